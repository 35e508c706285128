"""The operations of the transaction journal: what each record says, packed and unpacked.

A payload is one msgpack array. Its fields are only ever added to, at the end: a reader takes those that it
knows and gives those that an older writer left out their defaults; docs/formats/journal.md has the table.
Unpacking raises `ValueError` for whatever does not fit, and nothing else.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgpack

from tfmq.effects import GroupPlaces
from tfmq.transaction.requests import Member

PREPARE, COMMIT, ROLLBACK, LOCAL_COMMIT, LOCAL_ROLLBACK, HEURISTIC_COMMIT, HEURISTIC_ROLLBACK = range(1, 8)
FORGET, EPOCHS, GROUP_COMMIT, GROUP_ABORT, GROUP_FORGET = range(8, 13)

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


def origin_of(fields: Sequence[Any]) -> Origin:
    """An `Origin` that was packed."""
    origin = Origin(*fields[: len(Origin._fields)])
    return origin if origin.member is None else origin._replace(member=Member(*origin.member[:3]))


def offsets_of(rows: Sequence[Sequence[Any]]) -> tuple[GroupPlaces, ...]:
    """Groups' places that were packed."""
    return tuple(GroupPlaces(*row[:3]) for row in rows)


def _prepare(epoch: int, fields: Sequence[Any]) -> Prepare:
    time_ms, origin, topics, offsets, messages, expires_ms = fields[:6]
    return Prepare(epoch, time_ms, origin_of(origin), topics, offsets_of(offsets), messages, expires_ms)


def _local_commit(epoch: int, fields: Sequence[Any]) -> LocalCommit:
    time_ms, origin, topics, offsets, messages = fields[:5]
    return LocalCommit(epoch, time_ms, origin_of(origin), topics, offsets_of(offsets), messages)


def _local_rollback(epoch: int, fields: Sequence[Any]) -> LocalRollback:
    return LocalRollback(epoch, fields[0], origin_of(fields[1]))


_READERS: Final[dict[int, Callable[[int, Sequence[Any]], Operation]]] = {
    PREPARE: _prepare,
    COMMIT: lambda epoch, fields: Commit(epoch, fields[0]),
    ROLLBACK: lambda epoch, fields: Rollback(epoch, fields[0]),
    LOCAL_COMMIT: _local_commit,
    LOCAL_ROLLBACK: _local_rollback,
    HEURISTIC_COMMIT: lambda epoch, fields: HeuristicCommit(epoch, fields[0]),
    HEURISTIC_ROLLBACK: lambda epoch, fields: HeuristicRollback(epoch, fields[0]),
    FORGET: lambda epoch, fields: Forget(epoch, fields[0]),
    EPOCHS: lambda epoch, fields: Epochs(*fields[:3]),
    GROUP_COMMIT: lambda epoch, fields: GroupCommit(*fields[:7]),
    GROUP_ABORT: lambda epoch, fields: GroupAbort(*fields[:5]),
    GROUP_FORGET: lambda epoch, fields: GroupForget(*fields[:2]),
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
