"""A force that takes minutes: what it covers is not on the disk, however much else goes on meanwhile."""

from __future__ import annotations

from journal.log.log import Log
from tests.broker.helpers import Broker, after
from tests.crash.delay_life import MINUTE, pass_time
from tests.scale import seeded


def log_of(broker: Broker) -> Log:
    """Of the only partition."""
    (partition,) = broker.engine.broker.topics.partitions()
    log: Log = partition.log
    return log


def others_work(broker: Broker, seconds: float) -> None:
    """Time goes on; every job is done but the oldest one, which hangs."""
    generator = seeded("slow force")
    for _ in range(int(seconds)):
        pass_time(broker, 1, 0, generator)
        while len(broker.jobs) > 1:
            broker.step(len(broker.jobs) - 1)


def until_fired(broker: Broker) -> None:
    """Up to the force of the partition, which is begun and hangs."""
    log = log_of(broker)
    while log.end_offset == 0:
        broker.work()
        pass_time(broker, 0.01, 0, seeded("fired"))
    assert broker.jobs and log.forced_offset == 0


def test_a_bucket_stays_until_what_was_delivered_of_it_is_on_the_disk() -> None:
    """Its time is over, all in it was appended, the checkpoint is written again and again; then the power goes."""
    broker = Broker(queued=True)
    broker.create("orders", 1)
    broker.work()
    answer = broker.delay(broker.lease(), 0, [b"once"], due=after(3 * MINUTE))
    broker.work()
    assert answer.code == "ok"
    for _ in range(120):
        pass_time(broker, 1, 1, seeded("spilled"))
        broker.work()
    assert broker.engine.broker.delay_commands.queue._buckets.live_buckets[0].count == 1
    until_fired(broker)
    others_work(broker, 300)
    assert log_of(broker).forced_offset == 0
    again = Broker(broker.disk.crash(keep="nothing"), broker.clock)
    again.advance(1)
    assert again.payloads() == [b"once"]
