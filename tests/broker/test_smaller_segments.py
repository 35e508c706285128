"""A decided transaction waits for a partition that a start could not open, and that takes less in one append."""

from tests.broker.helpers import Broker
from tfmq.protocol.commands import ResumePartition

BATCHES = 60


def test_it_comes_in_appends_that_fit_once_the_partition_is_open() -> None:
    broker = Broker()
    broker.create("orders", 1, log__segment_bytes=65_536)
    batches = [("orders", 0, [b"x" * 3000]) for _ in range(BATCHES)]
    stream = broker.stream()
    broker.disk.faults.fail("write", times=None, path="orders-0")
    assert broker.transact(stream, batches).state == "applying"
    after = Broker(broker.disk.crash(keep="everything"), broker.clock, start=False)
    after.disk.faults.fail("open", times=None, path="orders-0")
    after.engine.start()
    assert isinstance(after.engine.broker.topics.topic("orders").partitions[0], str)
    after.disk.faults.clear()
    assert after.ask(ResumePartition("orders", 0)).code == "ok"
    after.advance(120)
    assert len(after.payloads()) == BATCHES
    after.advance(60)
    assert after.settled()
