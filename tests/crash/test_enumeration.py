"""Every state that a power cut could leave, at every boundary of seeded lives of a log. See
tests.crash.invariants.

At scale 1 more than 100,000 distinct states. A failure names the life; TFMQ_TEST_SEED brings it back.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from journal.testing import SimulatedDisk, SimulatedFile
from tests.crash.examination import Examination, interrupt, some_states
from tests.crash.invariants import Broken
from tests.crash.workload import Life
from tests.scale import SEED, scaled, seeded

LIVES = 400
"""About 370 states each."""
STATES_PER_LIFE_LEAST = 260

JOINT_LIVES = 30
INTERRUPTED_LIVES = 60
STATES_INTERRUPTED = 12


def test_whatever_a_power_cut_leaves_of_a_log_opens_with_everything_that_was_promised() -> None:
    examination = Examination()
    lives = scaled(LIVES)
    for number in range(lives):
        examination.life(f"{number} of seed {SEED}", seeded("one log", number))
    print(f"{len(examination.digests)} distinct states at {examination.boundaries} boundaries")
    assert len(examination.digests) >= lives * STATES_PER_LIFE_LEAST * (0.6 if lives < 20 else 1)


def test_whatever_a_power_cut_leaves_of_several_logs_fsynced_together() -> None:
    examination = Examination(limit=20)
    for number in range(scaled(JOINT_LIVES)):
        examination.life(f"{number} of seed {SEED}", seeded("three logs", number), logs=3)
    print(f"{len(examination.digests)} distinct states at {examination.boundaries} boundaries")
    assert examination.opened > 0


def test_a_power_cut_in_the_middle_of_recovery_changes_nothing() -> None:
    interrupted = 0
    for number in range(scaled(INTERRUPTED_LIVES)):
        generator = seeded("interrupted", number)
        life = Life(generator)
        for boundary, state in some_states(life.run(20), STATES_INTERRUPTED, generator):
            for folder, candidates in boundary.candidates.items():
                log_ids = tuple(known.log_id for known in candidates)
                try:
                    interrupted += interrupt(state, folder, log_ids, life.options, generator)
                except Broken as error:
                    raise Broken(f"life {number} of seed {SEED}, {boundary.after}: {error}") from error
    assert interrupted > 0


def no_force(file: SimulatedFile) -> None:
    """A log that forgets to force its records."""
    if not file.path.endswith(".zxQueue"):
        HONEST_FORCE(file)


def no_mark_force(file: SimulatedFile) -> None:
    """A log that forgets to force its marks."""
    if not file.path.endswith("log.mark"):
        HONEST_FORCE(file)


def no_folder_force(disk: SimulatedDisk, path: str) -> None:
    """A log that forgets to force new names."""


def no_sync(disk: SimulatedDisk, anchor: object) -> None:
    """A group commit that forgets to call the system."""


HONEST_FORCE: Callable[[SimulatedFile], None] = SimulatedFile.force


@pytest.mark.long
@pytest.mark.parametrize(
    ("owner", "name", "lie"),
    [
        (SimulatedFile, "force", no_force),
        (SimulatedFile, "force", no_mark_force),
        (SimulatedDisk, "force_folder", no_folder_force),
        (SimulatedDisk, "sync_file_system", no_sync),
    ],
    ids=["records", "marks", "folders", "joint"],
)
def test_the_rig_sees_an_fsync_that_was_left_out(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, lie: Callable[..., None]
) -> None:
    monkeypatch.setattr(owner, name, lie)
    with pytest.raises((Broken, AssertionError)):
        for number in range(40):
            Examination().life(str(number), seeded("a lie", number), logs=2)
