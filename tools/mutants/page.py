"""tests/planted-bugs.md: what was planted, which promise it breaks, and the test that saw it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.mutants.mutant import Verdict

HEAD = """# Planted bugs

Tests prove little unless they fail when the code is wrong. So each of these bugs is planted on purpose, one at a
time, in a copy of the checkout, and the tests named with it must see it. `tests/test_mutants.py` holds every bug to
the code (a change that moves a promise elsewhere has to move its bug, too) and tries a seeded few of them in each
run; `python -m tools.mutants` tries all of them and writes this page with `--markdown tests/planted-bugs.md`.

{caught} of {count} are caught.
"""


def text(verdicts: Sequence[Verdict]) -> str:
    """The page."""
    caught = sum(verdict.caught for verdict in verdicts)
    lines = [HEAD.format(caught=caught, count=len(verdicts))]
    folder = ""
    for verdict in sorted(verdicts, key=lambda verdict: str(Path(verdict.mutant.file).parent)):
        path = Path(verdict.mutant.file)
        if str(path.parent) != folder:
            folder = str(path.parent)
            lines += [f"\n## {folder}\n", "| planted bug | in | promise it breaks | caught by |"]
            lines.append("|---|---|---|---|")
        by = f"`{plain(verdict.caught_by[0])}`" if verdict.caught else "**nothing**"
        lines.append(f"| {verdict.mutant.name} | {path.name} | {verdict.mutant.promise} | {by} |")
    return "\n".join(lines) + "\n"


def plain(test: str) -> str:
    """A test's name without its parameters."""
    return test.partition("[")[0]
