"""Planted bugs: schedules: their times, what is sent, and what is stored of them."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

CRON: Final = "tests/delay/test_cron.py"
MISFIRE: Final = "tests/broker/test_scheduler.py"
WATCH: Final = "tests/broker/test_scheduler.py"
FIRING: Final = "tests/broker/test_scheduler.py"
SCHEDULES_TEST: Final = "tests/broker/test_schedule_commands.py"
RUN: Final = "tests/broker/test_scheduler.py"
BOOK: Final = "tests/broker/test_catalog_state.py"

TIMES: Final = (
    Mutant(
        "sunday-is-one-number-only",
        "0 and 7 are both Sunday",
        "tfmq/delay/cron.py",
        "(number + 6) % 7 for number in weekdays",
        "min(number + 6, number - 1) % 7 if number else 0 for number in weekdays",
        [CRON],
    ),
    Mutant(
        "both-days-must-fit",
        "where day of month and day of week are both given, either may match",
        "tfmq/delay/cron.py",
        'either = not day_text.startswith("*") and not weekday_text.startswith("*")',
        'either = day_text.startswith("*") and weekday_text.startswith("?")',
        [CRON],
    ),
    Mutant(
        "a-time-that-comes-twice-is-sent-twice",
        "a local time that occurs twice is sent the first time",
        "tfmq/delay/cron.py",
        "        if not self._every_hour:\n            return [first.astimezone(UTC)]\n",
        "",
        [CRON],
    ),
    Mutant(
        "every-hour-misses-the-hour-that-comes-twice",
        "a schedule of every hour includes both hours of a local time that occurs twice",
        "tfmq/delay/cron.py",
        "        if not self._every_hour:\n",
        "        if self.expression:\n",
        [CRON],
    ),
    Mutant(
        "no-search-after-a-change-of-the-clock",
        "a skipped time is reported the same wherever the search begins",
        "tfmq/delay/cron.py",
        "        start = after.astimezone(self.zone).replace(tzinfo=None, fold=0) - self._clock_change_near(after)\n",
        "        start = after.astimezone(self.zone).replace(tzinfo=None, fold=0)\n",
        [CRON],
    ),
    Mutant(
        "first-in-the-calendar-is-taken-for-first-in-time",
        "times after a clock change come before skipped ones that are later",
        "tfmq/delay/cron.py",
        ("                if local - first >= self._clock_change_near(best):\n                    break\n"),
        "                break\n",
        [CRON],
    ),
    Mutant(
        "skip-sends-what-was-missed",
        "with the rule skip no missed time is sent",
        "tfmq/broker/scheduler.py",
        "now_ms - latest >= GRACE_MS",
        "now_ms - latest >= GRACE_MS * 1_000_000",
        [MISFIRE],
    ),
    Mutant(
        "all-sends-without-an-end",
        "the rule all sends at most the newest thousand",
        "tfmq/broker/scheduler.py",
        "        return cron.last_moments(after_ms, now_ms, SEND_ALL_MAX)\n",
        "        return cron.last_moments(after_ms, now_ms, SEND_ALL_MAX * 2)\n",
        [MISFIRE],
    ),
)

SENDING: Final = (
    Mutant(
        "the-append-names-the-first-of-its-times",
        "the position of an append is the last of its times",
        "tfmq/broker/scheduler.py",
        "Source(*self.source, moments_ms[-1], 0)",
        "Source(*self.source, moments_ms[0], 0)",
        [RUN, FIRING],
    ),
    Mutant(
        "no-fsync-of-scheduled-messages",
        "a scheduled message is made durable at once",
        "tfmq/broker/scheduler.py",
        "            self._apply_target.fsync_to(result, partial(self._append_durable, run, rest))\n",
        "            self._append_durable(run, rest, None)\n",
        [FIRING],
    ),
    Mutant(
        "a-clock-that-is-set-back-is-not-seen",
        "times that were left out while the clock was wrong are sent when it is right",
        "tfmq/broker/scheduler.py",
        "            self._set_back(now)\n",
        "            pass\n",
        [FIRING],
    ),
    Mutant(
        "no-rounds",
        "a suspend of the machine or a change of the clock is noticed soon",
        "tfmq/broker/scheduler.py",
        "        if _is_finished(self._round):\n",
        "        if _is_finished(self._round) and self._round is not None:\n",
        [FIRING],
    ),
    Mutant(
        "what-cannot-be-sent-is-passed",
        "a stopped partition's schedules wait for it",
        "tfmq/broker/scheduler.py",
        (
            "            self.retry_later(run, error)\n"
            "            return\n"
            "        # Determine the times to send for; in a worker if the misfire rule is `all` and several are due.\n"
        ),
        (
            "            self.skip_due(run, str(error))\n"
            "            return\n"
            "        # Determine the times to send for; in a worker if the misfire rule is `all` and several are due.\n"
        ),
        [FIRING],
    ),
    Mutant(
        "the-resumption-is-not-reported",
        "a resumed partition gets its scheduled messages at once",
        "tfmq/broker/broker.py",
        "        self.schedule_commands.scheduler.partition_resumed(log_id)\n",
        "        pass\n",
        [FIRING],
    ),
    Mutant(
        "all-are-sent-in-one-turn",
        "many schedules that are due together leave time for other requests",
        "tfmq/broker/scheduler.py",
        "        for _ in range(PORTION_STEPS):\n",
        "        for _ in range(PORTION_STEPS * 10):\n",
        [FIRING],
    ),
    Mutant(
        "a-portion-takes-its-time",
        "the work of one turn is bounded in time, too",
        "tfmq/broker/scheduler.py",
        "            if self._timers.now() > end:\n",
        "            if end > self._timers.now() + PORTION_SECONDS:\n",
        [WATCH],
    ),
    Mutant(
        "unsent-time-is-never-tried-again",
        "a time that could not be sent is tried again every few seconds",
        "tfmq/broker/scheduler.py",
        "                self._retry_at = self._timers.now() + ROUND_SECONDS\n",
        "                self._retry_at = self._timers.now() + ROUND_SECONDS * 1000\n",
        [WATCH],
    ),
)

KEEPING: Final = (
    Mutant(
        "bound-to-the-new-topic-from-the-beginning",
        "times that the old topic got are not sent to the new one",
        "tfmq/broker/schedule_commands.py",
        "incarnation=topic.incarnation, partition=number, through_ms=now)",
        "incarnation=topic.incarnation, partition=number)",
        [SCHEDULES_TEST],
    ),
    Mutant(
        "resumed-from-where-it-was-paused",
        "times during a pause are not reported as missed",
        "tfmq/broker/schedule_commands.py",
        "self._change(run, reply_described, paused=False, through_ms=now)",
        "self._change(run, reply_described, paused=False)",
        [SCHEDULES_TEST],
    ),
    Mutant(
        "sends-while-a-pause-is-on-its-way",
        "nothing is sent between the request to pause and its reply",
        "tfmq/broker/scheduler.py",
        "        return self.timer.is_started and here and not run.is_changing and not run.row.paused\n",
        "        return self.timer.is_started and here and not run.row.paused\n",
        [SCHEDULES_TEST],
    ),
    Mutant(
        "a-new-name-under-the-old-id",
        "after a wrong clock a resumed schedule continues under another id",
        "tfmq/broker/schedule_commands.py",
        "run.row._replace(id=id, through_ms=now, paused=False)",
        "run.row._replace(id=run.row.id or id, through_ms=now, paused=False)",
        [FIRING],
    ),
    Mutant(
        "what-is-being-made-is-not-counted",
        "several schedules that are created in one turn count against the limit",
        "tfmq/broker/schedule_commands.py",
        '        if len(self._running) + len(self._adding) >= self._limits["schedules"]:\n',
        '        if len(self._running) >= self._limits["schedules"]:\n',
        [SCHEDULES_TEST],
    ),
    Mutant(
        "a-late-state-brings-a-removed-one-back",
        "a late change of a deleted schedule changes nothing",
        "tfmq/broker/catalog_state.py",
        "        row = self._by_id.get(id)\n        if row is not None:\n",
        "        row = self._by_id[id]\n        if row is not None:\n",
        [BOOK],
    ),
    Mutant(
        "an-imitation-is-sent",
        "a payload that looks like a block trailer of its partition is refused",
        "tfmq/broker/schedule_commands.py",
        "                self.scheduler.check_batches(run, [run.batch(0)])\n",
        "                run.batch(0)\n",
        [SCHEDULES_TEST],
    ),
)

SCHEDULES: Final[tuple[Mutant, ...]] = TIMES + SENDING + KEEPING
