"""Bugs to plant where decided transactions are brought to their targets, and kept until all is on the disk."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

APPLYING: Final = "tests/transaction/test_applier.py"
CONVOY: Final = "tests/transaction/test_applier.py"
COURSE: Final = "tests/transaction/test_apply_progress.py"
ENDING: Final = "tests/transaction/test_commands.py"
HANDLER: Final = "tests/transaction/test_coordinator.py"
HAZARDS: Final = "tests/transaction/test_hazards.py"
LINE: Final = "tests/transaction/test_applier.py"
LISTING: Final = "tests/transaction/test_queries.py"
SETTLING: Final = "tests/transaction/test_apply_progress.py"

APPLIED: Final = (
    Mutant(
        "effects-overtake-one-another",
        "decisions are applied to a target one after the other",
        "tfmq/apply_queue.py",
        "        while self._can_send() and not self.busy and not self.is_paused:\n",
        "        while self._can_send() and not self.is_paused:\n",
        [LINE, APPLYING],
    ),
    Mutant(
        "refused-effect-behind-later-ones",
        "what a target refused comes before what was decided later",
        "tfmq/transaction/applier.py",
        "        self._queue = deque(sorted([*parts, *self._queue], key=lambda part: part.position))\n",
        "        self._queue = deque([*self._queue, *parts])\n",
        [LINE, APPLYING],
    ),
    Mutant(
        "target-not-asked-after-an-error",
        "after an error a target is asked how far it is",
        "tfmq/apply_queue.py",
        "        self._position_known = False\n        if isinstance(error, UnknownTopic):\n",
        "        self._position_known = True\n        if isinstance(error, UnknownTopic):\n",
        [LINE, APPLYING],
    ),
    Mutant(
        "what-is-there-is-sent-again",
        "what a target has is not sent to it again",
        "tfmq/transaction/applier.py",
        "        while applied is not None and self._queue and self._queue[0].position <= applied:\n",
        "        while applied is not None and self._queue and self._queue[0].position < applied:\n",
        [CONVOY, LINE],
    ),
    Mutant(
        "large-part-begins-anew-after-a-crash",
        "a part goes on behind the last message that is there",
        "tfmq/transaction/applier.py",
        "        self._applied_ordinal = applied[1] if applied is not None and head == applied[0] else 0\n",
        "        self._applied_ordinal = 0\n",
        [CONVOY],
    ),
    Mutant(
        "joined-effect-under-the-first-place",
        "a shared effect stands for the last decision in it",
        "tfmq/transaction/applier.py",
        "        last = parts[-1]\n        effect = ",
        "        last = parts[0]\n        effect = ",
        [LINE, APPLYING],
    ),
    Mutant(
        "gone-target-holds-up-its-transaction",
        "what was for a topic that is gone is dropped, counted and told",
        "tfmq/apply_queue.py",
        ("            self.drop_all()\n        else:\n            self._block(error)\n"),
        ("            pass\n        self._block(error)\n"),
        [LINE, APPLYING],
    ),
    Mutant(
        "stopped-target-drops",
        "what a stopped target does not take waits for it",
        "tfmq/apply_queue.py",
        "        if isinstance(error, UnknownTopic):\n",
        "        if error:\n",
        [LINE, APPLYING],
    ),
    Mutant(
        "offset-told-before-it-is-forced",
        "an offset that was told stays",
        "tfmq/transaction/applier.py",
        "        if not mark.offsets or not self._applier.destination.is_durable(mark):\n",
        "        if not mark.offsets:\n",
        [LINE, APPLYING],
    ),
    Mutant(
        "applied-before-all-targets-have-it",
        "a transaction is applied when every target has its part",
        "tfmq/transaction/applier.py",
        (
            "            progress.pending_targets -= 1\n"
            "            if not progress.pending_targets:\n"
            "                self._targets_done(progress)\n"
        ),
        ("            progress.pending_targets -= 1\n            self._targets_done(progress)\n"),
        [APPLYING],
    ),
    Mutant(
        "offsets-left-out",
        "offsets of a transaction are saved with it",
        "tfmq/transaction/applier.py",
        ("        if offsets:\n            self._enqueue(OFFSETS_KEY, ApplyTask(progress, OFFSETS_PART))\n"),
        "        progress.pending_targets -= offsets\n",
        [LINE],
    ),
    Mutant(
        "resumed-target-not-given-what-it-lost",
        "what a target lost by a resumption is brought again",
        "tfmq/transaction/applier.py",
        "            self._target_queue(key).requeue(parts)\n",
        "            self._finish_tasks(self._target_queue(key), parts)\n",
        [APPLYING, SETTLING],
    ),
    Mutant(
        "dropped-messages-not-told",
        "what was for a topic that is gone is dropped, counted and told",
        "tfmq/transaction/applier.py",
        "            progress.dropped_messages += target.messages\n",
        "            progress.dropped_messages += 0\n",
        [APPLYING, LINE],
    ),
    Mutant(
        "journal-let-go-before-the-force",
        "the journal keeps a decision until all of it is on the disk",
        "tfmq/transaction/apply_progress.py",
        (
            "            and not self.pending_targets\n"
            "            and not self.undurable_parts\n"
            "            and not self.undurable_delayed\n"
        ),
        "            and not self.pending_targets\n",
        [COURSE, SETTLING, APPLYING],
    ),
    Mutant(
        "stuck-part-called-committed",
        "what a stopped target may lose is told as applying",
        "tfmq/transaction/apply_progress.py",
        "        there = self.applied and not self.pending_targets and not self.blocked\n",
        "        there = self.applied and not self.pending_targets\n",
        [APPLYING],
    ),
    Mutant(
        "unforced-part-settled",
        "the journal keeps a decision until all of it is on the disk",
        "tfmq/transaction/apply_progress.py",
        "        while written and self._destination.is_durable(written[0].mark):\n",
        "        while written:\n",
        [SETTLING],
    ),
    Mutant(
        "readers-wait-for-the-flush",
        "readers of forced data see a commit soon",
        "tfmq/transaction/apply_progress.py",
        "            self._timer = self._timers.after(FSYNC_DELAY_SECONDS, self._request_fsyncs)\n",
        "            self._timer = self._timers.after(10.0, self._request_fsyncs)\n",
        [SETTLING],
    ),
    Mutant(
        "large-part-not-in-one-piece",
        "a large part lies in one piece in its partition",
        "tfmq/transaction/applier.py",
        "            self._applier.destination.begin_exclusive(self._queue.key, self._applier.source)\n",
        "            pass\n",
        [CONVOY, APPLYING],
    ),
    Mutant(
        "hold-leaked",
        "a partition is free again behind a large part, however that ended",
        "tfmq/transaction/applier.py",
        "            self._applier.destination.end_exclusive(self._queue.key)\n",
        "            pass\n",
        [CONVOY, APPLYING],
    ),
    Mutant(
        "large-part-cut-short",
        "a part is there when its last message is",
        "tfmq/transaction/applier.py",
        "        elif found.last_ordinal >= self._task.target.last_ordinal:\n",
        "        elif found.last_ordinal > 0:\n",
        [CONVOY],
    ),
    Mutant(
        "convoy-s-place-leaked",
        "a convoy that ended makes room for the next",
        "tfmq/transaction/applier.py",
        (
            "        self._applier.chunked.release(1)\n"
            "        self._done(None if mark is None else mark._replace(offsets=(), delayed=()), error)\n"
        ),
        "        self._done(None if mark is None else mark._replace(offsets=(), delayed=()), error)\n",
        [CONVOY],
    ),
    Mutant(
        "convoy-goes-on-behind-a-resumption",
        "nothing is written over a gap that a resumption left",
        "tfmq/transaction/applier.py",
        (
            '        self._cancelled = StorageStopped(reason="the target stopped and resumed meanwhile",'
            " outcome=NOT_DONE)\n"
        ),
        '        StorageStopped(reason="the target stopped and resumed meanwhile", outcome=NOT_DONE)\n',
        [CONVOY, "tests/issues/test_convoy_over_a_resumption.py"],
    ),
    Mutant(
        "settled-before-its-due-times-are-noted",
        "what is kept to tell due times is given back, or no handles of transactions are told any more",
        "tfmq/transaction/apply_progress.py",
        ("            and not self.undurable_parts\n            and not self.undurable_delayed\n"),
        "            and not self.undurable_parts\n",
        [SETTLING],
    ),
    Mutant(
        "window-not-kept",
        "a large transaction does not make others wait for its bytes",
        "tfmq/apply_queue.py",
        "        return not self.in_flight_bytes or self.in_flight_bytes + size_bytes <= self._maximum\n",
        "        return True\n",
        [CONVOY],
    ),
)
