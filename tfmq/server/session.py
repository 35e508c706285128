"""A session: decodes the frames of one connection into requests, and sends the replies.

Before HELLO only small frames are accepted, and no other command. After an error reply the session continues, unless
the error's class sets `closes`. Replies are sent in the order in which the broker completes them. A request's body
stays in the receive buffer until the broker has released it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from journal.buffers import Buffer
from tfmq import errors, limits
from tfmq.broker.reply import Buffers, client_error
from tfmq.broker.request_handler import Engine
from tfmq.errors import (
    BadFrame,
    BadRequest,
    Busy,
    NotAllowed,
    NotSupported,
    TfmqError,
    UnknownCommand,
    VersionMismatch,
)
from tfmq.protocol import commands, frames
from tfmq.protocol.commands import BY_CODE, BY_REQUEST, Command, reserved_for

if TYPE_CHECKING:
    from tfmq.server.transport import Connection


logger = logging.getLogger("tfmq.server")

REQUESTS = "requests"
NAME_SHOWN = int(limits.CLIENT_ID_LENGTH)
"""Characters of a client's name in logs. The client chose it, and a line break in it could forge a log line."""
RESUME_PART = 8
"""A session paused at its limit of requests resumes when an eighth of them has been answered."""


class Welcome(NamedTuple):
    """What all sessions of a server share: settings, handlers and callbacks."""

    engine: Engine
    handlers: Mapping[int, tuple[Command, Method]]
    """Command and method by code, without HELLO."""
    server: str
    """Name and version, for display."""
    address: str
    """HOST:PORT of the server."""
    limits: Mapping[str, int]
    limits_sent: Mapping[str, int]
    acks: int
    features: list[str]
    call_later: Callable[[float, Callable[[], None]], Any]
    turn_wanted: Callable[[], None]
    """Requests that the broker's end of turn runs."""
    status: Callable[[], dict[str, Any]]
    """Returns the server's part of STATUS."""
    allow: Callable[[Session, Command], None]
    """Called before each command; raises NotAllowed if the session may not use it."""
    opened: Callable[[Session], None]
    closed: Callable[[Session], None]
    header_bounds: Mapping[int, tuple[int, int]]
    """See `commands.header_bounds`."""


class Reply:
    """The reply to one request. Only the first call of `ok` or `error` sends something."""

    __slots__ = ("_hold", "_session", "correlation", "silent")

    def __init__(self, session: Session, correlation: int, hold: Buffer | None = None) -> None:
        self._session: Session | None = session
        self._hold = hold
        self.correlation = correlation
        self.silent = False
        """The client wants no reply, not even an error."""

    def body_done(self) -> None:
        """Release the request's body."""
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.release()

    def ok(self, *fields: Any, body: Buffers = b"") -> None:
        """Send the reply's fields, followed by its body."""
        session = self._settle()
        if session is None or self.silent:
            return
        parts = [body] if isinstance(body, bytes | memoryview) else body
        try:
            buffers = frames.encode((0, self.correlation, *fields), *(part for part in parts if len(part)))
        except TfmqError as error:
            session.send_error(self.correlation, error)
        else:
            session.send(buffers)

    def error(self, error: BaseException) -> None:
        """Send an error reply. An error with `closes` ends the session."""
        session = self._settle()
        if session is not None and not self.silent:
            session.send_error(self.correlation, error)

    def _settle(self) -> Session | None:
        self.body_done()
        session, self._session = self._session, None
        if session is not None:
            session.settled()
        return session


class Session:
    """Protocol of one connection. Hashed by identity."""

    transport: Connection
    _numbers = count()

    def __init__(self, welcome: Welcome) -> None:
        self.number = next(self._numbers)
        self._welcome = welcome
        self._engine = welcome.engine
        self._handlers = welcome.handlers
        self._client = ""
        self._peer = ""
        self._in_flight = 0
        self._in_flight_max = welcome.limits["requests_in_flight"]
        self._gone = False
        self._on_close: dict[Callable[[], None], None] = {}
        self._hello_alarm: Any = None
        self.frame_bytes: int = welcome.limits["frame_bytes_before_hello"]
        self.principal = ""
        self.operator = False

    # Called by the connection

    def makeConnection(self, transport: Connection) -> None:
        """Start the session on a new connection."""
        self.transport = transport
        self._peer = transport.peer
        transport.setTcpNoDelay(True)
        transport.setTcpKeepAlive(True)
        self._hello_alarm = self._welcome.call_later(self._welcome.limits["hello_seconds"], self._too_late)
        self._welcome.opened(self)

    def connectionLost(self, reason: Any) -> None:
        """Notify everything that registered with `on_close`."""
        self._gone = True
        self._disarm()
        self._welcome.closed(self)
        callbacks, self._on_close = self._on_close, {}
        for callback in callbacks:
            try:
                callback()
            except Exception:
                logger.exception("a callback at the end of a session failed")
        self._welcome.turn_wanted()

    def frame_received(self, frame: memoryview, hold: Buffer) -> None:
        """Handle one request."""
        try:
            (header_size,) = frames.SIZE.unpack_from(frame, 4)
            if header_size > len(frame) - 8 or header_size > limits.HEADER_BYTES:
                frames.parse_prefix(frame, frame_bytes=self.frame_bytes)
            header = frames.decode_header(frame[8 : 8 + header_size], self._welcome.header_bounds)
        except BadFrame as error:
            self.frame_refused(error, bytes(frame[: frames.LOOK_BYTES]))
            return
        body = frame[8 + header_size :]
        self._in_flight += 1
        if self._in_flight >= self._in_flight_max:
            self.transport.pause(REQUESTS)
        entry = self._handlers.get(header[0])
        if self._hello_alarm is not None or entry is None:
            self._serve_apart(header)
            return
        held = hold.retain() if len(body) else None
        reply = Reply(self, header[1], held)
        try:
            if self._in_flight > self._in_flight_max:
                raise Busy(f"More than {self._in_flight_max} requests of this connection wait for answers.")
            command, method = entry
            self._welcome.allow(self, command)
            request = command.request.read(header, command.name, 2)
        except TfmqError as error:
            reply.error(error)
            return
        if type(request) is commands.Produce:
            reply.silent = request.acks == commands.ACKS_NONE
        elif type(request) is commands.Status:
            self._status(reply)
            return
        self._welcome.turn_wanted()
        method(self._engine, request, body, reply, self)

    def _status(self, reply: Reply) -> None:
        """Reply with the broker's and the server's part of STATUS.

        A disk error becomes an error reply.
        """
        try:
            status = {**self._engine.status_map(), **self._welcome.status()}
        except Exception as error:
            reply.error(client_error(error))
        else:
            reply.ok(status)

    def frame_refused(self, error: BadFrame, start: bytes) -> None:
        """Reply to bytes that are no frame, in HTTP if they are an HTTP request, and close."""
        logger.info("connection of %s refused: %s", self._peer, error)
        answer = frames.http_answer(start, self._welcome.address)
        if answer is not None:
            self.send([answer])
            self._end()
        else:
            self.send_error(0, error)

    # Called by the broker

    @property
    def identity(self) -> str:
        """The client's name and address, for display."""
        client = "".join(letter if letter.isprintable() else "?" for letter in self._client[:NAME_SHOWN])
        return f"{client or 'a client'} at {self._peer}"

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call `callback()` once when the connection is closed; immediately if it is."""
        if self._gone:
            callback()
        else:
            self._on_close[callback] = None

    def pause(self) -> None:
        """Stop reading from the client."""
        self.transport.pause("engine")

    def resume(self) -> None:
        """Continue reading."""
        self.transport.resume("engine")

    # Called by replies

    def send(self, buffers: list[Any]) -> None:
        """Send a frame, given as its buffers."""
        if not self._gone:
            self.transport.send(buffers)

    def send_error(self, correlation: int, error: BaseException) -> None:
        """Send an error reply, and close after it if the error's class says so."""
        number, code, outcome, sentence, details = errors.to_wire(error)
        if code == errors.ServerError.code:
            logger.error("a request of %s met an error of ours", self.identity, exc_info=error)
        self.send(frames.encode((-number, correlation, code, outcome, sentence, details)))
        if getattr(error, "closes", False):
            self._end()

    def settled(self) -> None:
        """Count a request as answered."""
        self._in_flight -= 1
        if self._in_flight == self._in_flight_max - self._in_flight_max // RESUME_PART - 1 and not self._gone:
            self.transport.resume(REQUESTS)

    # HELLO and unknown commands

    def _serve_apart(self, header: list[Any]) -> None:
        reply = Reply(self, header[1])
        try:
            if header[0] == HELLO.code:
                reply.ok(*self._hello(HELLO.request.read(header, HELLO.name, 2)))
            elif self._hello_alarm is not None:
                raise BadFrame("The first request of a connection must be HELLO.")
            else:
                raise unknown(header[0])
        except TfmqError as error:
            reply.error(error)
            if self._hello_alarm is not None:
                self._end()

    def _hello(self, hello: Any) -> commands.HelloReply:
        if self._hello_alarm is None:
            raise BadRequest("HELLO was sent before.")
        if hello.magic != commands.MAGIC:
            raise BadFrame(f"HELLO must begin with {commands.MAGIC!r}, not {hello.magic[:20]!r}.")
        version = min(hello.version_max, commands.VERSION_MAX)
        if version < max(hello.version_min, commands.VERSION_MIN):
            raise VersionMismatch(
                f"This broker speaks protocol versions {commands.VERSION_MIN} to {commands.VERSION_MAX}, "
                f"the client {hello.version_min} to {hello.version_max}."
            )
        self._welcome.allow(self, HELLO)
        self._disarm()
        self._client = hello.client
        self.operator = hello.details.get("operator") is True
        self.frame_bytes = self._welcome.limits["frame_bytes"]
        welcome = self._welcome
        return commands.HelloReply(
            version,
            welcome.server,
            self._engine.node,
            dict(welcome.limits_sent),
            welcome.acks,
            welcome.features,
        )

    def _too_late(self) -> None:
        self._hello_alarm = None
        self.transport.cut_off("it did not send HELLO in time")

    def _disarm(self) -> None:
        alarm, self._hello_alarm = self._hello_alarm, None
        if alarm is not None and alarm.active():
            alarm.cancel()

    def _end(self) -> None:
        if not self._gone:
            self.transport.end()


class Turned:
    """Protocol of a connection above the limit: sends one error reply and closes.

    `closed()` when it is closed.
    """

    frame_bytes = int(limits.FRAME_BYTES_BEFORE_HELLO)

    def __init__(self, error: TfmqError, over: Callable[[], None]) -> None:
        self._error, self._over = error, over

    def makeConnection(self, transport: Connection) -> None:
        """Send the error.

        What the client sends is still read, because a reset would discard the error reply.
        """
        number, code, outcome, sentence, details = errors.to_wire(self._error)
        transport.send(frames.encode((-number, 0, code, outcome, sentence, details)))
        transport.end()

    def connectionLost(self, reason: Any) -> None:
        self._over()

    def frame_received(self, frame: memoryview, hold: Buffer) -> None:
        """Ignore requests."""

    def frame_refused(self, error: BadFrame, start: bytes) -> None:
        """Ignore bytes that are no frame."""


def everybody(session: Session, command: Command) -> None:
    """Allow every command; there are no users yet."""


def nobody(session: Session, command: Command) -> None:
    """Reject every command; the server is stopping."""
    raise NotAllowed("The broker is stopping.")


# The broker's method for each command. The session handles HELLO itself and completes STATUS.

Method: TypeAlias = Callable[..., None]

METHODS: dict[type[Any], Method] = {
    commands.Ping: Engine.ping,
    commands.Status: Engine.status,
    commands.Cancel: Engine.cancel,
    commands.Metadata: Engine.metadata,
    commands.CreateTopic: Engine.create_topic,
    commands.GrowTopic: Engine.grow_topic,
    commands.DeleteTopic: Engine.delete_topic,
    commands.DescribeTopic: Engine.describe_topic,
    commands.ResumePartition: Engine.resume_partition,
    commands.Truncate: Engine.truncate,
    commands.SetTopic: Engine.set_topic,
    commands.LeaseProducerIds: Engine.lease_producer_ids,
    commands.Produce: Engine.produce,
    commands.SucceedProducer: Engine.succeed_producer,
    commands.Fetch: Engine.fetch,
    commands.Locate: Engine.locate,
    commands.JoinGroup: Engine.join_group,
    commands.Heartbeat: Engine.heartbeat,
    commands.LeaveGroup: Engine.leave_group,
    commands.CommitOffsets: Engine.commit_offsets,
    commands.ReadOffsets: Engine.read_offsets,
    commands.ListGroups: Engine.list_groups,
    commands.DescribeGroup: Engine.describe_group,
    commands.ResetGroup: Engine.reset_group,
    commands.DeleteGroup: Engine.delete_group,
    commands.BeginTransaction: Engine.begin_transaction,
    commands.PrepareTransaction: Engine.prepare_transaction,
    commands.CommitTransaction: Engine.commit_transaction,
    commands.RollbackTransaction: Engine.rollback_transaction,
    commands.ForgetTransaction: Engine.forget_transaction,
    commands.ListTransactions: Engine.list_transactions,
    commands.DescribeTransaction: Engine.describe_transaction,
    commands.Transact: Engine.transact,
    commands.AwaitChecks: Engine.await_checks,
    commands.CancelDelayed: Engine.cancel_delayed,
    commands.RescheduleDelayed: Engine.reschedule_delayed,
    commands.ListDelayed: Engine.list_delayed,
    commands.DescribeDelayed: Engine.describe_delayed,
    commands.DelayedHistogram: Engine.delayed_histogram,
    commands.AddSchedule: Engine.add_schedule,
    commands.ListSchedules: Engine.list_schedules,
    commands.PauseSchedule: Engine.pause_schedule,
    commands.ResumeSchedule: Engine.resume_schedule,
    commands.RemoveSchedule: Engine.remove_schedule,
    commands.CommitGroup: Engine.commit_group,
    commands.AbortCommitGroup: Engine.abort_commit_group,
    commands.ListCommitGroups: Engine.list_commit_groups,
    commands.ForgetCommitGroup: Engine.forget_commit_group,
}
HANDLERS: dict[int, tuple[Command, Method]] = {
    BY_REQUEST[request].code: (BY_REQUEST[request], method) for request, method in METHODS.items()
}
HELLO = BY_REQUEST[commands.Hello]


def unknown(code: int) -> TfmqError:
    """Return the error for a code without a method: reserved for a later release, or unknown."""
    later = reserved_for(code)
    if later is not None:
        return NotSupported(f"This release of the broker has no {later} yet.")
    known = BY_CODE.get(code)
    return UnknownCommand(f"The broker does not know the command {known.name if known else code}.")
