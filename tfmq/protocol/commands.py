"""The table of all commands: code, name, and the fields of request and reply.

Each request and reply is a NamedTuple: the annotation of a field contains its kind (the accepted values), its default
replaces a missing trailing field. `COMMANDS` assigns the codes; a code is never reused. The docstrings are the
descriptions in docs/protocol.md, which also explains how to add a command.
"""

from typing import Annotated, Any, NamedTuple

from tfmq import limits
from tfmq.protocol.messages import AbortCommitGroup as AbortCommitGroup
from tfmq.protocol.messages import AbortCommitGroupReply as AbortCommitGroupReply
from tfmq.protocol.messages import AddSchedule as AddSchedule
from tfmq.protocol.messages import AddScheduleReply as AddScheduleReply
from tfmq.protocol.messages import AwaitChecks as AwaitChecks
from tfmq.protocol.messages import AwaitChecksReply as AwaitChecksReply
from tfmq.protocol.messages import BeginTransaction as BeginTransaction
from tfmq.protocol.messages import BeginTransactionReply as BeginTransactionReply
from tfmq.protocol.messages import CancelDelayed as CancelDelayed
from tfmq.protocol.messages import CancelDelayedReply as CancelDelayedReply
from tfmq.protocol.messages import CommitGroup as CommitGroup
from tfmq.protocol.messages import CommitGroupReply as CommitGroupReply
from tfmq.protocol.messages import CommitOffsets as CommitOffsets
from tfmq.protocol.messages import CommitOffsetsReply as CommitOffsetsReply
from tfmq.protocol.messages import CommitTransaction as CommitTransaction
from tfmq.protocol.messages import CommitTransactionReply as CommitTransactionReply
from tfmq.protocol.messages import CreateTopic as CreateTopic
from tfmq.protocol.messages import CreateTopicReply as CreateTopicReply
from tfmq.protocol.messages import DelayedHistogram as DelayedHistogram
from tfmq.protocol.messages import DelayedHistogramReply as DelayedHistogramReply
from tfmq.protocol.messages import DeleteGroup as DeleteGroup
from tfmq.protocol.messages import DeleteGroupReply as DeleteGroupReply
from tfmq.protocol.messages import DeleteTopic as DeleteTopic
from tfmq.protocol.messages import DeleteTopicReply as DeleteTopicReply
from tfmq.protocol.messages import DescribeDelayed as DescribeDelayed
from tfmq.protocol.messages import DescribeDelayedReply as DescribeDelayedReply
from tfmq.protocol.messages import DescribeGroup as DescribeGroup
from tfmq.protocol.messages import DescribeGroupReply as DescribeGroupReply
from tfmq.protocol.messages import DescribeTopic as DescribeTopic
from tfmq.protocol.messages import DescribeTopicReply as DescribeTopicReply
from tfmq.protocol.messages import DescribeTransaction as DescribeTransaction
from tfmq.protocol.messages import DescribeTransactionReply as DescribeTransactionReply
from tfmq.protocol.messages import ForgetCommitGroup as ForgetCommitGroup
from tfmq.protocol.messages import ForgetCommitGroupReply as ForgetCommitGroupReply
from tfmq.protocol.messages import ForgetTransaction as ForgetTransaction
from tfmq.protocol.messages import ForgetTransactionReply as ForgetTransactionReply
from tfmq.protocol.messages import GrowTopic as GrowTopic
from tfmq.protocol.messages import GrowTopicReply as GrowTopicReply
from tfmq.protocol.messages import Heartbeat as Heartbeat
from tfmq.protocol.messages import HeartbeatReply as HeartbeatReply
from tfmq.protocol.messages import JoinGroup as JoinGroup
from tfmq.protocol.messages import JoinGroupReply as JoinGroupReply
from tfmq.protocol.messages import LeaveGroup as LeaveGroup
from tfmq.protocol.messages import LeaveGroupReply as LeaveGroupReply
from tfmq.protocol.messages import ListCommitGroups as ListCommitGroups
from tfmq.protocol.messages import ListCommitGroupsReply as ListCommitGroupsReply
from tfmq.protocol.messages import ListDelayed as ListDelayed
from tfmq.protocol.messages import ListDelayedReply as ListDelayedReply
from tfmq.protocol.messages import ListGroups as ListGroups
from tfmq.protocol.messages import ListGroupsReply as ListGroupsReply
from tfmq.protocol.messages import ListSchedules as ListSchedules
from tfmq.protocol.messages import ListSchedulesReply as ListSchedulesReply
from tfmq.protocol.messages import ListTransactions as ListTransactions
from tfmq.protocol.messages import ListTransactionsReply as ListTransactionsReply
from tfmq.protocol.messages import Metadata as Metadata
from tfmq.protocol.messages import MetadataReply as MetadataReply
from tfmq.protocol.messages import PauseSchedule as PauseSchedule
from tfmq.protocol.messages import PauseScheduleReply as PauseScheduleReply
from tfmq.protocol.messages import PrepareTransaction as PrepareTransaction
from tfmq.protocol.messages import PrepareTransactionReply as PrepareTransactionReply
from tfmq.protocol.messages import ReadOffsets as ReadOffsets
from tfmq.protocol.messages import ReadOffsetsReply as ReadOffsetsReply
from tfmq.protocol.messages import RemoveSchedule as RemoveSchedule
from tfmq.protocol.messages import RemoveScheduleReply as RemoveScheduleReply
from tfmq.protocol.messages import RescheduleDelayed as RescheduleDelayed
from tfmq.protocol.messages import RescheduleDelayedReply as RescheduleDelayedReply
from tfmq.protocol.messages import ResetGroup as ResetGroup
from tfmq.protocol.messages import ResetGroupReply as ResetGroupReply
from tfmq.protocol.messages import ResumePartition as ResumePartition
from tfmq.protocol.messages import ResumePartitionReply as ResumePartitionReply
from tfmq.protocol.messages import ResumeSchedule as ResumeSchedule
from tfmq.protocol.messages import ResumeScheduleReply as ResumeScheduleReply
from tfmq.protocol.messages import RollbackTransaction as RollbackTransaction
from tfmq.protocol.messages import RollbackTransactionReply as RollbackTransactionReply
from tfmq.protocol.messages import SetTopic as SetTopic
from tfmq.protocol.messages import SetTopicReply as SetTopicReply
from tfmq.protocol.messages import Transact as Transact
from tfmq.protocol.messages import TransactReply as TransactReply
from tfmq.protocol.messages import Truncate as Truncate
from tfmq.protocol.messages import TruncateReply as TruncateReply
from tfmq.protocol.schema import ACKS_NONE as ACKS_NONE
from tfmq.protocol.schema import ACKS_SYNCED as ACKS_SYNCED
from tfmq.protocol.schema import ACKS_WRITTEN as ACKS_WRITTEN
from tfmq.protocol.schema import DUE_MAX as DUE_MAX
from tfmq.protocol.schema import DUE_RELATIVE as DUE_RELATIVE
from tfmq.protocol.schema import EPOCH_UNKNOWN as EPOCH_UNKNOWN
from tfmq.protocol.schema import ORDINAL_UNKNOWN as ORDINAL_UNKNOWN
from tfmq.protocol.schema import SEQUENCE_NONE as SEQUENCE_NONE
from tfmq.protocol.schema import (
    Acks,
    Blocks,
    Boolean,
    DuesOrNil,
    Identity,
    Incarnation,
    Integer,
    Kind,
    ListOf,
    Map,
    Member,
    Number,
    Offset,
    Optional,
    Partition,
    PlainMap,
    Positions,
    ProducerId,
    Record,
    Sequence,
    ShortText,
    Signed,
    SignedSequence,
    Size,
    Text,
    TimeMs,
    Topic,
)
from tfmq.protocol.schema import Block as Block
from tfmq.protocol.schema import CommitMember as CommitMember
from tfmq.protocol.schema import DelayedBatch as DelayedBatch
from tfmq.protocol.schema import GrantedPartition as GrantedPartition
from tfmq.protocol.schema import GroupOffset as GroupOffset
from tfmq.protocol.schema import HeldPartition as HeldPartition
from tfmq.protocol.schema import PartitionName as PartitionName
from tfmq.protocol.schema import PartitionRow as PartitionRow
from tfmq.protocol.schema import Position as Position
from tfmq.protocol.schema import SavedOffset as SavedOffset
from tfmq.protocol.schema import Subscription as Subscription
from tfmq.protocol.schema import TopicRow as TopicRow
from tfmq.protocol.schema import TransactionBatch as TransactionBatch
from tfmq.protocol.schema import TransactionName as TransactionName
from tfmq.protocol.schema import TransactionOffsets as TransactionOffsets

MAGIC = "TFMQ"
VERSION_MIN = VERSION_MAX = 1

ACKS = {"none": ACKS_NONE, "written": ACKS_WRITTEN, "synced": ACKS_SYNCED}
DURABILITY = {ACKS_NONE: "none", ACKS_WRITTEN: "written", ACKS_SYNCED: "synced"}
# Values of the field `read` of FETCH: up to the durable offset, or to the end of what is written.
READ_FORCED, READ_WRITTEN = 0, 1
READ = {"forced": READ_FORCED, "written": READ_WRITTEN}
# Values of the field `by` of LOCATE.
BY_EARLIEST, BY_LATEST, BY_ORDINAL, BY_TIME_MS, BY_OFFSET = range(5)

# Commands about the connection and the broker


class Hello(NamedTuple):
    """Begin a connection.

    The client offers a range of versions; the broker selects the highest that both support.
    """

    magic: ShortText
    version_min: Size
    version_max: Size
    client: ShortText
    details: PlainMap


class HelloReply(NamedTuple):
    version: Size
    server: ShortText
    node: ShortText
    limits: PlainMap
    acks: Acks
    features: Annotated[list[str], ListOf(Text(), limits.MAP_ITEMS)]


class Ping(NamedTuple):
    """Do nothing; the reply has the broker's wall clock."""


class PingReply(NamedTuple):
    time_ms: TimeMs


class Status(NamedTuple):
    """Read the state of the broker."""


class StatusReply(NamedTuple):
    status: PlainMap


class Cancel(NamedTuple):
    """End a parked FETCH, AWAIT_CHECKS or HEARTBEAT of this connection.

    Its empty reply is sent at once.
    """

    target: Size


class CancelReply(NamedTuple):
    cancelled: Boolean


# Commands of producers


class LeaseProducerIds(NamedTuple):
    """Allocate producer ids that were never used before."""

    count: Annotated[int, Integer(1, limits.PRODUCER_IDS_PER_LEASE)] = 1  # type: ignore[assignment]


class LeaseProducerIdsReply(NamedTuple):
    first: ProducerId
    count: Size  # type: ignore[assignment]


class Produce(NamedTuple):
    """Append a batch of records, the body, to one partition: all of it or nothing.

    With `due` the records are stored until they are due, and appended then. With the epoch of an open transaction
    they become part of it: nothing is appended before the commit.
    """

    topic: Topic
    incarnation: Incarnation
    partition: Partition
    producer_id: ProducerId
    sequence: Sequence
    count: Annotated[int, Integer(1, limits.BATCH_RECORDS)]  # type: ignore[assignment]
    acks: Acks
    blocks: Blocks
    due: DuesOrNil = None
    transaction: Annotated[int | None, Optional(Integer(1, (1 << 63) - 1, "u63, not 0"))] = None


class ProduceReply(NamedTuple):
    positions: Positions
    durability: Acks
    repeated: Boolean
    append_time: TimeMs
    first_ordinal: Signed
    delayed: Annotated[DelayedBatch | None, Optional(Record(DelayedBatch))] = None


class SucceedProducer(NamedTuple):
    """Close a producer id on a partition for good.

    The reply has its last stored sequence and a new id to continue with. Topic "": an id for delayed messages, whose
    sequence spans all partitions.
    """

    topic: Member
    incarnation: Incarnation
    partition: Partition
    producer_id: ProducerId


class SucceedProducerReply(NamedTuple):
    successor_id: ProducerId
    last_sequence: SignedSequence
    durability: Acks


# Commands that read or find messages


class Fetch(NamedTuple):
    """Read whole blocks from the one that contains `offset` on.

    Wait up to `wait_ms` if there are none.
    """

    topic: Topic
    incarnation: Incarnation
    partition: Partition
    offset: Offset
    epoch: Signed = EPOCH_UNKNOWN
    max_bytes: Size = 256 * limits.KIB
    wait_ms: Size = 0
    read: Annotated[int, Integer(READ_FORCED, READ_WRITTEN)] = READ_FORCED
    tags: Annotated[list[int] | None, Optional(ListOf(Integer(1, 65_535), limits.FETCH_TAGS))] = None


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
    """Find an offset.

    `by` is 0 earliest, 1 latest (durable), 2 ordinal, 3 append time in ms, 4 record start at or before.
    """

    topic: Topic
    incarnation: Incarnation
    partition: Partition
    by: Annotated[int, Integer(BY_EARLIEST, BY_OFFSET)]
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
    """A command of the protocol: code, name, and the fields of its request and reply."""

    def __init__(self, code: int, request: type[Any], reply: type[Any], body: str = "", reply_body: str = ""):
        self.code = code
        self.request = Record(request)
        self.reply = Record(reply)
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
    Command(30, Fetch, FetchReply, reply_body="whole blocks"),
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
"""Fields of a later release that are allowed in each row of a list, and ignored."""


def header_bounds(partitions: int = limits.PARTITIONS.cap) -> dict[int, tuple[int, int]]:
    """Return for each command code how many fields and values its request header may have.

    The entry of a code is (fields, values in all) for a broker with at most `partitions` partitions: what the
    fields of the command allow, and some more for fields of later releases.
    """
    bounds = {}
    for command in COMMANDS:
        items = sum(values_of(kind, partitions) for kind in command.request.kinds)
        fields = 2 + len(command.request.kinds) + SPARE_FIELDS
        bounds[command.code] = fields, min(fields + items, limits.HEADER_ITEMS)
    return bounds


def values_of(kind: Kind, partitions: int) -> int:
    """Return how many msgpack values a field of this kind has at most; lists and maps count too."""
    if isinstance(kind, Optional):
        return values_of(kind.kind, partitions)
    if isinstance(kind, ListOf):
        is_cap = kind.count == limits.PARTITIONS.cap and isinstance(kind.kind, Record)
        return 1 + (partitions if is_cap else kind.count) * values_of(kind.kind, partitions)
    if isinstance(kind, Record):
        return 1 + sum(values_of(each, partitions) for each in kind.kinds) + SPARE_IN_ROW
    return 1 + 4 * limits.MAP_ITEMS if isinstance(kind, Map) else 1


# Command codes that are reserved for later releases, with what they will do.
RESERVED: dict[range, str] = {
    range(75, 80): "more commands about schedules",
}


def reserved_for(code: int) -> str | None:
    """Return what a later release will use this code for; None if it is not reserved."""
    return next((what for codes, what in RESERVED.items() if code in codes), None)
