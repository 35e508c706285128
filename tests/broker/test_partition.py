"""The queue of a partition: order kept, size bounded, workers waited for."""

from tests.broker.helpers import Broker
from tfmq.protocol.commands import ACKS_WRITTEN


def test_while_file_work_runs_the_queue_waits_and_keeps_its_order() -> None:
    broker = Broker(queued=True, log__segment_bytes=1 << 16)
    broker.create(partitions=2)
    producer, other = broker.lease(), broker.lease()
    for sequence in range(2):
        broker.produce(producer, sequence, [bytes(25_000)])
        broker.work()
    answers = [broker.produce(producer, n, [bytes(25_000)], acks=ACKS_WRITTEN) for n in (2, 3)]
    assert [answer.code for answer in answers] == ["waiting"] * 2
    elsewhere = broker.produce(other, 0, partition=1, acks=ACKS_WRITTEN)
    broker.work()
    assert [answer.code for answer in (*answers, elsewhere)] == ["ok"] * 3
    assert answers[0].first_ordinal == 2 and answers[1].first_ordinal == 3
    assert broker.log().segment_count == 2


def test_one_append_is_bounded_and_the_rest_follows_in_the_same_turn() -> None:
    broker = Broker(limits__append_bytes=100_000)
    broker.create()
    producer = broker.lease()
    answers = [broker.produce(producer, n, [bytes(40_000)], turn=False) for n in range(5)]
    broker.engine.turn_ended()
    assert [answer.code for answer in answers] == ["ok"] * 5
    assert len({answer.positions[0][1] for answer in answers}) == 5


def test_appends_fit_small_segments_and_a_batch_that_cannot_is_too_large() -> None:
    broker = Broker(log__segment_bytes=1 << 16)
    broker.create()
    producer = broker.lease()
    answers = [broker.produce(producer, n, [bytes(30_000)], turn=False) for n in range(6)]
    broker.engine.turn_ended()
    assert [answer.code for answer in answers] == ["ok"] * 6
    large = broker.produce(producer, 6, [bytes(30_000)] * 4)
    assert large.code == "message_too_large"
    assert broker.produce(producer, 6).code == "ok"


def test_a_full_disk_at_the_roll_is_an_error_and_the_next_try_rolls() -> None:
    broker = Broker(queued=True, log__segment_bytes=1 << 16)
    broker.create()
    producer = broker.lease()
    for sequence in range(2):
        broker.produce(producer, sequence, [bytes(25_000)])
        broker.work()
    broker.disk.space_bytes = broker.disk.used_bytes()
    failed = broker.produce(producer, 2, [bytes(25_000)])
    broker.work()
    assert failed.code == "disk_full"
    broker.disk.space_bytes = None
    done = broker.produce(producer, 2, [bytes(25_000)])
    broker.work()
    assert done.code == "ok"


def test_work_that_needs_the_log_alone_waits_for_file_work_and_holds_the_queue() -> None:
    broker = Broker(queued=True)
    broker.create()
    broker = broker.restart()
    producer = broker.lease()
    partition = broker.engine.house.topics.partition("orders", broker.incarnation(), 0)
    first = broker.produce(producer, 0, acks=ACKS_WRITTEN)
    seen: list[str] = []
    partition.exclusively(lambda: seen.append("alone"), lambda result, error: seen.append("done"))
    second = broker.produce(producer, 1, acks=ACKS_WRITTEN)
    assert (first.code, second.code, seen) == ("waiting", "waiting", [])
    broker.work()
    assert (first.code, second.code, seen) == ("ok", "ok", ["alone", "done"])
