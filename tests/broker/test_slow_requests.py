"""Requests that are valid and slow do not keep the broker from what it owes to others."""

from tests.broker.helpers import Broker, Session
from tfmq.protocol.commands import BY_TIME_MS, EPOCH_UNKNOWN, Fetch, Locate


def filled() -> tuple[Broker, int]:
    broker = Broker(queued=True)
    broker.create()
    producer = broker.lease()
    for sequence in range(0, 30_000, 10_000):
        broker.produce(producer, sequence, [b""] * 10_000)
        broker.work()
    return broker, producer


def test_an_fsync_does_not_wait_after_a_thousand_slow_requests() -> None:
    broker, producer = filled()
    incarnation, flood = broker.incarnation(), Session()
    for _ in range(1000):
        broker.ask(Locate("orders", incarnation, 0, BY_TIME_MS, 1), session=flood)
    other = broker.locate(BY_TIME_MS, 1)
    sent = broker.produce(producer, 30_000)
    assert len(broker.jobs) <= 4, "of eight workers"
    broker.step(len(broker.jobs) - 1)
    assert sent.code == "ok"
    for _ in range(6):
        broker.step()
    assert other.code == "ok", "and each session has its turn"
    broker.work()


def test_tags_are_looked_for_by_a_worker_where_there_is_much_to_look_through() -> None:
    broker, _ = filled()
    request = Fetch("orders", broker.incarnation(), 0, 0, EPOCH_UNKNOWN, 8 << 20, 0, 0, [7])
    answers = [broker.ask(request) for _ in range(100)]
    assert not any(answer.done for answer in answers) and len(broker.jobs) <= 3
    broker.work()
    assert {(answer.code, answer.next) for answer in answers} == {("ok", broker.log().end_offset)}


def test_a_topic_is_described_by_a_worker_since_that_reads() -> None:
    from tfmq.protocol.commands import DescribeTopic

    broker, _ = filled()
    answer = broker.ask(DescribeTopic("orders"))
    assert not answer.done
    broker.work()
    assert answer.description["partitions"][0]["end_ordinal"] == 30_000
    assert broker.ask(DescribeTopic("nothing")).code == "unknown_topic"
