"""Planted bugs: the journal: what is fsynced, when, and what follows from a failed fsync."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

LOG: Final = "tests/journal/log/test_log.py"
KEEPER: Final = "tests/journal/log/test_durability.py"
GATE: Final = "tests/journal/test_fsync.py"
OPENING: Final = "tests/journal/log/test_recovery.py"
RECOVERY: Final = "tests/journal/log/test_recovery_rules.py"
FORCE: Final = "tests/journal/test_fsync.py"
STATE: Final = "tests/journal/log/test_checkpoint.py"
CONFORMANCE: Final = "tests/journal/test_conformance_storage.py"
PROMISES: Final = "tests/journal/test_promises.py"
FAULTS: Final = "tests/crash/test_faults.py"
ENUMERATION: Final = (
    "tests/crash/test_enumeration.py::test_whatever_a_power_cut_leaves_of_a_log_opens_with_everything_that_was_promised"
)

FORCES: Final = (
    Mutant(
        "fsync-does-nothing",
        "messages that are acknowledged as synced survive a power cut",
        "journal/fsync.py",
        "                (how or file.file.force)()\n",
        "                (how or file.file.size)()\n",
        [ENUMERATION],
    ),
    Mutant(
        "real-fsync-does-nothing",
        "an fsync reaches the real disk",
        "journal/disk.py",
        "            os.fdatasync(self._descriptor)\n",
        "            os.fstat(self._descriptor)\n",
        ["tests/journal/test_disk.py", PROMISES],
    ),
    Mutant(
        "roll-skips-the-fsync-of-the-old-file",
        "only the last file of a log can be torn",
        "journal/log/segment.py",
        ("        index = self.index\n        self.file.force()\n        self.sealed = True\n"),
        ("        index = self.index\n        self.sealed = True\n"),
        [KEEPER, ENUMERATION],
    ),
    Mutant(
        "roll-skips-the-fsync-of-the-folder",
        "a new segment's name is durable before anything in it is acknowledged",
        "journal/log/writer.py",
        (
            "            self._disk.force_folder(self._folder)\n"
            "        except OSError as error:\n"
            '            raise self.stop(f"a new segment could not be created: {error}") from error\n'
        ),
        (
            "        except OSError as error:\n"
            '            raise self.stop(f"a new segment could not be created: {error}") from error\n'
        ),
        [KEEPER, ENUMERATION],
    ),
    Mutant(
        "creation-skips-the-fsync-of-the-folder",
        "the first segment's name is durable",
        "journal/log/recovery.py",
        "        self._disk.force_folder(self._folder)\n        return segment\n",
        "        return segment\n",
        [ENUMERATION, OPENING],
    ),
    Mutant(
        "marks-are-written-without-a-fsync",
        "a stop, an epoch, `clean` and the log's beginning are durable before they take effect",
        "journal/dual_slot_file.py",
        ("        self._slots.write(payload, fsync=True)\n        self._slots.write(payload, fsync=True)\n"),
        ("        self._slots.write(payload, fsync=False)\n        self._slots.write(payload, fsync=False)\n"),
        ["tests/journal/log/test_checkpoint.py", KEEPER],
    ),
    Mutant(
        "marks-are-settled-in-one-slot",
        "damage of either slot of log.mark does not lose a stop",
        "journal/dual_slot_file.py",
        ("        self._slots.write(payload, fsync=True)\n        self._slots.write(payload, fsync=True)\n"),
        "        self._slots.write(payload, fsync=True)\n",
        ["tests/journal/log/test_checkpoint.py"],
    ),
    Mutant(
        "a-stop-is-not-written",
        "a log that stopped stays stopped after a restart",
        "journal/log/writer.py",
        (
            "        try:\n"
            "            self.write_checkpoint()\n"
            "        except (OSError, Full) as error:\n"
            '            segment_set.stopped = f"{reason}; log.mark could not be written, so a restart'
            ' ends it: {error}"\n'
        ),
        (
            "        try:\n"
            "            self.checkpoint_due\n"
            "        except (OSError, Full) as error:\n"
            '            segment_set.stopped = f"{reason}; log.mark could not be written, so a restart'
            ' ends it: {error}"\n'
        ),
        [OPENING, KEEPER, f"{FAULTS}::test_a_log_whose_fsync_failed_answers_errors_and_never_fsyncs_again"],
    ),
    Mutant(
        "clean-is-not-taken-back-before-the-first-write",
        "a crash after a clean start is recovered, not taken for clean",
        "journal/log/writer.py",
        ("                segment_set.clean = False\n                self.write_checkpoint()\n"),
        "                segment_set.clean = False\n",
        [KEEPER, f"{LOG}::test_a_clean_log_is_marked_dirty_before_its_first_append", RECOVERY],
    ),
    Mutant(
        "epoch-not-raised",
        "a reader from before a cut is notified",
        "journal/log/recovery.py",
        "            epoch = next_epoch(segment_set.epoch, self._clock.wall_ms(), truncated=True)\n",
        "            epoch = segment_set.epoch\n",
        [LOG],
    ),
    Mutant(
        "epoch-raised-only-in-memory",
        "the new epoch is durable before anything is served",
        "journal/log/recovery.py",
        (
            "            self.checkpoint_file.write_durably(segment_set.checkpoint()._replace(epoch=epoch,"
            " starts=starts))\n"
        ),
        (
            "            self.checkpoint_file.write_unsynced(segment_set.checkpoint()._replace(epoch=epoch,"
            " starts=starts))\n"
        ),
        [PROMISES],
    ),
    Mutant(
        "tail-not-fsynced-again",
        "what recovery accepts after the durable offset is durable before it is served",
        "journal/torn_tail.py",
        "        position += write_all(file, [piece], position)\n    file.force()\n",
        "        position += write_all(file, [piece], position)\n",
        [OPENING],
    ),
    Mutant(
        "tail-not-written-again",
        "after a crash the page cache proves nothing, so the accepted tail is written again",
        "journal/torn_tail.py",
        "        position += write_all(file, [piece], position)\n",
        "        position += len(piece)\n",
        [OPENING],
    ),
    Mutant(
        "durable-offset-is-the-end-at-completion",
        "the durable offset covers only what was written before the fsync began",
        "journal/log/log.py",
        "        segment_set.raise_durable(plan.end, plan.end_ordinal)\n",
        "        segment_set.raise_durable(segment_set.end, segment_set.end_ordinal)\n",
        [FORCE],
    ),
    Mutant(
        "durable-offset-moves-when-the-fsync-begins",
        "the durable offset moves after the fsync succeeded",
        "journal/log/log.py",
        "        return FsyncPlan(self, self._writer.gate, segment_set.segments[-1], *position, now, snapshot)\n",
        (
            "        segment_set.raise_durable(segment_set.end, segment_set.end_ordinal)\n"
            "        return FsyncPlan(self, self._writer.gate, segment_set.segments[-1], *position, now,"
            " snapshot)\n"
        ),
        [FORCE],
    ),
    Mutant(
        "durable-offset-moves-after-a-failed-fsync",
        "a failed fsync acknowledges nothing",
        "journal/log/log.py",
        '        if error is not None:\n            reason = f"an fsync failed: {error}"\n',
        (
            "        if error is not None:\n"
            "            segment_set.raise_durable(plan.end, plan.end_ordinal)\n"
            '            reason = f"an fsync failed: {error}"\n'
        ),
        [FORCE, f"{FAULTS}::test_a_log_whose_fsync_failed_answers_errors_and_never_fsyncs_again"],
    ),
    Mutant(
        "failed-fsync-swallowed",
        "every caller that waits for a failed fsync gets the error",
        "journal/fsync.py",
        "        except (OSError, JournalError) as error:\n            return error\n",
        "        except (OSError, JournalError):\n            return None\n",
        [FORCE, CONFORMANCE],
    ),
    Mutant(
        "failed-fsync-retried",
        "a failed fsync is never repeated",
        "journal/fsync.py",
        "            if self._error is not None:\n                raise self._error\n",
        "            if self._error is not None:\n                self._error = None\n",
        [GATE, FORCE, f"{FAULTS}::test_a_log_whose_fsync_failed_answers_errors_and_never_fsyncs_again", KEEPER],
    ),
    Mutant(
        "failed-fsync-does-not-stop-the-log",
        "after a failed fsync a log accepts no writes",
        "journal/log/log.py",
        "                segment_set.stopped = segment_set.stopped or reason\n"
        "            return lambda: self._stop(reason)\n",
        "                segment_set.stopped = segment_set.stopped\n            return None\n",
        [FORCE, CONFORMANCE],
    ),
    Mutant(
        "failed-syncfs-believed",
        "after a failed syncfs the fsync of each file decides which bytes are lost",
        "journal/fsync.py",
        "            self._failures += 1\n",
        "            self._failures += 0\n",
        [FORCE],
    ),
    Mutant(
        "failed-syncfs-forgotten-for-absent-logs",
        "after a failed syncfs the bytes of logs that were not part of it may be lost, too",
        "journal/fsync.py",
        (
            "        return [None if self._verified.get(plan.log, 0) == self._failures else self._fsync_one(p"
            "lan) for plan in plans]\n"
        ),
        (
            "        return [\n"
            "            None if self._verified.get(plan.log, self._failures) == self._failures else self._fs"
            "ync_one(plan)\n"
            "            for plan in plans\n"
            "        ]\n"
        ),
        [FORCE],
    ),
    Mutant(
        "file-closed-without-fsync",
        "a file whose bytes are not known to be durable is never closed",
        "journal/log/writer.py",
        "        segment_set.replace_segments((), tuple(s for s in segment_set.segments if s not in unforced))\n",
        "        segment_set.replace_segments((), segment_set.segments)\n",
        [PROMISES],
    ),
    Mutant(
        "kernel-s-fsync-error-swallowed",
        "an fsync in the kernel (AIO) reports its error",
        "journal/linux_aio.py",
        "            if result < 0:\n",
        "            if result < -9999:\n",
        [PROMISES],
    ),
    Mutant(
        "owner-not-woken-again",
        "no fsync is waited for without end, whichever thread read its completion",
        "journal/linux_aio.py",
        "            os.eventfd_write(self._descriptor, 1)\n",
        "            os.fstat(self._descriptor)\n",
        [PROMISES],
    ),
    Mutant(
        "fsync-beside-the-kernel-s",
        "an error is reported to one caller only, so no two fsyncs of a file run at the same time",
        "journal/fsync.py",
        "                self._error = self._error or in_flight.wait()\n",
        "                self._error = self._error or in_flight.error\n",
        [GATE, FORCE],
    ),
    Mutant(
        "error-of-the-kernel-s-fsync-known-too-late",
        "a worker that no longer waits for an fsync in the kernel finds its error",
        "journal/fsync.py",
        "        if error is not None:\n            self._error = self._error or error\n",
        (
            "        self._in_progress = None\n"
            "        if error is not None:\n"
            "            self._error = self._error or error\n"
        ),
        [GATE],
    ),
    Mutant(
        "file-closed-under-the-kernel-s-fsync",
        "a file is not closed during its fsync",
        "journal/fsync.py",
        "            self._references.acquire()\n",
        "            self._references.retire(())\n",
        [GATE, FORCE],
    ),
    Mutant(
        "refused-append-can-come-back",
        "an append that a full disk refused cannot be completed by a later power cut",
        "journal/log/segment.py",
        "                self.file.force()\n            raise\n",
        "                self.file.size()\n            raise\n",
        [f"{FAULTS}::test_an_append_that_was_refused_never_comes_back_by_a_power_cut"],
    ),
    Mutant(
        "slot-over-the-last-fsynced-one",
        "a rewrite of the mark without fsync loses nothing that was durable in it",
        "journal/dual_slot_file.py",
        ("        if fsync:\n            self._next_slot = 1 - self._next_slot\n"),
        "        self._next_slot = 1 - self._next_slot\n",
        ["tests/journal/test_dual_slot_file.py", "tests/journal/log/test_checkpoint.py"],
    ),
    Mutant(
        "snapshot-written-before-its-fsync",
        "a snapshot never describes more than is durable",
        "journal/log/writer.py",
        (
            "            self.gate.fsync(old, old.seal)\n"
            "            segment_set.raise_durable(segment_set.end, segment_set.end_ordinal,"
            " is_replicated=self._disk.is_replicated)\n"
            "            self.write_snapshot(snapshot)\n"
        ),
        (
            "            self.write_snapshot(snapshot)\n"
            "            self.gate.fsync(old, old.seal)\n"
            "            segment_set.raise_durable(segment_set.end, segment_set.end_ordinal)\n"
        ),
        [KEEPER, ENUMERATION],
    ),
    Mutant(
        "snapshot-not-fsynced",
        "a snapshot has its name only when it is complete",
        "journal/disk.py",
        "    file.force()\n    file.close()\n",
        "    file.close()\n",
        [STATE],
    ),
    Mutant(
        "snapshot-renamed-without-a-fsync-of-the-folder",
        "older snapshots are deleted only when the name of the newest is durable",
        "journal/log/checkpoint.py",
        ("            self._disk.force_folder(self._folder)\n            self._offsets.append(snapshot.offset)\n"),
        "            self._offsets.append(snapshot.offset)\n",
        [STATE],
    ),
    Mutant(
        "snapshots-of-two-workers-at-once",
        "a roll does not remove the snapshot that another worker is writing",
        "journal/log/checkpoint.py",
        "        with self._lock:\n            if self._offsets and snapshot",
        "        if True:\n            if self._offsets and snapshot",
        ["tests/journal/log/test_checkpoint.py"],
    ),
    Mutant(
        "late-snapshot-removes-a-newer-one",
        "a snapshot that is written late removes no newer one",
        "journal/log/checkpoint.py",
        "snapshot.offset <= self._offsets[-1]",
        "snapshot.offset in self._offsets",
        ["tests/journal/log/test_checkpoint.py"],
    ),
    Mutant(
        "segments-go-before-the-marks-say-so",
        "retention never leaves a log that misses what its marks promise",
        "journal/log/writer.py",
        (
            "                segment_set.first, segment_set.first_ordinal = offset, ordinal\n"
            "            self.write_checkpoint()\n"
        ),
        "                segment_set.first, segment_set.first_ordinal = offset, ordinal\n",
        [KEEPER],
    ),
    Mutant(
        "segment-goes-that-no-snapshot-knows",
        "retention does not delete the only file that contains a producer's sequences",
        "journal/log/writer.py",
        "            needed = min(offset, max(self._snapshots.offsets, default=0))\n",
        "            needed = offset\n",
        [KEEPER],
    ),
    Mutant(
        "archive-copy-not-fsynced",
        "an archived segment is complete in its new folder before the old one is deleted",
        "journal/disk.py",
        "    file.force()\n    file.close()\n",
        "    file.close()\n",
        ["tests/journal/log/test_retention.py"],
    ),
)
