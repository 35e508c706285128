"""Hooks: user code around every send and every handler call, for metrics or tracing.

    class Count(tfmq.Hook):
        def after_send(self, topic, message, result, error):
            counter.labels(topic).inc()

    tfmq.Producer(hooks=[Count()])

A hook must not wait for the broker. `before_send` and `before_handle` run in the caller's thread, and their errors are
raised to the caller. `after_send` runs in the thread that reads the connection, and its errors are logged.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from importlib import import_module
from typing import Any

from tfmq.errors import BadRequest, TfmqError
from tfmq.message import Message, SendResult

TRACE_PARENT = "traceparent"  # the property with a W3C trace context


class Hook:
    """A hook that does nothing. Override the methods that you need."""

    def before_send(self, topic: str, message: Message) -> Message:
        """Return the message to send: `message` itself, or a changed copy (`message._replace(...)`)."""
        return message

    def after_send(self, topic: str, message: Message, result: SendResult | None, error: TfmqError | None) -> None:
        """Called when the message was acknowledged (`result`) or has failed (`error`)."""

    def before_handle(self, message: Any) -> None:
        """Called before a received message is passed to its handler."""

    def after_handle(self, message: Any, error: BaseException | None) -> None:
        """Called after the handler returned, or raised `error`."""


def check_hooks(hooks: Any, *methods: str) -> tuple[Any, ...]:
    """Return `hooks` as a tuple if each hook has these methods. Raises BadRequest."""
    if not isinstance(hooks, Iterable):
        raise BadRequest(f"hooks={hooks!r}: it takes a list of them, as hooks=[MyHook()].")
    found = tuple(hooks)
    for each in found:
        if isinstance(each, type):
            raise BadRequest(f"hooks=: {each.__name__} is a class; write {each.__name__}().")
        if not all(callable(getattr(each, name, None)) for name in methods):
            raise BadRequest(f"hooks=: {each!r} is no hook; it takes objects of a class made from tfmq.Hook.")
    return found


class Tracing(Hook):
    """Propagates OpenTelemetry spans in the property `traceparent`. Needs the package opentelemetry-api.

    `before_send` stores the active span in the message. `before_handle` makes the sender's span the parent of the spans
    that the handler creates. The constructor raises `ImportError` without the package.
    """

    def __init__(self) -> None:
        propagate = import_module("opentelemetry.propagate")
        self._inject, self._extract = propagate.inject, propagate.extract
        self._context = import_module("opentelemetry.context")
        self._tokens: ContextVar[tuple[Any, ...]] = ContextVar("tfmq_trace_tokens", default=())

    def before_handle(self, message: Any) -> None:
        context = self._extract(message.properties)
        self._tokens.set((*self._tokens.get(), self._context.attach(context)))

    def after_handle(self, message: Any, error: BaseException | None) -> None:
        *rest, token = self._tokens.get()
        self._tokens.set(tuple(rest))
        self._context.detach(token)

    def before_send(self, topic: str, message: Message) -> Message:
        properties = dict(message.properties or {})
        if TRACE_PARENT not in properties:
            self._inject(properties)
        return message._replace(properties=properties) if properties else message
