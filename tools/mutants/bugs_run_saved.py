"""Planted bugs: what is committed while handlers run: no offset beyond an unfinished message."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

RUNNING: Final = "tests/client/worker/test_runner.py"
PROCESSED: Final = "tests/client/test_acked_run.py"
LEDGER: Final = "tests/client/consumer/test_positions.py"
POSITIONS: Final = "tests/client/consumer/test_positions.py"

_RUNNING = "tfmq/client/worker/runner.py"
_LEDGER = "tfmq/client/consumer/ack_tracker.py"
_POSITIONS = "tfmq/client/consumer/positions.py"

SAVED: Final = (
    Mutant(
        "saved-above-the-lowest-unfinished",
        "no offset is committed beyond an unfinished message",
        _LEDGER,
        "        while self._unacked and self._unacked[0].offset in self._acked_offsets:\n",
        "        while self._unacked and self._unacked[0].offset <= max(self._acked_offsets, default=-1):\n",
        [LEDGER],
    ),
    Mutant(
        "rejected-after-the-last-not-committed",
        "messages that a filter rejected after the last one are committed with it",
        _LEDGER,
        "            self.position = self._positions_after.pop(done.offset) if known else position_after(done)\n",
        (
            "            self.position = position_after(done)\n"
            "            self._positions_after.pop(done.offset, None)\n"
        ),
        [LEDGER],
    ),
    Mutant(
        "left-out-passes-what-is-unfinished",
        "rejected messages advance the offset only after all before them are finished",
        _LEDGER,
        (
            "        if self._unacked:\n"
            "            self._positions_after[self._unacked[-1].offset] = batch.end_position\n"
            "        else:\n"
            "            self.position = batch.end_position\n"
        ),
        (
            "        if batch.messages:\n"
            "            self._positions_after[self._unacked[-1].offset] = batch.end_position\n"
            "        else:\n"
            "            self.position = batch.end_position\n"
        ),
        [LEDGER],
    ),
    Mutant(
        "place-with-a-message-jumps",
        "an offset in a transaction covers no unfinished message",
        _LEDGER,
        (
            "                if each.offset != message.offset and each.offset not in self._acked_offsets:\n"
            "                    break\n"
        ),
        "",
        [LEDGER, POSITIONS],
    ),
    Mutant(
        "transaction-with-an-offset-that-does-not-cover-its-message",
        "an offset that cannot cover its message is refused",
        _POSITIONS,
        "        if position.offset <= message.offset:\n            raise BadRequest(",
        "        if position.offset < 0:\n            raise BadRequest(",
        [POSITIONS],
    ),
    Mutant(
        "void-ledger-counts",
        "a message that ends after a seek or a loss does not count",
        _LEDGER,
        "            tracker.invalid = tracker.revoked = True\n",
        "            tracker.revoked = True\n",
        [LEDGER, POSITIONS],
    ),
    Mutant(
        "finished-with-the-call-not-with-its-end",
        "a message is acked when its handler returned",
        _RUNNING,
        ("        job.ack_tracker.active_handlers += 1\n        begins = False\n"),
        (
            "        job.ack_tracker.active_handlers += 1\n"
            "        begins = False\n"
            "        job.ack_tracker.ack(job.message)\n"
        ),
        [PROCESSED],
    ),
    Mutant(
        "broken-off-call-counts-as-finished",
        "a call that was interrupted leaves its message not acked",
        _RUNNING,
        'the message is not acked."""\n        yield from ()\n',
        (
            'the message is not acked."""\n'
            "        yield from ()\n"
            "        if job.ack_tracker is not None:\n"
            "            job.ack_tracker.ack(job.message)\n"
        ),
        [PROCESSED],
    ),
    Mutant(
        "before-without-a-save",
        'with commits="before" the offset is committed before the handler begins',
        _RUNNING,
        '            refused = yield from self._retry_store(core.commit_acked, "A message waits to be handled")\n',
        "            refused = ()\n",
        [PROCESSED],
    ),
    Mutant(
        "before-calls-again",
        'with commits="before" a message is called at most once',
        _RUNNING,
        '        return self._core.options.commits == "before"\n',
        '        return self._core.options.commits == "never"\n',
        [PROCESSED],
    ),
    Mutant(
        "handler-s-commit-covers-other-handlers-messages",
        "commit() of a handler excludes messages that other handlers are processing",
        _POSITIONS,
        "        return max(self._acked[name], tracker.position_if_acked(own))\n",
        "        return max(self._acked[name], tracker.end_position)\n",
        [POSITIONS, PROCESSED],
    ),
    Mutant(
        "stuck-partition-is-read-on-without-end",
        "a partition with a blocked message is read no further than its window",
        _RUNNING,
        "        core.suspended = {each.name for each in trackers if each.unacked_bytes >= UNACKED_BYTES_MAX}\n",
        "        core.suspended = set()\n",
        [f"{RUNNING}::test_a_partition_with_a_blocked_message_is_read_no_further_than_its_limit"],
    ),
)

RUN_SAVED: Final = SAVED
