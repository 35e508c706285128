"""Turns end after every poll that brought something, and hooks run in their order."""

import os
import time
from typing import Any

import pytest
from twisted.internet.task import Clock

from tfmq.busy_poll import BusyPoll
from tfmq.server.reactor import HOOK_ROUNDS_MAX, TURN_SECONDS, Turn, TurnReactor


@pytest.fixture
def reactor() -> Any:
    made = TurnReactor()
    yield made
    made._poller.close()


class Reader:
    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.read_end, self.write_end = os.pipe()
        self.reads = 0

    def fileno(self) -> int:
        return self.read_end

    def doRead(self) -> None:
        os.read(self.read_end, 100)
        self.reads += 1
        self.turn.request_end()

    def connectionLost(self, reason: Any) -> None: ...


def test_the_turn_ends_after_the_poll_that_brought_something(reactor: Any) -> None:
    turn = Turn(reactor)
    ends: list[int] = []
    readers = [Reader(turn), Reader(turn)]
    turn.at_end(lambda: ends.append(sum(reader.reads for reader in readers)))
    for reader in readers:
        reactor.addReader(reader)
        os.write(reader.write_end, b"x")
    reactor.doPoll(1)
    assert ends == [2], "once, for both"
    reactor.doPoll(0)
    assert ends == [2], "nobody wanted the second turn's end"


def test_the_limit_of_busy_polling_is_longer_at_the_beginning_of_an_fsync_only(
    reactor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, now = [], 1000.0

    def poll(self: BusyPoll, poll: Any, timeout: float, most: int, seconds: float) -> list[Any]:
        limits.append(round(seconds * 1e6))
        return []

    monkeypatch.setattr(BusyPoll, "poll", poll)
    monkeypatch.setattr(reactor, "seconds", lambda: now)
    fsyncs = reactor.fsyncs_in_progress = {}
    for now, count in ((0.0, 0), (0.0, 1), (0.0003, 1), (0.0004, 2), (0.0006, 1), (9.0, 1), (9.0, 0), (9.0, 1)):
        now += 1000.0
        fsyncs.clear()
        fsyncs.update(dict.fromkeys(range(count)))
        reactor.doPoll(1)
    assert limits == [100, 500, 200, 100, 100, 100, 100, 500]


def test_a_turn_that_was_too_short_ends_and_the_next_one_begins_with_the_least_served(reactor: Any) -> None:
    turn = Turn(reactor)
    order: list[float] = []

    class Expensive(Reader):
        served_until = 0.0

        def doRead(self) -> None:
            super().doRead()
            order.append(self.served_until)
            turn.handling_seconds += TURN_SECONDS * 0.6
            self.served_until += 100.0

    readers = [Expensive(turn) for _ in range(4)]
    for number, reader in enumerate(readers):
        reader.served_until = float(9 - number)
        reactor.addReader(reader)
        os.write(reader.write_end, b"x")
    for polls in range(1, 3):
        reactor.doPoll(1)
        assert len(order) == 2 * polls
    assert sorted(order[2:]) == order[2:] and sorted(order) == [6.0, 7.0, 8.0, 9.0]


def test_what_a_timer_wants_runs_before_the_poll_waits(reactor: Any) -> None:
    turn = Turn(reactor)
    ran: list[str] = []
    turn.at_end(lambda: ran.append("end"))
    turn.request_end()
    started = time.monotonic()
    reactor.callLater(0.0, ran.append, "call")
    reactor.doPoll(5)
    assert ran == ["end"]
    assert time.monotonic() - started < 4


def test_hooks_run_in_order_and_again_for_what_they_ask() -> None:
    clock = Clock()
    turn = Turn(clock)
    ran: list[str] = []
    turn.at_end(lambda: ran.append("first"))
    turn.at_end(lambda: (ran.append("second"), turn.request_end() if len(ran) < 4 else None))
    turn.request_end()
    turn.request_end()
    clock.advance(0)
    assert ran == ["first", "second"] * 2


def test_hooks_that_call_each_other_without_end_are_stopped() -> None:
    turn = Turn(Clock())
    ran: list[int] = []
    turn.at_end(lambda: (ran.append(1), turn.request_end()))
    turn.request_end()
    turn.run_hooks()
    assert len(ran) == HOOK_ROUNDS_MAX


def test_a_hook_knows_that_the_turn_is_ending() -> None:
    turn = Turn(Clock())
    seen: list[bool] = []
    turn.at_end(lambda: seen.append(turn.is_ending))
    turn.request_end()
    turn.run_hooks()
    assert (seen, turn.is_ending) == ([True], False)


def test_a_failing_hook_does_not_keep_the_others_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfmq.server.reactor.log.err", lambda *_: None)
    turn = Turn(Clock())
    ran: list[int] = []
    turn.at_end(lambda: 1 // 0)
    turn.at_end(lambda: ran.append(1))
    turn.request_end()
    turn.run_hooks()
    assert ran == [1]


def test_the_reactor_counts_on_a_clock_that_does_not_jump(reactor: Any) -> None:
    assert abs(reactor.seconds() - time.monotonic()) < 5
