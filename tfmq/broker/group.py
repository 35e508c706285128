"""One group: who is in it, who has which partition, and who shall have it.

A partition is somebody's by a grant that is in the catalog. It gets another owner only when the one before has given it
up, has left, or is dead. Who shall have it (`target`) changes with the members and the topics; what an owner has and
shall not have is revoked, which means: it is not in its share any more, and the next one waits until it lets go.

Nothing here waits or writes: `changes` says what should be written, `written` that it is on the disk.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from tfmq.broker.group_member import Member, Waiting
from tfmq.broker.group_strategies import Partition, assign
from tfmq.broker.register import GroupRow, Key, Owner, Register
from tfmq.broker.topics import Topics


class Changes(NamedTuple):
    """What is to be written: new owners by partition, and partitions that are nobody's."""

    grants: dict[Key, Owner]
    freed: list[Key]

    def rows(self) -> list[tuple[str, int, list[Key]]]:
        """As an entry GROUP_OWNERS has them: for each member its session time and partitions."""
        rows: dict[tuple[str, int], list[Key]] = {("", 0): self.freed} if self.freed else {}
        for key, owner in self.grants.items():
            rows.setdefault((owner.member, owner.session_ms), []).append(key)
        return [(*who, keys) for who, keys in rows.items()]


class Group:
    """See the module. `members` are in the order in which they came."""

    def __init__(self, name: str, register: Register, topics: Topics) -> None:
        self.name = name
        self._register, self._topics = register, topics
        self.members: dict[str, Member] = {}
        self.target: dict[Key, str] = {}
        self.stale = False
        """Whether the target must be made anew: members, their wishes or the topics changed."""
        self._awaited: dict[str, dict[Key, None]] = {}
        """Of the target what its member does not have, by member: free, or another one's."""
        self._holders: dict[Key, str] = {}
        """What the members have, by partition: `owned` of all of them."""
        self._pending: dict[Key, Owner] = {}
        """Grants on their way to the disk: nobody is told of them, and they fence already."""
        self._void: dict[Key, int] = {}
        """Grants that were given up, and are in the catalog yet."""
        self._found: set[str] = set()
        """Members that the catalog knew, some of which may have been heard of since."""

    @property
    def row(self) -> GroupRow:
        return self._register.groups.get(self.name, _NOBODY)

    @property
    def empty(self) -> bool:
        """Whether everything to be known of it is in the catalog."""
        return not self.members and not self._pending

    def wants_any(self, topics: Collection[str]) -> bool:
        """Whether a member asks for one of these."""
        wishes = (each.wishes for each in self.members.values())
        return any(each is not None and not each.topics.isdisjoint(topics) for each in wishes)

    # Who has what

    def owner(self, key: Key) -> Owner | None:
        """Who has the partition, or is just being given it; also one of whom nothing is heard any more."""
        owner = self._pending.get(key) or self.row.owners.get(key)
        return None if owner is None or self._void.get(key) == owner.grant else owner

    def has(self, member_id: str, generation: int, key: Key) -> bool:
        """Whether the member of that generation has the partition."""
        owner = self.owner(key)
        return owner is not None and owner.member == member_id and owner.grant <= generation

    def holder(self, key: Key) -> Member | None:
        """The living member that has the partition, and has been or may be told so."""
        member_id = self._holders.get(key)
        return None if member_id is None else self.members[member_id]

    def share(self, member: Member) -> dict[Key, int]:
        """What the member has and shall have, with the grants."""
        return {key: grant for key, grant in member.owned.items() if self.target.get(key) == member.id}

    def awaited(self, member_id: str) -> list[Key]:
        """What the member shall have and has not."""
        return list(self._awaited.get(member_id, ()))

    def coming(self, member_id: str) -> bool:
        """Whether something is on its way to the member."""
        return bool(self._pending) and any(owner.member == member_id for owner in self._pending.values())

    def unheard(self) -> list[Member]:
        """Members that the catalog knew, and that have not said yet what they ask for."""
        found = [each for name in self._found if (each := self.members.get(name)) and each.wishes is None]
        self._found = {each.id for each in found}
        return found

    def unknown_to(self, member: Member, waiting: Waiting) -> bool:
        """Whether there is something that the member does not know: about its share, or that it must ask anew."""
        if member.wishes is None:
            return True
        share, held = self.share(member), waiting.held
        if any(held.get(key, True) for key in share):
            return True
        if any(not leaving and key not in share for key, leaving in held.items()):
            return True
        return any(grant > waiting.generation for grant in member.owned.values())

    # Members

    def enter(self, member: Member) -> None:
        """It joined, and holds nothing, whatever one of its name had before."""
        self._void_all(member.id)
        self.lose(member.id)
        self.members[member.id] = member
        self.stale = True

    def leave(self, member_id: str) -> Member | None:
        """It is gone for good, and what it had is free."""
        self._void_all(member_id)
        return self.lose(member_id)

    def lose(self, member_id: str) -> Member | None:
        """It is dead as far as anybody knows: others may get what it had; what nobody gets it may come back to."""
        member = self.members.pop(member_id, None)
        if member is not None:
            self.stale = True
            for key in member.owned:
                del self._holders[key]
        return member

    def adopt(self, member_id: str, generation: int, now: float) -> Member | None:
        """A member that the catalog knows as the owner of something, under that generation or an earlier one."""
        owned = {
            key: owner
            for key, owner in self.row.owners.items()
            if self.has(member_id, generation, key) and key not in self._pending
        }
        return self._find(member_id, owned, now) if owned else None

    def expect(self, now: float) -> list[Member]:
        """At the start: all owners that the catalog knows, none of which has been heard of."""
        found: dict[str, dict[Key, Owner]] = {}
        for key, owner in self.row.owners.items():
            found.setdefault(owner.member, {})[key] = owner
        return [self._find(member_id, owned, now) for member_id, owned in found.items()]

    def _find(self, member_id: str, owned: Mapping[Key, Owner], now: float) -> Member:
        """Nobody knows when it joined: its grants say what is its."""
        member = self.members[member_id] = Member(member_id, 0, next(iter(owned.values())).session_ms, now)
        member.owned = {key: owner.grant for key, owner in owned.items()}
        self._holders.update(dict.fromkeys(owned, member_id))
        self._found.add(member_id)
        self.stale = True
        return member

    def give_up(self, member: Member, kept: Iterable[Key], generation: int) -> bool:
        """The member has seen the grants up to `generation`, and of these holds only `kept`; whether that is less."""
        kept = set(kept)
        gone = [key for key, grant in member.owned.items() if grant <= generation and key not in kept]
        for key in gone:
            self._void[key] = member.owned.pop(key)
            del self._holders[key]
            self.stale = self.stale or self.target.get(key) == member.id
        return bool(gone)

    def void(self) -> None:
        """Nobody has anything any more."""
        for member_id in {owner.member for owner in (*self.row.owners.values(), *self._pending.values())}:
            self._void_all(member_id)

    def _void_all(self, member_id: str) -> None:
        for key, owner in (*self.row.owners.items(), *self._pending.items()):
            if owner.member == member_id:
                self._void[key] = owner.grant

    # Who shall have what

    def changes(self, generation: int, room: int) -> Changes:
        """What should be written now, under `generation`: the entry is on its way from here on. At most `room` of the
        partitions may be ones that had no owner before.
        """
        if self.stale:
            self._retarget()
        grants: dict[Key, Owner] = {}
        for member_id, keys in self._awaited.items():
            for key in keys:
                if key in self._pending or key in self._holders:
                    continue
                known = key in self.row.owners
                if known or room > 0:
                    grants[key] = Owner(member_id, generation, self.members[member_id].session_ms)
                    room -= not known
        freed = []
        for key, grant in list(self._void.items()):
            owner = self._pending.get(key) or self.row.owners.get(key)
            if owner is None or owner.grant != grant:
                del self._void[key]
            elif key not in grants and key not in self._pending:
                freed.append(key)
        for key, owner in grants.items():
            del self._awaited[owner.member][key]
        self._pending.update(grants)
        return Changes(grants, freed)

    def written(self, changes: Changes, forced: bool) -> None:
        """The entry of `changes` is on the disk, or (not `forced`) was refused, or nobody knows."""
        for key, owner in changes.grants.items():
            in_catalog = self.row.owners.get(key) == owner
            if not forced and in_catalog:
                continue  # perhaps on the disk: it is told to nobody, and given to nobody
            if self._pending.get(key) == owner:
                del self._pending[key]
            member = self.members.get(owner.member)
            if in_catalog and member is not None and self._void.get(key) != owner.grant:
                member.owned[key] = owner.grant
                self._holders[key] = member.id
            if key not in self._holders or self.target.get(key) != owner.member:
                self.stale = True
        for key in changes.freed:
            if key not in self.row.owners:
                self._void.pop(key, None)

    def _retarget(self) -> None:
        self.stale = False
        candidates = [each.candidate for each in self.members.values() if each.candidate is not None]
        pinned = {key: each.id for each in self.members.values() if each.wishes is None for key in each.owned}
        keys = {
            partition: key
            for partition, key in self._partitions({topic for each in candidates for topic in each.topics})
            if key not in pinned
        }
        owned = {partition: self.owner(key) for partition, key in keys.items()}
        owners = {partition: owner.member for partition, owner in owned.items() if owner is not None}
        assigned = assign(self.strategy, candidates, keys, owners) if candidates else {}
        self.target = pinned | {keys[partition]: member for partition, member in assigned.items()}
        self._awaited = {}
        for key, member_id in self.target.items():
            if self._holders.get(key) != member_id:
                self._awaited.setdefault(member_id, {})[key] = None

    @property
    def strategy(self) -> str:
        """That of the oldest member; "" where none is known."""
        return next((each.wishes.strategy for each in self.members.values() if each.wishes is not None), "")

    def _partitions(self, topics: Iterable[str]) -> Iterator[tuple[Partition, Key]]:
        for name in topics:
            topic = self._topics.find(name)
            if topic is not None:
                for number in range(len(topic.partitions)):
                    yield (name, number), (topic.incarnation, number)


_NOBODY = GroupRow()
"""Of a group that is not in the catalog; nothing is ever put into it."""
