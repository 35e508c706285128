"""The table of all commands: code, name, and the fields of request and reply.

A request or a reply is a NamedTuple. The annotation of a field contains its kind, which defines the accepted values. If
fields are missing at the end of a received array, their defaults are used. `COMMANDS` assigns a code to each command; a
code is never reused. The docstrings are the descriptions in docs/protocol.md, which also explains how to add a command.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Final, NamedTuple

from tfmq import limits
from tfmq.errors import BadRequest
from tfmq.protocol.schema import ByteString, Flag, Integer, Kind, ListOf, Map, Name, Optional, Record, Text

# Field types and rows that several commands use. A field type is a Python type with the kind that validates its
# values.

# Values of the field `acks`: the durability that a PRODUCE request waits for, and that its reply reports. A reply may
# report one more, which no request asks for: what is durable is replicated where the broker replicates synchronously.
ACKS_NONE, ACKS_WRITTEN, ACKS_SYNCED, ACKS_REPLICATED = 0, 1, 2, 3
EPOCH_UNKNOWN = ORDINAL_UNKNOWN = -1

_U32 = Integer(0, (1 << 32) - 1, "u32")
_U63 = Integer(0, (1 << 63) - 1, "u63")

Size = Annotated[int, _U32]
Offset = Annotated[int, _U63]
Number = Annotated[int, _U63]
Signed = Annotated[int, Integer(-1, (1 << 63) - 1, "u63, or -1")]
TimeMs = Annotated[int, _U63]
Identity = Annotated[int, Integer(1, (1 << 64) - 1, "u64, not 0")]
Incarnation = Annotated[int, Integer(0, (1 << 40) - 1, "u40")]
ProducerId = Annotated[int, Integer(1, (1 << 40) - 1, "u40, not 0")]
Sequence = Annotated[int, Integer(0, (1 << 24) - 1, "u24")]
SignedSequence = Annotated[int, Integer(-1, (1 << 24) - 1, "u24, or -1")]
Partition = Annotated[int, Integer(0, (1 << 24) - 1, "u24")]
PartitionOrNil = Annotated[int | None, Optional(Integer(0, (1 << 24) - 1, "u24"))]
Partitions = Annotated[int, Integer(1, limits.PARTITIONS_PER_TOPIC.cap)]
Acks = Annotated[int, Integer(ACKS_NONE, ACKS_SYNCED)]
Durability = Annotated[int, Integer(ACKS_NONE, ACKS_REPLICATED)]
Topic = Annotated[str, Name()]
Group = Annotated[str, Name()]
Member = Annotated[str, Name(empty=True)]
ShortText = Annotated[str, Text()]
PlainMap = Annotated[dict[str, Any], Map()]
Boolean = Annotated[bool, Flag()]
# The epoch of a transaction is a number from the broker's counter, which is never reused. The xid is the transaction's
# name for users and other systems.
TransactionEpoch = Annotated[int, Integer(1, (1 << 63) - 1, "u63, not 0")]
Xid = Annotated[str, Text(limits.XID_BYTES, empty=False)]

# The due times of a batch: one u64 for each record. If its top bit is set, the other bits are a delay in ms from the
# time at which the broker accepts the message; otherwise the u64 is an absolute time, ms since 1970 by the wall clock.
DUE_RELATIVE = 1 << 63
DUE_MAX = DUE_RELATIVE - 1
DUE_BYTES = 8
_DUES = ByteString(DUE_BYTES * limits.BATCH_RECORDS_DELAYED, DUE_BYTES, "bin of one u64 a record")
TRACE_CONTEXT_BYTES: Final = 128
"""Maximum size of a trace context; version 00 of W3C's header `traceparent` has 55 characters."""
TraceContext = Annotated[str | None, Optional(Text(TRACE_CONTEXT_BYTES, empty=False))]
"""The W3C trace context (`traceparent`) of the span in which a client sends a request; nil without a span. The kind is
Optional, not a text that may be empty, because nil is accepted without a call."""
DuesOrNil = Annotated[bytes | None, Optional(_DUES)]


class Block(NamedTuple):
    """One block of a batch: whole records, with the CRC-32 of their bytes."""

    size: Annotated[int, Integer(1, (1 << 32) - 1, "u32, not 0")]
    count: Annotated[int, Integer(1, limits.BATCH_RECORDS, "u32, not 0")]  # type: ignore[assignment]
    crc: Size


class Position(NamedTuple):
    """Where a part of a batch was appended: consecutive records without a gap between them.

    The part begins with record number `first_record` of the batch, which is at `offset`. It ends before the next part.
    """

    first_record: Size
    offset: Offset


class PartitionRow(NamedTuple):
    partition: Partition
    state: ShortText


class TopicRow(NamedTuple):
    name: Topic
    incarnation: Incarnation
    partitions: Annotated[list[PartitionRow], ListOf(Record(PartitionRow), limits.PARTITIONS_PER_TOPIC.cap)]
    settings: PlainMap


class PartitionName(NamedTuple):
    topic: Topic
    partition: Partition


class GroupOffset(NamedTuple):
    """Committed offset of a group in one partition.

    `index`: how many messages inside the record at `offset` are acked; 0 unless the record contains a batch.
    """

    topic: Topic
    incarnation: Incarnation
    partition: Partition
    offset: Offset
    index: Size = 0  # type: ignore[assignment]
    epoch: Signed = EPOCH_UNKNOWN


class SavedOffset(NamedTuple):
    topic: Topic
    incarnation: Incarnation
    partition: Partition
    offset: Offset
    index: Size  # type: ignore[assignment]
    epoch: Signed
    generation: Number


class GrantedPartition(NamedTuple):
    """A partition assigned to a member; `grant` is the generation that assigned it."""

    topic: Topic
    incarnation: Incarnation
    partition: Partition
    grant: Number


class HeldPartition(NamedTuple):
    """A partition that a member still owns; `leaving`: whether the member knows that it is revoked."""

    topic: Topic
    incarnation: Incarnation
    partition: Partition
    leaving: Boolean = False


class TransactionBatch(NamedTuple):
    """One batch of a TRANSACT; its records are the next `size` bytes of the body."""

    topic: Topic
    incarnation: Incarnation
    partition: Partition
    sequence: Sequence
    count: Annotated[int, Integer(1, limits.BATCH_RECORDS)]  # type: ignore[assignment]
    size: Annotated[int, Integer(1, (1 << 32) - 1, "u32, not 0")]
    blocks: Annotated[list[Block], ListOf(Record(Block), limits.BATCH_BLOCKS)]
    due: DuesOrNil = None


class DelayedBatch(NamedTuple):
    """A delayed batch as it is stored.

    Message n of the batch has the number `first_number` + n and is due at entry n of `dues`.

    The handles of the messages are made from these fields.
    """

    store_id: Identity
    log_id: Identity
    first_number: Number
    dues: Annotated[bytes, _DUES]


class TransactionDelayed(NamedTuple):
    """A delayed batch of a transaction as it is stored.

    `batch` is the index of this batch among all batches of the transaction.

    The other fields are as in DelayedBatch. If `dues` has a single entry, this entry applies to all messages.
    """

    batch: Size
    store_id: Identity
    log_id: Identity
    first_number: Number
    dues: Annotated[bytes, _DUES]


class TransactionOffsets(NamedTuple):
    """Offsets that a consumer group commits with the transaction."""

    group: Group
    member: Member
    generation: Number
    offsets: Annotated[list[GroupOffset], ListOf(Record(GroupOffset), limits.OFFSETS_PER_COMMIT)]


class CommitMember(NamedTuple):
    """A transaction's membership in a commit group: its sequence, and the run that prepared it."""

    group: Group
    sequence: Number
    run: Group


class TransactionName(NamedTuple):
    xid: Xid
    epoch: TransactionEpoch


GrantedPartitions = Annotated[list[GrantedPartition], ListOf(Record(GrantedPartition), limits.PARTITIONS.cap)]
PartitionNamesOrNil = Annotated[
    list[PartitionName] | None, Optional(ListOf(Record(PartitionName), limits.PARTITIONS.cap))
]
SessionMs = Annotated[int, Integer(limits.SESSION_MS_MIN, limits.SESSION_MS.cap)]
Topics = Annotated[list[str], ListOf(Name(), limits.TOPICS.cap)]
Blocks = Annotated[list[Block], ListOf(Record(Block), limits.BATCH_BLOCKS)]
Positions = Annotated[list[Position], ListOf(Record(Position), limits.BATCH_BLOCKS)]
GroupOffsets = Annotated[list[GroupOffset], ListOf(Record(GroupOffset), limits.OFFSETS_PER_COMMIT)]
FencedPartitions = Annotated[list[PartitionName], ListOf(Record(PartitionName), limits.OFFSETS_PER_COMMIT)]
SavedOffsets = Annotated[list[SavedOffset], ListOf(Record(SavedOffset), limits.PARTITIONS.cap)]
HeldPartitions = Annotated[list[HeldPartition], ListOf(Record(HeldPartition), limits.PARTITIONS.cap)]
TransactionBatches = Annotated[list[TransactionBatch], ListOf(Record(TransactionBatch), limits.TRANSACT_BATCHES)]
TransactionOffsetRows = Annotated[
    list[TransactionOffsets], ListOf(Record(TransactionOffsets), limits.TRANSACTION_OFFSET_GROUPS)
]
SentDelayed = Annotated[list[TransactionDelayed], ListOf(Record(TransactionDelayed), limits.TRANSACT_BATCHES)]
SentOffsets = Annotated[list[int], ListOf(Integer(-1, (1 << 63) - 1, "u63, or -1"), limits.TRANSACTION_PIECES.cap)]


class Subscription(NamedTuple):
    """The topics of a group member, its session timeout and strategy.

    If `only` is not nil, the member accepts only the partitions in it.
    """

    topics: Topics
    session_ms: SessionMs
    strategy: ShortText
    only: PartitionNamesOrNil = None


SubscriptionOrNil = Annotated[Subscription | None, Optional(Record(Subscription))]

MAGIC = "TFMQ"
FEATURE_SCRAM = "scram-sha-256"
"""Feature in the reply to HELLO: the broker has users, and wants a login (AUTHENTICATE) before other requests."""
MECHANISM_SCRAM = "SCRAM-SHA-256"
FEATURE_REPLICATED = "replicated"
"""Feature in the list `features` of the details of HELLO: the client knows the durability 3 in replies."""
ROLE_PRIMARY, ROLE_STANDBY = "primary", "standby"
"""Values of `role` in the properties of the reply to HELLO, and in the map `replication` of the reply to STATUS."""
VERSION_MIN = VERSION_MAX = 1

ACKS = {"none": ACKS_NONE, "written": ACKS_WRITTEN, "synced": ACKS_SYNCED}
DURABILITY = {ACKS_NONE: "none", ACKS_WRITTEN: "written", ACKS_SYNCED: "synced", ACKS_REPLICATED: "replicated"}
# Values of the field `read` of FETCH: up to the durable offset, or to the end of what is written.
READ_FORCED, READ_WRITTEN = 0, 1
READ = {"forced": READ_FORCED, "written": READ_WRITTEN}
# Values of the field `by` of LOCATE.
BY_EARLIEST, BY_LATEST, BY_ORDINAL, BY_TIME_MS, BY_OFFSET = range(5)

# Replies of several commands


class StateReply(NamedTuple):
    state: ShortText


class DescriptionReply(NamedTuple):
    description: PlainMap


class ScheduleReply(NamedTuple):
    schedule: PlainMap


class ForgottenReply(NamedTuple):
    forgotten: Boolean


class DeletedReply(NamedTuple):
    deleted: Boolean


# Commands about the connection and the broker


class Hello(NamedTuple):
    """Begin a connection. The client offers a range of versions; the broker selects the highest that both support."""

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
    properties: Annotated[Mapping[str, Any], Map()] = {}


class Ping(NamedTuple):
    """Do nothing; the reply has the broker's wall clock."""


class PingReply(NamedTuple):
    time_ms: TimeMs


class Status(NamedTuple):
    """Read the state of the broker."""


class StatusReply(NamedTuple):
    status: PlainMap


class Cancel(NamedTuple):
    """End the wait of the FETCH, AWAIT_CHECKS or HEARTBEAT with the correlation number `target` on this connection.

    The broker then sends the reply to that request at once, without messages or changes.
    """

    target: Size


class CancelReply(NamedTuple):
    cancelled: Boolean


class Authenticate(NamedTuple):
    """Log in: one message of the client, answered with one of the broker, until `done`.

    The messages are those of the SASL mechanism SCRAM-SHA-256 (RFC 5802, RFC 7677). A broker with users names the
    mechanism in the features of its HELLO reply, and accepts no other command before the login is done.
    """

    mechanism: ShortText
    data: Annotated[bytes, ByteString(limits.LOGIN_MESSAGE_BYTES)]


class AuthenticateReply(NamedTuple):
    data: Annotated[bytes, ByteString(limits.LOGIN_MESSAGE_BYTES)]
    done: Boolean


class PromoteReplica(NamedTuple):
    """Request that this standby becomes primary: the present primary stops and hands over.

    The reply is sent when the request is stored where the primary finds it. STATUS then shows when it is done.
    """


# Commands of producers


class LeaseProducerIds(NamedTuple):
    """Allocate producer ids that were never used before."""

    count: Annotated[int, Integer(1, limits.PRODUCER_IDS_PER_LEASE)] = 1  # type: ignore[assignment]


class LeaseProducerIdsReply(NamedTuple):
    first: ProducerId
    count: Size  # type: ignore[assignment]


class Produce(NamedTuple):
    """Append a batch of records, the body, to one partition: all of it or nothing.

    If `due` is given, the records are stored until they are due, and appended then. If `transaction` is the epoch of an
    open transaction, the records become part of that transaction: nothing is appended before its commit.
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
    trace: TraceContext = None


class ProduceReply(NamedTuple):
    positions: Positions
    durability: Durability
    repeated: Boolean
    append_time: TimeMs
    first_ordinal: Signed
    delayed: Annotated[DelayedBatch | None, Optional(Record(DelayedBatch))] = None


class SucceedProducer(NamedTuple):
    """Close a producer id on a partition for good.

    The reply has the last stored sequence of that id, and a new id with which the client continues. Topic "" closes an
    id for delayed messages; the sequence of such an id spans all partitions.
    """

    topic: Member
    incarnation: Incarnation
    partition: Partition
    producer_id: ProducerId


class SucceedProducerReply(NamedTuple):
    successor_id: ProducerId
    last_sequence: SignedSequence
    durability: Durability


# Commands that read or find messages


class Fetch(NamedTuple):
    """Read whole blocks, beginning with the one that contains `offset`. Wait up to `wait_ms` if there is none."""

    topic: Topic
    incarnation: Incarnation
    partition: Partition
    offset: Offset
    epoch: Signed = EPOCH_UNKNOWN
    max_bytes: Size = 256 * limits.KIB
    wait_ms: Size = 0
    read: Annotated[int, Integer(READ_FORCED, READ_WRITTEN)] = READ_FORCED
    tags: Annotated[list[int] | None, Optional(ListOf(Integer(1, 65_535), limits.FETCH_TAGS))] = None
    trace: TraceContext = None


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
    """Find the offset of a record.

    `by` says which record: 0 the earliest one; 1 the end of the durable records; 2 the one with the ordinal `value`; 3
    the first one appended at the time `value` (ms since 1970) or later; 4 the one that starts at the offset `value`, or
    the last one before it.
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


# Delayed messages. A requested due time is a u64. If its top bit is set, the other bits are a delay in ms from the time
# at which the broker accepts the message; otherwise the u64 is an absolute time, ms since 1970 by the wall clock.
# Replies have the effective due time, an absolute time of broker time (the broker's clock that never goes back).
HANDLE_BYTES: Final = 64
"""Maximum size of a handle. Handles have 59 characters (`tfmq.protocol.delayed_handle`); a later kind may have more."""
Handle = Annotated[str, Text(HANDLE_BYTES, empty=False)]
HandleOrNone = Annotated[str, Text(HANDLE_BYTES)]
Due = Annotated[int, Integer(0, (1 << 64) - 1, "u64")]


class Edges(ListOf):
    """A list of two or more times, each later than the previous one."""

    text = "list of u63, ascending"

    def __init__(self) -> None:
        super().__init__(Integer(0, DUE_MAX, "u63"), limits.DELAYED_HISTOGRAM_EDGES)

    def check(self, value: Any, name: str) -> list[int]:
        edges = super().check(value, name)
        if len(edges) < 2 or any(left >= right for left, right in pairwise(edges)):
            raise BadRequest(f"The field {name} must be a list of two moments or more, each later than the one before.")
        return edges


class CancelDelayed(NamedTuple):
    """Cancel a waiting message. The reply is sent once the result is durable. A repeat gets the first reply."""

    handle: Handle


class RescheduleDelayed(NamedTuple):
    """Give a waiting message another due time, in one step.

    The message gets a new handle, and the old handle refers to the new one. A repeat of the command reschedules the
    message again; the handle in the last reply counts.
    """

    handle: Handle
    due: Due


class RescheduleDelayedReply(NamedTuple):
    state: ShortText
    handle: HandleOrNone


class ListDelayed(NamedTuple):
    """List waiting messages in order of due time.

    Listed are the messages with first_due <= due < end_due that follow the message with the handle `after`. The default
    of end_due includes the largest time. Topic "", partition nil and key nil stand for all topics, partitions and keys.
    """

    topic: Member = ""
    partition: PartitionOrNil = None
    key: Annotated[bytes | None, Optional(ByteString(limits.KEY_BYTES))] = None
    first_due: Number = 0
    end_due: Number = DUE_MAX
    after: HandleOrNone = ""
    limit: Annotated[int, Integer(1, limits.DELAYED_PER_PAGE)] = int(limits.DELAYED_PER_PAGE)


class ListDelayedReply(NamedTuple):
    delayed: Annotated[list[dict[str, Any]], ListOf(Map(), limits.DELAYED_PER_PAGE)]
    more: Boolean
    after: HandleOrNone = ""


class DescribeDelayed(NamedTuple):
    """Describe one delayed message, waiting or not."""

    handle: Handle


class DelayedHistogram(NamedTuple):
    """Count the waiting messages of the topic; with topic "", those of all topics.

    In the reply, `counts` has the messages due from each edge on and before the next one, `pending` all of them.
    """

    topic: Member
    edges: Annotated[list[int], Edges()]


class DelayedHistogramReply(NamedTuple):
    counts: Annotated[list[int], ListOf(Integer(0, (1 << 63) - 1, "u63"), limits.DELAYED_HISTOGRAM_EDGES)]
    pending: Number


# Commands of consumer groups

STICKY, RANGE, CONSISTENT_HASH = "sticky", "range", "consistent_hash"


class JoinGroup(NamedTuple):
    """Make the caller a member of the group, at first without partitions.

    `member` is "" the first time, or a name chosen by the client, so that a repeat adds no second member. Partitions
    that an earlier member of this name owned are released. If `only` is not nil, the member accepts only the partitions
    in it. The reply is sent once the member's assignment is durable.
    """

    group: Group
    member: Member
    topics: Topics
    session_ms: SessionMs = int(limits.SESSION_MS)
    strategy: ShortText = STICKY
    only: PartitionNamesOrNil = None


class JoinGroupReply(NamedTuple):
    member: Group
    generation: Number
    partitions: GrantedPartitions
    note: ShortText


class Heartbeat(NamedTuple):
    """Keep a member alive, and report in `held` the partitions that it has not released.

    A partition that is left out of `held` is released. The reply waits up to `wait_ms` for a change of the member's
    assignment. `subscription` is sent only if it changed, or if the last reply had `forgotten` set. `dead_letters`: how
    many messages have become dead letters at this member since it joined, for the broker's metrics.
    """

    group: Group
    member: Group
    generation: Number
    held: HeldPartitions
    wait_ms: Size = 0
    subscription: SubscriptionOrNil = None
    dead_letters: Number = 0


class HeartbeatReply(NamedTuple):
    generation: Number
    assigned: Annotated[
        list[GrantedPartition] | None, Optional(ListOf(Record(GrantedPartition), limits.PARTITIONS.cap))
    ]
    note: ShortText
    forgotten: Boolean = False


class LeaveGroup(NamedTuple):
    """End the membership and release all partitions of the member. `dead_letters`: as in HEARTBEAT."""

    group: Group
    member: Group
    generation: Number
    dead_letters: Number = 0


class LeaveGroupReply(NamedTuple):
    left: Boolean


class CommitOffsets(NamedTuple):
    """Commit offsets of the group; the reply is sent once they are durable.

    The offsets of partitions that the member does not own, or owns no more, are not committed; `fenced` names these
    partitions. If the member owns none of the partitions, the reply is the error `fenced`.
    """

    group: Group
    member: Member
    generation: Number
    offsets: GroupOffsets


class CommitOffsetsReply(NamedTuple):
    committed: Size
    fenced: FencedPartitions


class ReadOffsets(NamedTuple):
    """Read the committed offsets of the group in the named partitions, or with nil in all partitions."""

    group: Group
    partitions: PartitionNamesOrNil = None


class ReadOffsetsReply(NamedTuple):
    offsets: SavedOffsets


class ListGroups(NamedTuple):
    """List all groups that the user may see. `partial`: whether there may be others."""


class ListGroupsReply(NamedTuple):
    groups: Annotated[list[dict[str, Any]], ListOf(Map(), limits.GROUPS.cap)]
    partial: Boolean = False


class DescribeGroup(NamedTuple):
    """Describe one group: its members with their partitions, its generation, and its offsets with their lag."""

    group: Group


class ResetGroup(NamedTuple):
    """Set the offsets of a group that has no live member."""

    group: Group
    offsets: GroupOffsets


class ResetGroupReply(NamedTuple):
    committed: Size


class DeleteGroup(NamedTuple):
    """Delete a group that has no live member, with all its offsets."""

    group: Group


# Schedules: messages that the broker sends at the times of a cron expression.
#
# In replies a schedule is a map: name, id, cron, timezone, topic, partition, misfire, state (active, paused, waiting),
# trouble (why it waits), next_ms (0: none), last_ms (0: nothing sent yet), made_ms, size (of the payload), tag,
# properties (their number). If the request names one schedule, its map also has payload (nil: a tombstone) and
# attribute.


class AddSchedule(NamedTuple):
    """Add a schedule.

    From now on the broker sends the body as a message to the topic at each time of the cron expression, in the time
    zone. A repeat with the same fields changes nothing. `attribute` is the attribute of these messages' records,
    without a born time.
    """

    name: Topic
    cron: Annotated[str, Text(limits.CRON_BYTES, empty=False)]
    timezone: Annotated[str, Text(limits.CRON_BYTES, empty=False)]
    topic: Topic
    partition: PartitionOrNil = None
    misfire: ShortText = "one"
    attribute: Annotated[bytes, ByteString(limits.ATTRIBUTE_BYTES)] = b""
    tombstone: Boolean = False


class AddScheduleReply(NamedTuple):
    schedule: PlainMap
    made: Boolean


class ListSchedules(NamedTuple):
    """List schedules in order of their names: those after the name `after`, or if `name` is given, only this one."""

    name: Member = ""
    after: Member = ""
    limit: Annotated[int, Integer(1, limits.SCHEDULES_PER_PAGE)] = int(limits.SCHEDULES_PER_PAGE)


class ListSchedulesReply(NamedTuple):
    schedules: Annotated[list[dict[str, Any]], ListOf(Map(), limits.SCHEDULES_PER_PAGE)]
    more: Boolean


class PauseSchedule(NamedTuple):
    """Pause a schedule until it is resumed. Times during the pause do not count as missed."""

    name: Topic


class ResumeSchedule(NamedTuple):
    """Resume a schedule. It continues with the first time of its cron expression after now.

    This also works if the wall clock was set back to before the time of the last message that was sent.
    """

    name: Topic


class RemoveSchedule(NamedTuple):
    """Remove a schedule.

    If `id` is given, the schedule is removed only if it has that id: so a repeat cannot remove a newer schedule of the
    same name.
    """

    name: Topic
    id: Number = 0


class RemoveScheduleReply(NamedTuple):
    removed: Boolean


# Commands about topics and partitions


class Metadata(NamedTuple):
    """List topics with their partitions. Unknown topics are left out, or created if `create` is set."""

    topics: Annotated[list[str] | None, Optional(ListOf(Name(), limits.TOPICS.cap))] = None
    create: Boolean = False


class MetadataReply(NamedTuple):
    topics: Annotated[list[TopicRow], ListOf(Record(TopicRow), limits.TOPICS.cap)]


class CreateTopic(NamedTuple):
    """Create a topic. With nil partitions it has the broker's default number of partitions."""

    topic: Topic
    partitions: Annotated[int | None, Optional(Integer(1, limits.PARTITIONS_PER_TOPIC.cap))]
    settings: PlainMap


class CreateTopicReply(NamedTuple):
    incarnation: Incarnation
    partitions: Partitions


class GrowTopic(NamedTuple):
    """Increase the number of partitions to `partitions`."""

    topic: Topic
    partitions: Partitions


class GrowTopicReply(NamedTuple):
    partitions: Partitions


class DeleteTopic(NamedTuple):
    """Delete the topic with all its messages; `incarnation` 0 means the topic that has the name now."""

    topic: Topic
    incarnation: Incarnation = 0


class DescribeTopic(NamedTuple):
    """Describe one topic in full."""

    topic: Topic


class ResumePartition(NamedTuple):
    """Resume a partition that was stopped by a disk failure."""

    topic: Topic
    partition: Partition


class Truncate(NamedTuple):
    """Delete messages before an offset. Only whole segments are deleted, so some of these messages may remain."""

    topic: Topic
    incarnation: Incarnation
    partition: Partition
    before_offset: Offset


class TruncateReply(NamedTuple):
    first_offset: Offset


class SetTopic(NamedTuple):
    """Change settings of the topic. The settings named in `unset` get the server's values again.

    The change takes effect at once. `incarnation` 0 means the topic that has the name now.
    """

    topic: Topic
    incarnation: Incarnation
    settings: PlainMap
    unset: Annotated[list[str], ListOf(Text(), limits.MAP_ITEMS)]


class SetTopicReply(NamedTuple):
    settings: PlainMap


# Transactions and commit groups. A transaction is identified by its xid and its epoch, the number that
# BEGIN_TRANSACTION assigned: an xid may be reused, an epoch never, so that nothing of an ended transaction can affect
# a later one.

LISTED_STATES_MAX = 16
Page = Annotated[int, Integer(1, limits.TRANSACTIONS_PER_PAGE)]
Maps = Annotated[list[dict[str, Any]], ListOf(Map(), limits.TRANSACTIONS_PER_PAGE)]


class BeginTransaction(NamedTuple):
    """Begin transaction `number` of the producer `producer_id`.

    With xid "" the transaction is local: it ends with its connection, and the broker gives it a name. A repeat gets the
    first reply.
    """

    producer_id: ProducerId
    number: Number
    xid: Annotated[str, Text(limits.XID_BYTES)]
    timeout_ms: Annotated[int | None, Optional(Integer(1, (1 << 32) - 1, "u32, not 0"))]
    group: Member
    member: Annotated[CommitMember | None, Optional(Record(CommitMember))] = None


class BeginTransactionReply(NamedTuple):
    epoch: Number
    xid: Annotated[str, Text(limits.XID_BYTES)]
    state: ShortText
    timeout_ms: Size


class PrepareTransaction(NamedTuple):
    """Prepare a transaction (first phase). When the reply is sent, the transaction is durable with all its content.
    Then it waits for its owner's decision."""

    xid: Xid
    epoch: TransactionEpoch
    ttl_ms: Annotated[int | None, Optional(Integer(1, limits.TRANSACTION_TTL_SECONDS.cap * 1000, "u63, not 0"))]
    offsets: TransactionOffsetRows
    trace: TraceContext = None


class PrepareTransactionReply(NamedTuple):
    state: ShortText
    expires_ms: TimeMs


class CommitTransaction(NamedTuple):
    """Commit a prepared transaction, or with `one_phase` an unprepared one.

    With `heuristic` an operator commits the transaction instead of its owner. With `force` the transaction is committed
    even if it has lost messages because the journal was damaged.
    """

    xid: Xid
    epoch: TransactionEpoch
    one_phase: Boolean
    heuristic: Boolean
    offsets: TransactionOffsetRows
    force: Boolean = False
    trace: TraceContext = None


class CommitTransactionReply(NamedTuple):
    state: ShortText
    dropped: Number
    offsets: SentOffsets
    delayed: SentDelayed = []  # noqa: RUF012 - never changed
    lost: Number = 0


class RollbackTransaction(NamedTuple):
    """Roll back a transaction. With `heuristic` an operator does it instead of the owner."""

    xid: Xid
    epoch: TransactionEpoch
    heuristic: Boolean = False


class ForgetTransaction(NamedTuple):
    """Discard the record of a heuristic outcome, when all participants know it."""

    xid: Xid
    epoch: TransactionEpoch


class ListTransactions(NamedTuple):
    """List unfinished transactions in order of epoch, only those with an epoch higher than `after`.

    If `states` is nil, only transactions that need attention are listed: those that are prepared, applying, or ended by
    an operator.
    """

    states: Annotated[list[str] | None, Optional(ListOf(Text(32), LISTED_STATES_MAX))] = None
    after: Number = 0
    limit: Page = int(limits.TRANSACTIONS_PER_PAGE)
    group: Member = ""


class ListTransactionsReply(NamedTuple):
    transactions: Maps
    more: Boolean
    after: Number = 0


class DescribeTransaction(NamedTuple):
    """Describe a transaction that is unfinished, or has ended and is remembered. Epoch 0: the latest one of the xid.

    With xid "" the transaction is the one whose commit record is at `commit_lsn` in the transaction journal. Block
    trailers have this LSN. The journal deletes its records some time after the transactions are applied.
    """

    xid: Annotated[str, Text(limits.XID_BYTES)]
    epoch: Number = 0
    commit_lsn: Number = 0


class Transact(NamedTuple):
    """Run a whole local transaction in one frame: begin, sends and commit.

    The transaction is number `number` of the producer `producer_id`. A repeat gets the first reply.
    """

    producer_id: ProducerId
    number: Number
    batches: TransactionBatches
    offsets: TransactionOffsetRows
    trace: TraceContext = None


class TransactReply(NamedTuple):
    state: ShortText
    epoch: Number
    dropped: Number
    offsets: SentOffsets
    repeated: Boolean
    delayed: SentDelayed = []  # noqa: RUF012 - never changed


class AwaitChecks(NamedTuple):
    """Wait up to `wait_ms` for prepared transactions whose owner must be asked how they ended (check-back).

    The reply has such transactions of the producer group `group`. CANCEL ends the wait.
    """

    group: Group
    wait_ms: Annotated[int, Integer(0, limits.FETCH_WAIT_MS.cap)]


class AwaitChecksReply(NamedTuple):
    checks: Maps


class CommitGroup(NamedTuple):
    """Commit prepared transactions together, all or none, as `sequence` of the commit group.

    Other prepared transactions of the commit group with this or a lower sequence are rolled back. A repeat gets the
    first reply.
    """

    group: Group
    sequence: Number
    run: Group
    transactions: Annotated[list[TransactionName], ListOf(Record(TransactionName), limits.COMMIT_GROUP_MEMBERS)]
    rows: Number
    other_total: Boolean = False


class CommitGroupReply(NamedTuple):
    state: ShortText
    repeated: Boolean
    rows: Number
    dropped: Number


class AbortCommitGroup(NamedTuple):
    """Roll back the transactions that one run prepared for one sequence. Nothing more of that run is accepted."""

    group: Group
    sequence: Number
    run: Group


class ListCommitGroups(NamedTuple):
    """List commit groups in order of their names, only those after the name `after`."""

    after: Member = ""
    limit: Page = int(limits.TRANSACTIONS_PER_PAGE)


class ListCommitGroupsReply(NamedTuple):
    groups: Maps
    more: Boolean


class ForgetCommitGroup(NamedTuple):
    """Delete the record of a commit group's last sequence. After that an old sequence would be accepted again."""

    group: Group


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
    Command(5, Authenticate, AuthenticateReply),
    Command(6, PromoteReplica, StateReply),
    Command(10, Metadata, MetadataReply),
    Command(11, CreateTopic, CreateTopicReply),
    Command(12, GrowTopic, GrowTopicReply),
    Command(13, DeleteTopic, DeletedReply),
    Command(14, DescribeTopic, DescriptionReply),
    Command(15, ResumePartition, StateReply),
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
    Command(46, DescribeGroup, DescriptionReply),
    Command(47, ResetGroup, ResetGroupReply),
    Command(48, DeleteGroup, DeletedReply),
    Command(50, BeginTransaction, BeginTransactionReply),
    Command(51, PrepareTransaction, PrepareTransactionReply),
    Command(52, CommitTransaction, CommitTransactionReply),
    Command(53, RollbackTransaction, StateReply),
    Command(54, ForgetTransaction, ForgottenReply),
    Command(55, ListTransactions, ListTransactionsReply),
    Command(56, DescribeTransaction, DescriptionReply),
    Command(57, Transact, TransactReply, body="the records of its batches"),
    Command(58, AwaitChecks, AwaitChecksReply),
    Command(60, CancelDelayed, StateReply),
    Command(61, RescheduleDelayed, RescheduleDelayedReply),
    Command(62, ListDelayed, ListDelayedReply),
    Command(63, DescribeDelayed, DescriptionReply),
    Command(64, DelayedHistogram, DelayedHistogramReply),
    Command(70, AddSchedule, AddScheduleReply, body="the payload"),
    Command(71, ListSchedules, ListSchedulesReply),
    Command(72, PauseSchedule, ScheduleReply),
    Command(73, ResumeSchedule, ScheduleReply),
    Command(74, RemoveSchedule, RemoveScheduleReply),
    Command(80, CommitGroup, CommitGroupReply),
    Command(81, AbortCommitGroup, StateReply),
    Command(82, ListCommitGroups, ListCommitGroupsReply),
    Command(83, ForgetCommitGroup, ForgottenReply),
)
BY_CODE: dict[int, Command] = {command.code: command for command in COMMANDS}
BY_REQUEST: dict[type[Any], Command] = {command.request.shape: command for command in COMMANDS}

TRACED_REQUESTS: Final = frozenset({Produce, Fetch, PrepareTransaction, CommitTransaction, Transact})
"""The requests that may carry the trace context of the client's span."""

SPARE_FIELDS = 64
"""Maximum number of unknown fields in a request and its rows together. Fields of later releases are ignored."""

SPARE_IN_ROW = 1
"""Maximum number of unknown fields in a row of a list. Fields of later releases are ignored."""


def header_bounds(partitions: int = limits.PARTITIONS.cap) -> dict[int, tuple[int, int]]:
    """Return for each command code the maximum (number of fields, number of msgpack values in all) of a request header.

    A request may contain a row for each partition, so the numbers depend on `partitions`, the broker's limit of
    partitions. They leave room for SPARE_FIELDS fields that later releases may add.
    """
    bounds = {}
    for command in COMMANDS:
        items = sum(values_of(kind, partitions) for kind in command.request.kinds)
        fields = 2 + len(command.request.kinds) + SPARE_FIELDS
        bounds[command.code] = fields, min(fields + items, limits.HEADER_ITEMS)
    return bounds


def values_of(kind: Kind, partitions: int) -> int:
    """Return how many msgpack values a field of this kind has at most. A list or map is one value plus its entries."""
    if isinstance(kind, Optional):
        return values_of(kind.kind, partitions)
    if isinstance(kind, ListOf):
        is_cap = kind.count == limits.PARTITIONS.cap and isinstance(kind.kind, Record)
        return 1 + (partitions if is_cap else kind.count) * values_of(kind.kind, partitions)
    if isinstance(kind, Record):
        return 1 + sum(values_of(each, partitions) for each in kind.kinds) + SPARE_IN_ROW
    return 1 + 4 * limits.MAP_ITEMS if isinstance(kind, Map) else 1


# Command codes that are reserved for later releases, with what they will do.
RESERVED: dict[range, str] = {range(75, 80): "more commands about schedules"}


def reserved_for(code: int) -> str | None:
    """Return what a later release will use this code for; None if it is not reserved."""
    return next((what for codes, what in RESERVED.items() if code in codes), None)
