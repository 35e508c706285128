"""All planted bugs, by the part of the project that they are planted in."""

from __future__ import annotations

from typing import Final

from tools.mutants.bugs_journal import JOURNAL
from tools.mutants.mutant import Mutant

AREAS: Final[dict[str, tuple[Mutant, ...]]] = {"journal": JOURNAL}
BUGS: Final = tuple(bug for bugs in AREAS.values() for bug in bugs)
