"""The broker's interface for the server: passes each command of the protocol to the component that executes it."""

from collections.abc import Callable
from functools import partial
from typing import Any

from journal.clock import Clock
from journal.disk import Disk
from journal.linux_aio import StartFsync
from tfmq.broker.acts import LOGGED_COMMANDS, LoggingReply
from tfmq.broker.broker import Broker
from tfmq.broker.log_offsets import locate
from tfmq.broker.reply import STOPPING, Body, Randomness, Reply, Run, Session, client_error
from tfmq.broker.startup import start
from tfmq.config import Config
from tfmq.errors import Busy
from tfmq.protocol import commands


class RequestHandler:
    """The whole broker on one data folder. Call `start()` first, and all methods in one thread.

    Appends are queued until the server calls `Broker.end_turn`, after the requests of a poll and after timers. So all
    requests for a partition that the server received in one poll are written together.

    `begin_force` (`journal.linux_aio.AioFsyncQueue.start`) fsyncs a single file without a worker; it is None if the
    system does not support that.
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
    ) -> None:
        self.broker = Broker(config, disk, clock, run, randomness, begin_force)

    def start(self) -> None:
        """Open the data folder. Called before the server listens. Raises the errors of `tfmq.broker.startup.start`."""
        broker = self.broker
        start(broker)
        topics, delay, schedules = broker.topic_admin, broker.delay_commands, broker.schedule_commands
        groups, offsets, transactions = broker.group_coordinator, broker.offset_commands, broker.transaction_commands
        self.with_reply = {
            commands.Ping: lambda request, reply: reply.ok(broker.clock.wall_ms()),
            commands.CreateTopic: topics.create,
            commands.GrowTopic: topics.grow,
            commands.DeleteTopic: topics.delete,
            commands.ResumePartition: topics.resume,
            commands.Truncate: broker.retention.truncate,
            commands.SetTopic: topics.set,
            commands.LeaseProducerIds: broker.lease_producer_ids,
            commands.SucceedProducer: self._succeed_producer,
            commands.LeaveGroup: groups.leave,
            commands.ReadOffsets: broker.group_offset_store.read,
            commands.ListGroups: groups.list,
            commands.DescribeGroup: groups.describe,
            commands.ResetGroup: offsets.reset,
            commands.DeleteGroup: offsets.delete,
            commands.ListTransactions: transactions.list_transactions,
            commands.DescribeTransaction: transactions.describe,
            commands.ListCommitGroups: transactions.list_groups,
            commands.PauseSchedule: schedules.pause,
            commands.ResumeSchedule: schedules.resume,
            commands.RemoveSchedule: schedules.remove,
            commands.ListSchedules: schedules.list,
        }
        self.with_session = {
            commands.Cancel: self._cancel,
            commands.Metadata: topics.metadata,
            commands.DescribeTopic: broker.describe_topic,
            commands.CancelDelayed: delay.cancel,
            commands.RescheduleDelayed: delay.reschedule,
            commands.ListDelayed: delay.list,
            commands.DescribeDelayed: delay.describe,
            commands.DelayedHistogram: delay.histogram,
            commands.Fetch: broker.fetches.fetch,
            commands.Locate: partial(locate, broker.topics, broker.read_executor),
            commands.JoinGroup: groups.join,
            commands.Heartbeat: groups.heartbeat,
            commands.CommitOffsets: offsets.commit,
            commands.BeginTransaction: transactions.begin,
            commands.PrepareTransaction: transactions.prepare,
            commands.CommitTransaction: transactions.commit,
            commands.RollbackTransaction: transactions.rollback,
            commands.ForgetTransaction: transactions.forget,
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

    def _succeed_producer(self, request: commands.SucceedProducer, reply: Reply) -> None:
        if request.topic:
            partition = self.broker.topics.partition(request.topic, request.incarnation, request.partition)
            self.broker.produce_handler.succeed(partition, request.producer_id, reply)
        else:
            delay = self.broker.delay_commands
            self.broker.produce_handler.succeed(delay.partition, request.producer_id, reply)
            delay.queue.schedule_maintenance()

    def _cancel(self, request: commands.Cancel, reply: Reply, session: Session) -> None:
        parts = (self.broker.fetches, self.broker.transaction_commands, self.broker.group_coordinator)
        reply.ok(any(each.cancel(session, request.target) for each in parts))
