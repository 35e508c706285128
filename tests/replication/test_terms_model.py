"""All interleavings of claimants, primaries and a sweeper: what must hold is in tools/rigs/terms_model.py."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.scale import SCALE, scaled, seeded
from tfmq.replication.entries import Position
from tools.rigs import terms_model
from tools.rigs.terms_model import Broken, Course, Model

TWO = (None, None)
THREE = (None, None, None)
QUICK = (
    Course(TWO),
    Course((Position(1, 1), None), slots=2),
    Course(TWO, slots=1, faults=1),
    Course((None,), slots=2, faults=1),
    Course((None,), slots=2, sweeps=1),
    Course((None,), slots=3, bases=1),
)
"""All states of these are visited in each run."""
FULL = (
    Course(THREE, successors=2),
    Course((Position(1, 1), None, Position(1, 2)), slots=4),
    Course(THREE, faults=1),
    Course(TWO, faults=2, successors=2),
    Course(TWO, slots=2, sweeps=1),
    Course(THREE, slots=1, window=1, sweeps=1),
    Course(TWO, slots=1, faults=1, sweeps=1, bases=1),
    Course(TWO, bases=2),
    Course((None,), slots=2, sweeps=1, bases=1),
    Course((Position(1, 1), None), slots=1, sweeps=1),
    Course((None,), slots=3, sweeps=2),
    Course((None,), slots=2, sweeps=1, faults=1),
)
LARGE = (
    Course(THREE, slots=6, successors=4, faults=3),
    Course(THREE, slots=4, successors=3, faults=2, sweeps=2, bases=1),
    Course((Position(1, 1), Position(1, 2), None), slots=4, successors=3, faults=2, sweeps=3, bases=1),
)
"""Of these, random courses are followed."""


@pytest.mark.parametrize("course", QUICK, ids=str)
def test_there_is_one_history_in_all_interleavings(course: Course) -> None:
    assert Model(course).explore() > 500


@pytest.mark.long
@pytest.mark.parametrize("course", FULL, ids=str)
def test_there_is_one_history_in_all_interleavings_of_larger_courses(course: Course) -> None:
    states = Model(course).explore(None if SCALE >= 1 else scaled(200_000))
    print(f"{states} states")
    assert states >= min(5_000, scaled(200_000))


@pytest.mark.parametrize("course", LARGE, ids=str)
def test_there_is_one_history_in_random_interleavings(course: Course) -> None:
    model = Model(course)
    for seed in range(scaled(1000)):
        model.walk(seeded(course, seed))
    assert len(model.ends) > 10


def test_a_sweeper_must_not_delete_fences() -> None:
    """A primary that slept for longer than the history would find its slot free again."""
    with pytest.raises(Broken, match="primary 1 counts slot 1, which was fenced before"):
        Model(Course((None,), slots=2, sweeps=1, keeps_fences=False)).explore()


@pytest.mark.parametrize("course", [Course(TWO, slots=1), Course((None,), faults=1)], ids=str)
def test_the_model_leaves_nothing_out(course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all orders of independent calls, and without merging places in the steps, the same ends are reached."""
    model = Model(course)
    states = model.explore()
    complete = Model(replace(course, reduced=False))
    assert complete.explore() > states and complete.ends == model.ends
    numbers = itertools.count()
    monkeypatch.setattr(terms_model, "_frames", lambda steps: next(numbers))
    unmerged = Model(course)
    assert unmerged.explore() > states and unmerged.ends == model.ends
