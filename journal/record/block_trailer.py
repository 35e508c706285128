"""The control record: it closes a block of records, in the same write, and vouches for every byte of it.

A record of exactly 100 bytes: flag 0x40, the id of its log, a body of 80 bytes whose checksum is the
header's. It says how many bytes and ordinals it covers, their CRC-32, and at which offset they begin, so that
a block copied or moved to another place does not pass. docs/formats/record.md has the table.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from journal.record.format import FLAG_CONTROL, HEADER, HEADER_SIZE, BadRecord, Buffer, Incomplete

CONTROL_BODY: Final = Struct(">HHIIIQIIQQQQQQ")
CONTROL_SIZE: Final = HEADER_SIZE + CONTROL_BODY.size
CONTROL_VERSION: Final = 1
CONTROL_MARK: Final = Struct(">QI")
"""Id and flag, as they stand side by side in a control record's header: what a search looks for."""
CONTROL_MARK_POSITION: Final = 8

BIT_MORE_FOLLOWS: Final = 1

SOURCE_PLAIN: Final = 0
SOURCE_TRANSACTION: Final = 1
SOURCE_DELAY: Final = 2
SOURCE_SCHEDULE: Final = 3
SOURCE_SUCCESSION: Final = 4
"""No records: `source_id` is the producer id that is closed, `source_high` its successor, `source_low` its
last sequence + 1 (0: it never sent)."""

_BODY_SIZE: Final = CONTROL_BODY.size
_LENGTH: Final = _BODY_SIZE.to_bytes(4, "big")
_LAST: Final = FLAG_CONTROL.to_bytes(1, "big")
_LAST_POSITION: Final = CONTROL_MARK.size - 1
_RARE_SHIFT: Final = 10
"""Rare is less than once in 1024 bytes: then one call for each costs less than the slow search."""
CONTROL_RECORD: Final = Struct(">IIQIHHIIIQIIQQQQQQ")
"""Header and body in one: the fields of HEADER, then those of CONTROL_BODY."""


class BadControl(BadRecord):
    """No valid control record stands at `position`. `version` is set if a newer library wrote it."""

    def __init__(self, position: int, reason: str, version: int | None = None) -> None:
        super().__init__(position, reason)
        self.version = version

    def at(self, position: int) -> BadControl:
        return BadControl(position, self.reason, self.version)


class Control(NamedTuple):
    """What a control record says of its block.

    `records` counts ordinals, `size` bytes (all since the end of the control record before), `crc` is their
    CRC-32, `append_time` in ms, `forced` the offset up to which the log was on the disk, `offset` where the
    block begins. An append is the blocks up to the first whose `more_follows` is false.
    """

    records: int
    size: int
    crc: int
    append_time: int
    epoch: int
    forced: int
    first_ordinal: int
    offset: int
    more_follows: bool = False
    source_kind: int = SOURCE_PLAIN
    source_id: int = 0
    source_high: int = 0
    source_low: int = 0

    @property
    def end(self) -> int:
        """The offset of the control record itself, which is where its block's records end."""
        return self.offset + self.size

    @property
    def next(self) -> int:
        """The offset behind the control record: where the next block begins."""
        return self.offset + self.size + CONTROL_SIZE

    @property
    def next_ordinal(self) -> int:
        """The first ordinal of the next block."""
        return self.first_ordinal + self.records


def control_mark(log_id: int) -> bytes:
    """The 12 bytes that every control record of this log has at CONTROL_MARK_POSITION."""
    return CONTROL_MARK.pack(log_id, FLAG_CONTROL)


def holds_control_header(data: bytes | bytearray, log_id: int) -> bool:
    """True if a control record of this log may begin in `data`, at whatever place: its header stands there.

    The mark is mostly zeros, over which a search for it is slow: so its last byte is looked for as long as that is
    rare, as it is in zeros and in text.
    """
    mark = control_mark(log_id)
    start, patience = CONTROL_MARK_POSITION, len(data) >> _RARE_SHIFT
    while True:
        if patience >= 0:
            place = data.find(_LAST, start + _LAST_POSITION) - _LAST_POSITION
            patience -= 1
        else:
            place = data.find(mark, start)
        if place < 0:
            return False
        if data.startswith(mark, place) and data.startswith(_LENGTH, place - CONTROL_MARK_POSITION):
            return True
        start = place + 1


def encode_control(log_id: int, control: Control) -> bytes:
    """The CONTROL_SIZE bytes of `control`, header included."""
    body = CONTROL_BODY.pack(
        CONTROL_VERSION,
        BIT_MORE_FOLLOWS if control.more_follows else 0,
        control.records,
        control.size,
        control.crc,
        control.append_time,
        control.epoch,
        control.source_kind,
        control.forced,
        control.first_ordinal,
        control.offset,
        control.source_id,
        control.source_high,
        control.source_low,
    )
    return HEADER.pack(_BODY_SIZE, crc32(body), log_id, FLAG_CONTROL) + body


def decode_control(data: Buffer, position: int, log_id: int) -> Control:
    """The control record at `position`. Raises BadControl, or Incomplete if the bytes end inside it."""
    end = position + CONTROL_SIZE
    if end > len(data):
        raise Incomplete(position, "the bytes end inside a control record")
    (length, checksum, id, flag, version, bits, records, size, crc, append_time, epoch, kind, forced, ordinal,
     offset, source_id, source_high, source_low) = CONTROL_RECORD.unpack_from(data, position)  # fmt: skip
    if flag != FLAG_CONTROL or length != _BODY_SIZE:
        raise BadControl(position, f"flag {flag:#x} and length {length} are no control record's")
    if id != log_id:
        raise BadControl(position, f"the control record is of log {id:#x}, this is log {log_id:#x}")
    if crc32(memoryview(data)[position + HEADER_SIZE : end]) != checksum:
        raise BadControl(position, "the control record fails its own checksum")
    if version != CONTROL_VERSION:
        raise BadControl(position, f"control version {version}, {CONTROL_VERSION} is known", version)
    if bits & ~BIT_MORE_FOLLOWS:
        raise BadControl(position, f"unknown control bits {bits:#x}")
    return Control(
        records,
        size,
        crc,
        append_time,
        epoch,
        forced,
        ordinal,
        offset,
        bits == BIT_MORE_FOLLOWS,
        kind,
        source_id,
        source_high,
        source_low,
    )
