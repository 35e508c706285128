"""The control records of a stretch of blocks, as columns, and whether they say what is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from zlib import crc32

import numpy as np

from journal.record.block_trailer import BIT_MORE_FOLLOWS, CONTROL_SIZE, CONTROL_VERSION
from journal.record.format import HEADER_SIZE, Buffer
from tfmq.arrow.chain import Positions
from tfmq.arrow.fields import Array

CONTROL: Final = np.dtype(
    [
        ("length", ">u4"),
        ("checksum", ">u4"),
        ("id", ">u8"),
        ("flag", ">u4"),
        ("version", ">u2"),
        ("bits", ">u2"),
        ("records", ">u4"),
        ("size", ">u4"),
        ("crc", ">u4"),
        ("append_time", ">u8"),
        ("epoch", ">u4"),
        ("source_kind", ">u4"),
        ("forced", ">u8"),
        ("first_ordinal", ">u8"),
        ("offset", ">u8"),
        ("source_id", ">u8"),
        ("source_high", ">u8"),
        ("source_low", ">u8"),
    ]
)
"""journal.record.block_trailer.CONTROL_RECORD, field by field."""


class Controls:
    """The control records at `positions` of `data`, whose first byte is a block's start.

    `starts`: where their blocks begin.
    """

    def __init__(self, data: Buffer, positions: Positions) -> None:
        self.data = memoryview(data)
        self.positions = positions
        self.starts = np.empty_like(positions)
        self.starts[0] = 0
        self.starts[1:] = positions[:-1] + CONTROL_SIZE
        every: Any = np.ndarray((len(data) - CONTROL_SIZE + 1,), CONTROL, data, 0, (1,))
        self._fields = every[positions]

    def column(self, name: str) -> Array:
        """One field of all, as int64 (as uint64 where it may be larger)."""
        column: Array = self._fields[name]
        return column.astype(np.uint64 if column.dtype.itemsize == 8 else np.int64)

    def hold(self, offset: int, log_id: int, ordinals: Sequence[int] | Array) -> bool:
        """True if every one is right by its own checksum, and says what is there: the log, the place (`offset` of
        the first byte), the size and the ordinals (how many each block has)."""
        sizes = self.positions - self.starts
        records = self.column("records")
        first = self.column("first_ordinal").astype(np.int64)
        return bool(
            (self.column("length") == CONTROL.itemsize - HEADER_SIZE).all()
            and (self.column("id") == np.uint64(log_id)).all()
            and (self.column("version") == CONTROL_VERSION).all()
            and (self.column("bits") <= BIT_MORE_FOLLOWS).all()
            and (self.column("size") == sizes).all()
            and (self.column("offset") == (self.starts + offset).astype(np.uint64)).all()
            and (records == ordinals).all()
            and (first[1:] == first[:-1] + records[:-1]).all()
            and self._own_checksums_hold()
        )

    def cover(self) -> bool:
        """True if the CRC-32 of every block is what its control record says."""
        view = self.data
        pairs = zip(self.starts.tolist(), self.positions.tolist(), strict=True)
        return bool([crc32(view[start:end]) for start, end in pairs] == self.column("crc").tolist())

    def _own_checksums_hold(self) -> bool:
        view = self.data
        bodies = [position + HEADER_SIZE for position in self.positions.tolist()]
        size = CONTROL_SIZE - HEADER_SIZE
        return bool([crc32(view[at : at + size]) for at in bodies] == self.column("checksum").tolist())
