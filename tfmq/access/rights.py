"""Rights: what a user may do, and what each command of the protocol needs.

A right is written `ACTION:PATTERN`, such as `read:orders-*`, or only `ACTION` where it has no object. In a pattern `*`
stands for any characters. A command without a rule here is refused to every user (`tests/access/test_rights.py` fails
for it), and so is everything that no right allows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from tfmq.errors import BadRequest
from tfmq.protocol import commands

READ, WRITE, MANAGE = "read", "write", "manage"
GROUP, MANAGE_GROUP = "group", "manage-group"
SCHEDULE, TRANSACTIONS, MONITOR, ADMIN = "schedule", "transactions", "monitor", "admin"


class Action(NamedTuple):
    """What an action allows. `of`: what its pattern names, "" for an action without an object."""

    of: str
    text: str


ACTIONS: Final[Mapping[str, Action]] = {
    READ: Action("topic", "read messages of the topics, and list their delayed messages"),
    WRITE: Action("topic", "send to the topics, also delayed; cancel and reschedule delayed messages of them"),
    MANAGE: Action("topic", "create, change, grow, truncate, resume and delete the topics"),
    GROUP: Action("group", "consume with the groups, and use them as producer group or commit group"),
    MANAGE_GROUP: Action("group", "reset and delete the groups"),
    SCHEDULE: Action("schedule", "add, pause, resume and remove the schedules; sending needs `write` for their topic"),
    TRANSACTIONS: Action("", "list transactions, and end those of other users"),
    MONITOR: Action("", "read the state of the broker, and list all topics, groups, schedules and delayed messages"),
    ADMIN: Action("", "everything"),
}
PATTERN: Final = re.compile(r"[A-Za-z0-9._*-]{1,249}")
RIGHTS_MAX: Final = 1000
"""Maximum number of rights of one user."""
CACHED: Final = 10_000
"""How many answers of `Rights.allow` are remembered for each user."""


class Right(NamedTuple):
    """One right. `pattern` is "" for an action without an object."""

    action: str
    pattern: str = ""

    def __str__(self) -> str:
        return f"{self.action}:{self.pattern}" if self.pattern else self.action


def parse_right(text: str) -> Right:
    """Parse `ACTION:PATTERN` or `ACTION`. Raises `BadRequest` with the known actions."""
    action, colon, pattern = text.partition(":")
    known = ACTIONS.get(action)
    if known is None:
        raise BadRequest(f"{text!r} is no right: a right begins with one of {', '.join(ACTIONS)}.")
    if not known.of:
        if colon:
            raise BadRequest(f"{text!r} is no right: {action} has no object, write {action!r} alone.")
        return Right(action)
    if not PATTERN.fullmatch(pattern):
        raise BadRequest(
            f"{text!r} is no right: after {action}: follows the name of a {known.of}, in which * stands for any"
            f" characters, such as {action}:orders-*."
        )
    return Right(action, pattern)


ANY: Final = "*"
"""Name of a `Need` that a right for any object satisfies. It is no name of an object."""


class Need(NamedTuple):
    """What a request needs: one of `actions` for the object `name`, "" for an action without an object."""

    actions: tuple[str, ...]
    name: str = ""

    def __str__(self) -> str:
        return " or ".join(str(Right(each, self.name if ACTIONS[each].of else "")) for each in self.actions)


class Rights:
    """The rights of one user. Answers are cached, because each request asks."""

    def __init__(self, rights: Iterable[Right]) -> None:
        self.all = tuple(rights)
        self.is_admin = any(each.action == ADMIN for each in self.all)
        patterns: dict[str, list[str]] = {}
        for right in self.all:
            patterns.setdefault(right.action, []).append(".*".join(map(re.escape, right.pattern.split("*"))))
        self._patterns = {action: re.compile("|".join(each)) for action, each in patterns.items()}
        self.allow: Callable[[Need], bool] = lru_cache(CACHED)(self._allow)
        """Whether the user may do what a `Need` describes."""

    def _allow(self, need: Need) -> bool:
        if self.is_admin:
            return True
        for action in need.actions:
            pattern = self._patterns.get(action)
            if pattern is not None and (need.name == ANY or pattern.fullmatch(need.name if ACTIONS[action].of else "")):
                return True
        return False


# What each command needs

SEE: Final = (READ, WRITE, MANAGE, MONITOR)
SEE_GROUP: Final = (GROUP, MANAGE_GROUP, MONITOR)
Rule = Callable[[Any], Sequence[Need]]
NOTHING: Final[Rule] = lambda request: ()  # noqa: E731
"""The rule of a command that every user may send, and of those that only concern its own connection."""


SENDS: Final = Need((WRITE, GROUP), ANY)
"""The need of what is of use only to those who may send something, or commit offsets in transactions."""


def _topic(*actions: str) -> Rule:
    return lambda request: (Need(actions, request.topic),)


def _group(*actions: str) -> Rule:
    return lambda request: (Need(actions, request.group),)


def _any(*actions: str) -> Rule:
    needs = (Need(actions),)
    return lambda request: needs


def _metadata(request: commands.Metadata) -> Sequence[Need]:
    # A request for all topics is answered with those that the user may see (`Guard`).
    actions = (WRITE, MANAGE) if request.create else SEE
    return [Need(actions, name) for name in request.topics or ()]


def _produce(request: commands.Produce) -> Sequence[Need]:
    return (Need((WRITE,), request.topic),)


def _succeed(request: commands.SucceedProducer) -> Sequence[Need]:
    return (Need((WRITE,), request.topic or ANY),)  # without a topic: an id for delayed messages of all topics


def _topic_or_all(request: Any) -> Sequence[Need]:
    return (Need((READ, MONITOR), request.topic),) if request.topic else (Need((MONITOR,)),)


def _join(request: commands.JoinGroup) -> Sequence[Need]:
    return [Need((GROUP,), request.group), *(Need((READ,), topic) for topic in request.topics)]


def _heartbeat(request: commands.Heartbeat) -> Sequence[Need]:
    topics = request.subscription.topics if request.subscription is not None else ()
    return [Need((GROUP,), request.group), *(Need((READ,), topic) for topic in topics)]


def _reset(request: commands.ResetGroup) -> Sequence[Need]:
    # The description of a group has the ends of the partitions in which it has offsets.
    return [Need((MANAGE_GROUP,), request.group), *(Need(SEE, each.topic) for each in request.offsets)]


def _begin(request: commands.BeginTransaction) -> Sequence[Need]:
    groups = [request.group] if request.group else []
    if request.member is not None:
        groups.append(request.member.group)
    return [SENDS, *(Need((GROUP,), group) for group in groups)]


def _with_offsets(request: Any) -> Sequence[Need]:
    return [Need((GROUP,), each.group) for each in request.offsets]


def _transact(request: commands.Transact) -> Sequence[Need]:
    return [*(Need((WRITE,), batch.topic) for batch in request.batches), *_with_offsets(request)]


def _add_schedule(request: commands.AddSchedule) -> Sequence[Need]:
    return (Need((SCHEDULE,), request.name), Need((WRITE,), request.topic))


def _schedule(request: Any) -> Sequence[Need]:
    return (Need((SCHEDULE,), request.name),)


def _list_schedules(request: commands.ListSchedules) -> Sequence[Need]:
    return (Need((SCHEDULE, MONITOR), request.name),) if request.name else (Need((MONITOR,)),)


RULES: Final[Mapping[type[Any], Rule]] = {
    commands.Ping: NOTHING,
    commands.Cancel: NOTHING,
    commands.Status: _any(MONITOR),
    commands.PromoteReplica: _any(ADMIN),
    commands.Metadata: _metadata,
    commands.CreateTopic: _topic(MANAGE),
    commands.GrowTopic: _topic(MANAGE),
    commands.DeleteTopic: _topic(MANAGE),
    commands.DescribeTopic: _topic(*SEE),
    commands.ResumePartition: _topic(MANAGE),
    commands.Truncate: _topic(MANAGE),
    commands.SetTopic: _topic(MANAGE),
    commands.LeaseProducerIds: lambda request: (SENDS,),
    commands.Produce: _produce,
    commands.SucceedProducer: _succeed,
    commands.Fetch: _topic(READ),
    commands.Locate: _topic(READ),
    commands.JoinGroup: _join,
    commands.Heartbeat: _heartbeat,
    commands.LeaveGroup: _group(GROUP),
    commands.CommitOffsets: _group(GROUP),
    commands.ReadOffsets: _group(GROUP, MONITOR),
    # Answered with the groups that the user may see (`AccessControl`).
    commands.ListGroups: NOTHING,
    commands.DescribeGroup: _group(*SEE_GROUP),
    commands.ResetGroup: _reset,
    commands.DeleteGroup: _group(MANAGE_GROUP),
    # Transactions belong to the user who began them: `Guard` compares the users.
    commands.BeginTransaction: _begin,
    commands.PrepareTransaction: _with_offsets,
    commands.CommitTransaction: _with_offsets,
    commands.RollbackTransaction: NOTHING,
    commands.ForgetTransaction: NOTHING,
    commands.DescribeTransaction: lambda request: () if request.xid else (Need((TRANSACTIONS, MONITOR)),),
    commands.ListTransactions: lambda request: (
        (Need((GROUP,), request.group),) if request.group else (Need((TRANSACTIONS, MONITOR)),)
    ),
    commands.Transact: _transact,
    commands.AwaitChecks: _group(GROUP),
    # The handle of a delayed message names its partition: `Guard` finds the topic.
    commands.CancelDelayed: NOTHING,
    commands.RescheduleDelayed: NOTHING,
    commands.DescribeDelayed: NOTHING,
    commands.ListDelayed: _topic_or_all,
    commands.DelayedHistogram: _topic_or_all,
    commands.AddSchedule: _add_schedule,
    commands.ListSchedules: _list_schedules,
    commands.PauseSchedule: _schedule,
    commands.ResumeSchedule: _schedule,
    commands.RemoveSchedule: _schedule,
    commands.CommitGroup: _group(GROUP),
    commands.AbortCommitGroup: _group(GROUP),
    commands.ListCommitGroups: _any(MONITOR),
    commands.ForgetCommitGroup: _group(MANAGE_GROUP),
}
"""What each command needs. HELLO and AUTHENTICATE come before the login, and have no rule."""
