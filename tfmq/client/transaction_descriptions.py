"""What the broker tells about transactions and commit groups, as values with names. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


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
