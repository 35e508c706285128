"""Offsets of transactions in the catalog: once, in order, joined, and none past one that was refused."""

import errno

import pytest

from journal.record.batch import Source
from journal.record.block_trailer import SOURCE_TRANSACTION
from tests.broker.helpers import Broker
from tfmq.apply_target import AppendResult, CommitOffsets, GroupPositions
from tfmq.broker.groups import offsets as module

JOURNAL = 5

Told = list[tuple[AppendResult | None, BaseException | None]]


@pytest.fixture
def broker() -> Broker:
    made = Broker()
    made.create()
    return made


def offsets(broker: Broker, high: int, offset: int, group: str = "billing", count: int = 1) -> CommitOffsets:
    places = [(broker.incarnation(), partition, offset, 0, 1) for partition in range(count)]
    return CommitOffsets([GroupPositions(group, 1, places)], Source(SOURCE_TRANSACTION, JOURNAL, high, 1))


def apply(broker: Broker, *effects: CommitOffsets) -> Told:
    reported: Told = []
    for each in effects:
        broker.engine.broker.apply_target.apply(each, lambda mark, error: reported.append((mark, error)))
    broker.engine.broker.end_turn()
    return reported


def test_offsets_of_a_transaction_are_saved_once(broker: Broker) -> None:
    catalog = broker.engine.broker.catalog
    apply(broker, offsets(broker, 10, 100))
    apply(broker, offsets(broker, 20, 300))
    before = catalog.log.count
    reported = apply(broker, offsets(broker, 10, 100), offsets(broker, 20, 300))
    assert [error for _, error in reported] == [None, None] and catalog.log.count == before
    assert broker.saved() == {("orders", 0): 300}
    assert broker.engine.broker.apply_target.last_applied(0, (SOURCE_TRANSACTION, JOURNAL)) == (20, 1)


def test_the_place_survives_with_the_offsets_and_an_older_entry_changes_nothing(broker: Broker) -> None:
    apply(broker, offsets(broker, 10, 100), offsets(broker, 20, 300))
    again = broker.restart()
    assert again.engine.broker.apply_target.last_applied(0, (SOURCE_TRANSACTION, JOURNAL)) == (20, 1)
    apply(again, offsets(again, 15, 200))
    assert again.saved() == {("orders", 0): 300}


def test_what_comes_in_a_turn_is_one_append_and_asks_for_no_fsync() -> None:
    broker = Broker(queued=True)
    broker.create()
    catalog, forcer = broker.engine.broker.catalog, broker.engine.broker.forcer
    broker.work()
    forces, end = forcer.forces, catalog.log.end_offset
    reported = apply(broker, *(offsets(broker, 10 + n, n, f"group{n}") for n in range(16)))
    assert [error for _, error in reported] == [None] * 16
    assert forcer.forces == forces and catalog.log.forced_offset == end < catalog.log.end_offset
    mark = reported[-1][0]
    assert mark is not None and mark.end == catalog.log.end_offset
    assert not broker.engine.broker.apply_target.is_durable(mark)
    done: list[BaseException | None] = []
    broker.engine.broker.apply_target.fsync_to(mark, done.append)
    broker.engine.broker.end_turn()
    broker.work()
    assert done == [None] and broker.engine.broker.apply_target.is_durable(mark)


def test_none_passes_one_that_was_refused(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OFFSETS_PER_CHANGE_MAX", 1)
    apply(broker, offsets(broker, 1, 5))
    broker.disk.faults.fail("write", error=errno.ENOSPC, path="meta")
    reported = apply(broker, offsets(broker, 10, 100), offsets(broker, 20, 300), offsets(broker, 30, 400))
    assert [getattr(error, "code", None) for _, error in reported] == ["disk_full"] * 3
    assert broker.saved() == {("orders", 0): 5}
    reported = apply(broker, offsets(broker, 10, 100), offsets(broker, 20, 300))
    assert [error for _, error in reported] == [None, None]
    assert broker.saved() == {("orders", 0): 300}


def test_a_change_takes_so_many_places_and_the_rest_follows(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OFFSETS_PER_CHANGE_MAX", 3)
    count = broker.engine.broker.catalog.log.count
    reported = apply(broker, *(offsets(broker, 10 + n, n, count=2) for n in range(4)))
    assert [error for _, error in reported] == [None] * 4
    assert broker.engine.broker.catalog.log.count == count + 4
    assert len({mark.end for mark, _ in reported if mark}) == 4


def test_offsets_of_a_topic_that_is_gone_are_left_out(broker: Broker) -> None:
    effect = offsets(broker, 10, 100)
    broker.delete()
    assert [error for _, error in apply(broker, effect)] == [None]
    broker.create()
    assert broker.saved() == {}


def test_a_stopped_catalog_refuses_and_says_so(broker: Broker) -> None:
    apply(broker, offsets(broker, 5, 100))
    broker.disk.faults.fail("write", path="meta")
    reported = apply(broker, offsets(broker, 10, 100))
    reported += apply(broker, offsets(broker, 20, 100))
    reported += apply(broker, offsets(broker, 5, 100))
    assert [getattr(error, "code", None) for _, error in reported] == ["storage_stopped"] * 3
    assert [getattr(error, "outcome", None) for _, error in reported] == ["unknown", "not done", "unknown"]
