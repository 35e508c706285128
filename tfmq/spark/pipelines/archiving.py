"""The course of an archive: step by step, what is new in a topic becomes Parquet files and a manifest of them.

A step is planned first: which ranges of offsets, on the disk before any file is. The names of its files say the ranges.
So a step that is begun anew, after a kill at any point, makes the same files again, in place of those that are there,
and nobody who lists the folder ever sees a row twice. The manifest makes it done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from tfmq.arrow import Decoder
from tfmq.errors import BadRequest, LogTruncated, OffsetOutOfRange
from tfmq.spark.logs import Address, Bounds, Logs, PartitionLog, Range, open_logs
from tfmq.spark.pipelines import layout
from tfmq.spark.pipelines.durable import locked, make_folder, settle, sweep
from tfmq.spark.pipelines.hour_files import COLUMNS, written
from tfmq.spark.pipelines.layout import Piece
from tfmq.spark.pipelines.manifest import ArchiveFile, ArchiveFolder, Gap, Manifest, Plan
from tfmq.spark.pipelines.planning import LOST_ON_THE_WAY, Survey, cut, ends_behind, reconciled, surveyed
from tfmq.spark.pipelines.progress import Progress
from tfmq.spark.pipelines.tasks import Done

PIECE_BYTES: Final = 64 << 20
STEP_BYTES: Final = 4 << 30
BEHIND_SECONDS: Final = 3.0
"""A data folder says within 1 s of a force that it happened: so long a log may seem shorter than it was."""

BUSY: Final = "Another run archives {topic} into {folder} at this moment: wait until it has ended."
OTHER_NODE: Final = (
    "The archive {folder} has {topic} from another broker (node {old}, this one is {new}): offsets of two brokers do"
    " not go together. Archive it into a folder of its own."
)


class Wish(NamedTuple):
    """What is to be archived, and how. `since_ms`: a partition that was never archived begins there."""

    address: Address
    folder: Path
    node: str = ""
    on_loss: str = "stop"
    since_ms: int | None = None
    compression: str = "zstd"
    verify: str = "chunk"
    piece_bytes: int = PIECE_BYTES
    step_bytes: int = STEP_BYTES


@dataclass
class Outcome:
    """What a run did for one topic; `resumed`: it began with a step that a run before had begun."""

    topic: str
    steps: int = 0
    messages: int = 0
    files: int = 0
    size_bytes: int = 0
    resumed: bool = False
    gaps: list[Gap] = field(default_factory=list)

    def add(self, manifest: Manifest) -> None:
        self.steps += 1
        self.messages += manifest.rows
        self.files += len(manifest.files)
        self.size_bytes += manifest.size_bytes
        self.gaps.extend(manifest.plan.gaps)

    def row(self) -> dict[str, Any]:
        """As JSON has it."""
        gaps = [each._asdict() for each in self.gaps]
        return {
            "topic": self.topic,
            "messages": self.messages,
            "files": self.files,
            "size_bytes": self.size_bytes,
            "steps": self.steps,
            "resumed": self.resumed,
            "gaps": gaps,
        }


class Runner(Protocol):
    """Runs the tasks of a step: `SparkTasks`, or `inline`."""

    def __call__(
        self,
        work: Callable[[Piece], Done[list[ArchiveFile]]],
        items: Sequence[Piece],
        progress: Progress,
        title: str,
    ) -> list[list[ArchiveFile]]: ...


def archive_piece(wish: Wish, topic: str, piece: Piece) -> Done[list[ArchiveFile]]:
    """One task: read a piece, write its files."""
    log = PartitionLog(topic, piece.partition, piece.incarnation, piece.log_id)
    decoder = Decoder(topic, piece.partition, piece.log_id, COLUMNS, wish.verify, lenient=True)
    with open_logs(wish.address) as logs:
        start = readable_start(logs, log, piece)
        chunks = logs.chunks(Range(log, start, piece.end)) if start < piece.end else iter(())
        batches = (decoder.decode(each.data, each.offset, piece.start, piece.end) for each in chunks)
        files = written(wish.folder, topic, piece, batches, wish.compression)
    return Done(files, sum(each.rows for each in files), piece.end - piece.start)


def readable_start(logs: Logs, log: PartitionLog, piece: Piece) -> int:
    """Where its first record begins now: a repair since the plan may have put a filler where one began."""
    start = logs.at_or_after(log, piece.start)
    gone = logs.bounds(log).first > piece.start  # asked for last, so that no loss is passed over
    return piece.start if gone else start


class Archiving:
    """One topic of one run."""

    def __init__(self, wish: Wish, topic: str, logs: Logs, run: Runner) -> None:
        self._wish, self._topic, self._logs, self._run = wish, topic, logs, run
        self._archive = ArchiveFolder.made(wish.folder)
        self.outcome = Outcome(topic)

    def course(self, begin_progress: Callable[[int], Progress]) -> Outcome:
        """All that is new at its beginning. `begin_progress` gets the bytes of log that there are to do.

        Raises Busy, OffsetOutOfRange (gone, and the wish is to stop), LogTruncated, UnknownTopic, Damaged ...
        """
        busy = BUSY.format(topic=self._topic, folder=self._wish.folder)
        with locked(self._wish.folder / layout.lock_path(self._topic), busy):
            self._archive_all(begin_progress)
        return self.outcome

    def _archive_all(self, begin_progress: Callable[[int], Progress]) -> None:
        last = self._last()
        sweep(self._wish.folder / layout.house_folder(self._topic))
        step, ends = (last.plan.step + 1, last.ends) if last is not None else (1, {})
        begun = self._reconciled(self._archive.begun(self._topic, step))
        behind = ends if begun is None else ends_behind(ends, begun.pieces, begun.gaps)
        partitions, survey = self._survey(behind)
        again = 0 if begun is None else sum(each.end - each.start for each in begun.pieces)
        if begun is None:
            self._archive.require_whole(self._topic, last)
            if not survey.stretches:
                return
        progress = begin_progress(survey.size_bytes + again)
        if begun is not None:
            self.outcome.resumed = True
            sweep(self._wish.folder / layout.topic_folder(self._topic))
            ends = self._step(begun, ends, progress)
            step += 1
        node = self._wish.node or (last.plan.node if last is not None else "")
        gaps = survey.gaps
        while survey.stretches:
            pieces, survey = cut(self._logs, survey, self._wish.step_bytes, self._wish.piece_bytes)
            plan = Plan(step, self._topic, partitions, node, tuple(pieces), gaps)
            self._archive.begin(plan)
            ends = self._step(plan, ends, progress)
            step, gaps = step + 1, ()

    def _last(self) -> Manifest | None:
        """The last step that is done. Raises BadRequest if it is of another broker."""
        steps = self._archive.steps(self._topic)
        if not steps:
            return None
        last = self._archive.manifest(self._topic, steps[-1])
        self._archive.tidy(self._topic, last.plan.step)
        old, new = last.plan.node, self._wish.node
        if old and new and old != new:
            raise BadRequest(OTHER_NODE.format(folder=self._wish.folder, topic=self._topic, old=old, new=new))
        return last

    def _reconciled(self, plan: Plan | None) -> Plan | None:
        """The plan of a step that a run before began, without what is gone since. Raises OffsetOutOfRange."""
        if plan is None:
            return None
        kept, changed, gaps = reconciled(plan.pieces, self._found())
        if not changed:
            return plan
        aside = self._wish.folder / layout.aside_folder(self._topic)
        if self._wish.on_loss == "stop":
            first = changed[0]
            raise OffsetOutOfRange(
                LOST_ON_THE_WAY.format(
                    topic=self._topic,
                    start=first.start,
                    end=first.end,
                    partition=first.partition,
                    aside=aside,
                )
            )
        for each in changed:
            for path in (self._wish.folder / layout.topic_folder(self._topic)).rglob(layout.file_name(each)):
                make_folder(aside)
                settle(path, aside / f"{path.parent.parent.name}-{path.parent.name}-{path.name}")
        changed_plan = plan._replace(pieces=tuple(kept), gaps=(*plan.gaps, *gaps))
        self._archive.begin(changed_plan)
        return changed_plan

    def _found(self) -> list[tuple[PartitionLog, Bounds]]:
        logs = self._logs.partitions(self._topic)
        return list(zip(logs, self._logs.all_bounds(logs), strict=True))

    def _survey(self, ends: dict[tuple[int, int], int]) -> tuple[int, Survey]:
        """(number of partitions, what is new)."""
        deadline = time.monotonic() + BEHIND_SECONDS
        while True:
            found = self._found()
            try:
                return len(found), surveyed(found, ends, self._wish.on_loss, self._first_start)
            except LogTruncated:
                if self._wish.address.path is None or time.monotonic() > deadline:
                    raise
                time.sleep(BEHIND_SECONDS / 10)

    def _first_start(self, log: PartitionLog, bounds: Bounds) -> int:
        if self._wish.since_ms is None:
            return bounds.first
        return self._logs.at_time(log, self._wish.since_ms)

    def _step(
        self, plan: Plan, ends: dict[tuple[int, int], int], progress: Progress
    ) -> dict[tuple[int, int], int]:
        """Do what is planned; where the next step goes on."""
        work = partial(archive_piece, self._wish, self._topic)
        files = flat(self._run(work, plan.pieces, progress, f"archive {self._topic}, step {plan.step}"))
        after = ends_behind(ends, plan.pieces, plan.gaps)
        manifest = Manifest(plan, tuple(files), after)
        self._archive.finish(manifest)
        self.outcome.add(manifest)
        return after


def flat(lists: Iterable[list[ArchiveFile]]) -> list[ArchiveFile]:
    return [each for files in lists for each in files]
