"""Consumer core: fetching, delivery, acks and commits, as operations that any driver runs.

Work for which no caller waits (partition discovery, heartbeats, commits, release of partitions) is done by background
tasks. If a partition cannot be read further (lost offsets, damage, a deleted topic), the error is raised by the next
call that requests messages, after all messages that were read before the failure are delivered. A rebalance raises no
error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from typing import Any, Final, Literal

from tfmq.client.connection.connection import ClientConnection, ConnectionState, PendingRequest
from tfmq.client.connection.requests import wait_for_reply
from tfmq.client.consumer.assignment import Assignment
from tfmq.client.consumer.fetcher import Fetcher, FetchSession, PartitionFetchState
from tfmq.client.consumer.membership import Membership, ZooKeeperMembership
from tfmq.client.consumer.message import UNKNOWN, ReadPosition, ReceivedMessage, partition_of
from tfmq.client.consumer.offset_commit import GroupOffsets
from tfmq.client.consumer.options import ConsumerOptions, seek_position
from tfmq.client.consumer.positions import Positions
from tfmq.client.consumer.rebalance import Rebalance
from tfmq.client.operation import NEVER, BackgroundTasks, Event, Executor, Operation, Task, Wait, run_inline
from tfmq.errors import BadRequest, Closed, StorageStopped, TimedOut, UnknownPartition, UnknownTopic
from tfmq.hooks import trace_context_source
from tfmq.offsets.storage import PartitionName
from tfmq.protocol.commands import BY_LATEST, BY_OFFSET, Locate

POLL_CHECKS_MAX: Final = 3
"""Maximum number of checks for messages in a `poll` whose timeout has passed. The `poll` ends earlier if neither data
nor an assignment has arrived between two checks."""
HEARTBEAT_CHECK_SECONDS: Final = 0.1
"""While the last heartbeat is too old, nothing is delivered. Waiting callers check the heartbeat at this interval."""


class ConsumerCore:
    """State and operations of one consumer, shared by the blocking, asyncio and Twisted APIs.

    The driver runs the background tasks in `tasks` together with its timers. It also passes these functions: `run`
    executes a call to an offset storage, which may block; `wake_driver` makes the driver run due tasks while no caller
    waits; `flush` makes it send requests now; `complete_event` completes an event from any thread.
    """

    def __init__(
        self,
        options: ConsumerOptions,
        link: ClientConnection,
        run: Executor = run_inline,
        *,
        wake_driver: Callable[[], None],
        flush: Callable[[], None],
        complete_event: Callable[[Event], None] = Event.complete,
    ) -> None:
        self.wake_driver = wake_driver
        self.options = options
        self.link = link
        link.trace_context = trace_context_source(options.hooks)
        self.closed = False
        self.message_count = 0
        self.stop_requested = Event()
        self.suspended: set[PartitionName] = set()
        """Partitions not delivered for now: their handlers have UNACKED_BYTES_MAX unacked bytes, or a transaction was
        rolled back and the committed offsets are being read (see `rewind_to_committed` in `external_offsets.py`)."""
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
                else ZooKeeperMembership(options, link, self._assignment_changed, complete_event)
            )
            self.membership = member
            self.offsets = GroupOffsets(options, link, self.positions, member, run)
            group = self.rebalance = Rebalance(options, link, self.positions, member, self.offsets)
            self.positions.ack_trackers.on_handlers_idle = self.rebalance.wake
            self.rebalance.on_callback_returned = lambda: complete_event(self._change_event)
        self.assignment = Assignment(
            options, link, self.fetcher, self.positions, group, self._notify_change, self.fetch_session.cancel
        )
        self.fetch_session.on_partition_count = self.assignment.partition_count_seen
        if group is not None:
            self.offsets.on_fenced = self.assignment.partitions_fenced
        self._change_event = Event()
        self._background_tasks: dict[Callable[[], Operation[None]], Task | None] = {self.assignment.run: None}
        """Operations that run in the background, each with its task (None: not started). They end only by an error."""
        if self.membership is not None:
            self._background_tasks |= {self.membership.run: None, self.rebalance.run: None}
            if options.commits == "auto":
                self._background_tasks[self.offsets.commit_periodically] = None
        self._task_failures: list[Exception] = []

    # Delivery

    def next_batch(self) -> Operation[list[ReceivedMessage] | None]:
        """Wait for messages and return them; None after `stop`. The caller, a loop, must set `positions.current` to
        each message before its body handles the message."""
        self._ack_delivered()
        while (yield from self._wait_for_batch(NEVER)):
            if self.options.commits != "before":
                self.message_count += len(self.positions.ready_messages())
                return self.positions.hand_out()
            if found := (yield from self._commit_before_delivery(1)):
                return found
        return None

    def poll(self, seconds: float | None, count: int) -> Operation[list[ReceivedMessage]]:
        """Return up to `count` messages as soon as any can be delivered, or [] after `seconds`."""
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

    def start_columns(self, columns: Iterable[str] | None) -> None:
        """Deliver Arrow record batches from now on, until `end_columns`. Raises: BadRequest if the consumer has an
        option that does not permit this, ImportError without pyarrow."""
        from tfmq.client.consumer.columns import column_decoder_factory  # pyarrow is an optional dependency

        options = self.options
        if options.tags is not None or options.where is not None or options.codec is not None:
            raise BadRequest("arrow_batches delivers the columns as they are: leave out tags, where and codec.")
        if options.commits == "before":
            raise BadRequest('arrow_batches does not commit before delivery: use commits="auto" or "manual".')
        create = column_decoder_factory(columns)
        self.check_tasks()
        self._ack_delivered()
        self._rewind_to_delivered()
        self.fetcher.set_column_decoders(create)

    def end_columns(self) -> None:
        """Deliver messages instead of record batches from now on, from the first one after the last delivered batch."""
        if not self.closed:
            self._rewind_to_delivered()
        self.fetcher.set_column_decoders(None)

    def next_columns(self, seconds: float | None) -> Operation[Any]:
        """Return the next record batch; None after `stop`, or if none arrives in `seconds` (None: no time limit)."""
        self._ack_delivered()
        until = NEVER if seconds is None else self.link.now() + seconds
        if not (yield from self._wait_for_batch(until)):
            return None
        [message] = self.positions.take_ready_messages(1)
        rows: Any = message.payload
        self.message_count += rows.num_rows
        return rows

    def _ack_delivered(self) -> None:
        """Ack the delivered messages, because the caller requests more. Wake the rebalance to release partitions."""
        self.positions.ack_trackers.raise_if_run_active()
        self.positions.ack_delivered()
        if self.membership is not None:
            self.rebalance.poll_called()

    def _wait_for_batch(self, until: float) -> Operation[bool]:
        """Wait for a batch until `stop` or the time `until`. Return whether a batch is ready. Even if `until` is
        reached already, the driver reads from the connection at least once before the result is False."""
        checks = 0
        while True:
            changed = self._change_event.done
            self.check_tasks()
            if self.membership is not None and self.rebalance.has_pending_callbacks:
                yield from self.rebalance.run_callbacks()
                continue
            if self.positions.stopped or self.prepare_batch():
                return not self.positions.stopped
            remaining = until - self.link.now()
            if remaining <= 0 and checks and (checks >= POLL_CHECKS_MAX or not changed):
                return False
            checks += 1
            yield self.wait_for_change(max(0.0, remaining))

    def prepare_batch(self) -> bool:
        """If no batch is ready for delivery, decode the next one. Return whether a batch is ready. While the last
        heartbeat is too old, only return False. Raises the failure of a stopped partition if no batch is ready."""
        self._change_event = Event() if self._change_event.done else self._change_event
        if self.heartbeat_overdue:
            return False
        # A poll() in another thread may have made a batch ready and delivered only a part of it.
        if self.positions.ready_messages() or self._decode_next_batch():
            return True
        if (failure := self.fetcher.next_failure()) is not None:
            raise failure
        return False

    @property
    def heartbeat_overdue(self) -> bool:
        """Whether the last heartbeat is so old that other members may own the partitions that this consumer reads."""
        return self.membership is not None and bool(self.fetcher.partitions) and not self.membership.may_deliver()

    def wait_for_change(self, seconds: float, *events: Event) -> Wait:
        """Return a `Wait` of up to `seconds`. It ends earlier if something has changed since the last `prepare_batch`,
        after `stop`, or if one of `events` is completed."""
        retry = self.fetcher.next_retry()
        if retry is not None:
            seconds = min(seconds, max(0.0, retry - self.link.now()))
        if self.heartbeat_overdue:
            seconds = min(seconds, HEARTBEAT_CHECK_SECONDS)
        return Wait((self._change_event, self.stop_requested, *events), None if seconds == NEVER else seconds)

    def _decode_next_batch(self) -> bool:
        """Decode fetch responses until one has messages, and make these ready to deliver. Return False if no buffered
        response has messages."""
        if self.fetcher.fetchable:
            self.fetch_session.send_fetches()  # So the broker prepares the next response while this one is decoded.
        skipped = self.suspended if self.membership is None else self.suspended | self.rebalance.unannounced
        try:
            while (batch := self.fetch_session.next_batch(skipped)) is not None:
                self.positions.set_ready_batch(batch)
                if batch.messages:
                    break
        except BaseException:  # For example Ctrl-C while decoding: fetch again all messages that were not delivered.
            self._rewind_to_delivered()
            raise
        if self.fetcher.fetchable:
            self.fetch_session.send_fetches()
        return batch is not None

    def _commit_before_delivery(self, count: int) -> Operation[list[ReceivedMessage]]:
        """Commit up to `count` ready messages and return them; [] if another member owns their partition by now. If the
        commit raises an error, the messages count as undelivered, and are delivered later."""
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
        """Deliver nothing more. The caller must also complete the event `stop_requested`, through its driver."""
        self.positions.stop()

    # Positions

    def set_position(self, name: PartitionName, position: ReadPosition) -> None:
        self.suspended.discard(name)
        self.fetch_session.cancel(name)
        self.positions.seek(name, position)
        self.fetcher.seek(name, position)

    def redeliver_from(self, message: ReceivedMessage) -> None:
        """Redeliver `message` and all later messages of its partition. If the read position is at `message` or before
        it, do nothing, because these messages will be delivered anyway."""
        name = partition_of(message)
        if name in self.fetcher.partitions and not self.will_redeliver(message):
            self.set_position(name, ReadPosition(message.offset, message.ordinal, message.origin.epoch))

    def will_redeliver(self, message: ReceivedMessage) -> bool:
        name = partition_of(message)
        return name in self.positions and self.positions.delivered_position(name).offset <= message.offset

    def _rewind_to_delivered(self) -> None:
        """Discard all prefetched messages, and fetch again after the last delivered message of each partition."""
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
        """Set the read position in one partition. If the partition had stopped with an error, it is read again.

        One argument gives the new position. `offset`: the record at or before this offset; `ordinal`: the message with
        this number, from 0 on; `time`: the first message appended at this time or later; `to`: the earliest offset of
        the log, or the latest, which is its end.
        """
        start = seek_position(offset, ordinal, time, to)
        feed = yield from self._require_partition(topic, partition)
        name = feed.name
        position = yield from self.assignment.locate(name, feed.incarnation, start)
        # If the partition was revoked and assigned again meanwhile, it has another `feed` and a new position.
        if self.fetcher.partitions.get(name) is not feed:
            raise UnknownPartition(f"{name} was assigned to another member of the group meanwhile.")
        self.set_position(name, position)

    def pause(self, topic: str, partition: int) -> Operation[None]:
        """Deliver no messages of the partition until `resume`."""
        name = (yield from self._require_partition(topic, partition)).name
        if (ready := self.positions.ready) is not None and ready.name == name:
            self.positions.drop_ready_batch()
            self.fetch_session.cancel(name)
            self.fetcher.seek(name, self.positions.delivered_position(name))
        self.fetcher.pause(name)

    def resume(self, topic: str, partition: int) -> Operation[None]:
        """Deliver messages of the partition again."""
        feed = yield from self._require_partition(topic, partition)
        self.fetcher.resume(feed.name)
        self._change_event.complete()

    def _require_partition(self, topic: str, partition: int) -> Operation[PartitionFetchState]:
        """Return a partition's fetch state. Raises UnknownPartition if this consumer does not read the partition;
        TimedOut if the assignment is not known in time."""
        name = PartitionName(topic, partition)
        yield from self._wait_for_partitions(self.link.now() + self.options.timeout)
        feed = self.fetcher.partitions.get(name)
        if feed is None:
            raise UnknownPartition(f"This consumer does not read {name}, or it does not exist yet.")
        return feed

    def _wait_for_partitions(self, until: float) -> Operation[None]:
        while True:
            self.check_tasks()
            if self.assignment.discovered:
                return
            if self.link.now() >= until:
                raise TimedOut("The broker did not return the partitions in time.")
            self._change_event = Event() if self._change_event.done else self._change_event
            yield Wait((self._change_event,), until - self.link.now())

    # Queries

    def lag(self) -> Operation[Lag]:
        """Return the number of undelivered messages; `partitions` of the result has the number of each partition."""
        yield from self._wait_for_partitions(self.link.now() + self.options.timeout)
        # All requests are sent at once: for the end of each log, and for each position whose ordinal must be found out.
        fetcher, positions = self.fetcher, self.positions
        delivered = {name: positions.delivered_position(name) for name in fetcher.partitions}
        end_requests = {name: self._locate(name, BY_LATEST, 0) for name in delivered}
        ordinal_requests = {
            n: self._locate(n, BY_OFFSET, each.offset) for n, each in delivered.items() if each.ordinal == UNKNOWN
        }
        yield from wait_for_reply(self.link, *end_requests.values(), *ordinal_requests.values())
        lags = {}
        for name, position in delivered.items():
            try:
                ordinal = ordinal_requests[name].result().ordinal if name in ordinal_requests else position.ordinal
                end = end_requests[name].result().end_ordinal
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
        feed = yield from self._require_partition(topic, partition)
        return self.positions.delivered_position(feed.name).offset

    def committed(self, topic: str, partition: int) -> Operation[int | None]:
        """Return the offset that the group has committed for the partition; None if it has committed none in the
        topic's present incarnation."""
        self.require_membership()
        feed = yield from self._require_partition(topic, partition)
        stored = (yield from self.offsets.read([feed.name])).get(feed.name)
        return stored.offset if stored is not None and stored.incarnation == feed.incarnation else None

    def stats(self) -> dict[str, Any]:
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

        With `message`: only the messages of its partition up to and including `message`.

        The offsets are durable when the call returns. Raises Fenced, with the names of the partitions, if some are now
        assigned to another member; the offsets of all others are committed, and the consumer continues with these.
        """
        self.require_membership()
        self.positions.ack_trackers.check_commit_method("commit")
        redeliver_lost_partitions(self, message)
        yield from self.offsets.commit(message, self.link.now() + self.options.timeout)
        self.rebalance.wake()

    def commit_acked(self) -> Operation[Collection[PartitionName]]:
        until = self.link.now() + self.options.timeout
        return self.offsets.commit_positions(self.positions.uncommitted_positions, until)

    def require_membership(self) -> Membership:
        """Return the group membership. Raises Closed if the consumer is closed, BadRequest if it has no group."""
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
        self._task_failures.append(error)
        self._change_event.complete()

    def check_tasks(self) -> None:
        """Raise the failure of a background task. If no task has failed, start the tasks that are not running. Raises
        Closed if the consumer or its connection is closed."""
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

    # Fork and shutdown

    def reset_after_fork(self) -> None:
        """Reset the state in a forked child. The child reads from the same positions, and joins the group as a new
        member."""
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
        """Commit the offsets of acked messages (not in manual mode) and leave the group. A second call does nothing.

        With `ack_delivered` all delivered messages are acked first. Raises the error that prevented the commit. But if
        the commit of a partition is refused because another member owns the partition by now, this is only logged.
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


def redeliver_lost_partitions(core: ConsumerCore, message: ReceivedMessage | None = None) -> None:
    """Redeliver the unacked messages of partitions that this consumer has lost and that were assigned to it again.

    Called before `Fenced` reports the loss to the user. The user then discards all uncommitted work, so this consumer
    must deliver the messages again. With `message`, only its partition is redelivered. Raises BadRequest if `message`
    is no message of a consumer.
    """
    if message is not None and not isinstance(message, ReceivedMessage):
        raise BadRequest(
            f"commit() takes a message that this consumer delivered, or no argument for all of them; not {message!r}."
        )
    for name in core.positions.reassigned_after_loss(message):
        rewind = core.set_position if name in core.fetcher.partitions else core.positions.seek
        rewind(name, core.positions.acked_position(name))


class Lag(int):
    """Number of messages not delivered yet: the value is the total, `partitions` has the number of each partition.

    If the lag of a partition is unknown, its number is -1, and the total counts it as 0. The lag is unknown if the
    position is in a damaged range, or if the log is not open.
    """

    partitions: dict[PartitionName, int]

    def __new__(cls, partitions: dict[PartitionName, int]) -> Lag:
        lag = super().__new__(cls, sum(max(0, each) for each in partitions.values()))
        lag.partitions = partitions
        return lag
