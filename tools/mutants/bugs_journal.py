"""Bugs to plant in the journal: what is checked, what a recovery keeps and names, what a reader gets."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

LOG: Final = "tests/journal/test_log.py"
OPENING: Final = "tests/journal/test_opening.py"
RECOVERY: Final = "tests/journal/test_recovery.py"
STATE: Final = "tests/journal/test_state.py"
CONFORMANCE: Final = "tests/journal/test_conformance_storage.py"
ENUMERATION: Final = (
    "tests/crash/test_enumeration.py"
    "::test_whatever_a_power_cut_leaves_of_a_log_opens_with_everything_that_was_promised"
)

CHECKS: Final = (
    Mutant(
        "older-copy-goes-on-in-the-same-epoch",
        "a reader is told when an older copy of the folder went on in its place",
        "journal/keeper.py",
        "                self._begin_epoch()\n",
        "",
        [LOG],
    ),
    Mutant(
        "batch-block-checksum-unchecked",
        "bytes damaged on the way to the broker are refused before the first is written",
        "journal/batch.py",
        "        if crc32(view[position : position + block_size]) != crc:\n",
        "        if crc < 0:\n",
        ["tests/journal/test_batch.py"],
    ),
    Mutant(
        "batch-ids-unchecked",
        "every record of a batch has the id that its stream says",
        "journal/batch.py",
        "                if found != id or flag & FLAG_REFUSED_MASK or length > length_max:\n",
        "                if flag & FLAG_REFUSED_MASK or length > length_max:\n",
        ["tests/journal/test_batch.py"],
    ),
    Mutant(
        "batch-flags-unchecked",
        "a producer cannot write what only a log may write",
        "journal/batch.py",
        "                if found != id or flag & FLAG_REFUSED_MASK or length > length_max:\n",
        "                if found != id or length > length_max:\n",
        ["tests/journal/test_batch.py"],
    ),
    Mutant(
        "batch-flags-unchecked-by-columns",
        "a producer cannot write what only a log may write, in batches of one size either",
        "journal/columns.py",
        "    if data[start + _FLAG_HIGH : end : size] != bytes(count):\n        return False\n",
        "",
        ["tests/journal/test_batch.py", "tests/journal/test_columns.py"],
    ),
    Mutant(
        "block-checksum-unchecked-when-read",
        "a reader verifies every byte of a block",
        "journal/block.py",
        "        if verify and crc32(records) != control.crc:\n",
        "        if verify and control.crc < 0:\n",
        ["tests/journal/test_block.py"],
    ),
    Mutant(
        "recovery-does-not-check-blocks",
        "a torn append is never taken for a whole one",
        "journal/replay.py",
        "            for block in segment.blocks(offset - segment.base, end - segment.base):\n",
        "            for block in segment.blocks(offset - segment.base, end - segment.base, verify=False):\n",
        [RECOVERY, ENUMERATION],
    ),
    Mutant(
        "control-checksum-unchecked",
        "a control record proves itself",
        "journal/control.py",
        "    if crc32(memoryview(data)[position + HEADER_SIZE : end]) != checksum:\n",
        "    if checksum < 0:\n",
        ["tests/journal/test_control.py"],
    ),
    Mutant(
        "offset-field-ignored",
        "a block that was copied or displaced does not pass",
        "journal/block.py",
        "    if control.offset != offset + start:\n",
        "    if control.offset < 0:\n",
        ["tests/journal/test_block.py"],
    ),
    Mutant(
        "log-id-ignored",
        "the block of another log does not pass",
        "journal/control.py",
        '    if id != log_id:\n        raise BadControl(position, f"the control record is of log',
        '    if id < 0:\n        raise BadControl(position, f"the control record is of log',
        ["tests/journal/test_block.py", "tests/journal/test_control.py"],
    ),
    Mutant(
        "first-ordinal-ignored",
        "ordinals go on from block to block",
        "journal/block.py",
        "        if control.first_ordinal != ordinal and ordinal >= 0:\n",
        "        if ordinal < -1:\n",
        ["tests/journal/test_block.py", "tests/journal/test_segment.py"],
    ),
    Mutant(
        "more-follows-ignored",
        "an append of many blocks is whole or not there",
        "journal/replay.py",
        "        if not block.control.more_follows:\n            self._finish(block.next)\n",
        "        self._finish(block.next)\n",
        ["tests/journal/test_replay.py", RECOVERY],
    ),
    Mutant(
        "more-follows-never-set",
        "the parts of an append say that more follows",
        "journal/appender.py",
        "        more = more_follows or block is not blocks[-1]\n",
        "        more = False\n",
        ["tests/journal/test_appender.py"],
    ),
    Mutant(
        "rot-cut-off",
        "rot before forced data never deletes what lies behind it",
        "journal/recovery.py",
        '    Row("rot before forced data", lambda t: t.forced > t.append and t.later is not None, Tail.SKIP),\n',
        '    Row("rot before forced data", lambda t: t.forced > t.append and t.later is not None, Tail.CUT),\n',
        [RECOVERY, CONFORMANCE],
    ),
    Mutant(
        "forced-data-cut-off-in-silence",
        "forced bytes that are gone are named as damage",
        "journal/recovery.py",
        '    Row("forced data lost", lambda t: t.forced > t.append, Tail.LOST),\n',
        "",
        [RECOVERY],
    ),
    Mutant(
        "claims-behind-damage-ignored",
        "a control record behind a bad place proves that forced data lies there",
        "journal/replay.py",
        "        for block in segment.sound_blocks(good.position, verify=True):\n",
        "        for block in ():\n",
        ["tests/journal/test_replay.py", RECOVERY, CONFORMANCE],
    ),
    Mutant(
        "control-record-of-its-own-log-accepted",
        "no producer can write what recovery would take for a log's own record",
        "journal/log.py",
        "        if holds_control_header(data, self.log_id) or holds_control_header(seam, self.log_id):\n",
        "        if holds_control_header(seam, -1):\n",
        ["tests/issues/test_forged_control.py"],
    ),
    Mutant(
        "claim-of-what-nobody-can-know-believed",
        "a control record is believed only about what came before it",
        "journal/replay.py",
        "        if not self.forced < forced <= control.offset:\n",
        "        if forced <= self.forced:\n",
        ["tests/issues/test_forged_control.py", "tests/journal/test_replay.py"],
    ),
    Mutant(
        "torn-bytes-not-kept",
        "what recovery cuts off is copied aside first",
        "journal/opening.py",
        "        if decision is not Tail.CUT_ZEROS:\n            self._keep_torn(segment, extent.end)\n",
        "",
        [RECOVERY, OPENING],
    ),
    Mutant(
        "index-entry-checksum-unchecked",
        "a damaged index entry is made anew, not believed",
        "journal/index.py",
        "                crc32(data[place : place + ENTRY_SIZE - _CRC.size], self._seed) != crc\n"
        "                or log_id != self._log_id\n",
        "                crc < 0 or log_id != self._log_id\n",
        ["tests/journal/test_index.py"],
    ),
    Mutant(
        "stale-index-entries-believed",
        "index entries of bytes that were cut off and written anew do not count",
        "journal/segment.py",
        "            self._drop_stale(index)\n",
        "",
        ["tests/journal/test_segment.py"],
    ),
    Mutant(
        "mark-checksum-unchecked",
        "a damaged mark is never believed",
        "journal/checkpoint.py",
        "        if zlib.crc32(COVERED.pack(sequence, size) + payload) != crc:\n",
        "        if crc < 0:\n",
        ["tests/journal/test_checkpoint.py"],
    ),
    Mutant(
        "snapshot-checksum-unchecked",
        "a damaged snapshot is passed over",
        "journal/state.py",
        "    if crc32(data[HEADER.size :], crc32(data[: HEADER.size - CRC.size])) != crc:\n",
        "    if crc < 0:\n",
        [STATE],
    ),
    Mutant(
        "damaged-mark-means-not-stopped",
        "a log whose mark is lost takes no writes until somebody looked",
        "journal/opening.py",
        '            if status == "damaged" and files:\n',
        '            if status == "lost" and files:\n',
        [RECOVERY],
    ),
    Mutant(
        "folder-of-another-log-taken",
        "nothing of a deleted topic reaches a new one of the same name",
        "journal/mark.py",
        "    if found_id != log_id:\n",
        "    if found_id < 0:\n",
        ["tests/journal/test_mark.py", RECOVERY],
    ),
)

APPENDS_AND_READS: Final = (
    Mutant(
        "no-space-not-cut-back",
        "a full disk leaves nothing of an append behind",
        "journal/segment.py",
        "        except Full:\n            self._take_back(buffers)\n            raise\n",
        "        except Full:\n            raise\n",
        [LOG, "tests/journal/test_segment.py"],
    ),
    Mutant(
        "write-error-does-not-stop-the-log",
        "after a failed write a log takes no writes",
        "journal/writer.py",
        '            raise self._keeper.fail(f"a write failed: {error}") from error\n',
        "            raise\n",
        [CONFORMANCE],
    ),
    Mutant(
        "stream-not-taken-back",
        "a streamed append that fails leaves nothing behind",
        "journal/writer.py",
        "        except (JournalError, OSError):\n            self._take_back(size)\n            raise\n",
        "        except (JournalError, OSError):\n            raise\n",
        ["tests/journal/test_stream.py", "tests/journal/test_writer.py"],
    ),
    Mutant(
        "short-write-taken-for-whole",
        "a short write is finished",
        "journal/file.py",
        "    if len(buffers) <= BUFFERS_MAX and file.pwritev(buffers, position) == total:\n",
        "    if len(buffers) <= BUFFERS_MAX and file.pwritev(buffers, position) > 0:\n",
        [LOG, "tests/journal/test_file.py"],
    ),
    Mutant(
        "roll-after-the-limit",
        "no segment file is larger than its limit",
        "journal/writer.py",
        "active.size + size > self.options.segment_bytes)\n",
        "active.size > self.options.segment_bytes)\n",
        [CONFORMANCE],
    ),
    Mutant(
        "append-times-go-back",
        "append times never go back, whatever the clock does",
        "journal/writer.py",
        "        return max(self._extent.append_time, self._clock.wall_ms())\n",
        "        return self._clock.wall_ms()\n",
        [LOG],
    ),
    Mutant(
        "reads-pass-the-forced-mark",
        "nobody sees what a power cut can take back",
        "journal/reader.py",
        "        return extent.forced if forced or extent.stopped is not None else extent.end\n",
        "        return extent.end\n",
        [CONFORMANCE],
    ),
    Mutant(
        "stopped-log-read-to-its-end",
        "a stopped log is read up to its forced mark only",
        "journal/reader.py",
        "        return extent.forced if forced or extent.stopped is not None else extent.end\n",
        "        return extent.forced if forced else extent.end\n",
        [LOG],
    ),
    Mutant(
        "cut-not-told",
        "a reader beyond a cut is told where to go back to",
        "journal/reader.py",
        "        if cut is not None and offset > cut:\n",
        "        if cut is not None and offset > cut + extent.end:\n",
        [LOG],
    ),
    Mutant(
        "below-the-start-is-empty",
        "below the first offset is an error that says where the log begins",
        "journal/reader.py",
        "            raise BelowStart(offset, extent.first)\n",
        "            return\n",
        [CONFORMANCE],
    ),
    Mutant(
        "inside-a-record-accepted",
        "a position that is no record's start is refused",
        "journal/reader.py",
        "        if offset not in _starts(block):\n",
        "        if offset < 0:\n",
        [CONFORMANCE, LOG],
    ),
    Mutant(
        "damage-read-as-nothing",
        "reading damage is an error with its range",
        "journal/reader.py",
        "            if first <= offset < next:\n                segments",
        "            if first > offset >= next:\n                segments",
        [LOG, RECOVERY],
    ),
    Mutant(
        "sound-blocks-before-damage-withheld",
        "the undamaged blocks before damage are given before the damage is told",
        "journal/reader.py",
        "            if stop == start:\n                raise\n            return stop\n",
        "            raise\n",
        ["tests/journal/test_reader.py"],
    ),
    Mutant(
        "large-block-never-given",
        "a message larger than the fetch size is given alone",
        "journal/reader.py",
        "                return stop if stop > start else block.next\n",
        "                return stop\n",
        [CONFORMANCE],
    ),
)

ROLLS: Final = (
    Mutant(
        "segment-of-a-roll-cut-short-used-without-its-name",
        "what is forced behind a roll that was cut short survives a power cut",
        "journal/opening.py",
        "                self._disk.force_folder(self._folder)\n            self._force_again(forced)",
        "                pass\n            self._force_again(forced)",
        ["tests/issues/test_roll_cut_short.py"],
    ),
)

JOURNAL: Final = CHECKS + APPENDS_AND_READS + ROLLS
