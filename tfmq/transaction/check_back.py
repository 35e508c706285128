"""Asks producer groups about prepared transactions that nobody finishes.

A client that can answer waits here for its group; when a transaction of that group has been prepared for
`check_seconds`, one waiting client is told of it. Whether it answers shows only in the transaction's end, so
it is asked about again after growing pauses. Clients are taken in the order in which they came to wait, so the
next time it is another one's turn where there are several.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from tfmq.errors import Busy
from tfmq.transaction.deadlines import Deadlines
from tfmq.transaction.requests import Caller, Check, Done, Timers

PAUSE_SECONDS_MAX: Final = 3600.0
"""Who could not say in a day is still asked each hour."""
CHECKS_AT_ONCE: Final = 100
"""One client is asked about no more in one answer, so that several share a pile."""
WAITS_PER_SESSION_MAX: Final = 1000
"""A client waits once for each of its groups; one that waits again and again keeps nobody else from being asked."""
BUSY: Final = "Too many wait to be asked about transactions: limits.checks_parked in all, 1,000 a connection."


class Wait:
    """One client that waits to be asked."""

    __slots__ = ("done", "group", "session", "timer")

    def __init__(self, group: str, session: Caller, done: Done) -> None:
        self.group, self.session, self.done = group, session, done
        self.timer: Any = None


class Asked:
    """A watched transaction: its producer group, how often it was asked about, and whom last."""

    __slots__ = ("count", "group", "identity")

    def __init__(self, group: str) -> None:
        self.group = group
        self.count = 0
        self.identity = ""


class Checks:
    """See the module. `check(epoch)` makes what a client is told of a transaction."""

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
        """Asks `group` about the transaction once it has been prepared for long enough."""
        self._watched[epoch] = Asked(group)
        self._later.set(epoch, max(0.0, self._check_seconds - age_seconds))

    def unwatch(self, epoch: int) -> None:
        """The transaction ended; harmless if it was not watched."""
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
        """(how often a client was asked about it, the client that was last)."""
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
        """`done(list of Check)` as soon as there is something to ask, `done([])` after `wait_ms`.

        The answer is a call that ends the wait with `done([])`, harmless when it is over. `done(None, Busy)`
        where too many wait.
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
        """Its waits end, without an answer that nobody would read."""
        for wait in list(self._sessions.get(session, ())):
            self._unpark(wait)

    def close(self) -> None:
        """Everybody who waits is told that there is nothing; nothing is asked any more."""
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
        """Whether it was waiting."""
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
        """Tells the client what is due in its group, and asks about these again after a longer pause."""
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
    """Takes the wait out of `table[key]`, and that out of the table when it was the last."""
    waits = table[key]
    del waits[wait]
    if not waits:
        del table[key]
