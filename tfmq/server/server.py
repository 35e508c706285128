"""The server: listener, broker, connections, and the periodic jobs around them."""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory

from journal.buffers import Pool
from journal.clock import Clock
from journal.disk import Disk
from tfmq import limits
from tfmq.broker.request_handler import Handle, RequestHandler, refuse_when_behind
from tfmq.config import Config, split_address
from tfmq.errors import BadFrame, Busy, ConfigError, NotAllowed, TfmqError
from tfmq.protocol import commands, frames
from tfmq.protocol.commands import ACKS, header_bounds
from tfmq.server.connection_limits import ConnectionLimits, DeadlineQueue, connections_max
from tfmq.server.health import RecoveryResponder
from tfmq.server.reactor import AsyncFsync, Turn, WorkerThreads, reactor_of_newcomers
from tfmq.server.session import RejectedConnection, Session, SessionContext
from tfmq.server.standby_reads import StandbyReads
from tfmq.server.tls_connection import TlsConnection
from tfmq.server.tracing import with_spans
from tfmq.server.transport import BACKLOG, Connection, FrameProtocol, Listener, address_text
from tfmq.tls import READ_BYTES, TlsSocket, certificate_trouble, server_context

if TYPE_CHECKING:
    import ssl

    from tfmq.replication.primary import Primary
    from tfmq.server.access_control import AccessControl
    from tfmq.server.http import HttpServer
    from tfmq.server.http_message import HttpAnswer, HttpContext
    from tfmq.server.metrics import Scraper
    from tfmq.server.replication import ReplicatedServer, Replication
    from tfmq.zookeeper.registration import Registration


STANDBY: Final = "The server is a standby."


class NextDueTimer:
    """A timer that calls `ring()` once, at the earliest of the times that were set since the last call of `ring`.

    Setting a later time does not move the timer, because moving it in every turn would be expensive. So `ring` may be
    called before there is anything to do.
    """

    def __init__(self, reactor: Any, clock: Clock, ring: Callable[[], None]) -> None:
        self._reactor = reactor
        self._clock = clock
        self._ring = ring
        self._call: Any = None
        self._due = 0.0

    def set_due(self, due: float | None) -> None:
        """Let the timer call `ring` at `due` (monotonic seconds) at the latest. None does not change the timer."""
        if due is None or (self._call is not None and self._due <= due):
            return
        if self._call is not None:
            self._call.cancel()
        self._due = due
        self._call = self._reactor.callLater(max(0.0, due - self._clock.monotonic()), self._fired)

    def _fired(self) -> None:
        self._call = None
        self._ring()


class IdleMonitor:
    """Calls `end` once when no session was open for `seconds` (0: never), so that an unused server exits."""

    def __init__(
        self, call_later: Callable[..., Any], seconds: float, sessions: Callable[[], int], end: Callable[[], None]
    ) -> None:
        self._call_later = call_later
        self._seconds = seconds
        self._sessions = sessions
        self._end = end
        self._call: Any = None
        self._running = False

    def start(self) -> None:
        self._running = True
        self.check()

    def check(self) -> None:
        """Start or cancel the timer. Called after a session was opened or closed."""
        idle = self._running and self._seconds > 0 and not self._sessions()
        if idle and self._call is None:
            self._call = self._call_later(self._seconds, self._expired)
        elif not idle and self._call is not None:
            self._call.cancel()
            self._call = None

    def stop(self) -> None:
        self._running = False
        self.check()

    def _expired(self) -> None:
        self._call = None
        self._running = False
        self._end()


logger = logging.getLogger("tfmq.server")

IN_DOUBT_CHECK_SECONDS = 60.0
"""Interval of the checks of `InDoubtMonitor`, unless half of the setting transaction.alarm_seconds is shorter."""
IN_DOUBT_CHECK_SECONDS_MIN = 0.05
REMIND_SECONDS = 3600.0
"""Interval at which a lasting alarm is logged again, so that the log of every hour contains the alarm."""


class InDoubtMonitor:
    """Logs an alarm if transactions stay prepared for `alarm_seconds`: they occupy disk space and lock offsets."""

    def __init__(
        self,
        call_later: Callable[[float, Callable[[], None]], Any],
        status: Callable[[], Mapping[str, Any]],
        alarm_seconds: float,
    ) -> None:
        self._call_later = call_later
        self._status = status
        self._alarm_seconds = alarm_seconds
        self._pause_seconds = max(IN_DOUBT_CHECK_SECONDS_MIN, min(IN_DOUBT_CHECK_SECONDS, alarm_seconds / 2))
        self._silent_seconds: float | None = None  # since the last alarm in the log; None without an alarm
        self._call: Any = None

    def start(self) -> None:
        """Check in the next turn, because prepared transactions may be old already, and then periodically."""
        self._call = self._call_later(0, self._check)

    def _check(self) -> None:
        try:
            self._log_alarm(self._status())
        finally:
            self._call = self._call_later(self._pause_seconds, self._check)

    def stop(self) -> None:
        if self._call is not None and self._call.active():
            self._call.cancel()

    def _log_alarm(self, found: Mapping[str, Any]) -> None:
        if not found.get("alarm"):
            if self._silent_seconds is not None:
                logger.info("no transaction is prepared for longer than %g s any more", self._alarm_seconds)
            self._silent_seconds = None
        elif self._silent_seconds is None or self._silent_seconds + self._pause_seconds >= REMIND_SECONDS:
            self._silent_seconds = 0.0
            logger.error(
                "prepared transactions that wait for their owners: %d, the oldest for %d s, which is longer than "
                "transaction.alarm_seconds = %g; tfmq tx list shows them, docs/operations.md (tfmq --docs) says what "
                "to do",
                found.get("prepared", 0),
                found.get("oldest_prepared_seconds") or 0,
                self._alarm_seconds,
            )
        else:
            self._silent_seconds += self._pause_seconds


# Memory that the C library keeps after it is freed

TRIM_THRESHOLD: Final = -1
MAP_THRESHOLD: Final = -3
"""Parameter numbers for glibc's mallopt, from its malloc.h."""
KEPT_BYTES: Final = 32 << 20
"""Free memory that glibc keeps at the end of the heap, enough for the reads and replies of a turn."""
MAPPED_BYTES: Final = 16 << 20
"""A buffer of at least this size (the largest frames) gets a mapping of its own, which is unmapped when freed."""


def retain_freed_memory() -> bool:
    """Let glibc keep up to KEPT_BYTES of freed memory. Return False on other C libraries.

    By default glibc returns every large buffer to the system when it is freed, and requests the memory again, page by
    page, for the next reply. That took half of the CPU time of a fetch. While the server is idle, `return_free_memory`
    returns the kept memory.
    """
    mallopt = _libc_function("mallopt", ctypes.c_int, ctypes.c_int)
    if mallopt is None:
        return False
    return bool(mallopt(MAP_THRESHOLD, MAPPED_BYTES) and mallopt(TRIM_THRESHOLD, KEPT_BYTES))


def return_free_memory() -> bool:
    """Return free memory to the system. Return whether there was any."""
    trim = _libc_function("malloc_trim", ctypes.c_size_t)
    return trim is not None and bool(trim(0))


TRIM_SECONDS = 15.0
"""Interval at which an idle server returns memory to the system."""
QUIET_ALLOCATIONS = 16
"""A server that allocated fewer buffers than this in an interval is idle."""


class MemoryTrimmer:
    """Calls `trim` when the server is idle (QUIET_ALLOCATIONS): once after each period of load, and after each interval
    in which worker threads completed jobs, because a job may free much memory, such as that of delayed messages which
    were written to buckets."""

    def __init__(
        self,
        call_later: Callable[..., Any],
        allocated_count: Callable[[], int],
        finished_jobs: Callable[[], int],
        trim: Callable[[], object],
    ) -> None:
        self._call_later = call_later
        self._allocated_count = allocated_count
        self._finished_jobs = finished_jobs
        self._trim = trim
        self._allocated = self._finished = 0
        self._trimmed = False

    def start(self) -> None:
        self._call_later(TRIM_SECONDS, self._check)

    def _check(self) -> None:
        allocated, finished = self._allocated_count(), self._finished_jobs()
        quiet = allocated - self._allocated < QUIET_ALLOCATIONS
        if quiet and not (self._trimmed and finished == self._finished):
            self._trim()
        self._trimmed = quiet
        self._allocated, self._finished = allocated, finished
        self._call_later(TRIM_SECONDS, self._check)


def _libc_function(name: str, *arguments: Any) -> Any:
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function.argtypes = list(arguments)
        function.restype = ctypes.c_int
    return function


REGISTRATION_CHECK_SECONDS: Final = 1.0
"""Interval at which the topics are registered again, so that created, grown and deleted topics are noticed."""
UNREGISTER_SECONDS: Final = 5.0
"""Maximum time that a stop waits for the removal of the registration. `Registration.close` normally ends earlier."""
ANY_HOSTS: Final = ("", "0.0.0.0", "::")
"""Listening hosts that mean all addresses of this machine. Clients cannot connect to them."""


class RegistrationUpdater:
    """Keeps the registration of the server's address and topics in ZooKeeper up to date."""

    def __init__(
        self,
        call_later: Callable[[float, Callable[[], None]], Any],
        topics: Callable[[], Mapping[str, int]],
        registration: Registration,
    ) -> None:
        self._call_later, self._topics, self._registration = call_later, topics, registration
        self._call: Any = None
        self._closing: threading.Thread | None = None

    def start(self) -> None:
        """Register the current topics, and repeat that every REGISTRATION_CHECK_SECONDS."""
        self._registration.set_topics(dict(self._topics()))
        self._call = self._call_later(REGISTRATION_CHECK_SECONDS, self.start)

    def stop(self) -> None:
        """Start a thread that removes the registration."""
        if self._call is not None and self._call.active():
            self._call.cancel()
        self._closing = threading.Thread(target=self._registration.close, name="tfmq-unregister", daemon=True)
        self._closing.start()

    def wait_unregistered(self) -> None:
        """Wait for the thread of `stop`. If the removal fails, the registration ends with its ZooKeeper session."""
        if self._closing is not None:
            self._closing.join(UNREGISTER_SECONDS)


def client_address(address: str) -> str:
    """Return the address for clients, with this machine's name if the server listens on all addresses."""
    host, port = split_address(address)
    return f"{socket.gethostname()}:{port}" if host in ANY_HOSTS else address


def registration_updater(
    zookeeper: str,
    address: str,
    call_later: Callable[[float, Callable[[], None]], Any],
    topics: Callable[[], Mapping[str, int]],
) -> RegistrationUpdater | None:
    """Return the updater for the server at `address`; None if the setting `zookeeper` is empty.

    Raises BadRequest for an invalid ZooKeeper address, NotSupported without kazoo.
    """
    if not zookeeper:
        return None
    from tfmq.zookeeper.registration import Registration

    return RegistrationUpdater(call_later, topics, Registration(zookeeper, client_address(address)))


LAST_REPLY_SECONDS = 1.0
"""When the server stops, time that its clients have to read their last replies."""
BEFORE_LOGIN_SECONDS = 1.0
"""How long a connection may take to log in although there are too many of them: longer than an honest client needs."""
REJECTED_MAX = 32
"""Maximum connections above the limit that are open at a time to get an error reply, each for two seconds."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Server:
    """One server in one reactor.

    Call `start()`, then run the reactor; `stop(done)` calls `done()` when all is closed.

    A start binds the address first, so that a port in use is reported at once; then it opens the broker, which may take
    long, and accepts connections. A stop closes the listener, lets the broker complete accepted requests, sends the
    last replies, closes the connections, and closes all files cleanly.
    """

    def __init__(
        self, config: Config, reactor: Any, disk: Disk, clock: Clock, randomness: Callable[[int], bytes]
    ) -> None:
        self.config = config
        self._reactor = reactor
        self._clock = clock
        self._randomness = randomness
        self._turn = Turn(reactor)
        self._workers = WorkerThreads(reactor, delivered=self._turn.request_end)
        self._fsync = AsyncFsync(reactor, self._turn.request_end)
        self._request_handler = RequestHandler(
            config, disk, clock, self._workers.run, randomness, self._fsync.begin, time.sleep
        )
        self._broker = self._request_handler.broker
        self._handle: Handle = self._request_handler.handle
        self._is_serving = False
        self._replication = replication = replication_of(config, reactor, disk, clock, randomness, self, self._turn)
        self._standby_reads: StandbyReads | None = None
        if replication is not None and config.replicate.read:
            self._standby_reads = StandbyReads(
                config,
                disk,
                clock,
                self._workers.run,
                randomness,
                reactor.callLater,
                lambda: replication.folder_version,
                time.sleep,
            )
        self._absence = "The server finds out whether it is primary."
        """Why a server with replicas has no broker, as long as it has none."""
        self._stopped: Callable[[], None] | None = None
        """What the end of the stop calls; None before `stop`."""
        self._pool = Pool()
        self._sessions: set[Session] = set()
        self._sessions_max = config.limits["connections"]
        self.on_idle: Callable[[], None] = lambda: None
        """Called when no client was connected for `server.idle_exit_seconds`."""
        self.on_ready: Callable[[], None] = lambda: None
        self.on_standby: Callable[[], None] = lambda: None
        """Called when the server accepts commands, and when it has become a standby."""
        self.on_restart: Callable[[str], None] = lambda reason: None
        """Called with the reason when another server has become primary: the process has to begin again."""
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        """Called with the error that keeps a server with replicas from following and from serving."""
        self._idle_monitor = IdleMonitor(
            reactor.callLater, config.server.idle_exit_seconds, lambda: len(self._sessions), lambda: self.on_idle()
        )
        self._header_bounds: dict[int, tuple[int, int]] = {}
        self._refused_count = 0
        self._rejecting = 0
        """Number of connections that are being rejected with an error reply."""
        self._listener: Listener | None = None
        self._timer = NextDueTimer(reactor, clock, self._tick)
        self._in_doubt = InDoubtMonitor(
            reactor.callLater,
            lambda: self._broker.transaction_commands.coordinator.status(),
            config.transaction.alarm_seconds,
        )
        self._registration: RegistrationUpdater | None = None
        self._trimmer = MemoryTrimmer(
            reactor.callLater,
            lambda: self._pool.stats().allocated_count,
            lambda: self._workers.finished_count,
            self._trim,
        )
        self.access = (
            access_control(config, self._request_handler.handle, self._request_handler.broker, clock, randomness)
            if self._standby_reads is None
            else access_control(config, self._standby_reads.handle, self._standby_reads, clock, randomness)
        )
        self._hello_deadlines = DeadlineQueue(reactor_of_newcomers(reactor).callLater, clock.monotonic)
        self._before_login: dict[Session, float] = {}
        """Sessions whose HELLO or login is not done, in the order of their age, with the time of their connection."""
        self._tls_context: ssl.SSLContext | None = None
        self._tls_scratch = bytearray(READ_BYTES)
        self._http: HttpServer | None = None
        self._http_port = 0
        self.address = config.server.listen
        self.http_url = ""
        """Address of the HTTP server, like http://127.0.0.1:8368; "" without one."""

    def start(self) -> None:
        """Open the broker and accept connections. If that fails, close everything again and raise the error."""
        self._tls_context = tls_context(self.config)
        if self.access is not None:
            self.access.load()
        host, port = split_address(self.config.server.listen)
        bound = bind_socket(host, port)
        bound_http = None
        try:
            bound_http = listen_for_http(self.config)
            self.address = address_text(host or bound.getsockname()[0], bound.getsockname()[1])
            self._registration = registration_updater(
                self.config.server.zookeeper,
                self.address,
                self._reactor.callLater,
                lambda: self._broker.topics.partition_counts(),
            )
            if self._replication is not None:
                self._replication.open(client_address(self.address))
            elif bound_http is None:
                self._request_handler.start()
            else:
                with RecoveryResponder(bound_http, self._tls_context):
                    self._request_handler.start()
        except BaseException:
            bound.close()
            if bound_http is not None:
                bound_http.close()
            self._workers.stop()
            self._fsync.stop()
            raise
        # The hooks of a turn are called in this order: the broker creates replies, which the connections then send.
        if self._replication is None:
            self._turn.at_end(self._broker.end_turn)
        else:
            self._turn.at_end(self._end_replicated_turn)
        self._connection_limits = ConnectionLimits(
            self._pool, self._turn, self._clock, self._reactor.callLater, self.config.limits
        )
        if self._replication is not None:
            self._start_listening(bound, host)
            if bound_http is not None:
                self._start_http(bound_http)
            self._reactor.callWhenRunning(self._replication.start)
            return
        if bound_http is not None:
            self._start_http(bound_http)
        self._serve()
        self._start_listening(bound, host)
        self._reactor.callWhenRunning(lambda: self.on_ready())

    def _serve(self) -> None:
        """Begin the work of a broker that has started."""
        self._is_serving = True
        self._turn.at_end(self._set_timer)
        self._bound_headers()
        self._in_doubt.start()
        self._idle_monitor.start()
        if self._registration is not None:
            self._registration.start()
        self._turn.request_end()
        self._trimmer.start()

    # What a server with replicas is told by its `Replication`

    @property
    def name(self) -> str:
        return server_name()

    def following(self) -> None:
        self._absence = STANDBY
        self.on_standby()

    def serve_as_primary(self, primary: Primary) -> None:
        """Start a broker on the folder of `primary` in a worker, while this thread sends heartbeats to the store."""
        assert self._replication is not None
        replication = self._replication
        self._absence = "The server has become primary, and recovers its data folder."
        self._request_handler = RequestHandler(
            self.config,
            primary.disk,
            self._clock,
            self._workers.run,
            self._randomness,
            replication.begin_force_of(self._fsync.begin),
            time.sleep,
            replication.replicas_of(primary, self._workers.run),
        )
        self._broker = self._request_handler.broker
        self._broker.may_be_behind = lambda: not primary.may_serve()
        self._handle = self._request_handler.handle
        if replication.is_sync:
            self._handle = refuse_when_behind(self._handle, self._broker)
        if self.access is not None:
            self.access = access_control(self.config, self._handle, self._broker, self._clock, self._randomness)
            assert self.access is not None
            self.access.load()
        primary.start()

        def started(_: Any, error: BaseException | None) -> None:
            if error is not None:
                self.on_failure(error)
                return
            primary.has_broker = True
            # Recovery may have changed files. What it has found counts when it is stored.
            primary.writer.when_stored(primary.disk.cut(), self._serve_replicated)
            primary.woken()

        self._workers.run(self._start_replicated, started)

    def _start_replicated(self) -> None:
        """Start the broker, in a worker; from then on an fsync is only half of what makes data durable."""
        assert self._replication is not None
        self._request_handler.start()
        self._replication.broker_started()

    def _serve_replicated(self) -> None:
        assert self._replication is not None
        if self._stopped is not None:
            return  # the stop has waited until what the recovery has found was stored
        self.__dict__.pop("_session_context", None)
        if self._broker.config is not self.config:  # it has changed while the broker started
            self._broker.reload(self.config)
        self.close_connections()  # these clients were told that this server is a standby
        self._serve()
        if self._http is not None:
            self._http.context = self._create_http_context()
        self.on_ready()

    def _end_replicated_turn(self) -> None:
        if self._is_serving:
            self._broker.end_turn()
        assert self._replication is not None
        self._replication.end_turn()

    def refuse(self, reason: str) -> None:
        """Refuse requests that write, because they could not be stored; with "", accept them again."""
        self._broker.backpressure.refusal = reason

    def close_connections(self) -> None:
        for session in list(self._sessions):
            session.transport.end()

    def hand_over(self) -> None:
        self.stop(lambda: self.on_restart("it has handed over to the standby that has asked for it"))

    def restart(self, reason: str) -> None:
        self.on_restart(reason)

    def fail(self, error: BaseException) -> None:
        self.on_failure(error)

    def stop(self, done: Callable[[], None]) -> None:
        """Complete what was accepted, close everything, then call `done()`. A second call replaces only `done`."""
        is_stopping, self._stopped = self._stopped is not None, done
        if is_stopping:
            return
        if self._listener is not None:
            self._listener.stopListening()
            self._listener = None
        self._in_doubt.stop()
        self._idle_monitor.stop()
        if self._replication is not None:
            # Without its store, what is not stored there waits on this disk for the next start.
            self._reactor.callLater(self._replication.stop_seconds, self._give_up_stop)
        if self._registration is not None:
            self._registration.stop()
        if self._broker.is_open:
            self._broker.stop(self._engine_stopped)
            self._turn.request_end()
        else:
            self._engine_stopped()

    def end_calls(self) -> None:
        """Start no further call of the store. The threads that have none end."""
        if self._replication is not None:
            self._replication.end_calls()

    def _give_up_stop(self) -> None:
        assert self._replication is not None and self._stopped is not None
        logger.error("%s", self._replication.sentence_of_rest())
        self._stopped()

    def reload(self, config: Config) -> None:
        """Apply another configuration, and read the certificates and the users again.

        Open sessions keep the limits and acks that their HELLO reply contained, and their TLS. Raises `ConfigError`,
        and changes nothing, if the certificates or the users cannot be used.
        """
        context = tls_context(config)
        if self.access is not None:
            self.access.load()
        self._tls_context = context
        self.config = config
        self.__dict__.pop("_session_context", None)
        if self._broker.is_open:  # a standby has none; one that starts just now gets it at its end
            self._broker.reload(config)
        self._connection_limits.set_limits(config.limits)
        self._bound_headers()
        self._limit_connections()
        self._turn.request_end()

    def _limit_connections(self) -> None:
        self._sessions_max = connections_max(
            self.config.limits["connections"], len(os.listdir("/proc/self/fd")) - len(self._sessions)
        )
        if self._sessions_max < self.config.limits["connections"]:
            logger.warning(
                "at most %d connections: the limit of open files leaves room for no more (ulimit -n)",
                self._sessions_max,
            )

    def _start_listening(self, bound: socket.socket, host: str) -> None:
        self._limit_connections()
        factory = Factory()
        factory.noisy = False
        factory.buildProtocol = lambda address: self.new_session()
        listener = Listener(bound, factory, reactor_of_newcomers(self._reactor), self._connection_limits, self._accept)
        try:
            listener.startListening()
        except OSError as error:
            port = bound.getsockname()[1]
            bound.close()
            raise listen_error(error, host, port) from None
        self._listener = listener

    def _start_http(self, listening: socket.socket) -> None:
        from tfmq.server.http import (
            HttpServer,
            http_url,
        )  # loads twisted.web, which a server without HTTP does not need

        self._http_port = listening.getsockname()[1]
        context = self._create_http_context()
        self._http = HttpServer(listening, reactor_of_newcomers(self._reactor), context, lambda: self._tls_context)
        self.http_url = http_url(self.config.http.listen, listening, self._tls_context is not None)
        logger.info("HTTP at %s", self.http_url)

    def _create_http_context(self) -> HttpContext:
        from tfmq.server.http_message import HttpContext
        from tfmq.server.http_page import make_page

        return HttpContext(
            config=lambda: self.config,
            status=self._status,
            turn_wanted=self._turn.request_end,
            not_ready=self._not_ready,
            access=self.access,
            absence=self._sentence_of_absence,
            page=make_page(
                lambda: self._session_context,
                lambda: self._broker,
                lambda: (self._connection_limits.received_bytes, self._connection_limits.sent_bytes),
                self._clock,
                self._randomness,
                self._http_port,
                lambda: self._tls_context is not None,
            ),
            scrape=self._create_scraper().scrape if self._has_broker else self._scrape_standby,
        )

    @property
    def _has_broker(self) -> bool:
        return self._replication is None or self._is_serving

    def _sentence_of_absence(self) -> str:
        if self._has_broker:
            return ""
        assert self._replication is not None
        if self._absence != STANDBY:
            return f"{self._absence} Ask again; /ready says when it is done."
        primary = self._replication.primary_address
        where = f"clients reach the primary at {primary}" if primary else "which server is primary is not known yet"
        return f"This server is a standby, and has no page: {where}, and the page is at that server's http.listen."

    def _create_scraper(self) -> Scraper:
        from tfmq.server.metrics import Scraper
        from tfmq.server.survey import Survey

        survey = Survey(self._broker, self._reactor.callLater, self._clock.monotonic)
        return Scraper(survey, self._server_figures, self._broker.run, self._reactor.callLater)

    def _scrape_standby(self) -> Deferred[HttpAnswer]:
        """Return the metrics of a server that is not primary, later."""
        from tfmq.server.metrics import STANDBY_METRICS, exposition
        from tfmq.server.survey import Figures

        assert self._replication is not None
        server = {"memory_bytes": resident_bytes(), "cpu_seconds": time.process_time()}
        figures = Figures({**server, "replication": self._replication.status()})
        answer: Deferred[HttpAnswer] = Deferred()

        def done(found: HttpAnswer | None, error: BaseException | None) -> None:
            if found is None:
                answer.errback(error)
            else:
                answer.callback(found)

        self._workers.run(lambda: exposition(figures, STANDBY_METRICS), done)
        return answer

    def _server_figures(self) -> dict[str, Any]:
        """Return the figures of the process and its connections, for metrics."""
        counts, http = self._connection_limits, self._http
        return {
            "version": server_name(),
            "ready": not self._not_ready(),
            "memory_bytes": resident_bytes(),
            "connections": len(self._sessions),
            "connections_refused": self._refused_count,
            "http_connections": 0 if http is None else len(http.channels),
            "http_connections_refused": 0 if http is None else http.refused_count,
            "request_count": counts.request_count,
            "received_bytes": counts.received_bytes,
            "sent_bytes": counts.sent_bytes,
            "unsent_bytes": counts.unsent_bytes,
            "failed_handshakes": counts.failed_handshakes + (0 if http is None else http.failed_handshakes),
            "buffer_bytes": self._pool.stats().live_bytes,
            "replication": {} if self._replication is None else self._replication.status(),
        }

    def _accept(
        self,
        sock: socket.socket,
        protocol: FrameProtocol,
        client: tuple[Any, ...],
        server: Any,
        number: int,
        reactor: Any,
        limits: ConnectionLimits,
    ) -> Connection:
        """Return the connection of a client, with the certificates that were read last."""
        if self._tls_context is None:
            return Connection(sock, protocol, client, server, number, reactor, limits)
        tls = TlsSocket(sock, self._tls_context, scratch=self._tls_scratch)
        return TlsConnection(tls, protocol, client, server, number, reactor, limits)

    def _set_timer(self) -> None:
        self._timer.set_due(self._broker.timers.next_due())

    def _tick(self) -> None:
        try:
            self._broker.timers.tick(self._clock.monotonic())
        finally:
            # Request the end of the turn after an exception too: its hook `_set_timer` sets the timer again.
            self._turn.request_end()

    def _trim(self) -> None:
        self._pool.trim()
        return_free_memory()

    def new_session(self) -> Session | RejectedConnection | None:
        """Return the protocol object of a new connection; above the limit, a `RejectedConnection`.

        If too many connections are being rejected already, return None: Twisted then closes the connection at once.
        Connections without a login must not keep others away: where there are too many, the oldest one is closed for
        the new one, unless it is younger than BEFORE_LOGIN_SECONDS.
        """
        is_full = len(self._sessions) >= self._sessions_max
        if is_full or len(self._before_login) >= self.config.limits["connections_before_login"]:
            self._close_oldest_before_login()
        if len(self._sessions) >= self._sessions_max:
            self._refused_count += 1
            if self._refused_count & (self._refused_count - 1) == 0:
                logger.warning("%d connections refused so far: there are %d", self._refused_count, self._sessions_max)
            if self._rejecting >= REJECTED_MAX:
                return None
            self._rejecting += 1
            is_own = self._sessions_max == self.config.limits["connections"]
            limit = "limits.connections" if is_own else "the limit of open files, ulimit -n"
            return RejectedConnection(
                Busy(
                    f"The broker has {len(self._sessions)} connections, and takes no more ({limit}): close"
                    " some, or raise the limit."
                ),
                self._rejected_closed,
            )
        return Session(self._session_context)

    def _close_oldest_before_login(self) -> None:
        oldest, since = next(iter(self._before_login.items()), (None, 0.0))
        if oldest is not None and self._clock.monotonic() - since >= BEFORE_LOGIN_SECONDS:
            self._refused_count += 1
            self._session_closed(oldest)  # at once, so that its place is free for the new one
            oldest.cut_off()

    def _rejected_closed(self) -> None:
        self._rejecting -= 1

    @functools.cached_property
    def _session_context(self) -> SessionContext:
        replication = self._replication
        if replication is not None and not self._is_serving:
            standby = replication.standby_handler(self.access, self._standby_reads)
            return self._create_context(
                standby.handle, "", replication.standby_status, hello_properties=standby.hello_properties
            )
        handle = with_spans(self._handle if self.access is None else self.access.handle)
        if replication is None:
            return self._create_context(handle, self._broker.node, self._status)
        return self._create_context(
            handle,
            self._broker.node,
            self._status,
            hello_properties=replication.hello_properties,
            synced_durability=replication.synced_durability,
        )

    def _create_context(
        self, handle: Callable[..., None], node: str, status: Callable[[], dict[str, Any]], **more: Any
    ) -> SessionContext:
        return SessionContext(
            handle=handle,
            node=node,
            server=server_name(),
            address=self.address,
            limits=self.config.limits,
            limits_sent=limits.limits_to_send(self.config.limits),
            acks=ACKS[self.config.server.acks],
            call_later=self._reactor.callLater,
            hello_later=self._hello_deadlines.call_later,
            turn_wanted=self._turn.request_end,
            status=status,
            opened=self._session_opened,
            closed=self._session_closed,
            header_bounds=self._header_bounds,
            access=self.access,
            greeted=self._session_greeted,
            **more,
        )

    def _bound_headers(self) -> None:
        """Set how many values a request header may have, by command. More partitions allow more values.

        The bounds are computed from the limit of partitions, or from the existing number, which is higher if the limit
        was reduced. The mapping is changed in place, because open sessions use it too.
        """
        existing = self._broker.topics.partition_count() if self._broker.is_open else 0
        self._header_bounds.update(header_bounds(max(self.config.limits["partitions"], existing)))

    def _session_opened(self, session: Session) -> None:
        self._sessions.add(session)
        self._before_login[session] = self._clock.monotonic()
        self._idle_monitor.check()

    def _session_greeted(self, session: Session) -> None:
        self._before_login.pop(session, None)

    def _session_closed(self, session: Session) -> None:
        self._sessions.discard(session)
        self._before_login.pop(session, None)
        self._idle_monitor.check()

    def _status(self) -> dict[str, Any]:
        pool = self._pool.stats()
        return {
            **self._broker.status(),
            "version": server_name(),
            "data": os.path.abspath(self.config.values["server.data"]),
            "listen": self.address,
            **({} if self._replication is None else {"replication": self._replication.status()}),
            "settings": self._public_settings(),
            "http": self.http_url,
            "connections": len(self._sessions),
            "connections_refused": self._refused_count,
            "memory_bytes": resident_bytes(),
            "unsent_bytes": self._connection_limits.unsent_bytes,
            "buffer_bytes": pool.live_bytes,
            "buffer_chunks": sum(pool.chunk_counts),
        }

    def _public_settings(self) -> dict[str, Any]:
        """Return the settings without the secrets that the URL of a store may have."""
        if self._replication is None:
            return dict(self.config.values)
        return {**self.config.values, "replicate.url": self._replication.store.name}

    def _not_ready(self) -> list[dict[str, str]]:
        """Return why the broker does not do its whole work now, each as a word and a sentence; [] if it does."""
        if not self._has_broker:
            return [{"reason": "replication", "detail": self._absence}]
        if not self._broker.is_open:
            return [{"reason": "stopping", "detail": "The broker completes its work and stops."}]
        if self._broker.backpressure.refusal:
            return [{"reason": "replication", "detail": self._broker.backpressure.refusal}]
        return self._broker.find_troubles()

    def _engine_stopped(self) -> None:
        self._turn.request_end()
        self.close_connections()
        self._close_by(self._clock.monotonic() + LAST_REPLY_SECONDS)

    def _close_by(self, deadline: float) -> None:
        if self._sessions and self._clock.monotonic() < deadline:
            self._reactor.callLater(0.01, self._close_by, deadline)
            return
        for session in list(self._sessions):
            session.transport.abortConnection()
        if self._replication is not None:
            self._replication.stop(self._close_files)
        else:
            self._reactor.callLater(0, self._close_files)

    def _close_files(self) -> None:
        assert self._stopped is not None
        if self._replication is not None:
            self._replication.close()
        if self._registration is not None:
            self._registration.wait_unregistered()
        if self._http is not None:
            self._http.stop()
        self._workers.stop()
        self._fsync.stop()
        self._connection_limits.close()
        live = self._pool.stats().live_count
        if live:
            logger.warning("%d receive buffers were not given back", live)
        self._stopped()


def replication_of(
    config: Config,
    reactor: Any,
    disk: Disk,
    clock: Clock,
    randomness: Callable[[int], bytes],
    server: ReplicatedServer,
    turn: Turn,
) -> Replication | None:
    """Return the replication of the configuration; None without one."""
    if not config.replicate.url:
        return None
    # Imported here because a server without replicas needs none of it.
    from tfmq.server.replication import Replication

    return Replication(config, reactor, disk, clock, randomness, server, turn)


def tls_context(config: Config) -> ssl.SSLContext | None:
    """Return the TLS context of the configuration; None without TLS. Raises `ConfigError` for an unusable file."""
    server = config.server
    if not server.tls_certificate:
        return None
    context = server_context(server.tls_certificate, server.tls_key, server.tls_client_ca)
    if trouble := certificate_trouble(context, server.tls_certificate):
        logger.warning(
            "server.tls_certificate is %s, which clients may refuse: %s. Replace the file, and send SIGHUP.",
            server.tls_certificate,
            trouble,
        )
    return context


def access_control(
    config: Config, handle: Callable[..., None], broker: Any, clock: Clock, randomness: Callable[[int], bytes]
) -> AccessControl | None:
    """Return the access control of the configuration; None if it has no users.

    `handle` executes requests; `broker` is the `Broker`, or the `StandbyReads`, which has fetches, too.
    """
    if not config.server.users:
        return None
    # Imported here because the library for logins takes time to load, which a server without users does not need.
    from tfmq.server.access_control import AccessControl

    return AccessControl(config.server.users, handle, lambda: broker, clock, randomness)


def resident_bytes() -> int:
    """Return the resident memory of the process, shared pages included."""
    with open("/proc/self/statm") as status:
        return int(status.read().split()[1]) * PAGE_BYTES


@functools.cache
def server_name() -> str:
    """Return the name and version of the installed package for display, like "tfmq 0.1.0"."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"tfmq {version('tfmq')}"
    except PackageNotFoundError:
        return "tfmq (not installed)"


# The listening address, and what uses it already


def bind_socket(host: str, port: int, key: str = "server.listen") -> socket.socket:
    """Return a socket that is bound but does not listen yet. An empty host means all addresses.
    Raises ConfigError if the host is unknown or is not this machine, NotAllowed if the port cannot be used."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"{key}: the host {host!r} is not known ({error.strerror}).") from None
    bound = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise listen_error(error, host, port, key) from None
    return bound


def listen_for_http(config: Config) -> socket.socket | None:
    """Return the listening socket of `http.listen`; None without HTTP, also if the default address is in use.

    Raises ConfigError if an address that was set cannot be used. The socket listens from here on, so that a request
    during the recovery is answered, or waits.
    """
    if not config.http.listen:
        return None
    host, port = split_address(config.http.listen)
    bound = None
    try:
        bound = bind_socket(host, port, "http.listen")
        bound.listen(BACKLOG)
    except (OSError, TfmqError) as error:
        if bound is not None:
            bound.close()
        known = error if isinstance(error, TfmqError) else listen_error(error, host, port, "http.listen")
        if "http.listen" in config.origins:
            raise ConfigError(known.sentence, key="http.listen") from None
        logger.warning("No HTTP server, so neither health nor metrics. %s", known.sentence)
        return None
    return bound


def listen_error(error: OSError, host: str, port: int, key: str = "server.listen") -> TfmqError:
    """Return the error that describes why the server cannot bind this address or listen on it."""
    where = address_text(host, port)
    if error.errno == errno.EADDRINUSE and key != "server.listen":
        return NotAllowed(f"The port {where} of {key} is taken: set {key} to another address, or to none ({key}=).")
    if error.errno == errno.EADDRINUSE:
        return NotAllowed(
            f"The port {where} is taken: {describe_port_owner(host, port)}. Stop it, or choose another port with "
            f"--listen {address_text(host, port + 1 if port < 65_535 else 0)} (0 takes a free one)."
        )
    if error.errno == errno.EACCES:
        return NotAllowed(f"The port {where} may not be used by this user: take one from 1024 on.")
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"{key}: this machine has no address {host}.")
    return NotAllowed(f"The server cannot listen at {where}: {error.strerror}.")


PROBE_SECONDS = 0.4
"""Timeout of each step of `describe_port_owner`. A program on this machine responds immediately or never."""
RESPONSE_BYTES_MAX = 4096


def describe_port_owner(host: str, port: int) -> str:
    """Return a clause that describes what uses a port, like "another tfmq server (tfmq 0.1.0) answers there".

    This waits for a greeting from the program. If none comes, it sends HELLO, and then an empty line, to which text
    protocols respond with an error. Each step has a timeout, and no step changes anything in the other program.
    """
    try:
        with socket.create_connection((host, port), timeout=PROBE_SECONDS) as connection:
            return _probe(connection)
    except OSError:
        return "something holds it that does not accept connections"


def _probe(connection: socket.socket) -> str:
    hello = commands.Hello(commands.MAGIC, commands.VERSION_MIN, commands.VERSION_MAX, "neighbour", {})
    questions = (b"", b"".join(frames.encode((commands.BY_REQUEST[commands.Hello].code, 0, *hello))), b"\r\n\r\n")
    for question in questions:
        connection.sendall(question)
        with suppress(TimeoutError):
            return describe_response(connection.recv(RESPONSE_BYTES_MAX))
    return "something answers there that does not say what it is"


def describe_response(response: bytes) -> str:
    """Return a clause that describes the program that sent `response`; b"" means that it closed the connection."""
    speaker = frames.detect_protocol(response)
    if speaker is not None:
        return f"{speaker} answers there"
    with suppress(BadFrame):
        frame, _ = frames.frame_at(memoryview(response), 0)
        if frame is not None and frame.header and frame.header[0] < 0:
            return "another tfmq server answers there, and refuses a connection without TLS, or this version"
        if frame is not None:
            server = frame.header[3] if len(frame.header) > 3 else "of another version"
            return f"another tfmq server ({server}) answers there"
    return "something answers there that is neither tfmq nor anything known"
