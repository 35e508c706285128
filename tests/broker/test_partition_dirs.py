"""Folders: made whole or not at all, another topic's never taken, deleted ones put aside before their files go."""

import pytest

from journal.errors import Corrupt, JournalError
from tests.broker.helpers import DATA, Broker
from tfmq.broker.catalog_state import TopicRow


def row(broker: Broker, target: int, partitions: int = 0, incarnation: int = 999) -> TopicRow:
    return TopicRow("bills", incarnation, partitions, target, "creating", {})


def test_a_making_that_fails_leaves_no_log_open() -> None:
    broker = Broker()
    open_before = set(broker.disk.open_files)
    broker.disk.faults.fail("create", nth=3, path="bills")
    with pytest.raises((OSError, JournalError)):
        broker.engine.broker.partition_dirs.create_missing(row(broker, 3))
    assert broker.disk.open_files == open_before


def test_an_interrupted_making_is_taken_up() -> None:
    broker = Broker()
    folders = broker.engine.broker.partition_dirs
    for opened in folders.create_missing(row(broker, 2)):
        opened.log.close()
    assert [opened.number for opened in folders.create_missing(row(broker, 3))] == [0, 1, 2]


def test_the_folder_of_another_incarnation_is_never_taken() -> None:
    broker = Broker()
    folders = broker.engine.broker.partition_dirs
    for opened in folders.create_missing(row(broker, 1)):
        opened.log.close()
    with pytest.raises(Corrupt):
        folders.create_missing(row(broker, 1, incarnation=1000))


def test_putting_aside_can_be_repeated_and_removal_goes_on_where_it_failed() -> None:
    broker = Broker()
    folders = broker.engine.broker.partition_dirs
    for opened in folders.create_missing(row(broker, 2)):
        opened.log.close()
    paths = folders.rename_deleted("bills", 999, 2)
    assert folders.rename_deleted("bills", 999, 2) == paths == folders.list_deleted()
    broker.disk.faults.fail("unlink", path="deleted")
    folders.delete_renamed(paths)
    assert len(folders.list_deleted()) == 1
    folders.delete_renamed(paths)
    assert folders.list_deleted() == []
    assert [name for name in broker.disk.list(DATA) if "bills" in name] == []


def test_strangers_are_named_and_the_broker_s_own_folders_are_none() -> None:
    broker = Broker()
    for name in ("meta-1", "bills-0", "notes", "archive"):
        broker.disk.make_folder(f"{DATA}/{name}")
    assert broker.engine.broker.partition_dirs.unknown_folders({}) == ["bills-0", "meta-1"]
