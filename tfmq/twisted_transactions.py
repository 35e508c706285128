"""The Twisted face of a transaction: names, parameters and promises as in `tfmq.transactions`, with Deferreds."""

from __future__ import annotations

from inspect import iscoroutinefunction, isgeneratorfunction, unwrap
from typing import TYPE_CHECKING, Any, NoReturn

from twisted.internet.threads import blockingCallFromThread

import tfmq.aio_transactions
import tfmq.transactions
from tfmq.client.consumer.external_offsets import transaction_positions
from tfmq.client.drivers.twisted import DeferredDriver, deferred
from tfmq.client.faces import copy_docs_from, shared
from tfmq.client.transaction.check_back import Check, InDoubt
from tfmq.client.transaction.transaction import TransactionCore, TransactionHandle

if TYPE_CHECKING:
    from tfmq.twisted_consumer import Consumer


@copy_docs_from(tfmq.transactions.Transaction)
class Transaction(TransactionHandle):
    """`tfmq.transactions.Transaction` for Twisted: methods give Deferreds; `async with` in coroutines. A Deferred of
    such a coroutine that is cancelled inside rolls back.
    """

    def __init__(self, core: TransactionCore) -> None:
        self._core = core
        self._producer = core.producer
        self._driver: DeferredDriver = core.producer.driver

    send = deferred(
        tfmq.aio_transactions.Transaction.send,
        """Here a Deferred gives the handle, which a coroutine may await behind the commit.""",
    )
    send_many = deferred(tfmq.aio_transactions.Transaction.send_many)
    prepare = deferred(tfmq.aio_transactions.Transaction.prepare)
    commit = deferred(tfmq.aio_transactions.Transaction.commit)
    rollback = deferred(tfmq.aio_transactions.Transaction.rollback)

    def commit_offsets(self, consumer: Consumer[Any]) -> None:
        self._core.add_offsets(transaction_positions(consumer))

    def __enter__(self) -> NoReturn:
        raise TypeError(
            "A transaction of tfmq.twisted is awaited: write `async with producer.transaction() as tx:`, not `with`; or"
            " begin(), then commit() and rollback() in callbacks."
        )

    __exit__ = shared(tfmq.aio_transactions.Transaction.__exit__)
    __aexit__ = shared(tfmq.aio_transactions.Transaction.__aexit__)

    async def __aenter__(self) -> Transaction:
        self._core.enter()
        return self


def checked_in(driver: DeferredDriver, function: Any) -> Check:
    """`function` as a thread can call it: one that is a coroutine function, or made by `inlineCallbacks`, runs in the
    reactor.
    """
    if not iscoroutinefunction(function) and not isgeneratorfunction(unwrap(function)):
        check: Check = function
        return check

    def ask(transaction: InDoubt) -> Any:
        return blockingCallFromThread(driver.reactor, function, transaction)

    return ask
