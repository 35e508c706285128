"""The requests and replies of transactions and commit groups; their codes stand with all others in `commands`.

A transaction is named by its xid and its epoch, the number that BEGIN_TRANSACTION gave it: an xid may come
again, an epoch never, so what belongs to an ended transaction can never touch a later one of the same xid.
"""

from typing import Annotated, Any, NamedTuple

from tfmq import limits
from tfmq.protocol.fields import ListOf, Map, Optional, Row, Text, Whole
from tfmq.protocol.rows import (
    CommitMember,
    Group,
    Member,
    Number,
    OffsetsInside,
    Plain,
    ProducerId,
    SentDelayed,
    SentOffsets,
    Size,
    TimeMs,
    TransactionBatches,
    TransactionEpoch,
    TransactionName,
    Words,
    Xid,
    Yes,
)

STATES_IN_LIST = 16
Page = Annotated[int, Whole(1, limits.TRANSACTIONS_PER_PAGE)]
Maps = Annotated[list[dict[str, Any]], ListOf(Map(), limits.TRANSACTIONS_PER_PAGE)]


class BeginTransaction(NamedTuple):
    """Begins a transaction, number `number` of the stream `producer_id`; with xid "" it is a local one, which
    ends with its connection and gets its name from the broker. Repeated, it has the first answer.
    """

    producer_id: ProducerId
    number: Number
    xid: Annotated[str, Text(limits.XID_BYTES)]
    timeout_ms: Annotated[int | None, Optional(Whole(1, (1 << 32) - 1, "u32, not 0"))]
    group: Member
    member: Annotated[CommitMember | None, Optional(Row(CommitMember))] = None


class BeginTransactionReply(NamedTuple):
    epoch: Number
    xid: Annotated[str, Text(limits.XID_BYTES)]
    state: Words
    timeout_ms: Size


class PrepareTransaction(NamedTuple):
    """The first phase: the transaction is on the disk with all it holds, and waits for its owner's word."""

    xid: Xid
    epoch: TransactionEpoch
    ttl_ms: Annotated[int | None, Optional(Whole(1, limits.TRANSACTION_TTL_SECONDS.cap * 1000, "u63, not 0"))]
    offsets: OffsetsInside


class PrepareTransactionReply(NamedTuple):
    state: Words
    expires_ms: TimeMs


class CommitTransaction(NamedTuple):
    """Commits a prepared transaction, or an unprepared one with `one_phase`; `heuristic`: an operator does, with
    `force` also one that lost messages with damage of the journal.
    """

    xid: Xid
    epoch: TransactionEpoch
    one_phase: Yes
    heuristic: Yes
    offsets: OffsetsInside
    force: Yes = False


class CommitTransactionReply(NamedTuple):
    state: Words
    dropped: Number
    offsets: SentOffsets
    delayed: SentDelayed = []  # noqa: RUF012 - never changed
    lost: Number = 0


class RollbackTransaction(NamedTuple):
    """Drops a transaction with all it holds; `heuristic`: an operator does."""

    xid: Xid
    epoch: TransactionEpoch
    heuristic: Yes = False


class RollbackTransactionReply(NamedTuple):
    state: Words


class ForgetTransaction(NamedTuple):
    """Lets go of a heuristic outcome that everybody concerned knows of."""

    xid: Xid
    epoch: TransactionEpoch


class ForgetTransactionReply(NamedTuple):
    forgotten: Yes


class ListTransactions(NamedTuple):
    """Unfinished transactions by epoch, from the one behind `after` on; nil states: those that need somebody,
    which are prepared, applying, or ended by an operator.
    """

    states: Annotated[list[str] | None, Optional(ListOf(Text(32), STATES_IN_LIST))] = None
    after: Number = 0
    limit: Page = int(limits.TRANSACTIONS_PER_PAGE)
    group: Member = ""


class ListTransactionsReply(NamedTuple):
    transactions: Maps
    more: Yes
    after: Number = 0


class DescribeTransaction(NamedTuple):
    """One transaction, live or remembered; epoch 0: the latest of that xid."""

    xid: Xid
    epoch: Number = 0


class DescribeTransactionReply(NamedTuple):
    description: Plain


class Transact(NamedTuple):
    """A whole local transaction in one frame: begin, sends and commit, number `number` of the stream
    `producer_id`. Repeated, it has the first answer.
    """

    producer_id: ProducerId
    number: Number
    batches: TransactionBatches
    offsets: OffsetsInside


class TransactReply(NamedTuple):
    state: Words
    epoch: Number
    dropped: Number
    offsets: SentOffsets
    repeated: Yes
    delayed: SentDelayed = []  # noqa: RUF012 - never changed


class AwaitChecks(NamedTuple):
    """Waits up to `wait_ms` for prepared transactions of a producer group whose owner must be asked; CANCEL
    ends the wait.
    """

    group: Group
    wait_ms: Annotated[int, Whole(0, limits.FETCH_WAIT_MS.cap)]


class AwaitChecksReply(NamedTuple):
    checks: Maps


class CommitGroup(NamedTuple):
    """Commits prepared transactions together, all or none, as `sequence` of the commit group; other members
    of the group with a sequence up to it are dropped. Repeated, it has the first answer.
    """

    group: Group
    sequence: Number
    run: Group
    transactions: Annotated[list[TransactionName], ListOf(Row(TransactionName), limits.COMMIT_GROUP_MEMBERS)]
    rows: Number
    other_total: Yes = False


class CommitGroupReply(NamedTuple):
    state: Words
    repeated: Yes
    rows: Number
    dropped: Number


class AbortCommitGroup(NamedTuple):
    """Drops the members that one run made for one sequence, and takes nothing more of that run."""

    group: Group
    sequence: Number
    run: Group


class AbortCommitGroupReply(NamedTuple):
    state: Words


class ListCommitGroups(NamedTuple):
    """Commit groups by name, from the one behind `after` on."""

    after: Member = ""
    limit: Page = int(limits.TRANSACTIONS_PER_PAGE)


class ListCommitGroupsReply(NamedTuple):
    groups: Maps
    more: Yes


class ForgetCommitGroup(NamedTuple):
    """Forgets the sequence that a commit group has reached: an old one would be taken again."""

    group: Group


class ForgetCommitGroupReply(NamedTuple):
    forgotten: Yes
