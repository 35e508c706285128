"""`run` in groups through random troubles; `run_scenario` has what must hold. Prints its seed."""

import itertools
from typing import Final

import pytest

from tests.client.run_scenario import Course
from tests.scale import SEED, scaled

SCENARIOS: Final = 150


@pytest.fixture(autouse=True)
def names_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of members are part of the seed: who gets what depends on them."""
    numbers = itertools.count(1)
    monkeypatch.setattr("tfmq.client.consumer.membership.token_hex", lambda size: f"member-{next(numbers):04d}")


@pytest.mark.long
@pytest.mark.parametrize("number", range(scaled(SCENARIOS)))
def test_nothing_is_passed_over_order_is_kept_and_saved_is_the_lowest_unfinished(number: int) -> None:
    seed = SEED + number
    print(f"seed {seed}")
    course = Course(seed)
    try:
        course.run()
    finally:
        course.close()
