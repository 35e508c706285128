"""Bugs to plant in the command line: what it shows, and how it reads what people type."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

OUTPUT: Final = "tests/cli/test_output.py"

_OUTPUT = "tfmq/cli/output.py"

COMMAND_LINE: Final = (
    Mutant(
        "times-in-utc",
        "times are shown in the zone of this machine, with their offset",
        _OUTPUT,
        "            time = (EPOCH + timedelta(milliseconds=time)).astimezone()\n",
        "            time = EPOCH + timedelta(milliseconds=time)\n",
        [f"{OUTPUT}::test_a_time_is_read_as_it_is_shown"],
    ),
    Mutant(
        "words-broken-in-a-narrow-terminal",
        "no word, number or time of a list is broken in a narrow terminal",
        _OUTPUT,
        "    if sys.stdout.isatty() and sum(least) + edges > console.width:\n",
        "    if sys.stdout.isatty() and console.width < edges:\n",
        [f"{OUTPUT}::test_no_word_time_or_number_of_a_list_is_broken_however_narrow_the_terminal_is"],
    ),
)
