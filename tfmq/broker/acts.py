"""Writes a log line with request, client and result for each administrative command.

Payloads are never logged. Topic, group and schedule names contain only characters that the protocol has validated.
Other strings from a client are logged as Python literals, so that a client cannot forge a log line.
"""

import logging
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from tfmq.broker.reply import Buffers, Reply, Session
from tfmq.errors import NOT_DONE, TfmqError, UnknownPartition, UnknownTopic
from tfmq.protocol import commands

log = logging.getLogger("tfmq.broker")

RESULT_CHARACTERS_MAX: Final = 1000
"""A longer result is cut off after this number of characters in the log."""


class LoggedCommand(NamedTuple):
    """How the calls of one command are logged.

    `describe_request(request)` and `describe_result(*fields of the reply)` return the texts about request and result.
    If `operator_only` is set, a call is logged only if an operator uses the client (`Session.operator`), because
    programs send the same command all the time. `refused(request, error)` returns the text about an error; if that is
    "", the error's own message is logged.
    """

    describe_request: Callable[[Any], str]
    describe_result: Callable[..., str] = lambda *fields: "done"
    operator_only: bool = False
    refused: Callable[[Any, BaseException], str] = lambda asked, error: ""


class LoggingReply:
    """Wrapper around a `Reply` that logs the result before it is sent."""

    def __init__(self, reply: Reply, session: Session, command: LoggedCommand, request: Any) -> None:
        self._reply, self._session, self._command, self._request = reply, session, command, request

    @property
    def correlation(self) -> int:
        return self._reply.correlation

    def body_done(self) -> None:
        self._reply.body_done()

    def ok(self, *fields: Any, body: Buffers = b"") -> None:
        self._log(self._command.describe_result(*fields))
        self._reply.ok(*fields, body=body)

    def error(self, error: BaseException) -> None:
        known = isinstance(error, TfmqError) and error.outcome == NOT_DONE
        sentence = self._command.refused(self._request, error) or error
        self._log(f"{'not done' if known else 'failed, outcome unknown'}: {sentence}")
        self._reply.error(error)

    def _log(self, result: str) -> None:
        # An error message may quote text of the client; a line break in that text would forge a second log line.
        result = "".join(character if character.isprintable() else "?" for character in result[:RESULT_CHARACTERS_MAX])
        log.info("%s, asked by %s: %s", self._command.describe_request(self._request), self._session.identity, result)


def _heuristic(request: Any) -> str:
    return " (heuristic)" if request.heuristic else ""


def _without_topic(asked: commands.AddSchedule, error: BaseException) -> str:
    """Return the log text if `error` says that the schedule's topic does not exist; "" for any other error."""
    # A client adds a schedule before it creates the schedule's topic, so that no topic is created for an invalid
    # schedule. After this error the client creates the topic and adds the schedule again.
    if not isinstance(error, UnknownTopic) or isinstance(error, UnknownPartition):
        return ""
    return f"there is no topic {asked.topic} yet; a client makes it, if topics.auto_create is on, and asks again"


def _done_or_none(found: bool) -> str:
    return "done" if found else "not done: there is none"


LOGGED_COMMANDS: Final[dict[type[Any], LoggedCommand]] = {
    commands.CreateTopic: LoggedCommand(
        lambda asked: f"create topic {asked.topic}", lambda incarnation, partitions: f"done, {partitions} partitions"
    ),
    commands.GrowTopic: LoggedCommand(
        lambda asked: f"grow topic {asked.topic} to {asked.partitions} partitions",
        lambda partitions: f"done, {partitions} partitions",
    ),
    commands.DeleteTopic: LoggedCommand(
        lambda asked: f"delete topic {asked.topic}",
        lambda deleted: "done" if deleted else "not done: there is none, or not of that incarnation",
    ),
    commands.SetTopic: LoggedCommand(
        lambda asked: f"set topic {asked.topic}", lambda settings: f"done, its own settings are {settings}"
    ),
    commands.ResumePartition: LoggedCommand(
        lambda asked: f"resume {asked.topic}-{asked.partition}", lambda state: f"it is {state}"
    ),
    commands.Truncate: LoggedCommand(
        lambda asked: f"truncate {asked.topic}-{asked.partition} before offset {asked.before_offset}",
        lambda first: f"done, it begins at offset {first}",
    ),
    commands.ResetGroup: LoggedCommand(
        lambda asked: f"reset group {asked.group}", lambda committed: f"done, {committed} offsets"
    ),
    commands.DeleteGroup: LoggedCommand(lambda asked: f"delete group {asked.group}", _done_or_none),
    commands.CommitTransaction: LoggedCommand(
        lambda asked: (
            f"commit {'what is left of ' if asked.force else ''}transaction {asked.xid!r} of epoch {asked.epoch}"
            f"{_heuristic(asked)}"
        ),
        lambda state, dropped, offsets, delayed, lost: state + (f", {lost} messages are lost" if lost else ""),
        operator_only=True,
    ),
    commands.RollbackTransaction: LoggedCommand(
        lambda asked: f"roll back transaction {asked.xid!r} of epoch {asked.epoch}{_heuristic(asked)}",
        lambda state: state,
        operator_only=True,
    ),
    commands.ForgetTransaction: LoggedCommand(
        lambda asked: f"forget transaction {asked.xid!r} of epoch {asked.epoch}",
        lambda forgotten: "done" if forgotten else "not done: nothing of it was remembered",
    ),
    commands.CommitGroup: LoggedCommand(
        lambda asked: f"commit sequence {asked.sequence} of commit group {asked.group}",
        lambda state, *more: state,
        operator_only=True,
    ),
    commands.AbortCommitGroup: LoggedCommand(
        lambda asked: f"abort sequence {asked.sequence} of commit group {asked.group}",
        lambda state: state,
        operator_only=True,
    ),
    commands.ForgetCommitGroup: LoggedCommand(lambda asked: f"forget commit group {asked.group}", _done_or_none),
    commands.CancelDelayed: LoggedCommand(
        lambda asked: f"cancel delayed message {asked.handle!r}", lambda state: state, operator_only=True
    ),
    commands.RescheduleDelayed: LoggedCommand(
        lambda asked: f"reschedule delayed message {asked.handle!r}",
        lambda state, handle: f"{state} {handle}".rstrip(),
        operator_only=True,
    ),
    commands.AddSchedule: LoggedCommand(
        lambda asked: f"add schedule {asked.name} for topic {asked.topic}",
        lambda schedule, made: "done" if made else "it is there already",
        refused=_without_topic,
    ),
    commands.PauseSchedule: LoggedCommand(lambda asked: f"pause schedule {asked.name}"),
    commands.ResumeSchedule: LoggedCommand(lambda asked: f"resume schedule {asked.name}"),
    commands.RemoveSchedule: LoggedCommand(lambda asked: f"remove schedule {asked.name}", _done_or_none),
}
