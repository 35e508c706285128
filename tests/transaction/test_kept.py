"""What is kept is counted with what each batch costs, and is nothing again when all have gone."""

from tests.transaction.desk import ORDERS
from tfmq.transaction.journal_records import Origin
from tfmq.transaction.model import ENTRY_BYTES, Transaction
from tfmq.transaction.transaction_table import Kept


def test_batches_count_with_their_headers_and_go_as_they_came() -> None:
    kept, transaction = Kept(), Transaction(1, Origin("x", False, 1, 1, 0))
    for size_bytes in (21, 300):
        kept.add(size_bytes)
        transaction.locations.add(size_bytes, ORDERS, 1, size_bytes)
        transaction.size_bytes += size_bytes
    assert (kept.size_bytes, kept.batches, kept.entries_bytes) == (321, 2, 321 + 2 * ENTRY_BYTES)
    again = Kept()
    again.take(transaction)
    assert again.entries_bytes == kept.entries_bytes
    kept.let_go(transaction)
    assert (kept.size_bytes, kept.batches, kept.entries_bytes) == (0, 0, 0)
