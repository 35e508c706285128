"""Commands of commit groups: many prepared transactions decided by one record, in sequences that never go back.

Commands of one group are taken one after the other: what is asked for while a record of that group is on its way
waits for it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from tfmq.errors import BadRequest, GroupIncomplete
from tfmq.transaction import rejections, states
from tfmq.transaction.active_transactions import Books
from tfmq.transaction.apply_progress import Course
from tfmq.transaction.commands import Steps, again, answer
from tfmq.transaction.journal_writer import MaybeWritten, Written
from tfmq.transaction.model import Transaction
from tfmq.transaction.requests import Done, GroupAborted, GroupCommit, GroupEnded

ABORTED: Final = "aborted"
TWICE: Final = "The transaction {epoch} is in the list twice: name each member once."
TOO_MANY: Final = "A commit group commits at most {most} transactions at once (limits.commit_group_members)."
MISSING: Final = (
    "Of the commit group {group}, sequence {sequence}, {count} transactions are not prepared members, or lost messages"
    " with damage in the journal; the first is {first}. Nothing was committed: run the missing parts again, or abort"
    " the run."
)
PLACES_MAX: Final = 100_000
"""Offsets of all members together, some 4 MB. They are one change of the catalog, which must fit a segment of it: a
larger one could never be applied once it is decided, and would hold up all that come behind."""
TOO_MANY_PLACES: Final = (
    "The members of a commit group commit the offsets of at most {most} partitions together."
)
NAMES_TOLD: Final = 100
"""An error names no more of the missing ones."""


class GroupCommits:
    """One method a command; each gives `done` one call or raises what refuses it."""

    def __init__(self, books: Books, steps: Steps) -> None:
        self._books, self._steps = books, steps
        self._store = books.store
        self._waiting: dict[str, list[Callable[[], None]]] = {}
        self._courses: dict[str, tuple[int, Course]] = {}
        self._unsure: dict[str, MaybeWritten] = {}
        """Groups of which only a start will tell how far they are: the disk failed under a record of theirs."""

    # Commit

    def commit(self, request: GroupCommit, done: Done) -> None:
        group, sequence, run, names, rows, other_total = request
        self._require_sure(group)
        if group in self._waiting:
            self._waiting[group].append(partial(again, self.commit, (request, done), done))
            return
        self._refuse_bad(names)
        first = self._store.groups.repeated(group, sequence, run, rows, other_total=other_total)
        if first is not None:
            self._repeat(request, first.rows, done)
            return
        members = self._members(request)
        left = self._store.groups.leftovers(group, sequence, [each.epoch for each in members])
        dropped = self._prepared(left)

        def written(place: int, error: BaseException | None) -> None:
            if error is not None:
                self._refused((*members, *dropped), error, done)
            else:
                self._committed(request, members, dropped, place, done)
                self._end_open(left)
            self._go_on(group)

        call = partial(self._store.commit_group, group, sequence, run, rows, members, dropped)
        self._put(group, (*members, *dropped), call, written)

    def _refuse_bad(self, names: Iterable[tuple[str, int]]) -> None:
        epochs: set[int] = set()
        for _, epoch in names:
            if epoch in epochs:
                raise BadRequest(TWICE.format(epoch=epoch))
            epochs.add(epoch)
        most = self._books.limits["commit_group_members"]
        if len(epochs) > most:
            raise BadRequest(TOO_MANY.format(most=most))

    def _members(self, request: GroupCommit) -> list[Transaction]:
        """All that are named, in their order. Raises GroupIncomplete, BadRequest."""
        if self._store.stopped is not None:
            raise rejections.stopped(self._store.stopped)
        strangers = set(
            self._store.groups.missing(
                request.group, request.sequence, [epoch for _, epoch in request.transactions]
            )
        )
        members, missing = [], []
        for xid, epoch in request.transactions:
            found = None if epoch in strangers else self._store.transactions.get(epoch)
            if found is not None and found.xid == xid and self._is(found, states.PREPARED) and not found.lost:
                members.append(found)
            else:
                missing.append(xid)
        if missing:
            sentence = MISSING.format(
                group=request.group, sequence=request.sequence, count=len(missing), first=missing[0]
            )
            raise GroupIncomplete(sentence, missing=missing[:NAMES_TOLD])
        if sum(len(each.places) for member in members for each in member.offsets) > PLACES_MAX:
            raise BadRequest(TOO_MANY_PLACES.format(most=PLACES_MAX))
        return members

    def _committed(
        self,
        request: GroupCommit,
        members: list[Transaction],
        dropped: list[Transaction],
        place: int,
        done: Done,
    ) -> None:
        tell = partial(_tell, False, request.rows, done)
        if members:
            decision = members[0].decision
            assert decision is not None
            self._books.decided(decision, tell)
            self._remember(request.group, request.sequence, self._books.course(members[0]))
        else:
            self._courses.pop(request.group, None)
            told = GroupEnded(states.COMMITTED, False, request.rows, 0)
            self._store.when_forced(place, partial(answer, done, told))
        self._books.dropped(dropped, place)

    def _remember(self, group: str, sequence: int, course: Course) -> None:
        """Until it is settled, a repeat may have to hear that it is still being applied."""
        mine = self._courses[group] = (sequence, course)

        def settled() -> None:
            if self._courses.get(group) is mine:
                del self._courses[group]

        course.settling.append(settled)

    def _repeat(self, request: GroupCommit, rows: int, done: Done) -> None:
        """The first answer; and what other attempts left over since then goes."""
        group, sequence = request.group, request.sequence
        left = self._store.groups.leftovers(group, sequence)
        self._end_open(left)
        dropped = self._prepared(left)
        if not dropped:
            self._tell_first(group, sequence, rows, done)
            return

        def written(place: int, error: BaseException | None) -> None:
            if error is not None:
                self._refused(dropped, error, done)
            else:
                self._books.dropped(dropped, place)
                self._tell_first(group, sequence, rows, done)
            self._go_on(group)

        call = partial(self._store.commit_group, group, sequence, request.run, rows, (), dropped)
        self._put(group, dropped, call, written)

    def _tell_first(self, group: str, sequence: int, rows: int, done: Done) -> None:
        known, course = self._courses.get(group, (-1, None))
        if course is not None and known == sequence:
            course.wait(partial(_tell, True, rows, done))
        else:
            self._books.when_sure(partial(answer, done, GroupEnded(states.COMMITTED, True, rows, 0)))

    # Abort and forget

    def abort(self, group: str, sequence: int, run: str, done: Done) -> None:
        self._require_sure(group)
        if group in self._waiting:
            self._waiting[group].append(partial(again, self.abort, (group, sequence, run, done), done))
            return
        if self._store.groups.too_late(group, sequence):
            self._books.when_sure(partial(answer, done, GroupAborted(states.COMMITTED)))
            return
        self._store.groups.require_fence(group, run)
        left = self._store.groups.of_run(group, run)
        dropped = self._prepared(left)

        def written(place: int, error: BaseException | None) -> None:
            if error is not None:
                self._refused(dropped, error, done)
            else:
                self._books.dropped(dropped, place)
                self._store.when_forced(place, partial(answer, done, GroupAborted(ABORTED)))
                self._end_open(left)
            self._go_on(group)

        call = partial(self._store.abort_group, group, sequence, run, dropped)
        self._put(group, dropped, call, written)

    def forget(self, group: str, done: Done) -> None:
        known = self._store.groups.by_name.get(group)
        if known is None or not known.lasting:
            done(False, None)
            return

        def written(place: int, error: BaseException | None) -> None:
            if error is not None:
                done(None, rejections.of_journal(error))
                return
            self._courses.pop(group, None)
            self._books.recorded(place)
            self._store.when_forced(place, partial(answer, done, True))

        self._store.forget_group(group, written)

    def rows(self, after: str, limit: int) -> tuple[list[dict[str, Any]], bool]:
        """One map a group that has committed or aborted anything, or has live members; whether there are more."""
        found = []
        page, more = self._store.groups.page(after, limit)
        for name, group in page:
            last = group.last
            found.append(
                {
                    "group": name,
                    "sequence": -1 if last is None else last.sequence,
                    "run": "" if last is None else last.run,
                    "rows": 0 if last is None else last.rows,
                    "committed_ms": 0 if last is None else last.time_ms,
                    "members": len(group.members),
                    "runs_fenced": len(group.fenced),
                }
            )
        return found, more

    # What several share

    def _prepared(self, epochs: Iterable[int]) -> list[Transaction]:
        """Those that can end with a group's record. One that is being decided by itself is let be."""
        found = [self._store.transactions.get(epoch) for epoch in epochs]
        return [each for each in found if each is not None and self._is(each, states.PREPARED)]

    def _end_open(self, epochs: Iterable[int]) -> None:
        """Those that were not prepared end, each by itself: behind the group's record, so that they stay where that is
        refused, and whether or not the disk takes their own. One whose prepare is on its way is fenced by that.
        """
        for epoch in epochs:
            transaction = self._store.transactions.get(epoch)
            if transaction is not None and self._is(transaction, states.OPEN):
                self._steps.drop(transaction)

    def _is(self, transaction: Transaction, wanted: str) -> bool:
        """In that state for sure."""
        return transaction.state == wanted and not self._books.busy(transaction)

    def _refused(self, transactions: Sequence[Transaction], error: BaseException, done: Done) -> None:
        """The record was not written: all of them are as before, unless their time has run out meanwhile."""
        done(None, rejections.of_journal(error))
        for transaction in transactions:
            self._steps.resume(transaction)

    def _put(
        self,
        group: str,
        transactions: Sequence[Transaction],
        call: Callable[[Written], None],
        written: Written,
    ) -> None:
        """Puts the record into the queue; the group waits for it, unless that raises."""

        def told(place: int, error: BaseException | None) -> None:
            if isinstance(error, MaybeWritten):
                self._unsure[group] = error
            written(place, error)

        self._waiting[group] = []
        try:
            self._books.put(transactions, call, told)
        except Exception:
            self._go_on(group)
            raise

    def _require_sure(self, group: str) -> None:
        """Raises StorageStopped, outcome unknown."""
        if group in self._unsure:
            raise rejections.of_journal(self._unsure[group])

    def _go_on(self, group: str) -> None:
        for waiting in self._waiting.pop(group, ()):
            waiting()


def _tell(repeated: bool, rows: int, done: Done, course: Course, error: BaseException | None) -> None:
    if error is not None:
        done(None, error)
    elif course.damage and not course.applied:
        done(None, rejections.unreadable(course.damage))
    else:
        done(GroupEnded(course.state, repeated, rows, course.dropped), None)
