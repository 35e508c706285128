"""kill -9 of a live server under load. The invariants are listed in tools/rigs/kill.py."""

from pathlib import Path

import pytest

from tests.scale import SEED, scaled
from tools.rigs.kill import run

KILLS = 100


@pytest.mark.long
@pytest.mark.timeout(900)
def test_nothing_acknowledged_is_lost_or_doubled_by_kill_9(tmp_path: Path) -> None:
    outcome = run(max(3, scaled(KILLS)), writers=4, seed=SEED, folder=tmp_path)
    assert outcome.faults == [], f"seed {outcome.seed}"
    assert outcome.acknowledged > 0
