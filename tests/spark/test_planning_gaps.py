"""Micro-batches of partitions in which messages were lost: fillers stand for them, or damage that was not repaired."""

from __future__ import annotations

import pytest

from journal import filenames
from journal.fsck.log_repair import repair
from tests.spark.stored import small_broker
from tfmq.spark.file_reader import FolderLogReader
from tfmq.spark.log_reader import LogReader
from tfmq.spark.planner import BatchLimit, Planner
from tfmq.spark.ranges import OffsetRange, message_offsets
from tfmq.spark.settings import parse_source_settings
from tfmq.spark.wire_reader import BrokerLogReader
from tfmq.testing.broker import SimulatedBroker

DATA = "/data"
FOLDER = "/data/orders-0"
LIMITS = (BatchLimit(rows=10), BatchLimit(bytes=500))


def damaged_broker() -> SimulatedBroker:
    """600 messages in blocks of 100, of which the third and the fourth are damaged."""
    broker = small_broker()
    broker.admin().create_topic("orders", 1)
    with broker.producer(linger_ms=1000) as producer:
        for _ in range(6):
            for _ in range(100):
                producer.send("orders", b"x" * 50, partition=0)
            producer.flush()
    broker.clock.advance(5)
    segment = next(name for name in broker.disk.list(FOLDER) if name.endswith(filenames.SEGMENT_SUFFIX))
    broker.disk.damage(filenames.join(FOLDER, segment), 25_700, b"\xff" * 8000)
    return broker


def read_through(logs: LogReader, limit: BatchLimit, **more: str) -> int:
    """How many micro-batches a query takes that reads what is there, and goes on where something is gone."""
    options = {"servers": "127.0.0.1:1", "subscribe": "orders", "failOnDataLoss": "false", **more}
    planner = Planner(parse_source_settings({**options, "startingOffsets": "earliest"}, streaming=True), logs)
    planner.freeze_end()
    place, batches = planner.initial_offsets(), 0
    while (end := planner.plan_end(place, limit)) != place:
        assert end["orders", 0].offset > place["orders", 0].offset
        assert planner.plan_micro_batch(place, end)
        place, batches = end, batches + 1
    assert place["orders", 0].offset == logs.bounds(logs.partitions("orders")[0]).end
    return batches


@pytest.mark.parametrize("limit", LIMITS, ids=["rows", "bytes"])
def test_more_lost_messages_than_a_micro_batch_may_have_do_not_hold_a_query_up(limit: BatchLimit) -> None:
    """They keep their numbers, and a limit counts numbers."""
    with damaged_broker() as broker:
        broker.stop()
        (mended,) = repair(broker.disk, FOLDER)
        assert mended.lost > 50
        broker.start()
        with FolderLogReader(DATA, broker.disk) as stored, BrokerLogReader(broker.servers) as wire:
            assert read_through(stored, limit) > 40
            assert read_through(wire, limit) > 40


@pytest.mark.parametrize("limit", LIMITS, ids=["rows", "bytes"])
def test_damage_does_not_hold_a_query_up_that_goes_on_after_it(limit: BatchLimit) -> None:
    with damaged_broker() as broker, FolderLogReader(DATA, broker.disk) as stored:
        assert read_through(stored, limit) >= 40


def test_tasks_of_so_many_messages_are_planned_also_from_damage_on() -> None:
    with damaged_broker() as broker, FolderLogReader(DATA, broker.disk) as stored:
        assert read_through(stored, BatchLimit(bytes=500), maxRecordsPerPartition="3") >= 40


def test_a_range_that_starts_inside_a_repaired_range_is_read_from_the_next_message_on() -> None:
    """A checkpoint of a query can have such an offset: a message started there before the repair."""
    with damaged_broker() as broker:
        broker.stop()
        repair(broker.disk, FOLDER)
        broker.start()
        inside = 28_000
        with FolderLogReader(DATA, broker.disk) as stored, BrokerLogReader(broker.servers) as wire:
            for logs in (stored, wire):
                log = logs.partitions("orders")[0]
                read = OffsetRange(log, inside, logs.bounds(log).end)
                found = [offset for run in logs.read_blocks(read) for offset in message_offsets(run)]
                following = [offset for offset in found if offset >= inside]
                assert following[0] == logs.next_message_offset(log, inside) > inside
                assert len(following) == 600 - logs.ordinal_at_or_after(log, inside)
