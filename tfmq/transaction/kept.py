"""How much the journal keeps for transactions: of the messages, and of what each batch of them costs besides."""

from tfmq.transaction.transaction import ENTRY_BYTES, Transaction


class Kept:
    """`size_bytes`: of all messages. `batches`: how many they came in; each has memory here, and in the journal a
    header.
    """

    __slots__ = ("batches", "size_bytes")

    def __init__(self) -> None:
        self.size_bytes = self.batches = 0

    @property
    def entries_bytes(self) -> int:
        """What lives in the journal's files: the messages with the headers of their entries."""
        return self.size_bytes + self.batches * ENTRY_BYTES

    def add(self, size_bytes: int) -> None:
        """A batch."""
        self.size_bytes += size_bytes
        self.batches += 1

    def take(self, transaction: Transaction) -> None:
        """All that a transaction of a snapshot has."""
        self.size_bytes += transaction.size_bytes
        self.batches += transaction.locations.rows

    def lose(self, size_bytes: int) -> None:
        """A batch of that size is lost; it still has its row."""
        self.size_bytes -= size_bytes

    def let_go(self, transaction: Transaction) -> None:
        """The same, before its locations are cleared."""
        self.size_bytes -= transaction.size_bytes
        self.batches -= transaction.locations.rows
