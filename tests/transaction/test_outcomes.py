"""Outcomes are remembered for days, in few bytes, and forgotten oldest first."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scale import scaled
from tfmq.transaction.outcomes import ALL_EPOCHS, MERGED_RUNS, NEWEST_MAX, ROW_SIZE, Outcome, Outcomes
from tfmq.transaction.states import COMMITTED, ROLLED_BACK

DAY_MS = 86_400_000
WEEK_MS = 7 * DAY_MS
BYTES_EACH = 40
"""What the design allows for one outcome."""


def make(outcomes_max: int = 100_000, keep_ms: int = WEEK_MS) -> Outcomes:
    outcomes = Outcomes(outcomes_max=outcomes_max, retention_ms=keep_ms)
    outcomes.key = b"a key of sixteen"
    return outcomes


def test_an_outcome_is_found_by_its_name() -> None:
    outcomes = make()
    outcomes.add_outcome("order-1", 17, COMMITTED, 1000)
    outcomes.add_outcome("order-2", 18, ROLLED_BACK, 2000)
    assert outcomes.find("order-1") == Outcome(17, COMMITTED, 1000)
    assert outcomes.find("order-2") == Outcome(18, ROLLED_BACK, 2000)
    assert outcomes.find("order-3") is None


def test_of_one_name_the_latest_is_found_and_every_epoch() -> None:
    outcomes = make(outcomes_max=32)
    for epoch in range(1, 12):
        outcomes.add_outcome("again", epoch, (COMMITTED, ROLLED_BACK)[epoch % 2], epoch)
        assert outcomes.find("again") == Outcome(epoch, (COMMITTED, ROLLED_BACK)[epoch % 2], epoch)
        for earlier in range(1, epoch + 1):
            found = outcomes.find("again", earlier)
            assert found is not None and found.epoch == earlier == found.time_ms
    assert outcomes.find("again", 99) is None


@given(st.integers(0, 1 << 32), st.sampled_from((1, 2, 16, 50, 160, 400)))
def test_it_finds_what_a_dict_finds(seed: int, outcomes_max: int) -> None:
    """Nothing is lost that the limit leaves: at least fifteen sixteenths less one merged run."""
    generator = random.Random(seed)
    outcomes, known, order = make(outcomes_max), {}, []
    for epoch in range(1, 200 + 2 * outcomes_max):
        xid = f"x{generator.randrange(outcomes_max * 2)}"
        state = generator.choice((COMMITTED, ROLLED_BACK))
        outcomes.add_outcome(xid, epoch, state, epoch)
        known[xid] = Outcome(epoch, state, epoch)
        order.append(xid)
        assert len(outcomes) <= outcomes_max
    safe = set(order[-max(1, outcomes_max * 4 // 5) :]) if outcomes_max >= 16 else set(order[-1:])
    for xid in {*safe, *generator.sample(order, min(len(order), 20))}:
        found = outcomes.find(xid)
        assert found == known[xid] if xid in safe else found in (known[xid], None), f"seed {seed}"


@pytest.mark.long
def test_a_week_is_remembered_and_not_much_more() -> None:
    outcomes = make(outcomes_max=1_000_000)
    for hour in range(24 * 20):
        now_ms = hour * 3_600_000
        outcomes.expire(now_ms)
        for each in range(300):
            outcomes.add_outcome(f"{hour}/{each}", hour * 300 + each + 1, COMMITTED, now_ms)
        for back in (1, 24, 24 * 7 - 12):
            if hour >= back:
                assert outcomes.find(f"{hour - back}/50") is not None, f"{back} hours later"
    assert outcomes.find("0/0") is None
    assert len(outcomes) < 300 * 24 * 20


@pytest.mark.long
def test_it_knows_below_which_epoch_it_may_have_forgotten_one() -> None:
    """Nothing that it has forgotten lies above, whether it went by its age or because there were too many."""
    for outcomes in (make(64, keep_ms=10_000), make(64)):
        dropped = 0
        for epoch in range(1, 400):
            outcomes.add_outcome(f"x{epoch}", epoch, COMMITTED, epoch * 100)
            outcomes.expire(epoch * 100)
            gone = [each for each in range(1, epoch + 1) if outcomes.find(f"x{each}") is None]
            assert outcomes.expired_epoch == max(gone, default=0)
            dropped += bool(gone)
        assert dropped


def test_after_a_repair_nothing_is_known_to_be_all_until_new_epochs_are_leased() -> None:
    outcomes = make()
    outcomes.add_outcome("x", 17, COMMITTED, 1000)
    outcomes.mark_entries_lost()
    assert outcomes.expired_epoch == ALL_EPOCHS
    outcomes.mark_epochs_leased(100)
    assert outcomes.expired_epoch == 99
    outcomes.mark_epochs_leased(200)
    assert outcomes.expired_epoch == 99


def test_a_dump_of_an_earlier_release_does_not_say_what_it_has_forgotten() -> None:
    outcomes = make()
    outcomes.load(make().dump()[:4])
    assert outcomes.expired_epoch == ALL_EPOCHS


@pytest.mark.long
def test_900_000_outcomes_take_at_most_40_bytes_each() -> None:
    count = scaled(900_000)
    outcomes = make(outcomes_max=1_000_000)
    gc.collect()
    tracemalloc.start()
    for epoch in range(1, count + 1):
        outcomes.add_outcome(f"transaction-{epoch}", epoch, COMMITTED, epoch)
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert ROW_SIZE == 32
    newest = NEWEST_MAX * 300  # the dict of the newest, however many there are
    assert size - newest <= BYTES_EACH * count, f"{(size - newest) / count:.1f} bytes each of {count}"
    assert len(outcomes) == count
    runs = len(outcomes.dump()[3])
    assert runs <= MERGED_RUNS + count // (NEWEST_MAX * MERGED_RUNS), "a look-up asks few runs"
    for epoch in range(1, count + 1, max(1, count // 500)):
        assert outcomes.find(f"transaction-{epoch}") == Outcome(epoch, COMMITTED, epoch)


@given(st.integers(0, 1 << 32), st.integers(0, 400))
def test_a_snapshot_goes_on_as_if_nothing_had_been(seed: int, at: int) -> None:
    generator = random.Random(seed)
    first = make(64)
    for epoch in range(1, 401):
        if epoch == at:
            second = make(64)
            second.load(first.dump())
            break
        first.add_outcome(f"x{generator.randrange(40)}", epoch, COMMITTED, epoch)
    else:
        return
    for epoch in range(at, at + 100):
        xid = f"x{generator.randrange(40)}"
        for each in (first, second):
            each.add_outcome(xid, epoch, ROLLED_BACK, epoch)
            each.expire(epoch)
    assert first.dump() == second.dump(), f"seed {seed}"
    assert len(first) == len(second)


def test_names_are_not_kept_and_another_key_finds_nothing() -> None:
    outcomes, other = make(), make()
    outcomes.add_outcome("secret", 1, COMMITTED, 1)
    key, *rest = outcomes.dump()
    assert b"secret" not in repr((key, rest)).encode()
    other.load((b"another key ....", *rest))
    assert other.find("secret") is None


@pytest.mark.parametrize("fields", [(b"k", [], 0), (b"k", 5, 0, []), (b"k", [], 0, [(0, 1, b"short")])])
def test_what_is_no_dump_is_refused(fields: tuple[object, ...]) -> None:
    with pytest.raises((ValueError, TypeError, IndexError)):
        make().load(fields)
