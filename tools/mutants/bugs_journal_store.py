"""Planted bugs: the transaction journal: entries, due work, refusals of a start, verification."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

AUDIT: Final = "tests/journal/fsck/test_wal_verify.py"
ENTRY: Final = "tests/journal/wal/test_entry.py"
FILE: Final = "tests/journal/wal/test_file.py"
FILES: Final = "tests/journal/wal/test_file.py"
HAZARDS: Final = "tests/journal/test_journal_hazards.py"
KEEPER: Final = "tests/journal/wal/test_store.py"
OPENING: Final = "tests/journal/wal/test_recovery.py"
RECOVERY: Final = "tests/journal/wal/test_recovery_rules.py"
STORE: Final = "tests/journal/wal/test_store.py"

_ENTRIES: Final = (
    Mutant(
        "entry-s-checksum-unchecked",
        "every flipped bit of an entry is found",
        "journal/wal/entry.py",
        "        if crc32(view[position + 8 : next], crc32(view[position : position + 4], seed)) != checksum:\n",
        "        if checksum < 0:\n",
        [ENTRY],
    ),
    Mutant(
        "entry-of-another-place",
        "an entry is valid only at the position where it was written",
        "journal/wal/entry.py",
        "            or found != lsn + position\n",
        "",
        [ENTRY],
    ),
    Mutant(
        "blocks-beyond-the-entry",
        "no count is used before it is compared with the available bytes",
        "journal/wal/entry.py",
        "    if records > next:\n",
        "    if records < begins:\n",
        [ENTRY],
    ),
    Mutant(
        "later-version-s-operation-read",
        "an entry of a later version is refused",
        "journal/wal/entry.py",
        "    if zero:\n        raise BadRecord",
        "    if zero > 255:\n        raise BadRecord",
        [ENTRY],
    ),
    Mutant(
        "entry-of-any-size",
        "the size of an entry is limited",
        "journal/wal/entry.py",
        "        if size > ENTRY_SIZE_MAX:\n",
        "        if size > 2 * ENTRY_SIZE_MAX:\n",
        [ENTRY, STORE],
    ),
    Mutant(
        "search-ends-with-the-first-candidate",
        "the search after damage finds the next whole entry",
        "journal/wal/file.py",
        "                        return decode_entry(self.pread(size, at), at, seed)\n",
        "                        return decode_entry(self.pread(size, at), at, seed)\n                return None\n",
        [FILE],
    ),
    Mutant(
        "search-steps-over-a-header",
        "the search after damage finds the next whole entry",
        "journal/wal/file.py",
        "            lsn += max(len(data) - HEADER_SIZE + 1, 1)\n",
        "            lsn += max(len(data), 1)\n",
        [FILE],
    ),
    Mutant(
        "failed-cut-goes-on",
        "the rest of a failed write never completes a later one",
        "journal/wal/file.py",
        '            raise OSError(errno.EIO, f"a failed write cannot be truncated: {error}", self.path) from error\n',
        "            return error is None\n",
        [FILE, KEEPER],
    ),
)

_DUE: Final = (
    Mutant(
        "file-outgrows-its-bytes",
        "a file of the journal has a maximum size, unless one append is larger",
        "journal/wal/store.py",
        (
            "        if not active.sealed and (active.size == FILE_HEADER_SIZE or active.size + size <= self."
            "options.file_bytes):\n"
        ),
        (
            "        if not active.sealed and (active.size == FILE_HEADER_SIZE or active.size <= self.options"
            ".file_bytes):\n"
        ),
        [STORE],
    ),
    Mutant(
        "places-from-before-the-roll",
        "an entry names its own position",
        "journal/wal/store.py",
        "            work()\n            buffers, lsns, end = encode_entries(entries, files.end",
        "            work()\n            _, lsns, _ = encode_entries(entries, end",
        [STORE],
    ),
    Mutant(
        "stopped-journal-appends",
        "a stopped journal accepts no writes",
        "journal/wal/store.py",
        (
            '            raise Closed("the transaction journal")\n'
            "        if self._files.stopped is not None:\n"
            "            raise Stopped(self._files.stopped)\n"
        ),
        '            raise Closed("the transaction journal")\n',
        [STORE, KEEPER],
    ),
    Mutant(
        "fsyncs-only-when-asked",
        "a large transaction does not end in one large fsync",
        "journal/wal/store.py",
        "        return files.end - files.high_watermark > self.options.flush_bytes and files.stopped is None\n",
        "        return files.end - files.high_watermark > 2 * self.options.flush_bytes and files.stopped is None\n",
        [STORE],
    ),
    Mutant(
        "two-checkpoints-at-a-time",
        "two checkpoints do not run at the same time",
        "journal/wal/store.py",
        "        if self._checkpoint_running or self.closed or files.stopped is not None:\n",
        "        if self.closed or files.stopped is not None:\n",
        [STORE],
    ),
    Mutant(
        "failed-checkpoint-tried-at-once",
        "a failed checkpoint is repeated after a pause",
        "journal/wal/store.py",
        "        self._retry_after = now if error is None else now + RETRY_SECONDS\n",
        "        self._retry_after = now\n",
        [STORE],
    ),
    Mutant(
        "filler-read-as-an-entry",
        "a reader of an entry that a repair dropped gets an error",
        "journal/wal/store.py",
        "            if type(entry.content) is LostEntries:\n",
        "            if type(entry) is LostEntries:\n",
        [STORE, "tests/journal/fsck/test_wal_repair.py"],
    ),
    Mutant(
        "hold-released-once-too-often",
        "file references are counted",
        "journal/wal/file.py",
        (
            "            if not file.references:\n"
            "                raise KeyError(lsn)\n"
            "            file.references -= 1\n"
        ),
        "            file.references -= 1\n",
        [FILES],
    ),
    Mutant(
        "held-file-counted-as-idle",
        "only files that are not referenced make a checkpoint due",
        "journal/wal/file.py",
        "            self.idle_count -= file.sealed and not file.references\n",
        "",
        [FILES],
    ),
)

_REFUSALS: Final = (
    Mutant(
        "journal-without-its-checkpoint-begun-anew",
        "LSNs never go back",
        "journal/wal/recovery_rules.py",
        'Rule("new journal", lambda f: f.checkpoint == CheckpointState.NONE and not f.files, StartAction.CREATE),\n',
        'Rule("new journal", lambda f: f.checkpoint == CheckpointState.NONE, StartAction.CREATE),\n',
        [RECOVERY, HAZARDS],
    ),
    Mutant(
        "start-without-a-snapshot",
        "a start without a complete snapshot is refused",
        "journal/wal/recovery_rules.py",
        '    Rule("no snapshot", lambda f: True, StartAction.REFUSE),\n',
        '    Rule("no snapshot", lambda f: True, StartAction.OLDER),\n',
        [RECOVERY],
    ),
    Mutant(
        "listed-file-may-be-missing",
        "a start without a required file is refused",
        "journal/wal/recovery_rules.py",
        '    Rule("listed file missing", lambda f: bool(f.missing), FilesAction.REFUSE),\n',
        '    Rule("listed file missing", lambda f: bool(f.missing), FilesAction.REPLAY),\n',
        [RECOVERY, HAZARDS],
    ),
    Mutant(
        "listed-file-may-be-shorter",
        "a start with a file that lost its end is refused",
        "journal/wal/recovery_rules.py",
        "file.end < listed[file.number].end",
        "file.end < listed[file.number].first",
        [RECOVERY],
    ),
    Mutant(
        "needed-entries-not-looked-at",
        "damage before the snapshot in required entries ends the start",
        "journal/wal/recovery.py",
        "            self._prove(found.lsn)\n",
        "",
        [OPENING],
    ),
    Mutant(
        "only-the-first-bytes-looked-at",
        "each required entry is verified to its end",
        "journal/wal/file.py",
        "                entry = decode_entry(data[lsn - begin :][: max(size, HEADER_SIZE)], lsn, seed)\n",
        "                entry = decode_entry(self.pread(size or HEADER_SIZE, begin), begin, seed)\n",
        [OPENING],
    ),
    Mutant(
        "hole-between-files-passed-over",
        "a start with a gap in the entries that it replays is refused",
        "journal/wal/recovery_rules.py",
        "            if file.number != before.number + 1 or file.first != before.end:\n",
        "            if file.number != before.number + 1 and file.first != before.end:\n",
        [RECOVERY],
    ),
    Mutant(
        "last-file-may-be-missing",
        "a start without the last file is refused",
        "journal/wal/recovery_rules.py",
        '    Rule("last file missing", lambda f: f.files[-1].number < f.file_number, FilesAction.REFUSE),\n',
        '    Rule("last file missing", lambda f: f.files[-1].number < f.file_number - 1, FilesAction.REFUSE),\n',
        [RECOVERY],
    ),
    Mutant(
        "damage-of-a-finished-file-cut",
        "only the last file of the journal can have a torn tail",
        "journal/wal/recovery_rules.py",
        '    Rule("damage in a finished file", lambda t: not t.is_last_file, TailAction.REFUSE),\n',
        '    Rule("damage in a finished file", lambda t: not t.is_last_file, TailAction.CUT),\n',
        [RECOVERY],
    ),
    Mutant(
        "fsynced-entries-cut",
        "durable entries are never cut",
        "journal/wal/recovery_rules.py",
        'Rule("forced entries lost", lambda t: t.durable_lsn > t.lsn, TailAction.REFUSE)',
        'Rule("forced entries lost", lambda t: t.durable_lsn > t.end, TailAction.REFUSE)',
        [RECOVERY, HAZARDS],
    ),
    Mutant(
        "verify-calls-damage-a-torn-tail",
        "verification distinguishes damage from a torn tail",
        "journal/fsck/wal_verify.py",
        "        torn = gap.first >= durable_lsn\n",
        "        torn = gap.next >= durable_lsn\n",
        [AUDIT],
    ),
    Mutant(
        "verify-passes-over-blocks",
        "verification includes the messages in the entries",
        "journal/fsck/wal_verify.py",
        "        if crc32(view[start : start + size]) != crc:\n",
        "        if size < 0:\n",
        [AUDIT],
    ),
    Mutant(
        "verify-calls-delayed-batches-damaged",
        "verification of all records reports no damage in an undamaged folder",
        "journal/fsck/wal_verify.py",
        "    own = [record.id for record in found if split_id(record.id)[0] >= LEASED_ID_FIRST]\n",
        "    own = [record.id for record in found]\n",
        [AUDIT],
    ),
    Mutant(
        "verify-passes-over-slots",
        "verification reports a damaged slot although the other one is valid",
        "journal/fsck/wal_verify.py",
        '            self.add_finding(filenames.CHECKPOINT_NAME, first, next, what, "slot", NOTE)\n',
        "            del what\n",
        [AUDIT],
    ),
)

JOURNAL_STORE: Final = _ENTRIES + _DUE + _REFUSALS
