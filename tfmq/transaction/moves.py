"""Changes where a transaction's batches lie, when the journal has carried them forward."""

from tfmq.transaction.transaction import WORDS, Locations, Transaction


class Moves:
    """Snapshots that are being packed share locations with the ledger: the first move of a transaction after each
    copies them.
    """

    def __init__(self) -> None:
        self._copied: set[int] = set()
        self._rows: tuple[int, dict[int, int]] = (0, {})
        """An epoch, and which of its batches lies at which place."""

    def share(self) -> None:
        """A snapshot has taken hold of all locations."""
        self._copied.clear()

    def move(self, transaction: Transaction, place: int, moved_from: int) -> bool:
        """The batch at `moved_from` lies at `place` now; False if it has none there."""
        row = self._row(transaction, moved_from)
        if row is None:
            return False
        if transaction.epoch not in self._copied:
            transaction.locations = Locations(transaction.locations)
            self._copied.add(transaction.epoch)
        transaction.locations[row * WORDS] = place
        self._rows[1][place] = row
        return True

    def _row(self, transaction: Transaction, place: int) -> int | None:
        """Which of its batches lies at `place`. Moves come transaction by transaction: one index is enough."""
        epoch, rows = self._rows
        if epoch != transaction.epoch or place not in rows:
            rows = {at: row for row, at in enumerate(transaction.locations[0::WORDS])}
            self._rows = (transaction.epoch, rows)
        return rows.get(place)
