"""Errors that users of the Spark data source see.

The sentence of each error says in which partition it occurred, what is lost and what the user can do. With
`hide_traceback`, Spark shows users only this sentence.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """Return the error that users see for the `error` of a read of `log` at `offset` (None: `error` has the offset)."""
    if isinstance(error, OffsetOutOfRange):
        return out_of_range_error(log, error.details.get("offset", -1) if offset is None else offset, error)
    if isinstance(error, LogTruncated):
        return truncated_error(log, error.cut)
    if isinstance(error, Damaged):
        return damaged_error(log, error.first, error.next)
    if isinstance(error, NotARecord):
        named_offset = error.offset if offset is None else offset
        return NotARecord(f"{log.name}: no record starts at offset {named_offset}.", offset=named_offset)
    if isinstance(error, UnknownTopic) and not isinstance(error, UnknownPartition):
        return replaced_topic_error(log, deleted="incarnation" not in error.details)
    return error


def out_of_range_error(log: PartitionLog, offset: int, bounds: OffsetOutOfRange) -> OffsetOutOfRange:
    """Return the error for an `offset` that is not in the readable range, `bounds.first` to `bounds.end`."""
    first, end = bounds.first, bounds.end
    if offset < first:
        what = f"offsets {offset} to {first} were removed by retention, or truncated, before they were read"
    else:
        what = f"offset {offset} is after the durable end of the log"
    return OffsetOutOfRange(
        f"{log.name}: {what}; it holds {first} to {end}.", outcome=NOT_DONE, first=first, end=end, offset=offset
    )


def truncated_error(log: PartitionLog, cut: int) -> LogTruncated:
    """Return the error for `log` if a crash removed the records after offset `cut` while Spark read the log."""
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
    """Return the error for a topic that was deleted and created again; if `deleted`, for one that was only deleted."""
    if deleted:
        return UnknownTopic(f"The topic {log.topic} does not exist any more: it was deleted after this query began.")
    return UnknownTopic(
        f"The topic {log.topic} was deleted and created again after this query began: the old one's offsets are invalid"
        " in the new one. Start again with a new checkpoint."
    )


def unreachable_error(error: TfmqError, log: PartitionLog, offset: int, seconds: float) -> TfmqError:
    """Return the error for a read that failed with `error` at `offset`, after `seconds` of retries."""
    kind = TimedOut if isinstance(error, TimedOut) else ConnectionFailed
    return kind(
        f"{error.sentence} {log.name} was read up to offset {offset}; given up after {seconds:g} s.", outcome=NOT_DONE
    )


Method = TypeVar("Method", bound=Callable[..., Any])


def hide_traceback(method: Method) -> Method:
    """Wrap `method` so that Spark shows only the sentence of a TfmqError, without a traceback.

    When a Spark worker process ends with an exception, it sends the traceback to the driver, and the driver shows the
    traceback as the error's message. The worker omits the traceback if SPARK_HIDE_TRACEBACK is set in its environment,
    so the wrapper sets this variable when `method` raises a TfmqError. Other exceptions keep their traceback.
    """

    @functools.wraps(method)
    def rows(*arguments: Any, **named: Any) -> Iterator[Any]:
        with _without_traceback():
            yield from method(*arguments, **named)

    return cast(Method, rows if inspect.isgeneratorfunction(method) else _without_traceback()(method))


@contextmanager
def _without_traceback() -> Iterator[None]:
    try:
        yield
    except TfmqError as error:
        if os.environ.get("SPARK_PYTHON_RUNTIME") == "PYTHON_WORKER":
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise error from None
