"""Planted bugs: the transaction journal: entries, files, checkpoints, recovery, repair."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

ENTRY: Final = "tests/journal/wal/test_entry.py"
FILE: Final = "tests/journal/wal/test_file.py"
FILES: Final = "tests/journal/wal/test_file.py"
SNAPSHOT: Final = "tests/journal/wal/test_snapshot.py"
CHECKPOINT: Final = "tests/journal/wal/test_checkpoint.py"
RECOVERY: Final = "tests/journal/wal/test_recovery_rules.py"
OPENING: Final = "tests/journal/wal/test_recovery.py"
TAIL: Final = "tests/journal/wal/test_recovery.py"
GATE: Final = "tests/journal/test_fsync.py"
KEEPER: Final = "tests/journal/wal/test_store.py"
PINS: Final = "tests/journal/test_disk.py"
STORE: Final = "tests/journal/wal/test_store.py"
HAZARDS: Final = "tests/journal/test_journal_hazards.py"
REPAIR: Final = "tests/journal/fsck/test_wal_repair.py"
CRASHES: Final = "tests/crash/test_journal_enumeration.py"

_WRITING: Final = (
    Mutant(
        "entry-without-the-journal-s-seed",
        "a message that imitates an entry is not taken for one",
        "journal/wal/entry.py",
        "crc32(data, crc32(rest, crc32(word, seed)))",
        "crc32(data, crc32(rest, crc32(word)))",
        [ENTRY],
    ),
    Mutant(
        "more-durable-than-written-believed",
        "an entry with impossible values is refused",
        "journal/wal/entry.py",
        "            or durable_lsn > found\n",
        "",
        [ENTRY],
    ),
    Mutant(
        "walk-believes-a-length",
        "no length is used before it is compared with the available bytes",
        "journal/wal/file.py",
        "                if lsn + max(HEADER_SIZE, claimed) > self.end:\n",
        "                if lsn + HEADER_SIZE > self.end:\n",
        [FILE],
    ),
    Mutant(
        "read-believes-a-length",
        "no length is used before it is compared with the available bytes",
        "journal/wal/store.py",
        "                if lsn + claimed > file.end:\n",
        "                if False:\n",
        [STORE],
    ),
    Mutant(
        "journal-head-not-fsynced",
        "a new file is complete before it has its name",
        "journal/wal/file.py",
        ("        file.force()\n        return cls(file, header.number, header.first, size)\n"),
        "        return cls(file, header.number, header.first, size)\n",
        [FILE, CRASHES],
    ),
    Mutant(
        "journal-file-with-entries-made-again",
        "a file that has entries is never created again",
        "journal/wal/file.py",
        "            if disk.size(path) > FILE_HEADER_SIZE:\n",
        "            if False:\n",
        [FILE],
    ),
    Mutant(
        "refused-entries-cut-without-a-fsync",
        "an append that was refused never reappears after a power cut",
        "journal/wal/store.py",
        (
            "                if active.truncate_failed_write():\n"
            "                    self._gate.fsync(active)\n"
            "                    files.raise_durable(files.end, is_replicated=self._disk.is_replicated)\n"
        ),
        "                active.truncate_failed_write()\n",
        [KEEPER],
    ),
    Mutant(
        "journal-rolls-without-a-fsync",
        "only the last file of the journal can have a torn tail",
        "journal/wal/store.py",
        "            self._gate.fsync(old, seal)\n",
        "            files.seal()\n",
        [KEEPER, CRASHES],
    ),
    Mutant(
        "journal-rolls-without-a-fsync-of-the-folder",
        "a file with entries does not lose its name",
        "journal/wal/store.py",
        ("            self._disk.force_folder(self._folder)\n"),
        (""),
        [KEEPER, CRASHES],
    ),
    Mutant(
        "journal-fsync-covers-what-came-later",
        "no entry is acknowledged by an fsync that began before it was written",
        "journal/wal/store.py",
        "        files.raise_durable(plan.end)\n",
        "        files.raise_durable(files.end)\n",
        [STORE],
    ),
    Mutant(
        "journal-fsyncs-again-after-a-failure",
        "a failed fsync is never repeated",
        "journal/fsync.py",
        "                self._error = error\n                raise\n",
        "                raise\n",
        [KEEPER, GATE],
    ),
    Mutant(
        "journal-forgets-an-error-of-the-kernel-s-fsync",
        "a failed fsync is never repeated",
        "journal/fsync.py",
        "            self._error = self._error or error\n",
        "            self._in_progress = None\n",
        [KEEPER, GATE],
    ),
    Mutant(
        "failed-fsync-moves-the-journal-s-mark",
        "what a failed fsync should have made durable is not reported as durable",
        "journal/wal/store.py",
        (
            "        if files.stopped is not None or self.closed:\n"
            "            return None\n"
            "        files.raise_durable(plan.end)\n"
        ),
        "        files.raise_durable(plan.end)\n",
        [KEEPER],
    ),
    Mutant(
        "journal-closes-files-without-fsync",
        "a file whose bytes are not known to be durable is never closed",
        "journal/wal/store.py",
        "        files.remove_all(self._gate.keep_unsynced_open(files.files, files.durable_lsn))\n",
        "        files.remove_all(())\n",
        [KEEPER],
    ),
    Mutant(
        "journal-file-read-before-the-end-that-is-fsynced",
        "what is appended during a checkpoint's fsync is not taken for durable",
        "journal/wal/store.py",
        "        end, active = files.end, files.active\n",
        "        active, end = files.active, files.end\n",
        [KEEPER],
    ),
)

_CHECKPOINTS: Final = (
    Mutant(
        "checkpoint-ahead-of-the-journal",
        "a snapshot never describes more than is durable",
        "journal/wal/store.py",
        ("                if self._files.durable_lsn < lsn:\n                    self._fsync_all()\n"),
        "",
        [OPENING, CRASHES],
    ),
    Mutant(
        "checkpoint-not-fsynced",
        "files are deleted only after the checkpoint that replaces them is durable",
        "journal/wal/store.py",
        "            self._checkpoint_file.write_durably(new)\n",
        "            self._checkpoint_file.write_unsynced(new)\n",
        [KEEPER, CRASHES],
    ),
    Mutant(
        "checkpoint-in-one-slot",
        "one valid slot of the checkpoint is sufficient",
        "journal/dual_slot_file.py",
        ("        self._slots.write(payload, fsync=True)\n        self._slots.write(payload, fsync=True)\n"),
        "        self._slots.write(payload, fsync=True)\n",
        [CHECKPOINT],
    ),
    Mutant(
        "journal-snapshot-not-fsynced",
        "a snapshot is durable before it is used",
        "journal/disk.py",
        "    file.force()\n    file.close()\n",
        "    file.close()\n",
        [SNAPSHOT, CRASHES],
    ),
    Mutant(
        "journal-snapshot-s-name-not-fsynced",
        "a snapshot is durable before it is used",
        "journal/wal/checkpoint.py",
        "        self._disk.rename(new, path)\n        self._disk.force_folder(self._folder)\n",
        "        self._disk.rename(new, path)\n",
        [SNAPSHOT, CRASHES],
    ),
    Mutant(
        "journal-snapshot-not-checked",
        "every flipped bit of a snapshot is found",
        "journal/wal/checkpoint.py",
        "        if found != crc:\n",
        "        if False:\n",
        [SNAPSHOT],
    ),
    Mutant(
        "fallback-s-files-removed",
        "when a snapshot is damaged, the older one has everything that it needs",
        "journal/wal/store.py",
        "        kept = RequiredFiles.from_lists(*self._file_lists)\n",
        "        kept = RequiredFiles.from_lists(self._file_lists[0])\n",
        [KEEPER, CRASHES],
    ),
    Mutant(
        "held-journal-files-removed",
        "a file is deleted only when nothing in it is referenced",
        "journal/wal/file.py",
        "file.sealed and not file.references and not kept(file.number)",
        "file.sealed and not kept(file.number)",
        [FILES, KEEPER],
    ),
    Mutant(
        "journal-file-closed-under-a-reader",
        "reads continue while files are deleted",
        "journal/disk.py",
        "            if self._count:\n                return\n",
        "",
        [PINS, FILES, STORE],
    ),
    Mutant(
        "file-left-open-by-a-pin-taken-back-meanwhile",
        "a file that was removed from the set is closed, whatever happens at the same moment",
        "journal/disk.py",
        "        obsolete = list(files)",
        "        obsolete = files",
        [PINS],
    ),
)

_STARTS: Final = (
    Mutant(
        "journal-s-tail-not-fsynced-again",
        "what a start accepts after the durable LSN is durable before it is served",
        "journal/wal/recovery.py",
        "        if lsn < file.end:\n            report",
        "        if False:\n            report",
        [TAIL, CRASHES],
    ),
    Mutant(
        "journal-s-cut-not-fsynced",
        "what a start cuts does not reappear after what is written in its place",
        "journal/wal/recovery.py",
        "            file.size = tail.end - file.first\n            file.file.force()\n",
        "            file.size = tail.end - file.first\n",
        [TAIL],
    ),
    Mutant(
        "journal-s-last-name-not-fsynced-again",
        "what a start accepts is durable, its file name too",
        "journal/wal/recovery.py",
        "            disk.force_folder(folder)\n",
        "",
        [TAIL],
    ),
    Mutant(
        "later-entries-prove-nothing",
        "what a later entry says was durable is never cut",
        "journal/wal/recovery.py",
        "            durable_lsn = max(durable_lsn, found.durable_lsn)\n",
        "",
        [RECOVERY, HAZARDS],
    ),
    Mutant(
        "durable-offset-of-the-journal-ignored",
        "damage of the last entry is not taken for a torn tail",
        "journal/wal/recovery.py",
        "        durable_lsn = max(found.durable_lsn, found.lsn, files[-1].first)\n",
        "        durable_lsn = max(found.lsn, files[-1].first)\n",
        [RECOVERY, KEEPER],
    ),
    Mutant(
        "lost-end-of-the-journal-accepted",
        "missing durable entries end the start",
        "journal/wal/recovery_rules.py",
        "lambda t: t.lsn == t.end and (t.end >= t.durable_lsn or not t.is_last_file), TailAction.KEEP",
        "lambda t: t.lsn == t.end, TailAction.KEEP",
        [RECOVERY],
    ),
    Mutant(
        "damaged-last-file-dropped",
        "a last file that has entries is never deleted",
        "journal/wal/recovery_rules.py",
        "        return bool(last.fault) and last.size <= FILE_HEADER_SIZE and not listed\n",
        "        return bool(last.fault) and not listed\n",
        [RECOVERY],
    ),
    Mutant(
        "journal-begun-anew-without-its-files",
        "LSNs never go back",
        "journal/wal/recovery_rules.py",
        '    Rule("unfinished creation", lambda f: not f.files and not f.file_number, FilesAction.CREATE),\n',
        '    Rule("unfinished creation", lambda f: not f.files, FilesAction.CREATE),\n',
        [RECOVERY, HAZARDS],
    ),
    Mutant(
        "references-forgotten-by-a-start",
        "file references are restored by a start",
        "journal/wal/recovery.py",
        (
            "        self._add_references()\n"
            "        self._remove_obsolete(numbers, [pointer.number for pointer in self.checkpoint.snapshots])\n"
        ),
        "        self._remove_obsolete(numbers, [pointer.number for pointer in self.checkpoint.snapshots])\n",
        [OPENING],
    ),
    Mutant(
        "month-old-journal-read-again",
        "a start replays from the newest snapshot",
        "journal/wal/recovery.py",
        "max(found.lsn, file.first + FILE_HEADER_SIZE)",
        "file.first + FILE_HEADER_SIZE",
        [RECOVERY, OPENING],
    ),
    Mutant(
        "repair-keeps-what-was-never-fsynced",
        "a torn tail is left to the next start",
        "journal/fsck/wal_repair.py",
        "            if isinstance(gap, JournalGap) and gap.first < durable_lsn:\n",
        "            if isinstance(gap, JournalGap):\n",
        [REPAIR],
    ),
    Mutant(
        "complete-file-ends-where-its-bytes-do",
        "bytes after the end of a complete file cost no entry",
        "journal/wal/recovery_rules.py",
        "        end = firsts.get(file.number + 1, complete.get(file.number, file.end))\n",
        "        end = complete.get(file.number, file.end)\n",
        [REPAIR, RECOVERY],
    ),
    Mutant(
        "misplaced-file-taken-for-its-own-place",
        "a file under the name of another one is not taken for it",
        "journal/fsck/wal_verify.py",
        "            inside = self._first_lsn_of(number) if number not in self._misplaced else None\n",
        "            inside = self._first_lsn_of(number)\n",
        [f"{REPAIR}::test_a_file_in_the_place_of_another_one_is_not_taken_for_it"],
    ),
    Mutant(
        "surplus-is-not-in-the-original",
        "the original of a repaired file is kept unchanged",
        "journal/fsck/findings.py",
        "            _write_copy(disk, kept + REPAIRED_SUFFIX, path, file.size())\n",
        "            _write_copy(disk, kept + REPAIRED_SUFFIX, path, file.size() - 1)\n",
        [f"{REPAIR}::test_bytes_after_the_end_of_a_complete_file_cost_no_entry"],
    ),
    Mutant(
        "repair-does-not-judge-as-the-start",
        "a repair whose result a start would refuse says so",
        "tfmq/cli/log.py",
        "        lost += filter(None, [unrepaired_damage(disk, str(journal))])\n",
        "        pass\n",
        ["tests/cli/test_log_transactions.py"],
    ),
    Mutant(
        "repair-without-the-original",
        "the original of a repaired file is kept",
        "journal/fsck/wal_repair.py",
        "                keep_original(self.disk, path)\n",
        "                pass\n",
        [REPAIR],
    ),
    Mutant(
        "repair-without-the-original-of-a-file-that-is-not-located",
        "the original of a repaired file is kept",
        "journal/fsck/wal_repair.py",
        "            if self.disk.exists(path):\n                keep_original",
        "            if file is not None:\n                keep_original",
        [REPAIR],
    ),
)

TRANSACTION_JOURNAL: Final = _WRITING + _CHECKPOINTS + _STARTS
