"""`python -m tfmq.spark.pipelines.archive TOPIC... --to FOLDER`: topics as Parquet files by hour.

A run archives what is new in each topic, step by step. A step is planned first: the plan with its offset ranges is
durable before any file is written, and file names contain the ranges. So a step that is repeated after a kill at
any point writes the same files again, in place of existing ones, and a reader never sees a row twice. The manifest
completes the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import click

from tfmq.arrow import Decoder
from tfmq.cli.output import counted, did_you_mean, size_text
from tfmq.cli.values import Moment
from tfmq.errors import BadRequest, LogTruncated, OffsetOutOfRange, UnknownTopic
from tfmq.spark.log_reader import Address, Logs, open_logs
from tfmq.spark.pipelines import archive_layout
from tfmq.spark.pipelines.archive_layout import Piece, locked, make_folder, settle, sweep
from tfmq.spark.pipelines.command import (
    Job,
    Size,
    address_of,
    address_options,
    check_topics,
    leave,
    pipeline_options,
)
from tfmq.spark.pipelines.manifest import ArchiveFile, ArchiveFolder, Gap, Manifest, Plan
from tfmq.spark.pipelines.parquet_files import COLUMNS, COMPRESSIONS, written
from tfmq.spark.pipelines.spark_jobs import Done, Progress, SparkTasks
from tfmq.spark.ranges import Bounds, PartitionLog, Range

PIECE_BYTES: Final = 64 << 20
STEP_BYTES: Final = 4 << 30
BEHIND_SECONDS: Final = 3.0
"""How long a log in a data folder may seem shorter than it is.

Its durable offset is written to its checkpoint within 1 s of an fsync.
"""

BUSY: Final = "Another run archives {topic} into {folder} now: wait until it has ended."
OTHER_NODE: Final = (
    "The archive {folder} has {topic} from another broker (node {old}, this one is {new}): their offsets cannot"
    " be mixed. Archive it into a folder of its own."
)


class Wish(NamedTuple):
    """Options of an archive run.

    `since_ms`: where a partition that was never archived begins.
    """

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
    """What a run did for one topic; `resumed`: it began with an interrupted step of an earlier run."""

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
        """Return the result as a JSON object."""
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
    """Type of `SparkTaskRunner` and `run_inline`: runs the tasks of a step."""

    def __call__(
        self,
        work: Callable[[Piece], Done[list[ArchiveFile]]],
        items: Sequence[Piece],
        progress: Progress,
        title: str,
    ) -> list[list[ArchiveFile]]: ...


def archive_piece(wish: Wish, topic: str, piece: Piece) -> Done[list[ArchiveFile]]:
    """Read a piece and write its files. Runs in a task."""
    log = PartitionLog(topic, piece.partition, piece.incarnation, piece.log_id)
    decoder = Decoder(topic, piece.partition, piece.log_id, COLUMNS, wish.verify, lenient=True)
    with open_logs(wish.address) as logs:
        start = readable_start(logs, log, piece)
        chunks = logs.chunks(Range(log, start, piece.end)) if start < piece.end else iter(())
        batches = (decoder.decode(each.data, each.offset, piece.start, piece.end) for each in chunks)
        files = written(wish.folder, topic, piece, batches, wish.compression)
    return Done(files, sum(each.rows for each in files), piece.end - piece.start)


def readable_start(logs: Logs, log: PartitionLog, piece: Piece) -> int:
    """Return the offset of the piece's first record.

    A repair since the plan may have replaced that record by a filler.
    """
    start = logs.at_or_after(log, piece.start)
    gone = logs.bounds(log).first > piece.start  # requested last, so that no loss is missed
    return piece.start if gone else start


class Archiving:
    """Archives one topic in one run."""

    def __init__(self, wish: Wish, topic: str, logs: Logs, run: Runner) -> None:
        self._wish, self._topic, self._logs, self._run = wish, topic, logs, run
        self._archive = ArchiveFolder.made(wish.folder)
        self.outcome = Outcome(topic)

    def course(self, begin_progress: Callable[[int], Progress]) -> Outcome:
        """Archive all that is new at the start. `begin_progress` gets the bytes of log to archive.

        Raises Busy, OffsetOutOfRange (messages are lost, and the run is to stop then), LogTruncated, UnknownTopic,
        BadRequest, Damaged, and the errors of reading.
        """
        busy = BUSY.format(topic=self._topic, folder=self._wish.folder)
        with locked(self._wish.folder / archive_layout.lock_path(self._topic), busy):
            self._archive_all(begin_progress)
        return self.outcome

    def _archive_all(self, begin_progress: Callable[[int], Progress]) -> None:
        last = self._last()
        sweep(self._wish.folder / archive_layout.house_folder(self._topic))
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
            sweep(self._wish.folder / archive_layout.topic_folder(self._topic))
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
        """Return the last completed step. Raises BadRequest if it is of another broker."""
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
        """Return the plan of an interrupted step, without what was lost since.

        Raises OffsetOutOfRange if something was lost and the run is to stop then. Otherwise files of a changed
        piece are moved aside, and the changed plan is durable on return.
        """
        if plan is None:
            return None
        kept, changed, gaps = reconciled(plan.pieces, self._found())
        if not changed:
            return plan
        aside = self._wish.folder / archive_layout.aside_folder(self._topic)
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
            for path in (self._wish.folder / archive_layout.topic_folder(self._topic)).rglob(
                archive_layout.file_name(each)
            ):
                make_folder(aside)
                settle(path, aside / f"{path.parent.parent.name}-{path.parent.name}-{path.name}")
        changed_plan = plan._replace(pieces=tuple(kept), gaps=(*plan.gaps, *gaps))
        self._archive.begin(changed_plan)
        return changed_plan

    def _found(self) -> list[tuple[PartitionLog, Bounds]]:
        logs = self._logs.partitions(self._topic)
        return list(zip(logs, self._logs.all_bounds(logs), strict=True))

    def _survey(self, ends: dict[tuple[int, int], int]) -> tuple[int, Survey]:
        """Return (number of partitions, what is new).

        In a data folder, a log that seems truncated is read again for CHECKPOINT_LAG_SECONDS.
        """
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
        """Execute a plan; return where the next step begins."""
        work = partial(archive_piece, self._wish, self._topic)
        files = flat(self._run(work, plan.pieces, progress, f"archive {self._topic}, step {plan.step}"))
        after = ends_behind(ends, plan.pieces, plan.gaps)
        manifest = Manifest(plan, tuple(files), after)
        self._archive.finish(manifest)
        self.outcome.add(manifest)
        return after


def flat(lists: Iterable[list[ArchiveFile]]) -> list[ArchiveFile]:
    return [each for files in lists for each in files]


ON_LOSS: Final = ("stop", "skip")

LOST: Final = (
    "Partition {partition} of {topic} was archived up to offset {end}, and the broker has it only from {first} on:"
    " retention deleted the messages between, which are not archived. With --on-loss skip the archive records the"
    " gap and continues."
)
LOST_ON_THE_WAY: Final = (
    "A run that was stopped was archiving offsets {start} to {end} of partition {partition} of {topic}, and the broker"
    " does not have all of them any more. With --on-loss skip the archive records the gap and continues; files already"
    " written are moved to {aside}."
)
BEHIND: Final = (
    "Partition {partition} of {topic} was archived up to offset {archived}, and ends at {end}: this is another"
    " broker's topic, or its data was restored from an older copy. Archive it into a folder of its own."
)


class Stretch(NamedTuple):
    """What a run archives of one partition: the records with start <= offset < end."""

    log: PartitionLog
    start: int
    end: int


class Survey(NamedTuple):
    """What a run archives of one topic.

    Fixed at the start, so a run ends although the topic grows.
    """

    stretches: tuple[Stretch, ...]
    gaps: tuple[Gap, ...]

    @property
    def size_bytes(self) -> int:
        return sum(each.end - each.start for each in self.stretches)


def surveyed(
    found: Sequence[tuple[PartitionLog, Bounds]],
    ends: dict[tuple[int, int], int],
    on_loss: str,
    first_start: Callable[[PartitionLog, Bounds], int],
) -> Survey:
    """Return what is new. `ends`: as in a manifest; `first_start`: start of a new partition.

    Raises OffsetOutOfRange (messages are lost, and `on_loss` is "stop"), LogTruncated (the log is shorter than what
    was archived of it).
    """
    stretches, gaps = [], []
    for log, bounds in found:
        start = ends.get((log.incarnation, log.partition))
        if start is None:
            start = first_start(log, bounds)
        elif start < bounds.first:
            if on_loss == "stop":
                raise OffsetOutOfRange(
                    LOST.format(partition=log.partition, topic=log.topic, end=start, first=bounds.first),
                    first=bounds.first,
                    end=bounds.end,
                )
            gaps.append(Gap(log.partition, log.incarnation, start, bounds.first))
            start = bounds.first
        elif start > bounds.end:
            raise LogTruncated(
                BEHIND.format(partition=log.partition, topic=log.topic, archived=start, end=bounds.end),
                cut=bounds.end,
            )
        if start < bounds.end:
            stretches.append(Stretch(log, start, bounds.end))
    return Survey(tuple(stretches), tuple(gaps))


def cut(logs: Logs, survey: Survey, step_bytes: int, piece_bytes: int) -> tuple[list[Piece], Survey]:
    """Return (the pieces of the next step, what is left after it).

    A step has about `step_bytes` of log, shared by the partitions.
    """
    pieces: list[Piece] = []
    left: list[Stretch] = []
    share = max(1, step_bytes // max(1, len(survey.stretches)))
    for stretch in survey.stretches:
        end = stretch.end
        if stretch.start + share < end:
            end = min(end, logs.at_or_after(stretch.log, stretch.start + share))
        for each in logs.split(Range(stretch.log, stretch.start, end), piece_bytes):
            log = each.log
            pieces.append(Piece(log.partition, log.incarnation, log.log_id, each.start, each.end))
        if end < stretch.end:
            left.append(stretch._replace(start=end))
    return pieces, Survey(tuple(left), ())


def reconciled(
    pieces: Sequence[Piece], found: Sequence[tuple[PartitionLog, Bounds]]
) -> tuple[list[Piece], list[Piece], list[Gap]]:
    """Return (readable pieces of a planned step, pieces changed or dropped, their gaps).

    Retention, or a deleted topic, may have removed some of them between two runs.
    """
    firsts = {(log.incarnation, log.partition): bounds.first for log, bounds in found}
    kept, changed, gaps = [], [], []
    for each in pieces:
        first = min(firsts.get((each.incarnation, each.partition), each.end), each.end)
        if first <= each.start:
            kept.append(each)
            continue
        changed.append(each)
        gaps.append(Gap(each.partition, each.incarnation, each.start, first))
        if first < each.end:
            kept.append(each._replace(start=first))
    return kept, changed, gaps


def ends_behind(
    ends: dict[tuple[int, int], int], pieces: Sequence[Piece], gaps: Sequence[Gap]
) -> dict[tuple[int, int], int]:
    """Return where the step after these pieces and gaps begins."""
    after = dict(ends)
    reached = [(each.incarnation, each.partition, each.end) for each in pieces]
    reached += [(each.incarnation, each.partition, each.end) for each in gaps]
    for incarnation, partition, end in reached:
        after[incarnation, partition] = max(after.get((incarnation, partition), 0), end)
    return after


EXAMPLES = """\b
Examples:
  python -m tfmq.spark.pipelines.archive orders --to /mnt/archive
  python -m tfmq.spark.pipelines.archive orders payments --to /mnt/archive --servers broker:8367 --json
  python -m tfmq.spark.pipelines.archive --all --to /mnt/archive --path /var/lib/tfmq
"""


@click.command(epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option(
    "--to",
    "folder",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The archive's folder; created if missing. On a cluster all executors must see it.",
)
@click.option("--all", "everything", is_flag=True, help="All topics.")
@click.option("--since", type=Moment(), help="A partition that was never archived begins here [all].")
@click.option(
    "--on-loss",
    type=click.Choice(ON_LOSS),
    default="stop",
    show_default=True,
    help="If retention deleted messages that were not archived: stop, or record the gap and continue.",
)
@click.option(
    "--verify",
    type=click.Choice(["chunk", "message"]),
    default="chunk",
    show_default=True,
    help="Verify the checksums of blocks, or of each message, too.",
)
@click.option("--compression", type=click.Choice(COMPRESSIONS), default="zstd", show_default=True)
@click.option(
    "--file-bytes",
    type=Size(),
    default=PIECE_BYTES,
    help="Maximum size of log in one file, approximate [64 MiB].",
)
@click.option(
    "--step-bytes",
    type=Size(),
    default=STEP_BYTES,
    help="Size of log in one step; done steps are kept [4 GiB].",
)
@address_options
@pipeline_options("archive")
def archive(
    topics: tuple[str, ...],
    folder: Path,
    everything: bool,
    since: datetime | None,
    on_loss: str,
    verify: str,
    compression: str,
    file_bytes: int,
    step_bytes: int,
    servers: str | None,
    path: Path | None,
    timeout: float,
    job: Job,
) -> int:
    """Archive TOPICs as Parquet files by date and hour of append time, each message once.

    Run it again to archive what is new; after a kill at any point it resumes and writes the same files.
    """
    check_topics(topics, everything)
    address = address_of(servers, path, timeout)
    since_ms = None if since is None else round(since.timestamp() * 1000)
    with ExitStack() as stack:
        logs = stack.enter_context(open_logs(address))
        node = logs.node()
        wish = Wish(
            address, folder.resolve(), node, on_loss, since_ms, compression, verify, file_bytes, step_bytes
        )
        tasks = SparkTasks(lambda: stack.enter_context(job.spark()))
        outcomes = [archived(job, wish, name, logs, tasks) for name in named(topics, logs)]
    tell(job, folder, outcomes)
    return 0


def named(topics: Sequence[str], logs: Logs) -> list[str]:
    """Return the topics to archive, each once. Raises UnknownTopic."""
    there = logs.topics()
    for name in topics:
        if name not in there:
            raise UnknownTopic(f"There is no topic {name!r}.{did_you_mean(name, there)}")
    return list(dict.fromkeys(topics)) or there


def archived(job: Job, wish: Wish, topic: str, logs: Logs, tasks: SparkTasks) -> Outcome:
    """Archive one topic, showing its progress."""
    with ExitStack() as stack:
        return Archiving(wish, topic, logs, tasks).course(
            lambda total: stack.enter_context(job.progress(f"archiving {topic}", total))
        )


def tell(job: Job, folder: Path, outcomes: Sequence[Outcome]) -> None:
    """Print the results: JSON, or a sentence per topic."""
    if job.output.json:
        row: dict[str, Any] = {"archive": str(folder), "topics": [each.row() for each in outcomes]}
        job.output.object(row)
        return
    for each in outcomes:
        if not each.steps:
            job.output.say(f"{each.topic}: nothing new, nothing written")
            continue
        job.output.say(
            f"{each.topic}: {counted(each.messages, 'message')} in {counted(each.files, 'file')},"
            f" {size_text(each.size_bytes)}{'; resumed an interrupted run' if each.resumed else ''}"
        )
        for gap in each.gaps:
            job.output.say(
                f"{each.topic}: partition {gap.partition} has a gap, offsets {gap.start:,} to {gap.end:,}"
            )


if __name__ == "__main__":
    leave(archive, "archive")
