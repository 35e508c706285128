"""A session: decodes the frames of one connection into requests, and sends the replies.

The first command must be HELLO, and where the server has users, AUTHENTICATE follows until the login is done; before
that only small frames are accepted. After an error reply the session continues, unless the error's class sets `closes`.
Replies are sent in the order in which the broker completes requests. The body of a request stays in the receive buffer
until the broker calls `Reply.body_done`, or the reply is sent.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from journal.buffers import Buffer
from tfmq import errors, limits
from tfmq.broker.reply import Body, Buffers, client_error
from tfmq.errors import (
    BadFrame,
    BadRequest,
    Busy,
    LoginFailed,
    NotAllowed,
    NotSupported,
    TfmqError,
    UnknownCommand,
    VersionMismatch,
)
from tfmq.protocol import commands, frames
from tfmq.protocol.commands import BY_CODE, BY_REQUEST, reserved_for
from tfmq.server.log_lines import BY_PEER

if TYPE_CHECKING:
    from tfmq.access.scram import Login
    from tfmq.server.access_control import AccessControl, Account
    from tfmq.server.transport import Connection

logger = logging.getLogger("tfmq.server")

PAUSED_FOR_REQUESTS = "requests"
PAUSED_FOR_QUOTA = "quota"
PAUSED_FOR_LOGIN = "login"
LOGIN_FAILED_SECONDS = 1.0
"""After this time a failed login is answered, so that one connection can try one password a second."""
CLIENT_NAME_LOGGED_MAX = int(limits.CLIENT_ID_LENGTH)
"""Maximum number of characters of a client's name in logs. The client chooses the name, and it may be very long."""
RESUME_FRACTION = 8
"""A session that was paused at its limit of requests reads again when an eighth of that number has got replies."""


class SessionContext(NamedTuple):
    """Settings, handlers and callbacks that all sessions of a server share."""

    handle: Callable[[Any, Body, Reply, Session], None]
    """`RequestHandler.handle`, which executes a request."""
    node: str
    """The broker's permanent id."""
    server: str
    """Name and version, for display."""
    address: str
    """HOST:PORT of the server."""
    limits: Mapping[str, int]
    limits_sent: Mapping[str, int]
    acks: int
    call_later: Callable[[float, Callable[[], None]], Any]
    turn_wanted: Callable[[], None]
    """Called to request that the hooks at the end of this turn run."""
    status: Callable[[], dict[str, Any]]
    """Returns the fields of the reply to STATUS."""
    opened: Callable[[Session], None]
    closed: Callable[[Session], None]
    header_bounds: Mapping[int, tuple[int, int]]
    """How many fields and values a request header may have, by command code (`commands.header_bounds`)."""
    access: AccessControl | None = None
    """The users and their rights; None: everybody who can connect may do everything. With it, `handle` is its own."""
    greeted: Callable[[Session], None] = lambda session: None
    """Called when HELLO, and the login if there is one, are done."""
    hello_later: Callable[[float, Callable[[], None]], Any] | None = None
    """As `call_later`, for deadlines of HELLO and login, which all have the same length; None: `call_later`."""
    hello_properties: Callable[[], dict[str, Any]] = dict
    """Returns the `properties` of the reply to HELLO: the role of a server that replicates."""
    synced_durability: int = commands.ACKS_SYNCED
    """What replies report as the durability of what is durable: `ACKS_REPLICATED` with synchronous replication."""


class Reply:
    """The reply to one request. Only the first call of `ok` or `error` sends something."""

    __slots__ = ("_buffer", "_session", "correlation", "is_silent")

    def __init__(self, session: Session, correlation: int, buffer: Buffer | None = None) -> None:
        self._session: Session | None = session
        self._buffer = buffer
        self.correlation = correlation
        self.is_silent = False
        """Whether the client wants no reply, not even an error (acks "none")."""

    def body_done(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.release()

    def appended(self) -> None:
        """Do nothing: only `tracing.TracedReply` records that a batch is appended."""

    def ok(self, *fields: Any, body: Buffers = b"") -> None:
        """Send the reply's fields, followed by its body."""
        session = self._take_session()
        if session is None or self.is_silent:
            return
        if isinstance(body, bytes | memoryview):
            body = (body,) if len(body) else ()
        try:
            buffers = frames.encode((0, self.correlation, *fields), *filter(len, body))
        except TfmqError as error:
            session.send_error(self.correlation, error)
        else:
            if not session.is_closed:
                session.transport.send(buffers)

    def error(self, error: BaseException) -> None:
        """Send an error reply. An error with `closes` ends the session."""
        session = self._take_session()
        if session is not None and not self.is_silent:
            session.send_error(self.correlation, error)

    def _take_session(self) -> Session | None:
        if self._buffer is not None:
            self._buffer.release()
            self._buffer = None
        session, self._session = self._session, None
        if session is not None:
            session.request_replied()
        return session


class Session:
    """The protocol object of one connection: passes its requests to the broker, and sends the replies."""

    transport: Connection
    _numbers = count()

    def __init__(self, welcome: SessionContext) -> None:
        self.number = next(self._numbers)
        self._context = welcome
        self._handle = welcome.handle
        self._peer = ""
        self.client = ""
        """The client's name, for display."""
        self.identity = ""
        """The client's name, user and address, for display."""
        self._in_flight = 0
        self._held: deque[Callable[[bool], None]] = deque()
        """What waits for a quota (`pause_for`)."""
        self._in_flight_max = welcome.limits["requests_in_flight"]
        self.is_closed = False
        self._on_close: dict[Callable[[], None], None] = {}
        self._hello_timer: Any = None
        """Ends the session if HELLO and the login are not done in time; None when they are."""
        self._quota_timer: Any = None
        """Ends the pause of `pause_for`; None if there was none."""
        self._login: Login | None = None
        self.account: Account | None = None
        """The user that has logged in; None on a server without users."""
        self.frame_bytes: int = welcome.limits["frame_bytes_before_hello"]
        self.operator = False
        self.synced_durability = commands.ACKS_SYNCED
        self._is_admitted = False

    # Methods that the connection calls

    def makeConnection(self, transport: Connection) -> None:
        self.transport = transport
        self._peer = transport.peer
        self._set_identity("")
        transport.setTcpNoDelay(True)
        transport.setTcpKeepAlive(True)
        call_later = self._context.hello_later or self._context.call_later
        self._hello_timer = call_later(self._context.limits["hello_seconds"], self._hello_timed_out)
        self._context.opened(self)

    def connectionLost(self, reason: Any) -> None:
        """Call every callback that was registered with `on_close`."""
        self.is_closed = True
        self._cancel_hello_timer()
        if self._quota_timer is not None and self._quota_timer.active():
            self._quota_timer.cancel()  # a large debt would keep the closed connection in memory for a long time
        self._context.closed(self)
        while self._held:
            self._held.popleft()(False)
        callbacks, self._on_close = self._on_close, {}
        for callback in callbacks:
            try:
                callback()
            except Exception:
                logger.exception("a callback at the end of a session failed")
        if callbacks:
            self._context.turn_wanted()

    def frame_received(self, frame: memoryview, buffer: Buffer) -> None:
        """Decode one request and pass it to the broker."""
        try:
            (header_size,) = frames.SIZE.unpack_from(frame, 4)
            if header_size > len(frame) - 8 or header_size > limits.HEADER_BYTES:
                frames.parse_prefix(frame, frame_bytes=self.frame_bytes)
            header = frames.decode_header(frame[8 : 8 + header_size], self._context.header_bounds)
        except BadFrame as error:
            self.frame_refused(error, bytes(frame[: frames.DETECTION_BYTES]))
            return
        body = frame[8 + header_size :]
        self._in_flight += 1
        if self._in_flight >= self._in_flight_max:
            self.transport.pause(PAUSED_FOR_REQUESTS)
        command = BY_CODE.get(header[0])
        if self._hello_timer is not None or command is None or command is HELLO or command is AUTHENTICATE:
            self._handle_other(header)
            return
        retained = buffer.retain() if len(body) else None
        reply = Reply(self, header[1], retained)
        try:
            if self._in_flight > self._in_flight_max:
                raise Busy(f"More than {self._in_flight_max} requests of this connection wait for answers.")
            request = command.request.decode(header, command.name, 2)
        except TfmqError as error:
            reply.error(error)
            return
        if not self._is_admitted:
            # Not before a valid request, because a peer that sends invalid ones after HELLO is hardly a client.
            self._is_admitted = True
            self.transport.admit()
        if type(request) is commands.Produce:
            reply.is_silent = request.acks == commands.ACKS_NONE
        elif type(request) is commands.Status:
            self._status(request, reply)
            return
        self._context.turn_wanted()
        self._handle(request, body, reply, self)

    def _status(self, request: commands.Status, reply: Reply) -> None:
        if self._context.access is not None and not self._context.access.check(request, reply, self):
            return
        try:
            status = self._context.status()
        except Exception as error:
            reply.error(client_error(error))
        else:
            reply.ok(status)

    def frame_refused(self, error: TfmqError, start: bytes) -> None:
        """Reply to bytes that are not accepted, in HTTP if they are an HTTP request, and close the connection."""
        logger.info("connection of %s refused: %s", self._peer, error, extra=BY_PEER)
        response = frames.http_response(start, self._context.address)
        if response is not None:
            self.send([response])
        else:
            self.send_error(0, error)
        self.end()

    # Methods that the broker calls

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call `callback()` once when the connection is closed; immediately if it is closed already."""
        if self.is_closed:
            callback()
        else:
            self._on_close[callback] = None

    def pause(self) -> None:
        self.transport.pause("engine")

    def resume(self) -> None:
        self.transport.resume("engine")

    @property
    def sent_bytes(self) -> int:
        return self.transport.sent_bytes

    @property
    def user(self) -> str:
        return "" if self.account is None else self.account.name

    def pause_for(self, seconds: float, then: Callable[[bool], None]) -> None:
        """Read nothing from the client for this time from now on. It replaces the time of an earlier call.

        After that time each `then(True)` is called, in the order of the calls; `then(False)` if the session ends first.
        """
        # Several requests of one read ask for it. A timer for each would end the pause at the first of them, and let
        # as many reads through as there were requests.
        self._held.append(then)
        if self._quota_timer is not None and self._quota_timer.active():
            self._quota_timer.reset(seconds)
            return
        self.transport.pause(PAUSED_FOR_QUOTA)
        self._quota_timer = self._context.call_later(seconds, self._continue_held)

    def _continue_held(self) -> None:
        self._context.turn_wanted()
        while self._held:
            self._held.popleft()(True)
        self.transport.resume(PAUSED_FOR_QUOTA)

    # Methods that `Reply` calls

    def send(self, buffers: list[Any]) -> None:
        if not self.is_closed:
            self.transport.send(buffers)

    def send_error(self, correlation: int, error: BaseException) -> None:
        """Send an error reply, and close the session after it if the error's class sets `closes`."""
        number, code, outcome, sentence, details = errors.to_error_reply(error)
        if code == errors.ServerError.code:
            logger.error("a request of %s met an error of ours", self.identity, exc_info=error)
        self.send(frames.encode((-number, correlation, code, outcome, sentence, details)))
        if getattr(error, "closes", False):
            self.end()

    def request_replied(self) -> None:
        """Count a reply. After a pause, read again when 1/RESUME_FRACTION of the maximum has got replies."""
        self._in_flight -= 1
        if self._in_flight == self._in_flight_max - self._in_flight_max // RESUME_FRACTION - 1 and not self.is_closed:
            self.transport.resume(PAUSED_FOR_REQUESTS)

    # Requests that the broker does not handle: HELLO, AUTHENTICATE and unknown commands

    def _handle_other(self, header: list[Any]) -> None:
        reply = Reply(self, header[1])
        try:
            if header[0] == HELLO.code:
                reply.ok(*self._hello(HELLO.request.decode(header, HELLO.name, 2)))
            elif header[0] == AUTHENTICATE.code:
                self._authenticate(AUTHENTICATE.request.decode(header, AUTHENTICATE.name, 2), reply)
            elif self._login is not None:
                raise LoginFailed("This broker has users: log in, before any other request.")
            elif self._hello_timer is not None:
                raise BadFrame("The first request of a connection must be HELLO.")
            else:
                raise unknown_command(header[0])
        except TfmqError as error:
            reply.error(error)
            if self._hello_timer is not None:
                self.end()

    def _hello(self, hello: Any) -> commands.HelloReply:
        if self._hello_timer is None or self._login is not None:
            raise BadRequest("HELLO was sent before.")
        if hello.magic != commands.MAGIC:
            raise BadFrame(f"HELLO must begin with {commands.MAGIC!r}, not {hello.magic[:20]!r}.")
        version = min(hello.version_max, commands.VERSION_MAX)
        if version < max(hello.version_min, commands.VERSION_MIN):
            raise VersionMismatch(
                f"This broker speaks protocol versions {commands.VERSION_MIN} to {commands.VERSION_MAX}, "
                f"the client {hello.version_min} to {hello.version_max}."
            )
        self._set_identity(hello.client)
        self.operator = hello.details.get("operator") is True
        context = self._context
        known = hello.details.get("features")
        if isinstance(known, list) and commands.FEATURE_REPLICATED in known:
            # An older client takes a reply with an unknown durability for damaged.
            self.synced_durability = context.synced_durability
        features = []
        properties = context.hello_properties()
        if self.synced_durability != commands.ACKS_SYNCED:
            properties = {**properties, "durability": self.synced_durability}
        if context.access is None:
            self._greeted()
        else:
            self._login = context.access.new_login()
            features.append(commands.FEATURE_SCRAM)
        return commands.HelloReply(
            version, context.server, context.node, dict(context.limits_sent), context.acks, features, properties
        )

    def _authenticate(self, request: commands.Authenticate, reply: Reply) -> None:
        access, login = self._context.access, self._login
        if access is None:
            raise NotAllowed("This broker has no users (server.users): leave the user out of the address.")
        if login is None:
            raise BadRequest("AUTHENTICATE was sent before HELLO, or the login is done.")
        if login.is_over:
            return  # The login has failed, and the session is about to be closed.
        try:
            if request.mechanism != commands.MECHANISM_SCRAM:
                raise LoginFailed(f"The broker knows no login but {commands.MECHANISM_SCRAM}.")
            data, done = login.answer(request.data)
            if done:
                self.account = access.admit(self, login.name, login.keys)
        except LoginFailed as error:
            login.is_over = True
            access.log_failed_login(login.name, self._peer)
            self.transport.pause(PAUSED_FOR_LOGIN)
            self._context.call_later(LOGIN_FAILED_SECONDS, partial(reply.error, error))
            return
        if done:
            self._set_identity(self.client)
            self._login = None
            self._greeted()
        reply.ok(data, done)

    def _greeted(self) -> None:
        self._cancel_hello_timer()
        self.frame_bytes = self._context.limits["frame_bytes"]
        self._context.greeted(self)

    def _set_identity(self, client: str) -> None:
        shown = "".join(character if character.isprintable() else "?" for character in client[:CLIENT_NAME_LOGGED_MAX])
        self.client = shown or "a client"
        user = f" of user {self.user}" if self.account is not None else ""
        self.identity = f"{self.client}{user} at {self._peer}"

    def end(self) -> None:
        """Send the queued replies, then close."""
        if not self.is_closed:
            self.transport.end()

    def cut_off(self) -> None:
        """Close a connection without a login, because there are too many."""
        self.transport.cut_off("there are too many connections that have not sent HELLO, or not logged in")

    def _hello_timed_out(self) -> None:
        self._hello_timer = None
        what = "log in" if self._login is not None else "send HELLO"
        self.transport.cut_off(f"it did not {what} in time")

    def _cancel_hello_timer(self) -> None:
        alarm, self._hello_timer = self._hello_timer, None
        if alarm is not None and alarm.active():
            alarm.cancel()


class RejectedConnection:
    """Protocol object of a connection above the limit: sends an error, closes, and calls `closed()` when closed."""

    frame_bytes = int(limits.FRAME_BYTES_BEFORE_HELLO)

    def __init__(self, error: TfmqError, closed: Callable[[], None]) -> None:
        self._error, self._closed = error, closed

    def makeConnection(self, transport: Connection) -> None:
        """Send the error. Requests are read and ignored: closing with unread data would discard the error reply."""
        number, code, outcome, sentence, details = errors.to_error_reply(self._error)
        transport.send(frames.encode((-number, 0, code, outcome, sentence, details)))
        transport.end()

    def connectionLost(self, reason: Any) -> None:
        self._closed()

    def frame_received(self, frame: memoryview, buffer: Buffer) -> None:
        """Ignore requests."""

    def frame_refused(self, error: TfmqError, start: bytes) -> None:
        """Ignore bytes that are no frame."""


HELLO = BY_REQUEST[commands.Hello]
AUTHENTICATE = BY_REQUEST[commands.Authenticate]


def unknown_command(code: int) -> TfmqError:
    """Return NotSupported for a command code that is reserved for a later release, UnknownCommand for any other."""
    later = reserved_for(code)
    if later is not None:
        return NotSupported(f"This release of the broker has no {later} yet.")
    known = BY_CODE.get(code)
    return UnknownCommand(f"The broker does not know the command {known.name if known else code}.")
