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
from collections.abc import Callable, Collection
from typing import Any, Final

from tfmq.client.connection.connection import NEVER, Call, Link
from tfmq.client.consumer.assignment import Assignment, Group, place_of
from tfmq.client.consumer.fetcher import Feed, Fetcher, Fetching, fetcher_of
from tfmq.client.consumer.membership import Membership, membership_of
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.consumer.offset_commit import GroupOffsets, Saving
from tfmq.client.consumer.options import ConsumerOptions, Question
from tfmq.client.consumer.positions import UNKNOWN, Place, Positions, partition_of
from tfmq.client.consumer.rebalance import Handover
from tfmq.client.operation import Flag, Operation, Run, Task, Tasks, Wait, inline
from tfmq.errors import (
    BadRequest,
    Closed,
    StorageStopped,
    TfmqError,
    TimedOut,
    UnknownPartition,
    UnknownTopic,
)
from tfmq.offsets.storage import PartitionName, StoredOffset
from tfmq.protocol.commands import BY_LATEST, BY_OFFSET, Locate

log = logging.getLogger("tfmq.consumer")

LOOKS: Final = 3
"""Checks of a `poll` after its timeout, while news arrive: partitions, offsets, messages."""
SILENCE_SECONDS: Final = 0.1
"""Interval for checking an overdue heartbeat; until one succeeds, nothing is delivered."""


class Consuming:
    """State and operations of one consumer, shared by the blocking, asyncio and Twisted APIs.

    The driver runs `tasks` with its timers. `run` executes calls of offset storages, which may block.
    `wake_driver` wakes the driver for due tasks when no caller waits, `flush` makes the driver send requests
    now, and `raise_flag` sets an event from another thread.
    """

    def __init__(
        self,
        options: ConsumerOptions,
        link: Link,
        run: Run = inline,
        *,
        attend: Callable[[], None],
        flush: Callable[[], None],
        raise_flag: Callable[[Flag], None] = Flag.settle,
    ) -> None:
        self.attend = attend
        self.options = options
        self.link = link
        self.closed = False
        self.messages = 0
        self.stop_asked = Flag()
        self.held: set[PartitionName] = set()
        """Partitions withheld from delivery: handlers have enough, or a rewind is pending."""
        self.tasks = Tasks(link.now)
        self.positions = Positions(manual=options.commits == "manual")
        self.fetcher = fetcher_of(options)
        self.fetching = Fetching(options, link, self.fetcher, arrived=self._arrived, flush=flush)
        self.membership: Membership | None = None
        group = None
        if options.group is not None:
            member = self.membership = membership_of(options, link, self._share_changed, raise_flag)
            self.offsets = GroupOffsets(link, member, run, options.storage)
            self._saving = Saving(options, link, self.positions, member, self.offsets)
            self.handover = Handover(options, link, self.positions, self._saving, member)
            group = Group(member, self.offsets, self.handover)
            self.positions.ledgers.freed = self.handover.look
            self.handover.told = lambda: raise_flag(self._arrival)
        self.assignment = Assignment(
            options, link, self.fetcher, self.positions, group, self._arrived, self.fetching.void
        )
        self.fetching.counted = self.assignment.counted
        if group is not None:
            self._saving.refused = self.assignment.refused
        self._arrival = Flag()
        self._beside: dict[Callable[[], Operation[None]], Task | None] = dict.fromkeys(self._operations())
        self._failures: list[Exception] = []

    def _operations(self) -> list[Callable[[], Operation[None]]]:
        """Return the background operations; none of them ever ends by itself."""
        if self.membership is None:
            return [self.assignment.watch]
        found = [self.assignment.watch, self.membership.live, self.handover.watch]
        return [*found, self._saving.keep] if self.options.commits == "auto" else found

    # Delivery

    def next_batch(self) -> Operation[list[ReceivedMessage] | None]:
        """Return messages for a loop, or None after `stop`.

        The loop sets `positions.current` to each message before it hands the message out.
        """
        self._settle()
        while (yield from self._receive(NEVER)):
            if self.options.commits != "before":
                self.messages += len(self.positions.loop())
                return self.positions.lend()
            if found := (yield from self._saved_first(1)):
                return found
        return None

    def poll(self, seconds: float | None, count: int) -> Operation[list[ReceivedMessage]]:
        """Return up to `count` messages as soon as there are any, or [] after `seconds`."""
        if count < 1:
            raise BadRequest(f"max_messages={count} is not possible; it must be at least 1.")
        until = NEVER if seconds is None else self.link.now() + seconds
        self._settle()
        while (yield from self._receive(until)):
            if self.options.commits == "before":
                found = yield from self._saved_first(count)
            else:
                found = self.positions.poll(count)
                while len(found) < count and self._take():
                    found += self.positions.poll(count - len(found))
                self.messages += len(found)
            if found:
                return found
        return []

    def _settle(self) -> None:
        """Ack what was delivered, because the caller asks for more, and wake what waits for that."""
        self.positions.ledgers.check_free()
        self.positions.settle()
        if self.membership is not None:
            self.handover.asked()

    def _receive(self, until: float) -> Operation[bool]:
        """Wait for a batch with messages.

        Return False after `stop`, or when `until` passed without one. The connection is checked at least
        once, also when `until` is already over.
        """
        looks = 0
        while True:
            came = self._arrival.done
            self._raise_failures()
            if self.membership is not None and self.handover.has_news:
                yield from self.handover.tell()
                continue
            if self.positions.stopped or self.look():
                return not self.positions.stopped
            remaining = until - self.link.now()
            if remaining <= 0 and looks and (looks >= LOOKS or not came):
                return False
            looks += 1
            yield self.news(max(0.0, remaining))

    def look(self) -> bool:
        """Return whether a batch is ready; decode the next fetch response if none is.

        Raises the failure of a partition or of a background task.
        """
        self._raise_failures()
        self._arrival = Flag() if self._arrival.done else self._arrival
        if self.silent:
            return False
        if self.positions.loop() or self._take():  # left over by a poll() in another thread
            return True
        if (failure := self.fetcher.failure() or self.fetcher.standstill()) is not None:
            raise failure
        return False

    @property
    def silent(self) -> bool:
        """Whether the heartbeat is so old that other members may own the partitions read here."""
        return self.membership is not None and bool(self.fetcher.feeds) and not self.membership.may_hand_out()

    def news(self, seconds: float, *flags: Flag) -> Wait:
        """Return an effect that waits for news since `prepare_batch`, `stop`, or one of `flags`."""
        retry = self.fetcher.next_retry()
        if retry is not None:
            seconds = min(seconds, max(0.0, retry - self.link.now()))
        if self.silent:
            seconds = min(seconds, SILENCE_SECONDS)
        return Wait((self._arrival, self.stop_asked, *flags), None if seconds == NEVER else seconds)

    def _take(self) -> bool:
        """Decode fetch responses until a batch has messages. Return False if there is none."""
        self.fetching.send()  # the broker works on the next response while this one is decoded
        taken, held = False, self.held if self.membership is None else self.held | self.handover.untold
        try:
            while (batch := self.fetching.take(held)) is not None:
                self.positions.begin(batch)
                if batch.messages:
                    break
            taken = True
        finally:
            if not taken:  # Interrupted (Ctrl-C) during decoding: read again what was not delivered.
                self._rewind()
        self.fetching.send()
        return batch is not None

    def _saved_first(self, count: int) -> Operation[list[ReceivedMessage]]:
        """Commit up to `count` ready messages, then return those whose commit succeeded.

        After a failed commit the messages are delivered again later.
        """
        messages = self.positions.poll(count)
        if not messages:
            return []
        name = partition_of(first := messages[0])
        self.positions.settle()
        saved = False
        try:
            refused = yield from self.save()
            saved = True
        finally:
            if not saved and name in self.fetcher.feeds:
                self.go_to(name, Place(first.offset, first.ordinal, first.origin.epoch))
        if name in refused:
            return []
        self.messages += len(messages)
        return messages

    def stop(self) -> None:
        """Deliver nothing more.

        The caller must set `stop_requested` through the driver to wake waiting threads.
        """
        self.positions.stop()

    # Positions

    def go_to(self, name: PartitionName, place: Place) -> None:
        """Continue reading and delivering the partition at `position`."""
        self.held.discard(name)
        self.fetching.void(name)
        self.positions.seek(name, place)
        self.fetcher.seek(name, place)

    def again(self, message: ReceivedMessage) -> None:
        """Redeliver `message` and those after it, unless its partition is already rewound that far."""
        name = partition_of(message)
        if name in self.fetcher.feeds and not self.comes_again(message):
            self.go_to(name, Place(message.offset, message.ordinal, message.origin.epoch))

    def comes_again(self, message: ReceivedMessage) -> bool:
        """Return whether a rewind or seek causes `message` to be delivered again."""
        name = partition_of(message)
        return name in self.positions and self.positions.handed_out(name).offset <= message.offset

    def _rewind(self) -> None:
        """Continue reading after the last delivered message of each partition.

        Drop what was prefetched.
        """
        self.positions.drop_ready()
        for name, feed in self.fetcher.feeds.items():
            if feed.failure is None:
                self.fetcher.seek(name, self.positions.handed_out(name))

    def seek(self, name: PartitionName, question: Question) -> Operation[None]:
        """Continue at the position that `start` names; also restarts a stopped partition.

        Raises UnknownPartition if the partition is not read here, TimedOut.
        """
        feed = yield from self._feed(name)
        place = yield from self.assignment.locate(name, feed.incarnation, question)
        # also if the partition was revoked and assigned again: it has another position now
        if self.fetcher.feeds.get(name) is not feed:
            raise UnknownPartition(f"{name} was assigned to another member of the group meanwhile.")
        self.go_to(name, place)

    def pause(self, name: PartitionName) -> Operation[None]:
        """Deliver nothing of the partition until `resume`. Raises UnknownPartition, TimedOut."""
        yield from self._feed(name)
        if (ready := self.positions.ready) is not None and ready.name == name:
            self.positions.drop_ready()
            self.fetching.void(name)
            self.fetcher.seek(name, self.positions.handed_out(name))
        self.fetcher.pause(name)

    def resume(self, name: PartitionName) -> Operation[None]:
        """Deliver messages of the partition again. Raises UnknownPartition, TimedOut."""
        yield from self._feed(name)
        self.fetcher.resume(name)
        self._arrival.settle()

    def _feed(self, name: PartitionName) -> Operation[Feed]:
        """Return the fetch state of a partition.

        Raises UnknownPartition if this consumer does not read it once the partitions are known, TimedOut.
        """
        yield from self._looked(self.link.now() + self.options.timeout)
        feed = self.fetcher.feeds.get(name)
        if feed is None:
            raise UnknownPartition(f"This consumer does not read {name}, or it does not exist yet.")
        return feed

    def _looked(self, until: float) -> Operation[None]:
        """Wait until the partitions are known. Raises TimedOut at `until`."""
        while True:
            self._raise_failures()
            if self.assignment.looked:
                return
            if self.link.now() >= until:
                raise TimedOut("The broker did not return the partitions in time.")
            self._arrival = Flag() if self._arrival.done else self._arrival
            yield Wait((self._arrival,), until - self.link.now())

    # Queries

    def lag(self) -> Operation[Lag]:
        """Return the number of stored messages not delivered yet, including those not fsynced."""
        yield from self._looked(self.link.now() + self.options.timeout)
        return (yield from measure(self.link, self.fetcher, self.positions, self.options.timeout))

    def position(self, name: PartitionName) -> Operation[int]:
        """Return the offset after the last delivered message of the partition."""
        yield from self._feed(name)
        return self.positions.handed_out(name).offset

    def committed(self, name: PartitionName) -> Operation[int | None]:
        """Return the committed offset of the partition, or None if the group has none."""
        self.member()
        feed = yield from self._feed(name)
        stored = (yield from self.offsets.read([name])).get(name)
        return stored.offset if stored is not None and stored.incarnation == feed.incarnation else None

    def stats(self) -> dict[str, Any]:
        """Return counters since the start, and the state of the membership and the partitions."""
        return counts(self)

    # Commits

    def commit(self, message: ReceivedMessage | None = None) -> Operation[None]:
        """Commit all delivered messages, or one partition up to and including `message`.

        Raises Fenced if one of these partitions belongs to another member by now; the others are committed.
        """
        self.member()
        self.positions.ledgers.agree("commit")
        void_lost(self, message)
        yield from self._saving.commit(message, self.link.now() + self.options.timeout)
        self.handover.look()

    def save(self) -> Operation[Collection[PartitionName]]:
        """Commit what is acked.

        Return the partitions that were fenced; raises what the store raises.
        """
        return (yield from self._saving.save(self.positions.unsaved, self.link.now() + self.options.timeout))

    def member(self) -> Membership:
        """Return the group membership. Raises Closed, and BadRequest for a consumer without a group."""
        if self.closed:
            raise Closed("The consumer is closed; make a new one.")
        if self.membership is None:
            raise BadRequest("Without a group nothing is saved: give the consumer group=.")
        return self.membership

    # Background tasks

    def _arrived(self) -> None:
        """Wake all waiting callers, because something changed."""
        self._arrival.settle()

    def _share_changed(self) -> None:
        """Apply a changed assignment and wake all waiting callers."""
        self.assignment.share_changed()
        self._arrival.settle()

    def failed(self, error: Exception) -> None:
        """Record the failure of a background task; the next call raises it."""
        self._failures.append(error)
        self._arrival.settle()

    def _raise_failures(self) -> None:
        """Raise the failure of a background task, or start the tasks that do not run."""
        if self.closed or self.link.state == "closed":
            raise Closed("The consumer is closed; make a new one.")
        if not self._failures:
            for operation, task in self._beside.items():
                if task is None or task.done:
                    self._beside[operation] = self.tasks.start(operation(), self.failed)
                    if self.membership is not None:
                        self.attend()
        if self._failures:
            raise self._failures.pop(0)

    # Shutdown

    def renew(self) -> None:
        """Reset the state in a forked child: same positions, own reader.

        A group must be joined again.
        """
        self.fetching.clear()
        self.tasks.cancel()
        self._beside = dict.fromkeys(self._beside)
        self._arrival = Flag()
        self.fetcher.renew()
        self._rewind()
        if self.membership is not None:
            self.assignment.renew()
            self._saving.renew()
            self.handover.renew()
            self.membership.renew()

    def close(self, processed: bool) -> Operation[None]:
        """Commit what is acked and leave the group. A second call does nothing.

        With `ack_delivered` everything delivered is acked first. Raises what prevented the commit; partitions
        that belong to another member by now are only logged.
        """
        if self.closed:
            return
        until = self.link.now() + self.options.timeout
        try:
            if processed:
                self.positions.settle()
            self.positions.drop_ready()
            membership = self.membership
            if membership is not None and membership.joined and self.link.state != "closed":
                yield from self.handover.tell_the_end()
                if self.options.commits != "manual":
                    yield from self._saving.save(self.positions.unsaved, until)
                yield from membership.leave(until)
        finally:
            self.closed = True
            self.tasks.cancel()
            self.fetching.clear()
            if self.options.storage is not None:
                self.options.storage.close()


def counts(core: Consuming) -> dict[str, Any]:
    """Return the counters of `stats()` and the state of each partition."""
    positions, fetcher = core.positions, core.fetcher
    return {
        "messages": core.messages,
        "bytes": fetcher.bytes_read,
        "fetches": fetcher.fetches,
        "connections": core.link.connections,
        **_standing(core),
        "skipped": fetcher.skipped_count,
        "skipped_ranges": [tuple(each) for each in fetcher.skipped],
        "partitions": {
            str(name): {
                "offset": positions.handed_out(name).offset,
                "processed_offset": positions.processed(name).offset,
                "saved_offset": positions.saved(name),
                "waiting_bytes": feed.chunk_bytes,
                "paused": feed.paused,
                "stopped": None if feed.failure is None else str(feed.failure),
            }
            for name, feed in fetcher.feeds.items()
        },
    }


def _standing(core: Consuming) -> dict[str, Any]:
    """Return the counters of the group membership."""
    if core.membership is None:
        return {"commits": 0, "generation": 0}
    return {"commits": core.offsets.commits, **core.membership.stats()}


RETRY_SECONDS: Final = 1.0
"""Pause before the group's offsets are requested again."""


def void_lost(core: Consuming, message: ReceivedMessage | None = None) -> None:
    """Redeliver partitions that were lost and assigned again.

    Called before the loss is reported to the user, after which the user discards all uncommitted work; so this consumer
    must deliver it again. `message` limits this to its partition. Raises BadRequest if `message` is no
    message of a consumer.
    """
    if message is not None and not isinstance(message, ReceivedMessage):
        raise BadRequest(
            f"commit() takes a message that this consumer delivered, or no argument for all of them; not {message!r}."
        )
    for name in core.positions.lost_and_back(message):
        forget = core.go_to if name in core.fetcher.feeds else core.positions.seek
        forget(name, core.positions.processed(name))


def go_back(core: Consuming, names: Collection[PartitionName]) -> None:
    """Rewind partitions to their committed offsets after a rolled back transaction.

    Call it under the driver's lock. Partitions assigned to handlers of `run` are left alone, because `run`
    calls the handlers again with the same messages. Nothing of the other partitions is delivered until the
    broker has returned the group's offsets, because another commit may be newer than the last one of this
    consumer. A `seek` in the meantime takes precedence.
    """
    positions = core.positions
    found = [name for name in names if name in core.fetcher.feeds and positions.ledgers.get(name) is None]
    for name in found:
        offset = positions.saved(name)
        core.go_to(name, positions.start_of(name) if offset is None else Place(offset, UNKNOWN, UNKNOWN))
        core.held.add(name)
    if found and not core.closed:
        core.tasks.start(_going_back(core, found), core.failed)
        _look_around(core)


def _going_back(core: Consuming, names: Collection[PartitionName]) -> Operation[None]:
    """Read the group's offsets and move to those that differ from what this consumer knew."""
    positions = core.positions
    try:
        stored = yield from _stored(core, names)
        for name in core.held.intersection(names, stored, core.fetcher.feeds):
            row = stored[name]
            if row.incarnation == positions.incarnation(name) and row.offset != positions.saved(name):
                place = place_of(name, row)
                positions.note_saved({name: place})
                core.go_to(name, place)
    finally:
        core.held.difference_update(names)
    _look_around(core)


def _stored(
    core: Consuming, names: Collection[PartitionName]
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


def _look_around(core: Consuming) -> None:
    """Send due requests now and wake the callers that wait, in any thread."""
    core.fetching.send()
    core.attend()
    core.handover.told()


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


def measure(link: Link, fetcher: Fetcher, positions: Positions, seconds: float) -> Operation[Lag]:
    """Ask the broker for the ends of all logs, and for the ordinals of positions that have none.

    All requests are sent at once. Partitions of deleted topics are left out.
    """
    places = {name: positions.handed_out(name) for name in fetcher.feeds}
    ends = {name: _locate(link, fetcher.feeds[name], BY_LATEST, 0, seconds) for name in places}
    here = {
        name: _locate(link, fetcher.feeds[name], BY_OFFSET, place.offset, seconds)
        for name, place in places.items()
        if place.ordinal == UNKNOWN
    }
    calls = [*ends.values(), *here.values()]
    try:
        for call in calls:
            while not call.done:
                yield Wait((call,))
    finally:
        for call in calls:
            link.abandon(call)
    lags = {}
    for name, place in places.items():
        try:
            ordinal = here[name].result().ordinal if name in here else place.ordinal
            end = ends[name].result().end_ordinal
        except UnknownTopic:
            continue
        except StorageStopped:
            ordinal = end = UNKNOWN
        lags[name] = UNKNOWN if ordinal == UNKNOWN else max(0, end - ordinal)
    return Lag(lags)


def _locate(link: Link, feed: Feed, by: int, value: int, seconds: float) -> Call:
    """Send a LOCATE request for a partition."""
    return link.call(
        Locate(feed.name.topic, feed.incarnation, feed.name.partition, by, value), seconds=seconds
    )
