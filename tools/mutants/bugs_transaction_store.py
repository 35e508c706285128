"""Bugs to plant in what the store of transactions knows: its fold, snapshots, streams, and what it hands out."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

CODE: Final = "tfmq/transaction/"
TESTS: Final = "tests/transaction/test_"


def _bug(name: str, promise: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name, promise, f"{CODE}{file}.py", old, new, [f"{TESTS}{test}.py" for test in tests])


LEDGER: Final = (
    _bug(
        "time-goes-back-with-the-clock",
        "what expires does so by the latest time in any record",
        "ledger",
        "max(self.time_ms, operation.time_ms)",
        "operation.time_ms",
        "ledger",
    ),
    _bug(
        "copies-are-taken-for-new-messages",
        "a batch that was carried forward is not counted twice",
        "ledger",
        "        if moved_from:\n",
        "        if moved_from < 0:\n",
        "ledger",
    ),
    _bug(
        "lost-messages-give-their-numbers-away",
        "messages that a repair lost keep their numbers",
        "ledger",
        "        if missing and self.repaired:",
        "        if missing < 0:",
        "ledger",
    ),
    _bug(
        "missing-messages-are-not-noticed",
        "a prepared transaction is never shorter than it was, in silence",
        "ledger",
        "if missing < 0 or not self.repaired:",
        "if missing < 0:",
        "ledger",
    ),
    _bug(
        "epochs-go-back",
        "epochs never go back",
        "ledger",
        "self.epochs_end = max(self.epochs_end, said.end)",
        "self.epochs_end = said.end",
        "ledger",
    ),
    _bug(
        "the-latest-key-counts",
        "outcomes are found under the key of the first record",
        "ledger",
        "outcomes.key = outcomes.key or said.key",
        "outcomes.key = said.key",
        "ledger",
        "store",
    ),
    _bug(
        "decided-members-stay-in-their-group",
        "what is decided is no member of its commit group any more",
        "ledger",
        " and transaction.decision is None and not transaction.settled:",
        ":",
        "ledger",
        "commit_groups",
    ),
    _bug(
        "open-ones-survive-a-start",
        "what was never prepared is rolled back at recovery",
        "ledger",
        "if each.state == states.OPEN]",
        "if each.state == states.READ_ONLY]",
        "ledger",
        "store",
    ),
    _bug(
        "decided-ones-are-carried-forward",
        "what is decided stays where it is in the journal",
        "ledger",
        "if transaction is None or transaction.decision is not None or transaction.settled:",
        "if transaction is None:",
        "ledger",
        "relocation",
    ),
    _bug(
        "an-older-one-takes-the-name-away",
        "a name belongs to its latest transaction",
        "ledger",
        "if origin.xid and self.named.get(origin.xid) is transaction:",
        "if origin.xid in self.named:",
        "ledger",
        "store",
    ),
    _bug(
        "by-hand-is-a-plain-outcome",
        "a heuristic outcome is a plain one only when it is forgotten",
        "ledger",
        "            if event == states.DECIDE:\n",
        "            if event:\n",
        "recording",
    ),
    _bug(
        "local-outcomes-push-out-named-ones",
        "local transactions do not push out the outcomes of named ones",
        "ledger",
        "self.local_outcomes if origin.local else self.outcomes",
        "self.outcomes",
        "store",
    ),
    _bug(
        "a-prepare-leaves-its-stream-behind",
        "the request that began a prepared one finds it after a restart",
        "ledger",
        "        self._ended(transaction, states.PREPARED)\n",
        "",
        "streams",
    ),
    _bug(
        "prepared-ones-without-their-offsets",
        "a prepare keeps the offsets of groups",
        "ledger",
        "        transaction.offsets = said.offsets\n",
        "",
        "recording",
    ),
)
SNAPSHOTS: Final = (
    _bug(
        "a-snapshot-shares-what-moves",
        "a snapshot that is being packed has the places of its time",
        "moves",
        "if transaction.epoch not in self._copied:",
        "if not transaction.epoch:",
        "moves",
        "ledger",
    ),
    _bug(
        "a-snapshot-has-what-came-later",
        "what is sent behind a capture is not in it",
        "snapshot",
        "packed(locations[:words])",
        "packed(Locations(locations))",
        "snapshot",
    ),
    _bug(
        "an-open-one-comes-back-prepared",
        "a step without its record is not in a snapshot",
        "snapshot",
        "        0 if opened else transaction.prepared_ms,\n",
        "        transaction.prepared_ms,\n",
        "snapshot",
    ),
    _bug(
        "a-group-comes-back-apart",
        "members of a commit group come back with one decision",
        "snapshot",
        "            _share([by_epoch[epoch] for epoch in epochs])\n",
        "            by_epoch[epochs[0]]\n",
        "ledger",
        "commit_groups",
    ),
    _bug(
        "an-applied-one-is-left-as-it-was",
        "what is applied and not settled is applied again after a crash",
        "snapshot",
        "    states.COMMITTED: states.APPLYING,\n",
        "",
        "snapshot",
    ),
)
STREAMS: Final = (
    _bug(
        "an-old-number-is-a-new-transaction",
        "a number below the last is never taken for a new one",
        "streams",
        "        if number < last:\n",
        "        if number < NO_NUMBER:\n",
        "streams",
    ),
    _bug(
        "a-late-end-hides-a-later-one",
        "a stream remembers its highest number",
        "streams",
        "        if number >= stream.number:\n",
        "        if number >= NO_NUMBER:\n",
        "streams",
    ),
    _bug(
        "senders-are-idle",
        "who sends is not idle",
        "streams",
        "            self._streams.move_to_end(producer_id)\n",
        "            pass\n",
        "streams",
    ),
    _bug(
        "no-floor",
        "what is forgotten is never taken for new",
        "streams",
        "        self.floor = max(self.floor, producer_id)\n",
        "",
        "streams",
    ),
    _bug(
        "another-transactions-piece-is-a-repeat",
        "a piece is a repeat only in its own transaction",
        "streams",
        "if begin_epoch == epoch and begin <= sequence",
        "if begin <= sequence",
        "streams",
    ),
    _bug(
        "an-earlier-piece-is-a-repeat",
        "what an earlier transaction sent is no repeat",
        "streams",
        "begin <= sequence and sequence + count",
        "sequence + count",
        "streams",
    ),
    _bug(
        "queued-pieces-are-forgotten",
        "what is queued counts for whoever comes next",
        "streams",
        "if staged is not None and staged[2] == stream.next:",
        "if staged is not None:",
        "streams",
    ),
)
SLICES: Final = (
    _bug(
        "parts-are-whole-pieces",
        "only the first part of a batch tells its offset",
        "slices",
        "            index = PART\n\n    def _put",
        "\n    def _put",
        "slices",
    ),
    _bug(
        "a-cut-batch-keeps-its-sequence",
        "a batch that goes on has the sequence of its first record",
        "slices",
        "sequence + skipped, count - skipped",
        "sequence, count - skipped",
        "slices",
    ),
    _bug(
        "what-is-there-comes-again",
        "behind a message comes what is behind it",
        "slices",
        "return (row + (last <= after)) * ROW_WORDS",
        "return row * ROW_WORDS",
        "slices",
    ),
    _bug(
        "lost-ones-stop-the-rest",
        "what a repair gave up does not hold up the rest",
        "slices",
        "            slicing.lose(number + count - 1)\n",
        "",
        "slices",
    ),
    _bug(
        "a-target-ends-too-late",
        "the last number of a target is that of its last message",
        "transaction",
        "last = plan[-3] + (plan[-2] >> SIZE_BITS) - 1",
        "last = plan[-3] + (plan[-2] >> SIZE_BITS)",
        "transaction",
    ),
)

TRANSACTION_STORE: Final = LEDGER + SNAPSHOTS + STREAMS + SLICES
