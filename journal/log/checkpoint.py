"""The checkpoint file of a log (`log.mark`), and the log's snapshot files.

The checkpoint has what must be known before the first record is read, such as the epoch and the durable offset. A
snapshot has the state derived from all records before an offset, so that a start need not read these records.

The durable offset in `log.mark` is a lower bound: it is updated after an fsync of the log, at most once a second, and
without an fsync of `log.mark`. Changes of the epoch, the first offset, the stop reason or `clean` (the log was closed)
take effect only after they are written to both slots of the file and fsynced. The formats are in docs/formats/mark.md
and docs/formats/state.md.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from struct import Struct
from typing import Final, NamedTuple, Protocol

from journal import filenames
from journal.crc32 import crc32
from journal.disk import Disk, read_file, write_new_file
from journal.dual_slot_file import CheckpointFile, DualSlotFile
from journal.errors import Corrupt, NewerFormat
from journal.record.block import Block

VERSION: Final = 1
CHECKPOINT_HEADER: Final = Struct(">HHQQQQQQIHH")
EPOCH_START: Final = Struct(">IQ")
BIT_CLEAN: Final = 1
BIT_STOPPED: Final = 2

EPOCH_CLOCK_MIN: Final = 1 << 30
EPOCH_CLOCK_MAX: Final = 0xF000_0000
"""Highest epoch taken from a clock. Higher epochs are left for counting, so a wrong clock cannot use up all epochs."""

STARTS_MAX: Final = 128
"""Number of epoch starts that fit in a slot. If there are more, `add_epoch_start` drops one or merges two."""

REASON_SIZE_MAX: Final = 1000
"""Maximum bytes of the reason of a stop: about as many as the other contents of a slot leave free."""

REWRITE_SECONDS: Final = 1.0
"""Minimum time between rewrites of the durable offset without an fsync. Rewrites only save work at the next start."""


class WrongLog(Corrupt):
    """The folder belongs to another log, for example of an earlier topic with the same name. Nothing was changed."""


class LogCheckpoint(NamedTuple):
    """The content of `log.mark`, the checkpoint of a log.

    `starts`: (epoch, offset of the log's end when that epoch began), by rising offset. `stopped`: why the log accepts
    no writes; None if it accepts them. `clean`: the log was closed, so nothing follows the durable offset.
    """

    first: int
    first_ordinal: int
    durable: int
    durable_ordinal: int
    append_time: int
    epoch: int = 0
    starts: tuple[tuple[int, int], ...] = ()
    clean: bool = False
    stopped: str | None = None


def encode_checkpoint(log_id: int, checkpoint: LogCheckpoint) -> bytes:
    """Encode a checkpoint as the payload of a slot. A stop reason that is too long is shortened."""
    reason = (checkpoint.stopped or "").encode()[:REASON_SIZE_MAX]
    bits = BIT_CLEAN * checkpoint.clean | BIT_STOPPED * (checkpoint.stopped is not None)
    head = CHECKPOINT_HEADER.pack(VERSION, bits, log_id, *checkpoint[:6], len(checkpoint.starts), len(reason))
    return head + b"".join(EPOCH_START.pack(*start) for start in checkpoint.starts) + reason


def decode_checkpoint(data: bytes, path: str, log_id: int) -> LogCheckpoint:
    """Decode a checkpoint from a slot's payload. Raises NewerFormat, WrongLog, and Corrupt if the size is wrong."""
    if len(data) < CHECKPOINT_HEADER.size:
        raise Corrupt(path, 0, len(data), "shorter than its fixed part")
    version, bits, found_id, *numbers, count, reason_size = CHECKPOINT_HEADER.unpack_from(data)
    if version > VERSION:
        raise NewerFormat(path, version, VERSION)
    if found_id != log_id:
        raise WrongLog(path, 0, len(data), f"the folder is of log {found_id:#x}, not of {log_id:#x}")
    begins = CHECKPOINT_HEADER.size + count * EPOCH_START.size
    if begins + reason_size != len(data):
        raise Corrupt(path, 0, len(data), "its size does not match its content")
    first, first_ordinal, durable, durable_ordinal, append_time, epoch = numbers
    starts = tuple((start, offset) for start, offset in EPOCH_START.iter_unpack(data[CHECKPOINT_HEADER.size : begins]))
    reason = data[begins:].decode("utf-8", "replace") if bits & BIT_STOPPED else None
    clean = bool(bits & BIT_CLEAN)
    return LogCheckpoint(first, first_ordinal, durable, durable_ordinal, append_time, epoch, starts, clean, reason)


def read_log_id(disk: Disk, folder: str) -> int | None:
    """Return the log id in the folder's `log.mark`; None if it is missing. Raises Corrupt, NewerFormat, OSError."""
    path = filenames.join(folder, filenames.log_checkpoint_name())
    found = DualSlotFile(disk, path).read()
    if found is None:
        return None
    if len(found[1]) < CHECKPOINT_HEADER.size:
        raise Corrupt(path, 0, len(found[1]), "shorter than its fixed part")
    log_id: int = CHECKPOINT_HEADER.unpack_from(found[1])[2]
    decode_checkpoint(found[1], path, log_id)
    return log_id


def add_epoch_start(starts: tuple[tuple[int, int], ...], epoch: int, offset: int) -> tuple[tuple[int, int], ...]:
    """Add the start of `epoch` to `starts`, and drop starts at or above `offset`, because the new start covers them."""
    kept = [start for start in starts if start[1] < offset]
    kept.append((epoch, offset))
    if len(kept) > STARTS_MAX:
        # An even epoch from a clock means that nothing was truncated when it began. Lower epochs are from earlier
        # releases, which counted from 1: such an epoch may be even although the log was truncated.
        uncut = next((start for start in kept if start[0] >= EPOCH_CLOCK_MIN and start[0] % 2 == 0), None)
        if uncut is not None:
            # Nothing was truncated when this epoch began: its start only serves to recognise readers of another copy of
            # the folder. So it can be dropped.
            kept.remove(uncut)
        else:
            # The two oldest starts become one with the lower offset. A reader whose epoch is between the two goes back
            # further than necessary, which is safe.
            kept[:2] = [(kept[1][0], kept[0][1])]
    return tuple(kept)


def next_epoch(epoch: int, wall_ms: int, *, truncated: bool) -> int:
    """Return the epoch after `epoch`: odd if the log was truncated (`truncated`), even if not.

    The epoch is at least the wall clock's Unix time in seconds. So if an older copy of the folder (a restored backup)
    is put into use later, its new records do not get an epoch that the original has used for other records.
    """
    found = max(epoch + 1, min(wall_ms // 1000, EPOCH_CLOCK_MAX))
    return found + (found % 2 != truncated)


def truncated_since(starts: tuple[tuple[int, int], ...], epoch: int) -> int | None:
    """Return the lowest offset at which the log was truncated after `epoch`; None if it was not truncated since."""
    return next((offset for start, offset in starts if start > epoch), None)


class LogCheckpointFile(CheckpointFile[LogCheckpoint]):
    """The file `log.mark`. `read` also raises WrongLog."""

    def __init__(self, disk: Disk, folder: str, log_id: int) -> None:
        path = filenames.join(folder, filenames.log_checkpoint_name())
        encode = partial(encode_checkpoint, log_id)
        super().__init__(disk, path, encode, lambda data: decode_checkpoint(data, path, log_id))


MAGIC: Final = b"TFST"
HEADER: Final = Struct(">4sHHQQQQIQI")
SOURCE: Final = Struct(">IQQQ")
CRC: Final = Struct(">I")
SNAPSHOTS_KEPT: Final = 2
"""Number of snapshots kept: the newest, and the one before in case the newest cannot be read."""

SourcePositions = Mapping[tuple[int, int], tuple[int, int]]


class State(Protocol):
    """State in memory that the user of a log derives from the log's records, for example the sequences of producers.

    When the log is opened, `load` is called once, then `apply` for each verified block after the snapshot, in order.
    The blocks of an unfinished append at the end are not applied. Later the thread that appends calls `dump`, never
    within an append. The result of `dump` must describe exactly the records appended so far.
    """

    def load(self, data: bytes) -> None:
        """Replace the state by `data`: a result of `dump`, or b"" for an empty log. Raises ValueError if invalid."""

    def dump(self) -> bytes: ...

    def apply(self, block: Block) -> None: ...


class EmptyState:
    """A state without content, for a log whose user derives nothing from the records."""

    def load(self, data: bytes) -> None: ...

    def dump(self) -> bytes:
        return b""

    def apply(self, block: Block) -> None: ...


class Snapshot(NamedTuple):
    """State of a log before `offset`. A start that loads the snapshot need not read the records before `offset`.

    `ordinal`: ordinal of the next record. `sources`: for each source (for example a transaction journal), the highest
    position applied to the log. The snapshot has this position because retention may have removed its block trailer.
    """

    offset: int
    ordinal: int
    append_time: int
    sources: SourcePositions
    state: bytes


def encode_snapshot(log_id: int, snapshot: Snapshot) -> bytes:
    body = b"".join(SOURCE.pack(*key, *position) for key, position in sorted(snapshot.sources.items())) + snapshot.state
    fields = (MAGIC, VERSION, 0, log_id, snapshot.offset, snapshot.ordinal, snapshot.append_time)
    head = HEADER.pack(*fields, len(snapshot.sources), len(snapshot.state), 0)[: -CRC.size]
    return head + CRC.pack(crc32(body, crc32(head))) + body


def decode_snapshot(data: bytes, path: str, log_id: int) -> Snapshot:
    """Decode a snapshot. Raises NewerFormat, or Corrupt with positions in the file `path`."""
    if len(data) < HEADER.size:
        raise Corrupt(path, 0, len(data), "shorter than its header")
    magic, version, _, found_id, offset, ordinal, append_time, count, size, crc = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise Corrupt(path, 0, len(data), "not a snapshot")
    if crc32(data[HEADER.size :], crc32(data[: HEADER.size - CRC.size])) != crc:
        raise Corrupt(path, 0, len(data), "fails its checksum")
    if version > VERSION:
        raise NewerFormat(path, version, VERSION)
    begins = HEADER.size + count * SOURCE.size
    if begins + size != len(data) or found_id != log_id:
        raise Corrupt(path, 0, len(data), "a snapshot of another log, or its size does not match its content")
    positions = SOURCE.iter_unpack(data[HEADER.size : begins])
    sources = {(kind, id): (high, low) for kind, id, high, low in positions}
    return Snapshot(offset, ordinal, append_time, sources, data[begins:])


def read_snapshot(disk: Disk, folder: str, offset: int, log_id: int) -> Snapshot:
    """Read the snapshot at `offset` in `folder`. Raises Corrupt, NewerFormat, OSError."""
    path = filenames.join(folder, filenames.log_snapshot_name(offset))
    snapshot = decode_snapshot(read_file(disk, path), path, log_id)
    if snapshot.offset != offset:
        raise Corrupt(path, 0, 0, f"describes offset {snapshot.offset}")
    return snapshot


def read_snapshot_log_id(disk: Disk, path: str) -> int | None:
    """Return the log id in the snapshot at `path`; None if the file is damaged. Raises NewerFormat, OSError."""
    data = read_file(disk, path)
    if len(data) < HEADER.size:
        return None
    log_id: int = HEADER.unpack_from(data)[3]
    try:
        decode_snapshot(data, path, log_id)
    except Corrupt:
        return None
    return log_id


class SnapshotFiles:
    """The snapshot files in one log's folder. `write` may run in two workers at once: after an fsync and in a roll.

    The name of a snapshot's file is its offset. A snapshot is written only after the log is durable up to this offset.
    The two newest snapshots are kept, so that one remains if the other is damaged.
    """

    def __init__(self, disk: Disk, folder: str, log_id: int) -> None:
        self._disk = disk
        self._folder = folder
        self._log_id = log_id
        self._offsets: list[int] = []
        self._lock = threading.Lock()

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offsets of the snapshots that are known to be valid, oldest first."""
        return tuple(self._offsets)

    def load_newest(self, end: int) -> tuple[Snapshot | None, list[Corrupt]]:
        """Return (newest valid snapshot up to `end`, or None; errors of damaged snapshots). Raises NewerFormat."""
        found, damaged = None, []
        self._offsets = []
        for offset in reversed(filenames.numbers_in(self._disk.list(self._folder), filenames.parse_log_snapshot_name)):
            if offset <= end:
                try:
                    snapshot = read_snapshot(self._disk, self._folder, offset, self._log_id)
                except Corrupt as error:
                    damaged.append(error)
                else:
                    found = found or snapshot
                    self._offsets.insert(0, offset)
        return found, damaged

    def write(self, snapshot: Snapshot) -> None:
        """Write `snapshot`, durable on return, and remove all but the two newest snapshots. Raises OSError, Full.

        Does nothing if there is a snapshot of the same or a later offset.
        """
        # The lock keeps `prune` in one worker from removing the unfinished file of another one.
        with self._lock:
            if self._offsets and snapshot.offset <= self._offsets[-1]:
                return
            path = filenames.join(self._folder, filenames.log_snapshot_name(snapshot.offset))
            write_new_file(self._disk, path + filenames.NEW_SUFFIX, [encode_snapshot(self._log_id, snapshot)])
            self._disk.rename(path + filenames.NEW_SUFFIX, path)
            self._disk.force_folder(self._folder)
            self._offsets.append(snapshot.offset)
            self.prune(snapshot.offset)

    def prune(self, end: int) -> None:
        """Remove all snapshots except the newest SNAPSHOTS_KEPT valid ones at offsets up to `end`."""
        keep = {offset for offset in self._offsets if offset <= end}
        keep = set(sorted(keep)[-SNAPSHOTS_KEPT:])
        for name in self._disk.list(self._folder):
            offset = filenames.parse_log_snapshot_name(name.removesuffix(filenames.NEW_SUFFIX))
            if offset is not None and (name.endswith(filenames.NEW_SUFFIX) or offset not in keep):
                self._disk.unlink(filenames.join(self._folder, name))
        self._offsets = sorted(keep)
