"""A consumer's place in its group: what is its, by grants that the broker gives and takes back.

The broker gives each partition of a group to one member at a time. A heartbeat that waits at the broker is how both
agree: it says what this member still holds, and is answered at once when that is to change. What is to go to another
one is not in the `share` any more, and stays `held` until it is released. A member that was silent for too long has
lost everything; it joins again by itself. A broken connection, or a restart of the broker, ends no membership.
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
from tfmq.protocol.commands import Subscription as Wishes
from tfmq.protocol.messages import STICKY

log = logging.getLogger("tfmq.consumer")

BEATS_A_SESSION: Final = 3
"""Heartbeats in one session time: two may be lost before the broker takes the member for dead."""
RETRY_SECONDS: Final = 0.25
"""Between a heartbeat that failed and the next; where there is no connection the link's own back-off comes before."""
VARIABLE: Final = re.compile(r"[0-9a-f]{16}|\d+")
"""In a note: names of members, and numbers of seconds and partitions, which differ from one heartbeat to the next."""
GONE_A_SESSION: Final = 10
"""Who has no connection for that part of a session is taken for dead, too."""


def nothing() -> None:
    """For who is told of nothing."""


class Membership:
    """One member of one group. `changed` is called, under the driver's lock, when `share` has."""

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
        """Why it will never have anything."""
        self.note = ""
        """Why it has less than it asked for."""
        self.share: dict[PartitionName, GrantedPartition] = {}
        """What this member has and keeps."""
        self.held: dict[PartitionName, GrantedPartition] = {}
        """The share, and what is to go and was not released."""
        self._link = link
        self._session_ms = session_ms
        self._strategy = strategy
        self._changed = changed
        self._wishes: Wishes | None = None
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

    # What is asked for

    def want(
        self,
        topics: Sequence[str],
        only: Iterable[PartitionName] | None = None,
        wanted: Mapping[PartitionName, int] | None = None,
    ) -> None:
        """What this member asks for from now on; `only`: no other partitions than these. `wanted`: what that means now,
        with the incarnations. The first time it joins."""
        rows = None if only is None else [PartitionRow(*name) for name in only]
        wishes = Wishes(list(topics), self._session_ms, self._strategy, rows)
        if wishes != self._wishes:
            self._wishes, self._to_tell = wishes, True
            self._news.settle()

    def release(self, names: Iterable[PartitionName]) -> None:
        """Nothing of these is in work, and all is saved: another member may have them."""
        for name in names:
            self.share.pop(name, None)
            if self.held.pop(name, None) is not None:
                self._news.settle()

    def refused(self, names: Iterable[PartitionName]) -> None:
        """A save of these was fenced: they are another's. The broker is asked at once what there is."""
        self.release(names)
        self._news.settle()

    # What there is

    def generation_of(self, name: PartitionName) -> int:
        """The number under which the partition was granted, which storages of offsets fence with."""
        held = self.held.get(name)
        return self.generation if held is None else held.grant

    def may_hand_out(self) -> bool:
        """Whether the broker was heard of so lately that nobody else can have what is held here."""
        seconds = self._session_ms / 1000
        if self._link.state != "ready" or self._link.connections != self._heard_on:
            seconds /= GONE_A_SESSION
        return self._link.now() < self._heard_at + seconds

    @property
    def beat_seconds(self) -> float:
        return self._session_ms / 1000 / BEATS_A_SESSION

    # The conversation

    def live(self) -> Operation[None]:
        """Until it leaves: joins, beats, joins again. Raises what is neither a passing failure nor a lost place."""
        while not self._left:
            if self._wishes is None:
                yield Wait((self._fresh_news(),))
            elif not self.joined:
                yield from self._join(self._wishes)
            else:
                yield from self._beat()

    def _join(self, wishes: Wishes) -> Operation[None]:
        """Begins anew, with nothing but what the answer gives."""
        began = self._link.now()
        self._to_tell = False
        reply = yield from ask(
            self._link, JoinGroup(self.group, self.member, *wishes), NEVER, unattended=True
        )
        self.generation, self.joined = reply.generation, True
        self._heard_at, self._heard_on = began, self._link.connections
        self._note(reply.note)
        self._take(reply.partitions)

    def _beat(self) -> Operation[None]:
        """One heartbeat: until its answer came, or there is something to say."""
        news, began = self._fresh_news(), self._link.now()
        telling, self._to_tell = self._to_tell, False
        call = self._link.call(self._heartbeat(telling), seconds=self._session_ms / 1000, unattended=True)
        try:
            while not call.done and not news.done:
                yield Wait((call, news))
        finally:
            self._link.abandon(call)  # a newer one ends it at the broker, too
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
        if early and not fresh and not self._to_tell:  # whatever makes it answer so early: not in a circle
            yield Wait((self._fresh_news(),), PAUSE_SECONDS)

    def _take(self, rows: Iterable[GrantedPartition]) -> bool:
        """The share is this; whether that is new."""
        share = {PartitionName(each.topic, each.partition): each for each in rows}
        fresh = share != self.share
        self.held = {**self.held, **share}
        self.share = share
        self._changed()
        return fresh

    def _lost(self, fenced: Fenced) -> None:
        """It is no member any more: everything is another's, or may be. It joins under a new name: another process may
        have the old one, where a machine was copied, and the two would drive each other out for ever."""
        log.warning(
            "This member of group %s was taken for dead, and joins again. %s", self.group, fenced.sentence
        )
        self._forget()
        self.member = token_hex(8)
        self._changed()

    def _note(self, note: str) -> None:
        """Log why this member has less than it asked for: once for each reason, and only when that has lasted for half
        the time of a heartbeat. Until then partitions change owners, as at each start of a member."""
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
        """Another connection: the broker is to hear, and say, at once how things are."""
        self._at_once = True
        self._news.settle()

    def _fresh_news(self) -> Flag:
        if self._news.done:
            self._news = Flag()
        return self._news

    # The end

    def leave(self, until: float) -> Operation[None]:
        """Gives the place up, so that another member need not wait; best effort."""
        self._left = True
        self._news.settle()
        if not self.joined:
            return
        self._forget()
        yield from ask(self._link, LeaveGroup(self.group, self.member, self.generation), until)

    def renew(self) -> None:
        """In a forked child: the parent is the member, this one joins by itself under a name of its own."""
        self._forget()
        self.member, self.generation, self.note = token_hex(8), 0, ""
        self._news, self._reason = Flag(), ""

    def _forget(self) -> None:
        self.joined, self._to_tell = False, True
        self.share, self.held = {}, {}

    def stats(self) -> Mapping[str, Any]:
        """Where this member stands."""
        return {
            "member": self.member,
            "generation": self.generation,
            "assigned": sorted(map(str, self.share)),
            "releasing": sorted(map(str, self.held.keys() - self.share.keys())),
            "note": self.note,
        }


# A place in a group that ZooKeeper coordinates, for a consumer: as `Membership`, where the broker is not asked.

LOOK_SECONDS: Final = 0.5
"""A change is told at once, but where the client is busy at that moment: then it is seen so much later."""
CLOSE_SECONDS: Final = 10.0


def membership_of(
    options: ConsumerOptions,
    link: Link,
    changed: Callable[[], None],
    raise_flag: Callable[[Flag], None],
) -> Membership:
    """The place of a consumer with these options, wherever its group is coordinated. Raises NotSupported."""
    if options.group is None:
        raise BadRequest("Without a group there is no place in one.")
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
    """One member. Its shares are ranges, whatever strategy was asked for."""

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
        from tfmq.zookeeper.group_coordinator import Coordination  # kazoo is for who uses it

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
        """As its base; the partitions are those of `wanted`."""
        self._incarnations = dict(wanted or {})
        numbers: dict[str, list[int]] = {topic: [] for topic in topics}
        for name in sorted(self._incarnations):
            numbers.setdefault(name.topic, []).append(name.partition)
        self._coordination.wants(numbers)
        self.joined = True
        self._poke.settle()

    def release(self, names: Iterable[PartitionName]) -> None:
        """As its base."""
        gone = [name for name in names if name in self.held]
        super().release(gone)
        self._coordination.release(gone)

    def may_hand_out(self) -> bool:
        """As its base: a session that may be over, and a partition that is taken back, hold everything up."""
        share = self._coordination.share()
        if self._differs(share.granted, share.revoked):
            self._poke.settle()
        return self._coordination.is_sure()

    def live(self) -> Operation[None]:
        """Never ends: takes note of what ZooKeeper says. Raises what makes it hopeless."""
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
        held = {name: each.grant for name, each in self.held.items()}
        return held != dict(granted) or self.held.keys() - self.share.keys() != set(revoked)

    def _see(self, granted: Mapping[PartitionName, int], revoked: Iterable[PartitionName]) -> None:
        self.held = {
            name: GrantedPartition(name.topic, self._incarnations.get(name, 0), name.partition, grant)
            for name, grant in granted.items()
        }
        self.share = {name: each for name, each in self.held.items() if name not in set(revoked)}
        self._changed()

    def leave(self, until: float) -> Operation[None]:
        """As its base; waits a moment for ZooKeeper."""
        self._forget()
        self._coordination.close(max(0.0, min(CLOSE_SECONDS, until - self._link.now())))
        yield from ()

    def renew(self) -> None:
        """As its base."""
        super().renew()
        self._coordination.renew(self.member)
