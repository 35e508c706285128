"""What the tests of the crash matrix of transactions share: one life, its boundaries by point, and the check of one.

One life with every kind of transaction is played on a simulated disk; it is cut at boundaries of each point by a
kill, by a power cut, by a torn write; and it is played again with the calls of each point failing by EIO and
ENOSPC. See tools.rigs.transaction_model for what must hold, tests.crash.transaction_life for the points.
A failure names the boundary; TFMQ_TEST_SEED brings the sample back.

Each way to fail is a file of tests of its own, because the tests of a file run one after another.
"""

from __future__ import annotations

from functools import cache

from journal.testing import SimulatedDisk
from tests.crash.transaction_examination import examine
from tests.crash.transaction_life import Boundary, Life
from tests.scale import scaled, seeded
from tools.rigs.transaction_model import Broken

CUTS_PER_POINT = 60
"""Boundaries of a point that are tried, of those that it has."""
STATES_PER_CUT = 5


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
