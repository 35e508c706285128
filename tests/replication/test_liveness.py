"""When a standby may claim, and when a primary refuses: tfmq.replication.liveness."""

from __future__ import annotations

import pytest

from tfmq.replication.liveness import PrimaryLease, StandbyLease

LEASE, JITTER = 8.0, 1.0


def poll(lease: StandbyLease, start: float, end: float, step: float = 0.25, took: float = 0.0) -> float | None:
    """Poll without finding an entry until `end`; return the time at which the standby may claim first."""
    now = start
    while now <= end:
        lease.nothing_found(now - took, now)
        if lease.may_claim(now):
            return now
        now += step
    return None


def test_a_standby_claims_after_a_lease_and_its_jitter_without_entries() -> None:
    lease = StandbyLease(LEASE, JITTER, 100.0)
    assert poll(lease, 100.25, 130.0) == 109.0


def test_an_entry_begins_the_lease_again() -> None:
    lease = StandbyLease(LEASE, JITTER, 100.0)
    assert poll(lease, 100.25, 108.0) is None
    lease.entry_found(108.25)
    assert poll(lease, 108.5, 130.0) == 117.25


@pytest.mark.parametrize("gap", [2.25, 60.0])
def test_a_gap_between_polls_begins_the_lease_again(gap: float) -> None:
    """A standby that was frozen, or without a store, has not seen that the primary stored nothing."""
    lease = StandbyLease(LEASE, JITTER, 100.0)
    assert poll(lease, 100.25, 108.75) is None
    woken = 108.75 + gap
    assert poll(lease, woken, 300.0) == woken + LEASE + JITTER


def test_polls_no_further_apart_than_a_quarter_of_the_lease_are_no_gap() -> None:
    lease = StandbyLease(LEASE, JITTER, 100.0)
    assert poll(lease, 102.0, 130.0, step=2.0) == 110.0


def test_a_standby_that_was_frozen_after_its_last_poll_does_not_claim() -> None:
    lease = StandbyLease(LEASE, JITTER, 100.0)
    assert poll(lease, 100.25, 109.0) == 109.0
    assert lease.may_claim(111.0) and not lease.may_claim(111.25)


def test_a_slow_answer_says_nothing_of_the_time_after_its_question() -> None:
    """The object may have been stored while the answer was under way."""
    lease = StandbyLease(LEASE, JITTER, 100.0)
    assert poll(lease, 100.25, 130.0, took=1.5) == 110.5


def test_a_poll_that_was_frozen_between_question_and_answer_is_a_gap() -> None:
    lease = StandbyLease(LEASE, JITTER, 100.0)
    assert poll(lease, 100.25, 105.0) is None
    lease.nothing_found(105.25, 140.0)
    assert not lease.may_claim(140.0)
    assert poll(lease, 140.25, 200.0) == 149.0


def test_a_failed_attempt_begins_the_lease_again_with_another_jitter() -> None:
    lease = StandbyLease(LEASE, JITTER, 100.0)
    assert poll(lease, 100.25, 130.0) == 109.0
    lease.restart(110.0, 3.0)
    assert poll(lease, 110.25, 200.0) == 121.0


def test_a_primary_refuses_after_half_a_lease_without_a_stored_entry_and_serves_again_after_one() -> None:
    lease = PrimaryLease(LEASE, 100.0)
    assert lease.may_serve(103.9) and not lease.may_serve(104.0)
    lease.entry_stored(104.5)
    assert lease.refuses_from == 108.5 and lease.may_serve(108.4) and not lease.may_serve(108.5)


def test_the_time_of_the_put_counts_and_an_older_put_takes_nothing_back() -> None:
    """With puts under way at once, the answer of an earlier one may come later."""
    lease = PrimaryLease(LEASE, 100.0)
    lease.entry_stored(103.0)
    lease.entry_stored(102.0)
    assert lease.refuses_from == 107.0


def test_a_primary_refuses_long_before_a_standby_claims() -> None:
    """However long the put of the last entry takes: the standby's lease begins when it sees the entry."""
    for took in (0.0, 1.0, 30.0):
        primary = PrimaryLease(LEASE, 100.0)
        standby = StandbyLease(LEASE, 0.0, 100.0)
        standby.entry_found(100.0 + took)
        claimed = poll(standby, 100.25 + took, 200.0)
        assert claimed is not None and not primary.may_serve(claimed - LEASE / 2)
