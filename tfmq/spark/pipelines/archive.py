"""`python -m tfmq.spark.pipelines.archive TOPIC... --to FOLDER`: topics as Parquet files by hour.

A run archives the new messages of each topic in steps. First the plan of a step, with the offset ranges to archive, is
made durable; then the files are written, whose names contain these ranges; then a manifest completes the step. If a run
is killed at any point, the next run repeats the step by the same plan. A file that was already written is replaced by a
file with the same name and the same rows, so a reader never sees a row twice.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from tfmq.arrow import Decoder
from tfmq.cli.option_types import Moment
from tfmq.cli.output import did_you_mean, size_text, with_noun
from tfmq.errors import BadRequest, LogTruncated, OffsetOutOfRange, UnknownTopic
from tfmq.spark.log_reader import LogReader, SourceAddress, open_log_reader
from tfmq.spark.pipelines import archive_folder, command
from tfmq.spark.pipelines.archive_folder import ArchiveFile, ArchiveFolder, ArchivePiece, Gap, Manifest, Plan
from tfmq.spark.pipelines.command import Job
from tfmq.spark.pipelines.parquet_files import COLUMNS, COMPRESSIONS, write_piece
from tfmq.spark.pipelines.spark_jobs import Progress, ShowProgress, SparkTaskRunner, TaskResult, show_progress
from tfmq.spark.ranges import Bounds, OffsetRange, PartitionLog

PIECE_BYTES: Final = 64 << 20
STEP_BYTES: Final = 4 << 30
CHECKPOINT_LAG_SECONDS: Final = 3.0
"""If a log in a data folder seems to end before its archive, the log's checkpoint is read again for up to this long. A
broker writes the checkpoint up to 1 s after an fsync, so the checkpoint may name an end that is too low."""


class ArchiveOptions(NamedTuple):
    """Options of an archive run.

    `folder`: the archive · `node`: id of the broker, "" if unknown · `on_loss`: "stop" the run or "skip" the messages,
    if messages were deleted before they were archived · `since_ms`: append time at which the archive of a new partition
    begins, None for the partition's first message · `piece_bytes`, `step_bytes`: approximate bytes of log in a piece,
    which one task archives, and in a step.
    """

    address: SourceAddress
    folder: Path
    node: str = ""
    on_loss: str = "stop"
    since_ms: int | None = None
    compression: str = "zstd"
    verify: str = "chunk"
    piece_bytes: int = PIECE_BYTES
    step_bytes: int = STEP_BYTES


@dataclass
class ArchiveResult:
    """The amounts that a run archived of one topic. `resumed`: the run first repeated an interrupted step."""

    topic: str
    messages: int = 0
    files: int = 0
    size_bytes: int = 0
    steps: int = 0
    resumed: bool = False
    gaps: list[Gap] = field(default_factory=list)

    def add_step(self, manifest: Manifest) -> None:
        self.steps += 1
        self.messages += manifest.rows
        self.files += len(manifest.files)
        self.size_bytes += manifest.size_bytes
        self.gaps.extend(manifest.plan.gaps)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "gaps": [each._asdict() for each in self.gaps]}


def archive_piece(options: ArchiveOptions, topic: str, piece: ArchivePiece) -> TaskResult[list[ArchiveFile]]:
    """Read the messages of a piece and write its Parquet files. Runs in a task."""
    log = PartitionLog(topic, piece.partition, piece.incarnation, piece.log_id)
    decoder = Decoder(topic, piece.partition, piece.log_id, COLUMNS, options.verify, lenient=True)
    with open_log_reader(options.address) as logs:
        runs = logs.read_blocks(OffsetRange(log, piece.start, piece.end))
        batches = (decoder.decode(each.data, each.offset, piece.start, piece.end) for each in runs)
        files = write_piece(options.folder, topic, piece, batches, options.compression)
    return TaskResult(files, sum(each.rows for each in files), piece.end - piece.start)


class TopicArchiver:
    def __init__(self, options: ArchiveOptions, topic: str, logs: LogReader, run: SparkTaskRunner) -> None:
        self._options, self._topic, self._logs, self._run = options, topic, logs, run
        self._archive = ArchiveFolder.open_or_create(options.folder)
        self.outcome = ArchiveResult(topic)

    def archive_new(self, show: ShowProgress) -> ArchiveResult:
        """Archive all messages of the topic that exist when the run starts and are not archived yet.

        `show` is called with the number of bytes of log to archive. Raises Busy (another run archives this topic),
        OffsetOutOfRange (messages were deleted before they were archived, and `on_loss` is "stop"), LogTruncated (the
        log ends before the archive), BadRequest (the archive has this topic from another broker), Damaged (the log or
        the archive), UnknownTopic, ConnectionFailed, TimedOut.
        """
        folder = self._options.folder
        busy = f"Another run archives {self._topic} into {folder} now: wait until it has ended."
        with archive_folder.hold_lock(folder / archive_folder.lock_path(self._topic), busy):
            self._archive_all(show)
        return self.outcome

    def _archive_all(self, show: ShowProgress) -> None:
        last = self._last_manifest()
        archive_folder.delete_temporary_files(self._options.folder / archive_folder.metadata_folder(self._topic))
        step, ends = (last.plan.step + 1, last.ends) if last is not None else (1, {})
        begun = self._drop_lost_pieces(self._archive.started_plan(self._topic, step))
        archived_ends = ends if begun is None else ends_after(ends, begun.pieces, begun.gaps)
        partitions, survey = self._find_new(archived_ends)
        todo: list[ArchivePiece | OffsetRange] = [*(begun.pieces if begun is not None else ()), *survey.ranges]
        if begun is None:
            self._archive.check_no_lost_step(self._topic, last)
            if not survey.ranges:
                return
        with show(sum(each.end - each.start for each in todo)) as progress:
            if begun is not None:
                self.outcome.resumed = True
                archive_folder.delete_temporary_files(self._options.folder / archive_folder.topic_folder(self._topic))
                ends = self._execute(begun, ends, progress)
                step += 1
            node = self._options.node or (last.plan.node if last is not None else "")
            gaps = survey.gaps
            while survey.ranges:
                pieces, survey = plan_step(self._logs, survey, self._options.step_bytes, self._options.piece_bytes)
                plan = Plan(step, self._topic, partitions, node, tuple(pieces), gaps)
                self._archive.write_plan(plan)
                ends = self._execute(plan, ends, progress)
                step, gaps = step + 1, ()

    def _last_manifest(self) -> Manifest | None:
        """Return the last completed step's manifest, or None. Raises BadRequest if this step is of another broker."""
        steps = self._archive.steps(self._topic)
        if not steps:
            return None
        last = self._archive.manifest(self._topic, steps[-1])
        self._archive.delete_plan(self._topic, last.plan.step)
        old, new = last.plan.node, self._options.node
        if old and new and old != new:
            raise BadRequest(
                f"The archive {self._options.folder} has {self._topic} from another broker (node {old}, this one is"
                f" {new}): their offsets cannot be mixed. Archive it into a folder of its own."
            )
        return last

    def _drop_lost_pieces(self, plan: Plan | None) -> Plan | None:
        """Return the plan of an interrupted step, without messages that the broker has deleted since the plan was made.

        If messages were deleted and `on_loss` is "stop", OffsetOutOfRange is raised. Otherwise the pieces with deleted
        messages are shortened, files that were already written for these pieces are moved to the folder "aside", and
        the changed plan is durable on return.
        """
        if plan is None:
            return None
        kept, changed, gaps = drop_lost(plan.pieces, self._partition_bounds())
        if not changed:
            return plan
        aside = self._options.folder / archive_folder.aside_folder(self._topic)
        if self._options.on_loss == "stop":
            first = changed[0]
            raise OffsetOutOfRange(
                f"A run that was stopped was archiving offsets {first.start} to {first.end} of partition"
                f" {first.partition} of {self._topic}, and the broker does not have all of them any more. With"
                " --on-loss skip the archive records the gap and continues; files already written are moved to"
                f" {aside}."
            )
        folder = self._options.folder / archive_folder.topic_folder(self._topic)
        for each in changed:
            for path in folder.rglob(archive_folder.file_name(each)):
                archive_folder.create_folder(aside)
                archive_folder.rename_durably(path, aside / f"{path.parent.parent.name}-{path.parent.name}-{path.name}")
        changed_plan = plan._replace(pieces=tuple(kept), gaps=(*plan.gaps, *gaps))
        self._archive.write_plan(changed_plan)
        return changed_plan

    def _partition_bounds(self) -> list[tuple[PartitionLog, Bounds]]:
        logs = self._logs.partitions(self._topic)
        return list(zip(logs, self._logs.all_bounds(logs), strict=True))

    def _find_new(self, ends: dict[tuple[int, int], int]) -> tuple[int, NewRanges]:
        """Return the number of the topic's partitions, and the ranges that are not archived yet: those after `ends`.

        Raises LogTruncated if a log ends before `ends`; in a data folder, only after CHECKPOINT_LAG_SECONDS of retries.
        """
        deadline = time.monotonic() + CHECKPOINT_LAG_SECONDS
        while True:
            found = self._partition_bounds()
            try:
                return len(found), find_new_ranges(found, ends, self._options.on_loss, self._start_of_new_partition)
            except LogTruncated:
                if self._options.address.path is None or time.monotonic() > deadline:
                    raise
                time.sleep(CHECKPOINT_LAG_SECONDS / 10)

    def _start_of_new_partition(self, log: PartitionLog, bounds: Bounds) -> int:
        if self._options.since_ms is None:
            return bounds.first
        return self._logs.offset_at_time(log, self._options.since_ms)

    def _execute(self, plan: Plan, ends: dict[tuple[int, int], int], progress: Progress) -> dict[tuple[int, int], int]:
        """Run the tasks of `plan`, write its manifest, and return where the archive then ends in each partition."""
        work = partial(archive_piece, self._options, self._topic)
        written = self._run(work, plan.pieces, progress, f"archive {self._topic}, step {plan.step}")
        after = ends_after(ends, plan.pieces, plan.gaps)
        manifest = Manifest(plan, tuple(itertools.chain.from_iterable(written)), after)
        self._archive.write_manifest(manifest)
        self.outcome.add_step(manifest)
        return after


class NewRanges(NamedTuple):
    """The ranges that are still to be archived in a run, and the `gaps`: offsets deleted before they were archived."""

    ranges: tuple[OffsetRange, ...]
    gaps: tuple[Gap, ...]


def find_new_ranges(
    found: Sequence[tuple[PartitionLog, Bounds]],
    ends: dict[tuple[int, int], int],
    on_loss: str,
    first_start: Callable[[PartitionLog, Bounds], int],
) -> NewRanges:
    """Return for each partition the range that is not archived yet.

    `found`: the partitions with their bounds · `ends`: (incarnation, partition) -> offset where the archive ends, as in
    a manifest · `first_start`: returns where to begin in a partition that is not in `ends`. Raises OffsetOutOfRange
    (messages were deleted before they were archived, and `on_loss` is "stop"), LogTruncated (the log ends before the
    archive's end).
    """
    ranges, gaps = [], []
    for log, bounds in found:
        start = ends.get((log.incarnation, log.partition))
        archived = f"Partition {log.partition} of {log.topic} was archived up to offset {start}"
        if start is None:
            start = first_start(log, bounds)
        elif start < bounds.first:
            if on_loss == "stop":
                raise OffsetOutOfRange(
                    f"{archived}, and the broker has it only from {bounds.first} on: retention deleted the messages"
                    " between, which are not archived. With --on-loss skip the archive records the gap and continues.",
                    first=bounds.first,
                    end=bounds.end,
                )
            gaps.append(Gap(log.partition, log.incarnation, start, bounds.first))
            start = bounds.first
        elif start > bounds.end:
            raise LogTruncated(
                f"{archived}, and ends at {bounds.end}: this is another broker's topic, or its data was restored from"
                " an older copy. Archive it into a folder of its own.",
                cut=bounds.end,
            )
        if start < bounds.end:
            ranges.append(OffsetRange(log, start, bounds.end))
    return NewRanges(tuple(ranges), tuple(gaps))


def plan_step(
    logs: LogReader, survey: NewRanges, step_bytes: int, piece_bytes: int
) -> tuple[list[ArchivePiece], NewRanges]:
    """Return the pieces of a step (about `piece_bytes` each, `step_bytes` in sum), and the ranges for later steps."""
    pieces: list[ArchivePiece] = []
    left: list[OffsetRange] = []
    share = max(1, step_bytes // max(1, len(survey.ranges)))
    for stretch in survey.ranges:
        end = stretch.end
        if stretch.start + share < end:
            end = min(end, logs.next_message_offset(stretch.log, stretch.start + share))
        for each in logs.split(stretch._replace(end=end), piece_bytes):
            log = each.log
            pieces.append(ArchivePiece(log.partition, log.incarnation, log.log_id, each.start, each.end))
        if end < stretch.end:
            left.append(stretch._replace(start=end))
    return pieces, NewRanges(tuple(left), ())


def drop_lost(
    pieces: Sequence[ArchivePiece], found: Sequence[tuple[PartitionLog, Bounds]]
) -> tuple[list[ArchivePiece], list[ArchivePiece], list[Gap]]:
    """Return the parts of `pieces` that the broker still has, the pieces that lost a part, and the lost parts."""
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


def ends_after(
    ends: dict[tuple[int, int], int], pieces: Sequence[ArchivePiece], gaps: Sequence[Gap]
) -> dict[tuple[int, int], int]:
    """Return where the archive ends in each partition after a step. `ends`: where it ended before the step."""
    after = dict(ends)
    archived: tuple[ArchivePiece | Gap, ...] = (*pieces, *gaps)
    for each in archived:
        key = each.incarnation, each.partition
        after[key] = max(after.get(key, 0), each.end)
    return after


EXAMPLES = """\b
Examples:
  python -m tfmq.spark.pipelines.archive orders --to /mnt/archive
  python -m tfmq.spark.pipelines.archive orders payments --to /mnt/archive --servers broker:8367 --json
  python -m tfmq.spark.pipelines.archive --all --to /mnt/archive --path /var/lib/tfmq
"""


@click.command(epilog=EXAMPLES, context_settings=command.HELP)
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
    type=click.Choice(["stop", "skip"]),
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
    type=command.SizeType(),
    default=PIECE_BYTES,
    help="Maximum size of log in one file, approximate [64 MiB].",
)
@click.option(
    "--step-bytes",
    type=command.SizeType(),
    default=STEP_BYTES,
    help="Size of log in one step; done steps are kept [4 GiB].",
)
@command.address_options
@command.pipeline_options("archive")
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

    Run the command again to archive new messages; after a kill at any point, it resumes and writes the same files.
    """
    command.check_topics(topics, everything)
    address = command.parse_address(servers, path, timeout)
    with open_log_reader(address) as logs, job.tasks() as tasks:
        options = ArchiveOptions(
            address,
            folder.resolve(),
            logs.broker_id(),
            on_loss,
            command.to_ms(since),
            compression,
            verify,
            file_bytes,
            step_bytes,
        )
        outcomes = []
        for name in select_topics(topics, logs):
            show = partial(show_progress, job.output, f"archiving {name}")
            outcomes.append(TopicArchiver(options, name, logs, tasks).archive_new(show))
    print_results(job, folder, outcomes)
    return 0


def select_topics(topics: Sequence[str], logs: LogReader) -> list[str]:
    """Return the named topics, each once, or all topics if none is named. Raises UnknownTopic."""
    there = logs.topics()
    for name in topics:
        if name not in there:
            raise UnknownTopic(f"There is no topic {name!r}.{did_you_mean(name, there)}")
    return list(dict.fromkeys(topics)) or there


def print_results(job: Job, folder: Path, outcomes: Sequence[ArchiveResult]) -> None:
    if job.output.json:
        job.output.print_object({"archive": str(folder), "topics": [each.to_json() for each in outcomes]})
        return
    for each in outcomes:
        if not each.steps:
            job.output.info(f"{each.topic}: nothing new, nothing written")
            continue
        job.output.info(
            f"{each.topic}: {with_noun(each.messages, 'message')} in {with_noun(each.files, 'file')},"
            f" {size_text(each.size_bytes)}{'; resumed an interrupted run' if each.resumed else ''}"
        )
        for gap in each.gaps:
            job.output.info(f"{each.topic}: partition {gap.partition} has a gap, offsets {gap.start:,} to {gap.end:,}")


if __name__ == "__main__":
    command.run_and_exit(archive, "archive")
