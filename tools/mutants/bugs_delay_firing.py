"""Planted bugs: when a delayed message is delivered, in which order, once, and what is reported."""

from typing import Final

from tools.mutants.mutant import Mutant

CONTRACT: Final = "tests/broker/test_delay_contract.py"
CRASHES: Final = "tests/crash/test_delay_enumeration.py"
RANDOM: Final = "tests/delay/test_simulation_queue.py"
DELAY: Final = "tests/broker/test_delay_commands.py"
LINE: Final = "tests/delay/test_target_queue.py"

DELAY_FIRING: Final = (
    Mutant(
        "fires-a-tick-early",
        "a delayed message is never early",
        "tfmq/delay/dispatcher.py",
        "        limit = min(now, window.fires_below - 1)\n",
        "        limit = min(now + self.tick_ms, window.fires_below - 1)\n",
        [CONTRACT],
    ),
    Mutant(
        "stopped-arrivals-are-asked-again-and-again",
        "the broker continues while the arrival log is stopped",
        "tfmq/delay/dispatcher.py",
        "                self.non_durable.log_stopped()\n",
        ("                self._fsync_requested_to = 0\n                self.non_durable.log_stopped()\n"),
        [CONTRACT + "::test_arrivals_that_fail_beside_a_non_durable_one_keep_no_worker_busy"],
    ),
    Mutant(
        "fires-half-a-second-late",
        "without load a delayed message is at most one tick late",
        "tfmq/delay/dispatcher.py",
        "            times.append(-(-due // self.tick_ms) * self.tick_ms)\n",
        "            times.append(-(-due // 500) * 500)\n",
        [CONTRACT],
    ),
    Mutant(
        "fires-what-may-still-be-lost",
        "no message is delivered whose due time follows an arrival that is not durable",
        "tfmq/delay/dispatcher.py",
        "            limit = min(limit, unsure - 1)\n",
        "            limit = min(limit, unsure + 3_600_000)\n",
        [RANDOM, "tests/broker/test_delayed_send.py"],
    ),
    Mutant(
        "fires-beside-a-load",
        "messages with a due time beyond the old memory window wait until a load has ended",
        "tfmq/delay/dispatcher.py",
        "        limit = min(now, window.fires_below - 1)\n",
        "        limit = min(now, window.end - 1)\n",
        [CONTRACT],
        scale=0.1,
    ),
    Mutant(
        "source-of-more-than-was-written",
        "the stored apply position covers the messages of the same append, not those of the next",
        "tfmq/delay/target_queue.py",
        "        rows = rows.head(piece.rows)\n",
        "",
        [DELAY],
    ),
    Mutant(
        "delivered-reported-before-it-is-fsynced",
        "a delivery is reported once a power cut cannot undo it, a cancel once the message cannot be delivered",
        "tfmq/delay/target_queue.py",
        "        return last is not None and turn <= last.last\n",
        "        return False\n",
        [RANDOM, CONTRACT],
        scale=0.1,
    ),
    Mutant(
        "fires-while-its-cancel-is-written",
        "of a concurrent cancel and delivery exactly one happens",
        "tfmq/delay/cancellation.py",
        "            self.target_queues.locked.add(turn)\n",
        "            self.target_queues.locked.discard(turn)\n",
        [RANDOM, CONTRACT],
        scale=0.1,
    ),
    Mutant(
        "cancelled-reported-before-it-is-fsynced",
        "a message is reported as cancelled once a power cut cannot undo the cancel",
        "tfmq/delay/cancellation.py",
        "            self.arrival_log.when_forced(end, durable)\n",
        "            durable(None)\n",
        ["tests/delay/test_cancellation.py::test_cancelled_is_reported_only_when_it_is_on_the_disk"],
    ),
    Mutant(
        "cancelled-messages-fire-all-the-same",
        "a cancelled message is never delivered",
        "tfmq/delay/target_queue.py",
        "    if queues.cancelled.any_between(rows.dues[0], rows.dues[-1]):\n",
        "    if queues.cancelled.any_between(rows.dues[-1] + 1, rows.dues[-1] + 1):\n",
        [RANDOM, CRASHES],
        scale=0.1,
    ),
    Mutant(
        "broker-time-follows-the-wall-clock",
        "no step of the wall clock moves a delay",
        "tfmq/delay/due_time.py",
        "        now = self._start_ms + int((self._clock.monotonic() - self._start_monotonic) * 1000 + ROUNDING_MS)\n",
        "        now = max(self._start_ms, self._clock.wall_ms())\n",
        [CONTRACT],
    ),
    Mutant(
        "broker-time-goes-back-at-a-start",
        "a clock that is slow at the start does not make delivered messages due again",
        "tfmq/delay/due_time.py",
        "        self._start_ms = max(wall_ms, floor_ms, self._last)\n",
        "        self._start_ms = max(wall_ms, self._last)\n",
        [CONTRACT],
    ),
    Mutant(
        "times-do-not-wait-for-the-wall-clock",
        "a message for a time of day is never delivered before the wall clock shows that time",
        "tfmq/delay/target_queue.py",
        "    if any(rows.flags) and not queues.broker_clock.is_steady:\n",
        "    if any(rows.flags) and queues.stopping:\n",
        [CONTRACT],
    ),
    Mutant(
        "a-stopped-partition-keeps-the-window",
        "a stopped partition delays only its own delayed messages",
        "tfmq/delay/target_queue.py",
        ("        if result is None:\n            self._owner.flow_control.release(size_bytes)\n"),
        ("        if result is None:\n            self._owner.flow_control.release(0)\n"),
        [CONTRACT, "tests/broker/test_delay_commands.py"],
    ),
    Mutant(
        "a-catch-up-takes-the-whole-turn",
        "messages that became due in a downtime are delivered at a limited rate, beside other requests",
        "tfmq/delay/append_limits.py",
        "TURN_ROWS_MAX: Final = 1024\n",
        "TURN_ROWS_MAX: Final = 1 << 40\n",
        [CONTRACT],
    ),
    Mutant(
        "a-deleted-topic-is-asked-without-end",
        "messages for a deleted topic are dropped and counted",
        "tfmq/delay/target_queue.py",
        "        self._owner.dropped += count\n",
        "        self._owner.dropped += 0\n",
        [LINE],
    ),
    Mutant(
        "due-now-is-due-before-what-fired",
        "a new message is always due after everything that was delivered",
        "tfmq/delay/due_time.py",
        "    due = min(max(due, now_ms + 1), DUE_MAX)\n",
        "    due = min(max(due, now_ms), DUE_MAX)\n",
        [CONTRACT],
    ),
    Mutant(
        "the-end-of-time-is-not-listed",
        "a list without an end contains all waiting messages",
        "tfmq/broker/delay_commands.py",
        "        end_due = request.end_due + (request.end_due == DUE_MAX)\n",
        "        end_due = min(request.end_due, DUE_MAX)\n",
        [CONTRACT],
    ),
)
