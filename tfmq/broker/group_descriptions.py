"""What people are told of groups: lists, descriptions, and why a member has less than it asked for."""

from collections.abc import Iterable
from typing import Any, Final

from tfmq.broker.group import Group
from tfmq.broker.group_member import Member
from tfmq.broker.register import GroupRow, Key
from tfmq.broker.topics import Topics

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
