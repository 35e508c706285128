"""Requests to the delay queue, and their results. A `key` is always the log id of a message's partition."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, TypeAlias

from journal.log.log import Log
from journal.record.batch import Appended, Batch


class State(StrEnum):
    """State of a delayed message, or outcome of a reschedule. The protocol uses the same values."""

    PENDING = "pending"
    CANCELLED = "cancelled"
    DELIVERED = "delivered"
    RESCHEDULED = "rescheduled"
    UNKNOWN = "unknown"


PENDING, CANCELLED, DELIVERED, RESCHEDULED, UNKNOWN = State


class Turn(NamedTuple):
    """The key of a message in the order of delivery: due time (ms), and number (ordinal in the arrival log)."""

    due: int
    number: int


class ArrivalLog(Protocol):
    """The broker's arrival log. Appends are written at the end of a turn. One fsync serves all callers that wait."""

    @property
    def log(self) -> Log: ...

    def append(
        self, batches: Sequence[Batch], done: Callable[[Sequence[Appended] | None, BaseException | None], None]
    ) -> None:
        """Append the batches in one write, after all earlier appends.

        `done(results, None)` gets one result for each batch. After `done(None, error)` nothing was written, unless the
        error's outcome is "unknown".
        """
        ...

    def when_forced(self, offset: int, waiter: Callable[[BaseException | None], None]) -> None:
        """Call `waiter(None)` once the log is durable up to `offset`, or `waiter(error)` if its fsync fails."""
        ...

    def truncate_before(self, offset: int, done: Callable[[Any, BaseException | None], None]) -> None:
        """Delete the segments that end before `offset`, in a worker while no append is running; then call `done`."""
        ...


LogFilter: TypeAlias = Callable[[int], bool]
"""filter(log id): returns whether the messages for the partition with this log id are wanted."""


class PendingMessage(NamedTuple):
    """A pending message. `attribute`: the encoded attribute of its record; None if it has none or is unreadable."""

    key: int
    due: int
    number: int
    size_bytes: int
    attribute: bytes | None


class ListQuery(NamedTuple):
    """Which pending messages to list: at most `limit`, with first_due <= due < end_due.

    `after`: list only messages with higher turns than this; None: all. `keys`: selects partitions by log
    id; None: all. `message_key`: list only messages with this key in their attribute; None: all.
    """

    first_due: int
    end_due: int
    after: Turn | None
    limit: int
    keys: LogFilter | None = None
    message_key: bytes | None = None


class ListPage(NamedTuple):
    """One page of a list, in the order of turns. `after`: the last examined turn. `more`: whether more may follow."""

    rows: Sequence[PendingMessage]
    more: bool
    after: Turn | None


class MessageState(NamedTuple):
    """The state of a message and its latest turn. `pending`: its description if the message is pending, else None."""

    state: str
    turn: Turn
    pending: PendingMessage | None = None


class RescheduleResult(NamedTuple):
    """The outcome of a reschedule: RESCHEDULED with the new turn, or DELIVERED, CANCELLED or UNKNOWN without a turn."""

    state: str
    turn: Turn | None = None


class Histogram(NamedTuple):
    """Numbers of pending messages. `counts[n]`: those with edges[n] <= due < edges[n + 1]. `pending`: all."""

    counts: Sequence[int]
    pending: int
