"""Requests that fail because a test says so: at the broker, in place of what it would have answered.

The client does with such an answer whatever it does with a real one. So an error that it mends by itself (`Busy` behind
a send, any error behind a fetch that may be repeated) costs it time and is not seen by the program.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from tfmq.errors import BadRequest, TfmqError
from tfmq.protocol import commands
from tfmq.protocol.commands import Command
from tfmq.server.session import HANDLERS, Method

WORDS: Final[Mapping[str, tuple[type[Any], ...]]] = {
    "send": (commands.Produce, commands.Transact),
    "fetch": (commands.Fetch,),
    "join": (commands.JoinGroup,),
    "save": (commands.CommitOffsets,),
    "begin": (commands.BeginTransaction,),
    "prepare": (commands.PrepareTransaction,),
    "commit": (commands.CommitTransaction, commands.Transact),
    "rollback": (commands.RollbackTransaction,),
}
"""What a test calls them; any other command by its own name, as "create_topic"."""
CONNECT: Final = "connect"

Watch = Callable[[Any, Any, Any, Any], Any]


class Fault(NamedTuple):
    """One request that is to fail. `done`: it is done all the same, and only its answer is lost."""

    requests: tuple[type[Any], ...]
    error: TfmqError
    done: bool


class LostAnswer:
    """A reply whose good news never arrives: `error` does in its place."""

    def __init__(self, reply: Any, error: TfmqError) -> None:
        self._reply = reply
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reply, name)

    def ok(self, *fields: Any, body: Any = b"") -> None:
        self._reply.error(self._error)


class Faults:
    """What is still to fail, in order."""

    def __init__(self) -> None:
        self._planned: deque[Fault] = deque()
        self.refusals = 0
        """Connections that are to be refused."""
        self.watch: Watch | None = None
        """Sees every request first, and says what reply it is served with; None: it is not served."""

    def fail_next(
        self, what: str, error: type[TfmqError] | TfmqError, *, times: int = 1, done: bool = False
    ) -> None:
        """The next `times` requests that `what` names are answered with `error`. Raises `BadRequest`, `TypeError`."""
        if isinstance(times, bool) or not isinstance(times, int) or times < 1:
            raise BadRequest(f"times={times!r}: it fails once or more often.")
        if what == CONNECT:
            self.refusals += times
            return
        made = error() if isinstance(error, type) else error
        if not isinstance(made, TfmqError):
            raise TypeError(f"A broker answers with errors of tfmq, not {type(made).__name__}.")
        self._planned.extend([Fault(requests_of(what), made, done)] * times)

    def refuses(self) -> bool:
        """Whether this connection is to be refused; asked once for each."""
        refused = self.refusals > 0
        self.refusals -= refused
        return refused

    def handlers(self) -> dict[int, tuple[Command, Method]]:
        """The broker's own, with the planned faults before them."""
        return {code: (command, partial(self._serve, method)) for code, (command, method) in HANDLERS.items()}

    def _serve(self, method: Method, engine: Any, request: Any, body: Any, reply: Any, session: Any) -> None:
        if self.watch is not None:
            reply = self.watch(engine, request, reply, session)
            if reply is None:
                return
        fault = self._take(type(request))
        if fault is None:
            method(engine, request, body, reply, session)
        elif fault.done:
            method(engine, request, body, LostAnswer(reply, fault.error), session)
        else:
            reply.error(fault.error)

    def _take(self, request: type[Any]) -> Fault | None:
        for fault in self._planned:
            if request in fault.requests:
                self._planned.remove(fault)
                return fault
        return None


def requests_of(what: str) -> tuple[type[Any], ...]:
    """The requests that a word or a command's name stands for. Raises `BadRequest` that lists the words."""
    if what in WORDS:
        return WORDS[what]
    for command, _ in HANDLERS.values():
        if command.name.lower() == what:
            return (command.request.shape,)
    raise BadRequest(
        f"{what!r} is nothing that can be made to fail: {', '.join([*WORDS, CONNECT])}, or a command such as"
        ' "create_topic".'
    )
