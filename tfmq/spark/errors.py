"""Errors that users of the Spark data source see, and the handling of lost messages.

The sentence of each error names the partition, what is lost and what to do. `hide_traceback` shows users only this
sentence; `LossPolicy` decides whether a query stops at lost messages.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from tfmq.errors import (
    NOT_DONE,
    ConnectionFailed,
    Damaged,
    LogTruncated,
    NotARecord,
    OffsetOutOfRange,
    TfmqError,
    TimedOut,
    UnknownPartition,
    UnknownTopic,
)
from tfmq.spark.ranges import PartitionLog


def describe_read_error(error: TfmqError, log: PartitionLog, offset: int | None = None) -> TfmqError:
    """Return `error`, raised while reading `log` at `offset`, with a sentence for the user."""
    if isinstance(error, OffsetOutOfRange):
        return out_of_range_error(log, error.details.get("offset", -1) if offset is None else offset, error)
    if isinstance(error, LogTruncated):
        return truncated_error(log, error.cut)
    if isinstance(error, Damaged):
        return damaged_error(log, error.first, error.next)
    if isinstance(error, NotARecord):
        place = error.offset if offset is None else offset
        return NotARecord(f"{log.name}: no record starts at offset {place}.", offset=place)
    if isinstance(error, UnknownTopic) and not isinstance(error, UnknownPartition):
        return replaced_topic_error(log, deleted="incarnation" not in error.details)
    return error


def out_of_range_error(log: PartitionLog, offset: int, bounds: OffsetOutOfRange) -> OffsetOutOfRange:
    """Return the error for an `offset` outside of the readable range that `bounds` has."""
    first, end = bounds.first, bounds.end
    if offset < first:
        what = f"offsets {offset} to {first} were removed by retention, or truncated, before they were read"
    else:
        what = f"offset {offset} is after the durable end of the log"
    return OffsetOutOfRange(
        f"{log.name}: {what}; it holds {first} to {end}.", outcome=NOT_DONE, first=first, end=end, offset=offset
    )


def truncated_error(log: PartitionLog, cut: int) -> LogTruncated:
    """Return the error for a log that was truncated at offset `cut` while it was read."""
    return LogTruncated(
        f"{log.name}: its end was truncated to offset {cut} after a crash, below what was read: discard what was read"
        f" after {cut}, and continue from there.",
        cut=cut,
    )


def damaged_error(log: PartitionLog, first: int, next: int, reason: str = "") -> Damaged:
    """Return the error for the bytes from `first` up to `next`, which are corrupt or missing."""
    known = f" ({reason})" if reason else ""
    return Damaged(
        f"{log.name}: offsets {first} to {next} are damaged on the disk{known}: repair them with tfmq log repair (with"
        " the broker stopped), or read up to there and continue after them.",
        first=first,
        next=next,
    )


def replaced_topic_error(log: PartitionLog, deleted: bool = False) -> UnknownTopic:
    """Return the error for a topic that was created again, or with `deleted` only deleted."""
    if deleted:
        return UnknownTopic(f"The topic {log.topic} does not exist any more: it was deleted after this query began.")
    return UnknownTopic(
        f"The topic {log.topic} was deleted and created again after this query began: the old one's offsets are invalid"
        " in the new one. Start again with a new checkpoint."
    )


def unreachable_error(error: TfmqError, log: PartitionLog, offset: int, seconds: float) -> TfmqError:
    """Return `error`, a lost connection or a timeout, with the offset that was reached.

    `seconds`: how long the request was retried.
    """
    kind = TimedOut if isinstance(error, TimedOut) else ConnectionFailed
    return kind(
        f"{error.sentence} {log.name} was read up to offset {offset}; given up after {seconds:g} s.", outcome=NOT_DONE
    )


log = logging.getLogger("tfmq.spark")

LOGGED_LOSSES_MAX = 1000
"""Losses remembered as logged, so that the set stays bounded in a query that runs for a year."""

Method = TypeVar("Method", bound=Callable[..., Any])


def hide_traceback(method: Method) -> Method:
    """Wrap `method` so that Spark shows only the sentence of a TfmqError, without frames.

    A Spark worker process that ends with an exception sends its traceback to the driver, which makes it the error's
    message. The worker leaves the traceback out once SPARK_HIDE_TRACEBACK is set in its environment. Other
    exceptions keep their traceback.
    """

    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, **named)
        except TfmqError as error:
            raise _without_traceback(error) from None

    @functools.wraps(method)
    def rows(*arguments: Any, **named: Any) -> Iterator[Any]:
        try:
            yield from method(*arguments, **named)
        except TfmqError as error:
            raise _without_traceback(error) from None

    return cast(Method, rows if inspect.isgeneratorfunction(method) else call)


def _without_traceback(error: TfmqError) -> TfmqError:
    """Remove the traceback and the cause that Spark would show with `error`."""
    if os.environ.get("SPARK_PYTHON_RUNTIME") == "PYTHON_WORKER":
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
    error.__cause__ = None
    return error


class LossPolicy:
    """Policy for lost messages: the query stops, or continues and logs each loss once."""

    def __init__(self, stops_query: bool) -> None:
        self.stops_query = stops_query
        self._logged: set[str] = set()

    def handle_loss(self, error: TfmqError, continues: str = "") -> None:
        """Raise `error` if the query must stop at losses, else log it once.

        The sentence of `error` must say what is lost, not what to do. `continues` says how the query
        continues.
        """
        if self.stops_query:
            error.sentence += (
                " The query stops, because failOnDataLoss is true; with false it continues"
                f" {continues or 'after the lost messages'}."
            )
            raise error
        if error.sentence not in self._logged:
            if len(self._logged) >= LOGGED_LOSSES_MAX:
                self._logged.clear()
            self._logged.add(error.sentence)
            log.warning(
                "%s The query continues %s, because failOnDataLoss is false.", error.sentence, continues or "after them"
            )
