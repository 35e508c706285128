"""One file of the transaction journal: a head of 44 bytes, then entries. docs/formats/journal.md is the format's page.

    magic "TFTJ" | version u16 | zero u16 | journal id u64 | salt u64 | number u64 | first u64 | CRC-32 u32 of all that

All numbers are big-endian. `number` is also the file's name, `first` the place of its first byte, that of the head: so
`first + position` is a place. The CRC stays where it is in every version, so that a flipped bit is not taken for a
newer format. A file is appended while it is the last one, then only read.

Threads: one owner changes it; `pread` and `pread_cached` may run in others.
"""

from __future__ import annotations

import errno
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from journal import filenames
from journal.disk import Bytes, Disk, File, Pins, write_all
from journal.errors import Closed, Corrupt, Full, NewerFormat
from journal.record.format import BadRecord, Incomplete
from journal.wal.entry import HEADER_SIZE, Entry, Filler, candidates, claimed_size, decode_entry, entries_of

MAGIC: Final = b"TFTJ"
VERSION: Final = 1
HEAD: Final = Struct(">4sHHQQQQI")
HEAD_SIZE: Final = HEAD.size
CRC: Final = Struct(">I")

SCAN_SIZE: Final = 1 << 20
"""Bytes that a walk reads at a time; more only where one entry is larger."""


PROVE_SIZE: Final = 64 << 10
"""Likewise for entries that lie scattered: what is read beside one of them is little."""


class Head(NamedTuple):
    """What a file says of itself."""

    journal_id: int
    salt: int
    number: int
    first: int


def encode_head(head: Head) -> bytes:
    """The first bytes of a file."""
    fields = HEAD.pack(MAGIC, VERSION, 0, *head, 0)[: -CRC.size]
    return fields + CRC.pack(crc32(fields))


def decode_head(data: bytes | bytearray, path: str) -> Head:
    """The head in the first bytes of the file `path`. Raises Corrupt with positions in it, NewerFormat."""
    if len(data) < HEAD_SIZE:
        raise Corrupt(path, 0, len(data), "shorter than its head")
    magic, version, zero, journal_id, salt, number, first, crc = HEAD.unpack_from(data)
    if magic != MAGIC or crc32(data[: HEAD_SIZE - CRC.size]) != crc:
        raise Corrupt(path, 0, HEAD_SIZE, "its head is no head of a journal file")
    if version > VERSION or zero:
        raise NewerFormat(path, version, VERSION)
    return Head(journal_id, salt, number, first)


class JournalFile:
    """See the module. Made by `create` or `open`."""

    __slots__ = ("file", "first", "holds", "number", "path", "sealed", "size")

    def __init__(self, file: File, number: int, first: int, size: int) -> None:
        self.file = file
        self.path = file.path
        self.number = number
        self.first = first
        """The place of the first byte."""
        self.size = size
        """Bytes that belong to the journal, head included; what a failed write left behind them does not."""
        self.sealed = False
        self.holds = 0

    @classmethod
    def create(cls, disk: Disk, folder: str, head: Head) -> JournalFile:
        """A new file with its head, forced; its name survives a power cut once the caller has forced the folder.

        Raises Full (nothing is left of it), OSError.
        """
        path = filenames.join(folder, filenames.journal_name(head.number))
        if disk.exists(path):
            if disk.size(path) > HEAD_SIZE:
                raise OSError(errno.EEXIST, "a file with entries would be made again", path)
            # One whose making was cut short.
            disk.unlink(path)
        file = disk.create(path)
        try:
            size = write_all(file, [encode_head(head)], 0)
        except Full:
            file.close()
            disk.unlink(path)
            raise
        # After a failed force the file stays open: the error is the caller's, and closing could swallow it.
        file.force()
        return cls(file, head.number, head.first, size)

    @classmethod
    def open(cls, disk: Disk, folder: str, head: Head, *, writable: bool) -> JournalFile:
        """An existing file whose head was read; `writable`: the last one. Raises OSError."""
        path = filenames.join(folder, filenames.journal_name(head.number))
        opened = disk.open_write(path) if writable else disk.open_read(path)
        file = cls(opened, head.number, head.first, opened.size())
        file.sealed = not writable
        return file

    @property
    def end(self) -> int:
        """The place behind its last byte."""
        return self.first + self.size

    def append(self, buffers: Sequence[Bytes]) -> None:
        """Writes whole entries at the end, in one vectored write. Raises Full, OSError: then any part may be there."""
        self.size += write_all(self.file, buffers, self.size)

    def cut(self) -> bool:
        """Cuts off what a failed append left behind the end; False if there was nothing. Raises OSError."""
        if self.file.size() <= self.size:
            return False
        try:
            self.file.truncate(self.size)
        except Full as error:
            # What is left could complete a later append: nothing to go on with.
            raise OSError(errno.EIO, f"a failed write cannot be cut off: {error}", self.path) from error
        return True

    def pread(self, size: int, place: int) -> bytes:
        """Up to `size` bytes from `place`, within the file. Raises OSError."""
        return self.file.pread(min(size, self.end - place), place - self.first)

    def pread_cached(self, size: int, place: int) -> bytes | bytearray | None:
        """As `pread`, but None where it would wait for the disk."""
        return self.file.pread_cached(min(size, self.end - place), place - self.first)

    def entries(self, place: int, seed: int) -> Iterator[Entry]:
        """The entries from the one that begins at `place`, each verified, up to the end; views last until the next.

        Raises BadRecord whose position is the *place* where the first bad one begins.
        """
        size = SCAN_SIZE
        while place < self.end:
            data = self.pread(size, place)
            begin = place
            try:
                for entry in entries_of(data, begin, seed):
                    yield entry
                    place = entry.next
                size = SCAN_SIZE
            except Incomplete as error:
                size = self._needed(data[place - begin : place - begin + HEADER_SIZE], place, error)
            except BadRecord as error:
                raise error.at(begin + error.position) from None

    def _needed(self, header: bytes, place: int, error: Incomplete) -> int:
        """How much must be read to have the entry at `place` whole. Raises `error` if the file does not have it."""
        if place + max(HEADER_SIZE, claimed_size(header)) > self.end:
            raise error.at(place) from None
        return max(SCAN_SIZE, claimed_size(header))

    def find(self, place: int, seed: int) -> Entry | None:
        """The first whole entry that begins at `place` or behind; None: nowhere up to the end. For the way back
        behind damage."""
        while place + HEADER_SIZE <= self.end:
            data = self.pread(SCAN_SIZE, place)
            for position in candidates(data, place):
                found = self._whole(
                    place + position, claimed_size(data[position : position + HEADER_SIZE]), seed
                )
                if found is not None:
                    return found
            place += max(len(data) - HEADER_SIZE + 1, 1)
        return None

    def lost(self, place: int, seed: int) -> bool:
        """Whether a filler has the byte at `place`. Walks the file from its beginning."""
        return self._filler_end(place, seed) > 0

    def _filler_end(self, place: int, seed: int) -> int:
        """Where the filler that has the byte at `place` ends; 0 if none has it."""
        try:
            for entry in self.entries(self.first + HEAD_SIZE, seed):
                if entry.next > place:
                    return entry.next if type(entry.content) is Filler else 0
        except BadRecord:
            return 0
        return 0

    def prove(self, places: Iterable[int], seed: int) -> set[int]:
        """Reads the entries at the rising `places`, neighbours together; answers those that a repair has given up.
        Raises BadRecord with the place of the first that is neither whole nor given up; OSError."""
        lost: set[int] = set()
        data, begin, filler_end = memoryview(b""), 0, 0
        for place in places:
            if place < filler_end:
                lost.add(place)
                continue
            if place + HEADER_SIZE > begin + len(data):
                data, begin = memoryview(self.pread(PROVE_SIZE, place)), place
            size = claimed_size(data[place - begin : place - begin + HEADER_SIZE])
            if begin + len(data) < place + size <= self.end:
                data, begin = memoryview(self.pread(max(size, PROVE_SIZE), place)), place
            try:
                entry = decode_entry(data[place - begin :][: max(size, HEADER_SIZE)], place, seed)
            except BadRecord as error:
                filler_end = self._filler_end(place, seed)
                if not filler_end:
                    raise error.at(place) from None
                lost.add(place)
                continue
            if type(entry.content) is Filler:
                filler_end = entry.next
                lost.add(place)
        return lost

    def _whole(self, place: int, size: int, seed: int) -> Entry | None:
        if place + size > self.end:
            return None
        try:
            return decode_entry(self.pread(size, place), place, seed)
        except BadRecord:
            return None

    def close(self) -> None:
        """Gives the descriptor back; twice is harmless."""
        self.file.close()


_first = attrgetter("first")


class JournalFiles:
    """The files of the transaction journal: which there are, where the journal ends, how far it is forced, what is
    held.

    One object, shared by the parts of a journal. The owner's thread changes it, or a worker that does the owner's work.
    Readers in other threads take each value once: the list of files is replaced, never changed. A file that leaves the
    list is closed when no read is under way. A *hold* keeps a file; an *idle* one is sealed and nothing holds it.

    `files` by rising number; places between them may be missing where files were given up.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.files: tuple[JournalFile, ...] = ()
        self.end = 0
        """The place where the next entry goes."""
        self.forced = 0
        """The place up to which everything is on the disk."""
        self.stopped: str | None = None
        self.idle = 0
        """How many files are idle."""
        self.lock = threading.RLock()
        """Held for short changes of several fields; never for anything that may wait for the disk."""
        self.pins = Pins()
        """What keeps files open that have left the list."""

    @property
    def active(self) -> JournalFile:
        """The file that is written. Raises Closed."""
        files = self.files
        if not files:
            raise Closed("the transaction journal")
        return files[-1]

    def forced_to(self, place: int) -> None:
        """Everything up to an append's end is forced; never goes back."""
        with self.lock:
            if place > self.forced:
                self.forced = place

    def find(self, place: int) -> JournalFile | None:
        """The file that has the byte at `place`; None: there is none."""
        return find(self.files, place)

    def seal(self) -> None:
        """The active file, whole and forced, takes no more entries."""
        with self.lock:
            active = self.active
            if not active.sealed:
                active.sealed = True
                self.idle += not active.holds

    def add(self, file: JournalFile) -> None:
        """The next file, forced, goes behind the others: what is appended comes into it."""
        with self.lock:
            self.files = (*self.files, file)
            self.end = file.end
            self.forced = file.end

    def hold(self, place: int) -> None:
        """One hold more on the file of `place`. Raises KeyError: no file has it."""
        with self.lock:
            file = self._holder(place)
            self.idle -= file.sealed and not file.holds
            file.holds += 1

    def release(self, place: int) -> None:
        """One hold less. Raises KeyError: nothing holds it."""
        with self.lock:
            file = self._holder(place)
            if not file.holds:
                raise KeyError(place)
            file.holds -= 1
            self.idle += file.sealed and not file.holds

    def _holder(self, place: int) -> JournalFile:
        files = self.files
        if files and files[-1].first <= place < self.end:
            return files[-1]
        file = find(files, place)
        if file is None:
            raise KeyError(place)
        return file

    def take_idle(self, kept: Callable[[int], bool]) -> tuple[JournalFile, ...]:
        """Takes the idle files, but those whose numbers are `kept`, out of the list, and closes them; answers them."""
        with self.lock:
            gone = tuple(
                file for file in self.files[:-1] if file.sealed and not file.holds and not kept(file.number)
            )
            self.idle -= len(gone)
            self.files = tuple(file for file in self.files if file not in gone)
        self.pins.retire(gone)
        return gone

    def drop(self, kept_open: Collection[JournalFile] = ()) -> None:
        """No files any more; those of `kept_open` are not closed."""
        with self.lock:
            gone, self.files = self.files, ()
        self.pins.retire(file for file in gone if file not in kept_open)

    @contextmanager
    def reading(self) -> Iterator[tuple[JournalFile, ...]]:
        """The files, none of which is closed before the end of the block."""
        with self.pins:
            yield self.files


def find(files: tuple[JournalFile, ...], place: int) -> JournalFile | None:
    """The one of `files` that has the byte at `place`."""
    number = bisect_right(files, place, key=_first) - 1
    if number < 0 or place >= files[number].end:
        return None
    return files[number]
