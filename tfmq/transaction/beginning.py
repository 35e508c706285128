"""Begin and send: what an open transaction takes, and who may open one."""

from functools import partial
from typing import Any, Final

from tfmq.errors import BadRequest, Busy, TransactionExists
from tfmq.transaction import refusals, states
from tfmq.transaction.books import Books, live_of
from tfmq.transaction.operations import Origin
from tfmq.transaction.outcomes import LOCAL_PREFIX
from tfmq.transaction.requests import Began, Begin, Caller, Done
from tfmq.transaction.steps import again, answer
from tfmq.transaction.streams import Ending
from tfmq.transaction.transaction import Piece, Transaction

RESERVED: Final = f"Names that begin with {LOCAL_PREFIX} are given by the broker: choose another xid."
TOO_MANY: Final = "So many transactions are open that limits.{limit} is reached. End some of them, or wait."
TIMEOUT: Final = "A transaction may be open for 1 to {most} ms (limits.transaction_seconds), not {found}."


class Beginnings:
    """One method a command; each gives `done` one call or raises what refuses it."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._store = books.store

    # Begin

    def begin(self, request: Begin, session: Caller, done: Done) -> None:
        if request.xid.startswith(LOCAL_PREFIX):
            raise BadRequest(RESERVED)
        timeout_ms = self._timeout_ms(request.timeout_ms)
        ending = self._store.streams.find(request.producer_id, request.number, self._books.clock.wall_ms())
        if ending is not None:
            done(self._repeated(request, ending, timeout_ms), None)
            return
        member = request.member
        if member is not None and not self._store.groups.begin(member):
            self._books.when_sure(partial(answer, done, Began(0, request.xid, "done", timeout_ms)))
            return
        self._require_free(request.xid)
        self._require_places(session)
        transaction = self._store.begin(self._origin(request, session))
        self._books.opened(transaction, session, timeout_ms)
        done(Began(transaction.epoch, transaction.xid, states.OPEN, timeout_ms), None)

    def _timeout_ms(self, wanted_ms: int | None) -> int:
        most_ms = self._books.limits["transaction_seconds"] * 1000
        if wanted_ms is None:
            return min(int(self._books.settings["timeout_seconds"] * 1000), most_ms)
        if not 0 < wanted_ms <= most_ms:
            raise BadRequest(TIMEOUT.format(most=most_ms, found=wanted_ms))
        return wanted_ms

    def _repeated(self, request: Begin, ending: Ending, timeout_ms: int) -> Began:
        """The first answer again; if the transaction is over, its next step tells what became of it."""
        transaction = self._store.transactions.get(ending.epoch)
        if transaction is not None and transaction.live is not None:
            timeout_ms = live_of(transaction).timeout_ms or timeout_ms
        return Began(ending.epoch, _name(request), states.OPEN, timeout_ms)

    def _require_free(self, xid: str) -> None:
        """Raises TransactionExists, StorageStopped."""
        if self._store.stopped is not None:
            raise refusals.stopped(self._store.stopped)
        known = self._store.named.get(xid) if xid else None
        if known is not None and known.state not in states.ENDED:
            raise TransactionExists(epoch=known.epoch, state=known.state)

    def _require_places(self, session: Caller) -> None:
        """Raises Busy."""
        limits = self._books.limits
        if self._store.counts[states.OPEN] >= limits["transactions"]:
            raise Busy(TOO_MANY.format(limit="transactions"))
        if self._books.sessions.count(session) >= limits["transactions_per_session"]:
            raise Busy(TOO_MANY.format(limit="transactions_per_session"))

    def _origin(self, request: Begin, session: Caller) -> Origin:
        return Origin(
            _name(request),
            not request.xid,
            request.producer_id,
            request.number,
            self._books.clock.wall_ms(),
            request.group,
            session.identity,
            request.member,
        )

    # Send

    def send(self, epoch: int, piece: Piece, done: Done) -> None:
        transaction = self._store.transactions.get(epoch)
        if transaction is None:
            raise refusals.not_open(epoch)
        if transaction.state != states.OPEN:
            raise refusals.wrong_state(
                transaction.xid, transaction.state, "batches are sent before its end begins"
            )
        if self._sent_before(transaction, piece):
            self._repeat(transaction, piece, done)
            return
        self._require_room(transaction, piece)
        self._store.add(transaction, piece, self._written(transaction, piece, done))
        live = live_of(transaction)
        live.sending += 1
        self._books.sending_bytes += len(piece.data)

    def _sent_before(self, transaction: Transaction, piece: Piece) -> bool:
        return self._store.streams.check(
            piece.producer_id, transaction.epoch, piece.sequence, piece.count, self._books.clock.wall_ms()
        )

    def _repeat(self, transaction: Transaction, piece: Piece, done: Done) -> None:
        """It is there, or on its way; if that fails, it is sent once more."""
        if not live_of(transaction).sending:
            done(None, None)
            return
        own = piece._replace(data=bytes(piece.data))
        self._books.later(transaction, partial(again, self.send, (transaction.epoch, own, done), done))

    def _require_room(self, transaction: Transaction, piece: Piece) -> None:
        """Raises TransactionTooLarge, Busy, StorageStopped, DiskFull, UnknownTopic."""
        books, size = self._books, len(piece.data)
        self._store.check(size)
        held = self._store.size_bytes + books.sending_bytes
        sending = 1 + live_of(transaction).sending
        books.reservations.require_room(held, self._store.batches, transaction, size, sending)
        if piece.log_id not in live_of(transaction).sizes:
            books.destination.check(piece.log_id, size)

    def _written(self, transaction: Transaction, piece: Piece, done: Done) -> Any:
        key, size, name = piece.log_id, len(piece.data), (piece.producer_id, piece.sequence)

        def written(place: int, error: BaseException | None) -> None:
            live = live_of(transaction)
            live.sending -= 1
            self._books.sending_bytes -= size
            if error is None:
                live.sizes[key] = live.sizes.get(key, 0) + size
                live.missing.discard(name)
                done(None, None)
            else:
                live.missing.add(name)
                done(None, refusals.of_journal(error))
            if not live.sending and not self._books.busy(transaction):
                self._books.go_on(transaction)

        return written


def _name(request: Begin) -> str:
    """Its own name, or for a local one what nobody else has: the request that began it."""
    return request.xid or f"{LOCAL_PREFIX}{request.producer_id:x}-{request.number}"
