"""Every state that a power cut could leave, at every boundary of seeded lives of a transaction journal.

1. Nothing that was known to be forced is gone.
2. What is there is a beginning of what was written: nothing unforced comes back after a gap, nothing that was refused
   comes back at all, every byte is the one that was written.
3. Everything that is served is on the disk before it is served.
4. A file that something is held in is there, and gives every held entry.
5. Places and file numbers never go back; the journal keeps its name.
6. A power cut is never taken for damage: no start is refused, no snapshot is given up, no warning is logged.
7. Recovery is repeatable, also after a power cut in its middle.
8. It goes on: what is appended and forced then is there after the next power cut.

A failure names the life; TFMQ_TEST_SEED brings it back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from journal.testing import Moment, SimulatedDisk, SimulatedFile, crash_states
from tests.crash.invariants import Broken, require
from tests.crash.journal_life import Boundary, Known, Life
from tests.journal.journals import Journal, Seen, row_of
from tests.scale import SEED, scaled, seeded

LIVES = 400
ACTIONS = 25
STATES_PER_BOUNDARY = 30
STATES_PER_LIFE_LEAST = 150
INTERRUPTED_LIVES = 60
STATES_INTERRUPTED = 12
THOROUGH_EVERY = 4

LABELS_OF_A_CRASH = {
    "newest snapshot", "unfinished roll", "unfinished removal", "files whole", "whole", "zeros at the tail",
    "torn tail",
}  # fmt: skip


class Outcome(NamedTuple):
    """What an opening made of a state."""

    seen: tuple[Seen, ...]
    end: int
    number: int
    journal_id: int


def recover(disk: SimulatedDisk, like: Journal, *, thorough: bool) -> Outcome:
    """Opens the journal, and checks what can be checked without knowing its past."""
    journal = Journal(disk, like.options)
    journal.number = 10_000
    store = journal.open()
    recovery = store.recovery
    require(set(recovery.labels) <= LABELS_OF_A_CRASH, 6, f"it was recovered by {recovery.labels}")
    require(not recovery.warnings, 6, f"it warns: {recovery.warnings}")
    require(store.forced_offset == store.end_offset, 3, f"forced {store.forced_offset}, end {store.end_offset}")
    outcome = Outcome(tuple(journal.state.seen), store.end_offset, journal.numbers[-1], store.journal_id)
    rows = {row[0]: row for row in outcome.seen}
    for place in journal.state.held():
        require(row_of(store.read(place)) == rows[place], 4, f"the held entry at place {place} is another")
    if thorough:
        _again(journal, outcome)
    return outcome


def _again(journal: Journal, outcome: Outcome) -> None:
    """The same after another power cut, and a life after it."""
    again = journal.crash("nothing")
    found = Outcome(tuple(again.state.seen), again.store.end_offset, again.numbers[-1], again.store.journal_id)
    require(found == outcome, 7, f"first {outcome}, then {found}")
    again.sent(2, 4)
    again.checkpoint()
    again.sent(1, 4)
    last = again.crash("nothing")
    require(last.state.seen == again.state.seen, 8, "what was appended later is not there")


def check(outcome: Outcome, known: Known) -> None:
    """What was found against what was known."""
    seen, written = outcome.seen, known.written
    require(seen[: known.forced] == written[: known.forced], 1, f"{known.forced} were forced, {len(seen)} are there")
    both = min(len(seen), len(written))
    require(seen[:both] == written[:both], 2, "what is there is not what was written")
    more = tuple(row[1:] for row in seen[len(written) :])
    require(more == known.pending[: len(more)], 2, f"{more} came back, {known.pending} was under way")
    require(outcome.end >= known.end and outcome.number >= known.number, 5, f"{outcome[1:3]} behind {known[3:5]}")
    require(outcome.journal_id == known.journal_id, 5, "it has another name")


class Examination:
    """`digests` are the distinct states that were looked at, over all lives."""

    def __init__(self) -> None:
        self.digests: set[bytes] = set()
        self.opened = 0
        self.boundaries = 0

    def life(self, name: str, generator) -> None:  # type: ignore[no-untyped-def]
        life = Life(generator)
        outcomes: dict[bytes, Outcome] = {}
        for boundary in life.run(ACTIONS):
            self.boundaries += 1
            for number, state in enumerate(crash_states(boundary.moment, STATES_PER_BOUNDARY, generator)):
                try:
                    self._state(state, boundary, life, outcomes)
                except Exception as error:
                    place = f"life {name}, boundary {boundary.number} ({boundary.after}), state {number}"
                    raise Broken(f"{place}: {error!r}") from error

    def _state(self, state: SimulatedDisk, boundary: Boundary, life: Life, outcomes: dict[bytes, Outcome]) -> None:
        self.digests.add(state.digest)
        outcome = outcomes.get(state.digest)
        if outcome is None:
            self.opened += 1
            thorough = self.opened % THOROUGH_EVERY == 0
            outcome = outcomes[state.digest] = recover(state, life.journal, thorough=thorough)
        check(outcome, boundary.known)


@pytest.mark.long
def test_whatever_a_power_cut_leaves_of_a_journal_opens_with_everything_that_was_promised() -> None:
    examination = Examination()
    lives = scaled(LIVES)
    for number in range(lives):
        examination.life(f"{number} of seed {SEED}", seeded("journal", number))
    print(f"{len(examination.digests)} distinct states at {examination.boundaries} boundaries")
    assert len(examination.digests) >= lives * STATES_PER_LIFE_LEAST * (0.6 if lives < 20 else 1)


def test_a_power_cut_in_the_middle_of_a_journals_recovery_changes_nothing() -> None:
    interrupted = 0
    for number in range(scaled(INTERRUPTED_LIVES)):
        generator = seeded("journal interrupted", number)
        life = Life(generator)
        boundaries = life.run(20)
        for boundary in generator.sample(boundaries, min(STATES_INTERRUPTED, len(boundaries))):
            state = boundary.moment.crash(generator)
            expected = recover(state.crash(keep="everything"), life.journal, thorough=False)
            moments: list[Moment] = []
            disturbed = Journal(state, life.journal.options)
            state.after = lambda kind, path, state=state, moments=moments: moments.append(Moment(state))  # type: ignore[misc]
            disturbed.open()
            for moment in moments:
                for again in crash_states(moment, 6, generator):
                    found = recover(again, life.journal, thorough=False)
                    where = f"life {number} of seed {SEED}, {boundary.after}"
                    require(found == expected, 7, f"{where}: undisturbed {expected}, disturbed {found}")
                    interrupted += 1
    assert interrupted > 0


HONEST_FORCE: Callable[[SimulatedFile], None] = SimulatedFile.force


def no_entry_force(file: SimulatedFile) -> None:
    """A journal that forgets to force its entries."""
    if not file.path.endswith(".journal"):
        HONEST_FORCE(file)


def no_checkpoint_force(file: SimulatedFile) -> None:
    """A journal that forgets to force its checkpoint."""
    if not file.path.endswith("checkpoint"):
        HONEST_FORCE(file)


def no_snapshot_force(file: SimulatedFile) -> None:
    """A journal that forgets to force its snapshots."""
    if not file.path.endswith(".snapshot.new"):
        HONEST_FORCE(file)


def no_folder_force(disk: SimulatedDisk, path: str) -> None:
    """A journal that forgets to force new names."""


@pytest.mark.parametrize(
    ("owner", "name", "lie"),
    [
        (SimulatedFile, "force", no_entry_force),
        (SimulatedFile, "force", no_checkpoint_force),
        (SimulatedFile, "force", no_snapshot_force),
        (SimulatedDisk, "force_folder", no_folder_force),
    ],
    ids=["entries", "checkpoint", "snapshots", "folders"],
)
def test_the_rig_sees_an_fsync_that_a_journal_left_out(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, lie: Callable[..., None]
) -> None:
    monkeypatch.setattr(owner, name, lie)
    with pytest.raises((Broken, AssertionError)):
        for number in range(40):
            Examination().life(str(number), seeded("a lie", number))
