"""Makes the model of the transaction rig from the diaries of its clients."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.rigs.transaction_model import ABSENT, COMMITTED, NEVER, PREPARED, Fate, Model, Transaction

MEANS: dict[str, Fate] = {"prepare": PREPARED, "commit": COMMITTED, "rollback": ABSENT}
DECIDED: dict[str, Fate] = {"transaction_rolled_back": ABSENT, "transaction_committed": COMMITTED}


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The entries of a diary; the last one may be torn, since its writer may have been killed."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return


def model_of(diaries: Sequence[Path], down: Sequence[tuple[int, int]], troubles: dict[str, int] | None = None) -> Model:
    """What the clients know, all together. Answers that came while the power was away (`down`: from, to) are
    none. `troubles` counts the errors that they met, by code.
    """
    reader = Reader()
    for path in diaries:
        for entry in lines(path):
            if entry["event"] == "trouble":
                if troubles is not None:
                    troubles[entry["code"]] = troubles.get(entry["code"], 0) + 1
            elif entry["event"] not in ("answer", "stored") or not _away(entry["at"], down):
                reader.note(entry)
    model = reader.model
    for number, transaction in enumerate(model.transactions.values(), 1):
        transaction.epoch = number
        for at in (transaction.asked, transaction.answered):
            model.ticks = max(model.ticks, at if at != NEVER else 0)
    return model


def _away(at: int, down: Sequence[tuple[int, int]]) -> bool:
    return any(first <= at <= last for first, last in down)


class Reader:
    """Learns entry by entry; the ticks of its model are times."""

    def __init__(self) -> None:
        self.model = Model()
        self._before: dict[Transaction, frozenset[Fate]] = {}

    def note(self, entry: dict[str, Any]) -> None:
        event, label, model = entry["event"], entry["label"], self.model
        if event == "begin":
            model.begin(label, entry["xid"])
        elif event == "send":
            payload = entry["payload"].ljust(entry["size"], ".").encode()
            model.transactions[label].messages[entry["topic"], entry["partition"]].append(payload)
        elif event == "plain":
            stream = model.streams.get(label) or model.stream(label, (entry["topic"], entry["partition"]))
            numbers = range(entry["first"], entry["first"] + entry["count"])
            stream.sent += [f"{label}:{number}:".encode() for number in numbers]
        elif event == "stored":
            model.streams[label].safe = entry["count"]
        elif event == "ask":
            self._asked(model.transactions[label], MEANS[entry["what"]], entry["at"])
        elif event == "answer":
            self._answered(model.transactions[label], entry)

    def _asked(self, transaction: Transaction, fate: Fate, at: int) -> None:
        self._before[transaction] = transaction.fates
        transaction.may_be(fate)
        if fate is COMMITTED:
            transaction.asked = min(transaction.asked, at)

    def _answered(self, transaction: Transaction, entry: dict[str, Any]) -> None:
        code = entry["code"]
        fate = MEANS[entry["what"]] if code == "ok" else DECIDED.get(code)
        if fate is not None:
            transaction.is_now(fate)
            if fate is COMMITTED:
                transaction.answered = min(transaction.answered, entry["at"])
        elif entry.get("outcome") == "not done":
            transaction.fates = self._before.get(transaction, transaction.fates)
