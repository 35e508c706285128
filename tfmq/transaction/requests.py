"""Requests to the `TransactionCoordinator` and their results, as plain values."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from tfmq.apply_target import StoredDelayedBatch

DoneCallback: TypeAlias = Callable[[Any, BaseException | None], None]
"""Called exactly once, in the broker's thread, now or later: (result, None) or (None, error)."""


class Caller(Protocol):
    """The client session that sends a request. Hashed by identity."""

    @property
    def identity(self) -> str:
        """Name and address of the client, for display."""
        ...


class CommitGroupMember(NamedTuple):
    """Membership of a transaction in one sequence of a commit group.

    `run`: names one attempt at the sequence; an aborted run is fenced, that is, refused from then on.
    """

    group: str
    sequence: int
    run: str


class BeginRequest(NamedTuple):
    """Request for a new transaction.

    (`producer_id`, `number`) identifies the request, so that a repeated one is recognised. An empty `xid`
    makes the transaction local: it ends with its session. `timeout_ms` None means the broker's default.
    `group` is the producer group for check-back after the prepare; "" for none. `member` is for a transaction that is
    committed with its commit group.
    """

    producer_id: int
    number: int
    xid: str = ""
    timeout_ms: int | None = None
    group: str = ""
    member: CommitGroupMember | None = None


class BeginResult(NamedTuple):
    """Result of begin.

    `state`: "open", or "done" (with epoch 0) if the sequence of its commit group is committed already.
    """

    epoch: int
    xid: str
    state: str
    timeout_ms: int


class PrepareResult(NamedTuple):
    """Result of prepare: "prepared", or "read_only" if the transaction was empty.

    `expires_ms`: wall clock time after which it may be rolled back; 0 for never.
    """

    state: str
    expires_ms: int


class CommitResult(NamedTuple):
    """Result of a commit.

    `dropped`: number of messages for deleted topics. `offsets`: one a batch in the order sent, -1 where it is not
    known or not durable yet; [] for large transactions and after a restart. `repeated`: the commit was requested
    before, and this is its result again. `delayed`: by index of delayed batches, where they are stored, as far as that
    is known. `lost`: number of messages lost by damage of the journal, for operators; other callers get `Damaged`
    instead.
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

    `transactions` are (xid, epoch). `rows` is the number of rows that the caller has written, as a check: when a
    committed sequence is requested again with another number, that is rejected unless `other_total`.
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
