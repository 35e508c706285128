"""The blocking producer. The asyncio variant is in `tfmq.aio`, the Twisted variant in `tfmq.twisted`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from tfmq.client.api_variants import blocking, name_methods
from tfmq.client.connection.addresses import describe_client
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.producer import interpreter_exit
from tfmq.client.producer.core import BATCH_BYTES, BUFFER_BYTES, LINGER_MS, TIMEOUT_SECONDS, ProducerCore
from tfmq.client.producer.delivery import BlockingDeliveryOwner
from tfmq.client.send.batch import Deliveries, Delivery
from tfmq.client.send.delivery_time import Delay, DeliveryTime, Moment
from tfmq.client.send.partitioner import PartitionSelector
from tfmq.client.transaction.check_back import Check
from tfmq.codecs import Codec
from tfmq.errors import TfmqError
from tfmq.hooks import Hook
from tfmq.message import payload_bytes
from tfmq.transactions import Transaction, XAResource


@name_methods
class Producer:
    """Sends messages in batches, in order for each partition; a batch that is sent again is stored only once.

        with tfmq.Producer() as producer:
            producer.send("orders", b"...", key="42").result().offset

    The constructor does not connect. Any number of threads may use one producer; a forked child gets its own
    connection.

    Args:
        servers: "host:port", several with commas or as a list. None: $TFMQ_SERVERS, otherwise 127.0.0.1:8367.
        group: the name of a group of producers. The broker asks any member about prepared transactions of all members.
        acks: when a send is acknowledged: "synced" (on the disk), "written" (in the operating system), "none" (no
            reply). None: the broker's setting `server.acks`.
        linger_ms: how long a batch waits for more messages while no caller waits for its result.
        batch_bytes: the size at which a batch is full.
        buffer_bytes: memory for messages that are not acknowledged yet; when it is full, `send` waits.
        selector: a `PartitionSelector` or the name of one. None: by the key; messages without a key go to the
            partitions in turn, by batch.
        codec: encodes payloads of types other than bytes and text, see `tfmq.codecs`; one for all topics, or a dict
            with one for each topic.
        timeout: seconds that `send` waits for buffer space, and after which an undelivered message fails.
        hooks: see `tfmq.Hook`.
        client_id: the name of this client in the broker's log: 1 to 100 letters, digits, ".", "_" or "-". None:
            $TFMQ_CLIENT_ID.

    Raises `BadRequest` for invalid arguments.
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
        self._core = ProducerCore(BlockingDeliveryOwner, BlockingDriver, locals())
        self._driver: BlockingDriver = self._core.driver
        interpreter_exit.open_producers.add(self._core.owner)

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
        """Send one message and return its delivery handle at once.

        `payload` is bytes, text, None (a tombstone), a value that the codec encodes, or a complete `Message`.

        With `delay` (seconds or a timedelta, counted from this call, not below 0) or `deliver_at` (an aware
        datetime, or seconds since 1970) the broker stores the message until it is due. The result then has no
        offset, and `delayed` is the handle for `cancel` and `reschedule`.

        Waits only for buffer space, and, at the first message with a key to a topic, until the topic's partitions
        are known; each wait ends after `timeout` seconds. Raises `Busy` if there is no buffer space in that time,
        `MessageTooLarge` above a limit of the broker, `Closed` after `close`, and `TypeError` for a payload that needs
        a codec, for a wrong type of time, for a datetime without a time zone, and for `delay` with `deliver_at`.
        """
        core, driver, delivery = self._core, self._driver, None
        plain = key is tag is properties is delay is deliver_at is partition is None  # type: ignore[comparison-overlap]
        if plain and core.has_fast_path and type(topic) is str:
            if type(payload) is str:
                try:
                    payload = payload.encode()
                except UnicodeEncodeError:
                    payload_bytes(payload)  # raises the same error, with advice
            if type(payload) is bytes:
                with driver.lock:
                    batch = core.accumulator.shared_batches.get(topic)
                    if batch is not None and (delivery := batch.add_plain(payload)) is not None:
                        return delivery
                    delivery = core.append_plain(topic, payload)
                    if core.link.output:
                        driver.poll_nonblocking()
        if delivery is None:
            message = core.make_message(topic, payload, key, tag, properties, delay, deliver_at, partition)
            data = core.encode_payload(topic, message)
            with driver.lock:
                delivery = core.append(topic, message, data) if core.can_append(topic, message) else None
                if core.link.output or core.link.wants_connection():
                    driver.poll_nonblocking()
            if delivery is None:
                delivery = driver.run(core.send(topic, message, data))
        open_without_linger = not core.options.linger_seconds and delivery[0].is_open
        if open_without_linger or driver.network_thread.sleeping:
            driver.wake(at_once=open_without_linger)
        if driver.callbacks:
            driver.callbacks.run()
        return delivery

    def send_many(
        self, topic: str, payloads: Iterable[Any], delay: Delay | None = None, *, deliver_at: Moment | None = None
    ) -> Deliveries:
        """Send all `payloads`, with less work than a `send` for each; return one delivery handle for all.

        The payloads are bytes, text, `Message`s or values for the codec.

        `delay` or `deliver_at` applies to all messages without a time of their own. A delay counts from the moment
        at which the payload is read from the iterable.

        Waits for buffer space as `send` does; returns when the last message is in a batch. `result()` of the
        delivery handle is a list of one `SendResult` for each batch. When a batch fails, the remaining payloads
        are not read, and the error of the batch is raised. Raises the errors of `send` too.
        """
        deliveries = self._driver.run(self._core.send_many(topic, payloads, DeliveryTime(delay, deliver_at)))
        self._driver.wake()
        return deliveries

    def send_arrow(self, table: Any, topic: str) -> Deliveries:
        deliveries = self._driver.run(self._core.send_arrow(table, topic))
        self._driver.wake()
        return deliveries

    send_arrow.__doc__ = ProducerCore.send_arrow.__doc__

    cancel = blocking(ProducerCore.cancel)
    reschedule = blocking(ProducerCore.reschedule)
    flush = blocking(ProducerCore.flush)

    def close(self, timeout: float | None = None) -> None:
        """Flush for at most `timeout` seconds (None: the producer's timeout), then disconnect.

        Messages that are not acknowledged by then fail. Raises `DeliveryFailed` if these or earlier messages have
        failed and their results were not read. A second call does nothing.
        """
        seconds = self._core.options.timeout if timeout is None else timeout
        interpreter_exit.open_producers.discard(self._core.owner)
        self._core.owner.close(seconds)

    def stats(self) -> dict[str, Any]:
        """Return counters since the creation (messages, batches, bytes ...), and the state of the connection."""
        with self._driver.lock:
            return self._core.stats()

    def transaction(self) -> Transaction:
        """Create a transaction, whose messages become visible together or not at all.

        Usage: `with producer.transaction() as tx: tx.send(...)`. This call does not connect. A transaction of up to
        a megabyte is sent as one request at the commit. A larger one is rolled back if this producer's connection
        ends; use `begin` with an xid if it must outlive the connection. Raises `Closed`.
        """
        with self._driver.lock:
            return Transaction(self._core.transactions.begin())

    def begin(self, xid: str | None = None, timeout: float | None = None) -> Transaction:
        """Begin a transaction at the broker now; any process can commit or roll it back by its xid.

        `xid` is 1 to 249 bytes of text; None: the broker chooses one. An unprepared transaction is rolled
        back after `timeout` seconds (None: the broker's setting), and without an xid also when this
        producer's connection ends. Raises `TransactionExists` for an xid in use, `BadRequest` for an invalid
        argument, `Busy` if the broker has too many open transactions.
        """
        with self._driver.lock:
            core = self._core.transactions.begin(xid, timeout)
        self._driver.run(core.begin())
        return Transaction(core)

    def resume(self, xid: str) -> Transaction:
        """Return the latest transaction with that xid, which any process may have begun.

        The transaction can be committed or rolled back, and its `state` can be read. Raises `UnknownTransaction`.
        """
        return Transaction(self._driver.run(self._core.transactions.resume(xid)))

    def transaction_check(self, function: Check) -> Check:
        """Decorator: register `function(transaction)` as check-back of prepared transactions.

        If a transaction of any member of the group (`Producer(group=...)`) stays prepared without an outcome, the
        broker sends a check-back to one connected member, which calls `function`. `transaction` has `xid`,
        `epoch`, `prepared_at` and `topics`. The function returns "commit", "rollback", or None if the outcome is
        unknown; the broker then asks again later. `function` runs in its own thread; an exception is logged and
        means None. Several registered functions are called in turn until one returns an outcome. Raises
        `BadRequest` without a group.
        """
        with self._driver.lock:
            self._core.transactions.add_check(function)
        return function

    def xa(self) -> XAResource:
        """Return this producer as a resource of a transaction manager."""
        return XAResource(self)

    def __repr__(self) -> str:
        return describe_client(self, self._core.link.servers, group=self._core.group)

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
