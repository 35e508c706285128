"""Old segments go by age, size or hand; nobody loses what a rule does not name."""

from typing import Any

from tests.broker.helpers import DATA, Broker, config
from tfmq.broker.retention import ROUND_SECONDS
from tfmq.protocol.commands import CreateTopic, Metadata, Truncate


def filled(**values: Any) -> Broker:
    """Ten segments, a minute apart."""
    broker = Broker(log__segment_bytes=1 << 16, **values)
    broker.create()
    producer = broker.lease()
    for sequence in range(20):
        broker.produce(producer, sequence, [bytes(30_000)])
        broker.clock.advance(60)
    return broker


def test_segments_that_are_old_enough_go() -> None:
    broker = filled(retention__seconds=600)
    first = broker.log().first_offset
    broker.advance(ROUND_SECONDS + 1)
    assert 0 == first < broker.log().first_offset < broker.log().end_offset
    lost = broker.fetch(0)
    assert lost.code == "offset_out_of_range" and lost.failure is not None
    assert lost.failure.details["first"] == broker.log().first_offset


def test_segments_beyond_the_size_go() -> None:
    broker = filled(retention__bytes=200_000)
    broker.advance(ROUND_SECONDS + 1)
    assert broker.log().size_bytes <= 200_000 + (1 << 16)


def test_without_a_rule_all_stays() -> None:
    broker = filled()
    broker.advance(10 * ROUND_SECONDS)
    assert broker.log().first_offset == 0


def test_archive_moves_them_instead() -> None:
    broker = filled(retention__seconds=600, retention__action="archive")
    broker.advance(ROUND_SECONDS + 1)
    moved = broker.disk.list(f"{DATA}/archive/orders-0")
    assert moved and broker.log().first_offset > 0


def test_a_rule_that_is_read_again_holds_without_a_restart() -> None:
    broker = filled()
    broker.engine.reload(
        config(retention__seconds=600, retention__action="archive", log__segment_bytes=1 << 16)
    )
    broker.advance(ROUND_SECONDS + 1)
    assert broker.disk.list(f"{DATA}/archive/orders-0") and broker.log().first_offset > 0


def test_limits_that_are_read_again_hold_for_all_parts() -> None:
    broker = Broker()
    broker.create()
    broker.engine.reload(config(limits__topics=1, limits__pending_requests=7, topics__auto_create="false"))
    assert broker.ask(CreateTopic("bills", 1, {})).code == "not_allowed"
    assert broker.ask(Metadata(["bills"], True)).code == "unknown_topic"
    assert broker.engine.house.quotas.requests_max == 7


def test_truncate_gives_up_what_lies_before_an_offset() -> None:
    broker = filled()
    end = broker.log().end_offset
    request = Truncate("orders", broker.incarnation(), 0, end // 2)
    first = broker.ask(request).first_offset
    assert 0 < first <= end // 2
    assert broker.fetch(0).code == "offset_out_of_range"
    assert broker.fetch(first).code == "ok"
    assert broker.ask(Truncate("orders", broker.incarnation() + 1, 0, 5)).code == "unknown_topic"


def test_what_producers_sent_is_known_after_their_segments_went() -> None:
    broker = filled(retention__bytes=1)
    broker.advance(ROUND_SECONDS + 1)
    broker.engine.house.lock.release()
    again = broker.crashed(broker.disk.crash(keep="nothing"))
    producer = broker.lease() - 1
    assert again.produce(producer, 20).code == "ok"


def test_idle_producers_are_forgotten_in_the_round() -> None:
    broker = Broker(limits__producer_idle_seconds=100)
    broker.create()
    producer = broker.lease()
    broker.produce(producer, 0)
    broker.advance(100 + 2 * ROUND_SECONDS)
    late = broker.produce(producer, 1)
    assert late.code == "unknown_producer"


def test_a_failure_of_retention_is_not_silent(caplog: object) -> None:
    broker = filled(retention__seconds=600)
    broker.disk.faults.fail("unlink", path="orders-0")
    broker.advance(ROUND_SECONDS + 1)
    assert broker.log().stopped is not None
    assert broker.produce(broker.lease(), 0).code == "storage_stopped"
