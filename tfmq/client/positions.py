"""Where a consumer stands: what it was given, what of that is processed, what is saved. Pure bookkeeping.

A message handed out by a loop is processed when the next one is asked for; what `poll` handed out, when `poll` is
called again; both when the consumer is left without an error. With `manual`, only `commit` makes it so. `Positions`
knows at any moment, per partition, the place before which everything is processed, and so what may be saved. No
place goes back but by `seek`.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import NamedTuple

from tfmq.client.received import ReceivedMessage
from tfmq.errors import BadRequest
from tfmq.offsets.stored import PartitionName as PartitionName

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


class Positions:
    """The places of all partitions of one consumer.

    `current` is the message that a loop works on. The face sets it before it hands the message out, and nothing
    else is done for a single message. `ready` is the batch that is being handed out.
    """

    def __init__(self, *, manual: bool = False) -> None:
        self.current: ReceivedMessage | None = None
        self.ready: Batch | None = None
        self._manual = manual
        self._polled: dict[PartitionName, Place] = {}
        self._out: dict[PartitionName, Place] = {}
        self._processed: dict[PartitionName, Place] = {}
        self._saved: dict[PartitionName, int | None] = {}

    # Partitions

    def add(self, name: PartitionName, place: Place, saved: int | None = None) -> None:
        """A partition is read from `place` on; `saved` is the offset that the store has of it, None: none."""
        self._processed[name] = place
        self._saved[name] = saved

    def remove(self, name: PartitionName) -> None:
        """The partition is not this consumer's any more."""
        self._forget(name)
        self._processed.pop(name, None)
        self._saved.pop(name, None)

    def seek(self, name: PartitionName, place: Place) -> None:
        """Go on at `place`: what is before it counts as processed, what was handed out of the partition is void."""
        self._forget(name)
        self._processed[name] = place

    def __contains__(self, name: object) -> bool:
        return name in self._processed

    # Handing out

    def begin(self, batch: Batch) -> None:
        """`batch` is the next to be handed out; everything of the one before is out."""
        self.ready = batch
        if batch.messages:
            return
        if batch.name in self._polled:
            self._polled[batch.name] = batch.following
        else:
            self._done(batch.name, batch.following)

    def loop(self) -> list[ReceivedMessage]:
        """The messages for a loop to go through, setting `current` to each."""
        return [] if self.ready is None else self.ready.messages

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

    def settle(self) -> None:
        """More is asked for, or the consumer is left without an error: all that is out is processed."""
        current, ready = self.current, self.ready
        for name, place in self._outstanding():
            self._done(name, place)
        self._polled.clear()
        self.current = None
        if current is None or ready is None or _name(current) != ready.name:
            return
        if ready.messages and ready.messages[-1] is current:
            self.ready = None
        else:
            self._shorten(ready, bisect_right(ready.messages, current.offset, key=_offset))

    def settle_all_out(self) -> None:
        """`commit()`: all that is out counts as processed, the message in work included."""
        for name, place in (*self._out.items(), *self._outstanding()):
            self._advance(name, place)

    def settle_to(self, message: ReceivedMessage) -> PartitionName:
        """`commit(message)`: its partition is processed up to it and including it. Raises as `through`."""
        name, behind = self.through(message)
        self._advance(name, behind)
        return name

    def through(self, message: ReceivedMessage) -> tuple[PartitionName, Place]:
        """The partition of `message`, and the place behind it.

        Raises BadRequest for a message that this consumer was not given.
        """
        name, behind = _name(message), self._behind(message)
        if name not in self._processed:
            raise BadRequest(f"This consumer does not read {name}, so it cannot commit a message of it.")
        if behind.offset > self.handed_out(name).offset:
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
        return max(places)

    def processed(self, name: PartitionName) -> Place:
        """The place before which everything of the partition is processed."""
        current = self.current
        if current is not None and not self._manual and _name(current) == name:
            self._advance(name, Place(current.offset, current.ordinal, current.origin.epoch))
        return self._processed[name]

    def saved(self, name: PartitionName) -> int | None:
        """The offset that the store has, as far as this consumer knows."""
        return self._saved[name]

    def unsaved(self) -> dict[PartitionName, Place]:
        """What the store does not have yet, by partition."""
        places = {name: self.processed(name) for name in self._processed}
        return {name: place for name, place in places.items() if place.offset != self._saved[name]}

    def unsaved_out(self) -> dict[PartitionName, Place]:
        """The places behind all that was handed out, by partition, where the store has another one."""
        places = {name: self.handed_out(name) for name in self._processed}
        return {name: place for name, place in places.items() if place.offset != self._saved[name]}

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

    def names(self) -> Iterable[PartitionName]:
        return self._processed.keys()

    # Inside

    def _outstanding(self) -> list[tuple[PartitionName, Place]]:
        """The places behind what is out and not processed."""
        current = self.current
        found = list(self._polled.items())
        return found if current is None else [*found, (_name(current), self._behind(current))]

    def _done(self, name: PartitionName, place: Place) -> None:
        if self._manual:
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
        if ready is not None and ready.messages and ready.messages[-1] is message:
            return ready.following
        return Place(message.next_offset, message.ordinal + 1, message.origin.epoch)

    def _advance(self, name: PartitionName, place: Place) -> None:
        known = self._processed.get(name)
        if known is not None and place.offset > known.offset:
            self._processed[name] = place

    def _forget(self, name: PartitionName) -> None:
        """Nothing of the partition is out or ready any more."""
        self._polled.pop(name, None)
        self._out.pop(name, None)
        if self.ready is not None and self.ready.name == name:
            self.ready.messages.clear()
            self.ready = None
        if self.current is not None and _name(self.current) == name:
            self.current = None


def _name(message: ReceivedMessage) -> PartitionName:
    return PartitionName(message.topic, message.partition)


_offset = attrgetter("offset")
