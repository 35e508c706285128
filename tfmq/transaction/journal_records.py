"""The operations of the transaction journal: what each record says, packed and unpacked.

A payload is one msgpack array. Its fields are only ever added to, at the end: a reader takes those that it
knows and gives those that an older writer left out their defaults; docs/formats/operations.md has the table.
Unpacking raises `ValueError` for whatever does not fit, and nothing else.
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
"""Of a place of `GroupPlaces`."""

Topics: TypeAlias = Sequence[tuple[int, str]]
"""(log id, name of the topic), for people: names change hands, log ids never."""


class Origin(NamedTuple):
    """Who began a transaction, under which name; it never changes.

    `xid` "" has no name at all (a whole transaction in one frame); `local`: it ends with its session.
    (`producer_id`, `number`) name the request that began it, so that it can be repeated. `group`: the producer
    group that is asked about it. `owner`: the client, for people. `began_ms`: wall clock.
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
    """`messages`: how many it has, so that a start knows whether it has found them all. `expires_ms`: wall clock time
    after which a member of a commit group may be dropped; 0 never.
    """

    epoch: int
    time_ms: int
    origin: Origin
    topics: Topics
    offsets: Sequence[GroupPlaces]
    messages: int
    expires_ms: int


class Commit(NamedTuple):
    """The decision over a prepared transaction."""

    epoch: int
    time_ms: int


class Rollback(NamedTuple):
    """The end of a prepared transaction."""

    epoch: int
    time_ms: int


class LocalCommit(NamedTuple):
    """The decision over a transaction that was not prepared, with all that a prepare would have said."""

    epoch: int
    time_ms: int
    origin: Origin
    topics: Topics
    offsets: Sequence[GroupPlaces]
    messages: int


class LocalRollback(NamedTuple):
    """The end of a transaction that was not prepared."""

    epoch: int
    time_ms: int
    origin: Origin


class HeuristicCommit(NamedTuple):
    """An operator's decision over a prepared transaction."""

    epoch: int
    time_ms: int


class HeuristicRollback(NamedTuple):
    """An operator's end of a prepared transaction."""

    epoch: int
    time_ms: int


class Forget(NamedTuple):
    """A heuristic outcome was seen by whom it concerns."""

    epoch: int
    time_ms: int


class Epochs(NamedTuple):
    """Epochs below `end` may have been given out. `key`: 16 random bytes, those of the first record count."""

    end: int
    time_ms: int
    key: bytes


class GroupCommit(NamedTuple):
    """One decision over all `members` (epochs, in the order that numbers their messages); `dropped` end with it.

    `rows`: what the writer counted, to recognise another total under the same sequence. Without members it only
    drops what a repeated commit left over.
    """

    group: str
    sequence: int
    run: str
    rows: int
    members: Sequence[int]
    dropped: Sequence[int]
    time_ms: int


class GroupAbort(NamedTuple):
    """`run` of the group is fenced while `sequence` is not committed; `dropped` (epochs) end with it."""

    group: str
    sequence: int
    run: str
    dropped: Sequence[int]
    time_ms: int


class GroupForget(NamedTuple):
    """The group's sequences are forgotten, by the operator's word."""

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
    """The first fields, each of its kind; what is behind them is a later version's. Raises TypeError."""
    if type(fields) is not tuple:
        raise TypeError(f"an array is expected, not {type(fields).__name__}")
    for value, kind in zip(fields, kinds, strict=False):
        if type(value) is not kind:
            raise TypeError(f"{kind.__name__} is expected, not {type(value).__name__}")
    found: Sequence[Any] = fields[: len(kinds)]
    return found


def origin_of(fields: Any) -> Origin:
    """An `Origin` that was packed. Raises TypeError."""
    known = _known(fields, str, bool, int, int, int, str, str)
    origin = Origin(*known)
    member = fields[len(known)] if len(fields) > len(known) else None
    return origin if member is None else origin._replace(member=Member(*_known(member, str, int, str)))


def topics_of(rows: Sequence[Any]) -> tuple[tuple[int, str], ...]:
    """Topics that were packed. Raises TypeError, ValueError."""
    found = []
    for row in rows:
        log_id, name = _known(row, int, str)
        found.append((log_id, name))
    return tuple(found)


def offsets_of(rows: Sequence[Any]) -> tuple[GroupPlaces, ...]:
    """Groups' places that were packed. Raises TypeError, ValueError."""
    found = []
    for row in rows:
        group, generation, places = _known(row, str, int, tuple)
        for place in places:
            if len(_known(place, int, int, int, int, int)) != PLACE_FIELDS:
                raise TypeError("a group's place that is too short")
        found.append(GroupPlaces(group, generation, tuple(place[:PLACE_FIELDS] for place in places)))
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
    said = GroupCommit(*_known(fields, str, int, str, int, tuple, tuple, int))
    return said._replace(members=_epochs(said.members), dropped=_epochs(said.dropped))


def _group_abort(epoch: int, fields: Any) -> GroupAbort:
    said = GroupAbort(*_known(fields, str, int, str, tuple, int))
    return said._replace(dropped=_epochs(said.dropped))


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
"""Those whose epoch stands in the journal's own header, and not in the payload."""

_pack: Final = msgpack.Packer(autoreset=True).pack


def pack(operation: Operation) -> tuple[int, int, bytes]:
    """(kind, epoch or 0, payload), as the journal takes them."""
    kind = type(operation)
    if kind in _OF_ONE:
        return KINDS[kind], operation[0], _pack(operation[1:])  # type: ignore[return-value]
    return KINDS[kind], 0, _pack(operation)


def unpack(kind: int, epoch: int, payload: bytes) -> Operation:
    """The operation that `pack` was given. Raises ValueError."""
    reader = _READERS.get(kind)
    if reader is None:
        raise ValueError(f"an operation of the unknown kind {kind}; a later version may know it")
    try:
        return reader(epoch, msgpack.unpackb(payload, use_list=False))
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise ValueError(f"an operation of kind {kind} that does not fit: {error!r}") from error
