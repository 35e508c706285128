"""Hooks that come with tfmq. What producers do with hooks is in tests/test_producer.py."""

import sys
import types
from collections.abc import Callable

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


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[dict[str, str]], None]], None]:
    """Puts a module in the place of opentelemetry.propagate, as the package has it."""

    def put(inject: Callable[[dict[str, str]], None]) -> None:
        module = types.ModuleType("opentelemetry.propagate")
        module.inject = inject  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "opentelemetry", types.ModuleType("opentelemetry"))
        monkeypatch.setitem(sys.modules, "opentelemetry.propagate", module)

    return put


def test_tracing_adds_the_active_span(install: Callable[[object], None]) -> None:
    install(lambda carrier: carrier.update(traceparent="00-abc"))  # type: ignore[attr-defined]
    sent = Tracing().before_send("orders", Message(b"x", properties={"n": "1"}))
    assert sent.properties == {"n": "1", "traceparent": "00-abc"}
    mine = Message(b"x", properties={"traceparent": "mine"})
    assert Tracing().before_send("orders", mine).properties == {"traceparent": "mine"}


def test_without_a_span_a_message_stays_as_it_is(install: Callable[[object], None]) -> None:
    install(lambda carrier: None)
    message = Message(b"x")
    assert Tracing().before_send("orders", message) is message
