"""Bounded msgpack: decode bytes from a peer or a file with a limit on memory and depth.

`unpack` is for peers. It raises `Malformed`, and nothing else, for every invalid input: text that is not UTF-8, lengths
beyond the end, extension types, more items than allowed, bytes after the value, and nesting deeper than
`limits.HEADER_DEPTH` (which is not checked in values of up to UNCHECKED_BYTES_MAX bytes). The number of items that a
list or map announces is compared with the number of remaining bytes before memory for the items is allocated.

`unpack_stored` is for data that a broker stored. A snapshot may have millions of items. So the number of items is
limited only by the size of the data, and msgpack's C code counts the items.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgpack

from tfmq import limits

Buffer = bytes | bytearray | memoryview

# Values up to this size are decoded without a check of their structure: even if they are nested empty arrays, they
# allocate at most about 200 kB, which costs less than the check.
UNCHECKED_BYTES_MAX = 256

_unpackb = msgpack.unpackb
_Packer = msgpack.Packer


class Malformed(ValueError):
    """The bytes are not one valid, bounded msgpack value. `str(error)` names the reason."""


def pack(value: Any) -> bytes:
    """Encode as msgpack. Raises ValueError, TypeError or OverflowError for unsupported values."""
    packed: bytes = _Packer().pack(value)
    return packed


def unpack(data: Buffer, *, text_keys: bool = True, items_max: int = limits.HEADER_ITEMS) -> Any:
    """Decode the one value in `data`, of at most `items_max` items in total. Raises `Malformed`.

    `text_keys=False` also allows integers as keys of maps.

    The depth is not checked in a value of at most UNCHECKED_BYTES_MAX bytes: so few bytes cannot nest deep enough to
    overflow the stack. Callers that pass parts of such a value on unchanged must call `check_depth`.
    """
    if len(data) > UNCHECKED_BYTES_MAX:
        check_structure(data, items_max)
    try:
        return _unpackb(data, strict_map_key=text_keys, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise Malformed(f"not readable as msgpack ({str(error).rstrip('.')})") from None


def unpack_stored(data: Buffer) -> Any:
    """Decode the one value in `data`, with arrays as tuples. Raises `Malformed`."""
    if len(data) > UNCHECKED_BYTES_MAX:
        check_counts(data)
    return _unpack_checked(data)


def unpack_stored_values(data: Buffer) -> Iterator[Any]:
    """Decode the values in `data` one after the other, with arrays as tuples. Raises `Malformed`."""
    start = 0
    for end in _ends(data):
        yield _unpack_checked(memoryview(data)[start:end])
        start = end


def _unpack_checked(data: Buffer) -> Any:
    try:
        return _unpackb(data, use_list=False, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise Malformed(f"not readable as msgpack ({str(error).rstrip('.')})") from None


def check_counts(data: Buffer) -> None:
    """Raise `Malformed` unless `data` has all items that its lists and maps announce.

    Without this check, nested lists that each announce as many items as `data` has bytes would make the decoder
    allocate memory for that many items at each level.
    """
    for _ in _ends(data):
        pass


def _ends(data: Buffer) -> Iterator[int]:
    """Yield the position where each value ends, without building the values."""
    size = len(data)
    reader = msgpack.Unpacker(read_size=size, max_buffer_size=size)
    reader.feed(data)
    end = 0
    while end < size:
        try:
            reader.skip()
        except msgpack.OutOfData:
            raise Malformed("it ends in the middle of a value") from None
        except (ValueError, RecursionError) as error:
            raise Malformed(f"not readable as msgpack ({type(error).__name__})") from None
        end = reader.tell()
        yield end


@contextmanager
def decoding(name: str) -> Iterator[None]:
    """Context that replaces `Malformed` and errors of missing or wrong fields by a ValueError that contains `name`."""
    try:
        yield
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise ValueError(f"{name} does not decode: {error}") from error


def check_depth(value: Any) -> None:
    """Raise `Malformed` for lists and maps that are nested too deep."""
    level: list[Any] = [value]  # level by level: recursion could overflow the stack
    for _ in range(limits.HEADER_DEPTH):
        level = [
            item
            for each in level
            for item in (each.values() if type(each) is dict else each)
            if type(item) is list or type(item) is dict
        ]
        if not level:
            return
    raise Malformed(f"nested deeper than {limits.HEADER_DEPTH:d} levels")


# The first number of a row of FIRST_BYTES is the value's total size in bytes (> 0), or one of these kinds.
_ARRAY, _MAP, _STRING, _REFUSED = -1, -2, -3, -4


def _first_byte_info(byte: int) -> tuple[int, int, int]:
    """Return what the first byte of a msgpack value says about the value's size: a row of the table FIRST_BYTES.

    The row is (size of the value in bytes, or its kind; number of bytes of the length field after the first byte;
    length, if the first byte contains it).
    """
    if byte <= 0x7F or byte >= 0xE0:
        return 1, 0, 0
    if byte <= 0x8F:
        return _MAP, 0, byte & 0x0F
    if byte <= 0x9F:
        return _ARRAY, 0, byte & 0x0F
    if byte <= 0xBF:
        return 1 + (byte & 0x1F), 0, 0
    return _FIRST_BYTES.get(byte, (_REFUSED, 0, 0))


_FIRST_BYTES: dict[int, tuple[int, int, int]] = {
    **dict.fromkeys((0xC0, 0xC2, 0xC3), (1, 0, 0)),
    **dict.fromkeys((0xCC, 0xD0), (2, 0, 0)),
    **dict.fromkeys((0xCD, 0xD1), (3, 0, 0)),
    **dict.fromkeys((0xCA, 0xCE, 0xD2), (5, 0, 0)),
    **dict.fromkeys((0xCB, 0xCF, 0xD3), (9, 0, 0)),
    **dict.fromkeys((0xC4, 0xD9), (_STRING, 1, 0)),
    **dict.fromkeys((0xC5, 0xDA), (_STRING, 2, 0)),
    **dict.fromkeys((0xC6, 0xDB), (_STRING, 4, 0)),
    0xDC: (_ARRAY, 2, 0),
    0xDD: (_ARRAY, 4, 0),
    0xDE: (_MAP, 2, 0),
    0xDF: (_MAP, 4, 0),
}
FIRST_BYTES: Sequence[tuple[int, int, int]] = tuple(_first_byte_info(byte) for byte in range(256))


def list_header(data: Buffer) -> tuple[int, int]:
    """Return (item count, position of the first item) of the list that `data` begins with.
    The result is (-1, 0) if `data` does not begin with a list, or ends with the header of the list."""
    kind, width, length = FIRST_BYTES[data[0]] if len(data) else (_REFUSED, 0, 0)
    if kind != _ARRAY or len(data) <= width + 1:
        return -1, 0
    return (int.from_bytes(data[1 : 1 + width], "big") if width else length), 1 + width


def check_structure(data: Buffer, items_max: int = limits.HEADER_ITEMS) -> None:
    """Raise `Malformed` unless `data` is one value within the limits. Builds no objects."""
    end = len(data)
    position = items = 0
    unread = [1]  # how many items each open list or map still needs
    while unread:
        if not unread[-1]:
            unread.pop()
            continue
        unread[-1] -= 1
        items += 1
        if position >= end:
            raise Malformed("it ends in the middle of a value")
        size, width, length = FIRST_BYTES[data[position]]
        if size > 0:
            position += size
            continue
        if size == _REFUSED:
            raise Malformed(f"a value of a type that is not used here ({data[position]:#04x})")
        if width:
            length = int.from_bytes(data[position + 1 : position + 1 + width], "big")
        position += 1 + width
        if size == _STRING:
            position += length
            continue
        length <<= size == _MAP
        if length > end - position:
            raise Malformed(f"{length} values announced where {end - position} bytes are left")
        if items + length > items_max:
            raise Malformed(f"more than {items_max:d} values")
        if len(unread) > limits.HEADER_DEPTH:
            raise Malformed(f"nested deeper than {limits.HEADER_DEPTH:d} levels")
        unread.append(length)
    if position != end:
        raise Malformed("it ends in the middle of a value" if position > end else "bytes after the value")
