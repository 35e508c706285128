"""Decoder of fetch responses: verifies every block and creates the messages. No I/O.

The body of a response contains whole blocks. Each block is verified: its block trailer (checksum, log id, offset), the
CRC-32 over the block, and that its records fill it without gaps. The checksums of single records are used only to find
out which record of a damaged block is wrong. Fillers (zeros in place of lost records) and block trailers are not
returned. With a tag filter the broker leaves blocks out, so gaps between blocks are allowed then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, cycle, repeat
from struct import Struct
from struct import error as StructError
from typing import Any, Final, NamedTuple, Protocol

from journal.crc32 import crc32
from journal.record.block import trailer_position
from journal.record.block_trailer import (
    TRAILER,
    TRAILER_SIZE,
    TRAILER_VERSION,
    BadBlockTrailer,
    BlockTrailer,
    decode_trailer,
    find_next_trailer,
    trailer_key,
)
from journal.record.format import (
    ATTRIBUTE_SIZE,
    FLAG_ATTRIBUTE,
    FLAG_CODEC_MASK,
    FLAG_FILLER,
    FLAG_TOMBSTONE,
    FLAG_TRAILER,
    FLAG_VERSION_MASK,
    HEADER_SIZE,
    SEQUENCE_COUNT,
    SEQUENCE_MASK,
    BadRecord,
    checksum_matches,
    ids_are_contiguous,
    make_log_id,
    records_of,
)
from tfmq.client.consumer.message import ATTRIBUTES, Codec, FailureHandler, LazyAttribute, Origin, ReceivedMessage
from tfmq.errors import Damaged, DecodeFailed

SAME_SIZE_COUNT_MIN: Final = 4
"""Minimum number of records of one size to decode column by column; for fewer, the set-up costs more than it saves."""
_BODY_SIZE: Final = TRAILER_SIZE - HEADER_SIZE
_KEY_BEGIN: Final = HEADER_SIZE - 12
_ID_BEGIN: Final = 8
_ID_END: Final = 16
FIELDS_PER_LAYOUT: Final = 32
"""Number of records of which one struct layout takes a field."""
ROWS_MAX: Final = 32
"""Number of messages that share an `Origin`, whose columns stay in memory as long as a program keeps one of them."""
ATTRIBUTE_BYTES_MAX: Final = 8192
"""Maximum size of the attributes of an `Origin` together, estimated from the average in their block: it has fewer rows
where attributes are large, and at least one."""
LAYOUTS_MAX: Final = 512
"""Size of the cache of struct layouts, of up to 2 KiB each; limited because a sender may use every size."""
COMPARED_BYTES_MAX: Final = 32
"""Maximum size of an attribute that is compared byte by byte in all records of a block at once."""
BAD_RECORDS_NAMED: Final = 5
"""Maximum number of bad records that an error text names."""

_FLAG_LOW: Final = 0xFFFF
_KNOWN: Final = FLAG_ATTRIBUTE | FLAG_TOMBSTONE | FLAG_FILLER
_PREFIX: Final = Struct(">I4xQII")
_PREFIX_SIZE: Final = _PREFIX.size
_LARGE_ATTRIBUTE: Final = ATTRIBUTE_BYTES_MAX // ROWS_MAX
"""Size above which an attribute has an `Origin` of its own where blocks have one record each."""


class DecodedBlock(NamedTuple):
    """One decoded block, or several consecutive blocks of one record each.

    The block has the offsets from `offset` to `next_offset`, and its ordinals end before `next_ordinal`. `messages`: in
    the order of their offsets. `epoch`: the log's epoch when the block was written.
    """

    messages: list[ReceivedMessage]
    offset: int
    next_offset: int
    next_ordinal: int
    epoch: int


class _Columns(NamedTuple):
    """The messages of a block as columns. `positions`: where each record begins in the body.

    `ordinals`: for each message, its ordinal minus the block's first ordinal; and one more value at the end, the number
    of ordinals in the block. None: the values are 0, 1, 2 … `attribute`: that of all messages; None: they have
    different ones, `attributes`.
    """

    positions: Sequence[int]
    ids: Sequence[int]
    attribute: LazyAttribute | None
    attributes: Sequence[bytes | None]
    payloads: Sequence[bytes | None]
    ordinals: Sequence[int] | None = None


class BlockDecoder(Protocol):
    """Decodes the fetch responses of one partition, to messages or to Arrow record batches."""

    def decode(
        self, body: bytes, start: int, skip_to: int, next_offset: int, *, gaps: bool = False
    ) -> Iterator[DecodedBlock]: ...


class Decoder:
    """Decodes the fetch responses of one partition to messages. Calls of `decode` are independent of each other."""

    def __init__(self, topic: str, partition: int, incarnation: int, codec: Codec | None = None) -> None:
        self.topic = topic
        self.partition = partition
        self.incarnation = incarnation
        self.log_id = make_log_id(incarnation, partition)
        self.codec = codec
        self.failure_handler: Any = None
        """The `FailureHandler` that creates the contexts of `message.handling()`. It is put into each `Origin`."""
        self._trailer_key = trailer_key(self.log_id)

    def decode(
        self, body: bytes, start: int, skip_to: int, next_offset: int, *, gaps: bool = False
    ) -> Iterator[DecodedBlock]:
        """Decode the blocks of `body`, which has offsets `start` to `next_offset`.

        Records before the offset `skip_to` are left out. `gaps`: whether a tag filter was requested, so that blocks may
        be missing. After the last good block, raises Damaged (with the range `first` to `next`) if wrong bytes follow,
        or DecodeFailed if valid bytes follow that this release cannot read.
        """
        offset, position, end = start, 0, len(body)
        while position < end:
            if offset >= skip_to:
                singles, position_after = self._decode_single_blocks(body, position, offset, next_offset)
                if singles.messages:
                    yield singles
                    position, offset = position_after, singles.next_offset
                    continue
            at, control = self._verify_block(body, position, offset, next_offset, gaps)
            shift = control.offset - position
            decoded = self._create_messages(body, position, at, control, skip_to)
            yield decoded
            position = at + TRAILER_SIZE
            offset = position + shift
        if not gaps and offset != next_offset:
            reason = "bytes are missing at the end of the response"
            raise self._damaged(body, end, offset, next_offset, gaps, reason)

    def _decode_single_blocks(
        self, body: bytes, position: int, block_offset: int, limit: int
    ) -> tuple[DecodedBlock, int]:
        """Decode consecutive blocks of one record each, which arise when messages are sent one by one.

        `_verify_block` and `_create_messages` take about 9 us per block, which is much for a single record. Here one
        loop decodes such blocks with the same verification: the trailer by its checksum, log id and offset, the record
        by the CRC of the block. The loop ends at any other block and at any error; the caller then continues with these
        two methods, which report the error.

        Decoding starts at `position` in the body, where the block at `block_offset` begins, and ends at the offset
        `limit` at the latest. Return the messages (perhaps none), and the position in the body after them.
        """
        messages: list[ReceivedMessage] = []
        view, key, start = memoryview(body), self._trailer_key, block_offset
        unpack, unpack_control = _PREFIX.unpack_from, TRAILER.unpack_from
        origin, time, epoch, ordinal = None, -1, -1, -1
        offsets: list[int] = []
        ordinals: list[int] = []
        ids: list[int] = []
        attributes: list[bytes | None] = []
        size_before = 0
        try:
            while True:
                length, id, flag, attribute_size = unpack(body, position)
                at = position + HEADER_SIZE + length
                if body[at + _KEY_BEGIN : at + HEADER_SIZE] != key or flag & _FLAG_LOW != FLAG_ATTRIBUTE:
                    break
                (body_size, checksum, _, _, version, bits, records, size, crc, append_time, block_epoch, _, _,
                 first_ordinal, offset, _, _, _) = unpack_control(body, at)  # fmt: skip
                begins = position + _PREFIX_SIZE
                payload_begins, block_end = begins + attribute_size, at + TRAILER_SIZE
                following = block_offset + block_end - position
                if (
                    records != 1 or offset != block_offset or not id or payload_begins > at or following > limit
                    or size != at - position or bits > 1 or version != TRAILER_VERSION or body_size != _BODY_SIZE
                    or crc32(view[position:at]) != crc or crc32(view[at + HEADER_SIZE : block_end]) != checksum
                ):  # fmt: skip
                    break
                if len(ids) == ROWS_MAX or attribute_size > _LARGE_ATTRIBUTE or size_before > _LARGE_ATTRIBUTE:
                    if origin is not None:
                        origin.end = block_offset
                    origin, offsets, ordinals, ids, attributes = None, [], [], [], []
                if append_time != time or block_epoch != epoch or origin is None:
                    time, epoch = append_time, block_epoch
                    shared = self._shared_values(time, epoch)
                    origin = Origin(*shared, offsets, following, ordinals, ids, attributes)
                ordinal = first_ordinal
                messages.append(ReceivedMessage((body[payload_begins:at], len(ids), origin)))
                offsets.append(block_offset)
                ordinals.append(ordinal)
                ids.append(id)
                attributes.append(body[begins:payload_begins])
                position, block_offset, size_before = block_end, following, attribute_size
        except StructError:
            pass  # The end of the body is reached. If it ends inside a block, the caller's other methods report that.
        if origin is not None:
            origin.end = block_offset
        return DecodedBlock(messages, start, block_offset, ordinal + 1, epoch), position

    def _verify_block(
        self, body: bytes, position: int, offset: int, next_offset: int, gaps: bool
    ) -> tuple[int, BlockTrailer]:
        try:
            at = trailer_position(body, position)
            control = decode_trailer(body, at, self.log_id)
        except BadBlockTrailer as bad:
            if bad.version is not None:
                raise DecodeFailed(f"{self._where(offset)}: {bad.reason}; use a newer client.") from None
            raise self._damaged(body, position, offset, next_offset, gaps, bad.reason) from None
        except (BadRecord, StructError) as bad:
            raise self._damaged(body, position, offset, next_offset, gaps, str(bad)) from None
        reason = _trailer_mismatch(control, at - position, offset, next_offset, gaps)
        if not reason and crc32(memoryview(body)[position:at]) != control.crc:
            reason = f"the block fails its checksum{_describe_bad_records(body[position:at], control.offset)}"
        if reason:
            raise self._damaged(body, position, offset, next_offset, gaps, reason)
        return at, control

    def _create_messages(self, body: bytes, start: int, end: int, control: BlockTrailer, skip_to: int) -> DecodedBlock:
        shift = control.offset - start
        following = control.next
        try:
            columns = _split_same_size(body, start, end) or _split_plain(body, start, end)
        except _UnreadableRecord as unreadable:
            offset = unreadable.position + shift
            raise DecodeFailed(f"{self._where(offset)}: {unreadable.reason}") from None
        except (BadRecord, StructError) as bad:
            sentence = f"{self._where(control.offset)}: the block's records do not fit together ({bad})."
            raise Damaged(sentence, first=control.offset, next=following) from None
        counted = len(columns.ids) if columns.ordinals is None else columns.ordinals[-1]
        if 0 in columns.ids or counted != control.records:
            reason = f"{counted} records where {control.records} are announced."
            if 0 in columns.ids:
                reason = "a record has the id 0."
            sentence = f"{self._where(control.offset)}: {reason}"
            raise Damaged(sentence, first=control.offset, next=following)
        number, most = len(columns.ids), _rows_per_origin(columns, end - start)
        origins = self._origins(columns, control, shift, most)
        # `cycle` keeps its numbers and repeats them; for one origin there may be many, and none is repeated.
        numbers: Iterable[int] = range(number) if number <= most else cycle(range(most))
        origin_of_each = chain.from_iterable(map(repeat, origins, repeat(most)))
        rows = zip(columns.payloads, numbers, origin_of_each, strict=False)
        messages: list[ReceivedMessage] = list(map(ReceivedMessage, rows))
        if skip_to > control.offset:
            messages = [each for each in messages if each.offset >= skip_to]
        return DecodedBlock(messages, control.offset, following, control.next_ordinal, control.epoch)

    def _origins(self, columns: _Columns, control: BlockTrailer, shift: int, most: int) -> Iterator[Origin]:
        """Create the origins of a block's messages, each for `most` of them."""
        first, number = control.first_ordinal, len(columns.ids)
        offsets, ids, attributes = _offsets(columns.positions, shift), columns.ids, columns.attributes
        ordinals: Sequence[int] = range(first, first + number)
        if columns.ordinals is not None:
            ordinals = [first + each for each in columns.ordinals]
        shared = self._shared_values(control.append_time, control.epoch)
        for begin in range(0, number, most):
            end = begin + most
            rows = slice(begin, end)
            end_offset = offsets[end] if end < number else control.next
            values = offsets[rows], end_offset, ordinals[rows], ids[rows], attributes[rows]
            yield Origin(*shared, *values, columns.attribute)

    def _shared_values(
        self, append_ms: int, epoch: int
    ) -> tuple[int, int, int, Codec | None, FailureHandler | None, str, int]:
        """Return the first arguments of an `Origin`."""
        return self.incarnation, append_ms, epoch, self.codec, self.failure_handler, self.topic, self.partition

    def _damaged(self, body: bytes, position: int, offset: int, next_offset: int, gaps: bool, reason: str) -> Damaged:
        following = next_offset
        if not gaps:
            claim = find_next_trailer(body, position, offset=offset - position, log_id=self.log_id)
            if claim is not None:
                begins = claim.trailer.offset
                following = begins if begins > offset else claim.trailer.next
        sentence = f"{self._where(offset)} is damaged up to offset {following}: {reason}."
        return Damaged(sentence, first=offset, next=following)

    def _where(self, offset: int) -> str:
        return f"{self.topic}-{self.partition} at offset {offset}"


class _UnreadableRecord(Exception):
    """A valid record that this release cannot read."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(reason)
        self.position = position
        self.reason = reason


def _trailer_mismatch(control: BlockTrailer, size: int, offset: int, next_offset: int, gaps: bool) -> str:
    """Return why the trailer does not match the block of `size` bytes at `offset`; "" if it does."""
    if control.size != size:
        return f"the block trailer is for {control.size} bytes, the block has {size}"
    if control.offset != offset and not (gaps and control.offset > offset):
        return f"the block has another offset, {control.offset}"
    if control.next > next_offset:
        return f"the block ends at {control.next}, after the end of the response at {next_offset}"
    return ""


def _split_same_size(body: bytes, start: int, end: int) -> _Columns | None:
    """Split records column by column if all have the same size, kind and attribute size; else return None."""
    length, first_id, flag, attribute_size = _PREFIX.unpack_from(body, start)
    size = HEADER_SIZE + length
    number, rest = divmod(end - start, size)
    kind = flag & _FLAG_LOW
    if rest or number < SAME_SIZE_COUNT_MIN or kind not in (0, FLAG_ATTRIBUTE):
        return None
    same = (0, 1, 2, 3, 18, 19, 20, 21, 22, 23) if kind else (0, 1, 2, 3, 18, 19)
    for column in same:
        if body[start + column : end : size] != body[start + column : start + column + 1] * number:
            return None
    attribute_begin = HEADER_SIZE + ATTRIBUTE_SIZE.size
    payload_begin = attribute_begin + attribute_size if kind else HEADER_SIZE
    if payload_begin > size:
        raise BadRecord(start, "an attribute is longer than its record")

    def field(begin: int, field_end: int) -> list[Any]:
        return _split_field(body, start, number, size, begin, field_end)

    ids: Sequence[int]
    if (first_id & SEQUENCE_MASK) + number <= SEQUENCE_COUNT and ids_are_contiguous(body, start, end, size, first_id):
        ids = range(first_id, first_id + number)
    else:
        ids = [int.from_bytes(id, "big") for id in field(_ID_BEGIN, _ID_END)]
    attribute = body[start + attribute_begin : start + payload_begin] if kind else None
    attributes: Sequence[bytes | None] = [attribute]
    if attribute is not None and not _field_is_equal(body, start + attribute_begin, end, size, attribute):
        attributes = field(attribute_begin, payload_begin)
    return _Columns(range(start, end, size), ids, *_shared(attributes), field(payload_begin, size))


def _field_is_equal(body: bytes, begin: int, end: int, size: int, value: bytes) -> bool:
    """Return whether the records of `size` bytes, the first of which has `value` at `begin`, all have it there."""
    last = begin + (end - begin - 1) // size * size
    if body[last : last + len(value)] != value or len(value) > COMPARED_BYTES_MAX:
        return False
    number = (end - begin - 1) // size + 1
    for n in range(len(value)):
        column = body[begin + n : end : size]
        if column != value[n : n + 1] * number:
            return False
    return True


def _split_field(body: bytes, start: int, number: int, size: int, begin: int, end: int) -> list[Any]:
    """Return the bytes `begin` to `end` of each of `number` records of `size` bytes."""
    # One call cuts the field out of many records: an iteration for each record would make a tuple for each, which
    # costs more than the field.
    whole, rest = divmod(number, FIELDS_PER_LAYOUT)
    layout = _field_layout(begin, end, size, FIELDS_PER_LAYOUT if whole else rest)
    rest_begin = start + whole * FIELDS_PER_LAYOUT * size
    found = list(chain.from_iterable(layout.iter_unpack(memoryview(body)[start:rest_begin])))
    if rest:
        found += _field_layout(begin, end, size, rest).unpack_from(body, rest_begin)
    return found


@lru_cache(LAYOUTS_MAX)
def _field_layout(begin: int, end: int, size: int, number: int) -> Struct:
    return Struct(f"{begin}x{end - begin}s{size - end}x" * number)


def _split_plain(body: bytes, start: int, end: int) -> _Columns:
    """Split records one by one. If one is no message with attribute and payload, return the result of `_split_any`."""
    positions: list[int] = []
    ids: list[int] = []
    attributes: list[bytes | None] = []
    payloads: list[bytes | None] = []
    add_position, add_id = positions.append, ids.append
    add_attribute, add_payload = attributes.append, payloads.append
    unpack = _PREFIX.unpack_from
    position = start
    while position < end:
        length, id, flag, attribute_size = unpack(body, position)
        if flag & _FLAG_LOW != FLAG_ATTRIBUTE:
            return _split_any(body, start, end)
        begins = position + _PREFIX_SIZE
        payload_begins = begins + attribute_size
        following = position + HEADER_SIZE + length
        if payload_begins > following:
            raise BadRecord(position, "an attribute is longer than its record")
        add_position(position)
        add_id(id)
        add_attribute(body[begins:payload_begins])
        add_payload(body[payload_begins:following])
        position = following
    if position != end:
        raise BadRecord(start, "the records do not tile their block")
    return _Columns(positions, ids, *_shared(attributes), payloads)


def _split_any(body: bytes, start: int, end: int) -> _Columns:
    """Split records of any kind; this is slower. A filler becomes no message. It replaces lost records, and their
    number is added to the ordinals of the messages after the filler."""
    ordinals = [0]
    rows: list[tuple[int, int, bytes | None, bytes | None]] = []
    for record in records_of(memoryview(body)[start:end]):
        position = start + record.position
        kind = record.flag & _FLAG_LOW
        if kind & ~_KNOWN:
            raise _UnreadableRecord(position, _unreadable_reason(kind))
        if kind & FLAG_FILLER:
            ordinals[-1] += record.checksum
            continue
        rows.append((position, record.id, *_split_record(body, position, record.size, kind)))
        ordinals.append(ordinals[-1] + 1)
    positions, ids, attributes, payloads = zip(*rows, strict=True) if rows else ((),) * 4
    return _Columns(positions, ids, *_shared(attributes), payloads, ordinals)


def _shared(attributes: Sequence[bytes | None]) -> tuple[LazyAttribute | None, Sequence[bytes | None]]:
    """Return the attribute of all messages, or None and the attributes if they differ."""
    first = attributes[0] if attributes else None
    if attributes and (attributes[-1] != first or attributes.count(first) < len(attributes)):
        return None, attributes
    return ATTRIBUTES[first], ()


def _rows_per_origin(columns: _Columns, size: int) -> int:
    """Return how many messages of a block share an origin. `size`: that of the block's records."""
    number = len(columns.ids)
    computed = isinstance(columns.ids, range) and isinstance(columns.positions, range) and columns.ordinals is None
    if computed and columns.attribute is not None:
        return number  # The columns are as small for many rows as for one.
    if size * ROWS_MAX <= number * ATTRIBUTE_BYTES_MAX:
        return ROWS_MAX  # Not even the records are that large.
    attributes_size = sum(len(each) for each in columns.attributes if each)
    return min(ROWS_MAX, number * ATTRIBUTE_BYTES_MAX // max(attributes_size, 1)) or 1


def _split_record(body: bytes, position: int, size: int, kind: int) -> tuple[bytes | None, bytes | None]:
    """Return attribute and payload of one record. The payload of a tombstone is None."""
    begins, end = position + HEADER_SIZE, position + size
    attribute = None
    if kind & FLAG_ATTRIBUTE:
        prefix_end = begins + 4
        if prefix_end > end:
            raise BadRecord(position, "the record ends inside the size of its attribute")
        begins = prefix_end + int.from_bytes(body[begins:prefix_end], "big")
        if begins > end:
            raise BadRecord(position, "an attribute is longer than its record")
        attribute = body[prefix_end:begins]
    if not kind & FLAG_TOMBSTONE:
        return attribute, body[begins:end]
    if begins != end:
        raise _UnreadableRecord(position, "a tombstone has a payload, which means nothing in this release.")
    return attribute, None


def _unreadable_reason(kind: int) -> str:
    if kind & FLAG_CODEC_MASK:
        return "a compressed batch, which this release cannot read; use a newer client."
    if kind & FLAG_VERSION_MASK:
        return f"a record of format version {kind >> 12}, which this release cannot read; use a newer client."
    if kind & FLAG_TRAILER:
        return "a block trailer stands inside a block."
    return f"the flag {kind:#06x} has bits that this release does not know; use a newer client."


def _offsets(positions: Sequence[int], shift: int) -> Sequence[int]:
    """Return the offset of each record. `positions`: the positions of the records in the body."""
    if isinstance(positions, range):
        return range(positions.start + shift, positions.stop + shift, positions.step)
    return [position + shift for position in positions]


def _describe_bad_records(records: bytes, offset: int) -> str:
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
