"""Partition discovery of a consumer: which partitions it reads, and from which position.

In a group the consumer reads its assigned partitions only; a new one is claimed from the offset storage
before its first message is read. Missing topics, a transaction in doubt that contains the group's offsets,
and an offset storage that does not respond are retried. The start position of a partition is, in this order:
the group's committed offset for this incarnation of the topic; the earliest offset, for a partition that
appeared later; the user's `start`.

"latest" is resolved once, at the first metadata response, for all partitions of topics without a committed
offset of the group, so that it does not depend on the time of the assignment. It is committed before anything
is read, so that the successor of a crashed member starts there as well.
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
"""Delay before a missing topic is requested again, doubled up to the maximum."""


class Group(NamedTuple):
    """What a consumer in a group has in addition to a consumer without one."""

    membership: Membership
    offsets: GroupOffsets
    handover: Handover


class Assignment:
    """Updates fetcher and positions according to the subscription and the group's assignment.

    `changed` is called after each check, `void` for a partition whose reading stops.
    """

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
        """Resolved positions of "latest"."""
        self._endless: dict[PartitionName, int] | None = None if group and options.start_latest else {}
        """Incarnations of partitions whose "latest" is unresolved; None before the first metadata."""
        self._news = Flag()

    def watch(self) -> Operation[None]:
        """Refresh the metadata and apply the assignment, for ever.

        Raises errors that are not retriable.
        """
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
        """Return whether changes of the metadata are reported without a refresh."""
        return self._looking.is_told(name for name, feed in self._fetcher.feeds.items() if feed.fetching)

    @property
    def wanted(self) -> Mapping[PartitionName, int]:
        """Subscribed partitions that exist now, with the incarnations of their topics."""
        return self._looking.wanted

    def counted(self, topic: str, count: int) -> None:
        """Process a topic's partition count from a fetch response.

        A change causes a metadata refresh.
        """
        if self._looking.counted(topic, count):
            self._news.settle()

    def _look(self) -> Operation[None]:
        """Request the metadata and subscribe the member to the topics found."""
        yield from self._looking.look()
        self._drop_remade()
        if self._group is not None:
            wanted, subscription = self._looking.wanted, self._options.subscription
            topics = subscription.asked() or sorted({name.topic for name in wanted})
            self._group.membership.want(topics, subscription.only(wanted), wanted)

    def _unknown(self) -> bool:
        """Return whether a partition is assigned whose topic incarnation is not in the metadata."""
        if self._group is None:
            return False
        share = self._group.membership.share
        return any(self._looking.wanted.get(name) != each.incarnation for name, each in share.items())

    def _apply(self) -> Operation[bool]:
        """Start new partitions. Return whether some of them must be tried again."""
        yield from self._find_ends()
        mine = self._mine()
        fresh = {name: incarnation for name, incarnation in mine.items() if name not in self._fetcher.feeds}
        if fresh:
            yield from self._take_on(fresh)
        self.looked = self.looked or self._group is None or self._group.membership.joined
        return any(name not in self._fetcher.feeds for name in self._mine())

    def _mine(self) -> dict[PartitionName, int]:
        """Return the partitions to read now, with their incarnations."""
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
        """Stop partitions that are no longer assigned at once; `run` starts the new ones later."""
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
        )  # reading of these never started
        self._news.settle()

    def refused(self, names: Iterable[PartitionName]) -> None:
        """Drop partitions that were fenced in a commit, because another member owns them."""
        if self._group is not None:
            self._group.membership.refused(names)
            self.share_changed()

    def _stop_reading(self, name: PartitionName) -> None:
        """Stop fetching and delivering a partition.

        A loop over its batch ends after the current message.
        """
        self._void(name)
        if name in self._fetcher.feeds:
            self._fetcher.remove(name)
        if self._positions.ready is not None and self._positions.ready.name == name:
            self._positions.drop_ready()

    def renew(self) -> None:
        """Reset the state in a forked child: all partitions belong to the parent."""
        for name in list(self._positions.names()):
            self._stop_reading(name)
            self._positions.lose(name)
        self._grants.clear()
        self.looked = False

    # Positions

    def locate(self, name: PartitionName, incarnation: int, question: Question) -> Operation[Place]:
        """Ask the broker for the position that `start` names."""
        request = Locate(name.topic, incarnation, name.partition, question.by, question.value)
        reply = yield from ask(self._link, request, self._link.now() + self._options.timeout)
        return Place(reply.offset, reply.ordinal, reply.epoch)

    def _drop_remade(self) -> None:
        """Drop failed partitions of a topic that was deleted and created again.

        They are started as new ones, but only after the failure was raised to the user.
        """
        for name, feed in list(self._fetcher.feeds.items()):
            if (
                feed.told
                and isinstance(feed.failure, UnknownTopic)
                and self._looking.wanted.get(name, 0) not in (0, feed.incarnation)
            ):
                self._fetcher.remove(name)
                self._positions.remove(name)

    def _find_ends(self) -> Operation[None]:
        """Resolve "latest" for the partitions where this is still to be done."""
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
        """Claim the partitions, find their start positions, and start reading them."""
        stored: dict[PartitionName, StoredOffset] = {}
        grants: dict[PartitionName, int] = {}
        refused: set[PartitionName] = set()
        if self._group is not None:
            share, offsets = self._group.membership.share, self._group.offsets
            grants = {name: share[name].grant for name in fresh}
            claimed, refused = yield from offsets.claim(fresh)
            stored = (yield from offsets.read(fresh, while_busy=False)) | claimed
            if not all(name in stored and stored[name].incarnation == each for name, each in fresh.items()):
                # No offset for some partition: find out whether the group has any for their topics. Only then
                # ask for all partitions, since each of a thousand members may do so.
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
        """Commit start positions that the group does not have, whatever `commits` is.

        Fenced partitions are removed from `positions`. Return the committed rows.
        """
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
        """Start reading partitions whose position is known and whose assignment did not change."""
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
        """Add the partition to the fetcher."""
        decoder = Decoder(name.topic, name.partition, incarnation, codec_of(self._options.codec, name.topic))
        self._fetcher.add(Feed(name, incarnation, place, decoder))
        log.debug("Reading %s from offset %d.", name, place.offset)

    def _appeared(self, name: PartitionName, incarnation: int) -> bool:
        """Return whether the partition was created after the first metadata response.

        Such a partition is read from its start.
        """
        if self._looking.first is None or self._looking.first.get(name) == incarnation:
            return False
        return self._options.start_latest or self._topics.get(name.topic) == incarnation

    def _locate_all(
        self, fresh: Mapping[PartitionName, int], questions: Mapping[PartitionName, Question]
    ) -> Operation[dict[PartitionName, Place]]:
        """Return the positions for `questions`, all requested at once.

        Retriable failures and unknown topics are left out and tried again at the next check; other errors are
        raised.
        """
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

    # Logging

    def _tell_trouble(self, trouble: TfmqError) -> None:
        """Log once why the offsets cannot be read: a transaction in doubt, or a storage failure."""
        if trouble.sentence != self._told_trouble:
            self._told_trouble = trouble.sentence
            log.warning("Group %s waits for its offsets: %s", self._options.group, trouble)

    def _tell_refused(self, refused: Iterable[PartitionName]) -> None:
        """Log once which partitions the offset storage refused.

        This is transient if another member has just got them, and permanent if the storage has generations of
        another broker's lifetime.
        """
        names = ", ".join(map(str, sorted(refused)))
        if names and names != self._told_trouble:
            self._told_trouble = names
            log.warning(
                "Group %s: the offset storage has a later generation of %s; trying again.",
                self._options.group,
                names,
            )


def place_of(name: PartitionName, kept: StoredOffset) -> Place:
    """Return the read position of a stored offset. Raises NotSupported for one inside a batch."""
    if kept.index:
        raise NotSupported(
            f"{name}: the group's offset is inside a compressed batch, which this release cannot read;"
            " use a newer client."
        )
    return Place(kept.offset, UNKNOWN, kept.epoch)


NEVER: Final = float("inf")
TOLD_SECONDS: Final = 600.0
"""Refresh interval where changes are reported anyway: cheap even with many idle consumers."""


class Looking:
    """Topic metadata of a subscription, and when to refresh it.

    It is refreshed at the start, and every `refresh` seconds where changes are not reported: for a pattern,
    for missing topics, and while some topic has no fetch in flight. Changes are reported to a group by its
    assignment, to other consumers by the partition count in fetch responses. `wanted` and `initial` have the
    incarnation of each partition's topic.
    """

    def __init__(self, options: ConsumerOptions, link: Link) -> None:
        self.wanted: dict[PartitionName, int] = {}
        """Subscribed partitions that exist now."""
        self.first: dict[PartitionName, int] | None = None
        """Subscribed partitions at the first metadata response."""
        self.missing = False
        """Whether something named in the subscription does not exist."""
        self.grown = False
        """Whether a topic has another partition count than in the last metadata."""
        self._options = options
        self._link = link
        self._told_by_group = options.group is not None and options.coordinator is None
        self._looked_at = 0.0
        self._counts: dict[str, int] = {}
        self._told_counts: dict[str, int] = {}
        self._told_missing: set[str] = set()

    def look(self) -> Operation[None]:
        """Request the metadata."""
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
        """Return whether a change would have been reported, given fetches in flight for `waiting`."""
        pattern = self._options.subscription.pattern
        if self.missing or pattern is not None or self._link.now() >= self._looked_at + TOLD_SECONDS:
            return False
        topics = {name.topic for name in self.wanted}
        return self._told_by_group or topics <= {name.topic for name in waiting}

    def counted(self, topic: str, count: int) -> bool:
        """Record a topic's partition count from a fetch response.

        Return whether a refresh is needed.
        """
        if self._told_counts.get(topic) == count:
            return False
        self._told_counts[topic] = count
        self.grown = not self._told_by_group and self._counts.get(topic, count) != count
        return self.grown

    def _tell_missing(self, missing: list[str]) -> None:
        """Log each missing topic or partition once."""
        for name in missing:
            if name not in self._told_missing:
                self._told_missing.add(name)
                log.warning("%s does not exist yet; waiting for it. Reading never creates a topic.", name)
