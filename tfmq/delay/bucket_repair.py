"""Mends damaged buckets of delayed messages offline, when an operator says so, and says what is lost.

A bucket with damage is written anew with every message in it that is whole; one that is missing is taken off the list.
A checkpoint that is lost is made anew from the buckets: of what is still in the arrivals nothing counts in them, and of
buckets that overlap, as a split can leave them, each message counts once. What was there is kept as `<name>.damaged`
until `journal.fsck.log_repair.remove_originals`.

A new file takes the old one's name by a rename, and the list comes last: a power cut at any moment leaves something
that the same repair goes on with. Nobody else may write in the folder meanwhile.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from journal import filenames
from journal.disk import Disk, File, write_all
from journal.errors import Corrupt
from journal.filenames import DAMAGED_SUFFIX, REPAIRED_SUFFIX
from journal.log.checkpoint import MarkFile
from tfmq.delay.arrivals import LOG_ID
from tfmq.delay.bucket import SCAN_BYTES, Bucket
from tfmq.delay.bucket_file import (
    CHUNK_BYTES,
    TABLE_BYTES_MAX,
    Identity,
    bucket_name,
    encode_chunk,
    encode_head,
    seed_of,
)
from tfmq.delay.bucket_recovery import Decision
from tfmq.delay.bucket_survey import ARRIVALS_NAME, BucketSurvey
from tfmq.delay.checkpoint import Checkpoint, Listed
from tfmq.delay.columns import Messages, failing, spread
from tfmq.delay.draft import Draft
from tfmq.delay.spans import Span, span_of
from tfmq.delay.splitting import pieces_of

MISSING: Final = "the file is missing"


@dataclass(frozen=True)
class BucketRepaired:
    """One thing that was mended: of the bucket in `file`, `kept` messages are there and `lost` are given up."""

    file: str
    kept: int
    lost: int
    reason: str
    note: str = ""


def repair_buckets(disk: Disk, folder: str, *, dry_run: bool = False) -> list[BucketRepaired]:
    """Mends the buckets in `folder` and says what it did, or with `dry_run` would do.

    Raises Corrupt where nothing says whose they are, NewerFormat, Full, OSError.
    """
    survey = BucketSurvey(disk, folder)
    try:
        if survey.identity is None:
            if survey.fault is None:
                return []
            raise Corrupt(
                survey.file.path, 0, 0, "neither it nor a bucket's head says whose buckets they are"
            )
        return _Repair(disk, survey, survey.identity, dry_run).run()
    finally:
        survey.close()


class _Repair:
    """One repair."""

    def __init__(self, disk: Disk, survey: BucketSurvey, identity: Identity, dry_run: bool) -> None:
        self.disk = disk
        self.survey = survey
        self.folder = survey.folder
        self.identity = identity
        self.dry_run = dry_run
        self.done: list[BucketRepaired] = []
        self.listed: list[Listed] = []

    def run(self) -> list[BucketRepaired]:
        survey = self.survey
        checkpoint = survey.checkpoint
        if checkpoint is None:
            checkpoint = self._without_checkpoint()
        else:
            self._missing()
            for listed, bucket in survey.buckets():
                self._mend(bucket, listed.count)
        if self.done and not self.dry_run:
            if survey.fault is not None and self.disk.exists(survey.file.path):
                self._keep_original(survey.file.path)
            # How many of them are dead, the next start counts.
            survey.file.write(checkpoint._replace(buckets=sorted(self.listed), counted=0))
        return self.done

    def _missing(self) -> None:
        for found in self.survey.found():
            if found.row.decision is Decision.REFUSE and found.listed is not None:
                path = filenames.join(self.folder, found.name)
                self.done.append(BucketRepaired(path, 0, found.listed.count, MISSING, "it is listed no more"))

    def _mend(self, bucket: Bucket, count: int) -> None:
        """Writes it anew if something in it is damaged; `count`: the messages that it should have."""
        kept = sum(messages.length for messages in self._sound(bucket, None))
        size = self.survey.sizes[bucket_name(bucket.span)]
        if not bucket.damage and kept == count and size >= bucket.size:
            self.listed.append(Listed(bucket.span, bucket.size, count))
            return
        reason = bucket.damage[0].reason if bucket.damage else f"it has {kept} messages, not {count}"
        self.done.append(BucketRepaired(bucket.path, kept, count - kept, reason))
        self._rewrite([bucket], lambda due: bucket.span, None)

    # Without a checkpoint.

    def _without_checkpoint(self) -> Checkpoint:
        """What the files say. Of overlapping ones all messages go to spans as fine as the finest of them."""
        buckets = [bucket for _, bucket in self.survey.buckets()]
        offset, number = self._arrivals_first()
        kept = lost = 0
        for group in _groups(buckets):
            finest = min(bucket.span.exponent for bucket in group)
            found, damaged = self._regroup(group, finest, number)
            kept, lost = kept + found, lost + damaged
        fault = self.survey.fault
        reason = fault.reason if fault is not None else ""
        note = (
            "made anew from the buckets; messages that were delivered may be found in them, and are not again"
        )
        self.done.append(BucketRepaired(self.survey.file.path, kept, lost, reason, note))
        return Checkpoint(self.identity, offset, number, 0, ())

    def _regroup(self, group: Sequence[Bucket], finest: int, below: int) -> tuple[int, int]:
        """One that stands alone with nothing to leave out stays; (messages kept, damaged places)."""
        if len(group) == 1:
            (bucket,) = group
            every = sum(messages.length for messages in pieces_of(bucket, self.survey.files))
            kept = sum(messages.length for messages in self._sound(bucket, below))
            if not bucket.damage and every == kept and kept:
                self.listed.append(Listed(bucket.span, bucket.size, kept))
                return kept, 0
        before = len(self.listed)
        if self.dry_run:
            numbers = {n for bucket in group for m in self._sound(bucket, below) for n in m.numbers}
            return len(numbers), sum(len(bucket.damage) for bucket in group)
        self._rewrite(group, lambda due: span_of(due, finest), below)
        kept = sum(each.count for each in self.listed[before:])
        return kept, sum(len(bucket.damage) for bucket in group)

    def _arrivals_first(self) -> tuple[int, int]:
        """Offset and ordinal of the first that the arrivals still have: everything before is in the buckets only.

        Raises Corrupt.
        """
        folder = filenames.join(self.folder, ARRIVALS_NAME)
        marks = MarkFile(self.disk, folder, LOG_ID).read() if self.disk.is_folder(folder) else None
        if marks is None:
            raise Corrupt(
                folder, 0, 0, "without its mark nothing says which messages the arrivals still have"
            )
        return marks.first, marks.first_ordinal

    # Files.

    def _sound(self, bucket: Bucket, below: int | None) -> Iterator[Messages]:
        """Messages that are whole; with `below`, only those of lower numbers. Damage is noted in the bucket."""
        for messages in pieces_of(bucket, self.survey.files):
            bad = failing(bytes(messages.data[0]), messages.sizes, messages.numbers)
            for index in bad:
                what = f"a message is lost: number {messages.numbers[index]} fails its checksum"
                bucket.note(Corrupt(bucket.path, 0, bucket.size, what))
            limit = math.inf if below is None else below
            keep = bytearray(map(limit.__gt__, messages.numbers))
            for index in bad:
                keep[index] = False
            if any(keep):
                yield messages if all(keep) else messages.kept(keep)

    def _rewrite(self, group: Sequence[Bucket], to_span: Callable[[int], Span], below: int | None) -> None:
        """Writes all whole messages of `group` into the files of `to_span`, and takes the group's place with them."""
        if self.dry_run:
            return
        seen: set[int] = set()
        writers: dict[Span, _Writer] = {}
        for bucket in group:
            for messages in self._sound(bucket, below):
                fresh = _unseen(messages, seen if len(group) > 1 else None)
                for span, part in spread(fresh, to_span):
                    if span not in writers:
                        writers[span] = _Writer(self.disk, self.folder, self.identity, span)
                    writers[span].add(part)
        listed = [writer.finish() for writer in writers.values()]
        for bucket in group:
            self._keep_original(bucket.path)
        self.disk.force_folder(self.folder)
        for each in listed:
            path = filenames.join(self.folder, bucket_name(each.span))
            self.disk.rename(path + REPAIRED_SUFFIX, path)
        self.disk.force_folder(self.folder)
        for bucket in group:
            if bucket.span not in writers:
                self.disk.unlink(bucket.path)
        self.listed += listed

    def _keep_original(self, path: str) -> None:
        """A copy, so that the name is never without a file; what an earlier repair kept is the original."""
        kept = path + DAMAGED_SUFFIX
        if self.disk.exists(kept):
            return
        copy = self.disk.create(_fresh(self.disk, kept + REPAIRED_SUFFIX))
        source = self.disk.open_read(path)
        try:
            position = 0
            while data := source.pread(SCAN_BYTES, position):
                position += write_all(copy, [data], position)
        finally:
            source.close()
        copy.force()
        copy.close()
        self.disk.rename(kept + REPAIRED_SUFFIX, kept)


class _Writer:
    """One bucket in the making."""

    def __init__(self, disk: Disk, folder: str, identity: Identity, span: Span) -> None:
        self.span = span
        self.seed = seed_of(identity, span)
        path = filenames.join(folder, bucket_name(span)) + REPAIRED_SUFFIX
        self.file: File = disk.create(_fresh(disk, path))
        self.size = write_all(self.file, [encode_head(identity, span)], 0)
        self.count = 0
        self.draft = Draft()

    def add(self, messages: Messages) -> None:
        """Takes them. Raises Full, OSError."""
        self.draft.add(messages)
        if self.draft.size_bytes > CHUNK_BYTES or self.draft.table_bytes > TABLE_BYTES_MAX:
            self._write()

    def finish(self) -> Listed:
        """The file is forced. Raises Full, OSError."""
        self._write()
        # After a failed force it stays open: the error is the caller's, and closing could swallow it.
        self.file.force()
        self.file.close()
        return Listed(self.span, self.size, self.count)

    def _write(self) -> None:
        draft, self.draft = self.draft, Draft()
        if not draft.dues:
            return
        # What a chunk is complete up to matters to nobody any more: the list says what counts.
        buffers, chunk = encode_chunk(draft.messages(), self.size, 0, self.seed)
        self.size += write_all(self.file, buffers, self.size)
        self.count += chunk.count


def _unseen(messages: Messages, seen: set[int] | None) -> Messages:
    """Without those whose numbers were met before; they are remembered."""
    if seen is None:
        return messages
    keep = bytes(number not in seen for number in messages.numbers)
    seen.update(messages.numbers)
    return messages if all(keep) else messages.kept(keep)


def _groups(buckets: Sequence[Bucket]) -> Iterator[list[Bucket]]:
    """Buckets that overlap, together: spans do not cross, so each group lies in the span of its coarsest one."""
    ends: list[int] = []
    for bucket in sorted(buckets, key=lambda each: (each.span.start, -each.span.exponent)):
        begins = not ends or bucket.span.start >= ends[-1]
        ends.append(bucket.span.end if begins else ends[-1])
    ordered = sorted(buckets, key=lambda each: (each.span.start, -each.span.exponent))
    for _, pairs in groupby(zip(ends, ordered, strict=True), key=lambda pair: pair[0]):
        yield [bucket for _, bucket in pairs]


def _fresh(disk: Disk, path: str) -> str:
    """The name, free of what an unfinished repair left."""
    if disk.exists(path):
        disk.unlink(path)
    return path
