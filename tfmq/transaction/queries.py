"""Queries of operators: the list of transactions, the details of one transaction, and the status.

The status says whether a transaction is prepared for too long (`alarm`). `InDoubtMonitor` in `tfmq/server/server.py`
logs this alarm, and repeats it while it lasts.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Any, Final

from tfmq.transaction import journal_records, states
from tfmq.transaction.active_transactions import ActiveTransactions, TransactionRuntimeState, topic_names
from tfmq.transaction.apply_progress import ApplyProgress
from tfmq.transaction.model import Transaction

TOPICS_DESCRIBED: Final = 1000
"""Maximum of topics in the details of a transaction, which must fit into a frame's header."""
TARGETS_DESCRIBED: Final = 100
"""Maximum of blocked targets in the details of a transaction and in the status; both must fit into a frame's header."""

SCANNED_MAX: Final = 10_000
"""Maximum of transactions examined for one page (about 3 ms). So a page may have fewer rows than requested."""

ATTENTION_STATES: Final = frozenset((states.PREPARED, states.APPLYING, *states.HEURISTIC_STATES))
UNKNOWN: Final = "unknown"
UNDURABLE_STATES: Final = {
    states.PREPARED: states.PREPARING,
    states.APPLYING: states.COMMITTING,
    states.COMMITTED: states.COMMITTING,
    states.HEURISTIC_COMMITTED: states.COMMITTING,
    states.HEURISTIC_ROLLED_BACK: states.ROLLING_BACK,
}
"""State -> state that users are shown in its place while the record of the change to this state is not durable."""


class TransactionQueries:
    """Queries on active and ended transactions; they change nothing."""

    def __init__(self, active: ActiveTransactions) -> None:
        self._active = active
        self._store = active.store

    def page(
        self, wanted: Sequence[str] | None, after_epoch: int, limit: int, group: str = ""
    ) -> tuple[list[dict[str, Any]], bool, int]:
        """Return a page of transactions: (rows sorted by epoch, whether there are more, last examined epoch).

        To get the next page, pass the last examined epoch as `after_epoch`. A page may have fewer than `limit` rows, or
        none, although there are more. The rows are those of the reply to LIST_TRANSACTIONS. `wanted`: the states of the
        transactions to return; None: all transactions that are in ATTENTION_STATES or in doubt.
        """
        rows: list[dict[str, Any]] = []
        after = after_epoch
        for scanned, transaction in enumerate(self._store.transactions_after(after_epoch)):
            if scanned == SCANNED_MAX:
                return rows, True, after
            if self._is_wanted(transaction, wanted, group):
                if len(rows) == limit:
                    return rows, True, after
                rows.append(self._row(transaction))
            after = transaction.epoch
        return rows, False, after

    def _is_wanted(self, transaction: Transaction, wanted: Sequence[str] | None, group: str) -> bool:
        if group and transaction.origin.group != group:
            return False
        state = self._shown_state(transaction)
        if wanted is not None:
            return state in wanted
        return state in ATTENTION_STATES or bool(transaction.prepared_ms and state in states.IN_DOUBT_STATES)

    def _shown_state(self, transaction: Transaction) -> str:
        """Return the state to show to users: one that neither a power failure nor a stopped target can revert."""
        state = transaction.state
        if not self._store.is_durable(transaction):
            return UNDURABLE_STATES.get(state, state)
        progress = _apply_progress(transaction)
        return progress.state if state == states.COMMITTED and progress is not None else state

    def _row(self, transaction: Transaction) -> dict[str, Any]:
        most = self._active.limits["transaction_topics_listed"]
        origin = transaction.origin
        since_ms = transaction.prepared_ms or origin.began_ms
        member = origin.member
        progress = _apply_progress(transaction)
        lost, damage = transaction.lost_messages, ""
        if progress is not None:
            damage = progress.damage
            if len(progress.decision.transactions) == 1:
                lost = progress.lost
        return {
            "xid": transaction.xid,
            "epoch": transaction.epoch,
            "state": self._shown_state(transaction),
            "group": origin.group,
            "owner": origin.owner,
            "began_ms": origin.began_ms,
            "prepared_ms": transaction.prepared_ms,
            "age_seconds": max(0, self._active.clock.wall_ms() - since_ms) // 1000,
            "bytes": transaction.size_bytes,
            "messages": transaction.messages,
            "lost": lost,
            "damage": damage,
            "topics": topic_names(transaction)[:most],
            "expires_ms": transaction.expires_ms,
            "commit_group": "" if member is None else member.group,
        }

    def describe(self, xid: str, epoch: int) -> dict[str, Any]:
        """Return the details of the transaction `xid` (epoch 0: the latest); `state` is "unknown" if there is none."""
        transaction = self._store.transactions.get(epoch) if epoch else self._store.by_xid.get(xid)
        if transaction is not None and transaction.xid == xid:
            return self._details(transaction)
        ending = self._store.find_pending_rollback(xid, epoch)
        if ending is not None:
            return {**self._details(ending), "state": states.ROLLING_BACK}
        outcome = self._store.find_outcome(xid, epoch)
        if outcome is not None:
            return {"xid": xid, "epoch": outcome.epoch, "state": outcome.state, "decided_ms": outcome.time_ms}
        if (xid, epoch) in self._active.read_only:
            return {"xid": xid, "epoch": epoch, "state": states.READ_ONLY}
        return {"xid": xid, "epoch": 0, "state": UNKNOWN}

    def describe_commit(self, lsn: int) -> dict[str, Any] | None:
        """Return the details of the transaction whose commit record is at `lsn`; None if the table no longer has it.

        For a commit of several transactions, the result names only their commit group.
        """
        for transaction in islice(self._store.transactions_after(), SCANNED_MAX):
            decision = transaction.decision
            if decision is not None and decision.lsn == lsn:
                details = self._details(transaction)
                return (
                    details
                    if len(decision.transactions) == 1
                    else {**_of_group(details), "decided_ms": decision.time_ms}
                )
        return None

    def read_commit(self, lsn: int) -> dict[str, Any]:
        """Return what the commit record at `lsn` says, for a transaction that the table no longer has. Any thread.

        `state` is "unknown" if the journal no longer has the record: its files are deleted once all transactions in
        them are applied. `xid` is "" if the record does not have it. Raises OSError, Closed.
        """
        found = self._store.read_operation(lsn)
        known: dict[str, Any] = {"xid": "", "epoch": 0, "state": UNKNOWN}
        match found:
            case journal_records.LocalCommitRecord():
                origin = found.origin
                known |= {"xid": origin.xid, "epoch": found.epoch, "began_ms": origin.began_ms, "owner": origin.owner}
                known |= {"group": origin.group, "local": origin.local, "messages": found.messages}
            case journal_records.CommitRecord():
                known |= {"xid": found.xid, "epoch": found.epoch}
            case journal_records.HeuristicCommitRecord():
                return known | {"epoch": found.epoch, "state": states.HEURISTIC_COMMITTED, "decided_ms": found.time_ms}
            case journal_records.GroupCommitRecord():
                known |= {"commit_group": found.group, "sequence": found.sequence, "run": found.run}
            case _:
                return known
        return known | {"state": states.COMMITTED, "decided_ms": found.time_ms}

    def _details(self, transaction: Transaction) -> dict[str, Any]:
        count, client = self._active.check_back.query_history(transaction.epoch)
        member = transaction.origin.member
        return {
            **self._row(transaction),
            "topics": topic_names(transaction)[:TOPICS_DESCRIBED],
            "batches": transaction.locations.batch_count,
            "offset_groups": [each.group for each in transaction.offsets],
            "decided_ms": transaction.decided_ms,
            "asked": count,
            "asked_last": client,
            "local": transaction.origin.local,
            "waits_for": self._waits_for(transaction),
            "sequence": -1 if member is None else member.sequence,
            "run": "" if member is None else member.run,
        }

    def _waits_for(self, transaction: Transaction) -> dict[str, str]:
        progress = _apply_progress(transaction)
        if progress is None or progress.is_durable:
            return {}
        applier = self._active.applier
        parked = [each for each in applier.blocked_targets().items() if applier.has_target(each[0], progress)]
        return {applier.target_name(key): why for key, why in parked[:TARGETS_DESCRIBED]}

    def _age_seconds(self, time_ms: float | None) -> int:
        return 0 if time_ms is None else int(max(0, self._active.clock.wall_ms() - time_ms)) // 1000

    def _oldest_open_ms(self) -> int | None:
        """Return when the oldest open transaction began, by wall-clock time; None without one."""
        epoch = self._active.open_timeouts.first_epoch
        transaction = None if epoch is None else self._store.transactions.get(epoch)
        return None if transaction is None else transaction.origin.began_ms

    def status(self) -> dict[str, Any]:
        """Return the part "transactions" of the reply to STATUS."""
        counts, active = self._store.state_counts, self._active
        oldest_ms = active.prepared_ms.lowest
        age_seconds = self._age_seconds(oldest_ms)
        return {
            "open": counts[states.OPEN],
            "oldest_open_seconds": self._age_seconds(self._oldest_open_ms()),
            "prepared": len(active.prepared_ms),
            "applying": counts[states.APPLYING] + active.applier.blocked_count,
            "heuristic": sum(counts[each] for each in states.HEURISTIC_STATES),
            "oldest_prepared_seconds": age_seconds,
            "alarm": oldest_ms is not None and age_seconds > active.settings["alarm_seconds"],
            "waits_for": sorted(map(active.applier.target_name, active.applier.blocked_targets()))[:TARGETS_DESCRIBED],
            "journal": self._store.stopped or "open",
            "journal_bytes": self._store.journal_bytes,
        }


def _of_group(details: dict[str, Any]) -> dict[str, Any]:
    """Return those details of a transaction that it has in common with all others of its commit group."""
    common = {name: details[name] for name in ("state", "commit_group", "sequence", "run")}
    return {"xid": "", "epoch": 0, **common}


def _apply_progress(transaction: Transaction) -> ApplyProgress | None:
    runtime: TransactionRuntimeState | None = transaction.runtime
    return None if runtime is None else runtime.apply_progress
