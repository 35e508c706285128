"""Finds single delayed messages on the disk: in the arrivals by their numbers, or in the buckets of their dues."""

from journal.errors import BelowStart, BeyondEnd, Corrupt, NotARecord
from journal.log.log import Log
from journal.record.format import HEADER
from tfmq.delay.arrived_records import ArrivedRecords
from tfmq.delay.buckets import Buckets
from tfmq.delay.columns import POSITION_MASK, SLOT_SHIFT
from tfmq.delay.note import NOTE_ID
from tfmq.delay.requests import Turn


class Finder:
    """See the module. Any thread."""

    def __init__(self, log: Log, buckets: Buckets) -> None:
        self._log, self._buckets = log, buckets

    def record(self, key: int, turn: Turn) -> bytes | None:
        """The message's whole record; None: it is nowhere. Its arrival is forced. Raises OSError, Closed."""
        try:
            offset, ordinal = self._log.offset_of_ordinal(turn.number)
            if ordinal == turn.number and offset >= self._buckets.spilled_offset:
                (record,) = ArrivedRecords(self._log).read([offset])
                if record is not None:
                    return None if HEADER.unpack_from(record)[2] == NOTE_ID else record
        except (BelowStart, BeyondEnd, NotARecord, Corrupt):
            pass  # given up, or damaged: a bucket may have it
        return self._in_bucket(key, turn)

    def _in_bucket(self, key: int, turn: Turn) -> bytes | None:
        for row in self._buckets.rows(turn, turn.due + 1, (key,)):
            if row.number != turn.number:
                return None
            slot, position = row.locator >> SLOT_SHIFT, row.locator & POSITION_MASK
            return self._buckets.read(slot, [position], [row.number])[0]
        return None
