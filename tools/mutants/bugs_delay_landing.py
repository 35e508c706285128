"""Planted in the way of a delayed batch into the broker: what it is due, who may send it, what becomes of a refusal."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

SEND: Final = "tests/broker/test_delayed_send.py"
TRANSACTIONS: Final = "tests/broker/test_delayed_transactions.py"
LANDING: Final = "tests/broker/test_delayed_produce.py"

DELAY_LANDING: Final[tuple[Mutant, ...]] = (
    Mutant(
        "delay-counts-from-its-application",
        "a delay inside of a transaction counts from the commit, however long that takes to be applied",
        "tfmq/broker/delayed_produce.py",
        "    dues = effective_due_times(_requested_words(asked), len(asked.times), decided_ms, ahead_ms)\n",
        "    dues = effective_due_times(_requested_words(asked), len(asked.times), now_ms, ahead_ms)\n",
        [SEND, TRANSACTIONS],
    ),
    Mutant(
        "decision-timed-by-the-wall-clock",
        "a delay inside of a transaction counts in broker time, whatever the wall clock does",
        "tfmq/broker/startup.py",
        "        decision_time=broker.delay_commands.queue.now_rounded_up_ms,\n",
        "",
        [TRANSACTIONS],
    ),
    Mutant(
        "refused-batch-still-expected",
        "a delayed send that is refused holds up nothing",
        "tfmq/broker/delayed_produce.py",
        "            self._queue.append_failed(landed.ticket)\n",
        "            pass\n",
        [SEND],
    ),
    Mutant(
        "copy-taken-for-a-sequence",
        "a message that gets another time is no next sequence of whoever sent it",
        "tfmq/broker/delayed_produce.py",
        "        self.alone = any(batch.producer_id != PRODUCER_ID for batch in batches)\n",
        "        self.alone = False\n",
        [LANDING],
    ),
    Mutant(
        "delayed-batch-cut",
        "a delayed batch of a large transaction comes whole, with its due times",
        "tfmq/transaction/slicer.py",
        "        if self._never_split or size <= self._slice_bytes:\n",
        "        if size <= self._slice_bytes:\n",
        ["tests/transaction/test_slicer.py", TRANSACTIONS],
    ),
    Mutant(
        "delayed-batch-not-held-to-its-partition",
        "what its partition would refuse is refused when it is sent",
        "tfmq/broker/delay_commands.py",
        "        if contains_trailer_header(bytes(data), target.log.log_id):\n",
        "        if contains_trailer_header(bytes(data), 0):\n",
        [SEND],
    ),
    Mutant(
        "repeat-without-its-dues",
        "a delayed send that is repeated has the same handle",
        "tfmq/broker/delayed_produce.py",
        "        if note is not None and note.record_count == self._request.count:\n",
        "        if note is not None and note.record_count < self._request.count:\n",
        [SEND],
    ),
)
