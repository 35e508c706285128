"""OpenTelemetry spans of the broker, for requests that carry the trace context of a client's span.

Nothing is imported here: the package is used only if the process has it loaded when the server starts, as
`opentelemetry-instrument tfmq-server` does. A request without a trace context costs one comparison, and one with it one
span, whatever the number of its messages. Payloads, keys and the names of clients are not in spans.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

from tfmq.broker.reply import Body, Buffers, Reply, Session
from tfmq.errors import TfmqError
from tfmq.hooks import TRACE_PARENT, messaging_attributes
from tfmq.protocol import commands

Handle = Callable[[Any, Body, Reply, Session], None]

OPERATIONS: Final = {
    commands.Produce: "append",
    commands.Fetch: "fetch",
    commands.PrepareTransaction: "prepare",
    commands.CommitTransaction: "commit",
    commands.Transact: "transact",
}
"""The request -> the first word of its span's name."""


def with_spans(handle: Handle) -> Handle:
    """Return `handle`, or a function that also creates spans if OpenTelemetry is loaded in this process."""
    trace = sys.modules.get("opentelemetry.trace")
    return handle if trace is None else RequestTracer(trace, handle).handle


class RequestTracer:
    """Calls `handle` for each request, within a span if the request has a trace context."""

    def __init__(self, trace: Any, handle: Handle) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.trace = trace
        self.tracer = trace.get_tracer("tfmq.server")
        self._extract = TraceContextTextMapPropagator().extract
        self._handle = handle

    def handle(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        context = getattr(request, "trace", None)
        if context is not None:
            parent = self._extract({TRACE_PARENT: context})
            span = self.tracer.start_span(
                span_name(request),
                context=parent,
                kind=self.trace.SpanKind.SERVER,
                attributes=request_attributes(request, len(body)),
            )
            if span.is_recording():
                reply = TracedReply(reply, span, self, request)
        self._handle(request, body, reply, session)


class TracedReply:
    """Wrapper around a `Reply` that ends the span of the request when the reply is sent."""

    def __init__(self, reply: Reply, span: Any, tracer: RequestTracer, request: Any) -> None:
        self._reply, self._span, self._owner, self._request = reply, span, tracer, request
        self._fsync: Any = None

    @property
    def correlation(self) -> int:
        return self._reply.correlation

    def body_done(self) -> None:
        self._reply.body_done()

    def appended(self) -> None:
        """Begin the span of the fsync, which usually serves other requests too."""
        owner = self._owner
        parent = owner.trace.set_span_in_context(self._span)
        self._fsync = owner.tracer.start_span(f"fsync {self._request.topic}", context=parent)

    def ok(self, *fields: Any, body: Buffers = b"") -> None:
        if isinstance(self._request, commands.Produce):
            reply = commands.ProduceReply(*fields)
            self._span.set_attribute("tfmq.durability", commands.DURABILITY[reply.durability])
            self._span.set_attribute("tfmq.repeated", reply.repeated)
        self._end(None)
        self._reply.ok(*fields, body=body)

    def error(self, error: BaseException) -> None:
        self._end(error)
        self._reply.error(error)

    def _end(self, error: BaseException | None) -> None:
        for span in (self._fsync, self._span):
            if span is not None:
                if error is not None:
                    kind = error.code if isinstance(error, TfmqError) else type(error).__qualname__
                    span.set_attribute("error.type", kind)
                    span.set_status(self._owner.trace.Status(self._owner.trace.StatusCode.ERROR, kind))
                span.end()


def span_name(request: Any) -> str:
    topic = getattr(request, "topic", "")
    operation = OPERATIONS[type(request)]
    return f"{operation} {topic}" if topic else f"{operation} transaction"


def request_attributes(request: Any, size: int) -> dict[str, Any]:
    """Return the attributes of a request's span. `size`: bytes of its body."""
    operation = OPERATIONS[type(request)]
    match request:
        case commands.Produce() | commands.Fetch():
            found = messaging_attributes(operation, request.topic)
            del found["messaging.operation.type"]  # that is the client's; the convention has no type for a broker
            found["messaging.destination.partition.id"] = str(request.partition)
            if isinstance(request, commands.Produce):
                found |= {"messaging.batch.message_count": request.count, "tfmq.body.size": size}
        case commands.Transact():
            found = {"messaging.system": "tfmq", "messaging.operation.name": operation, "tfmq.body.size": size}
            found["messaging.batch.message_count"] = sum(batch.count for batch in request.batches)
        case _:
            found = {"messaging.system": "tfmq", "messaging.operation.name": operation}
            found |= {"tfmq.transaction.xid": request.xid, "tfmq.transaction.epoch": request.epoch}
    return found
