"""The checkpoint of a log, `log.mark`: what must be known before a record is read.

Also the log's snapshots.

The file has two alternating slots (journal.dual_slot_file). Payload of a slot, big-endian:

    version u16 | bits u16 (0 clean, 1 stopped) | log id u64 | first u64 | first ordinal u64 | forced u64
    | forced ordinal u64 | append time u64 ms | epoch u32 | starts u16 | reason size u16
    | starts x (epoch u32, offset u64) | reason, UTF-8

`forced`, the durable offset, is a lower bound and always the end of an append. It is rewritten without an
fsync, at most once a second, after the fsync that it reports. `first` is the first offset since retention or
truncation. A change of epoch, first, stopped or clean is written to both slots, each fsynced, before it takes
effect: a slot that is damaged or torn loses at most a newer durable offset.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct
from typing import Final, NamedTuple, Protocol
from zlib import crc32

from journal.disk import Disk, read_file, write_new_file
from journal.dual_slot_file import CheckpointFile, DualSlotFile
from journal.errors import Corrupt, NewerFormat
from journal.filenames import NEW_SUFFIX, join, log_checkpoint_name, log_snapshot_name, parse_log_snapshot_name
from journal.record.block import Block

VERSION: Final = 1
CHECKPOINT_HEADER: Final = Struct(">HHQQQQQQIHH")
EPOCH_START: Final = Struct(">IQ")
BIT_CLEAN: Final = 1
BIT_STOPPED: Final = 2

EPOCH_CLOCK_MIN: Final = 1 << 30
EPOCH_CLOCK_MAX: Final = 0xF000_0000
"""Epochs from a clock are limited to this value: a clock that is wrong by a century still leaves room for
more epochs than a log can have.
"""

STARTS_MAX: Final = 128
"""Epoch starts that are remembered; they fit in a slot. After that the two oldest are merged, which is safe
but makes some readers go back further than necessary.
"""

REASON_SIZE_MAX: Final = 1000
"""Maximum bytes of the reason of a stop: what is left of a slot, rounded down."""

REWRITE_SECONDS: Final = 1.0
"""Minimum time between rewrites of the durable offset without an fsync: it only reduces the checks at a
start.
"""


class WrongLog(Corrupt):
    """The folder belongs to another log, for example to an earlier topic of the same name.

    Nothing in it is changed.
    """


class LogCheckpoint(NamedTuple):
    """The checkpoint of a log: what its file `log.mark` says.

    `starts`: (epoch, offset at which the log was truncated when the epoch began), offsets rising. `stopped`:
    why the log accepts no writes, None if it does. `clean`: nothing follows the durable offset.
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
    """Encode a checkpoint as the payload of a slot; a too long reason of a stop is shortened."""
    reason = (checkpoint.stopped or "").encode()[:REASON_SIZE_MAX]
    bits = BIT_CLEAN * checkpoint.clean | BIT_STOPPED * (checkpoint.stopped is not None)
    head = CHECKPOINT_HEADER.pack(VERSION, bits, log_id, *checkpoint[:6], len(checkpoint.starts), len(reason))
    return head + b"".join(EPOCH_START.pack(*start) for start in checkpoint.starts) + reason


def decode_checkpoint(data: bytes, path: str, log_id: int) -> LogCheckpoint:
    """Decode a checkpoint from the payload of a slot.

    Raises NewerFormat, WrongLog; Corrupt if sizes do not match.
    """
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
    first, first_ordinal, durable, forced_ordinal, append_time, epoch = numbers
    starts = tuple((start, offset) for start, offset in EPOCH_START.iter_unpack(data[CHECKPOINT_HEADER.size : begins]))
    reason = data[begins:].decode("utf-8", "replace") if bits & BIT_STOPPED else None
    clean = bool(bits & BIT_CLEAN)
    return LogCheckpoint(first, first_ordinal, durable, forced_ordinal, append_time, epoch, starts, clean, reason)


def read_log_id(disk: Disk, folder: str) -> int | None:
    """Return the id of the log in `folder`; None if it has no checkpoint (yet).

    Raises Corrupt, NewerFormat, OSError.
    """
    path = join(folder, log_checkpoint_name())
    found = DualSlotFile(disk, path).read()
    if found is None:
        return None
    if len(found[1]) < CHECKPOINT_HEADER.size:
        raise Corrupt(path, 0, len(found[1]), "shorter than its fixed part")
    log_id: int = CHECKPOINT_HEADER.unpack_from(found[1])[2]
    decode_checkpoint(found[1], path, log_id)
    return log_id


def add_epoch_start(starts: tuple[tuple[int, int], ...], epoch: int, offset: int) -> tuple[tuple[int, int], ...]:
    """Return `starts` with a new epoch at `offset`.

    Earlier ones at or above `offset` are removed as redundant.
    """
    kept = [start for start in starts if start[1] < offset]
    kept.append((epoch, offset))
    if len(kept) > STARTS_MAX:
        # Epochs from a clock are even if nothing was truncated. Earlier releases counted from 1 and always truncated.
        uncut = next((start for start in kept if start[0] >= EPOCH_CLOCK_MIN and start[0] % 2 == 0), None)
        if uncut is not None:
            # Nothing was truncated when this epoch began: its only use is to recognise readers of another
            # copy of the folder.
            kept.remove(uncut)
        else:
            # The two oldest starts become one. A reader whose epoch is between the two is sent back to the
            # lower offset, further than necessary, which is safe.
            kept[:2] = [(kept[1][0], kept[0][1])]
    return tuple(kept)


def next_epoch(epoch: int, wall_ms: int, *, truncated: bool) -> int:
    """Return the epoch after `epoch`: odd if the log was truncated (`truncated`), even if not.

    The clock's second is used if it is higher, so that a folder and an older copy of it that is started later
    do not use the same epoch for different records.
    """
    found = max(epoch + 1, min(wall_ms // 1000, EPOCH_CLOCK_MAX))
    return found + (found % 2 != truncated)


def truncated_since(starts: tuple[tuple[int, int], ...], epoch: int) -> int | None:
    """Lowest offset at which the log was truncated after `epoch`; None if it was not."""
    return next((offset for start, offset in starts if start > epoch), None)


class LogCheckpointFile(CheckpointFile[LogCheckpoint]):
    """The file `log.mark`. `read` also raises WrongLog."""

    def __init__(self, disk: Disk, folder: str, log_id: int) -> None:
        path = join(folder, log_checkpoint_name())
        super().__init__(
            disk,
            path,
            lambda checkpoint: encode_checkpoint(log_id, checkpoint),
            lambda data: decode_checkpoint(data, path, log_id),
        )


# Format of a snapshot file, `<32 digits>.state`, big-endian:
#
#
#      magic "TFST" | version u16 | zero u16 | log id u64 | offset u64 | next ordinal u64 | append time u64 ms
#      | sources u32 | state size u64 | CRC-32 u32 of everything else
#      | sources x (kind u32, id u64, high u64, low u64) | state
#
#
# The checksum has the same position in every version, so that a flipped bit is not taken for a newer format.

MAGIC: Final = b"TFST"
HEADER: Final = Struct(">4sHHQQQQIQI")
SOURCE: Final = Struct(">IQQQ")
CRC: Final = Struct(">I")
SNAPSHOTS_KEPT: Final = 2
"""Snapshots kept: the newest, and the previous one in case the newest cannot be read."""

SourcePositions = Mapping[tuple[int, int], tuple[int, int]]


class State(Protocol):
    """In-memory state that is rebuilt from a log, for example the sequences of its producers.

    At open, `load` is called once, then `apply` for each verified block after the snapshot, in order, append
    by append. `dump` is called by the owner between appends and must describe exactly what was appended so
    far.
    """

    def load(self, data: bytes) -> None:
        """Replace the state by a dump; b"" is the state of an empty log.

        Raises ValueError for an invalid dump.
        """
        ...

    def dump(self) -> bytes: ...

    def apply(self, block: Block) -> None: ...


class EmptyState:
    """Empty state, for a log whose records need none."""

    def load(self, data: bytes) -> None:
        """Ignore the empty dump."""

    def dump(self) -> bytes:
        """Return the empty dump."""
        return b""

    def apply(self, block: Block) -> None:
        """Ignore the block."""


class Snapshot(NamedTuple):
    """State of a log before `offset`, so that a start need not read all records.

    `ordinal` is that of the next record. `sources` has the highest applied position of each source: retention
    may have removed the block trailers that record it.
    """

    offset: int
    ordinal: int
    append_time: int
    sources: SourcePositions
    state: bytes


def encode_snapshot(log_id: int, snapshot: Snapshot) -> bytes:
    """Encode `snapshot` as the bytes of a snapshot file."""
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
    places = SOURCE.iter_unpack(data[HEADER.size : begins])
    sources = {(kind, id): (high, low) for kind, id, high, low in places}
    return Snapshot(offset, ordinal, append_time, sources, data[begins:])


def read_snapshot(disk: Disk, folder: str, offset: int, log_id: int) -> Snapshot:
    """Read the snapshot at `offset` in `folder`. Raises Corrupt, NewerFormat, OSError."""
    path = join(folder, log_snapshot_name(offset))
    snapshot = decode_snapshot(read_file(disk, path), path, log_id)
    if snapshot.offset != offset:
        raise Corrupt(path, 0, 0, f"describes offset {snapshot.offset}")
    return snapshot


def read_snapshot_log_id(disk: Disk, path: str) -> int | None:
    """Return the log id in the snapshot at `path`; None if the file is damaged.

    Raises NewerFormat, OSError.
    """
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
    """The snapshot files in one log's folder. `write` may run in a worker; one thread at a time.

    A snapshot is written only after the log is durable up to its offset, which is also its name. It is
    renamed to its name when it is complete. The two newest are kept, so that damage to one leaves the other.
    """

    def __init__(self, disk: Disk, folder: str, log_id: int) -> None:
        self._disk = disk
        self._folder = folder
        self._log_id = log_id
        self._offsets: list[int] = []

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offsets of the snapshots that are known to be valid, oldest first."""
        return tuple(self._offsets)

    def load_newest(self, end: int) -> tuple[Snapshot | None, list[Corrupt]]:
        """Return the newest valid snapshot at or before `end`, and the errors of the damaged ones.

        Records the valid ones in `offsets`. Raises NewerFormat.
        """
        found, damaged = None, []
        self._offsets = []
        offsets = map(parse_log_snapshot_name, self._disk.list(self._folder))
        for offset in sorted((offset for offset in offsets if offset is not None), reverse=True):
            if offset > end:
                continue
            try:
                snapshot = read_snapshot(self._disk, self._folder, offset, self._log_id)
            except Corrupt as error:
                damaged.append(error)
                continue
            found = found or snapshot
            self._offsets.insert(0, offset)
        return found, damaged

    def write(self, snapshot: Snapshot) -> None:
        """Make `snapshot` durable, then remove those that are no longer kept. Raises OSError, Full."""
        if snapshot.offset in self._offsets:
            return
        path = join(self._folder, log_snapshot_name(snapshot.offset))
        write_new_file(self._disk, path + NEW_SUFFIX, [encode_snapshot(self._log_id, snapshot)])
        self._disk.rename(path + NEW_SUFFIX, path)
        self._disk.force_folder(self._folder)
        self._offsets = sorted([*self._offsets, snapshot.offset])
        self.prune(snapshot.offset)

    def prune(self, end: int) -> None:
        """Remove all snapshots except the newest SNAPSHOTS_KEPT valid ones at offsets up to `end`."""
        keep = {offset for offset in self._offsets if offset <= end}
        keep = set(sorted(keep)[-SNAPSHOTS_KEPT:])
        for name in self._disk.list(self._folder):
            offset = parse_log_snapshot_name(name.removesuffix(NEW_SUFFIX))
            if offset is not None and (name.endswith(NEW_SUFFIX) or offset not in keep):
                self._disk.unlink(join(self._folder, name))
        self._offsets = sorted(keep)
