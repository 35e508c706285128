"""LOCATE, and what it stands on: offsets and ordinals found again exactly."""

from __future__ import annotations

import pytest

from journal.errors import NotARecord
from tests.broker.helpers import DATA, Broker, payloads_of
from tfmq.broker.data_repair import repair_data
from tfmq.broker.log_offsets import ordinal_of, record_offset
from tfmq.protocol.commands import (
    ACKS_WRITTEN,
    BY_EARLIEST,
    BY_LATEST,
    BY_OFFSET,
    BY_ORDINAL,
    BY_TIME_MS,
    ORDINAL_UNKNOWN,
)


@pytest.fixture
def broker() -> Broker:
    """Ten records in five appends, a second apart."""
    made = Broker()
    made.create()
    producer = made.lease()
    for number in range(5):
        made.produce(producer, 2 * number, [b"x" * (number + 1)] * 2)
        made.clock.advance(1)
    return made


def offsets(broker: Broker) -> list[int]:
    found, position = [], 0
    for number in range(5):
        found += [position, position + 21 + number]
        position += 2 * (21 + number) + 100
    return found


def test_earliest_and_latest(broker: Broker) -> None:
    first, last = broker.locate(BY_EARLIEST), broker.locate(BY_LATEST)
    assert (first.offset, first.ordinal) == (0, 0)
    assert (last.offset, last.ordinal) == (broker.log().end_offset, 10)
    assert (first.first_offset, first.end_offset, first.forced_offset, first.end_ordinal) == (
        0,
        broker.log().end_offset,
        broker.log().forced_offset,
        10,
    )


def test_latest_is_the_durable_offset(broker: Broker) -> None:
    forced = broker.log().forced_offset
    broker.produce(broker.lease(), 0, acks=ACKS_WRITTEN)
    assert (broker.locate(BY_LATEST).offset, broker.locate(BY_LATEST).ordinal) == (forced, 10)


def test_every_place_of_a_stopped_log_is_answered(broker: Broker) -> None:
    forced, producer = broker.log().forced_offset, broker.lease()
    for number in range(2):
        broker.produce(producer, number, acks=ACKS_WRITTEN)
    broker.log().stop("its disk failed")
    end = broker.log().end_offset
    latest = broker.locate(BY_LATEST)
    assert (latest.code, latest.offset, latest.ordinal, latest.end_offset) == ("ok", forced, 10, end)
    for by, value in ((BY_OFFSET, forced + 150), (BY_TIME_MS, 0), (BY_ORDINAL, 11)):
        assert broker.locate(by, value).code == "ok"
    assert broker.locate(BY_OFFSET, forced + 150).ordinal == ORDINAL_UNKNOWN


def test_every_ordinal_and_every_offset_are_found(broker: Broker) -> None:
    for ordinal, offset in enumerate(offsets(broker)):
        by_ordinal, by_offset = broker.locate(BY_ORDINAL, ordinal), broker.locate(BY_OFFSET, offset)
        assert (by_ordinal.offset, by_ordinal.ordinal) == (offset, ordinal)
        assert (by_offset.offset, by_offset.ordinal) == (offset, ordinal)
        assert broker.locate(BY_OFFSET, offset + 1).offset == offset
        assert ordinal_of(broker.log(), offset) == ordinal


def test_values_outside_give_the_nearest_end(broker: Broker) -> None:
    end = broker.log().end_offset
    assert broker.locate(BY_OFFSET, 10**9).offset == end
    assert broker.locate(BY_ORDINAL, 10**9).offset == end
    assert broker.locate(BY_TIME_MS, broker.clock.wall_ms() + 1).offset == end


def test_a_time_gives_the_first_append_at_or_after_it(broker: Broker) -> None:
    third = broker.clock.wall_ms() - 3000
    assert broker.locate(BY_TIME_MS, third).offset == offsets(broker)[4]
    assert broker.locate(BY_TIME_MS, third + 1).ordinal == 6
    assert broker.locate(BY_TIME_MS, 0).ordinal == 0


def test_a_record_is_found_after_another_of_its_block(broker: Broker) -> None:
    assert record_offset(broker.log(), offsets(broker)[4], 1) == offsets(broker)[5]


def test_a_record_in_a_repaired_range_is_none_and_its_ordinal_is_that_of_the_next(broker: Broker) -> None:
    """A repeated send is not answered with the offset of other records."""
    path = "/data/orders-0/" + "0" * 32 + ".zxQueue"
    lost = offsets(broker)[5]
    broker.stop()
    broker.disk.damage(path, offsets(broker)[4], b"\xff" * (lost - offsets(broker)[4] + 22))
    (repaired,) = repair_data(broker.disk, DATA).logs
    assert repaired.lost == 2
    again = broker.crashed(broker.disk)
    assert ordinal_of(again.log(), lost) == 6
    fetched = again.fetch(lost)
    assert payloads_of(fetched, fetched.skip_to)[:1] == [b"xxxx"]
    with pytest.raises(NotARecord):
        record_offset(again.log(), lost, 0)


def test_in_damage_an_ordinal_is_unknown_and_the_range_is_named(broker: Broker) -> None:
    path = "/data/orders-0/" + "0" * 32 + ".zxQueue"
    broker.disk.damage(path, offsets(broker)[4] + 5, b"\xff" * 10)
    broker.engine.broker.lock.release()
    again = broker.crashed(broker.disk)
    damage = again.log().damage
    assert damage
    first, damage_end, _ = damage[0]
    assert first <= offsets(broker)[4] < damage_end
    assert ordinal_of(again.log(), first) == ORDINAL_UNKNOWN
    fetched = again.fetch(offsets(broker)[4])
    assert fetched.code == "damaged" and fetched.failure is not None
    assert (fetched.failure.details["first"], fetched.failure.details["next"]) == (first, damage_end)
    assert again.fetch(damage_end).code == "ok"


def test_in_a_block_whose_bytes_are_wrong_an_ordinal_is_unknown(broker: Broker) -> None:
    """Which a running broker learns from nothing but its checksum."""
    path = "/data/orders-0/" + "0" * 32 + ".zxQueue"
    broker.disk.damage(path, offsets(broker)[4] + 20, b"\xff")
    assert broker.locate(BY_OFFSET, offsets(broker)[4]).ordinal == ORDINAL_UNKNOWN
