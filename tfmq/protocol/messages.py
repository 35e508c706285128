"""The requests and replies about messages that wait for their time; their codes stand with all others in `commands`.

A time to deliver at, a *due*, is a u64. Its top bit tells two kinds apart: set, the rest is a delay in ms from the
moment at which the broker takes it; not set, it is a moment, ms since 1970 by the wall clock. What the broker made
of it, and tells in replies, is the effective due time: a moment of broker time.
"""

from itertools import pairwise
from typing import Annotated, Any, Final, NamedTuple

from tfmq import limits
from tfmq.errors import BadRequest
from tfmq.protocol.schema import (
    DUE_MAX,
    CommitMember,
    FencedPartitions,
    GrantedPartition,
    GrantedPartitions,
    Group,
    GroupOffsets,
    HeldPartitions,
    Incarnation,
    ListOf,
    Map,
    Member,
    Name,
    Number,
    Octets,
    Offset,
    OffsetsInside,
    Optional,
    Partition,
    PartitionNamesOrNil,
    PartitionOrNil,
    Partitions,
    Plain,
    ProducerId,
    Row,
    SavedOffsets,
    SentDelayed,
    SentOffsets,
    SessionMs,
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
    Whole,
    Words,
    Xid,
    Yes,
)

HANDLE_BYTES: Final = 64
"""A handle has 59 characters (`handles`); another kind may have some more."""
Handle = Annotated[str, Text(HANDLE_BYTES, empty=False)]
HandleOrNone = Annotated[str, Text(HANDLE_BYTES)]
Due = Annotated[int, Whole(0, (1 << 64) - 1, "u64")]


class Edges(ListOf):
    """Two moments or more, each later than the one before."""

    text = "list of u63, ascending"

    def __init__(self) -> None:
        super().__init__(Whole(0, DUE_MAX, "u63"), limits.DELAYED_HISTOGRAM_EDGES)

    def check(self, value: Any, name: str) -> list[int]:
        edges = super().check(value, name)
        if len(edges) < 2 or any(left >= right for left, right in pairwise(edges)):
            raise BadRequest(
                f"The field {name} must be a list of two moments or more, each later than the one before."
            )
        return edges


class CancelDelayed(NamedTuple):
    """Takes back a message that waits for its time; answered once the outcome is on the disk. Repeated, it has the
    first answer.
    """

    handle: Handle


class CancelDelayedReply(NamedTuple):
    state: Words


class RescheduleDelayed(NamedTuple):
    """Gives a message that waits another time, in one step: it gets a new handle, to which the old one leads. Repeated,
    it moves the message once more; the last answer counts.
    """

    handle: Handle
    due: Due


class RescheduleDelayedReply(NamedTuple):
    state: Words
    handle: HandleOrNone


class ListDelayed(NamedTuple):
    """Waiting messages in the order of their turns, with first_due <= due < end_due (the default includes the last of
    times), from the one behind the handle `after` on; topic "", nil partition, nil key: all.
    """

    topic: Member = ""
    partition: PartitionOrNil = None
    key: Annotated[bytes | None, Optional(Octets(limits.KEY_BYTES))] = None
    first_due: Number = 0
    end_due: Number = DUE_MAX
    after: HandleOrNone = ""
    limit: Annotated[int, Whole(1, limits.DELAYED_PER_PAGE)] = int(limits.DELAYED_PER_PAGE)


class ListDelayedReply(NamedTuple):
    delayed: Annotated[list[dict[str, Any]], ListOf(Map(), limits.DELAYED_PER_PAGE)]
    more: Yes
    after: HandleOrNone = ""


class DescribeDelayed(NamedTuple):
    """One delayed message, waiting or not."""

    handle: Handle


class DescribeDelayedReply(NamedTuple):
    description: Plain


class DelayedHistogram(NamedTuple):
    """How many messages wait for the time between each edge and the next one; topic "": of all topics."""

    topic: Member
    edges: Annotated[list[int], Edges()]


class DelayedHistogramReply(NamedTuple):
    counts: Annotated[list[int], ListOf(Whole(0, (1 << 63) - 1, "u63"), limits.DELAYED_HISTOGRAM_EDGES)]
    pending: Number


# The requests and replies of consumer groups; their codes stand with all others in `commands`.

STICKY, RANGE, CONSISTENT_HASH = "sticky", "range", "consistent_hash"


class JoinGroup(NamedTuple):
    """Makes the caller a member of the group that holds no partition: what it held before is lost to it. `member` ""
    the first time, or a name of its own, so that a repeat makes no second member. With `only` it takes no other
    partitions. Answered once what it is given is on the disk.
    """

    group: Group
    member: Member
    topics: Topics
    session_ms: SessionMs = int(limits.SESSION_MS)
    strategy: Words = STICKY
    only: PartitionNamesOrNil = None


class JoinGroupReply(NamedTuple):
    member: Group
    generation: Number
    partitions: GrantedPartitions
    note: Words


class Heartbeat(NamedTuple):
    """Keeps a member alive, says what it still holds, and waits up to `wait_ms` for a change of its share. What it
    leaves out of `held` it gives up. It has the `subscription` if that changed, or if the last reply said that it was
    `forgotten`.
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
        list[GrantedPartition] | None, Optional(ListOf(Row(GrantedPartition), limits.PARTITIONS.cap))
    ]
    note: Words
    forgotten: Yes = False


class LeaveGroup(NamedTuple):
    """Gives up the member's place, and all partitions that it holds."""

    group: Group
    member: Group
    generation: Number


class LeaveGroupReply(NamedTuple):
    left: Yes


class CommitOffsets(NamedTuple):
    """Saves where the group goes on; answered once it is on the disk. Partitions that are not the member's (any more)
    are left out and named in `fenced`; where all are, the answer is the error `fenced`.
    """

    group: Group
    member: Member
    generation: Number
    offsets: GroupOffsets


class CommitOffsetsReply(NamedTuple):
    committed: Size
    fenced: FencedPartitions


class ReadOffsets(NamedTuple):
    """Where the group goes on, in the partitions named, or in all with nil."""

    group: Group
    partitions: PartitionNamesOrNil = None


class ReadOffsetsReply(NamedTuple):
    offsets: SavedOffsets


class ListGroups(NamedTuple):
    """All groups."""


class ListGroupsReply(NamedTuple):
    groups: Annotated[list[dict[str, Any]], ListOf(Map(), limits.GROUPS.cap)]


class DescribeGroup(NamedTuple):
    """One group: its members and what each has, generation, offsets with lag."""

    group: Group


class DescribeGroupReply(NamedTuple):
    description: Plain


class ResetGroup(NamedTuple):
    """Puts a group that has no live member to other offsets."""

    group: Group
    offsets: GroupOffsets


class ResetGroupReply(NamedTuple):
    committed: Size


class DeleteGroup(NamedTuple):
    """Forgets a group that has no live member, with all its offsets."""

    group: Group


class DeleteGroupReply(NamedTuple):
    deleted: Yes


# The requests and replies about schedules: messages that the broker sends by itself at the times of a cron
# expression. Their codes stand with all others in `commands`.
#
# A schedule, in replies, is a map: name, id, cron, timezone, topic, partition, misfire, state (active, paused,
# waiting), trouble (why it waits), next_ms (0: none), last_ms (0: nothing was sent yet), made_ms, size (of the
# payload), tag, properties (how many). The answer about one that is asked for by name has payload (nil: a tombstone)
# and attribute too.

ScheduleName = Topic
"""Of a schedule: letters and lengths as topics have them."""


class AddSchedule(NamedTuple):
    """Makes a schedule: from now on the body is sent to the topic at each time of the cron expression, in the time
    zone. Repeated in the same words it changes nothing. `attribute`: that of the records, without a time of birth.
    """

    name: ScheduleName
    cron: Annotated[str, Text(limits.CRON_BYTES, empty=False)]
    timezone: Annotated[str, Text(limits.CRON_BYTES, empty=False)]
    topic: Topic
    partition: PartitionOrNil = None
    misfire: Words = "one"
    attribute: Annotated[bytes, Octets(limits.ATTRIBUTE_BYTES)] = b""
    tombstone: Yes = False


class AddScheduleReply(NamedTuple):
    schedule: Plain
    made: Yes


class ListSchedules(NamedTuple):
    """Schedules in the order of their names, from the one behind `after` on; with `name` only that one."""

    name: Member = ""
    after: Member = ""
    limit: Annotated[int, Whole(1, limits.SCHEDULES_PER_PAGE)] = int(limits.SCHEDULES_PER_PAGE)


class ListSchedulesReply(NamedTuple):
    schedules: Annotated[list[dict[str, Any]], ListOf(Map(), limits.SCHEDULES_PER_PAGE)]
    more: Yes


class PauseSchedule(NamedTuple):
    """Sends nothing of it until it is resumed; times that pass meanwhile are not missed."""

    name: ScheduleName


class PauseScheduleReply(NamedTuple):
    schedule: Plain


class ResumeSchedule(NamedTuple):
    """Goes on with the next time from now, also where the wall clock was set back behind what it sent last."""

    name: ScheduleName


class ResumeScheduleReply(NamedTuple):
    schedule: Plain


class RemoveSchedule(NamedTuple):
    """Forgets it. With an `id` only if it is that one, so that a repeat cannot hit one made anew under the name."""

    name: ScheduleName
    id: Number = 0


class RemoveScheduleReply(NamedTuple):
    removed: Yes


# The requests and replies about topics and their partitions; their codes stand with all others in `commands`.


class Metadata(NamedTuple):
    """Topics with their partitions. Unknown topics are left out, or made where `create` asks for it."""

    topics: Annotated[list[str] | None, Optional(ListOf(Name(), limits.TOPICS.cap))] = None
    create: Yes = False


class MetadataReply(NamedTuple):
    topics: Annotated[list[TopicRow], ListOf(Row(TopicRow), limits.TOPICS.cap)]


class CreateTopic(NamedTuple):
    """Makes a topic; nil partitions: the broker's default."""

    topic: Topic
    partitions: Annotated[int | None, Optional(Whole(1, limits.PARTITIONS_PER_TOPIC.cap))]
    settings: Plain


class CreateTopicReply(NamedTuple):
    incarnation: Incarnation
    partitions: Partitions


class GrowTopic(NamedTuple):
    """Raises the number of partitions to `partitions`."""

    topic: Topic
    partitions: Partitions


class GrowTopicReply(NamedTuple):
    partitions: Partitions


class DeleteTopic(NamedTuple):
    """Deletes the topic with all its messages; `incarnation` 0: whichever bears the name."""

    topic: Topic
    incarnation: Incarnation = 0


class DeleteTopicReply(NamedTuple):
    deleted: Yes


class DescribeTopic(NamedTuple):
    """Everything about one topic."""

    topic: Topic


class DescribeTopicReply(NamedTuple):
    description: Plain


class ResumePartition(NamedTuple):
    """Lifts the stop of a partition whose disk failed."""

    topic: Topic
    partition: Partition


class ResumePartitionReply(NamedTuple):
    state: Words


class Truncate(NamedTuple):
    """Lets go of what lies before an offset, as far as whole segments allow."""

    topic: Topic
    incarnation: Incarnation
    partition: Partition
    before_offset: Offset


class TruncateReply(NamedTuple):
    first_offset: Offset


class SetTopic(NamedTuple):
    """Changes settings of the topic's own, those of `unset` back to what the server has; effective at once.
    `incarnation` 0: whichever bears the name.
    """

    topic: Topic
    incarnation: Incarnation
    settings: Plain
    unset: Annotated[list[str], ListOf(Text(), limits.MAP_ITEMS)]


class SetTopicReply(NamedTuple):
    settings: Plain


# The requests and replies of transactions and commit groups; their codes stand with all others in `commands`.
#
# A transaction is named by its xid and its epoch, the number that BEGIN_TRANSACTION gave it: an xid may come
# again, an epoch never, so what belongs to an ended transaction can never touch a later one of the same xid.

STATES_IN_LIST = 16
Page = Annotated[int, Whole(1, limits.TRANSACTIONS_PER_PAGE)]
Maps = Annotated[list[dict[str, Any]], ListOf(Map(), limits.TRANSACTIONS_PER_PAGE)]


class BeginTransaction(NamedTuple):
    """Begins a transaction, number `number` of the stream `producer_id`; with xid "" it is a local one, which
    ends with its connection and gets its name from the broker. Repeated, it has the first answer.
    """

    producer_id: ProducerId
    number: Number
    xid: Annotated[str, Text(limits.XID_BYTES)]
    timeout_ms: Annotated[int | None, Optional(Whole(1, (1 << 32) - 1, "u32, not 0"))]
    group: Member
    member: Annotated[CommitMember | None, Optional(Row(CommitMember))] = None


class BeginTransactionReply(NamedTuple):
    epoch: Number
    xid: Annotated[str, Text(limits.XID_BYTES)]
    state: Words
    timeout_ms: Size


class PrepareTransaction(NamedTuple):
    """The first phase: the transaction is on the disk with all it holds, and waits for its owner's word."""

    xid: Xid
    epoch: TransactionEpoch
    ttl_ms: Annotated[int | None, Optional(Whole(1, limits.TRANSACTION_TTL_SECONDS.cap * 1000, "u63, not 0"))]
    offsets: OffsetsInside


class PrepareTransactionReply(NamedTuple):
    state: Words
    expires_ms: TimeMs


class CommitTransaction(NamedTuple):
    """Commits a prepared transaction, or an unprepared one with `one_phase`; `heuristic`: an operator does, with
    `force` also one that lost messages with damage of the journal.
    """

    xid: Xid
    epoch: TransactionEpoch
    one_phase: Yes
    heuristic: Yes
    offsets: OffsetsInside
    force: Yes = False


class CommitTransactionReply(NamedTuple):
    state: Words
    dropped: Number
    offsets: SentOffsets
    delayed: SentDelayed = []  # noqa: RUF012 - never changed
    lost: Number = 0


class RollbackTransaction(NamedTuple):
    """Drops a transaction with all it holds; `heuristic`: an operator does."""

    xid: Xid
    epoch: TransactionEpoch
    heuristic: Yes = False


class RollbackTransactionReply(NamedTuple):
    state: Words


class ForgetTransaction(NamedTuple):
    """Lets go of a heuristic outcome that everybody concerned knows of."""

    xid: Xid
    epoch: TransactionEpoch


class ForgetTransactionReply(NamedTuple):
    forgotten: Yes


class ListTransactions(NamedTuple):
    """Unfinished transactions by epoch, from the one behind `after` on; nil states: those that need somebody,
    which are prepared, applying, or ended by an operator.
    """

    states: Annotated[list[str] | None, Optional(ListOf(Text(32), STATES_IN_LIST))] = None
    after: Number = 0
    limit: Page = int(limits.TRANSACTIONS_PER_PAGE)
    group: Member = ""


class ListTransactionsReply(NamedTuple):
    transactions: Maps
    more: Yes
    after: Number = 0


class DescribeTransaction(NamedTuple):
    """One transaction, live or remembered; epoch 0: the latest of that xid."""

    xid: Xid
    epoch: Number = 0


class DescribeTransactionReply(NamedTuple):
    description: Plain


class Transact(NamedTuple):
    """A whole local transaction in one frame: begin, sends and commit, number `number` of the stream
    `producer_id`. Repeated, it has the first answer.
    """

    producer_id: ProducerId
    number: Number
    batches: TransactionBatches
    offsets: OffsetsInside


class TransactReply(NamedTuple):
    state: Words
    epoch: Number
    dropped: Number
    offsets: SentOffsets
    repeated: Yes
    delayed: SentDelayed = []  # noqa: RUF012 - never changed


class AwaitChecks(NamedTuple):
    """Waits up to `wait_ms` for prepared transactions of a producer group whose owner must be asked; CANCEL
    ends the wait.
    """

    group: Group
    wait_ms: Annotated[int, Whole(0, limits.FETCH_WAIT_MS.cap)]


class AwaitChecksReply(NamedTuple):
    checks: Maps


class CommitGroup(NamedTuple):
    """Commits prepared transactions together, all or none, as `sequence` of the commit group; other members
    of the group with a sequence up to it are dropped. Repeated, it has the first answer.
    """

    group: Group
    sequence: Number
    run: Group
    transactions: Annotated[list[TransactionName], ListOf(Row(TransactionName), limits.COMMIT_GROUP_MEMBERS)]
    rows: Number
    other_total: Yes = False


class CommitGroupReply(NamedTuple):
    state: Words
    repeated: Yes
    rows: Number
    dropped: Number


class AbortCommitGroup(NamedTuple):
    """Drops the members that one run made for one sequence, and takes nothing more of that run."""

    group: Group
    sequence: Number
    run: Group


class AbortCommitGroupReply(NamedTuple):
    state: Words


class ListCommitGroups(NamedTuple):
    """Commit groups by name, from the one behind `after` on."""

    after: Member = ""
    limit: Page = int(limits.TRANSACTIONS_PER_PAGE)


class ListCommitGroupsReply(NamedTuple):
    groups: Maps
    more: Yes


class ForgetCommitGroup(NamedTuple):
    """Forgets the sequence that a commit group has reached: an old one would be taken again."""

    group: Group


class ForgetCommitGroupReply(NamedTuple):
    forgotten: Yes
