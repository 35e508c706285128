"""What all connections share; the rules for peers that stand still are tested with the transport that they
end.
"""

from tests.server.fakes import Net


class Standing:
    def __init__(self, since: float | None) -> None:
        self.since = since
        self.unsent_bytes = 0
        self.flushed = 0
        self.ends: list[str] = []

    def flush(self) -> None:
        self.flushed += 1

    def cut_off(self, why: str) -> None:
        self.ends.append(why)
        self.since = None

    def stalled_since(self) -> float | None:
        return self.since

    def waits_for_client(self) -> bool:
        return True


def test_who_has_something_to_send_is_flushed_at_the_turns_end() -> None:
    net = Net()
    one = Standing(None)
    net.traffic.flush_later(one)
    assert one.flushed == 0
    net.reactor.advance(0)
    assert one.flushed == 1


def test_nobody_is_looked_after_when_nobody_stands_still() -> None:
    net = Net()
    one = Standing(0.0)
    net.traffic.monitor(one)
    net.reactor.pump([1] * 15)
    assert len(one.ends) == 1
    assert not net.reactor.getDelayedCalls()


def test_who_is_gone_is_not_looked_after() -> None:
    net = Net()
    one = Standing(0.0)
    net.traffic.monitor(one)
    net.traffic.remove(one)
    net.reactor.pump([1] * 15)
    assert one.ends == []


def test_closing_gives_the_memory_back() -> None:
    net = Net()
    net.traffic.close()
    assert net.pool.stats().live_count == 0
