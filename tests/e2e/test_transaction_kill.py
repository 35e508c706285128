"""Transactions under kill -9 of a live server, and of its clients. The invariants are listed in
tools/rigs/transactions.py.
"""

from pathlib import Path

import pytest

from tests.scale import SEED, scaled
from tools.rigs.transactions import describe, run

KILLS = 300
CLIENTS = 4


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_transaction_is_torn_lost_or_decided_by_itself_by_kill_9(tmp_path: Path) -> None:
    outcome = run(max(4, scaled(KILLS)), CLIENTS, SEED, tmp_path)
    print(describe(outcome))
    assert outcome.faults == [], describe(outcome)
    assert outcome.kills > 0
    assert outcome.committed > 0 and outcome.rolled_back > 0 and outcome.piped > 0
