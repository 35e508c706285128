"""The broker's interface for the server: passes each command to the component that executes it, and logs some of them.

Each administrative command is logged with request, client and result. Payloads are never logged. Topic, group and
schedule names contain only characters that the protocol has validated. Other strings from a client are logged as Python
literals, so that a client cannot forge a log line.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from journal.clock import Clock
from journal.disk import Disk
from journal.linux_aio import StartFsync
from tfmq.broker.broker import Broker
from tfmq.broker.log_offsets import locate
from tfmq.broker.reply import STOPPING, Body, Buffers, Pause, Randomness, Reply, Run, Session, client_error
from tfmq.broker.runtime import Replicas
from tfmq.broker.startup import start
from tfmq.config import Config
from tfmq.errors import NOT_DONE, Busy, NotAllowed, TfmqError, UnknownPartition, UnknownTopic
from tfmq.protocol import commands

audit = logging.getLogger("tfmq.audit")

Handle = Callable[[Any, Body, Reply, Any], None]

NO_STANDBY: Final = (
    "This server is not a standby, so it cannot be promoted: it is the primary, or it has no replicas (replicate.url)."
)
MAY_BE_BEHIND: Final = (
    "Another server may be primary and know more than this one: {reason}. Wait a little and try again."
)
RESULT_CHARACTERS_MAX: Final = 1000
"""A longer result is cut off after this number of characters in the log."""

SERVED_WHEN_BEHIND: Final = frozenset({
    commands.Ping, commands.Cancel, commands.Metadata, commands.DescribeTopic, commands.Fetch, commands.Locate,
    commands.ListDelayed, commands.DelayedHistogram, commands.ListGroups, commands.DescribeGroup,
    commands.ListSchedules, commands.AwaitChecks, commands.JoinGroup, commands.Heartbeat, commands.LeaveGroup,
})  # fmt: skip
"""Requests that read messages or lists for display, and those that members of groups need to go on reading.

Not those by whose answers programs decide what to do: committed offsets, and the states of transactions and of delayed
messages. A transaction that is not there may be prepared at the next primary.
"""


def refuse_when_behind(handle: Handle, broker: Broker) -> Handle:
    """Return `handle` for a broker whose answers wait for a store: while it may be behind another one, with Busy for
    all requests that are not in SERVED_WHEN_BEHIND.

    Most changes would wait for the store. But one that finds nothing to do is answered at once, such as the deletion of
    a topic that is not there, and another primary may have that topic by now.
    """

    def checked(request: Any, body: Body, reply: Reply, session: Session) -> None:
        if type(request) in SERVED_WHEN_BEHIND or not broker.may_be_behind():
            handle(request, body, reply, session)
            return
        reason = broker.backpressure.refusal or "it has stored nothing for a while"
        reply.error(Busy(MAY_BE_BEHIND.format(reason=reason)))

    return checked


class RequestHandler:
    """The whole broker on one data folder. Call `start()` first, and all methods in one thread.

    Appends are queued until the server calls `Broker.end_turn`, after the requests of a poll and after timers. So all
    requests for a partition that the server received in one poll are written together.

    `begin_force` (`journal.linux_aio.AioFsyncQueue.start`) fsyncs a single file without a worker; it is None if the
    system does not support that. `pause` (`time.sleep`) is called in workers (`Runtime.pause`). `replicas`: if
    replies wait until the data is stored elsewhere, too.
    """

    with_reply: dict[type[Any], Callable[[Any, Reply], None]]
    with_session: dict[type[Any], Callable[[Any, Reply, Session], None]]
    with_body: dict[type[Any], Callable[[Any, Body, Reply, Session], None]]
    """The method that executes each type of request. The three mappings differ in the method's arguments: (request,
    reply), (request, reply, session), or (request, body, reply, session)."""

    def __init__(
        self,
        config: Config,
        disk: Disk,
        clock: Clock,
        run: Run,
        randomness: Randomness,
        begin_force: StartFsync | None = None,
        pause: Pause | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        self.broker = Broker(config, disk, clock, run, randomness, begin_force, pause, replicas)

    def start(self) -> None:
        """Open the data folder. Called before the server listens. Raises the errors of `tfmq.broker.startup.start`."""
        broker = self.broker
        start(broker)
        topics, delay, schedules = broker.topic_admin, broker.delay_commands, broker.schedule_commands
        groups, offsets, transactions = broker.group_coordinator, broker.offset_commands, broker.transaction_commands
        self.with_reply = {
            commands.Ping: lambda request, reply: reply.ok(broker.clock.wall_ms()),
            commands.PromoteReplica: lambda request, reply: reply.error(NotAllowed(NO_STANDBY)),
            commands.CreateTopic: topics.create,
            commands.GrowTopic: topics.grow,
            commands.DeleteTopic: topics.delete,
            commands.ResumePartition: topics.resume,
            commands.Truncate: broker.retention.truncate,
            commands.SetTopic: topics.set,
            commands.LeaseProducerIds: broker.lease_producer_ids,
            commands.LeaveGroup: groups.leave,
            commands.ReadOffsets: broker.group_offset_store.read,
            commands.ListGroups: groups.list,
            commands.DescribeGroup: groups.describe,
            commands.ResetGroup: offsets.reset,
            commands.DeleteGroup: offsets.delete,
            commands.ListTransactions: transactions.list_transactions,
            commands.ListCommitGroups: transactions.list_groups,
            commands.PauseSchedule: schedules.pause,
            commands.ResumeSchedule: schedules.resume,
            commands.RemoveSchedule: schedules.remove,
            commands.ListSchedules: schedules.list,
        }
        self.with_session = {
            commands.Cancel: self._cancel,
            commands.Metadata: topics.metadata,
            commands.SucceedProducer: self._succeed_producer,
            commands.DescribeTopic: broker.describe_topic,
            commands.CancelDelayed: delay.cancel,
            commands.RescheduleDelayed: delay.reschedule,
            commands.ListDelayed: delay.list,
            commands.DescribeDelayed: delay.describe,
            commands.DelayedHistogram: delay.histogram,
            commands.Fetch: broker.fetches.fetch,
            commands.Locate: partial(locate, broker.topics, broker.read_executor, lambda: broker.may_be_behind()),
            commands.JoinGroup: groups.join,
            commands.Heartbeat: groups.heartbeat,
            commands.CommitOffsets: offsets.commit,
            commands.BeginTransaction: transactions.begin,
            commands.PrepareTransaction: transactions.prepare,
            commands.CommitTransaction: transactions.commit,
            commands.RollbackTransaction: transactions.rollback,
            commands.ForgetTransaction: transactions.forget,
            commands.DescribeTransaction: partial(transactions.describe, broker.read_executor),
            commands.AwaitChecks: transactions.await_checks,
            commands.CommitGroup: transactions.commit_group,
            commands.AbortCommitGroup: transactions.abort_group,
            commands.ForgetCommitGroup: transactions.forget_group,
        }
        self.with_body = {
            commands.Produce: self._produce,
            commands.Transact: transactions.transact,
            commands.AddSchedule: schedules.add,
        }

    def handle(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        """Execute any command but HELLO and STATUS, to which the server's session replies.

        `request` is a NamedTuple of `tfmq.protocol.commands`. `body` has the bytes after the header; they must not
        change until `reply.body_done`, `ok` or `error` is called. Errors are sent as the reply, not raised. Each
        request gets exactly one reply. A reply "written" or "durable" is sent only when the data is written or durable.
        """
        kind = type(request)
        logged = LOGGED_COMMANDS.get(kind)
        if logged is not None and (session.operator or not logged.operator_only):
            reply = LoggingReply(reply, session, logged, request)
        try:
            if not self.broker.is_open:
                raise Busy(STOPPING)
            if kind in self.with_session:
                self.with_session[kind](request, reply, session)
            elif kind in self.with_body:
                self.with_body[kind](request, body, reply, session)
            else:
                self.with_reply[kind](request, reply)
        except Exception as error:
            reply.error(client_error(error))

    def _produce(self, request: commands.Produce, body: Body, reply: Reply, session: Session) -> None:
        if request.transaction is not None:
            self.broker.transaction_commands.send(request, body, reply, session)
        elif request.due is not None:
            self.broker.delay_commands.send(request, body, reply, session)
        else:
            self.broker.produce_handler.produce(request, body, reply, session)

    def _succeed_producer(self, request: commands.SucceedProducer, reply: Reply, session: Session) -> None:
        if request.topic:
            partition = self.broker.topics.partition(request.topic, request.incarnation, request.partition)
            self.broker.produce_handler.succeed(partition, request.producer_id, reply, session)
        else:
            delay = self.broker.delay_commands
            self.broker.produce_handler.succeed(delay.partition, request.producer_id, reply, session)
            delay.queue.schedule_maintenance()

    def _cancel(self, request: commands.Cancel, reply: Reply, session: Session) -> None:
        parts = (self.broker.fetches, self.broker.transaction_commands, self.broker.group_coordinator)
        reply.ok(any(each.cancel(session, request.target) for each in parts))


# The log of administrative commands


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

    def appended(self) -> None:
        self._reply.appended()

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
        audit.info("%s, asked by %s: %s", self._command.describe_request(self._request), self._session.identity, result)


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
    commands.PromoteReplica: LoggedCommand(lambda asked: "promote this server to primary", lambda state: state),
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
