"""The crash matrix of transactions: records that were written in part, at every point at which something is written."""

from __future__ import annotations

import pytest

from tests.crash.transaction_examination import torn_states
from tests.crash.transaction_life import POINTS
from tests.crash.transaction_matrix import CUTS_PER_POINT, STATES_PER_CUT, held, some
from tests.scale import scaled, seeded

WRITTEN = tuple(
    point
    for point in POINTS
    if point not in ("prepare force", "commit force", "partition force", "rollback force", "file delete", "offsets")
    and not point.endswith("answer")
)
"""Points at which something is written, which can be torn."""


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
