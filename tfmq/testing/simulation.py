"""A broker and its clients in one thread, under one clock.

`settle` runs all work of broker and clients that is due now. Time advances only in two cases: the test advances it
(`clock.advance`), or a client waits and no work is due. In the second case, time advances from one due event to the
next until the wait ends. A wait that nothing can end raises `NothingComes`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from tfmq.client.connection.connection import READY, ClientConnection
from tfmq.client.operation import BackgroundTasks, Future
from tfmq.client.send.accumulator import RecordAccumulator
from tfmq.errors import NotAllowed
from tfmq.testing.clock import VirtualClock
from tfmq.testing.server import SimulatedServer

WAIT_SECONDS_MAX: Final = 3600.0
"""All deadlines of clients are shorter. So if a wait without a timeout takes this long, it will never end."""
ROUNDS_MAX: Final = 100_000
"""Maximum rounds of `settle`. More mean an internal error: broker or client reports due work, but does not do it."""
NEVER: Final = float("inf")


class NothingComes(RuntimeError):
    """A client waits, and no pending event can end its wait: the test would never end."""


class SimulatedClient(Protocol):
    """The attributes and methods of a client's driver that the simulation uses."""

    closed: bool
    link: ClientConnection
    tickers: list[Any]

    def run_due(self) -> bool:
        """Run the work that is due now. Return whether bytes were received."""
        ...

    def next_time(self) -> float: ...

    def run_callbacks(self) -> bool:
        """Call the user's callbacks that are due. Return whether there were any."""
        ...

    def close_at_once(self) -> None: ...


class Simulation:
    """The simulation of a broker and its clients. All calls must be in the thread that created the simulation."""

    def __init__(self, clock: VirtualClock, server: SimulatedServer) -> None:
        self.clock = clock
        self.server = server
        self.clients: list[SimulatedClient] = []
        self.change_count = 0  # increased with each change of the simulation, so that drivers notice progress
        self.callback_rounds = 0  # increased each time that a client has called the user's callbacks
        self.on_client_call: Callable[[], None] | None = None
        """Function that is called when the test's code calls a client, before the call has an effect."""
        self._thread = threading.get_ident()
        self._settling = False
        self._deferred_work: list[Callable[[], None]] = []
        self._longest_wait = 0.0
        self._call_started: float | None = None
        clock.go_on = self.advance_to

    def add_client(self, client: SimulatedClient) -> None:
        self.check_thread()
        self.clients.append(client)

    def call_soon(self, work: Callable[[], None]) -> None:
        """Run `work()` after all other work that is due now. Unlike that work, `work` may wait and advance time."""
        self._deferred_work.append(work)

    def check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise NotAllowed(
                "A simulated broker and its clients live in the thread that made them, where one thing happens after"
                " the other: use tfmq.local_server for a test with threads."
            )

    def settle(self) -> None:
        """Run the work of broker and clients that is due now, until none is left."""
        self.check_thread()
        if self._settling:  # called from work of a round: the rounds of the outer call continue
            return
        while True:
            self._settling = True
            try:
                self._run_rounds()
            finally:
                self._settling = False
            for client in list(self.clients):
                self.callback_rounds += client.run_callbacks()
            if self._deferred_work:
                self._deferred_work.pop(0)()
            elif not self._has_work():
                return

    def settle_and_flush(self) -> None:
        for client in self.clients:
            for ticker in client.tickers:
                if isinstance(ticker, RecordAccumulator):
                    ticker.close_open_batches()
        self.settle()

    def _run_rounds(self) -> None:
        for _ in range(ROUNDS_MAX):
            moved = False
            for client in list(self.clients):
                moved = client.run_due() or moved
            moved = self.server.run_turn() or moved
            self.clients = [client for client in self.clients if not client.closed]
            if moved:
                self.change_count += 1
            elif not self._has_work():
                return
        raise RuntimeError("the simulation does not come to rest")

    def _has_work(self) -> bool:
        return self.next_time() <= self.clock.monotonic()

    def next_time(self) -> float:
        """Return when the broker or a client has work next, in monotonic seconds; infinity if never."""
        return min(self.server.next_time(), *(client.next_time() for client in self.clients), NEVER)

    def advance_to(self, until: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Advance time to `until`, or until `done()` is true; return whether `done()` is true."""
        if self._settling:
            raise NotAllowed("Time cannot be moved by a callback, a codec or a selector: they run while it stands.")
        self.settle()
        while not done():
            due = self.next_time()
            if due > until:
                self.clock.move(until)
                self.settle()
                return done()
            self.clock.move(due)
            self.change_count += 1
            self.settle()
        return True

    def wait_for(self, client: SimulatedClient, targets: Collection[Future], seconds: float | None) -> bool:
        """Advance time until one of `targets` is done or `seconds` have passed; return whether one is done.

        Raises `NothingComes` if `seconds` is None and nothing can end the wait.
        """

        def done() -> bool:
            return client.closed or any(target.done for target in targets)

        self.settle()
        if done():
            return True
        if self.advance_to(self.wait_limit(client, targets, seconds), done):
            return True
        if seconds is None:
            raise self.deadlock_error()
        return False

    def wait_limit(self, client: SimulatedClient, targets: Iterable[Future], seconds: float | None) -> float:
        """Return until when a wait may last, in monotonic seconds. Raises `NothingComes` if the wait cannot end."""
        now = self.clock.monotonic()
        if seconds is None:
            if not has_own_deadline(client, targets):
                raise self.deadlock_error()
            return now + WAIT_SECONDS_MAX
        self._longest_wait = max(self._longest_wait, seconds)
        if self._call_started is not None and now - self._call_started > max(self._longest_wait, WAIT_SECONDS_MAX):
            raise self.deadlock_error()
        return now + max(0.0, seconds)

    def client_called(self) -> None:
        """Notify the run of a test with faults (`FaultRun`), if there is one, that the test calls a client.

        Drivers call this method. Nothing is notified while the simulation settles.
        """
        if self.on_client_call is not None and not self._settling:
            self.on_client_call()

    def all_connected(self) -> bool:
        return all(client.link.state == READY for client in self.clients if client.link.has_pending_requests)

    @contextmanager
    def client_call(self) -> Iterator[None]:
        """Context of one client call. Its waits may take WAIT_SECONDS_MAX in sum, or the longest timeout if longer."""
        before = self._call_started, self._longest_wait
        self._call_started, self._longest_wait = self.clock.monotonic(), 0.0
        try:
            yield
        finally:
            self._call_started, self._longest_wait = before

    def close_clients(self) -> None:
        """Close all clients; their pending requests fail."""
        for client in list(self.clients):
            for ticker in client.tickers:
                if isinstance(ticker, BackgroundTasks):  # otherwise the tasks would log the end as a broker's outage
                    ticker.cancel()
            client.close_at_once()
        self.clients.clear()
        self._deferred_work.clear()

    def deadlock_error(self) -> NothingComes:
        return NothingComes(
            f"This would wait for ever: nothing is left to happen at {self.clock.now:%Y-%m-%d %H:%M:%S} UTC of the"
            " test's clock. Move it (tfmq_broker.clock.advance(minutes=30)), send first what is waited for, or wait"
            " with a timeout."
        )


def has_own_deadline(client: SimulatedClient, targets: Iterable[Future]) -> bool:
    """Return whether a wait for `targets` ends at some time, although the caller gave no timeout.

    Requests, and messages that a producer sends, have deadlines at which they fail. Only a consumer that waits for new
    messages may wait without end.
    """
    if any(getattr(target, "deadline", NEVER) != NEVER for target in targets):
        return True
    return any(isinstance(ticker, RecordAccumulator) for ticker in client.tickers)
