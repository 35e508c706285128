"""Bugs to plant in what the store of transactions knows: its fold, snapshots, streams, and what it hands out."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

TESTS: Final = "tests/transaction/test_"


def _bug(name: str, promise: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name, promise, file, old, new, [f"{TESTS}{test}.py" for test in tests])


LEDGER: Final = (
    _bug(
        "time-goes-back-with-the-clock",
        "what expires does so by the latest time in any record",
        "tfmq/transaction/transaction_table.py",
        "max(self.latest_ms, operation.time_ms)",
        "operation.time_ms",
        "ledger",
    ),
    _bug(
        "copies-are-taken-for-new-messages",
        "a batch that was carried forward is not counted twice",
        "tfmq/transaction/transaction_table.py",
        "        if moved_from:\n",
        "        if moved_from < 0:\n",
        "ledger",
    ),
    _bug(
        "lost-messages-give-their-numbers-away",
        "messages that a repair lost keep their numbers",
        "tfmq/transaction/transaction_table.py",
        "        if missing and self.fillers_seen:\n",
        "        if missing < 0:\n",
        "ledger",
    ),
    _bug(
        "a-loss-is-not-counted",
        "messages that a repair gave up before the snapshot are counted",
        "tfmq/transaction/transaction_table.py",
        "                    transaction.lost_messages += count\n",
        "",
        "ending",
    ),
    _bug(
        "what-was-never-prepared-must-be-whole",
        "damage in what is about to be dropped ends no start",
        "tfmq/transaction/transaction_table.py",
        "            if transaction.state != states.OPEN:\n                yield",
        "            if True:\n                yield",
        "ending",
    ),
    _bug(
        "a-commit-of-the-rest-is-told-as-done",
        "a prepared transaction that lost messages is not committed unless an operator says so",
        "tfmq/transaction/commands.py",
        "            if transaction.lost_messages and not force:\n",
        "            if transaction.lost_messages and force:\n",
        "ending",
    ),
    _bug(
        "a-loss-behind-the-decision-is-not-told",
        "the commit of a transaction that lost messages is never told to its owner as done",
        "tfmq/transaction/commands.py",
        "    elif lost and not by_hand:\n",
        "    elif lost and by_hand:\n",
        "ending",
    ),
    _bug(
        "damage-of-the-journal-is-told-as-a-stopped-partition",
        "a decided transaction that cannot be read says that the journal is damaged",
        "tfmq/transaction/applier.py",
        "            self._queue[0].progress.damage = str(error)\n",
        "            pass\n",
        "applying",
    ),
    _bug(
        "a-group-commits-without-what-is-lost",
        "a commit group is committed whole or not at all, also after damage",
        "tfmq/transaction/commit_group_commands.py",
        "                and not found.lost_messages\n",
        "",
        "group_commits",
    ),
    _bug(
        "missing-messages-are-not-noticed",
        "a prepared transaction is never shorter than it was, in silence",
        "tfmq/transaction/transaction_table.py",
        "            if missing < 0 or not self.fillers_seen:\n",
        "            if missing < 0:\n",
        "ledger",
    ),
    _bug(
        "epochs-go-back",
        "epochs never go back",
        "tfmq/transaction/transaction_table.py",
        "        self.epochs_end = max(self.epochs_end, record.end)\n",
        "        self.epochs_end = record.end\n",
        "ledger",
    ),
    _bug(
        "the-latest-key-counts",
        "outcomes are found under the key of the first record",
        "tfmq/transaction/transaction_table.py",
        "            outcomes.key = outcomes.key or record.key\n",
        "            outcomes.key = record.key\n",
        "ledger",
        "store",
    ),
    _bug(
        "decided-members-stay-in-their-group",
        "what is decided is no member of its commit group any more",
        "tfmq/transaction/transaction_table.py",
        "        if origin.member is not None and transaction.decision is None and not transaction.obsolete:\n",
        "        if origin.member is not None:\n",
        "ledger",
        "commit_groups",
    ),
    _bug(
        "open-ones-survive-a-start",
        "what was never prepared is rolled back at recovery",
        "tfmq/transaction/transaction_table.py",
        "if each.state == states.OPEN]",
        "if each.state == states.READ_ONLY]",
        "ledger",
        "store",
    ),
    _bug(
        "decided-ones-are-carried-forward",
        "what is decided stays where it is in the journal",
        "tfmq/transaction/transaction_table.py",
        "        if transaction is None or transaction.decision is not None or transaction.obsolete:\n",
        "        if transaction is None:\n",
        "ledger",
        "relocation",
    ),
    _bug(
        "an-older-one-takes-the-name-away",
        "a name belongs to its latest transaction",
        "tfmq/transaction/transaction_table.py",
        "        if origin.xid and self.by_xid.get(origin.xid) is transaction:\n",
        "        if origin.xid in self.by_xid:\n",
        "ledger",
        "store",
    ),
    _bug(
        "by-hand-is-a-plain-outcome",
        "a heuristic outcome is a plain one only when it is forgotten",
        "tfmq/transaction/transaction_table.py",
        "            if event == states.COMMIT:\n",
        "            if event:\n",
        "recording",
    ),
    _bug(
        "local-outcomes-push-out-named-ones",
        "local transactions do not push out the outcomes of named ones",
        "tfmq/transaction/transaction_table.py",
        "self.local_outcomes if origin.local else self.outcomes",
        "self.outcomes",
        "store",
    ),
    _bug(
        "a-prepare-leaves-its-stream-behind",
        "the request that began a prepared one finds it after a restart",
        "tfmq/transaction/transaction_table.py",
        "        self._record_producer_outcome(transaction, states.PREPARED)\n",
        "",
        "streams",
    ),
    _bug(
        "prepared-ones-without-their-offsets",
        "a prepare keeps the offsets of groups",
        "tfmq/transaction/transaction_table.py",
        "        transaction.offsets = record.offsets\n",
        "",
        "recording",
    ),
)
SNAPSHOTS: Final = (
    _bug(
        "a-snapshot-shares-what-moves",
        "a snapshot that is being packed has the places of its time",
        "tfmq/transaction/transaction_table.py",
        "if transaction.epoch not in self._copied:",
        "if not transaction.epoch:",
        "moves",
        "ledger",
    ),
    _bug(
        "a-snapshot-has-what-came-later",
        "what is sent behind a capture is not in it",
        "tfmq/transaction/snapshot.py",
        "        pack_locations(locations[:words]),\n",
        "        pack_locations(BatchLocations(locations)),\n",
        "snapshot",
    ),
    _bug(
        "an-open-one-comes-back-prepared",
        "a step without its record is not in a snapshot",
        "tfmq/transaction/snapshot.py",
        "        0 if opened else transaction.prepared_ms,\n",
        "        transaction.prepared_ms,\n",
        "snapshot",
    ),
    _bug(
        "a-group-comes-back-apart",
        "members of a commit group come back with one decision",
        "tfmq/transaction/snapshot.py",
        "            _share_decision([by_epoch[epoch] for epoch in epochs])\n",
        "            by_epoch[epochs[0]]\n",
        "ledger",
        "commit_groups",
    ),
    _bug(
        "an-applied-one-is-left-as-it-was",
        "what is applied and not settled is applied again after a crash",
        "tfmq/transaction/snapshot.py",
        "    states.COMMITTED: states.APPLYING,\n",
        "",
        "snapshot",
    ),
)
STREAMS: Final = (
    _bug(
        "an-old-number-is-a-new-transaction",
        "a number below the last is never taken for a new one",
        "tfmq/transaction/producer_state.py",
        "        if number < last:\n",
        "        if number < NO_NUMBER:\n",
        "streams",
    ),
    _bug(
        "a-late-end-hides-a-later-one",
        "a stream remembers its highest number",
        "tfmq/transaction/producer_state.py",
        "        if number >= stream.last_number:\n",
        "        if number >= NO_NUMBER:\n",
        "streams",
    ),
    _bug(
        "senders-are-idle",
        "who sends is not idle",
        "tfmq/transaction/producer_state.py",
        "            self._producers.move_to_end(producer_id)\n",
        "            pass\n",
        "streams",
    ),
    _bug(
        "no-floor",
        "what is forgotten is never taken for new",
        "tfmq/transaction/producer_state.py",
        "        self.expired_id = max(self.expired_id, producer_id)\n",
        "",
        "streams",
    ),
    _bug(
        "another-transactions-piece-is-a-repeat",
        "a piece is a repeat only in its own transaction",
        "tfmq/transaction/producer_state.py",
        "if begin_epoch == epoch and begin <= sequence",
        "if begin <= sequence",
        "streams",
    ),
    _bug(
        "an-earlier-piece-is-a-repeat",
        "what an earlier transaction sent is no repeat",
        "tfmq/transaction/producer_state.py",
        "begin <= sequence and sequence + count",
        "sequence + count",
        "streams",
    ),
    _bug(
        "queued-pieces-are-forgotten",
        "what is queued counts for whoever comes next",
        "tfmq/transaction/producer_state.py",
        "        if staged is not None and staged[2] == stream.next_sequence:\n",
        "        if staged is not None:\n",
        "streams",
    ),
)
SLICES: Final = (
    _bug(
        "parts-are-whole-pieces",
        "only the first part of a batch tells its offset",
        "tfmq/transaction/slicer.py",
        (
            "            index = CONTINUED\n"
            "\n"
            "    def _append(self, batch: Batch, number: int, index: int) -> None:\n"
        ),
        ("\n    def _append(self, batch: Batch, number: int, index: int) -> None:\n"),
        "slices",
    ),
    _bug(
        "a-cut-batch-keeps-its-sequence",
        "a batch that goes on has the sequence of its first record",
        "tfmq/transaction/slicer.py",
        "sequence + skipped, count - skipped",
        "sequence, count - skipped",
        "slices",
    ),
    _bug(
        "what-is-there-comes-again",
        "behind a message comes what is behind it",
        "tfmq/transaction/slicer.py",
        "return (row + (last <= after)) * ROW_WORDS",
        "return row * ROW_WORDS",
        "slices",
    ),
    _bug(
        "lost-ones-stop-the-rest",
        "what a repair gave up does not hold up the rest",
        "tfmq/transaction/slicer.py",
        "            slicing.skip_lost(number, count)\n",
        "",
        "slices",
    ),
    _bug(
        "a-target-ends-too-late",
        "the last number of a target is that of its last message",
        "tfmq/transaction/model.py",
        "last = plan[-3] + (plan[-2] >> SIZE_BITS) - 1",
        "last = plan[-3] + (plan[-2] >> SIZE_BITS)",
        "transaction",
    ),
)

TRANSACTION_STORE: Final = LEDGER + SNAPSHOTS + STREAMS + SLICES
