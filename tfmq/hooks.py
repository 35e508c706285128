"""Hooks: user code around every send and every handler call, for metrics or tracing.

    class Count(tfmq.Hook):
        def after_send(self, topic, message, result, error):
            counter.labels(topic).inc()

    tfmq.Producer(hooks=[Count()])

A hook must not wait for the broker. `before_send` and `before_handle` run in the caller's thread, and their errors are
raised to the caller. `after_send` runs in the thread that reads the connection, and its errors are logged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from importlib import import_module
from typing import Any, Final

from tfmq.errors import BadRequest, DecodeFailed, TfmqError
from tfmq.ids import format_id
from tfmq.message import Message, SendResult

TRACE_PARENT = "traceparent"  # the property with a W3C trace context
TRACE_CONTEXT: Final = re.compile("00-[0-9a-f]{32}-[0-9a-f]{16}-([0-9a-f]{2})")
SPANS_MAX: Final = 100_000
"""Maximum number of spans of messages in transit; a producer's buffer usually has fewer messages."""


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


def trace_context_source(hooks: Iterable[Any]) -> Callable[[], str | None] | None:
    """Return the function of the first hook that returns the trace context of the active span; None without one."""
    return next((each.active_context for each in hooks if isinstance(each, Tracing)), None)


def sampled_context(properties: Mapping[str, str]) -> str | None:
    """Return the trace context in a message's properties if it is a sampled one of version 00; else None."""
    found = TRACE_CONTEXT.fullmatch(properties.get(TRACE_PARENT, ""))
    return found[0] if found is not None and int(found[1], 16) & 1 else None


class Tracing(Hook):
    """Creates OpenTelemetry spans, and propagates them in the property `traceparent`.

    Needs the package opentelemetry-api; the constructor raises `ImportError` without it. `tracer_provider`: the
    provider of the spans; None: the global one. Without a provider no spans are created, and the active span of the
    program is propagated.

    A send is a span `send TOPIC`, from the call to the acknowledgement; a `send_many` is one for all its messages. A
    call of a handler is a span `process TOPIC`, a child of the span that sent the message. While a span is active, the
    client sends its context with requests that append, read and commit, so that the spans of a broker with tracing are
    its children. Keys, properties and payloads are not in spans. docs/tracing.md describes the attributes.
    """

    def __init__(self, tracer_provider: Any = None) -> None:
        propagate = import_module("opentelemetry.propagate")
        self._inject, self._extract = propagate.inject, propagate.extract
        self._context = import_module("opentelemetry.context")
        self._trace = import_module("opentelemetry.trace")
        self._tracer = self._trace.get_tracer("tfmq", tracer_provider=tracer_provider)
        self._entered: ContextVar[tuple[tuple[Any, Any], ...]] = ContextVar("tfmq_trace_tokens", default=())
        self._sending: dict[str, Any] = {}
        """The spans of messages that are not acknowledged yet, by the trace context that the message has."""
        self._sending_many: dict[str, Any] = {}
        """The spans of calls of `send_many` whose messages are not all acknowledged yet, likewise."""

    # Sending

    def before_send(self, topic: str, message: Message) -> Message:
        properties = dict(message.properties or {})
        if TRACE_PARENT in properties:
            return message
        span = self._start_send(topic, properties)
        if span.is_recording():
            if (size := payload_size(message.payload)) is not None:
                span.set_attribute("messaging.message.body.size", size)
            self._keep(self._sending, properties.get(TRACE_PARENT), span)
        return message._replace(properties=properties) if properties else message

    def after_send(self, topic: str, message: Message, result: SendResult | None, error: TfmqError | None) -> None:
        span = self._sending.pop((message.properties or {}).get(TRACE_PARENT, ""), None)
        if span is None:
            return
        if result is not None:
            span.set_attribute("messaging.message.id", format_id(result.message_id))
            span.set_attribute("messaging.destination.partition.id", str(result.partition))
            span.set_attribute("tfmq.durability", result.durability)
            if result.offset is not None:
                span.set_attribute("tfmq.message.offset", result.offset)
        if error is not None:
            self._record_error(span, error)
        span.end()

    def after_attempts(self, message: Message, attempts: int) -> None:
        """Record how often the batch of `message` was sent, if more than once. Called before `after_send`."""
        span = self._sending.get((message.properties or {}).get(TRACE_PARENT, ""))
        if span is not None and attempts > 1:
            span.add_event("retry", {"tfmq.send.attempts": attempts})

    def before_send_many(self, topic: str) -> dict[str, str]:
        """Start the span of a `send_many`. Return the properties that each of its messages gets."""
        properties: dict[str, str] = {}
        span = self._start_send(topic, properties)
        if span.is_recording():
            self._keep(self._sending_many, properties.get(TRACE_PARENT), span)
        return properties

    def after_send_many(self, properties: Mapping[str, str], count: int, error: BaseException | None) -> None:
        """End the span of `before_send_many`, which returned `properties`. `count`: the number of its messages."""
        span = self._sending_many.pop(properties.get(TRACE_PARENT, ""), None)
        if span is None:
            return
        span.set_attribute("messaging.batch.message_count", count)
        if error is not None:
            self._record_error(span, error)
        span.end()

    def _start_send(self, topic: str, properties: dict[str, str]) -> Any:
        attributes = messaging_attributes("send", topic)
        span = self._tracer.start_span(f"send {topic}", kind=self._trace.SpanKind.PRODUCER, attributes=attributes)
        self._inject(properties, self._trace.set_span_in_context(span))
        return span

    @staticmethod
    def _keep(spans: dict[str, Any], trace_context: str | None, span: Any) -> None:
        if trace_context is None:  # the program's propagator uses another property, so the end is not found
            span.end()
            return
        if len(spans) >= SPANS_MAX:  # a send that raised before it was queued has no end
            with suppress(KeyError, StopIteration, RuntimeError):
                spans.pop(next(iter(spans))).end()
        spans[trace_context] = span

    # Handling

    def before_handle(self, message: Any) -> None:
        try:
            properties = message.properties
        except DecodeFailed:  # the handler is called, and gets this error where it reads the properties
            properties = {}
        sender = self._extract(properties)
        active = self._trace.get_current_span().get_span_context()
        links = [self._trace.Link(active)] if active.is_valid else []
        span = self._tracer.start_span(
            f"process {message.topic}",
            context=sender,
            kind=self._trace.SpanKind.CONSUMER,
            attributes=received_attributes(message),
            links=links,
        )
        context = self._trace.set_span_in_context(span, sender) if span.is_recording() else sender
        self._entered.set((*self._entered.get(), (self._context.attach(context), span)))

    def after_handle(self, message: Any, error: BaseException | None) -> None:
        *rest, (token, span) = self._entered.get()
        self._entered.set(tuple(rest))
        self._context.detach(token)
        if error is not None and not getattr(error, "is_failure", True):
            span.add_event("retry later")
        elif error is not None:
            self._record_error(span, error)
        span.end()

    # Requests

    def active_context(self) -> str | None:
        """Return the trace context of the active span, for a request to the broker; None without a sampled span."""
        context = self._trace.get_current_span().get_span_context()
        if not (context.is_valid and context.trace_flags.sampled):
            return None
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def _record_error(self, span: Any, error: BaseException) -> None:
        # Not `record_exception`: its traceback and the texts of some errors quote keys and payloads.
        kind = error.code if isinstance(error, TfmqError) else type(error).__qualname__
        span.set_attribute("error.type", kind)
        span.add_event("exception", {"exception.type": type(error).__qualname__})
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, kind))


def messaging_attributes(operation: str, topic: str) -> dict[str, Any]:
    """Return the attributes that all spans about messages of a topic have, by OpenTelemetry's conventions."""
    return {
        "messaging.system": "tfmq",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": topic,
    }


def received_attributes(message: Any) -> dict[str, Any]:
    attributes = messaging_attributes("process", message.topic) | {
        "messaging.destination.partition.id": str(message.partition),
        "messaging.message.id": format_id(message.id),
        "tfmq.message.offset": message.offset,
    }
    if message.payload is not None:
        attributes["messaging.message.body.size"] = len(message.payload)
    return attributes


def payload_size(payload: Any) -> int | None:
    """Return the size of a payload in bytes; None for a tombstone, and for a value that a codec has yet to encode."""
    if isinstance(payload, str):
        return len(payload.encode(errors="replace"))
    return len(payload) if isinstance(payload, bytes | bytearray) else None
