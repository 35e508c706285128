"""The blocking consumer: one method a line over `tfmq.client.consumer.core`; every wait happens in the calling
thread.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, Generic, Literal

from tfmq.client.connection.addresses import described
from tfmq.client.connection.factory import reach
from tfmq.client.consumer.core import Consuming, Lag, log
from tfmq.client.consumer.message import Codec, ReceivedMessage, Value
from tfmq.client.consumer.options import (
    FETCH_BYTES,
    OWN_STORE,
    PREFETCH_BYTES,
    REFRESH_SECONDS,
    RETRIES,
    SAVE_SECONDS,
    SESSION_SECONDS,
    TIMEOUT_SECONDS,
    Arguments,
    Partitions,
    Start,
    Told,
    Topics,
    Where,
    check_poll,
    checked,
    seek_question,
)
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.worker.listeners import Function, Listener, Listeners
from tfmq.client.worker.message_context import LoopHandling
from tfmq.client.worker.thread_runner import ThreadRun
from tfmq.hooks import Hook
from tfmq.offsets.storage import OffsetStorage, PartitionName
from tfmq.runs import begin_run, open_store


class Consumer(Generic[Value]):
    """Reads topics, in a loop or by `poll`. Making one touches no network; leave `with`, or call `close`, at the end.

    A message counts as processed when the next one is asked for, a polled batch when `poll` is called again, both when
    `with` ends without an exception. A topic that does not exist is waited for; reading never creates one.

    Args:
        servers: "host:port", several with commas or as a list. None: $TFMQ_SERVERS, otherwise 127.0.0.1:8367.
        topics: a name, several names, or a compiled pattern.
        partitions: pairs (topic, number), or numbers of partitions of the topics. None: all of them.
        group: the name under which offsets are saved and partitions are shared with other members.
        start: where reading begins; in a group only where it has no offset. "earliest", "latest", an offset (bytes),
            `tfmq.Ordinal(n)`, or an aware datetime (append time).
        read: "forced" delivers only what a power cut cannot take back; "written" also what is not on the disk yet.
        on_damage: "stop" raises `Damaged`; "skip" logs the damaged range and continues after it.
        on_out_of_range: "stop" raises `OffsetOutOfRange` when the offset no longer exists; "earliest" and "latest"
            continue there.
        commits: "auto" saves what is processed every `save_every` seconds and at the end (at least once). "manual"
            saves what `commit` says. "before" saves before a message is handed out (at most once).
        offsets: where offsets are stored: "broker", "file:PATH", "sql:URL", "zookeeper://...", or an `OffsetStorage`.
        retries: for `run`: how often a message is tried again after its first failure, before it is a dead letter.
        dead_letters: for `run`: where dead letters are stored. A path or a SQLAlchemy URL, "topic:NAME", or None: stop
            with the error. Default: an SQLite file on this machine for each broker and group, logged at the start.
        tags: only messages with one of these tags. "a || b" is both, "*" is all.
        where: a function of a message; only messages for which it returns a true value are delivered.
        codec: makes `message.value` from the payload, see `tfmq.codecs`; one for all topics, or a dict by topic.
        hooks: see `tfmq.Hook`.
        strategy: how the partitions are shared in a group: "sticky" moves the fewest, "range", "consistent_hash".
        broadcast: True: every machine reads the whole topic, with offsets of its own. A text replaces the machine's
            name.
        coordinator: what shares the partitions in a group: "broker", or "zookeeper://...", which also has the offsets.
        on_assigned: called with new partitions, before a message of them is handed out.
        on_revoked: called with partitions that are to be released, before they are.
        timeout: seconds after which a commit, a seek or `close` gives up.
        session: seconds without a heartbeat after which the member loses its partitions.
        save_every: seconds between saves with commits="auto".
        refresh_every: seconds between checks for new topics and partitions.
        fetch_bytes: bytes of one fetch request.
        prefetch_bytes: bytes that are read ahead.
        client_id: the name of this client in `tfmq group show` and in the broker's log. None: $TFMQ_CLIENT_ID.

    Raises `BadRequest` for wrong arguments.
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
        dead_letters: str | os.PathLike[str] | None = OWN_STORE,
        tags: str | Iterable[str] | None = None,
        where: Where = None,
        codec: Codec[Value] | Mapping[str, Codec[Value]] | None = None,
        hooks: Sequence[Hook] = (),
        strategy: Literal["sticky", "range", "consistent_hash"] = "sticky",
        broadcast: bool | str = False,
        coordinator: str = "broker",
        on_assigned: Told = None,
        on_revoked: Told = None,
        timeout: float = TIMEOUT_SECONDS,
        session: float = SESSION_SECONDS,
        save_every: float = SAVE_SECONDS,
        refresh_every: float = REFRESH_SECONDS,
        fetch_bytes: int = FETCH_BYTES,
        prefetch_bytes: int = PREFETCH_BYTES,
        client_id: str | None = None,
    ) -> None:
        options = checked(Arguments.of(locals()), awaits=False)
        link, self._driver, self._wall_clock = reach(servers, BlockingDriver, client_id=client_id)
        self._core = Consuming(
            options,
            link,
            self._driver.beside,
            attend=self._driver.attend,
            flush=self._driver.flush,
            raise_flag=self._driver.raise_flag,
        )
        self._driver.tickers.append(self._core.tasks)
        self._driver.on_fork.append(self._core.renew)
        self._listeners = Listeners()
        self._handling = LoopHandling(
            self._core,
            self._driver.run,
            partial(open_store, options, self._driver.beside, self._core, self._wall_clock),
            wall_clock=self._wall_clock,
            awaited=False,
        )
        self._core.fetcher.handler = self._handling
        self._loop: Iterator[ReceivedMessage[Value]] | None = None

    def __iter__(self) -> Iterator[ReceivedMessage[Value]]:
        """Every message in turn, without end; until `stop` is called."""
        core = self._core
        positions = core.positions
        while (messages := self._driver.run(core.next_batch())) is not None:
            for message in messages:
                positions.current = message
                yield message

    def __next__(self) -> ReceivedMessage[Value]:
        """The next message; waits for it."""
        loop = self._loop = self._loop or iter(self)
        try:
            return next(loop)
        except BaseException:
            self._loop = None
            raise

    def poll(self, timeout: float | None = 1.0, max_messages: int = 500) -> list[ReceivedMessage[Value]]:
        """Up to `max_messages` as soon as there are any; [] after `timeout` seconds (None: no limit) without one."""
        check_poll(timeout, max_messages)
        return self._driver.run(self._core.poll(timeout, max_messages))

    def commit(self, message: ReceivedMessage[Any] | None = None) -> None:
        """Saves all that was handed out, the current message included; or up to `message` and including it.

        Returns when it is on the disk. Raises Fenced, naming them, if partitions of it are another member's by now; all
        others are saved, and the consumer goes on with them.
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
        """Go on in one partition at the record at or before `offset`, at the `ordinal`-th message, at the first
        appended at or after `time`, or at an end of the log. A partition that had stopped goes on."""
        question = seek_question(offset, ordinal, time, to)
        self._driver.run(self._core.seek(PartitionName(topic, partition), question))

    def pause(self, topic: str, partition: int) -> None:
        """Hand out nothing of the partition until `resume`."""
        self._driver.run(self._core.pause(PartitionName(topic, partition)))

    def resume(self, topic: str, partition: int) -> None:
        """Hand out messages of the partition again."""
        self._driver.run(self._core.resume(PartitionName(topic, partition)))

    def lag(self) -> Lag:
        """How many messages are there and were not handed out: a number, with `.partitions` for each."""
        return self._driver.run(self._core.lag())

    def position(self, topic: str, partition: int) -> int:
        """The offset behind everything that was handed out of the partition."""
        return self._driver.run(self._core.position(PartitionName(topic, partition)))

    def committed(self, topic: str, partition: int) -> int | None:
        """The offset that the group has saved of the partition; None: none."""
        return self._driver.run(self._core.committed(PartitionName(topic, partition)))

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and where each partition stands."""
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

        A message is acknowledged when its listener returns. When it raises, the message is tried again up to `retries`
        times with growing pauses, and is then a dead letter. `tfmq.Reject` makes it a dead letter at once,
        `tfmq.RetryLater(seconds)` tries it again later and continues with the next message. Without a store of dead
        letters the error is raised here. What a listener returns is awaited where that is possible. At the end, also
        after an error, what is finished is saved, the group is left, and the consumer is closed.

        Args:
            listener: called with each message of a topic that has no listener of its own.
            workers: how many messages are handled at the same time.
            order: a message waits for the one before it in its "partition", for the one before it with its "key", or
                for "none".
            signals: SIGTERM and SIGINT finish the current messages; a second one ends at once (main thread only).
            tracebacks: the log (`tfmq.consumer`) has the traceback of each failed call; False: only the error's class.
        """
        running = begin_run(
            self._core,
            self._listeners,
            listener,
            workers=workers,
            order=order,
            tracebacks=tracebacks,
            beside=self._driver.beside,
            wall_clock=self._wall_clock,
            raise_flag=self._driver.raise_flag,
        )
        hooks = self._core.options.hooks
        try:
            ThreadRun(running, self._driver, self._listeners, hooks, self.stop).run(workers, signals)
        finally:
            self._driver.close()

    def on(self, topic: str) -> Callable[[Function], Function]:
        """Register a listener for a topic: `@consumer.on("orders")` above a function, which `run` calls then."""
        return self._listeners.on(topic)

    def stop(self) -> None:
        """End the loop behind the current message, from any thread or a signal handler; `poll` gives [] then."""
        self._core.stop()
        self._driver.raise_flag(self._core.stop_asked)

    def close(self) -> None:
        """Saves what is processed, without the message in work, and leaves the group. Bounded by `timeout`."""
        self._close(processed=False)

    def _close(self, processed: bool) -> None:
        try:
            self._driver.run(self._core.close(processed))
        finally:
            self._handling.close()
            self._driver.close()

    def __repr__(self) -> str:
        options = self._core.options
        return described(
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
            log.warning("Closing behind an error met another one: %s", closing)
