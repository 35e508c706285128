"""The server: all wiring, the start in its order, the stop.

Start: bind the address (a taken port is found before the long part), open the broker (tfmq.broker.startup has
that order), and accept connections last. Stop: accept nothing more, let the broker finish what it took, send
its last answers, end the connections, close everything as clean.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from typing import Any

from twisted.internet.protocol import Factory

from journal.buffers import Pool
from journal.clock import Clock
from journal.disk import Disk
from tfmq import limits
from tfmq.broker.request_handler import Engine
from tfmq.config import Config, split_address
from tfmq.errors import Busy
from tfmq.protocol.commands import ACKS, header_bounds
from tfmq.server import listening, memory
from tfmq.server.alarm import Alarm
from tfmq.server.commands import HANDLERS
from tfmq.server.forces import Forces
from tfmq.server.idleness import Idleness
from tfmq.server.in_doubt import InDoubt
from tfmq.server.reactor import Turn
from tfmq.server.registering import Registering, registering
from tfmq.server.session import Session, Turned, Welcome, everybody
from tfmq.server.traffic import Traffic
from tfmq.server.transport import Listener, address_text
from tfmq.server.version import server_name
from tfmq.server.workers import Workers

logger = logging.getLogger("tfmq.server")

ENDING_SECONDS = 1.0
"""How long connections get, at a stop, to take their last answers."""
TURNED_MAX = 32
"""Connections above the limit that are told so at a time, for two seconds each at most: each holds a descriptor."""
TRIM_SECONDS = 15.0
"""How often an idle server hands back memory that the last rush needed."""
QUIET_ALLOCATIONS = 16
"""A server that allocated fewer buffers than this between two looks is idle."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Service:
    """One server in one reactor. `start()`, then run the reactor; `stop(done)` calls back when all is
    closed.
    """

    def __init__(
        self, config: Config, reactor: Any, disk: Disk, clock: Clock, randomness: Callable[[int], bytes]
    ) -> None:
        self._config = config
        self._reactor = reactor
        self._clock = clock
        self._turn = Turn(reactor)
        self._workers = Workers(reactor, delivered=self._turn.want)
        self._forces = Forces(reactor, self._turn.want)
        self._engine = Engine(config, disk, clock, self._workers.run, randomness, self._forces.begin)
        self._pool = Pool()
        self._sessions: set[Session] = set()
        self._sessions_max = config.limits["connections"]
        self.on_idle: Callable[[], None] = lambda: None
        """Called when nobody was connected for `server.idle_exit_seconds`."""
        self._idleness = Idleness(
            reactor.callLater, config.server.idle_exit_seconds, self._count, lambda: self.on_idle()
        )
        self._header_bounds: dict[int, tuple[int, int]] = {}
        self._refused = 0
        self._turning = 0
        """Connections that are being told that there is no place."""
        self._listener: Listener | None = None
        self._alarm = Alarm(reactor, clock, self._tick)
        self._in_doubt = InDoubt(
            reactor.callLater, self._engine.transactions_map, config.transaction.alarm_seconds
        )
        self._registering: Registering | None = None
        self._allocated = 0
        self._trimmed = False
        self.address = config.server.listen

    def start(self) -> None:
        """Everything up to accepting connections. Raises what forbids it; then nothing is left open."""
        host, port = split_address(self._config.server.listen)
        bound = listening.bind(host, port)
        try:
            self.address = address_text(host or bound.getsockname()[0], bound.getsockname()[1])
            self._registering = registering(
                self._config.server.zookeeper,
                self.address,
                self._reactor.callLater,
                self._engine.partition_counts,
            )
            self._engine.start()
        except BaseException:
            bound.close()
            self._workers.stop()
            self._forces.stop()
            raise
        self._turn.at_end(self._engine.turn_ended)
        self._traffic = Traffic(
            self._pool, self._turn, self._clock, self._reactor.callLater, self._config.limits
        )
        self._turn.at_end(self._arm)
        self._bound_headers()
        self._listen(bound, host)
        self._in_doubt.start()
        self._idleness.start()
        if self._registering is not None:
            self._registering.start()
        self._turn.want()
        self._reactor.callLater(TRIM_SECONDS, self._trim_when_quiet)

    def stop(self, done: Callable[[], None]) -> None:
        """Stop cleanly, then `done()`."""
        if self._listener is not None:
            self._listener.stopListening()
            self._listener = None
        self._in_doubt.stop()
        self._idleness.stop()
        if self._registering is not None:
            self._registering.stop()
        self._engine.stop(lambda: self._engine_stopped(done))
        self._turn.want()

    def reload(self, config: Config) -> None:
        """The configuration that holds from now on (see `tfmq.config.reloaded`); sessions keep what HELLO told them."""
        self._config = config
        self.__dict__.pop("_welcomes", None)
        self._engine.reload(config)
        self._traffic.set_limits(config.limits)
        self._bound_headers()
        self._limit_connections()
        self._turn.want()

    def _limit_connections(self) -> None:
        self._sessions_max = listening.connections_max(
            self._config.limits["connections"], len(os.listdir("/proc/self/fd")) - len(self._sessions)
        )
        if self._sessions_max < self._config.limits["connections"]:
            logger.warning(
                "at most %d connections: the limit of open files leaves room for no more (ulimit -n)",
                self._sessions_max,
            )

    def _listen(self, bound: socket.socket, host: str) -> None:
        self._limit_connections()
        listener = Listener(bound, Sessions(self), self._reactor, self._traffic)
        try:
            listener.startListening()
        except OSError as error:
            port = bound.getsockname()[1]
            bound.close()
            raise listening.listen_failed(error, host, port) from None
        self._listener = listener

    @property
    def config(self) -> Config:
        """What holds now."""
        return self._config

    # Turning

    def _arm(self) -> None:
        self._alarm.set(self._engine.next_due())

    def _tick(self) -> None:
        try:
            self._engine.tick(self._clock.monotonic())
        finally:
            # Also behind a call that failed: the alarm for the others is set at the end of the turn.
            self._turn.want()

    def _trim_when_quiet(self) -> None:
        """Once when a rush is over, and not again before the next."""
        allocated = self._pool.stats().allocated_count
        quiet = allocated - self._allocated < QUIET_ALLOCATIONS
        if quiet and not self._trimmed:
            self._pool.trim()
            memory.give_back()
        self._trimmed = quiet
        self._allocated = allocated
        self._reactor.callLater(TRIM_SECONDS, self._trim_when_quiet)

    # Sessions

    def session(self) -> Session | Turned | None:
        """A session for a new connection. If there are as many as may be: what tells the peer so; None (the connection
        is closed at once) if too many are being told already.
        """
        if len(self._sessions) >= self._sessions_max:
            self._refused += 1
            if self._refused & (self._refused - 1) == 0:
                logger.warning(
                    "%d connections refused so far: there are %d", self._refused, self._sessions_max
                )
            if self._turning >= TURNED_MAX:
                return None
            self._turning += 1
            is_own = self._sessions_max == self._config.limits["connections"]
            limit = "limits.connections" if is_own else "the limit of open files, ulimit -n"
            return Turned(
                Busy(
                    f"The broker has {len(self._sessions)} connections, and takes no more ({limit}): close"
                    " some, or raise the limit."
                ),
                self._turned,
            )
        return Session(self._welcome())

    def _turned(self) -> None:
        self._turning -= 1

    def _welcome(self) -> Welcome:
        welcome = self.__dict__.get("_welcomes")
        if welcome is None:
            welcome = self._welcomes = Welcome(
                engine=self._engine,
                handlers=HANDLERS,
                server=server_name(),
                address=self.address,
                limits=self._config.limits,
                limits_sent=limits.sent(self._config.limits),
                acks=ACKS[self._config.server.acks],
                features=[],
                call_later=self._reactor.callLater,
                turn_wanted=self._turn.want,
                status=self._status,
                allow=everybody,
                opened=self._opened,
                closed=self._closed,
                header_bounds=self._header_bounds,
            )
        return welcome

    def _bound_headers(self) -> None:
        """As many partitions as there may be, or are: a limit may have been higher before. In place, for sessions that
        are open.
        """
        existing = sum(self._engine.partition_counts().values())
        self._header_bounds.update(header_bounds(max(self._config.limits["partitions"], existing)))

    def _opened(self, session: Session) -> None:
        self._sessions.add(session)
        self._idleness.look()

    def _closed(self, session: Session) -> None:
        self._sessions.discard(session)
        self._idleness.look()

    def _count(self) -> int:
        return len(self._sessions)

    def _status(self) -> dict[str, Any]:
        pool = self._pool.stats()
        return {
            "version": server_name(),
            "data": os.path.abspath(self._config.values["server.data"]),
            "listen": self.address,
            "connections": len(self._sessions),
            "connections_refused": self._refused,
            "memory_bytes": resident_bytes(),
            "unsent_bytes": self._traffic.unsent_bytes,
            "buffer_bytes": pool.live_bytes,
            "buffer_chunks": sum(pool.chunk_counts),
            "settings": self._config.values,
        }

    # Stopping

    def _engine_stopped(self, done: Callable[[], None]) -> None:
        self._turn.want()
        for session in list(self._sessions):
            session.transport.end()
        self._end_by(self._clock.monotonic() + ENDING_SECONDS, done)

    def _end_by(self, deadline: float, done: Callable[[], None]) -> None:
        if self._sessions and self._clock.monotonic() < deadline:
            self._reactor.callLater(0.01, self._end_by, deadline, done)
            return
        for session in list(self._sessions):
            session.transport.abortConnection()
        self._reactor.callLater(0, self._close, done)

    def _close(self, done: Callable[[], None]) -> None:
        if self._registering is not None:
            self._registering.end()
        self._workers.stop()
        self._forces.stop()
        self._traffic.close()
        live = self._pool.stats().live_count
        if live:
            logger.warning("%d receive buffers were not given back", live)
        done()


class Sessions(Factory):  # type: ignore[misc]
    """Makes the session of each connection."""

    noisy = False

    def __init__(self, service: Service) -> None:
        self._service = service

    def buildProtocol(self, address: Any) -> Session | Turned | None:
        """None closes the connection."""
        return self._service.session()


def resident_bytes() -> int:
    """Memory that the process has in use, shared pages included."""
    with open("/proc/self/statm") as status:
        return int(status.read().split()[1]) * PAGE_BYTES
