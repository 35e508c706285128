"""Read, transformed and sent exactly once while a group's members come, go, die and are frozen, and the broker dies.
The invariants are listed in tools/rigs/rebalancing.py.
"""

from pathlib import Path

import pytest

from tests.scale import SEED, scaled
from tools.rigs.rebalancing import describe, run

KILLS = 120


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_consume_transform_produce_is_exactly_once_over_rebalances_and_kills(tmp_path: Path) -> None:
    outcome = run(max(4, scaled(KILLS)), SEED, tmp_path)
    print(describe(outcome))
    assert outcome.faults == [], describe(outcome)
    assert outcome.broker_kills > 0 and outcome.frozen > 0 and outcome.left > 0
    assert outcome.messages > 0 and outcome.transactions > 0
