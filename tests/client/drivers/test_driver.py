"""Users' callbacks: each once, errors logged, waiting refused."""

from __future__ import annotations

import pytest

from tfmq.client.drivers.driver import CallbackQueue, Timers, check_not_in_callback
from tfmq.errors import NotAllowed


def test_they_run_in_order_and_once() -> None:
    heard: list[int] = []
    callbacks = CallbackQueue()
    for number in range(3):
        callbacks.append(lambda number=number: heard.append(number))
    assert callbacks
    callbacks.run()
    callbacks.run()
    assert heard == [0, 1, 2] and not callbacks


def test_one_that_raises_is_logged_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[int] = []
    callbacks = CallbackQueue()
    callbacks.append(lambda: 1 // 0)
    callbacks.append(lambda: heard.append(1))
    callbacks.run()
    assert heard == [1] and "A callback raised" in caplog.text


def test_what_a_callback_adds_runs_after_it() -> None:
    heard: list[str] = []
    callbacks = CallbackQueue()

    def first() -> None:
        callbacks.append(lambda: heard.append("second"))
        callbacks.run()
        heard.append("first")

    callbacks.append(first)
    callbacks.run()
    assert heard == ["first", "second"]


def test_waiting_inside_one_is_refused() -> None:
    raised: list[str] = []

    def callback() -> None:
        try:
            check_not_in_callback()
        except NotAllowed as error:
            raised.append(error.sentence)

    callbacks = CallbackQueue()
    callbacks.append(callback)
    callbacks.run()
    assert "must not wait" in raised[0]
    check_not_in_callback()


def test_what_is_cleared_never_runs() -> None:
    callbacks, ran = CallbackQueue(), list[str]()
    callbacks.append(lambda: ran.append("cleared"))
    callbacks.clear()
    callbacks.append(lambda: ran.append("kept"))
    callbacks.run()
    assert ran == ["kept"]


class Watch:
    """Timers: when they are due, in order, once, or not at all."""

    def __init__(self) -> None:
        self.time = 0.0
        self.rung: list[str] = []
        self.timers = Timers(lambda: self.time)

    def set(self, seconds: float, name: str):  # type: ignore[no-untyped-def]
        return self.timers.add(seconds, lambda: self.rung.append(name))

    def at(self, time: float) -> list[str]:
        self.time = time
        self.timers.tick()
        return self.rung


def test_each_rings_once_at_its_time() -> None:
    watch = Watch()
    watch.set(2, "b")
    watch.set(1, "a")
    assert watch.timers.next_time() == 1
    assert watch.at(0.9) == []
    assert watch.at(1) == ["a"]
    assert watch.at(5) == ["a", "b"]
    assert watch.timers.next_time() == float("inf")


def test_a_cancelled_one_does_not() -> None:
    watch = Watch()
    watch.set(1, "a").cancel()
    assert watch.timers.next_time() == float("inf")
    assert watch.at(2) == []


def test_one_may_set_another() -> None:
    watch = Watch()
    watch.timers.add(1, lambda: watch.set(1, "later"))
    assert watch.at(1) == []
    assert watch.at(2) == ["later"]


def test_clear_forgets_all() -> None:
    watch = Watch()
    watch.set(1, "a")
    watch.timers.clear()
    assert watch.at(2) == []
