"""The producer core, shared by all API variants, and its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tfmq.client.admin.delayed import Rescheduled, cancel_delayed_message, reschedule_delayed_message
from tfmq.client.connection.connection import READY, ClientConnection
from tfmq.client.connection.factory import make_client_parts
from tfmq.client.connection.requests import wait_for_all
from tfmq.client.operation import CallUserCode, Event, Operation, Wait
from tfmq.client.producer.store_and_forward import StoreAndForward
from tfmq.client.send.accumulator import RecordAccumulator, SendOptions
from tfmq.client.send.batch import Batch, Deliveries, Delivery, PayloadChunker, batch_ends, with_delivery_time
from tfmq.client.send.delivery_time import IMMEDIATE, Delay, DeliveryTime, Moment, StampedDueTime, due_number
from tfmq.client.send.partitioner import KeyHash, StrictPartitions, load_selector
from tfmq.client.transaction.transaction import ProducerTransactions
from tfmq.codecs import Codec, check_codec, select_codec
from tfmq.errors import BadRequest, Busy, Closed, DeliveryFailed, TfmqError, TimedOut
from tfmq.hooks import TRACE_PARENT, Tracing, check_hooks, trace_context_source
from tfmq.limits import NAME_RULE, is_valid_name
from tfmq.message import Message, payload_bytes
from tfmq.protocol.commands import ACKS, ACKS_SYNCED

LINGER_MS = 5.0
"""Default linger time: how long an open batch waits for further messages if no caller waits for the batch."""
BATCH_BYTES = 1 << 20
"""Default batch size. Measured with `send_many`: a quarter of it costs a fifth to a quarter of the throughput, as the
work for a batch is then done four times; twice as much gains nothing, and a rejection affects a whole batch."""
BUFFER_BYTES = 32 << 20
TIMEOUT_SECONDS = 30.0
BATCH_BYTES_MAX = 8 << 20
"""The largest permitted batch size: brokers reject frames of 16 MiB and more. A larger message is sent by itself."""


def send_options(given: Mapping[str, Any]) -> SendOptions:
    acks, group = given["acks"], given["group"]
    if acks is not None and acks not in ACKS:
        raise BadRequest(f"acks={acks!r} is not known; it takes None or one of {', '.join(map(repr, ACKS))}.")
    if group is not None and not is_valid_name(group):
        raise BadRequest(f"{group!r} cannot be a group: {NAME_RULE}.")
    for name in ("linger_ms", "batch_bytes", "buffer_bytes", "timeout"):
        value = given[name]
        if not isinstance(value, int | float) or not (value > 0 or (value == 0 and name == "linger_ms")):
            least = "0 or more" if name == "linger_ms" else "a number above 0"
            raise BadRequest(f"{name} must be {least}, not {value!r}.")
    if given["batch_bytes"] > BATCH_BYTES_MAX:
        raise BadRequest(f"batch_bytes is at most {BATCH_BYTES_MAX}, not {given['batch_bytes']}; larger gain nothing.")
    check_codec(given["codec"], "encode")
    buffer_bytes = int(given["buffer_bytes"])
    batch_bytes = min(int(given["batch_bytes"]), buffer_bytes)
    level = None if acks is None else ACKS[acks]
    return SendOptions(level, given["linger_ms"] / 1000, batch_bytes, buffer_bytes, float(given["timeout"]))


class ProducerCore:
    """The parts of a producer that all API variants share: checking messages, sending, flushing and closing.

    The methods that wait are operations. `driver_type(connection)` creates the driver, which runs operations.
    `owner_type(core)` creates the object by which delivery handles wait. `arguments` are the arguments of `Producer`.
    """

    def __init__(
        self,
        owner_type: Callable[[ProducerCore], Any],
        driver_type: Callable[[ClientConnection], Any],
        arguments: Mapping[str, Any],
    ) -> None:
        self.options = send_options(arguments)
        self.selector = load_selector(arguments["selector"])
        self.codec: Codec[Any] | Mapping[str, Codec[Any]] | None = arguments["codec"]
        self.hooks = check_hooks(arguments["hooks"], "before_send", "after_send")
        self.group: str | None = arguments["group"]
        self.closed = False
        self.closed_event = Event()
        """Set when `close` has finished. Other callers of `close` wait for this event."""
        self.has_fast_path = self.codec is None and not self.hooks and self.selector.per_batch
        """Whether `send` may append a payload without key, tag and properties directly to an open batch."""
        self.link, self.driver, self.wall_clock = make_client_parts(
            arguments["servers"], driver_type, client_id=arguments["client_id"]
        )
        self.link.trace_context = trace_context_source(self.hooks)
        self.link.waits_for_fsync = self.options.acks in (None, ACKS_SYNCED)
        self.owner = owner_type(self)
        self._create_accumulator()
        self.transactions = ProducerTransactions(self)
        self.driver.on_fork.append(self._on_fork)

    def _create_accumulator(self) -> None:
        self.accumulator = RecordAccumulator(self)
        self.driver.tickers.append(self.accumulator)
        self.store_and_forward: StoreAndForward | None = None
        if isinstance(self.selector, StrictPartitions) and self.selector.store is not None:
            self.store_and_forward = StoreAndForward(self, self.selector, self.selector.store)
            self.driver.tickers.append(self.store_and_forward.tasks)

    def _on_fork(self) -> None:
        self.driver.tickers.remove(self.accumulator)
        self.accumulator.abandon_after_fork()
        if self.store_and_forward is not None:
            self.driver.tickers.remove(self.store_and_forward.tasks)
            self.store_and_forward.abandon_after_fork()
        self._create_accumulator()
        self.transactions = self.transactions.recreate_after_fork()
        # In the child no thread finishes a `close` that was in progress, so no caller may wait for its end.
        self.closed_event.done = self.closed

    # Messages

    def check_open(self) -> None:
        if self.closed:
            raise Closed("The producer is closed; make a new one.")

    def make_message(
        self,
        topic: str,
        payload: Any,
        key: Any = None,
        tag: str | None = None,
        properties: Mapping[str, str] | None = None,
        delay: Any = None,
        deliver_at: Any = None,
        partition: int | None = None,
    ) -> Message:
        """Make a message of the arguments, and return the result of `prepare_message`. Raises that method's errors."""
        if not isinstance(payload, Message):
            payload = Message(payload, key, tag, properties, partition, delay, deliver_at)
        elif any(each is not None for each in (key, tag, properties, delay, deliver_at, partition)):
            raise TypeError("A Message has its key, tag and so on in it: give them there, not beside it.")
        return self.prepare_message(topic, payload)

    def prepare_message(self, topic: str, message: Message) -> Message:
        """Check the message, apply the `before_send` hooks, and return the result.

        Raises `Closed` after `close`, `BadRequest` for an invalid topic name or delivery time, and `TypeError` for a
        partition, key or delivery time of a wrong type.
        """
        self.check_open()
        if not isinstance(topic, str) or not is_valid_name(topic):
            raise BadRequest(f"{topic!r} cannot be a topic: {NAME_RULE}.")
        if message.partition is not None and type(message.partition) is not int:
            raise TypeError(f"A partition is a number, not {type(message.partition).__name__}.")
        for hook in self.hooks:
            message = hook.before_send(topic, message)
        # The result is not used: this call only raises an error for an invalid delivery time.
        due_number(message.delay, message.deliver_at)
        if message.key is not None and not isinstance(message.key, str | bytes):
            if not isinstance(message.key, bytearray | memoryview):
                raise TypeError(f"A key is bytes or text, not {type(message.key).__name__}.")
            message = message._replace(key=bytes(message.key))
        return message

    def encode_payload(self, topic: str, message: Message) -> bytes | None:
        """Return the encoded payload, copied if the caller could change it. Raises `TypeError` if a codec is needed."""
        value = message.payload
        if self.codec is not None and value is not None:
            codec = select_codec(self.codec, topic)
            value = value if codec is None else codec.encode(value)
        data = payload_bytes(value)
        return data if data is None or type(data) is bytes else bytes(data)

    # Sending

    def can_append(self, topic: str, message: Message) -> bool:
        """Return whether `append` may be called: there is buffer space, and the metadata is known if it is needed."""
        return self.accumulator.has_room() and (not self._needs_topic(message) or self.accumulator.is_known(topic))

    def _needs_topic(self, message: Message) -> bool:
        """Return whether the topic's metadata must be known before a message is appended.

        With a `StrictPartitions` store the metadata need not be known, because the user has configured the partitions.
        If the message may be sent to any partition, it need not be known either: the batch waits for the metadata.
        """
        any_partition = message.partition is None and message.key is None and self.selector.per_batch
        return self.store_and_forward is None and not any_partition

    def append_plain(self, topic: str, payload: bytes) -> Delivery | None:
        """Append a message that is only a payload. Return None if the caller must use `append` for the message."""
        if self.closed or self.store_and_forward is not None:
            return None
        return self.accumulator.append_plain(topic, payload)

    def append(self, topic: str, message: Message, payload: bytes | None, called_at: float | None = None) -> Delivery:
        """Append the message; its delay starts at `called_at` (None: now).

        Raises `Closed` after `close`, `MessageTooLarge`, and the errors of the partition selector.
        """
        self.check_open()
        try:
            if self.store_and_forward is not None:
                delivery = self.store_and_forward.append(topic, message, payload)
            else:
                delivery = self.accumulator.append(topic, message, payload, called_at)
        except TfmqError as error:
            for hook in self.hooks:
                hook.after_send(topic, message, None, error)
            raise
        if self.hooks:
            self.add_hook_callback(topic, message, delivery)
        return delivery

    def add_hook_callback(self, topic: str, message: Message, delivery: Delivery) -> None:
        def call_hooks(done: Delivery) -> None:
            error = done.peek()
            result = None if error is not None else done.result()
            for hook in self.hooks:
                if isinstance(hook, Tracing):
                    hook.after_attempts(message, getattr(done[0], "send_count", 1))
                hook.after_send(topic, message, result, error)

        delivery.add_callback(call_hooks)

    def send(self, topic: str, message: Message, payload: bytes | None) -> Operation[Delivery]:
        """Append the message after waiting for buffer space and, if a partition must be chosen, for the metadata."""
        called_at = self.link.now()
        if not self.can_append(topic, message):
            yield from self._wait_for_room()
            if self._needs_topic(message):
                yield from self.wait_for_topic(topic)
        return self.append(topic, message, payload, called_at)

    def send_many(self, topic: str, payloads: Iterable[Any], when: DeliveryTime = IMMEDIATE) -> Operation[Deliveries]:
        """Append all payloads. Then close the last batch, so that it is sent before its linger time has passed."""
        tracing = next((hook for hook in self.hooks if isinstance(hook, Tracing)), None)
        if tracing is None:
            return (yield from self._send_many(topic, payloads, when, None))
        properties = tracing.before_send_many(topic)
        try:
            deliveries = yield from self._send_many(topic, payloads, when, properties)
        except BaseException as error:
            tracing.after_send_many(properties, 0, error)
            raise
        deliveries.add_callback(
            lambda done: tracing.after_send_many(properties, len(done), next(_errors_of(done), None))
        )
        return deliveries

    def _send_many(
        self, topic: str, payloads: Iterable[Any], when: DeliveryTime, properties: Mapping[str, str] | None
    ) -> Operation[Deliveries]:
        """Send all payloads. `properties`: properties that each message gets that has no trace context, or None."""
        due = due_number(*when)
        self.prepare_message(topic, Message(b"")) if not self.hooks else self.check_open()
        deliveries = Deliveries(self.owner)
        chunker = PayloadChunker(payloads)
        while True:
            yield CallUserCode(chunker.read)
            yield Wait((), 0.0)  # Lets the driver send and receive between two chunks.
            if not chunker.chunk:
                break
            called_at = self.link.now()
            if not deliveries.runs and self.store_and_forward is None:
                yield from self.wait_for_topic(topic)
            chunk = chunker.as_bytes() if self.has_fast_path else None
            if chunk is not None:
                given = None if due is None else StampedDueTime(due, called_at)
                yield from self._send_raw(topic, chunk, chunker, deliveries, given)
            else:
                messages = (with_delivery_time(each, when) for each in chunker.chunk)
                if properties:
                    messages = (_with_trace(each, properties) for each in messages)
                yield from self._send_each(topic, messages, deliveries, called_at)
        self.accumulator.expedite(deliveries.batches)
        return deliveries

    def send_arrow(self, table: Any, topic: str) -> Operation[Deliveries]:
        """Send each row of an Arrow table as a message, without a Python object per message. Return one handle for all.

        `table` is a table or record batch of pyarrow, or a data frame that exports an Arrow stream (pandas, polars,
        DuckDB). Its columns are described in docs/arrow.md: `value` (binary or string; null is a tombstone), and
        optionally `key`, `tag` and `attributes`. Other columns are ignored. The default selector chooses the partition
        by the key. If the table has no keys, it chooses one partition for each batch. Waits for buffer space as `send`
        does. `result()` of the handle is a list with one entry for each batch.

        Raises `BadRequest` for columns that cannot be sent and for a producer with a codec, hooks or a selector of its
        own, `TypeError` if `table` is no table, `ImportError` without pyarrow, `MessageTooLarge` for a row above the
        broker's limit, `Busy` if the buffer stays full, and the error of the request for the topic's metadata.
        """
        from tfmq.client.send.columns import TableReader  # pyarrow is an optional dependency

        self.prepare_message(topic, Message(b"")) if not self.hooks else self.check_open()
        if not self.has_fast_path or not isinstance(self.selector, KeyHash) or self.store_and_forward is not None:
            raise BadRequest(
                "send_arrow sends the columns as they are: use a producer without codec, hooks and a selector of its"
                " own, or send_many."
            )
        yield from self.wait_for_topic(topic)
        deliveries = Deliveries(self.owner)
        reader = TableReader(
            table,
            self.accumulator.partition_count(topic),
            batch_bytes=self.options.batch_bytes,
            message_bytes=self.link.limits["message_bytes"],
        )
        while True:
            yield CallUserCode(reader.read)  # Called without the driver's lock, because it takes long.
            if not reader.parts:
                break
            for partition, records in reader.parts:
                yield from self._wait_for_room()
                self.check_open()
                batch = self.accumulator.append_prepared(topic, partition, records)
                deliveries.add(batch, 0, records.count)
                yield Wait((), 0.0)
                self._raise_early_failure(deliveries)
        self.accumulator.expedite(deliveries.batches)
        return deliveries

    def _send_raw(
        self,
        topic: str,
        chunk: list[bytes],
        chunker: PayloadChunker,
        deliveries: Deliveries,
        given: StampedDueTime | None,
    ) -> Operation[None]:
        sizes = list(map(len, chunk))
        overhead = self.accumulator.overhead_bytes
        start = 0
        for stop in batch_ends(sizes, self.options.batch_bytes, overhead):
            part = chunk if stop - start == len(chunk) else chunk[start:stop]
            yield from self._wait_for_room()
            self.check_open()
            batch = self.accumulator.append_many(topic, part, sum(sizes[start:stop]), given)
            deliveries.add(batch, 0, len(part))
            start = stop
            yield Wait((), 0.0)
            self._raise_early_failure(deliveries)
        chunker.adjust_count(sum(sizes) + overhead * len(chunk), self.options.batch_bytes)

    def _send_each(
        self, topic: str, messages: Iterable[Message], deliveries: Deliveries, called_at: float
    ) -> Operation[None]:
        for each in messages:
            message = self.prepare_message(topic, each)
            payload = self.encode_payload(topic, message)
            yield from self._wait_for_room()
            batch, index = self.append(topic, message, payload, called_at)
            deliveries.add(batch, index, 1)
        yield Wait((), 0.0)
        self._raise_early_failure(deliveries)

    def _raise_early_failure(self, deliveries: Deliveries) -> None:
        """If a batch of `deliveries` has failed, raise its error, so that the caller reads no more payloads."""
        if self.accumulator.failed_messages:
            for batch, first, count in deliveries.runs:
                if batch.error is not None:
                    batch.result_of(first, count)

    def _wait_for_room(self) -> Operation[None]:
        """Wait for buffer space. Raises `Busy` if the buffer stays full for the timeout."""
        until = self.link.now() + self.options.timeout
        while not self.accumulator.has_room():
            remaining = until - self.link.now()
            if remaining <= 0:
                raise Busy(
                    f"The buffer of {self.options.buffer_bytes} bytes was full for {self.options.timeout:g} s:"
                    " the broker does not keep up, or cannot be reached."
                )
            yield Wait((self.accumulator.room_event(),), remaining)

    def wait_for_topic(self, topic: str) -> Operation[None]:
        """Wait until the topic's metadata is known. Raises the error of the request, or `TimedOut`."""
        until = self.link.now() + self.options.timeout
        while not self.accumulator.is_known(topic):
            entry = self.accumulator.topic_entry(topic)
            self.accumulator.request_metadata(entry)
            remaining = until - self.link.now()
            if remaining <= 0:
                raise TimedOut(
                    f"The partitions of {topic} are still unknown after {self.options.timeout:g} s. Try again; if"
                    " that goes on, see `tfmq status`, or wait longer: Producer(timeout=...).",
                    outcome="not done",
                )
            yield Wait((entry.known_event,), remaining)
            if entry.error is not None:
                raise type(entry.error)(entry.error.sentence, outcome="not done")

    def cancel(self, handle: str) -> Operation[str]:
        """Cancel a delayed message of any sender. `handle` is `SendResult.delayed`.

        Returns "cancelled": the message will never be delivered; "delivered": it was delivered before; "unknown": the
        broker does not know the handle, or has forgotten it. The result is durable, and a repeated call returns it
        again. Raises `BadRequest` for a mistyped handle. Raises `TimedOut` or `ConnectionFailed` if no reply arrived:
        then repeat the call.
        """
        self.check_open()
        return cancel_delayed_message(self.link, handle, self.options.timeout)

    def reschedule(
        self, handle: str, delay: Delay | None = None, *, deliver_at: Moment | None = None
    ) -> Operation[Rescheduled]:
        """Change the due time of a delayed message: to `delay` from now, or to the time `deliver_at`.

        The change is atomic: the message is never lost and never delivered twice. If the result's `state` is
        "rescheduled", its `handle` is the new handle, which replaces the old one. If nothing was changed, the `state`
        is "delivered", "cancelled" or "unknown". Raises the errors of `cancel`, and `TypeError` for an invalid time.
        """
        self.check_open()
        return reschedule_delayed_message(self.link, handle, delay, deliver_at, self.options.timeout)

    # Waiting

    def wait_for_batches(self, batches: Iterable[Batch]) -> Operation[None]:
        """Wait for all `batches`. Open batches are closed at the next tick or later, to gather more messages."""
        waited = list(batches)
        self.accumulator.expedite(waited, at_once=False)
        yield from wait_for_all(waited, None, self.link)

    def wait_error(self, timeout: float | None) -> TimedOut:
        if self.driver.closed:
            return TimedOut("The producer was closed during the wait.")
        return TimedOut(f"The broker has not replied within {timeout:g} s; the messages are still being sent.")

    def flush(self, timeout: float | None = None) -> Operation[None]:
        """Wait until all messages sent so far are acknowledged, at most `timeout` seconds (else `TimedOut`).

        Raises `DeliveryFailed` if messages have failed whose results were not read. The error's `deliveries` are the
        handles of these messages.
        """
        waited = self.accumulator.close_open_batches()
        done = yield from wait_for_all(waited, timeout, self.link)
        self._raise_failures()
        if not done:
            raise TimedOut(f"Not all messages were delivered within {timeout:g} s; the rest is still being sent.")

    def close(self, timeout: float) -> Operation[None]:
        """Reject new messages, flush for at most `timeout` seconds, and fail all messages that are still undelivered.

        Raises `DeliveryFailed` if messages have failed whose results were not read, or else `TransactionRolledBack` if
        open transactions with messages were rolled back.
        """
        if self.closed:
            yield Wait((self.closed_event,), timeout)
            return
        self.closed = True
        self.has_fast_path = False
        reason = "The producer was closed before it was delivered: the waiting in close() was cancelled."
        try:
            yield from self.transactions.close(timeout)
        finally:
            try:
                yield from wait_for_all(self.accumulator.close_open_batches(), timeout, self.link)
                reason = f"The producer was closed, and it was not delivered within {timeout:g} s."
            finally:
                self.transactions.stop()
                if self.store_and_forward is not None:
                    self.store_and_forward.close()
                self.accumulator.fail_outstanding(TimedOut(reason))
                self.closed_event.complete()
            self._raise_failures()

    def _raise_failures(self) -> None:
        if failed := self.accumulator.pop_failures():
            count = "1 message" if len(failed) == 1 else f"{len(failed)} messages"
            raise DeliveryFailed(
                f"{count} could not be delivered; the first one: {failed[0].peek()}", deliveries=failed
            )

    def stats(self) -> dict[str, Any]:
        accumulator, link = self.accumulator, self.link
        return {
            "messages": accumulator.sent_messages,
            "batches": accumulator.sent_batches,
            "bytes": accumulator.sent_bytes,
            "failed_messages": accumulator.failed_messages,
            "lost_messages": accumulator.lost_messages,
            "buffered_bytes": accumulator.used_bytes,
            "unsettled_batches": len(accumulator.outstanding),
            "transactions": self.transactions.committed,
            "rolled_back_transactions": self.transactions.rolled_back,
            "open_transactions": len(self.transactions),
            "connections": link.connection_count,
            "connected": link.state == READY,
            "server": str(link.server),
        }


def _with_trace(message: Message, properties: Mapping[str, str]) -> Message:
    """Return the message with the trace context in `properties`, unless it has one."""
    own = message.properties or {}
    return message if TRACE_PARENT in own else message._replace(properties={**own, **properties})


def _errors_of(deliveries: Deliveries) -> Iterator[TfmqError]:
    return (batch.error for batch in deliveries.batches if batch.error is not None)
