"""Consumer core: fetching, delivery, acks and commits, as operations that any driver runs.

`ConsumerCore.next_batch` and `poll` deliver messages; a call acks what the call before delivered. Partition
discovery, heartbeats, offset commits and the release of revoked partitions run as background tasks. A failure
that ends a partition (lost offsets, damage, a deleted topic) is raised by the next of these calls, after all
messages that were read before the failure. A rebalance is not a failure: the consumer continues with its
remaining partitions.

The module also has the consumer's statistics and lag, and the redelivery after a rollback or a lost
partition.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Any, Final, Literal

from tfmq.client.connection.connection import NEVER, ClientConnection, ConnectionState, PendingRequest
from tfmq.client.connection.requests import wait_for_reply
from tfmq.client.consumer.assignment import Assignment, read_position_of
from tfmq.client.consumer.fetcher import Fetcher, FetchSession, PartitionFetchState
from tfmq.client.consumer.membership import Membership, ZooKeeperMembership
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.consumer.offset_commit import GroupOffsets
from tfmq.client.consumer.options import ConsumerOptions, seek_position
from tfmq.client.consumer.positions import UNKNOWN, Positions, ReadPosition, partition_of
from tfmq.client.consumer.rebalance import Rebalance
from tfmq.client.operation import BackgroundTasks, Event, Executor, Operation, Task, Wait, run_inline
from tfmq.errors import BadRequest, Closed, StorageStopped, TfmqError, TimedOut, UnknownPartition, UnknownTopic
from tfmq.offsets.storage import PartitionName, StoredOffset
from tfmq.protocol.commands import BY_LATEST, BY_OFFSET, Locate

log = logging.getLogger("tfmq.consumer")

POLL_CHECKS_MAX: Final = 3
"""Checks of a `poll` after its timeout, while news arrive: partitions, offsets, messages."""
HEARTBEAT_CHECK_SECONDS: Final = 0.1
"""Interval for checking an overdue heartbeat; until one succeeds, nothing is delivered."""


class ConsumerCore:
    """State and operations of one consumer, shared by the blocking, asyncio and Twisted APIs.

    The driver runs `tasks` with its timers. `run` executes calls of offset storages, which may block.
    `wake_driver` wakes the driver for due tasks when no caller waits, `flush` makes the driver send requests
    now, and `raise_flag` sets an event from another thread.
    """

    def __init__(
        self,
        options: ConsumerOptions,
        link: ClientConnection,
        run: Executor = run_inline,
        *,
        wake_driver: Callable[[], None],
        flush: Callable[[], None],
        raise_flag: Callable[[Event], None] = Event.complete,
    ) -> None:
        self.wake_driver = wake_driver
        self.options = options
        self.link = link
        self.closed = False
        self.message_count = 0
        self.stop_requested = Event()
        self.suspended: set[PartitionName] = set()
        """Partitions withheld from delivery: handlers have enough, or a rewind is pending."""
        self.tasks = BackgroundTasks(link.now)
        self.positions = Positions(manual=options.commits == "manual")
        self.fetcher = Fetcher(options)
        self.fetch_session = FetchSession(options, link, self.fetcher, arrived=self._notify_change, flush=flush)
        self.membership: Membership | None = None
        group = None
        if options.group is not None:
            member = (
                Membership(options, link, self._assignment_changed)
                if options.coordinator is None
                else ZooKeeperMembership(options, link, self._assignment_changed, raise_flag)
            )
            self.membership = member
            self.offsets = GroupOffsets(options, link, self.positions, member, run)
            group = self.rebalance = Rebalance(options, link, self.positions, member, self.offsets)
            self.positions.ack_trackers.on_handlers_idle = self.rebalance.wake
            self.rebalance.on_callback_returned = lambda: raise_flag(self._change_event)
        self.assignment = Assignment(
            options, link, self.fetcher, self.positions, group, self._notify_change, self.fetch_session.cancel
        )
        self.fetch_session.on_partition_count = self.assignment.partition_count_seen
        if group is not None:
            self.offsets.on_fenced = self.assignment.partitions_fenced
        self._change_event = Event()
        self._background_tasks: dict[Callable[[], Operation[None]], Task | None] = {self.assignment.run: None}
        """None of the operations ever ends by itself."""
        if self.membership is not None:
            self._background_tasks |= {self.membership.run: None, self.rebalance.run: None}
            if options.commits == "auto":
                self._background_tasks[self.offsets.commit_periodically] = None
        self._task_failures: list[Exception] = []

    # Delivery

    def next_batch(self) -> Operation[list[ReceivedMessage] | None]:
        """Return messages for a loop, which sets `positions.current` to each, or None after `stop`."""
        self._ack_delivered()
        while (yield from self._wait_for_batch(NEVER)):
            if self.options.commits != "before":
                self.message_count += len(self.positions.ready_messages())
                return self.positions.hand_out()
            if found := (yield from self._commit_before_delivery(1)):
                return found
        return None

    def poll(self, seconds: float | None, count: int) -> Operation[list[ReceivedMessage]]:
        """Return up to `count` messages as soon as there are any, or [] after `seconds`."""
        if count < 1:
            raise BadRequest(f"max_messages={count} is not possible; it must be at least 1.")
        until = NEVER if seconds is None else self.link.now() + seconds
        self._ack_delivered()
        while (yield from self._wait_for_batch(until)):
            if self.options.commits == "before":
                found = yield from self._commit_before_delivery(count)
            else:
                found = self.positions.take_ready_messages(count)
                while len(found) < count and self._decode_next_batch():
                    found += self.positions.take_ready_messages(count - len(found))
                self.message_count += len(found)
            if found:
                return found
        return []

    def _ack_delivered(self) -> None:
        """Ack what was delivered, because the caller asks for more, and wake what waits for that."""
        self.positions.ack_trackers.raise_if_run_active()
        self.positions.ack_delivered()
        if self.membership is not None:
            self.rebalance.poll_called()

    def _wait_for_batch(self, until: float) -> Operation[bool]:
        """Wait for a batch with messages.

        Return False after `stop`, or when `until` passed without one. The connection is checked at least
        once, also when `until` is already over.
        """
        looks = 0
        while True:
            came = self._change_event.done
            self._check_tasks()
            if self.membership is not None and self.rebalance.has_pending_callbacks:
                yield from self.rebalance.run_callbacks()
                continue
            if self.positions.stopped or self.prepare_batch():
                return not self.positions.stopped
            remaining = until - self.link.now()
            if remaining <= 0 and looks and (looks >= POLL_CHECKS_MAX or not came):
                return False
            looks += 1
            yield self.wait_for_change(max(0.0, remaining))

    def prepare_batch(self) -> bool:
        """Return whether a batch is ready; decode the next fetch response if none is.

        Raises the failure of a partition or of a background task.
        """
        self._check_tasks()
        self._change_event = Event() if self._change_event.done else self._change_event
        if self.heartbeat_overdue:
            return False
        # A batch may be left over by a poll() in another thread.
        if self.positions.ready_messages() or self._decode_next_batch():
            return True
        if (failure := self.fetcher.next_failure() or self.fetcher.all_stopped_failure()) is not None:
            raise failure
        return False

    @property
    def heartbeat_overdue(self) -> bool:
        """Whether the heartbeat is so old that other members may own the partitions read here."""
        return self.membership is not None and bool(self.fetcher.partitions) and not self.membership.may_deliver()

    def wait_for_change(self, seconds: float, *flags: Event) -> Wait:
        """Return an effect that waits for news since `prepare_batch`, `stop`, or one of `flags`."""
        retry = self.fetcher.next_retry()
        if retry is not None:
            seconds = min(seconds, max(0.0, retry - self.link.now()))
        if self.heartbeat_overdue:
            seconds = min(seconds, HEARTBEAT_CHECK_SECONDS)
        return Wait((self._change_event, self.stop_requested, *flags), None if seconds == NEVER else seconds)

    def _decode_next_batch(self) -> bool:
        """Decode fetch responses until a batch has messages. Return False if there is none."""
        self.fetch_session.send_fetches()  # the broker works on the next response while this one is decoded
        held = self.suspended if self.membership is None else self.suspended | self.rebalance.unannounced
        try:
            while (batch := self.fetch_session.next_batch(held)) is not None:
                self.positions.set_ready_batch(batch)
                if batch.messages:
                    break
        except BaseException:  # For example Ctrl-C during decoding: read again what was not delivered.
            self._rewind_to_delivered()
            raise
        self.fetch_session.send_fetches()
        return batch is not None

    def _commit_before_delivery(self, count: int) -> Operation[list[ReceivedMessage]]:
        """Commit up to `count` ready messages and return them; after a failure deliver them later."""
        messages = self.positions.take_ready_messages(count)
        if not messages:
            return []
        name = partition_of(first := messages[0])
        self.positions.ack_delivered()
        try:
            refused = yield from self.commit_acked()
        except BaseException:
            if name in self.fetcher.partitions:
                self.set_position(name, ReadPosition(first.offset, first.ordinal, first.origin.epoch))
            raise
        if name in refused:
            return []
        self.message_count += len(messages)
        return messages

    def stop(self) -> None:
        """Deliver nothing more. The caller sets `stop_requested` through the driver."""
        self.positions.stop()

    # Positions

    def set_position(self, name: PartitionName, position: ReadPosition) -> None:
        """Continue reading and delivering the partition at `position`."""
        self.suspended.discard(name)
        self.fetch_session.cancel(name)
        self.positions.seek(name, position)
        self.fetcher.seek(name, position)

    def redeliver_from(self, message: ReceivedMessage) -> None:
        """Redeliver `message` and those after it, unless its partition is already rewound that far."""
        name = partition_of(message)
        if name in self.fetcher.partitions and not self.will_redeliver(message):
            self.set_position(name, ReadPosition(message.offset, message.ordinal, message.origin.epoch))

    def will_redeliver(self, message: ReceivedMessage) -> bool:
        """Return whether a rewind or seek causes `message` to be delivered again."""
        name = partition_of(message)
        return name in self.positions and self.positions.delivered_position(name).offset <= message.offset

    def _rewind_to_delivered(self) -> None:
        """Drop what was prefetched: continue after the last delivered message of each partition."""
        self.positions.drop_ready_batch()
        for name, feed in self.fetcher.partitions.items():
            if feed.failure is None:
                self.fetcher.seek(name, self.positions.delivered_position(name))

    def seek(
        self,
        topic: str,
        partition: int,
        *,
        offset: int | None = None,
        ordinal: int | None = None,
        time: datetime | None = None,
        to: Literal["earliest", "latest"] | None = None,
    ) -> Operation[None]:
        """Set the read position in one partition.

        A partition that had stopped with an error is read again.

        The new position is the record at or before `offset`, the `ordinal`-th message, the first message
        appended at or after `time`, or an end of the log.
        """
        name, start = PartitionName(topic, partition), seek_position(offset, ordinal, time, to)
        feed = yield from self._require_partition(name)
        place = yield from self.assignment.locate(name, feed.incarnation, start)
        # also if the partition was revoked and assigned again: it has another position now
        if self.fetcher.partitions.get(name) is not feed:
            raise UnknownPartition(f"{name} was assigned to another member of the group meanwhile.")
        self.set_position(name, place)

    def pause(self, topic: str, partition: int) -> Operation[None]:
        """Deliver no messages of the partition until `resume`."""
        name = PartitionName(topic, partition)
        yield from self._require_partition(name)
        if (ready := self.positions.ready) is not None and ready.name == name:
            self.positions.drop_ready_batch()
            self.fetch_session.cancel(name)
            self.fetcher.seek(name, self.positions.delivered_position(name))
        self.fetcher.pause(name)

    def resume(self, topic: str, partition: int) -> Operation[None]:
        """Deliver messages of the partition again."""
        name = PartitionName(topic, partition)
        yield from self._require_partition(name)
        self.fetcher.resume(name)
        self._change_event.complete()

    def _require_partition(self, name: PartitionName) -> Operation[PartitionFetchState]:
        """Return the fetch state of a partition.

        Raises UnknownPartition if this consumer does not read it once the partitions are known, TimedOut.
        """
        yield from self._wait_for_partitions(self.link.now() + self.options.timeout)
        feed = self.fetcher.partitions.get(name)
        if feed is None:
            raise UnknownPartition(f"This consumer does not read {name}, or it does not exist yet.")
        return feed

    def _wait_for_partitions(self, until: float) -> Operation[None]:
        """Wait until the partitions are known. Raises TimedOut at `until`."""
        while True:
            self._check_tasks()
            if self.assignment.discovered:
                return
            if self.link.now() >= until:
                raise TimedOut("The broker did not return the partitions in time.")
            self._change_event = Event() if self._change_event.done else self._change_event
            yield Wait((self._change_event,), until - self.link.now())

    # Queries

    def lag(self) -> Operation[Lag]:
        """Return the number of undelivered messages, with `.partitions` for each partition."""
        yield from self._wait_for_partitions(self.link.now() + self.options.timeout)
        # All requests are sent at once: the ends of all logs, and the ordinals of positions that have none.
        fetcher, positions = self.fetcher, self.positions
        places = {name: positions.delivered_position(name) for name in fetcher.partitions}
        ends = {name: self._locate(name, BY_LATEST, 0) for name in places}
        here = {n: self._locate(n, BY_OFFSET, each.offset) for n, each in places.items() if each.ordinal == UNKNOWN}
        yield from wait_for_reply(self.link, *ends.values(), *here.values())
        lags = {}
        for name, place in places.items():
            try:
                ordinal = here[name].result().ordinal if name in here else place.ordinal
                end = ends[name].result().end_ordinal
            except UnknownTopic:  # Partitions of deleted topics are left out.
                continue
            except StorageStopped:
                ordinal = end = UNKNOWN
            lags[name] = UNKNOWN if ordinal == UNKNOWN else max(0, end - ordinal)
        return Lag(lags)

    def _locate(self, name: PartitionName, by: int, value: int) -> PendingRequest:
        request = Locate(name.topic, self.fetcher.partitions[name].incarnation, name.partition, by, value)
        return self.link.send_request(request, seconds=self.options.timeout)

    def position(self, topic: str, partition: int) -> Operation[int]:
        """Return the offset after the last delivered message of the partition."""
        name = PartitionName(topic, partition)
        yield from self._require_partition(name)
        return self.positions.delivered_position(name).offset

    def committed(self, topic: str, partition: int) -> Operation[int | None]:
        """Return the offset that the group has committed for the partition, or None."""
        name = PartitionName(topic, partition)
        self.require_membership()
        feed = yield from self._require_partition(name)
        stored = (yield from self.offsets.read([name])).get(name)
        return stored.offset if stored is not None and stored.incarnation == feed.incarnation else None

    def stats(self) -> dict[str, Any]:
        """Return counters since the start, and the state of the membership and the partitions."""
        positions, fetcher, member = self.positions, self.fetcher, self.membership
        group: Mapping[str, Any] = {"generation": 0} if member is None else member.stats()
        return {
            "messages": self.message_count,
            "bytes": fetcher.bytes_read,
            "fetches": fetcher.fetch_count,
            "connections": self.link.connection_count,
            "commits": 0 if member is None else self.offsets.commit_count,
            **group,
            "skipped": fetcher.skipped_count,
            "skipped_ranges": [tuple(each) for each in fetcher.skipped],
            "partitions": {
                str(name): {
                    "offset": positions.delivered_position(name).offset,
                    "processed_offset": positions.acked_position(name).offset,
                    "saved_offset": positions.committed[name],
                    "waiting_bytes": feed.buffered_bytes,
                    "paused": feed.paused,
                    "stopped": None if feed.failure is None else str(feed.failure),
                }
                for name, feed in fetcher.partitions.items()
            },
        }

    # Commits

    def commit(self, message: ReceivedMessage[Any] | None = None) -> Operation[None]:
        """Commit all delivered messages, the current one included.

        With `message`: only those up to and including it.

        The offsets are durable when it returns. Raises Fenced, with their names, if some of the partitions
        are now assigned to another member; the offsets of all others are committed, and the consumer
        continues with them.
        """
        self.require_membership()
        self.positions.ack_trackers.check_commit_method("commit")
        redeliver_lost_partitions(self, message)
        yield from self.offsets.commit(message, self.link.now() + self.options.timeout)
        self.rebalance.wake()

    def commit_acked(self) -> Operation[Collection[PartitionName]]:
        """Commit what is acked. Return the fenced partitions; raises what the store raises."""
        until = self.link.now() + self.options.timeout
        return self.offsets.commit_positions(self.positions.uncommitted_positions, until)

    def require_membership(self) -> Membership:
        """Return the group membership. Raises Closed, and BadRequest for a consumer without a group."""
        if self.closed:
            raise Closed("The consumer is closed; make a new one.")
        if self.membership is None:
            raise BadRequest("Without a group nothing is saved: give the consumer group=.")
        return self.membership

    # Background tasks

    def _notify_change(self) -> None:
        self._change_event.complete()

    def _assignment_changed(self) -> None:
        self.assignment.assignment_changed()
        self._change_event.complete()

    def task_failed(self, error: Exception) -> None:
        """Record the failure of a background task; the next call raises it."""
        self._task_failures.append(error)
        self._change_event.complete()

    def _check_tasks(self) -> None:
        """Raise the failure of a background task, or start the tasks that do not run."""
        if self.closed or self.link.state == ConnectionState.CLOSED:
            raise Closed("The consumer is closed; make a new one.")
        if not self._task_failures:
            for operation, task in self._background_tasks.items():
                if task is None or task.done:
                    self._background_tasks[operation] = self.tasks.start(operation(), self.task_failed)
                    if self.membership is not None:
                        self.wake_driver()
        if self._task_failures:
            raise self._task_failures.pop(0)

    # Shutdown

    def reset_after_fork(self) -> None:
        """Reset the state in a forked child: same positions, own reader; a group is joined again."""
        self.fetch_session.clear()
        self.tasks.cancel()
        self._background_tasks = dict.fromkeys(self._background_tasks)
        self._change_event = Event()
        self.fetcher.reset_after_fork()
        self._rewind_to_delivered()
        if self.membership is not None:
            self.assignment.reset_after_fork()
            self.offsets.reset_after_fork()
            self.rebalance.reset_after_fork()
            self.membership.reset_after_fork()

    def close(self, ack_delivered: bool) -> Operation[None]:
        """Commit what is acked and leave the group. A second call does nothing.

        With `ack_delivered` everything delivered is acked first. Raises what prevented the commit; partitions
        that belong to another member by now are only logged.
        """
        if self.closed:
            return
        until = self.link.now() + self.options.timeout
        try:
            if ack_delivered:
                self.positions.ack_delivered()
            self.positions.drop_ready_batch()
            membership = self.membership
            if membership is not None and membership.joined and self.link.state != ConnectionState.CLOSED:
                yield from self.rebalance.run_final_callbacks()
                if self.options.commits != "manual":
                    uncommitted = self.positions.uncommitted_positions
                    yield from self.offsets.commit_positions(uncommitted, until)
                yield from membership.leave(until)
        finally:
            self.closed = True
            self.tasks.cancel()
            self.fetch_session.clear()
            if self.options.storage is not None:
                self.options.storage.close()


RETRY_SECONDS: Final = 1.0
"""Pause before the group's offsets are requested again."""


def redeliver_lost_partitions(core: ConsumerCore, message: ReceivedMessage | None = None) -> None:
    """Redeliver partitions that were lost and assigned again.

    Called before the loss is reported to the user, after which the user discards all uncommitted work; so this consumer
    must deliver it again. `message` limits this to its partition. Raises BadRequest if `message` is no
    message of a consumer.
    """
    if message is not None and not isinstance(message, ReceivedMessage):
        raise BadRequest(
            f"commit() takes a message that this consumer delivered, or no argument for all of them; not {message!r}."
        )
    for name in core.positions.reassigned_after_loss(message):
        forget = core.set_position if name in core.fetcher.partitions else core.positions.seek
        forget(name, core.positions.acked_position(name))


def rewind_to_committed(core: ConsumerCore, names: Collection[PartitionName]) -> None:
    """Rewind partitions to their committed offsets after a rolled back transaction.

    Call it under the driver's lock. Partitions assigned to handlers of `run` are left alone, because `run`
    calls the handlers again with the same messages. Nothing of the other partitions is delivered until the
    broker has returned the group's offsets, because another commit may be newer than the last one of this
    consumer. A `seek` in the meantime takes precedence.
    """
    positions = core.positions
    found = [n for n in names if n in core.fetcher.partitions and n not in positions.ack_trackers]
    for name in found:
        offset = positions.committed[name]
        core.set_position(name, positions.start_position(name) if offset is None else ReadPosition(offset))
        core.suspended.add(name)
    if found and not core.closed:
        core.tasks.start(_rewind_when_read(core, found), core.task_failed)
        _wake_waiters(core)


def _rewind_when_read(core: ConsumerCore, names: Collection[PartitionName]) -> Operation[None]:
    """Read the group's offsets and move to those that differ from what this consumer knew."""
    positions = core.positions
    try:
        stored = yield from _read_committed(core, names)
        for name in core.suspended.intersection(names, stored, core.fetcher.partitions):
            row, known = stored[name], positions.committed[name]
            if row.incarnation == positions.incarnations[name] and row.offset != known:
                place = read_position_of(name, row)
                positions.mark_committed({name: place})
                core.set_position(name, place)
    finally:
        core.suspended.difference_update(names)
    _wake_waiters(core)


def _read_committed(
    core: ConsumerCore, names: Collection[PartitionName]
) -> Operation[dict[PartitionName, StoredOffset]]:
    """Read the group's offsets; retry every `RETRY_SECONDS` on retriable errors, with a warning."""
    while True:
        try:
            return (yield from core.offsets.read(names))
        except TfmqError as error:
            if not error.retriable:
                raise
            log.warning("Group %s waits for its offsets: %s", core.options.group, error)
        yield Wait((), RETRY_SECONDS)


def _wake_waiters(core: ConsumerCore) -> None:
    """Send due requests now and wake the callers that wait, in any thread."""
    core.fetch_session.send_fetches()
    core.wake_driver()
    core.rebalance.on_callback_returned()


class Lag(int):
    """Number of messages not delivered yet: the value is the total, `partitions` has the parts.

    A part is -1 if the lag is unknown: the position is in a damaged range, or the log is not open. The total
    counts it as 0.
    """

    partitions: dict[PartitionName, int]

    def __new__(cls, partitions: dict[PartitionName, int]) -> Lag:
        lag = super().__new__(cls, sum(max(0, each) for each in partitions.values()))
        lag.partitions = partitions
        return lag
