"""Filtering by tag: which control blocks hold a record that a reader wants. The reader does the exact check
itself.

A block is left out only if it is proven: by its control record, its place and its checksum. Otherwise a wrong byte in
a tag or a length could hide it, and undamaged blocks after it. From one that is not proven on all is kept: the reader,
which verifies every block, finds the damage and names it.
"""

from collections.abc import Collection
from struct import Struct
from struct import error as StructError
from typing import Final
from zlib import crc32

from journal.record.block_trailer import CONTROL_SIZE, decode_control
from journal.record.format import FLAG_CONTROL, FLAG_TAG_SHIFT, HEADER_SIZE, BadRecord

LENGTH_FLAG: Final = Struct(">I12xI")


def blocks_with(
    data: bytes | bytearray, wanted: Collection[int], offset: int, log_id: int
) -> list[memoryview]:
    """The stretches of `data` (whole control blocks, the first at `offset` of the log) whose blocks hold a record with
    one of the tag hashes `wanted`.

    Neighbours come as one stretch; no stretch at all means that nothing matches.
    """
    view = memoryview(data)
    return [view[start:end] for start, end in _stretches(view, frozenset(wanted), offset, log_id)]


def _stretches(data: memoryview, wanted: frozenset[int], offset: int, log_id: int) -> list[tuple[int, int]]:
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
                elif not _proven(data, start, position, offset, log_id):
                    break
                start, matches = position, False
            elif flag >> FLAG_TAG_SHIFT in wanted:
                matches = True
    except StructError:
        pass
    if start < size:
        _extend(found, start, size)
    return found


def _proven(data: memoryview, start: int, end: int, offset: int, log_id: int) -> bool:
    """Whether a whole block reaches from `start` to `end`, with its control record."""
    at = end - CONTROL_SIZE
    try:
        control = decode_control(data, at, log_id)
    except BadRecord:
        return False
    whole = control.size == at - start and control.offset == offset + start
    return whole and crc32(data[start:at]) == control.crc


def _extend(found: list[tuple[int, int]], start: int, end: int) -> None:
    """Adds [start, end), joined to the last stretch where they touch."""
    if found and found[-1][1] == start:
        start = found.pop()[0]
    found.append((start, end))
