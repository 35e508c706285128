"""Planted bugs: the pipelines archive and replay, and what all pipelines share."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

ARCHIVING: Final = "tests/spark/pipelines/test_archive.py"
REPLAYING: Final = "tests/spark/pipelines/test_replay_run.py"
REPLAY_PLAN: Final = "tests/spark/pipelines/test_replay.py"
HOUR_FILES: Final = "tests/spark/pipelines/test_parquet_files.py"
MANIFEST: Final = "tests/spark/pipelines/test_manifest.py"
PLANNING: Final = "tests/spark/pipelines/test_archive.py"
DURABLE: Final = "tests/spark/pipelines/test_archive_folder.py"
ANEW: Final = f"{ARCHIVING}::test_a_step_that_was_begun_is_made_again_as_it_was_planned"

ARCHIVED: Final = (
    Mutant(
        "archive-lost-manifest-passed-over",
        "no row is archived twice, also where a manifest was lost",
        "tfmq/spark/pipelines/archive_folder.py",
        "            if start >= ends.get((incarnation, partition), 0):\n",
        "            if False:\n",
        [f"{ARCHIVING}::test_a_lost_manifest_is_reported_and_nothing_comes_twice"],
    ),
    Mutant(
        "archive-stuck-at-an-attribute-that-is-none",
        "messages whose attributes cannot be decoded are copied as they are",
        "tfmq/spark/pipelines/archive.py",
        "options.verify, lenient=True)",
        "options.verify)",
        [f"{REPLAYING}::test_messages_whose_attributes_cannot_be_decoded_are_copied_as_they_are"],
    ),
    Mutant(
        "archive-step-not-planned-before-its-files",
        "an interrupted step is repeated as it was planned",
        "tfmq/spark/pipelines/archive.py",
        "                self._archive.write_plan(plan)\n",
        "",
        [ANEW],
    ),
    Mutant(
        "archive-step-planned-anew",
        "an interrupted step is repeated as it was planned, and no row is archived twice",
        "tfmq/spark/pipelines/archive.py",
        "        begun = self._drop_lost_pieces(self._archive.started_plan(self._topic, step))\n",
        "        begun = None\n",
        [ANEW],
    ),
    Mutant(
        "archive-half-written-files-stay",
        "the next run removes partial files of a killed one",
        "tfmq/spark/pipelines/archive.py",
        "                archive_folder.delete_temporary_files(",
        "                id(",
        [ANEW],
    ),
    Mutant(
        "archive-without-a-lock",
        "one run at a time archives a topic into a folder",
        "tfmq/spark/pipelines/archive_folder.py",
        "            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "            file.fileno()\n",
        [f"{ARCHIVING}::test_one_run_at_a_time", DURABLE],
    ),
    Mutant(
        "archive-takes-another-brokers-topic",
        "offsets of two brokers are never stored in one archive",
        "tfmq/spark/pipelines/archive.py",
        "        if old and new and old != new:\n",
        "        if old and new and old == new:\n",
        [f"{ARCHIVING}::test_another_brokers_topic_of_that_name_is_refused"],
    ),
    Mutant(
        "archive-passes-over-what-retention-takes-meanwhile",
        "messages that retention removes while a piece is read are reported, never skipped silently",
        "tfmq/spark/pipelines/archive.py",
        "        runs = logs.read_blocks(OffsetRange(log, piece.start, piece.end))\n",
        "        runs = logs.read_blocks(OffsetRange(log, logs.next_message_offset(log, piece.start), piece.end))\n",
        [f"{ARCHIVING}::test_what_retention_takes_before_a_piece_is_read_is_reported"],
    ),
    Mutant(
        "archive-piece-begins-before-its-range",
        "no row is archived twice, also where a piece begins inside a block",
        "tfmq/spark/pipelines/archive.py",
        "        batches = (decoder.decode(each.data, each.offset, piece.start, piece.end) for each in runs)\n",
        "        batches = (decoder.decode(each.data, each.offset, 0, piece.end) for each in runs)\n",
        [f"{ARCHIVING}::test_a_piece_that_starts_inside_a_repaired_range_has_the_messages_after_it"],
    ),
    Mutant(
        "archive-forgets-the-gap-of-a-step-that-was-begun",
        "messages of a step that retention removed are recorded, and the files of the step are moved aside",
        "tfmq/spark/pipelines/archive.py",
        "        changed.append(each)\n",
        "",
        [f"{ARCHIVING}::test_what_retention_took_of_a_step_that_was_begun_is_reported_or_noted"],
    ),
    Mutant(
        "archive-passes-over-what-retention-took",
        "missing messages stop the archive, or are recorded as a gap",
        "tfmq/spark/pipelines/archive.py",
        "        elif start < bounds.first:\n",
        "        elif start > bounds.end + bounds.first:\n",
        [f"{ARCHIVING}::test_what_retention_took_between_two_runs_is_reported_or_noted", PLANNING],
    ),
    Mutant(
        "archive-believes-a-log-that-was-set-back",
        "a log that is shorter than its archive is refused",
        "tfmq/spark/pipelines/archive.py",
        "        elif start > bounds.end:\n",
        "        elif start < 0:\n",
        [f"{ARCHIVING}::test_a_log_that_was_set_back_is_refused", PLANNING],
    ),
    Mutant(
        "archive-goes-on-before-a-gap",
        "a run continues after the gap that was recorded",
        "tfmq/spark/pipelines/archive.py",
        "    archived: tuple[ArchivePiece | Gap, ...] = (*pieces, *gaps)\n",
        "    archived = pieces\n",
        [PLANNING],
    ),
    Mutant(
        "archive-piece-begins-after-its-range",
        "steps and pieces contain every offset once",
        "tfmq/spark/pipelines/archive.py",
        "            left.append(stretch._replace(start=end))\n",
        "            left.append(stretch._replace(start=end + 1))\n",
        [PLANNING],
    ),
    Mutant(
        "archive-hours-of-another-zone",
        "rows are stored in the file of their hour, UTC",
        "tfmq/spark/pipelines/parquet_files.py",
        "// HOUR_US\n",
        "// HOUR_US + 1\n",
        [HOUR_FILES],
    ),
    Mutant(
        "archive-row-groups-as-batches-come",
        "the same rows give the same bytes, whatever their batches",
        "tfmq/spark/pipelines/parquet_files.py",
        "            if self._buffered_bytes >= GROUP_BYTES or self._buffered_rows >= GROUP_ROWS:\n",
        "            if self._buffered_bytes:\n",
        [f"{HOUR_FILES}::test_the_same_rows_give_the_same_bytes_however_they_come"],
    ),
    Mutant(
        "archive-file-shown-before-it-is-whole",
        "a file has its name when it is complete",
        "tfmq/spark/pipelines/parquet_files.py",
        "        self._temporary = archive_folder.temporary_path(self._path)\n",
        "        self._temporary = self._path\n",
        [f"{HOUR_FILES}::test_what_fails_in_the_middle_leaves_whole_files_only"],
    ),
    Mutant(
        "archive-file-not-fsynced",
        "a file is durable before it gets its name",
        "tfmq/spark/pipelines/archive_folder.py",
        "        file.flush()\n        os.fsync(file.fileno())\n",
        "        file.flush()\n",
        [DURABLE],
    ),
    Mutant(
        "archive-name-not-fsynced",
        "a file's name is durable when the file is reported as present",
        "tfmq/spark/pipelines/archive_folder.py",
        ("    temporary.replace(path)\n    fsync_folder(path.parent)\n"),
        "    temporary.replace(path)\n",
        [DURABLE],
    ),
    Mutant(
        "archive-manifest-believed",
        "a damaged manifest is reported by name",
        "tfmq/spark/pipelines/archive_folder.py",
        "    if crc != _crc(body):\n",
        "    if crc is None:\n",
        [MANIFEST],
    ),
    Mutant(
        "archive-missing-step-passed-over",
        "a missing step is reported by name",
        "tfmq/spark/pipelines/archive_folder.py",
        "            if step != expected:\n",
        "            if step < expected:\n",
        [MANIFEST],
    ),
    Mutant(
        "archive-takes-any-folder",
        "a folder with other content is not taken for an archive",
        "tfmq/spark/pipelines/archive_folder.py",
        "        if strangers:\n",
        "        if len(strangers) > 1:\n",
        [MANIFEST],
    ),
    Mutant(
        "archive-file-believed",
        "a damaged file of an archive is reported by name before a row of it is used",
        "tfmq/spark/pipelines/parquet_files.py",
        "    elif crc != file.crc:\n",
        "    elif crc == 0:\n",
        ["tests/spark/pipelines/test_parquet_files.py"],
    ),
    Mutant(
        "failed-task-passed-over",
        "the error of a task is raised with its own type",
        "tfmq/spark/pipelines/spark_jobs.py",
        (
            "            if isinstance(each, TaskFailure):\n"
            "                raise each.to_error()\n"
            '        return [each.result for each in cast("list[TaskResult[Result]]", found)]\n'
        ),
        "            pass\n        return [each.result for each in found if isinstance(each, TaskResult)]\n",
        ["tests/spark/pipelines/test_spark_jobs.py::test_the_error_of_a_task_is_raised_as_what_it_is"],
    ),
)

REPLAYED: Final = (
    Mutant(
        "replay-begins-anew-each-time",
        "a run continues where the previous one ended",
        "tfmq/spark/pipelines/replay.py",
        "        return ReplayTarget(group, topic.incarnation, count, max(reached, default=0))\n",
        "        return ReplayTarget(group, topic.incarnation, count, 0)\n",
        [f"{REPLAYING}::test_a_second_run_sends_nothing_and_a_grown_archive_only_what_is_new"],
    ),
    Mutant(
        "replay-without-attributes",
        "keys, tags, properties and birth times are restored",
        "tfmq/spark/pipelines/replay.py",
        'SENT_COLUMNS: Final = ("value", "attributes", "partition")\n',
        'SENT_COLUMNS: Final = ("value", "key", "partition")\n',
        [f"{REPLAYING}::test_the_identical_messages_come_back_in_their_partitions_and_order"],
    ),
    Mutant(
        "replay-without-partitions",
        "messages are restored to their partitions, in order",
        "tfmq/spark/pipelines/replay.py",
        'SENT_COLUMNS: Final = ("value", "attributes", "partition")\n',
        'SENT_COLUMNS: Final = ("value", "attributes")\n',
        [f"{REPLAYING}::test_the_identical_messages_come_back_in_their_partitions_and_order"],
    ),
    Mutant(
        "replay-into-another-number-of-partitions",
        "a target with another number of partitions is refused",
        "tfmq/spark/pipelines/replay.py",
        "        if count != known and not wish.repartition:\n",
        "        if count < known and not wish.repartition:\n",
        [f"{REPLAYING}::test_another_number_of_partitions_is_refused_or_keys_choose_anew"],
    ),
    Mutant(
        "replay-into-its-own-topic",
        "a topic does not get its own messages a second time unless that is requested",
        "tfmq/spark/pipelines/replay.py",
        "        if same and not wish.into_itself:\n",
        "        if same and wish.repartition:\n",
        [f"{REPLAYING}::test_a_topic_does_not_get_its_own_messages_unless_that_is_meant"],
    ),
    Mutant(
        "replay-takes-the-end-of-its-time-with-it",
        "rows are selected one by one: since <= time < until",
        "tfmq/spark/pipelines/replay.py",
        "int(np.searchsorted(times, choice.until_ms))",
        'int(np.searchsorted(times, choice.until_ms, "right"))',
        [f"{REPLAYING}::test_partitions_and_times_are_chosen_row_by_row"],
    ),
    Mutant(
        "replay-finds-a-missing-file-on-the-way",
        "a missing file is reported before anything is sent",
        "tfmq/spark/pipelines/replay.py",
        "        self._check_files(todo)\n",
        "",
        [f"{REPLAYING}::test_a_missing_file_is_reported_before_anything_is_sent"],
    ),
    Mutant(
        "replay-files-out-of-order",
        "partitions keep their order",
        "tfmq/spark/pipelines/replay.py",
        "key=lambda file: (file.partition, file.first_offset)",
        "key=lambda file: (file.partition, -file.first_offset)",
        [REPLAY_PLAN],
    ),
    Mutant(
        "replay-steps-renumbered-when-the-archive-grows",
        "a later archive run adds steps and changes none",
        "tfmq/spark/pipelines/replay.py",
        (
            "    for manifest in manifests:\n"
            "        files = [each for each in manifest.files if selection.includes(each)]\n"
        ),
        "    for files in ([each for one in manifests for each in one.files if selection.includes(each)],):\n",
        [REPLAY_PLAN],
    ),
    Mutant(
        "replay-into-a-new-topic-taken-for-the-old-one",
        "a replay to another target is another replay",
        "tfmq/spark/pipelines/replay.py",
        "[archive_id, *choice, node, topic, incarnation]",
        "[archive_id, *choice, node, topic]",
        [REPLAY_PLAN],
    ),
)

SPARK_ARCHIVE: Final = ARCHIVED + REPLAYED
