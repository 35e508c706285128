"""Users' callbacks: each once, errors logged, waiting refused."""

import pytest

from tfmq.client.drivers.callbacks import CallbackQueue, check_not_in_callback
from tfmq.errors import NotAllowed


def test_they_run_in_order_and_once() -> None:
    heard: list[int] = []
    callbacks = CallbackQueue()
    for number in range(3):
        callbacks.add(lambda number=number: heard.append(number))
    assert callbacks
    callbacks.run()
    callbacks.run()
    assert heard == [0, 1, 2] and not callbacks


def test_one_that_raises_is_logged_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[int] = []
    callbacks = CallbackQueue()
    callbacks.add(lambda: 1 // 0)
    callbacks.add(lambda: heard.append(1))
    callbacks.run()
    assert heard == [1] and "A callback raised" in caplog.text


def test_what_a_callback_adds_runs_behind_it() -> None:
    heard: list[str] = []
    callbacks = CallbackQueue()

    def first() -> None:
        callbacks.add(lambda: heard.append("second"))
        callbacks.run()
        heard.append("first")

    callbacks.add(first)
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
    callbacks.add(callback)
    callbacks.run()
    assert "must not wait" in raised[0]
    check_not_in_callback()


def test_what_is_cleared_never_runs() -> None:
    callbacks, ran = CallbackQueue(), list[str]()
    callbacks.add(lambda: ran.append("cleared"))
    callbacks.clear()
    callbacks.add(lambda: ran.append("kept"))
    callbacks.run()
    assert ran == ["kept"]
