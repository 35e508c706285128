"""The catalog's log: group commit, snapshots instead of old segments, errors to those who waited."""

from __future__ import annotations

import random
from functools import partial

import pytest

from journal.errors import Corrupt
from journal.record.format import PRODUCER_ID_MAX
from journal.testing import Moment, crash_states
from tests.broker.helpers import DATA, Broker
from tests.scale import SEED, scaled
from tfmq.broker import catalog as module
from tfmq.broker.catalog import ID_RANGE_MAX, ID_RANGE_SECONDS, IDS_PER_SECOND
from tfmq.broker.catalog_state import GENERATION
from tfmq.protocol.commands import ReadOffsets

META = f"{DATA}/meta"


def submitted(broker: Broker, count: int) -> list[BaseException | str | None]:
    found: list[BaseException | str | None] = ["waiting"] * count

    def done(index: int, error: BaseException | None) -> None:
        found[index] = error

    for index in range(count):
        generation = broker.engine.broker.catalog.state.generation + 1 + index
        broker.engine.broker.catalog.submit((GENERATION, f"group{index}", generation, "m"), partial(done, index))
    return found


def test_entries_of_one_turn_are_one_append_and_one_fsync() -> None:
    broker = Broker(queued=True)
    broker.create()
    catalog = broker.engine.broker.catalog
    before, count = broker.engine.broker.forcer.forces, catalog.log.count
    found = submitted(broker, 50)
    broker.engine.broker.end_turn()
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
        broker.engine.broker.end_turn()
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


def test_a_failed_fsync_is_an_error_to_all_who_waited_and_the_catalog_stops() -> None:
    broker = Broker(queued=True)
    broker.create()
    broker.disk.faults.fail("force", path="meta")
    found = submitted(broker, 3)
    broker.engine.broker.end_turn()
    broker.work()
    assert [getattr(error, "code", error) for error in found] == ["storage_stopped"] * 3
    assert [getattr(error, "outcome", error) for error in found] == ["unknown"] * 3
    (later,) = submitted(broker, 1)
    assert getattr(later, "outcome", later) == "not done"
    assert broker.produce(broker.lease(), 0).code in ("waiting", "ok")
    assert "fsync failed" in str(broker.engine.broker.status()["catalog"])


def test_too_many_entries_at_once_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENTRIES_MAX", 3)
    broker = Broker(queued=True)
    found = submitted(broker, 4)
    assert getattr(found[3], "code", "") == "busy"
    broker.engine.broker.end_turn()
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


def test_what_need_not_be_fsynced_is_reported_when_it_is_written() -> None:
    broker = Broker(queued=True)
    catalog = broker.engine.broker.catalog
    reported: list[str] = []
    catalog.submit((GENERATION, "one", 1, "m"), lambda error: reported.append(f"written {error}"), wait_durable=False)
    catalog.submit((GENERATION, "two", 2, "m"), lambda error: reported.append(f"forced {error}"))
    broker.engine.broker.end_turn()
    assert reported == ["written None"]
    broker.work()
    assert reported == ["written None", "forced None"]


def test_what_a_full_disk_kept_from_being_made_durable_is_not_read_as_if_it_were() -> None:
    broker = Broker()
    broker.create()
    broker.join("first")
    broker.engine.broker.catalog.submit((GENERATION, "billing", 2, "m"), lambda error: None, wait_durable=False)
    broker.engine.broker.end_turn()
    disk = broker.disk.crash(keep="everything")
    disk.space_bytes = disk.used_bytes()
    again = Broker(disk, broker.clock)
    assert again.engine.broker.catalog.log.waits_for_space
    assert again.ask(ReadOffsets("billing", None)).code == "disk_full"
    disk.space_bytes = None
    assert again.join("other").code == "ok"
    assert again.ask(ReadOffsets("billing", None)).code == "ok"


# Ids are given out once, also over crashes, and their age is known.


def test_leases_are_contiguous_and_never_overlap() -> None:
    broker = Broker()
    seen: set[int] = set()
    for count in (1, 1000, 1024, 1024, 1024, 7):
        first = broker.lease(count)
        ids = set(range(first, first + count))
        assert not ids & seen
        seen |= ids


def test_no_id_is_given_twice_over_any_crash() -> None:
    """Seeded by TFMQ_TEST_SEED."""
    broker = Broker()
    given = 0
    moments: list[tuple[Moment, int]] = []
    broker.disk.after = lambda kind, path: moments.append((Moment(broker.disk), given))
    for _ in range(12):
        given = broker.lease(1024) + 1023
    for moment, last in moments:
        for disk in crash_states(moment, scaled(5), random.Random(SEED)):
            assert Broker(disk).lease() > last


@pytest.mark.parametrize("seconds", [0, 60])
def test_an_older_copy_that_is_started_later_gives_no_id_again(seconds: int) -> None:
    broker = Broker()
    broker.lease()
    broker.stop()
    copy = next(iter(crash_states(Moment(broker.disk), 1, random.Random(SEED))))  # all of it was forced
    went_on = Broker(broker.disk, broker.clock)
    went_on.advance(seconds)
    given = went_on.lease(100) + 99
    went_on.advance(2)
    restored = Broker(copy, went_on.clock)
    assert restored.lease() > given


def test_an_id_that_a_client_has_from_a_later_copy_gets_another_one_as_its_successor() -> None:
    """The copy was started so soon that its next id is the client's."""
    broker = Broker()
    broker.create()
    broker.lease()
    broker.stop()
    copy = next(iter(crash_states(Moment(broker.disk), 1, random.Random(SEED))))
    client_has = Broker(broker.disk, broker.clock).lease()
    restored = Broker(copy, broker.clock)
    answer = restored.succeed(client_has)
    assert answer.code == "ok" and answer.successor_id > client_has and answer.last_sequence == -1
    assert restored.produce(answer.successor_id, 0).code == "ok"
    assert restored.lease() > answer.successor_id


def test_a_clock_that_is_wrong_by_centuries_leaves_half_of_the_ids() -> None:
    broker = Broker()
    broker.lease()
    broker.clock.jump_wall(1000 * 365.25 * 86_400)
    broker.advance(ID_RANGE_SECONDS + 1)
    assert PRODUCER_ID_MAX // 2 <= broker.lease() <= PRODUCER_ID_MAX // 2 + ID_RANGE_MAX


def test_one_fsync_serves_many_leases_and_more_where_ids_are_used_fast() -> None:
    broker = Broker(queued=True)
    broker.lease()
    before = broker.engine.broker.forcer.forces
    for _ in range(IDS_PER_SECOND - 1):
        broker.lease()
    assert broker.engine.broker.forcer.forces == before
    for _ in range(3 * ID_RANGE_MAX):
        broker.lease()
    assert broker.engine.broker.forcer.forces <= before + 8


def test_what_is_left_of_an_old_range_is_given_up_so_that_ids_look_young() -> None:
    broker = Broker()
    first = broker.lease()
    broker.advance(ID_RANGE_SECONDS + 1)
    second = broker.lease()
    assert second >= first + ID_RANGE_MAX
    register = broker.engine.broker.catalog.state
    assert (register.lease_time_ms(second) or 0) > (register.lease_time_ms(first) or 0)


def test_a_lease_that_cannot_be_fsynced_is_an_error() -> None:
    broker = Broker(queued=True)
    broker.create()
    broker.disk.faults.fail("force", path="meta")
    house = broker.engine.broker
    house.id_allocator._next = house.id_allocator._end
    found: list[tuple[int, BaseException | None]] = []
    house.id_allocator.allocate(1, lambda first, error: found.append((first, error)))
    broker.engine.broker.end_turn()
    broker.work()
    ((first, error),) = found
    assert first == 0 and error is not None
