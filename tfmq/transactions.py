"""The blocking face of a transaction. The asyncio one is in `tfmq.aio`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tfmq.client.consumer.external_offsets import handed_out
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.send.batch import Deliveries, Delivery
from tfmq.client.send.delivery_time import Delay, Moment, When
from tfmq.client.transaction.transaction import TransactionCore, TransactionHandle
from tfmq.message import Message, payload_bytes

if TYPE_CHECKING:
    from tfmq.consumer import Consumer

_new = tuple.__new__


class Transaction(TransactionHandle):
    """Messages, and offsets of what was read, that become visible together or not at all.

        with producer.transaction() as tx:
            tx.send("orders", order)
            tx.commit_offsets(consumer)

    Leaving `with` commits; an exception rolls back, and goes on to the caller. One that is prepared stays so behind an
    exception: who prepared it decides. Made by `Producer.transaction`, `begin` and `resume`; any number of threads may
    send in one, and a producer may have many at once. A forked child cannot go on with its parent's.
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
        """Add one message; arguments as those of `Producer.send`. The handle is done when the transaction has ended.
        A `delay` counts from the commit. The handle of a delayed message is in its
        result once the transaction is committed.

        Waits for a topic's partitions before its first message, and for room where a transaction of more than a
        megabyte grows faster than the broker takes it. Raises `TransactionState` behind the end, `UnknownTopic`,
        `MessageTooLarge`, `TransactionTooLarge`, what `Producer.send` raises of arguments, and why the transaction can
        only be rolled back.
        """
        core = self._core
        if self._producer.plain and key is tag is properties is delay is deliver_at is partition is None:  # type: ignore[comparison-overlap]
            if type(payload) is str:
                try:
                    payload = payload.encode()
                except UnicodeEncodeError:
                    payload_bytes(payload)  # it raises the same, and says what to do
            if type(payload) is bytes:
                with self._driver.lock:
                    try:
                        batch = core.shared.get(topic)
                    except TypeError:  # of a topic that is a list; it is refused below, by name
                        batch = None
                    if batch is not None:
                        room = batch.room - len(payload) - batch.overhead_bytes
                        if room > 0:
                            batch.room = room
                            payloads = batch.payloads
                            payloads.append(payload)
                            return _new(Delivery, (batch, len(payloads) - 1))
        message = self._producer.message(topic, payload, key, tag, properties, delay, deliver_at, partition)
        return self._append(topic, message)

    def _append(self, topic: str, message: Message) -> Delivery:
        core, driver, link = self._core, self._driver, self._producer.link
        data = self._producer.payload(topic, message)
        with driver.lock:
            delivery = core.append(topic, message, data) if core.may_append(topic) else None
            if link.has_output:
                driver.glance()
        if delivery is None:
            delivery = driver.run(core.sending(topic, message, data))
        if link.unattended:
            driver.attend()
        driver.callbacks.run()
        return delivery

    def send_many(
        self,
        topic: str,
        payloads: Iterable[Any],
        delay: Delay | None = None,
        *,
        deliver_at: Moment | None = None,
    ) -> Deliveries:
        """Add all of `payloads` (bytes, text, `Message`s ...), the fast way; one handle for them all. However many
        they are, memory holds a few megabytes of them. `delay` (counted from the commit) or `deliver_at`: of all that
        have no time of their own. Waits and raises as `send`.
        """
        deliveries = self._driver.run(self._core.sending_many(topic, payloads, When(delay, deliver_at)))
        self._driver.attend()
        return deliveries

    def commit_offsets(self, consumer: Consumer[Any]) -> None:
        """What `consumer` was handed out by now, the message in work included, is processed if this commits: then its
        group goes on behind it, else it is read again by who reads next from the saved offset. In a handler of `run`:
        its own message, with all before it in its partition; other handlers have transactions of their own.

        The consumer needs a group, commits="manual" and offsets="broker". If another member has the partitions by the
        time of the commit, that raises `Fenced`, and nothing of the transaction happens. Behind a rollback, whatever
        led to it, this consumer gets the same messages again. Raises `BadRequest` for a consumer that
        cannot, `Fenced`, `TransactionState`.
        """
        standing = handed_out(consumer)
        with self._driver.lock:
            self._core.add_offsets(standing)

    def prepare(self) -> str:
        """The first phase: when this returns, it is on the broker's disk with all it holds, and stays until somebody
        says commit or rollback. "prepared", or "read_only" if nothing was in it.

        Raises why it could not be prepared; then it is as it was, unless the error's outcome is "unknown".
        """
        return self._driver.run(self._core.preparing())

    def commit(self) -> str:
        """Make it visible. "committed", "applying" or "read_only"; again for one that is committed.

        Raises `TransactionRolledBack`, `HeuristicOutcome`, `Fenced` (offsets), `UnknownTopic`, `StorageStopped`,
        `DiskFull` ...: then nothing of it is visible, and a passing reason may be tried again. Only behind an error of
        outcome "unknown" it may have happened: its sentence says how to find out.
        """
        try:
            return self._driver.run(self._core.committing())
        finally:
            self._tell()

    def rollback(self) -> str:
        """Drop it: nothing of it is ever visible. "rolled_back"; again for one that is. Raises `TransactionCommitted`,
        `HeuristicOutcome`.
        """
        try:
            return self._driver.run(self._core.rolling_back())
        finally:
            self._tell()

    def __enter__(self) -> Transaction:
        self._core.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, GeneratorExit):  # the garbage collector may be at work here: it must not wait
            with self._driver.lock:
                self._core.drop(None)
            self._driver.attend()
            return
        try:
            self._driver.run(self._core.leaving(error))
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"Besides: {failure}")
        finally:
            self._tell()
