"""Operations inside the server's process: when they continue, how long they run, and how they end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfmq.broker.reply import Reply
from tfmq.client.connection.requests import request
from tfmq.client.operation import Operation, Wait
from tfmq.errors import Abandoned, BadRequest, TimedOut
from tfmq.protocol import commands
from tfmq.protocol.commands import header_bounds
from tfmq.server.local_connection import SLICE_SECONDS, LocalConnection, LocalSession, OperationRun
from tfmq.server.session import SessionContext
from tfmq.testing.clock import VirtualClock


class Call:
    """A call that the reactor makes later."""

    def __init__(self, due: float, function: Callable[[], None]) -> None:
        self.due, self.function, self.is_over = due, function, False

    def active(self) -> bool:
        return not self.is_over

    def cancel(self) -> None:
        self.is_over = True


class Rig:
    """A reactor and a broker: `handle` keeps the replies, or answers at once."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.clock = VirtualClock()
        self.calls: list[Call] = []
        self.replies: list[Reply] = []
        self.requests: list[Any] = []
        self.outcomes: list[tuple[Any, BaseException | None]] = []
        self.at_once = at_once
        self.session = LocalSession("a test")
        context = SessionContext(
            self._handle, "n" * 32, "tfmq", "127.0.0.1:1", {}, {}, 2, self.call_later, lambda: None, dict,
            lambda session: None, lambda session: None, header_bounds()
        )  # fmt: skip
        self.link = LocalConnection(context, self.session, self.clock.monotonic)

    def _handle(self, request: Any, body: Any, reply: Reply, session: Any) -> None:
        self.requests.append(request)
        if self.at_once:
            self.clock.advance(seconds=SLICE_SECONDS / 10)
            reply.ok(len(self.requests))
        else:
            self.replies.append(reply)

    def call_later(self, seconds: float, function: Callable[[], None]) -> Call:
        self.calls.append(Call(self.clock.monotonic() + seconds, function))
        return self.calls[-1]

    def turn(self) -> None:
        """Make the calls that are due."""
        due = [each for each in self.calls if each.due <= self.clock.monotonic() and each.active()]
        self.calls = [each for each in self.calls if each not in due and each.active()]
        for each in due:
            if each.active():
                each.is_over = True
                each.function()

    def start(self, operation: Operation[Any], seconds: float = 10.0) -> OperationRun:
        return OperationRun(self.link, operation, lambda *outcome: self.outcomes.append(outcome), seconds)

    def pings(self, count: int) -> Operation[int]:
        found = 0
        for _ in range(count):
            found = (yield from request(self.link, commands.Ping())).time_ms
        return found


def test_an_operation_continues_in_a_later_turn_than_the_reply() -> None:
    """The broker is in the middle of its work when it replies, and must not get a request there."""
    rig = Rig()
    rig.start(rig.pings(2))
    rig.replies.pop().ok(1)
    assert len(rig.requests) == 1
    rig.turn()
    assert len(rig.requests) == 2
    rig.replies.pop().ok(2)
    rig.turn()
    assert rig.outcomes == [(2, None)] and not any(each.active() for each in rig.calls)


def test_a_long_operation_lets_the_server_do_other_work() -> None:
    rig = Rig(at_once=True)
    rig.start(rig.pings(95))
    turns = 0
    while not rig.outcomes:
        turns += 1
        rig.turn()
    assert rig.outcomes == [(95, None)] and 8 <= turns <= 10


def test_an_operation_ends_in_time() -> None:
    rig = Rig()
    rig.start(rig.pings(1), seconds=3.0)
    rig.clock.advance(seconds=2.9)
    rig.turn()
    assert rig.outcomes == []
    rig.clock.advance(seconds=0.2)
    rig.turn()
    ((_, error),) = rig.outcomes
    assert isinstance(error, TimedOut)
    rig.replies.pop().ok(1)
    rig.turn()
    assert len(rig.outcomes) == 1


def test_an_operation_that_nobody_waits_for_is_closed() -> None:
    rig = Rig()
    run = rig.start(rig.pings(1))
    run.cancel()
    run.cancel()
    assert [type(error) for _, error in rig.outcomes] == [Abandoned] and not rig.link.has_pending_requests


def test_a_wait_without_a_request_ends_in_time() -> None:
    rig = Rig()

    def wait() -> Operation[str]:
        yield Wait((), 2.0)
        return "done"

    rig.start(wait())
    rig.clock.advance(seconds=2.0)
    rig.turn()
    assert rig.outcomes == [("done", None)]


def test_a_request_is_checked_like_one_from_the_network() -> None:
    """The broker relies on the limits of its fields."""
    rig = Rig()
    rig.start(request(rig.link, commands.ListDelayed(limit=10**6)))
    rig.turn()
    ((_, error),) = rig.outcomes
    assert isinstance(error, BadRequest) and "limit" in str(error) and rig.requests == []


def test_the_end_of_a_session_is_told_once() -> None:
    session, told = LocalSession("a test"), []
    session.on_close(lambda: told.append(1))
    session.end()
    session.end()
    session.on_close(lambda: told.append(2))
    assert told == [1, 2]
