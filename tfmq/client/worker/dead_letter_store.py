"""What a consumer needs of the store of its dead letters, whatever that is; `tfmq.dead_letters` has the stores.

A message whose handling failed for good is *kept*, and only when that is committed may the offset pass it. A kept one
is *dead*, and waits for a person (`tfmq dlq`), or *waiting*, and is handled again at its time by a consumer that takes
it. All verbs are operations: a driver runs them, so nothing here blocks an event loop. They raise `StoreFailed` where
the store could not do it; then nothing may be taken for done, and the same call may be made again.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.operation import Operation
from tfmq.errors import StoreFailed

ERROR_CHARACTERS: Final = 1000
"""Of an error's sentence; what is longer is a payload in disguise."""
TRACEBACK_CHARACTERS: Final = 8000
"""Of a traceback, its end, which names the place: some hundred frames, more only come of a recursion."""


TIDY_SECONDS: Final = 3600.0
"""How often what ended long ago is forgotten."""


class StoreUnusable(StoreFailed):
    """Nothing can ever be kept there as it is: whoever waited would wait for ever."""

    retriable = False


class NotCalled(Exception):
    """A message was taken to be handled again, and its consumer ended before a handler was called with it."""


class Failure(NamedTuple):
    """One call of a handler that failed. `at_ms`: when, in ms since 1970 · `error`: class and sentence on one line ·
    `traceback`: as Python prints it, "" where there is none."""

    at_ms: int
    error: str
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, at_ms: int) -> Failure:
        """The failure that `error` is."""
        lines = printed(traceback.format_exception, error)
        sentence = " ".join(printed(_without_source, error).split())
        return cls(at_ms, sentence[:ERROR_CHARACTERS], lines[-TRACEBACK_CHARACTERS:])


def _without_source(error: BaseException) -> list[str]:
    """Class and sentence, which come first: Python puts the text that a SyntaxError is about, perhaps a payload, in
    front of them."""
    lines = traceback.format_exception_only(error)
    if not isinstance(error, SyntaxError):
        return lines
    return [f"{type(error).__name__}: {error.msg}"]


def printed(form: Callable[[BaseException], list[str]], error: BaseException) -> str:
    """The text that `form` makes of `error`, in letters that can be stored; of an error that cannot be printed its
    class."""
    try:
        text = "".join(form(error))
    except Exception:
        text = type(error).__name__
    return text.encode(errors="backslashreplace").decode()


class Due(NamedTuple):
    """A kept message that is to be handled now, by whoever took it and nobody else until its lease ends.

    `calls`: how often a handler was called with it, this time included · `put_offs`: how often it was put off ·
    `token`: who took it.
    """

    id: str
    message: ReceivedMessage[Any]
    calls: int
    put_offs: int
    token: str


class DeadLetters(Protocol):
    """The store of one group. `address`: what a person calls it (without a password), for the log · `lease_seconds`:
    how long a message that was taken stays with its taker unless it is renewed.
    """

    @property
    def address(self) -> str: ...

    lease_seconds: float

    def begin(self, message: ReceivedMessage[Any]) -> Operation[str]:
        """Count a call in a lane before it is made: for messages that may have ended the process before this one, those
        that a consumer meets first. "failing": call it, and then `note(..., begun=True)` or `passed`; any other: the
        offset may pass it without a call. It is "dead" when it ended `calls_max` processes.
        """
        ...

    def note(
        self,
        message: ReceivedMessage[Any],
        failure: Failure,
        *,
        begun: bool = False,
        noted: Callable[[str], object] = lambda state: None,
    ) -> Operation[str]:
        """A call of the handler failed, and the lane would call again. Written down first, so that nobody begins to
        count anew who comes behind a kill. The state comes back: "failing": call again, after a pause; any other: the
        offset may pass it. It is "dead" when its calls are used up, and it is what it was where it had been kept before
        and its offset was not saved. `begun`: the call was counted by `begin`. `noted` is called with the state before
        the store logs that the message is dead: the caller logs the failed call first.
        """
        ...

    def passed(self, message: ReceivedMessage[Any]) -> Operation[None]:
        """The handler returned, behind failures that were noted."""
        ...

    def keep(
        self,
        message: ReceivedMessage[Any],
        failures: Sequence[Failure],
        *,
        calls: int | None = None,
        begun: bool = False,
        retry_after: float | None = None,
    ) -> Operation[str]:
        """Give `message` up, or put it off, whatever was noted of it; when this ends it is committed, and the offset
        may pass it. Its state comes back.

        `failures` in order, those that were not noted; `calls` of the handler, likewise (None: one a failure); `begun`:
        the last call was counted by `begin`, and is not counted again. After `retry_after` seconds it is handled again,
        and the call of which this came costs none; None: it is dead. The same message kept again is one letter, with
        both histories; it has the calls that were left to it, and one that is dead stays dead.
        """
        ...

    def take(self) -> Operation[Due | None]:
        """A waiting message whose time has come, the one that is due longest; None: there is none. Its call counts
        from now on, whatever becomes of the caller."""
        ...

    def seconds_until_due(self) -> Operation[float | None]:
        """When `take` may give something: 0 at once, None: nothing waits."""
        ...

    def renew(self, due: Due) -> Operation[bool]:
        """Still at work on it; False: the lease was over, and somebody else has it."""
        ...

    def handled(self, due: Due) -> Operation[bool]:
        """It is done. False: the lease was over, and it is another's to say."""
        ...

    def failed(self, due: Due, failure: Failure, *, rejected: bool = False) -> Operation[str]:
        """Its handling failed. It waits for the next time, or is dead when its calls are used up or it is `rejected`;
        the state comes back, "" where the lease was over."""
        ...

    def put_off(self, due: Due, seconds: float, reason: str = "") -> Operation[str]:
        """Handle it again after `seconds`; that is no failure. Put off too often it is dead; the state comes back, ""
        where the lease was over."""
        ...

    def give_back(self, due: Due) -> Operation[bool]:
        """It was taken and not handled: it waits as before, and the call is not counted."""
        ...

    def tidy(self) -> Operation[None]:
        """Forget what ended long ago; now and then."""
        ...

    def close(self) -> None:
        """The end; what was taken and is not settled is taken again when its lease is over."""
        ...
