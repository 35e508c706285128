"""An audit's work on Spark: pieces are checked in parallel, their facts meet in parallel; the driver gets summaries.

What is shuffled are numbers, some bytes for 65,536 messages of one producer; never a message.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from journal.disk import RealDisk
from tfmq.spark.pipelines.audit_facts import Facts, facts_of, joined, split
from tfmq.spark.pipelines.audit_journal import JournalFilePlan, JournalFound, read_file
from tfmq.spark.pipelines.audit_judging import Known, Standing, Verdict, judge
from tfmq.spark.pipelines.audit_locating import located
from tfmq.spark.pipelines.audit_piece import PieceFound, check
from tfmq.spark.pipelines.audit_plan import PIECE_BYTES, AuditedLog, Piece
from tfmq.spark.pipelines.progress import Progress

if TYPE_CHECKING:
    from pyspark import RDD, Broadcast, SparkContext

POLL_SECONDS: Final = 0.2
LOCATED_MAX: Final = 100
"""Repeats of one part of the facts whose exact place is looked up."""
NOTHING: Final = facts_of(0, 0, [])


class Checked:
    """Pieces that were checked: `found` without their facts, which stay with Spark. `close` lets go of these."""

    def __init__(self, context: SparkContext, logs: Sequence[AuditedLog], folders: Mapping[str, int]) -> None:
        self._context = context
        self._logs = list(logs)
        self._folders = dict(folders)
        self._rdd: RDD[PieceFound] | None = None
        self._broadcasts: list[Broadcast[Any]] = []
        self.found: list[PieceFound] = []

    def check(self, pieces: Sequence[Piece], progress: Progress) -> None:
        """Checks them all. Raises what Spark raises."""
        if not pieces:
            return
        logs, folders = self._shared(self._logs), self._folders
        done = self._context.accumulator(0)
        rows = self._context.accumulator(0)

        def checked(group: list[Piece]) -> Iterator[PieceFound]:
            for piece in group:
                log = logs.value[piece.log]
                found = check(RealDisk(), log, piece, folders[log.data])
                done.add(piece.size)
                rows.add(found.records)
                yield found

        groups = grouped(pieces)
        rdd: Any = self._context.parallelize(groups, len(groups)).flatMap(checked).persist()
        self._rdd = rdd
        with _told(progress, lambda: (rows.value, done.value)):
            self.found = rdd.map(lambda each: each._replace(facts=NOTHING)).collect()

    def judged(
        self, more: Sequence[Facts], standings: Mapping[int, Standing], known: Mapping[int, Known]
    ) -> list[Verdict]:
        """The verdicts about all facts, those of `more` among them."""
        context = self._context
        parts = max(1, context.defaultParallelism)
        mine: Any = context.parallelize(list(more), max(1, len(more)))
        if self._rdd is not None:
            mine = mine.union(self._rdd.map(lambda each: each.facts))
        logs, told = self._shared(self._logs), self._shared((dict(standings), dict(known)))

        def verdict(rows: Iterator[tuple[int, Facts]]) -> Iterator[Verdict]:
            found = judge(joined([facts for _, facts in rows]), *told.value)
            near = [located(RealDisk(), logs.value, each) for each in found.repeats[:LOCATED_MAX]]
            yield found._replace(repeats=[*near, *found.repeats[LOCATED_MAX:]])

        placed = mine.flatMap(lambda facts: split(facts, parts)).partitionBy(parts)
        verdicts: list[Verdict] = placed.mapPartitions(verdict).collect()
        return verdicts

    def close(self) -> None:
        """Twice is harmless."""
        if self._rdd is not None:
            self._rdd.unpersist()
            self._rdd = None
        for each in self._broadcasts:
            each.unpersist()
        self._broadcasts.clear()

    def _shared(self, value: Any) -> Broadcast[Any]:
        """The same for every task."""
        self._broadcasts.append(self._context.broadcast(value))
        return self._broadcasts[-1]


def read_journals(
    context: SparkContext, files: Sequence[JournalFilePlan]
) -> list[tuple[JournalFilePlan, JournalFound]]:
    """Each file of the transaction journals, read in a task of its own."""
    if not files:
        return []
    rdd = context.parallelize(list(files), len(files))
    found: list[tuple[JournalFilePlan, JournalFound]] = rdd.map(
        lambda file: (file, read_file(RealDisk(), file))
    ).collect()
    return found


def grouped(pieces: Sequence[Piece], size: int = PIECE_BYTES) -> list[list[Piece]]:
    """Small neighbours together, about `size` bytes a task, the largest tasks first."""
    groups: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if piece.size > room or not groups:
            groups.append([])
            room = size
        groups[-1].append(piece)
        room -= piece.size
    return sorted(groups, key=lambda group: -sum(piece.size for piece in group))


@contextmanager
def _told(progress: Progress, done: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """Tells `progress` while the block runs."""
    ended = threading.Event()
    before = [0, 0]

    def tell() -> None:
        rows, size = done()
        progress.add(rows - before[0], size - before[1])
        before[:] = rows, size

    def poll() -> None:
        while not ended.wait(POLL_SECONDS):
            tell()

    thread = threading.Thread(target=poll, name="audit progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        tell()
