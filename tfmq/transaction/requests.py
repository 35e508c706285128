"""Requests to the `TransactionCoordinator` and their results, as plain values."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from tfmq.apply_target import StoredDelayedBatch

DoneCallback: TypeAlias = Callable[[Any, BaseException | None], None]
"""Called exactly once, in the owner's thread, now or later: (result, None) or (None, error)."""


class Caller(Protocol):
    """The client session that sends a request. Hashed by identity."""

    @property
    def identity(self) -> str:
        """Name and address of the client, for display."""
        ...


class CommitGroupMember(NamedTuple):
    """Membership in a commit group's sequence; `run` identifies the writer's run, for fencing."""

    group: str
    sequence: int
    run: str


class BeginRequest(NamedTuple):
    """Request for a new transaction.

    (`producer_id`, `number`) identifies the request, so that a repeated one is recognised. An empty `xid`
    makes the transaction local: it ends with its session. `timeout_ms` None means the broker's default.
    `group` is the producer group for check-back after the prepare; "" for none.
    """

    producer_id: int
    number: int
    xid: str = ""
    timeout_ms: int | None = None
    group: str = ""
    member: CommitGroupMember | None = None


class BeginResult(NamedTuple):
    """Result of begin.

    `state`: "open", or "done" (with epoch 0) if the commit group's sequence is committed.
    """

    epoch: int
    xid: str
    state: str
    timeout_ms: int


class PrepareResult(NamedTuple):
    """Result of prepare: "prepared", or "read_only" if it was empty. `expires_ms`: 0 for never."""

    state: str
    expires_ms: int


class CommitResult(NamedTuple):
    """Result of a commit.

    `dropped`: messages for topics that are gone. `offsets`: one a batch in the order sent, -1 where it is not
    known or not on the disk yet; [] for large transactions and after a restart. `repeated`: this is the answer
    to an earlier request. `delayed`: what delayed batches came to, by their index, as far as it is known. `lost`:
    messages that damage of the journal took, told to operators; an owner gets `Damaged` instead.
    """

    state: str
    epoch: int
    dropped: int = 0
    offsets: Sequence[int] = ()
    repeated: bool = False
    delayed: Mapping[int, StoredDelayedBatch] = {}
    lost: int = 0


class RollbackResult(NamedTuple):
    """Result of a rollback. `state`: "rolled_back" or "heuristic_rolled_back"."""

    state: str


class TransactRequest(NamedTuple):
    """A complete local transaction in one request.

    `batches` are `IncomingBatch` values, `offsets` are rows for `ApplyTarget.check_offsets`.
    """

    producer_id: int
    number: int
    batches: Sequence[Any]
    offsets: Sequence[Any] = ()


class CheckBackQuery(NamedTuple):
    """A check-back query about one prepared transaction, sent to its producer group."""

    xid: str
    epoch: int
    prepared_ms: int
    topics: Sequence[str]


class GroupCommitRequest(NamedTuple):
    """Request to commit prepared members of (`group`, `sequence`) atomically.

    `transactions` are (xid, epoch). `rows` is the caller's row count; a different count for the same
    sequence is rejected unless `other_total`.
    """

    group: str
    sequence: int
    run: str
    transactions: Sequence[tuple[str, int]]
    rows: int
    other_total: bool = False


class GroupCommitResult(NamedTuple):
    """Result of a group commit. `state`: "committed" or "applying".

    `rows` is the row count of the commit; if `repeated`, that of the first request.
    """

    state: str
    repeated: bool
    rows: int
    dropped: int


class GroupAbortResult(NamedTuple):
    """Result of a group abort: "aborted", or "committed" if the sequence was committed before."""

    state: str
