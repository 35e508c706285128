"""`python -m tfmq.spark.pipelines.archive TOPIC... --to FOLDER`: topics as Parquet files by hour.

A run archives what is new in each topic, step by step. A step is planned first: the plan with its offset ranges is
durable before any file is written, and file names contain the ranges. So a step that is repeated after a kill at
any point writes the same files again, in place of existing ones, and a reader never sees a row twice. The manifest
completes the step.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
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
from tfmq.spark.pipelines import archive_folder
from tfmq.spark.pipelines.archive_folder import (
    ArchiveFile,
    ArchiveFolder,
    ArchivePiece,
    Gap,
    Manifest,
    Plan,
    create_folder,
    delete_temporary_files,
    hold_lock,
    rename_durably,
)
from tfmq.spark.pipelines.command import (
    HELP,
    Job,
    SizeType,
    address_options,
    check_topics,
    parse_address,
    pipeline_options,
    run_and_exit,
    to_ms,
)
from tfmq.spark.pipelines.parquet_files import COLUMNS, COMPRESSIONS, write_piece
from tfmq.spark.pipelines.spark_jobs import Progress, TaskResult, TaskRunner, show_progress
from tfmq.spark.ranges import Bounds, OffsetRange, PartitionLog

PIECE_BYTES: Final = 64 << 20
STEP_BYTES: Final = 4 << 30
CHECKPOINT_LAG_SECONDS: Final = 3.0
"""How long a log in a data folder may seem shorter than it is.

Its durable offset is written to its checkpoint within 1 s of an fsync.
"""

RUN_IN_PROGRESS: Final = "Another run archives {topic} into {folder} now: wait until it has ended."
OTHER_BROKER: Final = (
    "The archive {folder} has {topic} from another broker (node {old}, this one is {new}): their offsets cannot"
    " be mixed. Archive it into a folder of its own."
)


class ArchiveOptions(NamedTuple):
    """Options of an archive run.

    `address`: where to read from · `folder`: the archive · `node`: id of the broker, "" if unknown ·
    `on_loss`: "stop" or "skip" · `since_ms`: append time at which a partition begins that was never archived;
    None: its first message · `piece_bytes`, `step_bytes`: size of log that a task and a step archive.
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
    """What a run archived of one topic; `resumed`: it began by repeating an interrupted step."""

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


def archive_piece(wish: ArchiveOptions, topic: str, piece: ArchivePiece) -> TaskResult[list[ArchiveFile]]:
    """Read the messages of a piece and write its Parquet files. Runs in a task."""
    log = PartitionLog(topic, piece.partition, piece.incarnation, piece.log_id)
    decoder = Decoder(topic, piece.partition, piece.log_id, COLUMNS, wish.verify, lenient=True)
    with open_log_reader(wish.address) as logs:
        start = readable_start(logs, log, piece)
        chunks = logs.read_blocks(OffsetRange(log, start, piece.end)) if start < piece.end else iter(())
        batches = (decoder.decode(each.data, each.offset, piece.start, piece.end) for each in chunks)
        files = write_piece(wish.folder, topic, piece, batches, wish.compression)
    return TaskResult(files, sum(each.rows for each in files), piece.end - piece.start)


def readable_start(logs: LogReader, log: PartitionLog, piece: ArchivePiece) -> int:
    """Return the offset at which to start reading a piece: that of its first record.

    A repair after the plan was made may have replaced the record at the piece's start by a filler.
    """
    start = logs.next_message_offset(log, piece.start)
    gone = logs.bounds(log).first > piece.start  # requested last, so that no loss is missed
    return piece.start if gone else start


class TopicArchiver:
    """Archives one topic in one run."""

    def __init__(self, options: ArchiveOptions, topic: str, logs: LogReader, run: TaskRunner) -> None:
        self._options, self._topic, self._logs, self._run = options, topic, logs, run
        self._archive = ArchiveFolder.open_or_create(options.folder)
        self.outcome = ArchiveResult(topic)

    def archive_new(self, begin_progress: Callable[[int], Progress]) -> ArchiveResult:
        """Archive all messages that are new when the run starts.

        `begin_progress` gets the number of bytes of log to archive. Raises Busy, OffsetOutOfRange (messages
        are lost, and the options say to stop then), LogTruncated, UnknownTopic, BadRequest, Damaged, and the
        errors of reading.
        """
        busy = RUN_IN_PROGRESS.format(topic=self._topic, folder=self._options.folder)
        with hold_lock(self._options.folder / archive_folder.lock_path(self._topic), busy):
            self._archive_all(begin_progress)
        return self.outcome

    def _archive_all(self, begin_progress: Callable[[int], Progress]) -> None:
        last = self._last_manifest()
        delete_temporary_files(self._options.folder / archive_folder.metadata_folder(self._topic))
        step, ends = (last.plan.step + 1, last.ends) if last is not None else (1, {})
        begun = self._drop_lost_pieces(self._archive.started_plan(self._topic, step))
        archived_ends = ends if begun is None else ends_after(ends, begun.pieces, begun.gaps)
        partitions, survey = self._find_new(archived_ends)
        again = 0 if begun is None else sum(each.end - each.start for each in begun.pieces)
        if begun is None:
            self._archive.check_no_lost_step(self._topic, last)
            if not survey.ranges:
                return
        progress = begin_progress(survey.size_bytes + again)
        if begun is not None:
            self.outcome.resumed = True
            delete_temporary_files(self._options.folder / archive_folder.topic_folder(self._topic))
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
        """Return the manifest of the topic's last completed step; None if there is none.

        Raises BadRequest if the archive is of another broker.
        """
        steps = self._archive.steps(self._topic)
        if not steps:
            return None
        last = self._archive.manifest(self._topic, steps[-1])
        self._archive.delete_plan(self._topic, last.plan.step)
        old, new = last.plan.node, self._options.node
        if old and new and old != new:
            raise BadRequest(OTHER_BROKER.format(folder=self._options.folder, topic=self._topic, old=old, new=new))
        return last

    def _drop_lost_pieces(self, plan: Plan | None) -> Plan | None:
        """Return the plan of an interrupted step, without messages that the broker deleted since.

        Raises OffsetOutOfRange if some were deleted and the options say to stop then. Otherwise files already
        written for a changed piece are moved aside, and the changed plan is durable on return.
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
                LOST_IN_STEP.format(
                    topic=self._topic, start=first.start, end=first.end, partition=first.partition, aside=aside
                )
            )
        for each in changed:
            for path in (self._options.folder / archive_folder.topic_folder(self._topic)).rglob(
                archive_folder.file_name(each)
            ):
                create_folder(aside)
                rename_durably(path, aside / f"{path.parent.parent.name}-{path.parent.name}-{path.name}")
        changed_plan = plan._replace(pieces=tuple(kept), gaps=(*plan.gaps, *gaps))
        self._archive.write_plan(changed_plan)
        return changed_plan

    def _partition_bounds(self) -> list[tuple[PartitionLog, Bounds]]:
        logs = self._logs.partitions(self._topic)
        return list(zip(logs, self._logs.all_bounds(logs), strict=True))

    def _find_new(self, ends: dict[tuple[int, int], int]) -> tuple[int, NewRanges]:
        """Return the number of partitions, and what is to be archived of them.

        `ends`: where the last step ended, as in a manifest. In a data folder, a log that seems truncated is
        read again for up to CHECKPOINT_LAG_SECONDS.
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
        """Run the tasks of a plan and write its manifest; return the ends after this step.

        `ends`: those before it.
        """
        work = partial(archive_piece, self._options, self._topic)
        written = self._run(work, plan.pieces, progress, f"archive {self._topic}, step {plan.step}")
        after = ends_after(ends, plan.pieces, plan.gaps)
        manifest = Manifest(plan, tuple(itertools.chain.from_iterable(written)), after)
        self._archive.write_manifest(manifest)
        self.outcome.add_step(manifest)
        return after


ON_LOSS: Final = ("stop", "skip")

LOST_BEFORE_STEP: Final = (
    "Partition {partition} of {topic} was archived up to offset {end}, and the broker has it only from {first} on:"
    " retention deleted the messages between, which are not archived. With --on-loss skip the archive records the"
    " gap and continues."
)
LOST_IN_STEP: Final = (
    "A run that was stopped was archiving offsets {start} to {end} of partition {partition} of {topic}, and the broker"
    " does not have all of them any more. With --on-loss skip the archive records the gap and continues; files already"
    " written are moved to {aside}."
)
LOG_SHORTER: Final = (
    "Partition {partition} of {topic} was archived up to offset {archived}, and ends at {end}: this is another"
    " broker's topic, or its data was restored from an older copy. Archive it into a folder of its own."
)


class NewRanges(NamedTuple):
    """What a run archives of each partition, and the `gaps` of messages that were deleted before.

    It is fixed at the start, so a run ends although the topic grows.
    """

    ranges: tuple[OffsetRange, ...]
    gaps: tuple[Gap, ...]

    @property
    def size_bytes(self) -> int:
        return sum(each.end - each.start for each in self.ranges)


def find_new_ranges(
    found: Sequence[tuple[PartitionLog, Bounds]],
    ends: dict[tuple[int, int], int],
    on_loss: str,
    first_start: Callable[[PartitionLog, Bounds], int],
) -> NewRanges:
    """Return the records of each partition after those that are archived.

    `found`: the partitions with their bounds; `ends`: where the archived part of each ends, as in a manifest;
    `first_start` returns the start of a partition that is not in `ends`. Raises OffsetOutOfRange (messages
    are lost, and `on_loss` is "stop"), LogTruncated (the log is shorter than what was archived of it).
    """
    stretches, gaps = [], []
    for log, bounds in found:
        start = ends.get((log.incarnation, log.partition))
        if start is None:
            start = first_start(log, bounds)
        elif start < bounds.first:
            if on_loss == "stop":
                raise OffsetOutOfRange(
                    LOST_BEFORE_STEP.format(partition=log.partition, topic=log.topic, end=start, first=bounds.first),
                    first=bounds.first,
                    end=bounds.end,
                )
            gaps.append(Gap(log.partition, log.incarnation, start, bounds.first))
            start = bounds.first
        elif start > bounds.end:
            raise LogTruncated(
                LOG_SHORTER.format(partition=log.partition, topic=log.topic, archived=start, end=bounds.end),
                cut=bounds.end,
            )
        if start < bounds.end:
            stretches.append(OffsetRange(log, start, bounds.end))
    return NewRanges(tuple(stretches), tuple(gaps))


def plan_step(
    logs: LogReader, survey: NewRanges, step_bytes: int, piece_bytes: int
) -> tuple[list[ArchivePiece], NewRanges]:
    """Return the pieces of the next step, and the ranges that remain after it.

    A step has about `step_bytes` of log, shared by the partitions, and a piece at most about `piece_bytes`.
    """
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
    """Compare the pieces of a planned step with the bounds of the partitions.

    Returns the pieces that can be read, perhaps shortened; the pieces that were shortened or dropped, because
    retention or the deletion of the topic removed messages; and the gaps that this leaves.
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


def ends_after(
    ends: dict[tuple[int, int], int], pieces: Sequence[ArchivePiece], gaps: Sequence[Gap]
) -> dict[tuple[int, int], int]:
    """Return the ends after a step with these pieces and gaps; `ends` are those before it."""
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


@click.command(epilog=EXAMPLES, context_settings=HELP)
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
    "--file-bytes", type=SizeType(), default=PIECE_BYTES, help="Maximum size of log in one file, approximate [64 MiB]."
)
@click.option(
    "--step-bytes", type=SizeType(), default=STEP_BYTES, help="Size of log in one step; done steps are kept [4 GiB]."
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
    address = parse_address(servers, path, timeout)
    with open_log_reader(address) as logs, job.tasks() as tasks:
        wish = ArchiveOptions(
            address,
            folder.resolve(),
            logs.broker_id(),
            on_loss,
            to_ms(since),
            compression,
            verify,
            file_bytes,
            step_bytes,
        )
        outcomes = [archive_topic(job, wish, name, logs, tasks) for name in select_topics(topics, logs)]
    print_results(job, folder, outcomes)
    return 0


def select_topics(topics: Sequence[str], logs: LogReader) -> list[str]:
    """Return the named topics, each once, or all topics if none is named. Raises UnknownTopic."""
    there = logs.topics()
    for name in topics:
        if name not in there:
            raise UnknownTopic(f"There is no topic {name!r}.{did_you_mean(name, there)}")
    return list(dict.fromkeys(topics)) or there


def archive_topic(job: Job, wish: ArchiveOptions, topic: str, logs: LogReader, tasks: TaskRunner) -> ArchiveResult:
    """Archive one topic; its progress is shown as soon as there is something to archive."""
    with ExitStack() as stack:
        return TopicArchiver(wish, topic, logs, tasks).archive_new(
            lambda total: stack.enter_context(show_progress(job.output, f"archiving {topic}", total))
        )


def print_results(job: Job, folder: Path, outcomes: Sequence[ArchiveResult]) -> None:
    if job.output.json:
        row: dict[str, Any] = {"archive": str(folder), "topics": [each.to_json() for each in outcomes]}
        job.output.print_object(row)
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
    run_and_exit(archive, "archive")
