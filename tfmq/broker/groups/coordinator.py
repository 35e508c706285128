"""The groups that the broker has in memory, and what bounds them: in number, in members, in what these ask for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from tfmq.broker.catalog import Catalog
from tfmq.broker.catalog_state import GROUP_OWNERS, GroupRow, Key, Register
from tfmq.broker.groups import group as group_descriptions
from tfmq.broker.groups.assignors import strategy_of
from tfmq.broker.groups.group import Changes, Group, Member, Waiting, Wishes, members, summary
from tfmq.broker.groups.offsets import Offsets
from tfmq.broker.partition import Waiter
from tfmq.broker.reply import STOPPING, Randomness, Reply, Session, client_error
from tfmq.broker.timers import Timers
from tfmq.broker.topics import Topics
from tfmq.errors import Abandoned, Busy, Fenced, NotAllowed, TfmqError
from tfmq.protocol.commands import DescribeGroup, Heartbeat, JoinGroup, LeaveGroup, PartitionName


class GroupRoll:
    """See the module. A group of which everything is in the catalog is dropped, and made again when it is asked for."""

    def __init__(self, register: Register, topics: Topics, limits: Mapping[str, int]) -> None:
        self._register, self._topics, self._limits = register, topics, limits
        self._groups: dict[str, Group] = {}
        self._written: dict[str, int] = {}
        """How many entries of a group are on their way to the catalog: until then it may not be there yet."""
        self._asked = 0
        self._granting = 0
        self._generation = 0

    def __iter__(self) -> Iterator[Group]:
        yield from self._groups.values()

    def find(self, name: str) -> Group | None:
        """The group, if it is in memory."""
        return self._groups.get(name)

    def group(self, name: str) -> Group:
        """The group, which is in memory from now on."""
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = Group(name, self._register, self._topics)
        return group

    def drop_if_empty(self, group: Group) -> None:
        if group.empty and self._groups.get(group.name) is group:
            del self._groups[group.name]

    def next_generation(self) -> int:
        """A number that no group had before."""
        self._generation = max(self._generation, self._register.generation) + 1
        return self._generation

    # What is on its way to the catalog

    def submitted(self, name: str, grants: int = 0) -> None:
        """An entry of the group was handed to the catalog."""
        self._written[name] = self._written.get(name, 0) + 1
        self._granting += grants

    def arrived(self, name: str, grants: int = 0) -> None:
        """It is there, or never will be."""
        self._granting -= grants
        self._written[name] -= 1
        if not self._written[name]:
            del self._written[name]

    @property
    def room(self) -> int:
        """How many partitions more may have an owner."""
        return self._limits["group_owners"] - self._register.owners_count - self._granting

    # Limits

    def refuse_many(self, name: str) -> None:
        """Raises NotAllowed for one group too many."""
        known = self._register.groups
        if name in known:
            return
        coming = {each for each in (*self._written, *self._groups) if each not in known and each != name}
        if len(known) + len(coming) >= self._limits["groups"]:
            raise NotAllowed(f"The broker has {len(known)} groups, its limit (limits.groups).")

    def refuse_member(self, group: Group, instead_of: Member | None) -> None:
        """Raises NotAllowed for one member too many."""
        if instead_of is None and len(group.members) >= self._limits["group_members"]:
            raise NotAllowed(
                f"The group {group.name} has {len(group.members)} members (limits.group_members)."
            )

    def ask(self, member: Member, wishes: Wishes | None, instead_of: Member | None = None) -> None:
        """The member asks for something else from now on, or (None) for nothing. Raises NotAllowed for too many names;
        then nothing has changed.
        """
        before = member if instead_of is None else instead_of
        less = 0 if before.wishes is None else before.wishes.size
        more = 0 if wishes is None else wishes.size
        if more > less and self._asked + more - less > self._limits["group_subscriptions"]:
            raise NotAllowed(
                f"The members of all groups ask for {self._asked} topics and partitions already"
                " (limits.group_subscriptions)."
            )
        self._asked += more - less
        before.wishes = None
        member.wishes = wishes


BEATS_A_SESSION: Final = 3
"""A heartbeat waits for no longer than this part of its session time: two may be lost before the member is dead."""

GrantRow = tuple[str, int, int, int]
"""The fields of `GrantedPartition`."""


class GroupWaits:
    """Heartbeats that wait until there is something about its share that their member does not know: one a member.

    Who is to be looked at, and when, is the business of `groups`.
    """

    def __init__(self, timers: Timers, topics: Topics) -> None:
        self._timers, self._topics = timers, topics

    def wait(self, group: Group, member: Member, waiting: Waiting, wait_ms: int) -> None:
        """From now on this one waits; one before it is answered."""
        self.end(group, member)
        member.waiting = waiting
        seconds = min(wait_ms, member.session_ms / BEATS_A_SESSION) / 1000
        if seconds:
            waiting.timer = self._timers.idle_after(seconds, partial(self.end, group, member))

    def look(self, group: Group, member: Member) -> None:
        """Answers what waits, if its member does not know everything, or would not wait."""
        waiting = member.waiting
        if waiting is None:
            return
        if group.unknown_to(member, waiting):
            self._finish(member, waiting)
            told = self.share(group, member), self.note(group, member), member.wishes is None
            waiting.reply.ok(member.generation, *told)
        elif waiting.timer is None:
            self.end(group, member)

    def end(self, group: Group, member: Member, error: TfmqError | None = None) -> None:
        """Answers what waits: nothing has changed, or `error`."""
        waiting = member.waiting
        if waiting is None:
            return
        self._finish(member, waiting)
        if error is None:
            waiting.reply.ok(waiting.generation, None, self.note(group, member), member.wishes is None)
        else:
            waiting.reply.error(error)

    def cancel(self, members: Mapping[Member, Group], session: Session, correlation: int) -> bool:
        """Ends the one of that number, unchanged; whether there was one."""
        for member, group in members.items():
            waiting = member.waiting
            if (
                waiting is not None
                and waiting.session is session
                and waiting.reply.correlation == correlation
            ):
                self.end(group, member)
                return True
        return False

    def joined(self, group: Group, member: Member, reply: Reply) -> None:
        """Answers a JOIN_GROUP."""
        reply.ok(member.id, member.generation, self.share(group, member), self.note(group, member))

    def share(self, group: Group, member: Member) -> list[GrantRow]:
        """The member's share as it is told."""
        share = group.share(member)
        names = {incarnation: self._topics.by_incarnation(incarnation) for incarnation, _ in share}
        return [(name, *key, share[key]) for key in sorted(share) if (name := names[key[0]]) is not None]

    def note(self, group: Group, member: Member) -> str:
        return group_descriptions.note(group, member, self._topics, self._timers.now())

    def _finish(self, member: Member, waiting: Waiting) -> None:
        member.waiting = None
        if waiting.timer is not None:
            self._timers.cancel(waiting.timer)


# Which members of groups are alive: by their connections, and by when they were last heard of.

LATE_A_SESSION: Final = 0.1
"""A broker that is late by more than this part of a session time is not only busy: it, or its machine, was stopped."""


class GroupWatch:
    """`dead(group, member)` once nothing is heard of one for its session time, or its connection is gone for a part of
    that; `alone(group, member)` when its connection has just gone.
    """

    def __init__(
        self, timers: Timers, *, dead: Callable[[Group, Member], None], alone: Callable[[Group, Member], None]
    ) -> None:
        self._timers = timers
        self._dead, self._alone = dead, alone
        self._connected: dict[Session, dict[Member, Group]] = {}

    def begin(self, group: Group, member: Member) -> None:
        """A member that is not connected yet."""
        self._arm(group, member)

    def heard(self, group: Group, member: Member, session: Session) -> None:
        """The member is there, at the other end of `session`; one call back a session, however many it has."""
        if member.session is session:
            member.seen = self._timers.now()
            return
        self._disconnect(member)
        member.attach(session, self._timers.now())
        self._arm(group, member)
        members = self._connected.get(session)
        if members is not None:
            members[member] = group
        else:
            self._connected[session] = {member: group}
            session.on_close(partial(self._closed, session))

    def touch(self, member: Member) -> None:
        """The member was heard of over another's connection."""
        member.seen = self._timers.now()

    def end(self, member: Member) -> None:
        """It is no member any more."""
        self._disconnect(member)
        if member.timer is not None:
            self._timers.cancel(member.timer)
            member.timer = None

    def members(self, session: Session) -> Mapping[Member, Group]:
        """The members at the other end of a connection."""
        return self._connected.get(session, {})

    def _disconnect(self, member: Member) -> None:
        if member.session is not None:
            self._connected.get(member.session, {}).pop(member, None)

    def _closed(self, session: Session) -> None:
        for member, group in self._connected.pop(session, {}).items():
            member.detach(self._timers.now())
            self._arm(group, member)
            self._alone(group, member)

    def _arm(self, group: Group, member: Member) -> None:
        if member.timer is not None:
            self._timers.cancel(member.timer)
        seconds = max(0.0, member.deadline() - self._timers.now())
        member.timer = self._timers.after(seconds, partial(self._look, group, member))

    def _look(self, group: Group, member: Member) -> None:
        """The time that it had when the timer was set is over; it may have more by now.

        A broker that looks late stood still itself: what members said meanwhile is yet to be read, so they have their
        session time from now on.
        """
        member.timer = None
        now = self._timers.now()
        late = now - member.deadline()
        if late > LATE_A_SESSION * member.session_ms / 1000:
            member.spare(now)
        if now < member.deadline():
            self._arm(group, member)
        else:
            self._dead(group, member)


# Groups of consumers: each partition has one owner, by a grant that is on the disk before its owner is told.
#
# What changes during a turn (members, wishes, topics, partitions given up) is one plan and one entry in the catalog at
# its end. Heartbeats wait for what that does to their member's share. From the moment of the plan on a partition is its
# new owner's: commits of the one before are `Fenced`. A member of which nothing is heard is dead, and what it had is
# free; until somebody gets it, it may come back and go on, also over a restart of the broker, behind which every owner
# has its session time to do so.

log = logging.getLogger("tfmq.broker")

RETRY_SECONDS: Final = 1.0
"""When an entry that the catalog refused is tried again: its disk is full, or it is busy."""


class Join(NamedTuple):
    """Who waits to hear that it is a member."""

    member: Member
    reply: Reply


class Groups:
    """All groups. What must last is in the catalog's register; who is there, and what shall be, is here."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        offsets: Offsets,
        topics: Topics,
        timers: Timers,
        randomness: Randomness,
        limits: Mapping[str, int],
    ) -> None:
        self._catalog, self._offsets, self._topics, self._timers = catalog, offsets, topics, timers
        self._randomness, self._limits = randomness, limits
        self._roll = GroupRoll(catalog.register, topics, limits)
        self._waits = GroupWaits(timers, topics)
        self._watch = GroupWatch(timers, dead=self._dead, alone=self._alone)
        self._due: dict[str, set[str]] = {}
        """Groups that are to be planned at the end of the turn, with the members that are looked at then."""
        self._changed_topics: set[str] = set()
        self._joins: dict[str, list[Join]] = {}

    # The start, the end, the topics

    def start(self) -> None:
        """Whoever had something before the start has its session time to be heard of."""
        for name, row in self._catalog.register.groups.items():
            if row.owners:
                group = self._roll.group(name)
                for member in group.expect(self._timers.now()):
                    self._watch.begin(group, member)
                self._mark(group)

    def stop(self) -> None:
        """The broker stops: whoever waits gets the error."""
        for group in self._roll:
            for member in group.members.values():
                self._waits.end(group, member, Busy(STOPPING))

    def topic_changed(self, name: str) -> None:
        """A topic is there, has grown, or is gone."""
        self._changed_topics.add(name)

    # Membership

    def join(self, request: JoinGroup, reply: Reply, session: Session) -> None:
        """Makes the caller a member that holds nothing; answered once that, and what it is given, is on the disk.

        Raises BadRequest, NotAllowed.
        """
        wishes = _wishes(request.topics, request.strategy, request.only)
        self._roll.refuse_many(request.group)
        member = Member(
            request.member or self._randomness(12).hex(),
            self._roll.next_generation(),
            self._session_ms(request.session_ms),
            self._timers.now(),
        )
        group = self._roll.group(request.group)
        before = group.members.get(member.id)
        try:
            self._roll.refuse_member(group, before)
            _refuse_left(group, before, session)
            self._roll.ask(member, wishes, instead_of=before)
        except (NotAllowed, Fenced):
            self._roll.drop_if_empty(group)
            raise
        if before is not None:
            self._end(group, before, fenced(group, before.id, "joined again"))
        group.enter(member)
        self._watch.heard(group, member, session)
        self._joins.setdefault(group.name, []).append(Join(member, reply))
        self._mark(group)
        log.info("group %s: %s (%s) joins", group.name, member.id, session.identity)

    def heartbeat(self, request: Heartbeat, reply: Reply, session: Session) -> None:
        """Keeps the member alive, takes what it gives up, and waits for what it does not know. Raises Fenced."""
        group, member = self._member(request.group, request.member, request.generation, session)
        wanted = request.subscription
        if wanted is not None:
            wishes = _wishes(wanted.topics, wanted.strategy, wanted.only)
            if wishes != member.wishes:
                self._roll.ask(member, wishes)
                group.stale = True
                self._mark(group)
            member.session_ms = self._session_ms(wanted.session_ms)
        self._watch.heard(group, member, session)
        held = {(each.incarnation, each.partition): each.leaving for each in request.held}
        if group.give_up(member, held, request.generation):
            self._mark(group)
        # What it is to give up and has not got is no news: it would only be kept for as long as this waits.
        known = {key: leaving for key, leaving in held.items() if not leaving or key in member.owned}
        self._waits.wait(group, member, Waiting(reply, session, request.generation, known), request.wait_ms)
        self._look(group, [member.id])

    def leave(self, request: LeaveGroup, reply: Reply) -> None:
        """Gives up the place and all that the member has; answers whether there was anything."""
        try:
            group, member = self._member(request.group, request.member, request.generation)
        except Fenced:
            reply.ok(False)
            return
        self._end(group, member, fenced(group, member.id, "left"))
        group.leave(member.id)
        self._mark(group)
        log.info("group %s: %s leaves", group.name, member.id)
        reply.ok(True)

    def cancel(self, session: Session, correlation: int) -> bool:
        """Ends a heartbeat that waits, unchanged; whether there was one."""
        return self._waits.cancel(self._watch.members(session), session, correlation)

    def member_of(self, name: str, member_id: str, generation: int, session: Session | None) -> Group:
        """The group, if this is a member of it; hearing of it keeps it alive. `session`: its own connection, if this is
        that. Raises Fenced.
        """
        group, member = self._member(name, member_id, generation, session)
        if session is None:
            self._watch.touch(member)
        else:
            self._watch.heard(group, member, session)
        return group

    def _member(
        self, name: str, member_id: str, generation: int, session: Session | None = None
    ) -> tuple[Group, Member]:
        """The member, which is one from here on if the catalog knows it as an owner. Raises Fenced; also where it has
        gone on over a later connection than `session`.
        """
        group = self._roll.group(name)
        member = group.members.get(member_id)
        if member is None:
            member = group.adopt(member_id, generation, self._timers.now())
            if member is not None:
                self._watch.begin(group, member)
                self._mark(group)
        if member is None or generation < member.joined:
            self._roll.drop_if_empty(group)
            raise fenced(group, member_id, "is none (any more)")
        _refuse_left(group, member, session)
        return group, member

    def _session_ms(self, asked: int) -> int:
        return min(asked, self._limits["session_ms"])

    def find(self, name: str) -> Group | None:
        """The group, if anything of it is not in the catalog."""
        return self._roll.find(name)

    def known(self, name: str) -> bool:
        """Whether there is such a group, in the catalog or only in memory."""
        return name in self._catalog.register.groups or self._roll.find(name) is not None

    def submit(self, entry: Sequence[Any], done: Waiter) -> None:
        """An entry about a group that was cleared; `done` once it is on the disk."""
        self._catalog.submit(entry, done)

    def clear(self, name: str) -> tuple[Group, int]:
        """Nobody is a member, or has anything, any more: under that new generation, once the caller has it written, and
        says so with `cleared`. Raises NotAllowed for one group too many.
        """
        self._roll.refuse_many(name)
        group = self._roll.group(name)
        for member in list(group.members.values()):
            self._end(group, member, fenced(group, member.id, "lost its place to a reset of the group"))
            group.lose(member.id)
        group.void()
        self._roll.submitted(name)
        return group, self._roll.next_generation()

    def cleared(self, group: Group, error: BaseException | None) -> None:
        """What `clear` promised is on the disk, or not."""
        self._roll.arrived(group.name)
        self._roll.drop_if_empty(group)

    # Death

    def _dead(self, group: Group, member: Member) -> None:
        log.warning("group %s: %s is not heard of any more; what it had is free", group.name, member.id)
        self._end(group, member, fenced(group, member.id, "was not heard of for its session time"))
        group.lose(member.id)
        self._mark(group)

    def _alone(self, group: Group, member: Member) -> None:
        self._waits.end(group, member, Abandoned())

    def _end(self, group: Group, member: Member, error: TfmqError) -> None:
        """It is no member any more."""
        self._watch.end(member)
        self._waits.end(group, member, error)
        self._roll.ask(member, None)

    # Who gets what

    @property
    def due(self) -> bool:
        """Whether `balance` has something to do."""
        return bool(self._due or self._changed_topics)

    def _mark(self, group: Group, *member_ids: str) -> None:
        self._due.setdefault(group.name, set()).update(member_ids)

    def balance(self) -> bool:
        """At the end of a turn: what changed is one plan and one entry a group; whether there was anything to do."""
        if not self.due:
            return False
        changed, self._changed_topics = self._changed_topics, set()
        for group in self._roll if changed else ():
            if group.wants_any(changed):
                group.stale = True
                self._mark(group)
        due, self._due = self._due, {}
        for name, member_ids in due.items():
            found = self._roll.find(name)
            if found is not None:
                self._plan(found, member_ids)
        return True

    def _plan(self, group: Group, member_ids: Collection[str]) -> None:
        """What should be written now; a new plan may concern everybody, else it is the members of these names."""
        joins = self._joins.pop(group.name, [])
        member_ids = list(group.members) if group.stale else member_ids
        generation = self._roll.next_generation()
        changes = group.changes(generation, self._roll.room)
        if joins or changes.grants or changes.freed:
            self._roll.submitted(group.name, len(changes.grants))
            entry = (GROUP_OWNERS, group.name, generation, changes.rows())
            self._catalog.submit(entry, partial(self._written, group, changes, joins))
        self._look(group, member_ids)
        self._roll.drop_if_empty(group)

    def _written(
        self, group: Group, changes: Changes, joins: list[Join], error: BaseException | None
    ) -> None:
        """The entry is on the disk, or, for all that is known, not."""
        self._roll.arrived(group.name, len(changes.grants))
        group.written(changes, forced=error is None)
        for join in joins:
            self._answer(group, join, error)
        if error is None and group.stale:
            self._mark(group)
        elif error is not None and group.members:
            self._timers.after(RETRY_SECONDS, partial(self._mark, group))
        self._look(group, {owner.member for owner in changes.grants.values()})
        self._roll.drop_if_empty(group)

    def _answer(self, group: Group, join: Join, error: BaseException | None) -> None:
        member, reply = join
        there = group.members.get(member.id) is member
        if error is not None:
            if there:
                self._end(group, member, Abandoned())
                group.leave(member.id)
            reply.error(client_error(error))
        elif there:
            self._waits.joined(group, member, reply)
        else:
            reply.error(fenced(group, member.id, "joined again, or left, before it was answered"))

    def _look(self, group: Group, member_ids: Iterable[str]) -> None:
        """Answers their heartbeats, where there is something to say; behind the plan, if there is one in this turn."""
        if group.name in self._due:
            self._mark(group, *member_ids)
            return
        for member_id in member_ids:
            member = group.members.get(member_id)
            if member is not None:
                self._waits.look(group, member)

    # Descriptions

    def list(self) -> list[dict[str, Any]]:
        """LIST_GROUPS: one map a group."""
        groups = self._catalog.register.groups
        return [self._summary(name, groups[name]) for name in sorted(groups)]

    def _summary(self, name: str, row: GroupRow) -> dict[str, Any]:
        partitions = sum(1 for _ in self._offsets.present(row))
        return summary(name, row, self._roll.find(name), partitions, self._timers.now())

    def describe(self, request: DescribeGroup, reply: Reply) -> None:
        """DESCRIBE_GROUP: its members, generation, offsets and lag; an unknown group is an empty one."""
        row = self._catalog.register.groups.get(request.group, GroupRow())
        group, now = self._roll.find(request.group), self._timers.now()
        summary = self._summary(request.group, row)
        description = {
            **summary,
            "strategy": "" if group is None else group.strategy,
            "member_count": summary["members"],
            "members": [] if group is None else members(group, self._topics, now),
        }

        def member_of(key: Key) -> str:
            holder = None if group is None else group.holder(key)
            return "" if holder is None else holder.id

        self._offsets.describe(row, member_of, reply, description)


def _wishes(topics: Collection[str], strategy: str, only: Iterable[PartitionName] | None) -> Wishes:
    """Raises BadRequest for an unknown strategy."""
    strategy_of(strategy)
    return Wishes(topics, strategy, None if only is None else {(each.topic, each.partition) for each in only})


def _refuse_left(group: Group, member: Member | None, session: Session | None) -> None:
    """What was sent before the member connected again, and is read behind it, is too late: it would take back what
    was said since.
    """
    if member is not None and session is not None and member.left(session):
        raise fenced(group, member.id, "has gone on over a later connection")


def fenced(group: Group, member_id: str, why: str) -> Fenced:
    """The error for who is no member, or has not got the partition, with the reason."""
    return Fenced(
        f"The member {member_id or '?'} of the group {group.name} {why}. What it had may be another's: drop work begun"
        " with that; who lost its place joins again.",
        generation=group.row.generation,
    )
