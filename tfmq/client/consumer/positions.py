"""Read positions of a consumer: what was delivered, acked and committed, by partition.

A message delivered by a loop is acked when the next one is requested; messages delivered by `poll`, at the
next `poll`; both also when the consumer is closed without an error. In manual mode only `commit` acks.
`Positions` does no I/O; it knows per partition the position up to which everything is acked, which is what
may be committed. Only `seek` and a rewind move a position backwards.

A revoked partition stays here until it is released, because delivered messages may still be acked. A lost
partition is removed at once.

Messages delivered to handlers are acked in any order; an `AckTracker` per partition finds the lowest unacked
one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from operator import attrgetter
from typing import NamedTuple

from tfmq.client.consumer.message import ReceivedMessage
from tfmq.errors import BadRequest, Fenced, NotAllowed
from tfmq.offsets.storage import PartitionName as PartitionName


class Positions:
    """Delivered, acked and committed positions of all partitions of one consumer.

    `current` is the message that a loop works on. The consumer API sets it before it hands the message out;
    nothing else is done per message. `ready` is the batch that is being delivered; a loop that got it by
    `hand_out` iterates over its list until more is requested.
    """

    def __init__(self, *, manual: bool = False) -> None:
        self.current: ReceivedMessage | None = None
        self.ready: Batch | None = None
        self.ledgers = Ledgers()
        """Messages delivered to handlers of `run`; these are acked one by one."""
        self._manual = manual
        self._polled: dict[PartitionName, Place] = {}
        self._out: dict[PartitionName, Place] = {}
        self._processed: dict[PartitionName, Place] = {}
        self._saved: dict[PartitionName, int | None] = {}
        self._incarnations: dict[PartitionName, int] = {}
        self._untouched: dict[PartitionName, int] = {}
        self._uncommitted: dict[PartitionName, int] = {}
        self._entrusted: dict[PartitionName, int] = {}
        self._lent: PartitionName | None = None
        self._looped: list[ReceivedMessage] = []
        self.stopped = False
        self._void: PartitionName | None = None
        self._gone: set[PartitionName] = set()
        self._lost: set[PartitionName] = set()

    # Partitions

    def add(self, name: PartitionName, place: Place, saved: int | None = None, incarnation: int = 0) -> None:
        """Start reading a partition at `position`. `saved` is the committed offset, if there is one.

        `incarnation` is that of the topic.
        """
        self._saved[name] = saved
        self._incarnations[name] = incarnation
        if saved is None:
            self._untouched[name] = place.offset
        # Last, because Ctrl-C can interrupt at any line, and a partition in this dict counts as read.
        self._processed[name] = place

    def remove(self, name: PartitionName) -> None:
        """Remove a partition that is not assigned to this consumer any more."""
        self._forget(name)
        self._gone.add(name)
        for places in (self._processed, self._saved, self._incarnations, self._untouched):
            places.pop(name, None)

    def lose(self, name: PartitionName) -> bool:
        """Remove a partition. Return True if delivered messages of it are uncommitted.

        Such messages are delivered again, to the new owner.
        """
        known = self._processed.get(name)
        unsaved = known is not None and known.offset != self._saved[name]
        open_ended = self.in_work(name) or self.uncommitted(name)
        self.remove(name)
        if open_ended:
            self._lost.add(name)
        return open_ended or unsaved

    def lost_and_back(self, message: ReceivedMessage | None = None) -> list[PartitionName]:
        """Return partitions assigned again whose loss is not reported yet.

        With `message` only its own partition.
        """
        return [name for name in self._lost if name in self and (message is None or name == _name(message))]

    def check_lost(
        self, refused: Iterable[PartitionName] = (), message: ReceivedMessage | None = None
    ) -> None:
        """Raise Fenced, once, if a partition was lost before its delivered messages were committed.

        `refused` partitions count as lost, too. For a `message`, and inside a handler, only its partition
        matters.
        """
        lost = sorted(self._lost.union(refused))
        message = message or IN_WORK.get()
        if message is not None:
            lost = [name for name in lost if name == _name(message)]
        self._lost.difference_update(lost)
        if lost:
            raise Fenced(
                f"{', '.join(map(str, lost))}: another member of the group owns it by now; the uncommitted messages"
                " that were delivered here are delivered again there.",
                partitions=[list(name) for name in lost],
            )

    def said_lost(self, names: Iterable[PartitionName]) -> None:
        """Clear the unreported loss of partitions, because the user was notified."""
        self._lost.difference_update(names)

    def incarnation(self, name: PartitionName) -> int:
        """Return the incarnation of the partition's topic."""
        return self._incarnations[name]

    def in_work(self, name: PartitionName) -> bool:
        """Return whether a loop, `poll` caller or handler may be working on a message of it."""
        return name in self._polled or name == self._lent or self.ledgers.in_work(name)

    def uncommitted(self, name: PartitionName) -> bool:
        """Return whether, in manual mode, a delivered message of the partition is not committed."""
        return name in self._uncommitted

    def seek(self, name: PartitionName, place: Place) -> None:
        """Continue at `position`.

        Everything before it counts as acked; unacked deliveries are discarded.
        """
        self._forget(name)
        self._untouched.pop(name, None)
        self._processed[name] = place

    def __contains__(self, name: object) -> bool:
        return name in self._processed

    # Delivery

    def begin(self, batch: Batch) -> None:
        """Make `batch` the next to be delivered. The former batch must be delivered completely."""
        self.ready = batch
        if batch.messages:
            return
        if self.ledgers.get(batch.name) is not None:
            self.take()
        elif batch.name in self._polled:
            self._polled[batch.name] = batch.following
        else:
            self._done(batch.name, batch.following)

    def loop(self) -> list[ReceivedMessage]:
        """Return the messages of the ready batch, for a loop that sets `current` to each."""
        return [] if self.ready is None else self.ready.messages

    def lend(self) -> list[ReceivedMessage]:
        """Return the ready messages, which a loop iterates over until more is requested."""
        self._lent = None if self.ready is None else self.ready.name
        self._looped = self.loop()
        return [] if self.stopped else self._looped

    def stop(self) -> None:
        """End a loop after the current message. Safe in any thread and in signal handlers.

        Only the loop's list is cleared: it is not used for positions, so nothing is acked by this.
        """
        self.stopped = True
        self._looped.clear()

    def poll(self, count: int) -> list[ReceivedMessage]:
        """Remove up to `count` messages from the ready batch and return them."""
        ready = self.ready
        if ready is None:
            return []
        messages = ready.messages[:count]
        if messages:
            self._polled[ready.name] = self._behind(messages[-1])
            self._shorten(ready, len(messages))
        return messages

    def take(self) -> Ledger | None:
        """Move the ready batch to its ack tracker, for delivery to handlers."""
        ready, self.ready = self.ready, None
        return None if ready is None else self.ledgers.take(ready, self._processed[ready.name])

    def settle(self) -> None:
        """Ack everything delivered.

        Called when more is requested, and when the consumer is left without an error.
        """
        current, ready = self._in_hand(), self.ready
        for name, place in self._outstanding():
            self._done(name, place)
            if (
                self._manual
                and name in self
                and place.offset not in (self._saved[name], self._entrusted.get(name))
            ):
                self._uncommitted[name] = place.offset
        self._polled.clear()
        self.current = self._lent = self._void = None
        if not self._manual:
            self._lost.clear()
        if current is None or ready is None or _name(current) != ready.name:
            return
        if ready.ends_with(current):
            self.ready = None
        else:
            self._shorten(ready, bisect_right(ready.messages, current.offset, key=_offset))

    def settle_all_out(self) -> None:
        """Ack everything delivered, including the current message, for `commit()`."""
        for name, place in (*self._out.items(), *self._outstanding()):
            self._advance(name, place)
        for name in self.ledgers.names():
            self._advance(name, self._committable(name))

    def settle_to(self, message: ReceivedMessage) -> PartitionName:
        """Ack a partition up to and including `message`, for `commit(message)`.

        Return the partition. With handlers only as far as all earlier messages are acked. Raises BadRequest
        for a message that this consumer did not deliver, Fenced if its partition was reassigned.
        """
        name, behind = self._given(message)
        ledger = self.ledgers.get(name)
        if ledger is not None:
            ledger.finish(message)
            behind = ledger.place
        self._advance(name, behind)
        return name

    def through(self, message: ReceivedMessage) -> tuple[PartitionName, Place]:
        """Return the partition of `message` and the position after it.

        Raises BadRequest for a message that this consumer did not deliver, and where an earlier message is
        not acked; Fenced if its partition was reassigned.
        """
        name, behind = self._given(message)
        ledger = self.ledgers.get(name)
        return name, behind if ledger is None else self._covering(name, message)

    def _given(self, message: ReceivedMessage) -> tuple[PartitionName, Place]:
        """Check that `message` was delivered by this consumer.

        Return its partition and the position after it.
        """
        name, behind = _name(message), self._behind(message)
        if name not in self._processed:
            self._check_gone(name)
            raise BadRequest(f"This consumer does not read {name}, so it cannot commit a message of it.")
        if behind.offset > self.handed_out(name).offset:
            self._check_gone(name)
            raise BadRequest(f"The message at offset {message.offset} of {name} was not delivered yet.")
        return name, behind

    def drop_ready(self) -> None:
        """Discard the undelivered rest of the ready batch; a loop over it ends at once."""
        if self.ready is not None:
            self.ready.messages.clear()
            self.ready = None

    # Queries

    def handed_out(self, name: PartitionName) -> Place:
        """Return the position after the last delivered message of the partition."""
        places = [self._processed[name], *(place for each, place in self._outstanding() if each == name)]
        if name in self._out:
            places.append(self._out[name])
        ledger = self.ledgers.get(name)
        if ledger is not None:
            places.append(ledger.following)
        return max(places)

    def processed(self, name: PartitionName) -> Place:
        """Return the position before which everything of the partition is acked."""
        current = self._in_hand()
        if current is not None and not self._manual and _name(current) == name:
            self._advance(name, Place(current.offset, current.ordinal, current.origin.epoch))
        ledger = self.ledgers.get(name)
        if ledger is not None and not self._manual:
            self._advance(name, ledger.place)
        return self._processed[name]

    def saved(self, name: PartitionName) -> int | None:
        """Return the last committed offset that this consumer knows of, or None."""
        return self._saved[name]

    def unsaved(self) -> dict[PartitionName, Place]:
        """Return the acked positions that are not committed yet."""
        places = {name: self.processed(name) for name in self._processed}
        return {name: place for name, place in places.items() if place.offset != self._saved[name]}

    def unsaved_out(self) -> dict[PartitionName, Place]:
        """Return the positions that a transaction is to commit: after all delivered messages.

        Positions that are committed already are left out. In a handler the result is the position after its
        own message only: another handler's transaction may be committed first, and no commit may move an
        offset back. Partitions without deliveries are left out: these may be reassigned at any time, which
        would fence the transaction.
        """
        message = IN_WORK.get()
        if message is not None and self.ledgers.get(_name(message)) is not None:
            places = {_name(message): self._covering(_name(message), message)}
        else:
            places = {name: self._committable(name) for name in self._processed}
        known = {name: self._untouched.get(name, self._saved[name]) for name in places}
        return {name: place for name, place in places.items() if place.offset != known[name]}

    def entrusted(self, places: Mapping[PartitionName, Place]) -> None:
        """Stop waiting for the commit of `positions`.

        A transaction has them whose end is not reported to this consumer.
        """
        for name, place in places.items():
            self._entrusted[name] = place.offset
            if self._uncommitted.get(name, UNKNOWN) <= place.offset:
                self._uncommitted.pop(name, None)

    def start_of(self, name: PartitionName) -> Place:
        """Return where a partition without a committed offset was started."""
        offset = self._untouched.get(name)
        return self._processed[name] if offset is None else Place(offset, UNKNOWN, UNKNOWN)

    def saved_elsewhere(self, places: Mapping[PartitionName, Place]) -> None:
        """Record `positions` as committed by a transaction, and ack them.

        Partitions that a `seek` moved back meanwhile are not acked.
        """
        self.note_saved(places)
        for name, place in places.items():
            if name in self and self.handed_out(name).offset >= place.offset:
                self._advance(name, place)

    def note_saved(self, places: Mapping[PartitionName, Place]) -> None:
        """Record `positions` as committed."""
        for name in places.keys() & self._saved.keys():
            self._saved[name] = places[name].offset
            self._untouched.pop(name, None)
            if self._uncommitted.get(name, UNKNOWN) <= places[name].offset:
                self._uncommitted.pop(name, None)

    def names(self) -> Iterable[PartitionName]:
        """Return the partitions that are read."""
        return self._processed.keys()

    # Internals

    def _covering(self, name: PartitionName, message: ReceivedMessage) -> Place:
        """Return the position after a handler's message if all earlier messages are acked.

        Raises BadRequest if one of these is not.
        """
        ledger = self.ledgers.get(name)
        assert ledger is not None
        place = max(self._processed[name], ledger.place_with(message))
        if place.offset <= message.offset:
            raise BadRequest(
                f"Messages of {name} before offset {message.offset} are not acked, so its offset cannot be committed"
                ' together with its results: that needs run(order="partition").'
            )
        return place

    def _committable(self, name: PartitionName) -> Place:
        """Return the position up to which everything is acked or belongs to the calling handler."""
        ledger = self.ledgers.get(name)
        if ledger is None:
            return self.handed_out(name)
        message = IN_WORK.get()
        own = message if message is not None and _name(message) == name else None
        return max(self._processed[name], ledger.place_with(own))

    def _in_hand(self) -> ReceivedMessage | None:
        """Return the message of the loop, or None if its partition was removed.

        A loop sets `current` without a lock, possibly after the removal.
        """
        current = self.current
        return None if current is None or _name(current) == self._void else current

    def _outstanding(self) -> list[tuple[PartitionName, Place]]:
        """Return the positions after unacked delivered messages, except those of handlers."""
        current = self._in_hand()
        found = list(self._polled.items())
        return found if current is None else [*found, (_name(current), self._behind(current))]

    def _done(self, name: PartitionName, place: Place) -> None:
        """Ack up to `position`; in manual mode only record it as delivered."""
        if self._manual and name in self:
            self._out[name] = place
        else:
            self._advance(name, place)

    def _shorten(self, ready: Batch, count: int) -> None:
        """Remove the first `count` messages. The old list is emptied, so that a loop over it ends."""
        rest = ready.messages[count:]
        ready.messages.clear()
        self.ready = ready._replace(messages=rest) if rest else None

    def _behind(self, message: ReceivedMessage) -> Place:
        """Return the position after `message` and after what was filtered out after it."""
        ready = self.ready
        if ready is not None and ready.ends_with(message):
            return ready.following
        return Place(message.next_offset, message.ordinal + 1, message.origin.epoch)

    def _check_gone(self, name: PartitionName) -> None:
        """Raise Fenced if the partition was removed after its messages were delivered."""
        if name in self._gone:
            self._lost.discard(name)
            raise Fenced(
                f"{name} was assigned to another member of the group after that message was delivered.",
                partitions=[list(name)],
            )

    def _advance(self, name: PartitionName, place: Place) -> None:
        """Move the acked position forward."""
        known = self._processed.get(name)
        if known is not None and place.offset > known.offset:
            self._processed[name] = place

    def _forget(self, name: PartitionName) -> None:
        """Discard everything delivered or ready of the partition."""
        self.ledgers.void(name)
        for places in (self._polled, self._out, self._uncommitted, self._entrusted):
            places.pop(name, None)
        if self._lent == name:
            self._void = name
        if self.ready is not None and self.ready.name == name:
            self.ready.messages.clear()
            self.ready = None
        if self.current is not None and _name(self.current) == name:
            self.current = None


def _name(message: ReceivedMessage) -> PartitionName:
    """Return the partition of `message`."""
    return PartitionName(message.topic, message.partition)


_offset = attrgetter("offset")


IN_WORK: ContextVar[ReceivedMessage | None] = ContextVar("tfmq_message_in_work", default=None)
"""The message of the running handler; None outside of handlers."""


class Ledger:
    """Unacked messages of one partition that were delivered to handlers.

    Messages are delivered in order and acked in any order. `position` is the position before which everything
    is acked, which may be committed; it never moves back. After a seek or the loss of the partition the
    tracker is `invalid`: late acks are ignored.
    """

    def __init__(self, name: PartitionName, place: Place) -> None:
        self.name = name
        self.place = place
        """Everything before this position is acked."""
        self.following = place
        """Position after the last delivered message."""
        self.void = False
        self.leaving = False
        """Whether the partition is revoked, so that no handler may start."""
        self.in_work = 0
        """Number of running handlers."""
        self.met = self.done = 0
        """Numbers of messages delivered and acked so far."""
        self._out: deque[ReceivedMessage] = deque()
        self._finished: set[int] = set()
        self._behind: dict[int, Place] = {}

    @property
    def span(self) -> int:
        """Bytes from the first unacked message to the end of what was delivered."""
        return self.following.offset - self.place.offset if self._out else 0

    def take(self, batch: Batch) -> None:
        """Add a delivered batch; an empty one only moves the end past what was filtered out."""
        self.following = batch.following
        self.met += len(batch.messages)
        self._out.extend(batch.messages)
        if self._out:
            self._behind[self._out[-1].offset] = batch.following
        else:
            self.place = batch.following

    def finish(self, message: ReceivedMessage) -> None:
        """Ack a message. A second call does nothing."""
        offset = message.offset
        if not self._out or not self._out[0].offset <= offset <= self._out[-1].offset:
            return
        if offset in self._finished:
            return
        self.done += 1
        self._finished.add(offset)
        while self._out and self._out[0].offset in self._finished:
            done = self._out.popleft()
            self._finished.discard(done.offset)
            known = done.offset in self._behind
            self.place = self._behind.pop(done.offset) if known else behind(done)

    def place_with(self, message: ReceivedMessage | None) -> Place:
        """Return what the position would be if `message` were acked as well."""
        place = self.place
        if message is not None and self._out and self._out[0].offset == message.offset:
            for each in self._out:
                if each.offset != message.offset and each.offset not in self._finished:
                    break
                place = self._behind.get(each.offset) or behind(each)
        return place


class Ledgers:
    """Ack trackers of one consumer, by partition."""

    def __init__(self) -> None:
        self.freed: Callable[[], None] = lambda: None
        """Called when a revoked partition has no running handler any more."""
        self.stayed: Callable[[], None] = lambda: None
        """Called when a revocation was withdrawn."""
        self.running = False
        """Whether `run` delivers the messages; stays True for the consumer's lifetime."""
        self._ledgers: dict[PartitionName, Ledger] = {}
        self._saved_by = ""

    def check_free(self) -> None:
        """Raise NotAllowed if `run` delivers the messages."""
        if self.running:
            raise NotAllowed(
                "run() hands out the messages of this consumer: poll(), next(), a loop or another run() would take them"
                " from its handlers. A handler has its message as argument; to read others, use another consumer."
            )

    def take(self, batch: Batch, place: Place) -> Ledger:
        """Add a delivered batch.

        `position` is the acked position if the partition has no tracker yet.
        """
        ledger = self._ledgers.get(batch.name)
        if ledger is None:
            ledger = self._ledgers[batch.name] = Ledger(batch.name, place)
        ledger.take(batch)
        return ledger

    def get(self, name: PartitionName) -> Ledger | None:
        """Return the tracker of a partition, or None."""
        return self._ledgers.get(name)

    def __iter__(self) -> Iterator[Ledger]:
        return iter(self._ledgers.values())

    def names(self) -> list[PartitionName]:
        """Return the partitions that have a tracker."""
        return list(self._ledgers)

    def agree(self, way: str) -> None:
        """Record how a handler commits. Raises NotAllowed if another method was used before."""
        if not self._ledgers or IN_WORK.get() is None:
            return
        if self._saved_by not in ("", way):
            raise NotAllowed(
                "Handlers of run() commit by commit(), or in transactions, not by both: the commit() of one could move"
                " back the offset that the transaction of another has just committed. Use commit_offsets(consumer)"
                " everywhere, also in a transaction of nothing else."
            )
        self._saved_by = way

    def in_work(self, name: PartitionName) -> bool:
        """Return whether a handler is running for the partition."""
        ledger = self._ledgers.get(name)
        return ledger is not None and ledger.in_work > 0

    def leave(self, name: PartitionName) -> None:
        """Start no more handlers for the partition; running ones may end and ack."""
        ledger = self._ledgers.get(name)
        if ledger is not None:
            ledger.leaving = True

    def stay(self, name: PartitionName) -> None:
        """Withdraw a revocation."""
        ledger = self._ledgers.get(name)
        if ledger is not None and ledger.leaving:
            ledger.leaving = False
            self.stayed()

    def rested(self, ledger: Ledger) -> None:
        """Count a handler as ended."""
        ledger.in_work -= 1
        if ledger.leaving and not ledger.in_work:
            self.freed()

    def void(self, name: PartitionName) -> None:
        """Remove the tracker of a lost or sought partition. Late acks are ignored."""
        ledger = self._ledgers.pop(name, None)
        if ledger is not None:
            ledger.void = ledger.leaving = True


UNKNOWN = -1


class Place(NamedTuple):
    """Position in a partition: next offset, number of messages before it, epoch of the log.

    `ordinal` and `epoch` are -1 where unknown.
    """

    offset: int
    ordinal: int = UNKNOWN
    epoch: int = UNKNOWN


class Batch(NamedTuple):
    """Messages of one partition in order, and the position after them.

    `end_position` is also after messages that were filtered out; if all were, `messages` is empty.
    """

    name: PartitionName
    messages: list[ReceivedMessage]
    following: Place

    def ends_with(self, message: ReceivedMessage) -> bool:
        """Return whether `message` is the last one. Another thread may clear the list at any moment."""
        last = self.messages[-1:]
        return bool(last) and last[0] is message


def partition_of(message: ReceivedMessage) -> PartitionName:
    """Return the partition of `message`."""
    return PartitionName(message.topic, message.partition)


def behind(message: ReceivedMessage) -> Place:
    """Return the position after `message`."""
    return Place(message.next_offset, message.ordinal + 1, message.origin.epoch)
