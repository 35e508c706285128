"""The state of the catalog (the broker's metadata log): topics, counters, groups with their offsets, schedules.

An entry is a msgpack array [kind, fields ...], one record of the catalog's log; docs/formats/catalog.md lists the
kinds. Replaying the same entries in the same order, from the first one or from a snapshot on, always leads to the same
state. An entry that does not fit the state is a sign of damage: applying it raises `ValueError`.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from operator import itemgetter
from typing import Any, Final, NamedTuple

from journal.errors import NewerFormat
from journal.record.block import Block
from journal.record.format import FLAG_FILLER, HEADER_SIZE, LEASED_ID_FIRST, records_of
from tfmq.bounded_msgpack import decoding, pack, unpack_stored

SNAPSHOT_VERSION: Final = 5
SNAPSHOT_WITH_JOURNAL: Final = 2
"""From this version on a snapshot has the transaction journal's id, and `CatalogState.applied_lsns`."""
SNAPSHOT_WITH_DELAY: Final = 3
"""From this version on a snapshot has the schedules, and the id of the delay store (the delayed messages on disk)."""
SNAPSHOT_WITH_OWNERS: Final = 4
"""From this version on a snapshot has the owner of each partition; before, one member of a group owned all of them."""
SNAPSHOT_WITH_NODE: Final = 5
"""From this version on a snapshot has the node's id."""

SNAPSHOT_NAME: Final = "the catalog's snapshot"

LEASE, CREATE, GROW, READY, DELETE, GONE, GENERATION, OFFSETS, TX_OFFSETS, JOURNAL, DELAY_STORE = range(1, 12)
SCHEDULE, SCHEDULE_GONE, SCHEDULE_STATE, GROUP_OWNERS, SETTINGS, GROUP_GONE, NODE, OWNERS_EXPIRED = range(12, 20)
KIND_MAX: Final = OWNERS_EXPIRED


class TopicState(StrEnum):
    CREATING = "creating"
    GROWING = "growing"
    OPEN = "open"
    DELETING = "deleting"


CREATING, GROWING, OPEN, DELETING = TopicState

ID_FIRST: Final = LEASED_ID_FIRST
"""The first id that may be leased. Lower ids are reserved for logs and records that the broker itself writes."""

LOST_IDS_MAX: Final = 1 << 20
"""If the catalog has lost its counter of ids, this number of ids after the highest known id is skipped, because those
ids may be in use. Ids have 40 bits, so that a million such repairs are possible."""

LEASE_SPACING_MS: Final = 600_000
"""All leases made within ten minutes are stored as one, with the time of the first. So an id may appear up to ten
minutes older than it is, and expires too early rather than too late."""

LEASES_MAX: Final = 4096
"""Number of stored leases, enough for at least four weeks. Older leases are dropped; their ids get the time 0."""


class TopicRow(NamedTuple):
    """One topic in the catalog.

    `partitions` is the number of existing partitions. `target` is the number that the topic will have; it is larger
    than `partitions` only while `state` is creating or growing. `settings` has the settings made for this topic only.
    """

    name: str
    incarnation: int
    partitions: int
    target: int
    state: str
    settings: dict[str, Any]


class CommittedOffset(NamedTuple):
    """The committed read position of a group in a partition: the group continues with the record at `offset`.

    `index`: how many messages of that record are acked; always 0, because a record is one message. `epoch`: the log's
    epoch. `generation`: the group's generation at the time of the commit.
    """

    offset: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not needed here
    epoch: int
    generation: int


Key = tuple[int, int]
"""(topic incarnation, partition). A new topic of the same name has another incarnation, so it inherits no offsets."""


class PartitionOwner(NamedTuple):
    """The member that owns a partition of a group, the generation that assigned it, the member's session timeout.

    `session_ms` is negative if the member has expired: then it is not restored at a start of the broker. It still owns
    the partition until another member gets it.
    """

    member: str
    generation: int
    session_ms: int

    @property
    def expired(self) -> bool:
        return self.session_ms < 0


class GroupState:
    """A group in the catalog: last generation, owners of partitions, committed offsets.

    `released` has partitions that their owner released before any offset was committed for them. Such a partition
    counts in the group's lag if the group has an offset in another partition of the topic. Otherwise it is not stored.
    """

    __slots__ = ("generation", "offsets", "owners", "released")

    def __init__(self, generation: int = 0) -> None:
        self.generation = generation
        self.owners: dict[Key, PartitionOwner] = {}
        self.offsets: dict[Key, CommittedOffset] = {}
        self.released: set[Key] = set()

    @property
    def owners_count(self) -> int:
        """The number of partitions in `owners` or `released`."""
        return len(self.owners) + len(self.released)

    def release(self, keys: Iterable[Key]) -> None:
        """Remove the owners of the partitions `keys`. Add those that still count in the lag to `released`."""
        topics = {incarnation for incarnation, _ in self.offsets}
        for key in keys:
            if self.owners.pop(key, None) is not None and key[0] in topics and key not in self.offsets:
                self.released.add(key)


class CatalogState:
    """The catalog's state: `topics` by incarnation, `groups` by name, counters and schedules."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.next_id = ID_FIRST
        self.generation = 0
        self.leases: list[tuple[int, int]] = []
        self.topics: dict[int, TopicRow] = {}
        self.groups: dict[str, GroupState] = {}
        self.offsets_count = 0
        self.owners_count = 0
        """Sums over all groups. `offsets_count`: the committed offsets. `owners_count`: `GroupState.owners_count`."""
        self.applied_lsns: dict[int, tuple[int, int]] = {}
        """Id of a transaction journal -> position (high, low) of its last commit whose group offsets are in this state.
        `high` is the LSN of the commit entry, `low` is 0."""
        self.journal_id = 0
        """Id of the transaction journal that belongs to this catalog; 0 before the journal exists."""
        self.delay_store = 0
        """Id of the delay store (delayed messages on disk) that belongs to this catalog; 0 before the store exists."""
        self.schedules = ScheduleTable()
        self.node = ""
        """The node's id, as in DATA/meta/version; "" in a catalog of an older version, which did not store that id."""

    def lease_time_ms(self, producer_id: int) -> int | None:
        """Return when the id was leased (wall clock, ms); None if it never was.

        The time may be up to LEASE_SPACING_MS too early. It is 0 if the lease is older than all stored leases.
        """
        if not ID_FIRST <= producer_id < self.next_id:
            return None
        found = bisect(self.leases, producer_id, key=itemgetter(0))
        return self.leases[found - 1][1] if found else 0

    # Changes by entries of the catalog's log

    def apply_entry(self, entry: Sequence[Any]) -> None:
        """Apply one entry. Raises ValueError if the entry does not fit the state, NewerFormat for an unknown kind."""
        kind, *fields = entry
        rule = self._ENTRY_RULES.get(kind)
        if rule is None:
            raise NewerFormat(f"catalog entry {kind!r}", kind if isinstance(kind, int) else 0, KIND_MAX)
        try:
            rule(self, *fields)
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"catalog entry {entry!r} does not fit: {error!r}") from error

    def _lease(self, next_id: int, time_ms: int) -> None:
        if next_id < self.next_id:
            raise ValueError(f"ids up to {self.next_id} are leased, and {next_id} is lower")
        if not self.leases or time_ms >= self.leases[-1][1] + LEASE_SPACING_MS:
            self.leases.append((self.next_id, time_ms))
            del self.leases[:-LEASES_MAX]
        self.next_id = next_id

    def _create(self, name: str, incarnation: int, target: int, settings: dict[str, Any]) -> None:
        if incarnation in self.topics:
            raise ValueError(f"incarnation {incarnation} is there already")
        self.topics[incarnation] = TopicRow(name, incarnation, 0, target, CREATING, settings)

    def _grow(self, incarnation: int, target: int) -> None:
        """Start to grow a topic to `target` partitions, or cancel a growth if `target` is the present number."""
        row = self.topics[incarnation]
        state = GROWING if target > row.partitions else OPEN
        self.topics[incarnation] = row._replace(target=target, state=state)

    def _ready(self, incarnation: int) -> None:
        row = self.topics[incarnation]
        self.topics[incarnation] = row._replace(partitions=row.target, state=OPEN)

    def _settings(self, incarnation: int, settings: dict[str, Any]) -> None:
        self.topics[incarnation] = self.topics[incarnation]._replace(settings=settings)

    def _delete(self, incarnation: int) -> None:
        self.topics[incarnation] = self.topics[incarnation]._replace(state=DELETING)

    def _topic_gone(self, incarnation: int) -> None:
        del self.topics[incarnation]
        for group in self.groups.values():
            self._count(group, -1)
            group.offsets = {key: offset for key, offset in group.offsets.items() if key[0] != incarnation}
            group.owners = {key: owner for key, owner in group.owners.items() if key[0] != incarnation}
            group.released = {key for key in group.released if key[0] != incarnation}
            self._count(group)

    def _generation(self, group: str, generation: int, member: str) -> None:
        """Set the group's generation and remove all owners. The field `member` is from older versions and ignored."""
        row = self._set_generation(group, generation)
        self._count(row, -1)
        row.release(list(row.owners))
        self._count(row)

    def _group_owners(self, group: str, generation: int, changes: Sequence[Sequence[Any]]) -> None:
        """Set owners. Each change is (new owner, session timeout, partitions). The new owner "" removes the owner."""
        row = self._set_generation(group, generation)
        self._count(row, -1)
        for member, session_ms, keys in changes:
            if not member:
                row.release((incarnation, partition) for incarnation, partition in keys)
                continue
            for incarnation, partition in keys:
                if incarnation in self.topics:
                    row.owners[incarnation, partition] = PartitionOwner(member, generation, session_ms)
                    row.released.discard((incarnation, partition))
        self._count(row)

    def _owners_expired(self, group: str, rows: Sequence[Sequence[Any]]) -> None:
        """Set whether owners have expired. Each row is (incarnation, partition, generation of the owner, expired)."""
        owners = self.groups[group].owners if group in self.groups else {}
        for incarnation, partition, generation, expired in rows:
            owner = owners.get((incarnation, partition))
            if owner is not None and owner.generation == generation:
                session_ms = abs(owner.session_ms)
                owners[incarnation, partition] = owner._replace(session_ms=-session_ms if expired else session_ms)

    def _group_gone(self, group: str) -> None:
        """Delete the group if it exists. The counter `generation` stays, so that no generation is used again."""
        row = self.groups.pop(group, None)
        if row is not None:
            self._count(row, -1)

    def _count(self, row: GroupState, sign: int = 1) -> None:
        """Add the group's counts to `offsets_count` and `owners_count`; if `sign` is -1, subtract them."""
        self.offsets_count += sign * len(row.offsets)
        self.owners_count += sign * row.owners_count

    def _set_generation(self, group: str, generation: int) -> GroupState:
        row = self.groups.setdefault(group, GroupState())
        row.generation = generation
        self.generation = max(self.generation, generation)
        return row

    def _offsets(self, group: str, generation: int, rows: Sequence[Sequence[int]]) -> None:
        row = self.groups.setdefault(group, GroupState())
        self.offsets_count -= len(row.offsets)
        self.owners_count -= row.owners_count
        for incarnation, partition, offset, index, epoch in rows:
            if incarnation in self.topics:
                row.offsets[incarnation, partition] = CommittedOffset(offset, index, epoch, generation)
                row.released.discard((incarnation, partition))
        self.offsets_count += len(row.offsets)
        self.owners_count += row.owners_count

    def _tx_offsets(self, journal_id: int, high: int, low: int, groups: Sequence[Sequence[Any]]) -> None:
        position = (high, low)
        if journal_id in self.applied_lsns and position <= self.applied_lsns[journal_id]:
            return
        for group, generation, rows in groups:
            self._offsets(group, generation, rows)
        self.applied_lsns[journal_id] = position

    _ENTRY_RULES: dict[int, Callable[..., None]] = {  # noqa: RUF012 - a table, never changed
        LEASE: _lease,
        CREATE: _create,
        GROW: _grow,
        READY: _ready,
        DELETE: _delete,
        GONE: _topic_gone,
        GENERATION: _generation,
        OFFSETS: _offsets,
        TX_OFFSETS: _tx_offsets,
        JOURNAL: lambda self, journal_id: setattr(self, "journal_id", journal_id),
        DELAY_STORE: lambda self, store_id: setattr(self, "delay_store", store_id),
        SCHEDULE: lambda self, *fields: self.schedules.add(*fields),
        SCHEDULE_GONE: lambda self, schedule_id: self.schedules.remove(schedule_id),
        SCHEDULE_STATE: lambda self, *fields: self.schedules.set_state(*fields),
        GROUP_OWNERS: _group_owners,
        SETTINGS: _settings,
        GROUP_GONE: _group_gone,
        NODE: lambda self, node: setattr(self, "node", node),
        OWNERS_EXPIRED: _owners_expired,
    }

    # The methods of journal.log.checkpoint.State

    def load(self, data: bytes) -> None:
        """Replace this state by that of a snapshot; b"" stands for the empty state. Raises ValueError, NewerFormat."""
        self._clear()
        if not data:
            return
        with decoding(SNAPSHOT_NAME):
            version, next_id, generation, leases, topics, groups, *later = unpack_stored(data)
            if version > SNAPSHOT_VERSION:
                raise NewerFormat(SNAPSHOT_NAME, version, SNAPSHOT_VERSION)
            self.next_id, self.generation = next_id, generation
            self.leases = [(first, time_ms) for first, time_ms in leases]
            self.topics = {fields[1]: TopicRow(*fields) for fields in topics}
            for name, number, owners, offsets in groups:
                row = self.groups[name] = GroupState(number)
                row.offsets = {(each[0], each[1]): CommittedOffset(*each[2:]) for each in offsets}
                if version >= SNAPSHOT_WITH_OWNERS:
                    row.owners = {(each[0], each[1]): PartitionOwner(*each[2:]) for each in owners}
            if version >= SNAPSHOT_WITH_JOURNAL:
                self.journal_id, applied, *later = later
                self.applied_lsns = {journal_id: (high, low) for journal_id, high, low in applied}
            if version >= SNAPSHOT_WITH_DELAY:
                self.delay_store, schedules, *later = later
                self.schedules = ScheduleTable(ScheduleRow(*fields) for fields in schedules)
            if version >= SNAPSHOT_WITH_NODE:
                self.node, *later = later
            for name, keys in later[0] if later else ():
                self.groups[name].released = {(incarnation, partition) for incarnation, partition in keys}
            for row in self.groups.values():
                self._count(row)

    def dump(self) -> bytes:
        groups = [
            (name, row.generation, _rows_by_key(row.owners), _rows_by_key(row.offsets))
            for name, row in self.groups.items()
        ]
        topics = list(self.topics.values())
        applied = [(journal_id, *position) for journal_id, position in self.applied_lsns.items()]
        before = (SNAPSHOT_VERSION, self.next_id, self.generation, self.leases, topics, groups)
        released = [(name, sorted(row.released)) for name, row in self.groups.items() if row.released]
        return pack((*before, self.journal_id, applied, self.delay_store, list(self.schedules), self.node, released))

    def apply(self, block: Block) -> None:
        """Apply the entries of one block of the log. Recovery calls this for each block after the snapshot."""
        for record in records_of(block.data):
            if not record.flag & FLAG_FILLER:
                body = block.data[record.position + HEADER_SIZE : record.position + record.size]
                self.apply_entry(unpack_stored(bytes(body)))


def _rows_by_key(values: Mapping[Key, tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [(*key, *value) for key, value in values.items()]


SCHEDULE_ROW_BYTES: Final = 512
"""Approximate memory of a schedule, in bytes, without its payload and attribute."""


class ScheduleRow(NamedTuple):
    """One schedule in the catalog.

    `id` is leased like a producer id and never reused: it is the source id of the schedule's appends, and the producer
    id of its records. Messages are sent to the partition `partition` of the topic's incarnation `incarnation`.
    `partition_wanted` is the partition that the client requested; None if the broker chose it. `attribute` is the
    encoded attribute of the records (key, tag, properties), or b"". If `payload` is None, tombstones are sent. For
    scheduled times up to and including `through_ms` no message is sent, even if none was sent for them before.
    """

    id: int
    name: str
    cron: str
    timezone: str
    topic: str
    partition_wanted: int | None
    attribute: bytes
    payload: bytes | None
    misfire: str
    made_ms: int
    incarnation: int
    partition: int
    through_ms: int
    paused: bool = False

    @property
    def size_bytes(self) -> int:
        """Approximate size in bytes, in memory and in each snapshot of the catalog."""
        return SCHEDULE_ROW_BYTES + len(self.attribute) + len(self.payload or b"")

    def same_definition(self, other: ScheduleRow) -> bool:
        """Return whether both schedules were added with the same parameters."""
        return self[1:9] == other[1:9]


class ScheduleTable:
    """The schedules of the catalog, by name and by id."""

    def __init__(self, rows: Iterable[ScheduleRow] = ()) -> None:
        self._by_id: dict[int, ScheduleRow] = {}
        self._ids: dict[str, int] = {}
        self.size_bytes = 0
        for row in rows:
            self._insert(row)

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[ScheduleRow]:
        yield from self._by_id.values()

    # Changes by entries of the catalog's log

    def add(self, *fields: Any) -> None:
        """Add a schedule, or replace the one of the same name. Raises ValueError if the id exists already."""
        row = ScheduleRow(*fields)
        if row.id in self._by_id:
            raise ValueError(f"the schedule {row.id} is there already")
        self.remove(self._ids.get(row.name, 0))
        self._insert(row)

    def remove(self, id: int) -> None:
        """Remove a schedule if it exists."""
        row = self._by_id.pop(id, None)
        if row is not None:
            del self._ids[row.name]
            self.size_bytes -= row.size_bytes

    def set_state(self, id: int, incarnation: int, partition: int, through_ms: int, paused: bool) -> None:
        """If the schedule exists, set all its fields that can change."""
        row = self._by_id.get(id)
        if row is not None:
            self._by_id[id] = row._replace(
                incarnation=incarnation, partition=partition, through_ms=through_ms, paused=paused
            )

    def _insert(self, row: ScheduleRow) -> None:
        self._by_id[row.id] = row
        self._ids[row.name] = row.id
        self.size_bytes += row.size_bytes
