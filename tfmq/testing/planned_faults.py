"""Planned faults: requests that fail because a test has called `fail_next`.

The broker sends the planned error in place of its reply, and the client reacts as it does to a real error. If the
client retries requests after such an error, the tested code gets no error, but the test's clock has advanced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from tfmq.broker.request_handler import RequestHandler
from tfmq.errors import BadRequest, TfmqError
from tfmq.protocol import commands
from tfmq.protocol.commands import COMMANDS, Hello

REQUESTS_BY_WORD: Final[Mapping[str, tuple[type[Any], ...]]] = {
    "send": (commands.Produce, commands.Transact),
    "fetch": (commands.Fetch,),
    "join": (commands.JoinGroup,),
    "save": (commands.CommitOffsets,),
    "begin": (commands.BeginTransaction,),
    "prepare": (commands.PrepareTransaction,),
    "commit": (commands.CommitTransaction, commands.Transact),
    "rollback": (commands.RollbackTransaction,),
}
"""Words for kinds of requests. `fail_next` also accepts the protocol's names of commands, such as "create_topic"."""
CONNECT: Final = "connect"

RequestObserver = Callable[[Any, Any, Any, Any], Any]


class PlannedFault(NamedTuple):
    """The next request of a type in `requests` will fail. `done`: it is executed, and only its reply is replaced."""

    requests: tuple[type[Any], ...]
    error: TfmqError
    done: bool


class ReplyProxy:
    """Wraps the reply object `reply`: attributes and methods that a subclass does not define are those of `reply`."""

    def __init__(self, reply: Any) -> None:
        self._reply = reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reply, name)


class ErrorReplacingReply(ReplyProxy):
    """Wraps a reply object, so that `error` is sent if the request succeeds."""

    def __init__(self, reply: Any, error: TfmqError) -> None:
        super().__init__(reply)
        self._error = error

    def ok(self, *fields: Any, body: Any = b"") -> None:
        self._reply.error(self._error)


class PlannedFaults:
    """The planned faults of a test, in the order in which they were planned."""

    def __init__(self) -> None:
        self._planned: deque[PlannedFault] = deque()
        self.refusal_count = 0  # connections that will be refused
        self.observer: RequestObserver | None = None
        """Called with every request. Returns the reply object to use, or None if the request must not be executed."""

    def fail_next(self, what: str, error: type[TfmqError] | TfmqError, *, times: int = 1, done: bool = False) -> None:
        """Let the next `times` requests of the kind `what` fail with `error`. `done`: execute the requests, too.

        Raises `BadRequest` for an invalid `what` or `times`, `TypeError` if `error` is no error of tfmq.
        """
        if isinstance(times, bool) or not isinstance(times, int) or times < 1:
            raise BadRequest(f"times={times!r}: it fails once or more often.")
        if what == CONNECT:
            self.refusal_count += times
            return
        made = error() if isinstance(error, type) else error
        if not isinstance(made, TfmqError):
            raise TypeError(f"A broker answers with errors of tfmq, not {type(made).__name__}.")
        self._planned.extend([PlannedFault(request_types(what), made, done)] * times)

    def take_refusal(self) -> bool:
        """Return whether the test has planned to refuse this connection. Must be called once for each connection."""
        refused = self.refusal_count > 0
        self.refusal_count -= refused
        return refused

    def serve(self, engine: RequestHandler, request: Any, body: Any, reply: Any, session: Any) -> None:
        if self.observer is not None:
            reply = self.observer(engine, request, reply, session)
            if reply is None:
                return
        fault = next((each for each in self._planned if type(request) in each.requests), None)
        if fault is None:
            engine.handle(request, body, reply, session)
            return
        self._planned.remove(fault)
        if fault.done:
            engine.handle(request, body, ErrorReplacingReply(reply, fault.error), session)
        else:
            reply.error(fault.error)


def request_types(what: str) -> tuple[type[Any], ...]:
    """Return the request types for a word or the name of a command. Raises `BadRequest`, which lists all words."""
    if what in REQUESTS_BY_WORD:
        return REQUESTS_BY_WORD[what]
    for command in COMMANDS:
        if command.name.lower() == what and command.request.shape is not Hello:
            return (command.request.shape,)
    raise BadRequest(
        f"{what!r} cannot be made to fail; possible are {', '.join([*REQUESTS_BY_WORD, CONNECT])}, or a command such as"
        ' "create_topic".'
    )
