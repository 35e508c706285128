"""Every command of the protocol, once: its code, its name, and the fields of its request and reply.

The classes below are the table's rows written as types. A field's annotation carries its kind (what is taken
from the wire), its default stands in for a missing trailing field. `COMMANDS` lists them with their codes;
codes are never given to another command. docs/protocol.md says how to add one.
"""

from typing import Annotated, Any, NamedTuple

from tfmq import limits
from tfmq.protocol.delay_commands import CancelDelayed as CancelDelayed
from tfmq.protocol.delay_commands import CancelDelayedReply as CancelDelayedReply
from tfmq.protocol.delay_commands import DelayedHistogram as DelayedHistogram
from tfmq.protocol.delay_commands import DelayedHistogramReply as DelayedHistogramReply
from tfmq.protocol.delay_commands import DescribeDelayed as DescribeDelayed
from tfmq.protocol.delay_commands import DescribeDelayedReply as DescribeDelayedReply
from tfmq.protocol.delay_commands import ListDelayed as ListDelayed
from tfmq.protocol.delay_commands import ListDelayedReply as ListDelayedReply
from tfmq.protocol.delay_commands import RescheduleDelayed as RescheduleDelayed
from tfmq.protocol.delay_commands import RescheduleDelayedReply as RescheduleDelayedReply
from tfmq.protocol.fields import Kind, ListOf, Map, Optional, Row, Text, Whole
from tfmq.protocol.group_commands import CommitOffsets as CommitOffsets
from tfmq.protocol.group_commands import CommitOffsetsReply as CommitOffsetsReply
from tfmq.protocol.group_commands import DeleteGroup as DeleteGroup
from tfmq.protocol.group_commands import DeleteGroupReply as DeleteGroupReply
from tfmq.protocol.group_commands import DescribeGroup as DescribeGroup
from tfmq.protocol.group_commands import DescribeGroupReply as DescribeGroupReply
from tfmq.protocol.group_commands import Heartbeat as Heartbeat
from tfmq.protocol.group_commands import HeartbeatReply as HeartbeatReply
from tfmq.protocol.group_commands import JoinGroup as JoinGroup
from tfmq.protocol.group_commands import JoinGroupReply as JoinGroupReply
from tfmq.protocol.group_commands import LeaveGroup as LeaveGroup
from tfmq.protocol.group_commands import LeaveGroupReply as LeaveGroupReply
from tfmq.protocol.group_commands import ListGroups as ListGroups
from tfmq.protocol.group_commands import ListGroupsReply as ListGroupsReply
from tfmq.protocol.group_commands import ReadOffsets as ReadOffsets
from tfmq.protocol.group_commands import ReadOffsetsReply as ReadOffsetsReply
from tfmq.protocol.group_commands import ResetGroup as ResetGroup
from tfmq.protocol.group_commands import ResetGroupReply as ResetGroupReply
from tfmq.protocol.rows import ACKS_NONE as ACKS_NONE
from tfmq.protocol.rows import ACKS_SYNCED as ACKS_SYNCED
from tfmq.protocol.rows import ACKS_WRITTEN as ACKS_WRITTEN
from tfmq.protocol.rows import DUE_MAX as DUE_MAX
from tfmq.protocol.rows import DUE_RELATIVE as DUE_RELATIVE
from tfmq.protocol.rows import EPOCH_UNKNOWN as EPOCH_UNKNOWN
from tfmq.protocol.rows import ORDINAL_UNKNOWN as ORDINAL_UNKNOWN
from tfmq.protocol.rows import SEQUENCE_NONE as SEQUENCE_NONE
from tfmq.protocol.rows import (
    Acks,
    Blocks,
    DuesOrNil,
    Identity,
    Incarnation,
    Member,
    Number,
    Offset,
    Partition,
    Plain,
    Positions,
    ProducerId,
    Sequence,
    Signed,
    SignedSequence,
    Size,
    TimeMs,
    Topic,
    Words,
    Yes,
)
from tfmq.protocol.rows import Block as Block
from tfmq.protocol.rows import CommitMember as CommitMember
from tfmq.protocol.rows import DelayedBatch as DelayedBatch
from tfmq.protocol.rows import GrantedPartition as GrantedPartition
from tfmq.protocol.rows import GroupOffset as GroupOffset
from tfmq.protocol.rows import HeldPartition as HeldPartition
from tfmq.protocol.rows import PartitionName as PartitionName
from tfmq.protocol.rows import PartitionRow as PartitionRow
from tfmq.protocol.rows import Position as Position
from tfmq.protocol.rows import SavedOffset as SavedOffset
from tfmq.protocol.rows import Subscription as Subscription
from tfmq.protocol.rows import TopicRow as TopicRow
from tfmq.protocol.rows import TransactionBatch as TransactionBatch
from tfmq.protocol.rows import TransactionName as TransactionName
from tfmq.protocol.rows import TransactionOffsets as TransactionOffsets
from tfmq.protocol.schedule_commands import AddSchedule as AddSchedule
from tfmq.protocol.schedule_commands import AddScheduleReply as AddScheduleReply
from tfmq.protocol.schedule_commands import ListSchedules as ListSchedules
from tfmq.protocol.schedule_commands import ListSchedulesReply as ListSchedulesReply
from tfmq.protocol.schedule_commands import PauseSchedule as PauseSchedule
from tfmq.protocol.schedule_commands import PauseScheduleReply as PauseScheduleReply
from tfmq.protocol.schedule_commands import RemoveSchedule as RemoveSchedule
from tfmq.protocol.schedule_commands import RemoveScheduleReply as RemoveScheduleReply
from tfmq.protocol.schedule_commands import ResumeSchedule as ResumeSchedule
from tfmq.protocol.schedule_commands import ResumeScheduleReply as ResumeScheduleReply
from tfmq.protocol.topic_commands import CreateTopic as CreateTopic
from tfmq.protocol.topic_commands import CreateTopicReply as CreateTopicReply
from tfmq.protocol.topic_commands import DeleteTopic as DeleteTopic
from tfmq.protocol.topic_commands import DeleteTopicReply as DeleteTopicReply
from tfmq.protocol.topic_commands import DescribeTopic as DescribeTopic
from tfmq.protocol.topic_commands import DescribeTopicReply as DescribeTopicReply
from tfmq.protocol.topic_commands import GrowTopic as GrowTopic
from tfmq.protocol.topic_commands import GrowTopicReply as GrowTopicReply
from tfmq.protocol.topic_commands import Metadata as Metadata
from tfmq.protocol.topic_commands import MetadataReply as MetadataReply
from tfmq.protocol.topic_commands import ResumePartition as ResumePartition
from tfmq.protocol.topic_commands import ResumePartitionReply as ResumePartitionReply
from tfmq.protocol.topic_commands import SetTopic as SetTopic
from tfmq.protocol.topic_commands import SetTopicReply as SetTopicReply
from tfmq.protocol.topic_commands import Truncate as Truncate
from tfmq.protocol.topic_commands import TruncateReply as TruncateReply
from tfmq.protocol.transaction_commands import AbortCommitGroup as AbortCommitGroup
from tfmq.protocol.transaction_commands import AbortCommitGroupReply as AbortCommitGroupReply
from tfmq.protocol.transaction_commands import AwaitChecks as AwaitChecks
from tfmq.protocol.transaction_commands import AwaitChecksReply as AwaitChecksReply
from tfmq.protocol.transaction_commands import BeginTransaction as BeginTransaction
from tfmq.protocol.transaction_commands import BeginTransactionReply as BeginTransactionReply
from tfmq.protocol.transaction_commands import CommitGroup as CommitGroup
from tfmq.protocol.transaction_commands import CommitGroupReply as CommitGroupReply
from tfmq.protocol.transaction_commands import CommitTransaction as CommitTransaction
from tfmq.protocol.transaction_commands import CommitTransactionReply as CommitTransactionReply
from tfmq.protocol.transaction_commands import DescribeTransaction as DescribeTransaction
from tfmq.protocol.transaction_commands import DescribeTransactionReply as DescribeTransactionReply
from tfmq.protocol.transaction_commands import ForgetCommitGroup as ForgetCommitGroup
from tfmq.protocol.transaction_commands import ForgetCommitGroupReply as ForgetCommitGroupReply
from tfmq.protocol.transaction_commands import ForgetTransaction as ForgetTransaction
from tfmq.protocol.transaction_commands import ForgetTransactionReply as ForgetTransactionReply
from tfmq.protocol.transaction_commands import ListCommitGroups as ListCommitGroups
from tfmq.protocol.transaction_commands import ListCommitGroupsReply as ListCommitGroupsReply
from tfmq.protocol.transaction_commands import ListTransactions as ListTransactions
from tfmq.protocol.transaction_commands import ListTransactionsReply as ListTransactionsReply
from tfmq.protocol.transaction_commands import PrepareTransaction as PrepareTransaction
from tfmq.protocol.transaction_commands import PrepareTransactionReply as PrepareTransactionReply
from tfmq.protocol.transaction_commands import RollbackTransaction as RollbackTransaction
from tfmq.protocol.transaction_commands import RollbackTransactionReply as RollbackTransactionReply
from tfmq.protocol.transaction_commands import Transact as Transact
from tfmq.protocol.transaction_commands import TransactReply as TransactReply

MAGIC = "TFMQ"
VERSION_MIN = VERSION_MAX = 1

ACKS = {"none": ACKS_NONE, "written": ACKS_WRITTEN, "synced": ACKS_SYNCED}
DURABILITY = {ACKS_NONE: "none", ACKS_WRITTEN: "written", ACKS_SYNCED: "synced"}
# How far a fetch reads.
READ_FORCED, READ_WRITTEN = 0, 1
READ = {"forced": READ_FORCED, "written": READ_WRITTEN}
# What LOCATE looks for.
BY_EARLIEST, BY_LATEST, BY_ORDINAL, BY_TIME_MS, BY_OFFSET = range(5)

# The broker itself


class Hello(NamedTuple):
    """The first request of a connection. The client offers versions; the broker takes the highest that both
    know.
    """

    magic: Words
    version_min: Size
    version_max: Size
    client: Words
    details: Plain


class HelloReply(NamedTuple):
    version: Size
    server: Words
    node: Words
    limits: Plain
    acks: Acks
    features: Annotated[list[str], ListOf(Text(), limits.MAP_ITEMS)]


class Ping(NamedTuple):
    """Does nothing; the answer is the broker's wall clock."""


class PingReply(NamedTuple):
    time_ms: TimeMs


class Status(NamedTuple):
    """How the broker is."""


class StatusReply(NamedTuple):
    status: Plain


class Cancel(NamedTuple):
    """Ends a parked FETCH, AWAIT_CHECKS or HEARTBEAT of this connection: it is answered at once, empty."""

    target: Size


class CancelReply(NamedTuple):
    cancelled: Yes


# Producing


class LeaseProducerIds(NamedTuple):
    """Gives out producer ids that nobody had before."""

    count: Annotated[int, Whole(1, limits.PRODUCER_IDS_PER_LEASE)] = 1  # type: ignore[assignment]


class LeaseProducerIdsReply(NamedTuple):
    first: ProducerId
    count: Size  # type: ignore[assignment]


class Produce(NamedTuple):
    """Appends a batch of records, the body, to one partition: all of it or nothing. With `due` they wait for their
    time before. With the epoch of an open transaction it becomes part of that: nothing is appended before the
    commit.
    """

    topic: Topic
    incarnation: Incarnation
    partition: Partition
    producer_id: ProducerId
    sequence: Sequence
    count: Annotated[int, Whole(1, limits.BATCH_RECORDS)]  # type: ignore[assignment]
    acks: Acks
    blocks: Blocks
    due: DuesOrNil = None
    transaction: Annotated[int | None, Optional(Whole(1, (1 << 63) - 1, "u63, not 0"))] = None


class ProduceReply(NamedTuple):
    positions: Positions
    durability: Acks
    repeated: Yes
    append_time: TimeMs
    first_ordinal: Signed
    delayed: Annotated[DelayedBatch | None, Optional(Row(DelayedBatch))] = None


class SucceedProducer(NamedTuple):
    """Closes a producer id on a partition for good, tells the last sequence stored, gives the id that
    follows. Topic "": an id for delayed messages, whose one stream goes to all partitions.
    """

    topic: Member
    incarnation: Incarnation
    partition: Partition
    producer_id: ProducerId


class SucceedProducerReply(NamedTuple):
    successor_id: ProducerId
    last_sequence: SignedSequence
    durability: Acks


# Consuming


class Fetch(NamedTuple):
    """Whole control blocks from the one that holds `offset` on; waits up to `wait_ms` where there are
    none.
    """

    topic: Topic
    incarnation: Incarnation
    partition: Partition
    offset: Offset
    epoch: Signed = EPOCH_UNKNOWN
    max_bytes: Size = 256 * limits.KIB
    wait_ms: Size = 0
    read: Annotated[int, Whole(READ_FORCED, READ_WRITTEN)] = READ_FORCED
    tags: Annotated[list[int] | None, Optional(ListOf(Whole(1, 65_535), limits.FETCH_TAGS))] = None


class FetchReply(NamedTuple):
    start: Offset
    skip_to: Offset
    next: Offset
    epoch: Signed
    forced: Offset
    end: Offset
    first: Offset
    log_id: Identity
    partitions: Size = 0


class Locate(NamedTuple):
    """Finds an offset: 0 earliest, 1 latest (forced), 2 ordinal, 3 append time in ms, 4 record start at or
    before.
    """

    topic: Topic
    incarnation: Incarnation
    partition: Partition
    by: Annotated[int, Whole(BY_EARLIEST, BY_OFFSET)]
    value: Number = 0


class LocateReply(NamedTuple):
    offset: Offset
    ordinal: Signed
    epoch: Signed
    first_offset: Offset
    end_offset: Offset
    forced_offset: Offset
    end_ordinal: Number


class Command:
    """One row of the table."""

    def __init__(self, code: int, request: type[Any], reply: type[Any], body: str = "", reply_body: str = ""):
        self.code = code
        self.request = Row(request)
        self.reply = Row(reply)
        self.body = body
        self.reply_body = reply_body
        self.name = "".join(f"_{c}" if c.isupper() else c for c in request.__name__).strip("_").upper()
        self.description = (request.__doc__ or "").strip()

    def __repr__(self) -> str:
        return f"<{self.name}={self.code}>"


COMMANDS: tuple[Command, ...] = (
    Command(1, Hello, HelloReply),
    Command(2, Ping, PingReply),
    Command(3, Status, StatusReply),
    Command(4, Cancel, CancelReply),
    Command(10, Metadata, MetadataReply),
    Command(11, CreateTopic, CreateTopicReply),
    Command(12, GrowTopic, GrowTopicReply),
    Command(13, DeleteTopic, DeleteTopicReply),
    Command(14, DescribeTopic, DescribeTopicReply),
    Command(15, ResumePartition, ResumePartitionReply),
    Command(16, Truncate, TruncateReply),
    Command(17, SetTopic, SetTopicReply),
    Command(20, LeaseProducerIds, LeaseProducerIdsReply),
    Command(21, Produce, ProduceReply, body="the records"),
    Command(22, SucceedProducer, SucceedProducerReply),
    Command(30, Fetch, FetchReply, reply_body="whole control blocks"),
    Command(31, Locate, LocateReply),
    Command(40, JoinGroup, JoinGroupReply),
    Command(41, Heartbeat, HeartbeatReply),
    Command(42, LeaveGroup, LeaveGroupReply),
    Command(43, CommitOffsets, CommitOffsetsReply),
    Command(44, ReadOffsets, ReadOffsetsReply),
    Command(45, ListGroups, ListGroupsReply),
    Command(46, DescribeGroup, DescribeGroupReply),
    Command(47, ResetGroup, ResetGroupReply),
    Command(48, DeleteGroup, DeleteGroupReply),
    Command(50, BeginTransaction, BeginTransactionReply),
    Command(51, PrepareTransaction, PrepareTransactionReply),
    Command(52, CommitTransaction, CommitTransactionReply),
    Command(53, RollbackTransaction, RollbackTransactionReply),
    Command(54, ForgetTransaction, ForgetTransactionReply),
    Command(55, ListTransactions, ListTransactionsReply),
    Command(56, DescribeTransaction, DescribeTransactionReply),
    Command(57, Transact, TransactReply, body="the records of its batches"),
    Command(58, AwaitChecks, AwaitChecksReply),
    Command(60, CancelDelayed, CancelDelayedReply),
    Command(61, RescheduleDelayed, RescheduleDelayedReply),
    Command(62, ListDelayed, ListDelayedReply),
    Command(63, DescribeDelayed, DescribeDelayedReply),
    Command(64, DelayedHistogram, DelayedHistogramReply),
    Command(70, AddSchedule, AddScheduleReply, body="the payload"),
    Command(71, ListSchedules, ListSchedulesReply),
    Command(72, PauseSchedule, PauseScheduleReply),
    Command(73, ResumeSchedule, ResumeScheduleReply),
    Command(74, RemoveSchedule, RemoveScheduleReply),
    Command(80, CommitGroup, CommitGroupReply),
    Command(81, AbortCommitGroup, AbortCommitGroupReply),
    Command(82, ListCommitGroups, ListCommitGroupsReply),
    Command(83, ForgetCommitGroup, ForgetCommitGroupReply),
)
BY_CODE: dict[int, Command] = {command.code: command for command in COMMANDS}
BY_REQUEST: dict[type[Any], Command] = {command.request.shape: command for command in COMMANDS}

SPARE_FIELDS = 64
"""Fields of a later release, which are ignored, beyond those of a request and of its rows in all."""

SPARE_IN_ROW = 1
"""Likewise of each row of a list."""


def header_bounds(partitions: int = limits.PARTITIONS.cap) -> dict[int, tuple[int, int]]:
    """Code -> (fields, values in all) that the header of a request may have at most, where the broker has at most so
    many `partitions`: what its fields allow, and some more for later releases.
    """
    bounds = {}
    for command in COMMANDS:
        items = sum(values_of(kind, partitions) for kind in command.request.kinds)
        fields = 2 + len(command.request.kinds) + SPARE_FIELDS
        bounds[command.code] = fields, min(fields + items, limits.HEADER_ITEMS)
    return bounds


def values_of(kind: Kind, partitions: int) -> int:
    """How many msgpack values, lists and maps among them, a field of this kind has at most."""
    if isinstance(kind, Optional):
        return values_of(kind.kind, partitions)
    if isinstance(kind, ListOf):
        is_cap = kind.count == limits.PARTITIONS.cap and isinstance(kind.kind, Row)
        return 1 + (partitions if is_cap else kind.count) * values_of(kind.kind, partitions)
    if isinstance(kind, Row):
        return 1 + sum(values_of(each, partitions) for each in kind.kinds) + SPARE_IN_ROW
    return 1 + 4 * limits.MAP_ITEMS if isinstance(kind, Map) else 1


# Codes kept for what later releases do.
RESERVED: dict[range, str] = {
    range(75, 80): "more commands about schedules",
}


def reserved_for(code: int) -> str | None:
    """What a later release will do under this code, if it is one of those."""
    return next((what for codes, what in RESERVED.items() if code in codes), None)
