"""Groups of consumers: one live member each, fenced by a durable generation.

A member lives while its connection does and it is heard of within its session time. Whoever joins gets a
generation from a durable counter, forced before the answer; commits of any other generation or member are
`Fenced`. A member whose connection is gone may be replaced at once, and may come back as long as nobody
took over, also over a restart of the broker.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from tfmq.broker import faults
from tfmq.broker.caller import Randomness, Reply, Session
from tfmq.broker.catalog import Catalog
from tfmq.broker.offsets import Offsets
from tfmq.broker.register import GENERATION, GroupRow
from tfmq.broker.timers import Timers
from tfmq.errors import BadRequest, Fenced, NotAllowed
from tfmq.protocol.commands import (
    CommitOffsets,
    DescribeGroup,
    Heartbeat,
    JoinGroup,
    LeaveGroup,
    ResetGroup,
)

TOPICS_KEPT: Final = 256
"""Of the topics that a member names, for people: a stranger may name any number."""


class Member:
    """Who holds a group; `session` None when its connection is gone."""

    __slots__ = ("id", "seen", "session", "session_ms", "topics")

    def __init__(self, id: str, session: Session, session_ms: int, topics: list[str], now: float) -> None:
        self.id, self.session_ms, self.topics = id, session_ms, topics
        self.session: Session | None = session
        self.seen = now

    def live(self, now: float) -> bool:
        return self.session is not None and now - self.seen <= self.session_ms / 1000


class Groups:
    """All groups. What must last is in the catalog's register; who is connected is here."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        offsets: Offsets,
        timers: Timers,
        randomness: Randomness,
        limits: Mapping[str, int],
    ) -> None:
        self._catalog, self._offsets, self._timers = catalog, offsets, timers
        self._randomness, self._limits = randomness, limits
        self._members: dict[str, Member] = {}
        self._held: dict[Session, set[str]] = {}
        self._joining: dict[str, tuple[int, str]] = {}
        self._generation = 0

    # Membership

    def join(self, request: JoinGroup, reply: Reply, session: Session) -> None:
        """Makes the caller the group's member, under a new generation. Raises NotAllowed."""
        self._refuse_live(request.group, request.member)
        self._refuse_many(request.group)
        member_id = request.member or self._randomness(12).hex()
        session_ms = min(request.session_ms, self._limits["session_ms"])
        before = self._members.get(request.group)
        member = Member(member_id, session, session_ms, request.topics[:TOPICS_KEPT], self._timers.now())
        self._hold(request.group, member)
        generation = self._next_generation()
        self._joining[request.group] = (generation, member_id)

        def forced(error: BaseException | None) -> None:
            self._joined(request.group, generation, error)
            if error is None:
                reply.ok(member_id, generation, [], "")
                return
            if self._members.get(request.group) is member:
                self._put_back(request.group, before)
            reply.error(faults.client_error(error))

        self._catalog.submit((GENERATION, request.group, generation, member_id), forced)

    def _joined(self, group: str, generation: int, error: BaseException | None) -> None:
        """The new generation is forced, or never will be: from here on the register says who holds the
        group.
        """
        if self._joining.get(group, (0, ""))[0] == generation:
            del self._joining[group]

    def _next_generation(self) -> int:
        self._generation = max(self._generation, self._catalog.register.generation) + 1
        return self._generation

    def _hold(self, group: str, member: Member) -> None:
        """The member has the group, as long as its session lives: one call back a session, however many joins."""
        self._members[group] = member
        session = member.session
        if session is None:
            return
        groups = self._held.get(session)
        if groups is not None:
            groups.add(group)
        else:
            self._held[session] = {group}
            session.on_close(partial(self._left, session))

    def _left(self, session: Session) -> None:
        for group in self._held.pop(session, ()):
            member = self._members.get(group)
            if member is not None and member.session is session:
                member.session = None

    def _put_back(self, group: str, before: Member | None) -> None:
        if before is None:
            del self._members[group]
        else:
            self._hold(group, before)

    def _refuse_live(self, group: str, member_id: str) -> None:
        live = self._live(group)
        if live is not None and live.id != member_id:
            who = live.session.identity if live.session is not None else "?"
            raise NotAllowed(
                f"The group {group} has a live member: {live.id} ({who}). This release knows one member a group;"
                " stop that one, or use another group.",
                member=live.id,
            )

    def _refuse_many(self, group: str) -> None:
        groups = self._catalog.register.groups
        if group not in groups and len(groups) + len(self._joining) >= self._limits["groups"]:
            raise NotAllowed(f"The broker has {len(groups)} groups, its limit (limits.groups).")

    def _live(self, group: str) -> Member | None:
        member = self._members.get(group)
        return member if member is not None and member.live(self._timers.now()) else None

    def _current(self, group: str) -> tuple[int, str]:
        """(generation, member) that may commit; (0, "") for a group that nobody joined."""
        row = self._catalog.register.groups.get(group)
        return self._joining.get(group) or ((row.generation, row.member) if row is not None else (0, ""))

    def require(self, group: str, generation: int, member_id: str, session: Session) -> None:
        """Raises Fenced unless this is the group's member; hearing of it keeps it alive."""
        current = self._current(group)
        if not member_id or current != (generation, member_id):
            raise Fenced(
                f"The group {group} is at generation {current[0]}, this member at {generation}: another member"
                " took over. Join again, and drop work begun under the old generation.",
                generation=current[0],
            )
        member = self._members.get(group)
        if member is None or member.id != member_id:
            member = Member(member_id, session, self._limits["session_ms"], [], self._timers.now())
            self._hold(group, member)
        elif member.session is not session:
            member.session = session
            self._hold(group, member)
        member.seen = self._timers.now()

    def heartbeat(self, request: Heartbeat, reply: Reply, session: Session) -> None:
        """Keeps the member alive. Raises Fenced."""
        self.require(request.group, request.generation, request.member, session)
        reply.ok(request.generation, None, "")

    def leave(self, request: LeaveGroup, reply: Reply) -> None:
        """Gives up the place; answers whether the caller had it."""
        held = self._current(request.group) == (request.generation, request.member)
        if held:
            self._members.pop(request.group, None)
        reply.ok(held)

    # Offsets

    def commit(self, request: CommitOffsets, reply: Reply, session: Session) -> None:
        """Saves offsets of the group's member. Raises Fenced; Busy while a transaction has them in doubt."""
        self.require(request.group, request.generation, request.member, session)
        self._offsets.save(
            request.group, request.generation, request.offsets, reply, any_incarnation=False, fenced=()
        )

    def reset(self, request: ResetGroup, reply: Reply) -> None:
        """Saves offsets for a group without a live member; a generation of its own fences the last one.

        Raises NotAllowed, BadRequest.
        """
        self._refuse_live(request.group, "")
        self._refuse_many(request.group)
        if not request.offsets:
            raise BadRequest("A reset without offsets changes nothing: name at least one partition.")
        generation = self._next_generation()
        self._members.pop(request.group, None)
        self._joining[request.group] = (generation, "")
        self._offsets.save(
            request.group,
            generation,
            request.offsets,
            reply,
            any_incarnation=True,
            before=[(GENERATION, request.group, generation, "")],
            done=partial(self._joined, request.group, generation),
        )

    # Descriptions

    def list(self) -> list[dict[str, Any]]:
        """LIST_GROUPS: one map a group."""
        groups = self._catalog.register.groups
        return [self._summary(name, groups[name]) for name in sorted(groups)]

    def _summary(self, name: str, row: GroupRow) -> dict[str, Any]:
        return {
            "group": name,
            "generation": row.generation,
            "member": row.member,
            "live": self._live(name) is not None,
            "partitions": sum(1 for _ in self._offsets.present(row)),
        }

    def describe(self, request: DescribeGroup, reply: Reply) -> None:
        """DESCRIBE_GROUP: its member, generation, offsets and lag; an unknown group is an empty one."""
        row = self._catalog.register.groups.get(request.group, GroupRow())
        member = self._members.get(request.group)
        description = {
            **self._summary(request.group, row),
            "members": [] if member is None else [self._member(member)],
        }
        self._offsets.describe(row, reply, description)

    def _member(self, member: Member) -> dict[str, Any]:
        now = self._timers.now()
        return {
            "member": member.id,
            "client": member.session.identity if member.session is not None else "",
            "live": member.live(now),
            "topics": member.topics,
            "session_ms": member.session_ms,
            "silent_ms": int((now - member.seen) * 1000),
        }
