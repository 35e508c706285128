"""A broker that goes away while handlers run: what is said, and how long the end of a run waits for it."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.handling_rig import Bench
from tfmq.client.worker.runner import (
    CONNECTIVITY_CHECK_SECONDS,
    DISCONNECTED_SECONDS_MAX,
    EXIT_CODE_BASE,
    DisconnectedTime,
    immediate_exit,
    signal_handlers,
)
from tfmq.errors import ConnectionFailed
from tfmq.testing.broker import SimulatedBroker

SOON = 2 * CONNECTIVITY_CHECK_SECONDS
SLACK_SECONDS = 2.0
"""Of the simulated clock, for looks and pauses."""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with SimulatedBroker() as broker:
        made = Bench(broker, tmp_path)
        made.send("a", "b")
        yield made


def test_a_broker_that_went_away_and_came_back_is_reported_once_each(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    def handler(message: Any) -> None:
        if message.text == "a":
            bench.broker.stop()
            bench.broker.clock.advance(SOON)
            assert [each.message.split(";")[0] for each in warnings()] == ["The broker is unreachable"]
            bench.broker.clock.advance(60)
            bench.broker.start()
            bench.broker.clock.advance(SOON)

    def warnings() -> list[logging.LogRecord]:
        return [each for each in caplog.records if each.message.startswith("The broker")]

    with caplog.at_level(logging.INFO, "tfmq.consumer"):
        bench.run(handler, until=2)
    assert [each.levelname for each in warnings()] == ["WARNING", "INFO"]
    assert warnings()[1].message == "The broker is reachable again."


def test_an_end_without_the_broker_waits_a_few_seconds_and_says_what_is_not_saved(bench: Bench) -> None:
    times: list[float] = []

    def handler(message: Any) -> None:
        bench.broker.stop()
        times.append(bench.broker.clock.monotonic())

    with pytest.raises(ConnectionFailed, match="the last offsets could not be saved"):
        bench.run(handler, until=1)
    took = bench.broker.clock.monotonic() - times[0]
    assert DISCONNECTED_SECONDS_MAX <= took <= DISCONNECTED_SECONDS_MAX + SLACK_SECONDS
    bench.broker.start()
    assert bench.saved() in (None, 0)


def test_an_end_without_the_broker_where_all_is_saved_is_a_good_one(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    times: list[float] = []

    def handler(message: Any) -> None:
        consumer: Any = bench.consumer
        consumer.commit()
        bench.broker.stop()
        times.append(bench.broker.clock.monotonic())

    bench.run(handler, until=1, commits="manual")
    took = bench.broker.clock.monotonic() - times[0]
    assert DISCONNECTED_SECONDS_MAX <= took <= DISCONNECTED_SECONDS_MAX + SLACK_SECONDS
    assert "so the group was not left; all offsets are saved" in caplog.text


def test_a_broker_that_comes_back_in_these_seconds_takes_it_all(bench: Bench) -> None:
    def handler(message: Any) -> None:
        broker = bench.broker
        broker.stop()
        later = broker.producer()  # what has timers of its own, in the simulated time
        later._driver.call_later(DISCONNECTED_SECONDS_MAX / 2, broker._server.start)

    bench.run(handler, until=1)
    assert (bench.saved() or 0) > bench.place("a")


def test_one_that_came_back_and_went_again_is_away_since_then_only(bench: Bench) -> None:
    broker = bench.broker
    consumer = bench.open()
    assert consumer.poll(timeout=SOON)
    link = consumer._core.link
    away = DisconnectedTime(link)
    broker.stop()
    assert not away.is_over_limit()
    broker.clock.advance(DISCONNECTED_SECONDS_MAX)
    assert away.is_over_limit()
    broker.start()
    broker.clock.advance(SOON)
    assert link.state == "ready" and not away.is_over_limit()
    broker.stop()
    assert not away.is_over_limit()
    broker.clock.advance(DISCONNECTED_SECONDS_MAX / 2)
    assert not away.is_over_limit()
    broker.clock.advance(DISCONNECTED_SECONDS_MAX / 2)
    assert away.is_over_limit()


# Signals while handlers run: one ends in order, two at once; afterwards all is as it was.


def test_the_first_one_stops_and_the_second_raises() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stopped = []
    with pytest.raises(SystemExit) as ended, signal_handlers(lambda: stopped.append(True)):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopped == [True]
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == EXIT_CODE_BASE + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert isinstance(immediate_exit(signal.SIGINT), KeyboardInterrupt)


def test_ctrl_c_is_no_keyboard_interrupt_the_first_time() -> None:
    before = signal.getsignal(signal.SIGINT)
    stopped = []
    with signal_handlers(lambda: stopped.append(True)):
        os.kill(os.getpid(), signal.SIGINT)
    assert stopped == [True]
    assert signal.getsignal(signal.SIGINT) is before, "whoever ran it has his signals back"


def test_unwanted_or_in_another_thread_it_does_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with signal_handlers(lambda: None, enabled=False):
        assert signal.getsignal(signal.SIGTERM) is before
    found = []

    def elsewhere() -> None:
        with signal_handlers(lambda: None):
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [before]
