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
from tfmq.broker.broker import Broker
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


class RequestHandler:
    """The whole broker on one data folder.

    Call `start()` first and `stop(done)` last, all in one thread.

    Command methods are `method(request, body, reply, session)`. `request` is a NamedTuple of
    `tfmq.protocol.commands`; `body` are the bytes after the header, unchanged until `reply.body_done`, `ok` or
    `error`. A method never raises for a client's error: every request gets exactly one call of its reply, and an ack
    is sent only once it is true. HELLO is handled by the server.

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
        return self.broker.status()

    @reply_errors
    def cancel(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        parts = (self.broker.fetches, self.broker.transaction_commands, self.broker.group_coordinator)
        reply.ok(any(each.cancel(session, request.target) for each in parts))

    # Commands for topics

    def partition_counts(self) -> dict[str, int]:
        """Return the number of partitions by topic."""
        return {topic.name: len(topic.partitions) for topic in self.broker.topics.all()}

    @reply_errors
    def metadata(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.topic_admin.metadata(request, reply, session)

    @log_command
    @reply_errors
    def create_topic(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.topic_admin.create(request, reply)

    @log_command
    @reply_errors
    def grow_topic(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.topic_admin.grow(request, reply)

    @log_command
    @reply_errors
    def delete_topic(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.topic_admin.delete(request, reply)

    @reply_errors
    def describe_topic(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.describe_topic(request, reply, session)

    @log_command
    @reply_errors
    def resume_partition(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.topic_admin.resume(request, reply)

    @log_command
    @reply_errors
    def truncate(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.retention.truncate(request, reply)

    @log_command
    @reply_errors
    def set_topic(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.topic_admin.set(request, reply)

    # Commands of producers

    @reply_errors
    def lease_producer_ids(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.lease_producer_ids(request, reply)

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

    @log_command
    @reply_errors
    def cancel_delayed(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.delay_commands.cancel(request, reply, session)

    @log_command
    @reply_errors
    def reschedule_delayed(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.delay_commands.reschedule(request, reply, session)

    @reply_errors
    def list_delayed(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.delay_commands.list(request, reply, session)

    @reply_errors
    def describe_delayed(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.delay_commands.describe(request, reply, session)

    @reply_errors
    def delayed_histogram(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.delay_commands.histogram(request, reply, session)

    # Commands of consumers

    @reply_errors
    def fetch(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.fetches.fetch(request, reply, session)

    @reply_errors
    def locate(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.locate_offset(request, reply, session)

    # Commands of groups

    @reply_errors
    def join_group(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.group_coordinator.join(request, reply, session)

    @reply_errors
    def heartbeat(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.group_coordinator.heartbeat(request, reply, session)

    @reply_errors
    def leave_group(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.group_coordinator.leave(request, reply)

    @reply_errors
    def commit_offsets(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.offset_commands.commit(request, reply, session)

    @reply_errors
    def read_offsets(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.group_offset_store.read(request, reply)

    @reply_errors
    def list_groups(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        reply.ok(self.broker.group_coordinator.list())

    @reply_errors
    def describe_group(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.group_coordinator.describe(request, reply)

    @log_command
    @reply_errors
    def reset_group(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.offset_commands.reset(request, reply)

    @log_command
    @reply_errors
    def delete_group(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.offset_commands.delete(request, reply)

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

    @log_command
    @reply_errors
    def rollback_transaction(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.transaction_commands.rollback(request, reply, session)

    @log_command
    @reply_errors
    def forget_transaction(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.transaction_commands.forget(request, reply, session)

    @reply_errors
    def transact(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.transaction_commands.transact(request, body, reply, session)

    @reply_errors
    def list_transactions(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.transaction_commands.list_transactions(request, reply)

    @reply_errors
    def describe_transaction(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.transaction_commands.describe(request, reply)

    @reply_errors
    def await_checks(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.transaction_commands.await_checks(request, reply, session)

    # Commands for commit groups

    @log_command
    @reply_errors
    def commit_group(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.transaction_commands.commit_group(request, reply, session)

    @log_command
    @reply_errors
    def abort_commit_group(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.transaction_commands.abort_group(request, reply, session)

    @reply_errors
    def list_commit_groups(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.transaction_commands.list_groups(request, reply)

    @log_command
    @reply_errors
    def forget_commit_group(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.transaction_commands.forget_group(request, reply, session)

    # Commands for schedules

    @log_command
    @reply_errors
    def add_schedule(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.schedule_commands.add(request, body, reply)

    @log_command
    @reply_errors
    def pause_schedule(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.schedule_commands.pause(request, reply)

    @log_command
    @reply_errors
    def resume_schedule(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.schedule_commands.resume(request, reply)

    @log_command
    @reply_errors
    def remove_schedule(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.schedule_commands.remove(request, reply)

    @reply_errors
    def list_schedules(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.broker.schedule_commands.list(request, reply)
