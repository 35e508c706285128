"""The fake broker with transactions that must be decided: rows in a table, and what was asked about them.

It keeps the rules that a person at the command line meets: only what is there is decided, what was decided by hand
stays until it is forgotten, and a second decision that differs is refused.
"""

from typing import Any

from tests.client.fake_broker import FakeBroker
from tfmq.errors import (
    Damaged,
    GroupIncomplete,
    TransactionCommitted,
    TransactionRolledBack,
    TransactionState,
    UnknownTransaction,
)
from tfmq.protocol import commands

LOOKED_MAX = 1000
"""Transactions that one page of a list looks at."""


def row(xid: str, epoch: int, state: str = "prepared", **fields: Any) -> dict[str, Any]:
    """One transaction as LIST_TRANSACTIONS has it."""
    return {
        "xid": xid,
        "epoch": epoch,
        "state": state,
        "group": "shop",
        "owner": "a client at 127.0.0.1:5",
        "began_ms": 1_700_000_000_000,
        "prepared_ms": 1_700_000_001_000 if state != "open" else 0,
        "age_seconds": 90.0,
        "bytes": 2048,
        "messages": 3,
        "topics": ["orders"],
        "expires_ms": 0,
        "commit_group": "",
        **fields,
    }


class InDoubtBroker(FakeBroker):
    """Transactions are `rows`; the newest of an xid is the one that its bare name means."""

    def __init__(self, *rows: dict[str, Any]) -> None:
        super().__init__()
        self.rows = sorted(rows, key=lambda each: int(each["epoch"]))
        self.decided: list[Any] = []
        self.groups = {f"query-{number}": number for number in range(3)}
        self.alarm_seconds = 3600.0

    def status(self, request: commands.Status) -> Any:
        prepared = [each for each in self.rows if each["state"] == "prepared"]
        oldest = max((each["age_seconds"] for each in prepared), default=0.0)
        transactions = {
            "open": sum(each["state"] == "open" for each in self.rows),
            "prepared": len(prepared),
            "applying": sum(each["state"] == "applying" for each in self.rows),
            "heuristic": sum(each["state"].startswith("heuristic") for each in self.rows),
            "oldest_prepared_seconds": oldest,
            "alarm": oldest > self.alarm_seconds,
            "journal": "open",
            "journal_bytes": 4096,
        }
        settings = {"transaction.alarm_seconds": self.alarm_seconds}
        return commands.StatusReply({"version": "1", "transactions": transactions, "settings": settings})

    def list_transactions(self, request: commands.ListTransactions) -> Any:
        """Looks at a few only, as a broker with very many does: a page may be short, or empty, and not the last."""
        later_rows = [each for each in self.rows if each["epoch"] > request.after]
        looked = later_rows[: min(LOOKED_MAX, request.limit)]
        rows = [
            each
            for each in looked
            if (each["state"] in request.states if request.states is not None else each["state"] != "open")
            and request.group in ("", each["group"])
        ]
        after = looked[-1]["epoch"] if looked else request.after
        return commands.ListTransactionsReply(rows, len(later_rows) > len(looked), after)

    def describe_transaction(self, request: commands.DescribeTransaction) -> Any:
        found = self._found(request.xid, request.epoch)
        return commands.DescriptionReply(found or {"xid": request.xid, "epoch": 0, "state": "unknown"})

    def commit_transaction(self, request: commands.CommitTransaction) -> Any:
        found = self._decided(request)
        if found["state"] == "open":
            raise TransactionState()
        if "rolled_back" in found["state"]:
            raise TransactionRolledBack()
        lost = found.get("lost", 0)
        if lost and found["state"] == "prepared" and not request.force:
            raise Damaged(f"{request.xid} was not committed: {lost} of its messages were lost.")
        found["state"] = "heuristic_committed" if request.heuristic else "committed"
        return commands.CommitTransactionReply("committed", found.get("dropped", 0), [], [], lost)

    def rollback_transaction(self, request: commands.RollbackTransaction) -> Any:
        found = self._decided(request)
        if "committed" in found["state"]:
            raise TransactionCommitted()
        found["state"] = "heuristic_rolled_back" if request.heuristic else "rolled_back"
        return commands.StateReply(found["state"])

    def forget_transaction(self, request: commands.ForgetTransaction) -> Any:
        found = self._decided(request)
        forgotten = found["state"].startswith("heuristic")
        if forgotten:
            self.rows.remove(found)
        return commands.ForgottenReply(forgotten)

    def list_commit_groups(self, request: commands.ListCommitGroups) -> Any:
        names = [name for name in sorted(self.groups) if name > request.after]
        rows = [{"group": name, "sequence": self.groups[name], "members": 4} for name in names[:2]]
        return commands.ListCommitGroupsReply(rows, len(names) > 2)

    def commit_group(self, request: commands.CommitGroup) -> Any:
        if len(request.transactions) < 2:
            raise GroupIncomplete()
        return commands.CommitGroupReply("committed", request.other_total, request.rows, 1)

    def abort_commit_group(self, request: commands.AbortCommitGroup) -> Any:
        return commands.StateReply("aborted")

    def forget_commit_group(self, request: commands.ForgetCommitGroup) -> Any:
        return commands.ForgottenReply(self.groups.pop(request.group, None) is not None)

    def _found(self, xid: str, epoch: int) -> dict[str, Any] | None:
        matching = [each for each in self.rows if each["xid"] == xid and epoch in (0, each["epoch"])]
        return matching[-1] if matching else None

    def _decided(self, request: Any) -> dict[str, Any]:
        self.decided.append(request)
        found = self._found(request.xid, request.epoch)
        if found is None:
            raise UnknownTransaction()
        return found
