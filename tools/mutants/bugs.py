"""All planted bugs, by the part of the project that they are planted in."""

from __future__ import annotations

from typing import Final

from tools.mutants.bugs_broker import BROKER
from tools.mutants.bugs_client import CLIENT
from tools.mutants.bugs_journal import JOURNAL
from tools.mutants.bugs_server import SERVER
from tools.mutants.mutant import Mutant

BUGS: Final[tuple[Mutant, ...]] = JOURNAL + BROKER + SERVER + CLIENT
