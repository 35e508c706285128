"""Ids are given out once, also over crashes, and their age is known."""

import random

from journal.record.format import PRODUCER_ID_MAX
from journal.testing import Moment, crash_states
from tests.broker.helpers import Broker
from tests.scale import SEED, scaled
from tfmq.broker.catalog import ID_RANGE, ID_RANGE_SECONDS, IDS_PER_SECOND


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


def test_an_older_copy_that_is_started_later_gives_no_id_again() -> None:
    broker = Broker()
    broker.lease()
    broker.stop()
    copy = next(iter(crash_states(Moment(broker.disk), 1, random.Random(SEED))))  # all of it was forced
    went_on = Broker(broker.disk, broker.clock)
    went_on.advance(60)
    given = went_on.lease(1024) + 1023
    went_on.advance(ID_RANGE / IDS_PER_SECOND)
    restored = Broker(copy, went_on.clock)
    assert restored.lease() > given


def test_a_clock_that_is_wrong_by_centuries_leaves_half_of_the_ids() -> None:
    broker = Broker()
    broker.lease()
    broker.clock.jump_wall(1000 * 365.25 * 86_400)
    broker.advance(ID_RANGE_SECONDS + 1)
    assert PRODUCER_ID_MAX // 2 <= broker.lease() <= PRODUCER_ID_MAX // 2 + ID_RANGE


def test_one_force_serves_many_leases() -> None:
    broker = Broker(queued=True)
    broker.lease()
    before = broker.engine.broker.forcer.forces
    for _ in range(ID_RANGE - 1):
        broker.lease()
    assert broker.engine.broker.forcer.forces == before


def test_what_is_left_of_an_old_range_is_given_up_so_that_ids_look_young() -> None:
    broker = Broker()
    first = broker.lease()
    broker.advance(ID_RANGE_SECONDS + 1)
    second = broker.lease()
    assert second >= first + ID_RANGE
    register = broker.engine.broker.catalog.state
    assert (register.lease_time_ms(second) or 0) > (register.lease_time_ms(first) or 0)


def test_a_lease_that_cannot_be_forced_is_an_error() -> None:
    broker = Broker(queued=True)
    broker.create()
    broker.disk.faults.fail("force", path="meta")
    house = broker.engine.broker
    house.id_allocator._next = house.id_allocator._end
    found: list[tuple[int, BaseException | None]] = []
    house.id_allocator.allocate(1, lambda first, error: found.append((first, error)))
    broker.engine.end_turn()
    broker.work()
    ((first, error),) = found
    assert first == 0 and error is not None
