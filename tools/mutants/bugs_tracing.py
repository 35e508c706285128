"""Planted bugs: what is in OpenTelemetry spans, and when they are created."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

TRACING_TESTS: Final = "tests/test_tracing.py"
HOOKS: Final = "tfmq/hooks.py"
SERVER: Final = "tfmq/server/tracing.py"

TRACING: Final = (
    Mutant(
        "texts-of-errors-in-spans",
        "spans have no text of an exception, which may quote a payload",
        HOOKS,
        'span.add_event("exception", {"exception.type": type(error).__qualname__})',
        "span.record_exception(error)",
        [TRACING_TESTS],
    ),
    Mutant(
        "keys-in-spans",
        "spans have no keys",
        HOOKS,
        'attributes = messaging_attributes("process", message.topic) | {',
        'attributes = messaging_attributes("process", message.topic) | {\n        "key": str(message.key),',
        [TRACING_TESTS],
    ),
    Mutant(
        "an-unsampled-context-is-sent",
        "a context is sent to the broker only from a sampled span",
        HOOKS,
        "if found is not None and int(found[1], 16) & 1 else None",
        "if found is not None else None",
        [TRACING_TESTS],
    ),
    Mutant(
        "a-client-without-the-hook-sends-contexts",
        "a context is sent to the broker only by a client that traces",
        "tfmq/client/send/accumulator.py",
        "if self.link.trace_context is not None and message.properties and batch.trace is None:",
        "if message.properties and batch.trace is None:",
        [TRACING_TESTS],
    ),
    Mutant(
        "the-server-imports-opentelemetry",
        "nothing of OpenTelemetry is imported without the hook, and by no server that was started without it",
        SERVER,
        'trace = sys.modules.get("opentelemetry.trace")',
        'trace = __import__("importlib").import_module("opentelemetry.trace")',
        [TRACING_TESTS],
    ),
    Mutant(
        "an-fsync-without-its-request",
        "the span of an fsync is a child of the span of its request",
        SERVER,
        'self._fsync = owner.tracer.start_span(f"fsync {self._request.topic}", context=parent)',
        'self._fsync = owner.tracer.start_span(f"fsync {self._request.topic}")',
        [TRACING_TESTS],
    ),
    Mutant(
        "a-failed-request-looks-done",
        "an error reply of the broker is recorded in the span of the request",
        SERVER,
        "        self._end(error)\n",
        "        self._end(None)\n",
        [TRACING_TESTS],
    ),
    Mutant(
        "a-span-for-each-message-of-send-many",
        "a send_many is one span, whose context all its messages carry",
        "tfmq/client/producer/core.py",
        "                if properties:\n                    messages =",
        "                if not properties:\n                    messages =",
        [TRACING_TESTS],
    ),
    Mutant(
        "retries-are-not-recorded",
        "a repeated send has an event with the number of its attempts",
        "tfmq/client/send/partition_sender.py",
        "        batch.send_count += 1\n",
        "        batch.send_count = 1\n",
        [TRACING_TESTS],
    ),
    Mutant(
        "a-retry-later-is-an-error",
        "a handler that wants the message later has not failed",
        "tfmq/client/worker/listeners.py",
        "    is_failure = False\n",
        "    is_failure = True\n",
        [TRACING_TESTS],
    ),
)
