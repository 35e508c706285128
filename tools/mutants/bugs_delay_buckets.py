"""Planted bugs: buckets of delayed messages: the order of fsyncs, what is counted, damage."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

SET: Final = "tests/delay/buckets/test_store.py"
BUCKET: Final = "tests/delay/buckets/test_bucket.py"
FORMAT: Final = "tests/delay/buckets/test_format.py"
ROWS: Final = "tests/delay/buckets/test_bucket_rows.py"
REPAIR: Final = "tests/delay/buckets/test_bucket_repair.py"
ENUMERATION: Final = "tests/crash/test_bucket_enumeration.py"

ORDER: Final = (
    Mutant(
        "buckets-listed-before-they-are-fsynced",
        "files are durable before the checkpoint lists them",
        "tfmq/delay/buckets/writer.py",
        ("                for file in self._unsynced_files.values():\n                    file.force()\n"),
        "                pass\n",
        [ENUMERATION],
    ),
    Mutant(
        "bucket-names-without-fsync-before-the-checkpoint",
        "the names of new buckets are durable before the checkpoint lists them",
        "tfmq/delay/buckets/writer.py",
        "                self.disk.force_folder(self.folder)\n",
        "                pass\n",
        [ENUMERATION],
    ),
    Mutant(
        "delay-checkpoint-renamed-without-fsync",
        "the checkpoint is durable before it is renamed",
        "journal/disk.py",
        "    file.force()\n    file.close()\n",
        "    file.close()\n",
        [ENUMERATION],
    ),
    Mutant(
        "delay-checkpoint-reported-before-its-name-is-fsynced",
        "a spill ends when its checkpoint survives a power cut",
        "tfmq/delay/buckets/recovery.py",
        "            raise\n        self.disk.force_folder(self.folder)\n",
        "            raise\n",
        [ENUMERATION],
    ),
    Mutant(
        "buckets-deleted-because-of-a-checkpoint-without-fsync",
        "a start removes nothing because of a checkpoint that is not durable",
        "tfmq/delay/buckets/recovery.py",
        "    checkpoint_file.fsync()\n",
        "",
        [ENUMERATION, "tests/delay/buckets/test_recovery.py"],
    ),
    Mutant(
        "settled-bucket-removed-while-it-is-listed",
        "a file is deleted only when no checkpoint lists it",
        "tfmq/delay/buckets/store.py",
        "if not e.is_listed and not e.has_locators]",
        "if not e.has_locators]",
        [ENUMERATION, SET],
    ),
    Mutant(
        "split-bucket-removed-while-it-is-read",
        "a bucket that was split can be read until it is released",
        "tfmq/delay/buckets/store.py",
        "if not e.is_listed and not e.has_locators]",
        "if not e.is_listed]",
        [SET],
    ),
    Mutant(
        "split-bucket-listed-beside-its-parts",
        "a message counts in exactly one bucket at every moment",
        "tfmq/delay/buckets/store.py",
        "            rows.pop(split.span, None)\n",
        "            pass\n",
        [ENUMERATION],
    ),
    Mutant(
        "unlisted-chunks-are-not-cut",
        "what an interrupted spill wrote does not count",
        "tfmq/delay/buckets/recovery.py",
        '    LONGER = "unlisted chunks", Decision.CUT\n',
        '    LONGER = "unlisted chunks", Decision.LEAVE\n',
        ["tests/delay/buckets/test_recovery.py", "tests/delay/buckets/test_recovery.py"],
    ),
    Mutant(
        "missing-bucket-starts-all-the-same",
        "a start without a promised file is refused",
        "tfmq/delay/buckets/recovery.py",
        "    if missing := [each for each in found if each.state.decision is Decision.REFUSE]:\n",
        "    if missing := list[FileDecision]():\n",
        ["tests/delay/buckets/test_recovery.py"],
    ),
    Mutant(
        "settled-bucket-that-gets-more-goes-all-the-same",
        "messages that are added to an obsolete bucket count",
        "tfmq/delay/buckets/store.py",
        "            if entry is not None and entry.is_listed:\n                return entry.bucket, False\n",
        "",
        [SET],
    ),
)

COUNTING: Final = (
    Mutant(
        "full-disk-leaves-the-spill-half-done",
        "a full disk leaves everything unchanged",
        "tfmq/delay/buckets/store.py",
        "                    writer.undo()\n",
        "                    pass\n",
        [SET],
    ),
    Mutant(
        "broken-disk-does-not-stop-the-buckets",
        "after a failed fsync nothing is written or tried again",
        "tfmq/delay/buckets/store.py",
        ("            if writer.failure is not None:\n                self._stop(writer.failure)\n"),
        "",
        [SET],
    ),
    Mutant(
        "buckets-closed-without-fsync",
        "a file with bytes that are not durable is never closed",
        "tfmq/delay/buckets/writer.py",
        "        NEVER_CLOSED.extend(self._unsynced_files.values())\n",
        ("        for file in self._unsynced_files.values():\n            file.close()\n"),
        [SET, ENUMERATION],
    ),
    Mutant(
        "failed-joint-fsync-is-believed",
        "after a failed syncfs each file reports whether its bytes are lost",
        "tfmq/delay/buckets/writer.py",
        "            return False\n        return True\n",
        "            return True\n        return True\n",
        [SET],
    ),
    Mutant(
        "spans-of-buckets-overlap",
        "spans of buckets never overlap",
        "tfmq/delay/buckets/store.py",
        "        while span in self._taken or self._overlaps(span):\n",
        "        while span in self._taken:\n",
        ["tests/delay/buckets/test_bucket_index.py"],
    ),
    Mutant(
        "file-of-a-split-bucket-is-taken",
        "a new bucket never takes the name of a file that is still read",
        "tfmq/delay/buckets/store.py",
        "        while span in self._taken or self._overlaps(span):\n",
        "        while self._overlaps(span):\n",
        [SET, "tests/delay/buckets/test_bucket_index.py"],
    ),
    Mutant(
        "records-sealed-without-their-number",
        "a record in the position of another record is detected",
        "tfmq/delay/buckets/format.py",
        "    numbers = range(first_number, first_number + len(records))\n",
        "    numbers = range(first_number, first_number + 1) and [0] * len(records)\n",
        ["tests/delay/buckets/test_format.py", BUCKET],
    ),
    Mutant(
        "record-of-a-bucket-unproven",
        "no record is delivered whose checksum fails",
        "tfmq/delay/buckets/bucket.py",
        "        if crc32(record, number & SEED_MASK) != crc:\n",
        "        if crc < 0:\n",
        [BUCKET],
    ),
    Mutant(
        "columns-of-a-bucket-unproven",
        "no due time is used whose checksum fails",
        "tfmq/delay/buckets/format.py",
        "    if crc32(data, seed) != chunk.crc:\n",
        "    if chunk.crc < 0:\n",
        [FORMAT, BUCKET],
    ),
    Mutant(
        "message-imitates-a-chunk",
        "no message can be taken for a chunk",
        "tfmq/delay/buckets/format.py",
        "    covered = crc32(POSITION_FIELD.pack(position), crc32(data[: CHUNK_SIZE - CHECKSUM.size], seed))\n",
        "    covered = head_crc\n",
        [FORMAT, BUCKET],
    ),
    Mutant(
        "rest-after-a-damaged-chunk-is-lost",
        "records after damage are served",
        "tfmq/delay/buckets/bucket.py",
        "                following = self._find_chunk(file, position + 1, size, listed_size)\n",
        "                following = size\n",
        [BUCKET],
    ),
    Mutant(
        "equal-dues-listed-in-any-order",
        "a list is sorted by due time and number",
        "tfmq/delay/buckets/format.py",
        "        order = sorted(range(self.length), key=self.dues.tolist().__getitem__)\n",
        "        order = sorted(range(self.length - 1, -1, -1), key=self.dues.tolist().__getitem__)\n",
        ["tests/delay/buckets/test_format.py"],
    ),
    Mutant(
        "repair-without-a-checkpoint-keeps-what-the-arrivals-have",
        "a repair makes no second copy of a message that is still in the arrival log",
        "tfmq/delay/buckets/fsck.py",
        "            limit = math.inf if below is None else below\n",
        "            limit = math.inf\n",
        [REPAIR],
    ),
    Mutant(
        "cut-chunk-is-lost-as-a-whole",
        "of a truncated bucket, every record before the cut is kept",
        "tfmq/delay/buckets/bucket.py",
        "        if chunk.records_position > size or chunk.next_position > listed_size:\n",
        "        if chunk.next_position > size:\n",
        [f"{REPAIR}::test_a_chunk_cut_off_by_the_end_of_the_file_keeps_every_record_before_that"],
    ),
    Mutant(
        "arrivals-alone-are-no-store",
        "a checkpoint that is lost before the first bucket exists is reported and made again",
        "tfmq/delay/buckets/fsck.py",
        "        is_used = any(map(parse_bucket_name, self.sizes)) or has_arrivals(disk, folder)\n",
        "        is_used = any(map(parse_bucket_name, self.sizes))\n",
        ["tests/broker/test_startup.py"],
    ),
    Mutant(
        "arrivals-in-buckets-counted-as-lost",
        "messages in the buckets are not counted as lost with the arrival log",
        "tfmq/broker/startup.py",
        (
            "    return sum(min(each.lost, max(0, each.first_ordinal + each.kept + each.lost - number)) for e"
            "ach in repaired)\n"
        ),
        "    return sum(each.lost for each in repaired)\n",
        ["tests/broker/test_startup.py"],
    ),
    Mutant(
        "repair-adds-arrivals-that-were-not-in-the-bucket",
        "only messages of the damaged chunk are rebuilt from the arrival log",
        "tfmq/delay/buckets/fsck.py",
        "                if key in unmatched and due in span:\n                    parts.append(unmatched.pop(key))\n",
        "                if due in span:\n                    parts.append(unmatched.pop(key, 0))\n",
        [REPAIR],
    ),
    Mutant(
        "start-rebuilds-no-damaged-columns",
        "a start rebuilds damaged columns from the arrival log before that is deleted",
        "tfmq/broker/startup.py",
        "    _rebuild_buckets(broker, folder)\n",
        "",
        [REPAIR],
    ),
    Mutant(
        "repair-removes-the-original",
        "the original of a repaired file is kept",
        "tfmq/delay/buckets/fsck.py",
        "        for bucket in group:\n            keep_original(self.disk, bucket.path)\n",
        "",
        [REPAIR],
    ),
)

DELAY_BUCKETS: Final = ORDER + COUNTING
