"""Transactions over database rows and messages: both commit or neither.

For SQLAlchemy 2, blocking and asyncio:

    tfmq.sql.create_table(engine)                               # once
    tfmq.sql.check(producer, engine)                            # at each start of the program

    with tfmq.sql.transaction(session, producer) as tx:
        session.add(order)
        session.flush()  # a generated key is set now
        tx.send("orders", order.as_json())

A crash can leave a transaction in doubt: prepared, but neither committed nor rolled back. After `check`, the producer
decides such transactions. Without `check`, a consumer whose offsets belong to such a transaction may wait without end.
docs/database-transactions.md describes how transactions survive crashes and what they need in operation.
`commit_offsets` is for consumers that send nothing: it commits results and offset together (docs/offsets.md).
"""

from tfmq.sql.database import TABLE as TABLE
from tfmq.sql.database import create_table as create_table
from tfmq.sql.database import transaction_table as transaction_table
from tfmq.sql.offset_commit import commit_offsets as commit_offsets
from tfmq.sql.pruning import prune as prune
from tfmq.sql.recovery import check as check
from tfmq.sql.transaction import AsyncTransaction as AsyncTransaction
from tfmq.sql.transaction import Transaction as Transaction
from tfmq.sql.transaction import transaction as transaction

__all__ = [
    "TABLE",
    "AsyncTransaction",
    "Transaction",
    "check",
    "commit_offsets",
    "create_table",
    "prune",
    "transaction",
    "transaction_table",
]
