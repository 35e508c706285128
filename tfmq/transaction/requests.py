"""Requests to the `TransactionCoordinator` and their results, as plain values."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from tfmq.apply_target import StoredDelayedBatch
from tfmq.transaction.states import State

DoneCallback: TypeAlias = Callable[[Any, BaseException | None], None]
"""Called exactly once, in the broker's thread, at once or later, with (result, None) or (None, error)."""


class Caller(Protocol):
    """The client session that sends a request. As a key of a dict, each session object differs from all others."""

    @property
    def identity(self) -> str:
        """Name and address of the client, for display."""
        ...

    @property
    def user(self) -> str:
        """The user to whom a transaction that is begun by this session belongs; "" where the broker has no users."""
        ...


class CommitGroupMember(NamedTuple):
    """Membership in one sequence of a commit group. `run`: one attempt at the sequence; an aborted run is refused."""

    group: str
    sequence: int
    run: str


class BeginRequest(NamedTuple):
    """Request for a new transaction.

    `producer_id` and `number` identify the request, so that a repeated request is recognised. `xid`: the name, or ""
    for a local transaction, which ends with its session. `timeout_ms`: how long the transaction may be open; None: the
    broker's default. `group`: the producer group for check-back after the prepare, or "". `member`: the membership of a
    transaction that is to be committed with a commit group.
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
    """Result of a prepare. `state`: "prepared", or "read_only" for an empty transaction. `expires_ms`: 0 for never."""

    state: State
    expires_ms: int


class CommitResult(NamedTuple):
    """Result of a commit.

    `dropped`: number of messages not delivered because their topic was deleted. `offsets`: the offset of each batch in
    the order sent, -1 if it is not known or not durable; [] for more than 4096 batches and after a restart. `repeated`:
    an earlier request has committed the transaction. `delayed`: index of a delayed batch -> where the batch is stored,
    for the batches of which this is known. `lost`: number of messages lost by damage; 0 unless an operator commits.
    """

    state: State
    epoch: int
    dropped: int = 0
    offsets: Sequence[int] = ()
    repeated: bool = False
    delayed: Mapping[int, StoredDelayedBatch] = {}
    lost: int = 0


class RollbackResult(NamedTuple):
    state: State


class TransactRequest(NamedTuple):
    """Request for a whole local transaction: its `batches` (`IncomingBatch`) and the consumer `offsets` to commit."""

    producer_id: int
    number: int
    batches: Sequence[Any]
    offsets: Sequence[Any] = ()


class CheckBackQuery(NamedTuple):
    """The question to a client of a producer group whether to commit or roll back one prepared transaction."""

    xid: str
    epoch: int
    prepared_ms: int
    topics: Sequence[str]


class GroupCommitRequest(NamedTuple):
    """Request to commit prepared members of (`group`, `sequence`) atomically.

    `transactions`: (xid, epoch) of these members. `rows`: how many rows the caller has written. A request for a
    sequence that was committed with another number of rows is rejected, unless `other_total` is true.
    """

    group: str
    sequence: int
    run: str
    transactions: Sequence[tuple[str, int]]
    rows: int
    other_total: bool = False


class GroupCommitResult(NamedTuple):
    """Result of a group commit. `state`: "committed" or "applying". `rows`: the number stated by the first request."""

    state: State
    repeated: bool
    rows: int
    dropped: int


class GroupAbortResult(NamedTuple):
    """Result of a group abort. `state`: "aborted", or "committed" if the sequence was committed before the abort."""

    state: str
