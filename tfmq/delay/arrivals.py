"""The arrivals: the one log in which every delayed batch lands, whole, behind its note. docs/formats/arrivals.md.

The number of a delayed message is the ordinal of its record here. Whatever is read here was proven by the checksum of
its block.
"""

import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import Final, NamedTuple

from journal.errors import BelowStart, BeyondEnd, Corrupt, NotARecord
from journal.log.log import Log, Upto
from journal.log.segments import LogOptions
from journal.record.batch import Batch
from journal.record.block import Block, blocks_of, find_next_control
from journal.record.format import (
    COLUMNS_COUNT_MIN,
    FLAG_FILLER,
    HEADER,
    HEADER_SIZE,
    LENGTH,
    BadRecord,
    Buffer,
    make_log_id,
    plain_flags,
    same_length,
    walk,
)
from tfmq.delay.note import NOTE_ID, PRODUCER_ID, BadNote, Note, decode_note, encode_note

logger = logging.getLogger("tfmq.delay")

LOG_ID: Final = make_log_id(2, 0)
SUFFIX: Final = ".arrivals"

SEGMENT_BYTES: Final = 64 << 20
"""Small, since what is in the buckets goes by whole segments; the least that takes the largest batch."""

READ_BYTES: Final = 1 << 20
"""One read of the log for a spill or a start."""

_LENGTH_FLAG: Final = Struct(">I12xI")

Damaged = Callable[[Corrupt], None]
"""Told of a range of the log that cannot be read; the messages in it are lost to whoever reads."""


def arrival_options(
    flush_messages: int, flush_seconds: float, segment_bytes: int = SEGMENT_BYTES
) -> LogOptions:
    """How the log is kept: nothing of it goes by age or size."""
    return LogOptions(
        segment_bytes=segment_bytes,
        flush_messages=flush_messages,
        flush_seconds=flush_seconds,
        suffix=SUFFIX,
    )


Noted = Callable[[Note, int], None]
"""Told of a note, and where it lies."""


class ArrivedBatch(NamedTuple):
    """Records that lie in a row in the log, all of one note: a batch, or as much of it as one block has.

    `dues` (array of u64, ms), `absolute` (a byte 0 or 1), `sizes` (array of u32, whole records) and `offsets` (array of
    u64, in the log) have one value a message; the n-th message's number is `first_number + n`. `low` and `high` are
    the first and the last of the dues. `data`: the records' bytes, one buffer, valid as long as it is kept. `ahead_ms`:
    by how much broker time was ahead of the wall clock, for those of `absolute`.
    """

    log_id: int
    topic: str
    first_number: int
    dues: "array[int]"
    absolute: bytes
    low: int
    high: int
    offsets: "array[int]"
    sizes: "array[int]"
    data: Sequence[Buffer]
    ahead_ms: int = 0


def batches_of(
    note: Note,
    body: Buffer,
    blocks: Sequence[tuple[int, int, int]],
    producer_id: int,
    sequence: int,
    count: int,
) -> list[Batch]:
    """The two batches of one append: the note, and the records as their producer sent them
    (`journal.record.batch.Batch`).
    """
    return [note_batch(note), Batch(body, blocks, producer_id, sequence, count)]


def note_batch(note: Note) -> Batch:
    """A note alone, as a cancel is."""
    return Batch(encode_note(note), (), PRODUCER_ID, 0, 1)


def record_offsets(data: Buffer, positions: Sequence[tuple[int, int]]) -> "array[int]":
    """Where each record of an appended batch lies in the log: `positions` as in `journal.record.batch.Appended`.

    Without a step of Python for a message where all have one size.
    """
    plain = data if isinstance(data, bytes | bytearray) else bytes(data)
    size = HEADER_SIZE + LENGTH.unpack_from(plain)[0]
    if len(plain) % size == 0 and same_length(plain, 0, len(plain), size):
        starts: Sequence[int] = range(0, len(plain), size)
    else:
        starts = walk(plain)
    found = array("Q")
    ends = [index for index, _ in positions[1:]] + [len(starts)]
    for (index, offset), end in zip(positions, ends, strict=True):
        shift = offset - starts[index]
        part = starts[index:end]
        if isinstance(part, range):
            part = range(part.start + shift, part.stop + shift, size)
            found.extend(part)
        else:
            found.extend(map(shift.__add__, part))
    return found


def read(
    log: Log,
    from_offset: int,
    to_offset: int,
    *,
    upto: Upto = "forced",
    damaged: Damaged | None = None,
    noted: Noted | None = None,
) -> Iterator[ArrivedBatch]:
    """What arrived from the append's end `from_offset` up to the append's end `to_offset`, in order; `noted` is told of
    each note on the way.

    May run in a worker. Raises Corrupt where the log is damaged, unless `damaged` is given: then it goes on behind.
    Raises BelowStart, BeyondEnd (`upto` does not reach so far: nothing is left out without a word), OSError, Closed.
    """
    reading, passed = _Reading(noted), -1
    while from_offset < to_offset:
        try:
            chunk = log.read(from_offset, min(READ_BYTES, to_offset - from_offset), upto=upto)
            if not chunk.data:
                raise BeyondEnd(to_offset, from_offset)
            for block in _verified(log, chunk.data, chunk.start):
                from_offset = block.next
                yield from reading.block(block)
        except Corrupt as error:
            if error.next <= from_offset and passed < from_offset:
                passed = from_offset  # the way there led through it: from now on it is known, and passed by
                continue
            if damaged is None or error.next <= from_offset:
                raise
            damaged(error)
            from_offset = error.next
            reading.forget()


def damaged_ranges(log: Log, from_offset: int) -> list[Corrupt]:
    """What of the log is damaged from the append's end `from_offset` on, up to the forced mark. Raises OSError."""
    found: list[Corrupt] = []
    for _ in read(log, max(from_offset, log.first_offset), log.forced_offset, damaged=found.append):
        pass
    return found


def _verified(log: Log, data: bytes | bytearray, start: int) -> Iterator[Block]:
    """Raises Corrupt instead of BadRecord."""
    position = 0
    try:
        for block in blocks_of(data, start, log.log_id):
            position = block.next - start
            yield block
    except BadRecord as error:
        end = _behind(data, start, position, log.log_id)
        raise Corrupt(log.folder, start + position, end, error.reason) from None


def _behind(data: bytes | bytearray, start: int, position: int, log_id: int) -> int:
    """The offset where blocks begin again behind the bad one at `position`, else the end of what was read."""
    claim = find_next_control(data, position, offset=start, log_id=log_id)
    if claim is None:
        return start + len(data)
    bad = claim.control.offset == start + position
    return claim.control.next if bad else claim.control.offset


class _Reading:
    """Goes through blocks in order and knows which note the next records belong to."""

    def __init__(self, noted: Noted | None) -> None:
        self._noted = noted
        self._note: Note | None = None
        self._done = 0

    def forget(self) -> None:
        """What comes next does not follow what came before."""
        self._note = None

    def block(self, block: Block) -> Iterator[ArrivedBatch]:
        """What the next block holds."""
        data = bytes(block.data)
        position, end = 0, len(data)
        ordinal, orphans = block.control.first_ordinal, 0
        while position < end:
            length, checksum, id, flag = HEADER.unpack_from(data, position)
            count, size = 1, HEADER_SIZE + length
            if id == NOTE_ID and not flag:
                self._begin(data[position : position + size], block.offset + position)
            elif flag & FLAG_FILLER:
                count = checksum
                self._skip(count)
            elif self._note is None:
                orphans += 1
            else:
                batch = self._take(self._note, data, position, block.offset + position, ordinal)
                yield batch
                count, size = len(batch.sizes), len(batch.data[0])
            ordinal += count
            position += size
        if orphans:
            logger.error(
                "nobody knows when %d delayed messages are due: their notes before offset %d of the arrivals are lost",
                orphans,
                block.next,
            )

    def _begin(self, record: bytes, offset: int) -> None:
        self._done = 0
        self._note = None
        try:
            note = decode_note(record)
        except BadNote as error:
            logger.error("the arrivals' note at offset %d says nothing: %s", offset, error.reason)
            return
        if note.records:
            self._note = note
        if self._noted is not None:
            self._noted(note, offset)

    def _skip(self, count: int) -> None:
        """Damage took these; a repair left a filler in their place."""
        self._done += count
        if self._note is not None and self._done >= self._note.records:
            self._note = None

    def _take(self, note: Note, data: bytes, position: int, offset: int, number: int) -> ArrivedBatch:
        """The records of `note` from `position` on, up to the last of them or the end of the block."""
        sizes, offsets, end = _columns(data, position, offset, note.records - self._done)
        dues = note.dues.part(self._done, self._done + len(sizes))
        self._done += len(sizes)
        if self._done == note.records:
            self._note = None
        view = memoryview(data)[position:end]
        columns = (*dues, offsets, sizes, [view])
        return ArrivedBatch(note.log_id, note.topic, number, *columns, note.ahead_ms)


def _columns(data: bytes, position: int, offset: int, wanted: int) -> "tuple[array[int], array[int], int]":
    """(sizes, offsets, end) of at most `wanted` records from `position` on, which lies at `offset` of the log."""
    size = HEADER_SIZE + LENGTH.unpack_from(data, position)[0]
    if wanted == 1:
        return array("I", (size,)), array("Q", (offset,)), position + size
    count = min(wanted, (len(data) - position) // size)
    end = position + count * size
    if (
        count >= COLUMNS_COUNT_MIN
        and same_length(data, position, end, size)
        and plain_flags(data, position, end, size)
    ):
        return array("I", (size,)) * count, array("Q", range(offset, offset + count * size, size)), end
    sizes: list[int] = []
    offsets: list[int] = []
    shift, end, unpack = offset - position, len(data), _LENGTH_FLAG.unpack_from
    while position < end and len(sizes) < wanted:
        length, flag = unpack(data, position)
        if flag & FLAG_FILLER:
            break
        sizes.append(HEADER_SIZE + length)
        offsets.append(position + shift)
        position += HEADER_SIZE + length
    return array("I", sizes), array("Q", offsets), position


def note_before(log: Log, first_number: int) -> Note | None:
    """The note of the batch whose first message has `first_number`: None where it is given up, or damaged.

    For the answer to a batch that is sent again. In a worker. Raises OSError, Closed.
    """
    if first_number <= log.first_ordinal or first_number > log.end_ordinal:
        return None
    try:
        offset, ordinal = log.offset_of_ordinal(first_number - 1)
        block = log.block_of_record(offset, upto="written") if ordinal == first_number - 1 else None
        return None if block is None else _note_at(block, offset - block.offset)
    except (Corrupt, BelowStart, BeyondEnd, NotARecord):
        return None


def _note_at(block: Block, position: int) -> Note | None:
    size = HEADER_SIZE + LENGTH.unpack_from(block.data, position)[0]
    try:
        return decode_note(block.data[position : position + size])
    except BadNote:
        return None
