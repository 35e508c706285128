"""Operations of the transaction journal: their fields, encoding and decoding.

A payload is one msgpack array. New fields are only added at its end: a reader ignores fields that it does not know, and
uses defaults for fields that an older writer omitted. docs/formats/operations.md has the table. Decoding a malformed
payload raises `ValueError` and nothing else.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgpack

from journal.wal import entry
from tfmq.apply_target import GroupPositions
from tfmq.bounded_msgpack import unpack_stored
from tfmq.transaction.requests import CommitGroupMember

PARTITION_OFFSET_FIELDS: Final = 5

Topics: TypeAlias = Sequence[tuple[int, str]]
"""(log id, topic name) of each target. The names are only for display: a later topic may have the same name."""


class Origin(NamedTuple):
    """Origin of a transaction: its name and the request that began it. Immutable.

    `xid`: the name; empty for a transaction of one TRANSACT frame. `local`: the transaction ends with its session.
    `producer_id` and `number` identify the begin request, so that a repeated request is recognised. `group`: the
    producer group for check-back. `owner`: the client, for display. `began_ms`: wall clock time.
    """

    xid: str
    local: bool
    producer_id: int
    number: int
    began_ms: int
    group: str = ""
    owner: str = ""
    member: CommitGroupMember | None = None


class PrepareRecord(NamedTuple):
    """Prepare record of a transaction.

    `messages`: the number of its messages, by which recovery finds out whether any are missing. `expires_ms`: wall
    clock time after which a member of a commit group may be rolled back; 0: never.
    """

    epoch: int
    time_ms: int
    origin: Origin
    topics: Topics
    offsets: Sequence[GroupPositions]
    messages: int
    expires_ms: int


class _Step(NamedTuple):
    epoch: int
    time_ms: int


class CommitRecord(_Step):
    """Commit decision of a prepared transaction."""


class RollbackRecord(_Step):
    """Rollback of a prepared transaction."""


class LocalCommitRecord(NamedTuple):
    """Commit decision of a transaction that was not prepared; it has most fields of a prepare record."""

    epoch: int
    time_ms: int
    origin: Origin
    topics: Topics
    offsets: Sequence[GroupPositions]
    messages: int


class LocalRollbackRecord(NamedTuple):
    """Rollback of an unprepared transaction."""

    epoch: int
    time_ms: int
    origin: Origin


class HeuristicCommitRecord(_Step):
    """An operator's commit decision of a prepared transaction."""


class HeuristicRollbackRecord(_Step):
    """An operator's rollback of a prepared transaction."""


class ForgetRecord(_Step):
    """An operator's request to forget a heuristic outcome."""


class EpochLeaseRecord(NamedTuple):
    """Lease of epochs: those below `end` may be in use. The first such record has the key of `Outcomes`."""

    end: int
    time_ms: int
    key: bytes


class GroupCommitRecord(NamedTuple):
    """Commits all `members` by one decision, and rolls back `dropped`; both are lists of epochs.

    The order of `members` defines the ordinals of their messages. `rows`: how many rows the writer has written; by this
    number, a repeated commit with other rows is detected. A record without members only rolls back transactions that
    have joined the group since its commit; it is written when the commit is repeated.
    """

    group: str
    sequence: int
    run: str
    rows: int
    members: Sequence[int]
    dropped: Sequence[int]
    time_ms: int


class GroupAbortRecord(NamedTuple):
    """Aborts `run`, unless `sequence` is committed, and rolls back the transactions with the epochs `dropped`."""

    group: str
    sequence: int
    run: str
    dropped: Sequence[int]
    time_ms: int


class GroupForgetRecord(NamedTuple):
    """An operator's request to forget the sequences of a commit group."""

    group: str
    time_ms: int


Operation: TypeAlias = (
    PrepareRecord
    | CommitRecord
    | RollbackRecord
    | LocalCommitRecord
    | LocalRollbackRecord
    | HeuristicCommitRecord
    | HeuristicRollbackRecord
    | ForgetRecord
    | EpochLeaseRecord
    | GroupCommitRecord
    | GroupAbortRecord
    | GroupForgetRecord
)


def _checked_fields(fields: Any, *kinds: type) -> Sequence[Any]:
    """Check the types of the first fields and return these; ignore fields of later versions. Raises TypeError."""
    if type(fields) is not tuple:
        raise TypeError(f"an array is expected, not {type(fields).__name__}")
    for value, kind in zip(fields, kinds, strict=False):
        if type(value) is not kind:
            raise TypeError(f"{kind.__name__} is expected, not {type(value).__name__}")
    found: Sequence[Any] = fields[: len(kinds)]
    return found


def unpack_origin(fields: Any) -> Origin:
    known = _checked_fields(fields, str, bool, int, int, int, str, str)
    origin = Origin(*known)
    member = fields[len(known)] if len(fields) > len(known) else None
    return (
        origin if member is None else origin._replace(member=CommitGroupMember(*_checked_fields(member, str, int, str)))
    )


def unpack_topics(rows: Sequence[Any]) -> tuple[tuple[int, str], ...]:
    found = []
    for row in rows:
        log_id, name = _checked_fields(row, int, str)
        found.append((log_id, name))
    return tuple(found)


def unpack_offsets(rows: Sequence[Any]) -> tuple[GroupPositions, ...]:
    found = []
    for row in rows:
        group, generation, places = _checked_fields(row, str, int, tuple)
        for partition in places:
            if len(_checked_fields(partition, int, int, int, int, int)) != PARTITION_OFFSET_FIELDS:
                raise TypeError("a group offset with too few fields")
        found.append(
            GroupPositions(group, generation, tuple(partition[:PARTITION_OFFSET_FIELDS] for partition in places))
        )
    return tuple(found)


def _unpack_epochs(found: Sequence[Any]) -> Sequence[int]:
    return _checked_fields(found, *[int] * len(found))


_TYPES: Final[dict[str, type]] = {
    **dict.fromkeys(("origin", "topics", "offsets", "members", "dropped"), tuple),
    **dict.fromkeys(("group", "run"), str),
    "key": bytes,
}
"""The types of the fields of a payload, by name; all others are `int`."""

_UNPACKERS: Final[dict[str, Any]] = {
    "origin": unpack_origin,
    "topics": unpack_topics,
    "offsets": unpack_offsets,
    "members": _unpack_epochs,
    "dropped": _unpack_epochs,
}
"""The functions that decode the fields that are not single values."""

KINDS: Final[dict[type[Any], int]] = {
    PrepareRecord: entry.PREPARE,
    CommitRecord: entry.COMMIT,
    RollbackRecord: entry.ROLLBACK,
    LocalCommitRecord: entry.LOCAL_COMMIT,
    LocalRollbackRecord: entry.LOCAL_ROLLBACK,
    HeuristicCommitRecord: entry.HEURISTIC_COMMIT,
    HeuristicRollbackRecord: entry.HEURISTIC_ROLLBACK,
    ForgetRecord: entry.FORGET,
    EpochLeaseRecord: entry.EPOCHS,
    GroupCommitRecord: entry.GROUP_COMMIT,
    GroupAbortRecord: entry.GROUP_ABORT,
    GroupForgetRecord: entry.GROUP_FORGET,
}
_RECORDS: Final = {kind: record for record, kind in KINDS.items()}

_SINGLE_TRANSACTION_KINDS: Final = frozenset(kind for kind in KINDS if "epoch" in kind._fields)
"""Operations on one transaction: its epoch is in the header of the journal entry, not in the payload."""

_pack: Final = msgpack.Packer(autoreset=True).pack


def pack(operation: Operation) -> tuple[int, int, bytes]:
    """Encode an operation as (kind, epoch or 0, payload) for the journal."""
    kind = type(operation)
    if kind in _SINGLE_TRANSACTION_KINDS:
        return KINDS[kind], operation[0], _pack(operation[1:])  # type: ignore[return-value]
    return KINDS[kind], 0, _pack(operation)


def unpack(kind: int, epoch: int, payload: bytes) -> Operation:
    """Decode the result of `pack`. Raises ValueError."""
    record = _RECORDS.get(kind)
    if record is None:
        raise ValueError(f"an operation of the unknown kind {kind}; a later version may know it")
    header = (epoch,) if record in _SINGLE_TRANSACTION_KINDS else ()
    names = record._fields[len(header) :]
    try:
        fields = _checked_fields(unpack_stored(payload), *[_TYPES.get(name, int) for name in names])
        decoded = [
            _UNPACKERS[name](value) if name in _UNPACKERS else value for name, value in zip(names, fields, strict=False)
        ]
        operation: Operation = record(*header, *decoded)
    except (ValueError, TypeError, IndexError) as error:
        raise ValueError(f"an operation of kind {kind} that does not fit: {error!r}") from error
    return operation
