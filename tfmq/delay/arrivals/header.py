"""The note: the house's record in the arrivals that says what the records behind it are. docs/formats/arrivals.md.

    version u8 | kind u8 | shape u8 | topic size u8 | count u32 | size u32 | log id u64 | topic
    | due times | absolute | ahead | old due times | old numbers | FF x 5 or more

It is the payload of one record of producer id 2, sequence 0, whose checksum covers it. An arrival or a reschedule
says of the next `count` records, `size` bytes in all, for which log they are and when they are due; a cancel says
which messages will not be delivered, a reschedule which ones its records stand for from now on. `ahead` is by how much
broker time was ahead of the wall clock (below 0: behind it), where a sender gave a time and it was not 0.

Every word of the columns has its top bit set, and the end is FF, a few more where the record's length could be taken
for a part of a control record's header. So whatever a sender asks for, and whatever lies before and behind a note, none
of its bytes can belong to such a header: recovery behind a torn end cannot take them for one.
"""

from array import array
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from journal.errors import NewerFormat
from journal.record.format import HEADER, HEADER_SIZE, SEQUENCE_COUNT, BadRecord, Buffer, make_id, make_record
from tfmq.delay.due_time import ABSOLUTE_FLAG, DUE_MAX, NO_DUES, RELATIVE_FLAG, WORD, Dues, word_bytes, words

VERSION: Final = 1
PRODUCER_ID: Final = 2
"""The house's: ids below 16 are never leased."""

NOTE_ID: Final = make_id(PRODUCER_ID, 0)
"""Every note has the same, so that no bit of it can change unseen."""

ARRIVAL, CANCEL, RESCHEDULE = range(1, 4)

KIND_NAMES: Final = {ARRIVAL: "arrival", CANCEL: "cancel", RESCHEDULE: "reschedule"}

HEAD: Final = Struct(">BBBBIIQ")
END_BYTES: Final = 5
"""Fewer could be a length's last byte and the checksum of a control record that goes on in the next record."""

FLAG_LENGTHS: Final = ((0x40, 0x41), (0x4000, 0x4100), (0x40_0000, 0x41_0000))
"""From the first of each up to below the second: as a record's length, its first bytes are the last ones of a control
record's flag."""

SHAPE_SAME_DUE: Final = 1
"""One due time for all."""
SHAPE_ABSOLUTE: Final = 2
"""All senders gave times; without this bit and the next, all gave delays."""
SHAPE_MIXED: Final = 4
"""A byte for each message says which."""
SHAPE_AHEAD: Final = 8
"""A word says by how much broker time was ahead of the wall clock."""

RECORDS_MAX: Final = SEQUENCE_COUNT
"""Of one batch, which never passes the sequences of one id: a damaged count cannot ask for gigabytes."""

TURNS_MAX: Final = 65_536
"""Messages that one cancel or reschedule names; more come in several notes."""

TOPIC_SIZE_MAX: Final = 0xFF
TOP_BIT: Final = 1 << 63
SIGN_BIT: Final = 1 << 62
_SET_TOP: Final = bytes(byte | 0x80 for byte in range(256))
_CLEAR_TOP: Final = bytes(byte & 0x7F for byte in range(256))
_TOP_BYTES: Final = bytes(range(0x80, 0x100))


class BadNote(BadRecord):
    """A record that stands where a note should, and is none."""


class Turns(NamedTuple):
    """Delayed messages, named: arrays of u64, their effective due times (ms) and their numbers."""

    dues: "array[int]"
    numbers: "array[int]"


NO_TURNS: Final = Turns(array("Q"), array("Q"))


class Note(NamedTuple):
    """See the module. `dues`: of the records behind it, `size_bytes` in all; `old`: what is cancelled; `ahead_ms` is 0
    where it is not needed."""

    kind: int
    log_id: int
    topic: str
    dues: Dues
    size_bytes: int
    old: Turns
    ahead_ms: int = 0

    @property
    def records(self) -> int:
        """How many records belong to it."""
        return len(self.dues.times)


def arrival(log_id: int, topic: str, dues: Dues, size_bytes: int, ahead_ms: int = 0) -> Note:
    """The note before a batch of `size_bytes` for that partition's log."""
    return Note(ARRIVAL, log_id, topic, dues, size_bytes, NO_TURNS, _needed(dues, ahead_ms))


def cancel(old: Turns) -> Note:
    """What is not to be delivered."""
    return Note(CANCEL, 0, "", NO_DUES, 0, old)


def reschedule(log_id: int, topic: str, dues: Dues, size_bytes: int, old: Turns, ahead_ms: int = 0) -> Note:
    """The note before copies of pending records, one of each in `old`, in that order, that take their places."""
    return Note(RESCHEDULE, log_id, topic, dues, size_bytes, old, _needed(dues, ahead_ms))


def _needed(dues: Dues, ahead_ms: int) -> int:
    """What was added to times; delays were counted in broker time."""
    return ahead_ms if ABSOLUTE_FLAG in dues.absolute else 0


def encode_note(note: Note) -> bytes:
    """The whole record. Raises ValueError for what no reader would take, TooLarge (journal.errors)."""
    kind, log_id, topic, dues, size_bytes, old, ahead_ms = note
    count = len(old.dues) if kind == CANCEL else note.records
    name = topic.encode("ascii")
    fault = _fault(VERSION, kind, count, size_bytes)
    if fault or len(name) > TOPIC_SIZE_MAX or len(dues.absolute) != note.records:
        raise ValueError(fault or f"no note of {topic!r} has {len(dues.absolute)} flags for {count} messages")
    if {len(old.dues), len(old.numbers)} != {0 if kind == ARRIVAL else count}:
        raise ValueError(f"no {KIND_NAMES[kind]} of {count} messages has {len(old.dues)} old turns")
    shape, columns = _columns(dues)
    if ahead_ms:
        shape |= SHAPE_AHEAD
        columns.append(_topped(array("Q", (ahead_ms & DUE_MAX,))))
    head = HEAD.pack(VERSION, kind, shape, len(name), count, size_bytes, log_id)
    turns = (_topped(old.dues), _topped(old.numbers)) if len(old.dues) else ()
    payload = b"".join((head, name, *columns, *turns))
    return make_record(payload + _end(len(payload)), NOTE_ID)


def decode_note(record: Buffer) -> Note:
    """The note in a whole record. Raises BadNote, or NewerFormat where a later version wrote it."""
    payload = _payload(record)
    version, kind, shape, name_size, count, size_bytes, log_id = HEAD.unpack_from(payload)
    if version > VERSION:
        raise NewerFormat("a note of the arrivals", version, VERSION)
    if fault := _fault(version, kind, count, size_bytes):
        raise BadNote(0, fault)
    position, dues, old, ahead_ms = HEAD.size + name_size, NO_DUES, NO_TURNS, 0
    if kind == ARRIVAL and shape & ~SHAPE_ABSOLUTE == SHAPE_SAME_DUE:
        dues = _same_dues(payload, position, count, shape)
        position += WORD
    else:
        columns = _Columns(payload, position)
        if kind != CANCEL:
            dues = columns.dues(shape & ~SHAPE_AHEAD, count)
            ahead_ms = columns.signed() if shape & SHAPE_AHEAD else 0
        if kind != ARRIVAL:
            old = Turns(columns.words(count), columns.words(count))
        position = columns.position
    if payload[position:] != _end(position):
        raise BadNote(0, "its columns are not as long as it says")
    try:
        topic = payload[HEAD.size : HEAD.size + name_size].decode("ascii")
    except UnicodeDecodeError as error:
        raise BadNote(0, f"no topic is called so: {error}") from None
    return Note(kind, log_id, topic, dues, size_bytes, old, ahead_ms)


def _payload(record: Buffer) -> bytes:
    if len(record) < HEADER_SIZE + HEAD.size + END_BYTES:
        raise BadNote(0, f"{len(record)} bytes are no note")
    length, checksum, id, flag = HEADER.unpack_from(record)
    if id != NOTE_ID or flag or HEADER_SIZE + length != len(record):
        raise BadNote(0, f"a record of id {id:#x}, flag {flag:#x} and {length} bytes is no note")
    payload = bytes(record[HEADER_SIZE:])
    if crc32(payload) != checksum:
        raise BadNote(0, "the note fails its checksum")
    return payload


def _fault(version: int, kind: int, count: int, size_bytes: int) -> str:
    """Why there is no such note; "" if there may be."""
    if not version or kind not in KIND_NAMES:
        return f"version {version} has no kind {kind}"
    if not 1 <= count <= (RECORDS_MAX if kind == ARRIVAL else TURNS_MAX):
        return f"no {KIND_NAMES[kind]} is of {count} messages"
    if size_bytes < (0 if kind == CANCEL else count * HEADER_SIZE):
        return f"{count} records cannot be in {size_bytes} bytes"
    return ""


def _columns(dues: Dues) -> tuple[int, list[bytes]]:
    """(shape, due times and flags as they stand in the note)."""
    times, absolute, low, high = dues
    if not times:
        return 0, []
    same = low == high
    columns = [_topped(times[:1] if same else times)]
    shape = SHAPE_SAME_DUE if same else 0
    if RELATIVE_FLAG not in absolute:
        shape |= SHAPE_ABSOLUTE
    elif ABSOLUTE_FLAG in absolute:
        shape |= SHAPE_MIXED
        columns.append(absolute)
    return shape, columns


def _end(size: int) -> bytes:
    """What stands behind `size` bytes of payload."""
    end = size + END_BYTES
    if end >= FLAG_LENGTHS[0][0]:
        for low, high in FLAG_LENGTHS:
            if low <= end < high:
                end = high
    return b"\xff" * (end - size)


def _topped(column: "array[int]") -> bytes:
    """The words, each with its top bit set, which none of them uses."""
    data = bytearray(word_bytes(column))
    data[::WORD] = data[::WORD].translate(_SET_TOP)
    return bytes(data)


def _same_dues(payload: bytes, position: int, count: int, shape: int) -> Dues:
    """What most notes have, one due time for all and no column of flags: without the steps that columns need."""
    word = int.from_bytes(payload[position : position + WORD], "big")
    if word < TOP_BIT:
        raise BadNote(0, "the word of its due time lacks its top bit")
    due = word - TOP_BIT
    flag = ABSOLUTE_FLAG if shape & SHAPE_ABSOLUTE else RELATIVE_FLAG
    return Dues(array("Q", (due,)) * count, flag * count, due, due)


class _Columns:
    """Takes one column after the other from a payload; what is too short is BadNote."""

    def __init__(self, payload: bytes, position: int) -> None:
        self._payload = payload
        self.position = position

    def take(self, size: int) -> bytes:
        data = self._payload[self.position : self.position + size]
        if len(data) != size:
            raise BadNote(0, f"{size} bytes were to come at position {self.position}, {len(data)} are there")
        self.position += size
        return data

    def words(self, count: int) -> "array[int]":
        data = bytearray(self.take(count * WORD))
        tops = data[::WORD]
        if tops.translate(None, _TOP_BYTES):
            raise BadNote(0, "a word of its columns lacks its top bit")
        data[::WORD] = tops.translate(_CLEAR_TOP)
        return words(bytes(data))

    def signed(self) -> int:
        """A word of 63 bits that may be below 0."""
        (word,) = self.words(1)
        return word - ((word & SIGN_BIT) << 1)

    def dues(self, shape: int, count: int) -> Dues:
        same, absolute, mixed = shape & SHAPE_SAME_DUE, shape & SHAPE_ABSOLUTE, shape & SHAPE_MIXED
        if shape & ~(SHAPE_SAME_DUE | SHAPE_ABSOLUTE | SHAPE_MIXED) or (absolute and mixed) or not count:
            raise BadNote(0, f"no note of {count} messages has the shape {shape:#x}")
        times = self.words(1 if same else count)
        if mixed:
            flags = self.take(count)
            if flags.translate(None, ABSOLUTE_FLAG + RELATIVE_FLAG):
                raise BadNote(0, "a byte that says what a sender gave is neither 0 nor 1")
        if same:
            times = times * count
        low, high = (times[0], times[0]) if same else (min(times), max(times))
        return Dues(
            times, flags if mixed else (ABSOLUTE_FLAG if absolute else RELATIVE_FLAG) * count, low, high
        )
