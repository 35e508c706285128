"""Group membership of a consumer: joining, heartbeats, assigned partitions.

The broker assigns each partition of a group to one member at a time. A heartbeat is a long poll: it contains
what this member still owns, and is answered at once when the assignment is to change. A revoked partition is
removed from `assigned` and remains in `owned` until it is released. A member that was silent for a session
timeout has lost everything and joins again by itself. A broken connection or a restart of the broker does not
end the membership.

`ZooKeeperMembership` is the same for a group that ZooKeeper coordinates.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from secrets import token_hex
from typing import Any, Final

from tfmq.client.connection.connection import NEVER, Call, Link
from tfmq.client.connection.requests import PAUSE_SECONDS, ask
from tfmq.client.consumer.options import ConsumerOptions
from tfmq.client.operation import Flag, Operation, Wait
from tfmq.errors import BadRequest, Fenced, TfmqError
from tfmq.offsets.storage import PartitionName
from tfmq.protocol.commands import GrantedPartition, Heartbeat, HeldPartition, JoinGroup, LeaveGroup
from tfmq.protocol.commands import PartitionName as PartitionRow
from tfmq.protocol.commands import Subscription as SubscriptionRow
from tfmq.protocol.messages import STICKY

log = logging.getLogger("tfmq.consumer")

BEATS_A_SESSION: Final = 3
"""Heartbeats in one session timeout: two may be lost before the broker expires the member."""
RETRY_SECONDS: Final = 0.25
"""Pause after a failed heartbeat; without a connection its own back-off comes first."""
VARIABLE: Final = re.compile(r"[0-9a-f]{16}|\d+")
"""The parts of a note that differ between heartbeats: member ids, seconds, partitions."""
GONE_A_SESSION: Final = 10
"""A member without a connection expires after this fraction of the session timeout."""


def nothing() -> None:
    """Default callback that does nothing."""


class Membership:
    """Membership of one consumer in a group that the broker coordinates.

    `changed` is called under the driver's lock when `assigned` changed.
    """

    def __init__(
        self,
        link: Link,
        group: str,
        *,
        session_ms: int,
        strategy: str = STICKY,
        changed: Callable[[], None] = nothing,
    ) -> None:
        self.group = group
        self.member = token_hex(8)
        self.generation = 0
        self.joined = False
        self.failure: TfmqError | None = None
        """A permanent failure, after which nothing can be assigned."""
        self.note = ""
        """Why less is assigned than was requested, as the broker reported; "" if nothing is missing."""
        self.share: dict[PartitionName, GrantedPartition] = {}
        """Assigned partitions, without revoked ones."""
        self.held: dict[PartitionName, GrantedPartition] = {}
        """Assigned partitions and revoked ones that are not released yet."""
        self._link = link
        self._session_ms = session_ms
        self._strategy = strategy
        self._changed = changed
        self._wishes: SubscriptionRow | None = None
        self._news = Flag()
        self._to_tell = True
        self._heard_at = 0.0
        self._heard_on = 0
        self._at_once = False
        self._reason = ""
        self._reason_at = 0.0
        self._logged = False
        self._left = False
        link.on_ready.append(self._connected)

    # Subscription

    def want(
        self,
        topics: Sequence[str],
        only: Iterable[PartitionName] | None = None,
        wanted: Mapping[PartitionName, int] | None = None,
    ) -> None:
        """Set the topics and partitions to request; the first call makes the member join.

        `only`: no other partitions than these. `wanted`: the existing partitions of the subscription, with
        incarnations.
        """
        rows = None if only is None else [PartitionRow(*name) for name in only]
        subscription = SubscriptionRow(list(topics), self._session_ms, self._strategy, rows)
        if subscription != self._wishes:
            self._wishes, self._to_tell = subscription, True
            self._news.settle()

    def release(self, names: Iterable[PartitionName]) -> None:
        """Release partitions so that other members may get them.

        No message of them may be in progress, and acked offsets must be committed.
        """
        for name in names:
            self.share.pop(name, None)
            if self.held.pop(name, None) is not None:
                self._news.settle()

    def refused(self, names: Iterable[PartitionName]) -> None:
        """Release partitions whose commit was fenced, and ask the broker for the assignment at once."""
        self.release(names)
        self._news.settle()

    # State

    def generation_of(self, name: PartitionName) -> int:
        """Return the generation that fences commits of the partition in offset storages."""
        held = self.held.get(name)
        return self.generation if held is None else held.grant

    def may_hand_out(self) -> bool:
        """Return whether the last heartbeat is recent enough to exclude other owners."""
        seconds = self._session_ms / 1000
        if self._link.state != "ready" or self._link.connections != self._heard_on:
            seconds /= GONE_A_SESSION
        return self._link.now() < self._heard_at + seconds

    @property
    def beat_seconds(self) -> float:
        """Interval of heartbeats in seconds."""
        return self._session_ms / 1000 / BEATS_A_SESSION

    # Protocol

    def live(self) -> Operation[None]:
        """Join, send heartbeats, and join again when expired, until `leave`.

        Raises errors that are neither retriable nor Fenced.
        """
        while not self._left:
            if self._wishes is None:
                yield Wait((self._fresh_news(),))
            elif not self.joined:
                yield from self._join(self._wishes)
            else:
                yield from self._beat()

    def _join(self, subscription: SubscriptionRow) -> Operation[None]:
        """Join with nothing owned, and take the assignment in the response."""
        began = self._link.now()
        self._to_tell = False
        reply = yield from ask(
            self._link, JoinGroup(self.group, self.member, *subscription), NEVER, unattended=True
        )
        self.generation, self.joined = reply.generation, True
        self._heard_at, self._heard_on = began, self._link.connections
        self._note(reply.note)
        self._take(reply.partitions)

    def _beat(self) -> Operation[None]:
        """Send one heartbeat, and wait for the response or for changes to report."""
        news, began = self._fresh_news(), self._link.now()
        telling, self._to_tell = self._to_tell, False
        call = self._link.call(self._heartbeat(telling), seconds=self._session_ms / 1000, unattended=True)
        try:
            while not call.done and not news.done:
                yield Wait((call, news))
        finally:
            self._link.abandon(call)  # the broker ends it, too, when a newer one is received
            self._to_tell = self._to_tell or (telling and call.error is not None)
        if self._left:
            return
        if call.error is None:
            yield from self._answered(call, began)
        elif isinstance(call.error, Fenced):
            self._lost(call.error)
        elif not news.done:
            if not call.error.retriable:
                raise call.error
            yield Wait((self._fresh_news(),), RETRY_SECONDS)

    def _heartbeat(self, telling: bool) -> Heartbeat:
        """Return the next heartbeat request; `with_subscription`: with the subscription."""
        held = [
            HeldPartition(each.topic, each.incarnation, each.partition, name not in self.share)
            for name, each in self.held.items()
        ]
        at_once, self._at_once = self._at_once or not self.may_hand_out(), False
        wait_ms = 0 if at_once else int(self.beat_seconds * 1000)
        return Heartbeat(
            self.group, self.member, self.generation, held, wait_ms, self._wishes if telling else None
        )

    def _answered(self, call: Call, began: float) -> Operation[None]:
        """Process the response to a heartbeat that was sent at `began`."""
        reply = call.reply
        waits, lapsed = self._link.now() - began, not self.may_hand_out()
        self._heard_at, self._heard_on = began, self._link.connections
        self.generation = reply.generation
        self._to_tell = self._to_tell or reply.forgotten
        self._note(reply.note)
        fresh = reply.assigned is not None and self._take(reply.assigned)
        if lapsed and not fresh:
            self._changed()
        early = call.request.wait_ms and waits < self.beat_seconds / 2
        # An early response without a change: pause, so that no cause makes this a busy loop.
        if early and not fresh and not self._to_tell:
            yield Wait((self._fresh_news(),), PAUSE_SECONDS)

    def _take(self, rows: Iterable[GrantedPartition]) -> bool:
        """Replace the assignment. Return whether it changed."""
        share = {PartitionName(each.topic, each.partition): each for each in rows}
        fresh = share != self.share
        self.held = {**self.held, **share}
        self.share = share
        self._changed()
        return fresh

    def _lost(self, fenced: Fenced) -> None:
        """Drop everything after the broker expired this member, and join under a new member id."""
        log.warning("This member of group %s expired, and joins again. %s", self.group, fenced.sentence)
        # A new id, because another process may have the old one, where a machine was copied; the two would
        # expire each other for ever.
        self._forget()
        self.member = token_hex(8)
        self._changed()

    def _note(self, note: str) -> None:
        """Log why less is assigned than was requested, if it lasts half a heartbeat interval.

        Each reason is logged once. Shorter ones are normal: partitions change owners whenever a member starts.
        """
        self.note = note
        reason, now = VARIABLE.sub("", note), self._link.now()
        if reason != self._reason:
            self._reason, self._reason_at, self._logged = reason, now, False
        elif note and not self._logged and now >= self._reason_at + self.beat_seconds / 2:
            self._logged = True
            if self.held:
                log.info("This member of group %s %s", self.group, note)
            else:
                log.warning("This member of group %s reads nothing: %s", self.group, note)

    def _connected(self, _: object) -> None:
        """Exchange the state with the broker at once, because the connection is new."""
        self._at_once = True
        self._news.settle()

    def _fresh_news(self) -> Flag:
        """Return an event that is not set yet and wakes the heartbeat."""
        if self._news.done:
            self._news = Flag()
        return self._news

    # Shutdown

    def leave(self, until: float) -> Operation[None]:
        """Leave the group, so that other members get the partitions without delay; best effort."""
        self._left = True
        self._news.settle()
        if not self.joined:
            return
        self._forget()
        yield from ask(self._link, LeaveGroup(self.group, self.member, self.generation), until)

    def renew(self) -> None:
        """Reset the state in a forked child, which joins under a new id; the parent stays a member."""
        self._forget()
        self.member, self.generation, self.note = token_hex(8), 0, ""
        self._news, self._reason = Flag(), ""

    def _forget(self) -> None:
        """Drop the membership and everything owned."""
        self.joined, self._to_tell = False, True
        self.share, self.held = {}, {}

    def stats(self) -> Mapping[str, Any]:
        """Return the membership part of `stats()`."""
        return {
            "member": self.member,
            "generation": self.generation,
            "assigned": sorted(map(str, self.share)),
            "releasing": sorted(map(str, self.held.keys() - self.share.keys())),
            "note": self.note,
        }


LOOK_SECONDS: Final = 0.5
"""Polling interval for changes whose notification came while the client was busy."""
CLOSE_SECONDS: Final = 10.0


def membership_of(
    options: ConsumerOptions,
    link: Link,
    changed: Callable[[], None],
    raise_flag: Callable[[Flag], None],
) -> Membership:
    """Create the membership for `options`, at the broker or in ZooKeeper.

    Raises BadRequest without a group, NotSupported where a library is missing.
    """
    if options.group is None:
        raise BadRequest("Without a group there is no membership.")
    session_ms = int(options.session * 1000)
    if options.coordinator is None:
        return Membership(
            link, options.group, session_ms=session_ms, strategy=options.strategy, changed=changed
        )
    return ZooKeeperMembership(
        link,
        options.group,
        session_ms=session_ms,
        changed=changed,
        address=options.coordinator,
        raise_flag=raise_flag,
    )


class ZooKeeperMembership(Membership):
    """Membership in a group that ZooKeeper coordinates.

    The assignment strategy is always "range".
    """

    def __init__(
        self,
        link: Link,
        group: str,
        *,
        session_ms: int,
        changed: Callable[[], None],
        address: str,
        raise_flag: Callable[[Flag], None],
    ) -> None:
        from tfmq.zookeeper.group_coordinator import Coordination  # kazoo is an optional dependency

        super().__init__(link, group, session_ms=session_ms, changed=changed)
        self._poke = Flag()
        self._raise_flag = raise_flag
        self._incarnations: Mapping[PartitionName, int] = {}
        self._coordination: Coordination = Coordination(
            address,
            group,
            self.member,
            session_seconds=session_ms / 1000,
            changed=lambda: self._raise_flag(self._poke),
        )

    def want(
        self,
        topics: Sequence[str],
        only: Iterable[PartitionName] | None = None,
        wanted: Mapping[PartitionName, int] | None = None,
    ) -> None:
        """Set the topics and partitions to request; the partitions are those of `wanted`."""
        self._incarnations = dict(wanted or {})
        numbers: dict[str, list[int]] = {topic: [] for topic in topics}
        for name in sorted(self._incarnations):
            numbers.setdefault(name.topic, []).append(name.partition)
        self._coordination.wants(numbers)
        self.joined = True
        self._poke.settle()

    def release(self, names: Iterable[PartitionName]) -> None:
        """Release partitions so that other members may get them."""
        gone = [name for name in names if name in self.held]
        super().release(gone)
        self._coordination.release(gone)

    def may_hand_out(self) -> bool:
        """Return False if the session may be over, or while a revocation is not processed yet."""
        share = self._coordination.share()
        if self._differs(share.granted, share.revoked):
            self._poke.settle()
        return self._coordination.is_sure()

    def live(self) -> Operation[None]:
        """Apply the assignments of ZooKeeper, for ever.

        Raises a permanent failure of the coordination.
        """
        while True:
            self._poke = Flag()
            self.failure = self._coordination.failure
            if self.failure is not None:
                raise self.failure
            share = self._coordination.share()
            self.generation = max(self.generation, self._coordination.generation)
            self._note(self._coordination.why_idle)
            if self._differs(share.granted, share.revoked):
                self._see(share.granted, share.revoked)
            yield Wait((self._poke,), LOOK_SECONDS)

    def _differs(self, granted: Mapping[PartitionName, int], revoked: Iterable[PartitionName]) -> bool:
        """Return whether ZooKeeper's assignment differs from the current one."""
        held = {name: each.grant for name, each in self.held.items()}
        return held != dict(granted) or self.held.keys() - self.share.keys() != set(revoked)

    def _see(self, granted: Mapping[PartitionName, int], revoked: Iterable[PartitionName]) -> None:
        """Replace the assignment."""
        self.held = {
            name: GrantedPartition(name.topic, self._incarnations.get(name, 0), name.partition, grant)
            for name, grant in granted.items()
        }
        self.share = {name: each for name, each in self.held.items() if name not in set(revoked)}
        self._changed()

    def leave(self, until: float) -> Operation[None]:
        """Leave the group; waits up to `CLOSE_SECONDS` for ZooKeeper."""
        self._forget()
        self._coordination.close(max(0.0, min(CLOSE_SECONDS, until - self._link.now())))
        yield from ()

    def renew(self) -> None:
        """Reset the state in a forked child."""
        super().renew()
        self._coordination.renew(self.member)
