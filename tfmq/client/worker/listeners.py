"""Who handles messages: functions by topic, and what happens around each call of one."""

from __future__ import annotations

import functools
import inspect
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, TypeVar

from tfmq import limits
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.consumer.positions import IN_WORK
from tfmq.client.worker.dead_letter_store import TRACEBACK_CHARACTERS, printed
from tfmq.errors import BadRequest, DecodeFailed

log = logging.getLogger("tfmq.consumer")

Listener = Callable[[ReceivedMessage[Any]], Any]
"""Called with a message; what it returns is awaited where that can be. Returning acknowledges."""
Function = TypeVar("Function", bound=Listener)
ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]
_OURS: Final = "tfmq.client."
"""Modules between a worker and the user's function; their frames are left out at the head of a traceback."""


class Listeners:
    """Those of one consumer."""

    def __init__(self) -> None:
        self.default: Listener | None = None
        self._by_topic: dict[str, Listener] = {}

    def on(self, topic: str) -> Callable[[Function], Function]:
        """A decorator: the function handles what comes from `topic`. Raises BadRequest for no topic's name, and where
        the topic has a listener already."""
        if not limits.valid_name(topic):
            raise BadRequest(f"{topic!r} is not a topic's name: 1 to 249 of A-Z a-z 0-9 . _ -")
        if topic in self._by_topic:
            raise BadRequest(f"The topic {topic} has a listener already; a topic has one.")

        def register(function: Function) -> Function:
            self._by_topic[topic] = checked(function)
            return function

        return register

    def of(self, topic: str) -> Listener:
        """Who handles messages of `topic`. Raises BadRequest where nobody does."""
        found = self._by_topic.get(topic, self.default)
        if found is None:
            raise BadRequest(
                f'Nobody handles the topic {topic}: register a listener with @consumer.on("{topic}"), or give run() one'
                " for all."
            )
        return found

    def check(self, topics: Sequence[str], reads: Callable[[str], bool]) -> None:
        """Raises BadRequest unless each of `topics` has a listener, there is any at all, and each has a topic that the
        consumer `reads`."""
        for topic in topics:
            self.of(topic)
        for topic in self._by_topic:
            if not reads(topic):
                raise BadRequest(
                    f"There is a listener for the topic {topic}, which this consumer does not read: name it in topics=,"
                    " or take the listener out."
                )
        if self.default is None and not self._by_topic:
            raise BadRequest(
                'run() needs a listener: give it one, or register some with @consumer.on("orders").'
            )


def checked(listener: Any) -> Listener:
    """`listener`, which can be called with a message and does its work then. Raises BadRequest."""
    if not callable(listener):
        raise BadRequest(f"A listener is a function that takes a message; {listener!r} cannot be called.")
    name = getattr(listener, "__qualname__", None) or repr(listener)
    if _any_of(listener, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
        raise BadRequest(
            f"The listener {name} is a generator, for the yield in it: calling it would run nothing of its body. A"
            " listener is a plain function, or a coroutine function."
        )
    try:
        signature = inspect.signature(listener, follow_wrapped=False)
    except (TypeError, ValueError):  # of some that are built in nothing is known
        signature = None
    if signature is not None:
        try:
            signature.bind(None)
        except TypeError as error:
            raise BadRequest(
                f"The listener {name}{signature} cannot be called with one argument, the message: {error}."
            ) from None
    found: Listener = listener
    return found


def awaits(listener: Listener) -> bool:
    """Whether calling it only makes a coroutine, so that it belongs into an event loop."""
    return _any_of(listener, inspect.iscoroutinefunction)


def _any_of(listener: Any, *kinds: Callable[[Any], bool]) -> bool:
    """Whether it, or what it calls, is of one of these kinds."""
    while isinstance(listener, functools.partial):
        listener = listener.func
    called = getattr(listener, "__call__", None)  # noqa: B004 - its code is looked at, it is not called
    return any(kind(listener) or kind(called) for kind in kinds)


def finished(found: object) -> None:
    """What a listener returned, and nobody awaits any more. Raises BadRequest where that shows that its work was not
    done: returning acknowledges."""
    if inspect.iscoroutine(found) or inspect.isgenerator(found):
        found.close()  # it never began
    elif not inspect.isasyncgen(found):
        return
    raise BadRequest(
        f"The listener returned {found!r}, which nobody runs: nothing of its body was done. A listener does its work"
        " before it returns; one that is awaited awaits what it calls."
    )


@contextmanager
def in_work(message: ReceivedMessage[Any], hooks: Sequence[Any]) -> Iterator[None]:
    """Around a call of a handler, in its thread, or in its task: hooks, and `commit()` knows which message is meant.

    What `before_handle` raises is the handler's failure; what `after_handle` raises is logged.
    """
    token = IN_WORK.set(message)
    entered: list[Any] = []
    failure: BaseException | None = None
    try:
        for hook in hooks:
            hook.before_handle(message)
            entered.append(hook)
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        for hook in reversed(entered):
            try:
                hook.after_handle(message, failure)
            except Exception:
                log.exception("after_handle of %s raised.", type(hook).__name__)
        IN_WORK.reset(token)


def log_failure(
    message: ReceivedMessage[Any], error: Exception, then: str = "", *, tracebacks: bool = True
) -> None:
    """Log that a call of a handler raised `error`, and what follows from that (`then`).

    With `tracebacks` the log record carries `exc_info`; without, only the class of the error. The message is named by
    its offset: key and payload are not logged, so no words of a `DecodeFailed` either, in which codecs quote payloads.
    `RetryLater` is no failure and logged at INFO; of it and of `Reject` only the reason and the cause are of interest.
    """
    place = f"{message.topic}-{message.partition} at offset {message.offset}"
    if isinstance(error, Reject | RetryLater):
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        reason = f": {error.reason}" if tracebacks and error.reason and not _quotes_payload(error) else ""
        level, words = logging.WARNING, f"its handler rejected it{reason}."
        if isinstance(error, RetryLater):
            level, words = logging.INFO, f"its handler put it off for {error.seconds:g} s{reason}."
    else:
        cause = error
        level, words = logging.WARNING, f"a call of its handler failed ({type(error).__name__}){then}."
    exc_info = _exc_info(cause) if tracebacks else None
    text = "" if exc_info is None else _bounded(exc_info)
    log.log(level, "%s: %s%s", place, words, text and f"\n{text}", exc_info=None if text else exc_info)


def _bounded(exc_info: ExcInfo) -> str:
    """The end of the traceback's text where all of it is too long for a log, or cannot be encoded; otherwise "" """
    text = printed(lambda error: traceback.format_exception(type(error), error, exc_info[2]), exc_info[1])
    try:
        whole = "".join(traceback.format_exception(*exc_info)).encode()
    except Exception:  # a lone surrogate, or an error that cannot be printed
        whole = None
    return "" if whole is not None and len(text) <= TRACEBACK_CHARACTERS else text[-TRACEBACK_CHARACTERS:]


def _exc_info(error: BaseException | None) -> ExcInfo | None:
    """What a log record carries of `error`; None where a codec's words would be in it."""
    if error is None or _quotes_payload(error):
        return None
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        if not trace.tb_frame.f_globals.get("__name__", "").startswith(_OURS):
            break
        trace = trace.tb_next
    return type(error), error, trace


def _quotes_payload(error: BaseException) -> bool:
    """Whether there is a DecodeFailed among all that Python would print of `error`."""
    seen: dict[int, BaseException] = {}
    left = [error]
    while left:
        each = left.pop()
        if isinstance(each, DecodeFailed):
            return True
        if id(each) not in seen:
            seen[id(each)] = each
            parts = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
            left += [part for part in (each.__cause__, each.__context__, *parts) if part is not None]
    return False


# How a handler says what is to become of its message: it returns, it raises anything, or it raises one of these.


class Reject(Exception):
    """Raised by a handler: this message will never be handled. It becomes a dead letter at once, without a retry."""

    __module__ = "tfmq"  # the name that people write is the one that logs and dead letters show

    def __init__(self, reason: str = "rejected") -> None:
        super().__init__(reason)
        self.reason = reason


class RetryLater(Exception):
    """Raised by a handler: not now. Those behind it go on; it is kept, and handled again after `seconds` (a number from
    0 on, or a timedelta). `reason` is kept with it. Raises `BadRequest` for other times.
    """

    __module__ = "tfmq"

    def __init__(self, seconds: float | timedelta, reason: str = "") -> None:
        found = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < float("inf"):
            raise BadRequest(
                f"RetryLater({seconds!r}): it takes a number of seconds from 0 on, or a timedelta."
            )
        super().__init__(reason or f"to be handled again after {found:g} s")
        self.seconds = float(found)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        """As another process gets it, such as one of a pool that a handler asks."""
        return type(self), (self.seconds, self.reason)
