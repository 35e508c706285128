"""Which files of the journal transactions need: one hold for each transaction and file.

A hold for each batch would cost a large transaction as much at its end as it had batches. So a transaction keeps one
place in each file where it has batches; since places only grow, the file that is written tells a new one.
"""

from bisect import bisect_right
from typing import Protocol

from journal.wal.store import JournalFileInfo
from tfmq.transaction.transaction import Transaction


class Held(Protocol):
    """What of a `JournalStore` counts holds."""

    @property
    def files(self) -> list[JournalFileInfo]: ...
    def hold(self, place: int) -> None: ...
    def release(self, place: int) -> None: ...


class Holds:
    """See the module."""

    def __init__(self, journal: Held) -> None:
        self._journal = journal
        self._firsts: list[int] = []
        self._first = 0
        self.rolled()

    def rolled(self) -> None:
        """The journal may have other files now."""
        self._firsts = [file.first for file in self._journal.files]
        self._first = self._firsts[-1]

    def add(self, transaction: Transaction, place: int) -> None:
        """The transaction has a batch at `place`, in the file that is written."""
        files = transaction.files
        if not files or files[-1] < self._first:
            self._journal.hold(place)
            files.append(place)

    def adopt(self, transaction: Transaction) -> None:
        """After a start, which held every one of its places: one in each file is enough."""
        kept: dict[int, int] = {}
        for place in transaction.places():
            number = self._number(place)
            if kept.setdefault(number, place) != place:
                self._journal.release(place)
        transaction.files = [kept[number] for number in sorted(kept)]

    def release(self, transaction: Transaction) -> None:
        """The journal need not keep anything of it."""
        files, transaction.files = transaction.files, []
        for place in files:
            self._journal.release(place)

    def renew(self, transaction: Transaction) -> None:
        """Its locations have changed: holds what it needs now, and nothing else."""
        needed: dict[int, int] = {}
        for place in transaction.places():
            needed.setdefault(self._number(place), place)
        places = [needed[number] for number in sorted(needed)]
        for place in places:
            self._journal.hold(place)
        self.release(transaction)
        transaction.files = places

    def _number(self, place: int) -> int:
        return bisect_right(self._firsts, place)
