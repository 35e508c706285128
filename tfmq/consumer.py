"""The blocking consumer, a thin layer over `tfmq.client.consumer.core`.

All waits are in the calling thread.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, Generic, Literal

from tfmq.client.connection.addresses import describe_client
from tfmq.client.connection.factory import make_client_parts
from tfmq.client.consumer.core import ConsumerCore, Lag, log
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
    ConsumerArguments,
    MessageFilter,
    PartitionCallback,
    Partitions,
    Start,
    Topics,
    check_arguments,
    check_poll,
    seek_position,
)
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.worker.listeners import Function, Listener, Listeners
from tfmq.client.worker.message_context import MessageContextFactory
from tfmq.client.worker.thread_runner import ThreadRunner
from tfmq.hooks import Hook
from tfmq.offsets.storage import OffsetStorage, PartitionName
from tfmq.runs import create_run, open_dead_letter_store


class Consumer(Generic[Value]):
    """Reads topics, in a loop or by `poll`.

    The constructor does not connect. Leave `with`, or call `close`, at the end.

    A message is acknowledged when the next one is requested, a polled batch when `poll` is called again, both when
    `with` ends without an exception. The consumer waits for a topic that does not exist; reading never creates one.

    Args:
        servers: "host:port", several with commas or as a list. None: $TFMQ_SERVERS, otherwise 127.0.0.1:8367.
        topics: a name, several names, or a compiled pattern.
        partitions: pairs (topic, number), or numbers of partitions of the topics. None: all of them.
        group: the name under which offsets are saved and partitions are shared with other members.
        start: where reading begins; in a group only where it has no offset. "earliest", "latest", an offset (bytes),
            `tfmq.Ordinal(n)`, or an aware datetime (append time).
        read: "forced" delivers only durable messages; "written" also messages that are not fsynced yet.
        on_damage: "stop" raises `Damaged`; "skip" logs the damaged range and continues after it.
        on_out_of_range: "stop" raises `OffsetOutOfRange` when the offset no longer exists; "earliest" and "latest"
            continue there.
        commits: "auto" commits the acknowledged messages every `save_every` seconds and at the end (at least once).
            "manual" commits only in `commit`. "before" commits before a message is delivered (at most once).
        offsets: where offsets are stored: "broker", "file:PATH", "sql:URL", "zookeeper://...", or an `OffsetStorage`.
        retries: for `run`: how often a message is tried again after its first failure, before it is a dead letter.
        dead_letters: for `run`: where dead letters are stored. A path or a SQLAlchemy URL, "topic:NAME", or None: stop
            with the error. Default: an SQLite file on this machine for each broker and group, logged at the start.
        tags: only messages with one of these tags. "a || b" is both, "*" is all.
        where: a function of a message; only messages for which it returns a true value are delivered.
        codec: makes `message.value` from the payload, see `tfmq.codecs`; one for all topics, or a dict by topic.
        hooks: see `tfmq.Hook`.
        strategy: how partitions are assigned in a group: "sticky" moves the fewest, "range", "consistent_hash".
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

    Raises `BadRequest` for invalid arguments.
    """

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
    ) -> None:
        options = check_arguments(ConsumerArguments.from_mapping(locals()), awaits=False)
        link, self._driver, self._wall_clock = make_client_parts(servers, BlockingDriver, client_id=client_id)
        self._core = ConsumerCore(
            options,
            link,
            self._driver.run_in_thread,
            wake_driver=self._driver.wake,
            flush=self._driver.flush,
            raise_flag=self._driver.set_event,
        )
        self._driver.tickers.append(self._core.tasks)
        self._driver.on_fork.append(self._core.reset_after_fork)
        self._listeners = Listeners()
        self._handling = MessageContextFactory(
            self._core,
            self._driver.run,
            partial(
                open_dead_letter_store, options, self._driver.run_in_thread, self._core, self._wall_clock
            ),
            wall_clock=self._wall_clock,
            is_async=False,
        )
        self._core.fetcher.failure_handler = self._handling
        self._loop: Iterator[ReceivedMessage[Value]] | None = None

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
        """Return up to `max_messages` as soon as there are any.

        Returns [] after `timeout` seconds (None: no limit) without one.
        """
        check_poll(timeout, max_messages)
        return self._driver.run(self._core.poll(timeout, max_messages))

    def commit(self, message: ReceivedMessage[Any] | None = None) -> None:
        """Commit all delivered messages, the current one included.

        With `message`: only those up to and including it.

        The offsets are durable when it returns. Raises Fenced, with their names, if some of the partitions
        are now assigned to another member; the offsets of all others are committed, and the consumer
        continues with them.
        """
        self._driver.run(self._core.commit(message))

    def seek(
        self,
        topic: str,
        partition: int,
        *,
        offset: int | None = None,
        ordinal: int | None = None,
        time: datetime | None = None,
        to: Literal["earliest", "latest"] | None = None,
    ) -> None:
        """Set the read position in one partition.

        A partition that had stopped with an error is read again.

        The new position is the record at or before `offset`, the `ordinal`-th message, the first message
        appended at or after `time`, or an end of the log.
        """
        question = seek_position(offset, ordinal, time, to)
        self._driver.run(self._core.seek(PartitionName(topic, partition), question))

    def pause(self, topic: str, partition: int) -> None:
        """Deliver no messages of the partition until `resume`."""
        self._driver.run(self._core.pause(PartitionName(topic, partition)))

    def resume(self, topic: str, partition: int) -> None:
        """Deliver messages of the partition again."""
        self._driver.run(self._core.resume(PartitionName(topic, partition)))

    def lag(self) -> Lag:
        """Return the number of undelivered messages, with `.partitions` for each partition."""
        return self._driver.run(self._core.lag())

    def position(self, topic: str, partition: int) -> int:
        """Return the offset after the last delivered message of the partition."""
        return self._driver.run(self._core.position(PartitionName(topic, partition)))

    def committed(self, topic: str, partition: int) -> int | None:
        """Return the offset that the group has committed for the partition, or None."""
        return self._driver.run(self._core.committed(PartitionName(topic, partition)))

    def stats(self) -> dict[str, Any]:
        """Return counters since the start, and the state of each partition."""
        with self._driver.lock:
            return self._core.stats()

    def run(
        self,
        listener: Listener | None = None,
        *,
        workers: int = 1,
        order: Literal["partition", "key", "none"] = "partition",
        signals: bool = True,
        tracebacks: bool = True,
    ) -> None:
        """Call `listener`, or what was registered with `on`, with each message, until `stop`, a signal or an error.

        A message is acknowledged when its listener returns. When it raises, the message is retried up to `retries`
        times with growing pauses, and is then a dead letter. `tfmq.Reject` makes it a dead letter at once,
        `tfmq.RetryLater(seconds)` retries it later and continues with the next message. Without a dead-letter store
        the error is raised here. If a listener returns an awaitable, it is awaited. At the end, also after an error,
        the offsets of acknowledged messages are committed, and the consumer leaves the group and is closed.

        Args:
            listener: called with each message of a topic that has no listener of its own.
            workers: how many messages are handled at the same time.
            order: a message waits for the one before it in its "partition", for the one before it with its "key", or
                for "none".
            signals: SIGTERM and SIGINT finish the current messages; a second one ends at once (main thread only).
            tracebacks: log the traceback of each failed call (logger `tfmq.consumer`); False: only the error's class.
        """
        running = create_run(
            self._core,
            self._listeners,
            listener,
            workers=workers,
            order=order,
            tracebacks=tracebacks,
            beside=self._driver.run_in_thread,
            wall_clock=self._wall_clock,
            raise_flag=self._driver.set_event,
        )
        hooks = self._core.options.hooks
        try:
            ThreadRunner(running, self._driver, self._listeners, hooks, self.stop).run(workers, signals)
        finally:
            self._driver.close()

    def on(self, topic: str) -> Callable[[Function], Function]:
        """Decorator: register a listener for `run`, as `@consumer.on("orders")`."""
        return self._listeners.on(topic)

    def stop(self) -> None:
        """Stop iteration after the current message. `poll` returns [] afterwards.

        Safe in any thread and in signal handlers.
        """
        self._core.stop()
        self._driver.set_event(self._core.stop_requested)

    def close(self) -> None:
        """Commit the acknowledged messages, without the current one, and leave the group.

        Takes at most `timeout`.
        """
        self._close(processed=False)

    def _close(self, processed: bool) -> None:
        try:
            self._driver.run(self._core.close(processed))
        finally:
            self._handling.close()
            self._driver.close()

    def __repr__(self) -> str:
        options = self._core.options
        return describe_client(
            self, self._core.link.servers, topics=options.subscription.shown, group=options.group
        )

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
