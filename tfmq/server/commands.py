"""Which method of the engine serves which command. HELLO is the session's own; STATUS gets the server's
part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from tfmq.broker.request_handler import Engine
from tfmq.errors import NotSupported, TfmqError, UnknownCommand
from tfmq.protocol import commands
from tfmq.protocol.commands import BY_CODE, BY_REQUEST, Command, reserved_for

Method: TypeAlias = Callable[..., None]

METHODS: dict[type[Any], Method] = {
    commands.Ping: Engine.ping,
    commands.Status: Engine.status,
    commands.Cancel: Engine.cancel,
    commands.Metadata: Engine.metadata,
    commands.CreateTopic: Engine.create_topic,
    commands.GrowTopic: Engine.grow_topic,
    commands.DeleteTopic: Engine.delete_topic,
    commands.DescribeTopic: Engine.describe_topic,
    commands.ResumePartition: Engine.resume_partition,
    commands.Truncate: Engine.truncate,
    commands.SetTopic: Engine.set_topic,
    commands.LeaseProducerIds: Engine.lease_producer_ids,
    commands.Produce: Engine.produce,
    commands.SucceedProducer: Engine.succeed_producer,
    commands.Fetch: Engine.fetch,
    commands.Locate: Engine.locate,
    commands.JoinGroup: Engine.join_group,
    commands.Heartbeat: Engine.heartbeat,
    commands.LeaveGroup: Engine.leave_group,
    commands.CommitOffsets: Engine.commit_offsets,
    commands.ReadOffsets: Engine.read_offsets,
    commands.ListGroups: Engine.list_groups,
    commands.DescribeGroup: Engine.describe_group,
    commands.ResetGroup: Engine.reset_group,
    commands.DeleteGroup: Engine.delete_group,
    commands.BeginTransaction: Engine.begin_transaction,
    commands.PrepareTransaction: Engine.prepare_transaction,
    commands.CommitTransaction: Engine.commit_transaction,
    commands.RollbackTransaction: Engine.rollback_transaction,
    commands.ForgetTransaction: Engine.forget_transaction,
    commands.ListTransactions: Engine.list_transactions,
    commands.DescribeTransaction: Engine.describe_transaction,
    commands.Transact: Engine.transact,
    commands.AwaitChecks: Engine.await_checks,
    commands.CancelDelayed: Engine.cancel_delayed,
    commands.RescheduleDelayed: Engine.reschedule_delayed,
    commands.ListDelayed: Engine.list_delayed,
    commands.DescribeDelayed: Engine.describe_delayed,
    commands.DelayedHistogram: Engine.delayed_histogram,
    commands.AddSchedule: Engine.add_schedule,
    commands.ListSchedules: Engine.list_schedules,
    commands.PauseSchedule: Engine.pause_schedule,
    commands.ResumeSchedule: Engine.resume_schedule,
    commands.RemoveSchedule: Engine.remove_schedule,
    commands.CommitGroup: Engine.commit_group,
    commands.AbortCommitGroup: Engine.abort_commit_group,
    commands.ListCommitGroups: Engine.list_commit_groups,
    commands.ForgetCommitGroup: Engine.forget_commit_group,
}
HANDLERS: dict[int, tuple[Command, Method]] = {
    BY_REQUEST[request].code: (BY_REQUEST[request], method) for request, method in METHODS.items()
}
HELLO = BY_REQUEST[commands.Hello]


def unknown(code: int) -> TfmqError:
    """The error for a code that no method serves: reserved for a later release, or never heard of."""
    later = reserved_for(code)
    if later is not None:
        return NotSupported(f"This release of the broker has no {later} yet.")
    known = BY_CODE.get(code)
    return UnknownCommand(f"The broker does not know the command {known.name if known else code}.")
