"""What a session asks of the `TransactionHandler`, and what it is told: plain values."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from tfmq.apply_target import Delayed

Done: TypeAlias = Callable[[Any, BaseException | None], None]
"""done(result, None) or done(None, error): once, at once or later, in the owner's thread."""


class Caller(Protocol):
    """The session that asks, as far as transactions care. Hashed by identity."""

    @property
    def identity(self) -> str:
        """The client's name and address, for people."""
        ...


class Timers(Protocol):
    """Calls at monotonic times: `tfmq.broker.timers.Timers`."""

    def now(self) -> float: ...
    def after(self, seconds: float, call: Callable[[], None], *, deferrable: bool = False) -> Any: ...
    def cancel(self, timer: Any) -> None: ...


class Member(NamedTuple):
    """A place in a commit group: `run` names the writer's run, so that an aborted one can be fenced."""

    group: str
    sequence: int
    run: str


class Begin(NamedTuple):
    """A new transaction. `producer_id` and `number` name the request, so that it can be repeated.

    `xid` "" makes it local: it ends with its session. `timeout_ms` None: the broker's default. `group`: the
    producer group that is asked about it once it is prepared ("": nobody).
    """

    producer_id: int
    number: int
    xid: str = ""
    timeout_ms: int | None = None
    group: str = ""
    member: Member | None = None


class Began(NamedTuple):
    """`state`: "open", or "done" for a member of a commit group that is committed already (epoch 0 then)."""

    epoch: int
    xid: str
    state: str
    timeout_ms: int


class Prepared(NamedTuple):
    """`state`: "prepared" or "read_only" (nothing was in it; it is finished). `expires_ms`: 0 never."""

    state: str
    expires_ms: int


class Ended(NamedTuple):
    """`state`: "committed", "applying" (decided; a target cannot be written yet) or "read_only".

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
    delayed: Mapping[int, Delayed] = {}
    lost: int = 0


class RolledBack(NamedTuple):
    """`state`: "rolled_back" or "heuristic_rolled_back"."""

    state: str


class Transact(NamedTuple):
    """A whole local transaction: `pieces` as `tfmq.transaction.model.Piece`, `offsets` rows for
    `Destination.check_offsets`.
    """

    producer_id: int
    number: int
    pieces: Sequence[Any]
    offsets: Sequence[Any] = ()


class Check(NamedTuple):
    """One prepared transaction that a producer group is asked about."""

    xid: str
    epoch: int
    prepared_ms: int
    topics: Sequence[str]


class GroupCommit(NamedTuple):
    """Prepared members of (`group`, `sequence`) to be committed all or none.

    `transactions` are (xid, epoch). `rows`: what the caller counts; another total for the same sequence is
    refused unless `other_total`.
    """

    group: str
    sequence: int
    run: str
    transactions: Sequence[tuple[str, int]]
    rows: int
    other_total: bool = False


class GroupEnded(NamedTuple):
    """`state`: "committed" or "applying". `rows`: the total that counts, the first answer's if `repeated`."""

    state: str
    repeated: bool
    rows: int
    dropped: int


class GroupAborted(NamedTuple):
    """`state`: "aborted", or "committed" where the abort came too late and changes nothing."""

    state: str
