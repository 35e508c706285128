"""Journal compaction: copies batches to the end of the transaction journal, so that old files can be deleted.

Without compaction a thousand transactions prepared a month ago could keep a thousand files. Live bytes are the bytes of
batches that a transaction still needs. A round of compaction begins when all files together have more than four times
the live bytes, and are larger than eight full files. From each file of which less than half is live, the batches of
prepared transactions are copied to the end of the journal; each copy has the LSN of its original. A file is deleted
when no transaction has a reference to the file and a later checkpoint was written.

The headers of entries count as live bytes. Otherwise a file of copied tiny batches would seem as empty as the original
file, and these batches would be copied again and again. Batches of committed transactions are not copied, because they
will soon be obsolete and the applier may be reading them.
"""

import logging
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from journal.errors import JournalError
from journal.wal.entry import AppendMsg
from journal.wal.store import JournalFileInfo, JournalStore
from tfmq.apply_target import RunInWorker
from tfmq.transaction import states
from tfmq.transaction.journal_writer import JournalWriter, WriteRequest
from tfmq.transaction.model import ENTRY_BYTES, SIZE_MASK, WORDS_PER_BATCH, BatchLocations
from tfmq.transaction.transaction_table import TransactionTable

logger = logging.getLogger("tfmq.transaction")

LIVE_FACTOR: Final = 4
"""Compaction begins when the files have more than this many times the live bytes."""
FILES_MIN: Final = 8
"""Compaction does not begin while all files together are smaller than this many full files."""
EMPTY_FACTOR: Final = 2
"""Batches are copied from files of which less than 1/EMPTY_FACTOR is live. There is one when compaction begins."""

BYTES_PER_STEP: Final = 1 << 20
"""Bytes of batches that one step copies; the broker does other work before the next step."""
BYTES_PER_ROUND: Final = 256 << 20
"""Maximum bytes of batches that one round copies; the next round copies the rest."""

LocationSnapshot = tuple[BatchLocations, int]
"""Batch locations of a transaction, and how many words this array had when the round began."""


class JournalCompaction:
    """Copies live batches from journal files that are less than half live; workers read the batches."""

    def __init__(
        self, journal: JournalStore, table: TransactionTable, queue: JournalWriter, run: RunInWorker, file_bytes: int
    ) -> None:
        self._journal = journal
        self._table = table
        self._writer = queue
        self._run = run
        self._bytes_min = FILES_MIN * file_bytes
        self._lsns: array[int] = array("Q")
        self._next_index = 0
        self._relocated_epochs: set[int] = set()
        self._unreadable_files: set[int] = set()
        """Numbers of the files with an unreadable entry; no later round copies batches from these files."""
        self.running = False

    @property
    def needed(self) -> bool:
        return self._journal.size_bytes > max(LIVE_FACTOR * self._table.retained_journal_bytes, self._bytes_min)

    def run_if_needed(self) -> None:
        if self.running or self._journal.stopped is not None or not self.needed:
            return
        rows = [
            (each.locations, len(each.locations))
            for each in self._table.transactions.values()
            if each.state == states.PREPARED
        ]
        self.running = True
        self._run(partial(plan_round, rows, self._journal.files, frozenset(self._unreadable_files)), self._plan_done)

    def _plan_done(self, lsns: "array[int] | None", error: BaseException | None) -> None:
        if error is not None:
            self.running = False
            raise error
        assert lsns is not None
        self._lsns, self._next_index = lsns, 0
        self._read_next()

    def _read_next(self) -> None:
        if self._next_index >= len(self._lsns) or self._journal.stopped is not None:
            self._finish_round()
        else:
            self._run(partial(_read_batches, self._journal.read, self._lsns, self._next_index), self._read_done)

    def _read_done(self, found: "tuple[list[AppendMsg], int] | None", error: BaseException | None) -> None:
        if isinstance(error, JournalError | OSError):
            # No later round reads this file. A client that commits the transaction of the bad entry gets an error.
            lsn, files = self._lsns[self._next_index], self._journal.files
            number = files[bisect_right([file.first for file in files], lsn) - 1].number
            logger.error("the transaction journal's file %d cannot be emptied: %s", number, error)
            self._unreadable_files.add(number)
            self._finish_round()
            return
        if found is None:
            self.running = False
            raise error or RuntimeError("a round of relocation without a result")
        messages, self._next_index = found
        live = self._table.transactions
        self._relocated_epochs.update(message.epoch for message in messages)
        messages = [message for message in messages if message.epoch in live]
        if messages:
            self._writer.enqueue_request(WriteRequest(None, messages, None, self._append_done))
        else:
            self._read_next()

    def _append_done(self, lsn: int, error: BaseException | None) -> None:
        if error is not None:
            self._finish_round()
        else:
            self._read_next()

    def _finish_round(self) -> None:
        self.running = False
        self._lsns = array("Q")
        touched, self._relocated_epochs = self._relocated_epochs, set()
        references = self._table.file_references
        for epoch in sorted(touched):
            transaction = self._table.transactions.get(epoch)
            if transaction is not None and not transaction.obsolete and references is not None:
                references.rebuild(transaction)


def plan_round(rows: Sequence[LocationSnapshot], files: Sequence[JournalFileInfo], bad: frozenset[int]) -> "array[int]":
    """Select the batches that a round copies, and return their LSNs, ordered by transaction. Runs in a worker.

    Selects all batches in `rows` that are in files less than half live, from the oldest such file on, but not in the
    last file nor in files with a number in `bad`. The round ends before the file that would exceed BYTES_PER_ROUND.
    """
    firsts = [file.first for file in files]
    alive = [0] * len(files)
    for locations, words in rows:
        for lsn, count_size in zip(locations[0:words:WORDS_PER_BATCH], locations[2:words:WORDS_PER_BATCH], strict=True):
            if lsn:
                alive[bisect_right(firsts, lsn) - 1] += (count_size & SIZE_MASK) + ENTRY_BYTES
    chosen: set[int] = set()
    size = 0
    for index, file in enumerate(files[:-1]):
        if file.number not in bad and 0 < EMPTY_FACTOR * alive[index] < file.size:
            size += alive[index]
            if chosen and size > BYTES_PER_ROUND:
                break
            chosen.add(index)
    return array(
        "Q",
        (
            lsn
            for locations, words in rows
            for lsn in locations[0:words:WORDS_PER_BATCH]
            if lsn and bisect_right(firsts, lsn) - 1 in chosen
        ),
    )


def _read_batches(read: Callable[[int], Any], lsns: "array[int]", at: int) -> tuple[list[AppendMsg], int]:
    """Read batches from `lsns[at]` on, about BYTES_PER_STEP; return copies and the next index. Runs in a worker."""
    messages: list[AppendMsg] = []
    size = 0
    while at < len(lsns) and (not messages or size < BYTES_PER_STEP):
        try:
            found = read(lsns[at]).content
        except (JournalError, OSError):
            if messages:
                break
            raise
        if isinstance(found, AppendMsg):
            size += len(found.data)
            messages.append(found._replace(moved_from=lsns[at]))
        at += 1
    return messages, at
