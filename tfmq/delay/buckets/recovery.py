"""The start of the buckets: the checkpoint is read and made sure of, then what does not count is cleared away.

Only sizes are looked at: a start costs the same however many messages wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from struct import Struct
from struct import error as StructError
from typing import Final, NamedTuple
from zlib import crc32

from journal import filenames
from journal.disk import Disk, require_files, write_all
from journal.errors import Corrupt, Full, NewerFormat, TooLarge
from journal.filenames import CHECKPOINT_NAME, DAMAGED_SUFFIX, NEW_SUFFIX, REPAIRED_SUFFIX
from tfmq.delay.buckets.bucket import Bucket
from tfmq.delay.buckets.format import HEAD_SIZE, Identity, Span, bucket_name, parse_bucket_name

SALT_SIZE: Final = 8

WAY_ON: Final = "`tfmq log repair` says what is lost and makes the rest usable"


class BucketOpening:
    """One start in `folder`, which exists. `labels`: the rows of the table that were met."""

    def __init__(
        self, disk: Disk, folder: str, new_id: Callable[[], int], randomness: Callable[[int], bytes]
    ) -> None:
        self.disk = disk
        self.folder = folder
        self.file = CheckpointFile(disk, folder)
        self.checkpoint: Checkpoint
        self.buckets: list[Bucket] = []
        self.labels: set[str] = set()
        self._new_id = new_id
        self._randomness = randomness

    def run(self) -> None:
        """Raises as `Buckets.open`."""
        children = self.disk.list(self.folder)
        wanted = [name for name in children if is_house_name(name) and not filenames.is_aside(name)]
        require_files(self.disk, self.folder, wanted)
        checkpoint = self.file.read()
        if checkpoint is None:
            self._require_none()
            salt = int.from_bytes(self._randomness(SALT_SIZE), "big")
            checkpoint = Checkpoint(Identity(self._new_id(), salt), 0, 0, 0, ())
            self.file.write(checkpoint)
        found = decide(checkpoint.buckets, self._sizes())
        self.labels = {each.row.label for each in found}
        self._refuse(found)
        self.checkpoint = checkpoint
        # An earlier process may have written it without seeing it forced: nothing is removed on the word of a
        # checkpoint that a power cut could take back.
        self.file.settle()
        for each in found:
            self._act(each)
        self.buckets = [
            Bucket(self.folder, checkpoint.identity, each.span, slot, each.size, each.count, each.dead)
            for slot, each in enumerate(checkpoint.buckets, 1)
        ]

    def _sizes(self) -> dict[str, int]:
        paths = {name: filenames.join(self.folder, name) for name in self.disk.list(self.folder)}
        return {name: self.disk.size(path) for name, path in paths.items() if not self.disk.is_folder(path)}

    def _require_none(self) -> None:
        """Raises Corrupt if there are buckets: a new checkpoint would give them up."""
        found = [each.name for each in decide((), self._sizes()) if each.row.label == "unlisted"]
        if found:
            what = f"the checkpoint of {len(found)} buckets, such as {found[0]}, is missing: {WAY_ON}"
            raise Corrupt(self.file.path, 0, 0, what)

    def _refuse(self, found: list[Found]) -> None:
        missing = [each for each in found if each.row.decision is Decision.REFUSE]
        if missing:
            lost = sum(each.listed.count for each in missing if each.listed is not None)
            path = filenames.join(self.folder, missing[0].name)
            what = f"the file is missing ({len(missing)} such, with {lost} messages in all): {WAY_ON}"
            raise Corrupt(path, 0, HEAD_SIZE, what)

    def _act(self, found: Found) -> None:
        path = filenames.join(self.folder, found.name)
        if found.row.decision is Decision.REMOVE:
            self.disk.unlink(path)
        elif found.row.decision is Decision.CUT and found.listed is not None:
            file = self.disk.open_write(path)
            file.truncate(found.listed.size)
            file.force()
            file.close()


# What is done with each thing that is found in the folder of the buckets: a table, labelled.
#
# The checkpoint lists what counts, and whatever is listed was forced before. So there is nothing to guess: more bytes
# than listed are of a spill that never ended, files that are not listed are of one, or counted once and count no more.
# Their messages are in the arrivals, or in what the checkpoint lists instead.


class Decision(Enum):
    """What an opening does."""

    USE = "use"
    CUT = "cut"
    REMOVE = "remove"
    REFUSE = "refuse"
    LEAVE = "leave"


class Row(NamedTuple):
    """A row of the table."""

    label: str
    decision: Decision


class Shape(Enum):
    """How a file is, beside what is listed."""

    WHOLE = "whole"
    LONGER = "longer"
    SHORTER = "shorter"
    MISSING = "missing"
    UNLISTED = "unlisted"
    UNFINISHED = "unfinished"
    FOREIGN = "foreign"


TABLE: Final = {
    Shape.WHOLE: Row("whole", Decision.USE),
    # A spill was written into it and never listed.
    Shape.LONGER: Row("unlisted chunks", Decision.CUT),
    # Forced bytes are gone: what is left is served, what is lost is named when it is read.
    Shape.SHORTER: Row("too short", Decision.USE),
    # No removal does that: files go after the checkpoint that lists them no more.
    Shape.MISSING: Row("missing", Decision.REFUSE),
    # Of a spill or a split that never ended, or settled, or cut into finer ones.
    Shape.UNLISTED: Row("unlisted", Decision.REMOVE),
    Shape.UNFINISHED: Row("unfinished", Decision.REMOVE),
    Shape.FOREIGN: Row("foreign", Decision.LEAVE),
}


class Found(NamedTuple):
    """One name, and what is done about it."""

    name: str
    row: Row
    listed: Listed | None


def decide(listed: Iterable[Listed], sizes: dict[str, int]) -> list[Found]:
    """A decision for each listed bucket and each name in the folder; `sizes` by name, of what is there."""
    expected = {bucket_name(each.span): each for each in listed}
    found = [Found(name, TABLE[_shape(sizes.get(name), each.size)], each) for name, each in expected.items()]
    rest = sorted(set(sizes) - set(expected) - {CHECKPOINT_NAME})
    return found + [Found(name, TABLE[_unlisted(name)], None) for name in rest]


def _shape(size: int | None, listed: int) -> Shape:
    if size is None:
        return Shape.MISSING
    if size == listed:
        return Shape.WHOLE
    return Shape.LONGER if size > listed else Shape.SHORTER


def _unlisted(name: str) -> Shape:
    if name == CHECKPOINT_NAME + NEW_SUFFIX:
        return Shape.UNFINISHED
    if name.endswith(REPAIRED_SUFFIX) and is_house_name(name):
        return Shape.UNFINISHED
    return Shape.UNLISTED if parse_bucket_name(name) is not None else Shape.FOREIGN


def is_house_name(name: str) -> bool:
    """True if buckets, their checkpoint or a repair of them may put a file of this name there."""
    for suffix in (NEW_SUFFIX, REPAIRED_SUFFIX, DAMAGED_SUFFIX):
        name = name.removesuffix(suffix)
    return name == CHECKPOINT_NAME or parse_bucket_name(name) is not None


# The checkpoint of delayed delivery: which buckets count and up to which size, how far the arrivals are in them, and
# broker time. docs/formats/bucket.md is the page of its format.
#
#     magic "TFDK" | version u16 | zero u16 | store id u64 | salt u64 | offset u64 | number u64 | broker ms u64
#     | counted u64 | count u32 | note size u32 | buckets: start u64, exponent u8, size u64, count u64, dead u64,
#     `count` times | note | CRC-32 u32 of everything before
#
# All numbers are big-endian. The file holds this twice, each copy in a half of the file. It is written beside the old
# one, forced, and takes its name: a power cut leaves the one or the other, and a full disk leaves the old one. So
# whatever is listed was forced before, and what is not listed never counted, or counts no more.

MAGIC: Final = b"TFDK"
VERSION: Final = 1
HEAD: Final = Struct(">4sHHQQQQQQII")
ROW: Final = Struct(">QBQQQ")
SUM: Final = Struct(">I")

NOTE_SIZE_MAX: Final = 8192
"""Of the note: two pages more at most."""
PAGE: Final = 4096
"""A copy fills whole pages: a torn or rotten one of a copy does not touch the other."""


class Listed(NamedTuple):
    """A bucket: up to `size` its file is forced, with `count` messages, `dead` of which nobody waits for any more."""

    span: Span
    size: int
    count: int  # type: ignore[assignment]
    dead: int = 0


class Checkpoint(NamedTuple):
    """`offset`, `number`: arrivals before are in the buckets, or were settled. `broker_ms`: broker time, at least.

    `note`: what the delay queue wants to find again, opaque here, at most NOTE_SIZE_MAX bytes. `counted`: `dead` has
    what is cancelled or moved by notes before this offset of the arrivals; 0: it is not known.
    """

    identity: Identity
    offset: int
    number: int
    broker_ms: int
    buckets: Sequence[Listed]
    note: bytes = b""
    counted: int = 0


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """One copy. Raises TooLarge."""
    identity, offset, number, broker_ms, buckets, note, counted = checkpoint
    if len(note) > NOTE_SIZE_MAX:
        raise TooLarge("the note in the checkpoint", len(note), NOTE_SIZE_MAX)
    head = HEAD.pack(
        MAGIC, VERSION, 0, *identity, offset, number, broker_ms, counted, len(buckets), len(note)
    )
    rows = (ROW.pack(*bucket.span, bucket.size, bucket.count, bucket.dead) for bucket in buckets)
    data = b"".join([head, *rows, note])
    return data + SUM.pack(crc32(data))


def decode_checkpoint(data: bytes, position: int, path: str) -> Checkpoint:
    """The copy at `position` of the file, whose half `data` is. Raises Corrupt, NewerFormat."""

    def bad(reason: str) -> Corrupt:
        return Corrupt(path, position, position + len(data), reason)

    try:
        magic, version, zero, *numbers, count, note_size = HEAD.unpack_from(data)
        begins = HEAD.size + count * ROW.size
        end = begins + note_size
        (crc,) = SUM.unpack_from(data, end)
    except StructError:
        raise bad("shorter than it says") from None
    if magic != MAGIC or crc32(data[:end]) != crc:
        raise bad("it fails its checksum")
    if version > VERSION or zero:
        raise NewerFormat(path, version, VERSION)
    store_id, salt, offset, number, broker_ms, counted = numbers
    rows = ROW.iter_unpack(data[HEAD.size : begins])
    buckets = [Listed(Span(start, exponent), *sizes) for start, exponent, *sizes in rows]
    if not all(bucket.span.is_valid for bucket in buckets):
        raise bad("it names a span of time that cannot be")
    return Checkpoint(Identity(store_id, salt), offset, number, broker_ms, buckets, data[begins:end], counted)


class CheckpointFile:
    """The checkpoint in `folder`. One thread at a time."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self.disk = disk
        self.folder = folder
        self.path = filenames.join(folder, filenames.CHECKPOINT_NAME)

    def read(self) -> Checkpoint | None:
        """None if there is none. Raises Corrupt if neither copy is whole, NewerFormat, OSError."""
        if not self.disk.exists(self.path):
            return None
        faults = []
        for position, data in self._copies():
            try:
                return decode_checkpoint(data, position, self.path)
            except Corrupt as error:
                faults.append(error)
        raise Corrupt(
            self.path, 0, faults[-1].next, f"neither of its two copies is whole: {faults[0].reason}"
        )

    def faulty(self) -> list[Corrupt]:
        """What is wrong with the copies, one by one; nothing where there is no file. Raises NewerFormat, OSError."""
        faults = []
        for position, data in self._copies() if self.disk.exists(self.path) else ():
            try:
                decode_checkpoint(data, position, self.path)
            except Corrupt as error:
                faults.append(error)
        return faults

    def write(self, checkpoint: Checkpoint) -> None:
        """Returns when it survives a power cut. Raises Full, TooLarge (the old one counts), OSError (either does)."""
        copy = encode_checkpoint(checkpoint)
        copy += bytes(-len(copy) % PAGE)
        new = self.path + filenames.NEW_SUFFIX
        if self.disk.exists(new):
            self.disk.unlink(new)
        try:
            file = self.disk.create(new)
            try:
                write_all(file, [copy, copy], 0)
            except Full:
                file.close()
                raise
            # After a failed force it stays open: the error is the caller's, and closing could swallow it.
            file.force()
            file.close()
            self.disk.rename(new, self.path)
        except Full:
            if self.disk.exists(new):
                self.disk.unlink(new)
            raise
        self.disk.force_folder(self.folder)

    def settle(self) -> None:
        """Forces the checkpoint that was read: an earlier process may have written it without seeing it forced.

        Raises OSError.
        """
        file = self.disk.open_write(self.path)
        file.force()
        file.close()
        self.disk.force_folder(self.folder)

    def _copies(self) -> Sequence[tuple[int, bytes]]:
        file = self.disk.open_read(self.path)
        try:
            data = file.pread(file.size(), 0)
        finally:
            file.close()
        half = len(data) // 2
        return [(0, data[:half]), (half, data[half:])]
