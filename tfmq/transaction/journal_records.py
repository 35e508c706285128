"""Operations of the transaction journal: their fields, encoding and decoding.

A payload is one msgpack array. New fields are only added at its end: a reader ignores unknown fields and
uses defaults for those that an older writer omitted. docs/formats/operations.md has the table. Decoding
raises `ValueError` for every malformed payload, and nothing else.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgpack

from journal.wal.entry import (
    COMMIT,
    EPOCHS,
    FORGET,
    GROUP_ABORT,
    GROUP_COMMIT,
    GROUP_FORGET,
    HEURISTIC_COMMIT,
    HEURISTIC_ROLLBACK,
    LOCAL_COMMIT,
    LOCAL_ROLLBACK,
    PREPARE,
    ROLLBACK,
)
from tfmq.apply_target import GroupPlaces
from tfmq.transaction.requests import Member

PLACE_FIELDS: Final = 5
"""Number of fields of one partition's offset in `GroupPlaces`."""

Topics: TypeAlias = Sequence[tuple[int, str]]
"""(log id, topic name) for display: a topic name may be reused, a log id never."""


class Origin(NamedTuple):
    """Origin of a transaction: its name and the request that began it. Immutable.

    An empty `xid` means no name (a whole transaction in one frame). A `local` transaction ends with its
    session. (`producer_id`, `number`) identifies the begin request, so that a repeated one is recognised.
    `group` is the producer group for check-back. `owner` is the client, for display. `began_ms` is wall
    clock time.
    """

    xid: str
    local: bool
    producer_id: int
    number: int
    began_ms: int
    group: str = ""
    owner: str = ""
    member: Member | None = None


class Prepare(NamedTuple):
    """Prepare record of a transaction.

    `messages` is its message count, with which recovery checks that none is missing. `expires_ms` is the
    wall clock time after which a member of a commit group may be rolled back; 0 for never.
    """

    epoch: int
    time_ms: int
    origin: Origin
    topics: Topics
    offsets: Sequence[GroupPlaces]
    messages: int
    expires_ms: int


class Commit(NamedTuple):
    """Commit decision of a prepared transaction."""

    epoch: int
    time_ms: int


class Rollback(NamedTuple):
    """Rollback of a prepared transaction."""

    epoch: int
    time_ms: int


class LocalCommit(NamedTuple):
    """Commit decision of an unprepared transaction.

    Has the fields that a prepare record would have.
    """

    epoch: int
    time_ms: int
    origin: Origin
    topics: Topics
    offsets: Sequence[GroupPlaces]
    messages: int


class LocalRollback(NamedTuple):
    """Rollback of an unprepared transaction."""

    epoch: int
    time_ms: int
    origin: Origin


class HeuristicCommit(NamedTuple):
    """An operator's commit decision of a prepared transaction."""

    epoch: int
    time_ms: int


class HeuristicRollback(NamedTuple):
    """An operator's rollback of a prepared transaction."""

    epoch: int
    time_ms: int


class Forget(NamedTuple):
    """An operator's request to forget a heuristic outcome."""

    epoch: int
    time_ms: int


class Epochs(NamedTuple):
    """Lease of epochs: those below `end` may be in use. `key`: 16 random bytes.

    The first record's key is used.
    """

    end: int
    time_ms: int
    key: bytes


class GroupCommit(NamedTuple):
    """One commit decision for all `members`.

    The transactions in `dropped` are rolled back with it. `members` and `dropped` are epochs; the order of
    `members` defines the message ordinals. `rows` is the writer's row count, to detect a different total
    under the same sequence. Without members the record only rolls back leftovers of a repeated commit.
    """

    group: str
    sequence: int
    run: str
    rows: int
    members: Sequence[int]
    dropped: Sequence[int]
    time_ms: int


class GroupAbort(NamedTuple):
    """Fence of `run` while `sequence` is not committed.

    The epochs in `dropped` are rolled back with it.
    """

    group: str
    sequence: int
    run: str
    dropped: Sequence[int]
    time_ms: int


class GroupForget(NamedTuple):
    """An operator's request to forget the sequences of a commit group."""

    group: str
    time_ms: int


Operation: TypeAlias = (
    Prepare
    | Commit
    | Rollback
    | LocalCommit
    | LocalRollback
    | HeuristicCommit
    | HeuristicRollback
    | Forget
    | Epochs
    | GroupCommit
    | GroupAbort
    | GroupForget
)


def _known(fields: Any, *kinds: type) -> Sequence[Any]:
    """Return the first fields after a type check; later fields are from newer versions.

    Raises: TypeError.
    """
    if type(fields) is not tuple:
        raise TypeError(f"an array is expected, not {type(fields).__name__}")
    for value, kind in zip(fields, kinds, strict=False):
        if type(value) is not kind:
            raise TypeError(f"{kind.__name__} is expected, not {type(value).__name__}")
    found: Sequence[Any] = fields[: len(kinds)]
    return found


def origin_of(fields: Any) -> Origin:
    """Decode an `Origin`.

    Raises: TypeError.
    """
    known = _known(fields, str, bool, int, int, int, str, str)
    origin = Origin(*known)
    member = fields[len(known)] if len(fields) > len(known) else None
    return origin if member is None else origin._replace(member=Member(*_known(member, str, int, str)))


def topics_of(rows: Sequence[Any]) -> tuple[tuple[int, str], ...]:
    """Decode the topics of a transaction.

    Raises: TypeError, ValueError.
    """
    found = []
    for row in rows:
        log_id, name = _known(row, int, str)
        found.append((log_id, name))
    return tuple(found)


def offsets_of(rows: Sequence[Any]) -> tuple[GroupPlaces, ...]:
    """Decode consumer offsets of groups.

    Raises: TypeError, ValueError.
    """
    found = []
    for row in rows:
        group, generation, places = _known(row, str, int, tuple)
        for partition in places:
            if len(_known(partition, int, int, int, int, int)) != PLACE_FIELDS:
                raise TypeError("a group offset with too few fields")
        found.append(GroupPlaces(group, generation, tuple(partition[:PLACE_FIELDS] for partition in places)))
    return tuple(found)


def _prepare(epoch: int, fields: Any) -> Prepare:
    time_ms, origin, topics, offsets, messages, expires_ms = _known(
        fields, int, tuple, tuple, tuple, int, int
    )
    described = origin_of(origin), topics_of(topics), offsets_of(offsets)
    return Prepare(epoch, time_ms, *described, messages, expires_ms)


def _local_commit(epoch: int, fields: Any) -> LocalCommit:
    time_ms, origin, topics, offsets, messages = _known(fields, int, tuple, tuple, tuple, int)
    return LocalCommit(epoch, time_ms, origin_of(origin), topics_of(topics), offsets_of(offsets), messages)


def _local_rollback(epoch: int, fields: Any) -> LocalRollback:
    time_ms, origin = _known(fields, int, tuple)
    return LocalRollback(epoch, time_ms, origin_of(origin))


def _group_commit(epoch: int, fields: Any) -> GroupCommit:
    record = GroupCommit(*_known(fields, str, int, str, int, tuple, tuple, int))
    return record._replace(members=_epochs(record.members), dropped=_epochs(record.dropped))


def _group_abort(epoch: int, fields: Any) -> GroupAbort:
    record = GroupAbort(*_known(fields, str, int, str, tuple, int))
    return record._replace(dropped=_epochs(record.dropped))


def _epochs(found: Sequence[Any]) -> Sequence[int]:
    return _known(found, *[int] * len(found))


_READERS: Final[dict[int, Callable[[int, Any], Operation]]] = {
    PREPARE: _prepare,
    COMMIT: lambda epoch, fields: Commit(epoch, *_known(fields, int)),
    ROLLBACK: lambda epoch, fields: Rollback(epoch, *_known(fields, int)),
    LOCAL_COMMIT: _local_commit,
    LOCAL_ROLLBACK: _local_rollback,
    HEURISTIC_COMMIT: lambda epoch, fields: HeuristicCommit(epoch, *_known(fields, int)),
    HEURISTIC_ROLLBACK: lambda epoch, fields: HeuristicRollback(epoch, *_known(fields, int)),
    FORGET: lambda epoch, fields: Forget(epoch, *_known(fields, int)),
    EPOCHS: lambda epoch, fields: Epochs(*_known(fields, int, int, bytes)),
    GROUP_COMMIT: _group_commit,
    GROUP_ABORT: _group_abort,
    GROUP_FORGET: lambda epoch, fields: GroupForget(*_known(fields, str, int)),
}

KINDS: Final[dict[type, int]] = {
    Prepare: PREPARE,
    Commit: COMMIT,
    Rollback: ROLLBACK,
    LocalCommit: LOCAL_COMMIT,
    LocalRollback: LOCAL_ROLLBACK,
    HeuristicCommit: HEURISTIC_COMMIT,
    HeuristicRollback: HEURISTIC_ROLLBACK,
    Forget: FORGET,
    Epochs: EPOCHS,
    GroupCommit: GROUP_COMMIT,
    GroupAbort: GROUP_ABORT,
    GroupForget: GROUP_FORGET,
}

_OF_ONE: Final = frozenset(kind for kind in KINDS if "epoch" in kind._fields)  # type: ignore[attr-defined]
"""Operations whose epoch is in the journal entry's header, not in the payload."""

_pack: Final = msgpack.Packer(autoreset=True).pack


def pack(operation: Operation) -> tuple[int, int, bytes]:
    """Encode an operation as (kind, epoch or 0, payload) for the journal."""
    kind = type(operation)
    if kind in _OF_ONE:
        return KINDS[kind], operation[0], _pack(operation[1:])  # type: ignore[return-value]
    return KINDS[kind], 0, _pack(operation)


def unpack(kind: int, epoch: int, payload: bytes) -> Operation:
    """Decode the result of `pack`.

    Raises: ValueError.
    """
    reader = _READERS.get(kind)
    if reader is None:
        raise ValueError(f"an operation of the unknown kind {kind}; a later version may know it")
    try:
        return reader(epoch, msgpack.unpackb(payload, use_list=False))
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise ValueError(f"an operation of kind {kind} that does not fit: {error!r}") from error
