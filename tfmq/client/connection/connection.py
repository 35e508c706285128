"""One connection to a broker, without I/O: requests, replies, reconnection.

`ClientConnection` encodes and decodes; a driver opens the network connection and moves the bytes. `PendingRequest` is a
request and its reply.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tfmq import limits
from tfmq.bounded_msgpack import Buffer
from tfmq.client.connection.addresses import Folder, Server
from tfmq.client.operation import Waitable
from tfmq.errors import (
    NOT_DONE,
    UNKNOWN,
    Abandoned,
    BadFrame,
    BadRequest,
    Closed,
    ConnectionFailed,
    TfmqError,
    TimedOut,
    from_wire,
)
from tfmq.protocol.commands import (
    ACKS_SYNCED,
    BY_REQUEST,
    MAGIC,
    VERSION_MAX,
    VERSION_MIN,
    Command,
    Hello,
    HelloReply,
)
from tfmq.protocol.frames import EMPTY_LINE, Decoder, Frame, encode

NEVER = float("inf")
Renew = Callable[[Any], Any]


class Call(Waitable):
    """A request in progress: done when its reply arrived, it failed, or it was abandoned.

    `request` is a NamedTuple of `protocol.commands`. With `repeat` it is sent again after a reconnect; without, it
    fails with outcome "unknown" when the connection is lost after sending. `in_background`: no caller waits, so the
    background thread of the driver reads until it is done. `update(request)` returns the request to send, at each
    sending, where a field depends on the time.

    `reply` and `error` are the result. `reply_body` is a view of the received bytes that stays valid as long as it is
    referenced.
    """

    __slots__ = (
        "body",
        "command",
        "correlation",
        "deadline",
        "error",
        "renew",
        "repeat",
        "reply",
        "reply_body",
        "request",
        "sends",
        "sent",
        "unattended",
        "wants_reply",
    )

    def __init__(
        self,
        request: Any,
        body: tuple[Buffer, ...],
        *,
        correlation: int,
        deadline: float = NEVER,
        repeat: bool = True,
        unattended: bool = False,
        wants_reply: bool = True,
        renew: Renew | None = None,
    ) -> None:
        super().__init__()
        self.command: Command = BY_REQUEST[type(request)]
        self.request = request
        self.body = body
        self.correlation = correlation
        self.deadline = deadline
        self.repeat = repeat
        self.unattended = unattended
        self.wants_reply = wants_reply
        self.renew = renew
        self.sent = False
        self.sends = 0
        """How often it was sent.

        Above 1, an earlier sending may have been executed although a later one was rejected.
        """
        self.reply: Any = None
        self.reply_body: memoryview = _EMPTY
        self.error: TfmqError | None = None

    def late(self, server: object) -> TimedOut:
        """Return the error for a request that `server` did not answer before its deadline."""
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
        return f"<PendingRequest {self.command.name} {self.correlation} {state}>"


_EMPTY = memoryview(b"")


def reply_error(header: list[Any]) -> TfmqError:
    """Return the error in an error reply. Malformed fields are replaced by defaults."""
    number, fields = -header[0], [*header[2:], None, None, None, None]
    code, outcome, sentence, details = fields[:4]
    return from_wire(
        number,
        code if isinstance(code, str) else "error",
        outcome if isinstance(outcome, str) else UNKNOWN,
        sentence if isinstance(sentence, str) else "",
        details if isinstance(details, dict) else {},
    )


Address = Server | Folder


def failure_of(
    error: BaseException | None, server: Address, servers: Sequence[Address], was_connected: bool
) -> TfmqError:
    """Return the user-visible error for `error` on the connection to `server`.

    `servers`: all configured addresses. `was_connected`: the connection was lost; else it could not be made.
    """
    if isinstance(error, BadFrame):
        failure: TfmqError = ConnectionFailed(f"{server}: {error.sentence}")
    elif isinstance(error, TfmqError):
        return error
    elif isinstance(error, ConnectionRefusedError):
        failure = ConnectionFailed(
            f"Nothing listens at {names(servers)}: start tfmq-server, or correct the address."
        )
    else:
        reason = f": {error}" if error is not None and str(error) else ""
        what = "was lost" if was_connected else "could not be made"
        failure = ConnectionFailed(f"The connection to the broker at {server} {what}{reason}.")
    failure.__cause__ = error
    return failure


def names(servers: Sequence[Address]) -> str:
    """Return the addresses joined by " or "."""
    return " or ".join(map(str, servers))


log = logging.getLogger("tfmq.connection")

Clock = Callable[[], float]

BACK_OFF_SECONDS = 0.05
"""The pause after the first failed attempt; doubled after each further one."""
BACK_OFF_SECONDS_MAX = 2.0
BACK_OFF_SECONDS_FIRST = 0.25
"""The longest pause before the first successful connection: a user waits for the result."""
PATIENCE_SECONDS = 2.0
"""How long a connection that never reached a broker retries before its requests fail.

Long enough for a broker that is started together with its clients, short enough to report a wrong address soon.
"""
WORDLESS_ROUNDS = 3
"""Failed rounds over all addresses, about 0.15 s, before the first log line."""
SECONDS = 30.0
"""The default timeout of a request."""
HELLO_SECONDS = 10.0
OUTPUT_BUFFERS = 64
"""Maximum buffers for one write. Far below IOV_MAX; more do not increase the throughput."""

HELLO = BY_REQUEST[Hello]
_CORRELATIONS = 1 << 32


class Link:
    """A connection to one of `servers`, without I/O. Reconnects with back-off.

    A driver connects and moves bytes when this object asks for it. Every request completes exactly once. After a lost
    connection, requests with `repeat` are sent again in their original order before any newer one; the others fail with
    outcome "unknown" if they were already sent, else they wait for the next connection. An abandoned request leaves the
    connection usable: its reply is dropped. Not thread-safe: callers hold the driver's lock.

    `state` is "down", "greeting" (HELLO sent), "ready" or "closed".
    """

    def __init__(
        self,
        servers: Sequence[Server | Folder],
        clock: Clock,
        *,
        client: str = "tfmq-python",
        patience_seconds: float = PATIENCE_SECONDS,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.servers = tuple(servers)
        self.client = client
        self.operator = False
        """Whether a person uses the client: the broker then logs the requested changes."""
        self.patience_seconds = patience_seconds
        self._clock = clock
        self._jitter = jitter
        self.on_ready: list[Callable[[Link], None]] = []
        """Called after every HELLO reply. A group member renews its session on the server here."""
        self._reset()

    def _reset(self) -> None:
        self.state = "down"
        self.hello: HelloReply | None = None
        self.limits = limits.sent({})
        """The broker's limits by name; the defaults before its HELLO reply."""
        self.connections = 0
        """How many HELLO replies arrived. A change means that the session on the server is new."""
        self.unattended = 0
        """How many background requests are open."""
        self.last_error: TfmqError | None = None
        self._turn = self._attempts = 0
        self._fruitful = False  # Whether this connection received a reply, or a part of one.
        self._trying_since: float | None = None
        self._retry_at, self._hello_deadline = 0.0, NEVER
        self._numbers = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._deadlines: list[tuple[float, int, Call]] = []
        self._output: deque[memoryview] = deque()
        self._queued_bytes = self._written_bytes = 0
        self._marks: deque[tuple[int, Call]] = deque()
        self._decoder = Decoder(limits.FRAME_BYTES)

    # Used by code that sends requests

    @property
    def server(self) -> Server | Folder:
        """The address in use, or the next one to try."""
        return self.servers[self._turn % len(self.servers)]

    def now(self) -> float:
        """Return the time in seconds of the clock that deadlines use."""
        return self._clock()

    @property
    def acks(self) -> int:
        """The durability that the broker uses for `acks=None`."""
        return self.hello.acks if self.hello else ACKS_SYNCED

    def call(
        self,
        request: Any,
        *body: Buffer,
        seconds: float | None = SECONDS,
        repeat: bool = True,
        unattended: bool = False,
        wants_reply: bool = True,
        renew: Renew | None = None,
    ) -> Call:
        """Send `request`, now or as soon as there is a connection. It fails after `seconds`.

        Use `repeat=False` for requests that must not be executed twice. With `wants_reply=False` the request is done
        once it is written. `update(request)` returns the request to send, at each sending. `body` buffers are not
        copied; do not change them before the request is done. Raises `Closed` after `close`, `BadRequest` for fields
        that cannot be packed.
        """
        if self.state == "closed":
            raise Closed("The client is closed; make a new one.")
        deadline = NEVER if seconds is None else self._clock() + seconds
        call = Call(
            request,
            body,
            correlation=self._number(),
            deadline=deadline,
            repeat=repeat,
            unattended=unattended,
            wants_reply=wants_reply,
            renew=renew,
        )
        if self.state == "ready":
            self._send(call)
        elif self.state == "down" and self.connections and not self._calls:
            self._begin_again()
        self._calls[call.correlation] = call
        self.unattended += unattended
        if deadline != NEVER:
            heapq.heappush(self._deadlines, (deadline, call.correlation, call))
        return call

    def abandon(self, call: Call, error: TfmqError | None = None) -> None:
        """Fail the request with `error` (default `Abandoned`). Its reply will be dropped."""
        if not call.done:
            self._fail(call, error or Abandoned(outcome=UNKNOWN if call.sent else NOT_DONE))

    def close(self, error: TfmqError | None = None) -> None:
        """Fail all open requests and reject new ones."""
        self.state = "closed"
        self._output.clear()
        for call in list(self._calls.values()):
            outcome = UNKNOWN if call.sent else NOT_DONE
            self._fail(
                call, error or Abandoned("The client was closed before the reply arrived.", outcome=outcome)
            )

    def renew(self) -> None:
        """Discard all requests without completing them.

        For a forked child: the requests belong to the parent process.
        """
        self._reset()

    # Used by drivers

    @property
    def busy(self) -> bool:
        """Whether any request is open."""
        return bool(self._calls)

    @property
    def has_output(self) -> bool:
        return bool(self._output)

    def wants_connection(self) -> bool:
        """Return whether the driver must connect to `server` now."""
        return self.state == "down" and bool(self._calls) and self._clock() >= self._retry_at

    def next_time(self) -> float:
        """Return when `tick` must be called next; infinity if never."""
        while self._deadlines and self._deadlines[0][2].done:
            heapq.heappop(self._deadlines)
        due = self._deadlines[0][0] if self._deadlines else NEVER
        if self.state == "down":
            return min(due, self._retry_at) if self._calls else due
        return min(due, self._hello_deadline)

    def tick(self) -> None:
        """Fail the requests whose deadline has passed.

        Raises `ConnectionFailed` if HELLO was not answered in time; the driver then disconnects.
        """
        now = self._clock()
        while self._deadlines and (self._deadlines[0][2].done or self._deadlines[0][0] <= now):
            call = heapq.heappop(self._deadlines)[2]
            if not call.done:
                self._fail(call, self._late(call))
        if self.state == "greeting" and now >= self._hello_deadline:
            raise ConnectionFailed(
                f"{self.server} accepted the connection but did not reply to HELLO in {HELLO_SECONDS:g} s: check that a"
                " tfmq broker is there.",
                outcome=NOT_DONE,
            )

    def connected(self) -> None:
        """Send HELLO on the connection that the driver has made."""
        self.state = "greeting"
        now = self._clock()
        self._hello_deadline = now + HELLO_SECONDS
        self._trying_since = now if self._trying_since is None else self._trying_since
        self._decoder = Decoder(limits.FRAME_BYTES)
        self._output.clear()
        self._queued_bytes = self._written_bytes = 0
        details: dict[str, Any] = {"process": os.getpid(), "line": EMPTY_LINE}
        if self.operator:
            details["operator"] = True
        hello = Hello(MAGIC, VERSION_MIN, VERSION_MAX, self.client, details)
        self._queue(encode([HELLO.code, 0, *hello]))

    def received(self, data: bytes | bytearray) -> None:
        """Process received bytes. `data` must not be changed afterwards.

        Raises `TfmqError` if the bytes are invalid; the driver then disconnects.
        """
        for frame in self._decoder.feed(data):
            self._take(frame)
        if self._decoder.midway and self.state == "ready":
            self._fruitful = True

    def pending(self) -> list[memoryview]:
        """Return the next buffers to write, at most `OUTPUT_BUFFERS`.

        The driver reports the number of bytes written to `output_written`.
        """
        return list(itertools.islice(self._output, OUTPUT_BUFFERS))

    def wrote(self, size: int) -> None:
        """Record that `size` bytes of `next_output` were written."""
        self._written_bytes += size
        output = self._output
        while size:
            first = output[0]
            if len(first) > size:
                output[0] = first[size:]
                break
            size -= len(first)
            output.popleft()
        while self._marks and self._marks[0][0] <= self._written_bytes:
            call = self._marks.popleft()[1]
            if not call.done:
                self._end(call)

    def disconnected(self, error: BaseException | None = None) -> None:
        """Fail or keep the open requests after a lost or failed connection."""
        if self.state == "closed":
            return
        was_connected, was_ready = self.state != "down", self.state == "ready"
        self.state = "down"
        self._output.clear()
        self._marks.clear()
        self.last_error = failure_of(error, self.server, self.servers, was_connected)
        now = self._clock()
        for call in [each for each in self._calls.values() if each.sent and not each.repeat]:
            self._fail(call, ConnectionFailed(self.last_error.sentence, outcome=UNKNOWN))
        self._turn += 1
        if was_ready and self._fruitful:
            self._attempts, self._trying_since, self._retry_at = 0, None, now
            return
        self._attempts += 1
        self._trying_since = now if self._trying_since is None else self._trying_since
        self._back_off(now)
        if self._hopeless(error, now):
            self._give_up(self.last_error)
        elif isinstance(error, ConnectionRefusedError) and not self.connections:
            self._say_waiting()

    # Internal

    def _number(self) -> int:
        number = next(self._numbers) % _CORRELATIONS
        while number == 0 or number in self._calls:
            number = next(self._numbers) % _CORRELATIONS
        return number

    def _queue(self, buffers: list[Buffer]) -> None:
        for buffer in buffers:
            view = memoryview(buffer)
            if view.nbytes:
                self._output.append(view)
                self._queued_bytes += view.nbytes

    def _send(self, call: Call) -> None:
        if call.renew is not None:
            call.request = call.renew(call.request)
        self._queue(encode([call.command.code, call.correlation, *call.request], *call.body))
        call.sent = True
        call.sends += 1
        if not call.wants_reply:
            self._marks.append((self._queued_bytes, call))

    def _take(self, frame: Frame) -> None:
        """Process one received frame. Raises `TfmqError` for an invalid one."""
        header = frame.header
        kind, correlation = header[:2]
        if kind > 0:
            raise BadFrame(f"{self.server} sent a request where only replies are expected.")
        if self.state == "greeting":
            self._greeted(header)
            return
        call = self._calls.get(correlation)
        if call is None:
            if kind < 0 and correlation == 0:
                # No request has correlation id 0: the error concerns the connection.
                raise reply_error(header)
            return
        self._fruitful = True
        if kind < 0:
            self._fail(call, reply_error(header))
            return
        try:
            call.reply = call.command.reply.read(header, call.command.name, 2)
        except TfmqError as error:
            self._fail(
                call, BadFrame(f"The reply to {call.command.name} cannot be read: {error}", outcome=UNKNOWN)
            )
            return
        call.reply_body = frame.body
        self._end(call)

    def _greeted(self, header: list[Any]) -> None:
        """Process the HELLO reply and send the open requests."""
        if header[0] < 0:
            raise reply_error(header)
        try:
            self.hello = HELLO.reply.read(header, "HELLO", 2)
            self.limits = limits.told(self.hello.limits)
        except (BadRequest, ValueError) as error:
            raise BadFrame(f"{self.server} replied to HELLO with something else: {error}") from None
        self.state, self._fruitful = "ready", False
        self.connections += 1
        self._hello_deadline = NEVER
        self._decoder.frame_bytes = max(limits.FRAME_BYTES, self.limits["frame_bytes"])
        for call in list(self._calls.values()):
            self._send(call)
        for listener in self.on_ready:
            listener(self)

    def _end(self, call: Call) -> None:
        # A request that is not in the table belongs to the parent process, before a fork.
        if self._calls.get(call.correlation) is call:
            del self._calls[call.correlation]
            self.unattended -= call.unattended
        call.settle()

    def _fail(self, call: Call, error: TfmqError) -> None:
        call.error = error
        self._end(call)

    def _late(self, call: Call) -> TfmqError:
        if self.state == "down" and self.last_error is not None:
            return ConnectionFailed(self.last_error.sentence, outcome=UNKNOWN if call.sent else NOT_DONE)
        return call.late(self.server)

    def _back_off(self, now: float) -> None:
        """Wait before the next round over all servers, not between two servers of a round."""
        if self._attempts % len(self.servers):
            self._retry_at = now
            return
        rounds = self._attempts // len(self.servers)
        most = BACK_OFF_SECONDS_MAX if self.connections else BACK_OFF_SECONDS_FIRST
        pause = min(most, BACK_OFF_SECONDS * 2 ** min(rounds - 1, 10))
        self._retry_at = now + pause * (0.75 + 0.5 * self._jitter())

    def _begin_again(self) -> None:
        """Shorten the pause for the first request after an idle time.

        The pause after the last attempt, up to 2.5 s, may be longer than the timeout of the new request.
        """
        self._attempts = 0
        self._retry_at = min(self._retry_at, self._clock() + BACK_OFF_SECONDS)

    def _hopeless(self, error: BaseException | None, now: float) -> bool:
        """Return whether the open requests must fail now."""
        if self._attempts % len(self.servers):
            return False
        if isinstance(error, TfmqError) and not error.retriable:
            return True
        return not self.connections and now - (self._trying_since or now) >= self.patience_seconds

    def _say_waiting(self) -> None:
        """Log once per first connection that no broker has answered yet."""
        if self._attempts == WORDLESS_ROUNDS * len(self.servers):
            log.info("Nothing listens at %s yet: waiting %g s.", names(self.servers), self.patience_seconds)

    def _give_up(self, error: TfmqError) -> None:
        """Fail all open requests with `error`."""
        self._trying_since = None
        for call in list(self._calls.values()):
            outcome = UNKNOWN if call.sent else NOT_DONE
            failure = type(error)(error.sentence, outcome=outcome)
            failure.__cause__ = error.__cause__
            self._fail(call, failure)
