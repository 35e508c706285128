"""The catalog's log: group commit, snapshots instead of old segments, errors to those who waited."""

from functools import partial

import pytest

from journal.errors import Corrupt
from tests.broker.helpers import DATA, Broker
from tfmq.broker import catalog as module
from tfmq.broker.catalog_state import GENERATION
from tfmq.protocol.commands import ReadOffsets

META = f"{DATA}/meta"


def submitted(broker: Broker, count: int) -> list[BaseException | str | None]:
    found: list[BaseException | str | None] = ["waiting"] * count

    def done(index: int, error: BaseException | None) -> None:
        found[index] = error

    for index in range(count):
        generation = broker.engine.broker.catalog.state.generation + 1 + index
        broker.engine.broker.catalog.submit(
            (GENERATION, f"group{index}", generation, "m"), partial(done, index)
        )
    return found


def test_entries_of_one_turn_are_one_append_and_one_force() -> None:
    broker = Broker(queued=True)
    broker.create()
    catalog = broker.engine.broker.catalog
    before, count = broker.engine.broker.forcer.forces, catalog.log.count
    found = submitted(broker, 50)
    broker.engine.end_turn()
    assert found == ["waiting"] * 50
    broker.work()
    assert found == [None] * 50
    assert catalog.log.count == count + 50
    assert broker.engine.broker.forcer.forces == before + 1


def test_old_segments_go_once_snapshots_hold_what_they_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 1 << 14)
    broker = Broker()
    broker.create()
    for _ in range(400):
        submitted(broker, 10)
        broker.engine.end_turn()
    segments = [name for name in broker.disk.list(META) if name.endswith(".catalog")]
    assert broker.engine.broker.catalog.log.first_offset > 0
    assert len(segments) <= module.SEGMENTS_KEPT + 2
    again = Broker(broker.disk.crash(keep="nothing"))
    register = again.engine.broker.catalog.state
    assert register.dump() == broker.engine.broker.catalog.state.dump()


def test_a_full_disk_is_an_error_and_it_goes_on_when_there_is_space() -> None:
    broker = Broker()
    broker.create()
    broker.disk.space_bytes = 1
    assert broker.join("first").code == "disk_full"
    assert broker.create("more").code == "disk_full"
    broker.disk.space_bytes = None
    assert broker.join("second").code == "ok"
    assert broker.create("more").code == "ok"


def test_a_failed_force_is_an_error_to_all_who_waited_and_the_catalog_stops() -> None:
    broker = Broker(queued=True)
    broker.create()
    broker.disk.faults.fail("force", path="meta")
    found = submitted(broker, 3)
    broker.engine.end_turn()
    broker.work()
    assert [getattr(error, "code", error) for error in found] == ["storage_stopped"] * 3
    assert [getattr(error, "outcome", error) for error in found] == ["unknown"] * 3
    (later,) = submitted(broker, 1)
    assert getattr(later, "outcome", later) == "not done"
    assert broker.produce(broker.lease(), 0).code in ("waiting", "ok")
    assert "fsync failed" in str(broker.engine.status_fields()["catalog"])


def test_too_many_entries_at_once_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENTRIES_MAX", 3)
    broker = Broker(queued=True)
    found = submitted(broker, 4)
    assert getattr(found[3], "code", "") == "busy"
    broker.engine.end_turn()
    broker.work()
    assert found[:3] == [None] * 3


def test_a_log_that_is_none_is_refused() -> None:
    broker = Broker()
    broker.stop()
    name = next(name for name in broker.disk.list(META) if name.endswith(".state"))
    broker.disk.damage(f"{META}/{name}", 0, bytes(60))
    try:
        again = Broker(broker.disk)
    except Corrupt:
        return
    assert again.engine.broker.catalog.state.dump() == broker.engine.broker.catalog.state.dump()


def test_what_need_not_be_forced_is_told_when_it_is_written() -> None:
    broker = Broker(queued=True)
    catalog = broker.engine.broker.catalog
    told: list[str] = []
    catalog.submit(
        (GENERATION, "one", 1, "m"), lambda error: told.append(f"written {error}"), wait_durable=False
    )
    catalog.submit((GENERATION, "two", 2, "m"), lambda error: told.append(f"forced {error}"))
    broker.engine.end_turn()
    assert told == ["written None"]
    broker.work()
    assert told == ["written None", "forced None"]


def test_what_a_full_disk_kept_from_being_made_durable_is_not_read_as_if_it_were() -> None:
    broker = Broker()
    broker.create()
    broker.join("first")
    broker.engine.broker.catalog.submit(
        (GENERATION, "billing", 2, "m"), lambda error: None, wait_durable=False
    )
    broker.engine.end_turn()
    disk = broker.disk.crash(keep="everything")
    disk.space_bytes = disk.used_bytes()
    again = Broker(disk, broker.clock)
    assert again.engine.broker.catalog.log.waits_for_space
    assert again.ask(ReadOffsets("billing", None)).code == "disk_full"
    disk.space_bytes = None
    assert again.join("other").code == "ok"
    assert again.ask(ReadOffsets("billing", None)).code == "ok"
