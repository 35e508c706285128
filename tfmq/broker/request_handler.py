"""One method per command of the wire protocol.

The broker's interface for the server, without sockets.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from journal.clock import Clock
from journal.disk import Disk
from journal.linux_aio import Begin
from tfmq.broker.acts import recorded
from tfmq.broker.broker import House
from tfmq.broker.reply import Body, Randomness, Reply, Run, Session, client_error
from tfmq.broker.startup import start
from tfmq.config import Config

Method: TypeAlias = Callable[["Engine", Any, Body, Reply, Session], None]


def answered(method: Method) -> Method:
    """Decorate a command method so that an exception becomes the error reply."""

    @functools.wraps(method)
    def command(self: "Engine", request: Any, body: Body, reply: Reply, session: Session) -> None:
        try:
            self.house.require_open()
            method(self, request, body, reply, session)
        except Exception as error:
            reply.error(client_error(error))

    return command


class Engine:
    """The whole broker on one data folder.

    Call `start()` first and `stop(done)` last, all in one thread.

    Command methods are `method(request, body, reply, session)`. `request` is a NamedTuple of
    `tfmq.protocol.commands`; `body` are the bytes after the header, unchanged until `reply.body_done`, `ok` or
    `error`. A method never raises for a client's error: every request gets exactly one call of its reply, and an ack
    is sent only once it is true. HELLO is handled by the server.

    Appends are queued until `end_turn()`, so that the requests which one poll of the server received for a partition
    are one write. Call it at the end of every poll, and after `tick`.

    `begin_force` (`journal.linux_aio.ForceQueue.begin`) fsyncs single files without a worker, where the system can.
    """

    def __init__(
        self,
        config: Config,
        disk: Disk,
        clock: Clock,
        run: Run,
        randomness: Randomness,
        begin_force: Begin | None = None,
    ) -> None:
        self.house = House(config, disk, clock, run, randomness, begin_force)

    def start(self) -> None:
        """Open the data folder: lock, catalog, logs. Call it before listening.

        Raises what prevents a start, with a sentence for the operator.
        """
        start(self.house)

    def stop(self, done: Callable[[], None]) -> None:
        """Reject new requests, complete the accepted ones, close the logs, call `done()`."""
        self.house.stop(done)

    def tick(self, now: float) -> float | None:
        """Run timers due at `now` (monotonic seconds).

        Return when the next one is due; None if none is.
        """
        return self.house.timers.tick(now)

    def next_due(self) -> float | None:
        """Return when `tick` must be called next. Ask again after every `end_turn`."""
        return self.house.timers.next_due()

    def turn_ended(self) -> None:
        """Write the requests of this poll, one append per partition, and start their fsync."""
        self.house.turn_ended()

    def reload(self, config: Config) -> None:
        """Use another configuration. Only the keys that `tfmq.config.reloaded` allows may differ."""
        self.house.reload(config)

    @property
    def node(self) -> str:
        """This broker's permanent id, created at the first start."""
        return self.house.node

    # Broker

    @answered
    def ping(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        reply.ok(self.house.clock.wall_ms())

    @answered
    def status(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        reply.ok(self.status_map())

    def status_map(self) -> dict[str, Any]:
        """Return the broker's part of STATUS; the server adds connections and memory."""
        return self.house.status()

    @answered
    def cancel(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        parts = (self.house.polls, self.house.transactions, self.house.groups)
        reply.ok(any(each.cancel(session, request.target) for each in parts))

    # Topics

    def partition_counts(self) -> dict[str, int]:
        """Return the number of partitions by topic."""
        return {topic.name: len(topic.partitions) for topic in self.house.topics.all()}

    @answered
    def metadata(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.changes.metadata(request, reply, session)

    @recorded
    @answered
    def create_topic(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.changes.create(request, reply)

    @recorded
    @answered
    def grow_topic(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.changes.grow(request, reply)

    @recorded
    @answered
    def delete_topic(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.changes.delete(request, reply)

    @answered
    def describe_topic(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.describe(request, reply, session)

    @recorded
    @answered
    def resume_partition(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.changes.resume(request, reply)

    @recorded
    @answered
    def truncate(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.retention.truncate(request, reply)

    @recorded
    @answered
    def set_topic(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.changes.set(request, reply)

    # Producing

    @answered
    def lease_producer_ids(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.lease(request, reply)

    @answered
    def produce(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        if request.transaction is not None:
            self.house.transactions.send(request, body, reply, session)
        elif request.due is not None:
            self.house.delay.send(request, body, reply, session)
        else:
            self.house.writes.produce(request, body, reply, session)

    @answered
    def succeed_producer(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        if request.topic:
            self.house.writes.succeed(request, reply)
        else:
            self.house.delay.succeed(request, reply)

    # Delayed messages

    @recorded
    @answered
    def cancel_delayed(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.delay.cancel(request, reply, session)

    @recorded
    @answered
    def reschedule_delayed(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.delay.reschedule(request, reply, session)

    @answered
    def list_delayed(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.delay.list(request, reply, session)

    @answered
    def describe_delayed(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.delay.describe(request, reply, session)

    @answered
    def delayed_histogram(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.delay.histogram(request, reply, session)

    # Consuming

    @answered
    def fetch(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.polls.fetch(request, reply, session)

    @answered
    def locate(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.locate(request, reply, session)

    # Groups

    @answered
    def join_group(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.groups.join(request, reply, session)

    @answered
    def heartbeat(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.groups.heartbeat(request, reply, session)

    @answered
    def leave_group(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.groups.leave(request, reply)

    @answered
    def commit_offsets(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.group_offsets.commit(request, reply, session)

    @answered
    def read_offsets(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.offsets.read(request, reply)

    @answered
    def list_groups(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        reply.ok(self.house.groups.list())

    @answered
    def describe_group(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.groups.describe(request, reply)

    @recorded
    @answered
    def reset_group(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.group_offsets.reset(request, reply)

    @recorded
    @answered
    def delete_group(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.group_offsets.delete(request, reply)

    # Transactions

    def transactions_map(self) -> Mapping[str, Any]:
        """Return the "transactions" part of STATUS, without reading partitions."""
        return self.house.transactions.handler.status()

    @answered
    def begin_transaction(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.transactions.begin(request, reply, session)

    @answered
    def prepare_transaction(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.transactions.prepare(request, reply, session)

    @recorded
    @answered
    def commit_transaction(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.transactions.commit(request, reply, session)

    @recorded
    @answered
    def rollback_transaction(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.transactions.rollback(request, reply, session)

    @recorded
    @answered
    def forget_transaction(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.transactions.forget(request, reply, session)

    @answered
    def transact(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.transactions.transact(request, body, reply, session)

    @answered
    def list_transactions(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.transactions.list_transactions(request, reply)

    @answered
    def describe_transaction(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.transactions.describe(request, reply)

    @answered
    def await_checks(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.transactions.await_checks(request, reply, session)

    # Commit groups

    @recorded
    @answered
    def commit_group(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.transactions.commit_group(request, reply, session)

    @recorded
    @answered
    def abort_commit_group(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.transactions.abort_group(request, reply, session)

    @answered
    def list_commit_groups(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.transactions.list_groups(request, reply)

    @recorded
    @answered
    def forget_commit_group(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.transactions.forget_group(request, reply, session)

    # Schedules

    @recorded
    @answered
    def add_schedule(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.schedules.add(request, body, reply)

    @recorded
    @answered
    def pause_schedule(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.schedules.pause(request, reply)

    @recorded
    @answered
    def resume_schedule(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.schedules.resume(request, reply)

    @recorded
    @answered
    def remove_schedule(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.schedules.remove(request, reply)

    @answered
    def list_schedules(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        self.house.schedules.list(request, reply)
