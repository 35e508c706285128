"""The start of the bucket store: its checkpoint, and the decision about each file in the folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from struct import Struct
from struct import error as StructError
from typing import Final, NamedTuple

from journal import filenames
from journal.crc32 import crc32
from journal.disk import Disk, check_no_folders, read_file, write_new_file
from journal.errors import Corrupt, Full, NewerFormat, TooLarge
from journal.filenames import CHECKPOINT_NAME, DAMAGED_SUFFIX, NEW_SUFFIX, REPAIRED_SUFFIX
from tfmq.delay.buckets.bucket import Bucket
from tfmq.delay.buckets.format import HEAD_SIZE, StoreIdentity, TimeSpan, bucket_name, parse_bucket_name

SALT_SIZE: Final = 8

REPAIR_HINT: Final = "`tfmq log repair` lists what is lost and makes the rest usable"


class RecoveredBuckets(NamedTuple):
    """The result of recovery. `labels`: the labels of the states (`FileState`) that recovery found in the folder."""

    checkpoint_file: BucketCheckpointFile
    checkpoint: BucketCheckpoint
    buckets: list[Bucket]
    labels: set[str]


def recover_buckets(
    disk: Disk, folder: str, new_id: Callable[[], int], randomness: Callable[[int], bytes]
) -> RecoveredBuckets:
    """Start the bucket store in `folder`, or create it if the folder has no checkpoint and no bucket.

    Files, and ends of files, that the durable checkpoint does not list are removed. Only file sizes are checked, so the
    duration of a start does not depend on the number of messages. Raises Corrupt (nothing was changed), NewerFormat,
    Full, OSError.
    """
    wanted = [name for name in disk.list(folder) if is_bucket_file_name(name) and not filenames.is_set_aside(name)]
    check_no_folders(disk, folder, wanted)
    checkpoint_file = BucketCheckpointFile(disk, folder)
    checkpoint = checkpoint_file.read()
    if checkpoint is None:
        files = decide_files((), file_sizes(disk, folder))
        if unlisted := [each.name for each in files if each.state is FileState.UNLISTED]:
            # A new checkpoint would not list these buckets, so their files would be deleted.
            what = f"the checkpoint of {len(unlisted)} buckets, such as {unlisted[0]}, is missing: {REPAIR_HINT}"
            raise Corrupt(checkpoint_file.path, 0, 0, what)
        salt = int.from_bytes(randomness(SALT_SIZE), "big")
        checkpoint = BucketCheckpoint(StoreIdentity(new_id(), salt), 0, 0, 0, ())
        checkpoint_file.write(checkpoint)
    found = decide_files(checkpoint.buckets, file_sizes(disk, folder))
    if missing := [each for each in found if each.state.decision is Decision.REFUSE]:
        lost = sum(each.listed.count for each in missing if each.listed is not None)
        path = filenames.join(folder, missing[0].name)
        what = f"the file is missing ({len(missing)} such, with {lost} messages in all): {REPAIR_HINT}"
        raise Corrupt(path, 0, HEAD_SIZE, what)
    # An earlier process may have ended between the write and the fsync of the checkpoint. Make the checkpoint durable
    # before files are removed because of it.
    checkpoint_file.fsync()
    for each in found:
        path = filenames.join(folder, each.name)
        if each.state.decision is Decision.REMOVE:
            disk.unlink(path)
        elif each.state.decision is Decision.CUT and each.listed is not None:
            file = disk.open_write(path)
            file.truncate(each.listed.size)
            file.force()
            file.close()
    buckets = [
        Bucket(folder, checkpoint.identity, each.span, slot, each.size, each.count, each.dead_count)
        for slot, each in enumerate(checkpoint.buckets, 1)
    ]
    return RecoveredBuckets(checkpoint_file, checkpoint, buckets, {each.state.label for each in found})


def file_sizes(disk: Disk, folder: str) -> dict[str, int]:
    paths = {name: filenames.join(folder, name) for name in disk.list(folder)}
    return {name: disk.size(path) for name, path in paths.items() if not disk.is_folder(path)}


# Decisions about the files in the folder. The checkpoint lists the valid buckets, which were durable before the
# checkpoint was written. So bytes after a listed size are from an unfinished spill (which writes messages of the
# arrival log to buckets). A file that is not listed is from an unfinished spill or split, or is obsolete. Pending
# messages in such bytes and files are also in the arrival log or in listed buckets.


class Decision(Enum):
    """What a start does with a file."""

    USE = "use"
    CUT = "cut"
    REMOVE = "remove"
    REFUSE = "refuse"
    LEAVE = "leave"


class FileState(Enum):
    """How a file differs from the checkpoint. A state has a label for findings, and a `Decision` for a start."""

    WHOLE = "whole", Decision.USE
    # The end of the file is from an unfinished spill.
    LONGER = "unlisted chunks", Decision.CUT
    # Durable data at the end of the file is lost. The rest is used, and the loss is reported when that end is read.
    SHORTER = "too short", Decision.USE
    # The store cannot have deleted the file: first it would have written a checkpoint that does not list the file.
    MISSING = "missing", Decision.REFUSE
    # The file is from an unfinished spill or split, or belongs to an obsolete bucket.
    UNLISTED = "unlisted", Decision.REMOVE
    UNFINISHED = "unfinished", Decision.REMOVE
    FOREIGN = "foreign", Decision.LEAVE

    def __init__(self, label: str, decision: Decision) -> None:
        self.label, self.decision = label, decision


class FileDecision(NamedTuple):
    """The decision about one file. `listed`: the bucket with this file name in the checkpoint; None if not listed."""

    name: str
    state: FileState
    listed: ListedBucket | None


def decide_files(listed: Iterable[ListedBucket], sizes: dict[str, int]) -> list[FileDecision]:
    """Decide about each listed bucket and each file in the folder. `sizes`: sizes of the existing files, by name."""
    expected = {bucket_name(each.span): each for each in listed}
    found = [
        FileDecision(name, _listed_file_state(sizes.get(name), each.size), each) for name, each in expected.items()
    ]
    rest = sorted(set(sizes) - set(expected) - {CHECKPOINT_NAME})
    return found + [FileDecision(name, _unlisted_file_state(name), None) for name in rest]


def _listed_file_state(size: int | None, listed: int) -> FileState:
    if size is None:
        return FileState.MISSING
    if size == listed:
        return FileState.WHOLE
    return FileState.LONGER if size > listed else FileState.SHORTER


def _unlisted_file_state(name: str) -> FileState:
    is_repaired = name.endswith(REPAIRED_SUFFIX) and is_bucket_file_name(name)
    if name == CHECKPOINT_NAME + NEW_SUFFIX or is_repaired:
        return FileState.UNFINISHED
    return FileState.UNLISTED if parse_bucket_name(name) is not None else FileState.FOREIGN


def is_bucket_file_name(name: str) -> bool:
    """Return whether this is the name of a bucket or checkpoint, maybe with a suffix of a write or a repair."""
    for suffix in (NEW_SUFFIX, REPAIRED_SUFFIX, DAMAGED_SUFFIX):
        name = name.removesuffix(suffix)
    return name == CHECKPOINT_NAME or parse_bucket_name(name) is not None


# The checkpoint contains the valid buckets with their sizes, the offset up to which the arrival log is in buckets, and
# broker time. Specified in docs/formats/bucket.md.
#
#     magic "TFDK" | version u16 | zero u16 | store id u64 | salt u64 | offset u64 | number u64 | broker ms u64
#     | counted u64 | count u32 | note size u32 | buckets: start u64, exponent u8, size u64, count u64, dead u64,
#     `count` times | note | CRC-32 u32 of everything before
#
# All integers are big-endian. `offset`, `number`, `counted` and `note` are `spilled_offset`, `spilled_number`,
# `counted_offset` and `queue_state` of `BucketCheckpoint`. Each half of the file has one copy of this structure.

MAGIC: Final = b"TFDK"
VERSION: Final = 1
HEAD: Final = Struct(">4sHHQQQQQQII")
BUCKET_ROW: Final = Struct(">QBQQQ")
CHECKSUM: Final = Struct(">I")

QUEUE_STATE_SIZE_MAX: Final = 8192
"""Maximum size of `queue_state`, which therefore adds at most two pages to a copy of the checkpoint."""
PAGE_BYTES: Final = 4096
"""A copy fills whole pages, so that a torn or damaged page of one copy does not affect the other."""


class ListedBucket(NamedTuple):
    """A bucket in the checkpoint: durable up to `size`; `dead_count` of its `count` messages are not pending."""

    span: TimeSpan
    size: int
    count: int  # type: ignore[assignment]
    dead_count: int = 0


class BucketCheckpoint(NamedTuple):
    """The contents of the checkpoint: the valid buckets, and other values that a start needs.

    `spilled_offset`: messages before this offset of the arrival log are in buckets, or were delivered or cancelled.
    `spilled_number`: these messages have lower numbers than this. `broker_ms`: lower bound of broker time.
    `queue_state`: opaque state of the delay queue, at most QUEUE_STATE_SIZE_MAX bytes. `counted_offset`: `dead_count`
    includes the cancels and reschedules before this offset of the arrival log; 0: unknown.
    """

    identity: StoreIdentity
    spilled_offset: int
    spilled_number: int
    broker_ms: int
    buckets: Sequence[ListedBucket]
    queue_state: bytes = b""
    counted_offset: int = 0


def encode_checkpoint(checkpoint: BucketCheckpoint) -> bytes:
    """Encode a checkpoint; its file has two copies of the result. Raises TooLarge if `queue_state` is too long."""
    identity, offset, number, broker_ms, buckets, queue_state, counted = checkpoint
    if len(queue_state) > QUEUE_STATE_SIZE_MAX:
        raise TooLarge("the queue state in the checkpoint", len(queue_state), QUEUE_STATE_SIZE_MAX)
    head = HEAD.pack(MAGIC, VERSION, 0, *identity, offset, number, broker_ms, counted, len(buckets), len(queue_state))
    rows = (BUCKET_ROW.pack(*bucket.span, bucket.size, bucket.count, bucket.dead_count) for bucket in buckets)
    data = b"".join([head, *rows, queue_state])
    return data + CHECKSUM.pack(crc32(data))


def decode_checkpoint(data: bytes, position: int, path: str) -> BucketCheckpoint:
    """Decode a copy of the checkpoint. `data`: the half of the file from `position` on. Raises Corrupt, NewerFormat."""

    def bad(reason: str) -> Corrupt:
        return Corrupt(path, position, position + len(data), reason)

    try:
        magic, version, zero, *numbers, count, note_size = HEAD.unpack_from(data)
        begins = HEAD.size + count * BUCKET_ROW.size
        end = begins + note_size
        (crc,) = CHECKSUM.unpack_from(data, end)
    except StructError:
        raise bad("shorter than its own size") from None
    if magic != MAGIC or crc32(data[:end]) != crc:
        raise bad("it fails its checksum")
    if version > VERSION or zero:
        raise NewerFormat(path, version, VERSION)
    store_id, salt, offset, number, broker_ms, counted = numbers
    rows = BUCKET_ROW.iter_unpack(data[HEAD.size : begins])
    buckets = [ListedBucket(TimeSpan(start, exponent), *sizes) for start, exponent, *sizes in rows]
    if not all(bucket.span.is_valid for bucket in buckets):
        raise bad("it lists an invalid time span")
    return BucketCheckpoint(
        StoreIdentity(store_id, salt), offset, number, broker_ms, buckets, data[begins:end], counted
    )


class BucketCheckpointFile:
    """The checkpoint file in `folder`, used by one thread.

    A write replaces the file by a rename, so that after a failure either the old or the new file exists.
    """

    def __init__(self, disk: Disk, folder: str) -> None:
        self.disk = disk
        self.folder = folder
        self.path = filenames.join(folder, filenames.CHECKPOINT_NAME)

    def read(self) -> BucketCheckpoint | None:
        """Return the first valid copy; None without a file. Raises Corrupt (no copy is valid), NewerFormat, OSError."""
        if not self.disk.exists(self.path):
            return None
        faults = []
        for copy in self._decoded_copies():
            if isinstance(copy, BucketCheckpoint):
                return copy
            faults.append(copy)
        raise Corrupt(self.path, 0, faults[-1].next, f"both of its copies are damaged: {faults[0].reason}")

    def damaged_copies(self) -> list[Corrupt]:
        """Return an error for each damaged copy; an empty list if there is no file. Raises NewerFormat, OSError."""
        copies = self._decoded_copies() if self.disk.exists(self.path) else ()
        return [copy for copy in copies if isinstance(copy, Corrupt)]

    def write(self, checkpoint: BucketCheckpoint) -> None:
        """Write a checkpoint durably. Raises Full or TooLarge (the old file is kept in both cases), OSError."""
        copy = encode_checkpoint(checkpoint)
        copy += bytes(-len(copy) % PAGE_BYTES)
        new = self.path + filenames.NEW_SUFFIX
        try:
            write_new_file(self.disk, new, [copy + copy])
            self.disk.rename(new, self.path)
        except Full:
            if self.disk.exists(new):
                self.disk.unlink(new)
            raise
        self.disk.force_folder(self.folder)

    def fsync(self) -> None:
        """Fsync the existing checkpoint, as an earlier process may have ended before its own fsync. Raises OSError."""
        file = self.disk.open_write(self.path)
        file.force()
        file.close()
        self.disk.force_folder(self.folder)

    def _decoded_copies(self) -> Iterator[BucketCheckpoint | Corrupt]:
        data = read_file(self.disk, self.path)
        half = len(data) // 2
        for position, copy in ((0, data[:half]), (half, data[half:])):
            try:
                yield decode_checkpoint(copy, position, self.path)
            except Corrupt as error:
                yield error
