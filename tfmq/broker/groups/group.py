"""State of one consumer group: its members, owners of partitions, and the planned assignment."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tfmq.broker.catalog_state import CatalogState, GroupState, Key, PartitionOwner
from tfmq.broker.groups.assignors import Candidate, assign
from tfmq.broker.groups.members import Member, ParkedHeartbeat, client_identity, is_live
from tfmq.broker.topics import Topics


class OwnerChanges(NamedTuple):
    """Changes of owners for the catalog: partition -> new owner, and partitions that get no owner.

    `marks` are the rows of an OWNERS_EXPIRED entry: owners that have expired or returned.
    """

    assigned: dict[Key, PartitionOwner]
    released: list[Key]
    marks: Sequence[tuple[int, int, int, bool]] = ()

    def rows(self) -> list[tuple[str, int, list[Key]]]:
        """Return the rows (member, session timeout, partitions) of a GROUP_OWNERS entry; member "": no owner."""
        rows: dict[tuple[str, int], list[Key]] = {("", 0): self.released} if self.released else {}
        for key, owner in self.assigned.items():
            rows.setdefault((owner.member, owner.session_ms), []).append(key)
        return [(*who, keys) for who, keys in rows.items()]


class Group:
    """One consumer group. `members` are in the order in which they joined.

    The owner of a partition is the member that the catalog names. A partition gets another owner only after the present
    owner has released the partition, has left, or has expired. The planned assignment (`target`, partition -> member)
    changes with members and topics. If the target of a partition is not its owner, the partition is revoked: the reply
    to the owner's heartbeat no longer lists the partition, and the target waits until the owner has released it.

    This class does no I/O: `changes` returns the changes that the caller writes to the catalog. When they are durable
    or have failed, the caller calls `changes_written`.
    """

    def __init__(self, name: str, register: CatalogState, topics: Topics) -> None:
        self.name = name
        self._register, self._topics = register, topics
        self.members: dict[str, Member] = {}
        self.target: dict[Key, str] = {}
        self.target_outdated = False
        """Whether `target` must be computed again, because members, their subscriptions or the topics changed."""
        self._awaited: dict[str, dict[Key, None]] = {}
        """Member -> the partitions that `target` assigns to it and that it does not own yet."""
        self._living_owners: dict[Key, str] = {}
        """Partition -> owner, if the owner is in `members`: the inverse of `Member.owned`."""
        self._pending: dict[Key, PartitionOwner] = {}
        """Assignments being written to the catalog. New owners are not notified yet, but previous ones are fenced."""
        self._released: dict[Key, int] = {}
        """Partition -> generation, for each assignment that was released but is still in the catalog."""
        self._restored: set[str] = set()
        """Members that were restored from the catalog. Some of them may have sent a heartbeat since then."""

    @property
    def row(self) -> GroupState:
        return self._register.groups.get(self.name, _NO_GROUP)

    @property
    def is_empty(self) -> bool:
        """Whether the catalog has all state of the group, so that this object is not needed."""
        return not self.members and not self._pending

    def subscribes_to_any(self, topics: Collection[str]) -> bool:
        wishes = (each.subscription for each in self.members.values())
        return any(each is not None and not each.topics.isdisjoint(topics) for each in wishes)

    # Owners of partitions

    def owner(self, key: Key) -> PartitionOwner | None:
        """Return the owner of a partition, or None. Includes assignments that are being written, and expired owners."""
        owner = self._pending.get(key) or self.row.owners.get(key)
        return None if owner is None or self._released.get(key) == owner.generation else owner

    def owns(self, member_id: str, generation: int, key: Key) -> bool:
        """Return whether the member owns the partition by an assignment of `generation` or an earlier one."""
        owner = self.owner(key)
        return owner is not None and owner.member == member_id and owner.generation <= generation

    def living_owner(self, key: Key) -> Member | None:
        """Return the member that owns the partition; None if there is no owner or the owner has expired."""
        member_id = self._living_owners.get(key)
        return None if member_id is None else self.members[member_id]

    def assignment(self, member: Member) -> dict[Key, int]:
        """Return partition -> generation for the partitions that the member owns and should keep."""
        return {key: grant for key, grant in member.owned.items() if self.target.get(key) == member.id}

    def awaited_partitions(self, member_id: str) -> list[Key]:
        """Return the partitions that are planned for the member, but not owned by it yet."""
        return list(self._awaited.get(member_id, ()))

    def has_pending_assignment(self, member_id: str) -> bool:
        """Return whether an assignment to the member is being written to the catalog."""
        return bool(self._pending) and any(owner.member == member_id for owner in self._pending.values())

    def silent_restored(self) -> list[Member]:
        """Return the members restored from the catalog that have not sent a subscription yet."""
        found = [each for name in self._restored if (each := self.members.get(name)) and each.subscription is None]
        self._restored = {each.id for each in found}
        return found

    def has_news_for(self, member: Member, waiting: ParkedHeartbeat) -> bool:
        """Return whether a parked heartbeat gets a reply: if the assignment changed, or the subscription is unknown."""
        if member.subscription is None:
            return True
        share, held = self.assignment(member), waiting.held
        if any(held.get(key, True) for key in share):
            return True
        if any(not leaving and key not in share for key, leaving in held.items()):
            return True
        return any(grant > waiting.generation for grant in member.owned.values())

    # Changes of members

    def add_member(self, member: Member) -> None:
        """Add a member that joined. Partitions of an earlier member with the same id are released."""
        self._release_all_of(member.id)
        self.expire_member(member.id)
        self.members[member.id] = member
        self.target_outdated = True

    def remove_member(self, member_id: str) -> None:
        """Remove a member for good and release its partitions."""
        self._release_all_of(member_id)
        self.expire_member(member_id)

    def expire_member(self, member_id: str) -> None:
        """Remove an expired member. If it returns, it still owns its partitions that no other member got meanwhile."""
        member = self.members.pop(member_id, None)
        if member is not None:
            self.target_outdated = True
            for key in member.owned:
                del self._living_owners[key]

    def restore_member(self, member_id: str, generation: int, now: float) -> Member | None:
        """Restore a member if it owns partitions in the catalog, assigned up to `generation`; else return None."""
        owned = {
            key: owner
            for key, owner in self.row.owners.items()
            if self.owns(member_id, generation, key) and key not in self._pending
        }
        return self._restore(member_id, owned, now) if owned else None

    def restore_all(self, now: float) -> list[Member]:
        """Add to `members` all owners that the catalog names, at a start of the broker. Return these members.

        Owners that expired before the start are left out.
        """
        found: dict[str, dict[Key, PartitionOwner]] = {}
        for key, owner in self.row.owners.items():
            if not owner.expired:
                found.setdefault(owner.member, {})[key] = owner
        return [self._restore(member_id, owned, now) for member_id, owned in found.items()]

    def _restore(self, member_id: str, owned: Mapping[Key, PartitionOwner], now: float) -> Member:
        """Add a member that owns `owned` in the catalog. The generation of its join is unknown, so `joined` is 0."""
        member = self.members[member_id] = Member(member_id, 0, abs(next(iter(owned.values())).session_ms), now)
        member.owned = {key: owner.generation for key, owner in owned.items()}
        self._living_owners.update(dict.fromkeys(owned, member_id))
        self._restored.add(member_id)
        self.target_outdated = True
        return member

    def release(self, member: Member, kept: Iterable[Key], generation: int) -> bool:
        """Release the member's partitions that are not in `kept`. Return whether there were any.

        A partition that was assigned after `generation` is not released, because the member may not know of it yet.
        """
        kept = set(kept)
        gone = [key for key, grant in member.owned.items() if grant <= generation and key not in kept]
        for key in gone:
            self._released[key] = member.owned.pop(key)
            del self._living_owners[key]
            self.target_outdated = self.target_outdated or self.target.get(key) == member.id
        return bool(gone)

    def release_all(self) -> None:
        for member_id in {owner.member for owner in (*self.row.owners.values(), *self._pending.values())}:
            self._release_all_of(member_id)

    def _release_all_of(self, member_id: str) -> None:
        for key, owner in (*self.row.owners.items(), *self._pending.items()):
            if owner.member == member_id:
                self._released[key] = owner.generation

    # Planned assignment

    def changes(self, generation: int, room: int) -> OwnerChanges:
        """Return the changes of owners that the caller writes to the catalog now, and record them as being written.

        At most `room` partitions that have no owner in the catalog get an owner, because of the limit of owners.
        """
        outdated = self.target_outdated
        if outdated:
            self._compute_target()
        grants: dict[Key, PartitionOwner] = {}
        for member_id, keys in self._awaited.items():
            for key in keys:
                if key in self._pending or key in self._living_owners:
                    continue
                known = key in self.row.owners
                if known or room > 0:
                    grants[key] = PartitionOwner(member_id, generation, self.members[member_id].session_ms)
                    room -= not known
        freed = []
        for key, grant in list(self._released.items()):
            owner = self._pending.get(key) or self.row.owners.get(key)
            if owner is None or owner.generation != grant:
                del self._released[key]
            elif key not in grants and key not in self._pending:
                freed.append(key)
        for key, owner in grants.items():
            del self._awaited[owner.member][key]
        self._pending.update(grants)
        return OwnerChanges(grants, freed, self._marks() if outdated else ())

    def _marks_outdated(self, changes: OwnerChanges) -> bool:
        """Return whether a member returned, or expired again, while its mark was being written."""
        owners = (self.row.owners.get((incarnation, partition)) for incarnation, partition, *_ in changes.marks)
        return any(owner is not None and owner.expired == (owner.member in self.members) for owner in owners)

    def _marks(self) -> list[tuple[int, int, int, bool]]:
        """Return the rows of an OWNERS_EXPIRED entry: for owners that are no members, or are members again."""
        return [
            (*key, owner.generation, not owner.expired)
            for key, owner in self.row.owners.items()
            if owner.expired == (owner.member in self.members)
            and key not in self._pending
            and self._released.get(key) != owner.generation
        ]

    def changes_written(self, changes: OwnerChanges, forced: bool) -> None:
        """Process the end of a write of `changes`. If `forced` is False, it failed, perhaps with an unknown outcome."""
        for key, owner in changes.assigned.items():
            in_catalog = self.row.owners.get(key) == owner
            if not forced and in_catalog:
                continue  # it may be durable: so its member is not notified, and no other member gets the partition
            if self._pending.get(key) == owner:
                del self._pending[key]
            member = self.members.get(owner.member)
            if in_catalog and member is not None and self._released.get(key) != owner.generation:
                member.owned[key] = owner.generation
                self._living_owners[key] = member.id
            if key not in self._living_owners or self.target.get(key) != owner.member:
                self.target_outdated = True
        for key in changes.released:
            if key not in self.row.owners:
                self._released.pop(key, None)
        if self._marks_outdated(changes):
            self.target_outdated = True

    def _compute_target(self) -> None:
        self.target_outdated = False
        candidates = [
            Candidate(each.id, wishes.topics, wishes.only)
            for each in self.members.values()
            if (wishes := each.subscription) is not None
        ]
        pinned = {key: each.id for each in self.members.values() if each.subscription is None for key in each.owned}
        existing = map(self._topics.get, {topic for each in candidates for topic in each.topics})
        keys = {
            (topic.name, number): key
            for topic in existing
            if topic is not None
            for number in range(len(topic.partitions))
            if (key := (topic.incarnation, number)) not in pinned
        }
        owned = {partition: self.owner(key) for partition, key in keys.items()}
        owners = {partition: owner.member for partition, owner in owned.items() if owner is not None}
        assigned = assign(self.strategy, candidates, keys, owners) if candidates else {}
        self.target = pinned | {keys[partition]: member for partition, member in assigned.items()}
        self._awaited = {}
        for key, member_id in self.target.items():
            if self._living_owners.get(key) != member_id:
                self._awaited.setdefault(member_id, {})[key] = None

    @property
    def strategy(self) -> str:
        """The strategy of the member that joined first and has a subscription; "" if there is none."""
        return next((each.subscription.strategy for each in self.members.values() if each.subscription is not None), "")


_NO_GROUP = GroupState()
"""The `row` of groups that are not in the catalog; never modified."""


# Descriptions for users: LIST_GROUPS, DESCRIBE_GROUP, and why a member has fewer partitions than requested.

TOPICS_SHOWN: Final = 64
"""Maximum number of topics shown per member; a subscription by pattern may match any number."""

MEMBERS_SHOWN: Final = 1000
"""Maximum number of members shown per group, so that a description fits into a reply, whatever the limits are."""

SILENT_FRACTION: Final = 0.5
"""A member that has sent nothing for more than this part of its session timeout is reported as silent. A live member
sends three heartbeats in that timeout."""


def summary(name: str, row: GroupState, group: Group | None, partitions: int, now: float) -> dict[str, Any]:
    """Return a row of LIST_GROUPS. `partitions` is the number of partitions with a committed offset."""
    members = [] if group is None else list(group.members.values())
    return {
        "group": name,
        "generation": row.generation,
        "members": len(members),
        "live": any(is_live(each, now) for each in members),
        "partitions": partitions,
    }


def describe_member(group: Group, member: Member, topics: Topics, now: float) -> dict[str, Any]:
    """Return one member for DESCRIBE_GROUP. "leaving" has the partitions that are revoked and not released yet."""
    share = group.assignment(member)
    return {
        "member": member.id,
        "client": client_identity(member),
        "live": is_live(member, now),
        "topics": [] if member.subscription is None else sorted(member.subscription.topics)[:TOPICS_SHOWN],
        "strategy": "" if member.subscription is None else member.subscription.strategy,
        "session_ms": member.session_ms,
        "silent_ms": int((now - member.seen_at) * 1000),
        "partitions": _numbers_by_topic(share, topics),
        "leaving": _numbers_by_topic(member.owned.keys() - share.keys(), topics),
        "note": idle_reason(group, member, topics, now),
    }


def _numbers_by_topic(keys: Iterable[Key], topics: Topics) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for incarnation, number in sorted(keys):
        name = topics.by_incarnation(incarnation)
        if name is not None:
            found.setdefault(name, []).append(number)
    return found


def idle_reason(group: Group, member: Member, topics: Topics, now: float) -> str:
    """Return why the member waits or has fewer partitions than requested. Return "" if there is nothing to report."""
    awaited = [key for key in group.awaited_partitions(member.id) if group.living_owner(key) is not None]
    if awaited:
        return _waiting_note(group, awaited, topics, now)
    if member.subscription is None or group.assignment(member):
        return ""
    if group.target_outdated or group.awaited_partitions(member.id) or group.has_pending_assignment(member.id):
        return ""  # an assignment is in progress: its result is not known yet
    expected = group.silent_restored()
    if expected:
        # These members keep their partitions until they have sent their subscriptions or have expired.
        left = max(each.expires_at() for each in expected) - now
        first = ", ".join(sorted(each.id for each in expected)[:3])
        who = f"{_plural(len(expected), 'member')} {'has' if len(expected) == 1 else 'have'}"
        return f"{who} up to {left:.0f} s to reconnect after the start of the broker: {first}"
    there = [each for each in map(topics.get, sorted(member.subscription.topics)) if each is not None]
    if not there:
        return f"No topic that it asks for is there yet: {', '.join(sorted(member.subscription.topics)[:3]) or 'none'}."
    if member.subscription.only is not None:
        return "Other members have the partitions that it asks for."
    names = {each.name for each in there}
    rivals = [each.subscription for each in group.members.values() if each.subscription is not None]
    count = sum(not each.topics.isdisjoint(names) for each in rivals)
    partitions = sum(len(each.partitions) for each in there)
    if count <= partitions:
        return f"Other members have the partitions that it asks for, by the strategy {group.strategy}."
    return f"{_plural(count, 'member')}, {_plural(partitions, 'partition')}: tfmq topic grow {there[0].name}"


def _waiting_note(group: Group, awaited: list[Key], topics: Topics, now: float) -> str:
    incarnation, number = awaited[0]
    holder = group.living_owner(awaited[0])
    assert holder is not None
    more = f" and {len(awaited) - 1} more" if len(awaited) > 1 else ""
    what = f"{topics.by_incarnation(incarnation)}-{number}{more}"
    who = f"{holder.id} ({client_identity(holder)})" if holder.session is not None else holder.id
    silent = now - holder.seen_at
    if holder.session is None:
        return f"waits for {what}: the connection of {who} is gone for {now - (holder.disconnected_at or now):.0f} s"
    if silent > SILENT_FRACTION * holder.session_ms / 1000:
        return f"waits for {what}: {who} is silent for {silent:.0f} of {holder.session_ms / 1000:.0f} s"
    return f"waits for {what}, which {who} releases when its messages in work are finished"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
