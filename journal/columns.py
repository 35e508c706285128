"""Headers of records of one size, compared a byte column at a time.

Where every record of a run has the same size, the n-th byte of all headers is one strided slice, and a rule
for a thousand records is a few comparisons of a thousand bytes. The slices are taken of `bytes` or
`bytearray`: striding a memoryview is slower by a factor of nine. Each function covers the records of
`data[start:end]`, which the caller knows to be a whole number of `size` bytes each, at least HEADER_SIZE.
"""

from __future__ import annotations

from typing import Final

from journal.header import FLAG_ATTRIBUTE, FLAG_TOMBSTONE, HEADER_SIZE

COLUMNS_COUNT_MIN: Final = 32
"""Below this count a loop over the headers is as fast as a dozen slices."""

_LENGTH: Final = range(0, 4)
_PRODUCER: Final = range(8, 13)
_SEQUENCE: Final = (13, 14, 15)
_FLAG_HIGH: Final = 18
FLAG_LOW_POSITION: Final = 19
_EVERY_BYTE: Final = bytes(range(256))
_FLAG_LOW_ALLOWED: Final = bytes((0, FLAG_ATTRIBUTE, FLAG_TOMBSTONE, FLAG_ATTRIBUTE | FLAG_TOMBSTONE))

Bytes = bytes | bytearray


def same_length(data: Bytes, start: int, end: int, size: int) -> bool:
    """True if each header names a length that makes a record of `size` bytes."""
    count = (end - start) // size
    length = (size - HEADER_SIZE).to_bytes(4, "big")
    return all(data[start + n : end : size] == length[n : n + 1] * count for n in _LENGTH)


def leading(data: Bytes, start: int, end: int, size: int) -> int:
    """How many records from `start` on have this size and the first one's low byte of the flag, as long as
    their headers begin before `end`."""
    count = (end - start + size - 1) // size
    for n in (*_LENGTH, FLAG_LOW_POSITION):
        column = data[start + n : end : size]
        first = column[:1]
        if column != first * len(column):
            count = min(count, len(column) - len(column.lstrip(first)))
        count = min(count, len(column))
    return count


def contiguous(data: Bytes, start: int, end: int, size: int, first_id: int) -> bool:
    """True if the ids count up by one from `first_id`; the caller has checked that sequences do not
    overflow."""
    count = (end - start) // size
    id = first_id.to_bytes(8, "big")
    for n in _PRODUCER:
        if data[start + n : end : size] != id[n - 8 : n - 7] * count:
            return False
    sequence = int.from_bytes(id[5:], "big")
    return all(
        data[start + n : end : size] == _counting(sequence, count, shift)
        for n, shift in zip(_SEQUENCE, (16, 8, 0), strict=True)
    )


def client_flags(data: Bytes, start: int, end: int, size: int) -> bool:
    """True if every flag has only bits that a producer may set."""
    count = (end - start) // size
    if data[start + _FLAG_HIGH : end : size] != bytes(count):
        return False
    return not data[start + FLAG_LOW_POSITION : end : size].translate(None, _FLAG_LOW_ALLOWED)


def plain_flags(data: Bytes, start: int, end: int, size: int) -> bool:
    """True if no record is a filler or a control record."""
    return not data[start + FLAG_LOW_POSITION : end : size].translate(None, _EVERY_BYTE[:0x20])


def _counting(first: int, count: int, shift: int) -> bytes:
    """One byte column (`shift` bits up) of the numbers from `first` on."""
    if not shift:
        low = first & 0xFF
        return (_EVERY_BYTE * ((low + count) // 256 + 1))[low : low + count]
    column = []
    number, end = first, first + count
    while number < end:
        turn = min(end, ((number >> shift) + 1) << shift)
        column.append(_EVERY_BYTE[number >> shift & 0xFF :][:1] * (turn - number))
        number = turn
    return b"".join(column)
