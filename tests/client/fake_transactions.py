"""What the fake broker does with transactions: epochs, streams, states, outcomes, all in memory and for real.

A message is in `logs` once its transaction is committed, and never before. Local transactions end with their
session. What a transactional stream sends is checked as the broker does: next sequence, known number, or an error.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

from journal.record.batch import verify_batch
from tfmq.errors import (
    Fenced,
    HeuristicOutcome,
    SequenceGap,
    StaleEpoch,
    TransactionCommitted,
    TransactionExists,
    TransactionRolledBack,
    TransactionState,
    UnknownProducer,
    UnknownTopic,
    UnknownTransaction,
)
from tfmq.protocol import commands


class Piece:
    """One batch in a transaction."""

    def __init__(self, request: commands.Produce, body: bytes) -> None:
        self.request, self.body = request, body


class FakeTransaction:
    """One transaction; `session` is None for one that outlives its connection."""

    def __init__(self, epoch: int, xid: str, session: object, begin: commands.BeginTransaction | None) -> None:
        self.epoch, self.xid, self.session, self.begin = epoch, xid, session, begin
        self.state = "open"
        self.pieces: list[Piece] = []
        self.offsets: list[commands.TransactionOffsets] = []
        self.prepared_ms = 0
        self.placed: list[int] = []


class FakeTransactions:
    """A part of the fake broker: `logs`, `incarnations` and `_append` are its."""

    logs: Any
    incarnations: dict[str, int]

    def __init__(self) -> None:
        self.transactions: dict[int, FakeTransaction] = {}
        self.tx_streams: dict[int, int] = {}
        self.tx_numbers: dict[int, tuple[int, int]] = {}
        self.forgotten_ids: set[int] = set()
        self.group_offsets: dict[str, list[commands.GroupOffset]] = defaultdict(list)
        self.fenced: set[str] = set()
        self.applying: set[str] = set()
        self.checks: deque[dict[str, Any]] = deque()
        self.parked: list[tuple[Any, int]] = []
        self.next_epoch = 1
        self.dropped = 0

    # Helpers for tests

    def states(self) -> list[str]:
        return [each.state for each in self.transactions.values()]

    def by_hand(self, epoch: int, commit: bool) -> None:
        """What an operator does."""
        transaction = self.transactions[epoch]
        self._end(transaction, commit)
        transaction.state = "heuristic_committed" if commit else "heuristic_rolled_back"

    def session_lost(self, session: object) -> None:
        for each in self.transactions.values():
            if each.session is session and each.state == "open":
                each.state = "rolled_back"

    def ask(self, xid: str, epoch: int) -> None:
        """The broker asks about this one; waiting polls are answered."""
        self.checks.append({"xid": xid, "epoch": epoch, "prepared_ms": 1_700_000_000_000, "topics": ["orders"]})
        parked, self.parked = self.parked, []
        for session, correlation in parked:
            if self.checks and not session.cut:
                session.say([0, correlation, [self.checks.popleft()]])

    # Streams

    def _begin(self, producer_id: int, number: int, make: Any) -> tuple[FakeTransaction, bool]:
        if producer_id in self.forgotten_ids:
            raise UnknownProducer()
        last, epoch = self.tx_numbers.get(producer_id, (0, 0))
        if number == last:
            return self.transactions[epoch], True
        if number < last:
            raise UnknownTransaction()
        made = make(self.next_epoch)
        self.next_epoch += 1
        self.transactions[made.epoch] = made
        self.tx_numbers[producer_id] = (number, made.epoch)
        return made, False

    def _take(self, transaction: FakeTransaction, request: commands.Produce, body: bytes) -> None:
        if self.incarnations.get(request.topic) != request.incarnation:
            raise UnknownTopic()
        verify_batch(body, request.blocks, request.producer_id, request.sequence, request.count, verify="records")
        if request.producer_id in self.forgotten_ids:
            raise UnknownProducer()
        following = self.tx_streams.get(request.producer_id, 0)
        if request.sequence + request.count <= following:
            return
        if request.sequence != following:
            raise SequenceGap()
        self.tx_streams[request.producer_id] = following + request.count
        transaction.pieces.append(Piece(request, body))

    def produce_inside(self, request: commands.Produce, body: bytes) -> Any:
        transaction = self._named(None, request.transaction or 0)
        if transaction.state != "open":
            raise TransactionState()
        self._take(transaction, request, body)
        return commands.ProduceReply([], commands.ACKS_WRITTEN, False, 0, -1)

    # Commands

    def begin_transaction(self, request: commands.BeginTransaction, session: Any) -> Any:
        def make(epoch: int) -> FakeTransaction:
            if any(
                each.xid == request.xid and each.state in ("open", "prepared") for each in self.transactions.values()
            ):
                raise TransactionExists()
            name = request.xid or f"local-{epoch}"
            return FakeTransaction(epoch, name, None if request.xid else session, request)

        found, _ = self._begin(request.producer_id, request.number, make)
        return commands.BeginTransactionReply(found.epoch, found.xid, "open", request.timeout_ms or 60_000)

    def await_checks(self, request: commands.AwaitChecks) -> Any:
        return commands.AwaitChecksReply([self.checks.popleft()])

    def transact(self, request: commands.Transact, body: bytes) -> Any:
        found, repeated = self._begin(
            request.producer_id, request.number, lambda epoch: FakeTransaction(epoch, f"local-{epoch}", None, None)
        )
        if not repeated:
            streams, position = dict(self.tx_streams), 0
            try:
                for row in request.batches:
                    fields = (request.producer_id, row.sequence, row.count, commands.ACKS_SYNCED, row.blocks)
                    piece = commands.Produce(row.topic, row.incarnation, row.partition, *fields, row.due)
                    self._take(found, piece, body[position : position + row.size])
                    position += row.size
                assert position == len(body)
                self._check_offsets(request.offsets)
            except Exception:
                self.tx_streams = streams
                self.tx_numbers[request.producer_id] = (request.number - 1, 0)
                del self.transactions[found.epoch]
                raise
            found.offsets = request.offsets
            self._end(found, True)
        return commands.TransactReply(self._reported(found), found.epoch, 0, found.placed, repeated)

    def prepare_transaction(self, request: commands.PrepareTransaction) -> Any:
        found = self._named(request.xid, request.epoch)
        if found.state == "open":
            self._check_offsets(request.offsets)
            found.offsets = request.offsets
            found.state = "prepared" if found.pieces or found.offsets else "read_only"
            found.session, found.prepared_ms = None, 1_700_000_000_000
        elif found.state not in ("prepared", "read_only"):
            raise self._wrong(found, TransactionState())
        return commands.PrepareTransactionReply(found.state, 0)

    def commit_transaction(self, request: commands.CommitTransaction) -> Any:
        found = self._named(request.xid, request.epoch)
        if found.state == "open":
            if not request.one_phase:
                raise TransactionState("prepare it first")
            self._check_offsets(request.offsets)
            found.offsets = request.offsets
            self._end(found, True)
        elif found.state == "prepared":
            self._end(found, True)
        elif found.state not in ("committed", "read_only"):
            raise self._wrong(found, TransactionState())
        return commands.CommitTransactionReply(self._reported(found), self.dropped, found.placed)

    def rollback_transaction(self, request: commands.RollbackTransaction) -> Any:
        found = self._named(request.xid, request.epoch)
        if found.state in ("open", "prepared"):
            self._end(found, False)
        elif found.state != "rolled_back":
            raise self._wrong(found, TransactionState())
        return commands.StateReply(found.state)

    def forget_transaction(self, request: commands.ForgetTransaction) -> Any:
        found = self._named(request.xid, request.epoch)
        heuristic = found.state.startswith("heuristic")
        if heuristic:
            del self.transactions[found.epoch]
        return commands.ForgottenReply(heuristic)

    def describe_transaction(self, request: commands.DescribeTransaction) -> Any:
        found = [each for each in self.transactions.values() if each.xid == request.xid]
        if not found:
            return commands.DescriptionReply({"xid": request.xid, "state": "unknown", "epoch": 0})
        return commands.DescriptionReply(self._row(found[-1]))

    def list_transactions(self, request: commands.ListTransactions) -> Any:
        rows = [
            self._row(each)
            for each in self.transactions.values()
            if each.epoch > request.after
            and each.state in (request.states or ())
            and (not request.group or (each.begin is not None and each.begin.group == request.group))
        ]
        page = rows[:2]
        return commands.ListTransactionsReply(page, len(rows) > len(page))

    def _row(self, each: FakeTransaction) -> dict[str, Any]:
        return {"xid": each.xid, "epoch": each.epoch, "state": each.state, "prepared_ms": each.prepared_ms}

    def _check_offsets(self, rows: list[commands.TransactionOffsets]) -> None:
        if any(row.group in self.fenced for row in rows):
            raise Fenced()

    def _reported(self, found: FakeTransaction) -> str:
        return "applying" if found.state == "committed" and found.xid in self.applying else found.state

    def _end(self, found: FakeTransaction, commit: bool) -> None:
        found.state = "committed" if commit else "rolled_back"
        for piece in found.pieces if commit else ():
            if piece.request.due is not None:
                self.arrive(piece.request, piece.body)  # type: ignore[attr-defined]
                found.placed.append(-1)
                continue
            found.placed.append(self._append(piece.request, piece.body).offset)  # type: ignore[attr-defined]
        for row in found.offsets if commit else ():
            self.group_offsets[row.group] += row.offsets

    def _named(self, xid: str | None, epoch: int) -> FakeTransaction:
        found = self.transactions.get(epoch)
        if found is None or (xid is not None and found.xid != xid):
            if any(each.xid == xid for each in self.transactions.values()):
                raise StaleEpoch()
            raise UnknownTransaction()
        return found

    def _wrong(self, found: FakeTransaction, otherwise: Exception) -> Exception:
        if found.state.startswith("heuristic"):
            return HeuristicOutcome(state=found.state)
        if found.state == "rolled_back":
            return TransactionRolledBack()
        return TransactionCommitted() if found.state == "committed" else otherwise
