"""Decoder of fetch responses: verifies every block and creates the messages. No I/O.

The body of a response contains whole blocks. Each block is verified: its block trailer (checksum, log id, offset), the
CRC-32 over the block, and that its records fill it without gaps. The checksums of single records are used only to find
out which record of a damaged block is wrong. Fillers (zeros in place of lost records) and block trailers are not
returned. With a tag filter the broker leaves blocks out, so gaps between blocks are allowed then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, count, repeat
from struct import Struct
from struct import error as StructError
from typing import Any, Final, NamedTuple, Protocol
from zlib import crc32

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
    FLAG_ATTRIBUTE,
    FLAG_CODEC_MASK,
    FLAG_FILLER,
    FLAG_TOMBSTONE,
    FLAG_TRAILER,
    FLAG_VERSION_MASK,
    HEADER_SIZE,
    BadRecord,
    checksum_matches,
    make_log_id,
    records_of,
)
from tfmq.client.consumer.message import Codec, LazyAttribute, Origin, ReceivedMessage
from tfmq.errors import Damaged, DecodeFailed

SAME_SIZE_COUNT_MIN: Final = 4
"""Minimum number of records of one size to decode column by column; for fewer, the set-up costs more than it saves."""
_BODY_SIZE: Final = TRAILER_SIZE - HEADER_SIZE
_KEY_BEGIN: Final = HEADER_SIZE - 12
LAYOUTS_MAX: Final = 512
"""Size of the cache of struct layouts, one per record size; limited because a sender may use every size."""
BAD_RECORDS_NAMED: Final = 5
"""Maximum number of bad records that an error text names."""

_FLAG_LOW: Final = 0xFFFF
_KNOWN: Final = FLAG_ATTRIBUTE | FLAG_TOMBSTONE | FLAG_FILLER
_PREFIX: Final = Struct(">I4xQII")
_PREFIX_SIZE: Final = _PREFIX.size
_cached_layout = lru_cache(LAYOUTS_MAX)(Struct)
_new = tuple.__new__


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
    of ordinals in the block. None: the values are 0, 1, 2 …
    """

    positions: Sequence[int]
    ids: Sequence[int]
    attributes: Sequence[bytes | None]
    payloads: Sequence[bytes | None]
    ordinals: Sequence[int] | None = None

    def shared_attributes(self) -> Iterable[LazyAttribute | bytes | None]:
        """Return the attributes. If all are equal, return one shared object, which is decoded only once."""
        attributes = self.attributes
        first = attributes[0] if attributes else None
        if first is None or attributes[-1] != first or attributes.count(first) < len(attributes):
            return attributes
        return repeat(LazyAttribute(first))


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
        topic, partition = self.topic, self.partition
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
                if append_time != time or block_epoch != epoch or origin is None:
                    time, epoch = append_time, block_epoch
                    origin = Origin(self.incarnation, time, epoch, self.codec, self.failure_handler)
                ordinal = first_ordinal
                fields = (
                    body[payload_begins:at], topic, partition, block_offset, following, ordinal, id,
                    body[begins:payload_begins], origin,
                )  # fmt: skip
                messages.append(_new(ReceivedMessage, fields))
                position, block_offset = block_end, following
        except StructError:
            pass  # The end of the body is reached. If it ends inside a block, the caller's other methods report that.
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
        time, epoch = control.append_time, control.epoch
        origin = Origin(self.incarnation, time, epoch, self.codec, self.failure_handler)
        first = control.first_ordinal
        offsets, next_offsets = _offsets(columns.positions, shift, following)
        rows = zip(
            columns.payloads,
            repeat(self.topic),
            repeat(self.partition),
            offsets,
            next_offsets,
            count(first) if columns.ordinals is None else [first + each for each in columns.ordinals],
            columns.ids,
            columns.shared_attributes(),
            repeat(origin),
            strict=False,
        )
        messages: list[ReceivedMessage] = list(map(_new, repeat(ReceivedMessage), rows))
        if skip_to > control.offset:
            messages = [each for each in messages if each.offset >= skip_to]
        return DecodedBlock(messages, control.offset, following, control.next_ordinal, control.epoch)

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
    length, _, flag, attribute_size = _PREFIX.unpack_from(body, start)
    size = HEADER_SIZE + length
    number, rest = divmod(end - start, size)
    kind = flag & _FLAG_LOW
    if rest or number < SAME_SIZE_COUNT_MIN or kind not in (0, FLAG_ATTRIBUTE):
        return None
    same = (0, 1, 2, 3, 18, 19, 20, 21, 22, 23) if kind else (0, 1, 2, 3, 18, 19)
    for column in same:
        if body[start + column : end : size] != body[start + column : start + column + 1] * number:
            return None
    view = memoryview(body)[start:end]
    positions = range(start, end, size)
    if not kind:
        ids, payloads = zip(*_cached_layout(f">8xQ4x{length}s").iter_unpack(view), strict=True)
        return _Columns(positions, ids, (None,) * number, payloads)
    payload_size = length - 4 - attribute_size
    if payload_size < 0:
        raise BadRecord(start, "an attribute is longer than its record")
    layout = _cached_layout(f">8xQ8x{attribute_size}s{payload_size}s")
    ids, attributes, payloads = zip(*layout.iter_unpack(view), strict=True)
    return _Columns(positions, ids, attributes, payloads)


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
    return _Columns(positions, ids, attributes, payloads)


def _split_any(body: bytes, start: int, end: int) -> _Columns:
    """Split records of any kind; this is slower. A filler becomes no message. It replaces lost records, and their
    number is added to the ordinals of the messages after the filler."""
    columns = _Columns([], [], [], [], ordinals := [0])
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
    if not rows:
        return columns
    positions, ids, attributes, payloads = zip(*rows, strict=True)
    return _Columns(positions, ids, attributes, payloads, ordinals)


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


def _offsets(positions: Sequence[int], shift: int, following: int) -> tuple[Iterable[int], Iterable[int]]:
    """Return the offset of each record, and the offset at which the next record begins (for the last one: `following`).
    `positions`: the positions of the records in the body. A record's offset is its position plus `shift`."""
    if isinstance(positions, range):
        begin, end, size = positions.start + shift, positions.stop + shift, positions.step
        return range(begin, end, size), chain(range(begin + size, end, size), (following,))
    offsets = [position + shift for position in positions]
    return offsets, chain(offsets[1:], (following,))


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
