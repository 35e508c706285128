"""Which partitions a consumer reads, and from where: found at the start, and looked for again from time to time.

In a group it reads its share, and no more: what is new in it is claimed before the first message is read, what is not
in it any more is not read on. A topic that is not there is waited for, and so is the end of a transaction that has the
group's offsets, and a storage that does not answer. A partition's place is, in this order: what its group has saved for
this incarnation of the topic; the earliest one, for a partition that appeared later; what the user said with `start`.

"latest" is a moment: that of the first look, for all partitions of topics of which the group has nothing, so that it is
the same whoever gets them when. It is saved before anything is read: who comes after a member that died begins there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from tfmq.client.connection.connection import Call, Link
from tfmq.client.connection.requests import ask
from tfmq.client.consumer.decoder import Decoder
from tfmq.client.consumer.fetcher import Feed, Fetcher
from tfmq.client.consumer.membership import Membership
from tfmq.client.consumer.offset_commit import GroupOffsets
from tfmq.client.consumer.options import EARLIEST, LATEST, ConsumerOptions, Question
from tfmq.client.consumer.positions import UNKNOWN, Place, Positions
from tfmq.client.consumer.rebalance import Handover
from tfmq.client.operation import Flag, Operation, Wait
from tfmq.codecs import codec_of
from tfmq.errors import NotSupported, TfmqError, UnknownTopic
from tfmq.offsets.storage import PartitionName, StoredOffset
from tfmq.protocol.commands import Locate, Metadata

log = logging.getLogger("tfmq.consumer")

MISSING_SECONDS: Final = 0.1
MISSING_SECONDS_MAX: Final = 1.0
"""How soon a topic that is not there is looked for again, doubled up to the second."""


class Group(NamedTuple):
    """What a member of a group has besides what everybody has."""

    membership: Membership
    offsets: GroupOffsets
    handover: Handover


class Assignment:
    """Keeps `fetcher` and `positions` at what the subscription, and the share of the group, mean; `changed` is called
    when they were looked at, `void` for a partition that is not read on."""

    def __init__(
        self,
        options: ConsumerOptions,
        link: Link,
        fetcher: Fetcher,
        positions: Positions,
        group: Group | None,
        changed: Callable[[], None],
        void: Callable[[PartitionName], None],
    ) -> None:
        self.looked = False
        self._options = options
        self._link = link
        self._looking = Looking(options, link)
        self._fetcher = fetcher
        self._positions = positions
        self._group = group
        self._changed = changed
        self._void = void
        self._told_trouble = ""
        self._topics: dict[str, int] = {}
        self._grants: dict[PartitionName, int] = {}
        self._ends: dict[PartitionName, Place] = {}
        """Where "latest" is."""
        self._endless: dict[PartitionName, int] | None = None if group and options.start_latest else {}
        """Partitions of which that is still to be found; None: nobody knows yet which."""
        self._news = Flag()

    def watch(self) -> Operation[None]:
        """Never ends: looks, waits, looks again. Raises what is no passing failure."""
        pause, due, again = MISSING_SECONDS, 0.0, True
        while True:
            self._news = Flag()
            late, anyhow, again = self._link.now() >= due, again, True
            try:
                if self._looking.grown or self._unknown() or (late and (anyhow or not self._is_told())):
                    yield from self._look()
                    late = True
                if late:
                    due = self._link.now() + self._options.refresh
                again = (yield from self._apply()) or self._looking.missing
                self._told_trouble = "" if not again else self._told_trouble
            except TfmqError as trouble:
                if not trouble.retriable or not self._link.connections:
                    raise
                self._tell_trouble(trouble)
            self._changed()
            wait = due - self._link.now()
            if again:
                wait, due = min(pause, self._options.refresh), self._link.now()
                pause = min(pause * 2, MISSING_SECONDS_MAX)
            else:
                pause = MISSING_SECONDS
            yield Wait((self._news,), max(0.0, wait))

    def _is_told(self) -> bool:
        return self._looking.is_told(name for name, feed in self._fetcher.feeds.items() if feed.fetching)

    @property
    def wanted(self) -> Mapping[PartitionName, int]:
        """What the subscription means now, with the incarnations."""
        return self._looking.wanted

    def counted(self, topic: str, count: int) -> None:
        """The answer to a fetch said how many partitions the topic has now."""
        if self._looking.counted(topic, count):
            self._news.settle()

    def _look(self) -> Operation[None]:
        """Asks for the topics."""
        yield from self._looking.look()
        self._drop_remade()
        if self._group is not None:
            wanted, subscription = self._looking.wanted, self._options.subscription
            topics = subscription.asked() or sorted({name.topic for name in wanted})
            self._group.membership.want(topics, subscription.only(wanted), wanted)

    def _unknown(self) -> bool:
        """Whether the share has something of which the topic is not known."""
        if self._group is None:
            return False
        share = self._group.membership.share
        return any(self._looking.wanted.get(name) != each.incarnation for name, each in share.items())

    def _apply(self) -> Operation[bool]:
        """Takes on what is new; whether something of it must be tried again."""
        yield from self._find_ends()
        mine = self._mine()
        fresh = {name: incarnation for name, incarnation in mine.items() if name not in self._fetcher.feeds}
        if fresh:
            yield from self._take_on(fresh)
        self.looked = self.looked or self._group is None or self._group.membership.joined
        return any(name not in self._fetcher.feeds for name in self._mine())

    def _mine(self) -> dict[PartitionName, int]:
        if self._group is None:
            return self._looking.wanted
        share = self._group.membership.share
        return {
            name: incarnation
            for name, incarnation in self._looking.wanted.items()
            if name in share and share[name].incarnation == incarnation
        }

    # The share

    def share_changed(self) -> None:
        """The share is another one: what is not in it is not read on from this moment; the rest is for `watch`."""
        if self._group is None:
            return
        membership, handover = self._group.membership, self._group.handover
        for name in list(self._positions.names()):
            grant = self._grants.get(name)
            held = membership.held.get(name)
            if held is None or held.grant != grant:
                self._stop_reading(name)
                handover.lost(name)
                self._grants.pop(name, None)
            elif name not in membership.share:
                if name in self._fetcher.feeds:
                    self._stop_reading(name)
                    handover.revoke(name)
            elif handover.back(name):
                self._add_feed(name, held.incarnation, self._positions.handed_out(name))
        leaving = membership.held.keys() - membership.share.keys()
        membership.release(
            [name for name in leaving if name not in self._positions]
        )  # it never began with them
        self._news.settle()

    def refused(self, names: Iterable[PartitionName]) -> None:
        """A save said that these are another's by now."""
        if self._group is not None:
            self._group.membership.refused(names)
            self.share_changed()

    def _stop_reading(self, name: PartitionName) -> None:
        """Nothing more of it is fetched or handed out; a loop over a batch of it ends behind the current message."""
        self._void(name)
        if name in self._fetcher.feeds:
            self._fetcher.remove(name)
        if self._positions.ready is not None and self._positions.ready.name == name:
            self._positions.drop_ready()

    def renew(self) -> None:
        """In a forked child: all partitions are the parent's."""
        for name in list(self._positions.names()):
            self._stop_reading(name)
            self._positions.lose(name)
        self._grants.clear()
        self.looked = False

    # Places

    def locate(self, name: PartitionName, incarnation: int, question: Question) -> Operation[Place]:
        """The place that `question` asks for."""
        request = Locate(name.topic, incarnation, name.partition, question.by, question.value)
        reply = yield from ask(self._link, request, self._link.now() + self._options.timeout)
        return Place(reply.offset, reply.ordinal, reply.epoch)

    def _drop_remade(self) -> None:
        """A deleted topic of which the user was told, and which was made anew, is read as a new one."""
        for name, feed in list(self._fetcher.feeds.items()):
            if (
                feed.told
                and isinstance(feed.failure, UnknownTopic)
                and self._looking.wanted.get(name, 0) not in (0, feed.incarnation)
            ):
                self._fetcher.remove(name)
                self._positions.remove(name)

    def _find_ends(self) -> Operation[None]:
        """What "latest" means, as far as it is not known."""
        if self._endless is None:
            assert self._group is not None and self._looking.first is not None
            stored = yield from self._group.offsets.read(self._looking.first, while_busy=False, others=True)
            begun = {(name.topic, each.incarnation) for name, each in stored.items()}
            self._endless = {
                n: each for n, each in self._looking.first.items() if (n.topic, each) not in begun
            }
        if self._endless:
            questions = dict.fromkeys(self._endless, LATEST)
            self._ends |= yield from self._locate_all(self._endless, questions)
            self._endless = {
                name: incarnation
                for name, incarnation in self._endless.items()
                if name not in self._ends and self._looking.wanted.get(name) == incarnation
            }

    def _take_on(self, fresh: Mapping[PartitionName, int]) -> Operation[None]:
        stored: dict[PartitionName, StoredOffset] = {}
        grants: dict[PartitionName, int] = {}
        refused: set[PartitionName] = set()
        if self._group is not None:
            share, offsets = self._group.membership.share, self._group.offsets
            grants = {name: share[name].grant for name in fresh}
            claimed, refused = yield from offsets.claim(fresh)
            stored = (yield from offsets.read(fresh, while_busy=False)) | claimed
            if not all(name in stored and stored[name].incarnation == each for name, each in fresh.items()):
                # Whether the group has anything of their topics; each of a thousand members may ask.
                wanted = self._looking.wanted
                stored = (yield from offsets.read(wanted, while_busy=False, others=True)) | stored
            self._tell_refused(refused)
        known = {name.topic: each.incarnation for name, each in stored.items()}
        places: dict[PartitionName, Place] = {}
        questions: dict[PartitionName, Question] = {}
        for name, incarnation in fresh.items():
            kept = stored.get(name)
            if name in refused or name in (self._endless or ()):
                continue
            if kept is not None and kept.incarnation == incarnation:
                places[name] = place_of(name, kept)
            elif name in self._ends and not self._appeared(name, incarnation):
                places[name] = self._ends[name]
            elif known.get(name.topic) == incarnation or self._appeared(name, incarnation):
                questions[name] = EARLIEST
            elif self._options.start.exact:
                places[name] = Place(self._options.start.value, UNKNOWN, UNKNOWN)
            else:
                questions[name] = self._options.start
        places |= yield from self._locate_all(fresh, questions)
        if self._options.start_latest:
            stored |= yield from self._save_first(fresh, grants, places, stored)
        self._begin(fresh, grants, places, stored)

    def _save_first(
        self,
        fresh: Mapping[PartitionName, int],
        grants: Mapping[PartitionName, int],
        places: dict[PartitionName, Place],
        stored: Mapping[PartitionName, StoredOffset],
    ) -> Operation[dict[PartitionName, StoredOffset]]:
        """Saves those of `places` that the group does not have, whatever `commits` is. Drops what is another's."""
        if self._group is None:
            return {}
        rows = {
            name: StoredOffset(place.offset, 0, fresh[name], place.epoch, grants[name])
            for name, place in places.items()
            if name not in stored or stored[name].incarnation != fresh[name]
        }
        if not rows:
            return {}
        until = self._link.now() + self._options.timeout
        refused = yield from self._group.offsets.save(rows, until)
        generation_of = self._group.membership.generation_of
        for name in refused:
            places.pop(name, None)
        if lost := [name for name in refused if generation_of(name) == grants[name]]:
            self.refused(lost)
        return {name: row for name, row in rows.items() if name not in refused}

    def _begin(
        self,
        fresh: Mapping[PartitionName, int],
        grants: Mapping[PartitionName, int],
        places: Mapping[PartitionName, Place],
        stored: Mapping[PartitionName, StoredOffset],
    ) -> None:
        """Those of which the place is known, and which are still what they were when that was asked."""
        share = {} if self._group is None else self._group.membership.share
        taken = []
        for name, place in places.items():
            if self._group is not None and (name not in share or share[name].grant != grants[name]):
                continue
            kept = stored.get(name)
            saved = kept.offset if kept and place.offset == kept.offset else None
            self._positions.add(name, place, saved, fresh[name])
            self._add_feed(name, fresh[name], place)
            self._grants[name] = grants.get(name, 0)
            self._topics[name.topic] = fresh[name]
            taken.append(name)
        if self._group is not None:
            self._group.handover.came(taken)

    def _add_feed(self, name: PartitionName, incarnation: int, place: Place) -> None:
        decoder = Decoder(name.topic, name.partition, incarnation, codec_of(self._options.codec, name.topic))
        self._fetcher.add(Feed(name, incarnation, place, decoder))
        log.debug("Reading %s from offset %d.", name, place.offset)

    def _appeared(self, name: PartitionName, incarnation: int) -> bool:
        """Whether the partition came up after this consumer had looked, so that its first messages are news."""
        if self._looking.first is None or self._looking.first.get(name) == incarnation:
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

    # Telling

    def _tell_trouble(self, trouble: TfmqError) -> None:
        """The offsets are part of a transaction in doubt, or their storage does not answer: nobody knows yet where the
        group goes on."""
        if trouble.sentence != self._told_trouble:
            self._told_trouble = trouble.sentence
            log.warning("Group %s waits for its offsets: %s", self._options.group, trouble)

    def _tell_refused(self, refused: Iterable[PartitionName]) -> None:
        """Passing where another member has just got them; for ever where the storage is of another broker's time."""
        names = ", ".join(map(str, sorted(refused)))
        if names and names != self._told_trouble:
            self._told_trouble = names
            log.warning(
                "Group %s: its storage of offsets knows a later owner of %s; trying again.",
                self._options.group,
                names,
            )


def place_of(name: PartitionName, kept: StoredOffset) -> Place:
    """Where `kept` says that the group goes on. Raises NotSupported for a place inside a batch."""
    if kept.index:
        raise NotSupported(
            f"{name}: the group stands inside a compressed batch, which this release cannot read; use a newer client."
        )
    return Place(kept.offset, UNKNOWN, kept.epoch)


NEVER: Final = float("inf")
TOLD_SECONDS: Final = 600.0
"""How often is looked for what is told: a thousand idle consumers cost a broker next to nothing so."""


class Looking:
    """What a consumer knows of the topics that it reads: which are there, since when, and when to look again.

    It looks at the start, and every `refresh` seconds where nobody would tell it: for topics of a pattern, and where
    nothing is asked of the broker. A group is told of partitions by its share, everybody else by the answers to
    fetches.

    `wanted` and `first` have the incarnation of each partition's topic.
    """

    def __init__(self, options: ConsumerOptions, link: Link) -> None:
        self.wanted: dict[PartitionName, int] = {}
        """What the subscription means now."""
        self.first: dict[PartitionName, int] | None = None
        """What it meant at the first look."""
        self.missing = False
        """Whether something named is not there."""
        self.grown = False
        """Whether a topic is known to have more partitions by now."""
        self._options = options
        self._link = link
        self._told_by_group = options.group is not None and options.coordinator is None
        self._looked_at = 0.0
        self._counts: dict[str, int] = {}
        self._told_counts: dict[str, int] = {}
        self._told_missing: set[str] = set()

    def look(self) -> Operation[None]:
        """Asks for the topics."""
        self.grown, self._looked_at = False, self._link.now()
        subscription = self._options.subscription
        reply = yield from ask(self._link, Metadata(subscription.asked()), NEVER)
        self._counts = {row.name: len(row.partitions) for row in reply.topics}
        self.wanted = subscription.wanted(reply.topics)
        if self.first is None:
            self.first = dict(self.wanted)
        missing = subscription.missing(self.wanted)
        self.missing = bool(missing)
        self._tell_missing(missing)

    def is_told(self, waiting: Iterable[PartitionName]) -> bool:
        """Whether a change since the last look would have been told, if fetches of `waiting` are under way."""
        pattern = self._options.subscription.pattern
        if self.missing or pattern is not None or self._link.now() >= self._looked_at + TOLD_SECONDS:
            return False
        topics = {name.topic for name in self.wanted}
        return self._told_by_group or topics <= {name.topic for name in waiting}

    def counted(self, topic: str, count: int) -> bool:
        """The answer to a fetch said how many partitions the topic has now; whether that is news to look at."""
        if self._told_counts.get(topic) == count:
            return False
        self._told_counts[topic] = count
        self.grown = not self._told_by_group and self._counts.get(topic, count) != count
        return self.grown

    def _tell_missing(self, missing: list[str]) -> None:
        for name in missing:
            if name not in self._told_missing:
                self._told_missing.add(name)
                log.warning("%s is not there yet; waiting for it. Reading never makes a topic.", name)
