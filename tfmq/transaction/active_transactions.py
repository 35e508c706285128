"""Which prepared transaction has waited longest: what an operator must hear of."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from journal.clock import Clock
from tfmq.apply_target import Destination
from tfmq.errors import Busy, TransactionTooLarge
from tfmq.transaction import rejections, states
from tfmq.transaction.applier import Applier
from tfmq.transaction.apply_progress import Course, Waiting
from tfmq.transaction.check_back import Checks
from tfmq.transaction.deadlines import Deadlines
from tfmq.transaction.journal_writer import MaybeWritten, Run, Waiter, Written
from tfmq.transaction.model import Decision, Transaction
from tfmq.transaction.requests import Caller, Check, Timers
from tfmq.transaction.store import JournalTransactionStore

DEAD_MIN: Final = 1024
"""Below this many dead entries a clean-up of the heap is not worth its pass."""


class Ages:
    """Prepared transactions by the time (wall clock, ms) at which they were prepared."""

    def __init__(self) -> None:
        self._times: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._times)

    def add(self, epoch: int, prepared_ms: int) -> None:
        self._times[epoch] = prepared_ms
        heapq.heappush(self._heap, (prepared_ms, epoch))

    def remove(self, epoch: int) -> None:
        """Harmless if it is not there."""
        self._times.pop(epoch, None)
        if len(self._heap) > 2 * len(self._times) + DEAD_MIN:
            self._heap = [(time_ms, each) for each, time_ms in self._times.items()]
            heapq.heapify(self._heap)

    @property
    def oldest_ms(self) -> int | None:
        """When the one that has waited longest was prepared; None if there is none."""
        while self._heap and self._times.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


READ_ONLY_REMEMBERED: Final = 10_000
"""Empty transactions leave no record; so many of the last are remembered for a repeat."""
DROPS_REMEMBERED: Final = 10_000
"""Likewise how many messages a decision had for topics that were gone, and how many of its messages were lost."""
UNDER_WAY: Final = frozenset((states.PREPARING, states.COMMITTING, states.ROLLING_BACK))
MAY_STAY_PREPARED: Final = frozenset((states.PREPARED, states.COMMITTING, states.ROLLING_BACK))
TOPICS_ASKED: Final = 8
"""A producer that is asked about a transaction is told the first topics of it."""


class Books:
    """The books of live transactions: what has to be done beside the record when one begins, is prepared, decided,
    over.

    Sessions and timers let go, space is set aside or freed, offsets are locked or free again, whoever waited for a step
    goes on. Commands decide; here it is only written down, the same way for each of them.

    `expired(epoch)`: the time of an open transaction is over; `outlived(epoch)`: that of a prepared
    member of a commit group.
    """

    def __init__(
        self,
        store: JournalTransactionStore,
        destination: Destination,
        *,
        timers: Timers,
        clock: Clock,
        run: Run,
        limits: Mapping[str, int],
        settings: Mapping[str, float],
        expired: Callable[[int], None],
        outlived: Callable[[int], None],
    ) -> None:
        self.store, self.destination = store, destination
        self.clock, self.limits, self.settings = clock, limits, settings
        self.sessions = Sessions()
        self.timeouts = Deadlines(timers, expired)
        self.expiries = Deadlines(timers, outlived)
        self.ages = Ages()
        self.reservations = Reservations(destination, limits)
        self.checks = Checks(
            timers,
            check_seconds=settings["check_seconds"],
            parked_max=limits["checks_parked"],
            check=self._check,
        )
        self.applier = Applier(
            store,
            destination,
            timers=timers,
            run=run,
            release=self.reservations.release,
            ended=self._applied,
        )
        self.sending_bytes = 0
        """On the way to the journal."""
        self._place = 0
        self._pending: deque[Course] = deque()
        self._read_only: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._drops: OrderedDict[int, int] = OrderedDict()
        self._losses: OrderedDict[int, tuple[int, int]] = OrderedDict()

    # Finding

    def find(self, xid: str, epoch: int) -> Transaction | None:
        """The live transaction of that name and epoch; None if it is over, or there never was one.

        Raises StaleEpoch if nothing is known of it but that a newer one has its name; StorageStopped, outcome unknown,
        where only a start will tell what became of it.
        """
        transaction = self.store.transactions.get(epoch)
        if transaction is not None and transaction.xid == xid:
            require_sure(transaction)
            return transaction
        newer = self.store.named.get(xid)
        if newer is not None and newer.epoch > epoch and self.store.outcome(xid, epoch) is None:
            raise rejections.stale(epoch, newer.epoch)
        return None

    def busy(self, transaction: Transaction) -> bool:
        """A record of it is on its way, so its state is not known for sure."""
        live = live_of(transaction)
        return transaction.state in UNDER_WAY or live.recording > 0 or live.unsure is not None

    def put(
        self, transactions: Sequence[Transaction], call: Callable[[Written], None], written: Written
    ) -> None:
        """`call(written)` puts a record of these transactions into the journal's queue: they are busy until `written`,
        or until `call` raises.

        The state alone does not tell: a refused record gives it back before whoever asked for the record hears of it.
        """
        lives = [live_of(transaction) for transaction in transactions]

        def arrived(place: int, error: BaseException | None) -> None:
            for live in lives:
                live.recording -= 1
                live.unsure = error if isinstance(error, MaybeWritten) else live.unsure
            written(place, error)

        for live in lives:
            live.recording += 1
        try:
            call(arrived)
        except Exception:
            for live in lives:
                live.recording -= 1
            raise

    def later(self, transaction: Transaction, again: Callable[[], None]) -> None:
        """`again()` when what is on its way has arrived or was refused."""
        live_of(transaction).waiting.append(again)

    def go_on(self, transaction: Transaction) -> None:
        """What is on its way has arrived or was refused: steps that wait are taken again, in order."""
        live = live_of(transaction)
        waiting, live.waiting = live.waiting, []
        for again in waiting:
            again()

    # What is sure

    def recorded(self, place: int) -> None:
        """A record is in the journal at `place`."""
        self._place = max(self._place, place)

    def when_sure(self, waiter: Waiter) -> None:
        """`waiter(None)` once every record so far is on the disk: what they say can be told then."""
        if self._place:
            self.store.when_forced(self._place, waiter)
        else:
            waiter(None)

    # The steps of a transaction

    def opened(self, transaction: Transaction, session: Caller, timeout_ms: int) -> None:
        """It begins."""
        transaction.live = Live(timeout_ms)
        self.sessions.opened(session, transaction.epoch, local=transaction.origin.local)
        self.timeouts.set(transaction.epoch, timeout_ms / 1000)

    def prepared(self, transaction: Transaction, place: int) -> None:
        """Its record is in the journal: neither time nor session ends it any more."""
        self.recorded(place)
        live_of(transaction).place = place
        self._closed(transaction.epoch)
        self._keep(transaction)
        self.store.when_forced(place, lambda error: self._surely_prepared(transaction, error))

    def _surely_prepared(self, transaction: Transaction, error: BaseException | None) -> None:
        """Nobody is asked before the record is on the disk: who then commits his own part for it would be alone with
        that after a power cut. An end that is under way may still be refused; one that is not ends the asking, too."""
        if error is None and transaction.state in MAY_STAY_PREPARED:
            self._watch(transaction)

    def _watch(self, transaction: Transaction) -> None:
        """From now on its group is asked what becomes of it."""
        if transaction.origin.group:
            age_seconds = max(0.0, (self.clock.wall_ms() - transaction.prepared_ms) / 1000)
            self.checks.watch(transaction.epoch, transaction.origin.group, age_seconds)

    def _keep(self, transaction: Transaction) -> None:
        """A prepared one: when it ends, how old it is."""
        epoch = transaction.epoch
        self.ages.add(epoch, transaction.prepared_ms)
        if transaction.expires_ms:
            self.expiries.set(epoch, max(0.0, (transaction.expires_ms - self.clock.wall_ms()) / 1000))

    def _closed(self, epoch: int) -> None:
        self.timeouts.clear(epoch)
        self.sessions.closed(epoch)

    def _left(self, epoch: int) -> None:
        """It is not prepared any more."""
        self.ages.remove(epoch)
        self.checks.unwatch(epoch)
        self.expiries.clear(epoch)

    def decided(self, decision: Decision, waiting: Waiting) -> None:
        """Its record is in the journal; `waiting` hears of it when it is applied, or cannot be for now."""
        self.recorded(decision.place)
        alone = decision.transactions[0] if len(decision.transactions) == 1 else None
        course = Course(decision, batches=alone.locations.rows if alone is not None else 0)
        for transaction in decision.transactions:
            live = live_of(transaction)
            live.course, live.place = course, decision.place
            course.reserved += live.reserved
            live.reserved = 0
            if transaction.origin.xid:
                self._closed(transaction.epoch)
                self._left(transaction.epoch)
        course.wait(waiting)
        self._pending.append(course)
        self.store.when_forced(decision.place, lambda error: self._forced(course, error))
        for transaction in decision.transactions:
            if live_of(transaction).waiting:
                self.go_on(transaction)

    def course(self, transaction: Transaction) -> Course:
        """Of a decided one."""
        course = live_of(transaction).course
        assert course is not None
        return course

    @property
    def forcing(self) -> bool:
        """Whether a decision is in the journal and not known to be on the disk."""
        return bool(self._pending)

    def _forced(self, course: Course, error: BaseException | None) -> None:
        """The decision is on the disk, and so is every one before it: they go to their targets in that order."""
        while self._pending and self._pending[0].decision.place <= course.decision.place:
            first = self._pending.popleft()
            if error is None:
                self.applier.start(first)
            else:
                first.fail(rejections.not_forced(error))

    def _applied(self, course: Course) -> None:
        self.reservations.release(course.reserved)
        course.reserved = 0
        for transaction in course.decision.transactions:
            if transaction.offsets:
                self.destination.unlock_offsets(transaction.epoch)
            if course.dropped:
                _remember(self._drops, transaction.epoch, course.dropped, DROPS_REMEMBERED)
            if course.lost:
                alone = len(course.decision.transactions) == 1
                lost = course.lost if alone else transaction.lost
                _remember(self._losses, transaction.epoch, (lost, transaction.messages), DROPS_REMEMBERED)

    def ended(self, transaction: Transaction) -> None:
        """It is over without a decision: rolled back, forgotten, or empty."""
        self._closed(transaction.epoch)
        self._left(transaction.epoch)
        live = live_of(transaction)
        self.reservations.release(live.reserved)
        live.reserved = 0
        self.go_on(transaction)

    def dropped(self, transactions: Sequence[Transaction], place: int) -> None:
        """Their end is in the journal. Their offsets are free once it is on the disk: before, a crash could bring them
        back."""
        self.recorded(place)
        locked = [each.epoch for each in transactions if each.offsets]
        for transaction in transactions:
            self.ended(transaction)
        if locked:
            self.store.when_forced(place, lambda error: self._unlock(locked, error))

    def _unlock(self, epochs: Iterable[int], error: BaseException | None) -> None:
        """Without the force nobody knows what a start will find: they stay locked."""
        if error is None:
            for epoch in epochs:
                self.destination.unlock_offsets(epoch)

    # Empty ones

    def finish_empty(self, transaction: Transaction) -> None:
        """Nothing was in it, so nothing needs to be done."""
        self.store.finish_empty(transaction)
        _remember(self._read_only, (transaction.xid, transaction.epoch), None, READ_ONLY_REMEMBERED)
        self.ended(transaction)

    def drops(self, epoch: int) -> int:
        """How many messages of a committed one were for topics that are gone, if that was not long ago."""
        return self._drops.get(epoch, 0)

    def losses(self, epoch: int) -> tuple[int, int]:
        """(how many messages of a committed one damage of the journal took, of how many), if that was not long ago."""
        return self._losses.get(epoch, (0, 0))

    def was_empty(self, xid: str, epoch: int) -> bool:
        """Whether that transaction ended as read_only not long ago."""
        return (xid, epoch) in self._read_only

    # Asking

    def _check(self, epoch: int) -> Check:
        transaction = self.store.transactions[epoch]
        return Check(transaction.xid, epoch, transaction.prepared_ms, topics_of(transaction)[:TOPICS_ASKED])

    # A start, and the end

    def close(self) -> None:
        """Nothing ends by time any more, and nobody is asked."""
        self.timeouts.close()
        self.expiries.close()
        self.checks.close()

    def restore(self) -> None:
        """After recovery: prepared ones wait as before, decided ones go to their targets again."""
        decisions: dict[int, Decision] = {}
        for transaction in self.store.transactions.values():
            if transaction.decision is not None and not transaction.settled:
                decisions[transaction.decision.place] = transaction.decision
            elif transaction.state == states.PREPARED:
                live_of(transaction).reserved = transaction.size_bytes
                self.reservations.restore(transaction.size_bytes)
                self._keep(transaction)
                self._watch(transaction)
            else:
                continue
            if transaction.offsets:
                self.destination.lock_offsets(transaction.epoch, transaction.xid, transaction.offsets)
        for place in sorted(decisions):
            self._restore_decision(decisions[place])

    def _restore_decision(self, decision: Decision) -> None:
        course = Course(decision, sum(each.size_bytes for each in decision.transactions))
        self.reservations.restore(course.reserved)
        for transaction in decision.transactions:
            live_of(transaction).course = course
        self.applier.start(course)


def live_of(transaction: Transaction) -> Live:
    """Its `Live`; a new one after a start."""
    live: Live | None = transaction.live
    if live is None:
        live = transaction.live = Live()
    return live


def require_sure(transaction: Transaction) -> None:
    """Raises StorageStopped, outcome unknown, where a record of it may or may not be in the journal."""
    unsure = live_of(transaction).unsure
    if unsure is not None:
        raise rejections.of_journal(unsure)


def topics_of(transaction: Transaction) -> list[str]:
    """The topics it sends to, each once."""
    return sorted(set(transaction.topics.values()))


def _remember(memory: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    """The oldest goes where there are too many."""
    memory[key] = value
    if len(memory) > most:
        memory.popitem(last=False)


# What the broker knows of a live transaction that nothing durable depends on.


class Live:
    """`timeout_ms`: as its owner was told. `place`: of the record that its state stands for, 0 before the first.

    `sizes`: bytes by target, of what was sent. `sending`: batches on the way to the journal, `recording`: records;
    `missing`: (producer id, sequence) of batches that the disk refused and that have not come again. `reserved`: bytes
    set aside at its targets. `orphan`: its time is over or its session gone while a record was on its way, so it
    ends if that is refused. `unsure`: the disk failed while a record was written, and only a start will tell whether
    it is there. `waiting`: steps that were asked for meanwhile. `course`: after the decision.
    """

    __slots__ = (
        "course",
        "missing",
        "orphan",
        "place",
        "recording",
        "reserved",
        "sending",
        "sizes",
        "timeout_ms",
        "unsure",
        "waiting",
    )

    def __init__(self, timeout_ms: int = 0) -> None:
        self.timeout_ms = timeout_ms
        self.place = self.recording = self.reserved = self.sending = 0
        self.sizes: dict[int, int] = {}
        self.missing: set[tuple[int, int]] = set()
        self.orphan = False
        self.unsure: MaybeWritten | None = None
        self.waiting: list[Callable[[], None]] = []
        self.course: Course | None = None


# Space that transactions need: bounded for all unfinished ones together, set aside at their targets before a decision.
#
# What is set aside was asked for first (`Destination.check`), for every target and with all that is set aside already:
# so a decision is refused while it still can be, and not found to be impossible afterwards.

FULL: Final = (
    "Unfinished transactions hold {held} bytes; with {more} more that is above limits.transactions_bytes. Wait, or"
    " end some of them."
)
MANY: Final = (
    "Unfinished transactions hold {held} batches; with {more} more that is above limits.transactions_pieces. Wait, or"
    " end some of them; and send larger batches."
)
LARGE: Final = "The transaction would have {found} {what}; the limit is limits.{limit}, {most}."


class Reservations:
    """`reserved`: bytes set aside at the targets, of prepared and decided transactions."""

    def __init__(self, destination: Destination, limits: Mapping[str, int]) -> None:
        self._destination = destination
        self._bytes_max = limits["transaction_bytes"]
        self._pieces_max = limits["transaction_pieces"]
        self._all_bytes_max = limits["transactions_bytes"]
        self._all_pieces_max = limits["transactions_pieces"]
        self.reserved = 0

    def require_room(
        self, held_bytes: int, held_pieces: int, transaction: Transaction, size_bytes: int, pieces: int
    ) -> None:
        """Whether a transaction may grow by so much; `held_bytes`, `held_pieces`: what all unfinished ones have, and
        what is on its way. Raises TransactionTooLarge, Busy.
        """
        found = transaction.size_bytes + size_bytes
        if found > self._bytes_max:
            raise _too_large("bytes", "transaction_bytes", found, self._bytes_max)
        rows = transaction.locations.rows + pieces
        if rows > self._pieces_max:
            raise _too_large("batches", "transaction_pieces", rows, self._pieces_max)
        if held_bytes + size_bytes > self._all_bytes_max:
            raise Busy(FULL.format(held=held_bytes, more=size_bytes))
        if held_pieces + pieces > self._all_pieces_max:
            raise Busy(MANY.format(held=held_pieces, more=pieces))

    def reserve(self, sizes: Mapping[int, int]) -> int:
        """Sets aside what a transaction brings to each target, by key; all or nothing. Answers the sum.

        Raises what `Destination.check` does.
        """
        taken = 0
        try:
            for key, size in sizes.items():
                self._destination.check(key, size)
                self._destination.reserve(size)
                taken += size
        except Exception:
            if taken:
                self._destination.release(taken)
            raise
        self.reserved += taken
        return taken

    def restore(self, size_bytes: int) -> None:
        """After a start: what was decided or prepared has its space, whether or not it is there."""
        self._destination.reserve(size_bytes)
        self.reserved += size_bytes

    def release(self, size_bytes: int) -> None:
        """It was written, or is not needed any more."""
        if size_bytes:
            self._destination.release(size_bytes)
            self.reserved -= size_bytes


def _too_large(what: str, limit: str, found: int, most: int) -> TransactionTooLarge:
    return TransactionTooLarge(
        LARGE.format(found=found, what=what, limit=limit, most=most), found=found, max=most, limit=limit
    )


# Which session began which transaction: so many each at most, and the local ones end with their session.
#
# A session is here only as long as it has transactions.


class Sessions:
    """Open transactions by the session that began them."""

    def __init__(self) -> None:
        self._epochs: dict[Caller, dict[int, bool]] = {}
        self._owner: dict[int, Caller] = {}

    def opened(self, session: Caller, epoch: int, *, local: bool) -> None:
        """`local`: the transaction ends when the session does."""
        self._epochs.setdefault(session, {})[epoch] = local
        self._owner[epoch] = session

    def closed(self, epoch: int) -> None:
        """The transaction is open no more: prepared, decided or over. Harmless if it is not known."""
        session = self._owner.pop(epoch, None)
        if session is None:
            return
        epochs = self._epochs[session]
        del epochs[epoch]
        if not epochs:
            del self._epochs[session]

    def count(self, session: Caller) -> int:
        """How many transactions of this session are open."""
        return len(self._epochs.get(session, ()))

    def lost(self, session: Caller) -> list[int]:
        """Forgets the session; the epochs of its local transactions, in the order in which they began."""
        epochs = self._epochs.pop(session, {})
        for epoch in epochs:
            del self._owner[epoch]
        return [epoch for epoch, local in epochs.items() if local]
