"""What is a data folder, and what lies in it."""

from __future__ import annotations

import json

import pytest

from journal.clock import SystemClock
from journal.filenames import join, log_checkpoint_name, partition_folder
from journal.log.log import Log
from journal.record.format import make_log_id
from journal.testing import SimulatedDisk
from tfmq.errors import BadRequest, NotSupported, UnknownPartition, UnknownTopic
from tfmq.spark.file_reader import FolderTopics, absolute_path

DATA = "/data"


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
    assert [(log.partition, log.incarnation, log.log_id) for log in logs] == [
        (n, 20, 20 << 24 | n) for n in range(3)
    ]
    assert found.partition_path(logs[2]) == "/data/orders-2"
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
