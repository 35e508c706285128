"""Commands of commit groups: commit, abort, forget and list."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from tfmq.errors import BadRequest, GroupIncomplete
from tfmq.transaction import rejections, states
from tfmq.transaction.active_transactions import ActiveTransactions
from tfmq.transaction.apply_progress import ApplyProgress
from tfmq.transaction.commands import TransactionCommandHandler, Wait, command, reply_when_durable
from tfmq.transaction.journal_writer import UncertainWrite, WrittenCallback
from tfmq.transaction.model import Transaction
from tfmq.transaction.requests import DoneCallback, GroupAbortResult, GroupCommitRequest, GroupCommitResult

ABORTED: Final = "aborted"
NAMED_TWICE: Final = "The transaction {epoch} is in the list twice: name each member once."
TOO_MANY: Final = "A commit group commits at most {most} transactions at once (limits.commit_group_members)."
NOT_PREPARED: Final = (
    "Of the commit group {group}, sequence {sequence}, {count} transactions are not prepared members, or lost messages"
    " with damage in the journal; the first is {first}. Nothing was committed: run the missing parts again, or abort"
    " the run."
)
OFFSETS_MAX: Final = 100_000
"""Maximum of group offsets in one group commit, about 4 MB: they are one catalog entry, which must fit a segment."""
TOO_MANY_OFFSETS: Final = "The members of a commit group commit the offsets of at most {most} partitions together."
MISSING_NAMED_MAX: Final = 100
"""Maximum of transactions named in a GroupIncomplete error."""


class CommitGroupCommands:
    """Commands of commit groups. Each calls `done` once. Commands wait while a record of their group is written."""

    def __init__(self, active: ActiveTransactions, commands: TransactionCommandHandler) -> None:
        self._active, self._commands = active, commands
        self._store = active.store
        self._waiting_commands: dict[str, list[Callable[[], None]]] = {}
        self._last_progress: dict[str, tuple[int, ApplyProgress]] = {}
        self._uncertain_writes: dict[str, UncertainWrite] = {}
        """Group with a record that may or may not be in the journal -> the error for its commands until a restart."""

    # Commit

    @command
    def commit(self, request: GroupCommitRequest, done: DoneCallback) -> None:
        """Commit all transactions that the request names, atomically; calls `done(GroupCommitResult)`.

        The same record rolls back the other prepared members of the group with this or a lower sequence. Errors:
        GroupStale if a later sequence is committed, or this one with another number of rows; GroupFenced if the run was
        aborted; GroupIncomplete if a named transaction is not prepared or has lost messages; NotAllowed for a new group
        above the limit of groups; BadRequest if a transaction is named twice or the request exceeds a limit.
        """
        group, sequence, run, names, rows, other_total = request
        self._wait_for_records(group)
        epochs: set[int] = set()
        for _, epoch in names:
            if epoch in epochs:
                raise BadRequest(NAMED_TWICE.format(epoch=epoch))
            epochs.add(epoch)
        most = self._active.limits["commit_group_members"]
        if len(epochs) > most:
            raise BadRequest(TOO_MANY.format(most=most))
        first = self._store.commit_groups.find_commit(group, sequence, run, rows, other_total=other_total)
        if first is not None:
            self._repeat_commit(request, first.rows, done)
            return
        members = self._require_members(request)
        leftovers = self._store.commit_groups.find_leftovers(group, sequence, [each.epoch for each in members])
        dropped = self._prepared_members(leftovers)

        def written(lsn: int) -> None:
            self._commit_written(request, members, dropped, lsn, done)
            self._roll_back_open(leftovers)

        call = partial(self._store.commit_group, group, sequence, run, rows, members, dropped)
        self._submit(group, (*members, *dropped), call, written, done)

    def _require_members(self, request: GroupCommitRequest) -> list[Transaction]:
        """Return the named transactions. Raises GroupIncomplete if one is no prepared member or has lost messages."""
        if self._store.stopped is not None:
            raise rejections.journal_stopped(self._store.stopped)
        strangers = set(
            self._store.commit_groups.find_nonmembers(
                request.group, request.sequence, [epoch for _, epoch in request.transactions]
            )
        )
        members, missing = [], []
        for xid, epoch in request.transactions:
            found = None if epoch in strangers else self._store.transactions.get(epoch)
            if (
                found is not None
                and found.xid == xid
                and self._active.is_certainly(found, states.PREPARED)
                and not found.lost_messages
            ):
                members.append(found)
            else:
                missing.append(xid)
        if missing:
            sentence = NOT_PREPARED.format(
                group=request.group, sequence=request.sequence, count=len(missing), first=missing[0]
            )
            raise GroupIncomplete(sentence, missing=missing[:MISSING_NAMED_MAX])
        if sum(len(each.positions) for member in members for each in member.offsets) > OFFSETS_MAX:
            raise BadRequest(TOO_MANY_OFFSETS.format(most=OFFSETS_MAX))
        return members

    def _commit_written(
        self,
        request: GroupCommitRequest,
        members: list[Transaction],
        dropped: list[Transaction],
        lsn: int,
        done: DoneCallback,
    ) -> None:
        reply = partial(_reply_commit, False, request.rows, done)
        if members:
            decision = members[0].decision
            assert decision is not None
            progress = self._active.on_committed(decision, reply)
            self._keep_progress(request.group, request.sequence, progress)
        else:
            self._last_progress.pop(request.group, None)
            result = GroupCommitResult(states.COMMITTED, False, request.rows, 0)
            self._store.when_durable(lsn, partial(reply_when_durable, done, result))
        self._active.on_rolled_back(dropped, lsn)

    def _keep_progress(self, group: str, sequence: int, progress: ApplyProgress) -> None:
        """Store the progress of a commit for replies to repeated requests, until all its effects are durable."""
        mine = self._last_progress[group] = (sequence, progress)

        def durable() -> None:
            if self._last_progress.get(group) is mine:
                del self._last_progress[group]

        progress.durable_callbacks.append(durable)

    def _repeat_commit(self, request: GroupCommitRequest, rows: int, done: DoneCallback) -> None:
        """Reply to a repeated request with the first result. Roll back members that have joined after that commit."""
        group, sequence = request.group, request.sequence
        leftovers = self._store.commit_groups.find_leftovers(group, sequence)
        self._roll_back_open(leftovers)
        dropped = self._prepared_members(leftovers)
        if not dropped:
            self._reply_first(group, sequence, rows, done)
            return

        def written(lsn: int) -> None:
            self._active.on_rolled_back(dropped, lsn)
            self._reply_first(group, sequence, rows, done)

        call = partial(self._store.commit_group, group, sequence, request.run, rows, (), dropped)
        self._submit(group, dropped, call, written, done)

    def _reply_first(self, group: str, sequence: int, rows: int, done: DoneCallback) -> None:
        known, progress = self._last_progress.get(group, (-1, None))
        if progress is not None and known == sequence:
            progress.add_callback(partial(_reply_commit, True, rows, done))
        else:
            self._commands.reply_when_all_durable(done, GroupCommitResult(states.COMMITTED, True, rows, 0))

    # Abort, forget, list

    @command
    def abort(self, group: str, sequence: int, run: str, done: DoneCallback) -> None:
        """Fence a run (reject its requests from now on) and roll back its members; calls `done(GroupAbortResult)`.

        If the group has committed `sequence` already, nothing is changed. Error NotAllowed: too many groups or runs.
        """
        self._wait_for_records(group)
        if self._store.commit_groups.is_committed(group, sequence):
            self._commands.reply_when_all_durable(done, GroupAbortResult(states.COMMITTED))
            return
        self._store.commit_groups.require_fence_capacity(group, run)
        run_members = self._store.commit_groups.find_run_members(group, run)
        dropped = self._prepared_members(run_members)

        def written(lsn: int) -> None:
            self._active.on_rolled_back(dropped, lsn)
            self._store.when_durable(lsn, partial(reply_when_durable, done, GroupAbortResult(ABORTED)))
            self._roll_back_open(run_members)

        call = partial(self._store.abort_group, group, sequence, run, dropped)
        self._submit(group, dropped, call, written, done)

    @command
    def forget(self, group: str, done: DoneCallback) -> None:
        """Forget a group's last commit and aborted runs; calls `done(True)`, or `done(False)` if the group has none."""
        self._wait_for_records(group)
        known = self._store.commit_groups.by_name.get(group)
        if known is None or not known.has_history:
            done(False, None)
            return

        def written(lsn: int) -> None:
            self._last_progress.pop(group, None)
            self._active.record_written(lsn)
            self._store.when_durable(lsn, partial(reply_when_durable, done, True))

        self._submit(group, (), partial(self._store.forget_group, group), written, done)

    def list_groups(self, after: str, limit: int) -> tuple[list[dict[str, Any]], bool]:
        """Return one row for each of the first `limit` groups with names above `after`, and whether there are more."""
        found = []
        page, more = self._store.commit_groups.page(after, limit)
        for name, group in page:
            last = group.last_commit
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

    def _prepared_members(self, epochs: Iterable[int]) -> list[Transaction]:
        found = [self._store.transactions.get(epoch) for epoch in epochs]
        return [each for each in found if each is not None and self._active.is_certainly(each, states.PREPARED)]

    def _roll_back_open(self, epochs: Iterable[int]) -> None:
        """Roll back those members of a commit group that are still open. `epochs`: the epochs of these transactions."""
        # Called after the group's record is written, so that open members stay open if that write fails. A member whose
        # prepare record is being written is rolled back at the end of that write, because it is fenced by then.
        for epoch in epochs:
            transaction = self._store.transactions.get(epoch)
            if transaction is not None and self._active.is_certainly(transaction, states.OPEN):
                self._commands.roll_back(transaction)

    def _submit(
        self,
        group: str,
        transactions: Sequence[Transaction],
        call: Callable[[WrittenCallback], None],
        written: Callable[[int], None],
        done: DoneCallback,
    ) -> None:
        """Queue a record of the group and call `written` when it is written; until then commands of the group wait.

        If the write fails, `done` gets the error, and the transactions keep their states. Except: an open one is rolled
        back if its session or timeout has ended meanwhile. If `_submit` raises an error, no record is queued.
        """

        def completed(lsn: int, error: BaseException | None) -> None:
            if isinstance(error, UncertainWrite):
                self._uncertain_writes[group] = error
            if error is None:
                written(lsn)
            else:
                done(None, rejections.from_journal_error(error))
                for transaction in transactions:
                    self._active.resume_commands(transaction)
            self._retry_waiting(group)

        self._waiting_commands[group] = []
        try:
            self._active.submit(transactions, call, completed)
        except Exception:
            self._retry_waiting(group)
            raise

    def _wait_for_records(self, group: str) -> None:
        """Raise `Wait` while a record of the group is being written; StorageStopped after an `UncertainWrite`."""
        if group in self._uncertain_writes:
            raise rejections.from_journal_error(self._uncertain_writes[group])
        if group in self._waiting_commands:
            raise Wait(self._waiting_commands[group])

    def _retry_waiting(self, group: str) -> None:
        for waiting in self._waiting_commands.pop(group, ()):
            waiting()


def _reply_commit(
    repeated: bool, rows: int, done: DoneCallback, progress: ApplyProgress, error: BaseException | None
) -> None:
    if error is not None:
        done(None, error)
    elif progress.damage and not progress.applied:
        done(None, rejections.unreadable(progress.damage))
    else:
        done(GroupCommitResult(progress.state, repeated, rows, progress.dropped_messages), None)
