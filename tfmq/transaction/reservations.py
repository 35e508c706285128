"""Space that transactions need: bounded for all unfinished ones together, set aside at their targets before a decision.

What is set aside was asked for first (`Destination.check`), for every target and with all that is set aside already:
so a decision is refused while it still can be, and not found to be impossible afterwards.
"""

from collections.abc import Mapping
from typing import Final

from tfmq.apply_target import Destination
from tfmq.errors import Busy, TransactionTooLarge
from tfmq.transaction.transaction import Transaction

FULL: Final = (
    "Unfinished transactions hold {held} bytes; with {more} more that is above limits.transactions_bytes. Wait, or"
    " end some of them."
)
MANY: Final = (
    "Unfinished transactions hold {held} batches; with {more} more that is above limits.transactions_pieces. Wait, or"
    " end some of them; and send larger batches."
)
LARGE: Final = "The transaction would have {found} {what}; the limit is limits.{limit}, {most}."


class Reservations:
    """`reserved`: bytes set aside at the targets, of prepared and decided transactions."""

    def __init__(self, destination: Destination, limits: Mapping[str, int]) -> None:
        self._destination = destination
        self._bytes_max = limits["transaction_bytes"]
        self._pieces_max = limits["transaction_pieces"]
        self._all_bytes_max = limits["transactions_bytes"]
        self._all_pieces_max = limits["transactions_pieces"]
        self.reserved = 0

    def require_room(
        self, held_bytes: int, held_pieces: int, transaction: Transaction, size_bytes: int, pieces: int
    ) -> None:
        """Whether a transaction may grow by so much; `held_bytes`, `held_pieces`: what all unfinished ones have, and
        what is on its way. Raises TransactionTooLarge, Busy.
        """
        found = transaction.size_bytes + size_bytes
        if found > self._bytes_max:
            raise _too_large("bytes", "transaction_bytes", found, self._bytes_max)
        rows = transaction.locations.rows + pieces
        if rows > self._pieces_max:
            raise _too_large("batches", "transaction_pieces", rows, self._pieces_max)
        if held_bytes + size_bytes > self._all_bytes_max:
            raise Busy(FULL.format(held=held_bytes, more=size_bytes))
        if held_pieces + pieces > self._all_pieces_max:
            raise Busy(MANY.format(held=held_pieces, more=pieces))

    def reserve(self, sizes: Mapping[int, int]) -> int:
        """Sets aside what a transaction brings to each target, by key; all or nothing. Answers the sum.

        Raises what `Destination.check` does.
        """
        taken = 0
        try:
            for key, size in sizes.items():
                self._destination.check(key, size)
                self._destination.reserve(size)
                taken += size
        except Exception:
            if taken:
                self._destination.release(taken)
            raise
        self.reserved += taken
        return taken

    def restore(self, size_bytes: int) -> None:
        """After a start: what was decided or prepared has its space, whether or not it is there."""
        self._destination.reserve(size_bytes)
        self.reserved += size_bytes

    def release(self, size_bytes: int) -> None:
        """It was written, or is not needed any more."""
        if size_bytes:
            self._destination.release(size_bytes)
            self.reserved -= size_bytes


def _too_large(what: str, limit: str, found: int, most: int) -> TransactionTooLarge:
    return TransactionTooLarge(
        LARGE.format(found=found, what=what, limit=limit, most=most), found=found, max=most, limit=limit
    )
