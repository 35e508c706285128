"""All administrative requests to a broker, as operations for the API variants of `Admin`.

Each raises the broker's error, `ConnectionFailed` or `TimedOut`. A request that may be executed twice is sent again
after a lost connection; any other fails with outcome "unknown".
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, tzinfo
from itertools import pairwise
from typing import Any, Final

from tfmq.bounded_msgpack import Buffer
from tfmq.client.admin.delayed import (
    DelayedCounts,
    DelayedDescription,
    Rescheduled,
    ScheduleDescription,
    ScheduleRequest,
    cancel_delayed_message,
    check_handle,
    check_limit,
    delayed_description,
    reschedule_delayed_message,
    schedule_description,
    topic_field,
)
from tfmq.client.admin.models import (
    STATES,
    CommitGroupDescription,
    CommitGroupEnd,
    GroupDescription,
    GroupSummary,
    LocatedPosition,
    PurgeResult,
    TopicDescription,
    TransactionDescription,
    TransactionEnd,
    commit_group_description,
    group_description,
    group_summary,
    topic_description,
    transaction_description,
)
from tfmq.client.connection.connection import ClientConnection
from tfmq.client.connection.requests import MetadataCache, Topic, fetch_topics, get_topic, request, wait_for_reply
from tfmq.client.operation import Operation
from tfmq.client.send.delivery_time import Delay, Moment, moment_ms
from tfmq.errors import (
    BadRequest,
    Busy,
    NotAllowed,
    OffsetOutOfRange,
    UnknownPartition,
    UnknownSchedule,
    UnknownTopic,
    UnknownTransaction,
)
from tfmq.limits import DELAYED_HISTOGRAM_EDGES, DELAYED_PER_PAGE, SCHEDULES_PER_PAGE, TRANSACTIONS_PER_PAGE
from tfmq.message import Ordinal
from tfmq.protocol import commands

PartitionPosition = str | int | datetime | Ordinal
"""A position in a partition.

"earliest", "latest", an offset (the record at or before it), an aware datetime (the first block appended at or after
it), or `Ordinal(n)`.
"""


class AdminCore:
    """The operations on one connection; `seconds` is the timeout of each request."""

    def __init__(self, link: ClientConnection, seconds: float) -> None:
        self._link = link
        self._seconds = seconds
        self._metadata = MetadataCache(link.now)

    def ping(self) -> Operation[int]:
        """Return the broker's wall clock, in ms since 1970."""
        reply = yield from self._request(commands.Ping())
        return int(reply.time_ms)

    def status(self) -> Operation[dict[str, Any]]:
        """Return the broker's version, uptime, topics, connections, memory, settings and more."""
        reply = yield from self._request(commands.Status())
        found: dict[str, Any] = reply.status
        return found

    # Topics

    def topics(self) -> Operation[list[Topic]]:
        """Return all topics by name: incarnation, partitions with their states, settings."""
        found = yield from fetch_topics(self._link, self._metadata, None, seconds=self._seconds)
        return sorted(found)

    def topic(self, name: str) -> Operation[TopicDescription]:
        """Return the description of one topic. Raises `UnknownTopic`."""
        reply = yield from self._request(commands.DescribeTopic(name))
        return topic_description(reply.description)

    def create_topic(
        self, name: str, partitions: int | None = None, settings: Mapping[str, Any] | None = None
    ) -> Operation[TopicDescription]:
        """Create a topic. Raises `TopicExists`.

        `partitions` None: the broker's setting `topics.partitions`.

        If the connection is lost before the reply: `ConnectionFailed` with the outcome "unknown". It is not repeated,
        because `TopicExists` would not tell who made the topic; look whether it is there with `topic`.
        """
        if type(partitions) is int and partitions < 1:
            raise BadRequest(f"A topic has 1 partition or more, up to limits.partitions_per_topic, not {partitions}.")
        yield from self._check_partitions(partitions)
        yield from self._request(commands.CreateTopic(name, partitions, dict(settings or {})), repeat=False)
        return (yield from self.topic(name))

    def _check_partitions(self, count: int | None) -> Operation[None]:
        """Raises `BadRequest` for more partitions than the broker allows.

        The request for that connects, which tells the limit. It may be repeated, so an idle connection that the broker
        has closed, for example at a restart, is noticed here and not by a request that may be sent only once.
        """
        yield from self._request(commands.Ping())
        most = self._link.limits["partitions_per_topic"]
        if type(count) is int and count > most:
            raise BadRequest(f"{count} partitions are above the limit of {most} (limits.partitions_per_topic).")

    def grow_topic(self, name: str, partitions: int) -> Operation[int]:
        """Raise the number of partitions to `partitions`; keys may move to other ones.

        Returns the number.
        """
        yield from self._check_partitions(partitions)
        reply = yield from self._request(commands.GrowTopic(name, partitions))
        self._metadata.invalidate(name)
        return int(reply.partitions)

    def set_topic(self, name: str, settings: Mapping[str, Any]) -> Operation[TopicDescription]:
        """Change the topic's own settings, at once and permanently; None restores the server's value.

        Raises `UnknownTopic`, `BadRequest` for an unknown setting or an invalid value, `NotAllowed` if the server's
        configuration sets it for the topic, which takes precedence.
        """
        if not isinstance(settings, Mapping):
            raise BadRequest(
                f'The settings of a topic are a mapping, as {{"retention.seconds": "7d"}}, not {settings!r}.'
            )
        found = yield from self._current_topic(name)
        values = {key: value for key, value in settings.items() if value is not None}
        unset = [key for key, value in settings.items() if value is None]
        yield from self._request(commands.SetTopic(name, found.incarnation, values, unset))
        self._metadata.invalidate(name)
        return (yield from self.topic(name))

    def delete_topic(self, name: str) -> Operation[bool]:
        """Delete the topic with all its messages. Raises `UnknownTopic`.

        Returns False if another client deleted it at the same time.
        """
        # The request names the incarnation, so that a repeated request cannot delete a re-created topic of this name.
        # If the reply was lost, this request may have been the one that deleted it: then the result is True.
        topic = yield from self._current_topic(name)
        call = self._link.send_request(commands.DeleteTopic(name, topic.incarnation), seconds=self._seconds)
        yield from wait_for_reply(self._link, call)
        self._metadata.invalidate(name)
        return bool(call.result().deleted) or call.send_count > 1

    def resume(self, topic: str, partition: int) -> Operation[str]:
        """Resume a partition that was stopped by a disk failure. Returns its state."""
        reply = yield from self._request(commands.ResumePartition(topic, partition))
        return str(reply.state)

    def truncate_before(self, topic: str, partition: int, offset: int) -> Operation[int]:
        """Remove the messages before `offset` of one partition, block by block, never more than was asked. Returns the
        first offset that is left. Raises `OffsetOutOfRange` for an offset after the end. `purge` also moves groups.
        """
        if type(offset) is not int:
            raise BadRequest(f'An offset is a whole number, not {offset!r}: purge also takes "latest" and times.')
        located = yield from self.locate(topic, partition, offset)
        _refuse_beyond_end(topic, partition, offset, located, NOTHING_REMOVED)
        return (yield from self._truncate(topic, partition, offset))

    def _truncate(self, topic: str, partition: int, offset: int) -> Operation[int]:
        found = yield from self._current_topic(topic)
        message = commands.Truncate(topic, found.incarnation, partition, offset)
        reply = yield from self._request(message)
        return int(reply.first_offset)

    def purge(
        self, topic: str, partition: int | None = None, before: PartitionPosition = "latest"
    ) -> Operation[PurgeResult]:
        """Remove the messages before a position, of one partition or of all.

        Messages are removed by block, never more than requested. An offset or an `Ordinal` needs a partition; after its
        end it is rejected with `OffsetOutOfRange`, a time in the future (of the broker) with `BadRequest`. Groups
        whose next message is removed continue at the first remaining one, unless they have a live member: those are in
        `left` of the result.
        """
        found = yield from self._current_topic(topic)
        numbers = _partitions_of(found, partition, before)
        if isinstance(before, datetime):
            yield from self._refuse_future(before)
        located = {}
        for number in numbers:
            located[number] = yield from self.locate(topic, number, before)
            _refuse_beyond_end(topic, number, before, located[number], NOTHING_REMOVED)
        first = {}
        for number in numbers:
            first[number] = yield from self._truncate(topic, number, located[number].offset)
        groups = yield from self.groups()
        moved: list[str] = []
        left: list[str] = []
        for each in groups:
            outcome = yield from self._advance_group(each.group, topic, found.incarnation, first)
            if outcome is not None:
                (moved if outcome else left).append(each.group)
        return PurgeResult(first, tuple(moved), tuple(left))

    def _refuse_future(self, before: datetime) -> Operation[None]:
        """Raises `BadRequest` for a time after the broker's: all messages are before it."""
        _, before_ms = locate_fields(before)
        now_ms = yield from self.ping()
        if before_ms > now_ms:
            raise BadRequest(f"{before} is in the future by the broker's clock, and {NOTHING_REMOVED}.")

    def _advance_group(
        self, group: str, topic: str, incarnation: int, first: Mapping[int, int]
    ) -> Operation[bool | None]:
        """Move a group to the first offsets in partitions where its own offset was deleted.

        Return whether the broker allowed it; None if nothing had to be moved.
        """
        try:
            reply = yield from self._request(
                commands.ReadOffsets(group, [commands.PartitionName(topic, number) for number in first])
            )
            offsets = [
                commands.GroupOffset(topic, incarnation, each.partition, first[each.partition])
                for each in reply.offsets
                if each.incarnation == incarnation and each.offset < first[each.partition]
            ]
            if not offsets:
                return None
            yield from self._request(commands.ResetGroup(group, offsets))
        except (NotAllowed, Busy):
            return False
        return True

    def locate(self, topic: str, partition: int, place: PartitionPosition) -> Operation[LocatedPosition]:
        """Return the position of "earliest", "latest", a datetime (append time) or an `Ordinal`.

        For an offset: the message at or before it.
        """
        by, value = locate_fields(place)
        found = yield from self._current_topic(topic)
        reply = yield from self._request(commands.Locate(topic, found.incarnation, partition, by, value))
        return LocatedPosition(*reply)

    # Groups

    def groups(self) -> Operation[list[GroupSummary]]:
        """Return all groups, by name."""
        reply = yield from self._request(commands.ListGroups())
        return [group_summary(each) for each in reply.groups]

    def group(self, name: str) -> Operation[GroupDescription]:
        """Return a group's members and their partitions, offsets and lag; empty for an unused group."""
        reply = yield from self._request(commands.DescribeGroup(name))
        return group_description(reply.description)

    def reset_group(
        self, name: str, topic: str, place: PartitionPosition, partition: int | None = None, *, create: bool = False
    ) -> Operation[dict[int, int]]:
        """Put a group to `place` in one partition or all of a topic. Returns the new offset of each partition. An
        offset, and an `Ordinal`, belongs to one partition; after its end it is refused with `OffsetOutOfRange`. With
        `create` a group that is not there is made.

        An offset or an `Ordinal` needs a partition. `create` creates a group that does not exist.

        Raises `NotAllowed` while the group has a live member, and for a group that does not exist.
        """
        found = yield from self._current_topic(topic)
        numbers = _partitions_of(found, partition, place)
        if not create:
            yield from self._require_group(name)
        located = {}
        for number in numbers:
            located[number] = yield from self.locate(topic, number, place)
            refuse_reset_beyond_end(topic, number, place, located[number])
        offsets = [
            commands.GroupOffset(topic, found.incarnation, number, each.offset, 0, each.epoch)
            for number, each in located.items()
        ]
        yield from self._request(commands.ResetGroup(name, offsets))
        return {number: each.offset for number, each in located.items()}

    def _require_group(self, name: str) -> Operation[None]:
        """Raises NotAllowed where there is none: a misspelled name would leave a group that nothing reads with."""
        names = [each.group for each in (yield from self.groups())]
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise NotAllowed(f"There is no group {name!r}.{hint} With create=True it is made.")

    def delete_group(self, name: str) -> Operation[bool]:
        """Delete a group with all its offsets. Returns whether it existed.

        Raises `NotAllowed` while the group has a live member.
        """
        reply = yield from self._request(commands.DeleteGroup(name))
        return bool(reply.deleted)

    # Transactions

    def transactions(
        self, states: Sequence[str] | None = None, *, group: str | None = None, after: int = 0, limit: int | None = None
    ) -> Operation[list[TransactionDescription]]:
        """Return unfinished transactions in the order of their begin, after epoch `after`.

        `states` None: those that need an operator: prepared, applying, ended by an operator; others are "open" and
        the like. `group`: only those of one producer group. `limit`: at most so many; None: all, however many. Raises
        `BadRequest` for a state or limit that is none.
        """
        # Read page by page: transactions that begin or end during the call may be missing or included.
        _check_states(states)
        check_limit(limit)
        found: list[TransactionDescription] = []
        more = limit is None or limit > 0
        while more:
            page = int(TRANSACTIONS_PER_PAGE) if limit is None else min(limit - len(found), TRANSACTIONS_PER_PAGE)
            asked = None if states is None else list(states)
            reply = yield from self._request(commands.ListTransactions(asked, after, page, group or ""))
            found += [transaction_description(each) for each in reply.transactions]
            last_epoch = reply.after or (found[-1].epoch if found else after)
            more = reply.more and last_epoch > after and len(found) != limit
            after = last_epoch
        return found

    def transaction(self, xid: str, epoch: int = 0) -> Operation[TransactionDescription]:
        """Return one transaction, live or ended; `epoch` 0: the latest of that xid.

        A transaction that the broker does not have gets the state "unknown".
        """
        reply = yield from self._request(commands.DescribeTransaction(xid, epoch))
        return transaction_description({"xid": xid, **reply.description})

    def commit_transaction(
        self, xid: str, epoch: int = 0, *, heuristic: bool = True, force: bool = False
    ) -> Operation[TransactionEnd]:
        """Commit a prepared transaction by hand: a heuristic outcome, which its owner gets later.

        `heuristic` False: in its owner's name, without a heuristic outcome. `epoch` 0: the latest of that xid. The
        outcome is kept until `forget_transaction`.

        A transaction that lost messages to damage of the transaction journal is rejected (`Damaged`); with `force`,
        which needs `heuristic`, its remaining messages are committed, and `lost` is the number of lost ones.

        Raises `UnknownTransaction`, `TransactionState` if it is not prepared, `TransactionRolledBack`,
        `HeuristicOutcome` if another operator ended it before.
        """
        number = epoch or (yield from self._current_epoch(xid))
        reply = yield from self._request(commands.CommitTransaction(xid, number, False, heuristic, [], force))
        return TransactionEnd(xid, number, reply.state, reply.dropped, reply.lost)

    def rollback_transaction(self, xid: str, epoch: int = 0, *, heuristic: bool = True) -> Operation[TransactionEnd]:
        """Roll back a transaction by hand, like `commit_transaction`.

        Raises `TransactionCommitted` too.
        """
        number = epoch or (yield from self._current_epoch(xid))
        reply = yield from self._request(commands.RollbackTransaction(xid, number, heuristic))
        return TransactionEnd(xid, number, reply.state, 0)

    def forget_transaction(self, xid: str, epoch: int = 0) -> Operation[bool]:
        """Discard the outcome of a transaction that an operator ended. Returns whether there was one.

        Call it after the transaction's owner has got the outcome.
        """
        number = epoch or (yield from self._current_epoch(xid))
        reply = yield from self._request(commands.ForgetTransaction(xid, number))
        return bool(reply.forgotten)

    def commit_groups(self) -> Operation[list[CommitGroupDescription]]:
        """Return all commit groups by name, with their last sequence and their prepared members."""
        found: list[CommitGroupDescription] = []
        more = True
        while more:
            reply = yield from self._request(commands.ListCommitGroups(found[-1].group if found else ""))
            found += [commit_group_description(each) for each in reply.groups]
            more = reply.more and bool(reply.groups)
        return found

    def commit_group(
        self,
        name: str,
        sequence: int,
        run: str,
        transactions: Sequence[tuple[str, int]],
        rows: int,
        *,
        other_total: bool = False,
    ) -> Operation[CommitGroupEnd]:
        """Commit prepared members atomically, as `sequence` of the commit group.

        `transactions`: (xid, epoch) of each member. The same sequence again gets the first reply; a different total of
        `rows` is accepted only with `other_total`. Other members with a sequence up to it are rolled back.

        Raises `GroupStale`, `GroupFenced`, `GroupIncomplete`.
        """
        names = [commands.TransactionName(xid, epoch) for xid, epoch in transactions]
        reply = yield from self._request(commands.CommitGroup(name, sequence, run, names, rows, other_total))
        return CommitGroupEnd(*reply)

    def abort_commit_group(self, name: str, sequence: int, run: str) -> Operation[str]:
        """Roll back the members of one run for one sequence, and reject later requests of that run.

        Returns "aborted", or "committed" if the sequence was committed before and nothing was changed.
        """
        reply = yield from self._request(commands.AbortCommitGroup(name, sequence, run))
        return str(reply.state)

    def forget_commit_group(self, name: str) -> Operation[bool]:
        """Discard the last sequence of a commit group, so that it can restart.

        Returns whether it had one.
        """
        reply = yield from self._request(commands.ForgetCommitGroup(name))
        return bool(reply.forgotten)

    # Delayed messages

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
    ) -> Operation[list[DelayedDescription]]:
        """Return pending delayed messages in the order of delivery, without payloads.

        `topic`, `partition`, `key`: only messages with these · `first`, `end`: only messages due from `first` on and
        before `end` (aware datetimes, or seconds since 1970) · `after`: only messages after this handle · `limit`: the
        maximum number; None: all.
        """
        # Read page by page: messages that are sent or delivered during the call may be missing or included.
        check_limit(limit)
        first_due = 0 if first is None else moment_ms(first)
        end_due = commands.DUE_MAX if end is None else moment_ms(end)
        filters = (topic_field(topic), partition, key.encode() if isinstance(key, str) else key, first_due, end_due)
        behind = "" if after is None else check_handle(after)
        found: list[DelayedDescription] = []
        more = limit is None or limit > 0
        while more:
            page = int(DELAYED_PER_PAGE) if limit is None else min(limit - len(found), DELAYED_PER_PAGE)
            reply = yield from self._request(commands.ListDelayed(*filters, behind, page))
            found += [delayed_description(row) for row in reply.delayed]
            last = reply.after or (found[-1].handle if found else behind)
            more = reply.more and last != behind and len(found) != limit
            behind = last
        return found

    def delayed_histogram(self, edges: Sequence[Moment], topic: str | None = None) -> Operation[DelayedCounts]:
        """Count the messages due between each of `edges` and the next, and all.

        Counts messages of one topic, or of all topics.

        `edges` are aware datetimes, or seconds since 1970. Raises `BadRequest` for edges that do not ascend.
        """
        moments = [moment_ms(each) for each in edges]
        if not 2 <= len(moments) <= DELAYED_HISTOGRAM_EDGES or any(a >= b for a, b in pairwise(moments)):
            raise BadRequest(
                f"A histogram has 2 to {DELAYED_HISTOGRAM_EDGES:d} edges, each later than the one before, by 1 ms at"
                " least."
            )
        reply = yield from self._request(commands.DelayedHistogram(topic_field(topic), moments))
        return DelayedCounts(tuple(moments), tuple(reply.counts), reply.pending)

    def describe_delayed(self, handle: str) -> Operation[DelayedDescription]:
        """Return one delayed message, pending or not, as long as the broker has it.

        Raises `BadRequest` for a mistyped handle.
        """
        reply = yield from self._request(commands.DescribeDelayed(check_handle(handle)))
        return delayed_description({**reply.description, "handle": str(handle)})

    def cancel(self, handle: str) -> Operation[str]:
        """See `Producer.cancel`."""
        return cancel_delayed_message(self._link, handle, self._seconds)

    def reschedule(
        self, handle: str, delay: Delay | None = None, *, deliver_at: Moment | None = None
    ) -> Operation[Rescheduled]:
        """See `Producer.reschedule`."""
        return reschedule_delayed_message(self._link, handle, delay, deliver_at, self._seconds)

    # Schedules

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
    ) -> Operation[ScheduleDescription]:
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
        message, body = wish.request()
        try:
            reply = yield from self._request(message, body)
        except UnknownPartition:
            raise
        except UnknownTopic:  # The broker has accepted all other arguments.
            self._metadata.invalidate(topic)
            yield from get_topic(self._link, self._metadata, topic, create=True, seconds=self._seconds)
            reply = yield from self._request(message, body)
        return schedule_description(reply.schedule)

    def schedules(self) -> Operation[list[ScheduleDescription]]:
        """Return all schedules, by name."""
        # Read page by page: schedules that are added or removed during the call may be missing or included.
        found: list[ScheduleDescription] = []
        more = True
        while more:
            after = found[-1].name if found else ""
            reply = yield from self._request(commands.ListSchedules("", after, int(SCHEDULES_PER_PAGE)))
            found += [schedule_description(row) for row in reply.schedules]
            more = reply.more and bool(reply.schedules)
        return found

    def describe_schedule(self, name: str) -> Operation[ScheduleDescription]:
        """Return one schedule. Raises `UnknownSchedule`."""
        reply = yield from self._request(commands.ListSchedules(name))
        if not reply.schedules:
            raise UnknownSchedule(f"There is no schedule {name}. Look at the list: tfmq schedule list.")
        return schedule_description(reply.schedules[0])

    def pause_schedule(self, name: str) -> Operation[ScheduleDescription]:
        """Pause a schedule until it is resumed. Raises `UnknownSchedule`."""
        return schedule_description((yield from self._request(commands.PauseSchedule(name))).schedule)

    def resume_schedule(self, name: str) -> Operation[ScheduleDescription]:
        """Resume a schedule with its next time; times that passed meanwhile do not count as missed.

        Raises `UnknownSchedule`.
        """
        return schedule_description((yield from self._request(commands.ResumeSchedule(name))).schedule)

    def remove_schedule(self, name: str) -> Operation[bool]:
        """Remove a schedule. Raises `UnknownSchedule`."""
        # The request names the id, so that a repeated request cannot remove a new schedule of the same name.
        found = yield from self.describe_schedule(name)
        reply = yield from self._request(commands.RemoveSchedule(name, found.id))
        return bool(reply.removed)

    # Internal

    def _current_epoch(self, xid: str) -> Operation[int]:
        """Return the epoch of the transaction that has the xid now.

        A decision names the epoch, so that a repeated request cannot affect a later transaction.
        """
        found = yield from self.transaction(xid, 0)
        if not found.epoch:
            raise UnknownTransaction(f"The broker has no transaction {xid!r}, and remembers no outcome of one.")
        return found.epoch

    def _request(self, message: Any, *body: Buffer, repeat: bool = True) -> Operation[Any]:
        return request(self._link, message, *body, seconds=self._seconds, repeat=repeat)

    def _current_topic(self, name: str) -> Operation[Topic]:
        """Return the topic with fresh metadata. A cached incarnation could be deleted by now."""
        self._metadata.invalidate(name)
        return (yield from get_topic(self._link, self._metadata, name, seconds=self._seconds))


def _partitions_of(topic: Topic, partition: int | None, place: PartitionPosition) -> list[int]:
    """The numbers that are meant: of one partition, or of all. Raises `BadRequest` for one offset or ordinal for
    several partitions: each counts its own messages.
    """
    if partition is not None:
        return [partition]
    numbers = [each.number for each in topic.partitions]
    if len(numbers) > 1 and (type(place) is int or isinstance(place, Ordinal)):
        what = "an ordinal" if isinstance(place, Ordinal) else "an offset"
        raise BadRequest(
            f"The topic {topic.name} has {len(numbers)} partitions, and {what} belongs to one of them: say which with"
            " partition=."
        )
    return numbers


def _check_states(states: Any) -> None:
    """Raises `TypeError` for one text, whose letters would be taken for states, `BadRequest` for no such state."""
    if states is None:
        return
    if isinstance(states, str | bytes) or not isinstance(states, Iterable):
        raise TypeError(f'states is a list, as ["prepared"], not {states!r}.')
    for state in states:
        if state not in STATES:
            raise BadRequest(
                f"There is no unfinished transaction in a state {state!r}: states are {', '.join(STATES)}."
            )


def refuse_reset_beyond_end(topic: str, partition: int, place: PartitionPosition, located: LocatedPosition) -> None:
    """Raises `OffsetOutOfRange` for an offset or ordinal after the end: a digit too many would skip all messages."""
    _refuse_beyond_end(topic, partition, place, located, 'no offset was changed. The end is "latest"')


NOTHING_REMOVED: Final = 'nothing was removed. To remove everything: "latest"'


def _refuse_beyond_end(
    topic: str, partition: int, before: PartitionPosition, located: LocatedPosition, outcome: str
) -> None:
    """Raises `OffsetOutOfRange` for an offset or ordinal after the end: the nearest place would be the end itself."""
    if type(before) is int and before > located.end_offset:
        asked, end, what = before, located.end_offset, "offset"
    elif isinstance(before, Ordinal) and before.number > located.end_ordinal:
        asked, end, what = before.number, located.end_ordinal, "ordinal"
    else:
        return
    raise OffsetOutOfRange(
        f"Partition {partition} of {topic} ends at {what} {end}; {asked} is not there, and {outcome}.",
        first=located.first_offset,
        end=located.end_offset,
    )


def locate_fields(place: PartitionPosition) -> tuple[int, int]:
    """Return the fields `by` and `value` of LOCATE for a position. Raises `BadRequest`."""
    if place == "earliest":
        return commands.BY_EARLIEST, 0
    if place == "latest":
        return commands.BY_LATEST, 0
    if isinstance(place, Ordinal):
        return commands.BY_ORDINAL, place.number
    if isinstance(place, datetime):
        if place.tzinfo is None:
            raise BadRequest(f"{place} has no time zone: give an aware datetime.")
        return commands.BY_TIME_MS, int(place.timestamp() * 1000)
    if type(place) is int:
        return commands.BY_OFFSET, place
    raise BadRequest(f'A position is "earliest", "latest", an offset, an Ordinal or a datetime, not {place!r}.')
