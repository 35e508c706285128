"""Interface between a consumer and its dead-letter store.

`tfmq.dead_letters` has the implementations. A message whose handling finally failed becomes a dead letter: it is stored
with its history, and only after the store's commit may its offset be committed. A letter is "dead", until a person
treats it with `tfmq dlq`, or "waiting", until it is due and a consumer leases it to handle it again. All methods are
operations, which a driver runs, so no call blocks an event loop. The methods raise `StoreFailed` if the store failed;
then the result is unknown, and the same call may be repeated.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.operation import Operation
from tfmq.errors import StoreFailed

ERROR_CHARACTERS: Final = 1000
"""Maximum length of a stored error text; a longer text usually contains a payload."""
TRACEBACK_CHARACTERS: Final = 8000
"""How much of a traceback is stored, about a hundred frames: the end, which shows where the error was raised."""
EXPIRY_SECONDS: Final = 3600.0
"""Interval for deleting expired letters."""


class StoreUnusable(StoreFailed):
    """The store can never work with its configuration, so repeating a call is useless."""

    retriable = False


class HandlerNotCalled(Exception):
    """A dead letter was leased, but the consumer ended before its handler was called."""


class Failure(NamedTuple):
    """One failed handler call.

    `at_ms`: time in ms since 1970 · `error`: class and text of the exception on one line · `traceback`: as Python
    prints it, or "".
    """

    at_ms: int
    error: str
    traceback: str = ""

    @classmethod
    def from_exception(cls, error: BaseException, at_ms: int) -> Failure:
        lines = format_storable(traceback.format_exception, error)
        sentence = " ".join(format_storable(format_without_source, error).split())
        return cls(at_ms, sentence[:ERROR_CHARACTERS], lines[-TRACEBACK_CHARACTERS:])


def format_without_source(error: BaseException) -> list[str]:
    """Return class and text of an error; of a SyntaxError without the source text, which may be a payload."""
    lines = traceback.format_exception_only(error)
    if not isinstance(error, SyntaxError):
        return lines
    return [f"{type(error).__name__}: {error.msg}"]


def format_storable(form: Callable[[BaseException], list[str]], error: BaseException) -> str:
    """Return the text that `form` makes of `error`, in storable characters; the class name if `form` fails."""
    try:
        text = "".join(form(error))
    except Exception:
        text = type(error).__name__
    return text.encode(errors="backslashreplace").decode()


class LeasedLetter(NamedTuple):
    """A dead letter to be handled now. It is leased: no other consumer gets it until the lease ends.

    `calls`: number of handler calls, the coming one included · `put_offs`: number of postponements · `token`:
    identifies the lease.
    """

    id: str
    message: ReceivedMessage[Any]
    calls: int
    put_offs: int
    token: str


class DeadLetterStore(Protocol):
    """Dead-letter store of one group.

    `address`: the store's name for logs, without a password · `lease_seconds`: duration of a lease that is not renewed.
    """

    @property
    def address(self) -> str: ...

    lease_seconds: float

    def count_call(self, message: ReceivedMessage[Any]) -> Operation[str]:
        """Count a handler call before it starts, and return the message's state.

        Used for the first messages of a consumer, because one of these may have crashed the process in a former run.
        State "failing": call the handler, then `record_failure(..., begun=True)` or `record_success`. Any other state:
        do not call the handler; the offset may be committed. After `calls_max` crashed processes the state is "dead".
        """

    def record_failure(
        self,
        message: ReceivedMessage[Any],
        failure: Failure,
        *,
        begun: bool = False,
        noted: Callable[[str], object] = lambda state: None,
    ) -> Operation[str]:
        """Record a failed handler call before the next call, so that the count continues if the consumer is killed.

        Returns the state. "failing": call the handler again after a pause. Any other state: the message's offset may be
        committed; "dead" means that all calls are used up. If the message became a letter before, but its offset was
        not committed, the letter keeps its state. `begun`: whether `count_call` has counted the call. `noted` is called
        with the state before the store logs that the message is dead, so that the caller can log the failed call first.
        """

    def failing_offsets(self, message: ReceivedMessage[Any]) -> Operation[frozenset[int]]:
        """Return the offsets of messages in state "failing" in the partition of `message`."""

    def record_success(self, message: ReceivedMessage[Any]) -> Operation[None]:
        """Record that the handler has now succeeded with a message of which the store has failures or counted calls."""

    def store_letter(
        self,
        message: ReceivedMessage[Any],
        failures: Sequence[Failure],
        *,
        calls: int | None = None,
        begun: bool = False,
        retry_after: float | None = None,
    ) -> Operation[str]:
        """Store `message` as dead, or to be handled later. Return its state when this is committed.

        `failures`: the failures that are not recorded yet, in order; `calls`: how many calls are not recorded yet
        (None: one per failure); `begun`: whether `count_call` has counted the last call. `retry_after`: the message is
        handled again after these seconds, and the call that requested this does not count; None: the message is dead.
        Storing the same message again results in one letter with both histories; the number of remaining calls does not
        change, and a dead letter stays dead.
        """

    def lease_next(self) -> Operation[LeasedLetter | None]:
        """Lease and return the letter that has been due for the longest time; None if no letter is due.

        The coming handler call is counted now, so that it counts also if the process crashes.
        """

    def seconds_until_due(self) -> Operation[float | None]:
        """Return the time until the next letter is due: 0 if a letter is due now, None if no letter waits."""

    def renew_lease(self, due: LeasedLetter) -> Operation[bool]:
        """Extend the lease. Return False if the lease had expired and another consumer has the letter."""

    def mark_handled(self, due: LeasedLetter) -> Operation[bool]:
        """Mark the letter as handled. Return False if the lease had expired."""

    def mark_failed(self, due: LeasedLetter, failure: Failure, *, rejected: bool = False) -> Operation[str]:
        """Record a failed call of a leased letter, and return its new state; "" if the lease had expired."""

    def postpone(self, due: LeasedLetter, seconds: float, reason: str = "") -> Operation[str]:
        """Postpone a leased letter by `seconds`, and return its state; "" if the lease had expired.

        A postponement is no failure, but after too many the letter is dead.
        """

    def release(self, due: LeasedLetter) -> Operation[bool]:
        """End the lease of a letter whose handler was not called, and count no call. Return False if it had expired."""

    def delete_expired(self) -> Operation[None]:
        """Delete letters that were handled or ended long ago. The consumer calls this every `EXPIRY_SECONDS`."""

    def close(self) -> None:
        """Close the store. Other consumers can lease the letters leased here when their leases expire."""
