"""What is told of a range that cannot be read: sentences that name the partition, what is lost, and what to do."""

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


def read_error(error: TfmqError, log: PartitionLog, offset: int | None = None) -> TfmqError:
    """`error`, met at `offset` of `log`, with a sentence for whoever runs the query."""
    if isinstance(error, OffsetOutOfRange):
        return out_of_range(log, error.details.get("offset", -1) if offset is None else offset, error)
    if isinstance(error, LogTruncated):
        return truncated(log, error.cut)
    if isinstance(error, Damaged):
        return damaged(log, error.first, error.next)
    if isinstance(error, NotARecord):
        place = error.offset if offset is None else offset
        return NotARecord(f"{log.name}: no record starts at offset {place}.", offset=place)
    if isinstance(error, UnknownTopic) and not isinstance(error, UnknownPartition):
        return renewed(log, gone="incarnation" not in error.details)
    return error


def out_of_range(log: PartitionLog, offset: int, bounds: OffsetOutOfRange) -> OffsetOutOfRange:
    """`offset` is not in the log any more, or not yet; `bounds` has what it holds."""
    first, end = bounds.first, bounds.end
    if offset < first:
        what = f"offsets {offset} to {first} were removed by retention, or truncated, before they were read"
    else:
        what = f"offset {offset} lies behind the end of what is on the disk for sure"
    return OffsetOutOfRange(
        f"{log.name}: {what}; it holds {first} to {end}.",
        outcome=NOT_DONE,
        first=first,
        end=end,
        offset=offset,
    )


def truncated(log: PartitionLog, cut: int) -> LogTruncated:
    """The log was cut while it was read."""
    return LogTruncated(
        f"{log.name}: its end was cut off at offset {cut} after a crash, below what was read of it: distrust what came"
        f" from behind {cut}, and go on from there.",
        cut=cut,
    )


def damaged(log: PartitionLog, first: int, next: int, reason: str = "") -> Damaged:
    """The bytes from `first` up to `next` are not what was written, or not there; `reason`: what is known of it."""
    known = f" ({reason})" if reason else ""
    return Damaged(
        f"{log.name}: offsets {first} to {next} are damaged on the disk{known}: mend them with tfmq log repair (with"
        " the broker stopped), or read up to there and go on behind.",
        first=first,
        next=next,
    )


def renewed(log: PartitionLog, gone: bool = False) -> UnknownTopic:
    """Another topic bears the name by now; `gone`: or none."""
    if gone:
        return UnknownTopic(
            f"The topic {log.topic} is not there any more: it was deleted after this query began."
        )
    return UnknownTopic(
        f"The topic {log.topic} was deleted and made anew after this query began: offsets of the old one mean nothing"
        " in the new one. Begin again, with a new checkpoint."
    )


def unreached(error: TfmqError, log: PartitionLog, offset: int, seconds: float) -> TfmqError:
    """`error`, a lost connection or an answer that did not come, after `seconds` of trying."""
    kind = TimedOut if isinstance(error, TimedOut) else ConnectionFailed
    return kind(
        f"{error.sentence} {log.name} was read up to offset {offset}; given up after {seconds:g} s.",
        outcome=NOT_DONE,
    )


# What a user of Spark reads when something is wrong: one sentence, without the frames of this package.
#
# A worker process of Spark that ends with an exception sends its traceback to the driver, which makes it the error's
# message. The traceback is left out where the process has SPARK_HIDE_TRACEBACK, and it has that from the moment on in
# which a sentence of ours ends it. Errors that nobody foresaw keep their traceback.

log = logging.getLogger("tfmq.spark")

SAID_MAX = 1000
"""Sentences that are known to have been said: a query that runs for a year meets more losses than these."""

Method = TypeVar("Method", bound=Callable[..., Any])


def shown_by_spark(method: Method) -> Method:
    """`method`, of which Spark shows the sentence where it raises a TfmqError."""

    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, **named)
        except TfmqError as error:
            raise _alone(error) from None

    @functools.wraps(method)
    def rows(*arguments: Any, **named: Any) -> Iterator[Any]:
        try:
            yield from method(*arguments, **named)
        except TfmqError as error:
            raise _alone(error) from None

    return cast(Method, rows if inspect.isgeneratorfunction(method) else call)


def _alone(error: TfmqError) -> TfmqError:
    if os.environ.get("SPARK_PYTHON_RUNTIME") == "PYTHON_WORKER":
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
    error.__cause__ = None
    return error


class Losses:
    """What becomes of a query that finds messages gone: it stops, or it goes on and says so in the log, once."""

    def __init__(self, fail: bool) -> None:
        self.fail = fail
        self._said: set[str] = set()

    def lost(self, error: TfmqError, on: str = "") -> None:
        """Raises `error` where the query is to stop; it says what is gone, without what to do. `on`: how it goes on."""
        if self.fail:
            error.sentence += (
                " The query stops, because failOnDataLoss is true; with false it goes on"
                f" {on or 'behind what is gone'}."
            )
            raise error
        if error.sentence not in self._said:
            if len(self._said) >= SAID_MAX:
                self._said.clear()
            self._said.add(error.sentence)
            log.warning(
                "%s The query goes on %s, because failOnDataLoss is false.", error.sentence, on or "behind it"
            )
