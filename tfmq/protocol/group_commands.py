"""The requests and replies of consumer groups; their codes stand with all others in `commands`."""

from typing import Annotated, Any, NamedTuple

from tfmq import limits
from tfmq.protocol.fields import ListOf, Map, Optional, Row, Whole
from tfmq.protocol.rows import (
    Group,
    GroupOffsets,
    Member,
    Number,
    PartitionName,
    Plain,
    SavedOffsets,
    Size,
    Topics,
    Yes,
)


class JoinGroup(NamedTuple):
    """Makes the caller the group's member; `member` "" the first time, later the one it was given."""

    group: Group
    member: Member
    topics: Topics
    session_ms: Annotated[int, Whole(limits.SESSION_MS_MIN, limits.SESSION_MS.cap)] = int(limits.SESSION_MS)


class JoinGroupReply(NamedTuple):
    member: Group
    generation: Number


class Heartbeat(NamedTuple):
    """Keeps a member alive."""

    group: Group
    member: Group
    generation: Number


class HeartbeatReply(NamedTuple):
    rebalance: Yes


class LeaveGroup(NamedTuple):
    """Gives up the member's place."""

    group: Group
    member: Group
    generation: Number


class LeaveGroupReply(NamedTuple):
    left: Yes


class CommitOffsets(NamedTuple):
    """Saves where the group goes on; answered once it is on the disk."""

    group: Group
    member: Member
    generation: Number
    offsets: GroupOffsets


class CommitOffsetsReply(NamedTuple):
    committed: Size


class ReadOffsets(NamedTuple):
    """Where the group goes on, in the partitions named, or in all with nil."""

    group: Group
    partitions: Annotated[
        list[PartitionName] | None, Optional(ListOf(Row(PartitionName), limits.PARTITIONS.cap))
    ] = None


class ReadOffsetsReply(NamedTuple):
    offsets: SavedOffsets


class ListGroups(NamedTuple):
    """All groups."""


class ListGroupsReply(NamedTuple):
    groups: Annotated[list[dict[str, Any]], ListOf(Map(), limits.GROUPS.cap)]


class DescribeGroup(NamedTuple):
    """One group: members, generation, offsets with lag."""

    group: Group


class DescribeGroupReply(NamedTuple):
    description: Plain


class ResetGroup(NamedTuple):
    """Puts a group that has no live member to other offsets."""

    group: Group
    offsets: GroupOffsets


class ResetGroupReply(NamedTuple):
    committed: Size
