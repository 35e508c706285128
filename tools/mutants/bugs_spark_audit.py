"""Planted bugs: the pipelines audit, reconcile and report: what they overlook or report wrongly."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

PIECE: Final = "tests/spark/pipelines/test_audit_piece.py"
CHAIN: Final = "tests/spark/pipelines/test_audit_check.py"
JUDGING: Final = "tests/spark/pipelines/test_audit_compare.py"
JOURNAL: Final = "tests/spark/pipelines/test_audit_journal.py"
PLAN: Final = "tests/spark/pipelines/test_audit_plan.py"
LOCATING: Final = "tests/spark/pipelines/test_audit_repeats.py"
FACTS: Final = "tests/spark/pipelines/test_audit_check.py"
CATALOG: Final = "tests/spark/pipelines/test_audit_plan.py"
ROWS: Final = "tests/spark/pipelines/test_reconcile.py"
FIGURES: Final = "tests/spark/pipelines/test_report_render.py"

SEGMENTS: Final = (
    Mutant(
        "audit-missing-mark-passed-over",
        "a log whose mark is missing is reported",
        "tfmq/spark/pipelines/audit_check.py",
        "        if marks is None and not self.log.checkpoint_damaged and any(each.size for each in self._segments):\n",
        "        if marks is None and begins:\n",
        [f"{PLAN}::test_a_log_without_a_mark_is_reported_and_checked_all_the_same"],
    ),
    Mutant(
        "report-latency-of-nothing",
        "a topic without birth times has no latency",
        "tfmq/spark/pipelines/report_render.py",
        "        if not self.bins:\n            names",
        "        if self.bins is None:\n            names",
        [f"{FIGURES}::test_where_nothing_was_measured_no_figure_is_made_up"],
    ),
    Mutant(
        "pipelines-interrupts-of-pyspark",
        "Ctrl-C prints one sentence",
        "tfmq/spark/pipelines/command.py",
        "            signal.signal(signal.SIGINT, before)\n",
        "            pass\n",
        ["tests/spark/pipelines/test_command.py::test_a_ctrl_c_is_taken_back_from_its_handler"],
    ),
    Mutant(
        "audit-damage-is-a-tail",
        "a flipped bit is found wherever it is",
        "tfmq/spark/pipelines/audit_check.py",
        "        if self.piece.is_last and end and first >= self.log.durable_offset:\n",
        "        if end and self.piece.is_last:\n",
        [f"{PIECE}::test_a_flipped_bit_is_found_wherever_it_is_and_nothing_else"],
    ),
    Mutant(
        "audit-tail-is-damage",
        "bytes after the durable offset are not damage",
        "tfmq/spark/pipelines/audit_check.py",
        "        if self.piece.is_last and end and first >= self.log.durable_offset:\n",
        "        if False:\n",
        [f"{PIECE}::test_the_tail_after_the_durable_offset_is_no_damage"],
    ),
    Mutant(
        "audit-places-may-go-back",
        "positions of transactions only increase in a partition",
        "tfmq/spark/pipelines/audit_check.py",
        "            if result.last_source is not None and source < result.last_source:\n",
        "            if result.last_source is not None and source < (0, 0):\n",
        [f"{PIECE}::test_places_of_transactions_that_go_back_are_reported"],
    ),
    Mutant(
        "audit-pieces-at-unproven-places",
        "a piece begins only at the beginning of a block that a block trailer confirms",
        "tfmq/spark/pipelines/audit_plan.py",
        "        return decode_trailer(data, 0, log_id).next == segment.base + position\n",
        "        return len(data) > 0\n",
        [f"{PLAN}::test_no_piece_begins_where_a_block_trailer_is_damaged"],
    ),
    Mutant(
        "audit-missing-segment-between-files-unseen",
        "a missing segment is found",
        "tfmq/spark/pipelines/audit_check.py",
        "            if before.end < after.base:\n",
        "            if before.end < before.base:\n",
        [f"{CHAIN}::test_each_missing_segment_is_found"],
    ),
    Mutant(
        "audit-last-segments-unseen",
        "segments that are missing at the end are found",
        "tfmq/spark/pipelines/audit_check.py",
        "        if marks is not None and self._segments and self._segments[-1].end < marks.durable:\n",
        "        if marks is not None and self._segments and self._segments[-1].end < marks.first:\n",
        [f"{CHAIN}::test_each_missing_segment_is_found"],
    ),
    Mutant(
        "audit-retention-is-loss",
        "messages that retention removed are not reported as missing",
        "tfmq/spark/pipelines/audit_check.py",
        ("            if marks.first < first:\n                self._report_missing_bytes(None, marks.first, first)\n"),
        ("            if 0 < first:\n                self._report_missing_bytes(None, 0, first)\n"),
        [f"{CHAIN}::test_what_retention_took_is_not_missing"],
    ),
    Mutant(
        "audit-ordinals-between-files-unseen",
        "ordinals continue from file to file",
        "tfmq/spark/pipelines/audit_check.py",
        "                self._check_ordinals(found[number - 1], each)\n",
        "                pass\n",
        [f"{CHAIN}::test_ordinals_that_do_not_go_on_from_file_to_file_are_reported"],
    ),
    Mutant(
        "audit-missing-folder-unseen",
        "a missing folder of a partition is found",
        "tfmq/spark/pipelines/audit_plan.py",
        "        for partition in range(topic.partitions):\n",
        "        for partition in range(1):\n",
        [f"{CATALOG}::test_a_partitions_folder_that_is_missing_is_found"],
    ),
)

IDS: Final = (
    Mutant(
        "audit-only-neighbours-are-repeats",
        "two messages with the same id are found wherever they are",
        "tfmq/spark/pipelines/audit_compare.py",
        "    for at in np.flatnonzero(runs.key[1:] < highest[:-1]) + 1:\n",
        "    for at in np.flatnonzero(runs.key[1:] < ends[:-1]) + 1:\n",
        [f"{JUDGING}::test_what_stands_twice_is_reported_and_only_that"],
    ),
    Mutant(
        "audit-brokers-share-ids",
        "each data folder is compared only with itself",
        "tfmq/spark/pipelines/audit_compare.py",
        "        mine = facts.select(facts.folder == folder)\n",
        "        mine = facts\n",
        [f"{JUDGING}::test_brokers_do_not_share_ids"],
    ),
    Mutant(
        "audit-a-producers-ids-in-two-parts",
        "ids of one producer are checked together",
        "tfmq/spark/pipelines/audit_check.py",
        "    mixed = (facts.key >> np.uint64(SEQUENCE_BITS)) + facts.folder.astype(np.uint64)\n",
        "    mixed = facts.key + facts.folder.astype(np.uint64)\n",
        [f"{FACTS}::test_a_split_loses_nothing_and_keeps_a_producers_ids_together"],
    ),
    Mutant(
        "audit-repeat-without-its-place",
        "a repeated message is reported with its exact position",
        "tfmq/spark/pipelines/audit_compare.py",
        "                if first_id <= id < end_id and not flag & (FLAG_TRAILER | FLAG_FILLER):\n",
        "                if first_id <= id and not flag & (FLAG_TRAILER | FLAG_FILLER):\n",
        [LOCATING],
    ),
)

TRANSACTIONS: Final = (
    Mutant(
        "audit-torn-transaction-is-on-its-way",
        "messages of a committed transaction that a partition lacks are found",
        "tfmq/spark/pipelines/audit_compare.py",
        "            if (lsn, number) > state.applied:\n",
        "            if (lsn, number) > audit_check.FIRST_SOURCE:\n",
        [f"{JUDGING}::test_what_a_transaction_brings_and_a_partition_lacks_is_reported"],
    ),
    Mutant(
        "audit-on-its-way-is-torn",
        "messages that a partition has not applied yet are reported as pending",
        "tfmq/spark/pipelines/audit_compare.py",
        "            if (lsn, number) > state.applied:\n",
        "            if lsn > state.applied[0]:\n",
        [f"{JUDGING}::test_what_a_partition_has_not_come_to_is_on_its_way"],
    ),
    Mutant(
        "audit-damage-is-reported-again-as-torn",
        "messages that were lost with damage are not reported as torn",
        "tfmq/spark/pipelines/audit_compare.py",
        "            elif not any(low[0] <= lsn <= high[0] for low, high, _ in state.windows):\n",
        "            elif not any(low[0] < lsn < high[0] for low, high, _ in state.windows):\n",
        [f"{JUDGING}::test_what_may_have_been_where_damage_is_or_retention_was_is_not_reported_again"],
    ),
    Mutant(
        "audit-unfinished-append-is-applied",
        "a large append that is being written, or was interrupted by kill -9, is no torn transaction",
        "tfmq/spark/pipelines/audit_check.py",
        "            if not control.more_follows:\n",
        "            if control.records:\n",
        [f"{PIECE}::test_an_unfinished_append_is_not_applied_yet"],
    ),
    Mutant(
        "audit-segments-deleted-meanwhile-are-torn",
        "messages that retention deletes during an audit are not reported as torn",
        "tfmq/spark/pipelines/audit_check.py",
        "            if each.file_missing:\n",
        "            if each.file_missing and not each.piece.base:\n",
        [f"{PIECE}::test_retention_between_the_pieces_of_a_segment_tears_no_transaction"],
    ),
    Mutant(
        "audit-stray-appends-unseen",
        "an append is valid only with a decision of the journal",
        "tfmq/spark/pipelines/audit_compare.py",
        "        if lsn >= end or any(",
        "        if any(",
        [f"{JUDGING}::test_an_append_counts_only_under_a_decision_that_the_journal_has"],
    ),
    Mutant(
        "audit-forgotten-decisions-are-undecided",
        "where files of the journal are missing, no transaction is reported as undecided",
        "tfmq/spark/pipelines/audit_journal.py",
        "        elif epoch in rolled or message.lsn >= known_from:\n",
        "        elif epoch in rolled or message.lsn >= 0:\n",
        [f"{JOURNAL}::test_where_files_are_gone_nothing_is_undecided_and_no_number_is_known"],
    ),
    Mutant(
        "audit-numbers-without-removed-files",
        "an audit beside a broker that removes the first files of a large transaction finds nothing torn",
        "tfmq/spark/pipelines/audit_journal.py",
        (
            "    return {lsn for epoch, (lsn, _) in of_epoch.items() if epoch in copied or total.get(epoc"
            "h) != has[epoch]}\n"
        ),
        "    return {lsn for epoch, (lsn, _) in of_epoch.items() if epoch in copied}\n",
        [f"{JOURNAL}::test_a_decision_whose_first_messages_were_removed_with_their_file_has_no_numbers"],
    ),
    Mutant(
        "audit-numbers-of-copies",
        "messages of which only copies are left are not numbered by the positions of the copies",
        "tfmq/spark/pipelines/audit_journal.py",
        (
            "    return {lsn for epoch, (lsn, _) in of_epoch.items() if epoch in copied or total.get(epoc"
            "h) != has[epoch]}\n"
        ),
        "    return {lsn for epoch, (lsn, _) in of_epoch.items() if total.get(epoch) != has[epoch]}\n",
        [f"{JOURNAL}::test_where_only_a_copy_is_left_the_order_of_a_decision_is_not_known"],
    ),
    Mutant(
        "audit-group-members-by-epoch",
        "members of a commit group are numbered in the order of the decision",
        "tfmq/spark/pipelines/audit_journal.py",
        "            of_epoch[epoch] = lsn, order\n",
        "            of_epoch[epoch] = lsn, 0 * order\n",
        [f"{JOURNAL}::test_members_of_a_commit_group_are_numbered_in_the_order_of_the_decision"],
    ),
)

BALANCES: Final = (
    Mutant(
        "reconcile-dead-letters-of-the-next-message-are-done",
        "a dead letter of a message that is not committed as processed is reported",
        "tfmq/spark/pipelines/reconcile.py",
        "    early = [letter for letter in letters if letter.ordinal >= consumed]\n",
        "    early = [letter for letter in letters if letter.ordinal > consumed]\n",
        [f"{ROWS}::test_each_thing_that_does_not_add_up_is_reported_alone"],
    ),
    Mutant(
        "reconcile-two-stores-count-twice",
        "a dead letter in two stores is reported",
        "tfmq/spark/pipelines/reconcile.py",
        "        if other is not letter and other.store != letter.store:\n",
        "        if other is not letter and other.store == letter.store:\n",
        [f"{ROWS}::test_each_thing_that_does_not_add_up_is_reported_alone"],
    ),
    Mutant(
        "report-quantiles-of-a-bins-edge",
        "quantiles are exact to the width of a bin, and with few values exact",
        "tfmq/spark/pipelines/report_render.py",
        "        left = share * self.count_values\n",
        "        left = share * share * self.count_values\n",
        [FIGURES],
    ),
    Mutant(
        "report-names-become-markup",
        "names from users are never interpreted as markup",
        "tfmq/spark/pipelines/report_render.py",
        '"".join(f"<td>{escape(cell)}</td>" for cell in row)',
        '"".join(f"<td>{cell}</td>" for cell in row)',
        ["tests/spark/pipelines/test_report_render.py::test_names_of_users_stay_text"],
    ),
)

SPARK_AUDIT: Final = SEGMENTS + IDS + TRANSACTIONS + BALANCES
