"""One group: who is in it, who has which partition, and who shall have it.

A partition is somebody's by a grant that is in the catalog. It gets another owner only when the one before has given it
up, has left, or is dead. Who shall have it (`target`) changes with the members and the topics; what an owner has and
shall not have is revoked, which means: it is not in its share any more, and the next one waits until it lets go.

Nothing here waits or writes: `changes` says what should be written, `written` that it is on the disk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from tfmq.broker.catalog_state import GroupRow, Key, Owner, Register
from tfmq.broker.groups.assignors import Candidate, Partition, assign
from tfmq.broker.reply import Reply, Session
from tfmq.broker.timers import Timer
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


# What people are told of groups: lists, descriptions, and why a member has less than it asked for.

TOPICS_SHOWN: Final = 64
"""Of each member; a pattern may match any number."""

MEMBERS_SHOWN: Final = 1000
"""Of a group, so that a description fits a reply whatever the limits are."""

SILENT: Final = 0.5
"""A member that is silent for a longer part of its session time is said to be: a heartbeat comes every third."""


def summary(name: str, row: GroupRow, group: Group | None, partitions: int, now: float) -> dict[str, Any]:
    """One map of LIST_GROUPS; `partitions` are those with an offset."""
    members = [] if group is None else list(group.members.values())
    return {
        "group": name,
        "generation": row.generation,
        "members": len(members),
        "live": any(is_live(each, now) for each in members),
        "partitions": partitions,
    }


def is_live(member: Member, now: float) -> bool:
    """Whether it is connected, and was heard of within its session time."""
    return member.session is not None and now - member.seen <= member.session_ms / 1000


def members(group: Group, topics: Topics, now: float) -> list[dict[str, Any]]:
    """Those of DESCRIBE_GROUP, oldest first."""
    return [describe(group, each, topics, now) for each in list(group.members.values())[:MEMBERS_SHOWN]]


def describe(group: Group, member: Member, topics: Topics, now: float) -> dict[str, Any]:
    """One of them. `partitions` and `leaving` are lists of numbers by topic: what it has and keeps, and what it is to
    give up.
    """
    share = group.share(member)
    return {
        "member": member.id,
        "client": client(member),
        "live": is_live(member, now),
        "topics": [] if member.wishes is None else sorted(member.wishes.topics)[:TOPICS_SHOWN],
        "strategy": "" if member.wishes is None else member.wishes.strategy,
        "session_ms": member.session_ms,
        "silent_ms": int((now - member.seen) * 1000),
        "partitions": by_topic(share, topics),
        "leaving": by_topic(member.owned.keys() - share.keys(), topics),
        "note": note(group, member, topics, now),
    }


def client(member: Member) -> str:
    return member.session.identity if member.session is not None else ""


def by_topic(keys: Iterable[Key], topics: Topics) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for incarnation, number in sorted(keys):
        name = topics.by_incarnation(incarnation)
        if name is not None:
            found.setdefault(name, []).append(number)
    return found


def note(group: Group, member: Member, topics: Topics, now: float) -> str:
    """Why the member has less than it asked for, or waits; "" where there is nothing to say."""
    awaited = [key for key in group.awaited(member.id) if group.holder(key) is not None]
    if awaited:
        return _waits(group, awaited, topics, now)
    if member.wishes is None or group.share(member):
        return ""
    if group.stale or group.awaited(member.id) or group.coming(member.id):
        return ""  # partitions change owners at this moment: it is not known yet what this member gets
    expected = group.unheard()
    if expected:
        return _expects(expected, now)
    there = [each for each in map(topics.find, sorted(member.wishes.topics)) if each is not None]
    if not there:
        return f"No topic that it asks for is there yet: {', '.join(sorted(member.wishes.topics)[:3]) or 'none'}."
    if member.wishes.only is not None:
        return "Other members have the partitions that it asks for."
    names = {each.name for each in there}
    rivals = [each.wishes for each in group.members.values() if each.wishes is not None]
    count = sum(not each.topics.isdisjoint(names) for each in rivals)
    partitions = sum(len(each.partitions) for each in there)
    if count <= partitions:
        return f"Other members have the partitions that it asks for, by the strategy {group.strategy}."
    return f"{plural(count, 'member')}, {plural(partitions, 'partition')}: tfmq topic grow {there[0].name}"


def _expects(expected: list[Member], now: float) -> str:
    """Of members that keep what they have while nobody knows what they ask for."""
    left = max(each.deadline() for each in expected) - now
    names = ", ".join(sorted(each.id for each in expected)[:3])
    who = f"{plural(len(expected), 'member')} {'has' if len(expected) == 1 else 'have'}"
    return f"{who} up to {left:.0f} s to be heard of behind the start of the broker: {names}"


def _waits(group: Group, awaited: list[Key], topics: Topics, now: float) -> str:
    incarnation, number = awaited[0]
    holder = group.holder(awaited[0])
    assert holder is not None
    more = f" and {len(awaited) - 1} more" if len(awaited) > 1 else ""
    what = f"{topics.by_incarnation(incarnation)}-{number}{more}"
    who = f"{holder.id} ({client(holder)})" if holder.session is not None else holder.id
    silent = now - holder.seen
    if holder.session is None:
        return f"waits for {what}: the connection of {who} is gone for {now - (holder.lost_at or now):.0f} s"
    if silent > SILENT * holder.session_ms / 1000:
        return f"waits for {what}: {who} is silent for {silent:.0f} of {holder.session_ms / 1000:.0f} s"
    return f"waits for {what}, which {who} releases when its messages in work are finished"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


REJOINS_A_SESSION: Final = 10
"""A member whose connection is gone has a tenth of its session time to come back: its process is dead, or connects
again at once; to wait for the rest would only keep its partitions idle.
"""


class Wishes:
    """What a member asked for: `only` None: every partition of its topics."""

    __slots__ = ("only", "strategy", "topics")

    def __init__(self, topics: Collection[str], strategy: str, only: Collection[Partition] | None) -> None:
        self.topics = frozenset(topics)
        self.strategy = strategy
        self.only = None if only is None else frozenset(only)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Wishes) and self._all() == other._all()

    def __hash__(self) -> int:
        return hash(self._all())

    def _all(self) -> tuple[object, ...]:
        return self.topics, self.strategy, self.only

    @property
    def size(self) -> int:
        """How many names it keeps in memory; at least one, so that whoever asks for nothing is counted, too."""
        return 1 + len(self.topics) + len(self.only or ())


class Waiting:
    """A HEARTBEAT that waits for a change, and what its sender knows: what it holds (True: it is to give that up), and
    the last generation that it has seen.
    """

    __slots__ = ("generation", "held", "reply", "session", "timer")

    def __init__(self, reply: Reply, session: Session, generation: int, held: dict[Key, bool]) -> None:
        self.reply, self.session, self.generation, self.held = reply, session, generation, held
        self.timer: Timer | None = None


class Member:
    """One member of a group, while the broker hears of it: its connection, its wishes, what it has, what it waits for.

    `joined` is the generation of its join: what is older, of the same name, is not this member.
    """

    __slots__ = (
        "id", "joined", "latest", "lost_at", "owned", "seen", "session", "session_ms", "timer", "waiting", "wishes",
    )  # fmt: skip

    def __init__(self, id: str, joined: int, session_ms: int, now: float) -> None:
        self.id, self.joined, self.session_ms, self.seen = id, joined, session_ms, now
        self.session: Session | None = None
        self.latest = -1
        """The number of the latest connection over which it was heard of."""
        self.lost_at: float | None = None
        """When its connection went; None while there is one, and after a start, when it has its whole session time."""
        self.wishes: Wishes | None = None
        """None for one that was found in the catalog and has not been heard of: it keeps what it has."""
        self.owned: dict[Key, int] = {}
        """What it has, by which grant: on the disk, so that it may be told."""
        self.waiting: Waiting | None = None
        self.timer: Timer | None = None

    def attach(self, session: Session, now: float) -> None:
        """It is heard of over this connection."""
        self.session, self.lost_at, self.seen, self.latest = session, None, now, session.number

    def left(self, session: Session) -> bool:
        """Whether it has gone on over a later connection: what still comes over this one was sent before."""
        return session.number < self.latest

    def detach(self, now: float) -> None:
        """Its connection is gone."""
        self.session, self.lost_at = None, now

    def spare(self, now: float) -> None:
        """Nobody listened: it has its time from now on, also to come back."""
        self.seen = now
        if self.lost_at is not None:
            self.lost_at = now

    def deadline(self) -> float:
        """When it is dead if nothing more is heard of it."""
        seconds = self.session_ms / 1000
        if self.lost_at is None:
            return self.seen + seconds
        return min(self.seen + seconds, self.lost_at + seconds / REJOINS_A_SESSION)

    @property
    def generation(self) -> int:
        """The number that all its requests should bear: of its join, or of the last grant."""
        return max(self.joined, *self.owned.values()) if self.owned else self.joined

    @property
    def candidate(self) -> Candidate | None:
        """As the strategies see it."""
        wishes = self.wishes
        return None if wishes is None else Candidate(self.id, wishes.topics, wishes.only)
