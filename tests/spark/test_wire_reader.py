"""Ranges over the wire: what is there, where it is, its bytes; what is reported when it is not; a broker that dies."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.replicated_broker import ReplicatedBroker
from tests.client.rig import Rig
from tests.scale import scaled, seeded
from tests.spark.stored import SEGMENT_BYTES, fill, joined, small_broker, wanted
from tfmq.embedded import local_server
from tfmq.errors import Busy, ConnectionFailed, LogTruncated, OffsetOutOfRange, StorageStopped, TimedOut, UnknownTopic
from tfmq.producer import Producer
from tfmq.protocol.commands import Locate, Ping
from tfmq.spark.ranges import OffsetRange, PartitionLog
from tfmq.spark.wire_reader import BrokerLogReader, send_requests
from tfmq.testing.broker import SimulatedBroker
from tools.rigs.live_server import LiveServer

TOTAL_BYTES = 5 * SEGMENT_BYTES


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    with small_broker() as made:
        yield made


@pytest.fixture(scope="module")
def filled() -> Iterator[SimulatedBroker]:
    """A broker with a topic of several segments, which no test changes."""
    with small_broker() as made:
        made.admin().create_topic("orders", 1)
        fill(made, "orders", seeded("wire logs"), TOTAL_BYTES)
        yield made


@pytest.fixture
def logs(filled: SimulatedBroker) -> Iterator[BrokerLogReader]:
    with BrokerLogReader(filled.servers) as made:
        yield made


def whole(logs: BrokerLogReader, topic: str = "orders") -> OffsetRange:
    log = logs.partitions(topic)[0]
    bounds = logs.bounds(log)
    return OffsetRange(log, bounds.first, bounds.end)


def recorded(logs: BrokerLogReader) -> list[Any]:
    """Every request from now on."""
    asked: list[Any] = []
    call = logs._link.send_request

    def recording(request: Any, *rest: Any, **options: Any) -> Any:
        asked.append(request)
        return call(request, *rest, **options)

    logs._link.send_request = recording  # type: ignore[method-assign]
    return asked


# What is there


def test_topics_and_partitions_as_they_are_now(broker: SimulatedBroker) -> None:
    admin = broker.admin()
    admin.create_topic("b", 2)
    admin.create_topic("a", 1)
    with BrokerLogReader(broker.servers) as logs:
        assert logs.topics() == ["a", "b"]
        assert [log.partition for log in logs.partitions("b")] == [0, 1]
        admin.grow_topic("b", 3)
        assert [log.name for log in logs.partitions("b")] == ["b-0", "b-1", "b-2"]
        log = logs.partitions("b")[2]
        assert log.log_id == log.incarnation << 24 | 2
        with pytest.raises(UnknownTopic, match="There is no topic c"):
            logs.partitions("c")


def test_the_end_is_the_durable_offset_and_ordinals_are_those_of_the_places(broker: SimulatedBroker) -> None:
    producer = broker.producer(acks="written")
    producer.send("orders", "one").result()
    with BrokerLogReader(broker.servers) as logs:
        log = logs.partitions("orders")[0]
        assert logs.offset_at_time(log, 0) == logs.offset_of_ordinal(log, 1) == logs.next_message_offset(log, 99) == 0
        assert logs.ordinal_at_or_after(log, 99) == 0, "written, and not on the disk for sure"
        broker.producer().send("orders", "two").result()
        assert logs.bounds(log)[2:] == (0, 2)
        assert logs.all_bounds([log, log]) == [logs.bounds(log)] * 2
        assert logs.all_bounds([]) == []


def test_who_asks_for_the_bounds_has_what_is_written_fsynced(broker: SimulatedBroker) -> None:
    producer = broker.producer(acks="written")
    for topic in ("orders", "bills"):
        broker.admin().create_topic(topic, 1)
    with BrokerLogReader(broker.servers) as logs:
        several = [logs.partitions(topic)[0] for topic in ("orders", "bills")]
        assert [bounds.end for bounds in logs.all_bounds(several)] == [0, 0]
        producer.send("bills", "one").result()
        before = broker.clock.now
        found = logs.all_bounds(several)
        assert [bounds.end_ordinal for bounds in found] == [0, 1] and found[1].end > 0
        assert (broker.clock.now - before).total_seconds() < 0.1
        asked = recorded(logs)
        logs.all_bounds(several)
        assert [type(request) for request in asked] == [Locate] * 4, "at rest nothing else is asked"


def test_a_disk_that_fsyncs_nothing_delays_no_caller(broker: SimulatedBroker) -> None:
    broker.producer().send("orders", "one").result()
    with BrokerLogReader(broker.servers) as logs:
        every = whole(logs)
        broker.disk.faults.fail("force", times=None)
        broker.disk.faults.fail("sync", times=None)
        broker.disk.faults.fail("sync_file", times=None)
        broker.producer(acks="written").send("orders", "two").result()
        before = broker.clock.now
        assert logs.bounds(every.log).end == every.end
        assert (broker.clock.now - before).total_seconds() <= 1.0
        assert joined(logs.read_blocks(every))[0] == 0


def test_places_by_time_number_and_offset(broker: SimulatedBroker) -> None:
    producer, places, times = broker.producer(), [], []
    for number in range(20):
        broker.clock.advance(1.5)
        times.append(broker.clock.wall_ms())
        places.append(producer.send("orders", str(number), partition=0).result().offset)
    with BrokerLogReader(broker.servers) as logs:
        log = logs.partitions("orders")[0]
        bounds = logs.bounds(log)
        for number, (place, time) in enumerate(zip(places, times, strict=True)):
            assert logs.offset_at_time(log, time) == logs.offset_of_ordinal(log, number) == place
            assert logs.offset_at_time(log, time - 1499) == place
            assert logs.next_message_offset(log, place) == place
            assert logs.ordinal_at_or_after(log, place) == number
        assert logs.offset_at_time(log, times[-1] + 1) == logs.offset_of_ordinal(log, 20) == bounds.end
        assert logs.next_message_offset(log, bounds.end + 5) == bounds.end
        assert logs.ordinal_at_or_after(log, bounds.end) == logs.ordinal_at_or_after(log, bounds.end + 9) == 20
        assert logs.offset_at_time(log, -5) == logs.offset_of_ordinal(log, -5) == 0


def test_any_offset_leads_to_the_next_message(logs: BrokerLogReader) -> None:
    every = whole(logs)
    starts = wanted(every, logs.read_blocks(every))
    generator = seeded("offsets")
    for _ in range(scaled(300) + 10):
        offset = generator.randrange(every.end)
        found = logs.next_message_offset(every.log, offset)
        following = min((start for start in starts if start >= offset), default=every.end)
        assert found == following
        number = sum(start < offset for start in starts)
        assert logs.ordinal_at_or_after(every.log, offset) == number


# Ranges


def test_chunks_follow_each_other_and_have_the_range(logs: BrokerLogReader) -> None:
    every = whole(logs)
    start, data = joined(logs.read_blocks(every))
    assert (start, len(data)) == (0, every.end)
    sizes = [len(chunk.data) for chunk in logs.read_blocks(every, 100_000)]
    assert sum(sizes) == every.end and max(sizes) <= 100_000
    assert joined(logs.read_blocks(every, 100_000)) == (0, data)
    assert list(logs.read_blocks(OffsetRange(every.log, 5, 5))) == []


def test_every_record_is_in_exactly_one_piece(logs: BrokerLogReader) -> None:
    every = whole(logs)
    starts = wanted(every, logs.read_blocks(every))
    for size in (every.end, 300_000, 100_000, 5_000):
        found = logs.split(every, size)
        assert [start for piece in found for start in wanted(piece, logs.read_blocks(piece))] == starts
        assert (found[0].start, found[-1].end) == (0, every.end)
        even = every.end / len(found)
        assert max(piece.end - piece.start for piece in found) <= max(even, size) + 70_200, "a record more"
    assert logs.split(OffsetRange(every.log, 9, 9), 5) == []


def test_a_split_asks_once_a_cut_however_much_there_is(logs: BrokerLogReader) -> None:
    every = whole(logs)
    asked = recorded(logs)
    assert len(logs.split(every, every.end // 10 + 1)) == 10
    assert [type(request) for request in asked] == [Locate] * 9


def test_the_next_chunk_is_asked_for_before_one_is_handed_out_and_no_more(logs: BrokerLogReader) -> None:
    reading = logs.read_blocks(whole(logs), 65_536)
    asked = recorded(logs)
    for number in range(5):
        next(reading)
        assert len(asked) == number + 2


def test_a_reader_that_ends_early_leaves_nothing_under_way(logs: BrokerLogReader) -> None:
    reading = logs.read_blocks(whole(logs), 65_536)
    next(reading)
    assert logs._link.has_pending_requests
    reading.close()  # type: ignore[attr-defined]
    assert not logs._link.has_pending_requests


# What is not there


def test_what_retention_took_is_reported(broker: SimulatedBroker) -> None:
    fill(broker, "orders", random.Random(1), 3 * SEGMENT_BYTES)
    with BrokerLogReader(broker.servers) as logs:
        old = whole(logs)
        first = broker.admin().truncate_before("orders", 0, 2 * SEGMENT_BYTES)
        assert first > 0 and logs.bounds(old.log).first == first
        assert logs.next_message_offset(old.log, 0) == logs.offset_of_ordinal(old.log, 0) == first
        with pytest.raises(OffsetOutOfRange, match=rf"orders-0: offsets 0 to {first} were removed") as caught:
            joined(logs.read_blocks(old))
        assert (caught.value.first, caught.value.end) == (first, old.end)


def test_what_is_after_the_durable_offset_is_not_there(broker: SimulatedBroker) -> None:
    broker.producer().send("orders", "one").result()
    with BrokerLogReader(broker.servers) as logs:
        every = whole(logs)
        written = broker.producer(acks="written").send("orders", "two").result()
        assert written.offset == every.end
        reading = logs.read_blocks(OffsetRange(every.log, 0, every.end + 100))
        assert joined([next(reading)])[0] == 0
        with pytest.raises(OffsetOutOfRange, match=f"orders-0: offset {every.end + 100} is after the durable end"):
            next(reading)


def test_a_topic_made_anew_is_another_one(broker: SimulatedBroker) -> None:
    broker.producer().send("orders", "one").result()
    with BrokerLogReader(broker.servers) as logs:
        old = whole(logs)
        broker.admin().delete_topic("orders")
        for asked in (lambda: logs.bounds(old.log), lambda: list(logs.read_blocks(old))):
            with pytest.raises(UnknownTopic, match="does not exist any more"):
                asked()
        broker.admin().create_topic("orders", 1)
        for asked in (lambda: logs.bounds(old.log), lambda: list(logs.read_blocks(old))):
            with pytest.raises(UnknownTopic, match=r"deleted and created again.*new checkpoint"):
                asked()


def test_a_cut_below_what_was_read_is_noticed(broker: SimulatedBroker) -> None:
    broker.producer().send("orders", "one").result()
    with BrokerLogReader(broker.servers) as logs:
        every = whole(logs)
        broker.fail_next("fetch", LogTruncated(cut=7))
        with pytest.raises(LogTruncated, match="orders-0: its end was truncated to offset 7") as caught:
            joined(logs.read_blocks(every))
        assert caught.value.cut == 7


def test_the_epoch_of_an_answer_goes_with_the_next_question(logs: BrokerLogReader) -> None:
    every = whole(logs)
    asked = recorded(logs)
    joined(logs.read_blocks(every, 200_000))
    assert [request.epoch for request in asked] == [-1] + [1] * (len(asked) - 1)


def test_a_reader_waits_as_long_as_the_broker_asks_for() -> None:
    rig = Rig()
    requests = [(PartitionLog("orders", 1, 0, 0), Ping())]
    rig.broker.plan(Ping, Busy(wait_ms=3000), Busy(wait_ms=2000))
    begun = rig.time
    (call,) = rig.run(send_requests(rig.link, requests, 10.0))
    assert call.error is None and 5.0 <= rig.time - begun < 5.2


def test_a_busy_broker_is_asked_again_until_the_time_is_over(broker: SimulatedBroker) -> None:
    broker.producer().send("orders", "one").result()
    with BrokerLogReader(broker.servers, timeout=5.0) as logs:
        every = whole(logs)
        broker.fail_next("fetch", Busy, times=3)
        broker.fail_next("locate", Busy, times=3)
        assert logs.bounds(every.log).end == len(joined(logs.read_blocks(every))[1])
        broker.fail_next("fetch", Busy, times=100)
        before = broker.clock.now
        with pytest.raises(Busy):
            joined(logs.read_blocks(every))
        assert 2 < (broker.clock.now - before).total_seconds() <= 5


def test_a_stopped_partition_is_reported_as_it_is(broker: SimulatedBroker) -> None:
    broker.producer().send("orders", "one").result()
    with BrokerLogReader(broker.servers) as logs:
        every = whole(logs)
        broker.fail_next("fetch", StorageStopped("It could not be opened."))
        with pytest.raises(StorageStopped, match="could not be opened"):
            joined(logs.read_blocks(every))


# A broker that is away


def test_a_missing_server_is_reported_soon_and_of_a_range_after_the_timeout(broker: SimulatedBroker) -> None:
    broker.producer().send("orders", "one").result()
    with BrokerLogReader(broker.servers) as logs:
        every = whole(logs)
    broker.stop()
    with BrokerLogReader(broker.servers) as logs:
        before = broker.clock.now
        with pytest.raises(ConnectionFailed):
            logs.topics()
        assert (broker.clock.now - before).total_seconds() < 5
        before = broker.clock.now
        with pytest.raises(ConnectionFailed, match=r"orders-0 was read up to offset 0; given up after 30 s"):
            list(logs.read_blocks(every))
        assert 29 < (broker.clock.now - before).total_seconds() < 33
        broker.start()


def test_time_counts_only_while_a_caller_waits(filled: SimulatedBroker) -> None:
    with BrokerLogReader(filled.servers, timeout=5.0) as logs:
        reading = logs.read_blocks(whole(logs), 100_000)
        for chunk in reading:
            assert chunk.data
            filled.clock.advance(60)


@pytest.mark.long
def test_a_caller_that_is_away_for_longer_than_the_timeout_reads_on(tmp_path: Path) -> None:
    with local_server(tmp_path / "data") as servers:
        with Producer(servers) as producer:
            producer.send_many("orders", [bytes(1000)] * 300)
        with BrokerLogReader(servers, timeout=0.3) as logs:
            sizes = []
            for chunk in logs.read_blocks(whole(logs), 100_000):
                sizes.append(len(chunk.data))
                time.sleep(0.6)  # the reply to the next request arrives, and no thread reads it
    assert len(sizes) > 2 and sum(sizes) > 300_000


@pytest.mark.long
def test_a_broker_that_is_killed_and_comes_back_in_the_middle(tmp_path: Path) -> None:
    server = LiveServer(tmp_path / "data", "log.segment_bytes=1048576")
    server.start()
    with Producer(server.address) as producer:
        producer.send_many("orders", [b"%09d" % number * 11 for number in range(60_000)]).result()
    with BrokerLogReader(server.address, timeout=60.0) as logs:
        every = whole(logs)
        expected = joined(logs.read_blocks(every))
        found = []
        for number, chunk in enumerate(logs.read_blocks(every, 100_000)):
            found.append(chunk)
            if number in (3, 11):
                server.kill()
                server.start()
        assert joined(found) == expected
        server.kill()
        started = logs._driver.clock()
        with (
            BrokerLogReader(server.address, timeout=1.0) as hurried,
            pytest.raises((ConnectionFailed, TimedOut), match="given up after 1 s"),
        ):
            list(hurried.read_blocks(every))
        assert logs._driver.clock() - started < 30


def test_a_log_of_another_partition_is_not_there(logs: BrokerLogReader) -> None:
    log = logs.partitions("orders")[0]
    with pytest.raises(UnknownTopic, match="no number 5"):
        logs.bounds(PartitionLog("orders", 5, log.incarnation, log.log_id + 5))


def test_a_reader_with_all_servers_goes_on_with_another_primary() -> None:
    """It is the same broker for the query: its id, topics and offsets stay."""
    with ReplicatedBroker() as broker, Producer(broker.servers) as producer, BrokerLogReader(broker.servers) as logs:
        producer.send_many("orders", [b"1", b"2"]).result()
        range_, broker_id = whole(logs), logs.broker_id()
        before = joined(logs.read_blocks(range_))
        broker.fail_over(1)
        assert (whole(logs), logs.broker_id()) == (range_, broker_id)
        assert joined(logs.read_blocks(range_)) == before
        broker.fail_over(2)
        with BrokerLogReader(broker.servers) as task:
            assert joined(task.read_blocks(range_)) == before and task.broker_id() == broker_id
