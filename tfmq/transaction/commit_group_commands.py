"""Commands of commit groups: commit, abort, forget and list."""

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
"""Offsets of all members together, about 4 MB.

They are one catalog change, which must fit a catalog segment: a larger one could never be applied after the
decision and would block all later ones.
"""
TOO_MANY_PLACES: Final = (
    "The members of a commit group commit the offsets of at most {most} partitions together."
)
NAMES_TOLD: Final = 100
"""Missing transactions named in an error."""


class GroupCommits:
    """Commands of commit groups; each calls `done` once or raises the error of its rejection.

    Commands of one group run one after the other: while a record of the group is being written, later
    commands wait.
    """

    def __init__(self, active: Books, steps: Steps) -> None:
        self._books, self._steps = active, steps
        self._store = active.store
        self._waiting: dict[str, list[Callable[[], None]]] = {}
        self._courses: dict[str, tuple[int, Course]] = {}
        self._unsure: dict[str, MaybeWritten] = {}
        """Groups with an uncertain record: the disk failed during the write.

        Only recovery finds the result.
        """

    # Commit

    def commit(self, request: GroupCommit, done: Done) -> None:
        """Commit all named members with one record; roll back leftovers of earlier attempts."""
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

        def written(lsn: int, error: BaseException | None) -> None:
            if error is not None:
                self._refused((*members, *dropped), error, done)
            else:
                self._committed(request, members, dropped, lsn, done)
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
        """Return the named transactions in order.

        Raises: GroupIncomplete, BadRequest, StorageStopped.
        """
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
        lsn: int,
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
            result = GroupEnded(states.COMMITTED, False, request.rows, 0)
            self._store.when_forced(lsn, partial(answer, done, result))
        self._books.dropped(dropped, lsn)

    def _remember(self, group: str, sequence: int, progress: Course) -> None:
        """Keep the progress until completion: the reply to a repeated request may be "applying"."""
        mine = self._courses[group] = (sequence, progress)

        def settled() -> None:
            if self._courses.get(group) is mine:
                del self._courses[group]

        progress.settling.append(settled)

    def _repeat(self, request: GroupCommit, rows: int, done: Done) -> None:
        """Return the first result again, and roll back members that were added since."""
        group, sequence = request.group, request.sequence
        left = self._store.groups.leftovers(group, sequence)
        self._end_open(left)
        dropped = self._prepared(left)
        if not dropped:
            self._tell_first(group, sequence, rows, done)
            return

        def written(lsn: int, error: BaseException | None) -> None:
            if error is not None:
                self._refused(dropped, error, done)
            else:
                self._books.dropped(dropped, lsn)
                self._tell_first(group, sequence, rows, done)
            self._go_on(group)

        call = partial(self._store.commit_group, group, sequence, request.run, rows, (), dropped)
        self._put(group, dropped, call, written)

    def _tell_first(self, group: str, sequence: int, rows: int, done: Done) -> None:
        known, progress = self._courses.get(group, (-1, None))
        if progress is not None and known == sequence:
            progress.wait(partial(_tell, True, rows, done))
        else:
            self._books.when_sure(partial(answer, done, GroupEnded(states.COMMITTED, True, rows, 0)))

    # Abort, forget, list

    def abort(self, group: str, sequence: int, run: str, done: Done) -> None:
        """Fence a run and roll back its members, unless its sequence is committed."""
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

        def written(lsn: int, error: BaseException | None) -> None:
            if error is not None:
                self._refused(dropped, error, done)
            else:
                self._books.dropped(dropped, lsn)
                self._store.when_forced(lsn, partial(answer, done, GroupAborted(ABORTED)))
                self._end_open(left)
            self._go_on(group)

        call = partial(self._store.abort_group, group, sequence, run, dropped)
        self._put(group, dropped, call, written)

    def forget(self, group: str, done: Done) -> None:
        """Forget the committed sequence and the fences of a group."""
        known = self._store.groups.by_name.get(group)
        if known is None or not known.lasting:
            done(False, None)
            return

        def written(lsn: int, error: BaseException | None) -> None:
            if error is not None:
                done(None, rejections.of_journal(error))
                return
            self._courses.pop(group, None)
            self._books.recorded(lsn)
            self._store.when_forced(lsn, partial(answer, done, True))

        self._store.forget_group(group, written)

    def rows(self, after: str, limit: int) -> tuple[list[dict[str, Any]], bool]:
        """Return one row per group with a commit, abort or live members, and whether there are more."""
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

    # Shared by several commands

    def _prepared(self, epochs: Iterable[int]) -> list[Transaction]:
        """Return the prepared transactions; those with a pending record of their own are skipped."""
        found = [self._store.transactions.get(epoch) for epoch in epochs]
        return [each for each in found if each is not None and self._is(each, states.PREPARED)]

    def _end_open(self, epochs: Iterable[int]) -> None:
        """Roll back members that were not prepared, each by its own record."""
        # This follows the group's record, so that they stay open if that fails. A member whose prepare is
        # being written is fenced when that completes.
        for epoch in epochs:
            transaction = self._store.transactions.get(epoch)
            if transaction is not None and self._is(transaction, states.OPEN):
                self._steps.drop(transaction)

    def _is(self, transaction: Transaction, wanted: str) -> bool:
        """Whether a transaction is in that state and no record is pending."""
        return transaction.state == wanted and not self._books.busy(transaction)

    def _refused(self, transactions: Sequence[Transaction], error: BaseException, done: Done) -> None:
        """Reply after the group's record failed.

        All transactions are unchanged, except that orphaned ones end.
        """
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
        """Queue the group's record; later commands of the group wait for it, unless this raises."""

        def completed(lsn: int, error: BaseException | None) -> None:
            if isinstance(error, MaybeWritten):
                self._unsure[group] = error
            written(lsn, error)

        self._waiting[group] = []
        try:
            self._books.put(transactions, call, completed)
        except Exception:
            self._go_on(group)
            raise

    def _require_sure(self, group: str) -> None:
        """Check that no record of the group has an uncertain write result.

        Raises: StorageStopped, outcome unknown.
        """
        if group in self._unsure:
            raise rejections.of_journal(self._unsure[group])

    def _go_on(self, group: str) -> None:
        for waiting in self._waiting.pop(group, ()):
            waiting()


def _tell(repeated: bool, rows: int, done: Done, progress: Course, error: BaseException | None) -> None:
    if error is not None:
        done(None, error)
    elif progress.damage and not progress.applied:
        done(None, rejections.unreadable(progress.damage))
    else:
        done(GroupEnded(progress.state, repeated, rows, progress.dropped), None)
