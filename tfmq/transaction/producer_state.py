"""Producer sequences and transaction numbers, to detect duplicates and gaps in transactions."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Final, NamedTuple

from tfmq.errors import BadRequest, SequenceGap, UnknownProducer, UnknownTransaction

LeaseTime = Callable[[int], int | None]
"""lease_time(producer id): the latest wall clock time (ms) of its lease; None if never leased."""

NO_NUMBER: Final = -1

NOT_STAMPED: Final = 0
"""`seen_ms` of a producer whose last journal entry is a batch, because batches have no time.

The next operation in the journal, of any transaction, sets it.
"""

NUMBER_EXPIRED = (
    "Transaction {number} of this producer id has ended and later ones have begun: its outcome is no longer stored"
    " by number. Query it by its name, if it has one."
)
PARTIAL_DUPLICATE = (
    "Some of the sequences {first}..{last} are in the journal and the rest is not, or they belong to another"
    " transaction. Resend batches unchanged."
)


class RequestOutcome(NamedTuple):
    """What a BEGIN or TRANSACT request led to: the epoch of its transaction, and its state.

    `state`: "prepared", "committed", "rolled_back", or "" without a record.
    """

    epoch: int
    state: str


@dataclass(slots=True, eq=False)
class ProducerState:
    """State of one producer id.

    `next_sequence` is the next expected sequence; `first_sequence` is the first sequence of the transaction
    `sequence_epoch`, the latest to have messages. `last_number`, `last_epoch` and `last_state` describe the
    latest transaction that has a record: number of the begin request, epoch, state. `seen_ms`: wall clock time of the
    last journal entry, or NOT_STAMPED. The order of the fields is that of the snapshot.
    """

    next_sequence: int = 0
    first_sequence: int = 0
    sequence_epoch: int = 0
    last_number: int = NO_NUMBER
    last_epoch: int = 0
    last_state: str = ""
    seen_ms: int = 0


_FIELDS: Final = tuple(each.name for each in fields(ProducerState))


class ProducerStates:
    """State of all producers that send into transactions, longest idle first.

    A client uses a separate producer id per concurrent transaction; its sequences are contiguous over all
    partitions and its transaction numbers increase. The state is rebuilt by replaying the journal, so it
    survives restarts. Idle producers expire, as do the longest idle above the limit. `expired_id` is the highest
    expired id: an unknown id at or below it may have sent before, so it is not accepted as new.

    Batches queued for the journal are *staged*: they count for later checks and are removed if the write
    fails.
    """

    def __init__(self, *, producers_max: int, idle_ms: int, lease_time: LeaseTime) -> None:
        self._producers_max = producers_max
        self._idle_ms = idle_ms
        self._lease_time = lease_time
        self.clear()

    def clear(self) -> None:
        """Reset to the state before the first journal entry."""
        self.expired_id = 0
        self.entries_lost = False
        """Whether a journal repair has ever removed records: state that is missing here may be lost."""
        self._producers: OrderedDict[int, ProducerState] = OrderedDict()
        self._staged: dict[int, tuple[int, int, int]] = {}
        """Producer id -> (epoch, its first sequence, next sequence), if it has queued batches."""
        self._begun: dict[int, tuple[int, int]] = {}
        """Producer id -> (number, epoch) of the latest transaction without a record."""
        self._unstamped: set[int] = set()
        """Producer ids whose `seen_ms` is NOT_STAMPED."""

    def __len__(self) -> int:
        return len(self._producers)

    @property
    def highest_id(self) -> int:
        """The highest producer id found in the journal; 0 if there is none."""
        return max((self.expired_id, *self._producers))

    # Checks

    def find_request(self, producer_id: int, number: int, now_ms: int) -> RequestOutcome | None:
        """Return what request `number` (TRANSACT, BEGIN) of the producer led to; None if it is new.

        Raises: UnknownTransaction for a number below the last, whose outcome is not kept; UnknownProducer
        for an expired or never leased id.
        """
        begun = self._begun.get(producer_id)
        stream = self._producers.get(producer_id)
        if begun is not None and begun[0] == number:
            return RequestOutcome(begun[1], "")
        if stream is not None and stream.last_number == number:
            return RequestOutcome(stream.last_epoch, stream.last_state)
        if stream is None and begun is None and producer_id not in self._staged:
            self._require_new(producer_id, now_ms)
        last = max(begun[0] if begun else NO_NUMBER, stream.last_number if stream else NO_NUMBER)
        if number < last:
            raise UnknownTransaction(NUMBER_EXPIRED.format(number=number))
        return None

    def is_duplicate(self, producer_id: int, epoch: int, sequence: int, count: int, now_ms: int) -> bool:
        """Return whether this batch is already in the transaction or queued.

        False if it is the next one.

        Raises: SequenceGap, UnknownProducer, BadRequest (only part of the batch is a duplicate, or it
        belongs to another transaction).
        """
        known = self._sequences(producer_id)
        if known is None:
            self._require_new(producer_id, now_ms)
            if sequence:
                raise UnknownProducer(producer_id=producer_id)
            return False
        begin_epoch, begin, expected = known
        if sequence == expected:
            return False
        if sequence > expected:
            raise SequenceGap(expected=expected, found=sequence)
        if begin_epoch == epoch and begin <= sequence and sequence + count <= expected:
            return True
        raise BadRequest(PARTIAL_DUPLICATE.format(first=sequence, last=sequence + count - 1))

    def next_sequence(self, producer_id: int) -> int:
        """Return the next expected sequence; 0 for a new producer.

        `find_request` must have accepted the id.
        """
        known = self._sequences(producer_id)
        return known[2] if known is not None else 0

    def _sequences(self, producer_id: int) -> tuple[int, int, int] | None:
        """Return the row of `_staged`, or the same of what is in the journal; None for a new producer."""
        staged = self._staged.get(producer_id)
        if staged is not None:
            return staged
        stream = self._producers.get(producer_id)
        if stream is None:
            return None
        return stream.sequence_epoch, stream.first_sequence, stream.next_sequence

    def _require_new(self, producer_id: int, now_ms: int) -> None:
        """Reject an id without state unless its lease is so recent that its state cannot have expired.

        Raises: UnknownProducer.
        """
        leased = self._lease_time(producer_id)
        if producer_id <= self.expired_id or leased is None or leased + self._idle_ms < now_ms:
            raise UnknownProducer(producer_id=producer_id)

    # Transactions and batches that are not in the journal yet

    def add_begun(self, producer_id: int, number: int, epoch: int) -> None:
        """Record that request `number` began `epoch`; no journal entry exists yet."""
        self._begun[producer_id] = (number, epoch)

    def discard_begun(self, producer_id: int, number: int) -> None:
        """Discard the begun transaction of that number; it ended without a record."""
        begun = self._begun.get(producer_id)
        if begun is not None and begun[0] == number:
            del self._begun[producer_id]

    def stage_batch(self, producer_id: int, epoch: int, sequence: int, count: int) -> None:
        """Count a batch as queued; `is_duplicate` must have accepted it."""
        begin_epoch, begin, _ = self._sequences(producer_id) or (0, 0, 0)
        if begin_epoch != epoch:
            begin = sequence
        self._staged[producer_id] = (epoch, begin, sequence + count)

    def discard_staged(self) -> None:
        """Discard all staged batches: the write failed."""
        self._staged.clear()

    # Replay of journal entries

    def apply_batch(self, producer_id: int, epoch: int, sequence: int, count: int) -> int:
        """Apply a batch in the journal; return how many messages of the producer before it are missing.

        Some may be missing only after a repair of the journal.
        """
        stream = self._most_recent(producer_id, NOT_STAMPED)
        self._unstamped.add(producer_id)
        missing = sequence - stream.next_sequence
        if stream.sequence_epoch != epoch:
            stream.sequence_epoch, stream.first_sequence = epoch, sequence
        stream.next_sequence = sequence + count
        staged = self._staged.get(producer_id)
        if staged is not None and staged[2] == stream.next_sequence:
            del self._staged[producer_id]
        return max(0, missing)

    def apply_outcome(self, producer_id: int, number: int, epoch: int, state: str, time_ms: int) -> None:
        """Apply a record by which the transaction that request `number` began is in `state` now."""
        stream = self._most_recent(producer_id, time_ms)
        self._unstamped.discard(producer_id)
        if number >= stream.last_number:
            stream.last_number, stream.last_epoch, stream.last_state = number, epoch, state
        self.discard_begun(producer_id, number)

    def expire(self, now_ms: int) -> None:
        """Set `seen_ms` where it is NOT_STAMPED; remove producers that were idle for too long."""
        streams = self._producers
        for producer_id in self._unstamped:
            streams[producer_id].seen_ms = now_ms
        self._unstamped.clear()
        while streams and next(iter(streams.values())).seen_ms + self._idle_ms < now_ms:
            self._remove_idlest()

    def _most_recent(self, producer_id: int, time_ms: int) -> ProducerState:
        """Return the producer's state, created if missing, and move it to the most recent end."""
        stream = self._producers.get(producer_id)
        if stream is None:
            stream = self._producers[producer_id] = ProducerState()
            if len(self._producers) > self._producers_max:
                self._remove_idlest()
        else:
            self._producers.move_to_end(producer_id)
        stream.seen_ms = time_ms
        return stream

    def _remove_idlest(self) -> None:
        producer_id, _ = self._producers.popitem(last=False)
        self._unstamped.discard(producer_id)
        self.expired_id = max(self.expired_id, producer_id)

    # Snapshots

    def dump(self) -> tuple[Any, ...]:
        """Return the state of all producers as plain values, without what is not in the journal yet."""
        values_of = attrgetter(*_FIELDS)
        rows = [(id, *values_of(state)) for id, state in self._producers.items()]
        return (self.expired_id, rows, self.entries_lost)

    def load(self, fields: Sequence[Any]) -> None:
        """Restore the result of `dump`.

        Raises: ValueError or TypeError for malformed fields.
        """
        self.clear()
        self.expired_id, rows = fields[:2]
        self.entries_lost = bool(fields[2]) if len(fields) > 2 else True
        for id, *row in rows:
            stream = self._producers[id] = ProducerState()
            for name, value in zip(_FIELDS, row[: len(_FIELDS)], strict=True):
                setattr(stream, name, value)
            if stream.seen_ms == NOT_STAMPED:
                self._unstamped.add(id)
