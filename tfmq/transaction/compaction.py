"""Keeps the journal small where old transactions stay in it: what lives in old, nearly empty files is carried forward.

One prepared transaction of a month ago would else pin the file that it is in, and a thousand of them a thousand files.
When the files hold more than four times what lives in them, and more than eight files' worth, the messages of
undecided transactions are copied out of files that are less than half alive. The copies are byte-identical entries
that name the place they came from; a file goes once nothing is held in it and checkpoints lie behind it.

What lives is counted with the headers of its entries: a copy of tiny batches would else look as empty as what it was
copied from, and be copied for ever.

What is decided is left where it is: it is about to go, and a partition may be reading it.
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
"""Files may hold so many times the bytes that live in them."""
FILES_MIN: Final = 8
"""Below so many files' worth nothing is moved: it would save little."""
EMPTY_FACTOR: Final = 2
"""A file of which less than this part lives is worth emptying. While there is more than ALIVE_FACTOR allows, there is
one."""

STEP_BYTES: Final = 1 << 20
"""Copied at once: others get their turn between two steps."""
ROUND_BYTES: Final = 256 << 20
"""Planned at once; the rest is for the next round."""

Row = tuple[Locations, int]
"""Locations of a transaction, and how many words of them there were when the round began."""


class Relocation:
    """See the module. `tend` about once a second, in the owner's thread; reading is done in a worker."""

    def __init__(
        self, journal: JournalStore, ledger: Ledger, queue: JournalQueue, run: Run, file_bytes: int
    ) -> None:
        self._journal = journal
        self._ledger = ledger
        self._queue = queue
        self._run = run
        self._bytes_min = FILES_MIN * file_bytes
        self._places: array[int] = array("Q")
        self._at = 0
        self._touched: set[int] = set()
        self._bad: set[int] = set()
        """Files with an entry that could not be read: they stay."""
        self.working = False

    @property
    def needed(self) -> bool:
        """Whether the files hold more than they should."""
        return self._journal.size_bytes > max(ALIVE_FACTOR * self._ledger.kept.entries_bytes, self._bytes_min)

    def tend(self) -> None:
        """Begins a round if one is needed and none is under way."""
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

    def _written(self, place: int, error: BaseException | None) -> None:
        if error is not None:
            self._end()
        else:
            self._step()

    def _failed(self, error: BaseException | None) -> None:
        """An entry cannot be read. The transaction that has it is in trouble, and says so when it is committed."""
        if not isinstance(error, JournalError | OSError):
            self.working = False
            raise error or RuntimeError("a round of relocation without a result")
        place = self._places[self._at]
        files = self._journal.files
        number = files[bisect_right([file.first for file in files], place) - 1].number
        logger.error("the transaction journal's file %d cannot be emptied: %s", number, error)
        self._bad.add(number)
        self._end()

    def _end(self) -> None:
        """The old places are needed no more."""
        self.working = False
        self._places = array("Q")
        touched, self._touched = self._touched, set()
        holds = self._ledger.holds
        for epoch in sorted(touched):
            transaction = self._ledger.transactions.get(epoch)
            if transaction is not None and not transaction.settled and holds is not None:
                holds.renew(transaction)


def plan(rows: Sequence[Row], files: Sequence[JournalFileInfo], bad: frozenset[int]) -> "array[int]":
    """The places of batches that should move, transaction by transaction; in a worker.

    They lie in files of which less than half is alive, the oldest first; not in the last one, nor in `bad` ones.
    """
    firsts = [file.first for file in files]
    alive = [0] * len(files)
    for locations, words in rows:
        for place, both in zip(locations[0:words:WORDS], locations[2:words:WORDS], strict=True):
            if place:
                alive[bisect_right(firsts, place) - 1] += (both & SIZE_MASK) + ENTRY_BYTES
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
            place
            for locations, words in rows
            for place in locations[0:words:WORDS]
            if place and bisect_right(firsts, place) - 1 in chosen
        ),
    )


def _read(read: Callable[[int], Any], places: "array[int]", at: int) -> tuple[list[AppendMsg], int]:
    """(copies of the batches at `places` from index `at` on, about STEP_BYTES of them, the index behind); in a worker.

    Raises what `read` does at the first of them; what cannot be read further on is left to the next step.
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
