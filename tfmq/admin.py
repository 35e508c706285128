"""The blocking face of what an operator does. The asyncio one is in `tfmq.aio`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import tzinfo
from types import TracebackType
from typing import Any

from tfmq.client.admin.admin import Administration, Place
from tfmq.client.admin.delayed import (
    DelayedCounts,
    DelayedDescription,
    DelayedQuery,
    Rescheduled,
    ScheduleDescription,
    ScheduleWish,
)
from tfmq.client.admin.models import (
    CommitGroupDescription,
    CommitGroupEnd,
    GroupDescription,
    GroupSummary,
    Located,
    Purged,
    TopicDescription,
    TransactionDescription,
    TransactionEnd,
)
from tfmq.client.connection.addresses import described
from tfmq.client.connection.connection import SECONDS
from tfmq.client.connection.factory import reach
from tfmq.client.connection.requests import Topic
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.send.delivery_time import Delay, Moment


class Admin:
    """Everything that the command line can do, as methods.

        with tfmq.Admin("127.0.0.1:8367") as admin:
            admin.create_topic("orders", partitions=4)
            admin.topic("orders").partitions

    Making one touches no network. `timeout`: seconds that each answer may take; `client_id`: the name in
    the broker's log for what is asked. All methods raise the `TfmqError`
    that the broker answered, `ConnectionFailed` where none is reached, `TimedOut`.
    """

    def __init__(
        self,
        servers: str | Sequence[str] | None = None,
        *,
        timeout: float = SECONDS,
        client_id: str | None = None,
    ) -> None:
        _, self._driver, _ = reach(servers, BlockingDriver, client_id=client_id, operator=True)
        self._operations = Administration(self._driver.link, timeout)

    def ping(self) -> int:
        """The broker's wall clock, in ms since 1970."""
        return self._driver.run(self._operations.ping())

    def status(self) -> dict[str, Any]:
        """How the broker is: version, uptime, topics, partitions, connections, memory, settings and more."""
        return self._driver.run(self._operations.status())

    def topics(self) -> list[Topic]:
        """All topics, by name: incarnation, partitions with their states, settings."""
        return self._driver.run(self._operations.topics())

    def topic(self, name: str) -> TopicDescription:
        """Everything about one topic. Raises `UnknownTopic`."""
        return self._driver.run(self._operations.topic(name))

    def create_topic(
        self, name: str, partitions: int | None = None, settings: Mapping[str, Any] | None = None
    ) -> TopicDescription:
        """Make a topic; `partitions` None: as many as the broker's setting says. Raises `TopicExists`."""
        return self._driver.run(self._operations.create_topic(name, partitions, settings))

    def grow_topic(self, name: str, partitions: int) -> int:
        """Raise the number of partitions to `partitions`; keys may move to other ones. Returns the number."""
        return self._driver.run(self._operations.grow_topic(name, partitions))

    def set_topic(self, name: str, settings: Mapping[str, Any]) -> TopicDescription:
        """Change settings of the topic's own, at once and for good; None: back to what the server has. Raises
        `UnknownTopic`, `BadRequest` for what is no such setting, `NotAllowed` where the server's configuration sets it
        for the topic: that comes first.
        """
        return self._driver.run(self._operations.set_topic(name, settings))

    def delete_topic(self, name: str) -> bool:
        """Delete the topic with all its messages. Raises `UnknownTopic`."""
        return self._driver.run(self._operations.delete_topic(name))

    def resume(self, topic: str, partition: int) -> str:
        """Lift the stop of a partition whose disk failed and was mended. Returns its state."""
        return self._driver.run(self._operations.resume(topic, partition))

    def truncate_before(self, topic: str, partition: int, offset: int) -> int:
        """Remove the messages before `offset` of one partition, block by block, never more than was asked. Returns the
        first offset that is left. Raises `OffsetOutOfRange` for an offset after the end. `purge` also moves groups.
        """
        return self._driver.run(self._operations.truncate_before(topic, partition, offset))

    def purge(self, topic: str, partition: int | None = None, before: Place = "latest") -> Purged:
        """Remove the messages before a place, of one partition or of all: block by block, never more than was asked. An
        offset, and an `Ordinal`, belongs to one partition; after its end it is refused with `OffsetOutOfRange`.

        Groups that would go on at a message that is gone go on at the first one that is left, unless they have a live
        member: those are in `left` of the result.
        """
        return self._driver.run(self._operations.purge(topic, partition, before))

    def locate(self, topic: str, partition: int, place: Place) -> Located:
        """Find an offset: of "earliest", "latest", a datetime (append time), an `Ordinal`; or at or before one."""
        return self._driver.run(self._operations.locate(topic, partition, place))

    def groups(self) -> list[GroupSummary]:
        """All groups, by name."""
        return self._driver.run(self._operations.groups())

    def group(self, name: str) -> GroupDescription:
        """One group: its members and what each has, offsets and lag. A group that nobody used yet is an empty one."""
        return self._driver.run(self._operations.group(name))

    def reset_group(
        self, name: str, topic: str, place: Place, partition: int | None = None, *, create: bool = False
    ) -> dict[int, int]:
        """Put a group to `place` in one partition or all of a topic. Returns the new offset of each partition. An
        offset, and an `Ordinal`, belongs to one partition; after its end it is refused with `OffsetOutOfRange`. With
        `create` a group that is not there is made.

        Raises `NotAllowed` while the group has a live member, and for a group that is not there.
        """
        return self._driver.run(self._operations.reset_group(name, topic, place, partition, create))

    def delete_group(self, name: str) -> bool:
        """Forget a group with all its offsets; whether there was one. Raises `NotAllowed` while a member is alive."""
        return self._driver.run(self._operations.delete_group(name))

    def transactions(
        self,
        states: Sequence[str] | None = None,
        *,
        group: str | None = None,
        after: int = 0,
        limit: int | None = None,
    ) -> list[TransactionDescription]:
        """Unfinished transactions in the order they were begun, from the one behind epoch `after` on.

        `states` None: those that need somebody: prepared, applying, ended by an operator; others are "open" and
        the like. `group`: only those of one producer group. `limit`: at most so many; None: all, however many. Raises
        `BadRequest` for a state or limit that is none.
        """
        return self._driver.run(self._operations.transactions(states, group, after, limit))

    def transaction(self, xid: str, epoch: int = 0) -> TransactionDescription:
        """One transaction, live or remembered; `epoch` 0: the latest of that xid. One that the broker does not know
        has the state "unknown".
        """
        return self._driver.run(self._operations.transaction(xid, epoch))

    def commit_transaction(
        self, xid: str, epoch: int = 0, *, heuristic: bool = True, force: bool = False
    ) -> TransactionEnd:
        """Commit a prepared transaction by hand: its owner is told so when it comes back, until it is forgotten.
        `heuristic` False: in its owner's name, as if it had come back. `epoch` 0: the one that bears the xid now.

        One that lost messages with damage of the transaction journal is refused (`Damaged`); with `force`, which needs
        `heuristic`, what is left of it is committed, and `lost` counts the rest.

        Raises `UnknownTransaction`, `TransactionState` if it is not prepared, `TransactionRolledBack`,
        `HeuristicOutcome` if another operator was there before.
        """
        return self._driver.run(self._operations.commit_transaction(xid, epoch, heuristic, force))

    def rollback_transaction(self, xid: str, epoch: int = 0, *, heuristic: bool = True) -> TransactionEnd:
        """Drop a transaction by hand; otherwise like `commit_transaction`. Raises `TransactionCommitted` too."""
        return self._driver.run(self._operations.rollback_transaction(xid, epoch, heuristic))

    def forget_transaction(self, xid: str, epoch: int = 0) -> bool:
        """Let go of the outcome of a transaction that an operator ended, once its owner knows. False: there was
        none.
        """
        return self._driver.run(self._operations.forget_transaction(xid, epoch))

    def commit_groups(self) -> list[CommitGroupDescription]:
        """All commit groups by name: the sequence that each has reached, and its members that are prepared."""
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
        """Commit prepared members together, all or none, as `sequence` of the commit group; `transactions`: (xid,
        epoch) of each. The same sequence again gets the first answer; another total of `rows` only with
        `other_total`. Other members with a sequence up to it are dropped.

        Raises `GroupStale`, `GroupFenced`, `GroupIncomplete`.
        """
        operation = self._operations.commit_group(name, sequence, run, transactions, rows, other_total)
        return self._driver.run(operation)

    def abort_commit_group(self, name: str, sequence: int, run: str) -> str:
        """Drop what one run made for one sequence, and let nothing more of that run in. "aborted", or "committed"
        where it came too late and changed nothing.
        """
        return self._driver.run(self._operations.abort_commit_group(name, sequence, run))

    def forget_commit_group(self, name: str) -> bool:
        """Forget the sequence that a commit group has reached, so that it may start anew. False: there was none."""
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
        """Messages that wait for their time, in the order in which they will be delivered, payloads left out.

        `topic`, `partition`, `key`: only those · `first`, `end`: only those that are due from the one moment on and
        before the other (aware datetimes, or seconds since 1970) · `after`: from the one behind this handle on ·
        `limit`: at most so many; None: all, however many.
        """
        asked = DelayedQuery(topic, partition, key, first, end)
        return self._driver.run(self._operations.delayed(asked, after, limit))

    def delayed_histogram(self, edges: Sequence[Moment], topic: str | None = None) -> DelayedCounts:
        """How many messages wait for the time between each of `edges` (aware datetimes, or seconds since 1970) and the
        next one, and how many in all; of one topic, or of all. Raises `BadRequest` for edges that do not ascend.
        """
        return self._driver.run(self._operations.delayed_histogram(edges, topic))

    def describe_delayed(self, handle: str) -> DelayedDescription:
        """One delayed message, whether it still waits or not, as far as the broker remembers. Raises `BadRequest` for a
        handle with a typo.
        """
        return self._driver.run(self._operations.describe_delayed(handle))

    def cancel(self, handle: str) -> str:
        """As `Producer.cancel`."""
        return self._driver.run(self._operations.cancel(handle))

    def reschedule(
        self, handle: str, delay: Delay | None = None, *, deliver_at: Moment | None = None
    ) -> Rescheduled:
        """As `Producer.reschedule`."""
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
        """Send a message at each time of a cron expression (five fields, as crontab has them, or @daily and the like),
        in a time zone as in "Europe/Berlin". A call with the same arguments adds no second schedule. A schedule without
        a `name` gets one that is made of its arguments. The topic is made on first use.

        `misfire`: what becomes of times that were missed, because the broker was down or the partition stopped: "one",
        the latest is sent, once; "all", each, the newest 1,000 at most; "skip", none. Messages also have the
        properties `schedule` and `scheduled_for`. Raises `BadRequest` for an expression or a zone that is none,
        `NotAllowed` for a name that another schedule has.
        """
        wish = ScheduleWish(cron, topic, payload, name, timezone, key, tag, properties, partition, misfire)
        return self._driver.run(self._operations.schedule(wish))

    def schedules(self) -> list[ScheduleDescription]:
        """All schedules, by name."""
        return self._driver.run(self._operations.schedules())

    def describe_schedule(self, name: str) -> ScheduleDescription:
        """One schedule. Raises `UnknownSchedule`."""
        return self._driver.run(self._operations.describe_schedule(name))

    def pause_schedule(self, name: str) -> ScheduleDescription:
        """Send nothing of it until it is resumed. Raises `UnknownSchedule`."""
        return self._driver.run(self._operations.pause_schedule(name))

    def resume_schedule(self, name: str) -> ScheduleDescription:
        """Go on with the next time from now: what passed meanwhile is not missed. Raises `UnknownSchedule`."""
        return self._driver.run(self._operations.resume_schedule(name))

    def remove_schedule(self, name: str) -> bool:
        """End it for good. Raises `UnknownSchedule`."""
        return self._driver.run(self._operations.remove_schedule(name))

    def close(self) -> None:
        """Drop the connection."""
        self._driver.close()

    def __repr__(self) -> str:
        return described(self, self._driver.link.servers)

    def __enter__(self) -> Admin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
