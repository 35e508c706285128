"""The blocking admin client. The asyncio one is in `tfmq.aio`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import tzinfo
from types import TracebackType
from typing import Any

from tfmq.client.admin.admin import AdminCore, PartitionPosition
from tfmq.client.admin.delayed import (
    DelayedCounts,
    DelayedDescription,
    DelayedQuery,
    Rescheduled,
    ScheduleDescription,
    ScheduleRequest,
)
from tfmq.client.admin.models import (
    CommitGroupDescription,
    CommitGroupEnd,
    GroupDescription,
    GroupSummary,
    LocatedPosition,
    PurgeResult,
    TopicDescription,
    TransactionDescription,
    TransactionEnd,
)
from tfmq.client.connection.addresses import describe_client
from tfmq.client.connection.connection import REQUEST_TIMEOUT_SECONDS
from tfmq.client.connection.factory import make_client_parts
from tfmq.client.connection.requests import Topic
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.send.delivery_time import Delay, Moment


class Admin:
    """The operations of the command line, as methods.

        with tfmq.Admin("127.0.0.1:8367") as admin:
            admin.create_topic("orders", partitions=4)
            admin.topic("orders").partitions

    The constructor does not connect. `timeout`: seconds until each reply; `client_id`: the name of this client in
    the broker's log. All methods raise the `TfmqError` of the broker's reply, `ConnectionFailed` if no broker is
    reached, `TimedOut`.
    """

    def __init__(
        self,
        servers: str | Sequence[str] | None = None,
        *,
        timeout: float = REQUEST_TIMEOUT_SECONDS,
        client_id: str | None = None,
    ) -> None:
        _, self._driver, _ = make_client_parts(servers, BlockingDriver, client_id=client_id, operator=True)
        self._operations = AdminCore(self._driver.link, timeout)

    def ping(self) -> int:
        """Return the broker's wall clock, in ms since 1970."""
        return self._driver.run(self._operations.ping())

    def status(self) -> dict[str, Any]:
        """Return the broker's version, uptime, topics, connections, memory, settings and more."""
        return self._driver.run(self._operations.status())

    def topics(self) -> list[Topic]:
        """Return all topics by name: incarnation, partitions with their states, settings."""
        return self._driver.run(self._operations.topics())

    def topic(self, name: str) -> TopicDescription:
        """Return the description of one topic. Raises `UnknownTopic`."""
        return self._driver.run(self._operations.topic(name))

    def create_topic(
        self, name: str, partitions: int | None = None, settings: Mapping[str, Any] | None = None
    ) -> TopicDescription:
        """Create a topic. Raises `TopicExists`.

        `partitions` None: the broker's setting `topics.partitions`.

        If the connection is lost before the reply: `ConnectionFailed` with the outcome "unknown". It is not repeated,
        because `TopicExists` would not tell who made the topic; look whether it is there with `topic`.
        """
        return self._driver.run(self._operations.create_topic(name, partitions, settings))

    def grow_topic(self, name: str, partitions: int) -> int:
        """Raise the number of partitions to `partitions`; keys may move to other ones.

        Returns the number.
        """
        return self._driver.run(self._operations.grow_topic(name, partitions))

    def set_topic(self, name: str, settings: Mapping[str, Any]) -> TopicDescription:
        """Change the topic's own settings, at once and permanently; None restores the server's value.

        Raises `UnknownTopic`, `BadRequest` for an unknown setting or an invalid value, `NotAllowed` if the server's
        configuration sets it for the topic, which takes precedence.
        """
        return self._driver.run(self._operations.set_topic(name, settings))

    def delete_topic(self, name: str) -> bool:
        """Delete the topic with all its messages. Raises `UnknownTopic`.

        Returns False if another client deleted it at the same time.
        """
        return self._driver.run(self._operations.delete_topic(name))

    def resume(self, topic: str, partition: int) -> str:
        """Resume a partition that was stopped by a disk failure. Returns its state."""
        return self._driver.run(self._operations.resume(topic, partition))

    def truncate_before(self, topic: str, partition: int, offset: int) -> int:
        """Remove the messages before `offset` of one partition, block by block, never more than was asked. Returns the
        first offset that is left. Raises `OffsetOutOfRange` for an offset after the end. `purge` also moves groups.
        """
        return self._driver.run(self._operations.truncate_before(topic, partition, offset))

    def purge(
        self, topic: str, partition: int | None = None, before: PartitionPosition = "latest"
    ) -> PurgeResult:
        """Remove the messages before a position, of one partition or of all.

        Messages are removed by block, never more than requested. An offset or an `Ordinal` needs a partition; after its
        end it is rejected with `OffsetOutOfRange`, a time in the future (of the broker) with `BadRequest`. Groups
        whose next message is removed continue at the first remaining one, unless they have a live member: those are in
        `left` of the result.
        """
        return self._driver.run(self._operations.purge(topic, partition, before))

    def locate(self, topic: str, partition: int, place: PartitionPosition) -> LocatedPosition:
        """Return the position of "earliest", "latest", a datetime (append time) or an `Ordinal`.

        For an offset: the message at or before it.
        """
        return self._driver.run(self._operations.locate(topic, partition, place))

    def groups(self) -> list[GroupSummary]:
        """Return all groups, by name."""
        return self._driver.run(self._operations.groups())

    def group(self, name: str) -> GroupDescription:
        """Return a group's members and their partitions, offsets and lag; empty for an unused group."""
        return self._driver.run(self._operations.group(name))

    def reset_group(
        self,
        name: str,
        topic: str,
        place: PartitionPosition,
        partition: int | None = None,
        *,
        create: bool = False,
    ) -> dict[int, int]:
        """Put a group to `place` in one partition or all of a topic. Returns the new offset of each partition. An
        offset, and an `Ordinal`, belongs to one partition; after its end it is refused with `OffsetOutOfRange`. With
        `create` a group that is not there is made.

        An offset or an `Ordinal` needs a partition. `create` creates a group that does not exist.

        Raises `NotAllowed` while the group has a live member, and for a group that does not exist.
        """
        return self._driver.run(self._operations.reset_group(name, topic, place, partition, create))

    def delete_group(self, name: str) -> bool:
        """Delete a group with all its offsets. Returns whether it existed.

        Raises `NotAllowed` while the group has a live member.
        """
        return self._driver.run(self._operations.delete_group(name))

    def transactions(
        self,
        states: Sequence[str] | None = None,
        *,
        group: str | None = None,
        after: int = 0,
        limit: int | None = None,
    ) -> list[TransactionDescription]:
        """Return unfinished transactions in the order of their begin, after epoch `after`.

        `states` None: those that need somebody: prepared, applying, ended by an operator; others are "open" and
        the like. `group`: only those of one producer group. `limit`: at most so many; None: all, however many. Raises
        `BadRequest` for a state or limit that is none.
        """
        return self._driver.run(self._operations.transactions(states, group, after, limit))

    def transaction(self, xid: str, epoch: int = 0) -> TransactionDescription:
        """Return one transaction, live or ended; `epoch` 0: the latest of that xid.

        A transaction that the broker does not have gets the state "unknown".
        """
        return self._driver.run(self._operations.transaction(xid, epoch))

    def commit_transaction(
        self, xid: str, epoch: int = 0, *, heuristic: bool = True, force: bool = False
    ) -> TransactionEnd:
        """Commit a prepared transaction by hand: a heuristic outcome, which its owner gets later.

        `heuristic` False: in its owner's name, without a heuristic outcome. `epoch` 0: the latest of that xid. The
        outcome is kept until `forget_transaction`.

        A transaction that lost messages to damage of the transaction journal is rejected (`Damaged`); with `force`,
        which needs `heuristic`, its remaining messages are committed, and `lost` is the number of lost ones.

        Raises `UnknownTransaction`, `TransactionState` if it is not prepared, `TransactionRolledBack`,
        `HeuristicOutcome` if another operator ended it before.
        """
        return self._driver.run(self._operations.commit_transaction(xid, epoch, heuristic, force))

    def rollback_transaction(self, xid: str, epoch: int = 0, *, heuristic: bool = True) -> TransactionEnd:
        """Roll back a transaction by hand, like `commit_transaction`.

        Raises `TransactionCommitted` too.
        """
        return self._driver.run(self._operations.rollback_transaction(xid, epoch, heuristic))

    def forget_transaction(self, xid: str, epoch: int = 0) -> bool:
        """Discard the outcome of a transaction that an operator ended. Returns whether there was one.

        Call it after the transaction's owner has got the outcome.
        """
        return self._driver.run(self._operations.forget_transaction(xid, epoch))

    def commit_groups(self) -> list[CommitGroupDescription]:
        """Return all commit groups by name, with their last sequence and their prepared members."""
        return self._driver.run(self._operations.commit_groups())

    def commit_group(
        self,
        name: str,
        sequence: int,
        run: str,
        transactions: Sequence[tuple[str, int]],
        rows: int,
        *,
        other_total: bool = False,
    ) -> CommitGroupEnd:
        """Commit prepared members atomically, as `sequence` of the commit group.

        `transactions`: (xid, epoch) of each member. The same sequence again gets the first reply; a different total of
        `rows` is accepted only with `other_total`. Other members with a sequence up to it are rolled back.

        Raises `GroupStale`, `GroupFenced`, `GroupIncomplete`.
        """
        operation = self._operations.commit_group(name, sequence, run, transactions, rows, other_total)
        return self._driver.run(operation)

    def abort_commit_group(self, name: str, sequence: int, run: str) -> str:
        """Roll back the members of one run for one sequence, and reject later requests of that run.

        Returns "aborted", or "committed" if the sequence was committed before and nothing was changed.
        """
        return self._driver.run(self._operations.abort_commit_group(name, sequence, run))

    def forget_commit_group(self, name: str) -> bool:
        """Discard the last sequence of a commit group, so that it can restart.

        Returns whether it had one.
        """
        return self._driver.run(self._operations.forget_commit_group(name))

    def delayed(
        self,
        topic: str | None = None,
        *,
        partition: int | None = None,
        key: str | bytes | None = None,
        first: Moment | None = None,
        end: Moment | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> list[DelayedDescription]:
        """Return pending delayed messages in the order of delivery, without payloads.

        `topic`, `partition`, `key`: only messages with these · `first`, `end`: only messages due from `first` on and
        before `end` (aware datetimes, or seconds since 1970) · `after`: only messages after this handle · `limit`: the
        maximum number; None: all.
        """
        asked = DelayedQuery(topic, partition, key, first, end)
        return self._driver.run(self._operations.delayed(asked, after, limit))

    def delayed_histogram(self, edges: Sequence[Moment], topic: str | None = None) -> DelayedCounts:
        """Count the messages due between each of `edges` and the next, and all.

        Counts messages of one topic, or of all topics.

        `edges` are aware datetimes, or seconds since 1970. Raises `BadRequest` for edges that do not ascend.
        """
        return self._driver.run(self._operations.delayed_histogram(edges, topic))

    def describe_delayed(self, handle: str) -> DelayedDescription:
        """Return one delayed message, pending or not, as long as the broker has it.

        Raises `BadRequest` for a mistyped handle.
        """
        return self._driver.run(self._operations.describe_delayed(handle))

    def cancel(self, handle: str) -> str:
        """See `Producer.cancel`."""
        return self._driver.run(self._operations.cancel(handle))

    def reschedule(
        self, handle: str, delay: Delay | None = None, *, deliver_at: Moment | None = None
    ) -> Rescheduled:
        """See `Producer.reschedule`."""
        return self._driver.run(self._operations.reschedule(handle, delay, deliver_at))

    def schedule(
        self,
        cron: str,
        topic: str,
        payload: Any,
        *,
        name: str | None = None,
        timezone: str | tzinfo = "UTC",
        key: bytes | str | None = None,
        tag: str | None = None,
        properties: Mapping[str, str] | None = None,
        partition: int | None = None,
        misfire: str = "one",
    ) -> ScheduleDescription:
        """Add a schedule, which sends a message at each time of a cron expression.

        The expression has five fields as in crontab, or is @daily or similar, in a time zone such as "Europe/Berlin". A
        call with the same arguments adds no second schedule. Without a `name`, the name is derived from the arguments.
        The topic is created on first use.

        `misfire`: the messages for times that were missed because the broker was down or the partition stopped: "one",
        only the latest; "all", each, at most the newest 1,000; "skip", none. Messages also have the properties
        `schedule` and `scheduled_for`. Raises `BadRequest` for an invalid expression or zone, `NotAllowed` if another
        schedule has the name.
        """
        wish = ScheduleRequest(cron, topic, payload, name, timezone, key, tag, properties, partition, misfire)
        return self._driver.run(self._operations.schedule(wish))

    def schedules(self) -> list[ScheduleDescription]:
        """Return all schedules, by name."""
        return self._driver.run(self._operations.schedules())

    def describe_schedule(self, name: str) -> ScheduleDescription:
        """Return one schedule. Raises `UnknownSchedule`."""
        return self._driver.run(self._operations.describe_schedule(name))

    def pause_schedule(self, name: str) -> ScheduleDescription:
        """Pause a schedule until it is resumed. Raises `UnknownSchedule`."""
        return self._driver.run(self._operations.pause_schedule(name))

    def resume_schedule(self, name: str) -> ScheduleDescription:
        """Resume a schedule with its next time; times that passed meanwhile do not count as missed.

        Raises `UnknownSchedule`.
        """
        return self._driver.run(self._operations.resume_schedule(name))

    def remove_schedule(self, name: str) -> bool:
        """Remove a schedule. Raises `UnknownSchedule`."""
        return self._driver.run(self._operations.remove_schedule(name))

    def close(self) -> None:
        """Close the connection."""
        self._driver.close()

    def __repr__(self) -> str:
        return describe_client(self, self._driver.link.servers)

    def __enter__(self) -> Admin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
