"""Planted bugs: Spark's source: gaps and repeats between micro-batches, silent losses, limits, errors."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

PLANNING: Final = "tests/spark/test_planner.py"
GAPS: Final = "tests/spark/test_planning_gaps.py"
PLACES: Final = "tests/spark/test_offsets.py"
STREAM: Final = "tests/spark/test_stream_reader.py"
TASKS: Final = "tests/spark/test_range_reader.py"

STOPPING: Final = "tests/spark/test_stopping_broker.py"

SPARK_SOURCE: Final = (
    Mutant(
        "a-broker-that-stops-ends-the-query",
        "a broker that stops and starts again is waited for",
        "tfmq/client/connection/requests.py",
        "            if give_up or link.now() + pause >= until:\n",
        "            if give_up or isinstance(error, Busy) or link.now() + pause >= until:\n",
        [f"{STOPPING}::test_every_question_of_a_query_is_asked_again"],
    ),
    Mutant(
        "a-query-that-has-begun-gives-up-soon",
        "a running query waits for its broker from the first request on",
        "tfmq/spark/wire_reader.py",
        "        if wait_for_broker:\n",
        "        if wait_for_broker and timeout < 0:\n",
        [f"{STOPPING}::test_a_query_that_has_begun_waits_for_its_broker_from_its_first_question_on"],
    ),
    Mutant(
        "added-partition-from-its-end",
        "partitions that are added while a query runs are read from their beginning",
        "tfmq/spark/planner.py",
        "        begin = 0 if start is None else start.offset\n",
        "        begin = bounds.end if start is None else start.offset\n",
        [PLANNING],
    ),
    Mutant(
        "retention-in-silence",
        "messages that retention removed before they were read stop the query, or are reported",
        "tfmq/spark/planner.py",
        "        if begin < bounds.first:\n",
        "        if begin < bounds.first and start is None:\n            return bounds.first\n"
        "        if begin < bounds.first - (1 << 40):\n",
        [PLANNING],
    ),
    Mutant(
        "new-topic-read-as-the-old-one",
        "a topic that was created again is not read as the old one",
        "tfmq/spark/planner.py",
        "        if start is not None and start.is_of_another(log.incarnation, self._logs.broker_id()):\n",
        "        if start is not None and start.is_of_another(start.incarnation, self._logs.broker_id()):\n",
        [PLANNING],
    ),
    Mutant(
        "another-brokers-checkpoint",
        "a checkpoint that is used with another broker is reported",
        "tfmq/spark/planner.py",
        "        if start is not None and start.is_of_another(log.incarnation, self._logs.broker_id()):\n",
        "        if start is not None and start.is_of_another(log.incarnation, start.broker):\n",
        [PLANNING],
    ),
    Mutant(
        "planned-batch-of-a-deleted-topic",
        "a topic that is deleted when a planned batch is read again is a loss",
        "tfmq/spark/planner.py",
        ("                self._losses.handle_loss(_deleted_topic_error(key[0]))\n                continue\n"),
        "                continue\n",
        [PLANNING],
    ),
    Mutant(
        "deleted-topic-in-silence",
        "a deleted topic stops the query, or is left out with a log line",
        "tfmq/spark/planner.py",
        ("            else:\n                self._losses.handle_loss(_deleted_topic_error(topic))\n"),
        (
            "            elif self._losses.stops_query is None:\n"
            "                self._losses.handle_loss(_deleted_topic_error(topic))\n"
        ),
        [PLANNING],
    ),
    Mutant(
        "cut-end-in-silence",
        "an end below what was read is a loss",
        "tfmq/spark/planner.py",
        "        if begin > bounds.end and not self._settings.address.path:\n",
        "        if begin > bounds.end + 60 and not self._settings.address.path:\n",
        [PLANNING],
    ),
    Mutant(
        "available-now-goes-on",
        "with AvailableNow a query ends with the messages that existed when it began",
        "tfmq/spark/planner.py",
        "            limited = bounds._replace(end=aim.bounds.end, end_ordinal=aim.bounds.end_ordinal)\n",
        "            limited = bounds\n",
        [PLANNING],
    ),
    Mutant(
        "available-now-reads-new-partitions",
        "with AvailableNow a query ends with the messages that existed when it began",
        "tfmq/spark/planner.py",
        "            found[key] = PartitionBounds(log, limited)\n",
        (
            "            found[key] = PartitionBounds(log, limited)\n"
            "        elif aim is None:\n"
            "            found[key] = PartitionBounds(log, bounds)\n"
        ),
        [PLANNING],
    ),
    Mutant(
        "limit-of-bytes-before-the-message",
        "a message larger than the limit does not stop a query",
        "tfmq/spark/planner.py",
        "begins[key], begins[key] + size, ends[key])\n",
        "begins[key], begins[key] + size - 1, ends[key])\n",
        [PLANNING],
    ),
    Mutant(
        "stuck-before-a-gap",
        "a limit that is smaller than a gap of lost messages does not block a query",
        "tfmq/spark/planner.py",
        "if found[key] <= begins[key]:",
        "if found[key] < begins[key]:",
        [GAPS],
    ),
    Mutant(
        "limit-of-bytes-in-damage",
        "a limit of bytes that ends in damage ends the micro-batch there",
        "tfmq/spark/planner.py",
        "found = error.first if error.first > begin else error.next",
        "raise error",
        [GAPS],
    ),
    Mutant(
        "made-anew-while-a-query-ends",
        "with Trigger.AvailableNow a topic that was created again is reported, too",
        "tfmq/spark/planner.py",
        (
            "                self._begin_offset(key, start[key], there[key])  # the topic was created ag"
            "ain: report lost messages\n"
        ),
        "                pass  # the topic was created again: report lost messages\n",
        [PLANNING],
    ),
    Mutant(
        "shares-beyond-the-limit",
        "a micro-batch has at most maxOffsetsPerTrigger messages",
        "tfmq/spark/planner.py",
        "    if limit <= len(names):\n",
        "    if limit < 1:\n",
        ["tests/spark/test_planner.py"],
    ),
    Mutant(
        "the-same-partition-every-turn",
        "a limit below the number of partitions reaches all of them in turn",
        "tfmq/spark/planner.py",
        "            self._next_turn += 1\n",
        "",
        [PLANNING],
    ),
    Mutant(
        "waits-without-end",
        "minOffsetsPerTrigger waits for maxTriggerDelay at most",
        "tfmq/spark/planner.py",
        "        if wanted is None or self._frozen_bounds is not None or self._now() - self._last_batch_at >= delay:\n",
        "        if wanted is None or self._frozen_bounds is not None:\n",
        [PLANNING],
    ),
    Mutant(
        "sticks-at-hidden-numbers",
        "damage that hides the ordinals of messages does not block a query",
        "tfmq/spark/planner.py",
        "                found[key] = int(begins[key] < each.bounds.end)\n",
        "                found[key] = 0\n",
        [PLANNING],
    ),
    Mutant(
        "a-loss-is-said-nowhere",
        "with failOnDataLoss=false a loss is logged",
        "tfmq/spark/loss_policy.py",
        '            log.warning(\n                "%s The query continues',
        '            log.debug(\n                "%s The query continues',
        ["tests/spark/test_errors.py", PLANNING],
    ),
    Mutant(
        "frames-of-ours",
        "errors have one sentence without a traceback of tfmq",
        "tfmq/spark/errors.py",
        '        os.environ["SPARK_HIDE_TRACEBACK"] = "1"\n',
        "        pass\n",
        ["tests/spark/test_errors.py"],
    ),
    Mutant(
        "stream-errors-lost-by-spark",
        "a stream with wrong options says which",
        "tfmq/spark/source.py",
        "            return FailedReader(error)\n",
        "            raise error\n",
        [STREAM],
    ),
    Mutant(
        "checkpoint-without-incarnation",
        "offsets contain the incarnation of the topic",
        "tfmq/spark/offsets.py",
        "        found[topic][INCARNATION] = each.incarnation\n",
        "        found[topic][INCARNATION] = 0\n",
        ["tests/spark/test_offsets.py", PLANNING],
    ),
    Mutant(
        "offset-inside-a-message",
        "an offset of a user that is not the beginning of a message is refused",
        "tfmq/spark/offsets.py",
        "        if found != offset:\n",
        "        if found < offset:\n",
        [PLACES],
    ),
    Mutant(
        "partition-not-named",
        "offsets of a user must name every partition that is read",
        "tfmq/spark/offsets.py",
        ("        missing = partitions.keys() - self.by_partition.keys()\n        if missing:\n"),
        ("        missing = partitions.keys() - self.by_partition.keys()\n        if len(missing) > 1:\n"),
        [PLACES],
    ),
    Mutant(
        "progress-one-batch-late",
        "the group has the progress as soon as a batch is committed",
        "tfmq/spark/stream_reader.py",
        "            session.report_progress(begin)\n",
        "",
        [STREAM],
    ),
    Mutant(
        "beside-a-live-member",
        "a query does not begin while its group has a live member",
        "tfmq/spark/stream_reader.py",
        "        if members:\n",
        "        if len(members) > 1:\n",
        ["tests/spark/test_group_progress.py"],
    ),
    Mutant(
        "limit-in-spite-of-spark",
        "Spark may request everything despite a limit",
        "tfmq/spark/stream_reader.py",
        "            end = session.planner.plan_end(begin, _to_batch_limit(limit))\n",
        "            end = session.planner.plan_end(begin, _to_batch_limit(self.getDefaultReadLimit()))\n",
        [STREAM],
    ),
    Mutant(
        "an-idle-query-never-rests",
        "an idle query is busy for a quarter of its time at most",
        "tfmq/spark/stream_reader.py",
        "        if self._pause > 0:\n",
        "        if self._pause > IDLE_SECONDS_MAX:\n",
        ["tests/spark/test_stream_reader.py"],
    ),
    Mutant(
        "good-rows-of-a-damaged-chunk",
        "undamaged rows before damage are read",
        "tfmq/spark/batch_reader.py",
        "        if size > 0 and error.first > begin:\n",
        "        if size < 0:\n",
        [TASKS],
    ),
    Mutant(
        "unreadable-attributes-not-reported",
        "a key that cannot be decoded is reported, not read as null",
        "tfmq/spark/batch_reader.py",
        '        losses.handle_loss(error, "with neither key nor tag")\n',
        "",
        [TASKS],
    ),
    Mutant(
        "rows-again-after-a-loss",
        "no message is read twice where a query continues after a loss",
        "tfmq/spark/batch_reader.py",
        "                    begin = max(begin, chunk.offset + memoryview(chunk.data).nbytes)\n",
        "",
        [TASKS],
    ),
    Mutant(
        "open-end-of-a-range",
        "a batch ends at its planned end",
        "tfmq/spark/planner.py",
        "                OffsetRange(partitions[key].log, start[key].offset, end[key].offset)\n",
        "                OffsetRange(partitions[key].log, start[key].offset, partitions[key].bounds.end)\n",
        [PLANNING, "tests/spark/test_batch_reader.py"],
    ),
)
