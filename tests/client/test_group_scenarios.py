"""Groups of up to twelve members through random troubles; `group_scenario` has what must hold. Prints its seed."""

import itertools
from collections import Counter
from typing import Final

import pytest

from tests.client.group_scenario import ACCIDENTS, Course
from tests.scale import SEED, scaled

SCENARIOS: Final = 120
TELLING: Final = 40
"""From so many on each kind of accident is among them."""
_met: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def names_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of members are part of the seed: who gets what depends on them."""
    numbers = itertools.count(1)
    monkeypatch.setattr("tfmq.client.consumer.membership.token_hex", lambda size: f"member-{next(numbers):04d}")


@pytest.mark.parametrize("number", range(scaled(SCENARIOS)))
def test_one_owner_nothing_passed_over_nothing_doubled_that_was_saved(number: int) -> None:
    seed = SEED + number
    print(f"seed {seed}")
    course = Course(seed)
    try:
        course.run()
    finally:
        course.close()
    _met["scenarios"] += 1
    _met.update(course.met)


if scaled(SCENARIOS) >= TELLING:

    def test_every_kind_of_accident_is_among_them() -> None:
        assert _met["scenarios"] == scaled(SCENARIOS), "this goes with all the others of this file"
        print(dict(_met))
        assert [kind for kind in ACCIDENTS if not _met[kind]] == []
