"""Check-back: asks the clients of a producer group how prepared transactions are to end."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from tfmq.errors import Busy
from tfmq.transaction.deadlines import Deadlines
from tfmq.transaction.requests import Caller, Check, Done, Timers

PAUSE_SECONDS_MAX: Final = 3600.0
"""Longest pause between two queries about one transaction."""
CHECKS_AT_ONCE: Final = 100
"""Transactions per query, so that several clients share a backlog."""
WAITS_PER_SESSION_MAX: Final = 1000
"""Waits per session. A client needs one per group.

Without a limit one client could use all waits.
"""
BUSY: Final = (
    "Too many clients wait for check-back: limits.checks_parked in total, or 1,000 of one connection."
)


class Wait:
    """One client that waits for check-back queries of its group."""

    __slots__ = ("done", "group", "session", "timer")

    def __init__(self, group: str, session: Caller, done: Done) -> None:
        self.group, self.session, self.done = group, session, done
        self.timer: Any = None


class Asked:
    """Check-back state of one transaction: its group, number of queries and last client."""

    __slots__ = ("count", "group", "identity")

    def __init__(self, group: str) -> None:
        self.group = group
        self.count = 0
        self.identity = ""


class Checks:
    """Check-back of prepared transactions by producer group.

    A client that can answer waits for queries of its group. When a transaction of the group has been
    prepared for `check_seconds`, one waiting client receives a query. Its answer is a commit or rollback of
    the transaction; without one the query is repeated after growing pauses. Clients are served in the order
    of their waits, so the next query is sent to another client if there is one. `make_query(epoch)` returns
    the query for a transaction.
    """

    def __init__(
        self, timers: Timers, *, check_seconds: float, parked_max: int, check: Callable[[int], Check]
    ) -> None:
        self._timers, self._check_seconds, self._parked_max = timers, check_seconds, parked_max
        self._check = check
        self._watched: dict[int, Asked] = {}
        self._later = Deadlines(timers, self._due_now)
        self._due: dict[str, dict[int, None]] = {}
        self._waits: dict[str, dict[Wait, None]] = {}
        self._sessions: dict[Caller, dict[Wait, None]] = {}
        self.parked = 0

    # Transactions

    def watch(self, epoch: int, group: str, age_seconds: float) -> None:
        """Start check-back of a transaction that has been prepared for `age_seconds`."""
        self._watched[epoch] = Asked(group)
        self._later.set(epoch, max(0.0, self._check_seconds - age_seconds))

    def unwatch(self, epoch: int) -> None:
        """Stop check-back of an ended transaction; no effect if there was none."""
        asked = self._watched.pop(epoch, None)
        if asked is None:
            return
        self._later.clear(epoch)
        due = self._due.get(asked.group)
        if due is not None:
            due.pop(epoch, None)
            if not due:
                del self._due[asked.group]

    def asked(self, epoch: int) -> tuple[int, str]:
        """Return (number of queries about the transaction, client of the last one)."""
        asked = self._watched.get(epoch)
        return (0, "") if asked is None else (asked.count, asked.identity)

    def _due_now(self, epoch: int) -> None:
        group = self._watched[epoch].group
        self._due.setdefault(group, {})[epoch] = None
        waits = self._waits.get(group)
        if waits:
            self._tell(next(iter(waits)))

    # Clients

    def wait(self, group: str, wait_ms: int, session: Caller, done: Done) -> Callable[[], None]:
        """Call `done(list of CheckBackQuery)` as soon as a query is due, `done([])` after `wait_ms`.

        Calls `done(None, Busy)` if too many clients wait.
        Returns: a function that ends the wait with `done([])`; no effect once the wait has ended.
        """
        wait = Wait(group, session, done)
        if group in self._due:
            self._answer(wait)
        elif not wait_ms:
            done([], None)
        elif self.parked >= self._parked_max or self._waits_of(session) >= WAITS_PER_SESSION_MAX:
            done(None, Busy(BUSY))
        else:
            self._park(wait, wait_ms)
        return partial(self._end, wait)

    def _waits_of(self, session: Caller) -> int:
        return len(self._sessions.get(session, ()))

    def session_lost(self, session: Caller) -> None:
        """End the waits of a closed session without a reply."""
        for wait in list(self._sessions.get(session, ())):
            self._unpark(wait)

    def close(self) -> None:
        """End all waits with an empty reply and send no more queries."""
        self._later.close()
        for waits in list(self._sessions.values()):
            for wait in list(waits):
                self._end(wait)

    def _park(self, wait: Wait, wait_ms: int) -> None:
        self.parked += 1
        self._waits.setdefault(wait.group, {})[wait] = None
        self._sessions.setdefault(wait.session, {})[wait] = None
        wait.timer = self._timers.after(wait_ms / 1000, partial(self._end, wait))

    def _unpark(self, wait: Wait) -> bool:
        """Remove a wait; False if it had ended before."""
        if wait.timer is None:
            return False
        self._timers.cancel(wait.timer)
        wait.timer = None
        self.parked -= 1
        _leave(self._waits, wait.group, wait)
        _leave(self._sessions, wait.session, wait)
        return True

    def _end(self, wait: Wait) -> None:
        if self._unpark(wait):
            wait.done([], None)

    def _tell(self, wait: Wait) -> None:
        self._unpark(wait)
        self._answer(wait)

    def _answer(self, wait: Wait) -> None:
        """Send the due queries of the group to the client.

        Schedule the next ones after a longer pause.
        """
        due = self._due[wait.group]
        epochs = [epoch for epoch, _ in zip(due, range(CHECKS_AT_ONCE), strict=False)]
        for epoch in epochs:
            del due[epoch]
            asked = self._watched[epoch]
            self._later.set(epoch, min(self._check_seconds * 2.0**asked.count, PAUSE_SECONDS_MAX))
            asked.count = min(asked.count + 1, 1000)
            asked.identity = wait.session.identity
        if not due:
            del self._due[wait.group]
        wait.done([self._check(epoch) for epoch in epochs], None)


def _leave(table: dict[Any, dict[Wait, None]], key: Any, wait: Wait) -> None:
    """Remove the wait from `table[key]`, and the key when it was the last."""
    waits = table[key]
    del waits[wait]
    if not waits:
        del table[key]
