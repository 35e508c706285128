"""Where records begin: the chain of lengths through a stretch of control blocks, as an array of positions.

Rows of records of one size are passed by comparing columns, the others walked one by one (0.1 us each). Nothing is
proven here but that the chain ends where the bytes do.
"""

from __future__ import annotations

from struct import Struct
from struct import error as StructError
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from journal.record.batch import BLOCK_SIZE_MAX
from journal.record.format import FLAG_CONTROL, HEADER_SIZE, Buffer

Positions = npt.NDArray[np.int64]

ROW_COUNT_MIN: Final = 16
"""Below so many records of one size, walking is as fast as comparing columns."""
WALK_BYTES: Final = BLOCK_SIZE_MAX
"""Where sizes are mixed, so many bytes are walked before columns are tried again."""

_LENGTH_FLAG: Final = Struct(">I12xI")


class BrokenChain(Exception):
    """The bytes do not end where a record does."""


def record_positions(data: Buffer) -> Positions:
    """The position of every record in `data`, control records and fillers too. Raises `BrokenChain`."""
    pieces: list[Any] = []
    position, end = 0, len(data)
    count = ROW_COUNT_MIN
    try:
        while position < end:
            size, count = _row(data, position, max(2 * count, ROW_COUNT_MIN))
            stop = position + count * size
            if count:
                pieces.append(np.arange(position, stop, size, dtype=np.int64))
            walked: list[int] = []
            position = _walk(data, stop, stop if count else position + WALK_BYTES, walked)
            pieces.append(np.array(walked, dtype=np.int64))
    except StructError:
        raise BrokenChain from None
    if position != end:
        raise BrokenChain
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)


def _walk(data: Buffer, position: int, stop: int, found: list[int]) -> int:
    """Adds positions to `found` up to the first control record that ends behind `stop`; the position behind it."""
    unpack, add = _LENGTH_FLAG.unpack_from, found.append
    end = len(data)
    while position < end:
        length, flag = unpack(data, position)
        add(position)
        position += HEADER_SIZE + length
        if flag == FLAG_CONTROL and position > stop:
            break
    return position


def _row(data: Buffer, position: int, guess: int) -> tuple[int, int]:
    """(size, count) of the records from `position` on that have one size; count 0 where they are few.

    `guess`: only where there are that many, all that may follow are looked at.
    """
    length, _ = _LENGTH_FLAG.unpack_from(data, position)
    size = HEADER_SIZE + length
    most = min(len(data) - position, BLOCK_SIZE_MAX) // size
    if most < ROW_COUNT_MIN:
        return size, 0
    count = _same(data, position, size, min(most, guess))
    if guess <= count < most:
        count = _same(data, position, size, most)
    return size, count if count >= ROW_COUNT_MIN else 0


def _same(data: Buffer, position: int, size: int, most: int) -> int:
    """How many of the next `most` records have `size` bytes, as the one at `position`."""
    lengths: Any = np.ndarray((most,), np.uint32, data, position, (size,))
    same = lengths == lengths[0]
    first = int(same.argmin())
    return most if same[first] else first
