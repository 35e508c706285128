"""Bugs to plant in what is saved while handlers are at work: no place beyond what is not finished."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

RUNNING: Final = "tests/client/test_running.py"
PROCESSED: Final = "tests/client/test_processed_run.py"
LEDGER: Final = "tests/client/test_ledger.py"
POSITIONS: Final = "tests/client/test_positions.py"

_RUNNING = "tfmq/client/worker/runner.py"
_LEDGER = "tfmq/client/consumer/positions.py"
_POSITIONS = "tfmq/client/consumer/positions.py"

SAVED: Final = (
    Mutant(
        "saved-above-the-lowest-unfinished",
        "no place is saved beyond a message that is not finished",
        _LEDGER,
        "        while self._out and self._out[0].offset in self._finished:\n",
        "        while self._out and self._out[0].offset <= max(self._finished, default=-1):\n",
        [LEDGER],
    ),
    Mutant(
        "left-out-behind-the-last-not-passed",
        "what a filter left out behind the last message is passed with it",
        _LEDGER,
        "            self.place = self._behind.pop(done.offset) if known else behind(done)\n",
        "            self.place = behind(done)\n            self._behind.pop(done.offset, None)\n",
        [LEDGER],
    ),
    Mutant(
        "left-out-passes-what-is-unfinished",
        "what is left out moves the place only behind what is finished",
        _LEDGER,
        "        if self._out:\n            self._behind[self._out[-1].offset] = batch.following\n        else:\n"
        "            self.place = batch.following\n",
        "        if batch.messages:\n            self._behind[self._out[-1].offset] = batch.following\n        else:\n"
        "            self.place = batch.following\n",
        [LEDGER],
    ),
    Mutant(
        "place-with-a-message-jumps",
        "an offset that goes into a transaction covers no message that is not finished",
        _LEDGER,
        "                if each.offset != message.offset and each.offset not in self._finished:\n"
        "                    break\n",
        "",
        [LEDGER, POSITIONS],
    ),
    Mutant(
        "transaction-with-an-offset-that-does-not-cover-its-message",
        "an offset that cannot cover its message is refused",
        _POSITIONS,
        "        if place.offset <= message.offset:\n            raise BadRequest(",
        "        if place.offset < 0:\n            raise BadRequest(",
        [POSITIONS],
    ),
    Mutant(
        "void-ledger-counts",
        "what ends late behind a seek, or a loss, counts for nothing",
        _LEDGER,
        "            ledger.void = ledger.leaving = True\n",
        "            ledger.leaving = True\n",
        [LEDGER, POSITIONS],
    ),
    Mutant(
        "finished-with-the-call-not-with-its-end",
        "a message is processed when its handler returned",
        _RUNNING,
        "        job.ledger.in_work += 1\n        begins = False\n",
        "        job.ledger.in_work += 1\n        begins = False\n        job.ledger.finish(job.message)\n",
        [PROCESSED],
    ),
    Mutant(
        "broken-off-call-counts-as-finished",
        "a call that was broken off leaves its message unprocessed",
        _RUNNING,
        'the message is not acked."""\n        yield from ()\n',
        'the message is not acked."""\n        yield from ()\n'
        "        if job.ledger is not None:\n            job.ledger.finish(job.message)\n",
        [PROCESSED],
    ),
    Mutant(
        "before-without-a-save",
        'with commits="before" the offset is saved before the handler begins',
        _RUNNING,
        '            refused = yield from self._sure(core.save, "A message waits to be handled")\n',
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
        "commit() of a handler leaves out what others are at work on",
        _POSITIONS,
        "        return max(self._processed[name], ledger.place_with(own))\n",
        "        return max(self._processed[name], ledger.following)\n",
        [POSITIONS, PROCESSED],
    ),
    Mutant(
        "stuck-partition-is-read-on-for-ever",
        "a partition with a stuck message is read no further than its window",
        _RUNNING,
        "        core.held = {each.name for each in ledgers if each.span >= OUT_BYTES}\n",
        "        core.held = set()\n",
        [f"{RUNNING}::test_a_partition_with_a_stuck_message_is_read_no_further_than_its_window"],
    ),
)

RUN_SAVED: Final = SAVED
