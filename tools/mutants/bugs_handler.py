"""Planted bugs: commands of transactions, from begin to forget, in every state."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

APPLYING: Final = "tests/transaction/test_applier.py"
BEGINNING: Final = "tests/transaction/test_commands.py"
BOOKS: Final = "tests/transaction/test_active_transactions.py"
ENDING: Final = "tests/transaction/test_commands.py"
GROUP_COMMITS: Final = "tests/transaction/test_commit_group_commands.py"
HANDLER: Final = "tests/transaction/test_coordinator.py"
HAZARDS: Final = "tests/transaction/test_hazards.py"
LISTING: Final = "tests/transaction/test_queries.py"
OUTCOMES: Final = "tests/transaction/test_outcomes.py"
PREPARING: Final = "tests/transaction/test_commands.py"
TRANSACTING: Final = "tests/transaction/test_commands.py"
REFUSALS: Final = "tests/transaction/test_rejections.py"
STATES: Final = "tests/transaction/test_states.py"
STEPS: Final = "tests/transaction/test_commands.py"

HANDLING: Final = (
    Mutant(
        "open-name-taken-twice",
        "only one live transaction has a given name",
        "tfmq/transaction/commands.py",
        "        if known is not None and known.state not in states.ENDED_STATES:\n",
        "        if known is not None and known.state in states.ENDED_STATES:\n",
        [BEGINNING],
    ),
    Mutant(
        "timeout-of-nothing-accepted",
        "the time-out of a transaction is above zero and limited",
        "tfmq/transaction/commands.py",
        (
            '            return min(int(self._active.settings["timeout_seconds"] * 1000), most_ms)\n'
            "        if not 0 < wanted_ms <= most_ms:\n"
        ),
        (
            '            return min(int(self._active.settings["timeout_seconds"] * 1000), most_ms)\n'
            "        if not 0 <= wanted_ms <= most_ms:\n"
        ),
        [BEGINNING],
    ),
    Mutant(
        "repeated-begin-begins-again",
        "a repeated begin gets the first reply",
        "tfmq/transaction/commands.py",
        ("            done(BeginResult(ending.epoch, xid, states.OPEN, timeout_ms), None)\n            return\n"),
        "",
        [BEGINNING],
    ),
    Mutant(
        "session-begins-any-number",
        "the number of open transactions of a session is limited",
        "tfmq/transaction/commands.py",
        '        if active.sessions.open_count(session) >= active.limits["transactions_per_session"]:\n',
        '        if active.sessions.open_count(session) > active.limits["transactions_per_session"]:\n',
        [BEGINNING],
    ),
    Mutant(
        "refused-batch-forgotten",
        "a transaction that lacks a batch is not committed",
        "tfmq/transaction/commands.py",
        "                runtime.missing_batches.add(name)\n",
        "",
        [BEGINNING, PREPARING, ENDING, STEPS],
    ),
    Mutant(
        "prepare-passes-batches-on-their-way",
        "a step waits for the batches that were sent before it",
        "tfmq/transaction/commands.py",
        "        if self._active.is_pending(transaction) or runtime.queued_batches > 0:\n",
        "        if self._active.is_pending(transaction):\n",
        [STEPS, PREPARING, ENDING],
    ),
    Mutant(
        "prepare-acked-before-the-fsync",
        "a prepare is durable when it is acknowledged",
        "tfmq/transaction/commands.py",
        (
            "                self._store.when_durable(\n"
            "                    lsn, partial(reply_when_durable, done, PrepareResult(states.PREPARED,"
            " expires_ms))\n"
            "                )\n"
        ),
        "                done(PrepareResult(states.PREPARED, expires_ms), None)\n",
        [PREPARING, HAZARDS],
    ),
    Mutant(
        "repeated-prepare-acked-before-the-fsync",
        "a repeated prepare is durable when it is acknowledged",
        "tfmq/transaction/commands.py",
        (
            "            self._store.when_durable(runtime_state(transaction).lsn, partial(reply_when_durable,"
            " done, result))\n"
        ),
        "            done(result, None)\n",
        [PREPARING, HAZARDS],
    ),
    Mutant(
        "prepared-ends-by-itself",
        "a prepared transaction never ends by itself, unless it was begun with that option",
        "tfmq/transaction/commands.py",
        "        if transaction.origin.member is None:\n            if ttl_ms is not None:\n",
        "        if transaction.origin.member is None and ttl_ms is None:\n            if ttl_ms is not None:\n",
        [PREPARING],
    ),
    Mutant(
        "any-number-prepared",
        "the number of prepared transactions is limited",
        "tfmq/transaction/commands.py",
        '        if staying >= self._active.limits["transactions_prepared"]:\n',
        '        if staying > self._active.limits["transactions_prepared"]:\n',
        [PREPARING],
    ),
    Mutant(
        "those-ended-by-hand-not-counted",
        "outcomes that stay until an operator forgets them are counted",
        "tfmq/transaction/commands.py",
        "        staying = counts[states.PREPARED] + sum(counts[each] for each in states.HEURISTIC_STATES)\n",
        "        staying = counts[states.PREPARED]\n",
        [PREPARING],
    ),
    Mutant(
        "member-prepared-after-its-group",
        "a member that was prepared for an earlier sequence of its group ends at once",
        "tfmq/transaction/commands.py",
        "            if member is None or self._may_join(member):\n",
        "            if member is None or self._may_join(member) or lsn:\n",
        [PREPARING, GROUP_COMMITS],
    ),
    Mutant(
        "unprepared-committed-in-two-phases",
        "a commit in two phases needs a prepare",
        "tfmq/transaction/commands.py",
        "            if not one_phase:\n",
        "            if one_phase is None:\n",
        [ENDING],
    ),
    Mutant(
        "unprepared-decided-by-hand",
        "only a prepared transaction is decided by hand",
        "tfmq/transaction/commands.py",
        (
            "            if heuristic:\n"
            '                raise rejections.wrong_state(xid, state, "only a prepared one is '
            'decided by hand")\n'
        ),
        (
            "            if heuristic and one_phase is None:\n"
            '                raise rejections.wrong_state(xid, state, "only a prepared one is '
            'decided by hand")\n'
        ),
        [ENDING],
    ),
    Mutant(
        "rollback-of-a-prepared-one-acked-before-the-fsync",
        "the rollback of a prepared transaction is durable when it is acknowledged",
        "tfmq/transaction/commands.py",
        "            self._store.when_durable(lsn, partial(reply_when_durable, done or _ignore_result, result))\n",
        "            (done or _ignore_result)(result, None)\n",
        [ENDING, HAZARDS],
    ),
    Mutant(
        "rollback-of-a-committed-one-acked-ok",
        "the rollback of a committed transaction is refused, and the error says so",
        "tfmq/transaction/commands.py",
        (
            "            self.reply_when_all_durable(done, RollbackResult(transaction.state))\n"
            "        elif transaction.state in states.HEURISTIC_STATES:\n"
            "            self.reply_when_all_durable(done,"
            " refusal=rejections.heuristic_outcome(transaction.state))\n"
            "        else:\n"
            "            self.reply_when_all_durable(done, refusal=TransactionCommitted(epoch=epoch))\n"
        ),
        (
            "            self.reply_when_all_durable(done, RollbackResult(transaction.state))\n"
            "        elif transaction.state in states.HEURISTIC_STATES:\n"
            "            self.reply_when_all_durable(done,"
            " refusal=rejections.heuristic_outcome(transaction.state))\n"
            "        else:\n"
            "            self.reply_when_all_durable(done, RollbackResult(states.ROLLED_BACK))\n"
        ),
        [ENDING],
    ),
    Mutant(
        "rollback-ends-a-decided-one",
        "a decision is final",
        "tfmq/transaction/states.py",
        "    (ROLLING_BACK, ROLLBACK): ROLLED_BACK,\n",
        ("    (ROLLING_BACK, ROLLBACK): ROLLED_BACK,\n    (APPLYING, ROLLBACK): ROLLED_BACK,\n"),
        [STATES],
    ),
    Mutant(
        "late-commit-not-notified-of-the-decision",
        "a client that commits after an operator's decision is notified of that decision",
        "tfmq/transaction/commands.py",
        ("COMMITTED_STATES or (heuristic and state == states.HEURISTIC_COMMITTED):\n"),
        "COMMITTED_STATES or state in states.HEURISTIC_STATES:\n",
        [ENDING],
    ),
    Mutant(
        "operator-s-outcome-forgotten-while-it-is-applied",
        "an outcome by hand is forgotten only when all of it is durable",
        "tfmq/transaction/commands.py",
        "        if progress is not None and not progress.is_durable:\n",
        "        if progress is not None and progress.is_durable is None:\n",
        [ENDING],
    ),
    Mutant(
        "older-epoch-taken-for-the-newest",
        "an older transaction of the same name is refused",
        "tfmq/transaction/active_transactions.py",
        "        newer = self.store.by_xid.get(xid)\n",
        "        newer = None\n",
        [BOOKS, BEGINNING, ENDING, STEPS],
    ),
    Mutant(
        "epoch-of-another-name",
        "a transaction is found by its name and its epoch",
        "tfmq/transaction/active_transactions.py",
        "        if transaction is not None and transaction.xid == xid:\n",
        "        if transaction is not None:\n",
        [BOOKS, ENDING, PREPARING, STEPS],
    ),
    Mutant(
        "rolled-back-reported-as-committed",
        "the outcome of an ended transaction is reported as it was",
        "tfmq/transaction/commands.py",
        "            committed = state == states.COMMITTED\n",
        "            committed = state != states.COMMITTED\n",
        [STEPS, ENDING, PREPARING],
    ),
    Mutant(
        "repeated-transact-done-again",
        "a repeated request gets the first reply",
        "tfmq/transaction/commands.py",
        "            progress.add_callback(partial(reply_committed, epoch, True, done))\n",
        "            return False\n",
        [TRANSACTING],
    ),
    Mutant(
        "gap-inside-a-transact",
        "the batches of a request are numbered without a gap",
        "tfmq/transaction/commands.py",
        "            if piece.sequence != expected:\n",
        "            if piece.sequence < expected:\n",
        [TRANSACTING],
    ),
    Mutant(
        "refused-transact-keeps-its-space",
        "a refused transact leaves nothing",
        "tfmq/transaction/commands.py",
        ("        except Exception:\n            self._discard(transaction)\n            raise\n"),
        ("        except Exception:\n            self._store.discard(transaction)\n            raise\n"),
        [TRANSACTING],
    ),
    Mutant(
        "refused-record-keeps-the-offsets-locked",
        "a refused step releases what it had reserved",
        "tfmq/transaction/commands.py",
        (
            "        self._active.reservations.release(runtime.reserved_bytes)\n"
            "        runtime.reserved_bytes = 0\n"
            "        self._active.apply_target.unlock_offsets(transaction.epoch)\n"
            "\n"
        ),
        ("        self._active.reservations.release(runtime.reserved_bytes)\n        runtime.reserved_bytes = 0\n\n"),
        [STEPS, ENDING, PREPARING],
    ),
    Mutant(
        "orphan-lives-on",
        "a transaction whose session ended while a record was refused ends",
        "tfmq/transaction/active_transactions.py",
        "        if not self._end_orphaned(transaction):\n            self.retry_waiting(transaction)\n",
        "        self.retry_waiting(transaction)\n",
        [STEPS, PREPARING, HANDLER, ENDING],
    ),
    Mutant(
        "failed-fsync-called-not-done",
        "a record whose fsync failed may be durable",
        "tfmq/transaction/rejections.py",
        "    return from_journal_error(error, UNKNOWN)\n",
        "    return from_journal_error(error, NOT_DONE)\n",
        [REFUSALS, PREPARING, ENDING],
    ),
    Mutant(
        "unsure-state-reported-as-sure",
        "a state is reported as certain when its record is durable",
        "tfmq/transaction/queries.py",
        (
            "        if not self._store.is_durable(transaction):\n"
            "            return UNDURABLE_STATES.get(state, state)\n"
        ),
        "",
        [LISTING],
    ),
    Mutant(
        "page-without-its-last-row",
        "the pages of a list contain every entry once",
        "tfmq/transaction/queries.py",
        "            if len(rows) == limit:\n",
        "            if len(rows) == limit - 1:\n",
        [LISTING],
    ),
    Mutant(
        "gap-reported-for-sure-after-a-repair",
        "after a repair that lost records a gap proves nothing",
        "tfmq/transaction/commands.py",
        "        if self._store.producer_states.entries_lost:\n",
        "        if self._store.producer_states.entries_lost and expected < 0:\n",
        [TRANSACTING],
    ),
    Mutant(
        "epochs-of-a-lost-lease-given-out-again",
        "no epoch is given out twice, whatever a repair dropped",
        "tfmq/transaction/store.py",
        "            first += EPOCH_RANGE  # A lost lease record may have leased one more range.\n",
        "            first += 0  # A lost lease record may have leased one more range.\n",
        ["tests/transaction/test_epochs.py"],
    ),
    Mutant(
        "epochs-after-a-lost-lease-not-seen",
        "no epoch is given out twice, whatever a repair dropped",
        "tfmq/transaction/transaction_table.py",
        "        self.epochs_end = max(self.epochs_end, epoch + 1)\n",
        "",
        ["tests/transaction/test_transaction_table.py"],
    ),
    Mutant(
        "repair-forgotten-by-the-next-snapshot",
        "after a repair that lost records a gap proves nothing, after any number of starts",
        "tfmq/transaction/producer_state.py",
        "        return (self.expired_id, rows, self.entries_lost)\n",
        "        return (self.expired_id, rows, False)\n",
        [TRANSACTING],
    ),
    Mutant(
        "forgotten-local-one-called-rolled-back",
        "a local transaction is reported as rolled back only while no outcome of its time is forgotten",
        "tfmq/transaction/store.py",
        "        given = self._table.local_outcomes.expired_epoch < epoch < self._table.epochs_end\n",
        "        given = 0 < epoch < self._table.epochs_end\n",
        [ENDING, OUTCOMES],
    ),
    Mutant(
        "epoch-never-given-called-rolled-back",
        "an epoch that was never given out is unknown, not rolled back",
        "tfmq/transaction/store.py",
        "        given = self._table.local_outcomes.expired_epoch < epoch < self._table.epochs_end\n",
        "        given = self._table.local_outcomes.expired_epoch < epoch\n",
        [ENDING, HANDLER],
    ),
    Mutant(
        "outcomes-lost-by-a-repair-are-sure",
        "after a repair a local transaction that may have been committed is not reported as rolled back",
        "tfmq/transaction/outcomes.py",
        ("        self.expired_epoch = ALL_EPOCHS\n\n    def mark_epochs_leased(self, end: int) -> None:\n"),
        ("        self.expired_epoch = 0\n\n    def mark_epochs_leased(self, end: int) -> None:\n"),
        [ENDING, OUTCOMES],
    ),
)
