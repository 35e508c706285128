"""Every call on the disk at which the power may go, or the process, in lives of a broker with delayed messages.

See delay_life for the lives, delay_examination for what must hold. A failure names life and boundary; TFMQ_TEST_SEED
brings them back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from journal.testing import crash_states
from tests.crash.delay_examination import Examiner
from tests.crash.delay_life import Broken, Life, small
from tests.scale import SEED, scaled, seeded

STATES = 52_000
"""Distinct ones, over all lives."""
STATES_PER_BOUNDARY = 8
ACTIONS = 50
THOROUGH_EVERY = 8
POINTS = {
    "insert", "arrivals roll", "bucket roll", "spill", "split", "load", "fire", "commit", "truncate", "cancel",
    "reschedule",
}  # fmt: skip
"""Where lives are cut; "load": while a bucket is being loaded something else is written."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    small(monkeypatch)
    yield


class Enumeration:
    """Counts what was looked at."""

    def __init__(self) -> None:
        self.digests: set[bytes] = set()
        self.points: Counter[str] = Counter()
        self.boundaries = 0
        self.opened = 0

    def life(self, number: int, most: int) -> None:
        """One life, its boundaries in an order of its own, until there are so many states."""
        generator = seeded("delayed", number)
        life = Life(generator)
        try:
            boundaries = life.run(ACTIONS)
        except Broken as error:
            raise Broken(f"life {number} of seed {SEED}: {error}") from error
        examiner = Examiner(life)
        for boundary in generator.sample(boundaries, len(boundaries)):
            if len(self.digests) >= most:
                return
            self.boundaries += 1
            self.points[boundary.point] += 1
            for index, state in enumerate(crash_states(boundary.moment, STATES_PER_BOUNDARY, generator)):
                self.digests.add(state.digest)
                try:
                    thorough = self.opened % THOROUGH_EVERY == 0
                    self.opened += examiner.examine(boundary, state, generator, thorough=thorough)
                except Broken as error:
                    place = f"life {number} of seed {SEED}, boundary {boundary.number}, {boundary.point}"
                    raise Broken(f"{place} ({boundary.after}), state {index}: {error}") from error


@pytest.mark.timeout(7200)
def test_no_crash_at_any_call_loses_doubles_or_hurries_a_delayed_message() -> None:
    enumeration, wanted, number = Enumeration(), scaled(STATES), 0
    while len(enumeration.digests) < wanted:
        enumeration.life(number, wanted)
        number += 1
    print(
        f"{len(enumeration.digests)} distinct states at {enumeration.boundaries} boundaries of {number} lives"
    )
    print(dict(enumeration.points))
