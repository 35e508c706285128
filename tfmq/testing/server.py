"""The broker of a simulation: the real request handler and sessions on a disk in memory, without sockets.

The broker works only in calls of `run_turn`, which runs the work that is due now. Jobs that the real broker gives to
other threads also run in `run_turn`, one job in each call.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from journal.buffers import Pool
from journal.clock import Clock
from journal.testing import SimulatedDisk
from tfmq import limits
from tfmq.broker.request_handler import RequestHandler
from tfmq.broker.timers import Timer, Timers
from tfmq.client.operation import run_inline
from tfmq.config import Config
from tfmq.protocol.commands import ACKS, header_bounds
from tfmq.server.session import Session, SessionContext
from tfmq.server.tracing import with_spans
from tfmq.testing.wire import BrokerEnd, ClientEnd, Wire

STOP_TURNS_MAX: Final = 100_000  # if the broker has not stopped after this many turns, the stop has failed

Done = Callable[[Any, BaseException | None], None]


class DelayedCall:
    """A function call at a later time, with the methods of Twisted's delayed calls that a session uses."""

    def __init__(self, timers: Timers, timer: Timer) -> None:
        self._timers = timers
        self._timer = timer

    def active(self) -> bool:
        return self._timer.call is not None

    def cancel(self) -> None:
        self._timers.cancel(self._timer)


class SimulatedServer:
    """One broker, which can be stopped and started again on the same disk.

    `address`: the address that the broker reports · `serve(engine, request, body, reply, session)`: executes a request
    · `refuses()`: returns whether to refuse a connection · `seed`: seed for random ids and for what crashes destroy.
    """

    def __init__(
        self,
        config: Config,
        clock: Clock,
        *,
        address: str,
        serve: Callable[..., None] = RequestHandler.handle,
        refuses: Callable[[], bool] = lambda: False,
        seed: int = 1,
    ) -> None:
        self.disk = SimulatedDisk()
        self.config = config
        self.address = address
        self.engine: RequestHandler | None = None
        self._clock = clock
        self._serve = serve
        self._refuses = refuses
        self._random = random.Random(seed)
        self._pool = Pool()
        self._alarms = Timers(clock)
        self._pending_jobs: deque[tuple[Callable[[], Any], Done]] = deque()
        self._sessions: set[Session] = set()
        self._ends: list[BrokerEnd] = []
        self._connected = 0
        self._turn_requested = False

    @property
    def running(self) -> bool:
        """Whether the broker accepts connections."""
        return self.engine is not None

    def start(self) -> None:
        """Start the broker on the current disk. Does nothing if it runs. Raises the error that prevents the start."""
        if self.engine is None:
            self._pending_jobs.clear()
            engine = RequestHandler(self.config, self.disk, self._clock, self._enqueue_job, self._random.randbytes)
            engine.start()
            self.engine = engine
            self._turn_requested = True

    def stop(self) -> None:
        """Stop cleanly: the broker completes and answers accepted requests, and then closes the connections."""
        engine = self.engine
        if engine is None:
            return
        stopped: list[bool] = []
        engine.broker.stop(lambda: stopped.append(True))
        self._turn_requested = True
        for _ in range(STOP_TURNS_MAX):
            if stopped:
                break
            if not self.run_turn():
                raise RuntimeError("the broker does not stop: it waits for something that never comes")
        for end in self._ends:
            end.end()
            end.deliver()
        self._discard_state()

    def kill(self, keep: str = "nothing") -> None:
        """Simulate a power failure: connections break, and pending work is lost.

        `keep`: how much of the data that was not fsynced is on the disk afterwards: "nothing", "some" or "everything".
        """
        self.disconnect()
        self._discard_state()
        self.disk = self.disk.crash(self._random, keep=keep)

    def connect(self, address: str = "") -> ClientEnd | None:
        """Open a connection to `address`, by default that of the broker; None if it is refused."""
        if self._refuses():
            return None
        context = self._context_at(address)
        if context is None:
            return None
        wire = Wire()
        self._connected += 1
        self._ends.append(BrokerEnd(wire, Session(context), self._pool, self._connected))
        return ClientEnd(wire)

    def _context_at(self, address: str) -> SessionContext | None:
        """Return the context of sessions at `address`; None if nothing listens there."""
        return None if self.engine is None else self._welcome(self.engine)

    def disconnect(self) -> None:
        """Break every connection. The broker continues to run."""
        for end in self._ends:
            end.wire.break_connection()

    def run_turn(self) -> bool:
        """Run one turn of the broker, with the work that is due now. Return whether there was any work."""
        engine = self.engine
        did = False
        for end in self._ends:
            did = end.deliver() or did
        self._ends = [end for end in self._ends if not end.is_lost]
        if engine is None:
            return did
        if self._pending_jobs:
            run_inline(*self._pending_jobs.popleft())
            did = True
        now = self._clock.monotonic()
        if self._earliest(engine.broker.timers.next_due()) <= now:
            self._alarms.tick(now)
            engine.broker.timers.tick(now)
            did = True
        if did or self._turn_requested:
            self._turn_requested = False
            engine.broker.end_turn()
            return True
        return False

    def next_time(self) -> float:
        """Return when the broker has work next, in monotonic seconds; infinity if never.

        Timers for work that may be late (deferrable timers) do not count: such work is done together with other work.
        """
        if self.engine is None:
            return float("inf")
        if self._pending_jobs or self._turn_requested:
            return self._clock.monotonic()
        return self._earliest(self.engine.broker.timers.next_not_deferrable())

    def _earliest(self, due: float | None) -> float:
        times = (due, self._alarms.next_due())
        return min((each for each in times if each is not None), default=float("inf"))

    def _enqueue_job(self, work: Callable[[], Any], done: Done) -> None:
        self._pending_jobs.append((work, done))

    def _discard_state(self) -> None:
        self.engine = None
        self._pending_jobs.clear()
        self._sessions.clear()
        self._ends.clear()
        self._alarms = Timers(self._clock)

    def _welcome(self, engine: RequestHandler) -> SessionContext:
        return SessionContext(
            handle=with_spans(partial(self._serve, engine)),
            node=engine.broker.node,
            server="tfmq in a test",
            address=self.address,
            limits=self.config.limits,
            limits_sent=limits.limits_to_send(self.config.limits),
            acks=ACKS[self.config.server.acks],
            call_later=self._call_later,
            turn_wanted=self._request_turn,
            status=partial(self._status, engine),
            opened=self._sessions.add,
            closed=self._sessions.discard,
            header_bounds=header_bounds(),
        )

    def _call_later(self, seconds: float, call: Callable[[], None]) -> DelayedCall:
        return DelayedCall(self._alarms, self._alarms.after(seconds, call))

    def _request_turn(self) -> None:
        self._turn_requested = True

    def _status(self, engine: RequestHandler) -> dict[str, Any]:
        return {
            **engine.broker.status(),
            "version": "tfmq in a test",
            "listen": self.address,
            "connections": len(self._sessions),
            "settings": self.config.values,
        }
