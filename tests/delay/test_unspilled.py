"""Arrivals that are in no bucket."""

from tfmq.delay.storage_scheduler import UnspilledArrivals


def test_the_lowest_due_is_known_until_it_is_in_a_bucket() -> None:
    arrivals = UnspilledArrivals()
    assert arrivals.lows == [] and arrivals.since is None
    arrivals.add(50, 1000)
    arrivals.add(70, 2000)
    assert arrivals.lows == [50] and arrivals.since == 1000
    arrivals.begin_spill()
    arrivals.add(60, 3000)
    assert sorted(arrivals.lows) == [50, 60] and arrivals.since == 3000
    arrivals.end_spill(True)
    assert arrivals.lows == [60] and arrivals.since == 3000


def test_a_spill_that_failed_leaves_them_as_old_as_they_are() -> None:
    arrivals = UnspilledArrivals()
    arrivals.add(50, 1000)
    arrivals.begin_spill()
    arrivals.add(60, 3000)
    arrivals.end_spill(False)
    assert arrivals.lows == [50] and arrivals.since == 1000


def test_notes_have_no_due_but_an_age() -> None:
    arrivals = UnspilledArrivals()
    arrivals.add(None, 1000)
    assert arrivals.lows == [] and arrivals.since == 1000
