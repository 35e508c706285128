"""Planted bugs: state of live transactions: fsync, locks, reserved space, time-outs, sessions, check-back."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

APPLYING: Final = "tests/transaction/test_applier.py"
BEGINNING: Final = "tests/transaction/test_commands.py"
BOOKS: Final = "tests/transaction/test_active_transactions.py"
CHECKS: Final = "tests/transaction/test_check_back.py"
ENDING: Final = "tests/transaction/test_commands.py"
HANDLER: Final = "tests/transaction/test_coordinator.py"
HAZARDS: Final = "tests/transaction/test_hazards.py"
PREPARING: Final = "tests/transaction/test_commands.py"
RESERVATIONS: Final = "tests/transaction/test_active_transactions.py"
SESSIONS: Final = "tests/transaction/test_active_transactions.py"
TIMEOUTS: Final = "tests/transaction/test_deadlines.py"
TRANSACTING: Final = "tests/transaction/test_commands.py"

TRANSACTION_BOOKS: Final = (
    Mutant(
        "decision-applied-before-its-fsync",
        "nothing of a transaction is visible before its decision is durable",
        "tfmq/transaction/active_transactions.py",
        "        self.store.when_durable(decision.lsn, lambda error: self._decision_durable(progress, error))\n",
        "        self._decision_durable(progress, None)\n",
        [BOOKS, ENDING, HAZARDS, TRANSACTING],
    ),
    Mutant(
        "decision-applied-although-its-fsync-failed",
        "nothing is visible whose decision may be lost",
        "tfmq/transaction/active_transactions.py",
        "            if error is None:\n                self.applier.start(first)\n",
        "            if first:\n                self.applier.start(first)\n",
        [BOOKS, ENDING, HAZARDS],
    ),
    Mutant(
        "prepared-keeps-its-place-in-the-session",
        "a prepared transaction does not count against the limit of its session",
        "tfmq/transaction/active_transactions.py",
        (
            "        runtime_state(transaction).lsn = lsn\n"
            "        self._untrack_open(transaction.epoch)\n"
            "        self._track_prepared(transaction)\n"
        ),
        ("        runtime_state(transaction).lsn = lsn\n        self._track_prepared(transaction)\n"),
        [BEGINNING],
    ),
    Mutant(
        "offsets-free-before-the-rollback-is-on-the-disk",
        "offsets in doubt are unlocked when no crash can restore the transaction",
        "tfmq/transaction/active_transactions.py",
        "            self.store.when_durable(lsn, lambda error: self._unlock_offsets(locked, error))\n",
        "            self._unlock_offsets(locked, None)\n",
        [BOOKS, ENDING],
    ),
    Mutant(
        "offsets-of-a-commit-stay-locked",
        "offsets of an ended transaction are unlocked",
        "tfmq/transaction/active_transactions.py",
        (
            "                self.apply_target.unlock_offsets(transaction.epoch)\n"
            "            if progress.dropped_messages:\n"
        ),
        ("                pass\n            if progress.dropped_messages:\n"),
        [BOOKS, ENDING, APPLYING, HANDLER],
    ),
    Mutant(
        "offsets-free-after-a-start",
        "offsets in doubt are locked again before the first request is served",
        "tfmq/transaction/active_transactions.py",
        "            if transaction.offsets:\n                self.apply_target.lock_offsets(",
        "            if not transaction.epoch:\n                self.apply_target.lock_offsets(",
        [BOOKS, HANDLER],
    ),
    Mutant(
        "start-applies-in-any-order",
        "decisions are applied in the order of their positions, also after a restart",
        "tfmq/transaction/active_transactions.py",
        "        for lsn in sorted(decisions):\n",
        "        for lsn in sorted(decisions, reverse=True):\n",
        [BOOKS, HANDLER, HAZARDS],
    ),
    Mutant(
        "space-of-a-prepared-one-given-away-by-a-start",
        "the space of a prepared transaction is reserved, also after a restart",
        "tfmq/transaction/active_transactions.py",
        "                self.reservations.restore(transaction.size_bytes)\n",
        "",
        [BOOKS, HANDLER],
    ),
    Mutant(
        "half-a-reservation-kept",
        "space is reserved at all targets or at none",
        "tfmq/transaction/active_transactions.py",
        ("            if taken:\n                self._apply_target.release_bytes(taken)\n            raise\n"),
        "            raise\n",
        [RESERVATIONS],
    ),
    Mutant(
        "transactions-of-any-size",
        "the size of a transaction in bytes is limited",
        "tfmq/transaction/active_transactions.py",
        '("bytes", "transaction_bytes", transaction.size_bytes + size_bytes)',
        '("bytes", "transaction_bytes", transaction.size_bytes)',
        [RESERVATIONS],
    ),
    Mutant(
        "any-number-of-batches",
        "the number of batches of a transaction is limited",
        "tfmq/transaction/active_transactions.py",
        '("batches", "transaction_pieces", transaction.locations.batch_count + batches)',
        '("batches", "transaction_pieces", transaction.locations.batch_count + batches - 1)',
        [RESERVATIONS],
    ),
    Mutant(
        "named-transaction-ends-with-its-session",
        "only a local transaction ends with its session",
        "tfmq/transaction/active_transactions.py",
        "        return [epoch for epoch, local in epochs.items() if local]\n",
        "        return list(epochs)\n",
        [SESSIONS],
    ),
    Mutant(
        "cleared-time-still-ends-it",
        "a time-out that was cleared ends nothing",
        "tfmq/transaction/deadlines.py",
        ("            if self._values.get(epoch) == due:\n                del self._values[epoch]\n"),
        ("            if due:\n                self._values.pop(epoch, None)\n"),
        [TIMEOUTS],
    ),
    Mutant(
        "earlier-time-waits-for-a-later-one",
        "a transaction ends at its time-out, whatever was set before",
        "tfmq/transaction/deadlines.py",
        ("        if self._timer is not None and self._timer_due <= due:\n            return\n"),
        ("        if self._timer is not None:\n            return\n"),
        [TIMEOUTS],
    ),
    Mutant(
        "prepared-for-a-while-and-not-checked-back",
        "the owner of a transaction that is prepared for long is asked for its outcome",
        "tfmq/transaction/active_transactions.py",
        "            self.check_back.watch_transaction(transaction.epoch, transaction.origin.group, age_seconds)\n",
        "            self.check_back.watch_transaction(transaction.epoch, transaction.origin.group, -1e9)\n",
        [BOOKS, HANDLER, PREPARING],
    ),
    Mutant(
        "asked-before-the-prepare-is-fsynced",
        "no client is asked about a transaction before its prepare is durable",
        "tfmq/transaction/active_transactions.py",
        "        self.store.when_durable(lsn, lambda error: self._prepare_durable(transaction, error))\n",
        "        self._prepare_durable(transaction, None)\n",
        [BOOKS],
    ),
    Mutant(
        "never-asked-after-an-end-that-was-refused",
        "a transaction whose end was refused is checked back, whenever its prepare became durable",
        "tfmq/transaction/active_transactions.py",
        "        if error is None and transaction.state in states.IN_DOUBT_STATES:\n",
        "        if error is None and transaction.state == states.PREPARED:\n",
        [BOOKS],
    ),
    Mutant(
        "asked-about-once",
        "a transaction is checked back repeatedly until it ends",
        "tfmq/transaction/check_back.py",
        "                epoch, backoff_seconds(asked.query_count + 1, self._check_seconds, QUERY_PAUSE_SECONDS_MAX)\n",
        "",
        [CHECKS],
    ),
    Mutant(
        "checked-back-after-its-end",
        "no client is asked about a transaction that has ended",
        "tfmq/transaction/check_back.py",
        (
            "            due.pop(epoch, None)\n"
            "            if not due:\n"
            "                del self._due_epochs[asked.group]\n"
        ),
        "            pass\n",
        [CHECKS],
    ),
    Mutant(
        "lost-client-asked",
        "a client that is disconnected is not asked",
        "tfmq/transaction/check_back.py",
        ("        for wait in list(self._sessions.get(session, ())):\n            self._unregister(wait)\n"),
        "        return\n",
        [CHECKS],
    ),
)
