"""Group membership of a consumer: joining, heartbeats, assigned partitions.

A heartbeat is a long poll: the request names the partitions that this member still owns, and the broker replies at once
when the assignment changes. A member that sent no heartbeat for a session timeout has lost all partitions, and joins
the group again by itself. A broken connection or a restart of the broker does not end the membership.
`ZooKeeperMembership` is for a group that ZooKeeper coordinates.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from secrets import token_hex
from typing import Any, Final

from tfmq.client.connection.connection import READY, ClientConnection, PendingRequest
from tfmq.client.connection.requests import PAUSE_SECONDS, request_with_retries
from tfmq.client.consumer.options import ConsumerOptions
from tfmq.client.operation import NEVER, Event, Operation, Wait
from tfmq.errors import Fenced, TfmqError
from tfmq.offsets.storage import PartitionName
from tfmq.protocol.commands import GrantedPartition, Heartbeat, HeldPartition, JoinGroup, LeaveGroup
from tfmq.protocol.commands import PartitionName as PartitionRow
from tfmq.protocol.commands import Subscription as SubscriptionRow

log = logging.getLogger("tfmq.consumer")

HEARTBEATS_PER_SESSION: Final = 3
"""Number of heartbeats in one session timeout, so that two may be lost before the broker expires the member."""
RETRY_SECONDS: Final = 0.25
"""Pause after a failed heartbeat. Without a connection, the next heartbeat waits in addition for the reconnection."""
NOTE_VARIABLE_PARTS: Final = re.compile(r"[0-9a-f]{16}|\d+")
"""The parts of the broker's note (see `Membership.note`) that differ between heartbeats: ids and numbers."""
DISCONNECTED_SESSION_FRACTION: Final = 10
"""Without a connection, a member may deliver until its last heartbeat is older than the session timeout divided by this
number."""


class Membership:
    """Membership of one consumer in a group. `changed` is called under the driver's lock when `assigned` changes."""

    def __init__(
        self, options: ConsumerOptions, link: ClientConnection, changed: Callable[[], None] = lambda: None
    ) -> None:
        assert options.group is not None
        self.group = options.group
        self.member_id = token_hex(8)
        self.generation = 0
        self.joined = False
        self.dead_letter_count = 0
        """How many messages have become dead letters at this member. Heartbeats report it to the broker's metrics."""
        self._reported_dead_letters = 0
        """The count in the last heartbeat that the broker replied to."""
        self._joined_dead_letters = 0
        """The value of `_reported_dead_letters` at the last join: the broker counts from there."""
        self.failure: TfmqError | None = None
        """The permanent error because of which no partition can be assigned any more; None without one."""
        self.note = ""
        """The broker's text why it assigned fewer partitions than requested; "" if none is missing."""
        self.assigned: dict[PartitionName, GrantedPartition] = {}
        """Partitions assigned to this member, without those that the group has requested back (revoked)."""
        self.owned: dict[PartitionName, GrantedPartition] = {}
        """All partitions of this member: the assigned ones, and revoked partitions that are not released yet."""
        self._link = link
        self._session_ms = int(options.session_timeout * 1000)
        self._strategy = options.strategy
        self._changed = changed
        self._subscription: SubscriptionRow | None = None
        self._wake_event = Event()
        self._subscription_unsent = True
        self._last_heartbeat_at = 0.0
        self._last_heartbeat_connection = 0
        self._respond_immediately = False
        self._note_reason = ""
        self._note_reason_since = 0.0
        self._note_logged = False
        self._left = False
        link.on_ready.append(self._on_connected)

    # Subscription

    def subscribe(
        self,
        topics: Sequence[str],
        only: Iterable[PartitionName] | None = None,
        wanted: Mapping[PartitionName, int] | None = None,
    ) -> None:
        """Set the topics and partitions that this member wants. The first call makes the member join.

        `only`: the wanted partitions; None: all partitions of the topics. `wanted`: the wanted partitions that exist,
        with the incarnations of their topics; only `ZooKeeperMembership` uses it.
        """
        rows = None if only is None else [PartitionRow(*name) for name in only]
        subscription = SubscriptionRow(list(topics), self._session_ms, self._strategy, rows)
        if subscription != self._subscription:
            self._subscription, self._subscription_unsent = subscription, True
            self._wake_event.complete()

    def release(self, names: Iterable[PartitionName]) -> None:
        """Report partitions as free to the group. The caller has finished their messages and committed the offsets."""
        for name in names:
            self.assigned.pop(name, None)
            if self.owned.pop(name, None) is not None:
                self._wake_event.complete()

    def partitions_fenced(self, names: Iterable[PartitionName]) -> None:
        """Release partitions whose commit was fenced, and ask the broker for the assignment at once."""
        self.release(names)
        self._wake_event.complete()

    # State

    def generation_of(self, name: PartitionName) -> int:
        """Return the generation of the partition's assignment; storages refuse commits with an older one."""
        owned = self.owned.get(name)
        return self.generation if owned is None else owned.grant

    def may_deliver(self) -> bool:
        """Return whether the last heartbeat is so recent that no other member can own this member's partitions."""
        seconds = self._session_ms / 1000
        if self._link.state != READY or self._link.connection_count != self._last_heartbeat_connection:
            seconds /= DISCONNECTED_SESSION_FRACTION
        return self._link.now() < self._last_heartbeat_at + seconds

    @property
    def heartbeat_seconds(self) -> float:
        return self._session_ms / 1000 / HEARTBEATS_PER_SESSION

    def count_dead_letter(self) -> None:
        self.dead_letter_count += 1

    # Protocol

    def run(self) -> Operation[None]:
        """Join, send heartbeats, and rejoin after an expiry, until `leave`. Raises errors that are not retriable."""
        while not self._left:
            if self._subscription is None:
                yield Wait((self._fresh_wake_event(),))
            elif not self.joined:
                yield from self._join(self._subscription)
            else:
                yield from self._send_heartbeat()

    def _join(self, subscription: SubscriptionRow) -> Operation[None]:
        """Join the group as a member that owns no partitions yet, and apply the assignment in the response."""
        began = self._link.now()
        self._subscription_unsent = False
        reply = yield from request_with_retries(
            self._link, JoinGroup(self.group, self.member_id, *subscription), NEVER, in_background=True
        )
        self.generation, self.joined = reply.generation, True
        self._joined_dead_letters = self._reported_dead_letters
        self._last_heartbeat_at, self._last_heartbeat_connection = began, self._link.connection_count
        self._log_note(reply.note)
        self._set_assigned(reply.partitions)

    def _send_heartbeat(self) -> Operation[None]:
        news, began = self._fresh_wake_event(), self._link.now()
        with_subscription, self._subscription_unsent = self._subscription_unsent, False
        dead_letters = self.dead_letter_count
        pending = self._link.send_request(
            self._heartbeat_request(with_subscription), seconds=self._session_ms / 1000, in_background=True
        )
        try:
            while not pending.done and not news.done:
                yield Wait((pending, news))
        finally:
            self._link.abandon(pending)  # When the broker receives a newer heartbeat, it also ends this one.
            self._subscription_unsent = self._subscription_unsent or (with_subscription and pending.error is not None)
        if self._left:
            return
        if pending.error is None:
            self._reported_dead_letters = dead_letters
            yield from self._process_heartbeat_response(pending, began)
        elif isinstance(pending.error, Fenced):
            self._rejoin_after_expiry(pending.error)
        elif not news.done:
            if not pending.error.retriable:
                raise pending.error
            yield Wait((self._fresh_wake_event(),), RETRY_SECONDS)

    def _heartbeat_request(self, with_subscription: bool) -> Heartbeat:
        owned = [
            HeldPartition(each.topic, each.incarnation, each.partition, name not in self.assigned)
            for name, each in self.owned.items()
        ]
        at_once, self._respond_immediately = self._respond_immediately or not self.may_deliver(), False
        wait_ms = 0 if at_once else int(self.heartbeat_seconds * 1000)
        subscription = self._subscription if with_subscription else None
        dead_letters = self.dead_letter_count - self._joined_dead_letters
        return Heartbeat(self.group, self.member_id, self.generation, owned, wait_ms, subscription, dead_letters)

    def _process_heartbeat_response(self, pending: PendingRequest, began: float) -> Operation[None]:
        reply = pending.reply
        waits, lapsed = self._link.now() - began, not self.may_deliver()
        self._last_heartbeat_at, self._last_heartbeat_connection = began, self._link.connection_count
        self.generation = reply.generation
        self._subscription_unsent = self._subscription_unsent or reply.forgotten
        self._log_note(reply.note)
        fresh = reply.assigned is not None and self._set_assigned(reply.assigned)
        if lapsed and not fresh:
            self._changed()
        early = pending.request.wait_ms and waits < self.heartbeat_seconds / 2
        # Pause after an early response without a change, so that heartbeats never become a busy loop.
        if early and not fresh and not self._subscription_unsent:
            yield Wait((self._fresh_wake_event(),), PAUSE_SECONDS)

    def _set_assigned(self, rows: Iterable[GrantedPartition]) -> bool:
        assigned = {PartitionName(each.topic, each.partition): each for each in rows}
        fresh = assigned != self.assigned
        self.owned = {**self.owned, **assigned}
        self.assigned = assigned
        self._changed()
        return fresh

    def _rejoin_after_expiry(self, fenced: Fenced) -> None:
        log.warning("This member of group %s expired, and joins again. %s", self.group, fenced.sentence)
        # The member takes a new id, because another process may have the old one if this machine is a copy of
        # another. Then the two members would expire each other again and again.
        self._drop_membership()
        self.member_id = token_hex(8)
        self._changed()

    def _log_note(self, note: str) -> None:
        """Log the broker's note why fewer partitions are assigned than requested: each reason once, and only if it
        lasts half a heartbeat interval. A shorter lack is normal: partitions change owners when a member starts."""
        self.note = note
        reason, now = NOTE_VARIABLE_PARTS.sub("", note), self._link.now()
        if reason != self._note_reason:
            self._note_reason, self._note_reason_since, self._note_logged = reason, now, False
        elif note and not self._note_logged and now >= self._note_reason_since + self.heartbeat_seconds / 2:
            self._note_logged = True
            if self.owned:
                log.info("This member of group %s %s", self.group, note)
            else:
                log.warning("This member of group %s reads nothing: %s", self.group, note)

    def _on_connected(self, _: object) -> None:
        """Send a heartbeat on a new connection at once, and request an immediate reply, so that member and broker
        exchange their states."""
        self._respond_immediately = True
        self._wake_event.complete()

    def _fresh_wake_event(self) -> Event:
        """Return an event that is not completed yet. Completing it ends the wait of `run`."""
        if self._wake_event.done:
            self._wake_event = Event()
        return self._wake_event

    # Shutdown

    def leave(self, until: float) -> Operation[None]:
        """Leave the group, so that other members get the partitions at once and not after a session timeout."""
        self._left = True
        self._wake_event.complete()
        if not self.joined:
            return
        self._drop_membership()
        dead_letters = self.dead_letter_count - self._joined_dead_letters
        request = LeaveGroup(self.group, self.member_id, self.generation, dead_letters)
        yield from request_with_retries(self._link, request, until)

    def reset_after_fork(self) -> None:
        """Reset the state in a forked child, which joins the group under a new id. The parent stays a member."""
        self._drop_membership()
        self.member_id, self.generation, self.note = token_hex(8), 0, ""
        self._wake_event, self._note_reason = Event(), ""

    def _drop_membership(self) -> None:
        self.joined, self._subscription_unsent = False, True
        self.assigned, self.owned = {}, {}

    def stats(self) -> Mapping[str, Any]:
        return {
            "member": self.member_id,
            "generation": self.generation,
            "assigned": sorted(map(str, self.assigned)),
            "releasing": sorted(map(str, self.owned.keys() - self.assigned.keys())),
            "note": self.note,
        }


ZOOKEEPER_CHECK_SECONDS: Final = 0.5
"""Interval at which `run` checks for changes: it may miss a notification of ZooKeeper that arrives while it is busy."""
CLOSE_SECONDS: Final = 10.0


class ZooKeeperMembership(Membership):
    """Membership in a group that ZooKeeper coordinates. The strategy is always "range"."""

    def __init__(
        self,
        options: ConsumerOptions,
        link: ClientConnection,
        changed: Callable[[], None],
        complete_event: Callable[[Event], None],
    ) -> None:
        # Imported here because kazoo is an optional dependency.
        from tfmq.zookeeper.group_coordinator import GroupMembership as Coordination

        super().__init__(options, link, changed)
        assert options.coordinator is not None
        self._zookeeper_event = Event()
        self._complete_event = complete_event
        self._incarnations: Mapping[PartitionName, int] = {}
        self._coordination: Coordination = Coordination(
            options.coordinator,
            self.group,
            self.member_id,
            session_seconds=self._session_ms / 1000,
            on_change=lambda: self._complete_event(self._zookeeper_event),
        )

    def subscribe(
        self,
        topics: Sequence[str],
        only: Iterable[PartitionName] | None = None,
        wanted: Mapping[PartitionName, int] | None = None,
    ) -> None:
        self._incarnations = dict(wanted or {})
        numbers: dict[str, list[int]] = {topic: [] for topic in topics}
        for name in sorted(self._incarnations):
            numbers.setdefault(name.topic, []).append(name.partition)
        self._coordination.set_topics(numbers)
        self.joined = True
        self._zookeeper_event.complete()

    def release(self, names: Iterable[PartitionName]) -> None:
        owned = [name for name in names if name in self.owned]
        super().release(owned)
        self._coordination.release(owned)

    def may_deliver(self) -> bool:
        """Return whether ZooKeeper's session is certainly valid. Also wake `run` if the assignment has changed."""
        assignment = self._coordination.assignment()
        if self._assignment_differs(assignment.assigned, assignment.revoked):
            self._zookeeper_event.complete()
        return self._coordination.may_deliver()

    def run(self) -> Operation[None]:
        """Apply the assignments of ZooKeeper. Raises a permanent failure of the coordination."""
        while True:
            self._zookeeper_event = Event()
            self.failure = self._coordination.failure
            if self.failure is not None:
                raise self.failure
            assignment = self._coordination.assignment()
            self.generation = max(self.generation, self._coordination.generation)
            self._log_note(self._coordination.idle_reason)
            if self._assignment_differs(assignment.assigned, assignment.revoked):
                self._set_partitions(assignment.assigned, assignment.revoked)
            yield Wait((self._zookeeper_event,), ZOOKEEPER_CHECK_SECONDS)

    def _assignment_differs(self, generations: Mapping[PartitionName, int], revoked: Iterable[PartitionName]) -> bool:
        owned = {name: each.grant for name, each in self.owned.items()}
        return owned != dict(generations) or self.owned.keys() - self.assigned.keys() != set(revoked)

    def _set_partitions(self, generations: Mapping[PartitionName, int], revoked: Iterable[PartitionName]) -> None:
        self.owned = {
            name: GrantedPartition(name.topic, self._incarnations.get(name, 0), name.partition, generation)
            for name, generation in generations.items()
        }
        self.assigned = {name: each for name, each in self.owned.items() if name not in set(revoked)}
        self._changed()

    def leave(self, until: float) -> Operation[None]:
        """Leave the group. Waits for ZooKeeper for `CLOSE_SECONDS` at most."""
        self._drop_membership()
        self._coordination.close(max(0.0, min(CLOSE_SECONDS, until - self._link.now())))
        yield from ()

    def reset_after_fork(self) -> None:
        super().reset_after_fork()
        self._coordination.restart_as(self.member_id)
