"""Planted bugs: Spark's sink: every batch once, all of it or nothing, each row in its partition."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

BATCH_SINK: Final = "tests/spark/test_sinks.py"
CLIENT: Final = "tests/spark/test_sink_task.py"
COLUMNS: Final = "tests/spark/test_sink_columns.py"
GROUPS: Final = "tests/cli/test_tx_groups.py"
OUTGOING: Final = "tests/spark/test_sink_task.py"
PART: Final = "tests/client/transaction/test_commit_group.py"
SETTINGS: Final = "tests/spark/test_settings.py"
STOPPING: Final = "tests/spark/test_stopping_broker.py::test_so_are_the_tasks_of_a_sink_and_the_verdict"
STREAM_SINK: Final = "tests/spark/test_stream_sink.py"
TASK: Final = "tests/spark/test_sink_commit.py"

LARGE: Final = "a task may be larger and slower than one transaction may be"
ONCE: Final = "each batch is stored once in its topics"
NOTHING_LEFT: Final = "a writer that failed leaves nothing at the broker"
PLACED: Final = "each row is sent to its topic and partition, in order"
COUNTED: Final = "a committed batch is recognised again, and another one under its number is refused"
TOLD: Final = "errors are reported in one sentence"

SPARK_SINK: Final = (
    # The client's part of a commit group
    Mutant(
        "member-of-any-size",
        LARGE,
        "tfmq/client/transaction/commit_group.py",
        "limits, size_bytes = self._link.limits, self._bytes + batch.size_bytes\n",
        "limits, size_bytes = self._link.limits, self._bytes\n",
        [PART],
    ),
    Mutant(
        "member-of-a-piece-too-many",
        LARGE,
        "tfmq/client/transaction/commit_group.py",
        'self._batches >= limits["transaction_pieces"]',
        'self._batches > limits["transaction_pieces"]',
        [PART],
    ),
    Mutant(
        "sizes-of-earlier-members-count",
        LARGE,
        "tfmq/client/transaction/commit_group.py",
        "        self._batches = self._bytes = 0\n        self._task",
        "        self._batches = 0\n        self._task",
        [PART],
    ),
    Mutant(
        "member-is-never-old",
        LARGE,
        "tfmq/client/transaction/commit_group.py",
        "        self._age_timer = self._call_later(timeout_ms / 2000, self._member_too_old)\n",
        "        self._age_timer = self._call_later(timeout_ms, self._member_too_old)\n",
        [PART],
    ),
    Mutant(
        "old-member-is-prepared-twice",
        ONCE,
        "tfmq/client/transaction/commit_group.py",
        "        self._age_timer.cancel()  # Otherwise the age timer would prepare the member a second time.\n",
        "",
        [PART],
    ),
    Mutant(
        "only-the-last-member-is-named",
        ONCE,
        "tfmq/client/transaction/commit_group.py",
        "        self.prepared.append(commands.TransactionName(pipeline.xid, pipeline.epoch))\n",
        "        self.prepared = [commands.TransactionName(pipeline.xid, pipeline.epoch)]\n",
        [PART],
    ),
    Mutant(
        "prepared-before-all-is-there",
        ONCE,
        "tfmq/client/transaction/commit_group.py",
        "        while (pipeline.unacked_bytes or not pipeline.begun) and not self._is_already_committed(pipeline):\n",
        "        while not pipeline.begun and not self._is_already_committed(pipeline):\n",
        [PART],
    ),
    Mutant(
        "done-is-taken-for-begun",
        COUNTED,
        "tfmq/client/transaction/pipeline.py",
        "            self.already_committed = not reply.epoch\n",
        "",
        [PART],
    ),
    Mutant(
        "failed-part-keeps-what-it-prepared",
        NOTHING_LEFT,
        "tfmq/client/transaction/commit_group.py",
        "        names, pipeline = list(self.prepared), self._pipeline\n",
        "        names, pipeline = [], self._pipeline\n",
        [PART],
    ),
    Mutant(
        "members-without-a-time",
        NOTHING_LEFT,
        "tfmq/client/transaction/commit_group.py",
        "PrepareTransaction(pipeline.xid, pipeline.epoch, self._ttl_ms, [])",
        "PrepareTransaction(pipeline.xid, pipeline.epoch, None, [])",
        [PART, CLIENT],
    ),
    Mutant(
        "broker-that-is-away-is-not-waited-for",
        ONCE,
        "tfmq/spark/sink_task.py",
        "seconds if patience_seconds is None else patience_seconds",
        "2.0",
        [CLIENT],
    ),
    Mutant(
        "slow-commit-is-given-up",
        ONCE,
        "tfmq/client/transaction/commit_group.py",
        "        if not isinstance(pending.error, TimedOut):\n",
        "        if pending.done:\n",
        [PART],
    ),
    # Tasks
    Mutant(
        "rows-of-a-committed-batch-are-not-counted",
        COUNTED,
        "tfmq/spark/sink_task.py",
        ("            count += len(batch)\n            if not part.already_committed:\n"),
        ("            if not part.already_committed:\n                count += len(batch)\n"),
        [TASK],
    ),
    Mutant(
        "last-rows-stay",
        ONCE,
        "tfmq/spark/sink_task.py",
        "            part.send_all(batcher.flush())\n",
        "            pass\n",
        [TASK],
    ),
    Mutant(
        "rows-of-one-task-are-the-total",
        COUNTED,
        "tfmq/spark/sink_task.py",
        "sum(each.rows for each in found)",
        "found[0].rows",
        [TASK],
    ),
    Mutant(
        "members-of-the-first-task-only",
        ONCE,
        "tfmq/spark/sink_task.py",
        "for each in found for name in each.transactions]",
        "for each in found[:1] for name in each.transactions]",
        [TASK],
    ),
    Mutant(
        "aborted-run-is-not-shut-out",
        NOTHING_LEFT,
        "tfmq/spark/sink_task.py",
        "            client.abort(*member)\n",
        "            pass\n",
        [TASK],
    ),
    # Rows
    Mutant(
        "rows-of-a-key-out-of-order",
        PLACED,
        "tfmq/spark/sink_task.py",
        'np.argsort(codes, kind="stable")',
        'np.argsort(codes, kind="heapsort")',
        [OUTGOING],
    ),
    Mutant(
        "partition-after-the-last",
        PLACED,
        "tfmq/spark/sink_task.py",
        "        if not 0 <= wrong < count:\n",
        "        if not 0 <= wrong <= count:\n",
        [OUTGOING],
    ),
    Mutant(
        "partition-below-zero",
        PLACED,
        "tfmq/spark/sink_task.py",
        'edges["min"] if edges["min"] < 0 else edges["max"]',
        'edges["max"]',
        [OUTGOING],
    ),
    Mutant(
        "named-partitions-give-way-to-keys",
        PLACED,
        "tfmq/spark/sink_task.py",
        (
            "        return named if not named.null_count else pc.coalesce(named,"
            " self._computed_partitions(topic, rows))\n"
        ),
        "        return named if not named.null_count else self._computed_partitions(topic, rows)\n",
        [OUTGOING],
    ),
    Mutant(
        "stopped-partitions-get-rows-of-any",
        PLACED,
        "tfmq/spark/sink_task.py",
        "[each.number for each in topic.partitions if each.writable]",
        "[each.number for each in topic.partitions]",
        [OUTGOING],
    ),
    Mutant(
        "row-without-a-topic",
        TOLD,
        "tfmq/spark/sink_task.py",
        "        if column.null_count:\n",
        "        if column.null_count > len(column):\n",
        [OUTGOING],
    ),
    Mutant(
        "records-larger-than-the-limit",
        LARGE,
        "tfmq/spark/sink_task.py",
        "            sizes += pc.binary_length(column).fill_null(0).to_numpy()\n",
        "            sizes = np.maximum(sizes, pc.binary_length(column).fill_null(0).to_numpy())\n",
        [OUTGOING],
    ),
    Mutant(
        "wide-columns-stay-wide",
        PLACED,
        "tfmq/spark/sink_task.py",
        "    if not any(each in wide for each in rows.schema.types):\n",
        "    if rows.schema.names:\n",
        [OUTGOING],
    ),
    # Options and columns
    Mutant(
        "version-of-its-own-choice",
        COUNTED,
        "tfmq/spark/settings.py",
        '    return commit_group_name("batch", name, topic), found["txnVersion"]\n',
        '    return commit_group_name("batch", name, topic), 0\n',
        [SETTINGS],
    ),
    Mutant(
        "queries-and-applications-share-groups",
        COUNTED,
        "tfmq/spark/settings.py",
        '    group = f"{GROUP_PREFIX}{kind}-{name}"\n',
        '    group = f"{GROUP_PREFIX}{name}"\n',
        [SETTINGS],
    ),
    Mutant(
        "topics-of-an-application-share-a-group",
        COUNTED,
        "tfmq/spark/settings.py",
        "    if not topic:\n        return group\n",
        "    if topic:\n        return group\n",
        [SETTINGS],
    ),
    Mutant(
        "topic-of-a-query-is-not-in-its-group",
        COUNTED,
        "tfmq/spark/sinks.py",
        'group_name("stream", query, self.settings.topic)',
        'group_name("stream", query)',
        ["tests/spark/test_stream_sink.py::test_a_copy_of_a_checkpoint_with_another_topic_loses_nothing"],
    ),
    Mutant(
        "unknown-columns-are-dropped",
        TOLD,
        "tfmq/spark/schema.py",
        "        if field.name in IGNORED_COLUMNS:\n",
        "        if field.name in IGNORED_COLUMNS or field.name not in SINK_COLUMNS:\n",
        [COLUMNS],
    ),
    # Through Spark
    Mutant(
        "stream-overwrites",
        TOLD,
        "tfmq/spark/sinks.py",
        ("    settings = parse_sink_settings(options, streaming=True)\n    if overwrite:\n"),
        ("    settings = parse_sink_settings(options, streaming=True)\n    if overwrite and not schema.fields:\n"),
        [STREAM_SINK],
    ),
    Mutant(
        "one-run-for-all-attempts",
        ONCE,
        "tfmq/spark/sinks.py",
        (
            "        self.settings = settings\n"
            "        self.run_id = uuid.uuid4().hex\n"
            '        """Id of this attempt. `commit` and `abort` run in another sink and use the'
            ' id in the tasks\' messages."""\n'
        ),
        (
            "        self.settings = settings\n"
            '        self.run_id = "run"\n'
            '        """Id of this attempt. `commit` and `abort` run in another sink and use the'
            ' id in the tasks\' messages."""\n'
        ),
        [STREAM_SINK],
    ),
    Mutant(
        "one-sequence-for-all-batches",
        ONCE,
        "tfmq/spark/sinks.py",
        "    return query, int(batch)\n",
        "    return query, 0\n",
        [STREAM_SINK],
    ),
    Mutant(
        "stream-without-other-totals",
        COUNTED,
        "tfmq/spark/sinks.py",
        (
            "        request = collect_commit(messages, other_total=self.settings.allow_other_total)\n"
            "        if request is None:\n"
        ),
        "        request = collect_commit(messages)\n        if request is None:\n",
        [STREAM_SINK],
    ),
    Mutant(
        "single-writes-stay-without-end",
        NOTHING_LEFT,
        "tfmq/spark/sinks.py",
        ("            if not self.idempotent:\n                self._delete_group(client)\n"),
        "",
        [BATCH_SINK],
    ),
    Mutant(
        "aborted-writes-are-forgotten-at-once",
        NOTHING_LEFT,
        "tfmq/spark/sink_task.py",
        "            client.abort(*member)\n",
        ("            client.abort(*member)\n            client.delete_group(member.group)\n"),
        [f"{BATCH_SINK}::test_a_task_that_comes_after_the_abort_leaves_nothing"],
    ),
    Mutant(
        "a-sinks-task-does-not-wait-for-a-broker-that-stops",
        "a broker that stops and starts again is waited for",
        "tfmq/spark/sink_task.py",
        "create=True, retry_while_busy=True,",
        "create=True,",
        [STOPPING],
    ),
    Mutant(
        "batch-overwrites",
        TOLD,
        "tfmq/spark/sinks.py",
        ("    settings = parse_sink_settings(options, streaming=False)\n    if overwrite:\n"),
        ("    settings = parse_sink_settings(options, streaming=False)\n    if overwrite and not schema.fields:\n"),
        [BATCH_SINK],
    ),
    Mutant(
        "tasks-wait-for-a-broker-that-is-not-there",
        TOLD,
        "tfmq/spark/sinks.py",
        (
            "    with CommitGroupClient(settings.servers, settings.timeout, patience_seconds=FIRST_CONNECT_TI"
            "MEOUT) as client:\n"
            "        client.connect()\n"
        ),
        (
            "    with CommitGroupClient(settings.servers, settings.timeout, patience_seconds=FIRST_CONNECT_TI"
            "MEOUT):\n"
            "        pass\n"
        ),
        [BATCH_SINK],
    ),
    # The command line
    Mutant(
        "groups-are-forgotten-unasked",
        "nothing is forgotten by accident",
        "tfmq/cli/tx.py",
        (
            '                raise TfmqError(f"There is no commit group {name!r}.{hint}", outcome=NOT_DONE)\n'
            "        if not yes:\n"
        ),
        (
            '                raise TfmqError(f"There is no commit group {name!r}.{hint}", outcome=NOT_DONE)\n'
            "        if yes is None:\n"
        ),
        [GROUPS],
    ),
)
