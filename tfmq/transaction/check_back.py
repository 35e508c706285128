"""Check-back: asks the clients of a producer group how their prepared transactions are to end."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from tfmq.apply_target import Timers
from tfmq.backoff import backoff_seconds
from tfmq.errors import Busy
from tfmq.transaction.deadlines import Deadlines
from tfmq.transaction.requests import Caller, CheckBackQuery, DoneCallback

QUERY_PAUSE_SECONDS_MAX: Final = 3600.0
"""Maximum pause between two queries about one transaction."""
QUERIES_PER_REPLY: Final = 100
"""Maximum of queries (one for each transaction) in one reply, so that several clients share the work."""
WAITS_PER_SESSION_MAX: Final = 1000
"""Maximum of waits of one connection, so that one connection cannot use up limits.checks_parked."""
BUSY: Final = "Too many clients wait for check-back: limits.checks_parked in total, or 1,000 of one connection."


@dataclass(slots=True, eq=False)
class CheckBackWait:
    """A client's request that waits for check-back queries of a producer group."""

    group: str
    session: Caller
    done: DoneCallback
    timer: Any = None


@dataclass(slots=True, eq=False)
class WatchedTransaction:
    """A prepared transaction about which clients are asked. `last_client`: client that got the last query, or ""."""

    group: str
    query_count: int = 0
    last_client: str = ""


class CheckBack:
    """Asks the clients of a producer group how prepared transactions of this group are to end.

    When a transaction has been prepared for `check_seconds`, the client that has waited longest for queries of the
    transaction's group gets the query that `make_query(epoch)` returns. The client replies with a commit or rollback.
    If it does neither, a client is asked again after pauses that grow up to QUERY_PAUSE_SECONDS_MAX.
    """

    def __init__(
        self, timers: Timers, *, check_seconds: float, waits_max: int, make_query: Callable[[int], CheckBackQuery]
    ) -> None:
        self._timers, self._check_seconds, self._waits_max = timers, check_seconds, waits_max
        self._make_query = make_query
        self._watched: dict[int, WatchedTransaction] = {}
        self._deadlines = Deadlines(timers, self._mark_due)
        self._due_epochs: dict[str, dict[int, None]] = {}
        self._waits: dict[str, dict[CheckBackWait, None]] = {}
        self._sessions: dict[Caller, dict[CheckBackWait, None]] = {}
        self.wait_count = 0

    # Transactions in doubt

    def watch_transaction(self, epoch: int, group: str, age_seconds: float) -> None:
        """Start check-back of a transaction that has been prepared for `age_seconds` already."""
        self._watched[epoch] = WatchedTransaction(group)
        self._deadlines.set_deadline(epoch, max(0.0, self._check_seconds - age_seconds))

    def unwatch_transaction(self, epoch: int) -> None:
        asked = self._watched.pop(epoch, None)
        if asked is None:
            return
        self._deadlines.remove(epoch)
        due = self._due_epochs.get(asked.group)
        if due is not None:
            due.pop(epoch, None)
            if not due:
                del self._due_epochs[asked.group]

    def query_history(self, epoch: int) -> tuple[int, str]:
        asked = self._watched.get(epoch)
        return (0, "") if asked is None else (asked.query_count, asked.last_client)

    def _mark_due(self, epoch: int) -> None:
        group = self._watched[epoch].group
        self._due_epochs.setdefault(group, {})[epoch] = None
        waits = self._waits.get(group)
        if waits:
            wait = next(iter(waits))
            self._unregister(wait)
            self._send_queries(wait)

    # Waiting clients

    def add_wait(self, group: str, wait_ms: int, session: Caller, done: DoneCallback) -> Callable[[], None]:
        """Wait until queries of the group are due; return a function that ends the wait with `done([], None)`.

        Calls `done(queries, None)` when queries are due, `done([], None)` if none is due within `wait_ms`, and
        `done(None, Busy)` if the limit of waits is reached.
        """
        wait = CheckBackWait(group, session, done)
        if group in self._due_epochs:
            self._send_queries(wait)
        elif not wait_ms:
            done([], None)
        elif self.wait_count >= self._waits_max or len(self._sessions.get(session, ())) >= WAITS_PER_SESSION_MAX:
            done(None, Busy(BUSY))
        else:
            self.wait_count += 1
            self._waits.setdefault(group, {})[wait] = None
            self._sessions.setdefault(session, {})[wait] = None
            wait.timer = self._timers.after(wait_ms / 1000, partial(self._end_wait, wait))
        return partial(self._end_wait, wait)

    def session_lost(self, session: Caller) -> None:
        """End the waits of a closed session without a reply."""
        for wait in list(self._sessions.get(session, ())):
            self._unregister(wait)

    def close(self) -> None:
        """End all waits with empty replies; send no more queries."""
        self._deadlines.close()
        for waits in list(self._sessions.values()):
            for wait in list(waits):
                self._end_wait(wait)

    def _unregister(self, wait: CheckBackWait) -> bool:
        if wait.timer is None:
            return False
        self._timers.cancel(wait.timer)
        wait.timer = None
        self.wait_count -= 1
        _remove_wait(self._waits, wait.group, wait)
        _remove_wait(self._sessions, wait.session, wait)
        return True

    def _end_wait(self, wait: CheckBackWait) -> None:
        if self._unregister(wait):
            wait.done([], None)

    def _send_queries(self, wait: CheckBackWait) -> None:
        due = self._due_epochs[wait.group]
        epochs = [epoch for epoch, _ in zip(due, range(QUERIES_PER_REPLY), strict=False)]
        for epoch in epochs:
            del due[epoch]
            asked = self._watched[epoch]
            self._deadlines.set_deadline(
                epoch, backoff_seconds(asked.query_count + 1, self._check_seconds, QUERY_PAUSE_SECONDS_MAX)
            )
            asked.query_count += 1
            asked.last_client = wait.session.identity
        if not due:
            del self._due_epochs[wait.group]
        wait.done([self._make_query(epoch) for epoch in epochs], None)


def _remove_wait(table: dict[Any, dict[CheckBackWait, None]], key: Any, wait: CheckBackWait) -> None:
    waits = table[key]
    del waits[wait]
    if not waits:
        del table[key]
