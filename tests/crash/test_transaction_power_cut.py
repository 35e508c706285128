"""Transactions under real power cuts on an ext4 image. The invariants are listed in tools/rigs/transactions.py.

Skipped only where there is no root or no loop device, and it says so.
"""

from pathlib import Path

import pytest

from tests.scale import SEED, scaled
from tools.rigs.loop_image import LoopImage, Unavailable, require_loop_devices
from tools.rigs.transactions import describe, run

CUTS = 100
CLIENTS = 3


@pytest.fixture(scope="module", autouse=True)
def _loop_devices() -> None:
    try:
        require_loop_devices()
        LoopImage().close()
    except Unavailable as reason:
        pytest.skip(f"cannot be had here: real power cuts: {reason}")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_real_power_cut_takes_nothing_that_was_answered(tmp_path: Path) -> None:
    outcome = run(max(3, scaled(CUTS)), CLIENTS, SEED, tmp_path, cuts=True)
    print(describe(outcome))
    assert outcome.faults == [], describe(outcome)
    assert outcome.cuts > 0 and outcome.committed > 0
