"""The alarm rings at the time that was set, or before, and costs nothing to leave where it is."""

from tests.server.fakes import FakeReactor
from tfmq.server.server import NextDueTimer


def test_it_rings_when_it_is_due_and_once() -> None:
    reactor = FakeReactor()
    rung: list[float] = []
    alarm = NextDueTimer(reactor, reactor, lambda: rung.append(reactor.seconds()))
    alarm.set_due(5.0)
    reactor.pump([1] * 10)
    assert rung == [5.0]


def test_an_earlier_time_moves_it_and_a_later_one_does_not() -> None:
    reactor = FakeReactor()
    rung: list[float] = []
    alarm = NextDueTimer(reactor, reactor, lambda: rung.append(reactor.seconds()))
    alarm.set_due(5.0)
    (call,) = reactor.getDelayedCalls()
    alarm.set_due(8.0)
    alarm.set_due(None)
    assert reactor.getDelayedCalls() == [call]
    alarm.set_due(2.0)
    reactor.pump([1] * 10)
    assert rung == [2.0]


def test_what_is_overdue_rings_at_once() -> None:
    reactor = FakeReactor()
    reactor.advance(10)
    rung: list[int] = []
    NextDueTimer(reactor, reactor, lambda: rung.append(1)).set_due(3.0)
    reactor.advance(0)
    assert rung == [1]
