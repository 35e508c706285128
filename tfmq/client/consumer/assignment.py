"""Which partitions a consumer reads: all partitions of its subscription; in a group, those assigned to this member.

`tfmq.client.consumer.start_position` decides at which offset the consumer starts in a newly assigned partition.
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
from tfmq.client.consumer.message import ReadPosition
from tfmq.client.consumer.options import ConsumerOptions, StartPosition
from tfmq.client.consumer.positions import Positions
from tfmq.client.consumer.rebalance import Rebalance
from tfmq.client.consumer.start_position import StartPositions, Starts
from tfmq.client.operation import NEVER, Event, Operation, Wait
from tfmq.codecs import select_codec
from tfmq.errors import TfmqError, UnknownTopic
from tfmq.offsets.storage import PartitionName
from tfmq.protocol.commands import Locate, Metadata

log = logging.getLogger("tfmq.consumer")

MISSING_SECONDS: Final = 0.1
MISSING_SECONDS_MAX: Final = 1.0
"""Maximum delay before a missing topic is requested again. The first delay is MISSING_SECONDS; it doubles each time."""
NOTIFIED_REFRESH_SECONDS: Final = 600.0
"""Interval of metadata requests if the broker reports changes by itself: long, so that idle consumers cost little."""


class Assignment:
    """Starts and stops reading partitions, according to the subscription and the group's assignment.

    The metadata is requested at the start. The broker reports later changes: to a group member by its assignment, to
    other consumers by the partition count in fetch responses. In three cases this is not enough, and the metadata is
    requested at each `refresh_interval` too: for a topic pattern, for topics that do not exist yet, and (unless the
    broker coordinates the group) while a topic has no fetch in flight.

    `changed` is called after each round of `run`. `void` is called to cancel the fetch of a partition no longer read.
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
        self._missing = False
        """Whether a topic or partition named in the subscription does not exist."""
        self._count_changed = False
        """Whether a fetch response had another partition count for a topic than the last metadata response."""
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
        self._starts = StartPositions(options, link, group, self.partitions_fenced)
        self._generations: dict[PartitionName, int] = {}
        self._wake_event = Event()

    def run(self) -> Operation[None]:
        """Refresh the metadata if necessary, apply the assignment, and wait for a change or the next interval; repeat
        this without end. Raises errors that are not retriable, and before the first connection all errors."""
        backoff, due, again = Backoff(MISSING_SECONDS, MISSING_SECONDS_MAX), 0.0, True
        while True:
            self._wake_event = Event()
            is_due, retrying, again = self._link.now() >= due, again, True
            try:
                if (
                    self._count_changed
                    or self._has_unknown_incarnation()
                    or (is_due and (retrying or not self._is_notified_of_changes()))
                ):
                    yield from self._refresh_metadata()
                    is_due = True
                if is_due:
                    due = self._link.now() + self._options.refresh_interval
                again = (yield from self._apply_assignment()) or self._missing
                if not again:
                    self._starts.trouble.end()
            except TfmqError as trouble:
                if not trouble.retriable or not self._link.connection_count:
                    raise
                self._starts.trouble.log(trouble)
            self._changed()
            wait = due - self._link.now()
            if again:
                wait, due = min(backoff.advance(), self._options.refresh_interval), self._link.now()
            else:
                backoff.reset()
            yield Wait((self._wake_event,), max(0.0, wait))

    def partition_count_seen(self, topic: str, count: int) -> None:
        """Process a topic's partition count from a fetch response. If the metadata has another count, have `run`
        request the metadata again. If the broker coordinates the group, do nothing: it reports the change itself."""
        if self._seen_counts.get(topic) == count:
            return
        self._seen_counts[topic] = count
        self._count_changed = not self._notified_by_group and self._counts.get(topic, count) != count
        if self._count_changed:
            self._wake_event.complete()

    def _refresh_metadata(self) -> Operation[None]:
        """Request the metadata, find the subscribed partitions, and pass these to the group membership, if any."""
        self._count_changed, self._refreshed_at = False, self._link.now()
        subscription = self._options.subscription
        reply = yield from request_with_retries(self._link, Metadata(subscription.topics_to_request()), NEVER)
        self._counts = {row.name: len(row.partitions) for row in reply.topics}
        wanted = self.wanted = subscription.subscribed_partitions(reply.topics)
        self._starts.subscribed(wanted)
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
        """Return whether the broker itself reports all changes of the subscribed topics: in the group's assignment, or
        in the responses to fetches in flight. Return False if the metadata is older than NOTIFIED_REFRESH_SECONDS."""
        old = self._link.now() >= self._refreshed_at + NOTIFIED_REFRESH_SECONDS
        if self._missing or self._options.subscription.pattern is not None or old:
            return False
        fetching = {name.topic for name, feed in self._fetcher.partitions.items() if feed.fetching}
        return self._notified_by_group or {name.topic for name in self.wanted} <= fetching

    def _has_unknown_incarnation(self) -> bool:
        if self._group is None:
            return False
        assigned = self._group.membership.assigned
        return any(self.wanted.get(name) != each.incarnation for name, each in assigned.items())

    def _apply_assignment(self) -> Operation[bool]:
        """Start reading newly assigned partitions. Return True if one could not be started; `run` then tries again."""
        yield from self._starts.resolve_latest()
        to_read = self._partitions_to_read()
        fresh = {name: incarnation for name, incarnation in to_read.items() if name not in self._fetcher.partitions}
        if fresh:
            self._start_reading(fresh, (yield from self._starts.find(fresh)))
        self.discovered = self.discovered or self._group is None or self._group.membership.joined
        return any(name not in self._fetcher.partitions for name in self._partitions_to_read())

    def _partitions_to_read(self) -> dict[PartitionName, int]:
        if self._group is None:
            return self.wanted
        assigned = self._group.membership.assigned
        return {
            name: incarnation
            for name, incarnation in self.wanted.items()
            if name in assigned and assigned[name].incarnation == incarnation
        }

    # Assigned partitions

    def assignment_changed(self) -> None:
        """Stop reading partitions that are no longer assigned. `run` starts newly assigned partitions later."""
        if self._group is None:
            return
        membership, group = self._group.membership, self._group
        for name in list(self._positions.names()):
            generation = self._generations.get(name)
            owned = membership.owned.get(name)
            if owned is None or owned.grant != generation:
                self._stop_reading(name)
                group.partition_lost(name)
                self._generations.pop(name, None)
            elif name not in membership.assigned:
                if name in self._fetcher.partitions:
                    self._stop_reading(name)
                    group.revoke(name)
            elif group.unrevoke(name):
                self._add_partition(name, owned.incarnation, self._positions.delivered_position(name))
        revoked = membership.owned.keys() - membership.assigned.keys()
        # Partitions that are not in `_positions` were never read, so they can be released at once.
        membership.release([name for name in revoked if name not in self._positions])
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
        """Remove partitions whose topic was deleted and created again, so that the partitions of the new topic are
        read. A partition is removed only after the user got the error about the deletion."""
        for name, feed in list(self._fetcher.partitions.items()):
            if (
                feed.failure_raised
                and isinstance(feed.failure, UnknownTopic)
                and self.wanted.get(name, 0) not in (0, feed.incarnation)
            ):
                self._fetcher.remove(name)
                self._positions.remove(name)

    def _start_reading(self, fresh: Mapping[PartitionName, int], starts: Starts) -> None:
        """Start reading `fresh` partitions whose start is known, unless their assignment has changed meanwhile."""
        assigned = {} if self._group is None else self._group.membership.assigned
        started = []
        for name, position in starts.positions.items():
            if self._group is not None and (name not in assigned or assigned[name].grant != starts.generations[name]):
                continue
            kept = starts.stored.get(name)
            saved = kept.offset if kept and position.offset == kept.offset else None
            self._positions.add(name, position, saved, fresh[name])
            self._add_partition(name, fresh[name], position)
            self._generations[name] = starts.generations.get(name, 0)
            self._starts.started(name, fresh[name])
            started.append(name)
        if self._group is not None:
            self._group.assigned(started)

    def _add_partition(self, name: PartitionName, incarnation: int, position: ReadPosition) -> None:
        codec = select_codec(self._options.codec, name.topic)
        decoder = Decoder(name.topic, name.partition, incarnation, codec)
        self._fetcher.add(PartitionFetchState(name, incarnation, position, decoder))
        log.debug("Reading %s from offset %d.", name, position.offset)
