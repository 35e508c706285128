"""`checkpoint`: what a start of the transaction journal must know before it reads an entry. Two alternating slots.

    version u16 | snapshots u16 (0 to 2) | journal id u64 | salt u64 | forced u64 | file number u64
    | snapshots x (number u64, place u64), the newest first

All numbers are big-endian; the slots are those of journal.dual_slot_file. `forced` is a lower bound of the place up to
which the journal is forced, rewritten without a force, at most once a second, after the force that it reports. `file
number` is the highest that was known to be given to a file: numbering never goes back below it. A change of the
snapshots is written to both slots, each forced, before anything that the older ones need is removed: so a slot that
rots or tears takes at most a newer `forced` with it, and a snapshot that rots leaves the one before it.
docs/formats/journal.md is the format's page.
"""

from __future__ import annotations

from collections.abc import Collection
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from journal import filenames
from journal.disk import Disk, File, write_all
from journal.dual_slot_file import SLOT_SIZE, Slots
from journal.errors import Corrupt, NewerFormat

VERSION: Final = 1
CHECKPOINT_HEAD: Final = Struct(">HHQQQQ")
POINTER: Final = Struct(">QQ")

KEPT: Final = 2
"""Snapshots that count: the newest, and the one before it for the day the newest cannot be read."""

REWRITE_SECONDS: Final = 1.0
"""An unforced rewrite of the forced mark at most this often: it only tells rot from a torn tail."""


class Pointer(NamedTuple):
    """A snapshot that counts: its number, and the place from which on the journal must be replayed behind it."""

    number: int
    place: int


class Checkpoint(NamedTuple):
    """See the module."""

    journal_id: int
    salt: int
    forced: int
    file_number: int
    snapshots: tuple[Pointer, ...]


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """The payload of a slot."""
    *numbers, snapshots = checkpoint
    head = CHECKPOINT_HEAD.pack(VERSION, len(snapshots), *numbers)
    return head + b"".join(POINTER.pack(*pointer) for pointer in snapshots)


def decode_checkpoint(data: bytes, path: str) -> Checkpoint:
    """Raises NewerFormat, Corrupt."""
    if len(data) < CHECKPOINT_HEAD.size:
        raise Corrupt(path, 0, len(data), "shorter than its fixed part")
    version, count, journal_id, salt, forced, number = CHECKPOINT_HEAD.unpack_from(data)
    if version > VERSION:
        raise NewerFormat(path, version, VERSION)
    if CHECKPOINT_HEAD.size + count * POINTER.size != len(data) or count > KEPT:
        raise Corrupt(path, 0, len(data), "another size than it says")
    snapshots = tuple(Pointer(*pointer) for pointer in POINTER.iter_unpack(data[CHECKPOINT_HEAD.size :]))
    return Checkpoint(journal_id, salt, forced, number, snapshots)


class CheckpointFile:
    """The file. One thread at a time; the journal's lock sees to it."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self.path = filenames.join(folder, filenames.CHECKPOINT_NAME)
        self._slots = Slots(disk, self.path)

    def read(self) -> Checkpoint | None:
        """None if nothing was ever written. Raises Corrupt, NewerFormat, OSError."""
        found = self._slots.read()
        return None if found is None else decode_checkpoint(found[1], self.path)

    def faulty(self) -> list[tuple[int, int]]:
        """(first, next): positions of the slots that hold something and are not whole. Raises OSError."""
        return [(number * SLOT_SIZE, (number + 1) * SLOT_SIZE) for number in self._slots.faulty()]

    def settle(self, checkpoint: Checkpoint) -> None:
        """Both slots, each forced: what must not be forgotten. Raises OSError, Full."""
        payload = encode_checkpoint(checkpoint)
        self._slots.write(payload, force=True)
        self._slots.write(payload, force=True)

    def note(self, checkpoint: Checkpoint) -> None:
        """One slot, not forced. Raises OSError, Full."""
        self._slots.write(encode_checkpoint(checkpoint), force=False)


# Snapshots of the transaction journal: what all entries before a place taught. `<20 digits>.snapshot`.
#
#     magic "TFTS" | version u16 | zero u16 | journal id u64 | number u64 | place u64 | files u32 | state size u64
#     | CRC-32 u32 of the state | CRC-32 u32 of all before it and of the files behind it
#     | files x (number u64, first u64, end u64) | state
#
# All numbers are big-endian. `number` is the checkpoint's, and the file's name. The files are the live ones: those of
# which something before `place` is still needed, and the one that was written. It comes under its name by a rename,
# whole and forced; a checkpoint (journal.wal.checkpoint) makes it count. docs/formats/journal.md is the page of this
# format.

MAGIC: Final = b"TFTS"
SNAPSHOT_HEAD: Final = Struct(">4sHHQQQIQII")
HEAD_SIZE: Final = SNAPSHOT_HEAD.size
FILE: Final = Struct(">QQQ")
CRC: Final = Struct(">I")

PIECE_SIZE: Final = 16 << 20
"""A state is checked and written in such pieces, so that other threads run between them."""


class LiveFile(NamedTuple):
    """A file that a snapshot needs: its number, the place of its first byte, and the place behind its last one."""

    number: int
    first: int
    end: int


class SnapshotHead(NamedTuple):
    """All but the state."""

    journal_id: int
    number: int
    place: int
    files: tuple[LiveFile, ...]


class JournalSnapshot(NamedTuple):
    """What every entry before `head.place` taught."""

    head: SnapshotHead
    state: bytes


def encode_snapshot(snapshot: JournalSnapshot) -> bytes:
    """The head and the files; the state comes behind."""
    (journal_id, number, place, files), state = snapshot
    fields = (MAGIC, VERSION, 0, journal_id, number, place, len(files), len(state), crc32(state))
    head = SNAPSHOT_HEAD.pack(*fields, 0)[: -CRC.size]
    table = b"".join(FILE.pack(*file) for file in files)
    return head + CRC.pack(crc32(table, crc32(head))) + table


def decode_head(data: bytes, path: str, journal_id: int) -> tuple[SnapshotHead, int, int]:
    """(head, size of the state, its CRC) from the first bytes of a file. Raises NewerFormat, or Corrupt with positions
    in `path`."""
    if len(data) < HEAD_SIZE:
        raise Corrupt(path, 0, len(data), "shorter than its head")
    magic, version, zero, found_id, number, place, count, size, state_crc, crc = SNAPSHOT_HEAD.unpack_from(
        data
    )
    begins = HEAD_SIZE + count * FILE.size
    if magic != MAGIC or begins > len(data):
        raise Corrupt(path, 0, len(data), "not a snapshot")
    if crc32(data[HEAD_SIZE:begins], crc32(data[: HEAD_SIZE - CRC.size])) != crc:
        raise Corrupt(path, 0, begins, "its head fails its checksum")
    if version > VERSION or zero:
        raise NewerFormat(path, version, VERSION)
    if found_id != journal_id:
        raise Corrupt(path, 0, begins, f"a snapshot of journal {found_id:#x}, not of {journal_id:#x}")
    files = tuple(LiveFile(*file) for file in FILE.iter_unpack(data[HEAD_SIZE:begins]))
    return SnapshotHead(found_id, number, place, files), size, state_crc


class Snapshots:
    """The snapshot files of a journal's folder. `write` may run in a worker; one thread at a time."""

    def __init__(self, disk: Disk, folder: str, journal_id: int) -> None:
        self._disk = disk
        self._folder = folder
        self._journal_id = journal_id

    def path(self, number: int) -> str:
        """Where a checkpoint's snapshot lies."""
        return filenames.join(self._folder, filenames.snapshot_name(number))

    def read_head(self, number: int) -> SnapshotHead:
        """A snapshot's head, without a look at its state. Raises Corrupt, NewerFormat, OSError."""
        file = self._open(number)
        try:
            return self._read_head(file, number)[0]
        finally:
            file.close()

    def read(self, number: int) -> JournalSnapshot:
        """A whole snapshot, verified. Raises Corrupt, NewerFormat, OSError."""
        file = self._open(number)
        try:
            head, size, crc = self._read_head(file, number)
            begins = HEAD_SIZE + len(head.files) * FILE.size
            if begins + size != file.size():
                raise Corrupt(file.path, 0, file.size(), "of another size than it says")
            state = file.pread(size, begins)
        finally:
            file.close()
        found = 0
        for start in range(0, size, PIECE_SIZE):
            found = crc32(state[start : start + PIECE_SIZE], found)
        if found != crc:
            raise Corrupt(file.path, begins, begins + size, "its state fails its checksum")
        return JournalSnapshot(head, state)

    def write(self, snapshot: JournalSnapshot) -> None:
        """Makes a snapshot durable. Raises Full, OSError."""
        path = self.path(snapshot.head.number)
        new = path + filenames.NEW_SUFFIX
        if self._disk.exists(new):
            self._disk.unlink(new)
        file = self._disk.create(new)
        position = write_all(file, [encode_snapshot(snapshot)], 0)
        state = memoryview(snapshot.state)
        for start in range(0, len(state), PIECE_SIZE):
            position += write_all(file, [state[start : start + PIECE_SIZE]], position)
        # A file whose force failed is not closed: the error is the caller's, and the bytes are not wanted.
        file.force()
        file.close()
        self._disk.rename(new, path)
        self._disk.force_folder(self._folder)

    def prune(self, kept: Collection[int]) -> None:
        """Removes unfinished snapshots, and those whose numbers are not among `kept`. Raises OSError."""
        for name in self._disk.list(self._folder):
            number = filenames.parse_snapshot_name(name.removesuffix(filenames.NEW_SUFFIX))
            if number is not None and (name.endswith(filenames.NEW_SUFFIX) or number not in kept):
                self._disk.unlink(filenames.join(self._folder, name))

    def _open(self, number: int) -> File:
        path = self.path(number)
        if not self._disk.exists(path):
            raise Corrupt(path, 0, 0, "the snapshot that a checkpoint names is not there")
        return self._disk.open_read(path)

    def _read_head(self, file: File, number: int) -> tuple[SnapshotHead, int, int]:
        data = file.pread(HEAD_SIZE, 0)
        if len(data) == HEAD_SIZE:
            count = SNAPSHOT_HEAD.unpack_from(data)[6]
            if HEAD_SIZE + count * FILE.size <= file.size():
                data += file.pread(count * FILE.size, HEAD_SIZE)
        head, size, crc = decode_head(data, file.path, self._journal_id)
        if head.number != number:
            raise Corrupt(file.path, 0, len(data), f"it says that it is number {head.number}")
        return head, size, crc
