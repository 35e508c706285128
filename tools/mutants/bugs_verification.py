"""Planted bugs: background verification: what it checks, its pace, what becomes of its findings."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

BROKER: Final = "tests/broker/test_verification.py"
SEGMENT: Final = "tests/journal/fsck/test_sealed_verify.py"
PROCESSES: Final = "tests/e2e/test_verification.py"

VERIFICATION: Final = (
    Mutant(
        "verification-checks-no-checksum",
        "the verification finds each flipped byte of a closed segment",
        "journal/fsck/log_verify.py",
        "            for block in segment.blocks(position):\n                yield block",
        "            for block in segment.blocks(position, verify=False):\n                yield block",
        [SEGMENT],
    ),
    Mutant(
        "verification-skips-the-index",
        "the verification checks the index of each segment",
        "journal/fsck/log_verify.py",
        "        if sound:\n            self._verify_index(segment, built)",
        "        if sound and last:\n            self._verify_index(segment, built)",
        [SEGMENT],
    ),
    Mutant(
        "verification-ignores-its-pace",
        "the verification reads verification.bytes_per_second on average",
        "tfmq/broker/verification.py",
        "(size / self._pace if self._pace else 0.0)",
        "0.0",
        [BROKER],
    ),
    Mutant(
        "verification-is-never-due-again",
        "a segment is verified again after verification.interval_seconds",
        "tfmq/broker/verification.py",
        "elif segment.verified_at <= before:",
        "elif segment.verified_at < 0:",
        [BROKER],
    ),
    Mutant(
        "verification-takes-the-newest-first",
        "the segments whose verification is the longest ago come first",
        "tfmq/broker/verification.py",
        "again.sort(key=itemgetter(0))",
        "again.sort(key=itemgetter(0), reverse=True)",
        [BROKER],
    ),
    Mutant(
        "verification-loses-a-finding",
        "each finding is shown until its segment is removed or sound",
        "tfmq/broker/verification.py",
        "verification.findings[known:], read))",
        "verification.findings[known + 1 :], read))",
        [BROKER],
    ),
    Mutant(
        "verification-findings-are-lost-after-the-next-pass",
        "a finding that is found again stays",
        "tfmq/broker/verification.py",
        "rows.keys() - set(step.verification.findings)",
        "rows.keys() - set(step.found)",
        [BROKER],
    ),
    Mutant(
        "verification-findings-stay-although-the-segment-is-sound",
        "a pass that finds a segment sound removes earlier findings",
        "tfmq/broker/verification.py",
        "            del rows[finding]\n            partition.log.remove_damage(",
        "            partition.log.remove_damage(",
        [BROKER],
    ),
    Mutant(
        "verification-sound-again-and-still-refused",
        "readers get a range that is sound again",
        "tfmq/broker/verification.py",
        "            partition.log.remove_damage((finding.first, finding.next, finding.reason))\n",
        "",
        [BROKER],
    ),
    Mutant(
        "verification-findings-are-logged-in-each-pass",
        "a finding is one line in the log",
        "tfmq/broker/verification.py",
        "if finding not in rows and not _is_removed",
        "if not _is_removed",
        [BROKER],
    ),
    Mutant(
        "verification-reports-a-removed-segment",
        "a segment that is removed while it is verified is no finding",
        "tfmq/broker/verification.py",
        "        if not _is_current(partition, segment):  # what was found may be that the files were being removed\n"
        "            return\n",
        "",
        [BROKER],
    ),
    Mutant(
        "verification-findings-outlive-their-segment",
        "a finding ends when its segment is removed",
        "tfmq/broker/verification.py",
        "            if _is_current(partition, segment):\n                yield from",
        "            if segment is not None:\n                yield from",
        [BROKER],
    ),
    Mutant(
        "verification-damage-is-not-refused-to-readers",
        "damage that is found becomes damage of the log",
        "tfmq/broker/verification.py",
        "                partition.log.add_damage((finding.first, finding.next, finding.reason))\n",
        "                pass\n",
        [BROKER],
    ),
    Mutant(
        "verification-of-a-disk-error-becomes-damage",
        "an I/O error in a verification makes nothing unreadable",
        "tfmq/broker/verification.py",
        "            if finding.kind == FindingKind.DAMAGED:\n",
        "            if finding.kind != FindingKind.INDEX:\n",
        [BROKER],
    ),
    Mutant(
        "verification-goes-on-during-a-stop",
        "a stop waits for no read but the one that runs",
        "journal/fsck/sealed_verify.py",
        "        while position < end:\n            if self._is_stopped():\n"
        "                raise VerificationStopped\n",
        "        while position < end:\n",
        [SEGMENT],
    ),
    Mutant(
        "verification-leaves-its-file-open",
        "no file of a removed segment stays open",
        "journal/fsck/sealed_verify.py",
        "            self._reader.file.close()\n",
        "            pass\n",
        [SEGMENT],
    ),
    Mutant(
        "verification-an-unreadable-sector-is-a-flipped-byte",
        "an I/O error is distinguished from bytes that are wrong",
        "journal/fsck/sealed_verify.py",
        "                self._errors[piece] = error.strerror or str(error)\n",
        "                str(error)\n",
        [SEGMENT],
    ),
    Mutant(
        "verification-bytes-fill-the-cache",
        "the verification leaves the system's cache as it was",
        "journal/disk.py",
        "        os.posix_fadvise(self._descriptor, first, position + len(data) - first, os.POSIX_FADV_DONTNEED)\n",
        "",
        [SEGMENT],
    ),
    Mutant(
        "verification-empties-the-cache",
        "bytes that were cached before a verification stay cached",
        "journal/disk.py",
        "        if cached is not None:\n            return cached\n        if sys.platform",
        "        if sys.platform",
        [SEGMENT],
    ),
    Mutant(
        "verification-not-in-topic-show",
        "tfmq topic show names the findings",
        "tfmq/client/admin/models.py",
        '    known["findings"] = tuple(verification_finding(each) for each in row.get("findings") or ())\n',
        '    known["findings"] = ()\n',
        [PROCESSES],
    ),
    Mutant(
        "verification-no-description-where-the-disk-fails",
        "tfmq topic show works where the first message of a partition cannot be read",
        "tfmq/broker/topics.py",
        '        "oldest_ms": _oldest_ms(log),\n',
        '        "oldest_ms": log.oldest_ms,\n',
        [BROKER],
    ),
)
