"""Planted bugs: delayed batches in the broker: their due times, their producers, refusals."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

SEND: Final = "tests/broker/test_delayed_send.py"
TRANSACTIONS: Final = "tests/broker/test_delayed_transactions.py"
LANDING: Final = "tests/broker/test_delayed_produce.py"

DELAY_LANDING: Final[tuple[Mutant, ...]] = (
    Mutant(
        "delay-counts-from-its-application",
        "a delay in a transaction counts from the commit, however long the commit takes to be applied",
        "tfmq/broker/delayed_produce.py",
        "    dues = effective_due_times(_requested_words(asked), len(asked.times), decided_ms, ahead_ms)\n",
        "    dues = effective_due_times(_requested_words(asked), len(asked.times), now_ms, ahead_ms)\n",
        [SEND, TRANSACTIONS],
    ),
    Mutant(
        "decision-timed-by-the-wall-clock",
        "a delay in a transaction counts in broker time, whatever the wall clock does",
        "tfmq/broker/startup.py",
        "        decision_time=broker.delay_commands.queue.now_rounded_up_ms,\n",
        "",
        [TRANSACTIONS],
    ),
    Mutant(
        "refused-batch-still-expected",
        "a delayed send that is refused blocks nothing",
        "tfmq/broker/delayed_produce.py",
        "            self._queue.append_failed(expected.ticket)\n",
        "            pass\n",
        [SEND],
    ),
    Mutant(
        "copy-taken-for-a-sequence",
        "a message that is rescheduled is not the next sequence of its producer",
        "tfmq/broker/delayed_produce.py",
        "        self.alone = any(batch.producer_id != PRODUCER_ID for batch in batches)\n",
        "        self.alone = False\n",
        [LANDING],
    ),
    Mutant(
        "delayed-batch-cut",
        "a delayed batch of a large transaction is stored whole, with its due times",
        "tfmq/transaction/slicer.py",
        "        if self._never_split or size <= self._slice_bytes:\n",
        "        if size <= self._slice_bytes:\n",
        ["tests/transaction/test_slicer.py", TRANSACTIONS],
    ),
    Mutant(
        "delayed-batch-not-held-to-its-partition",
        "a delayed message that its partition would refuse is refused when it is sent",
        "tfmq/broker/delay_commands.py",
        "        if contains_trailer_header(bytes(data), target.log.log_id):\n",
        "        if contains_trailer_header(bytes(data), 0):\n",
        [SEND],
    ),
    Mutant(
        "repeat-without-its-dues",
        "a repeated delayed send returns the same handle",
        "tfmq/broker/delayed_produce.py",
        "        if header is not None and header.record_count == self._request.count:\n",
        "        if header is not None and header.record_count < self._request.count:\n",
        [SEND],
    ),
)
