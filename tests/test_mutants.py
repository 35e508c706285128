"""The tests see what they claim: planted bugs are caught. See tests/planted-bugs.md."""

from __future__ import annotations

import pytest

from tests.scale import SCALE, seeded
from tools.mutants import page
from tools.mutants.bugs import BUGS
from tools.mutants.mutant import Mutant, missing_tests, tried_all, with_bug

TRIED_COUNT_MIN, TRIED_COUNT_MAX = 2, 6
"""Each takes some seconds; `python -m tools.mutants` tries all of them."""


def test_there_are_enough_and_each_has_a_name_of_its_own() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 45


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_every_planted_bug_still_fits_the_code_and_its_tests_are_there(bug: Mutant) -> None:
    with_bug(bug)
    assert bug.tests and missing_tests(bug) == []


def test_the_page_has_all_of_them_and_says_which_were_not_tried() -> None:
    """`make docs` writes it (tests/test_docs.py), and loses no result."""
    results = {BUGS[0].name: "`tests/test_docs.py::test_x`", BUGS[1].name: page.NOTHING}
    text = page.text(BUGS[:3], results)
    assert page.results_in(text) == results and text.count(page.UNTRIED) == 1
    assert "3 bugs are planted. 2 of them" in text and ": 1 were caught" in text and "other 1" in text
    assert page.text(BUGS[:3], page.results_in(text)) == text


@pytest.mark.long
def test_planted_bugs_are_caught() -> None:
    """A seeded few of them."""
    count = min(max(TRIED_COUNT_MIN, int(len(BUGS) * SCALE)), TRIED_COUNT_MAX)
    verdicts = list(tried_all(seeded("planted bugs").sample(BUGS, count)))
    print(*(f"{verdict.mutant.name}: {verdict.caught_by[:1]}" for verdict in verdicts), sep="\n")
    assert [f"{verdict.mutant.name} {verdict.trouble}" for verdict in verdicts if not verdict.caught] == []
