"""Bugs to plant in what Spark reads: gaps and repeats between micro-batches, losses in silence, limits, sentences."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

PLANNING: Final = "tests/spark/test_planning.py"
PLACES: Final = "tests/spark/test_places.py"
STREAM: Final = "tests/spark/test_stream_reader.py"
TASKS: Final = "tests/spark/test_tasks.py"

SPARK_SOURCE: Final = (
    Mutant(
        "added-partition-from-its-end",
        "partitions that are added while a query runs are read from their beginning",
        "tfmq/spark/planning.py",
        "        begin = 0 if start is None else start.offset\n",
        "        begin = bounds.end if start is None else start.offset\n",
        [PLANNING],
    ),
    Mutant(
        "retention-in-silence",
        "what retention took before it was read stops the query, or is said",
        "tfmq/spark/planning.py",
        "        if begin < bounds.first:\n",
        "        if begin < bounds.first and start is None:\n            return bounds.first\n"
        "        if begin < bounds.first - (1 << 40):\n",
        [PLANNING],
    ),
    Mutant(
        "new-topic-read-as-the-old-one",
        "a topic that was made anew is not read as the old one",
        "tfmq/spark/planning.py",
        "        if start is not None and start.incarnation not in (0, log.incarnation):\n",
        "        if start is not None and start.incarnation not in (0, log.incarnation) and log.partition:\n",
        [PLANNING],
    ),
    Mutant(
        "planned-batch-of-a-deleted-topic",
        "a topic that is gone when a planned batch is read again is a loss",
        "tfmq/spark/planning.py",
        "                self._losses.lost(_deleted(key[0]))\n                continue\n",
        "                continue\n",
        [PLANNING],
    ),
    Mutant(
        "deleted-topic-in-silence",
        "a topic that is gone stops the query, or is left out with a word",
        "tfmq/spark/planning.py",
        "            else:\n                self._losses.lost(_deleted(topic))\n",
        "            elif self._losses.fail is None:\n                self._losses.lost(_deleted(topic))\n",
        [PLANNING],
    ),
    Mutant(
        "cut-end-in-silence",
        "an end below what was read is a loss",
        "tfmq/spark/planning.py",
        "        if begin > bounds.end and self._target is None",
        "        if begin > bounds.end + 60 and self._target is None",
        [PLANNING],
    ),
    Mutant(
        "available-now-goes-on",
        "with AvailableNow a query ends with what was there",
        "tfmq/spark/planning.py",
        "    return bounds._replace(end=aim.end, end_ordinal=aim.end_ordinal)\n",
        "    return bounds\n",
        [PLANNING],
    ),
    Mutant(
        "available-now-reads-new-partitions",
        "with AvailableNow a query ends with what was there",
        "tfmq/spark/planning.py",
        "            found[key] = Standing(log, _cut(bounds, aim.bounds))\n",
        "            found[key] = Standing(log, _cut(bounds, aim.bounds))\n"
        "        elif aim is None:\n            found[key] = Standing(log, bounds)\n",
        [PLANNING],
    ),
    Mutant(
        "limit-of-bytes-before-the-message",
        "a message larger than the limit does not stop a query",
        "tfmq/spark/planning.py",
        "self._logs.at_or_after(survey[key].log, begins[key] + size))",
        "self._logs.at_or_after(survey[key].log, begins[key] + size - 1))",
        [PLANNING],
    ),
    Mutant(
        "shares-beyond-the-limit",
        "a micro-batch has at most maxOffsetsPerTrigger messages",
        "tfmq/spark/shares.py",
        "    if limit <= len(names):\n",
        "    if limit < 1:\n",
        ["tests/spark/test_shares.py"],
    ),
    Mutant(
        "the-same-partition-every-turn",
        "a limit below the number of partitions reaches all of them in turn",
        "tfmq/spark/planning.py",
        "            self._turn += 1\n",
        "",
        [PLANNING],
    ),
    Mutant(
        "waits-for-ever",
        "minOffsetsPerTrigger waits at most for maxTriggerDelay",
        "tfmq/spark/planning.py",
        "self._target is not None or self._now() - self._begun >= delay:",
        "self._target is not None:",
        [PLANNING],
    ),
    Mutant(
        "a-loss-is-said-nowhere",
        "with failOnDataLoss=false a loss is in the log",
        "tfmq/spark/sentences.py",
        '            log.warning("%s The query goes on',
        '            log.debug("%s The query goes on',
        ["tests/spark/test_sentences.py", PLANNING],
    ),
    Mutant(
        "frames-of-ours",
        "errors are a sentence without a traceback of tfmq",
        "tfmq/spark/sentences.py",
        '        os.environ["SPARK_HIDE_TRACEBACK"] = "1"\n',
        "        pass\n",
        ["tests/spark/test_sentences.py"],
    ),
    Mutant(
        "stream-errors-lost-by-spark",
        "a stream with wrong options says which",
        "tfmq/spark/source.py",
        "            return RefusedReader(error)\n",
        "            raise error\n",
        ["tests/spark/test_source.py"],
    ),
    Mutant(
        "checkpoint-without-incarnation",
        "offsets keep the number of the topic's life",
        "tfmq/spark/offsets.py",
        "        found[topic][INCARNATION] = each.incarnation\n",
        "        found[topic][INCARNATION] = 0\n",
        ["tests/spark/test_offsets.py", PLANNING],
    ),
    Mutant(
        "offset-inside-a-message",
        "an offset of a user that begins no message is refused",
        "tfmq/spark/places.py",
        "        if found != offset:\n",
        "        if found < offset:\n",
        [PLACES],
    ),
    Mutant(
        "partition-not-named",
        "offsets of a user name every partition that is read",
        "tfmq/spark/places.py",
        "        if missing:\n",
        "        if len(missing) > 1:\n",
        [PLACES],
    ),
    Mutant(
        "progress-one-batch-late",
        "the group has the progress as soon as a batch is done",
        "tfmq/spark/stream_reader.py",
        "        desk.processed(begin)\n",
        "",
        [STREAM],
    ),
    Mutant(
        "beside-a-live-member",
        "a query does not begin beside a live member of its group",
        "tfmq/spark/group_progress.py",
        "        if members:\n",
        "        if len(members) > 1:\n",
        ["tests/spark/test_group_progress.py"],
    ),
    Mutant(
        "limit-in-spite-of-spark",
        "Spark may ask for all in spite of a limit",
        "tfmq/spark/stream_reader.py",
        "        return to_json(desk.planner.latest(begin, _limit(limit)))\n",
        "        return to_json(desk.planner.latest(begin, _limit(self.getDefaultReadLimit())))\n",
        [STREAM],
    ),
    Mutant(
        "good-rows-of-a-damaged-chunk",
        "what is whole before damage is read",
        "tfmq/spark/tasks.py",
        "        if size > 0 and error.first > begin:\n",
        "        if size < 0:\n",
        [TASKS],
    ),
    Mutant(
        "rows-again-behind-a-loss",
        "no message is read twice where a query goes on behind a loss",
        "tfmq/spark/tasks.py",
        "                    begin = max(begin, _next(chunk))\n",
        "",
        [TASKS],
    ),
    Mutant(
        "open-end-of-a-range",
        "a batch ends where it is told",
        "tfmq/spark/planning.py",
        "                Range(survey[key].log, start[key].offset, end[key].offset)\n",
        "                Range(survey[key].log, start[key].offset, survey[key].bounds.end)\n",
        [PLANNING, "tests/spark/test_batch_reader.py"],
    ),
)
