"""All administrative requests to a broker, as operations for the API variants of `Admin`.

Each operation raises the broker's error, `ConnectionFailed` or `TimedOut`. After a lost connection, a request that is
safe to execute twice is sent again; any other request fails with outcome "unknown".
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
from tfmq.client.admin.trace import SEARCH_MESSAGES, KeySearch, MessageTrace, MessageTracer, undelivered
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
"""A position in a partition: "earliest", "latest" (the durable offset), an offset, an aware datetime, or `Ordinal(n)`.

If no message starts at an offset, the last message before the offset is meant. A datetime means the first block that
was appended at or after this time. `Ordinal(n)` means the message number `n`, counted from 0.
"""


class AdminCore:
    """Administrative operations over one connection. `seconds`: timeout of each request."""

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

    def promote_replica(self) -> Operation[str]:
        """Request that the standby to which this client is connected becomes primary. Return "requested".

        For a client with `standby=True` and the address of that standby alone. The present primary hands over; `status`
        of the standby shows when that is done. Raises `NotAllowed` if the server is not a standby, `BadRequest` if the
        client has several addresses.
        """
        if len(self._link.servers) != 1:
            # After a lost connection the request would be repeated at another server, and promote that one.
            raise BadRequest("Give the address of the one standby that is to become primary.")
        reply = yield from self._request(commands.PromoteReplica())
        return str(reply.state)

    # Topics

    def topics(self) -> Operation[list[Topic]]:
        """Return all topics sorted by name, each with its incarnation, settings and the states of its partitions."""
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

        If `partitions` is None, the broker's setting `topics.partitions` is the number of partitions.

        Raises `ConnectionFailed` with the outcome "unknown" if the connection is lost before the reply. The request is
        not repeated: if the repeated request raised `TopicExists`, it would be unknown who created the topic. Call
        `topic` to check.
        """
        if type(partitions) is int and partitions < 1:
            raise BadRequest(f"A topic has 1 partition or more, up to limits.partitions_per_topic, not {partitions}.")
        yield from self._check_partitions(partitions)
        yield from self._request(commands.CreateTopic(name, partitions, dict(settings or {})), repeat=False)
        return (yield from self.topic(name))

    def _check_partitions(self, count: int | None) -> Operation[None]:
        """Raises `BadRequest` if `count` is above the broker's limit for the partitions of one topic.

        The broker reports its limits when a connection begins, so a PING is sent first: it waits for a connection. If
        the broker has closed the old connection, the PING detects this before the caller's request is sent.
        """
        yield from self._request(commands.Ping())
        most = self._link.limits["partitions_per_topic"]
        if type(count) is int and count > most:
            raise BadRequest(f"{count} partitions are above the limit of {most} (limits.partitions_per_topic).")

    def grow_topic(self, name: str, partitions: int) -> Operation[int]:
        """Raise the number of a topic's partitions to `partitions`. Returns the new number.

        After that, messages may be sent to another partition than earlier messages with the same key.
        """
        yield from self._check_partitions(partitions)
        reply = yield from self._request(commands.GrowTopic(name, partitions))
        self._metadata.invalidate(name)
        return int(reply.partitions)

    def set_topic(self, name: str, settings: Mapping[str, Any]) -> Operation[TopicDescription]:
        """Change the topic's own settings, at once and permanently. A value None removes a setting of the topic.

        For a removed setting, the server's value applies. Raises `UnknownTopic`, and `BadRequest` for an unknown
        setting or an invalid value. Raises `NotAllowed` if the server's configuration has the setting for this topic,
        because the configuration takes precedence.
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

        Returns False if another client deleted the topic at the same time.
        """
        # The request names the incarnation, so that a repeated request cannot delete a re-created topic of this name.
        # If the request was sent again, the first attempt may have deleted the topic: then the result is True.
        topic = yield from self._current_topic(name)
        pending = self._link.send_request(commands.DeleteTopic(name, topic.incarnation), seconds=self._seconds)
        yield from wait_for_reply(self._link, pending)
        self._metadata.invalidate(name)
        return bool(pending.result().deleted) or pending.send_count > 1

    def resume(self, topic: str, partition: int) -> Operation[str]:
        """Resume a partition that a disk failure has stopped. Returns its state: "open", "damaged" or "stopped"."""
        reply = yield from self._request(commands.ResumePartition(topic, partition))
        return str(reply.state)

    def truncate_before(self, topic: str, partition: int, offset: int) -> Operation[int]:
        """Remove the messages before `offset` of one partition. Returns the first remaining offset.

        Only whole blocks are removed, so some messages before `offset` may remain. Raises `OffsetOutOfRange` for an
        offset after the end. Unlike `purge`, this does not change the offsets of groups.
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
        """Remove the messages before the position `before`, from one partition or (`partition` None) from all.

        Only whole blocks are removed, so some messages before the position may remain. If the topic has several
        partitions, an offset or an `Ordinal` needs a `partition`. Raises `OffsetOutOfRange` for a position after the
        end, and `BadRequest` for a time in the future by the broker's clock. A group whose next message is removed is
        moved to the first remaining message. A group with a live member cannot be moved: it is in `left` of the result.
        """
        found = yield from self._current_topic(topic)
        numbers = _partitions_of(found, partition, before)
        # A time in the future is refused, because all messages are before it and would be removed.
        if isinstance(before, datetime) and locate_fields(before)[1] > (yield from self.ping()):
            raise BadRequest(f"{before} is in the future by the broker's clock, and {NOTHING_REMOVED}.")
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

    def _advance_group(
        self, group: str, topic: str, incarnation: int, first: Mapping[int, int]
    ) -> Operation[bool | None]:
        """In each partition, raise the group's offset to `first[partition]` if the offset is lower.

        Return None if no offset is lower, True if the lower offsets were raised. Return False if the broker rejected
        the change, for example because a member of the group is alive.
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
        """Return the offset, ordinal and epoch of the position `place`, and the bounds of the partition.

        If `place` is an offset at which no message starts, return the position of the last message before this offset.
        """
        by, value = locate_fields(place)
        found = yield from self._current_topic(topic)
        reply = yield from self._request(commands.Locate(topic, found.incarnation, partition, by, value))
        return LocatedPosition(*reply)

    # One message

    def trace(self, topic: str, partition: int, offset: int) -> Operation[MessageTrace]:
        """Return the life of the message at `offset`: how it was sent, stored and delivered, and which groups read it.

        Facts that the broker no longer has, or that the user has no right to read (`monitor` for groups, `transactions`
        or `monitor` for the transaction), are named in `unknown` of the result. If retention or a purge has removed the
        message, its `state` is "removed". Nothing is changed: no message becomes durable because of the read.

        Raises `UnknownTopic`, `UnknownPartition`, `OffsetOutOfRange` for an offset from the end on, `NotARecord` for an
        offset at which no message starts, and `Damaged` if the message cannot be read.
        """
        tracer = yield from self._tracer(topic)
        return (yield from tracer.trace(partition, offset))

    def trace_delayed(self, handle: str) -> Operation[MessageTrace]:
        """Return what is known of a delayed message. Its `state` is "unknown" if the broker never had or forgot it.

        If it was delivered, it is searched in its partition; if it cannot be found there, or if others were delivered
        with it, `state` is "delivered", and `offset` is None. Raises `BadRequest` for a mistyped handle.
        """
        described = yield from self.describe_delayed(handle)
        if described.state != "delivered" or not described.topic:
            return undelivered(described)
        tracer = yield from self._tracer(described.topic)
        return (yield from tracer.delivered(described.partition, described))

    def find_key(
        self, topic: str, key: bytes | str, partition: int | None = None, *, messages: int = SEARCH_MESSAGES
    ) -> Operation[KeySearch]:
        """Find the newest message with `key`, among the newest `messages` of each partition (or of one `partition`).

        All these messages are read, payloads too, from the newest on, up to the first that has the key. Raises
        `UnknownTopic` and `UnknownPartition`.
        """
        if type(messages) is not int or messages < 1:
            raise BadRequest(f"messages is a whole number from 1 on, not {messages!r}.")
        tracer = yield from self._tracer(topic)
        return (yield from tracer.find_key(key, partition, messages))

    def _tracer(self, topic: str) -> Operation[MessageTracer]:
        return MessageTracer(self._link, self._seconds, (yield from self._current_topic(topic)))

    # Groups

    def groups(self) -> Operation[list[GroupSummary]]:
        """Return all groups, sorted by name."""
        reply = yield from self._request(commands.ListGroups())
        return [group_summary(each) for each in reply.groups]

    def group(self, name: str) -> Operation[GroupDescription]:
        """Return a group's members, offsets and lag. A group that the broker does not know is described as empty."""
        reply = yield from self._request(commands.DescribeGroup(name))
        return group_description(reply.description)

    def reset_group(
        self, name: str, topic: str, place: PartitionPosition, partition: int | None = None, *, create: bool = False
    ) -> Operation[dict[int, int]]:
        """Set a group's offset to `place` in one partition or all of a topic. Returns the new offset of each partition.

        If the topic has several partitions, an offset or an `Ordinal` needs a `partition`. `create`: create the group
        if it does not exist. Raises `OffsetOutOfRange` for a position after the end, and `NotAllowed` while the group
        has a live member, or if the group does not exist and `create` is false.
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
        """Raises `NotAllowed` if the group does not exist, because resetting a misspelled name would create a group."""
        names = [each.group for each in (yield from self.groups())]
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise NotAllowed(f"There is no group {name!r}.{hint} With create=True it is made.")

    def delete_group(self, name: str) -> Operation[bool]:
        """Delete a group with all its offsets. Returns whether the group existed.

        Raises `NotAllowed` while the group has a live member.
        """
        reply = yield from self._request(commands.DeleteGroup(name))
        return bool(reply.deleted)

    # Transactions

    def transactions(
        self, states: Sequence[str] | None = None, *, group: str | None = None, after: int = 0, limit: int | None = None
    ) -> Operation[list[TransactionDescription]]:
        """Return the transactions that are unfinished or were ended by an operator, in the order of their begin.

        `states`: only transactions in these states, for example ["open"]; None: only transactions that are prepared,
        applying or ended by an operator, because they may need an operator. `group`: only transactions of this producer
        group. `after`: only transactions with a higher epoch. `limit`: the maximum number; None: all. Raises
        `BadRequest` for an invalid state or limit.
        """
        # The list is read page by page, so transactions that begin or end during the call may be missing or included.
        _check_states(states)
        check_limit(limit)
        found: list[TransactionDescription] = []
        more = limit is None or limit > 0
        while more:
            page = int(TRANSACTIONS_PER_PAGE) if limit is None else min(limit - len(found), TRANSACTIONS_PER_PAGE)
            selected = None if states is None else list(states)
            reply = yield from self._request(commands.ListTransactions(selected, after, page, group or ""))
            found += [transaction_description(each) for each in reply.transactions]
            last_epoch = reply.after or (found[-1].epoch if found else after)
            more = reply.more and last_epoch > after and len(found) != limit
            after = last_epoch
        return found

    def transaction(self, xid: str, epoch: int = 0) -> Operation[TransactionDescription]:
        """Return one transaction, unfinished or ended. `epoch` 0: the latest transaction named `xid`.

        A transaction that the broker does not know gets the state "unknown".
        """
        reply = yield from self._request(commands.DescribeTransaction(xid, epoch))
        return transaction_description({"xid": xid, **reply.description})

    def commit_transaction(
        self, xid: str, epoch: int = 0, *, heuristic: bool = True, force: bool = False
    ) -> Operation[TransactionEnd]:
        """Commit a prepared transaction in place of its owner. `epoch` 0: the latest transaction named `xid`.

        This is a heuristic outcome: the owner's next request for the transaction raises `HeuristicOutcome`, and the
        broker keeps the outcome until `forget_transaction`. `heuristic` False: commit as if the owner did it, so that
        the owner's own commit succeeds, too.

        Raises `Damaged` if damage of the transaction journal has destroyed messages of the transaction. With `force`,
        which needs `heuristic`, the remaining messages are committed, and `lost` of the result is the number of lost
        messages. Raises `TransactionState` if the transaction is not prepared, `HeuristicOutcome` if another operator
        rolled it back, `TransactionRolledBack` if it was rolled back otherwise, and `UnknownTransaction` if the broker
        does not know it.
        """
        number = epoch or (yield from self._current_epoch(xid))
        reply = yield from self._request(commands.CommitTransaction(xid, number, False, heuristic, [], force))
        return TransactionEnd(xid, number, reply.state, reply.dropped, reply.lost)

    def rollback_transaction(self, xid: str, epoch: int = 0, *, heuristic: bool = True) -> Operation[TransactionEnd]:
        """Roll back a transaction in place of its owner. The arguments are described at `commit_transaction`.

        Raises `HeuristicOutcome` if another operator committed the transaction, `TransactionCommitted` if it was
        committed otherwise, and `UnknownTransaction` if the broker does not know it.
        """
        number = epoch or (yield from self._current_epoch(xid))
        reply = yield from self._request(commands.RollbackTransaction(xid, number, heuristic))
        return TransactionEnd(xid, number, reply.state, 0)

    def forget_transaction(self, xid: str, epoch: int = 0) -> Operation[bool]:
        """Discard the outcome of a transaction that an operator ended. Returns whether there was an outcome.

        Inform the transaction's owner first: the owner's later requests no longer raise `HeuristicOutcome`.
        """
        number = epoch or (yield from self._current_epoch(xid))
        reply = yield from self._request(commands.ForgetTransaction(xid, number))
        return bool(reply.forgotten)

    def commit_groups(self) -> Operation[list[CommitGroupDescription]]:
        """Return all commit groups sorted by name, with the last committed sequence and the prepared transactions."""
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
        """Commit prepared transactions of the commit group `name` together, as its sequence number `sequence`.

        `run`: the name of this attempt · `transactions`: (xid, epoch) of each transaction · `rows`: total number of
        rows. If the sequence was committed before, the result of that commit is returned. Other transactions of the
        group for this or an earlier sequence are rolled back.

        Raises `GroupIncomplete` if not all `transactions` are prepared, and `GroupFenced` if the run was aborted.
        Raises `GroupStale` if a later sequence was committed, or if this sequence was committed with another number of
        rows and `other_total` is false.
        """
        names = [commands.TransactionName(xid, epoch) for xid, epoch in transactions]
        reply = yield from self._request(commands.CommitGroup(name, sequence, run, names, rows, other_total))
        return CommitGroupEnd(*reply)

    def abort_commit_group(self, name: str, sequence: int, run: str) -> Operation[str]:
        """Roll back the transactions of one run for one sequence of a commit group, and reject the run from then on.

        Returns "aborted". If the sequence was committed before, changes nothing and returns "committed".
        """
        reply = yield from self._request(commands.AbortCommitGroup(name, sequence, run))
        return str(reply.state)

    def forget_commit_group(self, name: str) -> Operation[bool]:
        """Discard a group's last committed sequence: then the group accepts any. Returns False if there was none."""
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
        before `end` (aware datetimes, or seconds since 1970) · `after`: only messages after the one with this handle ·
        `limit`: the maximum number; None: all.
        """
        # The list is read page by page, so messages sent or delivered during the call may be missing or included.
        check_limit(limit)
        first_due = 0 if first is None else moment_ms(first)
        end_due = commands.DUE_MAX if end is None else moment_ms(end)
        filters = (topic_field(topic), partition, key.encode() if isinstance(key, str) else key, first_due, end_due)
        last_handle = "" if after is None else check_handle(after)
        found: list[DelayedDescription] = []
        more = limit is None or limit > 0
        while more:
            page = int(DELAYED_PER_PAGE) if limit is None else min(limit - len(found), DELAYED_PER_PAGE)
            reply = yield from self._request(commands.ListDelayed(*filters, last_handle, page))
            found += [delayed_description(row) for row in reply.delayed]
            last = reply.after or (found[-1].handle if found else last_handle)
            more = reply.more and last != last_handle and len(found) != limit
            last_handle = last
        return found

    def delayed_histogram(self, edges: Sequence[Moment], topic: str | None = None) -> Operation[DelayedCounts]:
        """Count the pending delayed messages in each interval between two neighbouring `edges`, and in total.

        `topic` None: the messages of all topics. `edges` are aware datetimes, or seconds since 1970. Raises
        `BadRequest` for edges that do not ascend.
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
        """Return one delayed message. Its `state` is "unknown" if the broker never had or no longer remembers it.

        Raises `BadRequest` for a mistyped handle.
        """
        reply = yield from self._request(commands.DescribeDelayed(check_handle(handle)))
        return delayed_description({**reply.description, "handle": str(handle)})

    def cancel(self, handle: str) -> Operation[str]:
        """Cancel a delayed message. Returns "cancelled", "delivered" or "unknown". Details: `Producer.cancel`."""
        return cancel_delayed_message(self._link, handle, self._seconds)

    def reschedule(
        self, handle: str, delay: Delay | None = None, *, deliver_at: Moment | None = None
    ) -> Operation[Rescheduled]:
        """Change a message's due time: to `delay` from now, or to `deliver_at`. Details: `Producer.reschedule`."""
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

        `cron`: five fields as in crontab, or @daily or similar, in the time zone `timezone`, such as "Europe/Berlin". A
        repeated call with the same arguments adds no second schedule. Without a `name`, the name is derived from the
        arguments. A missing topic is created, if the broker allows that.

        `misfire`: which messages are sent for times that were missed because the broker was down or the partition
        stopped: "one": only the latest; "all": each, at most the newest 1,000; "skip": none. The broker adds two
        properties to each message: `schedule`, the name, and `scheduled_for`, the time. Raises `BadRequest` for an
        invalid expression or zone, `NotAllowed` if another schedule has the name.
        """
        wish = ScheduleRequest(cron, topic, payload, name, timezone, key, tag, properties, partition, misfire)
        message, body = wish.request()
        try:
            reply = yield from self._request(message, body)
        except UnknownPartition:
            raise
        except UnknownTopic:  # The broker raises this only after it has accepted all other arguments.
            self._metadata.invalidate(topic)
            yield from get_topic(self._link, self._metadata, topic, create=True, seconds=self._seconds)
            reply = yield from self._request(message, body)
        return schedule_description(reply.schedule)

    def schedules(self) -> Operation[list[ScheduleDescription]]:
        """Return all schedules, sorted by name."""
        # The list is read page by page, so schedules added or removed during the call may be missing or included.
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
        """Pause a schedule until `resume_schedule`. Raises `UnknownSchedule`."""
        return schedule_description((yield from self._request(commands.PauseSchedule(name))).schedule)

    def resume_schedule(self, name: str) -> Operation[ScheduleDescription]:
        """Resume a paused schedule at its next time after now. Times during the pause do not count as missed.

        Raises `UnknownSchedule`.
        """
        return schedule_description((yield from self._request(commands.ResumeSchedule(name))).schedule)

    def remove_schedule(self, name: str) -> Operation[bool]:
        """Remove a schedule. Raises `UnknownSchedule`."""
        # The request has the schedule's id, so that a repeated request cannot remove a new schedule of the same name.
        found = yield from self.describe_schedule(name)
        reply = yield from self._request(commands.RemoveSchedule(name, found.id))
        return bool(reply.removed)

    def _current_epoch(self, xid: str) -> Operation[int]:
        """Return the epoch (number) of the latest transaction with the name `xid`.

        Requests that end a transaction contain this number, so that a repeated request cannot end a later transaction.
        """
        found = yield from self.transaction(xid, 0)
        if not found.epoch:
            raise UnknownTransaction(f"The broker has no transaction {xid!r}, and remembers no outcome of one.")
        return found.epoch

    def _request(self, message: Any, *body: Buffer, repeat: bool = True) -> Operation[Any]:
        return request(self._link, message, *body, seconds=self._seconds, repeat=repeat)

    def _current_topic(self, name: str) -> Operation[Topic]:
        """Return the topic with newly requested metadata, because the cached incarnation may be deleted by now."""
        self._metadata.invalidate(name)
        return (yield from get_topic(self._link, self._metadata, name, seconds=self._seconds))


def _partitions_of(topic: Topic, partition: int | None, position: PartitionPosition) -> list[int]:
    """Return the numbers of the partitions to process: the given partition, or all partitions of the topic.

    Raises `BadRequest` for an offset or ordinal and several partitions, because each partition has its own offsets.
    """
    if partition is not None:
        return [partition]
    numbers = [each.number for each in topic.partitions]
    if len(numbers) > 1 and (type(position) is int or isinstance(position, Ordinal)):
        what = "an ordinal" if isinstance(position, Ordinal) else "an offset"
        raise BadRequest(
            f"The topic {topic.name} has {len(numbers)} partitions, and {what} belongs to one of them: say which with"
            " partition=."
        )
    return numbers


def _check_states(states: Any) -> None:
    """Raises `BadRequest` for an unknown state, and `TypeError` if `states` is no list, for example a single text."""
    if states is None:
        return
    if isinstance(states, str | bytes) or not isinstance(states, Iterable):
        raise TypeError(f'states is a list, as ["prepared"], not {states!r}.')
    for state in states:
        if state not in STATES:
            raise BadRequest(
                f"There is no unfinished transaction in a state {state!r}: states are {', '.join(STATES)}."
            )


def refuse_reset_beyond_end(topic: str, partition: int, position: PartitionPosition, located: LocatedPosition) -> None:
    """Raises `OffsetOutOfRange` for an offset or ordinal after the end: a group reset to it would skip all messages."""
    _refuse_beyond_end(topic, partition, position, located, 'no offset was changed. The end is "latest"')


NOTHING_REMOVED: Final = 'nothing was removed. To remove everything: "latest"'


def _refuse_beyond_end(
    topic: str, partition: int, position: PartitionPosition, located: LocatedPosition, outcome: str
) -> None:
    """Raises `OffsetOutOfRange` if `position` is an offset or ordinal after the partition's end, which `located` has.

    `outcome`: the last part of the error's text, which says what was not changed.
    """
    if type(position) is int and position > located.end_offset:
        value, end, what = position, located.end_offset, "offset"
    elif isinstance(position, Ordinal) and position.number > located.end_ordinal:
        value, end, what = position.number, located.end_ordinal, "ordinal"
    else:
        return
    raise OffsetOutOfRange(
        f"Partition {partition} of {topic} ends at {what} {end}; {value} is not there, and {outcome}.",
        first=located.first_offset,
        end=located.end_offset,
    )


def locate_fields(position: PartitionPosition) -> tuple[int, int]:
    """Return the fields `by` and `value` of a LOCATE request for a position. Raises `BadRequest` for other values."""
    if position == "earliest":
        return commands.BY_EARLIEST, 0
    if position == "latest":
        return commands.BY_LATEST, 0
    if isinstance(position, Ordinal):
        return commands.BY_ORDINAL, position.number
    if isinstance(position, datetime):
        if position.tzinfo is None:
            raise BadRequest(f"{position} has no time zone: give an aware datetime.")
        return commands.BY_TIME_MS, int(position.timestamp() * 1000)
    if type(position) is int:
        return commands.BY_OFFSET, position
    raise BadRequest(f'A position is "earliest", "latest", an offset, an Ordinal or a datetime, not {position!r}.')
