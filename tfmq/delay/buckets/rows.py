"""Lists and counts of the messages in a bucket, from columns only: no record is read."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import compress
from typing import NamedTuple

from tfmq.delay.buckets.bucket import Bucket, OpenFileCache
from tfmq.delay.buckets.format import BUCKET_ID_SHIFT, ChunkColumns
from tfmq.delay.requests import LogFilter


class BucketRow(NamedTuple):
    """One listed message."""

    due: int
    number: int
    log_id: int
    locator: int


def bucket_rows(
    bucket: Bucket, files: OpenFileCache, first_turn: tuple[int, int], end_due: int, keys: LogFilter | None
) -> Iterator[BucketRow]:
    """List the messages of one bucket, see `BucketStore.rows`."""
    chunks = bucket.read_columns(files)
    yield from merge(*[_chunk_rows(bucket.bucket_id, columns, first_turn, end_due, keys) for columns in chunks])


def _chunk_rows(
    slot: int, columns: ChunkColumns, first_turn: tuple[int, int], end_due: int, keys: LogFilter | None
) -> Iterator[BucketRow]:
    """List the messages of one chunk in the order of turns, with the parameters of `bucket_rows`."""
    dues, numbers, targets, _, _, positions, table = columns
    first_due, wanted = first_turn[0], _selected(columns, keys)
    indices: Iterable[int] = range(len(dues)) if wanted is None else compress(range(len(dues)), wanted)
    if min(dues) < first_due or max(dues) >= end_due:
        indices = [index for index in indices if first_due <= dues[index] < end_due]
    for index in sorted(sorted(indices, key=numbers.__getitem__), key=dues.__getitem__):
        due, number = dues[index], numbers[index]
        if (due, number) >= first_turn:
            locator = slot << BUCKET_ID_SHIFT | positions[index]
            yield BucketRow(due, number, table[targets[index]].log_id, locator)


def _selected(columns: ChunkColumns, keys: LogFilter | None) -> bytes | None:
    """Return one byte a message, 1 if it is for one of these logs; None if all messages are."""
    if keys is None:
        return None
    wanted = [keys(target.log_id) for target in columns.table]
    return None if all(wanted) else bytes(map(wanted.__getitem__, columns.targets))


def bucket_histogram(bucket: Bucket, files: OpenFileCache, edges: Sequence[int], keys: LogFilter | None) -> list[int]:
    """Count the messages of one bucket that are due between each edge and the next; `edges` ascend.

    The file is not read if the whole bucket is between two neighbouring edges, and messages for all logs count.
    """
    counts = [0] * max(0, len(edges) - 1)
    index = bisect_left(edges, bucket.span.start + 1) - 1
    if keys is None and 0 <= index < len(counts) and bucket.span.end <= edges[index + 1]:
        counts[index] = bucket.count
        return counts
    return histogram_of((_selected_dues(each, keys) for each in bucket.read_columns(files)), edges)


def _selected_dues(columns: ChunkColumns, keys: LogFilter | None) -> Sequence[int]:
    wanted = _selected(columns, keys)
    return columns.dues if wanted is None else array("Q", compress(columns.dues, wanted))


def histogram_of(columns: Iterable[Sequence[int]], edges: Sequence[int]) -> list[int]:
    """Count the due times in all the columns between each edge and the next."""
    counts = [0] * max(0, len(edges) - 1)
    for dues in columns:
        ordered = sorted(dues)
        below = [bisect_left(ordered, edge) for edge in edges]
        for index in range(len(counts)):
            counts[index] += below[index + 1] - below[index]
    return counts
