"""Planted bugs: the client's transactions: which requests it sends, and what it reports of replies."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

CORE: Final = "tests/client/transaction/test_transaction.py"
ASKING: Final = "tests/client/connection/test_requests.py"
ENDING: Final = "tests/client/transaction/test_commit.py"
HANDLE: Final = "tests/client/transaction/test_transaction.py"
OFFSETS: Final = "tests/client/consumer/test_transaction_offsets.py"
PIPELINE: Final = "tests/client/transaction/test_transaction_pipeline.py"
STEPS: Final = "tests/client/transaction/test_states.py"
ALL: Final = "tests/client/transaction/test_producer_transactions.py"
XA: Final = "tests/client/producer/test_xa.py"

_TAKEN: Final = (
    Mutant(
        "rolled-back-transaction-is-committed",
        "a rolled back transaction is not called committed",
        "tfmq/client/transaction/states.py",
        "    COMMIT: (READ_ONLY, COMMITTED),\n",
        "    COMMIT: (READ_ONLY, COMMITTED, ROLLED_BACK),\n",
        [STEPS, CORE, ENDING, PIPELINE],
    ),
    Mutant(
        "unknown-answer-called-rolled-back",
        "a step whose reply was lost is reported as unknown",
        "tfmq/client/transaction/states.py",
        "    if isinstance(error, StaleEpoch) or error.outcome == UNKNOWN:\n        return IN_DOUBT\n",
        "    if isinstance(error, StaleEpoch) or error.outcome == UNKNOWN:\n        return ROLLED_BACK\n",
        [STEPS, CORE, ENDING, PIPELINE],
    ),
    Mutant(
        "operator-s-word-forgotten",
        "an operator's decision is the state of the transaction",
        "tfmq/client/transaction/states.py",
        "        return str(error.state)\n",
        "        return None\n",
        [STEPS, CORE, ENDING, PIPELINE],
    ),
    Mutant(
        "commit-interrupted-called-open",
        "a commit that was interrupted after it was sent may have happened",
        "tfmq/client/transaction/transaction.py",
        "            self._finish_step(states.IN_DOUBT if executed else self._state_if_not_executed(before), None)\n",
        "            self._finish_step(before, None)\n",
        [CORE, ENDING, PIPELINE],
    ),
    Mutant(
        "sends-go-on-beside-a-commit",
        "nothing is sent in a transaction during its commit",
        "tfmq/client/transaction/transaction.py",
        "        self.shared_batches.clear()  # So that `send` does not append to these batches during a step.\n",
        "",
        [CORE, ENDING, PIPELINE, ALL],
    ),
    Mutant(
        "two-steps-at-a-time",
        "steps of one transaction follow one another",
        "tfmq/client/transaction/transaction.py",
        (
            "        while self.state in states.IN_PROGRESS:\n"
            "            yield Wait((self._step_done,))\n"
            "        if states.check_step(step, self.state, self._reason) == states.DONE:\n"
        ),
        "        if states.check_step(step, self.state, self._reason) == states.DONE:\n",
        [CORE, ENDING, PIPELINE],
    ),
    Mutant(
        "unknown-without-advice",
        "an error with an unknown outcome says how to find out",
        "tfmq/client/transaction/states.py",
        "    if error.outcome != UNKNOWN or isinstance(error, Damaged):\n        return error\n",
        "    if error.outcome:\n        return error\n",
        [CORE, ENDING, PIPELINE],
    ),
)

_ENDS: Final = (
    Mutant(
        "exception-commits",
        "an exception inside `with` rolls back",
        "tfmq/client/transaction/transaction.py",
        (
            "        elif self.state == states.OPEN:\n"
            "            try:\n"
            "                with suppress(TfmqError):\n"
            "                    yield from self.roll_back(EXIT_ROLLBACK_SECONDS)\n"
        ),
        (
            "        elif self.state == states.OPEN:\n"
            "            try:\n"
            "                with suppress(TfmqError):\n"
            "                    yield from self.commit()\n"
        ),
        [CORE, ENDING, PIPELINE, "tests/test_transactions.py"],
    ),
    Mutant(
        "prepared-rolled-back-by-an-exception",
        "a prepared transaction is not decided by an exception in its block",
        "tfmq/client/transaction/transaction.py",
        "        elif self.state == states.OPEN:\n            try:\n",
        "        elif self.state in (states.OPEN, states.PREPARED):\n            try:\n",
        [CORE, ENDING, PIPELINE, "tests/test_transactions.py"],
    ),
    Mutant(
        "prepared-rolled-back-by-closing",
        "a prepared transaction outlives its producer",
        "tfmq/client/transaction/transaction.py",
        "        if self.state != states.OPEN:\n            return False\n        lost = ",
        "        if self.state not in (states.OPEN, states.PREPARED):\n            return False\n        lost = ",
        [CORE, ENDING, PIPELINE, ALL],
    ),
    Mutant(
        "failed-commit-delivers",
        "deliveries of a transaction that was not committed fail",
        "tfmq/client/transaction/transaction.py",
        "        committed = self.state in states.SUCCEEDED\n        if not committed and error is None:\n",
        ("        committed = self.state in states.FINISHED\n        if not committed and error is None:\n"),
        [CORE, ENDING, PIPELINE],
    ),
    Mutant(
        "placed-by-the-next-batch",
        "a delivery reports the offset of its own message",
        "tfmq/client/transaction/transaction.py",
        "        offsets = iter(self.requests.batch_offsets)\n",
        "        offsets = iter(self.requests.batch_offsets[1:])\n",
        [CORE, ENDING, PIPELINE],
    ),
    Mutant(
        "forked-child-ends-its-parent-s",
        "a forked child does not end its parent's transactions",
        "tfmq/client/transaction/transaction.py",
        "            transaction.abandon_after_fork()\n",
        "            transaction.drop(None)\n",
        [CORE, ENDING, PIPELINE, ALL],
    ),
    Mutant(
        "forgotten-transaction-stays",
        "a transaction without a reference is rolled back",
        "tfmq/client/transaction/transaction.py",
        '                transaction.drop(None, "The transaction was dropped, so it was rolled back.")\n',
        "                transaction.requests.stop_sending()\n",
        [CORE, ENDING, PIPELINE, HANDLE, ALL],
    ),
    Mutant(
        "forgotten-transaction-not-rolled-back-at-the-broker",
        "a transaction without a reference is rolled back at the broker, also while the producer is idle",
        "tfmq/client/transaction/transaction.py",
        "so the background thread must be woken to send it.\n                self.producer.driver.wake()\n",
        "so the background thread must be woken to send it.\n",
        ["tests/test_transactions.py"],
    ),
    Mutant(
        "held-branch-swept-away",
        "a branch continues without a reference to its handle",
        "tfmq/client/transaction/transaction.py",
        ("            if transaction.keep_open:\n                continue\n"),
        "",
        [ALL],
    ),
    Mutant(
        "lost-work-not-reported-at-a-close",
        "a producer that is closed says what was rolled back",
        "tfmq/client/transaction/transaction.py",
        ("        if lost:\n            raise TransactionRolledBack(_lost_message(lost))\n"),
        "",
        [CORE, ENDING, PIPELINE, ALL],
    ),
    Mutant(
        "rollback-without-a-request",
        "a rollback is sent to the broker at once",
        "tfmq/client/transaction/commit.py",
        "            self._link.send_request(request, seconds=BACKGROUND_ROLLBACK_SECONDS, in_background=True)\n",
        "            del request\n",
        [ENDING, CORE, PIPELINE],
    ),
)

_REQUESTS: Final = (
    Mutant(
        "rollback-of-a-frame-under-way",
        "a frame whose reply was lost is not reported as rolled back",
        "tfmq/client/transaction/commit.py",
        ("        if self.one_request_sent:\n            raise TransactionState(\n"),
        ("        if self.one_request_sent and self.begun:\n            raise TransactionState(\n"),
        [ENDING, CORE, PIPELINE],
    ),
    Mutant(
        "frame-repeated-under-another-number",
        "a repeated commit is the same request, so it cannot commit twice",
        "tfmq/client/transaction/commit.py",
        ('            if error.outcome == "not done":\n                self._sequence = None\n'),
        "            self._sequence = None\n",
        [ENDING, CORE, PIPELINE],
    ),
    Mutant(
        "frame-not-put-back",
        "messages of a refused frame are in the next attempt",
        "tfmq/client/transaction/commit.py",
        ("            if not done:\n                self._accumulator.requeue(batches)\n"),
        "            pass\n",
        [ENDING, CORE, PIPELINE],
    ),
    Mutant(
        "frame-s-stream-keeps-its-sequence",
        "the sequences of a transaction have no gap",
        "tfmq/client/transaction/commit.py",
        "        producer_sequence.sequence += sum([batch.count for batch in batches])\n",
        "",
        [ENDING, CORE, PIPELINE],
    ),
    Mutant(
        "frame-numbered-as-the-last-one",
        "each transaction of a producer id has its own number",
        "tfmq/client/transaction/commit.py",
        (
            "                producer_sequence = yield from pool.lease_new(until)\n"
            "            producer_sequence.number += 1\n"
        ),
        (
            "                producer_sequence = yield from pool.lease_new(until)\n"
            "            producer_sequence.number = 1\n"
        ),
        [ENDING, CORE, PIPELINE],
    ),
    Mutant(
        "strange-stream-believed-after-a-repeat",
        "a frame that may have been stored is not sent again under another producer id",
        "tfmq/client/transaction/commit.py",
        "        isinstance(pending.error, SEQUENCE_ERRORS) and pending.send_count == 1\n",
        "        isinstance(pending.error, SEQUENCE_ERRORS)\n",
        [ENDING, CORE, PIPELINE],
    ),
    Mutant(
        "unknown-commit-called-rolled-back",
        "a transaction that a repeated commit does not find may have been committed by the first attempt",
        "tfmq/client/transaction/commit.py",
        "isinstance(pending.error, UnknownTransaction) and",
        "isinstance(pending.error, UnknownTransaction) or False and",
        [ENDING, CORE, PIPELINE],
    ),
    Mutant(
        "commit-of-a-prepared-one-in-one-phase",
        "a prepared transaction is committed in the second phase",
        "tfmq/client/transaction/commit.py",
        "CommitTransaction(self.xid, self.epoch, not self.prepared, False, offsets)\n",
        "CommitTransaction(self.xid, self.epoch, True, False, offsets)\n",
        [ENDING, CORE, PIPELINE],
    ),
    Mutant(
        "prepare-does-not-wait-for-its-messages",
        "a transaction is prepared when the broker has stored all of it",
        "tfmq/client/transaction/commit.py",
        "        while pipeline.failure is None and (pipeline.unacked_bytes or not pipeline.begun):\n",
        "        while pipeline.failure is None and not pipeline.begun:\n",
        [ENDING, CORE, PIPELINE],
    ),
    Mutant(
        "failed-message-passed-over",
        "a transaction that lost a batch is not committed",
        "tfmq/client/transaction/commit.py",
        (
            "            yield Wait((pipeline.changed_event(),))\n"
            "        _raise_if_failed(pipeline.failure)\n"
            "\n"
            "    def _commit_in_one_request(self) -> Operation[str]:\n"
        ),
        (
            "            yield Wait((pipeline.changed_event(),))\n"
            "\n"
            "    def _commit_in_one_request(self) -> Operation[str]:\n"
        ),
        [ENDING, CORE, PIPELINE],
    ),
    Mutant(
        "offsets-left-out-of-the-prepare",
        "offsets are prepared with the messages",
        "tfmq/client/transaction/commit.py",
        "        request = commands.PrepareTransaction(self.xid, self.epoch, ttl_ms, list(self.offsets.values()))\n",
        "        request = commands.PrepareTransaction(self.xid, self.epoch, ttl_ms, [])\n",
        [ENDING, CORE, PIPELINE, OFFSETS],
    ),
    Mutant(
        "named-rollback-without-an-answer-called-done",
        "a rollback without a reply is not reported as done where another client may commit",
        "tfmq/client/transaction/commit.py",
        "        return lost and not self._begin_fields.xid and not self._prepare_sent\n",
        "        return lost\n",
        [ENDING, CORE, PIPELINE],
    ),
    Mutant(
        "frame-of-any-size",
        "a transaction that exceeds a frame is sent while it grows",
        "tfmq/client/transaction/transaction.py",
        "        return few and gathering.size_bytes() <= ONE_REQUEST_BYTES\n",
        "        return few\n",
        [ALL],
    ),
    Mutant(
        "frame-of-any-number-of-batches",
        "a frame contains no more batches than the broker accepts",
        "tfmq/client/transaction/transaction.py",
        "        return few and gathering.size_bytes() <= ONE_REQUEST_BYTES\n",
        "        return gathering.size_bytes() <= ONE_REQUEST_BYTES\n",
        [ENDING],
    ),
    Mutant(
        "busy-broker-asked-without-end",
        "a step ends at its time-out, however busy the broker is",
        "tfmq/client/connection/requests.py",
        "            if link.now() + pause < until:\n",
        "            if pause < until:\n",
        [ASKING],
    ),
    Mutant(
        "cancelled-wait-leaves-its-call",
        "a cancelled wait leaves no call",
        "tfmq/client/connection/requests.py",
        ("                yield Wait((pending,))\n        finally:\n            link.abandon(pending)\n"),
        ("                yield Wait((pending,))\n        finally:\n            pass\n"),
        [ASKING, CORE, ENDING, PIPELINE],
    ),
)

CLIENT_TRANSACTIONS: Final = _TAKEN + _ENDS + _REQUESTS
