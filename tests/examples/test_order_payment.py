"""The example of orders and payments: it says of itself that all agree, and this looks whether that is so."""

import json
import re
import subprocess
import sys

import pytest

from examples.order_payment import accidents
from tests import paths
from tests.scale import SCALE
from tests.sql.test_commit_protocol import STEPS

ROOT = paths.ROOT
ACCOUNT = re.compile(r"^(orders|told|payments|confirmed) +(\[.*\])$", re.MULTILINE)
BEFORE_THE_DECISION = {0, 1, 2, 3, 4, 5, 6, 7, 8}
ALL = {*range(2 * len(accidents.EACH))}


def accounts(*arguments: str) -> dict[str, list[int]]:
    """What it prints in the end."""
    command = [sys.executable, "-m", "examples.order_payment", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all agree"
    return {name: json.loads(numbers) for name, numbers in ACCOUNT.findall(done.stdout)}


def test_its_accidents_are_at_every_step_of_a_transaction() -> None:
    assert set(accidents.STEPS) == set(STEPS) - {"session is checked"}


@pytest.mark.long
@pytest.mark.parametrize("database", ["sqlite", "postgresql"] if SCALE >= 1 else ["sqlite"])
def test_every_order_that_was_kept_is_booked_once(database: str, request: pytest.FixtureRequest) -> None:
    arguments, kept = [], ALL - BEFORE_THE_DECISION
    if database == "postgresql":  # in two phases: after the prepare of both sides an order is kept
        arguments, kept = ["--database", request.getfixturevalue("postgres").url()], kept | {7, 8}
    found = accounts(*arguments)
    assert found == dict.fromkeys(("orders", "told", "payments", "confirmed"), sorted(kept))
