"""Requests to the delay queue, their results, and the arrival log as the broker provides it.

`key` is the log id of the partition that a delayed message is for.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, TypeAlias

from journal.log.log import Log
from journal.record.batch import Appended, Batch


class State(StrEnum):
    """State of a delayed message, or outcome of a reschedule; the values are in the protocol, too."""

    PENDING = "pending"
    CANCELLED = "cancelled"
    DELIVERED = "delivered"
    RESCHEDULED = "rescheduled"
    UNKNOWN = "unknown"


PENDING, CANCELLED, DELIVERED, RESCHEDULED, UNKNOWN = State


class Turn(NamedTuple):
    """The delivery order of a delayed message: (due time in ms, number).

    The messages of a partition fire in this order. The number is the ordinal of the message in the arrival log.
    """

    due: int
    number: int


class ArrivalLog(Protocol):
    """The arrival log, with deferred appends; implemented by the broker.

    Appends wait for the end of the broker's turn, and for the end of running work on the log's files. Fsyncs are shared
    with other callers.
    """

    @property
    def log(self) -> Log: ...

    def append(
        self, batches: Sequence[Batch], done: Callable[[Sequence[Appended] | None, BaseException | None], None]
    ) -> None:
        """Append the batches in one write, after all earlier appends.

        `done(results, None)` gets one result a batch; `done(None, error)` one of the errors of a send: nothing was
        written, unless the error's outcome is "unknown".
        """
        ...

    def when_forced(self, offset: int, waiter: Callable[[BaseException | None], None]) -> None:
        """Call `waiter(None)` once the log is durable up to `offset`; `waiter(error)` if it stops."""
        ...

    def truncate_before(self, offset: int, done: Callable[[Any, BaseException | None], None]) -> None:
        """Delete the segments that end before `offset`, in a worker, while no append is running."""
        ...


LogFilter: TypeAlias = Callable[[int], bool]
"""Returns whether messages for this log id are wanted."""


class PendingMessage(NamedTuple):
    """A pending message, as it is listed and shown.

    `attribute`: the encoded attribute in its record, see `tfmq.message`; None if it has none or cannot be read.
    """

    key: int
    due: int
    number: int
    size_bytes: int
    attribute: bytes | None


class ListQuery(NamedTuple):
    """Which pending messages to list: at most `limit`, with first_due <= due < end_due.

    `after`: only messages with turns after this one; None: all. `keys`: None for all logs.
    `message_key`: only messages with this key in their attribute; None: all.
    """

    first_due: int
    end_due: int
    after: Turn | None
    limit: int
    keys: LogFilter | None = None
    message_key: bytes | None = None


class ListPage(NamedTuple):
    """Listed messages, in the order of their turns.

    `more`: there may be other messages after `after`, which is the last turn examined.
    """

    rows: Sequence[PendingMessage]
    more: bool
    after: Turn | None


class MessageState(NamedTuple):
    """The state of a message: pending, cancelled, delivered or unknown, and its latest turn.

    `pending`: the message itself, if it is pending.
    """

    state: str
    turn: Turn
    pending: PendingMessage | None = None


class RescheduleResult(NamedTuple):
    """The outcome of a reschedule.

    `state`: rescheduled (`turn` is the new one), delivered, cancelled or unknown.
    """

    state: str
    turn: Turn | None = None


class Histogram(NamedTuple):
    """How many messages are pending between each edge and the next, and in all."""

    counts: Sequence[int]
    pending: int
