"""The requests and replies of consumer groups; their codes stand with all others in `commands`."""

from typing import Annotated, Any, NamedTuple

from tfmq import limits
from tfmq.protocol.fields import ListOf, Map, Optional, Row
from tfmq.protocol.rows import (
    FencedPartitions,
    GrantedPartition,
    GrantedPartitions,
    Group,
    GroupOffsets,
    HeldPartitions,
    Member,
    Number,
    PartitionNamesOrNil,
    Plain,
    SavedOffsets,
    SessionMs,
    Size,
    SubscriptionOrNil,
    Topics,
    Words,
    Yes,
)

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
