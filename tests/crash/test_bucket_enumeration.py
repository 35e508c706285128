"""Every state that a power cut could leave, at every boundary of seeded lives of the buckets of delayed messages.

1. Every message that was spilled, and not settled since, is there, with its due, its target and its bytes.
2. No message is there twice, none is in two buckets' spans, none is there that is in the arrivals still.
3. What was said to be spilled stays so: the arrivals may be gone.
4. Broker time does not go back before a checkpoint.
5. A power cut is never taken for damage: no start is refused, nothing is named, nothing is kept aside.
6. Everything that is served is on the disk before; recovery is repeatable, also after a power cut in its middle.
7. It goes on: what is spilled and cut then is there after the next power cut.
8. All that holds where calls fail before: a full disk is waited out, a broken one stops the store, which still serves
   all that it had promised.

A failure names the life; TFMQ_TEST_SEED brings it back.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest

from journal.testing import Moment, SimulatedDisk, SimulatedFile, crash_states
from tests.crash.bucket_life import Boundary, Known, Life
from tests.crash.invariants import Broken, require
from tests.delay.bucket_rig import Bench, Kept, damage_in, everything, kept_of
from tests.scale import FRACTION, SCALE, SEED, scaled, seeded

LIVES = 400
ACTIONS = 25
STATES_PER_BOUNDARY = 24 if SCALE > FRACTION else 8
STATES_PER_LIFE_LEAST = 150
FAILING_LIVES = 300
INTERRUPTED_LIVES = 60
STATES_INTERRUPTED = 12
THOROUGH_EVERY = 4

LABELS_OF_A_CRASH = {"whole", "unlisted chunks", "unlisted", "unfinished"}


class Outcome(NamedTuple):
    """What an opening made of a state."""

    kept: dict[int, Kept]
    spilled_number: int
    broker_ms: int
    store_id: int


def recover(state: SimulatedDisk, life: Life, *, thorough: bool) -> Outcome:
    """Opens the set, and checks what can be checked without knowing its past."""
    bench = life.bench.on(state)
    buckets = bench.buckets
    require(buckets.recovery_labels <= LABELS_OF_A_CRASH, 5, f"it was opened by {buckets.recovery_labels}")
    require(not bench.ids, 5, "another set was begun")
    ends = [(leaf.span.end, leaf.span.start) for leaf in buckets.live_buckets]
    require(all(end <= start for (end, _), (_, start) in itertools.pairwise(ends)), 2, f"spans {ends}")
    try:
        outcome = outcome_of(bench)
    except AssertionError as error:
        raise Broken(f"invariant 2: {error}") from error
    require(not damage_in(buckets), 5, f"damage is named: {damage_in(buckets)}")
    require(not any(name.endswith(".damaged") for name in bench.files()), 5, f"{bench.files()}")
    require(len(bench.files()) == len(buckets.live_buckets), 5, f"{bench.files()} are left")
    if thorough:
        _again(bench, outcome)
    return outcome


def outcome_of(bench: Bench) -> Outcome:
    buckets = bench.buckets
    return Outcome(bench.contents(), buckets.spilled_number, buckets.broker_ms, buckets.store_id)


def _again(bench: Bench, outcome: Outcome) -> None:
    """The same after another power cut, and a life after it."""
    again = bench.crash("nothing")
    require(outcome_of(again) == outcome, 6, f"first {outcome}, then {outcome_of(again)}")
    rest = {each.number: kept_of(each) for each in again.unspilled()}
    again.spill()
    for bucket in [leaf for leaf in again.buckets.live_buckets if leaf.span.exponent > 10][:2]:
        again.buckets.split(bucket, everything)
    last = again.crash("nothing")
    require(last.contents() == outcome.kept | rest, 7, "what was spilled later is not there")


def check(outcome: Outcome, known: Known, life: Life) -> None:
    """What was found against what was known."""
    number = outcome.spilled_number
    require(number in known.numbers, 3, f"spilled up to {number}, known was {known.numbers}")
    require(outcome.broker_ms >= known.broker_ms, 4, f"{outcome.broker_ms}, told was {known.broker_ms}")
    require(outcome.store_id == 7, 5, "it has another name")
    arrived = life.bench.arrived
    expected = {n: each for n, each in arrived.items() if n < number and n not in known.settled}
    missing = sorted(set(expected) - set(outcome.kept))
    require(not missing, 1, f"numbers {missing} are gone")
    beyond = sorted(n for n in outcome.kept if n >= number)
    require(not beyond, 2, f"numbers {beyond} are in the arrivals and in buckets")
    for n, kept in outcome.kept.items():
        require(kept == kept_of(arrived[n]), 1, f"number {n} is {kept}")


class Examination:
    """`digests` are the distinct states that were looked at, over all lives."""

    def __init__(self) -> None:
        self.digests: set[bytes] = set()
        self.opened = 0
        self.boundaries = 0

    def life(self, name: str, generator: random.Random, *, failing: bool = False) -> Life:
        life = Life(generator)
        outcomes: dict[bytes, Outcome] = {}
        if failing:
            life.fail()
            life.fail()
        for boundary in life.run(ACTIONS):
            self.boundaries += 1
            for number, state in enumerate(crash_states(boundary.moment, STATES_PER_BOUNDARY, generator)):
                try:
                    self._state(state, boundary, life, outcomes)
                except Exception as error:
                    place = f"life {name}, boundary {boundary.number} ({boundary.after}), state {number}"
                    raise Broken(f"{place}: {error!r}") from error
        return life

    def _state(self, state: SimulatedDisk, boundary: Boundary, life: Life, outcomes: dict[bytes, Outcome]) -> None:
        self.digests.add(state.digest)
        outcome = outcomes.get(state.digest)
        if outcome is None:
            self.opened += 1
            thorough = self.opened % THOROUGH_EVERY == 0
            outcome = outcomes[state.digest] = recover(state, life, thorough=thorough)
        check(outcome, boundary.known, life)


@pytest.mark.long
def test_whatever_a_power_cut_leaves_of_the_buckets_opens_with_everything_that_was_promised() -> None:
    examination = Examination()
    lives = scaled(LIVES)
    for number in range(lives):
        examination.life(f"{number} of seed {SEED}", seeded("buckets", number))
    print(f"{len(examination.digests)} distinct states at {examination.boundaries} boundaries")
    assert len(examination.digests) >= lives * STATES_PER_LIFE_LEAST * (0.6 if lives < 100 else 1)


@pytest.mark.long
def test_a_power_cut_after_calls_that_failed_takes_nothing_that_was_promised() -> None:
    examination = Examination()
    stopped = refused = 0
    for number in range(scaled(FAILING_LIVES)):
        name = f"failing {number} of seed {SEED}"
        life = examination.life(name, seeded("buckets failing", number), failing=True)
        buckets = life.bench.buckets
        stopped += buckets.stop_reason is not None
        refused += life.refused
        served = life.bench.contents()
        expected = life.bench.expected()
        missing = sorted(set(expected) - set(served) - life.settled)
        require(not missing, 8, f"life {name}: numbers {missing} are not served")
        require(all(served[n] == expected[n] for n in served), 8, f"life {name}: others are served")
        closed = [path for path in life.bench.disk.closed_unforced if path.endswith(".bucket")]
        # A full disk takes back files that are new: those are closed when their names are gone.
        require(not closed or life.refused > 0, 8, f"life {name}: closed with unforced bytes: {closed}")
    print(f"{len(examination.digests)} distinct states, {stopped} stopped, {refused} refused")
    assert stopped and refused


def test_a_power_cut_in_the_middle_of_the_buckets_recovery_changes_nothing() -> None:
    interrupted = 0
    for number in range(scaled(INTERRUPTED_LIVES)):
        generator = seeded("buckets interrupted", number)
        life = Life(generator)
        boundaries = life.run(20)
        for boundary in generator.sample(boundaries, min(STATES_INTERRUPTED, len(boundaries))):
            state = boundary.moment.crash(generator)
            expected = recover(state.crash(keep="everything"), life, thorough=False)
            moments: list[Moment] = []
            state.after = lambda kind, path, state=state, moments=moments: moments.append(Moment(state))
            life.bench.on(state)
            for moment in moments:
                for again in crash_states(moment, 6, generator):
                    found = recover(again, life, thorough=False)
                    where = f"life {number} of seed {SEED}, {boundary.after}"
                    require(found == expected, 6, f"{where}: undisturbed {expected}, disturbed {found}")
                    interrupted += 1
    assert interrupted > 0


HONEST_FORCE: Callable[[SimulatedFile], None] = SimulatedFile.force


def no_bucket_force(file: SimulatedFile) -> None:
    """A store that forgets to force its buckets."""
    if not file.path.endswith(".bucket"):
        HONEST_FORCE(file)


def no_checkpoint_force(file: SimulatedFile) -> None:
    """A store that forgets to force its checkpoint."""
    if not file.path.endswith("checkpoint.new"):
        HONEST_FORCE(file)


def no_folder_force(disk: SimulatedDisk, path: str) -> None:
    """A store that forgets to force new names."""


@pytest.mark.parametrize(
    ("owner", "name", "lie"),
    [
        (SimulatedFile, "force", no_bucket_force),
        (SimulatedFile, "force", no_checkpoint_force),
        (SimulatedDisk, "force_folder", no_folder_force),
    ],
    ids=["buckets", "checkpoint", "folders"],
)
def test_the_rig_sees_an_fsync_that_the_buckets_left_out(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, lie: Callable[..., None]
) -> None:
    monkeypatch.setattr(owner, name, lie)
    with pytest.raises((Broken, AssertionError)):
        for number in range(40):
            Examination().life(str(number), seeded("a lie", number))
