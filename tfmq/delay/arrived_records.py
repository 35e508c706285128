"""Single records of the arrivals, as firing wants them: by their offsets, each proven by the checksum of its block."""

import logging
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Final
from zlib import crc32

from journal.errors import Corrupt, NotARecord
from journal.header import HEADER, HEADER_SIZE, LENGTH
from journal.log import Log

logger = logging.getLogger("tfmq.delay")

KEPT_BYTES: Final = 8 << 20
BLOCKS_KEPT: Final = 4096
"""Verified blocks that stay in memory: neighbours fire together, and so do messages of batches that came together."""

BLOCK_BYTES_KEPT: Final = 64 << 10
"""A larger one is one record, which nobody asks for twice."""

PROVEN_MAX: Final = 65_536
"""Blocks of which it is remembered that they were proven, a megabyte of numbers; with more, all are proven anew."""

DENSE: Final = 12
"""With so many wanted of a proven block it is read whole: that costs as much as so many single records."""

SINGLE_BYTES: Final = 1024
"""Read for a single record; what is larger costs a second read."""

NO_LIMIT: Final = 1 << 62


class ArrivedRecords:
    """Records below the log's forced mark. One thread at a time."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._starts: list[int] = []
        """Where the blocks in memory begin, sorted."""
        self._blocks: dict[int, bytes] = {}
        self._age: deque[int] = deque()
        self._kept_bytes = 0
        self._start = 0
        self._data = b""
        """The block that was used last."""
        self._proven_starts: list[int] = []
        self._proven_ends: list[int] = []
        """Blocks that were proven once, sorted: of these, single records are read without the rest. What lies in the
        file does not change any more, and a record's own checksum is looked at each time."""

    def read(self, offsets: Sequence[int], bytes_max: int = NO_LIMIT) -> list[bytes | None]:
        """The whole records that begin at these offsets; None for a damaged one, which the server's log names.

        Fewer where `bytes_max` is passed: the one with which it is comes last, and at least one comes. Fastest where
        offsets rise. Raises BelowStart (given up), BeyondEnd (not forced, or no such offset), NotARecord, OSError,
        Closed.
        """
        found = self._read(offsets, bytes_max, False)
        assert found is not None, "a read that may wait answers"
        return found

    def read_cached(self, offsets: Sequence[int], bytes_max: int = NO_LIMIT) -> list[bytes | None] | None:
        """As `read`; None where that would wait for the disk, or must name damage."""
        return self._read(offsets, bytes_max, True)

    def _read(self, offsets: Sequence[int], bytes_max: int, cached: bool) -> list[bytes | None] | None:
        found: list[bytes | None] = []
        start, data, length = self._start, self._data, LENGTH.unpack_from
        size = len(data)
        for index, offset in enumerate(offsets):
            at = offset - start
            if not 0 <= at < size:
                record = self._single(offsets, index, cached)
                if record is not None:
                    found.append(record)
                    bytes_max -= len(record)
                    if bytes_max <= 0:
                        break
                    continue
                if not self._use(offset, cached):
                    if cached:
                        return None
                    found.append(None)
                    continue
                start, data = self._start, self._data
                at, size = offset - start, len(data)
            end = at + HEADER_SIZE
            if end <= size:
                end += length(data, at)[0]
            if end > size:
                raise NotARecord(offset)
            found.append(data[at:end])
            bytes_max -= end - at
            if bytes_max <= 0:
                break
        return found

    def _single(self, offsets: Sequence[int], index: int, cached: bool) -> bytes | None:
        """The record alone, if its block was proven, is not in memory, and not much else is wanted of it."""
        offset = offsets[index]
        number = bisect_right(self._proven_starts, offset) - 1
        if number < 0 or offset >= self._proven_ends[number]:
            return None
        end = self._proven_ends[number]
        if index + DENSE <= len(offsets) and offset <= offsets[index + DENSE - 1] < end:
            return None
        kept = bisect_right(self._starts, offset) - 1
        if kept >= 0 and offset < self._starts[kept] + len(self._blocks[self._starts[kept]]):
            return None
        data = self._log.unproven(offset, min(SINGLE_BYTES, end - offset), cached=cached)
        if data is None or len(data) < HEADER_SIZE:
            return None
        length, checksum, _, _ = HEADER.unpack_from(data)
        size = HEADER_SIZE + length
        if size > end - offset:
            return None
        if size > len(data):
            data = self._log.unproven(offset, size, cached=cached)
            if data is None or len(data) < size:
                return None
        record = bytes(data[:size])
        return record if crc32(record[HEADER_SIZE:]) == checksum else None

    def _prove(self, start: int, end: int) -> None:
        """The block has been proven."""
        number = bisect_left(self._proven_starts, start)
        if number < len(self._proven_starts) and self._proven_starts[number] == start:
            return
        if len(self._proven_starts) >= PROVEN_MAX:
            self._proven_starts.clear()
            self._proven_ends.clear()
            number = 0
        self._proven_starts.insert(number, start)
        self._proven_ends.insert(number, end)

    def _use(self, offset: int, cached: bool) -> bool:
        """Makes the block that holds `offset` the current one; False if that would wait for the disk, or is damaged."""
        number = bisect_right(self._starts, offset) - 1
        if number >= 0:
            start = self._starts[number]
            if offset < start + len(self._blocks[start]):
                self._start, self._data = start, self._blocks[start]
                return True
        try:
            block = self._log.block_of_record(offset, cached=cached)
        except Corrupt as error:
            if not cached:
                logger.error("a delayed message cannot be read: %s", error)
            return False
        if block is None:
            return False
        self._start, self._data = block.offset, bytes(block.data)
        self._prove(block.offset, block.offset + len(block.data))
        if len(self._data) <= BLOCK_BYTES_KEPT:
            self._keep()
        return True

    def _keep(self) -> None:
        self._starts.insert(bisect_right(self._starts, self._start), self._start)
        self._blocks[self._start] = self._data
        self._age.append(self._start)
        self._kept_bytes += len(self._data)
        while len(self._age) > BLOCKS_KEPT or self._kept_bytes > KEPT_BYTES:
            oldest = self._age.popleft()
            self._kept_bytes -= len(self._blocks.pop(oldest))
            del self._starts[bisect_left(self._starts, oldest)]
