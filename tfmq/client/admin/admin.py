"""All administrative requests to a broker, as operations for the API variants of `Admin`.

Each raises the broker's error, `ConnectionFailed` or `TimedOut`. A request that may be executed twice is sent again
after a lost connection; any other fails with outcome "unknown".
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from tfmq.client.admin import delayed as asked_schedules
from tfmq.client.admin.delayed import (
    DelayedCounts,
    DelayedDescription,
    DelayedQuery,
    Rescheduled,
    ScheduleDescription,
    ScheduleRequest,
    cancel_delayed_message,
    check_limit,
    count_delayed,
    describe_delayed_message,
    list_delayed,
    reschedule_delayed_message,
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
from tfmq.client.connection.requests import (
    MetadataCache,
    Topic,
    fetch_topics,
    get_topic,
    request,
    wait_for_reply,
)
from tfmq.client.operation import Operation
from tfmq.client.send.delivery_time import Delay, Moment
from tfmq.errors import BadRequest, Busy, NotAllowed, OffsetOutOfRange, UnknownTransaction
from tfmq.limits import TRANSACTIONS_PER_PAGE
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
        reply = yield from self._request(commands.Ping())
        return int(reply.time_ms)

    def status(self) -> Operation[dict[str, Any]]:
        reply = yield from self._request(commands.Status())
        found: dict[str, Any] = reply.status
        return found

    # Topics

    def topics(self) -> Operation[list[Topic]]:
        found = yield from fetch_topics(self._link, self._metadata, None, seconds=self._seconds)
        return sorted(found)

    def topic(self, name: str) -> Operation[TopicDescription]:
        reply = yield from self._request(commands.DescribeTopic(name))
        return topic_description(reply.description)

    def create_topic(
        self, name: str, partitions: int | None, settings: Mapping[str, Any] | None
    ) -> Operation[TopicDescription]:
        if type(partitions) is int and partitions < 1:
            raise BadRequest(
                f"A topic has 1 partition or more, up to limits.partitions_per_topic, not {partitions}."
            )
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
            raise BadRequest(
                f"{count} partitions are above the limit of {most} (limits.partitions_per_topic)."
            )

    def grow_topic(self, name: str, partitions: int) -> Operation[int]:
        yield from self._check_partitions(partitions)
        reply = yield from self._request(commands.GrowTopic(name, partitions))
        self._metadata.invalidate(name)
        return int(reply.partitions)

    def set_topic(self, name: str, settings: Mapping[str, Any]) -> Operation[TopicDescription]:
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
        """Delete the current incarnation of the topic.

        The request names the incarnation, so that a repeated request cannot delete a re-created topic of the same name.
        Returns whether it was deleted here. If the reply was lost, this request may have been the one, so True.
        """
        topic = yield from self._current_topic(name)
        call = self._link.send_request(commands.DeleteTopic(name, topic.incarnation), seconds=self._seconds)
        yield from wait_for_reply(self._link, call)
        self._metadata.invalidate(name)
        return bool(call.result().deleted) or call.send_count > 1

    def resume(self, topic: str, partition: int) -> Operation[str]:
        reply = yield from self._request(commands.ResumePartition(topic, partition))
        return str(reply.state)

    def truncate_before(self, topic: str, partition: int, offset: int) -> Operation[int]:
        if type(offset) is not int:
            raise BadRequest(
                f'An offset is a whole number, not {offset!r}: purge also takes "latest" and times.'
            )
        located = yield from self.locate(topic, partition, offset)
        _refuse_beyond_end(topic, partition, offset, located, NOTHING_REMOVED)
        return (yield from self._truncate(topic, partition, offset))

    def _truncate(self, topic: str, partition: int, offset: int) -> Operation[int]:
        found = yield from self._current_topic(topic)
        message = commands.Truncate(topic, found.incarnation, partition, offset)
        reply = yield from self._request(message)
        return int(reply.first_offset)

    def purge(self, topic: str, partition: int | None, before: PartitionPosition) -> Operation[PurgeResult]:
        """Delete the messages before `before`, and move consumer groups to the remaining ones.

        `partition` None: all partitions. Raises `BadRequest` for an offset without a partition.
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
        by, value = locate_fields(place)
        found = yield from self._current_topic(topic)
        reply = yield from self._request(commands.Locate(topic, found.incarnation, partition, by, value))
        return LocatedPosition(*reply)

    # Groups

    def groups(self) -> Operation[list[GroupSummary]]:
        reply = yield from self._request(commands.ListGroups())
        return [group_summary(each) for each in reply.groups]

    def group(self, name: str) -> Operation[GroupDescription]:
        reply = yield from self._request(commands.DescribeGroup(name))
        return group_description(reply.description)

    def reset_group(
        self, name: str, topic: str, place: PartitionPosition, partition: int | None, create: bool
    ) -> Operation[dict[int, int]]:
        """Move the group to `place` and return the new offsets. `partition` None: all partitions."""
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
        reply = yield from self._request(commands.DeleteGroup(name))
        return bool(reply.deleted)

    # Transactions

    def transactions(
        self, states: Sequence[str] | None, group: str | None, after: int, limit: int | None
    ) -> Operation[list[TransactionDescription]]:
        """Return the transactions, read page by page.

        Transactions that begin or end during the call may be missing or included.
        """
        _check_states(states)
        check_limit(limit)
        found: list[TransactionDescription] = []
        more = limit is None or limit > 0
        while more:
            page = (
                int(TRANSACTIONS_PER_PAGE)
                if limit is None
                else min(limit - len(found), TRANSACTIONS_PER_PAGE)
            )
            asked = None if states is None else list(states)
            reply = yield from self._request(commands.ListTransactions(asked, after, page, group or ""))
            found += [transaction_description(each) for each in reply.transactions]
            behind = reply.after or (found[-1].epoch if found else after)
            more = reply.more and behind > after and len(found) != limit
            after = behind
        return found

    def transaction(self, xid: str, epoch: int) -> Operation[TransactionDescription]:
        reply = yield from self._request(commands.DescribeTransaction(xid, epoch))
        return transaction_description({"xid": xid, **reply.description})

    def commit_transaction(
        self, xid: str, epoch: int, heuristic: bool, force: bool = False
    ) -> Operation[TransactionEnd]:
        number = epoch or (yield from self._current_epoch(xid))
        reply = yield from self._request(commands.CommitTransaction(xid, number, False, heuristic, [], force))
        return TransactionEnd(xid, number, reply.state, reply.dropped, reply.lost)

    def rollback_transaction(self, xid: str, epoch: int, heuristic: bool) -> Operation[TransactionEnd]:
        number = epoch or (yield from self._current_epoch(xid))
        reply = yield from self._request(commands.RollbackTransaction(xid, number, heuristic))
        return TransactionEnd(xid, number, reply.state, 0)

    def forget_transaction(self, xid: str, epoch: int) -> Operation[bool]:
        number = epoch or (yield from self._current_epoch(xid))
        reply = yield from self._request(commands.ForgetTransaction(xid, number))
        return bool(reply.forgotten)

    def commit_groups(self) -> Operation[list[CommitGroupDescription]]:
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
        other_total: bool,
    ) -> Operation[CommitGroupEnd]:
        names = [commands.TransactionName(xid, epoch) for xid, epoch in transactions]
        reply = yield from self._request(commands.CommitGroup(name, sequence, run, names, rows, other_total))
        return CommitGroupEnd(*reply)

    def abort_commit_group(self, name: str, sequence: int, run: str) -> Operation[str]:
        reply = yield from self._request(commands.AbortCommitGroup(name, sequence, run))
        return str(reply.state)

    def forget_commit_group(self, name: str) -> Operation[bool]:
        reply = yield from self._request(commands.ForgetCommitGroup(name))
        return bool(reply.forgotten)

    # Delayed messages

    def delayed(
        self, asked: DelayedQuery, after: str | None, limit: int | None
    ) -> Operation[list[DelayedDescription]]:
        return list_delayed(self._link, asked, after, limit, self._seconds)

    def delayed_histogram(self, edges: Sequence[Moment], topic: str | None) -> Operation[DelayedCounts]:
        return count_delayed(self._link, edges, topic, self._seconds)

    def describe_delayed(self, handle: str) -> Operation[DelayedDescription]:
        return describe_delayed_message(self._link, handle, self._seconds)

    def cancel(self, handle: str) -> Operation[str]:
        return cancel_delayed_message(self._link, handle, self._seconds)

    def reschedule(
        self, handle: str, delay: Delay | None, deliver_at: Moment | None
    ) -> Operation[Rescheduled]:
        return reschedule_delayed_message(self._link, handle, delay, deliver_at, self._seconds)

    # Schedules

    def schedule(self, wish: ScheduleRequest) -> Operation[ScheduleDescription]:
        return asked_schedules.add_schedule(self._link, self._metadata, wish, self._seconds)

    def schedules(self) -> Operation[list[ScheduleDescription]]:
        return asked_schedules.list_schedules(self._link, self._seconds)

    def describe_schedule(self, name: str) -> Operation[ScheduleDescription]:
        return asked_schedules.describe_schedule(self._link, name, self._seconds)

    def pause_schedule(self, name: str) -> Operation[ScheduleDescription]:
        return asked_schedules.pause_schedule(self._link, name, self._seconds)

    def resume_schedule(self, name: str) -> Operation[ScheduleDescription]:
        return asked_schedules.resume_schedule(self._link, name, self._seconds)

    def remove_schedule(self, name: str) -> Operation[bool]:
        return asked_schedules.remove_schedule(self._link, name, self._seconds)

    # Internal

    def _current_epoch(self, xid: str) -> Operation[int]:
        """Return the epoch of the transaction that has the xid now.

        A decision names the epoch, so that a repeated request cannot affect a later transaction.
        """
        found = yield from self.transaction(xid, 0)
        if not found.epoch:
            raise UnknownTransaction(
                f"The broker has no transaction {xid!r}, and remembers no outcome of one."
            )
        return found.epoch

    def _request(self, message: Any, repeat: bool = True) -> Operation[Any]:
        return (yield from request(self._link, message, seconds=self._seconds, repeat=repeat))

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


def refuse_reset_beyond_end(
    topic: str, partition: int, place: PartitionPosition, located: LocatedPosition
) -> None:
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
    raise BadRequest(
        f'A position is "earliest", "latest", an offset, an Ordinal or a datetime, not {place!r}.'
    )
