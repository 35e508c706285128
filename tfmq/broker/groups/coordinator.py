"""The group coordinator: membership, session timeouts, assignment of partitions."""

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
    """The groups in memory, and the limits on groups, members and subscriptions.

    A group is dropped when all its state is in the catalog, and created again when it is needed.
    """

    def __init__(self, register: Register, topics: Topics, limits: Mapping[str, int]) -> None:
        self._register, self._topics, self._limits = register, topics, limits
        self._groups: dict[str, Group] = {}
        self._written: dict[str, int] = {}
        """Entries per group that are submitted to the catalog but not written yet."""
        self._asked = 0
        self._granting = 0
        self._generation = 0

    def __iter__(self) -> Iterator[Group]:
        yield from self._groups.values()

    def find(self, name: str) -> Group | None:
        """Return the group if it is in memory."""
        return self._groups.get(name)

    def group(self, name: str) -> Group:
        """Return the group, created in memory if necessary."""
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = Group(name, self._register, self._topics)
        return group

    def drop_if_empty(self, group: Group) -> None:
        if group.empty and self._groups.get(group.name) is group:
            del self._groups[group.name]

    def next_generation(self) -> int:
        """Return a generation that no group has used."""
        self._generation = max(self._generation, self._register.generation) + 1
        return self._generation

    # Entries that are being written

    def submitted(self, name: str, grants: int = 0) -> None:
        """Count an entry that was submitted to the catalog."""
        self._written[name] = self._written.get(name, 0) + 1
        self._granting += grants

    def arrived(self, name: str, grants: int = 0) -> None:
        """Count an entry as written or failed."""
        self._granting -= grants
        self._written[name] -= 1
        if not self._written[name]:
            del self._written[name]

    @property
    def room(self) -> int:
        """How many more partitions may have an owner."""
        return self._limits["group_owners"] - self._register.owners_count - self._granting

    # Limits

    def refuse_many(self, name: str) -> None:
        """Raise NotAllowed if the group would exceed the limit on groups."""
        known = self._register.groups
        if name in known:
            return
        coming = {each for each in (*self._written, *self._groups) if each not in known and each != name}
        if len(known) + len(coming) >= self._limits["groups"]:
            raise NotAllowed(f"The broker has {len(known)} groups, its limit (limits.groups).")

    def refuse_member(self, group: Group, instead_of: Member | None) -> None:
        """Raise NotAllowed if another member would exceed the limit on members."""
        if instead_of is None and len(group.members) >= self._limits["group_members"]:
            raise NotAllowed(
                f"The group {group.name} has {len(group.members)} members (limits.group_members)."
            )

    def ask(self, member: Member, wishes: Wishes | None, instead_of: Member | None = None) -> None:
        """Replace the member's subscription; None removes it.

        Raises NotAllowed if all subscriptions together exceed the limit; nothing has changed then.
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
"""A heartbeat waits at most this part of the session timeout, so that two may be lost before the member expires."""

GrantRow = tuple[str, int, int, int]
"""The fields of `GrantedPartition`."""


class GroupWaits:
    """Parked heartbeats, at most one per member, until its member must be notified of a change.

    `GroupCoordinator` decides when a heartbeat is checked.
    """

    def __init__(self, timers: Timers, topics: Topics) -> None:
        self._timers, self._topics = timers, topics

    def wait(self, group: Group, member: Member, waiting: Waiting, wait_ms: int) -> None:
        """Park a heartbeat. An earlier one of the member is answered."""
        self.end(group, member)
        member.waiting = waiting
        seconds = min(wait_ms, member.session_ms / BEATS_A_SESSION) / 1000
        if seconds:
            waiting.timer = self._timers.idle_after(seconds, partial(self.end, group, member))

    def look(self, group: Group, member: Member) -> None:
        """Answer the parked heartbeat if there is news, or if it does not want to wait."""
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
        """Answer the parked heartbeat: nothing has changed, or `error`."""
        waiting = member.waiting
        if waiting is None:
            return
        self._finish(member, waiting)
        if error is None:
            waiting.reply.ok(waiting.generation, None, self.note(group, member), member.wishes is None)
        else:
            waiting.reply.error(error)

    def cancel(self, members: Mapping[Member, Group], session: Session, correlation: int) -> bool:
        """Answer the parked heartbeat with that correlation number. Return whether there was one."""
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
        """Answer a JOIN_GROUP."""
        reply.ok(member.id, member.generation, self.share(group, member), self.note(group, member))

    def share(self, group: Group, member: Member) -> list[GrantRow]:
        """Return the member's assignment for the reply."""
        share = group.share(member)
        names = {incarnation: self._topics.by_incarnation(incarnation) for incarnation, _ in share}
        return [(name, *key, share[key]) for key in sorted(share) if (name := names[key[0]]) is not None]

    def note(self, group: Group, member: Member) -> str:
        return group_descriptions.note(group, member, self._topics, self._timers.now())

    def _finish(self, member: Member, waiting: Waiting) -> None:
        member.waiting = None
        if waiting.timer is not None:
            self._timers.cancel(waiting.timer)


LATE_A_SESSION: Final = 0.1
"""If the broker checks a member late by more than this part of the session timeout, the broker itself was stopped."""


class GroupWatch:
    """Session timeouts of members.

    `expired(group, member)` is called when a member has sent nothing for its session timeout, or its connection was
    closed for a part of it; `disconnected(group, member)` when its connection was closed just now.
    """

    def __init__(
        self, timers: Timers, *, dead: Callable[[Group, Member], None], alone: Callable[[Group, Member], None]
    ) -> None:
        self._timers = timers
        self._dead, self._alone = dead, alone
        self._connected: dict[Session, dict[Member, Group]] = {}

    def begin(self, group: Group, member: Member) -> None:
        """Start the session timeout of a member that has no connection yet."""
        self._arm(group, member)

    def heard(self, group: Group, member: Member, session: Session) -> None:
        """Record a request of the member on its own connection `session`."""
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
        """Record a request for the member on another connection."""
        member.seen = self._timers.now()

    def end(self, member: Member) -> None:
        """Stop monitoring a member."""
        self._disconnect(member)
        if member.timer is not None:
            self._timers.cancel(member.timer)
            member.timer = None

    def members(self, session: Session) -> Mapping[Member, Group]:
        """Return the members on a connection."""
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
        """Check a member whose timer expired; it may have been active since the timer was set."""
        member.timer = None
        now = self._timers.now()
        late = now - member.deadline()
        if late > LATE_A_SESSION * member.session_ms / 1000:
            # The broker itself did not run, so requests of the member may be unread. It gets a full session timeout.
            member.spare(now)
        if now < member.deadline():
            self._arm(group, member)
        else:
            self._dead(group, member)


log = logging.getLogger("tfmq.broker")

RETRY_SECONDS: Final = 1.0
"""Interval of retries for an entry that the catalog rejected because it is busy or its disk is full."""


class Join(NamedTuple):
    """A member and its pending JOIN_GROUP reply."""

    member: Member
    reply: Reply


class Groups:
    """All consumer groups.

    Durable state is in the catalog, members and planned assignments are in memory.

    Each partition has at most one owner per group, and the assignment is durable before the owner is notified.
    Changes during a turn (members, subscriptions, topics, released partitions) are combined into one plan and one
    catalog entry at its end. Heartbeats are parked until the member's assignment changes. From the plan on the
    partition belongs to the new owner, and commits of the previous one are `Fenced`. A member whose session timeout
    expires loses its partitions. Until they are assigned to others the member may return and continue, even across a
    restart of the broker, after which every owner has a full session timeout.
    """

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
        """Groups to be planned at the end of the turn, with the members whose heartbeats are checked then."""
        self._changed_topics: set[str] = set()
        self._joins: dict[str, list[Join]] = {}

    # Start, stop, topics

    def start(self) -> None:
        """Start a session timeout for each owner in the catalog."""
        for name, row in self._catalog.register.groups.items():
            if row.owners:
                group = self._roll.group(name)
                for member in group.expect(self._timers.now()):
                    self._watch.begin(group, member)
                self._mark(group)

    def stop(self) -> None:
        """Answer all parked heartbeats with an error; the broker is stopping."""
        for group in self._roll:
            for member in group.members.values():
                self._waits.end(group, member, Busy(STOPPING))

    def topic_changed(self, name: str) -> None:
        """Plan again for a topic that was created, has grown, or was deleted."""
        self._changed_topics.add(name)

    # Membership

    def join(self, request: JoinGroup, reply: Reply, session: Session) -> None:
        """Add a member without partitions.

        The reply is sent once that, and its assignment, is durable.

        Raises BadRequest, NotAllowed, Fenced.
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
        """Process a heartbeat: keep the member alive and accept released partitions.

        It is parked until there is news for the member.

        Raises Fenced, BadRequest, NotAllowed.
        """
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
        # Partitions to be released that the member does not own are no news; parking them would waste memory.
        known = {key: leaving for key, leaving in held.items() if not leaving or key in member.owned}
        self._waits.wait(group, member, Waiting(reply, session, request.generation, known), request.wait_ms)
        self._look(group, [member.id])

    def leave(self, request: LeaveGroup, reply: Reply) -> None:
        """Remove a member and release its partitions. Reply whether it was a member."""
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
        """End a parked heartbeat without a change. Return whether there was one."""
        return self._waits.cancel(self._watch.members(session), session, correlation)

    def member_of(self, name: str, member_id: str, generation: int, session: Session | None) -> Group:
        """Return the group of a member and keep the member alive. Raises Fenced if it is no member.

        `session` is the member's own connection, or None if the request uses another one.
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
        """Return a member; one that the catalog knows as an owner becomes a member again.

        Raises Fenced, also if the member has used a later connection than `session`.
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
            raise fenced(group, member_id, "is not a member (any more)")
        _refuse_left(group, member, session)
        return group, member

    def _session_ms(self, asked: int) -> int:
        return min(asked, self._limits["session_ms"])

    def find(self, name: str) -> Group | None:
        """Return the group if it is in memory."""
        return self._roll.find(name)

    def known(self, name: str) -> bool:
        """Return whether the group exists, in the catalog or only in memory."""
        return name in self._catalog.register.groups or self._roll.find(name) is not None

    def submit(self, entry: Sequence[Any], done: Waiter) -> None:
        """Append an entry about a cleared group; `done` is called once it is durable."""
        self._catalog.submit(entry, done)

    def clear(self, name: str) -> tuple[Group, int]:
        """Remove all members and owners of a group. Return it with a new generation.

        The caller writes that generation to the catalog and then calls `removal_written`. Raises NotAllowed if the
        group would exceed the limit on groups.
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
        """End what `remove_all_members` began: its entry is durable, or failed."""
        self._roll.arrived(group.name)
        self._roll.drop_if_empty(group)

    # Expired members

    def _dead(self, group: Group, member: Member) -> None:
        log.warning(
            "group %s: the session of %s has expired; its partitions are released", group.name, member.id
        )
        self._end(group, member, fenced(group, member.id, "sent nothing for its session timeout"))
        group.lose(member.id)
        self._mark(group)

    def _alone(self, group: Group, member: Member) -> None:
        self._waits.end(group, member, Abandoned())

    def _end(self, group: Group, member: Member, error: TfmqError) -> None:
        """Stop monitoring a member that has left, and answer its heartbeat with `error`."""
        self._watch.end(member)
        self._waits.end(group, member, error)
        self._roll.ask(member, None)

    # Assignment

    @property
    def due(self) -> bool:
        """Whether `balance` has work."""
        return bool(self._due or self._changed_topics)

    def _mark(self, group: Group, *member_ids: str) -> None:
        self._due.setdefault(group.name, set()).update(member_ids)

    def balance(self) -> bool:
        """Plan changed groups at the end of a turn, one catalog entry per group.

        Return whether there were any.
        """
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
        """Plan a group and submit the changes.

        A new plan checks all heartbeats, otherwise those of `member_ids`.
        """
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
        """Handle the result of an entry: durable, or failed with an unknown outcome."""
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
        """Check the members' heartbeats; after the plan, if the group is planned in this turn."""
        if group.name in self._due:
            self._mark(group, *member_ids)
            return
        for member_id in member_ids:
            member = group.members.get(member_id)
            if member is not None:
                self._waits.look(group, member)

    # Descriptions

    def list(self) -> list[dict[str, Any]]:
        """Return the rows of LIST_GROUPS."""
        groups = self._catalog.register.groups
        return [self._summary(name, groups[name]) for name in sorted(groups)]

    def _summary(self, name: str, row: GroupRow) -> dict[str, Any]:
        partitions = sum(1 for _ in self._offsets.present(row))
        return summary(name, row, self._roll.find(name), partitions, self._timers.now())

    def describe(self, request: DescribeGroup, reply: Reply) -> None:
        """Answer DESCRIBE_GROUP: members, generation, offsets and lag.

        An unknown group is described as empty.
        """
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
    """Return a subscription. Raises BadRequest for an unknown strategy."""
    strategy_of(strategy)
    return Wishes(topics, strategy, None if only is None else {(each.topic, each.partition) for each in only})


def _refuse_left(group: Group, member: Member | None, session: Session | None) -> None:
    """Raise Fenced for a request on an older connection of the member.

    It was sent before the member reconnected and would revert what the member sent since.
    """
    if member is not None and session is not None and member.left(session):
        raise fenced(group, member.id, "continued on a later connection")


def fenced(group: Group, member_id: str, why: str) -> Fenced:
    """Return the error for a caller that is no member, or does not own the partition.

    `why` is the reason.
    """
    return Fenced(
        f"The member {member_id or '?'} of the group {group.name} {why}. Its partitions may belong to another member:"
        " discard work begun with them; a member that was removed joins again.",
        generation=group.row.generation,
    )
