"""What the drivers of event loops share, with a loop that the test turns by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any

import pytest

from tests.client.fake_broker import FakeBroker, listening
from tfmq.client.connection.addresses import parse_servers
from tfmq.client.connection.connection import ClientConnection
from tfmq.client.connection.requests import request
from tfmq.client.drivers.event_loop import EventDriver, NoLock
from tfmq.client.drivers.socket import resolve_address
from tfmq.client.operation import Event, Future, Operation, Wait
from tfmq.protocol.commands import Ping


class HandDriver(EventDriver):
    """Its loop is `turn`: what was asked for soon, then the socket."""

    _current = staticmethod(get_ident)

    def _reset_state(self) -> None:
        super()._reset_state()
        self.soon: list[Callable[[], None]] = []
        self.watches: list[tuple[int, bool]] = []
        self.pauses: list[float] = []

    async def wait(self, futures: Iterable[Future], seconds: float | None = None) -> bool:
        waited = tuple(futures)
        for _ in range(10_000):
            if any(each.done for each in waited):
                return True
            self.wake()
            self.turn()
        return False

    def turn(self) -> None:
        soon, self.soon = self.soon, []
        for function in soon:
            function()
        if self._watched is not None:
            if self._watched[1]:
                self._writable()
            self._readable()

    def run_in_threads(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        done(work(), None)

    def set_event(self, event: Event) -> None:
        event.complete()

    def _check_other_caller(self) -> None:
        self._owner = get_ident()

    def _has_loop(self) -> bool:
        return True

    def _call_soon(self, function: Callable[[], None]) -> None:
        self.soon.append(function)

    def _call_later(self, seconds: float, function: Callable[[], None]) -> float:
        self.pauses.append(seconds)
        return seconds

    def _cancel_call(self, call: object) -> None:
        """It calls nothing."""

    def _create_sleep(self) -> tuple[Any, Callable[..., None]]:
        raise AssertionError("its wait does not sleep")

    def _watch_socket(self, fileno: int, to_write: bool) -> None:
        self.watches.append((fileno, to_write))

    def _unwatch(self) -> None:
        self._watched = None

    def _start_resolving(self) -> None:
        self._address_resolved(resolve_address(self.link.server))


def finish(coroutine: Any) -> Any:
    """Its result; it waits for nothing but its own turns."""
    with pytest.raises(StopIteration) as end:
        coroutine.send(None)
    return end.value.value


def driver(servers: str, now: list[float]) -> HandDriver:
    return HandDriver(ClientConnection(parse_servers(servers), lambda: now[0]), clock=lambda: now[0])


def test_a_request_goes_out_and_its_answer_comes_in() -> None:
    with listening(FakeBroker()) as servers:
        made = driver(servers, [0.0])
        assert finish(made.run(request(made.link, Ping(), seconds=20.0))).time_ms > 0
        assert made.watches, "the socket was watched"
        made.close_now()
        assert made.channel.socket is None


def test_many_changes_are_one_look_around() -> None:
    made = driver("127.0.0.1:1", [0.0])
    for _ in range(3):
        made.wake()
    assert len(made.soon) == 1
    made.turn()
    made.wake()
    assert len(made.soon) == 1


def test_timers_are_due_in_the_clocks_time() -> None:
    now, reported = [0.0], list[str]()
    made = driver("127.0.0.1:1", now)
    made.call_later(5.0, lambda: reported.append("due"))
    made.turn()
    assert (reported, made.pauses[-1]) == ([], 5.0)
    now[0] = 5.0
    made._run_turn()
    assert reported == ["due"]


def test_an_operation_that_raises_is_closed_and_looked_after() -> None:
    made = driver("127.0.0.1:1", [0.0])

    def operation() -> Operation[None]:
        yield Wait((), 0.0)
        raise KeyError("mine")

    made.wait = lambda *_: no_wait()  # type: ignore[method-assign]

    async def no_wait() -> bool:
        return False

    with pytest.raises(KeyError, match="mine"):
        made.run(operation()).send(None)
    assert made.soon


def test_a_closed_driver_looks_around_no_more() -> None:
    made = driver("127.0.0.1:1", [0.0])
    made.wake()
    made.close_now()
    made.turn()
    made.wake()
    assert made.soon == [] and made.channel.socket is None


def test_a_child_has_a_fresh_connection_and_stays_closed_if_it_was() -> None:
    made = driver("127.0.0.1:1", [0.0])
    forgotten: list[bool] = []
    made.on_fork.append(lambda: forgotten.append(True))
    made.reset_after_fork()
    assert forgotten == [True] and not made.closed
    made.close_now()
    made.reset_after_fork()
    assert made.closed


def test_what_stands_for_a_lock_never_waits() -> None:
    lock = NoLock()
    with lock:
        assert lock.acquire() and lock.acquire(blocking=False)
        lock.release()
