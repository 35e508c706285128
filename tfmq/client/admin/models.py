"""The broker's descriptions of topics, groups, transactions and commit groups, parsed from replies. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from tfmq.message import PartitionState

STATES: Final = (
    "open",
    "preparing",
    "prepared",
    "committing",
    "applying",
    "rolling_back",
    "heuristic_committed",
    "heuristic_rolled_back",
)
"""The states of the transactions that the broker can list: unfinished, or ended by an operator."""


class VerificationFinding(NamedTuple):
    """What the broker's background verification found wrong in a closed segment of a partition, or in its index.

    `file`: name of the segment file or index file. The range `first <= x < next` is in offsets of the partition, and in
    positions of the file if that is an index. `kind`: "damaged" (not the bytes that were written), "unreadable" (an
    error of the disk, or the file is missing), "inconsistent" (a whole block that contradicts the ones before it),
    "unverified" (left out because of too many findings before it), "index" (costs no message: the next start rebuilds
    it). `found_ms`: when it was first found, in ms since 1970.
    """

    file: str
    first: int
    next: int
    kind: str
    reason: str
    found_ms: int


class PartitionDescription(NamedTuple):
    """One partition.

    Offsets are byte positions, ordinals count the partition's messages, times are ms since 1970 (-1: none).

    `state`: "open", "stopped" (accepts no writes; `reason` is the cause) or "damaged" (`damage` has for each unreadable
    range its first offset, the offset after it, and the reason). `forced_offset`: the durable offset. `findings`: what
    the background verification found.
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
    findings: tuple[VerificationFinding, ...] = ()

    @property
    def messages(self) -> int:
        """The number of messages in the partition."""
        return self.end_ordinal - self.first_ordinal

    @property
    def is_lost(self) -> bool:
        """Whether the partition is stopped because its folder was missing at a start of the broker."""
        return self.state == PartitionState.STOPPED and self.reason.startswith("its folder was gone")

    @property
    def is_served(self) -> bool:
        """Whether the broker could open the partition."""
        return self.epoch > 0


class TopicDescription(NamedTuple):
    """One topic with all its partitions.

    `settings`: the settings made for this topic. `effective`: for each setting the value in use and its source:
    "topic", "default", or the part of the server's configuration that has the value.
    """

    name: str
    incarnation: int
    partitions: tuple[PartitionDescription, ...]
    settings: Mapping[str, Any]
    effective: Mapping[str, tuple[Any, str]] = {}

    @property
    def messages(self) -> int:
        """The number of messages in all partitions."""
        return sum(each.messages for each in self.partitions)

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self.partitions)


class LocatedPosition(NamedTuple):
    """A position (`offset`, `ordinal`, `epoch`) in a partition, and the partition's bounds. `ordinal` -1: unknown."""

    offset: int
    ordinal: int
    epoch: int
    first_offset: int
    end_offset: int
    forced_offset: int
    end_ordinal: int


class PurgeResult(NamedTuple):
    """The result of a purge.

    `first_offsets`: the first remaining offset of each partition. `moved`: the groups that were moved to these offsets.
    `left`: the groups whose next message was removed, but that could not be moved, because a member is alive or a
    transaction with the group's offsets has not ended.
    """

    first_offsets: Mapping[int, int]
    moved: tuple[str, ...]
    left: tuple[str, ...]


class GroupSummary(NamedTuple):
    """One group in a list.

    `members`: number of members. `live`: whether a member is alive. `partitions`: the number of partitions in which the
    group has a committed offset.
    """

    group: str
    generation: int
    members: int
    live: bool
    partitions: int


class GroupDescription(NamedTuple):
    """One group. `strategy`: the strategy in use; it is the strategy of the oldest member.

    Each of `members` (the oldest first) has the keys member, client, live, topics, strategy, session_ms, silent_ms (the
    time since its last heartbeat), partitions (its partitions by topic, without revoked ones), leaving (by topic, the
    partitions that are revoked from the member and not released yet), and note (why it has no partition or still waits
    for some, or "").

    Each of `offsets` has the keys topic, partition, member (the owner, or ""), offset (-1: none committed), index (the
    acked messages of the record at this offset: 0, because a record is one message), epoch, generation, end_offset, lag
    (number of messages that are not acked; -1: unknown).
    """

    group: str
    generation: int
    live: bool
    strategy: str
    members: tuple[Mapping[str, Any], ...]
    offsets: tuple[Mapping[str, Any], ...]

    @property
    def lag(self) -> int | None:
        """Number of messages that the group has not acked; None if the lag of any partition is unknown."""
        parts = [each.get("lag", -1) for each in self.offsets]
        return None if any(part < 0 for part in parts) else sum(parts)


def partition_description(row: Mapping[str, Any]) -> PartitionDescription:
    """Return the partition that `row` of a reply describes. Unknown fields are ignored."""
    known = {name: row[name] for name in PartitionDescription._fields if row.get(name) is not None}
    known["damage"] = tuple((first, next, reason) for first, next, reason in row.get("damage") or ())
    known["findings"] = tuple(verification_finding(each) for each in row.get("findings") or ())
    return PartitionDescription(**known)


def verification_finding(row: Mapping[str, Any]) -> VerificationFinding:
    """Return the finding that `row` of a reply describes. Unknown fields are ignored."""
    return VerificationFinding(**{name: row[name] for name in VerificationFinding._fields})


def topic_description(row: Mapping[str, Any]) -> TopicDescription:
    partitions = tuple(partition_description(each) for each in row["partitions"])
    effective = {key: (value, origin) for key, (value, origin) in row.get("effective", {}).items()}
    return TopicDescription(row["name"], row["incarnation"], partitions, row.get("settings", {}), effective)


def group_summary(row: Mapping[str, Any]) -> GroupSummary:
    generation, members = row.get("generation", 0), row.get("members", 0)
    return GroupSummary(row["group"], generation, members, row.get("live", False), row.get("partitions", 0))


def group_description(row: Mapping[str, Any]) -> GroupDescription:
    fields = (row["group"], row.get("generation", 0), row.get("live", False), row.get("strategy", ""))
    return GroupDescription(*fields, tuple(row.get("members", ())), tuple(row.get("offsets", ())))


class TransactionDescription(NamedTuple):
    """One transaction. Times are ms since 1970 (0: not yet, or never).

    `epoch`: the transaction's number. `state`: "open", "preparing", "prepared", "committing", "applying" (committed,
    but a partition accepts no writes yet), "committed", "rolled_back", "heuristic_committed", "heuristic_rolled_back",
    "read_only", "unknown". `group`: the producer group that the broker asks how the transaction ended. `owner`: the
    client that began it. `topics`: the topics of its messages; in a list of transactions only the first 8 by name.
    `expires_ms`: when a prepared transaction of a commit group times out. `details`: other fields of the reply.
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
    """The result of a commit or rollback by an operator.

    `state`: "committed", "applying" (committed, but a partition accepts no writes yet), "rolled_back",
    "heuristic_rolled_back" or "read_only" (it had neither messages nor offsets). `dropped`: number of messages whose
    topic was deleted. `lost`: number of messages lost to damage of the broker's transaction journal.
    """

    xid: str
    epoch: int
    state: str
    dropped: int
    lost: int = 0


class CommitGroupDescription(NamedTuple):
    """One commit group and its last committed sequence.

    `sequence`: the last committed sequence; -1: none. `run`: the attempt that committed this sequence. `rows`: the
    number of rows in this sequence. `details`: other fields of the reply.
    """

    group: str
    sequence: int = -1
    run: str = ""
    rows: int = 0
    details: Mapping[str, Any] = {}


class CommitGroupEnd(NamedTuple):
    """The result of COMMIT_GROUP.

    `state`: "committed" or "applying". `repeated`: whether the sequence was committed before; if so, `rows` is the
    number of rows of that earlier commit. `dropped`: number of messages whose topic was deleted.
    """

    state: str
    repeated: bool
    rows: int
    dropped: int


def transaction_description(row: Mapping[str, Any]) -> TransactionDescription:
    known, details = split_fields(row, TransactionDescription._fields)
    known["topics"] = tuple(known.get("topics", ()))
    return TransactionDescription(**known, details=details)


def commit_group_description(row: Mapping[str, Any]) -> CommitGroupDescription:
    known, details = split_fields(row, CommitGroupDescription._fields)
    return CommitGroupDescription(**known, details=details)


def split_fields(
    row: Mapping[str, Any], names: Sequence[str], size: str = "bytes"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two dicts: the fields of `row` that are in `names` and not None, and the fields that are not in `names`.

    `size`: the row's name for the field that is called `size_bytes` in the result.
    """
    known: dict[str, Any] = {}
    details: dict[str, Any] = {}
    for key, value in row.items():
        name = "size_bytes" if key == size else key
        (known if name in names and name != "details" else details)[name] = value
    return {name: value for name, value in known.items() if value is not None}, details
