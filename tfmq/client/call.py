"""A request that was handed to a link, and what came back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfmq.bounded_msgpack import Buffer
from tfmq.client.waiting import Waitable
from tfmq.errors import NOT_DONE, UNKNOWN, TfmqError, TimedOut, from_wire
from tfmq.protocol.commands import BY_REQUEST, Command

NEVER = float("inf")
Renew = Callable[[Any], Any]


class Call(Waitable):
    """Done when its reply came, when it failed, or when it was given up.

    `request` is a NamedTuple of `protocol.commands`. `repeat`: it is sent again after a reconnect, so its caller
    never sees one; without it, a connection that breaks makes it fail with an unknown outcome. `unattended`: nobody
    waits for it, so the driver's keeper reads until it is done. `renew`: makes the request anew each time it goes out,
    where a part of it passes with time. `reply` and `error` are what came; `reply_body` is a
    view of received bytes that stays valid as long as it is held.
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
        """How many times it went out: above 1, an earlier one may have been done although a later one is refused."""
        self.reply: Any = None
        self.reply_body: memoryview = _EMPTY
        self.error: TfmqError | None = None

    def late(self, server: object) -> TimedOut:
        """Why it fails when its time is over and no answer came from `server`."""
        return TimedOut(
            f"{server} did not answer {self.command.name} in time."
            + (" It may still happen." if self.sent else ""),
            outcome=UNKNOWN if self.sent else NOT_DONE,
        )

    def result(self) -> Any:
        """The reply, a NamedTuple of `protocol.commands`. Raises what the call failed with."""
        if self.error is not None:
            raise self.error
        return self.reply

    def __repr__(self) -> str:
        state = "open" if not self.done else repr(self.error) if self.error else "answered"
        return f"<Call {self.command.name} {self.correlation} {state}>"


_EMPTY = memoryview(b"")


def reply_error(header: list[Any]) -> TfmqError:
    """The error of an error reply; one that is not well formed is told as it came."""
    number, fields = -header[0], [*header[2:], None, None, None, None]
    code, outcome, sentence, details = fields[:4]
    return from_wire(
        number,
        code if isinstance(code, str) else "error",
        outcome if isinstance(outcome, str) else UNKNOWN,
        sentence if isinstance(sentence, str) else "",
        details if isinstance(details, dict) else {},
    )
