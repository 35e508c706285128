"""Which partitions a consumer reads, and from where: found at the start, and looked for again from time to time.

A topic that is not there is waited for, and so is the end of a transaction that has the group's offsets. A partition's
place is, in this order: what its group has saved for this incarnation of the topic; the earliest one, for a partition
that appeared later; what the user said with `start`.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Final

from tfmq.client.asking import ask
from tfmq.client.call import Call
from tfmq.client.consumer_options import ConsumerOptions
from tfmq.client.decoder import Decoder
from tfmq.client.fetcher import Feed, Fetcher
from tfmq.client.link import Link
from tfmq.client.membership import Membership
from tfmq.client.offset_storage import StoredOffset
from tfmq.client.positions import UNKNOWN, PartitionName, Place, Positions
from tfmq.client.start import EARLIEST, Question
from tfmq.client.waiting import Flag, Operation, Wait
from tfmq.errors import Busy, NotSupported, UnknownTopic
from tfmq.protocol.commands import Locate, Metadata

log = logging.getLogger("tfmq.consumer")

MISSING_SECONDS: Final = 0.1
MISSING_SECONDS_MAX: Final = 1.0
"""How soon a topic that is not there is looked for again, doubled up to the second."""


class Assignment:
    """Keeps `fetcher` and `positions` at what the subscription means; `changed` is called when they grew."""

    def __init__(
        self,
        options: ConsumerOptions,
        link: Link,
        fetcher: Fetcher,
        positions: Positions,
        membership: Membership | None,
        changed: Callable[[], None],
    ) -> None:
        self.looked = False
        self._options = options
        self._link = link
        self._fetcher = fetcher
        self._positions = positions
        self._membership = membership
        self._changed = changed
        self._told_missing: set[str] = set()
        self._told_busy = ""
        self._topics: dict[str, int] = {}
        self._grants: dict[PartitionName, int] = {}

    def watch(self) -> Operation[None]:
        """Never ends: looks, waits, looks again. Raises what is no passing failure."""
        pause = MISSING_SECONDS
        while True:
            try:
                missing = yield from self.look()
                self.looked = True
            except Busy as busy:
                missing = True
                self._tell_busy(busy)
            self._changed()
            if missing:
                yield Wait(self._news(), min(pause, self._options.refresh))
                pause = min(pause * 2, MISSING_SECONDS_MAX)
            else:
                pause = MISSING_SECONDS
                yield Wait(self._news(), self._options.refresh)

    def _news(self) -> tuple[Flag, ...]:
        """What is worth another look."""
        return () if self._membership is None else (self._membership.changed,)

    def look(self) -> Operation[bool]:
        """Asks for the topics and takes on what is new; whether something named is not there."""
        subscription = self._options.subscription
        reply = yield from ask(self._link, Metadata(subscription.asked()), NEVER)
        wanted = subscription.wanted(reply.topics)
        membership = self._membership
        self._drop_remade(wanted)
        mine: Mapping[PartitionName, int] = wanted
        if membership is not None:
            mine = yield from self._share(membership, wanted)
        fresh = {name: incarnation for name, incarnation in mine.items() if name not in self._fetcher.feeds}
        if fresh:
            yield from self._take_on(fresh, wanted)
        missing = subscription.missing(wanted)
        self._tell_missing(missing)
        return bool(missing) or len(mine) < len(wanted)

    def _share(
        self, membership: Membership, wanted: Mapping[PartitionName, int]
    ) -> Operation[dict[PartitionName, int]]:
        """What of `wanted` is this member's; what is not any more is dropped."""
        subscription = self._options.subscription
        topics = subscription.asked() or sorted({name.topic for name in wanted})
        some = subscription.single or subscription.numbers is not None
        only = sorted(wanted.keys() | subscription.single) if some else None
        if not membership.joined:
            yield from membership.join(topics, NEVER, only)
        elif not all(membership.has(*each) for each in wanted.items()):
            membership.want(topics, only)
            yield from membership.beat()
        grants = {name: each.grant for name, each in membership.granted.items()}
        for name in list(self._fetcher.feeds):
            if self._grants.get(name) != grants.get(name) and not self._fetcher.feeds[name].told:
                self._fetcher.remove(name)
                self._positions.remove(name)
        self._grants = grants
        return {
            name: incarnation for name, incarnation in wanted.items() if membership.has(name, incarnation)
        }

    def locate(self, name: PartitionName, incarnation: int, question: Question) -> Operation[Place]:
        """The place that `question` asks for."""
        request = Locate(name.topic, incarnation, name.partition, question.by, question.value)
        reply = yield from ask(self._link, request, self._link.now() + self._options.timeout)
        return Place(reply.offset, reply.ordinal, reply.epoch)

    def _drop_remade(self, wanted: Mapping[PartitionName, int]) -> None:
        """A deleted topic of which the user was told, and which was made anew, is read as a new one."""
        for name, feed in list(self._fetcher.feeds.items()):
            if (
                feed.told
                and isinstance(feed.failure, UnknownTopic)
                and wanted.get(name, 0) not in (0, feed.incarnation)
            ):
                self._fetcher.remove(name)
                self._positions.remove(name)

    def _take_on(
        self, fresh: Mapping[PartitionName, int], wanted: Mapping[PartitionName, int]
    ) -> Operation[None]:
        stored: Mapping[PartitionName, StoredOffset] = {}
        if self._membership is not None:
            stored = yield from self._membership.read(wanted, while_busy=False)
            stored = {**stored, **(yield from self._membership.claim(fresh))}
        known = {name.topic: each.incarnation for name, each in stored.items()}
        places: dict[PartitionName, Place] = {}
        questions: dict[PartitionName, Question] = {}
        for name, incarnation in fresh.items():
            kept = stored.get(name)
            if kept is not None and kept.incarnation == incarnation:
                places[name] = _place(name, kept)
            elif known.get(name.topic) == incarnation or self._appeared(name, incarnation):
                questions[name] = EARLIEST
            elif self._options.start.exact:
                places[name] = Place(self._options.start.value, UNKNOWN, UNKNOWN)
            else:
                questions[name] = self._options.start
        places |= yield from self._locate_all(fresh, questions)
        for name, place in places.items():
            kept = stored.get(name)
            self._add(name, fresh[name], place, kept.offset if kept and place.offset == kept.offset else None)

    def _appeared(self, name: PartitionName, incarnation: int) -> bool:
        """Whether the partition came up after this consumer had looked, so that its first messages are news."""
        if not self.looked:
            return False
        return self._options.start_latest or self._topics.get(name.topic) == incarnation

    def _locate_all(
        self, fresh: Mapping[PartitionName, int], questions: Mapping[PartitionName, Question]
    ) -> Operation[dict[PartitionName, Place]]:
        """The places for all `questions`, asked at once; those that fail are left for the next look."""
        calls: dict[PartitionName, Call] = {
            name: self._link.call(Locate(name.topic, fresh[name], name.partition, each.by, each.value))
            for name, each in questions.items()
        }
        found = {}
        try:
            for name, call in calls.items():
                while not call.done:
                    yield Wait((call,))
                if (
                    call.error is not None
                    and not call.error.retriable
                    and not isinstance(call.error, UnknownTopic)
                ):
                    raise call.error
                if call.error is None:
                    found[name] = Place(call.reply.offset, call.reply.ordinal, call.reply.epoch)
        finally:
            for call in calls.values():
                self._link.abandon(call)
        return found

    def _add(self, name: PartitionName, incarnation: int, place: Place, saved: int | None) -> None:
        decoder = Decoder(name.topic, name.partition, incarnation, self._options.codec)
        self._positions.add(name, place, saved)
        self._fetcher.add(Feed(name, incarnation, place, decoder))
        self._topics[name.topic] = incarnation
        log.debug("Reading %s from offset %d.", name, place.offset)

    def _tell_busy(self, busy: Busy) -> None:
        """The offsets are part of a transaction that is in doubt: nobody knows yet where the group goes on."""
        if busy.sentence != self._told_busy:
            self._told_busy = busy.sentence
            log.warning("Group %s waits for its offsets: %s", self._options.group, busy)

    def _tell_missing(self, missing: list[str]) -> None:
        for name in missing:
            if name not in self._told_missing:
                self._told_missing.add(name)
                log.warning("%s is not there yet; waiting for it. Reading never makes a topic.", name)


NEVER: Final = float("inf")


def _place(name: PartitionName, kept: StoredOffset) -> Place:
    if kept.index:
        raise NotSupported(
            f"{name}: the group stands inside a compressed batch, which this release cannot read; use a newer client."
        )
    return Place(kept.offset, UNKNOWN, kept.epoch)
