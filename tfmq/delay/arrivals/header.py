"""The arrival header: a record in the arrival log that describes the records after it.

Specified in docs/formats/arrivals.md.

    version u8 | kind u8 | shape u8 | topic size u8 | count u32 | size u32 | log id u64 | topic
    | due times | absolute | ahead | old due times | old numbers | FF x 5 or more

The header is the payload of a record with producer id 2 and sequence 0, and the checksum of this record covers it. In
an arrival or a reschedule, the header has the target log and the due times of the next `count` records, which have
`size` bytes in all. A cancel names messages that will not be delivered. A reschedule also names the messages that its
records replace.

`shape` has bits that say which columns follow and how the due times are encoded. `absolute` has one byte for each
message: 1 if its sender set an absolute time, 0 if a delay. The header has this column only if the messages differ.
`ahead` says by how many ms broker time was ahead of the wall clock (negative: late). The header has this word only if
the value is not 0 and a sender set an absolute time.

Each word of the columns has its top bit set, and the header ends with FF bytes. It has more FF bytes where the length
of the record could be mistaken for a part of a block trailer. So whatever values senders choose, recovery cannot
mistake bytes of an arrival header for a block trailer after a crash has interrupted an append.
"""

from array import array
from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple

from journal.crc32 import crc32
from journal.errors import NewerFormat
from journal.record.format import HEADER, HEADER_SIZE, SEQUENCE_COUNT, BadRecord, Buffer, make_id, make_record
from tfmq.delay.due_time import (
    ABSOLUTE_FLAG,
    DUE_MAX,
    NO_DUE_TIMES,
    RELATIVE_FLAG,
    WORD,
    DueTimes,
    decode_words,
    encode_words,
)

VERSION: Final = 1
PRODUCER_ID: Final = 2
"""The producer id of all headers. Ids below 16 are reserved for the broker and never leased."""

HEADER_ID: Final = make_id(PRODUCER_ID, 0)
"""The id of the records of all headers. It is always the same, so that a changed bit in the id is detected."""

ARRIVAL, CANCEL, RESCHEDULE = range(1, 4)

KIND_NAMES: Final = {ARRIVAL: "arrival", CANCEL: "cancel", RESCHEDULE: "reschedule"}

FIXED_PART: Final = Struct(">BBBBIIQ")
PADDING_BYTES_MIN: Final = 5
"""Minimum of FF bytes at the end of a header: fewer could be mistaken for parts of a block trailer."""

FLAG_LIKE_LENGTHS: Final = ((0x40, 0x41), (0x4000, 0x4100), (0x40_0000, 0x41_0000))
"""Ranges (first, end) of record lengths that look like the end of a block trailer's flag. Padding avoids them."""

SHAPE_SAME_DUE: Final = 1
"""Bit of the shape: all messages have the same due time, which is encoded once."""
SHAPE_ABSOLUTE: Final = 2
"""Bit of the shape: all due times are absolute. If neither this bit nor SHAPE_MIXED is set, all are delays."""
SHAPE_MIXED: Final = 4
"""Bit of the shape: a column has one byte for each message, which says whether its due time is absolute."""
SHAPE_AHEAD: Final = 8
"""Bit of the shape: the header has the word `ahead`."""

RECORDS_MAX: Final = SEQUENCE_COUNT
"""Maximum number of records after one header. They are one batch, and one producer id has this many sequences.

Because of this maximum, a damaged count in a header cannot cause an allocation of gigabytes.
"""

CHANGED_MESSAGES_MAX: Final = 65_536
"""Maximum of messages that one header cancels or reschedules; more need several headers."""

TOPIC_SIZE_MAX: Final = 0xFF
TOP_BIT: Final = 1 << 63
SIGN_BIT: Final = 1 << 62
_SET_TOP: Final = bytes(byte | 0x80 for byte in range(256))
_CLEAR_TOP: Final = bytes(byte & 0x7F for byte in range(256))
_TOP_BYTES: Final = bytes(range(0x80, 0x100))


class BadArrivalHeader(BadRecord):
    """A record that should be an arrival header is not a valid one."""


class TurnColumns(NamedTuple):
    """Turns of delayed messages, as two arrays of u64: their effective due times (ms) and their numbers."""

    dues: "array[int]"
    numbers: "array[int]"


NO_TURN_COLUMNS: Final = TurnColumns(array("Q"), array("Q"))


class ArrivalHeader(NamedTuple):
    """A decoded arrival header.

    `kind`: ARRIVAL, CANCEL or RESCHEDULE. `dues` and `size_bytes`: the due times of the records after the header, and
    their bytes in all. `old_turns`: the messages that are cancelled or rescheduled. `ahead_ms`: by how many ms broker
    time was ahead of the wall clock; 0 if no time is absolute.
    """

    kind: int
    log_id: int
    topic: str
    dues: DueTimes
    size_bytes: int
    old_turns: TurnColumns
    ahead_ms: int = 0

    @property
    def record_count(self) -> int:
        return len(self.dues.times)


def arrival_header(log_id: int, topic: str, dues: DueTimes, size_bytes: int, ahead_ms: int = 0) -> ArrivalHeader:
    # Only absolute due times depend on the difference between broker time and the wall clock.
    ahead_ms = ahead_ms if ABSOLUTE_FLAG in dues.absolute else 0
    return ArrivalHeader(ARRIVAL, log_id, topic, dues, size_bytes, NO_TURN_COLUMNS, ahead_ms)


def cancel_header(old: TurnColumns) -> ArrivalHeader:
    return ArrivalHeader(CANCEL, 0, "", NO_DUE_TIMES, 0, old)


def reschedule_header(
    log_id: int, topic: str, dues: DueTimes, size_bytes: int, old: TurnColumns, ahead_ms: int = 0
) -> ArrivalHeader:
    """Return the header of a reschedule. The n-th record after it replaces the message with the n-th turn of `old`."""
    header = arrival_header(log_id, topic, dues, size_bytes, ahead_ms)
    return header._replace(kind=RESCHEDULE, old_turns=old)


def encode_header(header: ArrivalHeader) -> bytes:
    """Encode a header as a whole record. Raises ValueError for an invalid header, TooLarge for one that is too long."""
    kind, log_id, topic, dues, size_bytes, old, ahead_ms = header
    count = len(old.dues) if kind == CANCEL else header.record_count
    name = topic.encode("ascii")
    fault = _why_invalid(VERSION, kind, count, size_bytes)
    if fault or len(name) > TOPIC_SIZE_MAX or len(dues.absolute) != header.record_count:
        raise ValueError(fault or f"a header of {topic!r} has {len(dues.absolute)} flags for {count} messages")
    if {len(old.dues), len(old.numbers)} != {0 if kind == ARRIVAL else count}:
        raise ValueError(f"a {KIND_NAMES[kind]} of {count} messages has {len(old.dues)} old turns")
    shape, columns = _encode_due_times(dues)
    if ahead_ms:
        shape |= SHAPE_AHEAD
        columns.append(_with_top_bits(array("Q", (ahead_ms & DUE_MAX,))))
    head = FIXED_PART.pack(VERSION, kind, shape, len(name), count, size_bytes, log_id)
    turns = (_with_top_bits(old.dues), _with_top_bits(old.numbers)) if len(old.dues) else ()
    payload = b"".join((head, name, *columns, *turns))
    return make_record(payload + _padding(len(payload)), HEADER_ID)


def decode_header(record: Buffer) -> ArrivalHeader:
    """Decode the header in a whole record. Raises BadArrivalHeader; NewerFormat if a later version wrote it."""
    payload = _checked_payload(record)
    version, kind, shape, name_size, count, size_bytes, log_id = FIXED_PART.unpack_from(payload)
    if version > VERSION:
        raise NewerFormat("an arrival header", version, VERSION)
    if fault := _why_invalid(version, kind, count, size_bytes):
        raise BadArrivalHeader(0, fault)
    position, dues, old, ahead_ms = FIXED_PART.size + name_size, NO_DUE_TIMES, NO_TURN_COLUMNS, 0
    if kind == ARRIVAL and shape & ~SHAPE_ABSOLUTE == SHAPE_SAME_DUE:
        dues = _decode_same_due_time(payload, position, count, shape)
        position += WORD
    else:
        columns = _ColumnReader(payload, position)
        if kind != CANCEL:
            dues = columns.read_due_times(shape & ~SHAPE_AHEAD, count)
            ahead_ms = columns.read_signed() if shape & SHAPE_AHEAD else 0
        if kind != ARRIVAL:
            old = TurnColumns(columns.read_words(count), columns.read_words(count))
        position = columns.position
    if payload[position:] != _padding(position):
        raise BadArrivalHeader(0, "the lengths of its columns do not match its size")
    try:
        topic = payload[FIXED_PART.size : FIXED_PART.size + name_size].decode("ascii")
    except UnicodeDecodeError as error:
        raise BadArrivalHeader(0, f"invalid topic name: {error}") from None
    return ArrivalHeader(kind, log_id, topic, dues, size_bytes, old, ahead_ms)


def _checked_payload(record: Buffer) -> bytes:
    if len(record) < HEADER_SIZE + FIXED_PART.size + PADDING_BYTES_MIN:
        raise BadArrivalHeader(0, f"an arrival header cannot have {len(record)} bytes")
    length, checksum, id, flag = HEADER.unpack_from(record)
    if id != HEADER_ID or flag or HEADER_SIZE + length != len(record):
        raise BadArrivalHeader(0, f"a record of id {id:#x}, flag {flag:#x} and {length} bytes is not an arrival header")
    payload = bytes(record[HEADER_SIZE:])
    if crc32(payload) != checksum:
        raise BadArrivalHeader(0, "the arrival header fails its checksum")
    return payload


def _why_invalid(version: int, kind: int, count: int, size_bytes: int) -> str:
    if not version or kind not in KIND_NAMES:
        return f"version {version} has no kind {kind}"
    if not 1 <= count <= (RECORDS_MAX if kind == ARRIVAL else CHANGED_MESSAGES_MAX):
        return f"{KIND_NAMES[kind]} of {count} messages: invalid count"
    if size_bytes < (0 if kind == CANCEL else count * HEADER_SIZE):
        return f"{count} records cannot be in {size_bytes} bytes"
    return ""


def _encode_due_times(dues: DueTimes) -> tuple[int, list[bytes]]:
    """Return the bits of the shape, and the columns: due times, and flags if there are delays and absolute times."""
    times, absolute, low, high = dues
    if not times:
        return 0, []
    same = low == high
    columns = [_with_top_bits(times[:1] if same else times)]
    shape = SHAPE_SAME_DUE if same else 0
    if RELATIVE_FLAG not in absolute:
        shape |= SHAPE_ABSOLUTE
    elif ABSOLUTE_FLAG in absolute:
        shape |= SHAPE_MIXED
        columns.append(absolute)
    return shape, columns


def _padding(size: int) -> bytes:
    end = size + PADDING_BYTES_MIN
    if end >= FLAG_LIKE_LENGTHS[0][0]:
        for low, high in FLAG_LIKE_LENGTHS:
            if low <= end < high:
                end = high
    return b"\xff" * (end - size)


def _with_top_bits(column: "array[int]") -> bytes:
    """Encode the words, each with its top bit set; no value needs that bit."""
    data = bytearray(encode_words(column))
    data[::WORD] = data[::WORD].translate(_SET_TOP)
    return bytes(data)


def _decode_same_due_time(payload: bytes, position: int, count: int, shape: int) -> DueTimes:
    """Decode the due time that all messages have. In this most common case, a `_ColumnReader` would be slower."""
    word = int.from_bytes(payload[position : position + WORD], "big")
    if word < TOP_BIT:
        raise BadArrivalHeader(0, "the top bit of its due time is not set")
    due = word - TOP_BIT
    flag = ABSOLUTE_FLAG if shape & SHAPE_ABSOLUTE else RELATIVE_FLAG
    return DueTimes(array("Q", (due,)) * count, flag * count, due, due)


@dataclass
class _ColumnReader:
    """Reads the columns of a payload in order. Raises BadArrivalHeader if the payload is too short."""

    payload: bytes
    position: int

    def read_bytes(self, size: int) -> bytes:
        data = self.payload[self.position : self.position + size]
        if len(data) != size:
            raise BadArrivalHeader(0, f"a column of {size} bytes at position {self.position} has only {len(data)}")
        self.position += size
        return data

    def read_words(self, count: int) -> "array[int]":
        data = bytearray(self.read_bytes(count * WORD))
        tops = data[::WORD]
        if tops.translate(None, _TOP_BYTES):
            raise BadArrivalHeader(0, "the top bit of a word in its columns is not set")
        data[::WORD] = tops.translate(_CLEAR_TOP)
        return decode_words(bytes(data))

    def read_signed(self) -> int:
        (word,) = self.read_words(1)
        return word - ((word & SIGN_BIT) << 1)

    def read_due_times(self, shape: int, count: int) -> DueTimes:
        same, absolute, mixed = shape & SHAPE_SAME_DUE, shape & SHAPE_ABSOLUTE, shape & SHAPE_MIXED
        if shape & ~(SHAPE_SAME_DUE | SHAPE_ABSOLUTE | SHAPE_MIXED) or (absolute and mixed) or not count:
            raise BadArrivalHeader(0, f"a header of {count} messages cannot have the shape {shape:#x}")
        times = self.read_words(1 if same else count)
        if mixed:
            flags = self.read_bytes(count)
            if flags.translate(None, ABSOLUTE_FLAG + RELATIVE_FLAG):
                raise BadArrivalHeader(0, "a flag for an absolute time is neither 0 nor 1")
        if same:
            times = times * count
        low, high = (times[0], times[0]) if same else (min(times), max(times))
        return DueTimes(times, flags if mixed else (ABSOLUTE_FLAG if absolute else RELATIVE_FLAG) * count, low, high)
