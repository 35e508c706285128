"""A whole local transaction in one request: begin, sends and commit are one record, forced once."""

from functools import partial
from typing import Final

from tfmq.apply_target import OFFSETS_KEY
from tfmq.errors import SequenceGap, UnknownProducer
from tfmq.transaction import refusals, states
from tfmq.transaction.books import Books, live_of, require_sure
from tfmq.transaction.live import Live
from tfmq.transaction.operations import Origin
from tfmq.transaction.queue import MaybeWritten, Written
from tfmq.transaction.requests import Caller, Done, Ended, Transact
from tfmq.transaction.steps import again, answer, tell_ended
from tfmq.transaction.transaction import Transaction

NAMELESS: Final = "without a name"
NOT_NEXT: Final = (
    "Nothing of the transaction was done, and nothing of it can be in that stream: its records begin at sequence"
    " {found}, and {expected} comes next there. Send it as the first one of a new stream."
)


class Transacting:
    """Gives `done` one call or raises what refuses the request; nothing of a refused one is left."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._store = books.store

    def transact(self, request: Transact, session: Caller, done: Done) -> None:
        now_ms = self._books.clock.wall_ms()
        ending = self._store.streams.find(request.producer_id, request.number, now_ms)
        if ending is not None and self._repeated(ending.epoch, ending.state, request, session, done):
            return
        if not request.pieces and not request.offsets:
            done(Ended(states.READ_ONLY, 0), None)
            return
        groups = self._books.destination.check_offsets(request.offsets, session) if request.offsets else ()
        if groups:
            self._books.destination.check(OFFSETS_KEY, 0)
        transaction = self._store.begin(
            Origin("", True, request.producer_id, request.number, now_ms, "", session.identity)
        )
        live = transaction.live = Live()
        try:
            self._check(transaction, live, request)
            live.reserved = self._books.reservations.reserve(live.sizes)
            if groups:
                self._books.destination.lock_offsets(transaction.epoch, NAMELESS, groups)
            self._store.commit(
                transaction, self._written(transaction, done), offsets=groups, pieces=request.pieces
            )
        except Exception:
            self._give_back(transaction)
            raise

    def _check(self, transaction: Transaction, live: Live, request: Transact) -> None:
        """The limits, and the rule of contiguous sequences over all its batches; sums up what goes where."""
        sizes = live.sizes
        total = 0
        expected = self._store.streams.next(request.producer_id)
        for number, piece in enumerate(request.pieces):
            if piece.sequence != expected:
                raise self._gap(request.producer_id, expected, piece.sequence, first=not number)
            expected = piece.sequence + piece.count
            size = len(piece.data)
            total += size
            sizes[piece.log_id] = sizes.get(piece.log_id, 0) + size
        self._store.check(total)
        store = self._store
        self._books.reservations.require_room(
            store.size_bytes, store.batches, transaction, total, len(request.pieces)
        )

    def _gap(self, producer_id: int, expected: int, found: int, *, first: bool) -> Exception:
        """Why these records cannot come now. The request is a new one to its stream, which was never forgotten: so it
        was not done before, either. Only a repair may have lost it behind its answer, and with it that proof.
        """
        if not first:
            return SequenceGap(expected=expected, found=found)
        if self._store.repaired:
            return UnknownProducer(producer_id=producer_id)
        return SequenceGap(NOT_NEXT.format(expected=expected, found=found), expected=expected, found=found)

    def _written(self, transaction: Transaction, done: Done) -> Written:
        def written(place: int, error: BaseException | None) -> None:
            if error is not None:
                live = live_of(transaction)
                waiting = live.waiting
                if isinstance(error, MaybeWritten):
                    live.unsure = error
                else:
                    self._give_back(transaction)
                done(None, refusals.of_journal(error))
                for each in waiting:
                    each()
                return
            assert transaction.decision is not None
            self._books.decided(transaction.decision, partial(tell_ended, transaction.epoch, False, done))

        return written

    def _give_back(self, transaction: Transaction) -> None:
        live = live_of(transaction)
        self._books.reservations.release(live.reserved)
        live.reserved = 0
        self._books.destination.unlock_offsets(transaction.epoch)
        self._store.discard(transaction)

    def _repeated(self, epoch: int, state: str, request: Transact, session: Caller, done: Done) -> bool:
        """Answers a request that came before; False if nothing of it is left, so that it is done now."""
        transaction = self._store.transactions.get(epoch)
        if transaction is not None:
            require_sure(transaction)
        if transaction is not None and self._books.busy(transaction):
            own = request._replace(pieces=[each._replace(data=bytes(each.data)) for each in request.pieces])
            self._books.later(transaction, partial(again, self.transact, (own, session, done), done))
        elif transaction is not None and live_of(transaction).course is not None:
            course = live_of(transaction).course
            assert course is not None
            course.wait(partial(tell_ended, epoch, True, done))
        elif state == states.COMMITTED:
            lost, messages = self._books.losses(epoch)
            if lost:
                raise refusals.lost_since("", states.COMMITTED, lost, messages)
            told = Ended(states.COMMITTED, epoch, self._books.drops(epoch), repeated=True)
            self._books.when_sure(partial(answer, done, told))
        elif state == states.ROLLED_BACK:
            raise refusals.rolled_back(epoch)
        else:
            return False
        return True
