"""Operations of the transaction journal: their fields, encoding and decoding.

A payload is one msgpack array. New fields are only added at its end: a reader ignores fields that it does not know, and
uses defaults for fields that an older writer omitted. docs/formats/operations.md lists all fields. Decoding a malformed
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
"""(log id, topic name) of each target partition. The log id identifies the topic; the name is only for display."""


class Origin(NamedTuple):
    """Origin of a transaction: its name and the request that began the transaction. Immutable.

    `xid`: the name; empty for a transaction of one TRANSACT frame. `local`: the transaction ends with its session.
    `producer_id` and `number` identify the begin request, so that a repeated request is recognised. `group`: the
    producer group for check-back. `owner`: the client, for display. `began_ms`: wall clock time. `user`: the user who
    began the transaction, and to whom it belongs; "" where the broker had no users then.
    """

    xid: str
    local: bool
    producer_id: int
    number: int
    began_ms: int
    group: str = ""
    owner: str = ""
    member: CommitGroupMember | None = None
    user: str = ""


class PrepareRecord(NamedTuple):
    """Prepare record of a transaction.

    `messages`: the number of its messages; recovery compares it with the number of messages that it has found.
    `expires_ms`: wall clock time after which a member of a commit group may be rolled back; 0: never.
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


class CommitRecord(NamedTuple):
    """Commit decision of a prepared transaction.

    `xid`: the transaction's name, by which it can be found when it is over; "" if an earlier release wrote the record.
    """

    epoch: int
    time_ms: int
    xid: str = ""


class RollbackRecord(_Step):
    """Rollback of a prepared transaction."""


class LocalCommitRecord(NamedTuple):
    """Commit decision of a transaction without a prepare record; it has most fields of a prepare record itself."""

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
    """Lease of epochs: all epochs below `end` may be in use.

    `key`: the secret key with which `Outcomes` hashes the names of transactions. That of the first lease counts.
    """

    end: int
    time_ms: int
    key: bytes


class GroupCommitRecord(NamedTuple):
    """Commits all `members` by one decision, and rolls back `dropped`; both are lists of epochs.

    The order of `members` defines the ordinals of their messages. `rows`: how many rows the writer has written, to
    detect a repeated commit with another number of rows. A record without members only rolls back `dropped`; it is
    written when a commit is repeated and transactions have joined the group since the first time.
    """

    group: str
    sequence: int
    run: str
    rows: int
    members: Sequence[int]
    dropped: Sequence[int]
    time_ms: int


class GroupAbortRecord(NamedTuple):
    """Aborts `run`, unless `sequence` is committed. Rolls back `dropped`: the epochs of the run's prepared members."""

    group: str
    sequence: int
    run: str
    dropped: Sequence[int]
    time_ms: int


class GroupForgetRecord(NamedTuple):
    """An operator's request to forget the last commit and the aborted runs of a commit group."""

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
    """Return the first `len(kinds)` fields; a later version may write more. Raises TypeError for a wrong type."""
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
    member, user = (*fields[len(known) :], None, None)[:2]
    if member is not None:
        origin = origin._replace(member=CommitGroupMember(*_checked_fields(member, str, int, str)))
    return origin if user is None else origin._replace(user=_checked_fields((user,), str)[0])


def unpack_topics(rows: Sequence[Any]) -> tuple[tuple[int, str], ...]:
    found = []
    for row in rows:
        log_id, name = _checked_fields(row, int, str)
        found.append((log_id, name))
    return tuple(found)


def unpack_offsets(rows: Sequence[Any]) -> tuple[GroupPositions, ...]:
    found = []
    for row in rows:
        group, generation, positions = _checked_fields(row, str, int, tuple)
        for partition in positions:
            if len(_checked_fields(partition, int, int, int, int, int)) != PARTITION_OFFSET_FIELDS:
                raise TypeError("a group offset with too few fields")
        found.append(
            GroupPositions(group, generation, tuple(partition[:PARTITION_OFFSET_FIELDS] for partition in positions))
        )
    return tuple(found)


def _unpack_epochs(found: Sequence[Any]) -> Sequence[int]:
    return _checked_fields(found, *[int] * len(found))


_TYPES: Final[dict[str, type]] = {
    **dict.fromkeys(("origin", "topics", "offsets", "members", "dropped"), tuple),
    **dict.fromkeys(("group", "run", "xid"), str),
    "key": bytes,
}
"""Field name -> type in a payload; all other fields are `int`."""

_UNPACKERS: Final[dict[str, Any]] = {
    "origin": unpack_origin,
    "topics": unpack_topics,
    "offsets": unpack_offsets,
    "members": _unpack_epochs,
    "dropped": _unpack_epochs,
}
"""Field name -> function that decodes the field, for fields that are arrays."""

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
"""Kinds of operations on one transaction. The epoch is in the header of their journal entry, not in the payload."""

_pack: Final = msgpack.Packer(autoreset=True).pack


def origin_fields(origin: Origin) -> tuple[Any, ...]:
    """Return the origin as it is written. A broker without users writes the bytes that one before users wrote."""
    return origin if origin.user else origin[:-1]


def pack(operation: Operation) -> tuple[int, int, bytes]:
    """Encode an operation as (kind, epoch, payload); the epoch is 0 if the operation is not for one transaction."""
    kind = type(operation)
    if isinstance(operation, PrepareRecord | LocalCommitRecord | LocalRollbackRecord):
        operation = operation._replace(origin=origin_fields(operation.origin))  # type: ignore[arg-type]
    if kind is CommitRecord and not operation.xid:  # type: ignore[union-attr]
        return KINDS[kind], operation[0], _pack(operation[1:2])  # type: ignore[return-value]
    if kind in _SINGLE_TRANSACTION_KINDS:
        return KINDS[kind], operation[0], _pack(operation[1:])  # type: ignore[return-value]
    return KINDS[kind], 0, _pack(operation)


def unpack(kind: int, epoch: int, payload: bytes) -> Operation:
    """Decode the result of `pack`. Raises ValueError if `payload` is malformed or `kind` is unknown."""
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
