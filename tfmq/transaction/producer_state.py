"""Producer sequences and transaction numbers, to detect repeated requests, repeated batches and missing batches."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple

from tfmq.errors import BadRequest, SequenceGap, UnknownProducer, UnknownTransaction
from tfmq.transaction.states import State

LeaseTime = Callable[[int], int | None]
"""lease_time(producer id): latest wall clock time (ms) at which this id was leased; None if it never was."""

NO_NUMBER: Final = -1

NOT_STAMPED: Final = 0
"""`seen_ms` after a batch, because the entry of a batch has no time. The next operation in the journal sets it."""

NUMBER_EXPIRED = (
    "Transaction {number} of this producer id has ended and later ones have begun: its outcome is no longer stored"
    " by number. Query it by its name, if it has one."
)
PARTIAL_DUPLICATE = (
    "Some of the sequences {first}..{last} are in the journal and the rest is not, or they belong to another"
    " transaction. Resend batches unchanged."
)


class RequestOutcome(NamedTuple):
    """The transaction that a request began. `state`: "prepared", "committed", "rolled_back"; "" without a record."""

    epoch: int
    state: State | Literal[""]


@dataclass(slots=True, eq=False)
class ProducerState:
    """State of one producer id. The snapshot has the fields in the same order.

    `sequence_epoch`: epoch of the id's latest transaction with messages; `first_sequence`: sequence of the first
    message in it. `last_epoch`: epoch of the id's latest transaction with a record; `last_number`: number of its begin
    request; `last_state`: its state. `seen_ms`: time of the id's last journal entry, or NOT_STAMPED.
    """

    next_sequence: int = 0
    first_sequence: int = 0
    sequence_epoch: int = 0
    last_number: int = NO_NUMBER
    last_epoch: int = 0
    last_state: State | Literal[""] = ""
    seen_ms: int = 0


_FIELDS: Final = tuple(each.name for each in fields(ProducerState))


class Gap(NamedTuple):
    """Messages of a producer id that are missing in the journal before a batch.

    `is_inside`: whether the batch before the gap is of the same transaction, so that the missing ones are, too. Else
    any of them may be of earlier transactions.
    """

    messages: int
    is_inside: bool


class ProducerStates:
    """State of all producer ids that send in transactions, the longest idle first, rebuilt from the journal.

    A client uses one producer id for each of its concurrent transactions. The sequences of an id are contiguous over
    all partitions, and its transaction numbers increase. Idle ids expire. Above `producers_max` ids, the longest idle
    ones expire. An unknown id up to `expired_id` may have expired, so it is not accepted as new. Batches that are
    queued for the journal are *staged*: the checks count them as if they were written.
    """

    def __init__(self, *, producers_max: int, idle_ms: int, lease_time: LeaseTime) -> None:
        self._producers_max = producers_max
        self._idle_ms = idle_ms
        self._lease_time = lease_time
        self.clear()

    def clear(self) -> None:
        self.expired_id = 0
        self.entries_lost = False
        """Whether a journal repair has ever removed entries, so that the state of any producer id may be incomplete."""
        self._producers: OrderedDict[int, ProducerState] = OrderedDict()
        self._staged: dict[int, tuple[int, int, int]] = {}
        """Producer id with queued batches -> (epoch, first sequence in this transaction, next sequence)."""
        self._begun: dict[int, tuple[int, int]] = {}
        """Producer id -> (number, epoch) of its latest transaction that has begun and has no record yet."""
        self._unstamped: set[int] = set()
        """The producer ids whose `seen_ms` is NOT_STAMPED."""

    def __len__(self) -> int:
        return len(self._producers)

    @property
    def highest_id(self) -> int:
        """The highest producer id of all journal entries so far; 0 if there is none."""
        return max((self.expired_id, *self._producers))

    # Checks

    def find_request(self, producer_id: int, number: int, now_ms: int) -> RequestOutcome | None:
        """Return the transaction that the request `number` (TRANSACT, BEGIN) of an id began; None for a new request.

        Raises UnknownTransaction for a number below the last one; UnknownProducer for an expired or never leased id.
        """
        begun = self._begun.get(producer_id)
        producer = self._producers.get(producer_id)
        if begun is not None and begun[0] == number:
            return RequestOutcome(begun[1], "")
        if producer is not None and producer.last_number == number:
            return RequestOutcome(producer.last_epoch, producer.last_state)
        if producer is None and begun is None and producer_id not in self._staged:
            self._require_new(producer_id, now_ms)
        last = max(begun[0] if begun else NO_NUMBER, producer.last_number if producer else NO_NUMBER)
        if number < last:
            raise UnknownTransaction(NUMBER_EXPIRED.format(number=number))
        return None

    def is_duplicate(self, producer_id: int, epoch: int, sequence: int, count: int, now_ms: int) -> bool:
        """Return whether this batch is already in the transaction or queued; False if the batch is the next one.

        Raises SequenceGap if earlier batches are missing, UnknownProducer if the producer id may have expired, and
        BadRequest if only a part of the batch is new, or if the batch was sent in another transaction.
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
        """Return the next expected sequence; 0 for a new producer id. Call `find_request` first, to check the id."""
        known = self._sequences(producer_id)
        return known[2] if known is not None else 0

    def _sequences(self, producer_id: int) -> tuple[int, int, int] | None:
        """Return (epoch, first sequence, next sequence) as if queued batches were written; None for an unknown id."""
        staged = self._staged.get(producer_id)
        if staged is not None:
            return staged
        producer = self._producers.get(producer_id)
        if producer is None:
            return None
        return producer.sequence_epoch, producer.first_sequence, producer.next_sequence

    def _require_new(self, producer_id: int, now_ms: int) -> None:
        """Raise UnknownProducer if the id may have expired: it is up to `expired_id` or leased over `idle_ms` ago."""
        leased = self._lease_time(producer_id)
        if producer_id <= self.expired_id or leased is None or leased + self._idle_ms < now_ms:
            raise UnknownProducer(producer_id=producer_id)

    # Transactions and batches that are not in the journal yet

    def add_begun(self, producer_id: int, number: int, epoch: int) -> None:
        self._begun[producer_id] = (number, epoch)

    def discard_begun(self, producer_id: int, number: int) -> None:
        begun = self._begun.get(producer_id)
        if begun is not None and begun[0] == number:
            del self._begun[producer_id]

    def stage_batch(self, producer_id: int, epoch: int, sequence: int, count: int) -> None:
        begin_epoch, begin, _ = self._sequences(producer_id) or (0, 0, 0)
        if begin_epoch != epoch:
            begin = sequence
        self._staged[producer_id] = (epoch, begin, sequence + count)

    def discard_staged(self) -> None:
        self._staged.clear()

    # Replay of journal entries

    def apply_batch(self, producer_id: int, epoch: int, sequence: int, count: int) -> Gap:
        """Apply a batch of the journal; return how many messages of the producer are missing just before this batch."""
        producer = self._most_recent(producer_id, NOT_STAMPED)
        self._unstamped.add(producer_id)
        gap = Gap(max(0, sequence - producer.next_sequence), producer.sequence_epoch == epoch)
        if not gap.is_inside:
            producer.sequence_epoch, producer.first_sequence = epoch, sequence
        producer.next_sequence = sequence + count
        staged = self._staged.get(producer_id)
        if staged is not None and staged[2] == producer.next_sequence:
            del self._staged[producer_id]
        return gap

    def apply_outcome(self, producer_id: int, number: int, epoch: int, state: State, time_ms: int) -> None:
        """Apply a record: the transaction that the request `number` has begun is now in `state`."""
        producer = self._most_recent(producer_id, time_ms)
        self._unstamped.discard(producer_id)
        if number >= producer.last_number:
            producer.last_number, producer.last_epoch, producer.last_state = number, epoch, state
        self.discard_begun(producer_id, number)

    def expire(self, now_ms: int) -> None:
        """Replace NOT_STAMPED by `now_ms` in each `seen_ms`, and remove producer ids that were idle for `idle_ms`."""
        producers = self._producers
        for producer_id in self._unstamped:
            producers[producer_id].seen_ms = now_ms
        self._unstamped.clear()
        while producers and next(iter(producers.values())).seen_ms + self._idle_ms < now_ms:
            self._remove_idlest()

    def _most_recent(self, producer_id: int, time_ms: int) -> ProducerState:
        """Return the state of a producer id, create it if there is none, and make the id the most recently used one."""
        producer = self._producers.get(producer_id)
        if producer is None:
            producer = self._producers[producer_id] = ProducerState()
            if len(self._producers) > self._producers_max:
                self._remove_idlest()
        else:
            self._producers.move_to_end(producer_id)
        producer.seen_ms = time_ms
        return producer

    def _remove_idlest(self) -> None:
        producer_id, _ = self._producers.popitem(last=False)
        self._unstamped.discard(producer_id)
        self.expired_id = max(self.expired_id, producer_id)

    # Snapshots

    def dump(self) -> tuple[Any, ...]:
        """Return the state of all producer ids as plain values, without staged batches and begun transactions."""
        values_of = attrgetter(*_FIELDS)
        rows = [(id, *values_of(state)) for id, state in self._producers.items()]
        return (self.expired_id, rows, self.entries_lost)

    def load(self, fields: Sequence[Any]) -> None:
        self.clear()
        self.expired_id, rows = fields[:2]
        self.entries_lost = bool(fields[2]) if len(fields) > 2 else True
        for id, *row in rows:
            producer = self._producers[id] = ProducerState()
            for name, value in zip(_FIELDS, row[: len(_FIELDS)], strict=True):
                setattr(producer, name, value)
            producer.last_state = State(producer.last_state) if producer.last_state else ""
            if producer.seen_ms == NOT_STAMPED:
                self._unstamped.add(id)
