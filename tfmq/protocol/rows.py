"""The parts that several commands share: the types of single fields, and the rows that their lists hold.

Each type is the Python type together with its kind, what the wire may bring there.
"""

from typing import Annotated, Any, NamedTuple

from tfmq import limits
from tfmq.protocol.fields import Flag, ListOf, Map, Name, Octets, Optional, Row, Text, Whole

# What a send waits for, and what an answer says was reached.
ACKS_NONE, ACKS_WRITTEN, ACKS_SYNCED = 0, 1, 2
EPOCH_UNKNOWN = ORDINAL_UNKNOWN = SEQUENCE_NONE = -1

_U32 = Whole(0, (1 << 32) - 1, "u32")
_U63 = Whole(0, (1 << 63) - 1, "u63")

Size = Annotated[int, _U32]
Offset = Annotated[int, _U63]
Number = Annotated[int, _U63]
Signed = Annotated[int, Whole(-1, (1 << 63) - 1, "u63, or -1")]
TimeMs = Annotated[int, _U63]
Identity = Annotated[int, Whole(1, (1 << 64) - 1, "u64, not 0")]
Incarnation = Annotated[int, Whole(0, (1 << 40) - 1, "u40")]
ProducerId = Annotated[int, Whole(1, (1 << 40) - 1, "u40, not 0")]
Sequence = Annotated[int, Whole(0, (1 << 24) - 1, "u24")]
SignedSequence = Annotated[int, Whole(-1, (1 << 24) - 1, "u24, or -1")]
Partition = Annotated[int, Whole(0, (1 << 24) - 1, "u24")]
PartitionOrNil = Annotated[int | None, Optional(Whole(0, (1 << 24) - 1, "u24"))]
Partitions = Annotated[int, Whole(1, limits.PARTITIONS_PER_TOPIC.cap)]
Acks = Annotated[int, Whole(ACKS_NONE, ACKS_SYNCED)]
Topic = Annotated[str, Name()]
Group = Annotated[str, Name()]
Member = Annotated[str, Name(empty=True)]
Words = Annotated[str, Text()]
Plain = Annotated[dict[str, Any], Map()]
Yes = Annotated[bool, Flag()]
# The number of a transaction from the broker's one counter, never given twice; and the name that people and
# other systems give it.
TransactionEpoch = Annotated[int, Whole(1, (1 << 63) - 1, "u63, not 0")]
Xid = Annotated[str, Text(limits.XID_BYTES, empty=False)]

# When messages are due, u64 each, as many as there are records. The top bit says that the rest is a delay in ms,
# counted from the moment at which the broker takes it; else it is a moment, ms since 1970 by the wall clock.
DUE_RELATIVE = 1 << 63
DUE_MAX = DUE_RELATIVE - 1
DUE_BYTES = 8
_DUES = Octets(DUE_BYTES * limits.BATCH_RECORDS_DELAYED, DUE_BYTES, "bin of one u64 a record")
DuesOrNil = Annotated[bytes | None, Optional(_DUES)]


class Block(NamedTuple):
    """One block of a batch: whole records, with the CRC-32 of all their bytes."""

    size: Annotated[int, Whole(1, (1 << 32) - 1, "u32, not 0")]
    count: Annotated[int, Whole(1, limits.BATCH_RECORDS, "u32, not 0")]  # type: ignore[assignment]
    crc: Size


class Position(NamedTuple):
    """From record `first_record` of the batch on, records lie back to back starting at `offset`."""

    first_record: Size
    offset: Offset


class PartitionRow(NamedTuple):
    partition: Partition
    state: Words


class TopicRow(NamedTuple):
    name: Topic
    incarnation: Incarnation
    partitions: Annotated[list[PartitionRow], ListOf(Row(PartitionRow), limits.PARTITIONS_PER_TOPIC.cap)]
    settings: Plain


class PartitionName(NamedTuple):
    topic: Topic
    partition: Partition


class GroupOffset(NamedTuple):
    """Where a group goes on: at `offset`, behind `index` messages of the record there (0 outside of
    batches).
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
    """A partition that a member of a group has; `grant` is the generation under which it was given."""

    topic: Topic
    incarnation: Incarnation
    partition: Partition
    grant: Number


class HeldPartition(NamedTuple):
    """A partition that a member still works on; `leaving` says that it knows that this is to end."""

    topic: Topic
    incarnation: Incarnation
    partition: Partition
    leaving: Yes = False


class TransactionBatch(NamedTuple):
    """One batch of a TRANSACT: the next `size` bytes of the body."""

    topic: Topic
    incarnation: Incarnation
    partition: Partition
    sequence: Sequence
    count: Annotated[int, Whole(1, limits.BATCH_RECORDS)]  # type: ignore[assignment]
    size: Annotated[int, Whole(1, (1 << 32) - 1, "u32, not 0")]
    blocks: Annotated[list[Block], ListOf(Row(Block), limits.BATCH_BLOCKS)]
    due: DuesOrNil = None


class DelayedBatch(NamedTuple):
    """A delayed batch as the broker took it: message n has the number `first_number` + n, and is due at number n of
    `dues`. A message's handle is made of these.
    """

    store_id: Identity
    log_id: Identity
    first_number: Number
    dues: Annotated[bytes, _DUES]


class TransactionDelayed(NamedTuple):
    """The delayed batch with that index among all of a transaction, as the broker took it: as DelayedBatch, but one due
    time alone is that of all its messages.
    """

    batch: Size
    store_id: Identity
    log_id: Identity
    first_number: Number
    dues: Annotated[bytes, _DUES]


class TransactionOffsets(NamedTuple):
    """Where a consumer group goes on once the transaction is committed."""

    group: Group
    member: Member
    generation: Number
    offsets: Annotated[list[GroupOffset], ListOf(Row(GroupOffset), limits.OFFSETS_PER_COMMIT)]


class CommitMember(NamedTuple):
    """What a transaction is a member of: the commit group, its sequence there, and the run that made it."""

    group: Group
    sequence: Number
    run: Group


class TransactionName(NamedTuple):
    xid: Xid
    epoch: TransactionEpoch


GrantedPartitions = Annotated[list[GrantedPartition], ListOf(Row(GrantedPartition), limits.PARTITIONS.cap)]
PartitionNamesOrNil = Annotated[
    list[PartitionName] | None, Optional(ListOf(Row(PartitionName), limits.PARTITIONS.cap))
]
SessionMs = Annotated[int, Whole(limits.SESSION_MS_MIN, limits.SESSION_MS.cap)]
Topics = Annotated[list[str], ListOf(Name(), limits.TOPICS.cap)]
Blocks = Annotated[list[Block], ListOf(Row(Block), limits.BATCH_BLOCKS)]
Positions = Annotated[list[Position], ListOf(Row(Position), limits.BATCH_BLOCKS)]
GroupOffsets = Annotated[list[GroupOffset], ListOf(Row(GroupOffset), limits.OFFSETS_PER_COMMIT)]
FencedPartitions = Annotated[list[PartitionName], ListOf(Row(PartitionName), limits.OFFSETS_PER_COMMIT)]
SavedOffsets = Annotated[list[SavedOffset], ListOf(Row(SavedOffset), limits.PARTITIONS.cap)]
HeldPartitions = Annotated[list[HeldPartition], ListOf(Row(HeldPartition), limits.PARTITIONS.cap)]
TransactionBatches = Annotated[list[TransactionBatch], ListOf(Row(TransactionBatch), limits.TRANSACT_BATCHES)]
OffsetsInside = Annotated[
    list[TransactionOffsets], ListOf(Row(TransactionOffsets), limits.TRANSACTION_OFFSET_GROUPS)
]
SentDelayed = Annotated[list[TransactionDelayed], ListOf(Row(TransactionDelayed), limits.TRANSACT_BATCHES)]
SentOffsets = Annotated[
    list[int], ListOf(Whole(-1, (1 << 63) - 1, "u63, or -1"), limits.TRANSACTION_PIECES.cap)
]


class Subscription(NamedTuple):
    """What a member of a group asked for when it joined."""

    topics: Topics
    session_ms: SessionMs
    strategy: Words
    only: PartitionNamesOrNil = None


SubscriptionOrNil = Annotated[Subscription | None, Optional(Row(Subscription))]
