"""Interface between a consumer and its dead-letter store. `tfmq.dead_letters` has the implementations.

A message whose handling finally failed becomes a dead letter: it is stored with its history, and only after the store's
commit may its offset be committed. The state of a dead letter is "dead" if a person must treat it with `tfmq dlq`, or
"waiting" if a consumer will handle it again at a certain time. A consumer leases a dead letter before it handles it.

All methods are operations, which a driver runs, so no call blocks an event loop. The methods raise `StoreFailed` if the
store failed. Then it is unknown whether the change was stored, and the same call may be repeated.
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
"""Maximum length of a stored traceback, about a hundred frames. Of a longer one, only the end is stored."""
COUNT_BEFORE_CALL_MAX: Final = 16
"""For the first messages of each partition in a run, up to this number, handler calls are counted before they start.

They are counted in the dead-letter store. One of these messages may have crashed the process in a former run, and only
a call that was counted before its start shows that. Counting costs two commits of the store per message. For a later
message, calls are counted only if the store has failures of it, which is looked up once per partition.
"""
EXPIRY_SECONDS: Final = 3600.0
"""Interval at which a consumer deletes expired dead letters."""


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
    """Return class and text of an error. For a SyntaxError, omit the source line, which may be a payload."""
    lines = traceback.format_exception_only(error)
    if not isinstance(error, SyntaxError):
        return lines
    return [f"{type(error).__name__}: {error.msg}"]


def format_storable(form: Callable[[BaseException], list[str]], error: BaseException) -> str:
    """Return the text that `form` makes of `error`; if `form` fails, the class name. Lone surrogates are escaped."""
    try:
        text = "".join(form(error))
    except Exception:
        text = type(error).__name__
    return text.encode(errors="backslashreplace").decode()


class LeasedLetter(NamedTuple):
    """A dead letter to be handled now. It is leased: no other consumer can lease it until the lease ends.

    `calls`: number of handler calls, the coming one included · `put_offs`: how often the dead letter was postponed ·
    `token`: identifies the lease.
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

        Used for the first messages of a partition in a run (`COUNT_BEFORE_CALL_MAX`), because one of them may have
        crashed the process in a former run. If the state is "failing", call the handler, then
        `record_failure(..., begun=True)` or `record_success`. In any other state, do not call the handler; the offset
        may be committed. The state is "dead" if all permitted calls are used up, for example by crashes.
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

        Returns the message's state. If it is "failing", call the handler again after a pause. In any other state the
        offset may be committed; "dead" means that all calls are used up. If a former run has stored the message as a
        dead letter, but not committed its offset, the dead letter keeps its state. `begun`: whether `count_call` has
        counted the call. `noted` is called with the state before the store logs that the message is dead, so that the
        caller can log the failed call first.
        """

    def failing_offsets(self, message: ReceivedMessage[Any]) -> Operation[frozenset[int]]:
        """Return the offsets of messages in state "failing" in the partition of `message`."""

    def record_success(self, message: ReceivedMessage[Any]) -> Operation[None]:
        """Record that the handler has succeeded with `message`. Called only if the store has recorded failures or calls
        of `message`."""

    def store_letter(
        self,
        message: ReceivedMessage[Any],
        failures: Sequence[Failure],
        *,
        calls: int | None = None,
        begun: bool = False,
        retry_after: float | None = None,
    ) -> Operation[str]:
        """Store `message` as a dead letter in the state "dead" or "waiting". Return its state when this is durable.

        `failures`: the failures that are not recorded yet, in order; `calls`: how many calls are not recorded yet
        (None: one per failure); `begun`: whether `count_call` has counted the last call. `retry_after`: if given, the
        state is "waiting": the message is handled again after these seconds, and the call that requested this does not
        count. If None, the state is "dead". If the message is a dead letter already, both histories are joined; its
        number of remaining calls does not change, and if it is dead, it stays dead.
        """

    def lease_next(self) -> Operation[LeasedLetter | None]:
        """Lease and return the dead letter that has been due for the longest time; None if no dead letter is due.

        The coming handler call is counted now, so that it also counts if it crashes the process.
        """

    def seconds_until_due(self) -> Operation[float | None]:
        """Return the seconds until the next dead letter is due: 0 if one is due now, None if no dead letter waits."""

    def renew_lease(self, due: LeasedLetter) -> Operation[bool]:
        """Extend the lease. Return False if the lease had expired and another consumer has leased the dead letter."""

    def mark_handled(self, due: LeasedLetter) -> Operation[bool]:
        """Mark the dead letter as handled. Return False if the lease had expired."""

    def mark_failed(self, due: LeasedLetter, failure: Failure, *, rejected: bool = False) -> Operation[str]:
        """Record a failed call for a leased dead letter, and return its new state; "" if the lease had expired. With
        `rejected` the dead letter becomes dead, even if calls are left."""

    def postpone(self, due: LeasedLetter, seconds: float, reason: str = "") -> Operation[str]:
        """Postpone a leased dead letter by `seconds`, and return its state; "" if the lease had expired. A postponement
        is no failure, but the store limits their number: at the limit the dead letter becomes dead."""

    def release(self, due: LeasedLetter) -> Operation[bool]:
        """End the lease of a dead letter whose handler was not called, and count no call. Return False if the lease had
        expired before."""

    def delete_expired(self) -> Operation[None]:
        """Delete dead letters that were handled, redriven or dropped, and records of failed calls, after the store's
        retention time. The consumer calls this every `EXPIRY_SECONDS`."""

    def close(self) -> None:
        """Close the store. Leases are not ended: other consumers get these dead letters after the leases expire."""
