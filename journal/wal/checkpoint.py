"""The checkpoint file of the transaction journal, which is read before any entry, and the journal's snapshot files.

The durable LSN in the checkpoint is a lower bound: it is updated after an fsync of the journal, at most once a second,
and without an fsync of the checkpoint. The checkpoint also names the valid snapshots. After a new snapshot, the
checkpoint is written to both slots of its file and fsynced. Only then are files removed that none of its snapshots
needs. The formats are in docs/formats/journal.md.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from itertools import chain
from struct import Struct
from typing import Final, NamedTuple

from journal import filenames
from journal.crc32 import crc32
from journal.disk import Disk, File, write_new_file
from journal.dual_slot_file import CheckpointFile
from journal.errors import Corrupt, NewerFormat

VERSION: Final = 1
CHECKPOINT_HEAD: Final = Struct(">HHQQQQ")
POINTER: Final = Struct(">QQ")

SNAPSHOTS_KEPT: Final = 2
"""Number of snapshots kept: the newest, and the one before it in case the newest cannot be read."""

REWRITE_SECONDS: Final = 1.0
"""Minimum time between rewrites of the durable LSN. A start needs this LSN only to tell damage from a torn tail."""


class SnapshotPointer(NamedTuple):
    """A snapshot in the checkpoint: its number, and the LSN from which a start replays entries after loading it."""

    number: int
    lsn: int


class JournalCheckpoint(NamedTuple):
    """Checkpoint of the transaction journal, with at most two snapshots, newest first."""

    journal_id: int
    salt: int
    durable_lsn: int
    file_number: int
    snapshots: tuple[SnapshotPointer, ...]


def encode_checkpoint(checkpoint: JournalCheckpoint) -> bytes:
    *numbers, snapshots = checkpoint
    head = CHECKPOINT_HEAD.pack(VERSION, len(snapshots), *numbers)
    return head + b"".join(POINTER.pack(*pointer) for pointer in snapshots)


def decode_checkpoint(data: bytes, path: str) -> JournalCheckpoint:
    """Decode a checkpoint from the payload of a slot. Raises NewerFormat, Corrupt."""
    if len(data) < CHECKPOINT_HEAD.size:
        raise Corrupt(path, 0, len(data), "shorter than its fixed part")
    version, count, journal_id, salt, durable_lsn, number = CHECKPOINT_HEAD.unpack_from(data)
    if version > VERSION:
        raise NewerFormat(path, version, VERSION)
    if CHECKPOINT_HEAD.size + count * POINTER.size != len(data) or count > SNAPSHOTS_KEPT:
        raise Corrupt(path, 0, len(data), "its size does not match its content")
    snapshots = tuple(SnapshotPointer(*pointer) for pointer in POINTER.iter_unpack(data[CHECKPOINT_HEAD.size :]))
    return JournalCheckpoint(journal_id, salt, durable_lsn, number, snapshots)


class JournalCheckpointFile(CheckpointFile[JournalCheckpoint]):
    def __init__(self, disk: Disk, folder: str) -> None:
        path = filenames.join(folder, filenames.CHECKPOINT_NAME)
        super().__init__(disk, path, encode_checkpoint, lambda data: decode_checkpoint(data, path))


MAGIC: Final = b"TFTS"
SNAPSHOT_HEAD: Final = Struct(">4sHHQQQIQII")
HEAD_SIZE: Final = SNAPSHOT_HEAD.size
FILE: Final = Struct(">QQQ")
CRC: Final = Struct(">I")

PIECE_SIZE: Final = 16 << 20
"""Bytes of a state that are checked or written at a time, so that other threads can run in between."""


class ListedFile(NamedTuple):
    """A journal file that a snapshot needs: its number, LSN of its first byte, LSN after its last byte."""

    number: int
    first: int
    end: int


class SnapshotHead(NamedTuple):
    """A snapshot without its state. `lsn`: where a replay starts. `files`: the journal files that a start needs."""

    journal_id: int
    number: int
    lsn: int
    files: tuple[ListedFile, ...]


class JournalSnapshot(NamedTuple):
    """State of the journal before LSN `head.lsn`."""

    head: SnapshotHead
    state: bytes


def encode_snapshot(snapshot: JournalSnapshot) -> bytes:
    """Encode the head and the list of files of a snapshot, which precede the state in the file."""
    (journal_id, number, lsn, files), state = snapshot
    fields = (MAGIC, VERSION, 0, journal_id, number, lsn, len(files), len(state), crc32(state))
    head = SNAPSHOT_HEAD.pack(*fields, 0)[: -CRC.size]
    table = b"".join(FILE.pack(*file) for file in files)
    return head + CRC.pack(crc32(table, crc32(head))) + table


def decode_snapshot_head(data: bytes, path: str, journal_id: int) -> tuple[SnapshotHead, int, int]:
    """Decode the start of a snapshot file. Return (head, size of state, CRC of state). Raises NewerFormat, Corrupt."""
    if len(data) < HEAD_SIZE:
        raise Corrupt(path, 0, len(data), "shorter than its head")
    magic, version, zero, found_id, number, lsn, count, size, state_crc, crc = SNAPSHOT_HEAD.unpack_from(data)
    begins = HEAD_SIZE + count * FILE.size
    if magic != MAGIC or begins > len(data):
        raise Corrupt(path, 0, len(data), "not a snapshot")
    if crc32(data[HEAD_SIZE:begins], crc32(data[: HEAD_SIZE - CRC.size])) != crc:
        raise Corrupt(path, 0, begins, "its head fails its checksum")
    if version > VERSION or zero:
        raise NewerFormat(path, version, VERSION)
    if found_id != journal_id:
        raise Corrupt(path, 0, begins, f"a snapshot of journal {found_id:#x}, not of {journal_id:#x}")
    files = tuple(ListedFile(*file) for file in FILE.iter_unpack(data[HEAD_SIZE:begins]))
    return SnapshotHead(found_id, number, lsn, files), size, state_crc


class JournalSnapshotFiles:
    """The snapshot files in a journal's folder. `write` may run in a worker, but in one thread at a time.

    A snapshot file gets its final name when it is complete and fsynced. A start uses only snapshots that the checkpoint
    names.
    """

    def __init__(self, disk: Disk, folder: str, journal_id: int) -> None:
        self._disk = disk
        self._folder = folder
        self._journal_id = journal_id

    def path(self, number: int) -> str:
        return filenames.join(self._folder, filenames.snapshot_name(number))

    def read_head(self, number: int) -> SnapshotHead:
        """Read a snapshot without its state. Raises Corrupt, NewerFormat, OSError."""
        with closing(self._open(number)) as file:
            return self._read_head(file, number)[0]

    def read(self, number: int) -> JournalSnapshot:
        """Read and verify a snapshot. Raises Corrupt, NewerFormat, OSError."""
        with closing(self._open(number)) as file:
            head, size, crc = self._read_head(file, number)
            begins = HEAD_SIZE + len(head.files) * FILE.size
            if begins + size != file.size():
                raise Corrupt(file.path, 0, file.size(), "its size does not match its content")
            state = file.pread(size, begins)
        found = 0
        for start in range(0, size, PIECE_SIZE):
            found = crc32(state[start : start + PIECE_SIZE], found)
        if found != crc:
            raise Corrupt(file.path, begins, begins + size, "its state fails its checksum")
        return JournalSnapshot(head, state)

    def write(self, snapshot: JournalSnapshot) -> None:
        """Write a snapshot; durable on return. Raises Full, OSError."""
        path = self.path(snapshot.head.number)
        new = path + filenames.NEW_SUFFIX
        state = memoryview(snapshot.state)
        pieces = (state[start : start + PIECE_SIZE] for start in range(0, len(state), PIECE_SIZE))
        write_new_file(self._disk, new, chain([encode_snapshot(snapshot)], pieces))
        self._disk.rename(new, path)
        self._disk.force_folder(self._folder)

    def prune(self, kept: Collection[int]) -> None:
        """Remove unfinished snapshots, and snapshots whose numbers are not in `kept`. Raises OSError."""
        for name in self._disk.list(self._folder):
            number = filenames.parse_snapshot_name(name.removesuffix(filenames.NEW_SUFFIX))
            if number is not None and (name.endswith(filenames.NEW_SUFFIX) or number not in kept):
                self._disk.unlink(filenames.join(self._folder, name))

    def _open(self, number: int) -> File:
        path = self.path(number)
        if not self._disk.exists(path):
            raise Corrupt(path, 0, 0, "the snapshot in the checkpoint is missing")
        return self._disk.open_read(path)

    def _read_head(self, file: File, number: int) -> tuple[SnapshotHead, int, int]:
        data = file.pread(HEAD_SIZE, 0)
        if len(data) == HEAD_SIZE:
            count = SNAPSHOT_HEAD.unpack_from(data)[6]
            if HEAD_SIZE + count * FILE.size <= file.size():
                data += file.pread(count * FILE.size, HEAD_SIZE)
        head, size, crc = decode_snapshot_head(data, file.path, self._journal_id)
        if head.number != number:
            raise Corrupt(file.path, 0, len(data), f"it has the number {head.number}")
        return head, size, crc
