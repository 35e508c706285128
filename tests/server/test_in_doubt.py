"""Prepared transactions that nobody finishes are told in the log: once, again every hour, and when it is over."""

import logging
from typing import Any

import pytest

from tests.server.fakes import FakeReactor
from tfmq.server.server import InDoubtMonitor


class Watched:
    """A broker whose oldest prepared transaction is as old as the clock, from `since` on."""

    def __init__(self, alarm_seconds: float = 100.0) -> None:
        self.reactor = FakeReactor()
        self.since: float | None = None
        self.alarm_seconds = alarm_seconds
        self.looks = 0
        self.watch = InDoubtMonitor(self.reactor.callLater, self.status, alarm_seconds)

    def status(self) -> dict[str, Any]:
        self.looks += 1
        if self.since is None:
            return {"prepared": 0, "oldest_prepared_seconds": 0, "alarm": False}
        age = self.reactor.seconds() - self.since
        return {"prepared": 2, "oldest_prepared_seconds": age, "alarm": age > self.alarm_seconds}

    def start(self) -> None:
        self.watch.start()
        self.reactor.advance(0)

    def pass_seconds(self, seconds: int) -> None:
        self.reactor.pump([1.0] * seconds)


@pytest.fixture
def errors(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "tfmq.server")
    return caplog


def test_it_is_silent_as_long_as_nobody_waits_too_long(errors: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.start()
    watched.since = 10.0
    watched.pass_seconds(105)
    assert errors.messages == [] and watched.looks == 3, "at the start, and every 50 s"


def test_it_is_told_once_and_again_after_an_hour(errors: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.since = 0.0
    watched.start()
    watched.pass_seconds(200)
    (told,) = errors.records
    assert told.levelno == logging.ERROR
    assert (
        "prepared transactions that wait for their owners: 2," in told.message
        and "the oldest for 150 s" in told.message
    )
    assert "transaction.alarm_seconds = 100" in told.message and "tfmq tx list" in told.message
    watched.pass_seconds(3500)
    assert len(errors.records) == 1
    watched.pass_seconds(100)
    assert len(errors.records) == 2


def test_the_end_of_it_is_told_and_the_next_one_is_new(errors: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.since = 0.0
    watched.start()
    watched.pass_seconds(150)
    watched.since = None
    watched.pass_seconds(50)
    assert errors.messages[-1] == "no transaction is prepared for longer than 100 s any more"
    watched.since = 200.0
    watched.pass_seconds(151)
    assert [each.levelno for each in errors.records] == [logging.ERROR, logging.INFO, logging.ERROR]


def test_one_that_was_too_old_before_the_start_is_told_at_once(errors: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.since = -1e6
    watched.start()
    assert len(errors.records) == 1


def test_it_looks_soon_where_the_alarm_is_early_and_no_more_after_the_stop() -> None:
    watched = Watched(alarm_seconds=0.2)
    watched.start()
    watched.reactor.pump([0.1] * 10)
    assert watched.looks >= 9
    watched.watch.stop()
    looks = watched.looks
    watched.reactor.pump([1.0] * 200)
    assert watched.looks == looks
    Watched().watch.stop()


def test_a_look_that_fails_is_not_the_last(errors: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.watch = InDoubtMonitor(watched.reactor.callLater, lambda: 1 / 0, 100.0)  # type: ignore[arg-type,return-value]
    with pytest.raises(ZeroDivisionError):
        watched.start()
    assert len(watched.reactor.getDelayedCalls()) == 1
