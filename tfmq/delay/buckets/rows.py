"""Lists and counts of the messages in a bucket, from columns only: no record is read."""

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from heapq import merge
from itertools import compress
from typing import NamedTuple

from tfmq.delay.buckets.bucket import Bucket, OpenFileCache
from tfmq.delay.buckets.format import BUCKET_ID_SHIFT, ChunkColumns, IntegerColumn


class BucketRow(NamedTuple):
    """One listed message. `absolute`: the sender set an absolute time."""

    due: int
    number: int
    log_id: int
    topic: str
    size: int
    absolute: bool
    locator: int


def bucket_rows(
    bucket: Bucket,
    files: OpenFileCache,
    first_turn: tuple[int, int],
    end_due: int,
    log_ids: Collection[int] | None,
) -> Iterator[BucketRow]:
    """List the messages of one bucket, see `BucketStore.rows`."""
    chunks = bucket.read_columns(files)
    yield from merge(
        *[_chunk_rows(bucket.bucket_id, columns, first_turn, end_due, log_ids) for columns in chunks]
    )


def _chunk_rows(
    slot: int,
    columns: ChunkColumns,
    first_turn: tuple[int, int],
    end_due: int,
    log_ids: Collection[int] | None,
) -> Iterator[BucketRow]:
    """List the messages of one chunk in the order of turns, with the parameters of `bucket_rows`."""
    dues, numbers, targets, sizes, flags, positions, table = columns
    for index in _sorted_indices(columns, first_turn[0], end_due, log_ids):
        due, number = dues[index], numbers[index]
        if (due, number) >= first_turn:
            locator = slot << BUCKET_ID_SHIFT | positions[index]
            yield BucketRow(due, number, *table[targets[index]], sizes[index], bool(flags[index]), locator)


def _sorted_indices(
    columns: ChunkColumns, first_due: int, end_due: int, log_ids: Collection[int] | None
) -> Sequence[int]:
    """Return the sorted indices of messages in the range of due times and for these logs."""
    dues = columns.dues
    keep: Iterable[int] = range(columns.length)
    wanted = _selected(columns, log_ids)
    if wanted is not None:
        keep = compress(keep, wanted)
    if min(dues) < first_due:
        kept = list(keep)
        keep = compress(kept, map(first_due.__le__, map(dues.__getitem__, kept)))
    if max(dues) >= end_due:
        kept = list(keep)
        keep = compress(kept, map(end_due.__gt__, map(dues.__getitem__, kept)))
    return sorted(sorted(keep, key=columns.numbers.__getitem__), key=dues.__getitem__)


def _selected(columns: ChunkColumns, log_ids: Collection[int] | None) -> bytes | None:
    """Return one byte a message, 1 if it is for one of these logs; None if all messages are."""
    if log_ids is None:
        return None
    wanted = [target.log_id in log_ids for target in columns.table]
    return None if all(wanted) else bytes(map(wanted.__getitem__, columns.targets))


def bucket_histogram(
    bucket: Bucket, files: OpenFileCache, edges: Sequence[int], log_ids: Collection[int] | None
) -> list[int]:
    """Count messages of one bucket, see `BucketStore.histogram`.

    The file is not read if the whole bucket is between two neighbouring edges, and messages for all logs count.
    """
    counts = [0] * max(0, len(edges) - 1)
    index = bisect_left(edges, bucket.span.start + 1) - 1
    if log_ids is None and 0 <= index < len(counts) and bucket.span.end <= edges[index + 1]:
        counts[index] = bucket.count
        return counts
    for columns in bucket.read_columns(files):
        _add_counts(_selected_due_times(columns, log_ids), edges, counts)
    return counts


def histogram_of(dues: Sequence[Sequence[int]], edges: Sequence[int]) -> list[int]:
    """Count the due times in all the columns `dues` between each edge and the next."""
    counts = [0] * max(0, len(edges) - 1)
    for each in dues:
        _add_counts(each, edges, counts)
    return counts


def _selected_due_times(columns: ChunkColumns, log_ids: Collection[int] | None) -> IntegerColumn:
    wanted = _selected(columns, log_ids)
    return columns.dues if wanted is None else array("Q", compress(columns.dues, wanted))


def _add_counts(dues: Sequence[int], edges: Sequence[int], counts: list[int]) -> None:
    """Add to `counts` how many of the due times are between each edge and the next."""
    ordered = sorted(dues)
    below = [bisect_left(ordered, edge) for edge in edges]
    for index in range(len(counts)):
        counts[index] += below[index + 1] - below[index]
