"""Interface between a consumer and its dead-letter store.

`tfmq.dead_letters` has the implementations. A message whose handling finally failed is stored, and only when
that is committed may its offset be committed. A stored message is "dead" and left to a person (`tfmq dlq`),
or "waiting" and handled again at its time by a consumer that leases it. All methods are operations, which a
driver runs, so nothing here blocks an event loop. They raise `StoreFailed` if the store failed; then the
result is unknown, and the same call may be repeated.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.operation import Operation
from tfmq.errors import StoreFailed

ERROR_CHARACTERS: Final = 1000
"""Maximum length of an error's sentence; longer ones usually contain a payload."""
TRACEBACK_CHARACTERS: Final = 8000
"""Of a traceback, about a hundred frames. Its end, which has the location, is stored."""
EXPIRY_SECONDS: Final = 3600.0
"""Interval for deleting expired letters."""


class StoreUnusable(StoreFailed):
    """The store can never work as it is configured, so retrying is useless."""

    retriable = False


class HandlerNotCalled(Exception):
    """A letter was leased, but its consumer ended before the handler was called."""


class Failure(NamedTuple):
    """One failed handler call.

    `at_ms`: time in ms since 1970 · `error`: class and sentence on one line · `traceback`: as Python prints
    it, or "".
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
    """Return class and sentence, without the source text of a SyntaxError: maybe a payload."""
    lines = traceback.format_exception_only(error)
    if not isinstance(error, SyntaxError):
        return lines
    return [f"{type(error).__name__}: {error.msg}"]


def format_storable(form: Callable[[BaseException], list[str]], error: BaseException) -> str:
    """Return what `form` creates in storable characters; the class name if it fails."""
    try:
        text = "".join(form(error))
    except Exception:
        text = type(error).__name__
    return text.encode(errors="backslashreplace").decode()


class LeasedLetter(NamedTuple):
    """A leased letter, to be handled now; no other consumer gets it until the lease ends.

    `calls`: number of handler calls, this one included · `put_offs`: number of postponements · `token`:
    identifies the lease.
    """

    id: str
    message: ReceivedMessage[Any]
    calls: int
    put_offs: int
    token: str


class DeadLetterStore(Protocol):
    """Dead-letter store of one group.

    `address`: its public name (without a password), for logs · `lease_seconds`: duration of a lease that is
    not renewed.
    """

    @property
    def address(self) -> str: ...

    lease_seconds: float

    def count_call(self, message: ReceivedMessage[Any]) -> Operation[str]:
        """Count a handler call before it starts, and return the message's state.

        For the first messages of a consumer, which may have crashed the process in a former run. "failing":
        call the handler, then `record_failure(..., begun=True)` or `record_success`; otherwise the offset may
        be committed without a call. The state is "dead" after `calls_max` crashed processes.
        """

    def record_failure(
        self,
        message: ReceivedMessage[Any],
        failure: Failure,
        *,
        begun: bool = False,
        noted: Callable[[str], object] = lambda state: None,
    ) -> Operation[str]:
        """Record a failed call of a handler whose retries go on, before the next call.

        So a consumer that follows a killed one continues the count. Returns the state: "failing": call again, after
        a pause; any other: the offset may pass the message. "dead" means that all calls are used up. A message that
        was stored before, and whose offset was not committed, keeps its state. `begun`: the call was counted by
        `begin`. `noted` is called with the state before the store logs that the message is dead: the caller logs the
        failed call first.
        """

    def failing_offsets(self, message: ReceivedMessage[Any]) -> Operation[frozenset[int]]:
        """Return the offsets of failing messages in the partition of `message`."""

    def record_success(self, message: ReceivedMessage[Any]) -> Operation[None]:
        """Record that a message with recorded failures was handled."""

    def store_letter(
        self,
        message: ReceivedMessage[Any],
        failures: Sequence[Failure],
        *,
        calls: int | None = None,
        begun: bool = False,
        retry_after: float | None = None,
    ) -> Operation[str]:
        """Store `message` as dead, or to be handled later.

        Committed when this returns. Return its state. `failures` in order, those that were not recorded;
        `calls`: number of calls not recorded (None: one per failure); `begun`: the last call was counted by
        `count_call`. With `retry_after` the message is handled again after that many seconds, and the call
        that asked for it does not count; None: it is dead. Storing the same message again results in one
        letter with both histories; the number of remaining calls is unchanged, and a dead one stays dead.
        """

    def lease_next(self) -> Operation[LeasedLetter | None]:
        """Lease the letter that is due longest and return it, or None.

        Its call counts from now on, also if the process crashes.
        """

    def seconds_until_due(self) -> Operation[float | None]:
        """Return the time until a letter is due: 0 if one is, None if none waits."""

    def renew_lease(self, due: LeasedLetter) -> Operation[bool]:
        """Extend the lease. Return False if it had expired and another consumer has the letter."""

    def mark_handled(self, due: LeasedLetter) -> Operation[bool]:
        """Mark the letter as handled. Return False if the lease had expired."""

    def mark_failed(self, due: LeasedLetter, failure: Failure, *, rejected: bool = False) -> Operation[str]:
        """Record a failed call of a leased letter, and return its state.

        "" if the lease had expired. It waits for the next call, or is dead if it is `rejected` or its calls
        are used up.
        """

    def postpone(self, due: LeasedLetter, seconds: float, reason: str = "") -> Operation[str]:
        """Postpone a leased letter by `seconds`, and return its state; "" if the lease had expired.

        This is not a failure, but after too many postponements the letter is dead.
        """

    def release(self, due: LeasedLetter) -> Operation[bool]:
        """Release a leased letter without a call.

        The call is not counted. Return False if it had expired.
        """

    def delete_expired(self) -> Operation[None]:
        """Delete letters that ended long ago; to be called from time to time."""

    def close(self) -> None:
        """Close the store; leased letters are available again when their leases expire."""
