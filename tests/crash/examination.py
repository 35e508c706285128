"""Takes a life apart: every boundary, the states that a power cut leaves there, each opened and held to the
invariants.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from journal.log.options import LogOptions
from journal.testing import Moment, SimulatedDisk, crash_states
from tests.crash.invariants import Broken, Outcome, check, contents, open_log, recover, require
from tests.crash.workload import Boundary, Life

STATES_PER_BOUNDARY = 40
"""All states where there are no more; few boundaries have more."""

THOROUGH_EVERY = 4
"""Every so many states are opened twice and then used."""


class Examination:
    """`digests` are the distinct states that were looked at, over all lives; `opened` counts recoveries."""

    def __init__(self, limit: int = STATES_PER_BOUNDARY) -> None:
        self.digests: set[bytes] = set()
        self.opened = 0
        self.boundaries = 0
        self._limit = limit
        self._outcomes: dict[tuple[bytes, str, tuple[int, ...]], Outcome] = {}

    def life(self, name: str, generator: random.Random, *, logs: int = 1, actions: int = 25) -> None:
        """Lives one life and looks at all of its boundaries. Raises Broken with what is needed to see it
        again.
        """
        life = Life(generator, logs=logs)
        self._outcomes.clear()
        for boundary in life.run(actions):
            self.boundaries += 1
            for number, state in enumerate(crash_states(boundary.moment, self._limit, generator)):
                try:
                    self.state(state, boundary, life.options)
                except Exception as error:
                    place = f"life {name}, boundary {boundary.number} ({boundary.after}), state {number}"
                    raise Broken(f"{place}: {error!r}") from error

    def state(self, state: SimulatedDisk, boundary: Boundary, options: LogOptions) -> None:
        """One state; one that was seen before is held to what is known by now."""
        self.digests.add(state.digest)
        for folder, candidates in boundary.candidates.items():
            log_ids = tuple(known.log_id for known in candidates)
            key = (state.digest, folder, log_ids)
            outcome = self._outcomes.get(key)
            if outcome is None:
                self.opened += 1
                thorough = self.opened % THOROUGH_EVERY == 0
                outcome = recover(state, folder, log_ids, options, thorough=thorough)
                self._outcomes[key] = outcome
            check(outcome, boundary, folder)


def interrupt(
    state: SimulatedDisk, folder: str, log_ids: tuple[int, ...], options: LogOptions, generator: random.Random
) -> int:
    """The power goes again at every boundary of the recovery: what comes out is the same. Answers the states."""
    moments: list[Moment] = []
    untouched = state.crash(keep="everything")
    expected = recover(state, folder, log_ids, options, thorough=False)
    if expected.was_stopped or not expected.log_id:
        return 0
    untouched.after = lambda kind, path: moments.append(Moment(untouched))
    open_log(untouched, folder, log_ids, options)
    count = 0
    for moment in moments:
        for again in crash_states(moment, 6, generator):
            found = recover(again, folder, (expected.log_id,), options, thorough=False)
            require(contents(found) == contents(expected), 6, f"undisturbed {expected}, disturbed {found}")
            count += 1
    return count


def some_states(
    boundaries: Sequence[Boundary], count: int, generator: random.Random
) -> list[tuple[Boundary, SimulatedDisk]]:
    """One state each of `count` boundaries."""
    chosen = generator.sample(boundaries, min(count, len(boundaries)))
    return [(boundary, boundary.moment.crash(generator)) for boundary in chosen]
