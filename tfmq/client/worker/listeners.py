"""Listeners (the user's functions that handle messages): registration by topic, validation, hooks, and logging.

Also `Reject` and `RetryLater`, which a listener may raise to decide what happens to its message.
"""

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
from tfmq.client.consumer.message import CURRENT_MESSAGE, ReceivedMessage
from tfmq.client.worker.dead_letter_store import TRACEBACK_CHARACTERS, format_storable
from tfmq.errors import BadRequest, DecodeFailed

log = logging.getLogger("tfmq.consumer")

Listener = Callable[[ReceivedMessage[Any]], Any]
"""A user's function, called with a message. An awaitable result is awaited. Without an error the message is acked."""
Function = TypeVar("Function", bound=Listener)
ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]
_CLIENT_PACKAGE: Final = "tfmq.client."
"""A logged traceback begins after the calls in modules with this prefix: they only show how the listener is called."""


class Listeners:
    def __init__(self) -> None:
        self.default: Listener | None = None
        self._by_topic: dict[str, Listener] = {}

    def on(self, topic: str) -> Callable[[Function], Function]:
        """Return a decorator that registers a listener for `topic`.

        Raises BadRequest for an invalid topic name, and if the topic has a listener already.
        """
        if not limits.is_valid_name(topic):
            raise BadRequest(f"{topic!r} cannot be a topic: {limits.NAME_RULE}.")
        if topic in self._by_topic:
            raise BadRequest(f"The topic {topic} has a listener already; a topic has one.")

        def register(function: Function) -> Function:
            self._by_topic[topic] = check_listener(function)
            return function

        return register

    def find(self, topic: str) -> Listener:
        found = self._by_topic.get(topic, self.default)
        if found is None:
            raise BadRequest(
                f'No listener for the topic {topic}: register one with @consumer.on("{topic}"), or give run() one for'
                " all topics."
            )
        return found

    def check(self, topics: Sequence[str], reads: Callable[[str], bool]) -> None:
        """Raises BadRequest if one of `topics` has no listener, or if `reads` is false for the topic of a listener."""
        for topic in topics:
            self.find(topic)
        for topic in self._by_topic:
            if not reads(topic):
                raise BadRequest(
                    f"There is a listener for the topic {topic}, which this consumer does not read: name it in topics=,"
                    " or remove the listener."
                )
        if self.default is None and not self._by_topic:
            raise BadRequest('run() needs a listener: give it one, or register some with @consumer.on("orders").')


def check_listener(listener: Any) -> Listener:
    if not callable(listener):
        raise BadRequest(f"A listener is a function that takes a message; {listener!r} cannot be called.")
    name = getattr(listener, "__qualname__", None) or repr(listener)
    if _matches_any(listener, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
        raise BadRequest(
            f"The listener {name} is a generator (it contains a yield): calling it would not run its body. A"
            " listener is a plain function, or a coroutine function."
        )
    try:
        signature = inspect.signature(listener, follow_wrapped=False)
    except (TypeError, ValueError):  # inspect.signature() fails for some built-ins
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


def is_coroutine_listener(listener: Listener) -> bool:
    """Return whether `listener` is a coroutine function: calling it creates a coroutine, which needs an event loop."""
    return _matches_any(listener, inspect.iscoroutinefunction)


def _matches_any(listener: Any, *kinds: Callable[[Any], bool]) -> bool:
    """Return whether one of the predicates `kinds` is true for `listener` or for its `__call__`. If `listener` is a
    `functools.partial`, its function is examined instead."""
    while isinstance(listener, functools.partial):
        listener = listener.func
    called = getattr(listener, "__call__", None)  # noqa: B004 - the attribute is inspected, not called
    return any(kind(listener) or kind(called) for kind in kinds)


def check_result(found: object) -> None:
    """Raises BadRequest if a listener returned a coroutine or generator: its body did not run, so no ack may follow."""
    if inspect.iscoroutine(found) or inspect.isgenerator(found):
        found.close()  # Closed so that Python does not log a "never awaited" warning.
    elif not inspect.isasyncgen(found):
        return
    raise BadRequest(
        f"The listener returned {found!r}, whose body was not run. A listener must do its work"
        " before it returns; a coroutine function must await what it calls."
    )


@contextmanager
def handler_context(message: ReceivedMessage[Any], hooks: Sequence[Any]) -> Iterator[None]:
    """Return a context for a handler call, which runs the hooks and sets `CURRENT_MESSAGE` for `commit()`.

    Enter the context in the handler's thread or task. An exception of a hook's `before_handle` counts as a failure of
    the handler; an exception of `after_handle` is logged.
    """
    token = CURRENT_MESSAGE.set(message)
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
        CURRENT_MESSAGE.reset(token)


def log_failure(message: ReceivedMessage[Any], error: Exception, then: str = "", *, tracebacks: bool = True) -> None:
    """Log the failure of a handler call. `then`: what happens next, appended to the log text.

    With `tracebacks` the log record has the traceback, otherwise only the class of the error. The message is identified
    by its offset. Key and payload are not logged; nor is the text of a `DecodeFailed`, in which codecs quote payloads.
    `RetryLater` is not a failure and is logged at INFO. Of `RetryLater` and `Reject` only reason and cause are logged.
    """
    label = f"{message.topic}-{message.partition} at offset {message.offset}"
    if isinstance(error, Reject | RetryLater):
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        reason = f": {error.reason}" if tracebacks and error.reason and not _quotes_payload(error) else ""
        level, words = logging.WARNING, f"its handler rejected it{reason}."
        if isinstance(error, RetryLater):
            level, words = logging.INFO, f"its handler postponed it by {error.seconds:g} s{reason}."
    else:
        cause = error
        level, words = logging.WARNING, f"a call of its handler failed ({type(error).__name__}){then}."
    exc_info = _exc_info(cause) if tracebacks else None
    text = "" if exc_info is None else _shortened_traceback(exc_info)
    log.log(level, "%s: %s%s", label, words, text and f"\n{text}", exc_info=None if text else exc_info)


def _shortened_traceback(exc_info: ExcInfo) -> str:
    """If a traceback has more than TRACEBACK_CHARACTERS, or characters that cannot be encoded, return its end with
    these characters escaped. Otherwise return ""."""
    text = format_storable(lambda error: traceback.format_exception(type(error), error, exc_info[2]), exc_info[1])
    try:
        whole = "".join(traceback.format_exception(*exc_info)).encode()
    except Exception:  # The text has a lone surrogate, or the error cannot be formatted.
        whole = None
    return "" if whole is not None and len(text) <= TRACEBACK_CHARACTERS else text[-TRACEBACK_CHARACTERS:]


def _exc_info(error: BaseException | None) -> ExcInfo | None:
    """Return the `exc_info` to log, without the client's own calls at its start. Return None if there is no error, or
    if the log would show the text of a `DecodeFailed`, which may quote a payload."""
    if error is None or _quotes_payload(error):
        return None
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        if not trace.tb_frame.f_globals.get("__name__", "").startswith(_CLIENT_PACKAGE):
            break
        trace = trace.tb_next
    return type(error), error, trace


def _quotes_payload(error: BaseException) -> bool:
    """Return whether the printed traceback would include a DecodeFailed, whose text may quote a payload."""
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


class Reject(Exception):
    """Raised by a handler: the message becomes a dead letter at once, without a retry."""

    __module__ = "tfmq"  # the public name, for logs and dead letters

    def __init__(self, reason: str = "rejected") -> None:
        super().__init__(reason)
        self.reason = reason


class RetryLater(Exception):
    """Raised by a handler: store the message and handle it again after `seconds`.

    Meanwhile the following messages of the same ordered queue are handled. `seconds` is a number from 0 on, or a
    timedelta; any other value raises BadRequest. `reason` is stored.
    """

    is_failure = False
    """Read by `tfmq.hooks.Tracing`, which records other exceptions of a handler as errors."""

    __module__ = "tfmq"

    def __init__(self, seconds: float | timedelta, reason: str = "") -> None:
        found = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < float("inf"):
            raise BadRequest(f"RetryLater({seconds!r}): it takes a number of seconds from 0 on, or a timedelta.")
        super().__init__(reason or f"to be handled again after {found:g} s")
        self.seconds = float(found)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling: a handler may run its work in a process pool, where this exception is raised."""
        return type(self), (self.seconds, self.reason)
