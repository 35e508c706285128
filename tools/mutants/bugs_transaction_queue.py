"""Planted bugs: how the store of transactions writes: its queue, records, files, groups, outcomes."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant


def _bug(name: str, promise: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name, promise, file, old, new, list(tests))


QUEUE: Final = (
    _bug(
        "waiting-messages-are-borrowed",
        "data that waits for a new file is copied",
        "tfmq/transaction/journal_writer.py",
        ("                for item in (*items, *self._queue):\n                    item.copy_data()\n"),
        "",
        "tests/transaction/test_journal_writer.py",
    ),
    _bug(
        "later-ones-are-borrowed",
        "data that is queued while a file is started is copied",
        "tfmq/transaction/journal_writer.py",
        ("        if self.starting_file:\n            item.copy_data()\n"),
        "",
        "tests/transaction/test_journal_writer.py",
    ),
    _bug(
        "later-records-are-written",
        "after a refused append nothing is written that was queued with it",
        "tfmq/transaction/journal_writer.py",
        "        refused = [*items, *self._queue]\n        self._queue.clear()\n",
        "        refused = items\n",
        "tests/transaction/test_journal_writer.py",
    ),
    _bug(
        "references-do-not-follow-the-roll",
        "a file with live messages is referenced",
        "tfmq/transaction/journal_writer.py",
        "            self._table.file_references.refresh_files()\n",
        "",
        "tests/transaction/test_transaction_table.py",
    ),
    _bug(
        "a-cached-transaction-is-borrowed",
        "data that is cached for the partitions is copied",
        "tfmq/transaction/journal_writer.py",
        "Batch(bytes(data), blocks",
        "Batch(data, blocks",
        "tests/transaction/test_journal_writer.py",
    ),
    _bug(
        "the-cache-fills-up",
        "memory of applied transactions is given back",
        "tfmq/transaction/journal_writer.py",
        "            self.cached_bytes -= transaction.size_bytes\n",
        "",
        "tests/transaction/test_journal_writer.py",
    ),
    _bug(
        "reported-before-it-is-fsynced",
        "no request is acknowledged before the fsync has ended",
        "tfmq/transaction/journal_writer.py",
        "        if lsn < self._journal.forced_offset:\n",
        "        if lsn <= self._journal.forced_offset:\n",
        "tests/transaction/test_journal_writer.py",
    ),
    _bug(
        "sizes-without-blocks",
        "the size of an append is counted with its blocks",
        "tfmq/transaction/journal_writer.py",
        "BLOCK.size * len(message.blocks)",
        "BLOCK.size",
        "tests/transaction/test_journal_writer.py",
    ),
    _bug(
        "a-prepare-misses-what-is-queued",
        "a prepare counts batches that are still queued",
        "tfmq/transaction/store.py",
        ("            transaction.messages + transaction.queued_messages,\n            expires_ms,\n"),
        ("            transaction.messages,\n            expires_ms,\n"),
        "tests/transaction/test_store.py",
    ),
    _bug(
        "leftovers-stay",
        "a commit of a group ends its other members",
        "tfmq/transaction/store.py",
        "            [each.epoch for each in members],\n            [each.epoch for each in dropped],\n",
        "            [each.epoch for each in members],\n            [],\n",
        "tests/transaction/test_commit_groups.py",
    ),
    _bug(
        "forgotten-before-it-is-settled",
        "a commit by hand is forgotten only when all of it is durable",
        "tfmq/transaction/store.py",
        "            or not transaction.obsolete\n",
        "",
        "tests/transaction/test_store.py",
    ),
)
KEEPING: Final = (
    _bug(
        "bad-files-are-tried-without-end",
        "a file that cannot be read is kept, and the others are compacted",
        "tfmq/transaction/compaction.py",
        "file.number not in bad and ",
        "",
        "tests/transaction/test_compaction.py",
    ),
    _bug(
        "old-places-stay-held",
        "a compacted file is not referenced",
        "tfmq/transaction/compaction.py",
        "                references.rebuild(transaction)\n",
        "                pass\n",
        "tests/transaction/test_compaction.py",
    ),
    _bug(
        "full-files-are-moved",
        "only files of which less than half is live are compacted",
        "tfmq/transaction/compaction.py",
        "0 < EMPTY_FACTOR * alive[index] < file.size",
        "0 < alive[index] < file.size",
        "tests/transaction/test_compaction.py",
    ),
    _bug(
        "fences-stay",
        "a later commit removes the fences",
        "tfmq/transaction/commit_groups.py",
        "            group.fenced = {run: at for run, at in group.fenced.items() if at > sequence}\n",
        "",
        "tests/transaction/test_commit_groups.py",
    ),
    _bug(
        "another-total-is-always-refused",
        "another total is accepted where the writer allows it",
        "tfmq/transaction/commit_groups.py",
        "if rows != last.rows and not other_total:",
        "if rows != last.rows:",
        "tests/transaction/test_commit_groups.py",
    ),
    _bug(
        "members-of-any-sequence",
        "a commit accepts members of its own sequence only",
        "tfmq/transaction/commit_groups.py",
        " or members[epoch].sequence != sequence",
        "",
        "tests/transaction/test_commit_groups.py",
    ),
    _bug(
        "an-older-outcome-is-reported",
        "the outcome of a name is the latest one",
        "tfmq/transaction/outcomes.py",
        "        for run in reversed(self._runs):",
        "        for run in self._runs:",
        "tests/transaction/test_outcomes.py",
    ),
    _bug(
        "merged-outcomes-go-early",
        "outcomes are kept for the configured time",
        "tfmq/transaction/outcomes.py",
        "max(run.newest_ms for run in runs)",
        "min(run.newest_ms for run in runs)",
        "tests/transaction/test_outcomes.py",
    ),
    _bug(
        "pages-begin-at-the-beginning",
        "a page does not read those before it",
        "tfmq/transaction/transaction_table.py",
        "bisect_right(epochs, epoch)",
        "0 * bisect_right(epochs, epoch)",
        "tests/transaction/test_transaction_table.py",
    ),
    _bug(
        "a-failed-lease-counts",
        "no epoch is given out before its range is durable",
        "tfmq/transaction/store.py",
        "                if error is None:\n                    self._end = end\n",
        "                self._end = end\n",
        "tests/transaction/test_epochs.py",
    ),
)

TRANSACTION_QUEUE: Final = QUEUE + KEEPING
