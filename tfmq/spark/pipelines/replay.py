"""`python -m tfmq.spark.pipelines.replay TOPIC --from FOLDER`: sends archived messages to a topic.

A replay has numbered steps; the messages of a step are committed together. Which files belong to which step depends
only on the archive and the filter (the options that select partitions and times). No step has files of two archive
steps, so when the archive grows, the replay only gets new steps at the end. The number of a step is the sequence of a
commit group, and the broker stores the last committed sequence: so a run continues after the last completed step. The
next commit discards the transactions that an interrupted step has prepared.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import numpy as np
import pyarrow as pa

from tfmq.admin import Admin
from tfmq.arrow import partition_of
from tfmq.cli.option_types import Moment, point_in_time
from tfmq.cli.output import with_noun
from tfmq.errors import BadRequest, Damaged, TopicExists, UnknownTopic
from tfmq.limits import NAME_RULE, is_valid_name
from tfmq.protocol.commands import CommitMember
from tfmq.spark.pipelines import command, parquet_files
from tfmq.spark.pipelines.archive_folder import ArchiveFile, ArchiveFolder, Manifest
from tfmq.spark.pipelines.command import Job
from tfmq.spark.pipelines.parquet_files import read_batches
from tfmq.spark.pipelines.spark_jobs import Progress, ShowProgress, SparkTaskRunner, TaskResult, show_progress
from tfmq.spark.settings import SinkSettings, commit_group_name
from tfmq.spark.sink_task import CommitGroupClient, TaskCommitMessage, abort_run, collect_commit, write_rows

STEP_BYTES: Final = 256 << 20
"""Approximate bytes of log in a step. Not an option: with another size, the step numbers would mean other files."""


class ReplayFilter(NamedTuple):
    """Selects the messages of a topic to replay: `partitions` (all if empty), append times [`since_ms`, `until_ms`)."""

    topic: str
    partitions: tuple[int, ...] = ()
    since_ms: int | None = None
    until_ms: int | None = None

    def includes(self, file: ArchiveFile) -> bool:
        """Return whether `file` may have rows that this filter selects."""
        return (
            (not self.partitions or file.partition in self.partitions)
            and (self.since_ms is None or file.last_ms >= self.since_ms)
            and (self.until_ms is None or file.first_ms < self.until_ms)
        )


class ReplayPart(NamedTuple):
    """The files that one task sends: files of one partition, in the order of offsets."""

    partition: int
    files: tuple[ArchiveFile, ...]

    @property
    def log_bytes(self) -> int:
        return sum(each.log_bytes for each in self.files)


class ReplayStep(NamedTuple):
    """The files that are sent in one commit, as a part for each partition. `number`: steps are counted from 1."""

    number: int
    parts: tuple[ReplayPart, ...]


def plan_steps(
    manifests: Iterable[Manifest], selection: ReplayFilter, step_bytes: int = STEP_BYTES
) -> Iterator[ReplayStep]:
    """Yield all steps of a replay. `manifests`: the manifests of all archive steps, in order.

    If a topic was deleted and created again, one archive step may have files of both incarnations of the topic. Files
    of different incarnations are replayed in separate steps, the older incarnation first.
    """
    number = 0
    for manifest in manifests:
        files = [each for each in manifest.files if selection.includes(each)]
        for incarnation in sorted({each.incarnation for each in files}):
            life = [each for each in files if each.incarnation == incarnation]
            for parts in _split_into_steps(life, step_bytes):
                number += 1
                yield ReplayStep(number, parts)


def _split_into_steps(files: list[ArchiveFile], step_bytes: int) -> Iterator[tuple[ReplayPart, ...]]:
    """Yield for each step its parts: one for each partition that still has files, about `step_bytes` of log in sum."""
    waiting: dict[int, list[ArchiveFile]] = {}
    for each in sorted(files, key=lambda file: (file.partition, file.first_offset)):
        waiting.setdefault(each.partition, []).append(each)
    while waiting:
        share = step_bytes // len(waiting)
        parts = []
        for partition in sorted(waiting):
            queue, size = waiting[partition], 0
            taken: list[ArchiveFile] = []
            while queue and (not taken or size + queue[0].log_bytes <= share):
                size += queue[0].log_bytes
                taken.append(queue.pop(0))
            parts.append(ReplayPart(partition, tuple(taken)))
            if not queue:
                del waiting[partition]
        yield tuple(parts)


def replay_name(archive_id: str, choice: ReplayFilter, node: str, topic: str, incarnation: int) -> str:
    """Return the name by which the broker knows a replay: the same for the same archive, filter and target topic."""
    identity = json.dumps([archive_id, *choice, node, topic, incarnation])
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


SENT_COLUMNS: Final = ("value", "attributes", "partition")
"""Key and tag are not sent as columns: they are in the attributes."""


class ReplayOptions(NamedTuple):
    """Options of a replay.

    `choice`: the messages to send · `topic`: the topic that gets them · `repartition`: choose partitions by key again,
    for a topic with another number of partitions · `into_itself`: permit the archived topic itself as `topic`.
    """

    folder: Path
    choice: ReplayFilter
    servers: str
    topic: str
    timeout: float
    repartition: bool = False
    into_itself: bool = False


class ReplayTarget(NamedTuple):
    """The topic that gets the messages. `last_step`: last step committed in the commit group `group`, 0 if none."""

    group: str
    incarnation: int
    partitions: int
    last_step: int


@dataclass
class ReplayResult:
    """The amounts that a run sent. `archived`: topic in the archive; `earlier_steps`: steps that earlier runs sent."""

    archived: str
    topic: str
    steps: int = 0
    earlier_steps: int = 0
    messages: int = 0
    topic_created: bool = False


def replay_part(
    options: ReplayOptions, settings: SinkSettings, member: CommitMember, partitions: int, part: ReplayPart
) -> TaskResult[TaskCommitMessage]:
    """Read the files of a part, send the selected rows, and prepare their transactions. Runs in a task."""
    written = write_rows(settings, member, read_rows(options, partitions, part))
    return TaskResult(written, written.rows, part.log_bytes)


def read_rows(options: ReplayOptions, partitions: int, part: ReplayPart) -> Iterator[pa.RecordBatch]:
    """Yield the selected rows of a part, with the columns of the sink. Raises Damaged, which names the file."""
    turn = part.partition
    for file in part.files:
        for batch in read_batches(options.folder, file):
            chosen = filter_by_time(batch, options.choice)
            if options.repartition and chosen.num_rows:
                column = partition_of(chosen, partitions, turn % partitions)
                turn += chosen.num_rows
                index = chosen.schema.get_field_index("partition")
                chosen = chosen.set_column(index, "partition", column.cast(pa.int32()))
            yield chosen.select(SENT_COLUMNS)


def filter_by_time(batch: pa.RecordBatch, choice: ReplayFilter) -> pa.RecordBatch:
    """Return the rows that were appended in the selected time. `batch` must be sorted by append time."""
    if choice.since_ms is None and choice.until_ms is None:
        return batch
    times = batch.column("timestamp").cast(pa.int64()).to_numpy() // 1000
    start = 0 if choice.since_ms is None else int(np.searchsorted(times, choice.since_ms))
    end = len(times) if choice.until_ms is None else int(np.searchsorted(times, choice.until_ms))
    return batch.slice(start, max(0, end - start))


class ReplayRun:
    def __init__(self, options: ReplayOptions, admin: Admin, run: SparkTaskRunner) -> None:
        self._options, self._admin, self._run = options, admin, run
        self._archive = ArchiveFolder.open(options.folder)
        self.outcome = ReplayResult(options.choice.topic, options.topic)

    def replay_new(self, show: ShowProgress) -> ReplayResult:
        """Send all archived messages that match the filter and that earlier runs did not send.

        `show` is called with the number of bytes to send. Raises UnknownTopic (the archive does not have the topic),
        BadRequest (the options do not permit this replay), Damaged (an archive file), or the error of the broker.
        """
        manifests = self._read_manifests()
        target = self._open_target(manifests[-1])
        todo = [each for each in plan_steps(manifests, self._options.choice) if each.number > target.last_step]
        self.outcome.earlier_steps = target.last_step
        self._check_files(todo)
        if todo:
            with show(sum(part.log_bytes for step in todo for part in step.parts)) as progress:
                for step in todo:
                    self._send_step(target, step, progress)
        return self.outcome

    def _read_manifests(self) -> list[Manifest]:
        topic = self._options.choice.topic
        found = self._archive.manifests(topic)
        if not found:
            there = ", ".join(self._archive.topics()) or "nothing yet"
            raise UnknownTopic(f"The archive {self._options.folder} has no topic {topic!r}; it has {there}.")
        wrong = [each for each in self._options.choice.partitions if each >= found[-1].plan.partitions]
        if wrong:
            raise BadRequest(
                f"The archived {topic} has partitions 0 to {found[-1].plan.partitions - 1}, not {wrong[0]}."
            )
        return found

    def _open_target(self, last: Manifest) -> ReplayTarget:
        """Return the target topic; create a missing one. Raises BadRequest if the options do not permit this target."""
        wish, known = self._options, last.plan.partitions
        node = str(self._admin.status().get("node", ""))
        try:
            topic = self._admin.topic(wish.topic)
        except UnknownTopic:
            topic = self._create_topic(known)
        count = len(topic.partitions)
        if count != known and not wish.repartition:
            raise BadRequest(
                f"{wish.topic} has {with_noun(count, 'partition')}, and the archived {wish.choice.topic} had {known}:"
                f" messages would change partitions. Create a topic with {known} (tfmq topic create), or use"
                " --repartition, which keeps the order of each key only."
            )
        lives = {incarnation for incarnation, _ in last.ends}
        same = wish.topic == wish.choice.topic and last.plan.node == node and topic.incarnation in lives
        if same and not wish.into_itself:
            raise BadRequest(
                f"The archive was made of this same topic {wish.topic}: its own messages would be appended a second"
                " time. Name another topic with --to, or use --into-itself if that is intended."
            )
        name = replay_name(self._archive.id, wish.choice, node, wish.topic, topic.incarnation)
        group = commit_group_name("replay", name)
        reached = [each.sequence for each in self._admin.commit_groups() if each.group == group]
        return ReplayTarget(group, topic.incarnation, count, max(reached, default=0))

    def _create_topic(self, partitions: int) -> Any:
        try:
            made = self._admin.create_topic(self._options.topic, partitions)
        except TopicExists:
            return self._admin.topic(self._options.topic)
        self.outcome.topic_created = True
        return made

    def _check_files(self, todo: Sequence[ReplayStep]) -> None:
        """Raise Damaged if a file of the steps `todo` is missing. Called before anything is sent."""
        for file in (file for step in todo for part in step.parts for file in part.files):
            if not (self._options.folder / file.path).is_file():
                raise Damaged(parquet_files.MISSING.format(folder=self._options.folder, path=file.path))

    def _send_step(self, target: ReplayTarget, step: ReplayStep, progress: Progress) -> None:
        wish = self._options
        settings = SinkSettings(wish.servers, wish.topic, wish.timeout, lenient=True)
        member = CommitMember(target.group, step.number, uuid.uuid4().hex)
        title = f"replay {wish.choice.topic}, step {step.number}"
        deleted = UnknownTopic(
            f"{wish.topic} was deleted while messages were replayed into it: run it again, which creates the topic."
        )
        try:
            work = partial(replay_part, wish, settings, member, target.partitions)
            written = self._run(work, step.parts, progress, title)
            request = collect_commit(written)
            assert request is not None, "a step has parts"
            if self._admin.topic(wish.topic).incarnation != target.incarnation:
                raise deleted
            with CommitGroupClient(wish.servers, wish.timeout) as client:
                reply = client.commit(request)
        except BaseException:
            abort_run(settings, member)
            raise
        if reply.dropped:
            raise deleted
        self.outcome.steps += 1
        self.outcome.messages += request.rows


EXAMPLES = """\b
Examples:
  python -m tfmq.spark.pipelines.replay orders --from /mnt/archive --servers other-broker:8367
  python -m tfmq.spark.pipelines.replay orders --from /mnt/archive --to orders-again --since 2026-11-01
"""


class FixedMoment(Moment):
    """Click parameter type of an absolute point in time. A relative one would mean another time in each run."""

    @staticmethod
    def parse(text: str) -> datetime:
        if text[:1] in ("-", "+"):
            raise ValueError(
                f"{text!r} is another time in each run, so that each run would be another replay:"
                " write a date or time, as 2026-11-21T09:30+01:00"
            )
        return point_in_time(text)


@click.command(epilog=EXAMPLES, context_settings=command.HELP)
@click.argument("topic")
@click.option(
    "--from",
    "folder",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The archive's folder. On a cluster all executors must see it.",
)
@click.option("--to", "target", metavar="TOPIC", help="The topic to write to, created if missing [the same name].")
@click.option(
    "--partition", "partitions", type=click.IntRange(min=0), multiple=True, help="Only this one; may be repeated."
)
@click.option("--since", type=FixedMoment(), help="Only what was appended at or after this time.")
@click.option("--until", type=FixedMoment(), help="Only what was appended before this time.")
@click.option(
    "--repartition", is_flag=True, help="Choose partitions by key again: for a target with another number of them."
)
@click.option("--into-itself", is_flag=True, help="Allow the archived topic itself as target.")
@command.servers_option
@command.timeout_option
@command.pipeline_options("replay")
def replay(
    topic: str,
    folder: Path,
    target: str | None,
    partitions: tuple[int, ...],
    since: datetime | None,
    until: datetime | None,
    repartition: bool,
    into_itself: bool,
    servers: str | None,
    timeout: float,
    job: Job,
) -> int:
    """Send what was archived of TOPIC again: the same messages, in the same partitions and order.

    Run the command again after an interruption, or when the archive has grown: it continues, and sends nothing twice.
    """
    if target is not None and not is_valid_name(target):
        raise click.BadParameter(f"{target!r} cannot be a topic: {NAME_RULE}.", param_hint="--to")
    choice = ReplayFilter(topic, tuple(sorted(set(partitions))), *command.parse_window(since, until))
    broker = command.resolve_broker(servers)
    wish = ReplayOptions(folder.resolve(), choice, broker, target or topic, timeout, repartition, into_itself)
    with Admin(broker, timeout=timeout) as admin, job.tasks() as tasks:
        outcome = ReplayRun(wish, admin, tasks).replay_new(partial(show_progress, job.output, f"replaying {topic}"))
    print_result(job, outcome)
    return 0


def print_result(job: Job, outcome: ReplayResult) -> None:
    if job.output.json:
        job.output.print_object({
            "archived": outcome.archived,
            "topic": outcome.topic,
            "messages": outcome.messages,
            "steps": outcome.steps,
            "steps_before": outcome.earlier_steps,
            "topic_made": outcome.topic_created,
        })  # fmt: skip
        return
    if not outcome.steps:
        what = "has all of it already" if outcome.earlier_steps else "has nothing to get: no messages are archived"
        job.output.info(f"{outcome.topic} {what}; nothing sent")
        return
    made = f"; the topic {outcome.topic} was created" if outcome.topic_created else ""
    went_on = "; resumed an interrupted run" if outcome.earlier_steps else ""
    job.output.info(f"{with_noun(outcome.messages, 'message')} sent to {outcome.topic}{made}{went_on}")


if __name__ == "__main__":
    command.run_and_exit(replay, "replay")
