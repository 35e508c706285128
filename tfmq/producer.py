"""The blocking face of sending. The asyncio one is in `tfmq.aio`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from tfmq.client.admin.delayed import Rescheduled
from tfmq.client.connection.addresses import described
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.producer import delivery
from tfmq.client.producer.core import (
    BATCH_BYTES,
    BUFFER_BYTES,
    LINGER_MS,
    TIMEOUT_SECONDS,
    ProducerCore,
    Settings,
)
from tfmq.client.producer.delivery import BlockingOwner
from tfmq.client.send.batch import Deliveries, Delivery
from tfmq.client.send.delivery_time import Delay, Moment, When
from tfmq.client.send.partitioner import PartitionSelector
from tfmq.client.transaction.check_back import Check
from tfmq.codecs import Codec
from tfmq.errors import TfmqError
from tfmq.hooks import Hook
from tfmq.message import Message, payload_bytes
from tfmq.transactions import Transaction
from tfmq.xa import XAResource

_new = tuple.__new__


class Producer:
    """Sends messages: in batches, in order for each partition, stored once however often they are repeated.

        with tfmq.Producer() as producer:
            producer.send("orders", b"...", key="42").result().offset

    Making one touches no network. Any number of threads may use it, and a forked child gets a connection of its own.

    Args:
        servers: "host:port", several with commas or as a list. None: $TFMQ_SERVERS, otherwise 127.0.0.1:8367.
        group: the name of a group of producers: each member is asked about prepared transactions of all.
        acks: when a send is acknowledged: "synced" (on the disk), "written" (in the operating system), "none" (no
            answer). None: the broker's setting `server.acks`.
        linger_ms: how long a batch waits for more messages while no caller waits for it.
        batch_bytes: the size at which a batch is full.
        buffer_bytes: memory for messages that are not acknowledged yet; when it is full, `send` waits.
        selector: a `PartitionSelector` or the name of one. None: by the key, and without a key in turn, by batch.
        codec: makes payloads of other values than bytes and text, see `tfmq.codecs`; one for all topics, or a dict with
            one by topic.
        timeout: seconds that `send` waits for room, and after which an undelivered message fails.
        hooks: see `tfmq.Hook`.
        client_id: the name of this client in the broker's log: 1 to 100 letters, digits, ".", "_" or "-". None:
            $TFMQ_CLIENT_ID.

    Raises `BadRequest` for wrong arguments.
    """

    def __init__(
        self,
        servers: str | Sequence[str] | None = None,
        *,
        group: str | None = None,
        acks: str | None = None,
        linger_ms: float = LINGER_MS,
        batch_bytes: int = BATCH_BYTES,
        buffer_bytes: int = BUFFER_BYTES,
        selector: PartitionSelector | str | None = None,
        codec: Codec[Any] | Mapping[str, Codec[Any]] | None = None,
        timeout: float = TIMEOUT_SECONDS,
        hooks: Sequence[Hook] = (),
        client_id: str | None = None,
    ) -> None:
        settings = Settings(
            servers,
            group,
            acks,
            linger_ms,
            batch_bytes,
            buffer_bytes,
            selector,
            codec,
            timeout,
            hooks,
            client_id,
        )
        self._core = ProducerCore(BlockingOwner, BlockingDriver, settings)
        self._driver: BlockingDriver = self._core.driver
        delivery.opened(self._core.owner)

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
        """Send one message; a handle on it comes back at once. `payload` is bytes, text, None (a tombstone), what the
        codec takes, or a `Message` that has everything in it.

        With `delay` (seconds or a timedelta, counted from this call, not below 0) or `deliver_at` (an
        aware datetime, or seconds since 1970) the broker keeps it until it is due. Then the result has no offset, and
        `delayed`, the handle to cancel or to reschedule it by.

        Waits only for room in the buffer, and for a topic's partitions before its first message with a key, both at
        most `timeout`. Raises `Busy` when there is no room by then, `MessageTooLarge`, `TypeError` for a payload that
        needs a codec and for a time that is none (a datetime without a time zone, both at once), `Closed`.
        """
        core = self._core
        if core.plain and key is tag is properties is delay is deliver_at is partition is None:  # type: ignore[comparison-overlap]
            if type(payload) is str:
                try:
                    payload = payload.encode()
                except UnicodeEncodeError:
                    payload_bytes(payload)  # it raises the same, and says what to do
            if type(payload) is bytes:
                with self._driver.lock:
                    try:
                        batch = core.sender.shared.get(topic)
                    except TypeError:  # of a topic that is a list; it is refused below, by name
                        batch = None
                    if batch is not None:
                        room = batch.room - len(payload) - batch.overhead_bytes
                        if room > 0:
                            batch.room = room
                            payloads = batch.payloads
                            payloads.append(payload)
                            return _new(Delivery, (batch, len(payloads) - 1))
        message = core.message(topic, payload, key, tag, properties, delay, deliver_at, partition)
        return self._append(topic, message)

    def _append(self, topic: str, message: Message) -> Delivery:
        core, driver = self._core, self._driver
        data = core.payload(topic, message)
        with driver.lock:
            delivery = core.append(topic, message, data) if core.may_append(topic, message) else None
            if core.link.has_output or core.link.wants_connection():
                driver.glance()
        if delivery is None:
            delivery = driver.run(core.sending(topic, message, data))
        driver.attend(at_once=delivery[0].is_open and not core.options.linger_seconds)
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
        """Send all of `payloads` (bytes, text, `Message`s ...), the fast way; one handle for them all. `delay`, counted
        from the moment at which a payload is taken, or `deliver_at`: of all that have no time of their own.

        Waits for room as `send` does; returns when the last one is in a batch. `result()` of the handle is a list,
        one entry a batch; `delayed` of a delayed one has a handle for each message. Once a batch failed, the rest is
        not read, and that failure is raised. Raises as `send`.
        """
        deliveries = self._driver.run(self._core.sending_many(topic, payloads, When(delay, deliver_at)))
        self._driver.attend()
        return deliveries

    def cancel(self, handle: str) -> str:
        """Take back a delayed message, whoever sent it; `handle` is `SendResult.delayed`.

        "cancelled": nobody will ever get it; "delivered": too late; "unknown": the broker knows nothing of it, or not
        any more. The answer is certain, on the disk, and the same when it is asked for again. Raises `BadRequest` for
        a handle with a typo, `TimedOut` and `ConnectionFailed` where no answer came: then ask again.
        """
        return self._driver.run(self._core.cancelling(handle))

    def reschedule(
        self, handle: str, delay: Delay | None = None, *, deliver_at: Moment | None = None
    ) -> Rescheduled:
        """Give a delayed message another time, counted from now or named. In one step: it is never gone, and never
        there twice. The result is the new handle, the one to use from now on, or "" where nothing was done: its `state`
        is "rescheduled", or "delivered", "cancelled", "unknown". Raises as `cancel`, and `TypeError` as `send` for the
        time.
        """
        return self._driver.run(self._core.rescheduling(handle, delay, deliver_at))

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything sent so far is acknowledged, at most `timeout` seconds.

        Raises `DeliveryFailed` (`.deliveries`) for failures at which nobody had looked, `TimedOut`.
        """
        self._driver.run(self._core.flushing(timeout))

    def close(self, timeout: float | None = None) -> None:
        """Flush for at most `timeout` seconds (None: the producer's), give up what is left, drop the connection.

        Raises `DeliveryFailed` as `flush` does, what was given up included. A second close does nothing.
        """
        seconds = self._core.options.timeout if timeout is None else timeout
        delivery.closed(self._core.owner)
        self._core.owner.close(seconds)

    def stats(self) -> dict[str, Any]:
        """Counters since it was made (messages, batches, bytes, failed_messages ...) and how it is connected."""
        with self._driver.lock:
            return self._core.stats()

    def transaction(self) -> Transaction:
        """Messages that become visible together or not at all: `with producer.transaction() as tx: tx.send(...)`.

        Touches no network: up to a megabyte goes as one request when it is committed. It ends with this producer's
        connection once it is larger; what shall outlive that is begun with an xid. Raises `Closed`.
        """
        with self._driver.lock:
            return Transaction(self._core.transactions.begin())

    def begin(self, xid: str | None = None, timeout: float | None = None) -> Transaction:
        """Begin a transaction at the broker now, to be prepared, and to be committed or rolled back from any process
        that knows its name: `xid`, 1 to 249 bytes of text, or None, and the broker gives it one.

        Unprepared it ends by itself after `timeout` seconds (None: the broker's setting), and without an xid also with
        this producer's connection. Raises `TransactionExists` for a name that is in use, `BadRequest`, `Busy`.
        """
        with self._driver.lock:
            core = self._core.transactions.begin(xid, timeout)
        self._driver.run(core.beginning())
        return Transaction(core)

    def resume(self, xid: str) -> Transaction:
        """Take up the latest transaction of that name, begun by whichever process: to commit it, to roll it back, or to
        see its `state`. Raises `UnknownTransaction`.
        """
        return Transaction(self._driver.run(self._core.transactions.resuming(xid)))

    def transaction_check(self, function: Check) -> Check:
        """A decorator: have `function(transaction)` say what is to become of prepared transactions that nobody ended.

        The broker asks one connected producer of the group (`Producer(group=...)`), over its open connection, about the
        transactions of all of them. `transaction` has `xid`, `epoch`, `prepared_at` and `topics`; the answer is
        "commit", "rollback", or None: not known yet, ask again. It runs in a thread of its own; what it raises is
        logged and means None. Several are asked in turn until one knows. Raises `BadRequest` without a group.
        """
        with self._driver.lock:
            self._core.transactions.check(function)
        return function

    def xa(self) -> XAResource:
        """This producer as a resource of a transaction manager."""
        return XAResource(self)

    def __repr__(self) -> str:
        return described(self, self._core.link.servers, group=self._core.group)

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except TfmqError as failure:
            if error is None:
                raise
            error.add_note(f"Besides: {failure}")
