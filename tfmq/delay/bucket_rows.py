"""Lists and counts of what waits in a bucket, from columns only: no message is read, no record is an object."""

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import compress
from typing import NamedTuple

from tfmq.delay.bucket import Bucket
from tfmq.delay.columns import SLOT_SHIFT, Columns, Numbers
from tfmq.delay.open_files import OpenFiles


class Row(NamedTuple):
    """One message in a list. `locator` as `columns` describes it; `absolute`: its sender named a time."""

    due: int
    number: int
    log_id: int
    topic: str
    size: int
    absolute: bool
    locator: int


def rows_of(
    bucket: Bucket,
    files: OpenFiles,
    first_turn: tuple[int, int],
    end_due: int,
    log_ids: Collection[int] | None,
) -> Iterator[Row]:
    """As `Buckets.rows`, of one bucket."""
    chunks = list(bucket.load(files))
    turns = [
        (due, number, which, index)
        for which, columns in enumerate(chunks)
        for due, number, index in _chosen(columns, first_turn, end_due, log_ids)
    ]
    turns.sort()
    for due, number, which, index in turns:
        columns = chunks[which]
        target = columns.table[columns.targets[index]]
        locator = bucket.slot << SLOT_SHIFT | columns.positions[index]
        absolute = bool(columns.flags[index])
        yield Row(due, number, *target, columns.sizes[index], absolute, locator)


def _chosen(
    columns: Columns, first_turn: tuple[int, int], end_due: int, log_ids: Collection[int] | None
) -> Iterator[tuple[int, int, int]]:
    """(due, number, index) of those that a list wants."""
    turns = zip(columns.dues, columns.numbers, range(columns.length), strict=True)
    wanted = _wanted(columns, log_ids)
    chosen = turns if wanted is None else compress(turns, wanted)
    if first_turn <= (min(columns.dues), 0) and max(columns.dues) < end_due:
        return iter(chosen)
    return (turn for turn in chosen if first_turn <= turn[:2] and turn[0] < end_due)


def _wanted(columns: Columns, log_ids: Collection[int] | None) -> bytes | None:
    """A byte for each message: whether it is for one of these logs; None: all are."""
    if log_ids is None:
        return None
    wanted = [target.log_id in log_ids for target in columns.table]
    return None if all(wanted) else bytes(map(wanted.__getitem__, columns.targets))


def counts_of(
    buckets: Iterable[Bucket], files: OpenFiles, edges: Sequence[int], log_ids: Collection[int] | None
) -> list[int]:
    """As `Buckets.histogram`. A bucket that lies between two edges is not read where all logs count."""
    counts = [0] * (len(edges) - 1)
    for bucket in buckets:
        index = bisect_left(edges, bucket.span.start + 1) - 1
        if log_ids is None and 0 <= index < len(counts) and bucket.span.end <= edges[index + 1]:
            counts[index] += bucket.count
            continue
        for columns in bucket.load(files):
            _count(_dues(columns, log_ids), edges, counts)
    return counts


def _dues(columns: Columns, log_ids: Collection[int] | None) -> Numbers:
    wanted = _wanted(columns, log_ids)
    return columns.dues if wanted is None else array("Q", compress(columns.dues, wanted))


def _count(dues: Numbers, edges: Sequence[int], counts: list[int]) -> None:
    """Adds to `counts` how many lie between each edge and the next."""
    ordered = sorted(dues)
    below = [bisect_left(ordered, edge) for edge in edges]
    for index in range(len(counts)):
        counts[index] += below[index + 1] - below[index]
