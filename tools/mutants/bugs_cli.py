"""Bugs to plant in the command line: what it shows, and how it reads what people type."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

OUTPUT: Final = "tests/cli/test_output.py"
TERMINAL: Final = "tests/cli/test_terminal.py"

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
    Mutant(
        "bar-shares-the-terminal",
        "a progress bar never stands on a line with output",
        "tfmq/cli/read.py",
        "None, follow or sys.stdout.isatty()) as advance",
        "None) as advance",
        [f"{TERMINAL}::test_no_command_shows_a_bar_and_its_output_on_one_line"],
    ),
    Mutant(
        "log-line-on-the-bar",
        "what is logged meanwhile stands above the progress bar",
        "tfmq/cli/main.py",
        "        self.stream = sys.stderr\n",
        "        self.stream = sys.__stderr__\n",
        [f"{TERMINAL}::test_what_is_said_meanwhile_stands_above_the_bar"],
    ),
    Mutant(
        "busy-without-a-word",
        "a send that waits for room at the broker says what it waits for",
        "tfmq/client/stream.py",
        '        if float("-inf") < self._busy_since <= now - SILENT_SECONDS:\n',
        '        if self._busy_since <= float("-inf"):\n',
        ["tests/client/test_stream.py::test_one_line_says_what_a_send_waits_for_once_it_waits_for_long"],
    ),
)
