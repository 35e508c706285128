"""The blocking consumer. Its methods run operations of `tfmq.client.consumer.core` and wait in the calling thread."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Literal

from tfmq.client.api_variants import blocking, name_methods
from tfmq.client.consumer.core import ConsumerCore
from tfmq.client.consumer.message import Codec, ReceivedMessage, Value
from tfmq.client.consumer.options import (
    DEFAULT_STORE,
    FETCH_BYTES,
    PREFETCH_BYTES,
    REFRESH_SECONDS,
    RETRIES,
    SAVE_SECONDS,
    SESSION_SECONDS,
    TIMEOUT_SECONDS,
    MessageFilter,
    PartitionCallback,
    Partitions,
    Start,
    Topics,
    check_poll,
)
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.worker.listeners import Listener
from tfmq.client.worker.thread_runner import ThreadRunner
from tfmq.consumer_base import BaseConsumer, log
from tfmq.hooks import Hook
from tfmq.offsets.storage import OffsetStorage


@name_methods
class Consumer(BaseConsumer, Generic[Value]):
    """Reads topics, in a loop or by `poll`.

    The constructor does not connect. Leave `with`, or call `close`, at the end.

    A message is acknowledged when the next message is requested; a batch from `poll` is acknowledged when `poll` is
    called again. When `with` ends without an exception, the last message or batch is acknowledged too. The consumer
    waits for a topic that does not exist; reading never creates a topic.

    Args:
        servers: "host:port", several with commas or as a list. None: $TFMQ_SERVERS, otherwise 127.0.0.1:8367.
        topics: a name, several names, or a compiled pattern.
        partitions: pairs (topic, number), or numbers of partitions of the topics. None: all of them.
        group: the name under which offsets are saved and partitions are shared with other members.
        start: where reading begins in partitions for which the group, if any, has no committed offset. "earliest",
            "latest", an offset (bytes), `tfmq.Ordinal(n)`, or an aware datetime (append time).
        read: "forced" delivers only durable messages; "written" also messages that are not fsynced yet.
        on_damage: "stop" raises `Damaged`; "skip" logs the damaged range and continues after it.
        on_out_of_range: what happens if the offset no longer exists. "stop" raises `OffsetOutOfRange`; "earliest"
            continues at the first message, "latest" after the last message.
        commits: "auto" commits the acknowledged messages every `save_every` seconds and at the end (at least once).
            "manual" commits only in `commit`. "before" commits before a message is delivered (at most once).
        offsets: where offsets are stored: "broker", "file:PATH", "sql:URL", "zookeeper://...", or an `OffsetStorage`.
        retries: for `run`: how often a message is tried again after its first failure, before it is a dead letter.
        dead_letters: for `run`: where dead letters are stored. A path or a SQLAlchemy URL, "topic:NAME", or None: stop
            with the error. Default: an SQLite file on this machine for each broker and group, logged at the start.
        tags: only messages with one of these tags. "a || b" stands for both, "*" for all.
        where: a function of a message; only messages for which it returns a true value are delivered.
        codec: makes `message.value` from the payload, see `tfmq.codecs`; one for all topics, or a dict by topic.
        hooks: see `tfmq.Hook`.
        strategy: how partitions are assigned in a group: "sticky" (moves the fewest), "range" or "consistent_hash".
        broadcast: True: every machine reads the whole topic, with offsets of its own. A text replaces the machine's
            name.
        coordinator: assigns the partitions of a group: "broker", or "zookeeper://...", which also stores the offsets.
        on_assigned: called with new partitions, before a message of them is delivered.
        on_revoked: called with partitions that will be revoked, before they are released.
        timeout: seconds after which a commit, a seek or `close` raises `TimedOut`.
        session: seconds without a heartbeat after which the member loses its partitions.
        save_every: seconds between saves with commits="auto".
        refresh_every: seconds between checks for new topics and partitions.
        fetch_bytes: bytes of one fetch request.
        prefetch_bytes: bytes that are read ahead.
        client_id: the name of this client in `tfmq group show` and in the broker's log. None: $TFMQ_CLIENT_ID.
        standby: True: of `servers`, a standby with `replicate.read` serves, too, about a second behind; without a
            group, because offsets are kept by the primary.

    Raises `BadRequest` for invalid arguments.
    """

    _driver: BlockingDriver

    def __init__(
        self,
        servers: str | Sequence[str] | None = None,
        *,
        topics: Topics = None,
        partitions: Partitions = None,
        group: str | None = None,
        start: Start = "earliest",
        read: Literal["forced", "written"] = "forced",
        on_damage: Literal["stop", "skip"] = "stop",
        on_out_of_range: Literal["stop", "earliest", "latest"] = "stop",
        commits: Literal["auto", "manual", "before"] = "auto",
        offsets: str | OffsetStorage = "broker",
        retries: int = RETRIES,
        dead_letters: str | os.PathLike[str] | None = DEFAULT_STORE,
        tags: str | Iterable[str] | None = None,
        where: MessageFilter = None,
        codec: Codec[Value] | Mapping[str, Codec[Value]] | None = None,
        hooks: Sequence[Hook] = (),
        strategy: Literal["sticky", "range", "consistent_hash"] = "sticky",
        broadcast: bool | str = False,
        coordinator: str = "broker",
        on_assigned: PartitionCallback = None,
        on_revoked: PartitionCallback = None,
        timeout: float = TIMEOUT_SECONDS,
        session: float = SESSION_SECONDS,
        save_every: float = SAVE_SECONDS,
        refresh_every: float = REFRESH_SECONDS,
        fetch_bytes: int = FETCH_BYTES,
        prefetch_bytes: int = PREFETCH_BYTES,
        client_id: str | None = None,
        standby: bool = False,
    ) -> None:
        self._connect(locals(), BlockingDriver, awaits=False)

    def __iter__(self) -> Iterator[ReceivedMessage[Value]]:
        """Iterate over the messages without end, until `stop` is called."""
        core = self._core
        positions = core.positions
        while (messages := self._driver.run(core.next_batch())) is not None:
            for message in messages:
                positions.current = message
                yield message

    def __next__(self) -> ReceivedMessage[Value]:
        """Wait for the next message and return it."""
        loop = self._loop = self._loop or iter(self)
        try:
            return next(loop)
        except BaseException:
            self._loop = None
            raise

    def poll(self, timeout: float | None = 1.0, max_messages: int = 500) -> list[ReceivedMessage[Value]]:
        """Return up to `max_messages` as soon as there are any, or [] after `timeout` seconds (None: never)."""
        check_poll(timeout, max_messages)
        return self._driver.run(self._core.poll(timeout, max_messages))

    def arrow_batches(self, columns: Iterable[str] | None = None, *, timeout: float | None = None) -> Iterator[Any]:
        """Iterate over the messages as Arrow record batches (`pyarrow.RecordBatch`), without an object per message.

        Each batch has messages of one partition, in order, verified by the checksums of their blocks. `columns`: names
        from docs/arrow.md; None: key, value, partition, offset and timestamp. The iteration ends after `timeout`
        seconds without a message (None: never), and after `stop`. A batch is acknowledged when the next batch is
        requested, and when `with` ends without an exception; `commit` and transactions work as with messages.

        Raises `BadRequest` for an unknown column, for a consumer with tags, where= or a codec, or with
        commits="before"; `ImportError` without pyarrow; `Damaged`, `DecodeFailed` and the other errors of `poll`.
        """
        core = self._core
        with self._driver.lock:
            core.start_columns(columns)
        try:
            while (batch := self._driver.run(core.next_columns(timeout))) is not None:
                yield batch
        finally:
            with self._driver.lock:
                core.end_columns()

    commit = blocking(ConsumerCore.commit)
    seek = blocking(ConsumerCore.seek)
    pause = blocking(ConsumerCore.pause)
    resume = blocking(ConsumerCore.resume)
    lag = blocking(ConsumerCore.lag)
    position = blocking(ConsumerCore.position)
    committed = blocking(ConsumerCore.committed)

    def run(
        self,
        listener: Listener | None = None,
        *,
        workers: int = 1,
        order: Literal["partition", "key", "none"] = "partition",
        signals: bool = True,
        tracebacks: bool = True,
    ) -> None:
        """Call `listener`, or a listener registered with `on`, with each message, until `stop`, a signal or an error.

        A message is acknowledged when its listener returns. If the listener raises, the message is retried up to
        `retries` times with growing pauses, and then becomes a dead letter. If the listener raises `tfmq.Reject`, the
        message becomes a dead letter at once. `tfmq.RetryLater(seconds)` retries it later, and later messages are
        handled meanwhile. Without a dead-letter store, `run` raises the listener's error. An awaitable result of a
        listener is awaited. At the end, also after an error, the offsets of acknowledged messages are committed, and
        the consumer leaves the group and is closed.

        Args:
            listener: called with each message of a topic that has no listener of its own.
            workers: how many messages are handled at the same time.
            order: what a message waits for: the previous message of its "partition", the previous message with its
                "key", or "none": no other message.
            signals: SIGTERM and SIGINT end `run` after the current messages, a second one at once (main thread only).
            tracebacks: log the traceback of each failed call (logger `tfmq.consumer`); False: only the error's class.
        """
        running = self._create_run(listener, workers, order, tracebacks)
        hooks = self._core.options.hooks
        try:
            ThreadRunner(running, self._driver, self._listeners, hooks, self.stop).run(workers, signals)
        finally:
            self._driver.close()

    def close(self) -> None:
        """Commit the acknowledged messages, but not the current one, and leave the group; wait at most `timeout`."""
        self._close(processed=False)

    def _close(self, processed: bool) -> None:
        try:
            self._driver.run(self._core.close(processed))
        finally:
            self._handling.close()
            self._driver.close()

    def __enter__(self) -> "Consumer[Value]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._close(processed=True)
            return
        try:
            self._close(processed=False)
        except Exception as closing:
            log.warning("Closing the consumer after an error failed too: %s", closing)
