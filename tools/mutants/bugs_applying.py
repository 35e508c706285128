"""Planted bugs: decisions of transactions applied to their targets, and kept until all is durable."""

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
        "decisions are applied to each target in their order",
        "tfmq/apply_queue.py",
        "        while self._can_send() and not self.busy and not self.is_paused:\n",
        "        while self._can_send() and not self.is_paused:\n",
        [LINE, APPLYING],
    ),
    Mutant(
        "refused-part-after-later-ones",
        "what a target refused is applied before later decisions",
        "tfmq/transaction/applier.py",
        "        self._queue = deque(sorted([*tasks, *self._queue], key=lambda task: task.position))\n",
        "        self._queue = deque([*self._queue, *tasks])\n",
        [LINE, APPLYING],
    ),
    Mutant(
        "target-not-asked-after-an-error",
        "after an error the broker reads again how much a target has applied",
        "tfmq/apply_queue.py",
        "        self._position_known = False\n        if isinstance(error, UnknownTopic):\n",
        "        self._position_known = True\n        if isinstance(error, UnknownTopic):\n",
        [LINE, APPLYING],
    ),
    Mutant(
        "what-is-there-is-sent-again",
        "what a target has stored is not sent to it again",
        "tfmq/transaction/applier.py",
        "        while applied is not None and self._queue and self._queue[0].position <= applied:\n",
        "        while applied is not None and self._queue and self._queue[0].position < applied:\n",
        [CONVOY, LINE],
    ),
    Mutant(
        "large-part-begins-anew-after-a-crash",
        "after a crash, applying continues after the last message that was stored",
        "tfmq/transaction/applier.py",
        "        self._applied_ordinal = applied[1] if applied is not None and head == applied[0] else 0\n",
        "        self._applied_ordinal = 0\n",
        [CONVOY],
    ),
    Mutant(
        "joined-effect-under-the-first-place",
        "a joined append carries the position of its last decision",
        "tfmq/transaction/applier.py",
        "        last = tasks[-1]\n        effect = ",
        "        last = tasks[0]\n        effect = ",
        [LINE, APPLYING],
    ),
    Mutant(
        "deleted-target-blocks-its-transaction",
        "messages for a deleted topic are dropped, counted and logged",
        "tfmq/apply_queue.py",
        ("            self.drop_all()\n        else:\n            self._block(error)\n"),
        ("            pass\n        self._block(error)\n"),
        [LINE, APPLYING],
    ),
    Mutant(
        "stopped-target-drops",
        "messages for a stopped target wait until it is resumed",
        "tfmq/apply_queue.py",
        "        if isinstance(error, UnknownTopic):\n",
        "        if error:\n",
        [LINE, APPLYING],
    ),
    Mutant(
        "offset-reported-before-it-is-fsynced",
        "a reported offset stays valid",
        "tfmq/transaction/applier.py",
        "        has_offsets = bool(result.offsets) and self._applier.apply_target.is_durable(result)\n",
        "        has_offsets = bool(result.offsets)\n",
        [LINE, APPLYING],
    ),
    Mutant(
        "applied-before-all-targets-have-it",
        "a transaction is applied when every target has stored its part",
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
        "offsets of a transaction are committed with it",
        "tfmq/transaction/applier.py",
        ("        if offsets:\n            self._enqueue(OFFSETS_KEY, ApplyTask(progress, OFFSETS_PART))\n"),
        "        progress.pending_targets -= offsets\n",
        [LINE],
    ),
    Mutant(
        "resumed-target-not-given-what-it-lost",
        "what a target lost by a resumption is applied again",
        "tfmq/transaction/applier.py",
        "            self._target_queue(key).requeue(tasks)\n",
        "            self._finish_tasks(self._target_queue(key), tasks)\n",
        [APPLYING, SETTLING],
    ),
    Mutant(
        "dropped-messages-not-reported",
        "messages for a deleted topic are dropped, counted and logged",
        "tfmq/transaction/applier.py",
        "            progress.dropped_messages += target.messages\n",
        "            progress.dropped_messages += 0\n",
        [APPLYING, LINE],
    ),
    Mutant(
        "journal-released-before-the-fsync",
        "the journal keeps a decision until all of it is durable",
        "tfmq/transaction/apply_progress.py",
        (
            "        return self.applied and not self.pending_targets and not self.undurable_tasks and not se"
            "lf.undurable_delayed\n"
        ),
        "        return self.applied and not self.pending_targets\n",
        [COURSE, SETTLING, APPLYING],
    ),
    Mutant(
        "stuck-part-called-committed",
        "a transaction whose messages a stopped target may lose is reported as applying",
        "tfmq/transaction/apply_progress.py",
        "        there = self.applied and not self.pending_targets and not self.blocked\n",
        "        there = self.applied and not self.pending_targets\n",
        [APPLYING],
    ),
    Mutant(
        "part-settled-without-fsync",
        "the journal keeps a decision until all of it is durable",
        "tfmq/transaction/apply_progress.py",
        "        while written and self._apply_target.is_durable(written[0].result):\n",
        "        while written:\n",
        [SETTLING],
    ),
    Mutant(
        "readers-wait-for-the-flush",
        "readers of durable data see a commit soon",
        "tfmq/transaction/apply_progress.py",
        "            self._timer = self._timers.after(FSYNC_DELAY_SECONDS, self._request_fsyncs)\n",
        "            self._timer = self._timers.after(10.0, self._request_fsyncs)\n",
        [SETTLING],
    ),
    Mutant(
        "large-part-not-in-one-piece",
        "a large part of a transaction is contiguous in its partition",
        "tfmq/transaction/applier.py",
        "            self._applier.apply_target.begin_exclusive(self._queue.key, self._applier.source)\n",
        "            pass\n",
        [CONVOY, APPLYING],
    ),
    Mutant(
        "hold-leaked",
        "a partition is free again after a large part, whether that succeeded or not",
        "tfmq/transaction/applier.py",
        "            self._applier.apply_target.end_exclusive(self._queue.key)\n",
        "            pass\n",
        [CONVOY, APPLYING],
    ),
    Mutant(
        "large-part-cut-short",
        "a part is complete only when its last message is stored",
        "tfmq/transaction/applier.py",
        "        elif found.last_ordinal >= self._task.target.last_ordinal:\n",
        "        elif found.last_ordinal > 0:\n",
        [CONVOY],
    ),
    Mutant(
        "apply-task-s-place-leaked",
        "an apply task that ended makes room for the next",
        "tfmq/transaction/applier.py",
        (
            "        self._applier.chunked.release(1)\n"
            "        self._done(None if result is None else result._replace(offsets=(), delayed=()), error)\n"
        ),
        "        self._done(None if result is None else result._replace(offsets=(), delayed=()), error)\n",
        [CONVOY],
    ),
    Mutant(
        "apply-task-continues-after-a-resumption",
        "nothing is written over a gap that a resumption left",
        "tfmq/transaction/applier.py",
        (
            '        self._cancelled = StorageStopped(reason="the target stopped and resumed meanwhile",'
            " outcome=NOT_DONE)\n"
        ),
        '        StorageStopped(reason="the target stopped and resumed meanwhile", outcome=NOT_DONE)\n',
        [CONVOY, "tests/transaction/test_apply_during_resumption.py"],
    ),
    Mutant(
        "settled-before-its-due-times-are-noted",
        "memory that is kept to report due times is given back; otherwise no more handles of transactions are reported",
        "tfmq/transaction/apply_progress.py",
        (
            "        return self.applied and not self.pending_targets and not self.undurable_tasks and not se"
            "lf.undurable_delayed\n"
        ),
        "        return self.applied and not self.pending_targets and not self.undurable_tasks\n",
        [SETTLING],
    ),
    Mutant(
        "window-not-kept",
        "a large transaction does not make others wait for memory",
        "tfmq/apply_queue.py",
        "        return not self.in_flight_bytes or self.in_flight_bytes + size_bytes <= self._maximum\n",
        "        return True\n",
        [CONVOY],
    ),
    Mutant(
        "targets-that-cannot-be-computed-end-all-applying",
        "a commit is applied after any error, and no later one waits for a restart",
        "tfmq/transaction/applier.py",
        "        if error is not None:\n            self._start_failed(error)\n            return\n",
        "        if error is not None:\n            raise error\n",
        [APPLYING],
    ),
    Mutant(
        "an-error-of-one-partition-leaves-the-others-unwritten",
        "an unexpected error of one partition keeps no message from being written to another",
        "tfmq/broker/produce.py",
        "                self._due = due[due.index(partition) + 1 :] + self._due\n",
        "",
        ["tests/broker/test_partition.py"],
    ),
    Mutant(
        "an-error-of-one-append-leaves-the-rest-of-the-queue",
        "an unexpected error of one append keeps no later append from being written to its partition",
        "tfmq/broker/partition.py",
        "            if self._queue:\n                self._timers.after(0.0, self.write)\n            raise\n",
        "            raise\n",
        ["tests/broker/test_partition.py"],
    ),
    Mutant(
        "an-error-of-one-target-leaves-the-others-unapplied",
        "an unexpected error of one target keeps no commit from being applied to another",
        "tfmq/apply_queue.py",
        "                    self.continue_next_turn(other)\n",
        "                    pass\n",
        [APPLYING],
    ),
)
