"""What the page shows of topics, groups, transactions, delayed messages and schedules, and what it changes there.

A view is an operation that executes commands of the protocol and returns a dict for JSON. Times are ms since 1970.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tfmq.client.admin.models import STATES, GroupDescription, PartitionDescription, group_description
from tfmq.client.operation import Operation, Wait
from tfmq.errors import BadRequest, TfmqError, UnknownSchedule
from tfmq.protocol import commands
from tfmq.server.page.arguments import shown_key, shown_text
from tfmq.server.page.call import Call, page_of_names

# The broker

STATUS_SHOWN: Final = (
    "version", "node", "data", "listen", "uptime_seconds", "topics", "partitions", "groups", "messages", "bytes",
    "free_bytes", "memory_bytes", "connections", "connections_refused", "catalog", "transactions", "delay", "schedules",
    "verification",
)  # fmt: skip
FINDINGS_MAX: Final = 100
"""Stopped and damaged partitions that the overview names; it counts all of them."""


def overview(call: Call) -> Operation[dict[str, Any]]:
    """Return the state of the broker, without its settings, which may have secrets."""
    status = yield from call.admin.status()
    found: dict[str, Any] = {key: status[key] for key in STATUS_SHOWN if key in status}
    for finding in ("stopped", "damaged", "unknown_folders"):
        rows = status.get(finding, [])
        found[finding] = {"count": len(rows), "first": rows[:FINDINGS_MAX]}
    return found | {"now_ms": call.now_ms()}


def rates(call: Call) -> Operation[dict[str, Any]]:
    """Return counters since the start; the page makes rates of two replies. The right is that of STATUS."""
    call.link.check(commands.Status())
    yield Wait((), 0.0)
    return {"now_ms": call.now_ms(), "counters": call.source.counters()}


# Topics

PARTITIONS_DESCRIBED_MAX: Final = 1000
"""Partitions that a page of topics describes in all. Topics beyond that are listed without sizes."""


def topics(call: Call) -> Operation[dict[str, Any]]:
    """Return a page of topics by name: those after `after` that contain `contains`."""
    arguments = call.arguments
    after, contains, limit = arguments.text("after", ""), arguments.text("contains", ""), arguments.limit()
    names, more = page_of_names(call.visible_topics(), after, contains, limit)
    found = {each.name: each for each in (yield from call.request(commands.Metadata(names))).topics} if names else {}
    described: list[str] = []
    budget = PARTITIONS_DESCRIBED_MAX
    for name in found:
        budget -= len(found[name].partitions)
        if budget >= 0 or not described:
            described.append(name)
    descriptions = yield from call.request_each(commands.DescribeTopic(name) for name in described)
    sizes = dict(zip(described, descriptions, strict=True))
    return {
        "topics": [_topic_row(found[name], sizes.get(name)) for name in names if name in found],
        "after": names[-1] if more else None,
    }


def _topic_row(topic: commands.TopicRow, described: Any) -> dict[str, Any]:
    states = [each.state for each in topic.partitions]
    row: dict[str, Any] = {
        "name": topic.name,
        "partitions": len(states),
        "stopped": states.count("stopped"),
        "damaged": states.count("damaged"),
        "findings": 0,
        "messages": None,
        "bytes": None,
        "newest_ms": None,
    }
    if described is not None and not isinstance(described, TfmqError):
        partitions = described.description["partitions"]
        row["messages"] = sum(each.get("end_ordinal", 0) - each.get("first_ordinal", 0) for each in partitions)
        row["bytes"] = sum(each.get("size_bytes", 0) for each in partitions)
        row["findings"] = sum(len(each.get("findings") or ()) for each in partitions)
        row["newest_ms"] = max((each.get("newest_ms") or -1 for each in partitions), default=-1)
    return row


def topic(call: Call) -> Operation[dict[str, Any]]:
    """Return one topic with a page of its partitions: those from number `after` + 1 on."""
    arguments = call.arguments
    name, first, limit = arguments.text("name"), arguments.number("first", 0), arguments.limit()
    found = yield from call.admin.topic(name)
    return {
        "name": found.name,
        "incarnation": found.incarnation,
        "messages": found.messages,
        "bytes": found.size_bytes,
        "partition_count": len(found.partitions),
        "partitions": [_partition_row(each) for each in found.partitions[first : first + limit]],
        "next": first + limit if len(found.partitions) > first + limit else None,
        "settings": {key: [value, source] for key, (value, source) in sorted(found.effective.items())},
    }


def _partition_row(partition: PartitionDescription) -> dict[str, Any]:
    damage = [list(each) for each in partition.damage[:FINDINGS_MAX]]
    findings = [each._asdict() for each in partition.findings[:FINDINGS_MAX]]
    return partition._asdict() | {"messages": partition.messages, "damage": damage, "findings": findings}


# Groups

GROUPS_PER_PAGE: Final = 25
"""Fewer rows than in other lists, because the lag of each group is counted for all its partitions."""


def groups(call: Call) -> Operation[dict[str, Any]]:
    """Return a page of groups by name, each with its lag."""
    arguments = call.arguments
    after, contains = arguments.text("after", ""), arguments.text("contains", "")
    names, more = page_of_names(call.visible_groups(), after, contains, arguments.limit(GROUPS_PER_PAGE))
    found = yield from call.request_each(commands.DescribeGroup(name) for name in names)
    rows = []
    for name, each in zip(names, found, strict=True):
        if isinstance(each, TfmqError):
            rows.append({"group": name, "error": each.sentence})
        else:
            rows.append(_group_row(group_description(each.description), each.description.get("member_count")))
    return {"groups": rows, "after": names[-1] if more else None}


def _group_row(group: GroupDescription, members: int | None) -> dict[str, Any]:
    return {
        "group": group.group,
        "generation": group.generation,
        "live": group.live,
        "strategy": group.strategy,
        "members": len(group.members) if members is None else members,
        "partitions": len(group.offsets),
        "topics": sorted({str(each["topic"]) for each in group.offsets})[:TOPICS_OF_GROUP_MAX],
        "lag": group.lag,
    }


TOPICS_OF_GROUP_MAX: Final = 20
"""Topics that the row of a group names."""


def group(call: Call) -> Operation[dict[str, Any]]:
    """Return one group with its members, and a page of its partitions, those with the largest lag first."""
    arguments = call.arguments
    name, first, limit = arguments.text("name"), arguments.number("first", 0), arguments.limit()
    reply = yield from call.request(commands.DescribeGroup(name))
    found = group_description(reply.description)
    rows = sorted(
        found.offsets, key=lambda each: (-_unknown_first(each.get("lag", -1)), each["topic"], each["partition"])
    )
    members = [_member_row(each) for each in found.members[:FINDINGS_MAX]]
    return {
        **_group_row(found, reply.description.get("member_count")),
        "member_rows": members,
        "offsets": [dict(each) for each in rows[first : first + limit]],
        "next": first + limit if len(rows) > first + limit else None,
    }


def _unknown_first(lag: int) -> float:
    return float("inf") if lag < 0 else lag


def _member_row(member: Mapping[str, Any]) -> dict[str, Any]:
    partitions: Mapping[str, Sequence[int]] = member.get("partitions", {})
    return {
        "member": member.get("member", ""),
        "client": member.get("client", ""),
        "live": member.get("live", False),
        "silent_ms": member.get("silent_ms", 0),
        "note": member.get("note", ""),
        "partitions": sum(map(len, partitions.values())),
        "topics": sorted(partitions)[:TOPICS_OF_GROUP_MAX],
    }


def reported_dead_letters(call: Call) -> Operation[dict[str, Any]]:
    """Return the groups with the most dead letters that their members have reported since the start of the broker."""
    call.link.check(commands.Status())
    yield Wait((), 0.0)
    reported = call.source.dead_letters()
    most = heapq.nlargest(FINDINGS_MAX, reported.items(), key=lambda each: each[1])
    return {"groups": [{"group": group, "count": count} for group, count in most], "count": sum(reported.values())}


def reset_group(call: Call) -> Operation[dict[str, Any]]:
    """Set the offset of a group in one partition or all partitions of a topic."""
    arguments = call.arguments
    name, topic_name, position = arguments.text("group"), arguments.text("topic"), arguments.position("to", "")
    number = arguments.number("partition", -1)
    offsets = yield from call.admin.reset_group(name, topic_name, position, None if number < 0 else number)
    return {"group": name, "topic": topic_name, "offsets": [[each, offsets[each]] for each in sorted(offsets)]}


# Transactions


def transactions(call: Call) -> Operation[dict[str, Any]]:
    """Return a page of unfinished transactions; without `states` those that may need an operator."""
    arguments = call.arguments
    states = arguments.texts("states", len(STATES))
    unknown = [each for each in states if each not in STATES]
    if unknown:
        raise BadRequest(f"There is no state {unknown[0]!r} of transactions: {', '.join(STATES)}.")
    after, limit = arguments.number("after", 0), arguments.limit()
    reply = yield from call.request(commands.ListTransactions(states or None, after, limit))
    return {
        "transactions": [dict(each) for each in reply.transactions],
        "after": reply.after if reply.more else None,
        "now_ms": call.now_ms(),
    }


def transaction(call: Call) -> Operation[dict[str, Any]]:
    xid, epoch = call.arguments.text("xid"), call.arguments.number("epoch", 0)
    reply = yield from call.request(commands.DescribeTransaction(xid, epoch))
    return {"transaction": reply.description, "now_ms": call.now_ms()}


def end_transaction(call: Call) -> Operation[dict[str, Any]]:
    """Commit or roll back a transaction in place of its owner. The epoch must be given, as the name may be reused."""
    arguments = call.arguments
    xid, epoch, end = arguments.text("xid"), arguments.number("epoch", low=1), arguments.text("end")
    if end == "commit":
        done = yield from call.admin.commit_transaction(xid, epoch)
    elif end == "rollback":
        done = yield from call.admin.rollback_transaction(xid, epoch)
    else:
        raise BadRequest(f"The argument end must be commit or rollback, not {end!r}.")
    return {"xid": xid, "epoch": epoch, "state": done.state, "dropped": done.dropped}


# Delayed messages


def delayed(call: Call) -> Operation[dict[str, Any]]:
    """Return a page of pending delayed messages in the order of delivery, from the due time `from_ms` on."""
    arguments = call.arguments
    limit = arguments.limit()
    request = commands.ListDelayed(
        arguments.text("topic", ""),
        None,
        arguments.key(),
        arguments.number("from_ms", 0),
        commands.DUE_MAX,
        arguments.text("after", ""),
        limit,
    )
    reply = yield from call.request(request)
    rows = [
        {**each, "key": shown_key(each.get("key")), "tag": shown_text(each.get("tag") or "")} for each in reply.delayed
    ]
    return {"delayed": rows, "after": reply.after if reply.more else None, "now_ms": call.now_ms()}


MINUTE_MS: Final = 60_000
HOUR_MS: Final = 60 * MINUTE_MS
DAY_MS: Final = 24 * HOUR_MS
SPANS: Final[Mapping[str, tuple[int, int]]] = {
    "hour": (60, MINUTE_MS),
    "day": (48, HOUR_MS // 2),
    "week": (42, 4 * HOUR_MS),
    "month": (30, DAY_MS),
    "year": (52, 7 * DAY_MS),
}
"""Span of a histogram -> (number of intervals, length of an interval)."""
SPAN_FRACTION: Final = 0.95
"""The span "auto" is the shortest that has this fraction of the messages which are due within a year."""


def delayed_histogram(call: Call) -> Operation[dict[str, Any]]:
    """Count the pending delayed messages in the intervals of a span of time that begins now."""
    arguments = call.arguments
    span, name = arguments.text("span", "auto"), arguments.text("topic", "")
    if span != "auto" and span not in SPANS:
        raise BadRequest(f"The argument span must be auto, {', '.join(SPANS)}, not {span!r}.")
    now = call.now_ms()
    if span == "auto":
        ends = [now + count * length for count, length in SPANS.values()]
        reply = yield from call.request(commands.DelayedHistogram(name, [0, *ends]))
        within = [sum(reply.counts[: number + 1]) for number in range(len(SPANS))]
        wanted = within[-1] * SPAN_FRACTION
        span = next(each for each, count in zip(SPANS, within, strict=True) if count >= wanted)
    count, length = SPANS[span]
    start = now - now % length
    edges = [start + number * length for number in range(count + 1)]
    reply = yield from call.request(commands.DelayedHistogram(name, [0, *edges]))
    overdue, counts = reply.counts[0], list(reply.counts[1:])
    return {
        "span": span,
        "edges": edges,
        "counts": counts,
        "overdue": overdue,
        "later": max(0, reply.pending - overdue - sum(counts)),
        "pending": reply.pending,
        "now_ms": now,
    }


def cancel_delayed(call: Call) -> Operation[dict[str, Any]]:
    state = yield from call.admin.cancel(call.arguments.text("handle"))
    return {"state": state}


def reschedule_delayed(call: Call) -> Operation[dict[str, Any]]:
    """Give a delayed message the due time `due_ms`."""
    handle, due_ms = call.arguments.text("handle"), call.arguments.number("due_ms", high=commands.DUE_MAX)
    reply = yield from call.request(commands.RescheduleDelayed(handle, due_ms))
    return {"state": reply.state, "handle": reply.handle, "due_ms": due_ms}


# Schedules


def schedules(call: Call) -> Operation[dict[str, Any]]:
    """Return a page of schedules by name, or with `name` one schedule with its message."""
    arguments = call.arguments
    name, after, limit = arguments.text("name", ""), arguments.text("after", ""), arguments.limit()
    reply = yield from call.request(commands.ListSchedules(name, after, limit))
    if name and not reply.schedules:
        raise UnknownSchedule(f"There is no schedule {name}.")
    rows = [{key: value for key, value in each.items() if key != "attribute"} for each in reply.schedules]
    return {"schedules": rows, "after": rows[-1]["name"] if reply.more and rows else None, "now_ms": call.now_ms()}
