"""The broker: creates all components, connects them, runs their turns and stops them.

Also the STATUS reply.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from journal.clock import Clock
from journal.disk import Disk, File, Lock
from journal.errors import JournalError
from journal.filenames import join
from journal.fsync import Forceable, Forcer, Waiter
from journal.linux_aio import Begin, Flight, Landed
from journal.log.log import Log
from journal.log.segments import LogOptions
from journal.record.format import HEADER_SIZE
from tfmq.broker import log_offsets
from tfmq.broker.admission import Lane, Quotas
from tfmq.broker.apply_target import BrokerDestination
from tfmq.broker.catalog import Catalog, Leases
from tfmq.broker.catalog_state import TopicRow
from tfmq.broker.delay_commands import Delay
from tfmq.broker.fetch import Polls
from tfmq.broker.groups.coordinator import Groups
from tfmq.broker.groups.offset_commands import GroupOffsets
from tfmq.broker.groups.offsets import OffsetEffects, OffsetLocks, Offsets
from tfmq.broker.log_offsets import Retention
from tfmq.broker.partition import Partition
from tfmq.broker.partition_dirs import Folders, Opened
from tfmq.broker.produce import Writes
from tfmq.broker.producer_state import Producers
from tfmq.broker.reply import STOPPING, Randomness, Reply, Run, Session, not_done
from tfmq.broker.reserve import FullDiskLog
from tfmq.broker.schedule_commands import Schedules
from tfmq.broker.timers import Timers
from tfmq.broker.topic_admin import FIXED, TopicChanges
from tfmq.broker.topics import Topic, Topics, describe_topic, state_of, why_stopped
from tfmq.broker.transaction_commands import Transactions
from tfmq.config import DEFAULT, Config
from tfmq.errors import Busy
from tfmq.protocol.commands import DescribeTopic, LeaseProducerIds, Locate
from tfmq.settings import TOPIC_KEYS
from tfmq.transaction.coordinator import TransactionHandler
from tfmq.transaction.store import JournalTransactionStore

log = logging.getLogger("tfmq.broker")

READS_AT_ONCE: Final = 3
CHORES_AT_ONCE: Final = 2
"""Workers for reads and for topic changes. The server has more workers, for fsyncs and segment rolls."""


class House:
    """All components of the broker.

    `startup` sets the attributes from `lock` on, which need the disk.
    """

    lock: Lock
    node: str
    forcer: Forcer
    catalog: Catalog
    delay: Delay
    transactions: Transactions

    def __init__(
        self,
        config: Config,
        disk: Disk,
        clock: Clock,
        run: Run,
        randomness: Randomness,
        begin_force: Begin | None = None,
    ) -> None:
        self.config, self.disk, self.clock, self.randomness = config, disk, clock, randomness
        self.data = config.server.data
        self.meta = join(self.data, "meta")
        self.limits: dict[str, int] = dict(config.limits)
        """Shared with the components as one mutable mapping, so that a changed limit takes effect everywhere."""
        self.timers = Timers(clock)
        self.full_disk = FullDiskLog(self.timers)
        self.quotas = Quotas(self.limits)
        self.jobs = 0
        self.started = clock.monotonic()
        self.open = False
        self.starting = True
        """No turns run yet: worker jobs, and what would complete in a later turn, run immediately."""
        self.strangers: list[str] = []
        self.begin_force = None if begin_force is None else partial(self._begin, begin_force)
        self._run = run
        self._stopped: Callable[[], None] | None = None

    def join(self) -> None:
        """Create the components that need the catalog."""
        self.reads = Lane(self.run, READS_AT_ONCE)
        self.chores = Lane(self.run, CHORES_AT_ONCE)
        self.topics = Topics(self.catalog.register)
        self.leases = Leases(self.catalog, self.clock)
        self.folders = Folders(
            disk=self.disk,
            data=self.data,
            clock=self.clock,
            options=self.log_options,
            producers=self.producers,
            partition=self._partition,
        )
        self.changes = TopicChanges(
            topics=self.topics,
            catalog=self.catalog,
            leases=self.leases,
            folders=self.folders,
            run=self.chores.run,
            limits=self.limits,
            partitions_default=lambda name, own: self.settings(name, own)["topics.partitions"],
            auto_create=lambda: self.config.topics.auto_create,
            gone=self._gone,
            resumed=self._resumed,
            made=self._made,
            apply=self.apply_settings,
            fixed=self.fixed_settings,
        )
        self.writes = Writes(
            partition=self.topics.partition,
            quotas=self.quotas,
            record_bytes_max=self.limits["message_bytes"] + self.limits["attribute_bytes"] + HEADER_SIZE,
            run=self.reads.run,
            now_ms=self.clock.wall_ms,
            lease=partial(self.leases.take, 1),
        )
        self._join_readers()

    def _join_readers(self) -> None:
        """Create the components that need topics: fetches, groups, apply target, schedules."""
        self.polls = Polls(self.limits, topics=self.topics, timers=self.timers, reads=self.reads)
        self.locks = OffsetLocks()
        self.offsets = Offsets(
            self.catalog, self.topics, self.reads.run, self.limits["group_offsets"], self.locks
        )
        self.groups = Groups(
            catalog=self.catalog,
            offsets=self.offsets,
            topics=self.topics,
            timers=self.timers,
            randomness=self.randomness,
            limits=self.limits,
        )
        self.group_offsets = GroupOffsets(self.groups, self.offsets, self.timers)
        self.offset_effects = OffsetEffects(self.catalog)
        self.destination = BrokerDestination(
            disk=self.disk,
            data=self.data,
            topics=self.topics,
            catalog=self.catalog,
            writes=self.writes,
            offset_effects=self.offset_effects,
            locks=self.locks,
            group_offsets=self.group_offsets,
        )
        self.retention = Retention(topics=self.topics, timers=self.timers, clock=self.clock)
        self.schedules = Schedules(
            catalog=self.catalog,
            destination=self.destination,
            topics=self.topics,
            leases=self.leases,
            timers=self.timers,
            clock=self.clock,
            run=self.chores.run,
            limits=self.limits,
        )

    def _made(self, topic: Topic) -> None:
        self.schedules.topic_made(topic)
        self.groups.topic_changed(topic.name)
        self.polls.topic_changed(topic)

    def _gone(self, incarnation: int) -> None:
        self.groups.topic_changed(self.catalog.register.topics[incarnation].name)
        self.transactions.handler.topic_gone(incarnation)
        self.delay.queue.topic_gone(incarnation)

    def _resumed(self, log_id: int) -> None:
        self.transactions.handler.resumed(log_id)
        self.delay.queue.resumed(log_id)
        self.schedules.resumed(log_id)

    def join_transactions(self, store: JournalTransactionStore) -> None:
        """Create the components that need the transaction journal."""
        handler = TransactionHandler(
            store,
            self.destination,
            timers=self.timers,
            clock=self.clock,
            run=self.run,
            limits=self.limits,
            settings=self.transaction_settings,
        )
        self.transactions = Transactions(
            handler=handler,
            store=store,
            delay=self.delay,
            destination=self.destination,
            topics=self.topics,
            writes=self.writes,
            quotas=self.quotas,
            clock=self.clock,
        )

    @property
    def transaction_settings(self) -> Mapping[str, Any]:
        """The settings `transaction.*`, without the prefix."""
        prefix = "transaction."
        return {
            key.removeprefix(prefix): value
            for key, value in self.config.values.items()
            if key.startswith(prefix)
        }

    def log_options(self, name: str, number: int, own: Mapping[str, Any]) -> LogOptions:
        """Return the log options for one partition of a topic. `own` are the settings of the topic."""
        values = self.settings(name, own)
        archive = values["retention.action"] == "archive"
        return LogOptions(
            segment_bytes=values["log.segment_bytes"],
            segment_seconds=self._segment_seconds(name, own, values),
            flush_messages=values["flush.messages"],
            flush_seconds=values["flush.seconds"],
            retention_seconds=values["retention.seconds"],
            retention_bytes=values["retention.bytes"],
            retention_action="archive" if archive else "delete",
            archive_folder=self.folders.archive_folder(name, number) if archive else None,
            state_bytes=values["log.state_bytes"],
            verify=values["log.verify"],
        )

    def _segment_seconds(self, name: str, own: Mapping[str, Any], values: Mapping[str, Any]) -> float:
        # The default applies only if segments are deleted by age. Otherwise closing them early gains nothing, and each
        # segment costs an open file descriptor. An explicit setting always applies.
        key = "log.segment_seconds"
        was_set = key in own or key in self.config.topic.get(name, {}) or key in self.config.origins
        return float(values[key]) if was_set or values["retention.seconds"] else 0

    def settings(self, name: str, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return every setting for one topic.

        Precedence: the topic's section of the configuration, the topic's own settings, the broker's settings.
        """
        return {**self.config.values, **own, **self.config.topic.get(name, {})}

    def reload(self, config: Config) -> None:
        """Use another configuration. Only the keys that `tfmq.config.reloaded` allows may differ."""
        self.config = config
        self.limits.update(config.limits)
        self.quotas.set_limits(self.limits)
        for topic in self.topics.all():
            self.apply_settings(topic)

    def apply_settings(self, topic: Topic, *, has_archives: bool = False) -> None:
        """Apply the current settings of the topic to its logs.

        Missing archive folders are created in a worker first, unless the topic `has_archives` already.
        """
        for partition in topic.partitions:
            if isinstance(partition, Partition):
                options = self.log_options(topic.name, partition.number, topic.settings)
                if options == partition.log.options:
                    continue
                if has_archives or options.archive_folder is None:
                    partition.set_options(options)
                else:
                    self._apply_with_archive(topic, partition, options.archive_folder)

    def _apply_with_archive(self, topic: Topic, partition: Partition, folder: str) -> None:
        def made(result: Any, error: BaseException | None) -> None:
            if error is not None:
                log.error(
                    "the settings of %s-%d stay as they were, its archive cannot be made: %s",
                    partition.name, partition.number, error,
                )  # fmt: skip
            elif not partition.gone:
                # Read the settings again: they may have changed while the folder was created.
                partition.set_options(self.log_options(topic.name, partition.number, topic.settings))

        self.chores.run(partial(self.folders.make_archive, folder), made)

    def fixed_settings(self, name: str) -> dict[str, str]:
        """Return the settings that the configuration fixes for a topic, each with its origin.

        They override its own.
        """
        return {
            key: self.config.origins.get(f'topic."{name}".{key}', "configuration")
            for key in self.config.topic.get(name, {})
        }

    def effective_settings(self, topic: Topic) -> dict[str, list[Any]]:
        """Return the effective settings of a topic: key -> [value, origin]."""
        values, fixed = self.settings(topic.name, topic.settings), self.fixed_settings(topic.name)
        found = {}
        for key in TOPIC_KEYS:
            origin = "topic" if key in topic.settings else self.config.origins.get(key, DEFAULT)
            if key != FIXED:
                found[key] = [values[key], fixed.get(key, origin)]
        return found

    def producers(self) -> Producers:
        """Create the producer state for one log."""
        return Producers(
            remembered=self.limits["batches_remembered"],
            streams_max=self.limits["producers_per_partition"],
            idle_ms=self.limits["producer_idle_seconds"] * 1000,
            leased_ms=self.catalog.register.leased_ms,
        )

    def _partition(self, topic: TopicRow, opened: Opened) -> Partition:
        return Partition(
            topic.name,
            topic.incarnation,
            opened.number,
            opened.log,
            opened.producers,
            force=self.want,
            run=self.run,
            timers=self.timers,
            full_disk=self.full_disk,
            append_bytes_max=self.limits["append_bytes"],
        )

    # Turns

    def run(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Run `work` in a worker, and count it, so that a stop can wait for its end."""
        self.jobs += 1

        def ended(result: Any, error: BaseException | None) -> None:
            self.jobs -= 1
            done(result, error)

        (run_at_once if self.starting else self._run)(work, ended)

    def _begin(self, begin: Begin, file: File, landed: Landed) -> Flight | None:
        """Start an fsync without a worker.

        Returns None during startup, when no completion could be received.
        """
        return None if self.starting else begin(file, landed)

    def want(self, wanted: Forceable, offset: int, waiter: Waiter) -> None:
        """Request an fsync.

        It starts at the end of the turn, so that one covers all logs written in the turn.
        """
        self.forcer.want(wanted, offset, waiter, start=False)

    def turn_ended(self) -> None:
        """Write what is queued and start an fsync.

        Repeat until no component has work that can be done now.
        """
        busy = True
        while busy:
            busy = self.transactions.handler.write()
            busy = self.delay.queue.write() or busy
            busy = self.offset_effects.write() or busy
            busy = self.groups.balance() or busy
            busy = self.catalog.write() or busy
            busy = self.writes.write() or busy
            if not busy:
                self.forcer.start()
                busy = self._due()
        if self._stopped is not None:
            self._try_stop()

    def _due(self) -> bool:
        return (
            self.catalog.due
            or self.writes.due
            or self.transactions.handler.due
            or self.delay.queue.due
            or self.offset_effects.due
            or self.groups.due
        )

    def require_open(self) -> None:
        if not self.open:
            raise Busy(STOPPING)

    # Commands that involve several components

    def locate(self, request: Locate, reply: Reply, session: Session) -> None:
        partition = self.topics.partition(request.topic, request.incarnation, request.partition)
        log_offsets.locate(request, partition, partial(self.reads.run, who=session), reply)

    def describe(self, request: DescribeTopic, reply: Reply, session: Session) -> None:
        """Answer DESCRIBE_TOPIC."""
        # In a worker, because the age of a partition's first record is read from the disk.
        topic = self.topics.topic(request.topic)

        def described(result: Any, error: BaseException | None) -> None:
            if error is not None:
                reply.error(not_done(error))
            else:
                reply.ok({**result, "effective": effective})

        effective = self.effective_settings(topic)
        self.reads.run(partial(describe_topic, topic), described, session)

    def lease(self, request: LeaseProducerIds, reply: Reply) -> None:
        def taken(first: int, error: BaseException | None) -> None:
            if error is not None:
                reply.error(not_done(error))
            else:
                reply.ok(first, request.count)

        self.leases.take(request.count, taken)

    def status(self) -> dict[str, Any]:
        """Return the fields of STATUS.

        Counters start with the broker and count storage, not traffic.
        """
        return status(self)

    # Stopping

    def stop(self, done: Callable[[], None]) -> None:
        """Stop all components.

        `done()` is called when the logs are closed; see `RequestHandler.stop`.
        """
        self.open = False
        self.folders.stopping = True
        self._stopped = done
        self.polls.close()
        self.groups.stop()
        self.retention.stop()
        self.schedules.stop()
        self.transactions.stop()
        self.delay.stop()
        self.turn_ended()

    def _try_stop(self) -> None:
        """Close the logs once no worker job, queue or fsync is pending."""
        if self.jobs or not self.forcer.idle or self._stopped is None:
            return
        if not self.transactions.stopped or not self.delay.stopped:
            return
        done, self._stopped = self._stopped, None
        self._run(self._close_all, partial(self._closed, done))

    def _close_all(self) -> None:
        for partition in self.topics.partitions():
            close(partition.log, f"{partition.name}-{partition.number}")
        close(self.delay.partition.log, "the arrivals of delayed messages")
        close(self.delay, "the buckets of delayed messages")
        close(self.catalog.log, "the catalog")
        close(self.transactions.store, "the transaction journal")

    def _closed(self, done: Callable[[], None], result: Any, error: BaseException | None) -> None:
        self.forcer.close()
        self.lock.release()
        if error is not None:
            raise error
        done()


def run_at_once(work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
    """Run `work` immediately in this thread; a `Run` without workers."""
    try:
        result = work()
    except Exception as error:
        done(None, error)
    else:
        done(result, None)


def close(closing: Log | Delay | JournalTransactionStore, name: str) -> None:
    """Close a log cleanly. If that fails, log the error: the next start recovers the log."""
    try:
        closing.close()
    except (OSError, JournalError, MemoryError) as error:
        log.error("%s could not be closed cleanly: %s", name, str(error) or "out of memory")


def status(house: House) -> dict[str, Any]:
    """Return the fields of STATUS.

    Nothing is read from the disk; counters start with the broker.
    """
    partitions = list(house.topics.partitions())
    stopped = [
        {"topic": topic.name, "partition": number, "reason": why_stopped(each)}
        for topic in house.topics.all()
        for number, each in enumerate(topic.partitions)
        if state_of(each) == "stopped"
    ]
    return {
        "node": house.node,
        "uptime_seconds": int(house.clock.monotonic() - house.started),
        "data": house.data,
        "topics": len(house.topics),
        "partitions": house.topics.partition_count(),
        "groups": len(house.catalog.register.groups),
        "messages": sum(each.log.count for each in partitions),
        "bytes": sum(each.log.size_bytes for each in partitions),
        "stopped": stopped,
        "damaged": [{"topic": each.name, "partition": each.number} for each in partitions if each.log.damage],
        "unknown_folders": house.strangers,
        "catalog": house.catalog.log.stopped or "open",
        "free_bytes": house.disk.free_space(house.data),
        "parked_fetches": house.polls.count,
        "pending_bytes": house.quotas.bytes,
        "forces": house.forcer.forces,
        "transactions": house.transactions.handler.status(),
        "delay": house.delay.status(),
        "schedules": house.schedules.status(),
    }
