"""The group coordinator: membership, session timeouts, assignment of partitions."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import Any, Final

from tfmq.broker.catalog import Catalog
from tfmq.broker.catalog_state import GROUP_OWNERS, OWNERS_EXPIRED, GroupState, Key
from tfmq.broker.groups.assignors import strategy_of
from tfmq.broker.groups.group import MEMBERS_SHOWN, Group, OwnerChanges, describe_member, idle_reason, summary
from tfmq.broker.groups.members import HEARTBEATS_PER_TIMEOUT, LATE_FRACTION, GroupSubscription, Member, ParkedHeartbeat
from tfmq.broker.groups.offsets import GroupOffsetStore
from tfmq.broker.reply import STOPPING, Reply, Session, client_error
from tfmq.broker.runtime import Runtime
from tfmq.broker.topics import Topics
from tfmq.errors import Abandoned, Busy, Fenced, NotAllowed, TfmqError
from tfmq.protocol.commands import DescribeGroup, Heartbeat, JoinGroup, LeaveGroup, ListGroups, PartitionName

log = logging.getLogger("tfmq.broker")

RETRY_SECONDS: Final = 1.0
"""Time until a group's assignment is planned anew if its catalog entry was not written, for example on a full disk."""


class GroupCoordinator:
    """All consumer groups. Their durable state is in the catalog, members and planned assignments are in memory.

    A partition has at most one owner per group, and an assignment is durable before the new owner is notified. Changes
    during a turn (members, subscriptions, topics, released partitions) are combined into one plan and one catalog entry
    per group at the end of the turn. Heartbeats are parked (get no reply) until the member's assignment changes. As
    soon as the plan is made, a partition belongs to its new owner, and commits of the previous owner are `Fenced`. A
    member whose session timeout expires loses its partitions. If the member returns before they are assigned to others,
    it continues with them. After a restart of the broker, each owner that had not expired has a full session timeout to
    return.
    """

    def __init__(self, runtime: Runtime, catalog: Catalog, offsets: GroupOffsetStore, topics: Topics) -> None:
        self.catalog, self._offsets, self._topics = catalog, offsets, topics
        self._timers, self._randomness, self._limits = runtime.timers, runtime.randomness, runtime.limits
        self._mark_ready = runtime.ready_marker("groups")
        self._groups: dict[str, Group] = {}
        self.dead_letters: dict[str, int] = {}
        """Group -> how many dead letters its members have reported since the start of this process."""
        """The groups in memory. A group whose state is all in the catalog is dropped, and created again if needed."""
        self._pending_entries: dict[str, int] = {}
        """Group -> number of its entries that were submitted to the catalog and are neither durable nor failed yet."""
        self._retries: set[str] = set()
        """Groups whose entry was not written; their assignment is planned anew after RETRY_SECONDS."""
        self._subscribed_names = 0
        self._pending_owners = 0
        self._generation = 0
        self._connected: dict[Session, dict[Member, Group]] = {}
        """Connection -> the members that use it, with their groups."""
        self._due: dict[str, set[str]] = {}
        """Group whose assignment `balance` will plan -> the members whose parked heartbeats are checked after that."""
        self._changed_topics: set[str] = set()
        self._joins: dict[str, list[tuple[Member, Reply]]] = {}

    # Start and stop of the broker, changes of topics

    def start(self) -> None:
        """Restore the members that the catalog names as owners, and start their session timeouts."""
        for name, row in self.catalog.state.groups.items():
            if row.owners:
                group = self._find_or_create(name)
                for member in group.restore_all(self._timers.now()):
                    self._set_timer(group, member)
                self._mark_due(group)

    def stop(self) -> None:
        """Reply to all parked heartbeats with an error, because the broker is stopping."""
        for group in self._groups.values():
            for member in group.members.values():
                self._answer_heartbeat(group, member, Busy(STOPPING))

    def topic_changed(self, name: str) -> None:
        """Have `balance` plan new assignments for the groups that subscribe to a created, grown or deleted topic."""
        self._changed_topics.add(name)
        self._mark_ready()

    # JOIN_GROUP, HEARTBEAT, LEAVE_GROUP, and the members

    def join(self, request: JoinGroup, reply: Reply, session: Session) -> None:
        """Add a member without partitions.

        The plan at the end of the turn releases the partitions of an earlier member with the same id, and assigns the
        partitions that the new member can get at once. The reply is sent when the catalog entry of this plan is
        durable. Raises BadRequest (unknown strategy), NotAllowed (a limit is reached), Fenced (the earlier member used
        a later connection than `session`).
        """
        wishes = _subscription(request.topics, request.strategy, request.only)
        self._check_group_limit(request.group)
        member = Member(
            request.member or self._randomness(12).hex(),
            self._next_generation(),
            min(request.session_ms, self._limits["session_ms"]),
            self._timers.now(),
            dead_letters=0,
        )
        group = self._find_or_create(request.group)
        before = group.members.get(member.id)
        try:
            if before is None and len(group.members) >= self._limits["group_members"]:
                count = len(group.members)
                raise NotAllowed(f"The group {group.name} has {count} members (limits.group_members).")
            _reject_old_connection(group, before, session)
            self._set_subscription(member, wishes, instead_of=before)
        except (NotAllowed, Fenced):
            self._drop_if_empty(group)
            raise
        if before is not None:
            self._remove_member(group, before, fenced_error(group, before.id, "joined again"))
        group.add_member(member)
        self._seen_on(group, member, session)
        self._joins.setdefault(group.name, []).append((member, reply))
        self._mark_due(group)
        log.info("group %s: %s (%s) joins", group.name, member.id, session.identity)

    def heartbeat(self, request: Heartbeat, reply: Reply, session: Session) -> None:
        """Process a heartbeat: restart the session timeout, and release partitions that the member does not hold now.

        The reply is sent when the member's assignment changes, or after the requested wait. Raises Fenced (no such
        member, or it used a later connection), BadRequest (unknown strategy), NotAllowed (limit of subscriptions).
        """
        group, member = self._find_member(request.group, request.member, request.generation, session)
        wanted = request.subscription
        if wanted is not None:
            wishes = _subscription(wanted.topics, wanted.strategy, wanted.only)
            if wishes != member.subscription:
                self._set_subscription(member, wishes)
                group.target_outdated = True
                self._mark_due(group)
            member.session_ms = min(wanted.session_ms, self._limits["session_ms"])
        self._seen_on(group, member, session)
        if request.dead_letters != member.dead_letters:
            self._count_dead_letters(group.name, member, request.dead_letters)
        held = {(each.incarnation, each.partition): each.leaving for each in request.held}
        if group.release(member, held, request.generation):
            self._mark_due(group)
        # Partitions that the member is releasing, but does not own any more, need not be remembered.
        known = {key: leaving for key, leaving in held.items() if not leaving or key in member.owned}
        self._answer_heartbeat(group, member)
        waiting = member.parked = ParkedHeartbeat(reply, session, request.generation, known)
        seconds = min(request.wait_ms, member.session_ms / HEARTBEATS_PER_TIMEOUT) / 1000
        if seconds:
            end_wait = partial(self._answer_heartbeat, group, member)
            waiting.timer = self._timers.after_rounded(seconds, end_wait)
        self._check_heartbeats(group, [member.id])

    def _count_dead_letters(self, name: str, member: Member, reported: int) -> None:
        # A member reports its total since it joined, so a repeated heartbeat counts nothing. The first total of a
        # member that an earlier process knew may have been counted by that one.
        if member.dead_letters is not None and reported > member.dead_letters:
            if name not in self.dead_letters and len(self.dead_letters) >= self._limits["groups"]:
                self.dead_letters = {each: n for each, n in self.dead_letters.items() if each in self._groups}
            self.dead_letters[name] = self.dead_letters.get(name, 0) + reported - member.dead_letters
        member.dead_letters = reported

    def leave(self, request: LeaveGroup, reply: Reply) -> None:
        """Remove a member and release its partitions. Reply False if the group has no such member, else True."""
        try:
            group, member = self._find_member(request.group, request.member, request.generation)
        except Fenced:
            reply.ok(False)
            return
        self._count_dead_letters(group.name, member, request.dead_letters)
        self._remove_member(group, member, fenced_error(group, member.id, "left"))
        group.remove_member(member.id)
        self._mark_due(group)
        log.info("group %s: %s leaves", group.name, member.id)
        reply.ok(True)

    def cancel(self, session: Session, correlation: int) -> bool:
        """Reply to the parked heartbeat with this correlation, as CANCEL requests. Return whether there was one."""
        for member, group in self._connected.get(session, {}).items():
            waiting = member.parked
            if waiting is not None and waiting.session is session and waiting.reply.correlation == correlation:
                self._answer_heartbeat(group, member)
                return True
        return False

    def group_of_member(self, name: str, member_id: str, generation: int, session: Session | None) -> Group:
        """Return the group and restart the member's session timeout. Raises Fenced if the group has no such member.

        `session` is the member's own connection, or None if the request uses another one.
        """
        group, member = self._find_member(name, member_id, generation, session)
        if session is None:
            member.seen_at = self._timers.now()
        else:
            self._seen_on(group, member, session)
        return group

    def _find_member(
        self, name: str, member_id: str, generation: int, session: Session | None = None
    ) -> tuple[Group, Member]:
        """Return the group `name` and its member `member_id`.

        If the member is not in memory, but the catalog names it as an owner, it becomes a member again. Raises Fenced
        if there is no such member, or if the member has used a later connection than `session`.
        """
        group = self._find_or_create(name)
        member = group.members.get(member_id)
        if member is None:
            member = group.restore_member(member_id, generation, self._timers.now())
            if member is not None:
                self._set_timer(group, member)
                self._mark_due(group)
        if member is None or generation < member.joined:
            self._drop_if_empty(group)
            raise fenced_error(group, member_id, "is not a member (any more)")
        _reject_old_connection(group, member, session)
        return group, member

    def find(self, name: str) -> Group | None:
        """Return the group if it is in memory, else None."""
        return self._groups.get(name)

    def remove_all_members(self, name: str) -> tuple[Group, int]:
        """Remove all members and owners of a group. Return the group and a new generation.

        The caller submits a catalog entry that removes the owners. When the entry is durable or has failed, the caller
        calls `removal_written`. Raises NotAllowed if the group is unknown, and the limit of groups is reached.
        """
        self._check_group_limit(name)
        group = self._find_or_create(name)
        for member in list(group.members.values()):
            self._remove_member(group, member, fenced_error(group, member.id, "lost its place to a reset of the group"))
            group.expire_member(member.id)
        group.release_all()
        self._entry_submitted(name)
        return group, self._next_generation()

    def removal_written(self, group: Group, error: BaseException | None) -> None:
        """Must be called after `remove_all_members`, when the caller's catalog entry is durable or has failed."""
        self._entry_done(group.name)
        if error is not None and group.row.owners:
            self._retry_later(group)  # The members are gone from memory, so the catalog must release their partitions.
        self._drop_if_empty(group)

    # Groups in memory, and the limits on groups, members and subscriptions

    def member_counts(self) -> Iterator[tuple[str, int]]:
        """Yield each group that has members, with their number."""
        return ((name, len(group.members)) for name, group in self._groups.items() if group.members)

    def _find_or_create(self, name: str) -> Group:
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = Group(name, self.catalog.state, self._topics)
        return group

    def _drop_if_empty(self, group: Group) -> None:
        in_work = any(group.name in each for each in (self._due, self._pending_entries, self._retries))
        if group.is_empty and not in_work and self._groups.get(group.name) is group:
            del self._groups[group.name]

    def _next_generation(self) -> int:
        self._generation = max(self._generation, self.catalog.state.generation) + 1
        return self._generation

    def _entry_submitted(self, name: str, assigned: int = 0) -> None:
        """Count an entry of the group that was submitted to the catalog. It assigns `assigned` partitions."""
        self._pending_entries[name] = self._pending_entries.get(name, 0) + 1
        self._pending_owners += assigned

    def _entry_done(self, name: str, assigned: int = 0) -> None:
        self._pending_owners -= assigned
        self._pending_entries[name] -= 1
        if not self._pending_entries[name]:
            del self._pending_entries[name]

    def _check_group_limit(self, name: str) -> None:
        known = self.catalog.state.groups
        if name in known:
            return
        coming = {each for each in (*self._pending_entries, *self._groups) if each not in known and each != name}
        if len(known) + len(coming) >= self._limits["groups"]:
            raise NotAllowed(f"The broker has {len(known)} groups, its limit (limits.groups).")

    def _set_subscription(
        self, member: Member, wishes: GroupSubscription | None, instead_of: Member | None = None
    ) -> None:
        """Replace the member's subscription by `wishes` (None: no subscription).

        `instead_of` is an earlier member of the same id, whose subscription is removed. Raises NotAllowed, without any
        change, if all subscriptions together would exceed the limit.
        """
        before = member if instead_of is None else instead_of
        less = 0 if before.subscription is None else before.subscription.name_count
        more = 0 if wishes is None else wishes.name_count
        if more > less and self._subscribed_names + more - less > self._limits["group_subscriptions"]:
            raise NotAllowed(
                f"The members of all groups ask for {self._subscribed_names} topics and partitions already"
                " (limits.group_subscriptions)."
            )
        self._subscribed_names += more - less
        before.subscription = None
        member.subscription = wishes

    # Connections and session timeouts of members

    def _seen_on(self, group: Group, member: Member, session: Session) -> None:
        if member.session is session:
            member.seen_at = self._timers.now()
            return
        self._disconnect(member)
        member.connected(session, self._timers.now())
        self._set_timer(group, member)
        members = self._connected.get(session)
        if members is not None:
            members[member] = group
        else:
            self._connected[session] = {member: group}
            session.on_close(partial(self._session_closed, session))

    def _disconnect(self, member: Member) -> None:
        if member.session is not None:
            self._connected.get(member.session, {}).pop(member, None)

    def _session_closed(self, session: Session) -> None:
        for member, group in self._connected.pop(session, {}).items():
            member.disconnected(self._timers.now())
            self._set_timer(group, member)
            self._answer_heartbeat(group, member, Abandoned())

    def _set_timer(self, group: Group, member: Member) -> None:
        if member.timer is not None:
            self._timers.cancel(member.timer)
        seconds = max(0.0, member.expires_at() - self._timers.now())
        member.timer = self._timers.after(seconds, partial(self._check_timeout, group, member))

    def _check_timeout(self, group: Group, member: Member) -> None:
        """Remove a member whose timer fired, unless the member was active after the timer was set."""
        member.timer = None
        now = self._timers.now()
        late = now - member.expires_at()
        if late > LATE_FRACTION * member.session_ms / 1000:
            # The broker was not running, so requests of the member may be unread. The member gets a new, full timeout.
            member.restart_timeout(now)
        if now < member.expires_at():
            self._set_timer(group, member)
            return
        log.warning("group %s: the session of %s has expired; its partitions are released", group.name, member.id)
        self._remove_member(group, member, fenced_error(group, member.id, "sent nothing for its session timeout"))
        group.expire_member(member.id)
        self._mark_due(group)

    def _remove_member(self, group: Group, member: Member, error: TfmqError) -> None:
        self._disconnect(member)
        if member.timer is not None:
            self._timers.cancel(member.timer)
            member.timer = None
        self._answer_heartbeat(group, member, error)
        self._set_subscription(member, None)

    # Plans of assignments, at the end of a turn

    def _mark_due(self, group: Group, *member_ids: str) -> None:
        self._due.setdefault(group.name, set()).update(member_ids)
        self._mark_ready()

    def balance(self) -> None:
        """Plan the assignments of changed groups at the end of a turn, with one catalog entry per group."""
        changed, self._changed_topics = self._changed_topics, set()
        for group in self._groups.values() if changed else ():
            if group.subscribes_to_any(changed):
                group.target_outdated = True
                self._mark_due(group)
        due, self._due = self._due, {}
        for name, member_ids in due.items():
            found = self.find(name)
            if found is not None:
                self._plan_group(found, member_ids)

    def _plan_group(self, group: Group, member_ids: Collection[str]) -> None:
        """Plan the assignment of a group, and submit the changes of owners to the catalog.

        Then check the parked heartbeats of `member_ids`, or of all members if `Group.target_outdated` was set.
        """
        joins = self._joins.pop(group.name, [])
        member_ids = list(group.members) if group.target_outdated else member_ids
        generation = self._next_generation()
        owners_left = self._limits["group_owners"] - self.catalog.state.owners_count - self._pending_owners
        changes = group.changes(generation, owners_left)
        entries: list[tuple[Any, ...]] = []
        if joins or changes.assigned or changes.released:
            entries.append((GROUP_OWNERS, group.name, generation, changes.rows()))
        if changes.marks:
            entries.append((OWNERS_EXPIRED, group.name, changes.marks))
        if entries:
            self._entry_submitted(group.name, len(changes.assigned))
            first, *more = entries
            self.catalog.submit(first, partial(self._changes_written, group, changes, joins), *more)
        self._check_heartbeats(group, member_ids)
        self._drop_if_empty(group)

    def _changes_written(
        self, group: Group, changes: OwnerChanges, joins: list[tuple[Member, Reply]], error: BaseException | None
    ) -> None:
        self._entry_done(group.name, len(changes.assigned))
        group.changes_written(changes, forced=error is None)
        for join in joins:
            self._reply_join(group, *join, error)
        if error is None and group.target_outdated:
            self._mark_due(group)
        elif error is not None and (group.members or group.row.owners):
            # Without members too: the catalog does not know yet which owners have left or expired.
            self._retry_later(group)
        self._check_heartbeats(group, {owner.member for owner in changes.assigned.values()})
        self._drop_if_empty(group)

    def _retry_later(self, group: Group) -> None:
        def retry() -> None:
            self._retries.discard(group.name)
            self._mark_due(group)

        if group.name not in self._retries:
            self._retries.add(group.name)
            self._timers.after(RETRY_SECONDS, retry)

    def _reply_join(self, group: Group, member: Member, reply: Reply, error: BaseException | None) -> None:
        there = group.members.get(member.id) is member
        if error is not None:
            if there:
                self._remove_member(group, member, Abandoned())
                group.remove_member(member.id)
            reply.error(client_error(error))
        elif there:
            rows = self._assigned_rows(group, member)
            reply.ok(member.id, member.generation, rows, self._idle_reason(group, member))
        else:
            reply.error(fenced_error(group, member.id, "joined again, or left, before it was answered"))

    # Answers to heartbeats

    def _check_heartbeats(self, group: Group, member_ids: Iterable[str]) -> None:
        """Reply to the members' parked heartbeats for which there is news, or whose requested wait is 0.

        If the group's assignment is yet to be planned in this turn, do this after the plan.
        """
        if group.name in self._due:
            self._mark_due(group, *member_ids)
            return
        for member_id in member_ids:
            member = group.members.get(member_id)
            waiting = None if member is None else member.parked
            if member is None or waiting is None:
                continue
            if group.has_news_for(member, waiting):
                self._unpark(member, waiting)
                rows, note = self._assigned_rows(group, member), self._idle_reason(group, member)
                waiting.reply.ok(member.generation, rows, note, member.subscription is None)
            elif waiting.timer is None:
                self._answer_heartbeat(group, member)

    def _answer_heartbeat(self, group: Group, member: Member, error: TfmqError | None = None) -> None:
        """Reply to the member's parked heartbeat, if there is one: with `error`, or that nothing has changed."""
        waiting = member.parked
        if waiting is None:
            return
        self._unpark(member, waiting)
        if error is not None:
            waiting.reply.error(error)
        else:
            note = self._idle_reason(group, member)
            waiting.reply.ok(waiting.generation, None, note, member.subscription is None)

    def _unpark(self, member: Member, waiting: ParkedHeartbeat) -> None:
        member.parked = None
        if waiting.timer is not None:
            self._timers.cancel(waiting.timer)

    def _assigned_rows(self, group: Group, member: Member) -> list[tuple[str, int, int, int]]:
        share = group.assignment(member)
        names = {incarnation: self._topics.by_incarnation(incarnation) for incarnation, _ in share}
        return [(name, *key, share[key]) for key in sorted(share) if (name := names[key[0]]) is not None]

    def _idle_reason(self, group: Group, member: Member) -> str:
        return idle_reason(group, member, self._topics, self._timers.now())

    # LIST_GROUPS and DESCRIBE_GROUP

    def list(self, request: ListGroups, reply: Reply) -> None:
        groups = self.catalog.state.groups
        reply.ok([self._summary(name, groups[name]) for name in sorted(groups)])

    def _summary(self, name: str, row: GroupState) -> dict[str, Any]:
        partitions = sum(1 for _ in self._offsets.in_existing_topics(row))
        return summary(name, row, self.find(name), partitions, self._timers.now())

    def describe(self, request: DescribeGroup, reply: Reply) -> None:
        """Reply with members, generation, offsets and lag of a group. An unknown group is described as empty."""
        row = self.catalog.state.groups.get(request.group, GroupState())
        group, now = self.find(request.group), self._timers.now()
        summary = self._summary(request.group, row)
        shown = [] if group is None else list(group.members.values())[:MEMBERS_SHOWN]  # in order of joining
        description = {
            **summary,
            "strategy": "" if group is None else group.strategy,
            "member_count": summary["members"],
            "members": [describe_member(group, each, self._topics, now) for each in shown] if group else [],
        }

        def member_of(key: Key) -> str:
            holder = None if group is None else group.living_owner(key)
            return "" if holder is None else holder.id

        self._offsets.describe(row, member_of, reply, description)


def _subscription(topics: Collection[str], strategy: str, only: Iterable[PartitionName] | None) -> GroupSubscription:
    strategy_of(strategy)
    picked = None if only is None else frozenset((each.topic, each.partition) for each in only)
    return GroupSubscription(frozenset(topics), strategy, picked)


def _reject_old_connection(group: Group, member: Member | None, session: Session | None) -> None:
    """Raise Fenced for a late request on an older connection: it would revert later requests of the member."""
    if member is not None and session is not None and session.number < member.latest_connection:
        raise fenced_error(group, member.id, "continued on a later connection")


def fenced_error(group: Group, member_id: str, why: str) -> Fenced:
    """Return the error for a client that is no member, or does not own a partition. `why` completes the message."""
    return Fenced(
        f"The member {member_id or '?'} of the group {group.name} {why}. Its partitions may belong to another member:"
        " discard work begun with them; a member that was removed joins again.",
        generation=group.row.generation,
    )
