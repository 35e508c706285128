"""Planted bugs: transactions that are decided and applied, with a crash in between.

The crash matrix (tests/crash/transaction_matrix.py) and the simulation of the whole broker
(tests/transaction/test_simulation.py) have to find each of them.
"""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

KILLS: Final = "tests/crash/test_transaction_kills.py"
POWER: Final = f"{KILLS}::test_a_power_cut_at_any_point_leaves_all_or_nothing"
KILL: Final = f"{KILLS}::test_a_kill_at_any_point_leaves_all_or_nothing"
TORN: Final = "tests/crash/test_transaction_torn_writes.py::test_a_torn_record_at_any_point_leaves_all_or_nothing"
INPUT_OUTPUT: Final = (
    "tests/crash/test_transaction_disk_errors.py::test_an_input_output_error_at_any_point_leaves_all_or_nothing"
)
REPEATED: Final = f"{KILLS}::test_recovery_once_twice_and_ten_times_finds_the_same"
INTERRUPTED: Final = f"{KILLS}::test_a_recovery_that_is_killed_changes_nothing"
PREPARING: Final = "tests/transaction/test_commands.py"
SIMULATION: Final = "tests/transaction/test_simulation.py"

MANY: Final = 0.1
"""More of the matrix than `make test` runs: these bugs need the right boundary."""

DECISIONS: Final = (
    Mutant(
        "visible-before-the-decision-is-fsynced",
        "the decision is durable before anything of it is visible",
        "tfmq/transaction/active_transactions.py",
        "        self.store.when_durable(decision.lsn, lambda error: self._decision_durable(progress, error))\n",
        "        self._decision_durable(progress, None)\n",
        [POWER, SIMULATION],
        MANY,
    ),
    Mutant(
        "prepared-before-it-is-fsynced",
        "prepare is acknowledged when it is durable",
        "tfmq/transaction/commands.py",
        (
            "                self._store.when_durable(\n"
            "                    lsn, partial(reply_when_durable, done, PrepareResult(states.PREPARED,"
            " expires_ms))\n"
            "                )\n"
        ),
        "                reply_when_durable(done, PrepareResult(states.PREPARED, expires_ms), None)\n",
        # The rigs have no moment between this answer and the force, which the same turn asks for: the desk has.
        [PREPARING, POWER, SIMULATION],
        MANY,
    ),
    Mutant(
        "rolled-back-before-it-is-fsynced",
        "the rollback of a prepared transaction is acknowledged when it is durable",
        "tfmq/transaction/commands.py",
        "            self._store.when_durable(lsn, partial(reply_when_durable, done or _ignore_result, result))\n",
        "            reply_when_durable(done or _ignore_result, result, None)\n",
        [POWER, SIMULATION],
        MANY,
    ),
    Mutant(
        "decisions-overtake-each-other",
        "decisions are applied to their targets in the order of their records",
        "tfmq/transaction/active_transactions.py",
        "            first = self.undurable_decisions.popleft()\n",
        "            first = self.undurable_decisions.pop()\n",
        [KILL, SIMULATION],
        MANY,
    ),
    Mutant(
        "group-commits-its-first-member",
        "a commit group is committed as a whole by one record",
        "tfmq/transaction/transaction_table.py",
        "                self._apply_commit(lsn, time_ms, self._existing(*members), states.COMMIT)\n",
        "                self._apply_commit(lsn, time_ms, self._existing(*members[:1]), states.COMMIT)\n",
        [KILL],
    ),
    Mutant(
        "group-drops-no-member",
        "a commit of a group drops its other members in the same record",
        "tfmq/transaction/transaction_table.py",
        (
            "                self._roll_back(lsn, time_ms, self._existing(*dropped))\n"
            "            case journal_records.GroupAbortRecord("
        ),
        "            case journal_records.GroupAbortRecord(",
        [KILL],
    ),
    Mutant(
        "offsets-inside-never-saved",
        "offsets in a transaction are committed with its messages",
        "tfmq/transaction/applier.py",
        "        offsets = any(each.offsets for each in progress.decision.transactions)\n",
        "        offsets = False\n",
        [KILL],
    ),
)

APPLYING: Final = (
    Mutant(
        "applied-again-by-a-start",
        "what a partition has of a decision is not applied again",
        "tfmq/transaction/applier.py",
        "        while applied is not None and self._queue and self._queue[0].position <= applied:\n",
        "        while applied is not None and self._queue and self._queue[0].position <= (0, 0):\n",
        [KILL, POWER],
        MANY,
    ),
    Mutant(
        "settled-before-it-is-on-the-disk",
        "the journal keeps messages until they are durable in their partitions",
        "tfmq/transaction/apply_progress.py",
        "        while written and self._apply_target.is_durable(written[0].result):\n",
        "        while written:\n",
        [POWER, SIMULATION],
        0.3,
    ),
    Mutant(
        "lost-by-a-resumption",
        "what a partition lost before it was resumed is applied again",
        "tfmq/transaction/applier.py",
        "            self._target_queue(key).requeue(tasks)\n",
        "            tasks.clear()\n",
        [INPUT_OUTPUT, SIMULATION],
        0.3,
    ),
)

STARTS: Final = (
    Mutant(
        "decided-ones-left-by-a-start",
        "a start applies decided transactions to their targets",
        "tfmq/transaction/active_transactions.py",
        (
            "                runtime_state(transaction).apply_progress = progress\n"
            "            self.applier.start(progress)\n"
        ),
        "                runtime_state(transaction).apply_progress = progress\n",
        [KILL, POWER],
        MANY,
    ),
    Mutant(
        "offsets-free-again-by-a-start",
        "offsets of a transaction in doubt stay locked after a restart",
        "tfmq/transaction/active_transactions.py",
        "                self.apply_target.lock_offsets(transaction.epoch, transaction.xid, transaction.offsets)\n",
        "                pass\n",
        [KILL],
    ),
    Mutant(
        "streams-forget-by-a-start",
        "a transaction that is sent again after a crash gets its first reply",
        "tfmq/transaction/transaction_table.py",
        (
            "        origin = transaction.origin\n"
            "        if origin.producer_id:\n"
            "            self.producer_states.apply_outcome(\n"
        ),
        (
            "        origin = transaction.origin\n"
            "        if origin.producer_id and self.file_references is not None:\n"
            "            self.producer_states.apply_outcome(\n"
        ),
        [POWER, KILL, TORN],
        MANY,
    ),
    Mutant(
        "epochs-start-again",
        "an epoch is never given twice",
        "tfmq/transaction/transaction_table.py",
        "                self.epochs_end = max(self.epochs_end, record.end)\n",
        "                self.epochs_end = self.epochs_end or record.end\n",
        [KILL],
    ),
    Mutant(
        "heuristics-forgotten",
        "a decision of an operator is reported until it is forgotten by request",
        "tfmq/transaction/transaction_table.py",
        "                    self.change_state(transaction, states.HEURISTIC_ROLLBACK)\n",
        "                    self.change_state(transaction, states.ROLLBACK)\n",
        [KILL],
    ),
)

TRANSACTIONS: Final[tuple[Mutant, ...]] = DECISIONS + APPLYING + STARTS
