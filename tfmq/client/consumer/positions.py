"""Where a consumer stands: what it was given, what of that is processed, what is saved. Pure bookkeeping.

A message handed out by a loop is processed when the next one is asked for; what `poll` handed out, when `poll` is
called again; both when the consumer is left without an error. With `manual`, only `commit` makes it so. `Positions`
knows at any moment, per partition, the place before which everything is processed, and so what may be saved. No
place goes back but by `seek`.

A partition that is to go to another member stays here until it is released: what is out of it may still become
processed. One that is lost is gone at once.
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
    """The places of all partitions of one consumer.

    `current` is the message that a loop works on. The face sets it before it hands the message out, and nothing
    else is done for a single message. `ready` is the batch that is being handed out; a loop that was `lent` it is in it
    until more is asked for.
    """

    def __init__(self, *, manual: bool = False) -> None:
        self.current: ReceivedMessage | None = None
        self.ready: Batch | None = None
        self.ledgers = Ledgers()
        """What is out to handlers that `run` calls: processed as far as they are finished."""
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
        """A partition, of the topic of that `incarnation`, is read from `place` on; `saved` is the offset that the
        store has of it, None: none."""
        self._saved[name] = saved
        self._incarnations[name] = incarnation
        if saved is None:
            self._untouched[name] = place.offset
        self._processed[name] = place  # last: Ctrl-C may come at any line, and what is in here is read

    def remove(self, name: PartitionName) -> None:
        """The partition is not this consumer's any more."""
        self._forget(name)
        self._gone.add(name)
        for places in (self._processed, self._saved, self._incarnations, self._untouched):
            places.pop(name, None)

    def lose(self, name: PartitionName) -> bool:
        """As `remove`; whether something was handed out of it that is not saved, so that another gets it too."""
        known = self._processed.get(name)
        unsaved = known is not None and known.offset != self._saved[name]
        open_ended = self.in_work(name) or self.uncommitted(name)
        self.remove(name)
        if open_ended:
            self._lost.add(name)
        return open_ended or unsaved

    def lost_and_back(self, message: ReceivedMessage | None = None) -> list[PartitionName]:
        """Partitions that were lost with something in work, which is still to be said, and are this one's again; of
        `message` its own only."""
        return [name for name in self._lost if name in self and (message is None or name == _name(message))]

    def check_lost(
        self, refused: Iterable[PartitionName] = (), message: ReceivedMessage | None = None
    ) -> None:
        """Raises Fenced, once, where something was handed out, and not saved in time, of partitions that are another's
        now; `refused`: of these, too. Where it is about a `message`, and to a handler, only that one's matters."""
        lost = sorted(self._lost.union(refused))
        message = message or IN_WORK.get()
        if message is not None:
            lost = [name for name in lost if name == _name(message)]
        self._lost.difference_update(lost)
        if lost:
            raise Fenced(
                f"{', '.join(map(str, lost))}: another member of the group has it by now, and will get again what was"
                " handed out of it here.",
                partitions=[list(name) for name in lost],
            )

    def said_lost(self, names: Iterable[PartitionName]) -> None:
        """The user was told that these are lost."""
        self._lost.difference_update(names)

    def incarnation(self, name: PartitionName) -> int:
        return self._incarnations[name]

    def in_work(self, name: PartitionName) -> bool:
        """Whether a loop, or who polled, may be at work on a message of it."""
        return name in self._polled or name == self._lent or self.ledgers.in_work(name)

    def uncommitted(self, name: PartitionName) -> bool:
        """Whether, with `manual`, a message of it was handed out that `commit` has not saved."""
        return name in self._uncommitted

    def seek(self, name: PartitionName, place: Place) -> None:
        """Go on at `place`: what is before it counts as processed, what was handed out of the partition is void."""
        self._forget(name)
        self._untouched.pop(name, None)
        self._processed[name] = place

    def __contains__(self, name: object) -> bool:
        return name in self._processed

    # Handing out

    def begin(self, batch: Batch) -> None:
        """`batch` is the next to be handed out; everything of the one before is out."""
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
        """The messages for a loop to go through, setting `current` to each."""
        return [] if self.ready is None else self.ready.messages

    def lend(self) -> list[ReceivedMessage]:
        """As `loop`; the loop goes through them from now on, until more is asked for."""
        self._lent = None if self.ready is None else self.ready.name
        self._looped = self.loop()
        return [] if self.stopped else self._looped

    def stop(self) -> None:
        """A loop ends behind the current message. Called in any thread and in signal handlers, so at any moment: all
        that it changes is a list that nobody takes for what was read, and nothing is processed by that."""
        self.stopped = True
        self._looped.clear()

    def poll(self, count: int) -> list[ReceivedMessage]:
        """Up to `count` messages of the ready batch, which go out by `poll`."""
        ready = self.ready
        if ready is None:
            return []
        messages = ready.messages[:count]
        if messages:
            self._polled[ready.name] = self._behind(messages[-1])
            self._shorten(ready, len(messages))
        return messages

    def take(self) -> Ledger | None:
        """All that is ready of a partition is out to handlers: processed as far as its ledger says."""
        ready, self.ready = self.ready, None
        return None if ready is None else self.ledgers.take(ready, self._processed[ready.name])

    def settle(self) -> None:
        """More is asked for, or the consumer is left without an error: all that is out is processed."""
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
        """`commit()`: all that is out counts as processed, the message in work included."""
        for name, place in (*self._out.items(), *self._outstanding()):
            self._advance(name, place)
        for name in self.ledgers.names():
            self._advance(name, self._committable(name))

    def settle_to(self, message: ReceivedMessage) -> PartitionName:
        """`commit(message)`: its partition is processed up to it and including it, as far as those before it are
        finished. Raises BadRequest for a message that this consumer was not given."""
        name, behind = self._given(message)
        ledger = self.ledgers.get(name)
        if ledger is not None:
            ledger.finish(message)
            behind = ledger.place
        self._advance(name, behind)
        return name

    def through(self, message: ReceivedMessage) -> tuple[PartitionName, Place]:
        """The partition of `message`, and the place behind it.

        Raises BadRequest for a message that this consumer was not given, and where one before it is not finished.
        """
        name, behind = self._given(message)
        ledger = self.ledgers.get(name)
        return name, behind if ledger is None else self._covering(name, message)

    def _given(self, message: ReceivedMessage) -> tuple[PartitionName, Place]:
        name, behind = _name(message), self._behind(message)
        if name not in self._processed:
            self._check_gone(name)
            raise BadRequest(f"This consumer does not read {name}, so it cannot commit a message of it.")
        if behind.offset > self.handed_out(name).offset:
            self._check_gone(name)
            raise BadRequest(f"The message at offset {message.offset} of {name} was not handed out yet.")
        return name, behind

    def drop_ready(self) -> None:
        """What of the ready batch is not handed out stays back; a loop over it ends at once."""
        if self.ready is not None:
            self.ready.messages.clear()
            self.ready = None

    # Asking

    def handed_out(self, name: PartitionName) -> Place:
        """The place behind everything that was handed out of the partition."""
        places = [self._processed[name], *(place for each, place in self._outstanding() if each == name)]
        if name in self._out:
            places.append(self._out[name])
        ledger = self.ledgers.get(name)
        if ledger is not None:
            places.append(ledger.following)
        return max(places)

    def processed(self, name: PartitionName) -> Place:
        """The place before which everything of the partition is processed."""
        current = self._in_hand()
        if current is not None and not self._manual and _name(current) == name:
            self._advance(name, Place(current.offset, current.ordinal, current.origin.epoch))
        ledger = self.ledgers.get(name)
        if ledger is not None and not self._manual:
            self._advance(name, ledger.place)
        return self._processed[name]

    def saved(self, name: PartitionName) -> int | None:
        """The offset that the store has, as far as this consumer knows."""
        return self._saved[name]

    def unsaved(self) -> dict[PartitionName, Place]:
        """What the store does not have yet, by partition."""
        places = {name: self.processed(name) for name in self._processed}
        return {name: place for name, place in places.items() if place.offset != self._saved[name]}

    def unsaved_out(self) -> dict[PartitionName, Place]:
        """For a transaction: the places behind all that was handed out, by partition, where the store has another one.

        In a handler that is the place behind its own message, and no more: another handler's transaction may be
        committed first, and nothing must go back behind it. Nor is there one of a partition of which nothing was handed
        out: such a one goes to another member at any time, and the transaction with it.
        """
        message = IN_WORK.get()
        if message is not None and self.ledgers.get(_name(message)) is not None:
            places = {_name(message): self._covering(_name(message), message)}
        else:
            places = {name: self._committable(name) for name in self._processed}
        known = {name: self._untouched.get(name, self._saved[name]) for name in places}
        return {name: place for name, place in places.items() if place.offset != known[name]}

    def entrusted(self, places: Mapping[PartitionName, Place]) -> None:
        """A transaction of which this consumer will not hear has `places`: it waits no longer for their commit."""
        for name, place in places.items():
            self._entrusted[name] = place.offset
            if self._uncommitted.get(name, UNKNOWN) <= place.offset:
                self._uncommitted.pop(name, None)

    def start_of(self, name: PartitionName) -> Place:
        """Where a partition of which nothing is saved goes on: where reading began."""
        offset = self._untouched.get(name)
        return self._processed[name] if offset is None else Place(offset, UNKNOWN, UNKNOWN)

    def saved_elsewhere(self, places: Mapping[PartitionName, Place]) -> None:
        """A transaction saved `places`; what is before them is processed, unless a `seek` has gone back meanwhile."""
        self.note_saved(places)
        for name, place in places.items():
            if name in self and self.handed_out(name).offset >= place.offset:
                self._advance(name, place)

    def note_saved(self, places: Mapping[PartitionName, Place]) -> None:
        """The store has `places` now."""
        for name in places.keys() & self._saved.keys():
            self._saved[name] = places[name].offset
            self._untouched.pop(name, None)
            if self._uncommitted.get(name, UNKNOWN) <= places[name].offset:
                self._uncommitted.pop(name, None)

    def names(self) -> Iterable[PartitionName]:
        return self._processed.keys()

    # Inside

    def _covering(self, name: PartitionName, message: ReceivedMessage) -> Place:
        """The place behind `message`, which is out to a handler. Raises BadRequest where it is not behind it."""
        ledger = self.ledgers.get(name)
        assert ledger is not None
        place = max(self._processed[name], ledger.place_with(message))
        if place.offset <= message.offset:
            raise BadRequest(
                f"Messages of {name} before offset {message.offset} are not finished, so its offset cannot be saved"
                ' together with its results: that needs run(order="partition").'
            )
        return place

    def _committable(self, name: PartitionName) -> Place:
        """The place behind all that was handed out, as far as no other handler is at work on it."""
        ledger = self.ledgers.get(name)
        if ledger is None:
            return self.handed_out(name)
        message = IN_WORK.get()
        own = message if message is not None and _name(message) == name else None
        return max(self._processed[name], ledger.place_with(own))

    def _in_hand(self) -> ReceivedMessage | None:
        """What a loop works on, unless its partition went away meanwhile: a loop sets `current` without a lock."""
        current = self.current
        return None if current is None or _name(current) == self._void else current

    def _outstanding(self) -> list[tuple[PartitionName, Place]]:
        """The places behind what is out and not processed."""
        current = self._in_hand()
        found = list(self._polled.items())
        return found if current is None else [*found, (_name(current), self._behind(current))]

    def _done(self, name: PartitionName, place: Place) -> None:
        if self._manual and name in self:
            self._out[name] = place
        else:
            self._advance(name, place)

    def _shorten(self, ready: Batch, count: int) -> None:
        """The first `count` messages of `ready` are out. The old list is emptied: a loop over it ends."""
        rest = ready.messages[count:]
        ready.messages.clear()
        self.ready = ready._replace(messages=rest) if rest else None

    def _behind(self, message: ReceivedMessage) -> Place:
        """The place behind `message`; behind the last one of a batch lies all that was left out after it, too."""
        ready = self.ready
        if ready is not None and ready.ends_with(message):
            return ready.following
        return Place(message.next_offset, message.ordinal + 1, message.origin.epoch)

    def _check_gone(self, name: PartitionName) -> None:
        if name in self._gone:
            self._lost.discard(name)
            raise Fenced(
                f"{name} went to another member of the group after that message was handed out.",
                partitions=[list(name)],
            )

    def _advance(self, name: PartitionName, place: Place) -> None:
        known = self._processed.get(name)
        if known is not None and place.offset > known.offset:
            self._processed[name] = place

    def _forget(self, name: PartitionName) -> None:
        """Nothing of the partition is out or ready any more."""
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
    return PartitionName(message.topic, message.partition)


_offset = attrgetter("offset")


# What of the partitions is out to handlers, and the lowest offset of each that is not finished. Pure bookkeeping.
#
# A consumer that runs handlers takes messages of a partition in order, and they end in any order. The place of a ledger
# is where everything before it is finished: what may be saved. It only goes forward. A ledger is *void* once its
# partition was given up or sought: what ends late counts for nothing.

IN_WORK: ContextVar[ReceivedMessage | None] = ContextVar("tfmq_message_in_work", default=None)
"""The message that the running handler was called with; None outside of one."""


class Ledger:
    """One partition from `place` on: see the module."""

    def __init__(self, name: PartitionName, place: Place) -> None:
        self.name = name
        self.place = place
        """Everything before it is finished."""
        self.following = place
        """Behind everything that is out."""
        self.void = False
        self.leaving = False
        """Nothing more of it may begin."""
        self.in_work = 0
        """How many handlers are at work on it."""
        self.met = self.done = 0
        """How many messages were out so far, and how many of them are finished."""
        self._out: deque[ReceivedMessage] = deque()
        self._finished: set[int] = set()
        self._behind: dict[int, Place] = {}

    @property
    def span(self) -> int:
        """Bytes from the place to the end of what is out."""
        return self.following.offset - self.place.offset if self._out else 0

    def take(self, batch: Batch) -> None:
        """All of `batch` is out; an empty one only moves on what was left out."""
        self.following = batch.following
        self.met += len(batch.messages)
        self._out.extend(batch.messages)
        if self._out:
            self._behind[self._out[-1].offset] = batch.following
        else:
            self.place = batch.following

    def finish(self, message: ReceivedMessage) -> None:
        """It is done with. A second time does nothing."""
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
        """The place as it would be if `message` were finished, too."""
        place = self.place
        if message is not None and self._out and self._out[0].offset == message.offset:
            for each in self._out:
                if each.offset != message.offset and each.offset not in self._finished:
                    break
                place = self._behind.get(each.offset) or behind(each)
        return place


class Ledgers:
    """Those of one consumer, by partition."""

    def __init__(self) -> None:
        self.freed: Callable[[], None] = lambda: None
        """Called when a partition that is leaving has no handler at work any more."""
        self.stayed: Callable[[], None] = lambda: None
        """Called when one that was leaving stays."""
        self.running = False
        """Whether a run hands out what is read; it never ends but with the consumer."""
        self._ledgers: dict[PartitionName, Ledger] = {}
        self._saved_by = ""

    def check_free(self) -> None:
        """Raises NotAllowed where a run hands out what is read."""
        if self.running:
            raise NotAllowed(
                "run() hands out the messages of this consumer: poll(), next(), a loop or another run() would take them"
                " from its handlers. A handler has its message as argument; who needs more reads with a consumer of his"
                " own."
            )

    def take(self, batch: Batch, place: Place) -> Ledger:
        """`batch` is out to handlers; everything before `place` is done where nothing else of the partition is out."""
        ledger = self._ledgers.get(batch.name)
        if ledger is None:
            ledger = self._ledgers[batch.name] = Ledger(batch.name, place)
        ledger.take(batch)
        return ledger

    def get(self, name: PartitionName) -> Ledger | None:
        return self._ledgers.get(name)

    def __iter__(self) -> Iterator[Ledger]:
        return iter(self._ledgers.values())

    def names(self) -> list[PartitionName]:
        """The partitions of which something is, or was, out."""
        return list(self._ledgers)

    def agree(self, way: str) -> None:
        """A handler is about to save by `way`. Raises NotAllowed where another way was used before."""
        if not self._ledgers or IN_WORK.get() is None:
            return
        if self._saved_by not in ("", way):
            raise NotAllowed(
                "Handlers of run() save by commit(), or in transactions, not by both: the commit() of one could take"
                " back the place that the transaction of another has just saved. Write commit_offsets(consumer)"
                " everywhere, also in a transaction of nothing else."
            )
        self._saved_by = way

    def in_work(self, name: PartitionName) -> bool:
        """Whether a handler is at work on a message of it."""
        ledger = self._ledgers.get(name)
        return ledger is not None and ledger.in_work > 0

    def leave(self, name: PartitionName) -> None:
        """Nothing more of the partition begins; what is in work may end, and counts."""
        ledger = self._ledgers.get(name)
        if ledger is not None:
            ledger.leaving = True

    def stay(self, name: PartitionName) -> None:
        """It stays after all."""
        ledger = self._ledgers.get(name)
        if ledger is not None and ledger.leaving:
            ledger.leaving = False
            self.stayed()

    def rested(self, ledger: Ledger) -> None:
        """A handler is not at work on it any more."""
        ledger.in_work -= 1
        if ledger.leaving and not ledger.in_work:
            self.freed()

    def void(self, name: PartitionName) -> None:
        """The partition was given up, or is read elsewhere: nothing of it begins, nothing that ends counts."""
        ledger = self._ledgers.pop(name, None)
        if ledger is not None:
            ledger.void = ledger.leaving = True


# Places in partitions, and messages of one partition with the place behind them.

UNKNOWN = -1


class Place(NamedTuple):
    """A place in a partition: the offset where reading goes on, how many messages lie before it, and the log's
    epoch when that was read (both -1 where not known)."""

    offset: int
    ordinal: int = UNKNOWN
    epoch: int = UNKNOWN


class Batch(NamedTuple):
    """Messages of one partition in order, and the place behind them and behind what was left out there.

    `messages` may be empty: then all that was read was left out, and `following` still moves on.
    """

    name: PartitionName
    messages: list[ReceivedMessage]
    following: Place

    def ends_with(self, message: ReceivedMessage) -> bool:
        """Whether `message` is its last one. The list may become empty at any moment."""
        last = self.messages[-1:]
        return bool(last) and last[0] is message


def partition_of(message: ReceivedMessage) -> PartitionName:
    """The partition that `message` stands in."""
    return PartitionName(message.topic, message.partition)


def behind(message: ReceivedMessage) -> Place:
    """The place behind `message`."""
    return Place(message.next_offset, message.ordinal + 1, message.origin.epoch)
