"""The Twisted variants of `tfmq.transactions.Transaction` and `tfmq.XAResource`, with Deferreds."""

from __future__ import annotations

from inspect import iscoroutinefunction, isgeneratorfunction, unwrap
from typing import TYPE_CHECKING, Any, NoReturn

from twisted.internet.threads import blockingCallFromThread

import tfmq.aio_transactions
import tfmq.transactions
from tfmq.client.api_variants import awaitable, copy_docs_from, shared
from tfmq.client.consumer.external_offsets import transaction_positions
from tfmq.client.drivers.twisted import DeferredDriver, deferred
from tfmq.client.producer.xa import XaBranches, check_xa_producer, notify_committed
from tfmq.client.transaction.check_back import Check, InDoubt
from tfmq.client.transaction.transaction import TransactionCore, TransactionHandle
from tfmq.transactions import ProducerLike
from tfmq.transactions import XAResource as BlockingXAResource

if TYPE_CHECKING:
    from tfmq.twisted_consumer import Consumer


@copy_docs_from(tfmq.transactions.Transaction)
class Transaction(TransactionHandle):
    """`tfmq.transactions.Transaction` for Twisted: methods return Deferreds.

    Coroutines may use `async with`. If the Deferred of such a coroutine is cancelled inside the block, the
    transaction is rolled back.
    """

    def __init__(self, core: TransactionCore) -> None:
        self._core = core
        self._producer = core.producer
        self._driver: DeferredDriver = core.producer.driver

    send = deferred(
        tfmq.aio_transactions.Transaction.send,
        """In Twisted: the Deferred's result is the handle, which a coroutine may await after the commit.""",
    )
    send_many = deferred(tfmq.aio_transactions.Transaction.send_many)
    prepare = deferred(tfmq.aio_transactions.Transaction.prepare)
    commit = deferred(tfmq.aio_transactions.Transaction.commit)
    rollback = deferred(tfmq.aio_transactions.Transaction.rollback)

    def commit_offsets(self, consumer: Consumer[Any]) -> None:
        self._driver.check_caller()
        self._core.add_offsets(transaction_positions(consumer))

    def __enter__(self) -> NoReturn:
        raise TypeError(
            "A transaction of tfmq.twisted is awaited: write `async with producer.transaction() as tx:`, not `with`; or"
            " begin(), then commit() and rollback() in callbacks."
        )

    __exit__ = shared(tfmq.aio_transactions.Transaction.__exit__)
    __aexit__ = shared(tfmq.aio_transactions.Transaction.__aexit__)

    async def __aenter__(self) -> Transaction:
        self._driver.check_caller()
        self._core.enter()
        return self


def checked_in(driver: DeferredDriver, function: Any) -> Check:
    """Return `function` as a check-back function that any thread may call.

    A coroutine function, or one made by `inlineCallbacks`, runs in the reactor.
    """
    if not iscoroutinefunction(function) and not isgeneratorfunction(unwrap(function)):
        check: Check = function
        return check

    def ask(transaction: InDoubt) -> Any:
        return blockingCallFromThread(driver.reactor, function, transaction)

    return ask


@copy_docs_from(BlockingXAResource)
class XAResource:
    """`tfmq.XAResource` for Twisted: methods return Deferreds."""

    def __init__(self, producer: ProducerLike[DeferredDriver]) -> None:
        check_xa_producer(producer, DeferredDriver, "tfmq.twisted")
        self._driver = producer._driver
        self._core = XaBranches(producer._core.transactions)

    start = deferred(awaitable(XaBranches.start, Transaction))
    prepare = deferred(awaitable(XaBranches.prepare))
    commit = deferred(awaitable(XaBranches.commit, notify_committed))
    rollback = deferred(awaitable(XaBranches.rollback))
    recover = deferred(awaitable(XaBranches.recover))
    forget = deferred(awaitable(XaBranches.forget))
    end = shared(tfmq.aio_transactions.XAResource.end)
