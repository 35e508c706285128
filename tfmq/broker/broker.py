"""The broker: creates all components, connects them, runs their turns and stops them.

A turn is the handling of the requests and timers of one poll of the server; `Broker.end_turn` writes what they have
queued. The STATUS reply is made here, too.
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
from journal.fsync import Forcer, FsyncTarget, Waiter
from journal.linux_aio import AioFsync, FsyncCallback, StartFsync
from journal.log.log import Log
from journal.log.segments import LogOptions
from tfmq.broker import log_offsets
from tfmq.broker.admission import Backpressure, BoundedExecutor
from tfmq.broker.apply_target import BrokerApplyTarget
from tfmq.broker.catalog import Catalog, IdAllocator
from tfmq.broker.catalog_state import TopicRow
from tfmq.broker.delay_commands import DelayCommands
from tfmq.broker.fetch import FetchHandler
from tfmq.broker.groups.coordinator import GroupCoordinator
from tfmq.broker.groups.offset_commands import OffsetCommands
from tfmq.broker.groups.offsets import GroupOffsetStore, OffsetLocks, TransactionOffsetQueue
from tfmq.broker.log_offsets import Retention
from tfmq.broker.partition import Partition
from tfmq.broker.partition_dirs import OpenedPartition, PartitionDirs
from tfmq.broker.produce import ProduceHandler
from tfmq.broker.producer_state import ProducerState
from tfmq.broker.reply import Randomness, Reply, Run, Session, not_done_error, reply_when_done
from tfmq.broker.reserve import FullDiskLog
from tfmq.broker.schedule_commands import ScheduleCommands
from tfmq.broker.timers import Timers
from tfmq.broker.topic_admin import CREATION_ONLY_KEY, TopicAdmin
from tfmq.broker.topics import Topic, Topics, describe_topic, partition_state, stop_reason
from tfmq.broker.transaction_commands import TransactionCommands
from tfmq.config import DEFAULT, Config
from tfmq.protocol.commands import DescribeTopic, LeaseProducerIds, Locate
from tfmq.settings_table import TOPIC_KEYS
from tfmq.transaction.coordinator import TransactionCoordinator
from tfmq.transaction.store import TransactionStore

log = logging.getLogger("tfmq.broker")

READ_WORKERS: Final = 3
TOPIC_WORKERS: Final = 2
"""Workers for reads and for topic changes. The server has more workers, for fsyncs and segment rolls."""


class Broker:
    """All components of the broker.

    `tfmq.broker.startup` sets the attributes from `lock` to `transaction_commands`, which need the disk.
    """

    lock: Lock
    node: str
    forcer: Forcer
    catalog: Catalog
    delay_commands: DelayCommands
    transaction_commands: TransactionCommands

    def __init__(
        self,
        config: Config,
        disk: Disk,
        clock: Clock,
        run: Run,
        randomness: Randomness,
        begin_force: StartFsync | None = None,
    ) -> None:
        self.config, self.disk, self.clock, self.randomness = config, disk, clock, randomness
        self.data = config.server.data
        self.meta = join(self.data, "meta")
        self.limits: dict[str, int] = dict(config.limits)
        """Shared with the components as one mutable mapping, so that a changed limit takes effect everywhere."""
        self.timers = Timers(clock)
        self.full_disk = FullDiskLog(self.timers)
        self.backpressure = Backpressure(self.limits)
        self.running_jobs = 0
        self.started = clock.monotonic()
        self.is_open = False
        self.is_starting = True
        """Whether the broker is starting. No turns run then, so worker jobs run at once, in its thread."""
        self.unknown_folders: list[str] = []
        self.begin_force = None if begin_force is None else partial(self._start_fsync, begin_force)
        self._ready: set[str] = set()
        self._fsync_requested = False
        self._run = run
        self._stopped: Callable[[], None] | None = None

    def create_components(self) -> None:
        """Create the components that need the catalog."""
        self.read_executor = BoundedExecutor(self.run, READ_WORKERS)
        self.topic_executor = BoundedExecutor(self.run, TOPIC_WORKERS)
        self.topics = Topics(self.catalog.state)
        self.id_allocator = IdAllocator(self.catalog, self.clock)
        self.partition_dirs = PartitionDirs(
            disk=self.disk,
            data=self.data,
            clock=self.clock,
            options=self.log_options,
            producers=self.new_producer_state,
            partition=self._new_partition,
        )
        self.topic_admin = TopicAdmin(
            topics=self.topics,
            catalog=self.catalog,
            leases=self.id_allocator,
            folders=self.partition_dirs,
            run=self.topic_executor.run,
            limits=self.limits,
            partitions_default=self._partitions_default,
            auto_create=lambda: self.config.topics.auto_create,
            deleted=self._topic_deleted,
            resumed=self._partition_resumed,
            created=self._topic_created,
            apply=self.apply_settings,
            configured=self.configured_settings,
        )
        self.produce_handler = ProduceHandler(
            partition=self.topics.partition,
            quotas=self.backpressure,
            message_bytes_max=self.limits["message_bytes"],
            attribute_bytes_max=self.limits["attribute_bytes"],
            run=self.read_executor.run,
            now_ms=self.clock.wall_ms,
            lease=partial(self.id_allocator.allocate, 1),
            mark_ready=self.ready_marker("partitions"),
        )
        self._create_readers()

    def _create_readers(self) -> None:
        """Create the components that need topics: fetches, groups, apply target, schedules."""
        self.fetches = FetchHandler(
            self.limits, topics=self.topics, timers=self.timers, read_executor=self.read_executor
        )
        self.offset_locks = OffsetLocks()
        self.group_offset_store = GroupOffsetStore(
            self.catalog, self.topics, self.read_executor.run, self.limits["group_offsets"], self.offset_locks
        )
        self.group_coordinator = GroupCoordinator(
            catalog=self.catalog,
            offsets=self.group_offset_store,
            topics=self.topics,
            timers=self.timers,
            randomness=self.randomness,
            limits=self.limits,
            mark_ready=self.ready_marker("groups"),
        )
        self.offset_commands = OffsetCommands(self.group_coordinator, self.group_offset_store, self.timers)
        self.transaction_offsets = TransactionOffsetQueue(self.catalog, self.ready_marker("offsets"))
        self.apply_target = BrokerApplyTarget(
            disk=self.disk,
            data=self.data,
            topics=self.topics,
            catalog=self.catalog,
            writes=self.produce_handler,
            offset_effects=self.transaction_offsets,
            locks=self.offset_locks,
            group_offsets=self.offset_commands,
        )
        self.retention = Retention(topics=self.topics, timers=self.timers, clock=self.clock)
        self.schedule_commands = ScheduleCommands(
            catalog=self.catalog,
            destination=self.apply_target,
            topics=self.topics,
            leases=self.id_allocator,
            timers=self.timers,
            clock=self.clock,
            run=self.topic_executor.run,
            limits=self.limits,
            partitions_default=self._partitions_default,
        )

    def _partitions_default(self, name: str, own: Mapping[str, Any] | None = None) -> int:
        """Return how many partitions a new topic gets. `own` are the topic's own settings."""
        count: int = self.settings(name, own or {})["topics.partitions"]
        return count

    def _topic_created(self, topic: Topic) -> None:
        self.schedule_commands.topic_created(topic)
        self.group_coordinator.topic_changed(topic.name)
        self.fetches.topic_changed(topic)

    def _topic_deleted(self, incarnation: int) -> None:
        self.group_coordinator.topic_changed(self.catalog.state.topics[incarnation].name)
        self.transaction_commands.coordinator.topic_deleted(incarnation)
        self.delay_commands.queue.topic_deleted(incarnation)

    def _partition_resumed(self, log_id: int) -> None:
        self.transaction_commands.coordinator.target_resumed(log_id)
        self.delay_commands.queue.target_resumed(log_id)
        self.schedule_commands.scheduler.partition_resumed(log_id)

    def create_transactions(self, store: TransactionStore) -> None:
        """Create the components that need the transaction journal."""
        handler = TransactionCoordinator(
            store,
            self.apply_target,
            timers=self.timers,
            clock=self.clock,
            run=self.run,
            limits=self.limits,
            settings=self.transaction_settings,
            mark_ready=self.ready_marker("transactions"),
        )
        self.transaction_commands = TransactionCommands(
            handler=handler,
            store=store,
            delay=self.delay_commands,
            destination=self.apply_target,
            topics=self.topics,
            writes=self.produce_handler,
            quotas=self.backpressure,
            clock=self.clock,
        )
        self._writes: dict[str, Callable[[], object]] = {
            "transactions": handler.write,
            "delay": self.delay_commands.queue.write,
            "offsets": self.transaction_offsets.write,
            "groups": self.group_coordinator.balance,
            "catalog": self.catalog.write,
            "partitions": self.produce_handler.write,
        }
        """The functions that write what a component has queued, in the order in which `end_turn` calls them."""

    @property
    def transaction_settings(self) -> Mapping[str, Any]:
        """The settings `transaction.*`, without the prefix."""
        prefix = "transaction."
        return {key.removeprefix(prefix): value for key, value in self.config.values.items() if key.startswith(prefix)}

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
            archive_folder=self.partition_dirs.archive_folder(name, number) if archive else None,
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
        """Use another configuration. Only keys that `tfmq.config.merge_reload` allows may differ."""
        self.config = config
        self.limits.update(config.limits)
        self.backpressure.set_limits(self.limits)
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
                    self._apply_after_archive(topic, partition, options.archive_folder)

    def _apply_after_archive(self, topic: Topic, partition: Partition, folder: str) -> None:
        def made(result: Any, error: BaseException | None) -> None:
            if error is not None:
                log.error(
                    "the settings of %s-%d stay as they were, its archive cannot be made: %s",
                    partition.name, partition.number, error,
                )  # fmt: skip
            elif not partition.deleted:
                # Read the settings again: they may have changed while the folder was created.
                partition.set_options(self.log_options(topic.name, partition.number, topic.settings))

        self.topic_executor.run(partial(self.partition_dirs.create_archive, folder), made)

    def configured_settings(self, name: str) -> dict[str, str]:
        """Return the settings that the configuration fixes for a topic: key -> origin.

        They override the topic's own settings.
        """
        return {
            key: self.config.origins.get(f'topic."{name}".{key}', "configuration")
            for key in self.config.topic.get(name, {})
        }

    def effective_settings(self, topic: Topic) -> dict[str, list[Any]]:
        """Return the effective settings of a topic: key -> [value, origin]."""
        values, fixed = self.settings(topic.name, topic.settings), self.configured_settings(topic.name)
        found = {}
        for key in TOPIC_KEYS:
            origin = "topic" if key in topic.settings else self.config.origins.get(key, DEFAULT)
            if key != CREATION_ONLY_KEY:
                found[key] = [values[key], fixed.get(key, origin)]
        return found

    def new_producer_state(self) -> ProducerState:
        """Create the producer state for one log."""
        return ProducerState(
            remembered=self.limits["batches_remembered"],
            entries_max=self.limits["producers_per_partition"],
            idle_ms=self.limits["producer_idle_seconds"] * 1000,
            leased_ms=self.catalog.state.lease_time_ms,
        )

    def _new_partition(self, topic: TopicRow, opened: OpenedPartition) -> Partition:
        return Partition(
            topic.name,
            topic.incarnation,
            opened.number,
            opened.log,
            opened.producers,
            force=self.request_fsync,
            run=self.run,
            timers=self.timers,
            full_disk=self.full_disk,
            append_bytes_max=self.limits["append_bytes"],
        )

    # Worker jobs, fsyncs, and the end of a turn

    def run(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Run `work` in a worker, and count it, so that `stop` can wait for its end."""
        self.running_jobs += 1

        def ended(result: Any, error: BaseException | None) -> None:
            self.running_jobs -= 1
            done(result, error)

        (run_immediately if self.is_starting else self._run)(work, ended)

    def _start_fsync(self, begin: StartFsync, file: File, completed: FsyncCallback) -> AioFsync | None:
        """Start an fsync of `file` by Linux AIO, without a worker; `completed` gets its result.

        Returns None if a worker has to do the fsync: always during startup, when no completion could be received.
        """
        return None if self.is_starting else begin(file, completed)

    def request_fsync(self, wanted: FsyncTarget, offset: int, waiter: Waiter) -> None:
        """Request an fsync of `wanted` up to `offset`; `waiter` gets its result.

        It starts at the end of the turn, so that one fsync covers all logs written in the turn.
        """
        self.forcer.want(wanted, offset, waiter, start=False)
        self._fsync_requested = True

    def ready_marker(self, component: str) -> Callable[[], None]:
        """Return the function by which a component says that it has something to write in this turn."""
        return partial(self._ready.add, component)

    def end_turn(self) -> None:
        """Write what is queued and start an fsync.

        Repeat until no component has work that can be done now. Only components that are ready are called.
        """
        ready, delay = self._ready, self.delay_commands.queue
        if delay.is_delivering:
            ready.add("delay")
        to_check = not self.is_open
        while ready or to_check or self._fsync_requested:
            if not self.is_open:
                # During a start or stop, a component's write also checks whether all its work is complete. So all are
                # called, and once more if one of them was ready.
                to_check = bool(ready)
                ready.update(self._writes)
            for component, write in self._writes.items():
                if component in ready:
                    ready.remove(component)
                    write()
            if self._fsync_requested and not ready:
                self._fsync_requested = False
                self.forcer.start()
            if delay.is_delivering and delay.due:
                ready.add("delay")
        if self._stopped is not None:
            self._stop_if_idle()

    # Commands that involve several components

    def locate_offset(self, request: Locate, reply: Reply, session: Session) -> None:
        partition = self.topics.partition(request.topic, request.incarnation, request.partition)
        log_offsets.locate(request, partition, partial(self.read_executor.run, caller=session), reply)

    def describe_topic(self, request: DescribeTopic, reply: Reply, session: Session) -> None:
        """Answer DESCRIBE_TOPIC."""
        # In a worker, because the age of a partition's first record is read from the disk.
        topic = self.topics.topic(request.topic)
        effective = self.effective_settings(topic)
        done = reply_when_done(reply, lambda result: ({**result, "effective": effective},), not_done_error)
        self.read_executor.run(partial(describe_topic, topic), done, session)

    def lease_producer_ids(self, request: LeaseProducerIds, reply: Reply) -> None:
        done = reply_when_done(reply, lambda first: (first, request.count), not_done_error)
        self.id_allocator.allocate(request.count, done)

    # Stop of the broker

    def stop(self, done: Callable[[], None]) -> None:
        """Stop all components.

        `done()` is called when the logs are closed; see `RequestHandler.stop`.
        """
        self.is_open = False
        self.partition_dirs.is_stopping = True
        self._stopped = done
        self.fetches.close()
        self.group_coordinator.stop()
        self.retention.stop()
        self.schedule_commands.scheduler.stop()
        self.transaction_commands.stop()
        self.delay_commands.stop()
        self.end_turn()

    def _stop_if_idle(self) -> None:
        """Close the logs once no worker job, queue or fsync is pending."""
        if self.running_jobs or not self.forcer.idle or self._stopped is None:
            return
        if not self.transaction_commands.stopped or not self.delay_commands.stopped:
            return
        done, self._stopped = self._stopped, None
        self._run(self._close_all, partial(self._closed, done))

    def _close_all(self) -> None:
        for partition in self.topics.partitions():
            close_cleanly(partition.log, f"{partition.name}-{partition.number}")
        close_cleanly(self.delay_commands.partition.log, "the arrivals of delayed messages")
        close_cleanly(self.delay_commands, "the buckets of delayed messages")
        close_cleanly(self.catalog.log, "the catalog")
        close_cleanly(self.transaction_commands.store, "the transaction journal")

    def _closed(self, done: Callable[[], None], result: Any, error: BaseException | None) -> None:
        self.forcer.close()
        self.lock.release()
        if error is not None:
            raise error
        done()


def run_immediately(work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
    """Run `work` immediately in this thread; a `Run` without workers."""
    try:
        result = work()
    except Exception as error:
        done(None, error)
    else:
        done(result, None)


def close_cleanly(closing: Log | DelayCommands | TransactionStore, name: str) -> None:
    """Close a log or a store. An error is only logged, because the next start recovers it."""
    try:
        closing.close()
    except (OSError, JournalError, MemoryError) as error:
        log.error("%s could not be closed cleanly: %s", name, str(error) or "out of memory")


def broker_status(broker: Broker) -> dict[str, Any]:
    """Return the fields of the STATUS reply.

    No file is read. Counters, for example of fsyncs, begin at 0 with each start of the broker.
    """
    partitions = list(broker.topics.partitions())
    stopped = [
        {"topic": topic.name, "partition": number, "reason": stop_reason(each)}
        for topic in broker.topics.all()
        for number, each in enumerate(topic.partitions)
        if partition_state(each) == "stopped"
    ]
    return {
        "node": broker.node,
        "uptime_seconds": int(broker.clock.monotonic() - broker.started),
        "data": broker.data,
        "topics": len(broker.topics),
        "partitions": broker.topics.partition_count(),
        "groups": len(broker.catalog.state.groups),
        "messages": sum(each.log.count for each in partitions),
        "bytes": sum(each.log.size_bytes for each in partitions),
        "stopped": stopped,
        "damaged": [{"topic": each.name, "partition": each.number} for each in partitions if each.log.damage],
        "unknown_folders": broker.unknown_folders,
        "catalog": broker.catalog.log.stopped or "open",
        "free_bytes": broker.disk.free_space(broker.data),
        "parked_fetches": broker.fetches.parked_count,
        "pending_bytes": broker.backpressure.pending_bytes,
        "forces": broker.forcer.forces,
        "transactions": broker.transaction_commands.coordinator.status(),
        "delay": broker.delay_commands.status(),
        "schedules": broker.schedule_commands.status(),
    }
