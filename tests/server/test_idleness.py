"""When a server without clients ends."""

from tests.server.fakes import FakeReactor
from tfmq.server.server import IdleMonitor


class Case:
    def __init__(self, seconds: float) -> None:
        self.reactor, self.sessions, self.ended = FakeReactor(), 0, 0
        self.idleness = IdleMonitor(self.reactor.callLater, seconds, lambda: self.sessions, self.end)

    def end(self) -> None:
        self.ended += 1

    def count(self) -> int:
        return self.ended

    def sessions_are(self, count: int) -> None:
        self.sessions = count
        self.idleness.check()


def test_it_ends_once_when_nobody_ever_comes() -> None:
    case = Case(5)
    case.idleness.start()
    case.reactor.advance(4.9)
    assert case.count() == 0
    case.reactor.advance(0.2)
    case.reactor.advance(60)
    assert case.count() == 1


def test_who_is_connected_keeps_it_and_the_time_begins_when_the_last_one_left() -> None:
    case = Case(5)
    case.idleness.start()
    case.reactor.advance(4)
    case.sessions_are(1)
    case.sessions_are(2)
    case.reactor.advance(100)
    case.sessions_are(1)
    case.reactor.advance(100)
    case.sessions_are(0)
    case.reactor.advance(4.9)
    assert case.count() == 0
    case.reactor.advance(0.2)
    assert case.count() == 1


def test_a_server_of_its_own_stays() -> None:
    case = Case(0)
    case.idleness.start()
    case.sessions_are(0)
    case.reactor.advance(1e6)
    assert case.count() == 0


def test_a_stop_leaves_nothing_to_come() -> None:
    case = Case(5)
    case.idleness.start()
    case.idleness.stop()
    case.reactor.advance(10)
    assert case.count() == 0
