"""The crash matrix of transactions: the disk fails or is full at every point."""

from __future__ import annotations

import errno
import os

import pytest

from tests.crash.transaction_examination import settled
from tests.crash.transaction_life import FORCES, POINTS, WRITES, Call, Life
from tests.crash.transaction_matrix import life
from tests.scale import scaled, seeded
from tools.rigs.transaction_model import Broken

FAULTS_PER_POINT = 40
FULL = frozenset({"write", "create", "truncate", "rename"})
"""Calls that a full disk refuses."""
BROKEN = WRITES | FORCES | {"create", "rename", "unlink", "force_folder", "open", "read"}


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
