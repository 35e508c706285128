"""What is kept is counted with what each batch costs, and is nothing again when all have gone."""

from tests.transaction.rig import ORDERS
from tfmq.transaction.journal_records import Origin
from tfmq.transaction.model import ENTRY_BYTES, Transaction
from tfmq.transaction.transaction_table import RetainedSize


def test_batches_count_with_their_headers_and_go_as_they_came() -> None:
    kept, transaction = RetainedSize(), Transaction(1, Origin("x", False, 1, 1, 0))
    for size_bytes in (21, 300):
        kept.add_batch(size_bytes)
        transaction.locations.add_batch(size_bytes, ORDERS, 1, size_bytes)
        transaction.size_bytes += size_bytes
    assert (kept.size_bytes, kept.batch_count, kept.journal_bytes) == (321, 2, 321 + 2 * ENTRY_BYTES)
    again = RetainedSize()
    again.add_transaction(transaction)
    assert again.journal_bytes == kept.journal_bytes
    kept.remove_transaction(transaction)
    assert (kept.size_bytes, kept.batch_count, kept.journal_bytes) == (0, 0, 0)
