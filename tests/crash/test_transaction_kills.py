"""The crash matrix of transactions: kills and power cuts at every point, and recoveries that are repeated."""

from __future__ import annotations

import pytest

from tests.crash.transaction_examination import interrupted, power_cuts, repeated
from tests.crash.transaction_life import POINTS
from tests.crash.transaction_matrix import CUTS_PER_POINT, STATES_PER_CUT, held, life, some
from tests.scale import scaled, seeded

REPEATED = 80
INTERRUPTED = 40


def test_an_undisturbed_life_ends_as_it_was_planned() -> None:
    reported = life()
    assert reported.errors == []
    held(reported.boundaries[-1], reported.boundaries[-1].moment.crash(keep="everything"))


@pytest.mark.long
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_leaves_all_or_nothing(point: str) -> None:
    for boundary in some(point, "kill", CUTS_PER_POINT):
        held(boundary, boundary.moment.crash(keep="everything"))


@pytest.mark.long
@pytest.mark.parametrize("point", POINTS)
def test_a_power_cut_at_any_point_leaves_all_or_nothing(point: str) -> None:
    generator = seeded("power", point)
    for boundary in some(point, "power cut", CUTS_PER_POINT):
        for disk in power_cuts(boundary, max(2, scaled(STATES_PER_CUT)), generator):
            held(boundary, disk)


def test_recovery_once_twice_and_ten_times_finds_the_same() -> None:
    generator = seeded("repeated")
    reported = life()
    for number, boundary in enumerate(generator.sample(reported.boundaries, scaled(REPEATED))):
        disk = boundary.moment.crash(generator)
        repeated(reported, boundary, disk, times=9 if number % 3 == 0 else 1)


def test_a_recovery_that_is_killed_changes_nothing() -> None:
    generator = seeded("interrupted recovery")
    reported, count = life(), 0
    for boundary in generator.sample(reported.boundaries, max(2, scaled(INTERRUPTED))):
        count += interrupted(reported, boundary, boundary.moment.crash(generator), 6, generator)
    assert count > 0
