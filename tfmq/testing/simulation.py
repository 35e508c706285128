"""A broker and its clients in one thread, under one clock: who does what next, and when time goes on.

`settle` lets everybody do what can be done now, until nobody has anything left. Time moves in two ways only. The test
moves it (`clock.advance`); or a client waits, nothing is left to be done now, and the wait has an end: then it goes on
as far as that wait needs, from one thing that is due to the next, each at its time, and never beyond the wait's end.
A wait that has no end, and that nothing under way can end, raises `NothingComes`: time stands still meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from tfmq.client.connection.connection import Link
from tfmq.client.operation import Tasks, Waitable
from tfmq.client.send.accumulator import Sender
from tfmq.errors import NotAllowed
from tfmq.testing.clock import VirtualClock
from tfmq.testing.server import Server

PATIENCE_SECONDS: Final = 3600.0
"""What a client's own deadlines end is over far earlier; a wait that lasts longer, and asked for less, never ends."""
ROUNDS_MAX: Final = 100_000
"""So many rounds without an end are an error of ours: somebody has something to do for ever, and does not do it."""
NEVER: Final = float("inf")


class NothingComes(RuntimeError):
    """A client waits, and nothing that could end the wait is left to happen."""


class Client(Protocol):
    """A client's driver, as the world sees it."""

    closed: bool
    link: Link
    tickers: list[Any]

    def look(self) -> bool:
        """Do what is to be done now; whether bytes came."""
        ...

    def next_time(self) -> float: ...

    def run_callbacks(self) -> bool:
        """Users' code; whether there was any."""
        ...

    def end(self) -> None:
        """Close it at once."""
        ...


class World:
    """See the module. One thread only: the one that makes it."""

    def __init__(self, clock: VirtualClock, server: Server) -> None:
        self.clock = clock
        self.server = server
        self.clients: list[Client] = []
        self.changes = 0
        """Counts what happened, so that a watcher sees that something did."""
        self.callbacks = 0
        """Counts the looks at which users' callbacks ran."""
        self.on_call: Callable[[], None] | None = None
        """Called when the test asks a client for something, before anything comes of that."""
        self._thread = threading.get_ident()
        self._settling = False
        self._beside: list[Callable[[], None]] = []
        self._longest = 0.0
        self._began: float | None = None
        clock.go_on = self.advance_to

    def join(self, client: Client) -> None:
        """`client` takes part from now on, until it is closed."""
        self.check_thread()
        self.clients.append(client)

    def beside(self, work: Callable[[], None]) -> None:
        """`work()` soon, outside of whatever is going on now: it may wait."""
        self._beside.append(work)

    def check_thread(self) -> None:
        """Raises `NotAllowed` in another thread than the test's."""
        if threading.get_ident() != self._thread:
            raise NotAllowed(
                "A simulated broker and its clients live in the thread that made them, where one thing happens after"
                " the other: use tfmq.local_server for a test with threads."
            )

    # Doing

    def settle(self) -> None:
        """Everybody does what is to be done now, until nobody has anything left."""
        self.check_thread()
        if self._settling:  # whoever asks is part of it: the rounds go on
            return
        while True:
            self._settling = True
            try:
                self._rounds()
            finally:
                self._settling = False
            for client in list(self.clients):
                self.callbacks += client.run_callbacks()
            if self._beside:
                self._beside.pop(0)()
            elif not self._restless():
                return

    def hurry(self) -> None:
        """As `settle`; batches that linger for company go at once."""
        for client in self.clients:
            for ticker in client.tickers:
                if isinstance(ticker, Sender):
                    ticker.flush()
        self.settle()

    def _rounds(self) -> None:
        for _ in range(ROUNDS_MAX):
            moved = False
            for client in list(self.clients):
                moved = client.look() or moved
            moved = self.server.turn() or moved
            self.clients = [client for client in self.clients if not client.closed]
            if moved:
                self.changes += 1
            elif not self._restless():
                return
        raise RuntimeError("the simulation does not come to rest")

    def _restless(self) -> bool:
        return self.next_time() <= self.clock.monotonic()

    def next_time(self) -> float:
        """When anybody has something to do next, in the clock's monotonic seconds; infinity if never."""
        return min(self.server.next_time(), *(client.next_time() for client in self.clients), NEVER)

    # Time

    def advance_to(self, until: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Time goes on to `until`, or until `done()`; whether it is."""
        if self._settling:
            raise NotAllowed(
                "Time cannot be moved by a callback, a codec or a selector: they run while it stands."
            )
        self.settle()
        while not done():
            due = self.next_time()
            if due > until:
                self.clock.move(until)
                self.settle()
                return done()
            self.clock.move(due)
            self.changes += 1
            self.settle()
        return True

    def wait(self, client: Client, targets: Collection[Waitable], seconds: float | None) -> bool:
        """Whether any of `targets` was done within `seconds`. Raises `NothingComes` where None of them ever will be."""

        def done() -> bool:
            return client.closed or any(target.done for target in targets)

        self.settle()
        if done():
            return True
        if self.advance_to(self.until(client, targets, seconds), done):
            return True
        if seconds is None:
            raise self.nothing_comes()
        return False

    def until(self, client: Client, targets: Iterable[Waitable], seconds: float | None) -> float:
        """Up to when time may go on for that wait. Raises `NothingComes` for one that cannot end now."""
        now = self.clock.monotonic()
        if seconds is None:
            if not ends_by_itself(client, targets):
                raise self.nothing_comes()
            return now + PATIENCE_SECONDS
        self._longest = max(self._longest, seconds)
        if self._began is not None and now - self._began > max(self._longest, PATIENCE_SECONDS):
            raise self.nothing_comes()
        return now + max(0.0, seconds)

    def called(self) -> None:
        """A client is asked for something, by the test's own code."""
        if self.on_call is not None and not self._settling:
            self.on_call()

    def connected(self) -> bool:
        """Whether every client that wants something has its connection."""
        return all(client.link.state == "ready" for client in self.clients if client.link.busy)

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Around one call of a client: however many waits it has, it is not to wait for ever."""
        before = self._began, self._longest
        self._began, self._longest = self.clock.monotonic(), 0.0
        try:
            yield
        finally:
            self._began, self._longest = before

    def end(self) -> None:
        """All clients are closed; what they still wanted fails."""
        for client in list(self.clients):
            for ticker in client.tickers:
                if isinstance(ticker, Tasks):  # else they would tell of the end as of an outage
                    ticker.cancel()
            client.end()
        self.clients.clear()
        self._beside.clear()

    def nothing_comes(self) -> NothingComes:
        """The error for a wait that would never end."""
        return NothingComes(
            f"This would wait for ever: nothing is left to happen at {self.clock.now:%Y-%m-%d %H:%M:%S} UTC of the"
            " test's clock. Move it (tfmq_broker.clock.advance(minutes=30)), send first what is waited for, or wait"
            " with a timeout."
        )


def ends_by_itself(client: Client, targets: Iterable[Waitable]) -> bool:
    """Whether the client gives these up at some time, although nobody said how long to wait: a request is answered or
    fails, what was sent is delivered or fails. Only who waits for new messages, without a timeout, waits for ever.
    """
    if any(getattr(target, "deadline", NEVER) != NEVER for target in targets):
        return True
    return any(isinstance(ticker, Sender) for ticker in client.tickers)
