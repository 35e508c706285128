"""Which members of groups are alive: by their connections, and by when they were last heard of."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from tfmq.broker.caller import Session
from tfmq.broker.group import Group
from tfmq.broker.group_member import Member
from tfmq.broker.timers import Timers

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
