"""Journal compaction: copies batches forward, so that old files can be deleted.

Without it one transaction prepared a month ago would keep its file, and a thousand of them a thousand
files. Compaction runs when the files hold more than four times the live bytes, and more than eight files'
worth. It copies the batches of prepared transactions out of files that are less than half live. The copies
are byte-identical entries that name the LSN of the original. A file is deleted once nothing refers to it
and checkpoints follow it.

Entry headers count as live bytes: otherwise copied tiny batches would seem as empty as the original file
and be copied forever. Decided transactions are not copied: they are about to be released, and a partition
may be reading them.
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
from tfmq.transaction import states
from tfmq.transaction.journal_writer import Item, JournalQueue, Run
from tfmq.transaction.model import ENTRY_BYTES, SIZE_MASK, WORDS, Locations
from tfmq.transaction.transaction_table import Ledger

logger = logging.getLogger("tfmq.transaction")

ALIVE_FACTOR: Final = 4
"""Files may hold this many times the live bytes."""
FILES_MIN: Final = 8
"""Below this many files' worth of bytes nothing is copied: it would save little."""
EMPTY_FACTOR: Final = 2
"""A file is emptied if less than 1/EMPTY_FACTOR of it is live.

While the total exceeds LIVE_FACTOR, at least one such file exists.
"""

STEP_BYTES: Final = 1 << 20
"""Bytes copied per step; other work runs between two steps."""
ROUND_BYTES: Final = 256 << 20
"""Bytes planned per round; the rest is left to the next round."""

Row = tuple[Locations, int]
"""Locations of a transaction, and their number of words when the round began."""


class Relocation:
    """Copies live batches out of nearly empty journal files.

    Call `run_if_needed` about once a second in the owner's thread; reading is done in a worker.
    """

    def __init__(
        self, journal: JournalStore, table: Ledger, queue: JournalQueue, run: Run, file_bytes: int
    ) -> None:
        self._journal = journal
        self._ledger = table
        self._queue = queue
        self._run = run
        self._bytes_min = FILES_MIN * file_bytes
        self._places: array[int] = array("Q")
        self._at = 0
        self._touched: set[int] = set()
        self._bad: set[int] = set()
        """Numbers of files with an unreadable entry: they are not emptied."""
        self.working = False

    @property
    def needed(self) -> bool:
        """Whether the files hold more bytes than allowed."""
        return self._journal.size_bytes > max(ALIVE_FACTOR * self._ledger.kept.entries_bytes, self._bytes_min)

    def tend(self) -> None:
        """Start a round if one is needed and none is running."""
        if self.working or self._journal.stopped is not None or not self.needed:
            return
        rows = [
            (each.locations, len(each.locations))
            for each in self._ledger.transactions.values()
            if each.state == states.PREPARED
        ]
        self.working = True
        self._run(partial(plan, rows, self._journal.files, frozenset(self._bad)), self._planned)

    def _planned(self, places: "array[int] | None", error: BaseException | None) -> None:
        if error is not None:
            self.working = False
            raise error
        assert places is not None
        self._places, self._at = places, 0
        self._step()

    def _step(self) -> None:
        if self._at >= len(self._places) or self._journal.stopped is not None:
            self._end()
        else:
            self._run(partial(_read, self._journal.read, self._places, self._at), self._read_done)

    def _read_done(self, found: "tuple[list[AppendMsg], int] | None", error: BaseException | None) -> None:
        if found is None:
            self._failed(error)
            return
        messages, self._at = found
        live = self._ledger.transactions
        self._touched.update(message.epoch for message in messages)
        messages = [message for message in messages if message.epoch in live]
        if messages:
            self._queue.add(Item(None, messages, None, self._written))
        else:
            self._step()

    def _written(self, lsn: int, error: BaseException | None) -> None:
        if error is not None:
            self._end()
        else:
            self._step()

    def _failed(self, error: BaseException | None) -> None:
        """End the round after an entry could not be read.

        The error of that transaction is reported when it is committed.
        """
        if not isinstance(error, JournalError | OSError):
            self.working = False
            raise error or RuntimeError("a round of relocation without a result")
        lsn = self._places[self._at]
        files = self._journal.files
        number = files[bisect_right([file.first for file in files], lsn) - 1].number
        logger.error("the transaction journal's file %d cannot be emptied: %s", number, error)
        self._bad.add(number)
        self._end()

    def _end(self) -> None:
        """End the round: release references to the original entries."""
        self.working = False
        self._places = array("Q")
        touched, self._touched = self._touched, set()
        holds = self._ledger.holds
        for epoch in sorted(touched):
            transaction = self._ledger.transactions.get(epoch)
            if transaction is not None and not transaction.settled and holds is not None:
                holds.renew(transaction)


def plan(rows: Sequence[Row], files: Sequence[JournalFileInfo], bad: frozenset[int]) -> "array[int]":
    """Choose the batches to copy and return their LSNs, ordered by transaction.

    Runs in a worker. They are in files less than half live, oldest first; not in the last file nor in `bad`
    ones.
    """
    firsts = [file.first for file in files]
    alive = [0] * len(files)
    for locations, words in rows:
        for lsn, count_size in zip(locations[0:words:WORDS], locations[2:words:WORDS], strict=True):
            if lsn:
                alive[bisect_right(firsts, lsn) - 1] += (count_size & SIZE_MASK) + ENTRY_BYTES
    chosen: set[int] = set()
    size = 0
    for index, file in enumerate(files[:-1]):
        if file.number not in bad and 0 < EMPTY_FACTOR * alive[index] < file.size:
            size += alive[index]
            if chosen and size > ROUND_BYTES:
                break
            chosen.add(index)
    return array(
        "Q",
        (
            lsn
            for locations, words in rows
            for lsn in locations[0:words:WORDS]
            if lsn and bisect_right(firsts, lsn) - 1 in chosen
        ),
    )


def _read(read: Callable[[int], Any], places: "array[int]", at: int) -> tuple[list[AppendMsg], int]:
    """Read copies of the batches at `places` from index `at` on, about BYTES_PER_STEP.

    Runs in a worker. Returns the copies and the index of the next batch.
    Raises: whatever `read` raises for the first batch; a later failure is left to the next step.
    """
    messages: list[AppendMsg] = []
    size = 0
    while at < len(places) and (not messages or size < STEP_BYTES):
        try:
            found = read(places[at]).content
        except (JournalError, OSError):
            if messages:
                break
            raise
        if isinstance(found, AppendMsg):
            size += len(found.data)
            messages.append(found._replace(moved_from=places[at]))
        at += 1
    return messages, at
