"""The crash matrix of transactions: every point of their way x every way to fail.

One life with every kind of transaction is played on a simulated disk; it is cut at boundaries of each point by a
kill, by a power cut, by a torn write; and it is played again with the calls of each point failing by EIO and
ENOSPC. See tools.rigs.transaction_model for what must hold, tests.crash.transaction_life for the points.
A failure names the boundary; TFMQ_TEST_SEED brings the sample back.
"""

from __future__ import annotations

import errno
import os
from functools import cache

import pytest

from journal.testing import SimulatedDisk
from tests.crash.transaction_examination import examine, interrupted, power_cuts, repeated, settled, torn_states
from tests.crash.transaction_life import FORCES, POINTS, WRITES, Boundary, Call, Life
from tests.scale import scaled, seeded
from tools.rigs.transaction_model import Broken

CUTS_PER_POINT = 60
"""Boundaries of a point that are tried, of those that it has."""
STATES_PER_CUT = 5
FAULTS_PER_POINT = 40
REPEATED = 80
INTERRUPTED = 40

WRITTEN = tuple(
    point
    for point in POINTS
    if point not in ("prepare force", "commit force", "partition force", "rollback force", "file delete", "offsets")
    and not point.endswith("answer")
)
"""Points at which something is written, which can be torn."""
FULL = frozenset({"write", "create", "truncate", "rename"})
"""Calls that a full disk refuses."""
BROKEN = WRITES | FORCES | {"create", "rename", "unlink", "force_folder", "open", "read"}


@cache
def life() -> Life:
    reported = Life()
    reported.tell()
    return reported


def boundaries_of(point: str) -> list[Boundary]:
    found = [boundary for boundary in life().boundaries if boundary.point == point]
    assert found, f"the life never comes to {point}"
    return found


def some(point: str, way: str, count: int) -> list[Boundary]:
    found = boundaries_of(point)
    if way == "torn record":
        found = [boundary for boundary in found if boundary.torn is not None]
    return seeded("matrix", point, way).sample(found, min(max(2, scaled(count)), len(found)))


def held(boundary: Boundary, disk: SimulatedDisk) -> None:
    try:
        examine(life(), boundary, disk)
    except Broken as error:
        raise Broken(f"boundary {boundary.number} ({boundary.after}): {error}") from error


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


@pytest.mark.long
@pytest.mark.parametrize("point", WRITTEN)
def test_a_torn_record_at_any_point_leaves_all_or_nothing(point: str) -> None:
    generator = seeded("torn", point)
    tried = 0
    for boundary in some(point, "torn record", CUTS_PER_POINT):
        for disk in torn_states(boundary, max(2, scaled(STATES_PER_CUT)), generator):
            held(boundary, disk)
            tried += 1
    assert tried


def calls_of(point: str, kinds: frozenset[str]) -> list[Call]:
    """Calls that belong to a point; for an answer, the first ones after it."""
    reported = life()
    if not point.endswith("answer"):
        return [call for call in reported.calls if call.point == point and call.kind in kinds]
    after = [reported.calls[count:] for name, count in reported.answers if name == point]
    return [call for calls in after for call in [next((c for c in calls if c.kind in kinds), None)] if call]


def failing(point: str, error: int, kinds: frozenset[str]) -> None:
    """Plays the life again, with one call of the point failing; then repairs the disk, and cuts the power."""
    calls = calls_of(point, kinds)
    generator = seeded("fault", point, error)
    for call in generator.sample(calls, min(max(1, scaled(FAULTS_PER_POINT)), len(calls))):
        reported = Life(keep_boundaries=False)
        fault = reported.disk.faults.fail(call.kind, nth=call.nth, error=error)
        try:
            reported.tell()
            assert fault.hit, "the life is another one"
            # A partition that fails in the middle of a large one lets others in meanwhile.
            reported.client.model.transactions["large"].contiguous = False
            settled(reported, generator)
        except Broken as broken:
            raise Broken(f"{os.strerror(error)} at {call}: {broken}") from broken


@pytest.mark.long
@pytest.mark.parametrize("point", POINTS)
def test_an_input_output_error_at_any_point_leaves_all_or_nothing(point: str) -> None:
    failing(point, errno.EIO, BROKEN)


@pytest.mark.long
@pytest.mark.parametrize("point", POINTS)
def test_a_full_disk_at_any_point_leaves_all_or_nothing(point: str) -> None:
    failing(point, errno.ENOSPC, FULL)


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
