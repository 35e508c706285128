"""Planted bugs: how many delayed messages wait, for limits and for people; and the order behind a load."""

from typing import Final

from tools.mutants.mutant import Mutant

LEAVING: Final = "tests/delay/test_cancelled_rows.py"
COUNTING: Final = "tests/delay/test_cancelled_rows.py"
LINE_COUNT: Final = "tests/delay/test_line_count.py"
BROKER: Final = "tests/broker/test_delay_count.py"

DELAY_COUNT: Final = (
    Mutant(
        "what-is-cancelled-counts-until-its-time",
        "what was cancelled on the disk counts as waiting no more",
        "tfmq/delay/cancelled_rows.py",
        "        bucket.dead_count = min(bucket.dead_count + 1, bucket.count)\n",
        "        bucket.dead_count = min(bucket.dead_count, bucket.count)\n",
        [LEAVING, BROKER],
    ),
    Mutant(
        "a-start-counts-what-was-cancelled",
        "what was cancelled counts no more after a restart either",
        "tfmq/delay/buckets/recovery.py",
        (
            "            Bucket(self.folder, checkpoint.identity, each.span, slot, each.size,"
            " each.count, each.dead_count)\n"
        ),
        "            Bucket(self.folder, checkpoint.identity, each.span, slot, each.size, each.count)\n",
        [LEAVING, BROKER],
    ),
    Mutant(
        "cancelled-behind-the-checkpoint-counts-again",
        "what was cancelled just before a kill counts no more behind it",
        "tfmq/delay/buckets/loader.py",
        "            if offset >= counted:\n",
        "            if offset >= counted << 1:\n",
        [LEAVING],
    ),
    Mutant(
        "cancelled-before-the-checkpoint-leaves-twice",
        "what was cancelled leaves the count once",
        "tfmq/delay/buckets/loader.py",
        "            if offset >= counted:\n",
        "            if offset >= 0:\n",
        [LEAVING],
    ),
    Mutant(
        "a-change-beside-a-spill-is-entered-at-once",
        "a cancel that becomes sure beside work with files leaves the count once",
        "tfmq/delay/cancelled_rows.py",
        ("        self.process_durable(forced_offset)\n        self._file_work_running = True\n"),
        ("        self.process_durable(forced_offset)\n        self._file_work_running = False\n"),
        [LEAVING],
    ),
    Mutant(
        "a-spill-sees-what-is-cancelled-meanwhile",
        "work with files sees the changes that were sure when it began",
        "tfmq/delay/pending.py",
        "self._is_topic_deleted, queues.locked, self._late, border\n",
        "self._is_topic_deleted, queues.locked\n",
        [LEAVING],
    ),
    Mutant(
        "what-arrived-leaves-with-the-buckets",
        "what was cancelled before it was in a bucket counts no more",
        "tfmq/delay/cancelled_rows.py",
        (
            "        elif not in_memory:\n"
            "            self._window.disk_arrivals.count = max(0, self._window.disk_arrivals.count - 1)\n"
        ),
        "",
        [LEAVING, COUNTING],
    ),
    Mutant(
        "a-topic-that-went-keeps-its-messages-waiting",
        "what waited for a topic that went counts no more, seconds later",
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
        "what was soon due for a topic that went counts no more either",
        "tfmq/delay/memory_window.py",
        "        return self.wheel.drop_targets(targets) if targets else 0\n",
        "        return 0\n",
        [LEAVING],
    ),
    Mutant(
        "a-start-does-not-look-for-topics-that-went",
        "what waited for a topic that went just before a kill counts no more behind it",
        "tfmq/delay/delay_queue.py",
        (
            "        self._row_counter.request(self._buckets.live_buckets, False)\n"
            "        self._dispatcher.start()\n"
        ),
        "        self._dispatcher.start()\n",
        [LEAVING],
    ),
    Mutant(
        "what-is-given-up-is-not-counted",
        "what waits for a stopped partition counts, also where it is on the disk only",
        "tfmq/delay/target_queue.py",
        "            self.on_disk += count\n",
        "            self.on_disk += 0\n",
        [LINE_COUNT],
    ),
    Mutant(
        "what-comes-during-a-load-passes-it",
        "what falls due while older messages of its partition are loaded again comes behind them",
        "tfmq/delay/target_queue.py",
        "        return len(self.rows) > 0 and not self.reloading\n",
        "        return len(self.rows) > 0\n",
        [LINE_COUNT],
    ),
    Mutant(
        "rows-given-up-during-a-load-are-lost",
        "rows that are given up during a load are loaded again",
        "tfmq/delay/target_queue.py",
        ("            self._reload_end, self.reloading = None, False\n            self._generation += 1\n"),
        ("            self._reload_end = None\n            self._generation += 1\n"),
        [LINE_COUNT],
    ),
    Mutant(
        "written-and-not-forced-waits-no-more",
        "what a partition may lose yet counts as waiting",
        "tfmq/delay/target_queue.py",
        "        return self._count.waiting(self.rows) + self.flush_tracker.count\n",
        "        return self._count.waiting(self.rows)\n",
        [LINE_COUNT],
    ),
    Mutant(
        "a-failed-write-is-taken-to-be-nothing",
        "of a cancel and a delivery that meet exactly one happens, also where a write failed",
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
        "a start in another part of a millisecond makes nothing early",
        "tfmq/delay/due_time.py",
        "        self._start_monotonic = now - part_us / 1e6 if self._start_ms == wall_ms else now\n",
        "        self._start_monotonic = now\n",
        ["tests/delay/test_due_time.py"],
    ),
    Mutant(
        "what-passes-between-two-looks-is-forgotten",
        "a start that takes its time makes nothing early behind the next one",
        "tfmq/delay/due_time.py",
        " + self._slack_ms\n",
        "\n",
        ["tests/delay/test_due_time.py"],
    ),
)
