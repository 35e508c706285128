"""Planted bugs: the journal: what is verified, what recovery keeps and reports, what a reader gets."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

LOG: Final = "tests/journal/log/test_log.py"
OPENING: Final = "tests/journal/log/test_recovery.py"
RECOVERY: Final = "tests/journal/log/test_recovery_rules.py"
STATE: Final = "tests/journal/log/test_checkpoint.py"
CONFORMANCE: Final = "tests/journal/test_conformance_storage.py"
ENUMERATION: Final = (
    "tests/crash/test_enumeration.py::test_whatever_a_power_cut_leaves_of_a_log_opens_with_everything_that_was_promised"
)

REPAIR: Final = "tests/journal/fsck/test_log_repair.py"
SURVEY: Final = "tests/journal/fsck/test_segment_scan.py"
VERIFY: Final = "tests/journal/fsck/test_log_verify.py"
DATA_REPAIR: Final = "tests/broker/test_data_repair.py"

CHECKS: Final = (
    Mutant(
        "bytes-after-the-end-of-a-short-file",
        "a repair corrects a file that ends before the position from which the log needs it",
        "journal/log/segment.py",
        "        return self.file.pread(max(0, min(size, self.size - position)), position)\n",
        "        return self.file.pread(min(size, self.size - position), position)\n",
        [REPAIR],
    ),
    Mutant(
        "a-mark-without-a-file-is-a-new-log",
        "a log without any segment file is stopped, also where its mark does not say that it had records",
        "journal/log/recovery_rules.py",
        'Rule("nothing missing", lambda f: not f.files and f.clean and f.durable == f.first, FolderAction.CREATE)',
        'Rule("nothing missing", lambda f: not f.files and f.durable == f.first, FolderAction.CREATE)',
        [RECOVERY],
    ),
    Mutant(
        "a-mark-before-the-first-file",
        "a crash while a log is created is not taken for damage",
        "journal/log/recovery.py",
        (
            "        if segment_set.stopped is not None:\n"
            "            self.checkpoint_file.write_durably(segment_set.checkpoint())\n"
            "        path = self._segment_path(forced)\n"
        ),
        (
            "        self.checkpoint_file.write_durably(segment_set.checkpoint())\n"
            "        path = self._segment_path(forced)\n"
        ),
        [RECOVERY],
    ),
    Mutant(
        "a-repair-keeps-what-is-applied-again",
        "a repair leaves out messages of a transaction that the next start applies again",
        "journal/fsck/log_repair.py",
        "        plan = _plan_repair(segment, damaged, before, {*repeated, *dropped})\n",
        "        plan = _plan_repair(segment, damaged, before, repeated)\n",
        [DATA_REPAIR],
    ),
    Mutant(
        "a-repair-forgets-how-far-a-transaction-was-applied",
        "a repair gives a block that lost its source the one of the transaction journal",
        "journal/fsck/log_repair.py",
        "            plan = _plan_repair(segment, damaged, before, repeated, source)\n",
        "            plan = _plan_repair(segment, damaged, before, repeated)\n",
        [DATA_REPAIR],
    ),
    Mutant(
        "a-repair-leaves-out-what-later-blocks-have-applied",
        "a repair keeps messages of a transaction that no start applies again",
        "journal/fsck/log_repair.py",
        "            if self.applied is None or position > self.applied\n",
        "",
        [DATA_REPAIR],
    ),
    Mutant(
        "verify-takes-a-durable-tail-for-torn",
        "`tfmq log verify` reports damage at the end of a log where a start knows that it was durable",
        "journal/fsck/log_verify.py",
        "                durable = max(durable, checkpoint.durable if checkpoint is not None else 0)\n",
        "                durable = max(durable, checkpoint.first if checkpoint is not None else 0)\n",
        [VERIFY],
    ),
    Mutant(
        "verify-knows-what-a-torn-tail-costs",
        "`tfmq log verify` says that messages may be lost with a tail that is not known to be durable",
        "journal/fsck/log_verify.py",
        "        self.add_finding(file, first, end, what, field, NOTE, may_lose=True)\n",
        "        self.add_finding(file, first, end, what, field, NOTE)\n",
        [VERIFY],
    ),
    Mutant(
        "verify-passes-an-empty-newest-file",
        "`tfmq log verify` reports that the newest file of a log that was not closed is empty or may be missing",
        "journal/fsck/log_verify.py",
        "        elif not marks.clean and marks.first < end and end in (bases[-1], self.described):\n",
        "        elif marks.stopped and marks.first < end and end in (bases[-1], self.described):\n",
        [VERIFY],
    ),
    Mutant(
        "verify-passes-a-mark-without-a-file",
        "`tfmq log verify` names a log whose segment files are all missing",
        "journal/fsck/log_verify.py",
        (
            "            elif checkpoint is not None and not (checkpoint.clean and checkpoint.first =="
            " checkpoint.durable):\n"
        ),
        "            elif checkpoint is not None and checkpoint.first < checkpoint.durable:\n",
        ["tests/journal/fsck/test_log_verify.py"],
    ),
    Mutant(
        "a-trailer-s-id-is-believed-before-a-checksum",
        "a flipped bit in the log id of a block trailer loses no record in a repair",
        "journal/fsck/log_repair.py",
        "            (trailer.log_id ^ log_id).bit_count() == 1\n",
        "            trailer.log_id == log_id\n",
        [REPAIR],
    ),
    Mutant(
        "a-trailer-with-a-bad-checksum-is-foreign",
        "a block trailer whose checksum fails does not identify its log or offset",
        "journal/record/block_trailer.py",
        "    if crc32(memoryview(data)[position + HEADER_SIZE : end]) != checksum:\n",
        "    if checksum < 0:\n",
        [REPAIR],
    ),
    Mutant(
        "a-trailer-in-a-payload-is-foreign",
        "bytes of a payload that look like a block trailer change nothing in a repair",
        "journal/fsck/log_repair.py",
        "        elif (flipped := _size_of_flipped(data, position)) is not None:\n",
        '        elif (flipped := _size_of_flipped(b"", position)) is not None:\n',
        [REPAIR],
    ),
    Mutant(
        "foreign-blocks-that-fit-are-kept",
        "a repair keeps no block of another log",
        "journal/fsck/log_repair.py",
        "            and named[trailer.log_id] == 1\n",
        "",
        [REPAIR],
    ),
    Mutant(
        "forged-trailers-name-the-log",
        "block trailers in a payload do not identify the log",
        "journal/fsck/log_verify.py",
        "    votes = proven or others\n",
        "    votes = proven + others\n",
        [SURVEY],
    ),
    Mutant(
        "the-mark-is-outvoted-by-a-flipped-bit",
        "where a single block trailer differs from the mark in one bit, the mark identifies the log",
        "journal/fsck/log_repair.py",
        "    return next((id for id in others if id in checked and (id ^ first).bit_count() == 1), first)\n",
        "    return first\n",
        [REPAIR],
    ),
    Mutant(
        "older-copy-goes-on-in-the-same-epoch",
        "a reader is notified when an older copy of the folder continued in its place",
        "journal/log/writer.py",
        "                if not segment_set.is_new:\n",
        "                if False:\n",
        [LOG],
    ),
    Mutant(
        "an-empty-log-starts-no-epoch",
        "a copy that was made while the log was empty continues in another epoch",
        "journal/log/writer.py",
        "        if not segment_set.is_new:\n",
        "        if segment_set.end > 0:\n",
        [LOG, "tests/broker/test_delay_promises.py"],
    ),
    Mutant(
        "first-append-in-the-former-epoch",
        "the block trailers of a start's first append name its epoch",
        "journal/log/writer.py",
        "            if self._segment_set.epoch != position.epoch:\n",
        "            if False:\n",
        [LOG],
    ),
    Mutant(
        "batch-block-checksum-unchecked",
        "bytes that were damaged in transfer are refused before the first is written",
        "journal/record/batch.py",
        "        if crc32(view[position : position + block_size]) != crc:\n",
        "        if crc < 0:\n",
        ["tests/journal/record/test_batch.py"],
    ),
    Mutant(
        "batch-ids-unchecked",
        "every record of a batch has the producer id of its request",
        "journal/record/batch.py",
        "                if found != id or flag & FLAG_REFUSED_MASK or length > length_max:\n",
        "                if flag & FLAG_REFUSED_MASK or length > length_max:\n",
        ["tests/journal/record/test_batch.py"],
    ),
    Mutant(
        "batch-flags-unchecked",
        "a producer cannot write what only a log may write",
        "journal/record/batch.py",
        "                if found != id or flag & FLAG_REFUSED_MASK or length > length_max:\n",
        "                if found != id or length > length_max:\n",
        ["tests/journal/record/test_batch.py"],
    ),
    Mutant(
        "batch-flags-unchecked-by-columns",
        "a producer cannot write what only a log may write, also in batches of equal sizes",
        "journal/record/format.py",
        "    if data[start + _FLAG_HIGH : end : size] != bytes(count):\n        return False\n",
        "",
        ["tests/journal/record/test_batch.py", "tests/journal/record/test_format.py"],
    ),
    Mutant(
        "block-checksum-unchecked-when-read",
        "a reader verifies every byte of a block",
        "journal/record/block.py",
        "        if verify and crc32(records) != trailer.crc:\n",
        "        if verify and trailer.crc < 0:\n",
        ["tests/journal/record/test_block.py"],
    ),
    Mutant(
        "recovery-does-not-check-blocks",
        "an interrupted append is never taken for a whole one",
        "journal/log/recovery.py",
        "            for block in segment.blocks(offset - segment.base, end - segment.base):\n",
        "            for block in segment.blocks(offset - segment.base, end - segment.base, verify=False):\n",
        [RECOVERY, ENUMERATION],
    ),
    Mutant(
        "control-checksum-unchecked",
        "a block trailer is verified by its checksum",
        "journal/record/block_trailer.py",
        "    if crc32(memoryview(data)[position + HEADER_SIZE : end]) != checksum:\n",
        "    if checksum < 0:\n",
        ["tests/journal/record/test_block_trailer.py"],
    ),
    Mutant(
        "offset-field-ignored",
        "a block that was copied or moved is refused",
        "journal/record/block.py",
        "    if trailer.offset != offset + start:\n",
        "    if trailer.offset < 0:\n",
        ["tests/journal/record/test_block.py"],
    ),
    Mutant(
        "log-id-ignored",
        "a block of another log is refused",
        "journal/record/block_trailer.py",
        (
            "    if id != log_id:\n"
            '        raise BadBlockTrailer(position, f"the block trailer is of log {id:#x}, this is log {log_id:#x}")\n'
        ),
        (
            "    if id < 0:\n"
            '        raise BadBlockTrailer(position, f"the block trailer is of log {id:#x}, this is log {log_id:#x}")\n'
        ),
        ["tests/journal/record/test_block.py", "tests/journal/record/test_block_trailer.py"],
    ),
    Mutant(
        "first-ordinal-ignored",
        "ordinals continue from block to block",
        "journal/record/block.py",
        "        if trailer.first_ordinal != ordinal and ordinal >= 0:\n",
        "        if ordinal < -1:\n",
        ["tests/journal/record/test_block.py", "tests/journal/log/test_segment.py"],
    ),
    Mutant(
        "more-follows-ignored",
        "an append of many blocks is complete or absent",
        "journal/log/recovery.py",
        ("                if not block.control.more_follows:\n                    self._apply_append(block.next)\n"),
        "                self._apply_append(block.next)\n",
        ["tests/journal/log/test_recovery.py", RECOVERY],
    ),
    Mutant(
        "more-follows-never-set",
        'every block of an append except the last has the flag "more follows"',
        "journal/log/writer.py",
        "        more = more_follows or block is not blocks[-1]\n",
        "        more = False\n",
        ["tests/journal/log/test_writer.py"],
    ),
    Mutant(
        "rot-cut",
        "damage before durable data never deletes the data after it",
        "journal/log/recovery_rules.py",
        (
            '    Rule("rot before forced data", lambda t: t.durable > t.append_end and t.next_block is not No'
            "ne, TailAction.SKIP),\n"
        ),
        (
            '    Rule("rot before forced data", lambda t: t.durable > t.append_end and t.next_block is not No'
            "ne, TailAction.CUT),\n"
        ),
        [RECOVERY, CONFORMANCE],
    ),
    Mutant(
        "fsynced-data-cut-in-silence",
        "missing durable bytes are reported as damage",
        "journal/log/recovery_rules.py",
        '    Rule("forced data lost", lambda t: t.durable > t.append_end, TailAction.LOST),\n',
        "",
        [RECOVERY],
    ),
    Mutant(
        "claims-after-damage-ignored",
        "a block trailer after damage proves that the data before it was durable",
        "journal/log/recovery.py",
        "        for block in segment.valid_blocks(next_valid.position, verify=True):\n",
        "        for block in ():\n",
        ["tests/journal/log/test_recovery.py", RECOVERY, CONFORMANCE],
    ),
    Mutant(
        "block-trailer-of-its-own-log-accepted",
        "no producer can write what recovery would take for a block trailer of the log",
        "journal/log/log.py",
        "        if contains_trailer_header(data, self.log_id) or (\n",
        '        if contains_trailer_header(b"", self.log_id) or (\n',
        ["tests/broker/test_forged_block_trailer.py"],
    ),
    Mutant(
        "claim-about-later-data-believed",
        "a block trailer is used only for what was written before it",
        "journal/log/recovery.py",
        "        if not self.durable < durable <= control.offset:\n",
        "        if durable <= self.durable:\n",
        ["tests/broker/test_forged_block_trailer.py", "tests/journal/log/test_recovery.py"],
    ),
    Mutant(
        "torn-bytes-not-kept",
        "what recovery cuts is copied first",
        "journal/log/recovery.py",
        "            copy_torn_tail(self._disk, self._folder, end, data, self.report, str(end))\n",
        "",
        [RECOVERY, OPENING],
    ),
    Mutant(
        "index-entry-checksum-unchecked",
        "a damaged index entry is rebuilt, not used",
        "journal/log/index.py",
        "        if crc32(data[: ENTRY_SIZE - _CRC.size], self._seed) != crc or log_id != self._log_id:\n",
        "        if crc < 0 or log_id != self._log_id:\n",
        ["tests/journal/log/test_index.py"],
    ),
    Mutant(
        "stale-index-entries-believed",
        "index entries of bytes that were cut and written again do not count",
        "journal/log/segment.py",
        "            self._drop_stale_entries(index)\n",
        "",
        ["tests/journal/log/test_segment.py"],
    ),
    Mutant(
        "name-of-an-unsynced-mark-never-durable",
        "after a fsynced write of the mark, its name survives a power cut",
        "journal/dual_slot_file.py",
        "        if fsync and not self._name_durable:\n",
        "        if fsync and made:\n",
        ["tests/journal/test_dual_slot_file.py"],
    ),
    Mutant(
        "segment-of-a-roll-cut-short-used-without-its-name",
        "what is durable after an interrupted roll survives a power cut",
        "journal/dual_slot_file.py",
        '            self._disk.force_folder(self.path.rpartition("/")[0] or ".")\n',
        "",
        ["tests/journal/log/test_interrupted_roll.py"],
    ),
    Mutant(
        "mark-checksum-unchecked",
        "a damaged mark is never used",
        "journal/dual_slot_file.py",
        "        if crc32(CHECKSUMMED.pack(sequence, size) + payload) != crc:\n",
        "        if crc < 0:\n",
        ["tests/journal/test_dual_slot_file.py"],
    ),
    Mutant(
        "snapshot-checksum-unchecked",
        "a damaged snapshot is skipped",
        "journal/log/checkpoint.py",
        "    if crc32(data[HEADER.size :], crc32(data[: HEADER.size - CRC.size])) != crc:\n",
        "    if crc < 0:\n",
        [STATE],
    ),
    Mutant(
        "damaged-mark-means-not-stopped",
        "a log whose mark is lost accepts no writes before an operator has resumed it",
        "journal/log/recovery.py",
        "            if status is CheckpointState.DAMAGED and files:\n",
        "            if status is CheckpointState.NONE and files:\n",
        [RECOVERY],
    ),
    Mutant(
        "folder-of-another-log-taken",
        "nothing of a deleted topic is stored in a new one of the same name",
        "journal/log/checkpoint.py",
        "    if found_id != log_id:\n",
        "    if found_id < 0:\n",
        ["tests/journal/log/test_checkpoint.py", RECOVERY],
    ),
)

APPENDS_AND_READS: Final = (
    Mutant(
        "no-space-not-cut-back",
        "an append that a full disk refused leaves no bytes",
        "journal/log/segment.py",
        "            written = self.file.size() - self.size\n            try:\n",
        "            raise\n            written = self.file.size() - self.size\n            try:\n",
        [LOG, "tests/journal/log/test_segment.py"],
    ),
    Mutant(
        "write-error-does-not-stop-the-log",
        "after a failed write a log accepts no writes",
        "journal/log/writer.py",
        '            raise self.stop(f"a write failed: {error}") from error\n',
        "            raise\n",
        [CONFORMANCE],
    ),
    Mutant(
        "stream-not-taken-back",
        "a streamed append that fails leaves no bytes",
        "journal/log/writer.py",
        "        if segment_set.stopped is not None:\n            return  # Recovery",
        "        if segment_set.stopped is None:\n            return  # Recovery",
        ["tests/journal/log/test_log.py", "tests/journal/log/test_writer.py"],
    ),
    Mutant(
        "short-write-taken-for-whole",
        "a short write is continued",
        "journal/disk.py",
        "    if len(buffers) <= BUFFERS_MAX and file.pwritev(buffers, position) == total:\n",
        "    if len(buffers) <= BUFFERS_MAX and file.pwritev(buffers, position) > 0:\n",
        [LOG, "tests/journal/test_disk.py"],
    ),
    Mutant(
        "roll-after-the-limit",
        "no segment file is larger than its limit",
        "journal/log/writer.py",
        "active.size + size > self.options.segment_bytes)\n",
        "active.size > self.options.segment_bytes)\n",
        [CONFORMANCE],
    ),
    Mutant(
        "a-batch-larger-than-a-segment-refused",
        "a batch that is larger than a segment gets one of its own",
        "journal/log/writer.py",
        "        full = active.sealed or (active.size > 0 and",
        "        if size > self.options.segment_bytes:\n"
        '            raise Full("the append")\n'
        "        full = active.sealed or (active.size > 0 and",
        [LOG, "tests/broker/test_partition.py"],
    ),
    Mutant(
        "append-times-go-back",
        "append times never decrease, whatever the clock does",
        "journal/log/writer.py",
        "        append_time = max(segment_set.append_time, self._clock.wall_ms())\n",
        "        append_time = self._clock.wall_ms()\n",
        [LOG],
    ),
    Mutant(
        "reads-pass-the-durable-offset",
        "no reader sees what a power cut can undo",
        "journal/log/reader.py",
        (
            "        return segment_set.high_watermark if durable or segment_set.stopped is not None"
            " else segment_set.end\n"
        ),
        "        return segment_set.end\n",
        [CONFORMANCE],
    ),
    Mutant(
        "stopped-log-read-to-its-end",
        "a stopped log is read up to its durable offset only",
        "journal/log/reader.py",
        (
            "        return segment_set.high_watermark if durable or segment_set.stopped is not None"
            " else segment_set.end\n"
        ),
        "        return segment_set.high_watermark if durable else segment_set.end\n",
        [LOG],
    ),
    Mutant(
        "cut-not-reported",
        "a reader after a cut is notified of the offset to continue from",
        "journal/log/reader.py",
        "        if cut is not None and offset > cut:\n",
        "        if cut is not None and offset > cut + segment_set.end:\n",
        [LOG],
    ),
    Mutant(
        "below-the-start-is-empty",
        "a read below the first offset raises an error that names the beginning of the log",
        "journal/log/reader.py",
        "            raise BelowStart(offset, segment_set.first)\n",
        "            return\n",
        [CONFORMANCE],
    ),
    Mutant(
        "inside-a-record-accepted",
        "a position that is not the start of a record is refused",
        "journal/log/reader.py",
        "        if offset not in _record_starts(block):\n",
        "        if offset < 0:\n",
        [CONFORMANCE, LOG],
    ),
    Mutant(
        "repaired-range-refused",
        "a read from inside a range that a repair filled continues after it",
        "journal/log/reader.py",
        "            following = _filler_end(block, offset, segment.log_id)\n",
        "            following = None\n",
        ["tests/journal/log/test_reader.py", "tests/cli/test_read.py"],
    ),
    Mutant(
        "damage-read-as-nothing",
        "a read of damage raises an error with its range",
        "journal/log/reader.py",
        "            if first <= offset < next:\n                segments",
        "            if first > offset >= next:\n                segments",
        [LOG, RECOVERY],
    ),
    Mutant(
        "sound-blocks-before-damage-withheld",
        "the undamaged blocks before damage are returned before the error",
        "journal/log/reader.py",
        "            if stop == start:\n                raise\n            return stop\n",
        "            raise\n",
        ["tests/journal/log/test_reader.py"],
    ),
    Mutant(
        "large-block-never-given",
        "a message larger than the fetch size is returned alone",
        "journal/log/reader.py",
        "                return stop if stop > start else block.next\n",
        "                return stop\n",
        [CONFORMANCE],
    ),
)

FAILED_APPENDS: Final = (
    Mutant(
        "slices-of-a-failed-append-kept",
        "an append that fails for any reason leaves nothing in its log",
        "journal/log/writer.py",
        (
            "            self._advance(append)\n"
            "        except BaseException:\n"
            "            self._truncate_to_end()\n"
            "            raise\n"
            "        return "
        ),
        (
            "            self._advance(append)\n"
            "        except (JournalError, OSError):\n"
            "            self._truncate_to_end()\n"
            "            raise\n"
            "        return "
        ),
        ["tests/journal/log/test_writer.py"],
    ),
)

JOURNAL: Final = CHECKS + APPENDS_AND_READS + FAILED_APPENDS
