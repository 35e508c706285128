"""Requests to the `TransactionCoordinator` and their results, as plain values."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from tfmq.apply_target import StoredDelayedBatch

DoneCallback: TypeAlias = Callable[[Any, BaseException | None], None]
"""Called exactly once, in the broker's thread, at once or later: (result, None) or (None, error)."""


class Caller(Protocol):
    """The client session that sends a request. Hashed by identity."""

    @property
    def identity(self) -> str:
        """Name and address of the client, for display."""
        ...


class CommitGroupMember(NamedTuple):
    """Membership in one sequence of a commit group. `run`: one attempt at the sequence, refused after its abort."""

    group: str
    sequence: int
    run: str


class BeginRequest(NamedTuple):
    """Request for a new transaction.

    `producer_id` and `number` identify the request, so that a repeated request is recognised. `xid`: the name; an empty
    one makes the transaction local, so that it ends with its session. `timeout_ms`: None for the broker's default.
    `group`: the producer group for check-back after the prepare, or "". `member`: the transaction is committed with a
    commit group.
    """

    producer_id: int
    number: int
    xid: str = ""
    timeout_ms: int | None = None
    group: str = ""
    member: CommitGroupMember | None = None


class BeginResult(NamedTuple):
    """Result of a begin. `state`: "open", or "done" (with epoch 0) if the commit group has committed the sequence."""

    epoch: int
    xid: str
    state: str
    timeout_ms: int


class PrepareResult(NamedTuple):
    """Result of a prepare: "prepared", or "read_only" if it was empty. `expires_ms`: wall clock time, 0: never."""

    state: str
    expires_ms: int


class CommitResult(NamedTuple):
    """Result of a commit.

    `dropped`: number of messages for deleted topics. `offsets`: the offset of each batch in the order sent, -1 if it is
    not known or not durable; [] for large transactions and after a restart. `repeated`: this is the result of an
    earlier request. `delayed`: where delayed batches are stored, by index, as far as that is known. `lost`: number of
    messages lost by damage, for operators.
    """

    state: str
    epoch: int
    dropped: int = 0
    offsets: Sequence[int] = ()
    repeated: bool = False
    delayed: Mapping[int, StoredDelayedBatch] = {}
    lost: int = 0


class RollbackResult(NamedTuple):
    state: str


class TransactRequest(NamedTuple):
    """A local transaction with `batches` (`IncomingBatch`) and `offsets` (for `ApplyTarget.check_offsets`)."""

    producer_id: int
    number: int
    batches: Sequence[Any]
    offsets: Sequence[Any] = ()


class CheckBackQuery(NamedTuple):
    """The question to a producer group how one prepared transaction is to end."""

    xid: str
    epoch: int
    prepared_ms: int
    topics: Sequence[str]


class GroupCommitRequest(NamedTuple):
    """Request to commit prepared members of (`group`, `sequence`) atomically.

    `transactions`: (xid, epoch) of the members. `rows`: how many rows the caller has written. If a committed sequence
    is requested again with another number of rows, the request is rejected unless `other_total`.
    """

    group: str
    sequence: int
    run: str
    transactions: Sequence[tuple[str, int]]
    rows: int
    other_total: bool = False


class GroupCommitResult(NamedTuple):
    """Result of a group commit: "committed" or "applying", and the number of rows of the first request."""

    state: str
    repeated: bool
    rows: int
    dropped: int


class GroupAbortResult(NamedTuple):
    """Result of a group abort: "aborted", or "committed" if the sequence was committed before."""

    state: str
