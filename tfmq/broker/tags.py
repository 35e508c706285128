"""Filtering by tag: which control blocks hold a record that a reader wants. The reader does the exact check
itself.

Only headers are looked at. A block in which the lengths do not add up is kept, so that the reader, who
verifies every block, finds the damage and names it.
"""

from collections.abc import Collection
from struct import Struct
from struct import error as StructError
from typing import Final

from journal.header import FLAG_CONTROL, FLAG_TAG_SHIFT, HEADER_SIZE

LENGTH_FLAG: Final = Struct(">I12xI")


def blocks_with(data: bytes | bytearray, wanted: Collection[int]) -> list[memoryview]:
    """The stretches of `data` (whole control blocks) whose blocks hold a record with one of the tag hashes
    `wanted`.

    Neighbours come as one stretch; no stretch at all means that nothing matches.
    """
    view = memoryview(data)
    return [view[start:end] for start, end in _stretches(data, frozenset(wanted))]


def _stretches(data: bytes | bytearray, wanted: frozenset[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    unpack, size = LENGTH_FLAG.unpack_from, len(data)
    position = start = 0
    matches = False
    try:
        while position < size:
            length, flag = unpack(data, position)
            position += HEADER_SIZE + length
            if flag & FLAG_CONTROL:
                if matches:
                    _extend(found, start, position)
                start, matches = position, False
            elif flag >> FLAG_TAG_SHIFT in wanted:
                matches = True
    except StructError:
        matches = True
    if start < size:
        _extend(found, start, size)
    return found


def _extend(found: list[tuple[int, int]], start: int, end: int) -> None:
    """Adds [start, end), joined to the last stretch where they touch."""
    if found and found[-1][1] == start:
        start = found.pop()[0]
    found.append((start, end))
