"""Who handles what, and what happens around a call."""

import functools
from typing import Any

import pytest

from tests.client.test_ledger import batch
from tfmq.client.ledger import IN_WORK
from tfmq.client.listeners import Listeners, awaits, checked, in_work
from tfmq.errors import BadRequest
from tfmq.hooks import Hook


async def coroutine(message: Any) -> None: ...


class Called:
    async def __call__(self, message: Any) -> None: ...


def test_a_topic_has_one_listener_and_the_rest_have_the_default() -> None:
    listeners = Listeners()
    with pytest.raises(BadRequest, match="needs a listener"):
        listeners.check(())
    assert listeners.on("orders")(print) is print
    assert listeners.of("orders") is print
    with pytest.raises(BadRequest, match="Nobody handles the topic bills"):
        listeners.check(["orders", "bills"])
    listeners.default = repr
    listeners.check(["orders", "bills"])
    assert listeners.of("bills") is repr
    with pytest.raises(BadRequest, match="a listener already"):
        listeners.on("orders")
    with pytest.raises(BadRequest, match="not a topic's name"):
        listeners.on("no such name")
    with pytest.raises(BadRequest, match="cannot be called"):
        checked("handler")


@pytest.mark.parametrize(
    ("listener", "expected"),
    [
        (print, False),
        (coroutine, True),
        (functools.partial(coroutine), True),
        (Called(), True),
        (lambda m: m, False),
    ],
)
def test_it_is_known_what_belongs_into_an_event_loop(listener: Any, expected: bool) -> None:
    assert awaits(listener) is expected


class Told(Hook):
    def __init__(self, name: str, told: list[Any]) -> None:
        self.name, self.told = name, told

    def before_handle(self, message: Any) -> None:
        self.told.append(f"before {self.name}")

    def after_handle(self, message: Any, error: BaseException | None) -> None:
        self.told.append(f"after {self.name} {error!r}")


def test_hooks_nest_and_the_message_in_work_is_known_meanwhile() -> None:
    told: list[Any] = []
    (message,) = batch(1).messages
    with in_work(message, [Told("a", told), Told("b", told)]):
        assert IN_WORK.get() is message
        told.append("work")
    assert IN_WORK.get() is None
    assert told == ["before a", "before b", "work", "after b None", "after a None"]


def test_only_hooks_that_began_hear_of_the_end() -> None:
    told: list[Any] = []
    (message,) = batch(1).messages

    class Bad(Hook):
        def before_handle(self, message: Any) -> None:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"), in_work(message, [Told("a", told), Bad(), Told("b", told)]):
        told.append("work")
    assert told == ["before a", "after a ValueError('no')"]
