"""The loop that handles waiting messages again: its calls, its reports to the store, its end. No broker here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dead_letters.helpers import NOW, Time, failure, finished, group_of, message, sql_letter_store
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.operation import Operation, Wait
from tfmq.client.worker.dead_letter_store import HandlerNotCalled
from tfmq.client.worker.listeners import Reject, RetryLater
from tfmq.dead_letters.model import DEAD, HANDLED, RETRYING, WAITING, Letter, Selection
from tfmq.dead_letters.retry_loop import FIRST_MS, JITTER, MAX_MS, POLL_SECONDS, Retrying, retry_delay_ms
from tfmq.dead_letters.store import LEASE_SECONDS, GroupDeadLetterStore
from tfmq.errors import Closed, StoreFailed


class Bench:
    """A store, a handler, and a loop over them, in a time that passes as the loop waits."""

    def __init__(self, path: Path, handler: Callable[[ReceivedMessage[Any]], Any], calls_max: int = 4) -> None:
        self.clock = Time()
        self.letter_store = sql_letter_store(path)
        self.store: GroupDeadLetterStore = group_of(self.letter_store, self.clock, calls_max)
        self.handler = handler
        self.calls: list[tuple[float, int]] = []
        self.loop = Retrying(self.store, self._handle, now=self.clock, wall_clock=self.clock)
        self.running = self.loop.run()

    def _handle(self, message: ReceivedMessage[Any]) -> Operation[None]:
        self.calls.append((self.clock.now - NOW, message.ordinal))
        made = self.handler(message)
        if isinstance(made, Iterator):
            yield from made

    def keep(self, *numbers: int, after: float = 1) -> None:
        for number in numbers:
            finished(self.store.store_letter(message(number), [failure(number)], calls=1, retry_after=after))

    def pass_time(self, seconds: float) -> bool:
        """Let the loop go on for so long; False once it ended."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            try:
                wait = next(self.running)
            except StopIteration:
                return False
            if not any(each.done for each in wait.futures):
                assert wait.seconds is not None, "it polls"
                self.clock.now = min(until, self.clock.now + max(wait.seconds, 1e-6))
        return True

    def states(self) -> dict[int, str]:
        return {each.ordinal: each.state for each in self.letters()}

    def letters(self) -> list[Letter]:
        found: list[Letter] = finished(self.letter_store.find(Selection()))
        return found


def test_each_is_handled_at_its_time_and_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "dead.db", lambda message: None)
    bench.keep(1, after=3)
    bench.keep(2, after=1)
    bench.pass_time(60)
    assert [(round(at, 2), number) for at, number in bench.calls] == [(1, 2), (3, 1)]
    assert bench.states() == {1: HANDLED, 2: HANDLED}


def test_one_that_fails_is_tried_with_growing_waits_and_is_dead_then(tmp_path: Path) -> None:
    def fail(message: Any) -> None:
        raise ValueError(f"call {len(bench.calls)}")

    bench = Bench(tmp_path / "dead.db", fail)
    bench.keep(1)
    bench.pass_time(100)
    assert [round(at) for at, _ in bench.calls] == [1, 3, 7, 15]
    (letter,) = bench.letters()
    assert letter.state == DEAD
    assert [each.error for each in letter.failures[1:]] == [f"ValueError: call {n}" for n in (1, 2, 3, 4)]
    whole = finished(bench.letter_store.get(letter.id))
    assert "in fail" in whole.failures[-1].traceback


def test_reject_and_retry_later_steer_it(tmp_path: Path) -> None:
    def handle(message: Any) -> None:
        if message.ordinal == 1:
            raise Reject("no such customer")
        if len(bench.calls) < 6:
            raise RetryLater(10, "the bank is closed")

    bench = Bench(tmp_path / "dead.db", handle, calls_max=2)
    bench.keep(1, 2)
    bench.pass_time(120)
    assert bench.states() == {1: DEAD, 2: HANDLED}
    assert [round(at) for at, number in bench.calls if number == 2] == [1, 11, 21, 31, 41]


@pytest.mark.long
def test_a_listener_that_raises_closed_has_failed_as_with_any_other_error(tmp_path: Path) -> None:
    """Its own producer may be closed: that says nothing of this consumer, which goes on and ends with it."""

    def handler(message: ReceivedMessage[Any]) -> None:
        raise Closed("The producer was closed.")

    bench = Bench(tmp_path / "dead.db", handler, calls_max=3)
    bench.keep(1)
    assert bench.pass_time(1000)
    assert len(bench.calls) == 3
    (letter,) = bench.letters()
    assert letter.state == DEAD and "Closed" in letter.error


def test_what_no_handler_was_called_with_is_given_back_uncounted(tmp_path: Path) -> None:
    """And the loop ends: it does not take the same one again and again until it is stopped."""

    def handler(message: ReceivedMessage[Any]) -> None:
        assert len(bench.calls) == 1
        raise HandlerNotCalled

    bench = Bench(tmp_path / "dead.db", handler, calls_max=3)
    bench.keep(1)
    assert not bench.pass_time(1000)
    (letter,) = bench.letters()
    assert (letter.state, letter.calls, letter.calls_left) == (WAITING, 1, 3)


def test_a_handler_of_minutes_keeps_its_message(tmp_path: Path) -> None:
    def slow(message: Any) -> Operation[None]:
        for _ in range(10):
            yield Wait((), 60.0)

    bench = Bench(tmp_path / "dead.db", slow)
    bench.keep(1)
    other = group_of(bench.letter_store, bench.clock)
    for _ in range(100):
        bench.pass_time(5)
        assert finished(other.lease_next()) is None
    assert len(bench.calls) == 1
    bench.pass_time(200)
    assert bench.states() == {1: HANDLED}


def test_a_waiting_handler_is_resumed_when_it_asked_for_it(tmp_path: Path) -> None:
    seen: list[float] = []

    def handle(message: Any) -> Operation[None]:
        for seconds in (0.5, LEASE_SECONDS, 1.0):
            before = bench.clock.now
            yield Wait((), seconds)
            seen.append(round(bench.clock.now - before, 3))

    bench = Bench(tmp_path / "dead.db", handle)
    bench.keep(1)
    bench.pass_time(120)
    assert seen == [0.5, LEASE_SECONDS, 1.0]


def test_where_the_handler_blocks_a_task_beside_it_keeps_the_lease(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "dead.db", lambda message: None)
    bench.keep(1)
    bench.clock.now += 1
    bench.loop.current = finished(bench.store.lease_next())
    renewing = bench.loop.renewing()
    other = group_of(bench.letter_store, bench.clock)
    for _ in range(20):
        wait = next(renewing)
        assert wait.seconds is not None and wait.seconds < LEASE_SECONDS / 2
        bench.clock.now += wait.seconds
        assert finished(other.lease_next()) is None
    bench.loop.current = None
    bench.loop.stop()
    with pytest.raises(StopIteration):
        next(renewing)


def test_stop_ends_it_after_the_message_in_work(tmp_path: Path) -> None:
    def handle(message: Any) -> Operation[None]:
        bench.loop.stop()
        yield Wait((), 1.0)

    bench = Bench(tmp_path / "dead.db", handle)
    bench.keep(1, 2)
    assert bench.pass_time(60) is False
    assert sorted(bench.states().values()) == [HANDLED, WAITING]
    assert len(bench.calls) == 1


def test_what_a_person_released_is_seen_soon(tmp_path: Path) -> None:
    from tfmq.dead_letters import model as events

    bench = Bench(tmp_path / "dead.db", lambda message: None)
    finished(bench.store.store_letter(message(1), [failure()]))
    bench.pass_time(100)
    assert bench.calls == []
    (letter,) = bench.letters()
    finished(bench.letter_store.apply([(letter.id, events.RetryEvent(round(bench.clock.now * 1000), 1))]))
    before = bench.clock.now
    bench.pass_time(POLL_SECONDS + 0.1)
    assert bench.states() == {1: HANDLED} and bench.calls[0][0] <= before - NOW + POLL_SECONDS


def test_a_store_that_fails_is_asked_again_and_what_was_handled_is_not_handled_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path / "dead.db", lambda message: None)
    bench.keep(1)
    broken: list[str] = ["mark_handled"] * 5 + ["lease_next"] * 3
    real = {name: getattr(bench.store, name) for name in ("lease_next", "mark_handled")}

    def failing(name: str) -> Callable[..., Operation[Any]]:
        def verb(*arguments: Any) -> Operation[Any]:
            if broken and broken[0] == name:
                broken.pop(0)
                raise StoreFailed("the disk is full")
            return (yield from real[name](*arguments))

        return verb

    for name in real:
        monkeypatch.setattr(bench.store, name, failing(name))
    bench.pass_time(40)
    assert bench.states() == {1: HANDLED} and len(bench.calls) == 1
    bench.pass_time(60)
    assert broken == []
    assert sum(each.levelno == logging.ERROR for each in caplog.records) == 8


def test_an_interrupt_leaves_the_message_to_its_lease(tmp_path: Path) -> None:
    def handle(message: Any) -> None:
        raise KeyboardInterrupt

    bench = Bench(tmp_path / "dead.db", handle)
    bench.keep(1)
    with pytest.raises(KeyboardInterrupt):
        bench.pass_time(60)
    assert bench.states() == {1: RETRYING} and bench.loop.current is None


# How long a message waits between its calls.


def test_waits_double_up_to_the_longest() -> None:
    assert [retry_delay_ms(calls, 0) for calls in (1, 2, 3, 4)] == [FIRST_MS, 2 * FIRST_MS, 4 * FIRST_MS, 8 * FIRST_MS]
    assert retry_delay_ms(50, 0) == retry_delay_ms(10**9, 0) == MAX_MS
    assert retry_delay_ms(0, 0) == FIRST_MS


def test_chance_only_adds_and_not_much() -> None:
    assert retry_delay_ms(1, 1.0) == FIRST_MS * (1 + JITTER)
    assert FIRST_MS < retry_delay_ms(1, 0.5) < retry_delay_ms(1, 1.0)
