"""Buckets that count no more, whose files are still there: until the checkpoint does not list them and nobody has a
locator into them.

The caller keeps two threads apart. A file in which damage was met is not removed but renamed, so that nothing of what
may be left in it is given up.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from journal.disk import Disk
from journal.filenames import DAMAGED_SUFFIX
from tfmq.delay.bucket import Bucket
from tfmq.delay.open_files import OpenFiles
from tfmq.delay.spans import Span


@dataclass
class _Entry:
    bucket: Bucket
    is_listed: bool
    """The checkpoint on the disk names it: its file must be there."""
    is_held: bool
    """It was split, and is read by those who have locators into it."""


class Retired:
    """See the module."""

    def __init__(self, disk: Disk, files: OpenFiles) -> None:
        self._disk = disk
        self._files = files
        self._entries: dict[Span, _Entry] = {}

    def add(self, bucket: Bucket, *, is_listed: bool, is_held: bool) -> None:
        """It counts no more."""
        self._entries[bucket.span] = _Entry(bucket, is_listed, is_held)

    def release(self, bucket: Bucket) -> None:
        """Nobody reads it any more."""
        entry = self._entries.get(bucket.span)
        if entry is not None and entry.bucket is bucket:
            entry.is_held = False

    def counts_again(self, bucket: Bucket) -> None:
        """Something was added to it meanwhile."""
        entry = self._entries.get(bucket.span)
        if entry is not None and entry.bucket is bucket:
            del self._entries[bucket.span]

    def listed(self, span: Span) -> Bucket | None:
        """The one of exactly this span, if its file is listed still, and so can be added to."""
        entry = self._entries.get(span)
        return entry.bucket if entry is not None and entry.is_listed else None

    def unlisted(self, spans: Iterable[Span]) -> None:
        """The checkpoint on the disk does not name these any more."""
        for span in spans:
            if span in self._entries:
                self._entries[span].is_listed = False

    def buckets(self) -> list[Bucket]:
        """All of them."""
        return [entry.bucket for entry in self._entries.values()]

    def spans(self) -> list[Span]:
        """Of all of them."""
        return list(self._entries)

    def held_spans(self) -> frozenset[Span]:
        """Whose files are there, read by somebody and not listed: no new bucket can have their names."""
        return frozenset(span for span, entry in self._entries.items() if not entry.is_listed)

    def removable(self) -> list[Bucket]:
        """Those that nothing lists and nobody reads."""
        return [e.bucket for e in self._entries.values() if not e.is_listed and not e.is_held]

    def forget(self, bucket: Bucket) -> None:
        """Its file is gone."""
        del self._entries[bucket.span]

    def remove(self, bucket: Bucket) -> None:
        """Its file goes. Raises Full (a damaged one that cannot be renamed: it stays), OSError. Beside everything."""
        self._files.forget(bucket.path)
        kept = bucket.path + DAMAGED_SUFFIX
        if bucket.damage and not self._disk.exists(kept):
            self._disk.rename(bucket.path, kept)
        else:
            self._disk.unlink(bucket.path)
