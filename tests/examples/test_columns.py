"""The examples with data frames: what is read is what was sent, whichever library reads it."""

import subprocess
import sys

import pytest

from examples.columns.orders import COUNT, CUSTOMERS, amount
from tests import paths


@pytest.mark.parametrize("library", ["pandas", "polars", "duckdb"])
def test_the_sums_are_those_of_the_orders_sent(library: str) -> None:
    command = [sys.executable, "-m", f"examples.columns.with_{library}"]
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    sent, *totals = done.stdout.splitlines()
    assert sent.startswith(f"sent {COUNT} orders")
    sums = dict.fromkeys(CUSTOMERS, 0)
    for number in range(COUNT):
        sums[CUSTOMERS[number % len(CUSTOMERS)]] += amount(number)
    assert totals == [f"{customer}: {sums[customer]}" for customer in sorted(sums)]
