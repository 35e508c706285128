"""Hooks that come with tfmq. What producers do with hooks is in tests/test_producer.py."""

import asyncio
import sys
import threading
import types
from collections.abc import Callable
from contextvars import ContextVar
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import tfmq.aio
from tests.client.handling_rig import GROUP, TOPIC, Bench
from tfmq.hooks import Hook, Tracing
from tfmq.message import Message
from tfmq.testing.broker import SimulatedBroker


def test_a_hook_changes_nothing_by_itself() -> None:
    message = Message(b"x")
    hook = Hook()
    assert hook.before_send("orders", message) is message
    hook.after_send("orders", message, None, None)
    hook.before_handle(message)
    hook.after_handle(message, None)


@pytest.mark.parametrize("hooks", [5, [5], [Hook], Hook, "ab", [None]])
@pytest.mark.parametrize("face", [tfmq.Consumer, tfmq.Producer, tfmq.aio.Consumer, tfmq.aio.Producer])
def test_what_is_no_hook_is_refused_when_it_is_given(face: Any, hooks: Any) -> None:
    topics = {} if face in (tfmq.Producer, tfmq.aio.Producer) else {"topics": TOPIC}
    with pytest.raises(tfmq.BadRequest, match="hooks="):
        face("127.0.0.1:1", hooks=hooks, **topics)
    face("127.0.0.1:1", hooks=(Hook(),), **topics)


ACTIVE: ContextVar[Any] = ContextVar("active", default=None)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[dict[str, str]], None]], None]:
    """Puts modules in the place of opentelemetry.propagate and .context, as the package has them."""

    def put(inject: Callable[[dict[str, str]], None]) -> None:
        propagate, context = (types.ModuleType("opentelemetry.propagate"), types.ModuleType("opentelemetry.context"))
        vars(propagate).update(inject=inject, extract=lambda carrier: carrier.get("traceparent"))
        vars(context).update(attach=ACTIVE.set, detach=ACTIVE.reset)
        monkeypatch.setitem(sys.modules, "opentelemetry", types.ModuleType("opentelemetry"))
        monkeypatch.setitem(sys.modules, "opentelemetry.propagate", propagate)
        monkeypatch.setitem(sys.modules, "opentelemetry.context", context)

    return put


def test_a_handler_stands_under_the_span_that_sent_its_message(install: Callable[[object], None]) -> None:
    install(lambda carrier: None)
    hook = Tracing()
    outer, inner = (Message(b"x", properties={"traceparent": name}) for name in ("00-outer", "00-inner"))
    hook.before_handle(outer)
    hook.before_handle(inner)
    assert ACTIVE.get() == "00-inner"
    hook.after_handle(inner, None)
    assert ACTIVE.get() == "00-outer"
    hook.after_handle(outer, ValueError())
    assert ACTIVE.get() is None


def test_tracing_adds_the_active_span(install: Callable[[object], None]) -> None:
    install(lambda carrier: carrier.update(traceparent="00-abc"))
    sent = Tracing().before_send("orders", Message(b"x", properties={"n": "1"}))
    assert sent.properties == {"n": "1", "traceparent": "00-abc"}
    mine = Message(b"x", properties={"traceparent": "mine"})
    assert Tracing().before_send("orders", mine).properties == {"traceparent": "mine"}


def test_without_a_span_a_message_stays_as_it_is(install: Callable[[object], None]) -> None:
    install(lambda carrier: None)
    message = Message(b"x")
    assert Tracing().before_send("orders", message) is message


def test_with_the_real_package_a_handler_stands_under_the_sender_and_without_it_the_error_says_so() -> None:
    if find_spec("opentelemetry") is None:
        with pytest.raises(ImportError, match="opentelemetry"):
            Tracing()
        return
    trace: Any = import_module("opentelemetry.trace")
    sender = trace.SpanContext(trace_id=0xABC, span_id=0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1))
    hook = Tracing()
    with trace.use_span(trace.NonRecordingSpan(sender)):
        sent = hook.before_send("orders", Message(b"x"))
    assert sent.properties == {"traceparent": f"00-{0xABC:032x}-{0xDEF:016x}-01"}
    hook.before_handle(sent)
    parent = trace.get_current_span().get_span_context()
    hook.after_handle(sent, None)
    assert (parent.trace_id, parent.span_id, parent.is_remote) == (0xABC, 0xDEF, True)
    assert not trace.get_current_span().get_span_context().is_valid


@pytest.mark.parametrize("kind", ["function", "coroutine function"])
def test_what_a_listener_does_stands_under_the_sender_in_its_thread_and_its_task(
    install: Callable[[object], None], kind: str, tmp_path: Path
) -> None:
    """Two at work at the same time do not take each other's span."""
    install(lambda carrier: None)
    seen: dict[str, Any] = {}

    async def scenario(bench: Bench) -> None:
        consumer: tfmq.aio.Consumer[Any] = tfmq.aio.Consumer(
            bench.broker.servers, topics=TOPIC, group=GROUP, dead_letters=None, hooks=[Tracing()]
        )
        both = asyncio.Event()
        together = threading.Barrier(2, timeout=60)

        def reported(message: Any) -> None:
            seen[message.text] = ACTIVE.get()
            if len(seen) == 2:
                both.set()
                consumer.stop()

        async def awaited(message: Any) -> None:
            reported(message)
            await both.wait()
            assert ACTIVE.get() == message.properties["traceparent"]

        def plain(message: Any) -> None:
            together.wait()
            seen[message.text] = ACTIVE.get()
            together.wait()
            consumer.stop()
            assert ACTIVE.get() == message.properties["traceparent"]

        listener = plain if kind == "function" else awaited
        await consumer.run(listener, workers=2, order="none", signals=False)

    with SimulatedBroker() as broker:
        bench = Bench(broker, tmp_path)
        for text in ("a", "b"):
            bench.send(text, properties={"traceparent": f"00-{text}"})
        asyncio.run(scenario(bench))
    assert seen == {"a": "00-a", "b": "00-b"}
