"""What a user of Spark reads when something is wrong: one sentence, without the frames of this package.

A worker process of Spark that ends with an exception sends its traceback to the driver, which makes it the error's
message. The traceback is left out where the process has SPARK_HIDE_TRACEBACK, and it has that from the moment on in
which a sentence of ours ends it. Errors that nobody foresaw keep their traceback.
"""

import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from tfmq.errors import TfmqError

log = logging.getLogger("tfmq.spark")

SAID_MAX = 1000
"""Sentences that are known to have been said: a query that runs for a year meets more losses than these."""

Method = TypeVar("Method", bound=Callable[..., Any])


def told(method: Method) -> Method:
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
