"""Delayed messages under kill -9 of a live server. The invariants are listed in tools/rigs/delay.py."""

from pathlib import Path

import pytest

from tests.scale import SEED, scaled
from tools.rigs.delay import describe, run

KILLS = 100
TIMERS = 100_000


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_kill_9_loses_doubles_and_hurries_no_delayed_message(tmp_path: Path) -> None:
    outcome = run(max(3, scaled(KILLS)), scaled(TIMERS), 2, SEED, tmp_path)
    print(describe(outcome))
    assert outcome.faults == [], describe(outcome)
    assert outcome.kills > 0 and outcome.cancelled > 0 and outcome.moved > 0
