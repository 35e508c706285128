"""tests/planted-bugs.md: what is planted, which promise it breaks, and the test that caught it at its last try."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tools.mutants.mutant import ROOT, Mutant, Verdict

PAGE = ROOT / "tests" / "planted-bugs.md"

HEAD = """# Planted bugs

A test proves something only if it fails when the code is wrong. Each of these bugs is planted on purpose, one at a
time, in a copy of the checkout, and the tests named in it must fail. `tests/test_mutants.py` checks that every bug
still fits the code, and tries a seeded few of them in each run. `python -m tools.mutants --markdown` tries all of
them (`--only WORD`: some of them) and writes the results into this page; `make docs` writes the page without trying
any.

{count} bugs are planted. {tried} of them have a result below, of the last run that tried them: {caught} were caught, by
the test that is named. The other {untried} are marked *not tried here*: the test is the first one of those that should
catch them.
"""

NOTHING = "**nothing**"
UNTRIED = "*not tried here:* "
ROW = re.compile(r"^\| ([\w.'-]+) \| .* \| ([^|]+) \|$", re.MULTILINE)


def text(bugs: Sequence[Mutant], results: Mapping[str, str]) -> str:
    """The page. `results`: the name of a bug that was tried -> the cell that says what caught it."""
    tried = [results[bug.name] for bug in bugs if bug.name in results]
    caught = sum(cell != NOTHING for cell in tried)
    lines = [HEAD.format(count=len(bugs), tried=len(tried), caught=caught, untried=len(bugs) - len(tried))]
    folder = ""
    for bug in sorted(bugs, key=lambda bug: str(Path(bug.file).parent)):
        path = Path(bug.file)
        if str(path.parent) != folder:
            folder = str(path.parent)
            lines += [f"\n## {folder}\n", "| planted bug | in | promise it breaks | caught by |"]
            lines.append("|---|---|---|---|")
        by = results.get(bug.name, f"{UNTRIED}`{plain(bug.tests[0])}`")
        promise = bug.promise.replace("|", r"\|")
        lines.append(f"| {bug.name} | {path.name} | {promise} | {by} |")
    return "\n".join(lines) + "\n"


def results_of(verdicts: Iterable[Verdict]) -> dict[str, str]:
    """The results of a run, as the page has them."""
    return {v.mutant.name: f"`{plain(v.caught_by[0])}`" if v.caught else NOTHING for v in verdicts}


def results_in(page: str) -> dict[str, str]:
    """The results that a page has: those of the runs that wrote it."""
    return {name: cell for name, cell in ROW.findall(page) if not cell.startswith(UNTRIED)}


def caught_by_in(page: str) -> dict[str, str]:
    """The tests that caught the bugs in the runs that wrote a page, by the names of the bugs."""
    return {name: cell.strip("`") for name, cell in results_in(page).items() if cell != NOTHING}


def plain(test: str) -> str:
    """A test's name without its parameters."""
    return test.partition("[")[0]
