"""Partition discovery of a consumer: which partitions it reads, and from which position.

A partition is read from the group's committed offset for this incarnation of the topic. Without such an offset, a
partition that was created after the consumer started is read from its earliest offset, any other from the user's
`start`. With "latest", the offsets are requested once, after the first metadata response, for all partitions of topics
without a committed offset of the group, so that they do not depend on when a partition is assigned. The start offset is
committed before anything is read, so that after a crash the next owner starts at the same offset.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from tfmq.backoff import Backoff
from tfmq.client.connection.connection import ClientConnection
from tfmq.client.connection.requests import request_with_retries
from tfmq.client.consumer.decoder import Decoder
from tfmq.client.consumer.fetcher import Fetcher, PartitionFetchState
from tfmq.client.consumer.options import EARLIEST, LATEST, ConsumerOptions, StartPosition
from tfmq.client.consumer.positions import UNKNOWN, Positions, ReadPosition
from tfmq.client.consumer.rebalance import Rebalance
from tfmq.client.operation import NEVER, Event, Operation, Wait
from tfmq.codecs import select_codec
from tfmq.errors import Busy, NotSupported, TfmqError, UnknownTopic
from tfmq.offsets.storage import PartitionName, StoredOffset
from tfmq.protocol.commands import Locate, Metadata

log = logging.getLogger("tfmq.consumer")

MISSING_SECONDS: Final = 0.1
MISSING_SECONDS_MAX: Final = 1.0
"""The delay before a missing topic is requested again doubles each time, up to this maximum."""
NOTIFIED_REFRESH_SECONDS: Final = 600.0
"""Interval of metadata requests if the broker reports changes by itself: cheap even with many idle consumers."""


class Assignment:
    """Updates fetcher and positions according to the subscription and the group's assignment.

    The metadata is requested at the start. Later changes reach a group member by its assignment, and other consumers by
    the partition count in fetch responses. If a change cannot be noticed so, the metadata is requested at each
    `refresh_interval`: for a topic pattern, for missing topics, and while some topic has no fetch in flight.

    `changed` is called after each check, `void` to cancel the fetch of a partition that is no longer read.
    """

    def __init__(
        self,
        options: ConsumerOptions,
        link: ClientConnection,
        fetcher: Fetcher,
        positions: Positions,
        group: Rebalance | None,
        changed: Callable[[], None],
        void: Callable[[PartitionName], None],
    ) -> None:
        self.discovered = False
        self.wanted: dict[PartitionName, int] = {}
        """Subscribed partitions that exist, with the incarnations of their topics."""
        self._options = options
        self._link = link
        self._initial: dict[PartitionName, int] | None = None
        """Subscribed partitions at the first metadata response."""
        self._missing = False
        """Whether a topic or partition named in the subscription does not exist."""
        self._count_changed = False
        """Whether a fetch response had another partition count than the last metadata."""
        self._notified_by_group = options.group is not None and options.coordinator is None
        self._refreshed_at = 0.0
        self._counts: dict[str, int] = {}
        self._seen_counts: dict[str, int] = {}
        self._logged_missing: set[str] = set()
        self._fetcher = fetcher
        self._positions = positions
        self._group = group
        self._changed = changed
        self._cancel_fetch = void
        self._logged_trouble = ""
        self._topics: dict[str, int] = {}
        self._generations: dict[PartitionName, int] = {}
        self._latest_positions: dict[PartitionName, ReadPosition] = {}
        """Positions that "latest" stands for."""
        self._latest_unresolved: dict[PartitionName, int] | None = None if group and options.start_latest else {}
        """Partitions (with incarnation) whose position for "latest" is still unknown; None: not computed yet."""
        self._wake_event = Event()

    def run(self) -> Operation[None]:
        """Refresh the metadata and apply the assignment. Never returns. Raises errors that are not retriable."""
        backoff, due, again = Backoff(MISSING_SECONDS, MISSING_SECONDS_MAX), 0.0, True
        while True:
            self._wake_event = Event()
            late, anyhow, again = self._link.now() >= due, again, True
            try:
                if (
                    self._count_changed
                    or self._has_unknown_incarnation()
                    or (late and (anyhow or not self._is_notified_of_changes()))
                ):
                    yield from self._refresh_metadata()
                    late = True
                if late:
                    due = self._link.now() + self._options.refresh_interval
                again = (yield from self._apply_assignment()) or self._missing
                self._logged_trouble = "" if not again else self._logged_trouble
            except TfmqError as trouble:
                if not trouble.retriable or not self._link.connection_count:
                    raise
                self._log_trouble(trouble)
            self._changed()
            wait = due - self._link.now()
            if again:
                wait, due = min(backoff.advance(), self._options.refresh_interval), self._link.now()
            else:
                backoff.reset()
            yield Wait((self._wake_event,), max(0.0, wait))

    def partition_count_seen(self, topic: str, count: int) -> None:
        """Process a topic's partition count from a fetch response. If it has changed, request the metadata."""
        if self._seen_counts.get(topic) == count:
            return
        self._seen_counts[topic] = count
        self._count_changed = not self._notified_by_group and self._counts.get(topic, count) != count
        if self._count_changed:
            self._wake_event.complete()

    def _refresh_metadata(self) -> Operation[None]:
        """Request the metadata and subscribe the member to the topics found."""
        self._count_changed, self._refreshed_at = False, self._link.now()
        subscription = self._options.subscription
        reply = yield from request_with_retries(self._link, Metadata(subscription.topics_to_request()), NEVER)
        self._counts = {row.name: len(row.partitions) for row in reply.topics}
        wanted = self.wanted = subscription.subscribed_partitions(reply.topics)
        if self._initial is None:
            self._initial = dict(wanted)
        missing = subscription.missing_names(wanted)
        self._missing = bool(missing)
        for name in missing:
            if name not in self._logged_missing:
                self._logged_missing.add(name)
                log.warning("%s does not exist yet; waiting for it. Reading never creates a topic.", name)
        self._drop_recreated()
        if self._group is not None:
            topics = subscription.topics_to_request() or sorted({name.topic for name in wanted})
            self._group.membership.subscribe(topics, subscription.requested_partitions(wanted), wanted)

    def _is_notified_of_changes(self) -> bool:
        """Return whether the broker reports changes of the subscribed topics, by the group or by fetches in flight."""
        old = self._link.now() >= self._refreshed_at + NOTIFIED_REFRESH_SECONDS
        if self._missing or self._options.subscription.pattern is not None or old:
            return False
        fetching = {name.topic for name, feed in self._fetcher.partitions.items() if feed.fetching}
        return self._notified_by_group or {name.topic for name in self.wanted} <= fetching

    def _has_unknown_incarnation(self) -> bool:
        if self._group is None:
            return False
        share = self._group.membership.assigned
        return any(self.wanted.get(name) != each.incarnation for name, each in share.items())

    def _apply_assignment(self) -> Operation[bool]:
        """Start reading newly assigned partitions. Return whether this failed for some and must be tried again."""
        yield from self._resolve_latest()
        mine = self._partitions_to_read()
        fresh = {name: incarnation for name, incarnation in mine.items() if name not in self._fetcher.partitions}
        if fresh:
            yield from self._start_partitions(fresh)
        self.discovered = self.discovered or self._group is None or self._group.membership.joined
        return any(name not in self._fetcher.partitions for name in self._partitions_to_read())

    def _partitions_to_read(self) -> dict[PartitionName, int]:
        if self._group is None:
            return self.wanted
        share = self._group.membership.assigned
        return {
            name: incarnation
            for name, incarnation in self.wanted.items()
            if name in share and share[name].incarnation == incarnation
        }

    # The share

    def assignment_changed(self) -> None:
        """Stop reading partitions that are no longer assigned. `run` starts newly assigned partitions later."""
        if self._group is None:
            return
        membership, handover = self._group.membership, self._group
        for name in list(self._positions.names()):
            grant = self._generations.get(name)
            held = membership.owned.get(name)
            if held is None or held.grant != grant:
                self._stop_reading(name)
                handover.partition_lost(name)
                self._generations.pop(name, None)
            elif name not in membership.assigned:
                if name in self._fetcher.partitions:
                    self._stop_reading(name)
                    handover.revoke(name)
            elif handover.unrevoke(name):
                self._add_partition(name, held.incarnation, self._positions.delivered_position(name))
        leaving = membership.owned.keys() - membership.assigned.keys()
        # Partitions that are not in `_positions` were never read, so they can be released at once.
        membership.release([name for name in leaving if name not in self._positions])
        self._wake_event.complete()

    def partitions_fenced(self, names: Iterable[PartitionName]) -> None:
        """Stop reading partitions whose commit was fenced, because another member owns them."""
        if self._group is not None:
            self._group.membership.partitions_fenced(names)
            self.assignment_changed()

    def _stop_reading(self, name: PartitionName) -> None:
        """Stop fetching and delivering a partition. A loop over its messages ends after the current message."""
        self._cancel_fetch(name)
        if name in self._fetcher.partitions:
            self._fetcher.remove(name)
        if self._positions.ready is not None and self._positions.ready.name == name:
            self._positions.drop_ready_batch()

    def reset_after_fork(self) -> None:
        for name in list(self._positions.names()):
            self._stop_reading(name)
            self._positions.remove_lost(name)
        self._generations.clear()
        self.discovered = False

    # Positions

    def locate(self, name: PartitionName, incarnation: int, start: StartPosition) -> Operation[ReadPosition]:
        request = Locate(name.topic, incarnation, name.partition, start.by, start.value)
        reply = yield from request_with_retries(self._link, request, self._link.now() + self._options.timeout)
        return ReadPosition(reply.offset, reply.ordinal, reply.epoch)

    def _drop_recreated(self) -> None:
        """Forget partitions of a re-created topic whose failure was raised, so that they are read from the start."""
        for name, feed in list(self._fetcher.partitions.items()):
            if (
                feed.failure_raised
                and isinstance(feed.failure, UnknownTopic)
                and self.wanted.get(name, 0) not in (0, feed.incarnation)
            ):
                self._fetcher.remove(name)
                self._positions.remove(name)

    def _resolve_latest(self) -> Operation[None]:
        if self._latest_unresolved is None:
            assert self._group is not None and self._initial is not None
            initial = self._initial
            stored = yield from self._read_all(initial)
            begun = {(name.topic, each.incarnation) for name, each in stored.items()}
            self._latest_unresolved = {n: each for n, each in initial.items() if (n.topic, each) not in begun}
        if self._latest_unresolved:
            questions = dict.fromkeys(self._latest_unresolved, LATEST)
            self._latest_positions |= yield from self._locate_all(self._latest_unresolved, questions)
            self._latest_unresolved = {
                name: incarnation
                for name, incarnation in self._latest_unresolved.items()
                if name not in self._latest_positions and self.wanted.get(name) == incarnation
            }

    def _read_unlocked(
        self, names: list[PartitionName], *, others: bool = False
    ) -> Operation[tuple[dict[PartitionName, StoredOffset], dict[PartitionName, Busy]]]:
        """Return the stored offsets, and the broker's error for each partition whose offset is in doubt.

        An offset is in doubt while a prepared transaction that commits it has not ended. The broker refuses a request
        that names such a partition. So a refused request is halved until these partitions are found, and the group
        continues with the others. `others`: the offsets of more partitions than `names` may be returned.
        """
        assert self._group is not None
        try:
            return (yield from self._group.offsets.read(names, while_busy=False, others=others)), {}
        except Busy as busy:
            if "xid" not in busy.details:
                raise
            if len(names) == 1 and not others:
                return {}, {names[0]: busy}
        if others:
            return (yield from self._read_unlocked(names))
        middle = len(names) // 2
        stored, locked = yield from self._read_unlocked(names[:middle])
        more, more_locked = yield from self._read_unlocked(names[middle:])
        return stored | more, locked | more_locked

    def _read_all(self, wanted: Mapping[PartitionName, int]) -> Operation[dict[PartitionName, StoredOffset]]:
        """Return the group's offsets, without those in doubt. Raises Busy if all offsets of a topic are in doubt."""
        stored, locked = yield from self._read_unlocked(list(wanted), others=True)
        known = {(name.topic, each.incarnation) for name, each in stored.items()}
        for name, busy in locked.items():
            if (name.topic, wanted[name]) not in known:
                raise busy
        return stored

    def _start_partitions(self, fresh: Mapping[PartitionName, int]) -> Operation[None]:
        stored: dict[PartitionName, StoredOffset] = {}
        grants: dict[PartitionName, int] = {}
        refused: set[PartitionName] = set()
        locked: dict[PartitionName, Busy] = {}
        if self._group is not None:
            share, offsets = self._group.membership.assigned, self._group.offsets
            grants = {name: share[name].grant for name in fresh}
            claimed, refused = yield from offsets.claim(fresh)
            stored, locked = yield from self._read_unlocked(list(fresh))
            stored |= claimed
            for busy in locked.values():
                self._log_trouble(busy)
                break
            if self._options.start != EARLIEST and not all(
                name in stored and stored[name].incarnation == each
                for name, each in fresh.items()
                if name not in locked
            ):
                # Some partition has no offset: find out whether the group has offsets in its topic at all. Offsets
                # of all partitions are requested only in this case, since each of a thousand members may do so.
                # With EARLIEST the result makes no difference.
                wanted = self.wanted
                stored = (yield from self._read_all(wanted)) | stored
            self._log_refused(refused)
        known = {name.topic: each.incarnation for name, each in stored.items()}
        places: dict[PartitionName, ReadPosition] = {}
        questions: dict[PartitionName, StartPosition] = {}
        for name, incarnation in fresh.items():
            kept = stored.get(name)
            if name in refused or name in locked or name in (self._latest_unresolved or ()):
                continue
            if kept is not None and kept.incarnation == incarnation:
                places[name] = read_position_of(name, kept)
            elif name in self._latest_positions and not self._is_new_partition(name, incarnation):
                places[name] = self._latest_positions[name]
            elif known.get(name.topic) == incarnation or self._is_new_partition(name, incarnation):
                questions[name] = EARLIEST
            elif self._options.start.exact:
                places[name] = ReadPosition(self._options.start.value, UNKNOWN, UNKNOWN)
            else:
                questions[name] = self._options.start
        places |= yield from self._locate_all(fresh, questions)
        if self._options.start_latest:
            stored |= yield from self._commit_start_positions(fresh, grants, places, stored)
        self._start_reading(fresh, grants, places, stored)

    def _commit_start_positions(
        self,
        fresh: Mapping[PartitionName, int],
        grants: Mapping[PartitionName, int],
        positions: dict[PartitionName, ReadPosition],
        stored: Mapping[PartitionName, StoredOffset],
    ) -> Operation[dict[PartitionName, StoredOffset]]:
        """Commit the start positions of partitions for which the group has no offset. Return what was committed.

        `grants`: the generation of each assignment. Partitions whose commit is fenced are removed from `positions`.
        """
        if self._group is None:
            return {}
        rows = {
            name: StoredOffset(place.offset, 0, fresh[name], place.epoch, grants[name])
            for name, place in positions.items()
            if name not in stored or stored[name].incarnation != fresh[name]
        }
        if not rows:
            return {}
        until = self._link.now() + self._options.timeout
        refused = yield from self._group.offsets.save(rows, until)
        generation_of = self._group.membership.generation_of
        for name in refused:
            positions.pop(name, None)
        if lost := [name for name in refused if generation_of(name) == grants[name]]:
            self.partitions_fenced(lost)
        return {name: row for name, row in rows.items() if name not in refused}

    def _start_reading(
        self,
        fresh: Mapping[PartitionName, int],
        grants: Mapping[PartitionName, int],
        places: Mapping[PartitionName, ReadPosition],
        stored: Mapping[PartitionName, StoredOffset],
    ) -> None:
        """Start reading the partitions in `places`, except those whose assignment has changed meanwhile."""
        share = {} if self._group is None else self._group.membership.assigned
        taken = []
        for name, place in places.items():
            if self._group is not None and (name not in share or share[name].grant != grants[name]):
                continue
            kept = stored.get(name)
            saved = kept.offset if kept and place.offset == kept.offset else None
            self._positions.add(name, place, saved, fresh[name])
            self._add_partition(name, fresh[name], place)
            self._generations[name] = grants.get(name, 0)
            self._topics[name.topic] = fresh[name]
            taken.append(name)
        if self._group is not None:
            self._group.assigned(taken)

    def _add_partition(self, name: PartitionName, incarnation: int, place: ReadPosition) -> None:
        codec = select_codec(self._options.codec, name.topic)
        decoder = Decoder(name.topic, name.partition, incarnation, codec)
        self._fetcher.add(PartitionFetchState(name, incarnation, place, decoder))
        log.debug("Reading %s from offset %d.", name, place.offset)

    def _is_new_partition(self, name: PartitionName, incarnation: int) -> bool:
        """Return whether a partition was created after the first metadata response, and is read from its start."""
        if self._initial is None or self._initial.get(name) == incarnation:
            return False
        return self._options.start_latest or self._topics.get(name.topic) == incarnation

    def _locate_all(
        self, fresh: Mapping[PartitionName, int], questions: Mapping[PartitionName, StartPosition]
    ) -> Operation[dict[PartitionName, ReadPosition]]:
        """Return the positions for `questions`, all requested at once.

        Partitions with a retriable error or an unknown topic are left out, and tried again at the next check; other
        errors are raised.
        """
        found, calls = {}, {}
        for name, each in questions.items():
            request = Locate(name.topic, fresh[name], name.partition, each.by, each.value)
            calls[name] = self._link.send_request(request)
        try:
            for name, call in calls.items():
                while not call.done:
                    yield Wait((call,))
                if call.error is None:
                    found[name] = ReadPosition(call.reply.offset, call.reply.ordinal, call.reply.epoch)
                elif not call.error.retriable and not isinstance(call.error, UnknownTopic):
                    raise call.error
        finally:
            for call in calls.values():
                self._link.abandon(call)
        return found

    def _log_trouble(self, trouble: TfmqError) -> None:
        """Log once why the group's offsets cannot be read: a transaction in doubt, or a failure of the storage."""
        if trouble.sentence != self._logged_trouble:
            self._logged_trouble = trouble.sentence
            advice = SQL_ADVICE if str(trouble.details.get("xid", "")).startswith(SQL_XID_PREFIX) else ""
            log.warning("Group %s waits for its offsets: %s%s", self._options.group, trouble, advice)

    def _log_refused(self, refused: Iterable[PartitionName]) -> None:
        """Log once which partitions the offset storage refused.

        The refusal is transient if another member has just got the partitions, and permanent if the storage has later
        generations than this broker will assign, for example those of another broker.
        """
        names = ", ".join(map(str, sorted(refused)))
        if names and names != self._logged_trouble:
            self._logged_trouble = names
            text = "Group %s: the offset storage has a later generation of %s; trying again."
            log.warning(text, self._options.group, names)


SQL_XID_PREFIX: Final = "tfmq.sql."
"""Names of transactions that `tfmq.sql` begins start with this."""
SQL_ADVICE: Final = (
    " It is a transaction of tfmq.sql: it ends when a program of its producer group that has called"
    " tfmq.sql.check(producer, engine) answers the broker's check. If this program is the only one, call that"
    " before the first message is read: without it this consumer may wait without end."
)


def read_position_of(name: PartitionName, kept: StoredOffset) -> ReadPosition:
    """Return the read position of a stored offset. Raises NotSupported for an offset inside a compressed batch."""
    if kept.index:
        raise NotSupported(
            f"{name}: the group's offset is inside a compressed batch, which this release cannot read;"
            " use a newer client."
        )
    return ReadPosition(kept.offset, UNKNOWN, kept.epoch)
