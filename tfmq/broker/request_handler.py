"""One method per command of the wire protocol.

The broker's interface for the server, without sockets.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from journal.clock import Clock
from journal.disk import Disk
from journal.linux_aio import StartFsync
from tfmq.broker.acts import log_command
from tfmq.broker.broker import Broker, broker_status
from tfmq.broker.reply import STOPPING, Body, Randomness, Reply, Run, Session, client_error
from tfmq.broker.startup import start
from tfmq.config import Config
from tfmq.errors import Busy

Method: TypeAlias = Callable[["RequestHandler", Any, Body, Reply, Session], None]


def reply_errors(method: Method) -> Method:
    """Decorate a command method so that an exception becomes the error reply."""

    @functools.wraps(method)
    def command(self: "RequestHandler", request: Any, body: Body, reply: Reply, session: Session) -> None:
        try:
            if not self.broker.is_open:
                raise Busy(STOPPING)
            method(self, request, body, reply, session)
        except Exception as error:
            reply.error(client_error(error))

    return command


def in_session(find: Callable[[Broker], Callable[[Any, Reply, Session], None]]) -> Method:
    """Return the command method that calls `find(broker)(request, reply, session)`."""
    return reply_errors(lambda self, request, body, reply, session: find(self.broker)(request, reply, session))


def without_session(find: Callable[[Broker], Callable[[Any, Reply], None]]) -> Method:
    """Return the command method that calls `find(broker)(request, reply)`."""
    return reply_errors(lambda self, request, body, reply, session: find(self.broker)(request, reply))


class RequestHandler:
    """The whole broker on one data folder.

    Call `start()` first and `stop(done)` last, all in one thread.

    Command methods are `method(request, body, reply, session)`. `request` is a NamedTuple of
    `tfmq.protocol.commands`; `body` are the bytes after the header, unchanged until `reply.body_done`, `ok` or
    `error`. A method never raises for a client's error: every request gets exactly one call of its reply, and an ack
    is sent only once it is true. HELLO is handled by the server. Frequent commands are written out, which is one call
    less.

    Appends are queued until `end_turn()`, so that the requests for a partition which the server received in one
    poll are one write. Call it at the end of every poll, and after `tick`.

    `begin_force` (`journal.linux_aio.AioFsyncQueue.start`) fsyncs single files without a worker, where the system can.
    """

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
        """Open the data folder: lock, catalog, logs. Call it before listening.

        Raises what prevents a start, with a sentence for the operator.
        """
        start(self.broker)

    def stop(self, done: Callable[[], None]) -> None:
        """Reject new requests, complete the accepted ones, close the logs, call `done()`."""
        self.broker.stop(done)

    def tick(self, now: float) -> float | None:
        """Run timers due at `now` (monotonic seconds).

        Return when the next one is due; None if none is.
        """
        return self.broker.timers.tick(now)

    def next_due(self) -> float | None:
        """Return when `tick` must be called next. Ask again after every `end_turn`."""
        return self.broker.timers.next_due()

    def end_turn(self) -> None:
        """Write the requests of this poll, one append per partition, and start their fsync."""
        self.broker.end_turn()

    def reload(self, config: Config) -> None:
        """Use another configuration. Only keys that `tfmq.config.merge_reload` allows may differ."""
        self.broker.reload(config)

    @property
    def node(self) -> str:
        """This broker's permanent id, created at the first start."""
        return self.broker.node

    # Commands about the broker itself

    @reply_errors
    def ping(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        reply.ok(self.broker.clock.wall_ms())

    @reply_errors
    def status(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        reply.ok(self.status_fields())

    def status_fields(self) -> dict[str, Any]:
        """Return the broker's part of STATUS; the server adds connections and memory."""
        return broker_status(self.broker)

    @reply_errors
    def cancel(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        parts = (self.broker.fetches, self.broker.transaction_commands, self.broker.group_coordinator)
        reply.ok(any(each.cancel(session, request.target) for each in parts))

    # Commands for topics

    def partition_counts(self) -> dict[str, int]:
        """Return the number of partitions by topic."""
        return {topic.name: len(topic.partitions) for topic in self.broker.topics.all()}

    metadata = in_session(lambda broker: broker.topic_admin.metadata)
    create_topic = log_command(without_session(lambda broker: broker.topic_admin.create))
    grow_topic = log_command(without_session(lambda broker: broker.topic_admin.grow))
    delete_topic = log_command(without_session(lambda broker: broker.topic_admin.delete))
    describe_topic = in_session(lambda broker: broker.describe_topic)
    resume_partition = log_command(without_session(lambda broker: broker.topic_admin.resume))
    truncate = log_command(without_session(lambda broker: broker.retention.truncate))
    set_topic = log_command(without_session(lambda broker: broker.topic_admin.set))

    # Commands of producers

    lease_producer_ids = without_session(lambda broker: broker.lease_producer_ids)

    @reply_errors
    def produce(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        if request.transaction is not None:
            self.broker.transaction_commands.send(request, body, reply, session)
        elif request.due is not None:
            self.broker.delay_commands.send(request, body, reply, session)
        else:
            self.broker.produce_handler.produce(request, body, reply, session)

    @reply_errors
    def succeed_producer(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        if request.topic:
            self.broker.produce_handler.succeed(request, reply)
        else:
            self.broker.delay_commands.succeed_producer(request, reply)

    # Commands for delayed messages

    cancel_delayed = log_command(in_session(lambda broker: broker.delay_commands.cancel))
    reschedule_delayed = log_command(in_session(lambda broker: broker.delay_commands.reschedule))
    list_delayed = in_session(lambda broker: broker.delay_commands.list)
    describe_delayed = in_session(lambda broker: broker.delay_commands.describe)
    delayed_histogram = in_session(lambda broker: broker.delay_commands.histogram)

    # Commands of consumers

    @reply_errors
    def fetch(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.fetches.fetch(request, reply, session)

    locate = in_session(lambda broker: broker.locate_offset)

    # Commands of groups

    join_group = in_session(lambda broker: broker.group_coordinator.join)

    @reply_errors
    def heartbeat(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.group_coordinator.heartbeat(request, reply, session)

    leave_group = without_session(lambda broker: broker.group_coordinator.leave)

    @reply_errors
    def commit_offsets(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.offset_commands.commit(request, reply, session)

    read_offsets = without_session(lambda broker: broker.group_offset_store.read)

    @reply_errors
    def list_groups(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        reply.ok(self.broker.group_coordinator.list())

    describe_group = without_session(lambda broker: broker.group_coordinator.describe)
    reset_group = log_command(without_session(lambda broker: broker.offset_commands.reset))
    delete_group = log_command(without_session(lambda broker: broker.offset_commands.delete))

    # Commands for transactions

    def transaction_status_fields(self) -> Mapping[str, Any]:
        """Return the "transactions" part of STATUS, without reading partitions."""
        return self.broker.transaction_commands.coordinator.status()

    @reply_errors
    def begin_transaction(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.transaction_commands.begin(request, reply, session)

    @reply_errors
    def prepare_transaction(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.transaction_commands.prepare(request, reply, session)

    @log_command
    @reply_errors
    def commit_transaction(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.transaction_commands.commit(request, reply, session)

    rollback_transaction = log_command(in_session(lambda broker: broker.transaction_commands.rollback))
    forget_transaction = log_command(in_session(lambda broker: broker.transaction_commands.forget))

    @reply_errors
    def transact(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.transaction_commands.transact(request, body, reply, session)

    list_transactions = without_session(lambda broker: broker.transaction_commands.list_transactions)
    describe_transaction = without_session(lambda broker: broker.transaction_commands.describe)
    await_checks = in_session(lambda broker: broker.transaction_commands.await_checks)

    # Commands for commit groups

    commit_group = log_command(in_session(lambda broker: broker.transaction_commands.commit_group))
    abort_commit_group = log_command(in_session(lambda broker: broker.transaction_commands.abort_group))
    list_commit_groups = without_session(lambda broker: broker.transaction_commands.list_groups)
    forget_commit_group = log_command(in_session(lambda broker: broker.transaction_commands.forget_group))

    # Commands for schedules

    @log_command
    @reply_errors
    def add_schedule(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.schedule_commands.add(request, body, reply)

    pause_schedule = log_command(without_session(lambda broker: broker.schedule_commands.pause))
    resume_schedule = log_command(without_session(lambda broker: broker.schedule_commands.resume))
    remove_schedule = log_command(without_session(lambda broker: broker.schedule_commands.remove))
    list_schedules = without_session(lambda broker: broker.schedule_commands.list)
