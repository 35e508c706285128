"""What the broker tells about topics, partitions and groups, as values with names. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class PartitionDescription(NamedTuple):
    """One partition. Offsets are bytes, ordinals count messages, times are ms since 1970 (-1: none).

    `state` is "open", "stopped" (takes no writes; `reason` says why) or "damaged" (`damage` lists the ranges that
    cannot be read, each first offset, next offset, reason).
    """

    partition: int
    state: str
    reason: str = ""
    first_offset: int = 0
    end_offset: int = 0
    forced_offset: int = 0
    first_ordinal: int = 0
    end_ordinal: int = 0
    size_bytes: int = 0
    segments: int = 0
    epoch: int = 0
    oldest_ms: int = -1
    newest_ms: int = -1
    damage: tuple[tuple[int, int, str], ...] = ()

    @property
    def messages(self) -> int:
        """How many messages it holds."""
        return self.end_ordinal - self.first_ordinal

    @property
    def is_lost(self) -> bool:
        """Whether it is stopped because its folder was gone at a start of the broker."""
        return self.state == "stopped" and self.reason.startswith("its folder was gone")

    @property
    def is_served(self) -> bool:
        """Whether the broker could open it."""
        return self.epoch > 0


class TopicDescription(NamedTuple):
    """One topic with all its partitions. `settings`: what it has of its own; `effective`: what holds for it, key ->
    (value, where it is from: "topic", "default", or the place in the server's configuration).
    """

    name: str
    incarnation: int
    partitions: tuple[PartitionDescription, ...]
    settings: Mapping[str, Any]
    effective: Mapping[str, tuple[Any, str]] = {}

    @property
    def messages(self) -> int:
        """How many messages all partitions hold."""
        return sum(each.messages for each in self.partitions)

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self.partitions)


class Located(NamedTuple):
    """A place in a partition; `ordinal` is -1 where it is not known. The rest is how far the partition reaches."""

    offset: int
    ordinal: int
    epoch: int
    first_offset: int
    end_offset: int
    forced_offset: int
    end_ordinal: int


class Purged(NamedTuple):
    """What a purge left: the first offset of each partition; groups that were moved there (`moved`), and groups that
    stay at a message that is gone because a member is alive, or a transaction has their offsets in doubt (`left`).
    """

    first_offsets: Mapping[int, int]
    moved: tuple[str, ...]
    left: tuple[str, ...]


class GroupSummary(NamedTuple):
    """One group in a list: how many members it has, whether one lives, in how many partitions it has offsets."""

    group: str
    generation: int
    members: int
    live: bool
    partitions: int


class GroupDescription(NamedTuple):
    """One group, its members oldest first.

    `members`: member, client, live, topics, strategy, session_ms, silent_ms, partitions and leaving (numbers by topic:
    what it has and keeps, and what it is to give up), note (why it has less than it asked for). `offsets`: topic,
    partition, member (who has it, ""), offset (-1: nothing is saved yet), index, epoch, generation, end_offset, lag (in
    messages, all that are there where nothing is saved; -1: cannot be told). `strategy` is the one that holds: that of
    the oldest member.
    """

    group: str
    generation: int
    live: bool
    strategy: str
    members: tuple[Mapping[str, Any], ...]
    offsets: tuple[Mapping[str, Any], ...]

    @property
    def lag(self) -> int:
        """Messages that are not processed yet, in all partitions where that can be told."""
        return sum(max(0, each.get("lag", 0)) for each in self.offsets)


def partition_description(row: Mapping[str, Any]) -> PartitionDescription:
    """Of what the broker sent; fields that this release does not know are passed over."""
    known = {name: row[name] for name in PartitionDescription._fields if row.get(name) is not None}
    known["damage"] = tuple((first, next, reason) for first, next, reason in row.get("damage") or ())
    return PartitionDescription(**known)


def topic_description(row: Mapping[str, Any]) -> TopicDescription:
    """Of DESCRIBE_TOPIC's map."""
    partitions = tuple(partition_description(each) for each in row["partitions"])
    effective = {key: (value, origin) for key, (value, origin) in row.get("effective", {}).items()}
    return TopicDescription(row["name"], row["incarnation"], partitions, row.get("settings", {}), effective)


def group_summary(row: Mapping[str, Any]) -> GroupSummary:
    """Of one map of LIST_GROUPS."""
    return GroupSummary(
        row["group"],
        row.get("generation", 0),
        row.get("members", 0),
        row.get("live", False),
        row.get("partitions", 0),
    )


def group_description(row: Mapping[str, Any]) -> GroupDescription:
    """Of DESCRIBE_GROUP's map."""
    return GroupDescription(
        row["group"],
        row.get("generation", 0),
        row.get("live", False),
        row.get("strategy", ""),
        tuple(row.get("members", ())),
        tuple(row.get("offsets", ())),
    )


# What the broker tells about transactions and commit groups, as values with names. Pure.


class TransactionDescription(NamedTuple):
    """One transaction. Times are ms since 1970 (0: not yet, or never); `epoch` is its number, never given twice.

    `state`: "open", "preparing", "prepared", "committing", "applying" (decided, a target cannot be written yet),
    "committed", "rolled_back", "heuristic_committed", "heuristic_rolled_back", "read_only", "unknown". `group` is
    the producer group that is asked about it, `owner` the client that began it. `topics`: in a list the first ones.
    `expires_ms`: when a prepared member of a commit group ends by itself. `details`: whatever else the broker said.
    """

    xid: str
    epoch: int = 0
    state: str = "unknown"
    group: str = ""
    owner: str = ""
    began_ms: int = 0
    prepared_ms: int = 0
    age_seconds: float = 0.0
    size_bytes: int = 0
    messages: int = 0
    topics: tuple[str, ...] = ()
    expires_ms: int = 0
    commit_group: str = ""
    details: Mapping[str, Any] = {}


class TransactionEnd(NamedTuple):
    """What became of a decision: `state` "committed", "applying" (decided, finished when a target takes writes
    again), "rolled_back", "heuristic_rolled_back" or "read_only"; `dropped` messages whose
    topic is gone; `lost` ones that damage of the broker's transaction journal took.
    """

    xid: str
    epoch: int
    state: str
    dropped: int
    lost: int = 0


class CommitGroupDescription(NamedTuple):
    """One commit group: the last `sequence` that was committed (-1: none), by which `run`, with how many `rows`.
    `details`: whatever else the broker said.
    """

    group: str
    sequence: int = -1
    run: str = ""
    rows: int = 0
    details: Mapping[str, Any] = {}


class CommitGroupEnd(NamedTuple):
    """What COMMIT_GROUP answered: `state` "committed" or "applying", whether this is the first answer `repeated`, the
    total of `rows` that counts, and how many messages were `dropped` because their topic is gone.
    """

    state: str
    repeated: bool
    rows: int
    dropped: int


_WIRE_NAMES = {"bytes": "size_bytes"}


def transaction_description(row: Mapping[str, Any]) -> TransactionDescription:
    """Of one map of LIST_TRANSACTIONS or DESCRIBE_TRANSACTION."""
    known, details = _split(row, TransactionDescription._fields)
    known["topics"] = tuple(known.get("topics", ()))
    return TransactionDescription(**known, details=details)


def commit_group_description(row: Mapping[str, Any]) -> CommitGroupDescription:
    """Of one map of LIST_COMMIT_GROUPS."""
    known, details = _split(row, CommitGroupDescription._fields)
    return CommitGroupDescription(**known, details=details)


def _split(row: Mapping[str, Any], names: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(fields of those names, the rest); nil is as good as not said."""
    known: dict[str, Any] = {}
    details: dict[str, Any] = {}
    for key, value in row.items():
        name = _WIRE_NAMES.get(key, key)
        (known if name in names and name != "details" else details)[name] = value
    return {name: value for name, value in known.items() if value is not None}, details
