"""Planted bugs: the command line: its output, and how it parses what users type."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

OUTPUT: Final = "tests/cli/test_output.py"
TERMINAL: Final = "tests/cli/test_terminal.py"

_OUTPUT = "tfmq/cli/output.py"

COMMAND_LINE: Final = (
    Mutant(
        "times-in-utc",
        "times are shown in the time zone of this machine, with their offset",
        _OUTPUT,
        "            time = (EPOCH + timedelta(milliseconds=time)).astimezone()\n",
        "            time = EPOCH + timedelta(milliseconds=time)\n",
        [f"{OUTPUT}::test_a_time_is_read_as_it_is_shown"],
    ),
    Mutant(
        "words-broken-in-a-narrow-terminal",
        "no word, number or time of a list is broken across lines in a narrow terminal",
        _OUTPUT,
        "    if sys.stdout.isatty() and sum(least) + edges > console.width:\n",
        "    if sys.stdout.isatty() and console.width < edges:\n",
        [f"{OUTPUT}::test_no_word_time_or_number_of_a_list_is_broken_however_narrow_the_terminal_is"],
    ),
    Mutant(
        "bar-at-once",
        "work that takes less than a second shows no progress bar",
        "tfmq/cli/output.py",
        "    if BAR_AFTER_SECONDS:\n",
        "    if not BAR_AFTER_SECONDS:\n",
        [f"{TERMINAL}::test_short_work_shows_no_bar"],
    ),
    Mutant(
        "messages-sent-after-one-that-failed",
        "tfmq send leaves no gap in its input that nothing shows before the end",
        "tfmq/cli/send.py",
        "            if producer._core.accumulator.failed_messages:\n",
        "            if False:\n",
        ["tests/cli/test_send.py::test_nothing_is_read_or_sent_after_a_message_that_could_not_be_delivered"],
    ),
    Mutant(
        "interrupted-send-counts-nothing",
        "tfmq send that is interrupted says how many messages were delivered",
        "tfmq/cli/send.py",
        '            count = producer.stats()["messages"]\n',
        '            count = producer.stats()["lost_messages"]\n',
        ["tests/cli/test_send.py::test_ctrl_c_says_how_many_messages_were_delivered"],
    ),
    Mutant(
        "bar-shares-the-terminal",
        "a progress bar never shares a line with output",
        "tfmq/cli/read.py",
        "None, follow or sys.stdout.isatty()) as advance",
        "None) as advance",
        [f"{TERMINAL}::test_no_command_shows_a_bar_and_its_output_on_one_line"],
    ),
    Mutant(
        "log-line-on-the-bar",
        "log lines are printed above the progress bar",
        "tfmq/cli/main.py",
        "        self.stream = sys.stderr\n",
        "        self.stream = sys.__stderr__\n",
        [f"{TERMINAL}::test_what_is_said_meanwhile_stands_above_the_bar"],
    ),
    Mutant(
        "busy-without-a-word",
        "a send that waits for space at the broker says what it waits for",
        "tfmq/client/send/partition_sender.py",
        '        if float("-inf") < self._busy_since <= now - BUSY_LOG_SECONDS:\n',
        '        if self._busy_since <= float("-inf"):\n',
        ["tests/client/send/test_partition_sender.py::test_one_line_says_what_a_send_waits_for_once_it_waits_for_long"],
    ),
    Mutant(
        "negative-delay-is-at-once",
        "a delay below 0 is refused by the API and by the command line",
        "tfmq/client/send/delivery_time.py",
        "    if is_negative:\n",
        "    if is_negative and not isinstance(delay, timedelta):\n",
        ["tests/client/send/test_delivery_time.py::test_a_delay_below_0_is_refused_and_a_moment_that_is_over_is_not"],
    ),
    Mutant(
        "histogram-begins-anywhere",
        "ranges of a chosen length begin at times that do not depend on the current time",
        "tfmq/cli/delay.py",
        "    return round_edges(low, high, step, low if first else 0, high if end else TIME_MAX)\n",
        "    return round_edges(low, high, step, low, high if end else TIME_MAX)\n",
        ["tests/cli/test_delay.py::test_ranges_of_a_chosen_length_begin_at_round_times"],
    ),
    Mutant(
        "dry-run-resets",
        "group reset --dry-run changes nothing",
        "tfmq/cli/group.py",
        "            offsets = {number: located[number].offset for number in numbers}\n",
        "            offsets = {n: admin.reset_group(name, topic, place, n)[n] for n in numbers}\n",
        ["tests/cli/test_group.py::test_a_reset_shows_the_old_offsets_too_and_can_be_tried"],
    ),
    Mutant(
        "purge-beyond-the-end",
        "a purge before an offset after the end removes nothing",
        "tfmq/client/admin/admin.py",
        "    if type(position) is int and position > located.end_offset:\n",
        "    if type(position) is int and position > located.end_offset << 40:\n",
        ["tests/client/admin/test_admin.py::test_a_purge_before_what_is_not_there_yet_removes_nothing"],
    ),
    Mutant(
        "reset-of-a-misspelled-group",
        "a reset creates a group only where that is requested",
        "tfmq/client/admin/admin.py",
        "        if not create:\n",
        "        if not create and not name:\n",
        ["tests/client/admin/test_admin.py::test_a_group_that_is_not_there_is_set_only_where_that_is_meant"],
    ),
    Mutant(
        "delay-of-a-thousand-years",
        "a delay above the limit is refused with the limit",
        "tfmq/client/send/delivery_time.py",
        "    if delay_ms > DELAY_DAYS_MAX * 86_400_000:\n",
        "    if delay_ms > DELAY_DAYS_MAX * 864_000_000:\n",
        ["tests/client/send/test_delivery_time.py::test_a_delay_above_the_limit_is_refused_with_the_limit"],
    ),
    Mutant(
        "rate-that-is-no-number",
        "--rate is a number above 0",
        "tfmq/cli/option_types.py",
        '            if 0 < float(text) < float("inf"):\n',
        "            if not float(text) <= 0:\n",
        ["tests/cli/test_dlq.py::test_what_is_wrong_is_reported_in_a_sentence"],
    ),
    Mutant(
        "dead-letter-before-its-failure",
        "a failed call is logged before its consequences",
        "tfmq/dead_letters/store.py",
        ("        on_stored(found.state)\n        self._log_if_dead(found)\n"),
        ("        self._log_if_dead(found)\n        on_stored(found.state)\n"),
        ["tests/client/worker/test_runner.py", "tests/client/worker/test_message_context.py"],
    ),
    Mutant(
        "dead-owner-is-shown",
        "a dead member is not shown as the owner of a partition",
        "tfmq/broker/groups/coordinator.py",
        '            return "" if holder is None else holder.id\n',
        '            return (row.owners[key].member if key in row.owners else "") if holder is None else holder.id\n',
        ["tests/broker/groups/test_group.py"],
    ),
    Mutant(
        "percent-at-the-end",
        "an unknown letter of --format is reported as wrong usage before anything is read",
        "tfmq/cli/read.py",
        "        if letter not in FIELDS:\n",
        "        if letter and letter not in FIELDS:\n",
        ["tests/cli/test_read.py::test_an_unknown_letter_of_a_template_is_wrong_usage_before_anything_is_read"],
    ),
    Mutant(
        "nothing-saved-is-minus-one",
        "a partition without a committed offset has no offset, not -1",
        "tfmq/cli/group.py",
        "    return None if number < 0 else number\n",
        "    return number\n",
        ["tests/cli/test_group.py::test_where_nothing_is_saved_there_is_no_offset_and_not_minus_one"],
    ),
    Mutant(
        "unread-partition-is-exit-code-0",
        "tfmq read exits with code 1 where a partition could not be read",
        "tfmq/cli/read.py",
        "    if not found.is_served:\n",
        "    if found.epoch < 0:\n",
        ["tests/cli/test_read.py::test_a_partition_that_cannot_be_read_is_named_after_the_rest_and_is_exit_code_1"],
    ),
    Mutant(
        "not-served-is-not-stopped",
        "the status names partitions that are not served",
        "tfmq/broker/broker.py",
        "            if isinstance(each, str) or each.log.stopped is not None\n",
        "            if not isinstance(each, str) and each.log.stopped is not None\n",
        ["tests/broker/test_broker.py::test_it_names_what_is_not_served"],
    ),
)
