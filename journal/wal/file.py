"""Files of the transaction journal: a header of 44 bytes, then entries. See docs/formats/journal.md.

The header has the file's `number`, which is also its name, and `first`, the LSN of the header's first byte. The byte at
a position in the file has the LSN `first + position`.
"""

from __future__ import annotations

import errno
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from struct import Struct
from typing import Final, NamedTuple

from journal import filenames
from journal.crc32 import crc32
from journal.disk import Bytes, Disk, File, FileReferences, write_all
from journal.errors import Closed, Corrupt, Full, NewerFormat
from journal.record.format import BadRecord, Incomplete
from journal.wal.entry import (
    HEADER_SIZE,
    JournalEntry,
    LostEntries,
    claimed_size,
    decode_entry,
    entries_of,
    possible_entries,
)

MAGIC: Final = b"TFTJ"
VERSION: Final = 1
FILE_HEADER: Final = Struct(">4sHHQQQQI")
FILE_HEADER_SIZE: Final = FILE_HEADER.size
CRC: Final = Struct(">I")

SCAN_SIZE: Final = 1 << 20
"""Bytes read at a time; more are read only if one entry is larger."""

PROVE_SIZE: Final = 64 << 10
"""Bytes read at a time to verify single entries, which may be far from each other."""


class JournalFileHeader(NamedTuple):
    journal_id: int
    salt: int
    number: int
    first: int


def encode_header(header: JournalFileHeader) -> bytes:
    fields = FILE_HEADER.pack(MAGIC, VERSION, 0, *header, 0)[: -CRC.size]
    return fields + CRC.pack(crc32(fields))


def decode_header(data: bytes | bytearray, path: str) -> JournalFileHeader:
    """Decode the header of the file `path`. Raises Corrupt with positions in the file, NewerFormat."""
    if len(data) < FILE_HEADER_SIZE:
        raise Corrupt(path, 0, len(data), "shorter than its head")
    magic, version, zero, journal_id, salt, number, first, crc = FILE_HEADER.unpack_from(data)
    if magic != MAGIC or crc32(data[: FILE_HEADER_SIZE - CRC.size]) != crc:
        raise Corrupt(path, 0, FILE_HEADER_SIZE, "its header is not a journal file's")
    if version > VERSION or zero:
        raise NewerFormat(path, version, VERSION)
    return JournalFileHeader(journal_id, salt, number, first)


class JournalFile:
    """One file of the transaction journal. Only the last file is written. Other threads may read any file."""

    __slots__ = ("file", "first", "number", "path", "references", "sealed", "size")

    def __init__(self, file: File, number: int, first: int, size: int) -> None:
        self.file = file
        self.path = file.path
        self.number = number
        self.first = first
        """LSN of the first byte."""
        self.size = size
        """Bytes that belong to the journal, including the header, without the remains of a failed write."""
        self.sealed = False
        self.references = 0

    @classmethod
    def create(cls, disk: Disk, folder: str, header: JournalFileHeader) -> JournalFile:
        """Create a file with an fsynced header. The caller fsyncs the folder. Raises OSError, Full (leaves no file)."""
        path = filenames.join(folder, filenames.journal_name(header.number))
        if disk.exists(path):
            if disk.size(path) > FILE_HEADER_SIZE:
                raise OSError(errno.EEXIST, "a file with entries would be created again", path)
            # The creation of this file was interrupted before it had entries: create it again.
            disk.unlink(path)
        file = disk.create(path)
        try:
            size = write_all(file, [encode_header(header)], 0)
        except Full:
            file.close()
            disk.unlink(path)
            raise
        # If this fsync fails, the file stays open: the caller gets the error, and closing the file could hide it.
        file.force()
        return cls(file, header.number, header.first, size)

    @classmethod
    def open(cls, disk: Disk, folder: str, header: JournalFileHeader, *, writable: bool) -> JournalFile:
        """Open an existing file with the header `header`. Only the last file is `writable`. Raises OSError."""
        path = filenames.join(folder, filenames.journal_name(header.number))
        opened = disk.open_write(path) if writable else disk.open_read(path)
        file = cls(opened, header.number, header.first, opened.size())
        file.sealed = not writable
        return file

    @property
    def end(self) -> int:
        """LSN after the last byte."""
        return self.first + self.size

    def append(self, buffers: Sequence[Bytes]) -> None:
        """Write whole entries at the end, without an fsync. After Full or OSError, some bytes may be in the file."""
        self.size += write_all(self.file, buffers, self.size)

    def truncate_failed_write(self) -> bool:
        """Truncate the bytes after `size`, which a failed write has left; False if there are none. Raises OSError."""
        if self.file.size() <= self.size:
            return False
        try:
            self.file.truncate(self.size)
        except Full as error:
            # After a later append, recovery could take the remaining bytes for entries. So the journal must stop.
            raise OSError(errno.EIO, f"a failed write cannot be truncated: {error}", self.path) from error
        return True

    def pread(self, size: int, lsn: int) -> bytes:
        """Read up to `size` bytes from `lsn`, within the file. Raises OSError."""
        return self.file.pread(min(size, self.end - lsn), lsn - self.first)

    def pread_cached(self, size: int, lsn: int) -> bytes | bytearray | None:
        """Read as `pread` does, but return None if the read would wait for the disk."""
        return self.file.pread_cached(min(size, self.end - lsn), lsn - self.first)

    def entries(self, lsn: int, seed: int) -> Iterator[JournalEntry]:
        """Yield the entries from `lsn` on. The `data` of an entry is valid until the next entry is requested.

        At the first invalid entry, raises BadRecord, or Incomplete if the file ends inside this entry. The error's
        `position` is the LSN of the entry.
        """
        size = SCAN_SIZE
        while lsn < self.end:
            data = self.pread(size, lsn)
            begin = lsn
            try:
                for entry in entries_of(data, begin, seed):
                    yield entry
                    lsn = entry.next
                size = SCAN_SIZE
            except Incomplete as error:
                claimed = claimed_size(data[lsn - begin : lsn - begin + HEADER_SIZE])
                if lsn + max(HEADER_SIZE, claimed) > self.end:
                    raise error.with_position(lsn) from None
                size = max(SCAN_SIZE, claimed)
            except BadRecord as error:
                raise error.with_position(begin + error.position) from None

    def find_entry(self, lsn: int, seed: int) -> JournalEntry | None:
        """Find the first valid entry at or after `lsn`; None if there is none up to the end."""
        while lsn + HEADER_SIZE <= self.end:
            data = self.pread(SCAN_SIZE, lsn)
            for position in possible_entries(data, lsn):
                at, size = lsn + position, claimed_size(data[position : position + HEADER_SIZE])
                if at + size <= self.end:
                    with suppress(BadRecord):
                        return decode_entry(self.pread(size, at), at, seed)
            lsn += max(len(data) - HEADER_SIZE + 1, 1)
        return None

    def filler_end(self, lsn: int, seed: int) -> int:
        """If a filler (an entry in place of entries that a repair found lost) contains `lsn`, return the LSN after it.

        Return 0 if none does, or if a damaged record comes before it. Reads the file from its start.
        """
        try:
            for entry in self.entries(self.first + FILE_HEADER_SIZE, seed):
                if entry.next > lsn:
                    return entry.next if type(entry.content) is LostEntries else 0
        except BadRecord:
            return 0
        return 0

    def prove(self, lsns: Iterable[int], seed: int) -> set[int]:
        """Verify the entries at the ascending LSNs `lsns`. Return the LSNs whose entries were replaced by fillers.

        Entries near each other are read together. Raises OSError; BadRecord if an entry is neither valid nor in a
        filler, with the LSN of the first such entry as `position`.
        """
        lost: set[int] = set()
        data, begin, filler_end = memoryview(b""), 0, 0
        for lsn in lsns:
            if lsn < filler_end:
                lost.add(lsn)
                continue
            if lsn + HEADER_SIZE > begin + len(data):
                data, begin = memoryview(self.pread(PROVE_SIZE, lsn)), lsn
            size = claimed_size(data[lsn - begin : lsn - begin + HEADER_SIZE])
            if begin + len(data) < lsn + size <= self.end:
                data, begin = memoryview(self.pread(max(size, PROVE_SIZE), lsn)), lsn
            try:
                entry = decode_entry(data[lsn - begin :][: max(size, HEADER_SIZE)], lsn, seed)
            except BadRecord as error:
                filler_end = self.filler_end(lsn, seed)
                if not filler_end:
                    raise error.with_position(lsn) from None
                lost.add(lsn)
                continue
            if type(entry.content) is LostEntries:
                filler_end = entry.next
                lost.add(lsn)
        return lost

    def close(self) -> None:
        self.file.close()


_first = attrgetter("first")


class JournalFiles:
    """The files of the transaction journal, its end, its durable LSN, and the references to files.

    Only the thread that owns the journal changes the fields, or a worker that it has called. Readers in other threads
    read each field once: the tuple of files, sorted by number, is replaced, never changed. A file is idle if it is
    sealed and has no references. Only idle files are removed. A removed file is closed when no read uses it.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.files: tuple[JournalFile, ...] = ()
        self.end = 0
        """LSN of the next entry."""
        self.durable_lsn = 0
        """Durable LSN: everything before it survives a power loss."""
        self.high_watermark = 0
        """The durable LSN that callers see. It is lower while what is durable on this disk is not stored elsewhere
        (`Disk.is_replicated`)."""
        self.stopped: str | None = None
        self.idle_count = 0
        self.lock = threading.RLock()
        """Held only to change several fields together, never while waiting for the disk."""
        self.file_references = FileReferences()
        """Each reader has a reference while it uses `files`. Removed files are closed when no reference is left."""

    @property
    def active(self) -> JournalFile:
        """The last file, to which entries are appended. Raises Closed."""
        files = self.files
        if not files:
            raise Closed("the transaction journal")
        return files[-1]

    def raise_durable(self, lsn: int, *, is_replicated: bool = False) -> None:
        """Advance the durable LSN to `lsn`, the end of an append; a lower `lsn` changes nothing.

        The high watermark is advanced, too, unless the data may not be stored elsewhere yet (`is_replicated`).
        """
        with self.lock:
            if lsn > self.durable_lsn:
                self.durable_lsn = lsn
            if not is_replicated and lsn > self.high_watermark:
                self.high_watermark = lsn

    def seal(self) -> None:
        """Seal the active file, which must be complete and fsynced."""
        with self.lock:
            active = self.active
            if not active.sealed:
                active.sealed = True
                self.idle_count += not active.references

    def add(self, file: JournalFile, *, is_replicated: bool = False) -> None:
        """Make `file`, which is new and fsynced, the active file. `is_replicated` as in `raise_durable`."""
        with self.lock:
            self.files = (*self.files, file)
            self.end = file.end
            self.raise_durable(file.end, is_replicated=is_replicated)

    def add_reference(self, lsn: int) -> None:
        """Add a reference to the file that contains `lsn`. Raises KeyError if there is no such file."""
        with self.lock:
            file = self._referenced_file(lsn)
            self.idle_count -= file.sealed and not file.references
            file.references += 1

    def release_reference(self, lsn: int) -> None:
        """Release a reference to the file that contains `lsn`. Raises KeyError if file or reference does not exist."""
        with self.lock:
            file = self._referenced_file(lsn)
            if not file.references:
                raise KeyError(lsn)
            file.references -= 1
            self.idle_count += file.sealed and not file.references

    def _referenced_file(self, lsn: int) -> JournalFile:
        files = self.files
        if files and files[-1].first <= lsn < self.end:
            return files[-1]
        file = find_file(files, lsn)
        if file is None:
            raise KeyError(lsn)
        return file

    def remove_idle(self, kept: Callable[[int], bool]) -> tuple[JournalFile, ...]:
        """Remove, close and return the idle files for whose number `kept` returns False."""
        with self.lock:
            removed = tuple(
                file for file in self.files[:-1] if file.sealed and not file.references and not kept(file.number)
            )
            self.idle_count -= len(removed)
            self.files = tuple(file for file in self.files if file not in removed)
        self.file_references.retire(removed)
        return removed

    def remove_all(self, kept_open: Collection[JournalFile] = ()) -> None:
        """Remove all files, and close each file that is not in `kept_open`."""
        with self.lock:
            removed, self.files = self.files, ()
        self.file_references.retire(file for file in removed if file not in kept_open)


def find_file(files: tuple[JournalFile, ...], lsn: int) -> JournalFile | None:
    number = bisect_right(files, lsn, key=_first) - 1
    if number < 0 or lsn >= files[number].end:
        return None
    return files[number]
