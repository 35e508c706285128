"""Bugs to plant in schedules: in their times, in what is sent, in what is kept of them."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

CRON: Final = "tests/delay/test_cron.py"
MISFIRE: Final = "tests/delay/test_cron.py"
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
        "where day of month and day of week are both named, either may fit",
        "tfmq/delay/cron.py",
        'either = not day_text.startswith("*") and not weekday_text.startswith("*")',
        'either = day_text.startswith("*") and weekday_text.startswith("?")',
        [CRON],
    ),
    Mutant(
        "a-time-that-comes-twice-is-sent-twice",
        "a time that comes twice is sent the first time",
        "tfmq/delay/cron.py",
        "        if not self._every_hour:\n            return [first.astimezone(UTC)]\n",
        "",
        [CRON],
    ),
    Mutant(
        "every-hour-misses-the-hour-that-comes-twice",
        "a schedule of every hour has none without it",
        "tfmq/delay/cron.py",
        "        if not self._every_hour:\n",
        "        if self.expression:\n",
        [CRON],
    ),
    Mutant(
        "no-look-behind-a-change-of-the-clock",
        "a skipped time is told the same from wherever one looks",
        "tfmq/delay/cron.py",
        "        start = after.astimezone(self.zone).replace(tzinfo=None, fold=0) - self._clock_change_near(after)\n",
        "        start = after.astimezone(self.zone).replace(tzinfo=None, fold=0)\n",
        [CRON],
    ),
    Mutant(
        "first-in-the-calendar-is-taken-for-first-in-time",
        "times behind a gap come before skipped ones that are later",
        "tfmq/delay/cron.py",
        ("                if local - first >= self._clock_change_near(best):\n                    break\n"),
        "                break\n",
        [CRON],
    ),
    Mutant(
        "skip-sends-what-was-missed",
        "by the rule skip nothing that was missed is sent",
        "tfmq/delay/cron.py",
        "now_ms - latest >= GRACE_MS",
        "now_ms - latest >= GRACE_MS * 1_000_000",
        [MISFIRE],
    ),
    Mutant(
        "all-sends-without-an-end",
        "all sends the newest thousand at most",
        "tfmq/delay/cron.py",
        "        return cron.last_moments(after_ms, now_ms, SEND_ALL_MAX)\n",
        "        return cron.last_moments(after_ms, now_ms, SEND_ALL_MAX * 2)\n",
        [MISFIRE],
    ),
)

SENDING: Final = (
    Mutant(
        "the-append-names-the-first-of-its-times",
        "the place of an append is the last of its times",
        "tfmq/broker/scheduler.py",
        "Source(*self.source, moments_ms[-1], 0)",
        "Source(*self.source, moments_ms[0], 0)",
        [RUN, FIRING],
    ),
    Mutant(
        "nobody-forces-what-was-sent",
        "what is sent is on the disk at once",
        "tfmq/broker/scheduler.py",
        "            self._destination.fsync_to(mark, partial(self._append_durable, run, rest))\n",
        "            self._append_durable(run, rest, None)\n",
        [FIRING],
    ),
    Mutant(
        "a-clock-that-is-set-back-is-not-seen",
        "what was left out while the clock was wrong comes when it is right",
        "tfmq/broker/scheduler.py",
        "            self._set_back(now)\n",
        "            pass\n",
        [FIRING],
    ),
    Mutant(
        "no-rounds",
        "a machine that slept, or a clock that was set, is seen soon",
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
            "        self._find_due_times(run, cron)\n"
        ),
        (
            "            self.skip_due(run, str(error))\n"
            "            return\n"
            "        self._find_due_times(run, cron)\n"
        ),
        [FIRING],
    ),
    Mutant(
        "the-resumption-is-not-told",
        "a resumed partition gets its own at once",
        "tfmq/broker/schedule_commands.py",
        "        self.scheduler.partition_resumed(log_id)\n",
        "        pass\n",
        [FIRING],
    ),
    Mutant(
        "all-are-sent-in-one-turn",
        "many that are due together leave others their turn",
        "tfmq/broker/scheduler.py",
        "        for _ in range(PORTION_STEPS):\n",
        "        for _ in range(PORTION_STEPS * 10):\n",
        [FIRING],
    ),
    Mutant(
        "a-portion-takes-its-time",
        "what is done in one turn is bounded in time, too",
        "tfmq/broker/scheduler.py",
        "            if self._timers.now() > end:\n",
        "            if end > self._timers.now() + PORTION_SECONDS:\n",
        [WATCH],
    ),
    Mutant(
        "what-is-parked-stays-parked",
        "what could not be sent is tried again every few seconds",
        "tfmq/broker/scheduler.py",
        "                self._retry_at = self._timers.now() + ROUND_SECONDS\n",
        "                self._retry_at = self._timers.now() + ROUND_SECONDS * 1000\n",
        [WATCH],
    ),
)

KEEPING: Final = (
    Mutant(
        "bound-to-the-new-topic-from-the-beginning",
        "what the old topic got is not sent to the new one",
        "tfmq/broker/schedule_commands.py",
        "incarnation=topic.incarnation, partition=number, through_ms=now)",
        "incarnation=topic.incarnation, partition=number)",
        [SCHEDULES_TEST],
    ),
    Mutant(
        "resumed-from-where-it-was-paused",
        "what passed while it was paused is not missed",
        "tfmq/broker/schedule_commands.py",
        "self._change(run, answer, paused=False, through_ms=now)",
        "self._change(run, answer, paused=False)",
        [SCHEDULES_TEST],
    ),
    Mutant(
        "sends-while-a-pause-is-on-its-way",
        "nothing is sent between the wish to pause and its answer",
        "tfmq/broker/scheduler.py",
        "        return self._timer.is_started and here and not run.is_changing and not run.row.paused\n",
        "        return self._timer.is_started and here and not run.row.paused\n",
        [SCHEDULES_TEST],
    ),
    Mutant(
        "a-new-name-under-the-old-id",
        "after a wrong clock a resumed schedule goes on under another id",
        "tfmq/broker/schedule_commands.py",
        "run.row._replace(id=id, through_ms=now, paused=False)",
        "run.row._replace(id=run.row.id or id, through_ms=now, paused=False)",
        [FIRING],
    ),
    Mutant(
        "what-is-being-made-is-not-counted",
        "several that come in one turn are counted against the limit",
        "tfmq/broker/schedule_commands.py",
        '        if len(self._running) + len(self._adding) >= self._limits["schedules"]:\n',
        '        if len(self._running) >= self._limits["schedules"]:\n',
        [SCHEDULES_TEST],
    ),
    Mutant(
        "a-late-state-brings-a-removed-one-back",
        "what comes late for a schedule that is gone changes nothing",
        "tfmq/broker/catalog_state.py",
        "        row = self._by_id.get(id)\n        if row is not None:\n",
        "        row = self._by_id[id]\n        if row is not None:\n",
        [BOOK],
    ),
    Mutant(
        "an-imitation-is-sent",
        "a payload that imitates a block trailer of its partition is refused",
        "tfmq/broker/schedule_commands.py",
        "                self.scheduler.check_batches(run, [run.batch(0)])\n",
        "                run.batch(0)\n",
        [SCHEDULES_TEST],
    ),
)

SCHEDULES: Final[tuple[Mutant, ...]] = TIMES + SENDING + KEEPING
