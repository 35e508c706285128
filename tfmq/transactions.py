"""The blocking transaction and XA resource. The asyncio variants are in `tfmq.aio`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tfmq.client.api_variants import blocking, name_methods
from tfmq.client.consumer.external_offsets import transaction_positions
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.producer.core import ProducerCore
from tfmq.client.producer.xa import XaBranches, check_xa_producer, notify_committed
from tfmq.client.send.batch import Deliveries, Delivery
from tfmq.client.send.delivery_time import Delay, DeliveryTime, Moment
from tfmq.client.transaction.transaction import TransactionCore, TransactionHandle
from tfmq.message import Message, payload_bytes

if TYPE_CHECKING:
    from tfmq.consumer import Consumer


class Transaction(TransactionHandle):
    """Messages, and consumed offsets, that become visible together or not at all.

        with producer.transaction() as tx:
            tx.send("orders", order)
            tx.commit_offsets(consumer)

    Leaving `with` commits; an exception rolls back and is raised to the caller. A prepared transaction
    remains prepared after an exception: the process that prepared it has to commit it or roll it back.
    Transactions are created by `Producer.transaction`, `begin` and `resume`. Any number of threads may send
    in one transaction, and a producer may have many transactions at once. A forked child cannot continue its
    parent's transaction.
    """

    def __init__(self, core: TransactionCore) -> None:
        self._core = core
        self._producer = core.producer
        self._driver: BlockingDriver = core.producer.driver

    def send(
        self,
        topic: str,
        payload: Any,
        key: bytes | bytearray | memoryview | str | None = None,
        tag: str | None = None,
        properties: Mapping[str, str] | None = None,
        delay: Delay | None = None,
        partition: int | None = None,
        *,
        deliver_at: Moment | None = None,
    ) -> Delivery:
        """Add one message; arguments like those of `Producer.send`. The handle completes when the transaction ends.

        A `delay` counts from the commit. The result of a delayed message has the message's handle after the
        transaction is committed.

        Before the first message to a topic, `send` waits until the topic's partitions are known. It also waits for
        buffer space if a transaction of more than a megabyte grows faster than the broker accepts it. Raises
        `TransactionState` if it is prepared or has ended, `UnknownTopic` for a missing topic, `MessageTooLarge` and
        `TransactionTooLarge` above a limit of the broker, and the errors of `Producer.send` for invalid arguments. If
        an earlier error permits only a rollback, raises that error.
        """
        core = self._core
        if (
            self._producer.has_fast_path and key is tag is properties is delay is deliver_at is partition is None  # type: ignore[comparison-overlap]
        ):
            if type(payload) is str:
                try:
                    payload = payload.encode()
                except UnicodeEncodeError:
                    payload_bytes(payload)  # raises the same error, with advice
            if type(payload) is bytes:
                with self._driver.lock:
                    try:
                        batch = core.shared_batches.get(topic)
                    # A list as topic cannot be hashed; it is rejected below, with an error that names it.
                    except TypeError:
                        batch = None
                    if batch is not None and (delivery := batch.add_plain(payload)) is not None:
                        return delivery
        message = self._producer.make_message(topic, payload, key, tag, properties, delay, deliver_at, partition)
        return self._append(topic, message)

    def _append(self, topic: str, message: Message) -> Delivery:
        core, driver, link = self._core, self._driver, self._producer.link
        data = self._producer.encode_payload(topic, message)
        with driver.lock:
            delivery = core.append(topic, message, data) if core.can_append(topic) else None
            if link.output:
                driver.poll_nonblocking()
        if delivery is None:
            delivery = driver.run(core.send(topic, message, data))
        if link.background_requests:
            driver.wake()
        driver.callbacks.run()
        return delivery

    def send_many(
        self, topic: str, payloads: Iterable[Any], delay: Delay | None = None, *, deliver_at: Moment | None = None
    ) -> Deliveries:
        """Add all `payloads`, with less work than a `send` for each; return one delivery handle for all.

        The payloads are bytes, text, `Message`s or values for the codec; at most a few megabytes are in memory.
        `delay` (counted from the commit) or `deliver_at` applies to all messages without a time of their own. Waits
        and raises like `send`.
        """
        deliveries = self._driver.run(self._core.send_many(topic, payloads, DeliveryTime(delay, deliver_at)))
        self._driver.wake()
        return deliveries

    def commit_offsets(self, consumer: Consumer[Any]) -> None:
        """Commit the offsets of `consumer` together with this transaction.

        If the transaction commits, all messages that `consumer` delivered so far, the current one included, are
        acknowledged, and the consumer's group continues after them. Otherwise these messages are delivered again. In a
        handler of `run`, only the handler's own message and those before it in its partition are acknowledged: other
        handlers use their own transactions.

        The consumer needs a group, commits="manual" and offsets="broker". If another member has the partitions at the
        time of the commit, the commit raises `Fenced`, and the whole transaction is rolled back. After any rollback,
        this consumer gets the same messages again. Raises `BadRequest` for an unsuitable consumer, `Fenced` if it has
        lost a partition whose messages it delivered, `TransactionState` if the transaction is prepared or has ended.
        """
        positions = transaction_positions(consumer)
        with self._driver.lock:
            self._core.add_offsets(positions)

    def prepare(self) -> str:
        """Run the first phase of a two-phase commit; return "prepared", or "read_only" for an empty transaction.

        When `prepare` returns, the transaction with all its messages is durable, and remains until it is committed or
        rolled back. If it cannot be prepared, raises the error that is the reason. The transaction's state is then
        unchanged, unless the error's outcome is "unknown".
        """
        return self._driver.run(self._core.prepare())

    def commit(self) -> str:
        """Commit the transaction; return "committed", "applying" or "read_only", also when repeated.

        "applying": committed, but a partition that accepts no writes now gets its messages later. "read_only": empty.

        Raises `TransactionRolledBack` if it was rolled back, `HeuristicOutcome` if an operator ended it, `Fenced` if
        another member has a partition whose offset it commits, `UnknownTopic`, `StorageStopped` or `DiskFull` if the
        messages cannot be stored, and others. After an error with the outcome "not done", no message is visible, and
        the commit may be repeated if the cause is temporary. After an error with the outcome "unknown", the transaction
        may have been committed: the error's sentence describes how to find out.
        """
        try:
            return self._driver.run(self._core.commit())
        finally:
            self._core.notify_consumers()

    def rollback(self) -> str:
        """Roll back: no message of the transaction ever becomes visible. Returns "rolled_back", also when repeated.

        Raises `TransactionCommitted` if it is committed, `HeuristicOutcome` if an operator ended it.
        """
        try:
            return self._driver.run(self._core.roll_back())
        finally:
            self._core.notify_consumers()

    def __enter__(self) -> Transaction:
        self._core.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The garbage collector may be closing a generator that contains the block, so this must not wait.
        if isinstance(error, GeneratorExit):
            with self._driver.lock:
                self._core.drop(None)
            self._driver.wake()
            return
        try:
            self._driver.run(self._core.exit(error))
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"Besides: {failure}")
        finally:
            self._core.notify_consumers()


Driver = TypeVar("Driver")


class ProducerLike(Protocol[Driver]):
    """The producer that an `XAResource` takes; a Protocol, because the producer's module imports this one."""

    _core: ProducerCore
    _driver: Driver


@name_methods
class XAResource:
    """A producer as a resource of a transaction manager, which calls the XA methods.

        resource = tfmq.XAResource(producer)
        tx = resource.start("branch-1"); tx.send("orders", order); resource.end("branch-1")
        resource.prepare("branch-1"); resource.commit("branch-1")

    A branch is identified by its xid, 1 to 249 bytes of text, in every process: any process that finds a
    prepared branch with `recover` may commit it or roll it back. Every method raises `UnknownTransaction` for
    an xid that neither this resource nor the broker knows, and `TransactionState` for a call in the wrong
    order.
    """

    def __init__(self, producer: ProducerLike[BlockingDriver]) -> None:
        check_xa_producer(producer, BlockingDriver, "tfmq")
        self._driver = producer._driver
        self._core = XaBranches(producer._core.transactions)

    start = blocking(XaBranches.start, Transaction)
    prepare = blocking(XaBranches.prepare)
    commit = blocking(XaBranches.commit, notify_committed)
    rollback = blocking(XaBranches.rollback)
    recover = blocking(XaBranches.recover)
    forget = blocking(XaBranches.forget)

    def end(self, xid: str) -> None:
        """End the association of this resource with the branch: no more messages can be sent in the branch."""
        with self._driver.lock:
            self._core.end(xid)
