"""Planted bugs: delayed messages in files: the arrival log, buckets, what is deleted and when."""

from typing import Final

from tools.mutants.mutant import Mutant

CRASHES: Final = "tests/crash/test_delay_enumeration.py"
SLOW_FORCE: Final = "tests/crash/test_delay_slow_force.py"
RANDOM: Final = "tests/delay/test_simulation_queue.py"

DELAY_STORE: Final = (
    Mutant(
        "arrivals-go-before-they-are-in-buckets",
        "arrival log files are deleted once their messages are in buckets",
        "tfmq/delay/storage_scheduler.py",
        "        return min(self._file_references.offset, self._buckets.spilled_offset)\n",
        "        return self._arrival_log.log.forced_offset\n",
        [CRASHES],
        scale=0.01,
    ),
    Mutant(
        "broker-time-is-not-written-down",
        "broker time is never before the last checkpoint, whatever the clock shows at the start",
        "tfmq/delay/storage_scheduler.py",
        "        self._run_worker(partial(self._buckets.commit, now, self._broker_clock.encode_steps()), done)\n",
        "        self._run_worker(partial(self._buckets.commit, 0, self._broker_clock.encode_steps()), done)\n",
        ["tests/broker/test_delay_contract.py"],
    ),
    Mutant(
        "a-bucket-goes-before-its-deliveries-are-fsynced",
        "a bucket is deleted once everything in it is delivered and durable",
        "tfmq/delay/storage_scheduler.py",
        "        limits = (window.fires_below, window.wheel.next_due, queues.lowest_due, self._lowest_due())\n",
        (
            "        limits = (window.fires_below, window.wheel.next_due, queues.lowest_row_due,"
            " self._lowest_due())\n"
        ),
        [SLOW_FORCE],
    ),
    Mutant(
        "a-bucket-goes-before-it-is-loaded",
        "a bucket is kept until its messages were loaded",
        "tfmq/delay/storage_scheduler.py",
        "        limits = (window.fires_below, window.wheel.next_due, queues.lowest_due, self._lowest_due())\n",
        "        limits = (1 << 63, window.wheel.next_due, queues.lowest_due, self._lowest_due())\n",
        [CRASHES],
        scale=0.01,
    ),
    Mutant(
        "a-bucket-goes-once-it-is-loaded",
        "a bucket is kept as long as messages that were loaded from it wait in memory",
        "tfmq/delay/storage_scheduler.py",
        "        limits = (window.fires_below, window.wheel.next_due, queues.lowest_due, self._lowest_due())\n",
        "        limits = (window.fires_below, queues.lowest_due, self._lowest_due())\n",
        [CRASHES],
        scale=0.01,
    ),
    Mutant(
        "spilled-meanwhile-is-unknown",
        "a message is known while it is being moved to the buckets",
        "tfmq/delay/storage_scheduler.py",
        "        self._spilling = self.low, self.since\n",
        "        self._spilling = None, self.since\n",
        ["tests/delay/test_storage_scheduler.py", "tests/delay/test_storage_scheduler.py", CRASHES],
        scale=0.01,
    ),
    Mutant(
        "a-list-requested-during-a-spill-is-not-returned",
        "a list that is requested during a spill is returned when the spill has ended",
        "tfmq/delay/storage_scheduler.py",
        ("        self._tell_wanted()\n        self._more_fireable()\n"),
        "        self._more_fireable()\n",
        ["tests/delay/test_storage_scheduler.py", "tests/delay/test_delay_queue.py"],
    ),
    Mutant(
        "a-line-gives-way-for-nothing",
        "a target whose partition accepts messages again gets them, however old their files are",
        "tfmq/delay/storage_scheduler.py",
        "        if self._should_drop_blocked_rows and self._file_references.oldest_window_end <= needed:\n",
        "        if self._file_references.oldest_window_end:\n",
        ["tests/delay/test_storage_scheduler.py"],
    ),
    Mutant(
        "late-to-the-disk-is-passed-by",
        "a message that became durable only during a load is loaded after it",
        "tfmq/delay/memory_window.py",
        "max(self.disk_arrivals.low, self.fires_below) if self.disk_arrivals.count > 0 else None\n",
        "max(self.disk_arrivals.low, self.end) if self.disk_arrivals.count > 0 else None\n",
        ["tests/delay/test_memory_window.py"],
    ),
    Mutant(
        "cancels-are-forgotten-while-they-count",
        "a cancelled message stays cancelled as long as a file contains it",
        "tfmq/delay/storage_scheduler.py",
        "        low = min(self.lowest_stored_due, now - self._outcome_ms)\n",
        "        low = now + (1 << 40)\n",
        [CRASHES, RANDOM, "tests/delay"],
        scale=0.1,
    ),
    Mutant(
        "a-new-time-leaves-the-old-one",
        "a rescheduled message is delivered once",
        "tfmq/delay/arrivals/state.py",
        "                if self.cancelled.add(due, number):\n",
        "                if number not in self.rescheduled.expirable_spans((), due):\n",
        [CRASHES, RANDOM],
        scale=0.01,
    ),
    Mutant(
        "copies-count-as-a-sequence",
        "the copy of a rescheduled message is not the next message of its producer",
        "tfmq/delay/arrivals/state.py",
        "        self._copies_left = header.record_count if header.kind == RESCHEDULE else 0\n",
        "        self._copies_left = 0\n",
        ["tests/delay/arrivals/test_state.py", CRASHES],
        scale=0.01,
    ),
    Mutant(
        "a-cancel-may-be-lost-in-a-spill",
        "a message whose cancel may be lost is kept",
        "tfmq/delay/pending.py",
        "        return turn in self._cancelled and turn not in self._locked and turn not in (self._late or ())\n",
        "        return turn in self._cancelled\n",
        [RANDOM, CRASHES, "tests/delay"],
        scale=0.05,
    ),
    Mutant(
        "settled-of-another-due",
        "messages after the highest apply position of their partition are pending",
        "tfmq/delay/pending.py",
        "        if through is not None and (high, max(numbers)) < through and high < through.due:\n",
        "        if through is not None and low <= through.due:\n",
        [CRASHES, RANDOM],
        scale=0.01,
    ),
    Mutant(
        "store-of-another-age-is-taken",
        "a store of delayed messages that is older than the partitions is refused",
        "tfmq/broker/startup.py",
        "        if turn is not None and turn[1] >= end_ordinal:\n",
        "        if turn is not None and turn[1] >= 1 << 62:\n",
        ["tests/broker/test_startup.py"],
    ),
)
