"""The broker: creates, connects and stops all components, and writes what they have queued at the end of each turn.

A turn is the work after one poll: the server handles the requests that it received, and the timers that are due, and
then calls `Broker.end_turn`. The reply to STATUS is made here, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from journal.clock import Clock
from journal.disk import Disk, Lock
from journal.errors import JournalError
from journal.linux_aio import StartFsync
from journal.log.log import Log
from tfmq.broker.admission import BoundedExecutor
from tfmq.broker.apply_target import BrokerApplyTarget
from tfmq.broker.catalog import Catalog, IdAllocator
from tfmq.broker.delay_commands import DelayCommands
from tfmq.broker.fetch import FetchHandler
from tfmq.broker.groups.coordinator import GroupCoordinator
from tfmq.broker.groups.offset_commands import OffsetCommands
from tfmq.broker.groups.offsets import GroupOffsetStore, OffsetLocks, TransactionOffsetQueue
from tfmq.broker.partition_dirs import PartitionDirs
from tfmq.broker.produce import ProduceHandler
from tfmq.broker.producer_state import ProducerState
from tfmq.broker.reply import Pause, Randomness, Reply, Run, Session, not_done_error, reply_when_done
from tfmq.broker.retention import Retention
from tfmq.broker.runtime import Replicas, Runtime
from tfmq.broker.schedule_commands import ScheduleCommands
from tfmq.broker.topic_admin import TopicAdmin
from tfmq.broker.topics import Topic, Topics, describe_topic, stop_reason
from tfmq.broker.transaction_commands import TransactionCommands
from tfmq.broker.verification import SegmentVerifier
from tfmq.config import Config
from tfmq.protocol.commands import DescribeTopic, LeaseProducerIds
from tfmq.transaction.coordinator import TransactionCoordinator
from tfmq.transaction.store import TransactionStore

log = logging.getLogger("tfmq.broker")

READ_WORKERS: Final = 3
TOPIC_WORKERS: Final = 2
"""Maximum numbers of workers for reads and for topic changes. The server has more, for fsyncs and segment rolls."""


TROUBLES_MAX: Final = 10
"""Maximum number of stopped partitions that `find_troubles` names."""


class Broker(Runtime):
    """The broker with all its components. The attributes declared in the class are set when a start opens the files."""

    lock: Lock
    node: str
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
        pause: Pause | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        super().__init__(config, disk, clock, run, randomness, begin_force, pause, replicas)
        self.started = clock.monotonic()
        self.is_open = False
        self.unknown_folders: list[str] = []
        self._stopped: Callable[[], None] | None = None

    def create_components(self) -> None:
        """Create the components that need the open catalog. Called by a start."""
        self.read_executor = BoundedExecutor(self.run, READ_WORKERS)
        self.topic_executor = BoundedExecutor(self.run, TOPIC_WORKERS)
        self.topics = Topics(self.catalog.state)
        self.id_allocator = IdAllocator(self.catalog, self.clock)
        self.partition_dirs = PartitionDirs(self, self.new_producer_state)
        self.topic_admin = TopicAdmin(
            self,
            topics=self.topics,
            catalog=self.catalog,
            leases=self.id_allocator,
            folders=self.partition_dirs,
            run=self.topic_executor.run,
            deleted=self._topic_deleted,
            resumed=self._partition_resumed,
            created=self._topic_created,
        )
        self.produce_handler = ProduceHandler(self, self.topics, self.id_allocator, self.read_executor.run)
        self.fetches = FetchHandler(self, self.topics, self.read_executor)
        self.offset_locks = OffsetLocks()
        self.group_offset_store = GroupOffsetStore(
            self.catalog, self.topics, self.read_executor.run, self.limits["group_offsets"], self.offset_locks
        )
        self.group_coordinator = GroupCoordinator(self, self.catalog, self.group_offset_store, self.topics)
        self.offset_commands = OffsetCommands(self.group_coordinator, self.group_offset_store, self.timers)
        self.transaction_offsets = TransactionOffsetQueue(self.catalog, self.ready_marker("offsets"))
        self.apply_target = BrokerApplyTarget(
            self,
            topics=self.topics,
            catalog=self.catalog,
            writes=self.produce_handler,
            offset_effects=self.transaction_offsets,
            locks=self.offset_locks,
            group_offsets=self.offset_commands,
        )
        self.retention = Retention(topics=self.topics, timers=self.timers, clock=self.clock)
        self.segment_verifier = SegmentVerifier(self, self.topics)
        self.schedule_commands = ScheduleCommands(
            self,
            catalog=self.catalog,
            apply_target=self.apply_target,
            topics=self.topics,
            leases=self.id_allocator,
            run=self.topic_executor.run,
        )

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
        """Create the components that need the open transaction journal. Called by a start."""
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
            apply_target=self.apply_target,
            topics=self.topics,
            writes=self.produce_handler,
            runtime=self,
        )
        self._writes: dict[str, Callable[[], object]] = {
            "transactions": handler.write,
            "delay": self.delay_commands.queue.write,
            "offsets": self.transaction_offsets.write,
            "groups": self.group_coordinator.balance,
            "catalog": self.catalog.write,
            "partitions": self.produce_handler.write,
        }
        """Component -> the function that writes what it has queued. `end_turn` calls the functions in this order."""

    @property
    def transaction_settings(self) -> Mapping[str, Any]:
        """Name without the prefix `transaction.` -> value, for each of the settings `transaction.*`."""
        prefix = "transaction."
        return {key.removeprefix(prefix): value for key, value in self.config.values.items() if key.startswith(prefix)}

    def reload(self, config: Config) -> None:
        """Use `config` from now on. It differs from `self.config` only in keys that `merge_reload` permits."""
        self.config = config
        self.limits.update(config.limits)
        self.backpressure.set_limits(self.limits)
        for topic in self.topics.values():
            self.topic_admin.apply_settings(topic)

    def end_parked_fetches(self, user: str) -> None:
        """Send an empty reply to each fetch of the user that waits, if the broker is open."""
        if self.is_open:
            self.fetches.end_parked(user)

    def new_producer_state(self) -> ProducerState:
        return ProducerState(
            remembered=self.limits["batches_remembered"],
            entries_max=self.limits["producers_per_partition"],
            idle_ms=self.limits["producer_idle_seconds"] * 1000,
            leased_ms=self.catalog.state.lease_time_ms,
        )

    def end_turn(self) -> None:
        """Write what components have queued and start the fsyncs, until no component can do more work now."""
        ready, delay = self._ready, self.delay_commands.queue
        if delay.is_delivering:
            ready.add("delay")
        to_check = not self.is_open
        while ready or to_check or self._fsync_requested:
            if not self.is_open:
                # During a start or stop, the `write` of a component also checks whether its work is complete. So every
                # `write` is called, not only that of ready components, until no component is marked as ready.
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

    def describe_topic(self, request: DescribeTopic, reply: Reply, session: Session) -> None:
        # In a worker, because the time of a partition's first record is read from the disk.
        topic = self.topics.topic(request.topic)
        effective = self.topic_admin.effective_settings(topic)
        done = reply_when_done(reply, lambda result: ({**result, "effective": effective},), not_done_error)
        findings = self.segment_verifier.findings_of(topic)
        self.read_executor.run(partial(describe_topic, topic, findings), done, session)

    def lease_producer_ids(self, request: LeaseProducerIds, reply: Reply) -> None:
        done = reply_when_done(reply, lambda first: (first, request.count), not_done_error)
        self.id_allocator.allocate(request.count, done)

    def status(self) -> dict[str, Any]:
        """Return the broker's part of the reply to STATUS, without reading files. Counters begin at 0 at each start."""
        partitions = list(self.topics.partitions())
        stopped = [
            {"topic": topic, "partition": number, "reason": reason}
            for topic, number, reason in self.stopped_partitions()
        ]
        return {
            "node": self.node,
            "uptime_seconds": int(self.clock.monotonic() - self.started),
            "data": self.data,
            "topics": len(self.topics),
            "partitions": self.topics.partition_count(),
            "groups": len(self.catalog.state.groups),
            "messages": sum(each.log.count for each in partitions),
            "bytes": sum(each.log.size_bytes for each in partitions),
            "stopped": stopped,
            "damaged": [{"topic": each.name, "partition": each.number} for each in partitions if each.log.damage],
            "unknown_folders": self.unknown_folders,
            "catalog": self.catalog.log.stopped or "open",
            "free_bytes": self.free_bytes(),
            "parked_fetches": self.fetches.parked_count,
            "pending_bytes": self.backpressure.pending_bytes,
            "forces": self.forcer.forces,
            "transactions": self.transaction_commands.coordinator.status(),
            "delay": self.delay_commands.status(),
            "schedules": self.schedule_commands.status(),
            "verification": self.segment_verifier.status(),
        }

    def find_troubles(self) -> list[dict[str, str]]:
        """Return why the open broker does not do its whole work, each reason as a word and a sentence; [] if it does.

        At most TROUBLES_MAX stopped partitions are named one by one.
        """
        found = []
        if self.full_disk.is_full:
            found.append({"reason": "disk_full", "detail": self.full_disk.description})
        own = {
            "The catalog": self.catalog.log.stopped,
            "The transaction journal": self.transaction_commands.store.stopped,
            "The log of delayed messages": self.delay_commands.partition.log.stopped,
        }
        found += [
            {"reason": "log_stopped", "detail": f"{name} takes no messages: {reason}"}
            for name, reason in own.items()
            if reason is not None
        ]
        stopped = self.stopped_partitions()
        found += [
            {"reason": "log_stopped", "detail": f"{topic}-{number} takes no messages: {reason}"}
            for topic, number, reason in stopped[:TROUBLES_MAX]
        ]
        if len(stopped) > TROUBLES_MAX:
            found.append({"reason": "log_stopped", "detail": f"{len(stopped) - TROUBLES_MAX} more partitions likewise"})
        return found

    def stopped_partitions(self) -> list[tuple[str, int, str]]:
        """Return topic, number and reason of each partition that takes no messages."""
        return [
            (topic.name, number, stop_reason(each))
            for topic in self.topics.values()
            for number, each in enumerate(topic.partitions)
            if isinstance(each, str) or each.log.stopped is not None
        ]

    def free_bytes(self) -> int | None:
        """Return the free space on the disk of the data folder; None if the system cannot tell it."""
        try:
            return self.disk.free_space(self.data)
        except OSError:  # for example because the data folder was deleted: the other figures are still known
            return None

    # Stop of the broker

    def stop(self, done: Callable[[], None]) -> None:
        """Reject new requests, complete the accepted ones, close the logs, then call `done()`."""
        self.is_open = False
        self.partition_dirs.is_stopping = True
        self._stopped = done
        self.fetches.close()
        self.group_coordinator.stop()
        self.retention.stop()
        self.segment_verifier.stop()
        self.schedule_commands.scheduler.timer.stop()
        self.transaction_commands.stop()
        self.delay_commands.stop()
        self.end_turn()

    def _stop_if_idle(self) -> None:
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


def close_cleanly(closing: Log | DelayCommands | TransactionStore, name: str) -> None:
    """Close a log or a store. An error is only logged, because the next start recovers the log or store."""
    try:
        closing.close()
    except (OSError, JournalError, MemoryError) as error:
        log.error("%s could not be closed cleanly: %s", name, str(error) or "out of memory")
