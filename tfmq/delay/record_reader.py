"""Reads the records of due messages, requested in the order of their turns, from the arrival log and buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Final

from journal.errors import BelowStart, BeyondEnd, Corrupt, NotARecord
from journal.log.log import Log
from journal.record.format import HEADER
from tfmq.apply_target import RunInWorker
from tfmq.delay.append_limits import SLICE_BYTES_MAX
from tfmq.delay.arrivals.header import HEADER_ID
from tfmq.delay.arrivals.log import ArrivalRecordReader, Records, VerifiedBlockCache, read_batches
from tfmq.delay.buckets.format import ARRIVAL_LOG_ID, BUCKET_ID_SHIFT, POSITION_MASK
from tfmq.delay.buckets.store import BucketStore
from tfmq.delay.requests import Turn
from tfmq.delay.rows import NO_ROWS, RowColumns, RowQueue


class RecordReader:
    """Reads records of messages from the arrival log and from buckets. A locator says where a record is stored.

    A read returns the requested records up to the one that reaches a limit of bytes; None stands for a damaged record.
    Call `read_cached` only in the broker thread, the other methods in any thread.
    """

    def __init__(self, log: Log, buckets: BucketStore) -> None:
        self._log, self._buckets = log, buckets
        proven = VerifiedBlockCache()
        self._cached_reader = ArrivalRecordReader(log, proven)
        self._disk_reader = ArrivalRecordReader(log, proven)
        self._lock = Lock()

    def read_cached(self, locators: Sequence[int], numbers: Sequence[int], bytes_max: int) -> Records | None:
        """Return the records up to the one that reaches `bytes_max`; None if a read would wait. Raises OSError."""
        return self._read_by_file(locators, numbers, bytes_max, True)

    def read(self, locators: Sequence[int], numbers: Sequence[int], bytes_max: int) -> Records:
        """Like `read_cached`, but wait for the disk. Raises OSError, Closed."""
        count = len(locators)
        plain = list(locators)
        order = sorted(range(count), key=plain.__getitem__)
        rising = [plain[row] for row in order]
        if rising == plain:
            return self._read_from_disk(rising, numbers, bytes_max)
        found = self._read_from_disk(rising, [numbers[row] for row in order], bytes_max)
        by_row = dict(zip(order, found, strict=False))
        end = count if len(found) == count else next(row for row in range(count) if row not in by_row)
        if end:
            return [by_row[row] for row in range(end)]
        # The records of other rows have reached the limit of bytes before the first row was read. Read only this row.
        first = order.index(0)
        return self._read_from_disk([rising[first]], [numbers[order[first]]], bytes_max)

    def _read_from_disk(self, locators: Sequence[int], numbers: Sequence[int], bytes_max: int) -> Records:
        found = self._read_by_file(locators, numbers, bytes_max, False)
        assert found is not None, "a read that may wait returns records"
        return found

    def find(self, key: int, turn: Turn) -> bytes | None:
        """Return the record of a message; None if no file has it, or it is damaged. Raises OSError, Closed."""
        try:
            offset, ordinal = self._log.offset_of_ordinal(turn.number)
            if ordinal == turn.number and offset >= self._buckets.spilled_offset:
                (record,) = ArrivalRecordReader(self._log).read([offset])
                if record is not None:
                    return None if HEADER.unpack_from(record)[2] == HEADER_ID else record
        except (BelowStart, BeyondEnd, NotARecord, Corrupt):
            pass  # the record is truncated or damaged in the log, but may be in a bucket
        row = next(self._buckets.rows(turn, turn.due + 1, key.__eq__), None)
        if row is None or row.number != turn.number:
            return None
        slot, position = row.locator >> BUCKET_ID_SHIFT, row.locator & POSITION_MASK
        return self._buckets.read(slot, [position], [row.number])[0]

    def is_for(self, key: int, turn: Turn) -> bool:
        """Return whether the pending message `turn` is one for the log `key`. Raises OSError, Closed."""
        while True:
            spilled = self._buckets.spilled_offset  # read first: a spill may end meanwhile
            row = next(self._buckets.rows(turn, turn.due + 1, key.__eq__), None)
            if row is not None and row.number == turn.number:
                return True
            try:
                batches = read_batches(self._log, spilled, self._log.forced_offset, on_damage=lambda damage: None)
                for each in batches:
                    index = turn.number - each.first_number
                    if 0 <= index < len(each.dues):
                        return each.log_id == key and each.dues[index] == turn.due
                return False
            except BelowStart:
                if spilled == self._buckets.spilled_offset:
                    return False

    def _read_by_file(
        self, locators: Sequence[int], numbers: Sequence[int], bytes_max: int, cached: bool
    ) -> Records | None:
        count = len(locators)
        if count and min(locators) >> BUCKET_ID_SHIFT == max(locators) >> BUCKET_ID_SHIFT:
            return self._from_file(locators[0] >> BUCKET_ID_SHIFT, locators, numbers, bytes_max, cached)
        rows_of: dict[int, list[int]] = {}
        for row, locator in enumerate(locators):
            rows_of.setdefault(locator >> BUCKET_ID_SHIFT, []).append(row)
        by_row: Records = [None] * count
        end = count
        for slot, rows in rows_of.items():
            records = self._from_file(
                slot, [locators[row] for row in rows], [numbers[row] for row in rows], bytes_max, cached
            )
            if records is None:
                return None
            for row, record in zip(rows, records, strict=False):
                by_row[row] = record
            if len(records) < len(rows):
                end = min(end, rows[len(records)])
        return by_row[:end]

    def _from_file(
        self, slot: int, locators: Sequence[int], numbers: Sequence[int], bytes_max: int, cached: bool
    ) -> Records | None:
        if slot == ARRIVAL_LOG_ID:
            if cached:
                return self._cached_reader.read_cached(locators, bytes_max)
            with self._lock:
                return self._disk_reader.read(locators, bytes_max)
        positions = [locator & POSITION_MASK for locator in locators]
        if cached:
            return self._buckets.read_cached(slot, positions, numbers, bytes_max)
        return self._buckets.read(slot, positions, numbers, bytes_max)


READ_AHEAD_ROWS_MIN: Final = 8192
"""A target queue reads records ahead only if it has at least this many rows."""
READ_AHEAD_BYTES: Final = 8 << 20
"""Maximum bytes to read ahead: about 16 MiB of memory, with the rows of the queue."""

FetchCallback = Callable[[Records | None, BaseException | None], None]


class ReadAhead:
    """Records of the next rows of a target queue, read ahead if it has READ_AHEAD_ROWS_MIN rows. Broker thread only.

    Rows are in the order of turns, which is not the order of their records in a file. But among the records of ten
    thousand rows, many are neighbours in the file, and one read of the file covers several neighbours.
    """

    def __init__(self, record_reader: RecordReader, run: RunInWorker) -> None:
        self._record_reader, self._run = record_reader, run
        self._generation = 0
        self.clear()

    def clear(self) -> None:
        self._read_rows = NO_ROWS
        self._records: Records = []
        """The records that were read ahead. They belong to the first rows of `_read_rows`."""
        self._used = 0
        self._generation += 1

    def fetch(self, wanted: RowColumns, rows: RowQueue, record_bytes: int, done: FetchCallback) -> None:
        """Pass the records of the first rows of `wanted`, at least one record, to `done`.

        `done` is called at once if the records need no read from the disk, otherwise after this read in a worker.
        `rows`: all rows of the queue, which begin with `wanted`. `record_bytes`: the average size of a record.
        """
        ahead = self._buffered(wanted)
        if ahead is not None:
            done(ahead, None)
            return
        self.clear()
        generation = self._generation
        read = partial(self._record_reader.read, wanted.locators, wanted.numbers, SLICE_BYTES_MAX)
        if len(rows) < READ_AHEAD_ROWS_MIN:
            try:
                cached = self._record_reader.read_cached(wanted.locators, wanted.numbers, SLICE_BYTES_MAX)
            except Exception as error:
                done(None, error)
                return
            if cached is not None:
                done(cached, None)
            else:
                self._run(read, done)
            return
        whole = rows.head(max(len(wanted.numbers), READ_AHEAD_BYTES // record_bytes))

        def was_read(found: Records | None, error: BaseException | None) -> None:
            if found is None:
                # A record after those of `wanted` may have caused the error. So read again, but only those of `wanted`.
                self._run(read, done)
            elif generation != self._generation:
                done(found[: len(wanted.numbers)], None)
            else:
                self._read_rows, self._records = whole, found
                done(self._buffered(wanted), None)

        self._run(partial(self._record_reader.read, whole.locators, whole.numbers, READ_AHEAD_BYTES), was_read)

    def _buffered(self, wanted: RowColumns) -> Records | None:
        """Return the records of the first rows of `wanted` if these were read ahead, else None."""
        numbers, count = self._read_rows.numbers, len(self._records)
        try:
            start = numbers.index(wanted.numbers[0], self._used, count)
        except ValueError:
            return None
        end = min(start + len(wanted.numbers), count)
        head = wanted.head(end - start)
        if head.numbers != numbers[start:end] or head.locators != self._read_rows.locators[start:end]:
            return None
        self._used = start
        return self._records[start:end]
