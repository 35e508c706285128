"""Partitions that leave their members, as when these are taken for dead: for a stranger that takes them all and gives
them back at once, or for nobody. The members learn of it as from any broker, join again, go on behind what is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from tfmq.broker.request_handler import Engine
from tfmq.protocol.commands import JoinGroup, LeaveGroup

STRANGER: Final = "another-member"
SESSION_MS: Final = 30_000


class StrangersReply:
    """Its answer is not looked at: what it was given shows in what the others lose."""

    silent = True

    def ok(self, *fields: Any, body: Any = b"") -> None:
        """It has joined, or left."""

    def error(self, error: BaseException) -> None:
        """It may not join: then nothing but the leaving happens."""

    def body_done(self) -> None:
        """There is none."""


class StrangersSession:
    """A connection that stands for as long as the stranger is there. Hashed by identity."""

    identity = "another member, for a moment"
    operator = False
    number = 0

    def on_close(self, callback: Callable[[], None]) -> None:
        """It never breaks."""


def live_groups(engine: Engine, names: Iterable[str]) -> list[str]:
    """Those of `names` that have members now."""
    found = [engine.house.groups.find(name) for name in names]
    return [group.name for group in found if group is not None and group.members]


def expel(engine: Engine, name: str, *, stranger: bool) -> None:
    """All members of the group `name` are none any more; where `stranger`, another one asks for all they asked for."""
    group = engine.house.groups.find(name)
    members = [] if group is None else list(group.members.values())
    topics = sorted(
        {topic for member in members for topic in (member.wishes.topics if member.wishes else ())}
    )
    session, reply = StrangersSession(), StrangersReply()
    for member in members:
        engine.leave_group(LeaveGroup(name, member.id, member.joined), b"", reply, session)  # type: ignore[arg-type]
    if stranger and topics:
        request = JoinGroup(name, STRANGER, topics, SESSION_MS)
        engine.join_group(request, b"", reply, session)  # type: ignore[arg-type]
    engine.turn_ended()  # all is the stranger's before anybody else can ask


def dismiss(engine: Engine, name: str) -> None:
    """The stranger leaves; what it had is free."""
    group = engine.house.groups.find(name)
    stranger = None if group is None else group.members.get(STRANGER)
    if stranger is not None:
        request = LeaveGroup(name, STRANGER, stranger.joined)
        engine.leave_group(request, b"", StrangersReply(), StrangersSession())  # type: ignore[arg-type]
        engine.turn_ended()
