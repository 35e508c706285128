"""Old segments are deleted by age, size or hand; nothing else is lost."""

from __future__ import annotations

from errno import ENOSPC
from typing import Any

import pytest

from journal.record.block import blocks_of
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


HOUR = 3600.0
LATE = 2 * ROUND_SECONDS
"""A segment is closed in one round and removed in another; each may be a round late."""


def ages(broker: Broker) -> list[float]:
    """How old the messages are that can still be read, in seconds."""
    log, found = broker.log(), []
    offset = log.first_offset
    while offset < log.forced_offset:
        chunk = log.read(offset, 1 << 30)
        offset = chunk.next
        for block in blocks_of(chunk.data, chunk.start, log.log_id):
            found.append((broker.clock.wall_ms() - block.control.append_time) / 1000)
    return found


def restarted(broker: Broker) -> Broker:
    """The process dies and begins again."""
    return broker.crashed(broker.disk.crash(keep="everything"))


@pytest.mark.long
@pytest.mark.parametrize(("segment_seconds", "roll"), [(7 * 24 * HOUR, 2 * HOUR), (HOUR / 2, HOUR / 2)])
def test_little_traffic_keeps_no_message_longer_than_retention_and_a_roll(segment_seconds: float, roll: float) -> None:
    """A message each ten minutes, for twelve hours, with a restart each three: far too little to fill a segment."""
    values = {"retention__seconds": 2 * HOUR, "log__segment_seconds": segment_seconds}
    broker = Broker(**values)
    broker.create()
    producer = broker.lease()
    for sequence in range(72):
        broker.produce(producer, sequence, [b"x"])
        broker.advance(HOUR / 6)
        assert max(ages(broker)) <= 2 * HOUR + roll + LATE
        if sequence % 18 == 17:
            broker = restarted(broker)
    found = ages(broker)
    assert len([age for age in found if age < 2 * HOUR]) == 11, "nothing goes before its time"
    assert broker.log().segment_count <= 2 + 2 * HOUR / roll


def test_the_last_segment_of_an_idle_topic_goes_too_and_offsets_go_on() -> None:
    broker = Broker(retention__seconds=2 * HOUR)
    broker.create()
    producer = broker.lease()
    for sequence in range(3):
        broker.produce(producer, sequence, [b"personal"])
    end, ordinal = broker.log().end_offset, broker.log().end_ordinal
    broker.advance(2 * HOUR)
    assert broker.log().first_offset == 0
    broker.advance(LATE)
    for _ in range(2):
        log = broker.log()
        assert (log.first_offset, log.end_offset, log.end_ordinal, log.count) == (end, end, ordinal, 0)
        files = [name for name in broker.disk.list(f"{DATA}/orders-0") if name.endswith(".zxQueue")]
        assert [broker.disk.size(f"{DATA}/orders-0/{name}") for name in files] == [0]
        broker = restarted(broker)
    broker.advance(10 * HOUR)
    assert broker.log().segment_count == 1, "an empty one is not closed"
    answer = broker.produce(producer, 3, [b"later"])
    assert answer.positions[0][1] == end and broker.log().end_ordinal == ordinal + 1


def test_on_a_full_disk_what_is_closed_goes_and_the_rest_follows() -> None:
    broker = Broker(retention__seconds=2 * HOUR, log__segment_seconds=HOUR)
    broker.create()
    producer = broker.lease()
    broker.produce(producer, 0, [b"x" * 1_000])
    broker.advance(HOUR + LATE)
    broker.produce(producer, 1, [b"x" * 1_000])
    assert broker.log().segment_count == 2
    folder = f"{DATA}/orders-0"
    broker.disk.faults.fail("create", error=ENOSPC, times=None, path=folder)
    broker.advance(HOUR + LATE)
    assert (broker.log().segment_count, broker.log().count) == (1, 1), "the closed one went, no new one could be made"
    broker.disk.faults.clear()
    broker.advance(2 * LATE)
    assert broker.log().segment_count == 2
    broker.advance(2 * HOUR)
    assert broker.log().count == 0


def test_a_power_cut_at_any_step_of_a_roll_by_age_loses_nothing() -> None:
    def filled() -> Broker:
        broker = Broker(log__segment_seconds=HOUR)
        broker.create()
        broker.produce(broker.lease(), 0, [b"a", b"b"])
        return broker

    steps: list[str] = []
    broker = filled()
    broker.disk.after = lambda kind, path: steps.append(kind)
    broker.advance(HOUR + LATE)
    assert broker.log().segment_count == 2 and len(steps) > 3
    for stop in range(len(steps)):
        broker, seen, left = filled(), [0], []

        def cut(kind: str, path: str, broker: Broker = broker, stop: int = stop) -> None:
            if seen[0] == stop:  # noqa: B023 - called before the next turn
                left.append(broker.disk.crash(keep="nothing"))  # noqa: B023
            seen[0] += 1  # noqa: B023

        broker.disk.after = cut
        broker.advance(HOUR + LATE)
        again = broker.crashed(left[0])
        assert again.log().count == 2 and again.fetch(0).code == "ok"


def test_segments_are_closed_by_age_where_configured_or_where_retention_is_by_age() -> None:
    """Each costs a descriptor; where none is ever removed by its age the default gains nothing."""
    for values, own, count in (
        ({}, {}, 1),
        ({"log__segment_seconds": HOUR}, {}, 2),
        ({}, {"log__segment_seconds": HOUR}, 2),
        ({"log__segment_seconds": HOUR}, {"log__segment_seconds": 30 * HOUR}, 1),
        ({"retention__bytes": 1 << 30}, {}, 1),
    ):
        broker = Broker(**values)
        broker.create("orders", **own)
        broker.produce(broker.lease(), 0, [b"x"])
        broker.advance(HOUR + LATE)
        assert broker.log().segment_count == count, (values, own)


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
    broker.engine.broker.reload(config(retention__seconds=600, retention__action="archive", log__segment_bytes=1 << 16))
    broker.advance(ROUND_SECONDS + 1)
    assert broker.disk.list(f"{DATA}/archive/orders-0") and broker.log().first_offset > 0


def test_of_two_readings_the_later_one_holds_though_the_archive_of_the_first_is_made_after_it() -> None:
    broker = Broker(queued=True)
    broker.create()
    broker.engine.broker.reload(config(retention__seconds=600, retention__action="archive"))
    broker.engine.broker.reload(config(retention__seconds=700))
    broker.work()
    options = broker.log().options
    assert (options.retention_seconds, options.retention_action) == (700, "delete")


def test_limits_that_are_read_again_hold_for_all_parts() -> None:
    broker = Broker()
    broker.create()
    broker.engine.broker.reload(config(limits__topics=1, limits__pending_requests=7, topics__auto_create="false"))
    assert broker.ask(CreateTopic("bills", 1, {})).code == "not_allowed"
    assert broker.ask(Metadata(["bills"], True)).code == "unknown_topic"
    assert broker.engine.broker.backpressure.pending_requests_max == 7


def test_truncate_gives_up_what_lies_before_an_offset() -> None:
    broker = filled()
    end = broker.log().end_offset
    request = Truncate("orders", broker.incarnation(), 0, end // 2)
    first = broker.ask(request).first_offset
    assert 0 < first <= end // 2
    assert broker.fetch(0).code == "offset_out_of_range"
    assert broker.fetch(first).code == "ok"
    assert broker.ask(Truncate("orders", broker.incarnation() + 1, 0, 5)).code == "unknown_topic"
    broker.log().stop("a test stops it")
    stopped = broker.ask(request)
    assert stopped.code == "storage_stopped" and stopped.failure is not None
    assert stopped.failure.outcome == "not done"


def test_what_producers_sent_is_known_after_their_segments_went() -> None:
    broker = filled(retention__bytes=1)
    broker.advance(ROUND_SECONDS + 1)
    broker.engine.broker.lock.release()
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
