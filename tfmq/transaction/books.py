"""The books of live transactions: what has to be done beside the record when one begins, is prepared, decided, over.

Sessions and timers let go, space is set aside or freed, offsets are locked or free again, whoever waited for a step
goes on. Commands decide; here it is only written down, the same way for each of them.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from journal.clock import Clock
from tfmq.apply_target import Destination
from tfmq.transaction import refusals, states
from tfmq.transaction.ages import Ages
from tfmq.transaction.applying import Applier
from tfmq.transaction.checks import Checks
from tfmq.transaction.course import Course, Waiting
from tfmq.transaction.live import Live
from tfmq.transaction.queue import MaybeWritten, Run, Waiter, Written
from tfmq.transaction.requests import Caller, Check, Timers
from tfmq.transaction.reservations import Reservations
from tfmq.transaction.sessions import Sessions
from tfmq.transaction.store import JournalTransactionStore
from tfmq.transaction.timeouts import Deadlines
from tfmq.transaction.transaction import Decision, Transaction

READ_ONLY_REMEMBERED: Final = 10_000
"""Empty transactions leave no record; so many of the last are remembered for a repeat."""
DROPS_REMEMBERED: Final = 10_000
"""Likewise how many messages a decision had for topics that were gone, and how many of its messages were lost."""
UNDER_WAY: Final = frozenset((states.PREPARING, states.COMMITTING, states.ROLLING_BACK))
MAY_STAY_PREPARED: Final = frozenset((states.PREPARED, states.COMMITTING, states.ROLLING_BACK))
TOPICS_ASKED: Final = 8
"""A producer that is asked about a transaction is told the first topics of it."""


class Books:
    """See the module. `expired(epoch)`: the time of an open transaction is over; `outlived(epoch)`: that of a prepared
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
            raise refusals.stale(epoch, newer.epoch)
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
                first.fail(refusals.not_forced(error))

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
        raise refusals.of_journal(unsure)


def topics_of(transaction: Transaction) -> list[str]:
    """The topics it sends to, each once."""
    return sorted(set(transaction.topics.values()))


def _remember(memory: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    """The oldest goes where there are too many."""
    memory[key] = value
    if len(memory) > most:
        memory.popitem(last=False)
