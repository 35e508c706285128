"""Single records of the arrivals, as firing wants them: by their offsets, each proven by the checksum of its block."""

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Final

from journal.errors import Corrupt, NotARecord
from journal.header import HEADER_SIZE, LENGTH
from journal.log import Log

logger = logging.getLogger("tfmq.delay")

BLOCKS_KEPT: Final = 64
"""Verified blocks that stay in memory, 4 MiB of them: neighbours fire together."""

BLOCK_BYTES_KEPT: Final = 64 << 10
"""A larger one is one record, which nobody asks for twice."""


class ArrivedRecords:
    """Records below the log's forced mark. One thread at a time."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._starts: list[int] = []
        """Where the blocks in memory begin, sorted."""
        self._blocks: dict[int, bytes] = {}
        self._age: deque[int] = deque()
        self._start = 0
        self._data = b""
        """The block that was used last."""

    def read(self, offsets: Sequence[int]) -> list[bytes | None]:
        """The whole records that begin at these offsets; None for a damaged one, which the server's log names.

        Fastest where neighbours stand together. Raises BelowStart (given up), BeyondEnd (not forced, or no such
        offset), NotARecord, OSError, Closed.
        """
        found: list[bytes | None] = []
        for offset in offsets:
            try:
                found.append(self._record(offset, False))
            except Corrupt as error:
                logger.error("a delayed message cannot be read: %s", error)
                found.append(None)
        return found

    def read_cached(self, offsets: Sequence[int]) -> list[bytes | None] | None:
        """As `read`; None where that would wait for the disk, or must name damage."""
        found: list[bytes | None] = []
        for offset in offsets:
            try:
                record = self._record(offset, True)
            except Corrupt:
                return None
            if record is None:
                return None
            found.append(record)
        return found

    def _record(self, offset: int, cached: bool) -> bytes | None:
        at = offset - self._start
        if not 0 <= at < len(self._data):
            if not self._use(offset, cached):
                return None
            at = offset - self._start
        end = at + HEADER_SIZE
        if end <= len(self._data):
            end += LENGTH.unpack_from(self._data, at)[0]
        if end > len(self._data):
            raise NotARecord(offset)
        return self._data[at:end]

    def _use(self, offset: int, cached: bool) -> bool:
        """Makes the block that holds `offset` the current one; False if that would wait for the disk."""
        number = bisect_right(self._starts, offset) - 1
        if number >= 0:
            start = self._starts[number]
            if offset < start + len(self._blocks[start]):
                self._start, self._data = start, self._blocks[start]
                return True
        block = self._log.block_of_record(offset, cached=cached)
        if block is None:
            return False
        self._start, self._data = block.offset, bytes(block.data)
        if len(self._data) <= BLOCK_BYTES_KEPT:
            self._keep()
        return True

    def _keep(self) -> None:
        if len(self._age) >= BLOCKS_KEPT:
            oldest = self._age.popleft()
            del self._blocks[oldest]
            self._starts.remove(oldest)
        self._starts.insert(bisect_right(self._starts, self._start), self._start)
        self._blocks[self._start] = self._data
        self._age.append(self._start)
