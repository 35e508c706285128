"""How much of a full count a test run does: `make test` runs a seeded fraction, `make test-long` all of it."""

import os
import random

SCALE = float(os.environ.get("TFMQ_TEST_SCALE", "1"))
FRACTION = 0.1
"""Up to here a run is one of `make test`'s kind."""
LONG_ONE_IN = 12
"""`make test` runs about one of so many tests that are marked `long`."""
SEED = int(os.environ.get("TFMQ_TEST_SEED", "20261121"))


def scaled(count: int, short: int | None = None) -> int:
    """`count` times the scale of this run, at least 1, and in a run of `make test`'s kind at most `short`."""
    found = max(1, int(count * SCALE))
    return found if short is None or SCALE > FRACTION else min(found, short)


def seeded(*names: object) -> random.Random:
    """A generator that a failing test's printed seed brings back; `names` keep two tests' streams apart."""
    return random.Random(f"{SEED}/{'/'.join(map(str, names))}")
