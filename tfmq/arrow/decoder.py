"""Decoding of blocks to Arrow columns without a Python object per record.

The positions of all records are computed from their lengths. numpy then reads and checks all headers as columns, and
each binary column is copied in one pass (`gather_bytes`). If a check fails, `DamageLocator` looks for the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from struct import error as StructError
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from journal.crc32 import crc32
from journal.record import block_trailer
from journal.record.batch import BLOCK_SIZE_MAX
from journal.record.block import Block, blocks_of
from journal.record.block_trailer import TRAILER_SIZE
from journal.record.format import (
    FLAG_ATTRIBUTE,
    FLAG_CODEC_MASK,
    FLAG_FILLER,
    FLAG_TOMBSTONE,
    FLAG_TRAILER,
    FLAG_VERSION_MASK,
    HEADER_SIZE,
    BadRecord,
    Buffer,
    checksum_matches,
    records_of,
    split_body,
)
from tfmq.arrow.attributes import POSITION_MAX, Array, AttributeColumn, UnreadableAttribute, gather_bytes, read_numbers
from tfmq.arrow.schema import SCHEMA
from tfmq.errors import BadRequest, Damaged, DecodeFailed

VERIFY: Final = ("chunk", "message", "none")

_ATTRIBUTE_SIZE: Final = 4
_TIME: Final = pa.timestamp("us", tz="UTC")


class MessageRows(NamedTuple):
    """The messages to decode, a row for each: where in the buffer its record begins (`positions`) and ends, and where
    its attribute and its payload begin; the flags of the record; the number of its block in the buffer, from 0 on."""

    positions: Positions
    ends: Positions
    attributes: Positions
    payloads: Positions
    flags: Array
    blocks: Array


class Decoder:
    """Decodes blocks of one partition.

    `schema`: the columns to return (see `project`). `log_id`: from `journal.record.format.make_log_id`.
    `verify`: "chunk" checks every block by the CRC-32 in its trailer; "message" also checks each record's own CRC-32;
    "none" only checks that records and trailers are consistent. Brokers do not check attributes, so one may be
    invalid. With `lenient`, a message with an invalid attribute has neither key nor tag. Without it, `decode` raises
    DecodeFailed for such a message if the column `key` or `tag` is requested.
    """

    def __init__(
        self,
        topic: str,
        partition: int,
        log_id: int,
        schema: pa.Schema = SCHEMA,
        verify: str = "chunk",
        *,
        lenient: bool = False,
    ) -> None:
        if verify not in VERIFY:
            raise BadRequest(f"verify is one of {', '.join(VERIFY)}, not {verify!r}.")
        self.topic = topic
        self.partition = partition
        self.log_id = log_id
        self.schema = schema
        self.verify = verify
        self.lenient = lenient

    def decode(self, data: Buffer, offset: int, start: int = 0, end: int | None = None) -> pa.RecordBatch:
        """Decode `data`, which contains complete blocks. Return the messages with an offset in [start, end).

        `offset`: the offset of the first byte of `data`. All blocks are checked. The columns are copies, so `data` may
        be reused. Raises: Damaged for a bad block; the error has the range of the block (`first`, `next`), and its text
        names the bad record if possible. DecodeFailed for data that this release cannot read. BadRequest if `data` has
        more than 2 GiB.
        """
        if len(data) > POSITION_MAX:
            raise BadRequest(f"At most {POSITION_MAX} bytes are decoded at once, not {len(data)}.")
        if not len(data):
            return pa.RecordBatch.from_pylist([], schema=self.schema)
        found = self._checked_rows(data, offset)
        if found is None:
            error = DamageLocator(self.topic, self.partition, self.log_id, self.verify).find_error(bytes(data), offset)
            assert error is not None, "the blocks are refused and nothing is wrong with them"
            raise error
        rows, controls = found
        rows = _select_range(rows, start - offset, None if end is None else end - offset)
        return self._columns(data, offset, rows, controls)

    def _checked_rows(self, data: Buffer, offset: int) -> tuple[MessageRows, BlockTrailers] | None:
        """Check the blocks, and return their messages and block trailers; None if a check fails."""
        try:
            positions = record_positions(data)
        except BrokenChain:
            return None
        flags = read_numbers(data, positions + 16, "u4")
        indexes = np.flatnonzero(flags == FLAG_TRAILER)
        if not len(indexes) or indexes[-1] != len(positions) - 1:
            return None
        if positions[-1] + TRAILER_SIZE > len(data):
            return None
        controls = BlockTrailers(data, positions[indexes])
        rows = _message_rows(data, positions, flags, indexes)
        ordinals = _ordinal_counts(data, positions, flags, indexes)
        if rows is None or not controls.match(offset, self.log_id, ordinals):
            return None
        if self.verify != "none" and not controls.checksums_match():
            return None
        if self.verify == "message" and not _checksums_match(
            data, rows.positions + HEADER_SIZE, rows.ends, read_numbers(data, rows.positions + 4, "u4")
        ):
            return None
        return rows, controls

    def _columns(self, data: Buffer, offset: int, rows: MessageRows, controls: BlockTrailers) -> pa.RecordBatch:
        made: dict[str, Any] = {}
        names = set(self.schema.names)
        count = len(rows.positions)
        if names & {"attributes", "key", "tag"}:
            made.update(self._attributes(data, offset, rows))
        if "value" in names:
            valid = rows.flags & FLAG_TOMBSTONE == 0
            made["value"] = gather_bytes(data, rows.payloads, rows.ends, valid)
        if "topic" in names:
            made["topic"] = pa.repeat(self.topic, count)
        if "partition" in names:
            made["partition"] = np.full(count, self.partition, dtype=np.int32)
        if "offset" in names:
            made["offset"] = rows.positions + offset
        if "timestamp" in names:
            times = controls.column("append_time").astype(np.int64) * 1000
            made["timestamp"] = pa.array(times[rows.blocks]).view(_TIME)
        if "id" in names:
            made["id"] = read_numbers(data, rows.positions + 8, "u8").view(np.int64)
        arrays = [
            made[name] if isinstance(made[name], pa.Array) else pa.array(made[name]) for name in self.schema.names
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _attributes(self, data: Buffer, offset: int, rows: MessageRows) -> dict[str, pa.Array]:
        found: dict[str, pa.Array] = {}
        attributes = AttributeColumn(data, rows.attributes, rows.payloads, rows.flags & FLAG_ATTRIBUTE != 0)
        if "attributes" in self.schema.names:
            found["attributes"] = attributes.column()
        names = [name for name in ("key", "tag") if name in self.schema.names]
        try:
            return found | (attributes.decode_fields(*names, lenient=self.lenient) if names else {})
        except UnreadableAttribute as error:
            record = f"{self.topic}-{self.partition} at offset {rows.positions[error.row] + offset}"
            raise DecodeFailed(f"{record}: {error} Without the columns key and tag it can be read.") from None


def _message_rows(data: Buffer, positions: Positions, flags: Array, indexes: Array) -> MessageRows | None:
    """Return the records that are messages; None if a record is invalid. `indexes`: which records are trailers."""
    ends = np.empty_like(positions)
    ends[:-1] = positions[1:]
    ends[-1] = len(data)
    blocks = np.repeat(np.arange(len(indexes)), np.diff(indexes, prepend=-1))
    keep = flags & (FLAG_TRAILER | FLAG_FILLER) == 0
    if (flags[flags != FLAG_TRAILER] & LOW_FLAGS & ~np.uint32(KNOWN_FLAGS)).any():
        return None
    positions, ends, flags, blocks = positions[keep], ends[keep], flags[keep], blocks[keep]
    if not read_numbers(data, positions + 8, "u8").all():
        return None
    attributes = positions + HEADER_SIZE
    payloads = attributes.copy()
    having = np.flatnonzero(flags & FLAG_ATTRIBUTE)
    if len(having):
        begins = attributes[having] + _ATTRIBUTE_SIZE
        if (begins > ends[having]).any():
            return None
        attribute_ends = begins + read_numbers(data, begins - _ATTRIBUTE_SIZE, "u4")
        if (attribute_ends > ends[having]).any():
            return None
        attributes[having] = begins
        payloads[having] = attribute_ends
    if ((flags & FLAG_TOMBSTONE != 0) & (payloads != ends)).any():
        return None
    return MessageRows(positions, ends, attributes, payloads, flags, blocks)


def _ordinal_counts(data: Buffer, positions: Positions, flags: Array, indexes: Array) -> Array:
    """Return how many ordinals each block has: one for each message, and for each filler the number in its header."""
    counts = (flags != FLAG_TRAILER).astype(np.int64)
    fillers = np.flatnonzero((flags & FLAG_FILLER != 0) & (counts != 0))
    counts[fillers] = read_numbers(data, positions[fillers] + 4, "u4")
    return np.diff(np.cumsum(counts)[indexes], prepend=0)


def _checksums_match(data: Buffer, begins: Array, ends: Array, expected: Array) -> bool:
    view = memoryview(data)
    pairs = zip(begins.tolist(), ends.tolist(), strict=True)
    return bool([crc32(view[begin:end]) for begin, end in pairs] == expected.tolist())


def _select_range(rows: MessageRows, start: int, end: int | None) -> MessageRows:
    """Return the rows of the records whose position is in [start, end); `end` None: without an end."""
    first = int(np.searchsorted(rows.positions, start))
    last = len(rows.positions) if end is None else int(np.searchsorted(rows.positions, end))
    if first == 0 and last == len(rows.positions):
        return rows
    return MessageRows(*(column[first : max(first, last)] for column in rows))


Positions = npt.NDArray[np.int64]

RUN_COUNT_MIN: Final = 16
"""Minimum consecutive records of one size whose positions are computed at once. For fewer, a loop is as fast."""
LOOP_BYTES: Final = BLOCK_SIZE_MAX
"""If record sizes differ, a loop over the records covers at least this size before lengths are compared again."""

_LENGTH_FLAG: Final = Struct(">I12xI")


class BrokenChain(Exception):
    """The data does not end where a record ends."""


def record_positions(data: Buffer) -> Positions:
    """Return the positions of all records and block trailers. Raises BrokenChain if `data` ends inside one of them."""
    pieces: list[Any] = []
    position, end = 0, len(data)
    count = RUN_COUNT_MIN
    try:
        while position < end:
            size, count = _find_run(data, position, max(2 * count, RUN_COUNT_MIN))
            stop = position + count * size
            if count:
                pieces.append(np.arange(position, stop, size, dtype=np.int64))
            walked: list[int] = []
            position = _append_positions(data, stop, stop if count else position + LOOP_BYTES, walked)
            pieces.append(np.array(walked, dtype=np.int64))
    except StructError:
        raise BrokenChain from None
    if position != end:
        raise BrokenChain
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)


def _append_positions(data: Buffer, position: int, stop: int, found: list[int]) -> int:
    """Append to `found` the positions of the records from `position` to the first block trailer that ends after `stop`.
    Return the position after that trailer."""
    unpack, add = _LENGTH_FLAG.unpack_from, found.append
    end = len(data)
    while position < end:
        length, flag = unpack(data, position)
        add(position)
        position += HEADER_SIZE + length
        if flag == FLAG_TRAILER and position > stop:
            break
    return position


def _find_run(data: Buffer, position: int, guess: int) -> tuple[int, int]:
    """Return the size of the record at `position`, and how many records from there on have this size; 0 if fewer than
    RUN_COUNT_MIN. To save time, only `guess` records are compared first, and the others only if these have the size."""
    length, _ = _LENGTH_FLAG.unpack_from(data, position)
    size = HEADER_SIZE + length
    most = min(len(data) - position, BLOCK_SIZE_MAX) // size
    if most < RUN_COUNT_MIN:
        return size, 0
    count = _run_length(data, position, size, min(most, guess))
    if guess <= count < most:
        count = _run_length(data, position, size, most)
    return size, count if count >= RUN_COUNT_MIN else 0


def _run_length(data: Buffer, position: int, size: int, most: int) -> int:
    """Return how many consecutive records have the size of the one at `position` (`size` bytes); at most `most`."""
    lengths: Any = np.ndarray((most,), np.uint32, data, position, (size,))
    same = lengths == lengths[0]
    first = int(same.argmin())
    return most if same[first] else first


_TRAILER_FIELDS: Final = (
    "length checksum id flag version bits records size crc append_time epoch source_kind"
    " forced first_ordinal offset source_id source_high source_low"
).split()
_NUMBER_TYPES: Final = {"H": ">u2", "I": ">u4", "Q": ">u8"}
TRAILER: Final = np.dtype(
    [(name, _NUMBER_TYPES[kind]) for name, kind in zip(_TRAILER_FIELDS, block_trailer.TRAILER.format[1:], strict=True)]
)
"""The fields of a block trailer, at the positions at which `journal.record.block_trailer` packs them."""


class BlockTrailers:
    """The block trailers at `positions` of `data`, as columns. `starts`: the positions at which their blocks start."""

    def __init__(self, data: Buffer, positions: Positions) -> None:
        self.data = memoryview(data)
        self.positions = positions
        self.starts = np.empty_like(positions)
        self.starts[0] = 0
        self.starts[1:] = positions[:-1] + TRAILER_SIZE
        every: Any = np.ndarray((len(data) - TRAILER_SIZE + 1,), TRAILER, data, 0, (1,))
        self._fields = every[positions]

    def column(self, name: str) -> Array:
        """Return one field of all trailers, as int64 (8-byte fields as uint64)."""
        column: Array = self._fields[name]
        return column.astype(np.uint64 if column.dtype.itemsize == 8 else np.int64)

    def match(self, offset: int, log_id: int, ordinals: Sequence[int] | Array) -> bool:
        """Return whether every trailer is valid and fits its block. `ordinals`: how many ordinals each block has."""
        sizes = self.positions - self.starts
        records = self.column("records")
        first = self.column("first_ordinal").astype(np.int64)
        return bool(
            (self.column("length") == TRAILER.itemsize - HEADER_SIZE).all()
            and (self.column("id") == np.uint64(log_id)).all()
            and (self.column("version") == block_trailer.TRAILER_VERSION).all()
            and (self.column("bits") <= block_trailer.BIT_MORE_FOLLOWS).all()
            and (self.column("size") == sizes).all()
            and (self.column("offset") == (self.starts + offset).astype(np.uint64)).all()
            and (records == ordinals).all()
            and (first[1:] == first[:-1] + records[:-1]).all()
            and _checksums_match(
                self.data, self.positions + HEADER_SIZE, self.positions + TRAILER_SIZE, self.column("checksum")
            )
        )

    def checksums_match(self) -> bool:
        """Return whether the CRC-32 of every block matches its trailer."""
        return _checksums_match(self.data, self.starts, self.positions, self.column("crc"))


KNOWN_FLAGS: Final = FLAG_ATTRIBUTE | FLAG_TOMBSTONE | FLAG_FILLER
LOW_FLAGS: Final = 0xFFFF
BAD_RECORDS_NAMED: Final = 5
"""Maximum number of damaged records that an error text names."""


class DamageLocator:
    """Finds the first error in data that `Decoder` has rejected, block by block. `verify`: that of the `Decoder`."""

    def __init__(self, topic: str, partition: int, log_id: int, verify: str) -> None:
        self.name = f"{topic}-{partition}"
        self.log_id = log_id
        self.verify = verify

    def find_error(self, data: bytes, offset: int) -> Damaged | DecodeFailed | None:
        """Return the first error in `data`, which begins at offset `offset`; None if nothing is wrong."""
        block_offset = offset
        try:
            for block in blocks_of(data, offset, self.log_id, verify=self.verify != "none"):
                block_offset = block.next
                error = self._find_in_block(block)
                if error is not None:
                    return error
        except block_trailer.BadBlockTrailer as bad:
            if bad.version is not None:
                return DecodeFailed(f"{self._location(block_offset)}: {bad.reason}; use a newer client.")
            return self._damaged_from(data, block_offset, offset, bad.reason)
        except BadRecord as bad:
            return self._damaged_from(data, block_offset, offset, bad.reason)
        return None

    def _find_in_block(self, block: Block) -> Damaged | DecodeFailed | None:
        """Return the first error of a record in a block whose trailer is valid; None if all records are valid."""
        ordinals = 0
        for record in records_of(block.data):
            record_offset, kind = block.offset + record.position, record.flag & LOW_FLAGS
            if kind & ~KNOWN_FLAGS:
                return DecodeFailed(f"{self._location(record_offset)}: {_describe_unknown_flag(kind)}")
            if kind & FLAG_FILLER:
                ordinals += record.checksum
                continue
            ordinals += 1
            body = block.data[record.position + 20 : record.position + record.size]
            try:
                _, payload = split_body(body, kind)
            except BadRecord as bad:
                return self._block_damaged(block, f"the record at offset {record_offset}: {bad.reason}")
            if kind & FLAG_TOMBSTONE and len(payload):
                reason = "a tombstone has a payload, which means nothing in this release."
                return DecodeFailed(f"{self._location(record_offset)}: {reason}")
            if not record.id:
                return self._block_damaged(block, f"the record at offset {record_offset} has the id 0")
            if self.verify == "message" and not checksum_matches(block.data, record):
                return self._block_damaged(block, f"the record at offset {record_offset} fails its own checksum")
        if ordinals != block.control.records:
            reason = f"{ordinals} records where {block.control.records} are announced"
            return self._block_damaged(block, reason)
        return None

    def _block_damaged(self, block: Block, reason: str) -> Damaged:
        return self._make_error(block.offset, block.next, reason)

    def _damaged_from(self, data: bytes, block_offset: int, offset: int, reason: str) -> Damaged:
        """Return the error for the bad block at `block_offset`. `offset`: the offset of the first byte of `data`."""
        start = block_offset - offset
        claim = block_trailer.find_next_trailer(data, start, offset=offset, log_id=self.log_id)
        following = offset + len(data)
        if claim is not None:
            begins = claim.trailer.offset
            following = begins if begins > block_offset else claim.trailer.next
            if begins == block_offset:
                reason += _name_bad_records(data[start : claim.position], block_offset)
        return self._make_error(block_offset, following, reason)

    def _make_error(self, first: int, next: int, reason: str) -> Damaged:
        return Damaged(f"{self._location(first)} is damaged up to offset {next}: {reason}.", first=first, next=next)

    def _location(self, offset: int) -> str:
        return f"{self.name} at offset {offset}"


def _describe_unknown_flag(kind: int) -> str:
    if kind & FLAG_CODEC_MASK:
        return "a compressed batch, which this release cannot read; use a newer client."
    if kind & FLAG_VERSION_MASK:
        return f"a record of format version {kind >> 12}, which this release cannot read; use a newer client."
    if kind & FLAG_TRAILER:
        return "a block trailer stands inside a block."
    return f"the flag {kind:#06x} has bits that this release does not know; use a newer client."


def _name_bad_records(records: bytes, offset: int) -> str:
    """Return the end of an error text for a bad block. It names the records that fail their own checksums."""
    bad: list[int] = []
    try:
        for record in records_of(records):
            if not record.flag & FLAG_FILLER and not checksum_matches(records, record):
                bad.append(offset + record.position)
    except BadRecord as broken:
        return f"; from offset {offset + broken.position} on no records can be told apart"
    if not bad:
        return "; every record's own checksum holds, so a header is wrong"
    named = ", ".join(map(str, bad[:BAD_RECORDS_NAMED]))
    more = " and more" if len(bad) > BAD_RECORDS_NAMED else ""
    return f"; the record at offset {named}{more} is wrong"
