"""Hooks that come with tfmq. What producers do with hooks is in tests/test_producer.py."""

import sys
import types
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest

from tfmq.hooks import Hook, Tracing
from tfmq.message import Message


def test_a_hook_changes_nothing_by_itself() -> None:
    message = Message(b"x")
    hook = Hook()
    assert hook.before_send("orders", message) is message
    hook.after_send("orders", message, None, None)
    hook.before_handle(message)
    hook.after_handle(message, None)


ACTIVE: ContextVar[Any] = ContextVar("active", default=None)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[dict[str, str]], None]], None]:
    """Puts modules in the place of opentelemetry.propagate and .context, as the package has them."""

    def put(inject: Callable[[dict[str, str]], None]) -> None:
        propagate, context = (
            types.ModuleType("opentelemetry.propagate"),
            types.ModuleType("opentelemetry.context"),
        )
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
