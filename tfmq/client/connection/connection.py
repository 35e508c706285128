"""One connection to a broker, without I/O: requests, replies, reconnection.

`ClientConnection` encodes requests and decodes replies; a driver opens the network connection, and writes and reads the
bytes. `PendingRequest` is a request and its reply.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from tfmq import limits
from tfmq.backoff import backoff_seconds, pause_seconds
from tfmq.bounded_msgpack import Buffer
from tfmq.client.connection.addresses import BrokerAddress, LocalBrokerAddress, find_address, is_address
from tfmq.client.operation import NEVER, Future
from tfmq.errors import (
    NOT_DONE,
    UNKNOWN,
    Abandoned,
    BadFrame,
    BadRequest,
    Closed,
    ConnectionFailed,
    LoginFailed,
    NotPrimary,
    Outcome,
    TfmqError,
    TimedOut,
    from_error_reply,
)
from tfmq.protocol.commands import (
    ACKS_REPLICATED,
    ACKS_SYNCED,
    BY_REQUEST,
    FEATURE_REPLICATED,
    FEATURE_SCRAM,
    MAGIC,
    MECHANISM_SCRAM,
    ROLE_STANDBY,
    TRACED_REQUESTS,
    VERSION_MAX,
    VERSION_MIN,
    Authenticate,
    Command,
    Hello,
    HelloReply,
    Ping,
)
from tfmq.protocol.frames import EMPTY_LINE, Decoder, Frame, encode

if TYPE_CHECKING:
    from tfmq.access.scram import ClientLogin

Address = BrokerAddress | LocalBrokerAddress
UpdateRequest = Callable[[Any], Any]


@dataclass(slots=True, eq=False, repr=False)
class PendingRequest(Future):
    """A request in progress. It is done when its reply has arrived, or when it has failed or was abandoned.

    `request` is a NamedTuple of `protocol.commands`. With `repeat` it is sent again after a reconnect. Without `repeat`
    it fails with outcome "unknown" if the connection is lost after it was sent. `in_background`: no caller waits, so
    the driver's background thread reads until the request is done. `update(request)` is called each time before the
    request is sent, and returns the request to send, for example with a shorter remaining delay.

    Once the request is done, `reply` or `error` is set. `reply_body` need not be copied: the view's bytes never change.
    """

    request: Any
    command: Command
    body: tuple[Buffer, ...]
    correlation_id: int
    deadline: float = NEVER
    repeat: bool = True
    in_background: bool = False
    wants_reply: bool = True
    update: UpdateRequest | None = None
    sent: bool = False
    send_count: int = 0
    """How often the request was sent. After several attempts it may have been executed although `error` is set."""
    reply: Any = None
    reply_body: memoryview = memoryview(b"")  # noqa: RUF009
    error: TfmqError | None = None

    def timeout_error(self, server: object) -> TimedOut:
        return TimedOut(
            f"{server} did not reply to {self.command.name} in time."
            + (" The request may still be executed." if self.sent else ""),
            outcome=UNKNOWN if self.sent else NOT_DONE,
        )

    def result(self) -> Any:
        """Return the reply, a NamedTuple of `protocol.commands`. Raises the error of the request."""
        if self.error is not None:
            raise self.error
        return self.reply

    def __repr__(self) -> str:
        state = "open" if not self.done else repr(self.error) if self.error else "answered"
        return f"<PendingRequest {self.command.name} {self.correlation_id} {state}>"


def error_from_reply(header: list[Any]) -> TfmqError:
    """Return the error that an error reply describes. Missing and malformed fields are replaced by defaults."""
    number, fields = -header[0], [*header[2:], None, None, None, None]
    code, outcome, sentence, details = fields[:4]
    return from_error_reply(
        number,
        code if isinstance(code, str) else "error",
        outcome if isinstance(outcome, str) else UNKNOWN,
        sentence if isinstance(sentence, str) else "",
        details if isinstance(details, dict) else {},
    )


def connection_error(
    error: BaseException | None, server: Address, servers: Sequence[Address], was_connected: bool
) -> TfmqError:
    if isinstance(error, BadFrame):
        failure: TfmqError = ConnectionFailed(f"{server}: {error.sentence}")
    elif isinstance(error, TfmqError):
        return error
    elif isinstance(error, ConnectionRefusedError):
        failure = ConnectionFailed(
            f"Nothing listens at {join_addresses(servers)}: start tfmq-server, or correct the address."
        )
    else:
        reason = f": {error}" if error is not None and str(error) else ""
        what = "was lost" if was_connected else "could not be made"
        failure = ConnectionFailed(f"The connection to the broker at {server} {what}{reason}.")
    failure.__cause__ = error
    return failure


def _login_wanted(server: Address) -> str:
    if isinstance(server, BrokerAddress):
        scheme, where = ("tfmq" if server.tls is None else "tfmqs"), str(server).rpartition("//")[2]
        return f"{server} wants a login: write {scheme}://USER@{where}, and the password in $TFMQ_PASSWORD."
    return f"The broker on {server} wants a login: write tfmq://USER@HOST:PORT instead, and $TFMQ_PASSWORD."


def join_addresses(servers: Sequence[Address]) -> str:
    return " or ".join(map(str, servers))


log = logging.getLogger("tfmq.connection")

Clock = Callable[[], float]

BACK_OFF_SECONDS = 0.05
"""The pause after the first failed attempt to connect; doubled after each further failed attempt."""
BACK_OFF_SECONDS_MAX = 2.0
BACK_OFF_SECONDS_FIRST = 0.25
"""The longest pause before the first successful connection: short, because a user waits for the result."""
FIRST_CONNECT_TIMEOUT = 2.0
"""After this time, requests that wait for the first connection fail.

Long enough for a broker that is started together with the client; short enough for the report of a wrong address.
"""
SILENT_ATTEMPTS = 3
"""After this number of failed attempts at each address (in about 0.15 s), the client logs that it waits."""
REQUEST_TIMEOUT_SECONDS = 30.0
DEADLINES_KEPT: Final = 16
"""Number of requests that may stay in the heap of deadlines although they are done. Each keeps its reply."""
HELLO_TIMEOUT_SECONDS = 10.0

SHORT_CONNECTIONS_MAX: Final = 25
"""A client opens a lost connection again at once. After this number of connections in a row that each lasted less than
BACK_OFF_SECONDS, it waits before the next one, as if it had not been connected."""

# With several addresses, a client leaves a server that does not answer, because another one may have become primary.

OTHER_SERVER_SECONDS = 2.0
"""With several addresses, how long a client waits for a connection, and for the reply to HELLO, before it tries the
next one. A machine that is switched off, or a process that is stopped, gives no answer at all."""
SILENT_SERVER_SECONDS = 0.25
"""The same for the first SHORT_ATTEMPTS attempts at a server that the client left because it was silent. The time
doubles after each SHORT_ATTEMPTS attempts, up to OTHER_SERVER_SECONDS."""
SHORT_ATTEMPTS = 4
"""A client leaves a silent server before the lease is over, so it has to try the standbys often until one of them
serves. The first SHORT_ATTEMPTS rounds take about 2 s, with their pauses, and the next ones 4 s."""
PING_SECONDS = 1.5
"""A replicated broker that sent nothing for this time, although requests wait, gets a PING ..."""
SILENCE_SECONDS = 3.0
"""... and if it sends not a byte for this time after it, the client tries the other addresses. So a client notices
within this time and twice the other that a machine is gone: 6 s."""
NO_PRIMARY_SECONDS = 30.0
"""How long the first request waits while a standby answers but no server is primary: longer than a failover takes."""
NO_PRIMARY_PAUSE_SECONDS = 0.5
"""The longest pause between two rounds in which a standby answered, because one of the servers soon is primary."""

HELLO = BY_REQUEST[Hello]
PING = BY_REQUEST[Ping]
AUTHENTICATE: Final = BY_REQUEST[Authenticate]
_CORRELATION_IDS = 1 << 32


class ConnectionState(StrEnum):
    DOWN = "down"
    CONNECTING = "connecting"
    """The driver opens the network connection."""
    GREETING = "greeting"
    """HELLO is sent, and its reply is not received yet, or the login is not complete."""
    READY = "ready"
    CLOSED = "closed"


_NOT_CONNECTED: Final = (ConnectionState.DOWN, ConnectionState.CONNECTING)
READY: Final = ConnectionState.READY
"""A constant, because access to an enum member is a call on Python 3.11, and each request compares states."""


class ClientConnection:
    """A connection to one of `servers`, without I/O. Not thread-safe: callers hold the driver's lock.

    A driver connects when `wants_connection` returns True, and writes and reads the bytes. Every request completes
    exactly once. After a lost connection, requests with `repeat` are sent again in their original order before any
    newer request. Requests without `repeat` fail with outcome "unknown" if they were sent before; otherwise they wait
    for the next connection. If a request is abandoned, its reply is ignored, and the connection stays usable.

    If the address has a user, no request is sent before the login is complete and the broker has proved that it knows
    the user. `LoginFailed` ends all pending requests; the next attempt is made for a later request, after a pause.

    The servers are addresses of one broker, or the servers of a replicated one, of which one is primary. A standby that
    answers is left, for the server that it names as primary if that is one of `servers`, else for the others in turn. A
    server that is not in `servers` is never connected to, whatever a standby says, so that neither messages nor logins
    are sent to an address that the user has not written. A request that was refused because its server is no primary
    was not executed, and is sent again as one that was never sent.
    """

    def __init__(
        self,
        servers: Sequence[Address],
        clock: Clock,
        *,
        client: str = "tfmq-python",
        first_connect_timeout: float = FIRST_CONNECT_TIMEOUT,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.servers = tuple(servers)
        self.client = client
        self.operator = False
        """Whether a person uses the client, so that the broker logs the changes that it requests."""
        self.accepts_standby = False
        """Whether a standby is a server to work with, for clients that ask for its state or promote it."""
        self.reads_standby = False
        """Whether a standby that serves reads is a server to work with."""
        self.waits_for_fsync = False
        """Whether replies mostly come after an fsync, so that a driver that busy-polls does so for longer."""
        self.trace_context: Callable[[], str | None] | None = None
        """Returns the trace context of the active span, for requests that a caller sends; None if the client does not
        trace."""
        self.first_connect_timeout = first_connect_timeout
        self.now = clock
        """Returns the time in seconds, by the connection's clock. All deadlines are times of this clock."""
        self._jitter = jitter
        self.on_ready: list[Callable[[ClientConnection], None]] = []
        """Functions called after every HELLO reply. For example, a group member then sends a heartbeat."""
        self.reset()

    def reset(self) -> None:
        """Set the initial state. A forked child calls this to drop the open requests, which belong to the parent."""
        self.state = ConnectionState.DOWN
        self.hello: HelloReply | None = None
        self.limits = limits.limits_to_send({})
        """The broker's limits by name; before the broker's first HELLO reply, the default limits."""
        self.connection_count = 0
        """How many HELLO replies have arrived: one for each connection."""
        self.background_requests = 0
        """How many open requests were sent with `in_background`."""
        self.last_error: TfmqError | None = None
        self._login: ClientLogin | None = None
        """The login in progress, after HELLO."""
        self._login_refusal: LoginFailed | None = None
        """The first failed login since all servers were tried without success, or since a connection was ready."""
        self._greeting: tuple[HelloReply, dict[str, int]] | None = None
        """The reply to HELLO and the broker's limits, while the login is in progress."""
        self._server_index = self._rounds = 0
        """The index of the server to try next, or in use, and how often all servers were tried without success."""
        self._tried: set[int] = set()
        """The indexes of the servers that were tried in this round."""
        self._ready_at = 0.0
        """When the last connection became ready, in monotonic seconds."""
        self._short_count = 0
        """How many connections in a row ended within BACK_OFF_SECONDS after that."""
        self._had_standbys = False
        """Whether a standby answered in the last complete round."""
        self._silent: dict[int, int] = {}
        """Servers that were left because they were silent, by index, and the attempts at each since then."""
        self._lost_index = -1
        """The index of the server whose connection was lost before this round; -1: none."""
        self._standbys: dict[int, str] = {}
        """The standbys of this round, and the primary that each named."""
        self._refused_by: NotPrimary | None = None
        """The error of a request that was refused because its server is no primary; the connection ends then."""
        self._got_response = False  # Whether a part of a reply was received after the HELLO reply.
        self._has_heard = self._has_pinged = False
        """Whether the server sent something since the last check that it lives, and got a PING at that check."""
        self._trying_since: float | None = None
        self._retry_at = 0.0
        self._reply_deadline = NEVER
        """When the connection, the HELLO reply or the login is late, and when it is checked that the server lives."""
        self._correlation_ids = itertools.count(1)
        self._pending: dict[int, PendingRequest] = {}
        self._deadlines: list[tuple[float, int, PendingRequest]] = []
        self.output: deque[memoryview] = deque()
        """The bytes that the driver must write; `output_written` removes them."""
        self._queued_bytes = self._written_bytes = 0
        self._complete_when_written: deque[tuple[int, PendingRequest]] = deque()
        self._decoder = Decoder(limits.FRAME_BYTES)

    # Used by code that sends requests

    @property
    def server(self) -> Address:
        """The address of the current connection, or else the address to try next."""
        return self.servers[self._server_index]

    @property
    def synced_durability(self) -> int:
        """What is durable when the broker replies that something is done: `ACKS_SYNCED`, or `ACKS_REPLICATED`."""
        found = None if self.hello is None else self.hello.properties.get("durability")
        return ACKS_REPLICATED if found == ACKS_REPLICATED else ACKS_SYNCED

    def send_request(
        self,
        request: Any,
        *body: Buffer,
        seconds: float | None = REQUEST_TIMEOUT_SECONDS,
        repeat: bool = True,
        in_background: bool = False,
        wants_reply: bool = True,
        update: UpdateRequest | None = None,
    ) -> PendingRequest:
        """Send `request` now, or once there is a connection. The request fails after `seconds` (None: no time limit).

        Use `repeat=False` for requests that must not be executed twice. With `wants_reply=False` the request is done
        once it is written. `update(request)` is called before each attempt, and returns the request to send. The `body`
        buffers are not copied; do not change them before the request is done. Raises `Closed` after `close`,
        `BadRequest` for fields that cannot be packed.
        """
        if self.state == ConnectionState.CLOSED:
            raise Closed("The client is closed; make a new one.")
        deadline = NEVER if seconds is None else self.now() + seconds
        number = next(self._correlation_ids) % _CORRELATION_IDS
        while number == 0 or number in self._pending:
            number = next(self._correlation_ids) % _CORRELATION_IDS
        if self.trace_context is not None and not in_background and type(request) in TRACED_REQUESTS:
            request = request._replace(trace=request.trace or self.trace_context())
        command = BY_REQUEST[type(request)]
        pending = PendingRequest(request, command, body, number, deadline, repeat, in_background, wants_reply, update)
        if self.state == READY:
            self._send(pending)
        elif (
            self.state == ConnectionState.DOWN
            and self.connection_count
            and not self._pending
            and not isinstance(self.last_error, LoginFailed)
        ):
            # This is the only waiting request. After many failed attempts the pause may be long: shorten it. But a
            # password that is wrong mostly stays so, and each login costs both ends some computing time.
            self._rounds = 0
            self._retry_at = min(self._retry_at, self.now() + BACK_OFF_SECONDS)
        self._pending[pending.correlation_id] = pending
        self.background_requests += in_background
        if deadline != NEVER:
            heapq.heappush(self._deadlines, (deadline, pending.correlation_id, pending))
            if len(self._deadlines) > DEADLINES_KEPT + 2 * len(self._pending):
                # Requests that are done stay, with their replies, below one that waits for long.
                self._deadlines = [each for each in self._deadlines if not each[2].done]
                heapq.heapify(self._deadlines)
        return pending

    def abandon(self, pending: PendingRequest, error: TfmqError | None = None) -> None:
        """Fail the request with `error` (default: `Abandoned`). Its reply will be ignored."""
        if not pending.done:
            self._fail(pending, error or Abandoned(outcome=UNKNOWN if pending.sent else NOT_DONE))

    def close(self, error: TfmqError | None = None) -> None:
        self.state = ConnectionState.CLOSED
        self._reply_deadline = NEVER
        self.output.clear()
        for pending in list(self._pending.values()):
            outcome = UNKNOWN if pending.sent else NOT_DONE
            self._fail(pending, error or Abandoned("The client was closed before the reply arrived.", outcome=outcome))

    # Used by drivers

    @property
    def has_pending_requests(self) -> bool:
        return bool(self._pending)

    def wants_connection(self) -> bool:
        return self.state == ConnectionState.DOWN and bool(self._pending) and self.now() >= self._retry_at

    def next_time(self) -> float:
        """Return when `tick` must be called next; infinity if no call is needed."""
        while self._deadlines and self._deadlines[0][2].done:
            heapq.heappop(self._deadlines)
        due = self._deadlines[0][0] if self._deadlines else NEVER
        if self.state == ConnectionState.DOWN:
            return min(due, self._retry_at) if self._pending else due
        return min(due, self._reply_deadline)

    def tick(self) -> None:
        """Fail requests past their deadline. Raises ConnectionFailed if the server does not answer; disconnect then."""
        now = self.now()
        while self._deadlines and (self._deadlines[0][2].done or self._deadlines[0][0] <= now):
            pending = heapq.heappop(self._deadlines)[2]
            if not pending.done:
                error: TfmqError = pending.timeout_error(self.server)
                if self.state != READY and self.last_error is not None:
                    error = self.connection_failure(error.outcome)
                self._fail(pending, error)
        if now >= self._reply_deadline:
            self._check_server(now)

    def connection_failure(self, outcome: Outcome) -> TfmqError:
        """Return an error for a request that waited for a connection, with the sentence of the last failure."""
        last = self.last_error
        if isinstance(last, NotPrimary):
            return NotPrimary(last.sentence, outcome=outcome, primary=last.primary)
        return ConnectionFailed("" if last is None else last.sentence, outcome=outcome)

    def _check_server(self, now: float) -> None:
        """Raise ConnectionFailed if the server is late with what it has to do now, or seems to be gone."""
        seconds = self._answer_seconds
        # If this check itself is late, because this program was stopped, the answer may wait to be read.
        is_late = now >= self._reply_deadline + (SILENCE_SECONDS / 2 if self.state == READY else seconds)
        if is_late and self.state != READY:
            self._reply_deadline = now + seconds
            return
        if self.state in (ConnectionState.CONNECTING, ConnectionState.GREETING) and self._server_index in self._silent:
            self._silent[self._server_index] += 1
        if self.state == ConnectionState.CONNECTING:
            raise ConnectionFailed(f"{self.server} does not answer: no connection in {seconds:g} s.", outcome=NOT_DONE)
        if self.state == ConnectionState.GREETING:
            what = "did not reply to HELLO"
            if self._login is not None:
                what, seconds = "did not complete the login", HELLO_TIMEOUT_SECONDS
            raise ConnectionFailed(
                f"{self.server} accepted the connection but {what} in {seconds:g} s:"
                " check that a tfmq broker is there.",
                outcome=NOT_DONE,
            )
        if self._has_pinged and not self._has_heard and not is_late:
            self._silent[self._server_index] = 0
            raise ConnectionFailed(f"{self.server} has sent nothing for {PING_SECONDS + SILENCE_SECONDS:g} s.")
        self._has_pinged = not self._has_heard and bool(self._pending)
        if self._has_pinged:
            self._queue(encode([PING.code, next(self._correlation_ids) % _CORRELATION_IDS]))
        self._has_heard = False
        self._reply_deadline = now + (SILENCE_SECONDS if self._has_pinged else PING_SECONDS)

    @property
    def _answer_seconds(self) -> float:
        if len(self.servers) == 1:
            return HELLO_TIMEOUT_SECONDS
        attempts = self._silent.get(self._server_index)
        if attempts is None:
            return OTHER_SERVER_SECONDS
        # It was silent a moment ago: while it is waited for, a standby may have become primary.
        return min(OTHER_SERVER_SECONDS, SILENT_SERVER_SECONDS * (1 << min(attempts // SHORT_ATTEMPTS, 8)))

    def connecting(self) -> None:
        """Note that the driver has begun to open the network connection to `server`."""
        self.state = ConnectionState.CONNECTING
        # A single server is waited for as long as the system tries, because there is no other one to try.
        self._reply_deadline = self.now() + self._answer_seconds if len(self.servers) > 1 else NEVER

    def connected(self) -> None:
        """Queue HELLO for the network connection that the driver has opened."""
        self.state = ConnectionState.GREETING
        now = self.now()
        self._reply_deadline = now + self._answer_seconds
        self._trying_since = now if self._trying_since is None else self._trying_since
        self._decoder = Decoder(limits.FRAME_BYTES)
        self._login = self._greeting = None
        self.output.clear()
        self._queued_bytes = self._written_bytes = 0
        details: dict[str, Any] = {"process": os.getpid(), "features": [FEATURE_REPLICATED]}
        if self.operator:
            details["operator"] = True
        details["line"] = EMPTY_LINE
        hello = Hello(MAGIC, VERSION_MIN, VERSION_MAX, self.client, details)
        self._queue(encode([HELLO.code, 0, *hello]))

    def received(self, data: bytes | bytearray) -> None:
        """Process received bytes; the caller must not change them later. If this raises, the driver must disconnect."""
        self._has_heard = True
        for frame in self._decoder.feed(data):
            self._process_frame(frame)
        if self._refused_by is not None:
            raise self._refused_by
        if not self._got_response and self._decoder.is_incomplete and self.state == READY:
            self._got_response = True

    def output_written(self, size: int) -> None:
        """Remove the first `size` bytes of `output`, which the driver has written."""
        self._written_bytes += size
        output = self.output
        while size:
            first = output[0]
            if len(first) > size:
                output[0] = first[size:]
                break
            size -= len(first)
            output.popleft()
        while self._complete_when_written and self._complete_when_written[0][0] <= self._written_bytes:
            pending = self._complete_when_written.popleft()[1]
            if not pending.done:
                self._complete(pending)

    def disconnected(self, error: BaseException | None = None) -> None:
        """Note that the connection was lost or could not be opened. Fail the requests that must not be sent again."""
        if self.state == ConnectionState.CLOSED:
            return
        was_connected, was_ready = self.state not in _NOT_CONNECTED, self.state == READY
        self.state = ConnectionState.DOWN
        self._reply_deadline = NEVER
        self.output.clear()
        self._complete_when_written.clear()
        failed = connection_error(error, self.server, self.servers, was_connected)
        if isinstance(failed, LoginFailed) and self._login_refusal is None:
            self._login_refusal = failed
        self._login = self._greeting = self._refused_by = None
        self.last_error = failed
        now = self.now()
        for pending in [each for each in self._pending.values() if each.sent and not each.repeat]:
            self._fail(pending, ConnectionFailed(failed.sentence, outcome=UNKNOWN))
        if was_ready:
            self._short_count = self._short_count + 1 if now - self._ready_at < BACK_OFF_SECONDS else 0
        if was_ready and self._got_response and self._short_count <= SHORT_CONNECTIONS_MAX:
            self._begin_round()
            self._rounds, self._trying_since, self._retry_at = 0, None, now
            self._lost_index = self._server_index
            if not isinstance(error, NotPrimary):
                self._server_index = (self._server_index + 1) % len(self.servers)
                return
        self._trying_since = now if self._trying_since is None else self._trying_since
        self._retry_at = now
        self._tried.add(self._server_index)
        if isinstance(error, NotPrimary):
            self._standbys[self._server_index] = error.primary if is_address(error.primary) else ""
        if len(self._tried) < len(self.servers):
            self._server_index = self._next_server(error)
            return  # Some servers have not been tried since the last pause: try the next server at once.
        self._server_index = (self._server_index + 1) % len(self.servers)
        self._end_round(failed, error)

    def _next_server(self, error: BaseException | None) -> int:
        """Return the index of a server that was not tried in this round: the primary that a standby names, if it may be
        tried, else the next one. A server whose connection was just lost is the last one, whoever names it.
        """
        if isinstance(error, NotPrimary):
            named = find_address(error.primary, self.servers)
            if named is not None and named not in self._tried and named != self._lost_index:
                return named
        order = [(self._server_index + step) % len(self.servers) for step in range(1, len(self.servers))]
        left = [each for each in order if each not in self._tried]
        return next((each for each in left if each != self._lost_index), left[0])

    def _begin_round(self) -> None:
        self._tried.clear()
        self._standbys.clear()
        self._lost_index = -1

    def _end_round(self, failed: TfmqError, error: BaseException | None) -> None:
        """Set the pause before the next round, and fail the requests for which no other round can help.

        `failed`: the error of the last server as requests get it; `error`: its cause.
        """
        now = self.now()
        self._rounds += 1
        standbys = dict(self._standbys)
        self._begin_round()
        most = BACK_OFF_SECONDS_MAX if self.connection_count else BACK_OFF_SECONDS_FIRST
        if standbys:
            most = NO_PRIMARY_PAUSE_SECONDS
        elif self._had_standbys:
            # A standby that becomes primary closes its connections, and takes new ones at once: pauses are short again.
            self._rounds = 1
        self._had_standbys = bool(standbys)
        pause = backoff_seconds(self._rounds, BACK_OFF_SECONDS, most) * (0.75 + 0.5 * self._jitter())
        self._retry_at += pause_seconds(error, pause)
        is_final = isinstance(error, TfmqError) and not error.retriable
        if standbys and not is_final:
            failed = self._no_primary(standbys)
        # All servers are the same broker, so that a wrong password is reported also if another one does not listen.
        refusal, self._login_refusal = self._login_refusal, None
        failed = self.last_error = refusal or failed
        # A primary that only one of several servers names, or none, is expected: one of the servers takes over.
        is_expected = len(self.servers) > 1 and bool(standbys) and not self._is_elsewhere(standbys)
        patience = max(NO_PRIMARY_SECONDS, self.first_connect_timeout) if is_expected else self.first_connect_timeout
        too_long = not self.connection_count and now - (self._trying_since or now) >= patience
        if too_long or refusal is not None or (is_final and not is_expected):
            self._trying_since = None
            for pending in list(self._pending.values()):
                outcome = UNKNOWN if pending.sent else NOT_DONE
                failure = type(failed)(failed.sentence, outcome=outcome, retriable=failed.retriable, **failed.details)
                failure.__cause__ = failed.__cause__
                self._fail(pending, failure)
            return
        if self._rounds == SILENT_ATTEMPTS and not self.connection_count:
            if standbys:
                log.info("%s Waiting %g s.", failed.sentence, patience)
            elif isinstance(error, ConnectionRefusedError):
                addresses = join_addresses(self.servers)
                log.info("Nothing listens at %s yet: waiting %g s.", addresses, self.first_connect_timeout)

    def _is_elsewhere(self, standbys: dict[int, str]) -> bool:
        """Return whether every standby names a primary that is not one of the servers of this client."""
        return all(primary and find_address(primary, self.servers) is None for primary in standbys.values())

    def _no_primary(self, standbys: dict[int, str]) -> NotPrimary:
        index = next((each for each, primary in standbys.items() if primary), next(iter(standbys)))
        primary, standby = standbys[index], self.servers[index]
        if self._is_elsewhere(standbys):
            advice = f"{primary} is the primary: add it to the addresses of this client."
        elif len(self.servers) == 1:
            advice = "No primary is known: give the addresses of all servers, or wait until one is primary."
        else:
            advice = "None of the servers of this client is primary yet; `tfmq replica status` shows their state."
        kind = "a standby without replicate.read=true" if self.reads_standby else "a standby"
        return NotPrimary(f"{standby} is {kind}, which takes no requests. {advice}", primary=primary)

    def _queue(self, buffers: list[Buffer]) -> None:
        for buffer in buffers:
            view = memoryview(buffer)
            if view.nbytes:
                self.output.append(view)
                self._queued_bytes += view.nbytes

    def _send(self, pending: PendingRequest) -> None:
        if pending.update is not None:
            pending.request = pending.update(pending.request)
        self._queue(encode([pending.command.code, pending.correlation_id, *pending.request], *pending.body))
        pending.sent = True
        pending.send_count += 1
        if not pending.wants_reply:
            self._complete_when_written.append((self._queued_bytes, pending))

    def _process_frame(self, frame: Frame) -> None:
        header = frame.header
        kind, correlation = header[:2]
        if kind > 0:
            raise BadFrame(f"{self.server} sent a request where only replies are expected.")
        if self.state == ConnectionState.GREETING:
            if self._login is None:
                self._process_hello(header)
            else:
                self._process_login(self._login, header)
            return
        pending = self._pending.get(correlation)
        if pending is None:
            if kind < 0 and correlation == 0:
                # No request has correlation id 0, so the error concerns the connection.
                raise error_from_reply(header)
            return
        if kind < 0:
            error = error_from_reply(header)
            if isinstance(error, NotPrimary) and not self.accepts_standby:
                self._postpone(pending, error)
                return
            self._got_response = True
            self._fail(pending, error)
            return
        self._got_response = True
        try:
            pending.reply = pending.command.reply.decode(header, pending.command.name, 2)
        except TfmqError as unreadable:
            sentence = f"The reply to {pending.command.name} cannot be read: {unreadable}"
            self._fail(pending, BadFrame(sentence, outcome=UNKNOWN))
            return
        pending.reply_body = frame.body
        self._complete(pending)

    def _postpone(self, pending: PendingRequest, error: NotPrimary) -> None:
        """Let a request that a standby refused wait for the primary, as if this attempt had not been made."""
        pending.send_count -= 1
        pending.sent = pending.send_count > 0
        self._refused_by = self._refused_by or error

    def _process_hello(self, header: list[Any]) -> None:
        if header[0] < 0:
            raise error_from_reply(header)
        try:
            hello = HELLO.reply.decode(header, "HELLO", 2)
            self._greeting = hello, limits.received_limits(hello.limits)
        except (BadRequest, ValueError) as error:
            raise BadFrame(f"{self.server} replied to HELLO with something else: {error}") from None
        properties = hello.properties
        is_accepted = self.accepts_standby or (self.reads_standby and properties.get("reads") is True)
        if properties.get("role") == ROLE_STANDBY and not is_accepted:
            # Before the login, because a login costs both ends some computing time.
            primary = properties.get("primary")
            raise NotPrimary(f"{self.server} is a standby, which takes no requests.", primary=primary)
        wants_login = FEATURE_SCRAM in hello.features
        server = self.server
        credentials = server.credentials if isinstance(server, BrokerAddress) else None
        if credentials is None:
            if wants_login:
                raise LoginFailed(_login_wanted(server))
            self._set_ready()
            return
        if not wants_login:
            # Never go on without a login: somebody in between, who is not the broker, may have removed the feature.
            raise LoginFailed(
                f"{server} asks for no login, but the address has a user: if this broker has no users, remove the user"
                " from the address; otherwise this is another program."
            )
        from tfmq.access.scram import ClientLogin  # Clients without a user do not load the library.

        self._reply_deadline = self.now() + HELLO_TIMEOUT_SECONDS
        self._login = ClientLogin(credentials.user, credentials.password)
        self._send_login(self._login.first())

    def _send_login(self, data: bytes) -> None:
        self._queue(encode([AUTHENTICATE.code, 0, MECHANISM_SCRAM, data]))

    def _process_login(self, login: ClientLogin, header: list[Any]) -> None:
        """Process a reply to AUTHENTICATE. Raises `LoginFailed`, also if the broker does not prove who it is."""
        if header[0] < 0:
            error = error_from_reply(header)
            if isinstance(error, LoginFailed):
                raise LoginFailed(f"{self.server}: {error.sentence}")
            raise error
        try:
            reply = AUTHENTICATE.reply.decode(header, AUTHENTICATE.name, 2)
        except BadRequest as error:
            raise BadFrame(f"{self.server} replied to AUTHENTICATE with something else: {error}") from None
        try:
            if not login.has_proof:
                if reply.done:
                    raise LoginFailed("The broker ended the login before the client had proved anything.")
                # This takes about 5 ms of computing, by the number of iterations that the broker asks for.
                self._send_login(login.final(reply.data))
                return
            login.check(reply.data)
        except LoginFailed as error:
            raise LoginFailed(f"{self.server}: {error.sentence}") from None
        if not reply.done:
            raise BadFrame(f"{self.server} goes on with the login after its end.")
        self._set_ready()

    def _set_ready(self) -> None:
        """Send the waiting requests: the HELLO reply has arrived, and the login, if there is one, is complete."""
        assert self._greeting is not None
        self.hello, self.limits = self._greeting
        self._login = self._greeting = self._login_refusal = None
        self.state, self._got_response, self._ready_at = READY, False, self.now()
        self.connection_count += 1
        self._has_heard, self._has_pinged = True, False
        is_replicated = "role" in self.hello.properties and len(self.servers) > 1
        self._reply_deadline = self.now() + PING_SECONDS if is_replicated else NEVER
        self._silent.pop(self._server_index, None)
        self._decoder.frame_bytes = max(limits.FRAME_BYTES, self.limits["frame_bytes"])
        for pending in list(self._pending.values()):
            self._send(pending)
        for listener in self.on_ready:
            listener(self)

    def _complete(self, pending: PendingRequest) -> None:
        # A request that is not in `_pending` was sent before a fork, and belongs to the parent process.
        if self._pending.get(pending.correlation_id) is pending:
            del self._pending[pending.correlation_id]
            self.background_requests -= pending.in_background
        pending.complete()

    def _fail(self, pending: PendingRequest, error: TfmqError) -> None:
        pending.error = error
        self._complete(pending)
