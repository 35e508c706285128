"""Ranges out of a data folder: the same as over the wire, beside a broker that writes, rolls and takes away."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.clock import SystemClock
from journal.disk import File, RealDisk
from journal.errors import Locked
from journal.filenames import join, log_checkpoint_name, partition_folder, segment_name
from journal.log.checkpoint import LogCheckpointFile
from journal.log.log import Log
from journal.record.format import make_log_id
from journal.testing import SimulatedDisk
from tests.scale import scaled, seeded
from tests.spark.stored import SEGMENT_BYTES, fill, joined, small_broker, wanted
from tfmq.admin import Admin
from tfmq.errors import (
    BadRequest,
    Damaged,
    LogTruncated,
    NotARecord,
    NotSupported,
    OffsetOutOfRange,
    UnknownPartition,
    UnknownTopic,
)
from tfmq.producer import Producer
from tfmq.spark.file_reader import FolderLogReader, FolderTopics, absolute_path
from tfmq.spark.log_reader import SourceAddress, open_log_reader
from tfmq.spark.ranges import OffsetRange, PartitionLog
from tfmq.spark.wire_reader import BrokerLogReader
from tfmq.testing.broker import SimulatedBroker
from tools.rigs.live_server import LiveServer

DATA = "/data"
FOLDER = "/data/orders-0"
TOTAL_BYTES = 6 * SEGMENT_BYTES


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    with small_broker() as made:
        yield made


@pytest.fixture(scope="module")
def filled() -> Iterator[SimulatedBroker]:
    """A broker with a topic of several segments, which no test changes."""
    with small_broker() as made:
        made.admin().create_topic("orders", 1)
        fill(made, "orders", seeded("folder logs"), TOTAL_BYTES)
        made.clock.advance(5)
        yield made


@pytest.fixture
def both(filled: SimulatedBroker) -> Iterator[tuple[FolderLogReader, BrokerLogReader]]:
    with FolderLogReader(DATA, filled.disk) as folder, BrokerLogReader(filled.servers) as wire:
        yield folder, wire


def whole(logs: Any, topic: str = "orders") -> OffsetRange:
    log = logs.partitions(topic)[0]
    bounds = logs.bounds(log)
    return OffsetRange(log, bounds.first, bounds.end)


def test_folder_and_wire_know_the_same_of_a_log(both: tuple[FolderLogReader, BrokerLogReader]) -> None:
    folder, wire = both
    assert folder.broker_id() == wire.broker_id() != ""
    assert folder.topics() == wire.topics() == ["orders"]
    log = folder.partitions("orders")[0]
    assert folder.partitions("orders") == wire.partitions("orders")
    assert folder.all_bounds([log]) == wire.all_bounds([log])
    assert folder.bounds(log).end > 4 * SEGMENT_BYTES


@given(data=st.data())
def test_folder_and_wire_give_the_same_bytes_of_any_range(data: st.DataObject, filled: SimulatedBroker) -> None:
    with FolderLogReader(DATA, filled.disk) as folder, BrokerLogReader(filled.servers) as wire:
        every = whole(folder)
        ends = [data.draw(st.integers(0, every.end)) for _ in range(2)]
        start, end = sorted(wire.next_message_offset(every.log, place) for place in ends)
        part = OffsetRange(every.log, start, end)
        size = data.draw(st.sampled_from([1, 5_000, 65_536, 200_000, 4 << 20]) if end - start < 40_000 else
                         st.sampled_from([65_536, 200_000, 4 << 20]))  # fmt: skip
        found, expected = list(folder.read_blocks(part, size)), list(wire.read_blocks(part, size))
        assert joined(found) == joined(expected)
        assert all(type(chunk.offset) is int for chunk in found)
        assert wanted(part, found) == wanted(part, expected)


@given(data=st.data())
def test_folder_and_wire_find_the_same_places(data: st.DataObject, filled: SimulatedBroker) -> None:
    with FolderLogReader(DATA, filled.disk) as folder, BrokerLogReader(filled.servers) as wire:
        every = whole(folder)
        log = every.log
        offset = data.draw(st.integers(0, every.end + 10))
        assert folder.next_message_offset(log, offset) == wire.next_message_offset(log, offset)
        assert folder.ordinal_at_or_after(log, offset) == wire.ordinal_at_or_after(log, offset)
        ordinal = data.draw(st.integers(0, wire.bounds(log).end_ordinal + 2))
        assert folder.offset_of_ordinal(log, ordinal) == wire.offset_of_ordinal(log, ordinal)
        time = filled.clock.wall_ms() - data.draw(st.integers(0, 60_000))
        assert folder.offset_at_time(log, time) == wire.offset_at_time(log, time)
        size = data.draw(st.integers(10_000, every.end))
        assert folder.split(every, size) == wire.split(every, size)


# What is not there


def test_what_retention_took_is_reported_also_in_the_middle(broker: SimulatedBroker) -> None:
    fill(broker, "orders", random.Random(1), 3 * SEGMENT_BYTES)
    broker.clock.advance(5)
    with FolderLogReader(DATA, broker.disk) as logs:
        old = whole(logs)
        reading = logs.read_blocks(old, 100_000)
        next(reading)
        first = broker.admin().truncate_before("orders", 0, 2 * SEGMENT_BYTES)
        with pytest.raises(OffsetOutOfRange, match=rf"orders-0: offsets \d+ to {first} were removed") as caught:
            joined(reading)
        assert caught.value.first == first and caught.value.end == old.end
        assert (
            logs.bounds(old.log).first
            == logs.next_message_offset(old.log, 0)
            == logs.offset_of_ordinal(old.log, 0)
            == first
        )
        rest = OffsetRange(old.log, first, old.end)
        assert joined(logs.read_blocks(rest))[0] == first


def test_an_archived_segment_is_gone_as_a_removed_one_is() -> None:
    with small_broker(**{"retention.action": "archive", "retention.seconds": 3600}) as broker:
        fill(broker, "orders", random.Random(1), 3 * SEGMENT_BYTES)
        broker.clock.advance(5)
        with FolderLogReader(DATA, broker.disk) as logs:
            old = whole(logs)
            reading = logs.read_blocks(old, 100_000)
            next(reading)
            broker.clock.advance(3 * 3600)
            assert broker.disk.list("/data/archive/orders-0")
            with pytest.raises(OffsetOutOfRange, match="were removed by retention"):
                joined(reading)


def test_the_end_is_what_the_mark_says_and_grows_within_a_second(broker: SimulatedBroker) -> None:
    producer = broker.producer()
    producer.send("orders", "one").result()
    with FolderLogReader(DATA, broker.disk) as logs:
        log = logs.partitions("orders")[0]
        broker.clock.advance(1.5)
        every = whole(logs)
        assert every.end > 0
        last = [producer.send("orders", str(number)).result().offset for number in range(5)][-1]
        with pytest.raises(OffsetOutOfRange, match=f"orders-0: offset {every.end + 100} is after the durable end"):
            joined(logs.read_blocks(OffsetRange(log, 0, every.end + 100)))
        broker.clock.advance(1.5)
        assert logs.offset_of_ordinal(log, 5) == last, "each question has a look of its own"
        assert logs.bounds(log).end_ordinal == 6
        assert len(wanted(whole(logs), logs.read_blocks(whole(logs)))) == 6


def test_a_topic_deleted_and_one_made_anew(broker: SimulatedBroker) -> None:
    broker.producer().send("orders", "one").result()
    broker.clock.advance(2)
    with FolderLogReader(DATA, broker.disk) as logs:
        old = whole(logs)
        broker.admin().delete_topic("orders")
        for asked in (lambda: logs.bounds(old.log), lambda: list(logs.read_blocks(old))):
            with pytest.raises(UnknownTopic, match="does not exist any more"):
                asked()
        broker.admin().create_topic("orders", 1)
        for asked in (lambda: logs.bounds(old.log), lambda: list(logs.read_blocks(old))):
            with pytest.raises(UnknownTopic, match=r"deleted and created again.*new checkpoint"):
                asked()
        assert whole(logs).log.incarnation > old.log.incarnation


def test_a_cut_below_what_was_read_is_noticed(broker: SimulatedBroker) -> None:
    fill(broker, "orders", random.Random(2), 200_000)
    broker.clock.advance(2)
    with FolderLogReader(DATA, broker.disk) as logs:
        every = whole(logs)
        reading = logs.read_blocks(every, 70_000)
        next(reading)
        mark = LogCheckpointFile(broker.disk, FOLDER, every.log.log_id)
        marks = mark.read()
        assert marks is not None
        mark.write_durably(marks._replace(epoch=marks.epoch + 1, starts=((marks.epoch + 1, 5),)))
        with pytest.raises(LogTruncated, match="orders-0: its end was truncated to offset 5"):
            joined(reading)


def test_an_offset_that_is_no_record_is_reported(both: tuple[FolderLogReader, BrokerLogReader]) -> None:
    for logs in both:
        log = logs.partitions("orders")[0]
        with pytest.raises(NotARecord, match="orders-0: no record starts at offset 7"):
            joined(logs.read_blocks(OffsetRange(log, 7, 5_000)))


def test_damage_and_a_missing_file_are_named(broker: SimulatedBroker) -> None:
    fill(broker, "orders", random.Random(3), 4 * SEGMENT_BYTES)
    broker.clock.advance(2)
    with FolderLogReader(DATA, broker.disk) as logs:
        every = whole(logs)
        assert len(logs.split(every, 100_000)) > 5
        base = sorted(name for name in broker.disk.list(FOLDER) if name.endswith(".zxQueue"))[1]
        broker.disk.damage(join(FOLDER, base), 0, b"")  # on purpose: tests/sound_folders.py lets it pass
        broker.disk.unlink(join(FOLDER, base))
    with FolderLogReader(DATA, broker.disk) as logs:
        with pytest.raises(Damaged, match=r"orders-0: offsets \d+ to \d+ are damaged.*missing") as caught:
            joined(logs.read_blocks(every))
        assert int(base[:32]) in range(caught.value.first, caught.value.next + 1)
        pieces = logs.split(every, 100_000)
        assert (pieces[0].start, pieces[-1].end) == (0, every.end), "a split goes around what it cannot read"


def test_a_mark_that_does_not_hold_and_a_newer_one(broker: SimulatedBroker) -> None:
    broker.producer().send("orders", "one").result()
    path = join(FOLDER, log_checkpoint_name())
    with FolderLogReader(DATA, broker.disk) as logs:
        log = logs.partitions("orders")[0]
        good = broker.disk.read_file(path)
        broker.disk.write_file(path, b"x" * len(good))
        with pytest.raises(Damaged, match=r"orders-0: .*neither of its two slots is valid"):
            logs.bounds(log)
        with pytest.raises(Damaged, match="neither of its two slots is valid"):
            logs.partitions("orders")
        broker.disk.write_file(path, good)
        assert logs.bounds(log).first == 0


def test_what_may_not_be_read_is_reported(tmp_path: Path) -> None:
    class Guarded(RealDisk):
        def open_read(self, path: str) -> Any:
            if path.endswith(log_checkpoint_name()):
                raise PermissionError(13, "Permission denied", path)
            return super().open_read(path)

    (tmp_path / "meta").mkdir()
    (tmp_path / "orders-0").mkdir()
    (tmp_path / "orders-0" / log_checkpoint_name()).touch()
    with pytest.raises(BadRequest, match=r"log.mark cannot be read by this process: Permission denied.*right"):
        FolderLogReader(str(tmp_path), Guarded()).partitions("orders")
    with pytest.raises(BadRequest, match="There is no folder"):
        open_log_reader(SourceAddress(path=str(tmp_path / "none")))


def test_a_disk_that_fails_is_reported(broker: SimulatedBroker) -> None:
    broker.producer().send("orders", "one").result()
    broker.clock.advance(2)
    with FolderLogReader(DATA, broker.disk) as logs:
        every = whole(logs)
        logs.close()
        broker.disk.faults.fail("read", path=segment_name(0))
        with pytest.raises(Damaged, match="orders-0"):
            joined(logs.read_blocks(every))


# What it costs


class CountingDisk(RealDisk):
    """Counts what is opened, listed, and read of data and of indexes."""

    def __init__(self, disk: Any) -> None:
        super().__init__()
        self.disk, self.opened, self.read_bytes, self.looks = disk, 0, 0, 0

    def open_read(self, path: str) -> Any:
        self.opened += 1
        return CountingFile(self, self.disk.open_read(path))

    def exists(self, path: str) -> bool:
        return bool(self.disk.exists(path))

    def is_folder(self, path: str) -> bool:
        return bool(self.disk.is_folder(path))

    def list(self, path: str) -> list[str]:
        self.looks += 1
        return list(self.disk.list(path))


class CountingFile:
    def __init__(self, counts: CountingDisk, file: File) -> None:
        self.counts, self.file, self.path = counts, file, file.path

    def size(self) -> int:
        return self.file.size()

    def pread(self, size: int, position: int) -> bytes:
        data = self.file.pread(size, position)
        self.counts.read_bytes += len(data)
        return data

    def close(self) -> None:
        self.file.close()


def cost(disk: Any, part: OffsetRange, ms: int) -> tuple[int, int]:
    """Files opened and bytes read by a driver and a task that never looked before, for one piece."""
    counts = CountingDisk(disk)
    with FolderLogReader(DATA, counts) as logs:
        log = logs.partitions("orders")[0]
        logs.bounds(log), logs.offset_at_time(log, ms), logs.next_message_offset(log, part.start + 1)
        logs.split(part, 50_000)
    with FolderLogReader(DATA, counts) as logs:
        size = len(joined(logs.read_blocks(part))[1])
    return counts.opened, counts.read_bytes - size


@pytest.mark.long
def test_the_cost_of_a_piece_is_the_same_however_long_the_topic_is() -> None:
    with small_broker() as broker:
        costs = []
        for batches in (10, 20, 70):
            for _ in range(batches):
                broker.producer().send_many("orders", [bytes(1_000)] * 100).result()
                broker.clock.advance(0.1)
            broker.clock.advance(2)
            with FolderLogReader(DATA, broker.disk) as logs:
                every = whole(logs)
                middle = logs.next_message_offset(every.log, every.end // 2)
                part = OffsetRange(every.log, middle, logs.next_message_offset(every.log, middle + 150_000))
            costs.append(cost(broker.disk, part, broker.clock.wall_ms() - 1_000))
        (few_files, few_bytes), _, (many_files, many_bytes) = costs
        assert many_files <= few_files + 12, "some more segments are asked in a search by time"
        assert many_bytes <= few_bytes + 600_000, costs


# Beside a real broker


@pytest.mark.long
def test_beside_a_broker_that_writes_rolls_removes_and_dies(tmp_path: Path) -> None:
    """Every message that is given is one that was sent, in order; and what the broker has at the end is all there."""
    server = LiveServer(tmp_path / "data", "log.segment_bytes=262144")
    server.start()
    with Producer(server.address) as producer, FolderLogReader(str(tmp_path / "data")) as logs:
        producer.send("orders", "first", partition=0).result()
        log = logs.partitions("orders")[0]
        place = lost = kills = number = 0
        for turn in range(scaled(300) + 12):
            texts = [b"%1000d" % n for n in range(number, number + 150)]
            producer.send_many("orders", texts).result()
            number += len(texts)
            if turn % 6 == 3:
                server.kill()
                server.start()
                kills += 1
            if turn % 4 != 2:
                continue
            bounds = logs.bounds(log)
            with Admin(server.address) as admin:
                admin.truncate_before("orders", 0, max(0, bounds.end - SEGMENT_BYTES))
            try:
                for chunk in logs.read_blocks(OffsetRange(log, place, bounds.end), 200_000):
                    place = chunk.offset + len(chunk.data)
            except OffsetOutOfRange as error:
                assert error.first > place
                place, lost = error.first, lost + 1
        server.stop()
        assert kills and lost
        bounds = logs.bounds(log)
        first = logs.next_message_offset(log, bounds.first)
        end = OffsetRange(log, first, bounds.end)
        assert bounds.end_ordinal - bounds.first_ordinal == len(wanted(end, logs.read_blocks(end))) > 100
    assert not (tmp_path / "data" / "orders-0" / segment_name(0)).exists()
    server.start()
    with BrokerLogReader(server.address) as wire, FolderLogReader(str(tmp_path / "data")) as logs:
        assert joined(logs.read_blocks(end)) == joined(wire.read_blocks(end))
        assert PartitionLog("orders", 0, *log[2:]) == wire.partitions("orders")[0]
    server.stop()


@pytest.mark.long
def test_the_lock_is_never_taken(tmp_path: Path) -> None:
    """A broker starts and stops on a folder that is being read."""
    server = LiveServer(tmp_path / "data")
    server.start()
    with Producer(server.address) as producer:
        producer.send_many("orders", ["x"] * 5_000).result()
    server.stop()
    before = set(os.listdir(tmp_path / "data"))
    with FolderLogReader(str(tmp_path / "data")) as logs:
        every = whole(logs)
        reading = logs.read_blocks(every, 100_000)
        next(reading)
        assert set(os.listdir(tmp_path / "data")) == before
        server.start()
        assert len(joined(reading)[1]) > 0
        with pytest.raises(Locked):
            RealDisk().lock(str(tmp_path / "data" / "lock"))
        server.stop()


# What is a data folder, and what lies in it.


@pytest.fixture
def disk() -> SimulatedDisk:
    """A data folder with two topics."""
    made = SimulatedDisk()
    for folder in (DATA, "/data/meta", "/data/transactions", "/data/archive"):
        made.make_folder(folder)
    write(made, "/data/meta/version", json.dumps({"format": 1, "node": "x"}))
    for topic, incarnation, count in (("orders", 20, 3), ("a-b", 21, 1)):
        for number in range(count):
            add(made, topic, incarnation, number)
    return made


def write(disk: SimulatedDisk, path: str, text: str) -> None:
    if not disk.exists(path):
        disk.create(path).close()
    disk.write_file(path, text.encode())


def add(disk: SimulatedDisk, topic: str, incarnation: int, number: int) -> None:
    folder = join(DATA, partition_folder(topic, number))
    disk.make_folder(folder)
    Log.open(disk, folder, log_id=make_log_id(incarnation, number), clock=SystemClock()).close()


def drop(disk: SimulatedDisk, topic: str, number: int) -> None:
    disk.rename(join(DATA, partition_folder(topic, number)), f"/data/deleted~{number}-9")


def test_topics_and_their_partitions(disk: SimulatedDisk) -> None:
    found = FolderTopics(disk, DATA)
    assert found.names() == ["a-b", "orders"]
    logs = found.partitions("orders")
    assert [(log.partition, log.incarnation, log.log_id) for log in logs] == [(n, 20, 20 << 24 | n) for n in range(3)]
    assert found.partition_path("orders", 2) == "/data/orders-2"
    with pytest.raises(UnknownTopic, match="no topic bills in the folder /data; it has a-b, orders"):
        found.partitions("bills")
    add(disk, "orders", 20, 3)
    assert len(found.partitions("orders")) == 4, "it is asked afresh each time"


def test_a_partition_that_is_just_being_made_is_not_there_yet(disk: SimulatedDisk) -> None:
    disk.make_folder("/data/orders-3")
    assert len(FolderTopics(disk, DATA).partitions("orders")) == 3


def test_what_is_missing_is_named(disk: SimulatedDisk) -> None:
    found = FolderTopics(disk, DATA)
    drop(disk, "orders", 1)
    with pytest.raises(UnknownPartition, match="/data does not have all of orders: partition 1 missing"):
        found.partitions("orders")
    drop(disk, "orders", 0)
    with pytest.raises(UnknownPartition, match="partitions 0, 1 missing"):
        found.partitions("orders")
    drop(disk, "orders", 2)
    with pytest.raises(UnknownTopic):
        found.partitions("orders")


def test_partitions_of_two_topics_are_no_topic(disk: SimulatedDisk) -> None:
    drop(disk, "orders", 2)
    add(disk, "orders", 33, 2)
    with pytest.raises(UnknownPartition, match="different topics"):
        FolderTopics(disk, DATA).partitions("orders")


def test_what_is_no_data_folder_is_refused_in_words(disk: SimulatedDisk) -> None:
    disk.make_folder("/other")
    write(disk, "/other/file", "x")
    for path, words in (
        ("/none", "There is no folder /none on this machine.*servers"),
        ("/other", "/other is no data folder"),
        ("/other/file", "/other/file is a file"),
        ("/data/orders-0", "is the folder of one partition: name the data folder above it, /data,"),
        ("/data/archive", "is no data folder"),
    ):
        with pytest.raises(BadRequest, match=words):
            FolderTopics(disk, path)


def test_an_empty_broker_and_lone_partitions_are_data_folders(disk: SimulatedDisk) -> None:
    disk.make_folder("/copy")
    disk.make_folder("/copy/orders-0")
    write(disk, join("/copy/orders-0", log_checkpoint_name()), "")
    assert FolderTopics(disk, "/copy").names() == ["orders"]
    disk.make_folder("/fresh")
    disk.make_folder("/fresh/meta")
    assert FolderTopics(disk, "/fresh").names() == []


def test_a_newer_format_is_refused_and_half_a_one_waited_for(disk: SimulatedDisk) -> None:
    write(disk, "/data/meta/version", "{")
    FolderTopics(disk, DATA)
    write(disk, "/data/meta/version", json.dumps({"format": 2, "node": "x"}))
    with pytest.raises(NotSupported, match="has format 2, this tfmq reads up to 1"):
        FolderTopics(disk, DATA)


def test_the_broker_that_owns_it_is_named(disk: SimulatedDisk) -> None:
    assert FolderTopics(disk, DATA).broker_id == "x"
    disk.unlink("/data/meta/version")
    assert FolderTopics(disk, DATA).broker_id == ""


def test_a_path_is_what_people_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert absolute_path("~/data/") == "/home/me/data"
    assert (
        absolute_path("file:///var/tfmq")
        == absolute_path("file:/var/tfmq")
        == absolute_path("/var/x/../tfmq")
        == "/var/tfmq"
    )
