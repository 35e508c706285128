"""Requests to the delay queue, their results, and what it needs from the broker."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from journal.log.log import Log
from journal.record.batch import Appended, Batch


class State(StrEnum):
    """State of a delayed message, or the outcome of a reschedule. The values are those of the protocol."""

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


class DelaySettings(NamedTuple):
    """Settings of the delay queue.

    `tick_ms`: interval at which due messages fire. `outcome_seconds`: how long after its due time the state of a
    message can be queried.
    """

    tick_ms: int = 10
    outcome_seconds: int = 86_400


class ArrivalLog(Protocol):
    """The arrival log as the broker provides it.

    Appends are deferred to the end of the broker's turn and to the end of running file work. Fsyncs are shared with
    other callers.
    """

    @property
    def log(self) -> Log: ...

    def append(
        self,
        batches: Sequence[Batch],
        done: Callable[[Sequence[Appended] | None, BaseException | None], None],
    ) -> None:
        """Append in one write, after all earlier appends.

        `done(results, None)` gets one result a batch. `done(None, error)`: an error of a send; nothing was written,
        unless the error's outcome is "unknown".
        """
        ...

    def when_forced(self, offset: int, waiter: Callable[[BaseException | None], None]) -> None:
        """Call `waiter(None)` once the log is durable up to `offset`.

        `waiter(error)` if it stops first.
        """
        ...

    def truncate_before(self, offset: int, done: Callable[[Any, BaseException | None], None]) -> None:
        """Delete what is before `offset`, in a worker, while no append is running."""
        ...


class PendingMessage(NamedTuple):
    """A pending message.

    `attribute`: of its record, as `tfmq.message` decodes it; None if it has none.
    """

    key: int
    due: int
    number: int
    size_bytes: int
    attribute: bytes | None


class ListQuery(NamedTuple):
    """Which pending messages to list.

    first_due <= due < end_due, after the turn `after`, at most `limit`.

    `keys`: predicate for log ids; None: all logs. `message_key`: only messages with this key; None: all.
    """

    first_due: int
    end_due: int
    after: Turn | None
    limit: int
    keys: Callable[[int], bool] | None = None
    message_key: bytes | None = None


class ListPage(NamedTuple):
    """`rows` in the order of their turns.

    `more`: there may be others after `after`, the last turn examined.
    """

    rows: Sequence[PendingMessage]
    more: bool
    after: Turn | None


class MessageState(NamedTuple):
    """`state`: pending, cancelled, delivered, rescheduled or unknown.

    `turn`: the latest turn of the message.
    """

    state: str
    turn: Turn
    pending: PendingMessage | None = None


class RescheduleResult(NamedTuple):
    """`state`: rescheduled (`turn` is the new one), delivered, cancelled or unknown."""

    state: str
    turn: Turn | None = None


class Histogram(NamedTuple):
    """How many messages are pending between each edge and the next, and in all."""

    counts: Sequence[int]
    pending: int
