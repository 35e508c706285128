"""A client inside the server's process: operations of `tfmq.client`, whose requests are calls of the request handler.

A request is encoded and decoded as one from the network. So it has the same checks and limits, and the session under
which it is executed has the same rights, as a client's with the same user. Nothing here waits or uses a socket.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tfmq import limits
from tfmq.bounded_msgpack import Buffer
from tfmq.broker.reply import Buffers, client_error
from tfmq.client.connection.addresses import BrokerAddress
from tfmq.client.connection.connection import ClientConnection, ConnectionState, PendingRequest
from tfmq.client.operation import CallUserCode, Future, Operation
from tfmq.config import split_address
from tfmq.errors import Abandoned, ServerError, TfmqError, TimedOut, to_error_reply
from tfmq.limits import received_limits
from tfmq.protocol import commands, frames
from tfmq.server.session import SessionContext

if TYPE_CHECKING:
    from tfmq.server.access_control import Account

logger = logging.getLogger("tfmq.server")

Clock = Callable[[], float]

SLICE_SECONDS: Final = 0.005
"""How long an operation may run before the server does other work. Requests that have their replies at once, such as
reads of cached blocks, would otherwise keep a long operation in one turn."""


class LocalSession:
    """The session under which requests of this process are executed (`tfmq.broker.reply.Session`)."""

    operator = True
    """A person uses the page, so the changes that it requests are logged."""
    number = 0
    sent_bytes = limits.FETCH_BYTES.cap
    """As much as any fetch may return: no reply waits for its reader here."""

    def __init__(self, identity: str, account: Account | None = None) -> None:
        """`account`: the user of the request; None where the server has no users."""
        self.identity = identity
        self.account = account
        self.synced_durability = commands.ACKS_SYNCED
        self._on_close: dict[Callable[[], None], None] = {}
        self.is_closed = False

    def on_close(self, callback: Callable[[], None]) -> None:
        if self.is_closed:
            callback()
        else:
            self._on_close[callback] = None

    def pause(self) -> None:
        """Do nothing: an operation sends its next request when it has the reply to the last one."""

    def resume(self) -> None:
        """Do nothing; see `pause`."""

    def pause_for(self, seconds: float, then: Callable[[bool], None]) -> None:
        """Continue at once: no operation sends without acknowledgements."""
        then(True)

    @property
    def user(self) -> str:
        return "" if self.account is None else self.account.name

    def end(self) -> None:
        """End the session: its open local transactions and waiting requests end."""
        self.is_closed = True
        callbacks, self._on_close = self._on_close, {}
        for callback in callbacks:
            callback()


class LocalReply:
    """The reply to one request of this process (`tfmq.broker.reply.Reply`): `received(frame)` gets it as a frame."""

    def __init__(self, correlation: int, received: Callable[[frames.Frame], None]) -> None:
        self.correlation = correlation
        self._received: Callable[[frames.Frame], None] | None = received

    def body_done(self) -> None:
        """Do nothing: the body belongs to the operation."""

    def appended(self) -> None:
        """Do nothing: requests of this process have no trace context."""

    def ok(self, *fields: Any, body: Buffers = b"") -> None:
        whole = bytes(body) if isinstance(body, bytes | memoryview) else b"".join(body)
        try:
            encoded = frames.encode((0, self.correlation, *fields))
        except TfmqError as error:
            self.error(error)
        else:
            self._deliver(encoded, whole)

    def error(self, error: BaseException) -> None:
        number, *fields = to_error_reply(error)
        if fields[0] == ServerError.code:
            logger.error("a request of this process met an error of ours", exc_info=error)
        self._deliver(frames.encode((-number, self.correlation, *fields)), b"")

    def _deliver(self, encoded: list[Any], body: bytes) -> None:
        received, self._received = self._received, None
        if received is not None:
            received(frames.Frame(_header_of(encoded), memoryview(body)))


class LocalConnection(ClientConnection):
    """A connection whose requests are executed by the broker of this process, at once and under `session`."""

    def __init__(self, context: SessionContext, session: LocalSession, clock: Clock) -> None:
        host, port = split_address(context.address)
        super().__init__((BrokerAddress(host, port),), clock, client=session.identity)
        self.operator = True
        self.session = session
        session.synced_durability = context.synced_durability
        self._context = context
        self._slice_ends = clock()
        self._is_executing = False
        self.state = ConnectionState.READY
        self.connection_count = 1
        self.limits = received_limits(context.limits_sent)
        self.hello = commands.HelloReply(
            commands.VERSION_MAX,
            context.server,
            context.node,
            dict(context.limits_sent),
            context.acks,
            [],
            {"durability": context.synced_durability},
        )

    def call_later(self, seconds: float, function: Callable[[], None]) -> Any:
        return self._context.call_later(seconds, function)

    def begin_slice(self) -> None:
        """Let replies that the broker gives at once arrive at once for the next SLICE_SECONDS."""
        self._slice_ends = self.now() + SLICE_SECONDS

    def send_request(self, request: Any, *body: Buffer, **options: Any) -> PendingRequest:
        pending = super().send_request(request, *body, **options)
        self._is_executing = True
        self._execute(pending)
        self._is_executing = False
        return pending

    def check(self, request: Any) -> None:
        """Raise the error with which `request` would be refused to the user of the session."""
        access = self._context.access
        refusal = None if access is None else access.refusal(request, self.session)
        if refusal is not None:
            raise refusal

    def may(self, request: Any) -> bool:
        """Return whether the user of the session has the rights for `request`."""
        access = self._context.access
        return access is None or access.allows(request, self.session.account)

    def _send(self, pending: PendingRequest) -> None:
        """Count the attempt. `send_request` executes the request when it is registered, so that a reply finds it."""
        if pending.update is not None:
            pending.request = pending.update(pending.request)
        pending.sent = True
        pending.send_count += 1

    def _execute(self, pending: PendingRequest) -> None:
        reply = LocalReply(pending.correlation_id, self._reply_received)
        command, context = pending.command, self._context
        try:
            encoded = frames.encode((command.code, pending.correlation_id, *pending.request))
            request = command.request.decode(_header_of(encoded, context.header_bounds), command.name, 2)
            if type(request) is commands.Status:
                self.check(request)
                reply.ok(context.status())
                return
            context.turn_wanted()
            context.handle(request, b"".join(pending.body), reply, self.session)  # type: ignore[arg-type]
        except Exception as error:
            reply.error(client_error(error))

    def _reply_received(self, frame: frames.Frame) -> None:
        """Complete the request: at once while the operation is executing it, else in a later turn of the server.

        Otherwise the operation would continue, and send its next request, in the middle of the broker's work.
        """
        if self._is_executing and self.now() < self._slice_ends:
            self._process_frame(frame)
        else:
            self.call_later(0, partial(self._process_frame, frame))


def _header_of(encoded: list[Any], bounds: Any = None) -> list[Any]:
    """Return the header of an encoded frame as a peer would decode it."""
    header = memoryview(encoded[0])[frames.PREFIX.size :]
    return frames.decode_header(header) if bounds is None else frames.decode_header(header, bounds)


class OperationRun:
    """Runs one operation over a `LocalConnection` to its end, in slices of SLICE_SECONDS, and then calls `done`.

    `done(result, error)` is called once, perhaps before the constructor has returned. After `seconds` the operation is
    closed where it waits, and the error is `TimedOut`: what it has requested may still be executed.
    """

    def __init__(
        self,
        link: LocalConnection,
        operation: Operation[Any],
        done: Callable[[Any, BaseException | None], None],
        seconds: float,
    ) -> None:
        self._link, self._operation, self._done = link, operation, done
        self._futures: tuple[Future, ...] = ()
        self._is_running = self._has_ended = False
        self._wake: Any = None
        self._timeout: Any = link.call_later(seconds, partial(self._timed_out, seconds))
        self._run()

    def cancel(self) -> None:
        """Close the operation where it waits, because nobody wants the result; `done` gets the error `Abandoned`."""
        if not self._has_ended:
            self._finish(None, Abandoned())

    def _run(self, _: Future | None = None) -> None:
        if self._is_running or self._has_ended:
            return
        self._is_running = True
        self._stop_waiting()
        self._link.begin_slice()
        try:
            while True:
                wait = next(self._operation)
                if isinstance(wait, CallUserCode):
                    wait.function()
                elif not any(each.done for each in wait.futures):
                    break
            self._futures = tuple(wait.futures)
            for each in self._futures:
                each.add_done_callback(self._run)
            if wait.seconds is not None:
                self._wake = self._link.call_later(max(0.0, wait.seconds), self._run)
        except StopIteration as end:
            self._finish(end.value, None)
        except Exception as error:
            self._finish(None, error)
        finally:
            self._is_running = False

    def _stop_waiting(self) -> None:
        for each in self._futures:
            each.remove_done_callback(self._run)
        self._futures = ()
        _cancel_call(self._wake)
        self._wake = None

    def _timed_out(self, seconds: float) -> None:
        self._timeout = None
        if not self._has_ended:
            self._finish(None, TimedOut(f"The broker did not complete this within {seconds:g} s."))

    def _finish(self, result: Any, error: BaseException | None) -> None:
        self._has_ended = True
        self._stop_waiting()
        _cancel_call(self._timeout)
        self._timeout = None
        with suppress(TfmqError):
            self._operation.close()
        self._done(result, error)


def _cancel_call(call: Any) -> None:
    if call is not None and call.active():
        call.cancel()
