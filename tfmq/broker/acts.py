"""Log lines for administrative commands: request, client and result.

Payloads are never logged. Topic, group and schedule names contain only characters that the protocol has validated.
Other strings from a client are logged as Python literals, so that a client cannot forge a log line.
"""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, NamedTuple

from tfmq.broker.reply import Body, Buffers, Reply, Session
from tfmq.errors import NOT_DONE, TfmqError, UnknownPartition, UnknownTopic
from tfmq.protocol import commands

log = logging.getLogger("tfmq.broker")

RESULT_SHOWN: Final = 1000
"""Characters of a result that are logged."""


class Act(NamedTuple):
    """How one command is told. `done`: what the reply's fields say. With `operator` only what an operator's client
    asked for is told: programs do the same as their daily work. `refused`: what is said of an error instead of its
    sentence, "" for the sentence.
    """

    what: Callable[[Any], str]
    done: Callable[..., str] = lambda *fields: "done"
    operator: bool = False
    refused: Callable[[Any, BaseException], str] = lambda asked, error: ""


class Recorded:
    """Wrapper around a `Reply` that logs the result before it is sent."""

    def __init__(self, reply: Reply, session: Session, act: Act, request: Any) -> None:
        self._reply, self._session, self._act, self._request = reply, session, act, request

    @property
    def correlation(self) -> int:
        return self._reply.correlation

    def body_done(self) -> None:
        self._reply.body_done()

    def ok(self, *fields: Any, body: Buffers = b"") -> None:
        self._log(self._act.done(*fields))
        self._reply.ok(*fields, body=body)

    def error(self, error: BaseException) -> None:
        known = isinstance(error, TfmqError) and error.outcome == NOT_DONE
        sentence = self._act.refused(self._request, error) or error
        self._log(f"{'not done' if known else 'failed, outcome unknown'}: {sentence}")
        self._reply.error(error)

    def _log(self, result: str) -> None:
        # An error sentence may quote the request: a line break in it would forge a log line.
        result = "".join(letter if letter.isprintable() else "?" for letter in result[:RESULT_SHOWN])
        log.info("%s, asked by %s: %s", self._act.what(self._request), self._session.identity, result)


def recorded(method: Callable[[Any, Any, Body, Reply, Session], None]) -> Any:
    """Decorate a command method so that each call is logged as `LOGGED_COMMANDS` says."""

    @wraps(method)
    def command(self: Any, request: Any, body: Body, reply: Reply, session: Session) -> None:
        act = ACTS[type(request)]
        if session.operator or not act.operator:
            reply = Recorded(reply, session, act, request)
        method(self, request, body, reply, session)

    return command


def _heuristic(request: Any) -> str:
    return " (heuristic)" if request.heuristic else ""


def _without_topic(asked: commands.AddSchedule, error: BaseException) -> str:
    """Clients ask first, so that a wish that makes no sense makes no topic, then make the topic and ask again."""
    if not isinstance(error, UnknownTopic) or isinstance(error, UnknownPartition):
        return ""
    return (
        f"there is no topic {asked.topic} yet; a client makes it, if topics.auto_create is on, and asks again"
    )


def _schedule(word: str) -> Act:
    return Act(lambda asked: f"{word} schedule {asked.name}")


ACTS: Final[dict[type[Any], Act]] = {
    commands.CreateTopic: Act(
        lambda asked: f"create topic {asked.topic}",
        lambda incarnation, partitions: f"done, {partitions} partitions",
    ),
    commands.GrowTopic: Act(
        lambda asked: f"grow topic {asked.topic} to {asked.partitions} partitions",
        lambda partitions: f"done, {partitions} partitions",
    ),
    commands.DeleteTopic: Act(
        lambda asked: f"delete topic {asked.topic}",
        lambda deleted: "done" if deleted else "not done: there is none, or not of that incarnation",
    ),
    commands.SetTopic: Act(
        lambda asked: f"set topic {asked.topic}",
        lambda settings: f"done, its own settings are {settings}",
    ),
    commands.ResumePartition: Act(
        lambda asked: f"resume {asked.topic}-{asked.partition}", lambda state: f"it is {state}"
    ),
    commands.Truncate: Act(
        lambda asked: f"truncate {asked.topic}-{asked.partition} before offset {asked.before_offset}",
        lambda first: f"done, it begins at offset {first}",
    ),
    commands.ResetGroup: Act(
        lambda asked: f"reset group {asked.group}", lambda committed: f"done, {committed} offsets"
    ),
    commands.DeleteGroup: Act(
        lambda asked: f"delete group {asked.group}",
        lambda deleted: "done" if deleted else "not done: there is none",
    ),
    commands.CommitTransaction: Act(
        lambda asked: (
            f"commit {'what is left of ' if asked.force else ''}transaction {asked.xid!r} of epoch {asked.epoch}"
            f"{_heuristic(asked)}"
        ),
        lambda state, dropped, offsets, delayed, lost: (
            state + (f", {lost} messages are lost" if lost else "")
        ),
        operator=True,
    ),
    commands.RollbackTransaction: Act(
        lambda asked: f"roll back transaction {asked.xid!r} of epoch {asked.epoch}{_heuristic(asked)}",
        lambda state: state,
        operator=True,
    ),
    commands.ForgetTransaction: Act(
        lambda asked: f"forget transaction {asked.xid!r} of epoch {asked.epoch}",
        lambda forgotten: "done" if forgotten else "not done: nothing of it was remembered",
    ),
    commands.CommitGroup: Act(
        lambda asked: f"commit sequence {asked.sequence} of commit group {asked.group}",
        lambda state, *more: state,
        operator=True,
    ),
    commands.AbortCommitGroup: Act(
        lambda asked: f"abort sequence {asked.sequence} of commit group {asked.group}",
        lambda state: state,
        operator=True,
    ),
    commands.ForgetCommitGroup: Act(
        lambda asked: f"forget commit group {asked.group}",
        lambda forgotten: "done" if forgotten else "not done: there is none",
    ),
    commands.CancelDelayed: Act(
        lambda asked: f"cancel delayed message {asked.handle!r}", lambda state: state, operator=True
    ),
    commands.RescheduleDelayed: Act(
        lambda asked: f"reschedule delayed message {asked.handle!r}",
        lambda state, handle: f"{state} {handle}".rstrip(),
        operator=True,
    ),
    commands.AddSchedule: Act(
        lambda asked: f"add schedule {asked.name} for topic {asked.topic}",
        lambda schedule, made: "done" if made else "it is there already",
        refused=_without_topic,
    ),
    commands.PauseSchedule: _schedule("pause"),
    commands.ResumeSchedule: _schedule("resume"),
    commands.RemoveSchedule: Act(
        lambda asked: f"remove schedule {asked.name}",
        lambda removed: "done" if removed else "not done: there is none",
    ),
}
