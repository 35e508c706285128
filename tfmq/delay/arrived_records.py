"""Records of the arrivals, as firing wants them: by their offsets, each proven.

A block that was not looked at before is read whole, and proven by its checksum. Of a proven one
single records are read, neighbours together, and proven by their own checksums.
"""

import logging
from collections.abc import Sequence
from typing import Final, TypeAlias
from zlib import crc32

from journal.errors import Corrupt, NotARecord
from journal.log.log import Log
from journal.log.reader import Bytes
from journal.record.format import HEADER, HEADER_SIZE, LENGTH
from tfmq.delay.proven import Proven

logger = logging.getLogger("tfmq.delay")

PROOFS_MAX: Final = 32
"""More blocks are not proven in one call that must not wait: that is some two milliseconds' work, for a worker."""

GAP_BYTES: Final = 4096
GAP_BYTES_SLOW: Final = 16 << 10
"""One read takes records up to this far apart: to copy what lies between costs less than another call, also where that
would wait for the disk."""

HINT_MIN: Final = 64
HINT_MAX: Final = 4096
"""Read from the last record's beginning on, whose size is not known before: as much as the largest had in the call
before, within these; what is larger costs a second read."""

NO_LIMIT: Final = 1 << 62

Found: TypeAlias = list[bytes | None]


class ArrivedRecords:
    """Records below the log's forced mark. One thread at a time; several may share what is `proven`."""

    def __init__(self, log: Log, proven: Proven | None = None) -> None:
        self._log = log
        self._proven = Proven() if proven is None else proven
        self._start = 0
        self._data = b""
        """The block that was proven last."""
        self._found: Found = []
        self._left = 0
        """Bytes that are still wanted."""
        self._gap = GAP_BYTES
        self._hint = HINT_MIN
        self._largest = 0

    def read(self, offsets: Sequence[int], bytes_max: int = NO_LIMIT) -> Found:
        """The whole records that begin at these offsets; None for a damaged one, which the server's log names.

        Fewer where `bytes_max` is passed: the one with which it is comes last, and at least one comes. Fastest where
        offsets rise. Raises BelowStart (given up), BeyondEnd (not forced, or no such offset), NotARecord, OSError,
        Closed.
        """
        found = self._read(offsets, bytes_max, False)
        assert found is not None, "a read that may wait answers"
        return found

    def read_cached(self, offsets: Sequence[int], bytes_max: int = NO_LIMIT) -> Found | None:
        """As `read`; None where that would wait for the disk, take long, or must name damage."""
        return self._read(offsets, bytes_max, True)

    def _read(self, offsets: Sequence[int], bytes_max: int, cached: bool) -> Found | None:
        found: Found = []
        self._found, self._left, self._largest = found, max(1, bytes_max), 0
        self._gap = GAP_BYTES if cached else GAP_BYTES_SLOW
        index, count, proofs, end_of = 0, len(offsets), 0, self._proven.end_of
        with self._log.unproven(cached=cached) as unproven:
            while index < count and self._left > 0:
                offset, before = offsets[index], index
                if 0 <= offset - self._start < len(self._data):
                    index = self._cut(offsets, index)
                elif end := end_of(offset):
                    index = self._cut_unproven(offsets, index, end, unproven)
                if index > before:
                    continue
                proofs += 1
                if cached and proofs > PROOFS_MAX:
                    return None
                if not self._prove(offset, cached):
                    if cached:
                        return None
                    found.append(None)
                    index += 1
        if self._largest:
            self._hint = min(max(self._largest, HINT_MIN), HINT_MAX)
        return found

    def _prove(self, offset: int, cached: bool) -> bool:
        """Reads the block that holds `offset`; False if that would wait for the disk, or the block is damaged."""
        try:
            block = self._log.block_of_record(offset, cached=cached)
        except Corrupt as error:
            if not cached:
                logger.error("a delayed message cannot be read: %s", error)
            return False
        if block is None:
            return False
        self._start, self._data = block.offset, bytes(block.data)
        self._proven.add(block.offset, block.offset + len(block.data))
        return True

    def _cut(self, offsets: Sequence[int], index: int) -> int:
        """Those from `index` on that lie in the block in memory; the index behind them."""
        start, data, left, length = self._start, self._data, self._left, LENGTH.unpack_from
        size, count = len(data), len(offsets)
        while index < count and 0 <= (at := offsets[index] - start) < size and left > 0:
            end = at + HEADER_SIZE
            if end <= size:
                end += length(data, at)[0]
            if end > size:
                raise NotARecord(offsets[index])
            self._found.append(data[at:end])
            left -= end - at
            index += 1
        self._left = left
        return index

    def _cut_unproven(self, offsets: Sequence[int], index: int, end: int, unproven: Bytes) -> int:
        """The record at `index`, and neighbours behind it, of a proven block that ends at `end`; the index behind them.
        The same index: its block has to be looked at."""
        first = last = offsets[index]
        behind, count, limit = index + 1, len(offsets), min(end, first + self._left)
        while behind < count and last < offsets[behind] < limit and offsets[behind] - last < self._gap:
            last = offsets[behind]
            behind += 1
        try:
            read = unproven(first, min(last + self._hint, end) - first)
            if read is None:
                return index
            data = bytes(read)
            while index < behind:
                at = offsets[index] - first
                if at + HEADER_SIZE > len(data):
                    break
                length, checksum, _, _ = HEADER.unpack_from(data, at)
                size = HEADER_SIZE + length
                record = data if size == len(data) else data[at : at + size]
                if len(record) < size:
                    more = unproven(first + at, size) if size <= end - first - at else None
                    if more is None or len(more) < size:
                        break
                    record = bytes(more)
                if crc32(record[HEADER_SIZE:]) != checksum:
                    break
                self._found.append(record)
                self._left -= size
                if size > self._largest:
                    self._largest = size
                index += 1
        except Corrupt:
            pass  # known damage, which the look at the block names
        return index
