"""Heartbeats that wait until there is something about its share that their member does not know: one a member."""

from collections.abc import Mapping
from functools import partial
from typing import Final

from tfmq.broker import group_descriptions
from tfmq.broker.caller import Reply, Session
from tfmq.broker.group import Group
from tfmq.broker.group_member import Member, Waiting
from tfmq.broker.timers import Timers
from tfmq.broker.topics import Topics
from tfmq.errors import TfmqError

BEATS_A_SESSION: Final = 3
"""A heartbeat waits for no longer than this part of its session time: two may be lost before the member is dead."""

GrantRow = tuple[str, int, int, int]
"""The fields of `GrantedPartition`."""


class GroupWaits:
    """See the module. Who is to be looked at, and when, is the business of `groups`."""

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
