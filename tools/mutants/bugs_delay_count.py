"""Planted bugs: the number of delayed messages that wait, and the order after a load."""

from typing import Final

from tools.mutants.mutant import Mutant

LEAVING: Final = "tests/delay/test_cancelled_rows.py"
COUNTING: Final = "tests/delay/test_cancelled_rows.py"
LINE_COUNT: Final = "tests/delay/test_blocked_targets.py"
BROKER: Final = "tests/broker/test_delay_limit.py"

DELAY_COUNT: Final = (
    Mutant(
        "what-is-cancelled-counts-until-its-time",
        "cancelled messages in bucket files are not counted as waiting",
        "tfmq/delay/pending.py",
        "        bucket.dead_count = min(bucket.dead_count + 1, bucket.count)\n",
        "        bucket.dead_count = min(bucket.dead_count, bucket.count)\n",
        [LEAVING, BROKER],
    ),
    Mutant(
        "a-start-counts-what-was-cancelled",
        "cancelled messages are not counted after a restart either",
        "tfmq/delay/buckets/recovery.py",
        ("        Bucket(folder, checkpoint.identity, each.span, slot, each.size, each.count, each.dead_count)\n"),
        "        Bucket(folder, checkpoint.identity, each.span, slot, each.size, each.count)\n",
        [LEAVING, BROKER],
    ),
    Mutant(
        "cancelled-after-the-checkpoint-counts-again",
        "messages that were cancelled just before a kill are not counted after it",
        "tfmq/delay/buckets/loader.py",
        "            if offset >= counted:\n",
        "            if offset >= counted << 1:\n",
        [LEAVING],
    ),
    Mutant(
        "cancelled-before-the-checkpoint-leaves-twice",
        "a cancelled message is subtracted from the count once",
        "tfmq/delay/buckets/loader.py",
        "            if offset >= counted:\n",
        "            if offset >= 0:\n",
        [LEAVING],
    ),
    Mutant(
        "a-change-beside-a-spill-is-entered-at-once",
        "a cancel that becomes durable while files are changed is subtracted from the count once",
        "tfmq/delay/pending.py",
        ("        self.process_durable(forced_offset)\n        self._file_work_running = True\n"),
        ("        self.process_durable(forced_offset)\n        self._file_work_running = False\n"),
        [LEAVING],
    ),
    Mutant(
        "a-spill-sees-what-is-cancelled-meanwhile",
        "work on files sees the changes that were durable when it began",
        "tfmq/delay/storage_scheduler.py",
        "self.target_queues, self.cancelled_rows.late, border)\n",
        "self.target_queues)\n",
        [LEAVING],
    ),
    Mutant(
        "what-arrived-leaves-with-the-buckets",
        "a message that was cancelled before it was in a bucket is not counted",
        "tfmq/delay/pending.py",
        (
            "        elif not in_memory:\n"
            "            self._window.disk_arrivals.count = max(0, self._window.disk_arrivals.count - 1)\n"
        ),
        "",
        [LEAVING, COUNTING],
    ),
    Mutant(
        "a-topic-that-went-keeps-its-messages-waiting",
        "messages for a deleted topic are not counted, seconds later",
        "tfmq/delay/delay_queue.py",
        (
            "            self._target_queues.dropped += self._window.topic_deleted(incarnation)\n"
            "            self._row_counter.request(self._buckets.live_buckets, False)\n"
        ),
        "            self._target_queues.dropped += self._window.topic_deleted(incarnation)\n",
        [LEAVING, COUNTING, BROKER],
    ),
    Mutant(
        "the-wheel-keeps-what-is-for-a-topic-that-went",
        "messages in the memory window for a deleted topic are not counted either",
        "tfmq/delay/memory_window.py",
        "        return self.wheel.drop_targets(targets) if targets else 0\n",
        "        return 0\n",
        [LEAVING],
    ),
    Mutant(
        "a-start-does-not-look-for-topics-that-went",
        "messages for a topic that was deleted just before a kill are not counted after it",
        "tfmq/delay/delay_queue.py",
        ("        self._row_counter.request(self._buckets.live_buckets, False)\n        self._dispatcher.start()\n"),
        "        self._dispatcher.start()\n",
        [LEAVING],
    ),
    Mutant(
        "what-is-given-up-is-not-counted",
        "messages for a stopped partition are counted, also those that are only in files",
        "tfmq/delay/target_queue.py",
        "            self._on_disk_count += count\n",
        "            self._on_disk_count += 0\n",
        [LINE_COUNT],
    ),
    Mutant(
        "what-comes-during-a-load-passes-it",
        "a message that becomes due while older messages of its partition are loaded is delivered after them",
        "tfmq/delay/target_queue.py",
        "        return len(self.rows) > 0 and not self.reloading\n",
        "        return len(self.rows) > 0\n",
        [LINE_COUNT],
    ),
    Mutant(
        "rows-given-up-during-a-load-are-lost",
        "rows that are dropped from memory during a load are loaded again",
        "tfmq/delay/target_queue.py",
        "        self._reload_end, self.reloading = None, False\n\n    def _reload_from",
        "        self._reload_end = None\n\n    def _reload_from",
        [LINE_COUNT],
    ),
    Mutant(
        "written-and-not-fsynced-waits-no-more",
        "a message that a partition may still lose counts as waiting",
        "tfmq/delay/target_queue.py",
        "        return self._not_appended + self.non_durable_appends.count\n",
        "        return self._not_appended\n",
        [LINE_COUNT],
    ),
    Mutant(
        "a-failed-write-is-taken-to-be-nothing",
        "of a concurrent cancel and delivery exactly one happens, also where a write failed",
        "tfmq/delay/target_queue.py",
        (
            '        if getattr(error, "outcome", None) == UNKNOWN:\n'
            "            self._uncertain_to = self._in_flight_to\n"
        ),
        "",
        ["tests/delay/test_target_queue.py"],
    ),
    Mutant(
        "what-a-spill-loses-is-not-counted",
        "messages that are lost by damage are counted",
        "tfmq/delay/pending.py",
        "        return max(0, count - self.kept - self.dropped) if self.damage else 0\n",
        "        return 0\n",
        ["tests/delay/test_storage_scheduler.py"],
    ),
    Mutant(
        "broker-time-begins-with-whole-milliseconds",
        "a start at another fraction of a millisecond delivers nothing early",
        "tfmq/delay/due_time.py",
        "        self._start_monotonic = now - part_us / 1e6 if self._start_ms == wall_ms else now\n",
        "        self._start_monotonic = now\n",
        ["tests/delay/test_due_time.py"],
    ),
    Mutant(
        "what-passes-between-two-looks-is-forgotten",
        "a slow start delivers nothing early after the next one",
        "tfmq/delay/due_time.py",
        " + self._slack_ms\n",
        "\n",
        ["tests/delay/test_due_time.py"],
    ),
)
