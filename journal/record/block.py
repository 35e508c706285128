"""Control blocks: records and the control record that closes them, found in bytes that may be damaged or
hostile.

A payload may hold bytes that look like a control record, even one whose checksum and offset are right. So a
control record counts only where the records before it, from a place that is known to be a block's start, tile
exactly up to it. `blocks_of` goes from block to block that way; `find_next_control` gets back on the track
behind damage, where no start is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from struct import error as StructError
from typing import Final, NamedTuple
from zlib import crc32

from journal.record.batch import BLOCK_SIZE_MAX
from journal.record.block_trailer import (
    CONTROL_BODY,
    CONTROL_MARK_POSITION,
    CONTROL_SIZE,
    BadControl,
    Control,
    control_mark,
    decode_control,
)
from journal.record.format import (
    COLUMNS_COUNT_MIN,
    FLAG_CONTROL,
    FLAG_FILLER,
    FLAG_LOW_POSITION,
    HEADER_SIZE,
    LENGTH,
    RECORD_SIZE_MAX,
    SEQUENCE_COUNT,
    SEQUENCE_MASK,
    BadRecord,
    Buffer,
    Bytes,
    Incomplete,
    contiguous,
    leading,
    plain_flags,
    same_length,
    split_id,
)

_LENGTH_FLAG: Final = Struct(">I12xI")
_LENGTH_ID_FLAG: Final = Struct(">I4xQI")

LENGTH_MAX: Final = RECORD_SIZE_MAX - HEADER_SIZE
BLOCK_SPAN_MAX: Final = RECORD_SIZE_MAX + CONTROL_SIZE
"""No control block is longer: a search that saw so many bytes has seen its end."""


class Block(NamedTuple):
    """One control block: `offset` of its first byte in the partition, `data` its records without the control
    record (a view of what was given, valid as long as that is), `control` what closes it."""

    offset: int
    data: memoryview
    control: Control

    @property
    def next(self) -> int:
        """The offset behind the control record."""
        return self.offset + len(self.data) + CONTROL_SIZE


class Run(NamedTuple):
    """`count` records of one producer with contiguous sequences, the first of them at `offset`."""

    producer_id: int
    first_sequence: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    offset: int


class Claim(NamedTuple):
    """A control record found by search: its `position` in the bytes given. It claims the block before it."""

    position: int
    control: Control


def blocks_of(data: Buffer, offset: int, log_id: int, *, verify: bool = True) -> Iterator[Block]:
    """The control blocks of `data`, whose first byte is a block's start and lies at `offset` of the
    partition.

    Always checked: tiling, the control record's own checksum, id, version, place, size, and that ordinals go
    on from block to block. `verify=False` leaves out the CRC over the records. Raises Incomplete (`position`:
    where the unfinished block begins) if the bytes end inside a block, else BadRecord, before the bad block
    is given.
    """
    plain = data if isinstance(data, bytes | bytearray) else bytes(data)
    view = memoryview(plain).toreadonly()
    start, end = 0, len(plain)
    ordinal = -1
    while start < end:
        at = control_position(plain, start)
        control = _checked(plain, start, at, offset, log_id)
        if control.first_ordinal != ordinal and ordinal >= 0:
            raise BadRecord(
                start, f"the block's first ordinal is {control.first_ordinal}, {ordinal} was to come"
            )
        records = view[start:at]
        if verify and crc32(records) != control.crc:
            raise BadRecord(
                start, f"the block of {control.size} bytes at offset {offset + start} fails its checksum"
            )
        yield Block(offset + start, records, control)
        ordinal = control.next_ordinal
        start = at + CONTROL_SIZE


def control_position(data: Bytes, start: int) -> int:
    """Where the control record stands that closes the block at `start`: the first one in the chain of
    lengths.

    Leading records of one size are passed by columns, the others walked. Raises Incomplete or BadRecord.
    """
    position = start + _leading_size(data, start)
    unpack = _LENGTH_FLAG.unpack_from
    try:
        while True:
            length, flag = unpack(data, position)
            if flag == FLAG_CONTROL:
                return position
            if length > LENGTH_MAX:
                raise BadRecord(start, f"the record at position {position} names a length of {length}")
            position += HEADER_SIZE + length
    except StructError:
        if len(data) - start > BLOCK_SPAN_MAX:
            raise BadRecord(start, f"no control record in {len(data) - start} bytes") from None
        raise Incomplete(start, "no control record closes this block") from None


def runs(block: Block) -> list[Run]:
    """The records of a block as runs of one producer with contiguous sequences. Fillers end a run and have
    none.

    Raises BadRecord if the block's records do not tile; a verified block's do.
    """
    data = block.data
    size = len(data)
    if not size:
        return []
    record_size = HEADER_SIZE + LENGTH.unpack_from(data)[0]
    if size >= record_size * COLUMNS_COUNT_MIN and size % record_size == 0:
        whole = _one_run(bytes(data), record_size, block.offset)
        if whole is not None:
            return [whole]
    return _runs_by_walk(block)


def find_next_control(data: Buffer, start: int, *, offset: int, log_id: int) -> Claim | None:
    """The first control record behind the damage at `start` that can be relied on; None if there is none.

    `data[0]` lies at `offset`; `start` is where a block begins that is bad. A control record counts if its
    own checksum holds, it stands where the block that it claims ends, and that block does not begin before
    `start`. One that lies inside the block that a later one claims is part of a payload and passed over: so
    the bytes up to BLOCK_SPAN_MAX behind `start` should be given, if there are as many.
    """
    stack: list[Claim] = []
    for claim in controls_in(data, start, offset=offset, log_id=log_id):
        begins = claim.control.offset - offset
        if begins < start:
            continue
        while stack and stack[-1].position + CONTROL_SIZE > begins:
            stack.pop()
        stack.append(claim)
        if claim.position - start > BLOCK_SPAN_MAX:
            break
    return stack[0] if stack else None


def controls_in(data: Buffer, start: int, *, offset: int, log_id: int) -> Iterator[Claim]:
    """Everything from `start` on that is a control record by its own checksum and place, forged ones
    included."""
    plain = data if isinstance(data, bytes | bytearray) else bytes(data)
    mark = control_mark(log_id)
    found = plain.find(mark, start + CONTROL_MARK_POSITION)
    while found >= 0:
        position = found - CONTROL_MARK_POSITION
        found = plain.find(mark, found + 1)
        if (
            position + CONTROL_SIZE > len(plain)
            or LENGTH.unpack_from(plain, position)[0] != CONTROL_BODY.size
        ):
            continue
        try:
            control = decode_control(plain, position, log_id)
        except BadControl:
            continue
        if control.end == offset + position and control.size <= RECORD_SIZE_MAX:
            yield Claim(position, control)


def _checked(data: Bytes, start: int, at: int, offset: int, log_id: int) -> Control:
    """The control record at `at`, which must name exactly the block from `start` to `at`."""
    try:
        control = decode_control(data, at, log_id)
    except BadRecord as error:
        raise error.at(start) from None
    if control.size != at - start:
        raise BadRecord(start, f"the control record covers {control.size} bytes, {at - start} are there")
    if control.offset != offset + start:
        raise BadRecord(start, f"the block is from offset {control.offset}, and stands at {offset + start}")
    return control


def _leading_size(data: Bytes, start: int) -> int:
    """Bytes from `start` on that are records of one size and kind, as far as columns tell: 0 if they are few.

    The low byte of the flag belongs to the kind, so a control record ends the row even where its size is
    theirs.
    """
    if len(data) - start < HEADER_SIZE or data[start + FLAG_LOW_POSITION] >= FLAG_CONTROL:
        return 0
    size = HEADER_SIZE + int(LENGTH.unpack_from(data, start)[0])
    end = min(len(data), start + BLOCK_SIZE_MAX)
    if end - start < size * COLUMNS_COUNT_MIN:
        return 0
    return size * leading(data, start, end, size)


def _one_run(data: bytes, record_size: int, offset: int) -> Run | None:
    """All records of one size as one run, by columns; None if they are not one."""
    size = len(data)
    if not same_length(data, 0, size, record_size) or not plain_flags(data, 0, size, record_size):
        return None
    first_id = int.from_bytes(data[8:16], "big")
    count = size // record_size
    if (first_id & SEQUENCE_MASK) + count > SEQUENCE_COUNT or not contiguous(
        data, 0, size, record_size, first_id
    ):
        return None
    return Run(*split_id(first_id), count, offset)


def _runs_by_walk(block: Block) -> list[Run]:
    found: list[Run] = []
    unpack = _LENGTH_ID_FLAG.unpack_from
    data = block.data
    position, size = 0, len(data)
    try:
        while position < size:
            first_position = position
            length, first_id, flag = unpack(data, position)
            position += HEADER_SIZE + length
            if flag & (FLAG_FILLER | FLAG_CONTROL):
                continue
            producer_id, first_sequence = split_id(first_id)
            next_id = first_id + 1
            while position < size and next_id & SEQUENCE_MASK:
                length, id, flag = unpack(data, position)
                if id != next_id or flag & FLAG_FILLER:
                    break
                next_id += 1
                position += HEADER_SIZE + length
            count = next_id - first_id
            found.append(Run(producer_id, first_sequence, count, block.offset + first_position))
    except StructError:
        raise Incomplete(first_position, "the records end inside a header") from None
    return found
