"""The client's side of one connection, without I/O: requests become bytes, bytes become replies.

    connection = Connection("my-program")
    write(connection.hello())                               # buffers, to be written in this order
    correlation, buffers = connection.request(Metadata())
    for reply in connection.receive(read()): ...            # whatever is complete by now

A reply is matched by its correlation number, so any number of requests may be under way and be answered in
any order. One that nobody waits for any more is dropped when it comes. The server's side is
`tfmq.server.session`, which reads requests with the same rows of `commands`.

Not to be used from two threads at once. After `receive` raised, or `lost` was called, it is done with.
"""

from typing import Any, NamedTuple

from tfmq import limits
from tfmq.errors import (
    Abandoned,
    BadFrame,
    BadRequest,
    Busy,
    NotSupported,
    TfmqError,
    VersionMismatch,
    from_wire,
)
from tfmq.packing import Buffer
from tfmq.protocol import commands
from tfmq.protocol.commands import BY_REQUEST, Command, HelloReply
from tfmq.protocol.frames import Decoder, Frame, encode

HELLO_CORRELATION = 0
CORRELATIONS = 1 << 32


class Reply(NamedTuple):
    """One answer: `result` is the command's reply as a NamedTuple, or the error."""

    correlation: int
    command: Command
    result: Any
    body: memoryview


NO_BODY = memoryview(b"")


class Connection:
    """One connection from `hello` to its end."""

    def __init__(self, client: str, details: dict[str, Any] | None = None) -> None:
        self.client = client
        self.details = details or {}
        self.welcome: HelloReply | None = None
        self._decoder = Decoder()
        self._waiting: dict[int, Command | None] = {}  # None: given up, the reply is to be dropped
        self._last = HELLO_CORRELATION
        self._requests_max = int(limits.REQUESTS_IN_FLIGHT)

    @property
    def ready(self) -> bool:
        """Whether the broker has answered HELLO."""
        return self.welcome is not None

    @property
    def missing(self) -> int:
        """How many bytes, at least, complete the next frame: what a reader may ask the socket for."""
        return self._decoder.missing

    @property
    def pending(self) -> list[int]:
        """The correlations that still wait for their reply, oldest first."""
        return [correlation for correlation, command in self._waiting.items() if command is not None]

    def hello(self) -> list[Buffer]:
        """The first thing to write."""
        command = BY_REQUEST[commands.Hello]
        self._waiting[HELLO_CORRELATION] = command
        versions = (commands.VERSION_MIN, commands.VERSION_MAX)
        return encode((command.code, HELLO_CORRELATION, commands.MAGIC, *versions, self.client, self.details))

    def request(self, request: Any, *body: Buffer) -> tuple[int, list[Buffer]]:
        """(correlation, buffers to write) of a request: a NamedTuple of `commands`.

        A PRODUCE with acks 0 has no reply, so nothing is remembered of it. Raises `Busy` when the broker
        would take no more at once, `BadRequest` for a field that cannot be sent.
        """
        if self.welcome is None:
            raise RuntimeError("a request before the broker's answer to HELLO")
        if len(self._waiting) >= self._requests_max:
            raise Busy(
                f"{len(self._waiting)} requests wait for answers on this connection, which is the most."
            )
        command = BY_REQUEST[type(request)]
        correlation = self._next()
        buffers = encode((command.code, correlation, *request), *body)
        if command.code != _PRODUCE or request.acks != commands.ACKS_NONE:
            self._waiting[correlation] = command
        return correlation, buffers

    def _next(self) -> int:
        """A number that no reply under way can bear; 0 is HELLO's and that of errors about no request."""
        while True:
            self._last = (self._last + 1) % CORRELATIONS or 1
            if self._last not in self._waiting:
                return self._last

    def abandon(self, correlation: int) -> None:
        """Nobody waits for this reply any more."""
        if correlation in self._waiting:
            self._waiting[correlation] = None

    def lost(self) -> list[Reply]:
        """The connection is gone: every request that waits ends with `Abandoned`, outcome unknown."""
        gone = [(key, command) for key, command in self._waiting.items() if command is not None]
        self._waiting.clear()
        return [Reply(key, command, Abandoned(), NO_BODY) for key, command in gone]

    def receive(self, data: Buffer) -> list[Reply]:
        """The replies that `data` completes; their bodies are views of it, so do not change it afterwards.

        Raises `BadFrame` for what is no reply, naming the program at the other end where it gives itself
        away, and whatever the broker says of the connection as a whole. Then close it.
        """
        replies = []
        for frame in self._decoder.feed(data):
            reply = self._reply(frame)
            if reply is not None:
                replies.append(reply)
        return replies

    def _reply(self, frame: Frame) -> Reply | None:
        kind, correlation = frame.header[0], frame.header[1]
        if kind > 0:
            raise BadFrame("The broker sent a request, which only clients do.")
        if correlation not in self._waiting:
            if kind:
                raise _error(frame.header)
            raise BadFrame(f"The broker answered a request {correlation} that was never sent.")
        command = self._waiting.pop(correlation)
        if command is None:
            return None
        if kind:
            return Reply(correlation, command, _error(frame.header), NO_BODY)
        result = _fields(command, frame.header)
        if command.code == _HELLO:
            self._welcomed(result)
        return Reply(correlation, command, result, frame.body)

    def _welcomed(self, welcome: HelloReply) -> None:
        if not commands.VERSION_MIN <= welcome.version <= commands.VERSION_MAX:
            raise VersionMismatch(
                f"The broker chose protocol version {welcome.version}; this client speaks"
                f" {commands.VERSION_MIN} to {commands.VERSION_MAX}. Upgrade the older of the two."
            )
        self.welcome = welcome
        self._decoder.frame_bytes = _limit(welcome, limits.FRAME_BYTES)
        self._requests_max = _limit(welcome, limits.REQUESTS_IN_FLIGHT)


_HELLO = BY_REQUEST[commands.Hello].code
_PRODUCE = BY_REQUEST[commands.Produce].code


def _fields(command: Command, header: list[Any]) -> Any:
    try:
        return command.reply.read(header, command.name, 2)
    except (BadRequest, NotSupported) as error:
        raise BadFrame(f"The broker's answer to {command.name} is broken: {error}") from None


def _error(header: list[Any]) -> TfmqError:
    """The error of an error reply: [-number, correlation, code, outcome, sentence, details]."""
    number, _, code, outcome, sentence, details, *_ = (*header, *_NO_ERROR[len(header) :])
    if not (type(code) is str and type(outcome) is str and type(sentence) is str and type(details) is dict):
        raise BadFrame("The broker sent an error reply whose fields are broken.")
    return from_wire(-number, code, outcome, sentence, details)


_NO_ERROR: list[Any] = [0, 0, "error", "unknown", "", {}]


def _limit(welcome: HelloReply, limit: limits.Limit) -> int:
    """What the broker says of a limit, never above its hard cap."""
    said = welcome.limits.get(limit.name)
    return min(said, limit.cap) if type(said) is int and said > 0 else int(limit)
