"""A consumer without a face: what is fetched, handed out, processed and saved, as operations that any driver runs.

`next_batch` and `poll` are where more is asked for, and so where what was handed out before becomes processed. Finding
partitions, heartbeats, the saving of offsets and the release of partitions go on beside them as tasks. A failure that
ends a partition (lost offsets, damage, a deleted topic) is raised by the next of these calls, behind everything that
was read before it. Partitions that went to another member are no failure: the consumer goes on with what it has.
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
"""A poll whose time is over looks again when something came: partitions, places, then messages. But no oftener."""
SILENCE_SECONDS: Final = 0.1
"""Between two looks whether the coordinator was heard of again: until then nothing is handed out."""


class Consuming:
    """One consumer; give `tasks` to its driver's tickers.

    `run` does the work of offset storages; `attend` tells the driver that tasks are due although nobody waits, `flush`
    that requests should leave now, although nobody waits yet, `raise_flag` settles a flag from another thread.
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
        """Partitions of which nothing more is wanted for now: their handlers have enough."""
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
        """What goes on beside, for ever."""
        if self.membership is None:
            return [self.assignment.watch]
        found = [self.assignment.watch, self.membership.live, self.handover.watch]
        return [*found, self._saving.keep] if self.options.commits == "auto" else found

    # Handing out

    def next_batch(self) -> Operation[list[ReceivedMessage] | None]:
        """Messages for a loop, which sets `positions.current` to each; None once `stop` was called."""
        self._settle()
        while (yield from self._receive(NEVER)):
            if self.options.commits != "before":
                self.messages += len(self.positions.loop())
                return self.positions.lend()
            if found := (yield from self._saved_first(1)):
                return found
        return None

    def poll(self, seconds: float | None, count: int) -> Operation[list[ReceivedMessage]]:
        """Up to `count` messages, as soon as there are any; [] after `seconds` (None: no limit) without one."""
        if count < 1:
            raise BadRequest(f"max_messages={count} asks for nothing; it takes a number from 1 on.")
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
        """More is asked for: what was handed out is processed, and what waited for that may go."""
        self.positions.ledgers.check_free()
        self.positions.settle()
        if self.membership is not None:
            self.handover.asked()

    def _receive(self, until: float) -> Operation[bool]:
        """Makes a batch with messages ready; False after `stop`, or at `until` and a look at the connection."""
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
        """Whether a batch is ready, made of what has arrived if need be. Raises what stopped a partition, or all."""
        self._raise_failures()
        self._arrival = Flag() if self._arrival.done else self._arrival
        if self.silent:
            return False
        if self.positions.loop() or self._take():  # another thread's poll may have left some
            return True
        if (failure := self.fetcher.failure() or self.fetcher.standstill()) is not None:
            raise failure
        return False

    @property
    def silent(self) -> bool:
        """Whether nothing was heard of the group for so long that others may have what is read here."""
        return self.membership is not None and bool(self.fetcher.feeds) and not self.membership.may_hand_out()

    def news(self, seconds: float, *flags: Flag) -> Wait:
        """Until something may have come behind the last `look`, `stop` was called, or one of `flags` is raised."""
        retry = self.fetcher.next_retry()
        if retry is not None:
            seconds = min(seconds, max(0.0, retry - self.link.now()))
        if self.silent:
            seconds = min(seconds, SILENCE_SECONDS)
        return Wait((self._arrival, self.stop_asked, *flags), None if seconds == NEVER else seconds)

    def _take(self) -> bool:
        """Makes a batch with messages ready of what has arrived, if it has."""
        self.fetching.send()  # the broker works on the next chunk while this one is decoded
        taken, held = False, self.held if self.membership is None else self.held | self.handover.untold
        try:
            while (batch := self.fetching.take(held)) is not None:
                self.positions.begin(batch)
                if batch.messages:
                    break
            taken = True
        finally:
            if not taken:  # interrupted (Ctrl-C) with a chunk in hand: read again what was not handed out
                self._rewind()
        self.fetching.send()
        return batch is not None

    def _saved_first(self, count: int) -> Operation[list[ReceivedMessage]]:
        """Up to `count` ready messages, once the store says that they are done. What cannot be saved is given later."""
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
        """Nothing more is handed out; a driver's `raise_flag(stop_asked)` wakes who waits."""
        self.positions.stop()

    # Moving

    def go_to(self, name: PartitionName, place: Place) -> None:
        """Reading and handing out go on at `place`."""
        self.held.discard(name)
        self.fetching.void(name)
        self.positions.seek(name, place)
        self.fetcher.seek(name, place)

    def again(self, message: ReceivedMessage) -> None:
        """A loop gets `message` next, and those behind it; unless it went back in front of it already."""
        name = partition_of(message)
        if name in self.fetcher.feeds and not self.comes_again(message):
            self.go_to(name, Place(message.offset, message.ordinal, message.origin.epoch))

    def comes_again(self, message: ReceivedMessage) -> bool:
        """Whether its partition went back in front of it."""
        name = partition_of(message)
        return name in self.positions and self.positions.handed_out(name).offset <= message.offset

    def _rewind(self) -> None:
        """Reading goes on behind what was handed out, whatever had been read ahead."""
        self.positions.drop_ready()
        for name, feed in self.fetcher.feeds.items():
            if feed.failure is None:
                self.fetcher.seek(name, self.positions.handed_out(name))

    def seek(self, name: PartitionName, question: Question) -> Operation[None]:
        """Go on at the place that `question` asks for; a stopped partition goes on, too."""
        feed = yield from self._feed(name)
        place = yield from self.assignment.locate(name, feed.incarnation, question)
        if self.fetcher.feeds.get(name) is not feed:  # also one that came back: its place is another by now
            raise UnknownPartition(f"{name} went to another member of the group meanwhile.")
        self.go_to(name, place)

    def pause(self, name: PartitionName) -> Operation[None]:
        """Hand out nothing of the partition until `resume`."""
        yield from self._feed(name)
        if (ready := self.positions.ready) is not None and ready.name == name:
            self.positions.drop_ready()
            self.fetching.void(name)
            self.fetcher.seek(name, self.positions.handed_out(name))
        self.fetcher.pause(name)

    def resume(self, name: PartitionName) -> Operation[None]:
        """Hand out messages of the partition again."""
        yield from self._feed(name)
        self.fetcher.resume(name)
        self._arrival.settle()

    def _feed(self, name: PartitionName) -> Operation[Feed]:
        """The partition. Raises UnknownPartition for one that this consumer does not read, once it has looked."""
        yield from self._looked(self.link.now() + self.options.timeout)
        feed = self.fetcher.feeds.get(name)
        if feed is None:
            raise UnknownPartition(f"This consumer does not read {name}, or it is not there yet.")
        return feed

    def _looked(self, until: float) -> Operation[None]:
        """Waits until the partitions are known."""
        while True:
            self._raise_failures()
            if self.assignment.looked:
                return
            if self.link.now() >= until:
                raise TimedOut("The broker did not say in time which partitions there are.")
            self._arrival = Flag() if self._arrival.done else self._arrival
            yield Wait((self._arrival,), until - self.link.now())

    # Asking

    def lag(self) -> Operation[Lag]:
        """Messages that are there and were not handed out; to the end of the log, whatever of it is forced."""
        yield from self._looked(self.link.now() + self.options.timeout)
        return (yield from measure(self.link, self.fetcher, self.positions, self.options.timeout))

    def position(self, name: PartitionName) -> Operation[int]:
        """The offset behind everything that was handed out of the partition."""
        yield from self._feed(name)
        return self.positions.handed_out(name).offset

    def committed(self, name: PartitionName) -> Operation[int | None]:
        """The offset that the group's store has of the partition; None: none."""
        self.member()
        feed = yield from self._feed(name)
        stored = (yield from self.offsets.read([name])).get(name)
        return stored.offset if stored is not None and stored.incarnation == feed.incarnation else None

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and where it stands now."""
        return counts(self)

    # Saving

    def commit(self, message: ReceivedMessage | None = None) -> Operation[None]:
        """Saves all that was handed out, or one partition up to `message` and including it. Raises Fenced where that is
        another member's by now; all else is saved."""
        self.member()
        self.positions.ledgers.agree("commit")
        void_lost(self, message)
        yield from self._saving.commit(message, self.link.now() + self.options.timeout)
        self.handover.look()

    def save(self) -> Operation[Collection[PartitionName]]:
        """Saves what is processed; which of that is another member's by now. Raises what the store does."""
        return (yield from self._saving.save(self.positions.unsaved, self.link.now() + self.options.timeout))

    def member(self) -> Membership:
        """Its place in the group. Raises `Closed`, `BadRequest` without a group."""
        if self.closed:
            raise Closed("The consumer is closed; make a new one.")
        if self.membership is None:
            raise BadRequest("Without a group nothing is saved: give the consumer group=.")
        return self.membership

    # Beside

    def _arrived(self) -> None:
        """Something came: whoever waits looks again."""
        self._arrival.settle()

    def _share_changed(self) -> None:
        self.assignment.share_changed()
        self._arrival.settle()

    def failed(self, error: Exception) -> None:
        """A task came to an end: the next call raises it."""
        self._failures.append(error)
        self._arrival.settle()

    def _raise_failures(self) -> None:
        """Raises what a task met; begins what is not being done beside."""
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

    # The end

    def renew(self) -> None:
        """In a forked child: a reader of its own, at the same places; of a group it has nothing until it has joined."""
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
        """Saves what is processed (`processed`: all that is out is), leaves the group. A second time does nothing.
        Raises what kept the offsets from being saved; of partitions that are another's by now a warning tells."""
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


# What a consumer says of itself in numbers: `stats()`.


def counts(core: Consuming) -> dict[str, Any]:
    """Counts since the start, and where each partition stands now."""
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
    """Where it stands in its group."""
    if core.membership is None:
        return {"commits": 0, "generation": 0}
    return {"commits": core.offsets.commits, **core.membership.stats()}


# What came to nothing is handed out again: of transactions that were rolled back, and of partitions that were lost.
#
# Behind a rollback nothing of its partitions is handed out until the broker has said where the group stands: what this
# consumer knows of that need not be the last that was saved. A `seek` meanwhile has its way.

RETRY_SECONDS: Final = 1.0
"""Before the broker is asked again where the group stands."""


def void_lost(core: Consuming, message: ReceivedMessage | None = None) -> None:
    """What is about to be told as lost, and came back since, is handed out again: who is told drops it all."""
    if message is not None and not isinstance(message, ReceivedMessage):
        raise BadRequest(
            f"What is committed is a message that this consumer gave, or with no argument all of them; not {message!r}."
        )
    for name in core.positions.lost_and_back(message):
        forget = core.go_to if name in core.fetcher.feeds else core.positions.seek
        forget(name, core.positions.processed(name))


def go_back(core: Consuming, names: Collection[PartitionName]) -> None:
    """Under the driver's lock. What handlers of `run` have is left alone: they are called with it again."""
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
    while True:
        try:
            return (yield from core.offsets.read(names))
        except TfmqError as error:
            if not error.retriable:
                raise
            log.warning("Group %s waits for its offsets: %s", core.options.group, error)
        yield Wait((), RETRY_SECONDS)


def _look_around(core: Consuming) -> None:
    """Whoever waits, in any thread, does; what is to be asked leaves now."""
    core.fetching.send()
    core.attend()
    core.handover.told()


# How far a consumer is behind: in messages, by partition and in all.


class Lag(int):
    """Messages that are there and were not handed out: the number is the total, `partitions` has each; -1: cannot be
    told, because its place is in a damaged range, or its log is not open."""

    partitions: dict[PartitionName, int]

    def __new__(cls, partitions: dict[PartitionName, int]) -> Lag:
        lag = super().__new__(cls, sum(max(0, each) for each in partitions.values()))
        lag.partitions = partitions
        return lag


def measure(link: Link, fetcher: Fetcher, positions: Positions, seconds: float) -> Operation[Lag]:
    """Asks the broker where the logs end, all at once, and where the reader stands where it does not know that.

    Partitions of topics that are gone are left out.
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
    return link.call(
        Locate(feed.name.topic, feed.incarnation, feed.name.partition, by, value), seconds=seconds
    )
