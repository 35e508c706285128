"""Every call on the disk at which the power may go, or the process, in lives of a broker with delayed messages.

See delay_life for the lives, delay_examination for what must hold. A failure names life and boundary; TFMQ_TEST_SEED
brings them back.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from journal.testing import Moment, SimulatedFile, crash_states
from tests.crash.delay_examination import Examiner, View, check, view_of
from tests.crash.delay_failing import FailingLife
from tests.crash.delay_life import Boundary, Broken, Life, LifeClock, require, small, started
from tests.crash.delay_points import POINTS
from tests.scale import SCALE, SEED, scaled, seeded
from tfmq.protocol.delayed_handle import parse_handle

STATES = 52_000
"""Distinct ones, over all lives."""
STATES_PER_BOUNDARY = 8
ACTIONS = 50
THOROUGH_EVERY = 8
INTERRUPTED = 300
"""Recoveries that are cut short at each of their own calls."""
FAILING = 600
LIES_LIVES = 6
STATES_LEAST = 180
"""However small the fraction."""
STATES_OF_A_POINT = 200
"""At least so many of each kind of boundary in the full count; in a fraction of it one."""
STATES_OF_A_LIFE = 60
"""In a fraction of the count no more, so that many lives have their part in it."""
LIVES_MOST = 40
"""When a kind that no life has met by then is missing."""
BESIDE = "beside"
"""Boundaries of no kind."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    small(monkeypatch)
    yield


class Enumeration:
    """Counts what was looked at."""

    def __init__(self) -> None:
        self.digests: set[bytes] = set()
        self.points: Counter[str] = Counter()
        """Distinct states of each kind."""
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
        for boundary in self._by_turns(boundaries, generator):
            if len(self.digests) >= most:
                return
            self.boundaries += 1
            for index, state in enumerate(crash_states(boundary.moment, STATES_PER_BOUNDARY, generator)):
                if state.digest not in self.digests:
                    self.points.update(boundary.points or (BESIDE,))
                self.digests.add(state.digest)
                try:
                    thorough = self.opened % THOROUGH_EVERY == 0
                    self.opened += examiner.examine(boundary, state, generator, thorough=thorough)
                except Broken as error:
                    place = f"life {number} of seed {SEED}, boundary {boundary.number}, {boundary.points}"
                    raise Broken(f"{place} ({boundary.after}), state {index}: {error}") from error

    def rare(self) -> dict[str, int]:
        """Kinds of boundaries with too few states."""
        least = STATES_OF_A_POINT if SCALE >= 1 else 1
        return {point: self.points[point] for point in POINTS if self.points[point] < least}

    def _by_turns(self, boundaries: list[Boundary], generator: random.Random) -> Iterator[Boundary]:
        """All of them, each once: next is always one of the kind with the fewest states so far."""
        kinds: dict[str, list[Boundary]] = {}
        for boundary in generator.sample(boundaries, len(boundaries)):
            for point in boundary.points or (BESIDE,):
                kinds.setdefault(point, []).append(boundary)
        taken: set[int] = set()
        while kinds:
            point = min(kinds, key=lambda point: (self.points[point], point))
            boundary = kinds[point].pop()
            if not kinds[point]:
                del kinds[point]
            if boundary.number not in taken:
                taken.add(boundary.number)
                yield boundary


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_no_crash_at_any_call_loses_doubles_or_hurries_a_delayed_message() -> None:
    wanted = STATES if SCALE >= 1 else max(STATES_LEAST, scaled(STATES) // 8)
    enumeration, number = Enumeration(), 0
    while len(enumeration.digests) < wanted or (enumeration.rare() and number < LIVES_MOST):
        enumeration.life(number, wanted if SCALE >= 1 else len(enumeration.digests) + STATES_OF_A_LIFE)
        number += 1
    print(f"{len(enumeration.digests)} distinct states at {enumeration.boundaries} boundaries of {number} lives")
    print(dict(enumeration.points))
    assert not enumeration.rare(), f"too few states of {enumeration.rare()}"


def without_handles_of_others(view: View, given: set[int]) -> View:
    """The view with the number in place of the handle for messages whose size is not in `given`.

    The delayed messages of a committed transaction may be appended by the start itself. A handle has the epoch of the
    start in which the message was appended, so it is another one if that start is cut short and the next one appends.
    """
    waiting = {
        size: (place, due, handle if size in given else str(parse_handle(handle).number))
        for size, (place, due, handle) in view.waiting.items()
    }
    return view._replace(waiting=waiting)


@pytest.mark.timeout(3600)
def test_a_start_that_is_cut_short_leaves_what_an_undisturbed_one_finds() -> None:
    """The power goes at each call of a start; the next one finds the same, and so does the one after that."""
    wanted, number, disturbed = scaled(INTERRUPTED), 0, 0
    while disturbed < wanted:
        generator = seeded("delayed, interrupted", number)
        life = Life(generator)
        for boundary in generator.sample(boundaries := life.run(ACTIONS // 2), min(6, len(boundaries))):
            state = boundary.moment.crash(generator)
            moments: list[Moment] = []
            # The first undisturbed start, and what a look at it writes, on a copy.
            copy = state.crash(keep="everything")
            copy.after = lambda kind, path, copy=copy, moments=moments: moments.append(Moment(copy))
            clock = LifeClock(boundary.wall_ms)
            first = view_of(started(copy, clock, life.broker, queued=False))
            copy.after = None
            for moment in generator.sample(moments, min(4, len(moments))):
                again = started(moment.crash(generator), LifeClock(boundary.wall_ms), life.broker, queued=False)
                found = view_of(again)
                where = f"life {number} of seed {SEED}, boundary {boundary.number} ({boundary.after})"
                given = {message.size for message in boundary.known.messages if message.handle}
                kept = without_handles_of_others(found, given) == without_handles_of_others(first, given)
                require(kept, f"{where}: first {first}, then {found}")
                disturbed += 1
        number += 1


@pytest.mark.timeout(3600)
def test_calls_that_fail_lose_double_and_hurry_nothing() -> None:
    """EIO and ENOSPC, anywhere; then the disk is mended, and a crash comes after all."""
    failed: Counter[str] = Counter()
    for number in range(FAILING if SCALE >= 1 else scaled(FAILING) // 2 + 1):
        generator = seeded("delayed, failing", number)
        life = FailingLife(generator)
        try:
            life.live(ACTIONS)
            failed.update(life.tolerant.failed)
            boundary = life.boundary()
            examiner = Examiner(life, resumes=True)
            check(life.client, view_of(life.broker))
            for state in crash_states(boundary.moment, STATES_PER_BOUNDARY, generator):
                examiner.examine(boundary, state, generator, thorough=True)
        except Broken as error:
            raise Broken(f"failing life {number} of seed {SEED}: {error}") from error
    print(dict(failed))
    assert failed


HONEST_FORCE: Callable[[SimulatedFile], None] = SimulatedFile.force


@pytest.mark.parametrize("path", ["/arrivals/", ".bucket", "orders-"])
def test_the_rig_sees_an_fsync_that_was_left_out(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lie(file: SimulatedFile) -> None:
        if path not in file.path:
            HONEST_FORCE(file)

    monkeypatch.setattr(SimulatedFile, "force", lie)
    enumeration = Enumeration()
    with pytest.raises(Broken):
        for number in range(LIES_LIVES):
            enumeration.life(number, 150 * (number + 1))
