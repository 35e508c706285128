"""Who handles what, and what happens around a call."""

from __future__ import annotations

import functools
import pickle
from datetime import timedelta
from typing import Any

import pytest

import tfmq
from tests.client.consumer.test_positions import batch_of_ledger
from tfmq.client.consumer.message import CURRENT_MESSAGE
from tfmq.client.worker.dead_letter_store import Failure
from tfmq.client.worker.listeners import (
    Listeners,
    Reject,
    RetryLater,
    check_listener,
    check_result,
    handler_context,
    is_coroutine_listener,
)
from tfmq.errors import BadRequest
from tfmq.hooks import Hook


async def coroutine(message: Any) -> None: ...


def everything(topic: str) -> bool:
    return True


class Called:
    async def __call__(self, message: Any) -> None: ...


def test_a_topic_has_one_listener_and_the_rest_have_the_default() -> None:
    listeners = Listeners()
    with pytest.raises(BadRequest, match="needs a listener"):
        listeners.check((), everything)
    assert listeners.on("orders")(print) is print
    assert listeners.find("orders") is print
    with pytest.raises(BadRequest, match="No listener for the topic bills"):
        listeners.check(["orders", "bills"], everything)
    listeners.default = repr
    listeners.check(["orders", "bills"], everything)
    assert listeners.find("bills") is repr
    with pytest.raises(BadRequest, match="a listener already"):
        listeners.on("orders")
    with pytest.raises(BadRequest, match="cannot be a topic"):
        listeners.on("no such name")
    with pytest.raises(BadRequest, match="cannot be called"):
        check_listener("handler")


def test_a_listener_for_a_topic_that_is_not_read_is_refused() -> None:
    listeners = Listeners()
    listeners.on("orders")(print)
    listeners.on("other")(print)
    with pytest.raises(BadRequest, match="for the topic other, which this consumer does not read"):
        listeners.check(["orders"], {"orders"}.__contains__)
    listeners.check([], everything)


def generator(message: Any) -> Any:
    yield message


async def async_generator(message: Any) -> Any:
    yield message


class Yielding:
    def __call__(self, message: Any) -> Any:
        yield message


@pytest.mark.parametrize(
    "listener", [generator, async_generator, functools.partial(generator), Yielding(), Yielding().__call__]
)
def test_a_generator_whose_body_no_call_would_run_is_refused(listener: Any) -> None:
    with pytest.raises(BadRequest, match=r"is a generator.*would not run its body"):
        Listeners().on("orders")(listener)
    with pytest.raises(BadRequest, match="is a generator"):
        check_listener(listener)


def nothing() -> None: ...


def two(message: Any, other: Any) -> None: ...


def named(*, message: Any) -> None: ...


@pytest.mark.parametrize("listener", [nothing, two, named, functools.partial(two, 1, 2), lambda a, b, c=1: None])
def test_what_cannot_be_called_with_a_message_alone_is_refused(listener: Any) -> None:
    with pytest.raises(BadRequest, match="cannot be called with one argument, the message"):
        Listeners().on("orders")(listener)


def wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def call(message: Any) -> Any:
        return function(message, 1)

    return call


@pytest.mark.parametrize(
    "listener",
    [functools.partial(two, 1), wrapped(two), print, [].append, lambda *a: None, lambda m, n=1, **k: None, Called()],
)
def test_what_can_be_called_with_a_message_is_taken(listener: Any) -> None:
    assert check_listener(listener) is listener


def test_what_was_returned_and_is_not_run_is_a_failure() -> None:
    for made in (generator(1), async_generator(1), coroutine(1)):
        with pytest.raises(BadRequest, match="whose body was not run"):
            check_result(made)
    for fine in (None, 0, [1], iter([1]), print):
        check_result(fine)


@pytest.mark.parametrize(
    ("listener", "expected"),
    [(print, False), (coroutine, True), (functools.partial(coroutine), True), (Called(), True), (lambda m: m, False)],
)
def test_it_is_known_what_belongs_into_an_event_loop(listener: Any, expected: bool) -> None:
    assert is_coroutine_listener(listener) is expected


class Told(Hook):
    def __init__(self, name: str, reported: list[Any]) -> None:
        self.name, self.reported = name, reported

    def before_handle(self, message: Any) -> None:
        self.reported.append(f"before {self.name}")

    def after_handle(self, message: Any, error: BaseException | None) -> None:
        self.reported.append(f"after {self.name} {error!r}")


def test_hooks_nest_and_the_message_in_work_is_known_meanwhile() -> None:
    reported: list[Any] = []
    (message,) = batch_of_ledger(1).messages
    with handler_context(message, [Told("a", reported), Told("b", reported)]):
        assert CURRENT_MESSAGE.get() is message
        reported.append("work")
    assert CURRENT_MESSAGE.get() is None
    assert reported == ["before a", "before b", "work", "after b None", "after a None"]


def test_only_hooks_that_began_are_called_at_the_end() -> None:
    reported: list[Any] = []
    (message,) = batch_of_ledger(1).messages

    class Bad(Hook):
        def before_handle(self, message: Any) -> None:
            raise ValueError("no")

    with (
        pytest.raises(ValueError, match="no"),
        handler_context(message, [Told("a", reported), Bad(), Told("b", reported)]),
    ):
        reported.append("work")
    assert reported == ["before a", "after a ValueError('no')"]


# What a handler may raise to say what becomes of its message.


def test_they_are_public_names() -> None:
    assert tfmq.Reject is Reject and tfmq.RetryLater is RetryLater
    assert str(Reject("no such customer")) == Reject("no such customer").reason == "no such customer"


def test_logs_and_dead_letters_show_the_names_that_people_write() -> None:
    for error in (Reject("no"), RetryLater(3600)):
        assert Failure.from_exception(error, 0).error.startswith(f"tfmq.{type(error).__name__}: ")
        assert type(pickle.loads(pickle.dumps(error))) is type(error)


def test_a_time_is_seconds_or_a_timedelta() -> None:
    assert RetryLater(0).seconds == 0.0
    assert RetryLater(1.5, "the bank is closed").reason == "the bank is closed"
    assert RetryLater(timedelta(minutes=2)).seconds == 120.0
    assert "120 s" in str(RetryLater(120))


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), True, "5", None, timedelta(seconds=-1)])
def test_anything_else_is_said_so(seconds: Any) -> None:
    with pytest.raises(BadRequest, match="RetryLater"):
        RetryLater(seconds)
