"""Rows of a database and messages, together or not at all. For SQLAlchemy 2, blocking and asyncio.

    tfmq.sql.create_table(engine)                               # once

    with tfmq.sql.transaction(session, producer) as tx:
        session.add(order)
        tx.send("orders", order.as_json())

Both commit or neither does, whatever crashes: docs/database-transactions.md tells how, and what to look after.
`commit_offsets` is for who only consumes: results and offset in one transaction of the database (docs/offsets.md).
"""

from tfmq.sql.database import TABLE as TABLE
from tfmq.sql.database import create_table as create_table
from tfmq.sql.database import transaction_table as transaction_table
from tfmq.sql.decision import prune as prune
from tfmq.sql.offsets import commit_offsets as commit_offsets
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
