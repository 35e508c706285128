"""Where a consumer starts, and where it goes on when it is told: what may be written, and what is read then."""

import re
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.client.scripted import Broker, Script
from tests.client.test_consuming import filled, offset_of
from tfmq.client.consumer.options import EARLIEST, LATEST, StartPosition, seek_position, start_position
from tfmq.errors import BadRequest, UnknownPartition
from tfmq.message import Ordinal
from tfmq.offsets.storage import PartitionName
from tfmq.protocol import commands as wire
from tfmq.protocol.commands import BY_OFFSET, BY_ORDINAL, BY_TIME_MS

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
NOON_MS = 1_767_268_800_000
NAME = PartitionName("orders", 0)


@pytest.fixture
def broker() -> Broker:
    return Broker()


def test_every_way_to_start() -> None:
    assert start_position("earliest") == EARLIEST
    assert start_position("latest") == LATEST
    assert start_position(0) == StartPosition(BY_OFFSET, 0, exact=True)
    assert start_position(Ordinal(7)) == StartPosition(BY_ORDINAL, 7)
    assert start_position(NOON) == StartPosition(BY_TIME_MS, NOON_MS)


@pytest.mark.parametrize("start", ["first", -1, 1 << 63, True, None, 1.5, Ordinal(-1), datetime(2026, 1, 1)])
def test_what_is_no_start_is_refused(start: Any) -> None:
    with pytest.raises(BadRequest):
        start_position(start)


def test_a_seek_takes_exactly_one_place_and_the_record_at_or_before_an_offset() -> None:
    assert seek_position(offset=5) == StartPosition(BY_OFFSET, 5)
    assert seek_position(ordinal=5) == StartPosition(BY_ORDINAL, 5)
    assert seek_position(time=NOON) == StartPosition(BY_TIME_MS, NOON_MS)
    assert seek_position(to="latest") == LATEST
    for wrong in ({}, {"offset": 1, "ordinal": 1}, {"to": "middle"}, {"offset": -1}):
        with pytest.raises(BadRequest):
            seek_position(**wrong)


# A consumer that starts there


@pytest.mark.parametrize(
    ("start", "expected"),
    [("earliest", [b"0", b"1", b"2"]), ("latest", []), (Ordinal(2), [b"2"]), (0, [b"0", b"1", b"2"])],
)
def test_start(broker: Broker, start: Any, expected: list[bytes]) -> None:
    filled(broker, 3)
    assert Script(broker, start=start).poll() == expected


def test_start_applies_only_where_the_group_has_no_offset(broker: Broker) -> None:
    filled(broker, 3)
    first = Script(broker, group="g")
    first.poll(count=1)
    first.close(processed=True)
    assert Script(broker, group="g", start="latest").poll() == [b"1", b"2"]


def test_an_offset_of_a_topic_that_was_deleted_and_made_anew_does_not_count(broker: Broker) -> None:
    filled(broker, 3)
    first = Script(broker, group="g")
    first.poll()
    first.close(processed=True)
    filled(broker, 2)
    assert Script(broker, group="g").poll() == [b"0", b"1"]


def test_it_waits_for_a_topic_that_is_not_there_and_never_makes_it(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(broker, start="latest")
    assert script.poll(10) == []
    assert [each for each in caplog.messages if "orders" in each] == [
        "orders does not exist yet; waiting for it. Reading never creates a topic."
    ]
    assert not any(request.create for request in broker.sent(wire.Metadata))
    filled(broker, 2)
    assert script.poll(3) == [b"0", b"1"], "what came after we began to wait is news"


def test_a_partition_that_appears_later_is_read_from_its_start(broker: Broker) -> None:
    filled(broker, 2)
    script = Script(broker, group="g", start="latest")
    assert script.poll() == []
    broker.grow("orders").append(b"new")
    assert script.poll(10) == [b"new"]
    script.close()
    broker.grow("orders").append(b"newer")
    assert Script(broker, group="g", start="latest").poll() == [b"new", b"newer"]


def test_a_pattern_finds_topics_that_appear_later(broker: Broker) -> None:
    filled(broker, 1, "a.1")
    filled(broker, 1, "b")
    script = Script(broker, topics=re.compile(r"a\..*"))
    assert script.poll() == [b"0"]
    filled(broker, 1, "a.2")
    assert [m.topic for m in script.messages(10)] == ["a.2"]


def test_partitions_may_be_named(broker: Broker) -> None:
    broker.create("orders", 3)
    for log in broker.topics["orders"][1]:
        log.append(b"x")
    assert [m.partition for m in Script(broker, partitions=[("orders", 1)]).messages()] == [1]
    assert sorted(m.partition for m in Script(broker, topics="orders", partitions=[0, 2]).messages()) == [
        0,
        2,
    ]


# A consumer that is moved


def test_seek_goes_back_and_forward(broker: Broker) -> None:
    log = filled(broker)
    script = Script(broker)
    script.poll()
    script.run(script.core.seek(*NAME, ordinal=3))
    assert script.poll() == [b"3", b"4"]
    script.run(script.core.seek(*NAME, offset=log.pieces[1].offset + 5))
    assert script.poll(count=2) == [b"1", b"2"]
    script.run(script.core.seek(*NAME, to="latest"))
    assert script.poll() == []


def test_a_seek_before_the_first_poll_and_in_the_middle_of_a_loop(broker: Broker) -> None:
    filled(broker)
    script = Script(broker)
    script.run(script.core.seek(*NAME, ordinal=2))
    seen = []
    for message in script.loop():
        seen.append(message.payload)
        if len(seen) == 2:
            script.run(script.core.seek(*NAME, ordinal=0))
        if len(seen) == 4:
            break
    assert seen == [b"2", b"3", b"0", b"1"]


def test_a_seek_back_is_saved_as_it_is(broker: Broker) -> None:
    filled(broker)
    script = Script(broker, group="g")
    script.poll()
    script.commit()
    script.run(script.core.seek(*NAME, ordinal=0))
    script.close(processed=True)
    assert broker.saved("g") == 0


def test_a_seek_tells_the_broker_that_the_parked_fetch_is_void(broker: Broker) -> None:
    filled(broker)
    script = Script(broker)
    script.poll(), script.poll(0.1)
    script.run(script.core.seek(*NAME, to="latest"))
    assert len(broker.sent(wire.Cancel)) == 1


def test_pause_keeps_back_what_was_ready_and_resume_brings_it(broker: Broker) -> None:
    log = broker.create("orders")
    log.append(*[b"%d" % n for n in range(4)])
    script = Script(broker)
    loop = script.loop()
    assert next(loop).payload == b"0"
    script.run(script.core.pause(*NAME))
    assert script.poll(1) == []
    script.run(script.core.resume(*NAME))
    assert script.poll() == [b"1", b"2", b"3"]


def test_partitions_that_it_does_not_read_are_refused(broker: Broker) -> None:
    filled(broker)
    script = Script(broker)
    with pytest.raises(UnknownPartition, match="orders-7"):
        script.run(script.core.pause("orders", 7))


def test_lag_counts_messages(broker: Broker) -> None:
    filled(broker)
    script = Script(broker, group="g")
    lag = script.run(script.core.lag())
    assert (lag, lag.partitions) == (5, {NAME: 5})
    script.poll(count=2)
    assert script.run(script.core.lag()) == 3
    script.close(processed=True)
    again = Script(broker, group="g")
    assert again.run(again.core.lag()) == 3, "the ordinal of a saved offset is asked for"


def test_position_and_committed(broker: Broker) -> None:
    log = filled(broker)
    script = Script(broker, group="g")
    assert script.run(script.core.committed(*NAME)) is None
    script.poll(count=2)
    assert script.run(script.core.position(*NAME)) == offset_of(log, 2)
    script.commit()
    assert script.run(script.core.committed(*NAME)) == offset_of(log, 2)
