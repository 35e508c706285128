"""Requests and replies of delayed messages, groups, schedules, topics and transactions.

Their codes are in `tfmq.protocol.commands`. The docstrings are the descriptions in docs/protocol.md.
"""

from itertools import pairwise
from typing import Annotated, Any, Final, NamedTuple

from tfmq import limits
from tfmq.errors import BadRequest
from tfmq.protocol.schema import (
    DUE_MAX,
    Boolean,
    ByteString,
    CommitMember,
    FencedPartitions,
    GrantedPartition,
    GrantedPartitions,
    Group,
    GroupOffsets,
    HeldPartitions,
    Incarnation,
    Integer,
    ListOf,
    Map,
    Member,
    Name,
    Number,
    Offset,
    Optional,
    Partition,
    PartitionNamesOrNil,
    PartitionOrNil,
    Partitions,
    PlainMap,
    ProducerId,
    Record,
    SavedOffsets,
    SentDelayed,
    SentOffsets,
    SessionMs,
    ShortText,
    Size,
    SubscriptionOrNil,
    Text,
    TimeMs,
    Topic,
    TopicRow,
    Topics,
    TransactionBatches,
    TransactionEpoch,
    TransactionName,
    TransactionOffsetRows,
    Xid,
)

# Delayed messages. A requested due time is a u64. If its top bit is set, the rest is a delay in ms from the time at
# which the broker accepts it; otherwise it is an absolute time, ms since 1970 by the wall clock. Replies have the
# effective due time: an absolute time of broker time.
HANDLE_BYTES: Final = 64
"""A handle has 59 characters (`tfmq.protocol.delayed_handle`); another kind may have some more."""
Handle = Annotated[str, Text(HANDLE_BYTES, empty=False)]
HandleOrNone = Annotated[str, Text(HANDLE_BYTES)]
Due = Annotated[int, Integer(0, (1 << 64) - 1, "u64")]


class Edges(ListOf):
    """Two or more times, each later than the previous one."""

    text = "list of u63, ascending"

    def __init__(self) -> None:
        super().__init__(Integer(0, DUE_MAX, "u63"), limits.DELAYED_HISTOGRAM_EDGES)

    def check(self, value: Any, name: str) -> list[int]:
        edges = super().check(value, name)
        if len(edges) < 2 or any(left >= right for left, right in pairwise(edges)):
            raise BadRequest(
                f"The field {name} must be a list of two moments or more, each later than the one before."
            )
        return edges


class CancelDelayed(NamedTuple):
    """Cancel a waiting message; the reply is sent once the result is durable.

    A repeat gets the first reply.
    """

    handle: Handle


class CancelDelayedReply(NamedTuple):
    state: ShortText


class RescheduleDelayed(NamedTuple):
    """Give a waiting message another due time, in one step.

    It gets a new handle, and the old one refers to it. A repeat reschedules it again; the last reply counts.
    """

    handle: Handle
    due: Due


class RescheduleDelayedReply(NamedTuple):
    state: ShortText
    handle: HandleOrNone


class ListDelayed(NamedTuple):
    """List waiting messages in order of due time.

    These have first_due <= due < end_due (the default includes the largest time) and follow the handle `after`; topic
    "", nil partition, nil key: all.
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


class DescribeDelayedReply(NamedTuple):
    description: PlainMap


class DelayedHistogram(NamedTuple):
    """Count the waiting messages between each edge and the next one; topic "": of all topics."""

    topic: Member
    edges: Annotated[list[int], Edges()]


class DelayedHistogramReply(NamedTuple):
    counts: Annotated[list[int], ListOf(Integer(0, (1 << 63) - 1, "u63"), limits.DELAYED_HISTOGRAM_EDGES)]
    pending: Number


# Commands of consumer groups

STICKY, RANGE, CONSISTENT_HASH = "sticky", "range", "consistent_hash"


class JoinGroup(NamedTuple):
    """Make the caller a member of the group without partitions.

    What a member of this name owned before is released. `member` is "" the first time, or a name chosen by
    the client, so that a repeat adds no second member. With `only` the member accepts only these partitions.
    The reply is sent once its assignment is durable.
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

    Waits up to `wait_ms` for a change of its assignment. What is left out of `held` is released.
    `subscription` is sent if it changed, or if the last reply had `forgotten` set.
    """

    group: Group
    member: Group
    generation: Number
    held: HeldPartitions
    wait_ms: Size = 0
    subscription: SubscriptionOrNil = None


class HeartbeatReply(NamedTuple):
    generation: Number
    assigned: Annotated[
        list[GrantedPartition] | None, Optional(ListOf(Record(GrantedPartition), limits.PARTITIONS.cap))
    ]
    note: ShortText
    forgotten: Boolean = False


class LeaveGroup(NamedTuple):
    """End the membership and release all partitions of the member."""

    group: Group
    member: Group
    generation: Number


class LeaveGroupReply(NamedTuple):
    left: Boolean


class CommitOffsets(NamedTuple):
    """Commit offsets of the group; the reply is sent once they are durable.

    Partitions that the member does not own (any more) are left out and named in `fenced`; if it owns none of them,
    the reply is the error `fenced`.
    """

    group: Group
    member: Member
    generation: Number
    offsets: GroupOffsets


class CommitOffsetsReply(NamedTuple):
    committed: Size
    fenced: FencedPartitions


class ReadOffsets(NamedTuple):
    """Read the committed offsets of the group, in the named partitions, or in all with nil."""

    group: Group
    partitions: PartitionNamesOrNil = None


class ReadOffsetsReply(NamedTuple):
    offsets: SavedOffsets


class ListGroups(NamedTuple):
    """List all groups."""


class ListGroupsReply(NamedTuple):
    groups: Annotated[list[dict[str, Any]], ListOf(Map(), limits.GROUPS.cap)]


class DescribeGroup(NamedTuple):
    """Describe one group: members and their partitions, generation, offsets with lag."""

    group: Group


class DescribeGroupReply(NamedTuple):
    description: PlainMap


class ResetGroup(NamedTuple):
    """Set the offsets of a group that has no live member."""

    group: Group
    offsets: GroupOffsets


class ResetGroupReply(NamedTuple):
    committed: Size


class DeleteGroup(NamedTuple):
    """Delete a group that has no live member, with all its offsets."""

    group: Group


class DeleteGroupReply(NamedTuple):
    deleted: Boolean


# Schedules: messages that the broker sends at the times of a cron expression.
#
# In replies a schedule is a map: name, id, cron, timezone, topic, partition, misfire, state (active, paused, waiting),
# trouble (why it waits), next_ms (0: none), last_ms (0: nothing sent yet), made_ms, size (of the payload), tag,
# properties (their number). The reply about one that is requested by name also has payload (nil: a tombstone) and
# attribute.

ScheduleName = Topic
"""Name of a schedule; the same rules as for topics."""


class AddSchedule(NamedTuple):
    """Add a schedule.

    From now on the body is sent to the topic at each time of the cron expression, in the time zone. A repeat with the
    same fields changes nothing. `attribute` is that of the records, without a born time.
    """

    name: ScheduleName
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
    """List schedules by name, starting after `after`; with `name` only that one."""

    name: Member = ""
    after: Member = ""
    limit: Annotated[int, Integer(1, limits.SCHEDULES_PER_PAGE)] = int(limits.SCHEDULES_PER_PAGE)


class ListSchedulesReply(NamedTuple):
    schedules: Annotated[list[dict[str, Any]], ListOf(Map(), limits.SCHEDULES_PER_PAGE)]
    more: Boolean


class PauseSchedule(NamedTuple):
    """Pause a schedule until it is resumed.

    Times in between do not count as missed.
    """

    name: ScheduleName


class PauseScheduleReply(NamedTuple):
    schedule: PlainMap


class ResumeSchedule(NamedTuple):
    """Resume a schedule with the next time from now.

    This also works if the wall clock was set back before its last sent time.
    """

    name: ScheduleName


class ResumeScheduleReply(NamedTuple):
    schedule: PlainMap


class RemoveSchedule(NamedTuple):
    """Remove a schedule.

    With `id` only if it has that id, so that a repeat cannot remove a newer one of the same name.
    """

    name: ScheduleName
    id: Number = 0


class RemoveScheduleReply(NamedTuple):
    removed: Boolean


# Commands about topics and partitions


class Metadata(NamedTuple):
    """List topics with their partitions.

    Unknown topics are left out, or created if `create` is set.
    """

    topics: Annotated[list[str] | None, Optional(ListOf(Name(), limits.TOPICS.cap))] = None
    create: Boolean = False


class MetadataReply(NamedTuple):
    topics: Annotated[list[TopicRow], ListOf(Record(TopicRow), limits.TOPICS.cap)]


class CreateTopic(NamedTuple):
    """Create a topic; nil partitions: the broker's default."""

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
    """Delete the topic with all its messages; `incarnation` 0: whichever has the name."""

    topic: Topic
    incarnation: Incarnation = 0


class DeleteTopicReply(NamedTuple):
    deleted: Boolean


class DescribeTopic(NamedTuple):
    """Describe one topic in full."""

    topic: Topic


class DescribeTopicReply(NamedTuple):
    description: PlainMap


class ResumePartition(NamedTuple):
    """Resume a partition that was stopped by a disk failure."""

    topic: Topic
    partition: Partition


class ResumePartitionReply(NamedTuple):
    state: ShortText


class Truncate(NamedTuple):
    """Delete messages before an offset, as far as whole segments allow."""

    topic: Topic
    incarnation: Incarnation
    partition: Partition
    before_offset: Offset


class TruncateReply(NamedTuple):
    first_offset: Offset


class SetTopic(NamedTuple):
    """Change settings of the topic; those in `unset` return to the server's values.

    Effective at once. `incarnation` 0: whichever has the name.
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

    With xid "" it is a local one, which ends with its connection and gets its name from the broker. A repeat gets the
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
    """Prepare a transaction (first phase).

    It is durable with all its content, and waits for its owner's decision.
    """

    xid: Xid
    epoch: TransactionEpoch
    ttl_ms: Annotated[
        int | None, Optional(Integer(1, limits.TRANSACTION_TTL_SECONDS.cap * 1000, "u63, not 0"))
    ]
    offsets: TransactionOffsetRows


class PrepareTransactionReply(NamedTuple):
    state: ShortText
    expires_ms: TimeMs


class CommitTransaction(NamedTuple):
    """Commit a prepared transaction, or with `one_phase` an unprepared one.

    `heuristic`: an operator commits it instead of its owner; with `force` also one that lost messages because
    the journal was damaged.
    """

    xid: Xid
    epoch: TransactionEpoch
    one_phase: Boolean
    heuristic: Boolean
    offsets: TransactionOffsetRows
    force: Boolean = False


class CommitTransactionReply(NamedTuple):
    state: ShortText
    dropped: Number
    offsets: SentOffsets
    delayed: SentDelayed = []  # noqa: RUF012 - never changed
    lost: Number = 0


class RollbackTransaction(NamedTuple):
    """Roll back a transaction; `heuristic`: an operator does it instead of the owner."""

    xid: Xid
    epoch: TransactionEpoch
    heuristic: Boolean = False


class RollbackTransactionReply(NamedTuple):
    state: ShortText


class ForgetTransaction(NamedTuple):
    """Discard a heuristic outcome that all participants know."""

    xid: Xid
    epoch: TransactionEpoch


class ForgetTransactionReply(NamedTuple):
    forgotten: Boolean


class ListTransactions(NamedTuple):
    """List unfinished transactions by epoch, starting after `after`.

    Nil states: those that need attention, which are prepared, applying, or ended by an operator.
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
    """Describe one transaction, live or remembered; epoch 0: the latest with that xid."""

    xid: Xid
    epoch: Number = 0


class DescribeTransactionReply(NamedTuple):
    description: PlainMap


class Transact(NamedTuple):
    """Run a whole local transaction in one frame: begin, sends and commit.

    It is transaction `number` of the producer `producer_id`. A repeat gets the first reply.
    """

    producer_id: ProducerId
    number: Number
    batches: TransactionBatches
    offsets: TransactionOffsetRows


class TransactReply(NamedTuple):
    state: ShortText
    epoch: Number
    dropped: Number
    offsets: SentOffsets
    repeated: Boolean
    delayed: SentDelayed = []  # noqa: RUF012 - never changed


class AwaitChecks(NamedTuple):
    """Wait up to `wait_ms` for prepared transactions whose owner must be asked (check-back).

    The reply has those of one producer group. CANCEL ends the wait.
    """

    group: Group
    wait_ms: Annotated[int, Integer(0, limits.FETCH_WAIT_MS.cap)]


class AwaitChecksReply(NamedTuple):
    checks: Maps


class CommitGroup(NamedTuple):
    """Commit prepared transactions together, all or none, as `sequence` of the commit group.

    Other members of the group with a sequence up to it are rolled back. A repeat gets the first reply.
    """

    group: Group
    sequence: Number
    run: Group
    transactions: Annotated[
        list[TransactionName], ListOf(Record(TransactionName), limits.COMMIT_GROUP_MEMBERS)
    ]
    rows: Number
    other_total: Boolean = False


class CommitGroupReply(NamedTuple):
    state: ShortText
    repeated: Boolean
    rows: Number
    dropped: Number


class AbortCommitGroup(NamedTuple):
    """Roll back the members that one run prepared for one sequence.

    No more of that run is accepted.
    """

    group: Group
    sequence: Number
    run: Group


class AbortCommitGroupReply(NamedTuple):
    state: ShortText


class ListCommitGroups(NamedTuple):
    """List commit groups by name, starting after `after`."""

    after: Member = ""
    limit: Page = int(limits.TRANSACTIONS_PER_PAGE)


class ListCommitGroupsReply(NamedTuple):
    groups: Maps
    more: Boolean


class ForgetCommitGroup(NamedTuple):
    """Delete the last sequence of a commit group.

    An old sequence would be accepted again.
    """

    group: Group


class ForgetCommitGroupReply(NamedTuple):
    forgotten: Boolean
