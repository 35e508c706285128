"""`python -m tfmq.spark.pipelines.replay TOPIC --from FOLDER`: what was archived becomes messages again."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import click
import numpy as np
import pyarrow as pa

from tfmq.admin import Admin
from tfmq.arrow import partition_of
from tfmq.cli.output import counted
from tfmq.cli.values import Duration, Moment
from tfmq.client.connection.connection import SECONDS
from tfmq.errors import BadRequest, Damaged, TopicExists, UnknownTopic
from tfmq.limits import valid_name
from tfmq.protocol.commands import CommitMember
from tfmq.spark.pipelines import parquet_files
from tfmq.spark.pipelines.command import Job, broker_of, leave, pipeline_options
from tfmq.spark.pipelines.manifest import ArchiveFile, ArchiveFolder, Manifest
from tfmq.spark.pipelines.parquet_files import batches_of
from tfmq.spark.pipelines.spark_jobs import Done, Progress, SparkTasks
from tfmq.spark.settings import SinkSettings, group_name
from tfmq.spark.sink_task import GroupClient, Written, abort_run, verdict_of, write_rows

# Which files of an archive a replay sends in which step; the same each time, also when the archive has grown.
#
# Steps are numbered from 1. A step never spans two steps of the archive, so what is archived later adds steps behind
# those that were known. Within a step a partition's files are one part, sent in order.

STEP_BYTES: Final = 256 << 20
"""Of messages, about; one commit each. Not an option: other steps would be another replay."""


class Choice(NamedTuple):
    """What of an archived topic is meant: `partitions` (() all), append times in [`since_ms`, `until_ms`) (None: no
    bound).
    """

    topic: str
    partitions: tuple[int, ...] = ()
    since_ms: int | None = None
    until_ms: int | None = None

    def takes(self, file: ArchiveFile) -> bool:
        """Whether some of its rows may be meant."""
        return (
            (not self.partitions or file.partition in self.partitions)
            and (self.since_ms is None or file.last_ms >= self.since_ms)
            and (self.until_ms is None or file.first_ms < self.until_ms)
        )


class Part(NamedTuple):
    """What one task sends: files of one partition, in order of offsets."""

    partition: int
    files: tuple[ArchiveFile, ...]

    @property
    def log_bytes(self) -> int:
        return sum(each.log_bytes for each in self.files)


class Step(NamedTuple):
    """What one commit sends."""

    number: int
    parts: tuple[Part, ...]

    @property
    def log_bytes(self) -> int:
        return sum(each.log_bytes for each in self.parts)


def steps(manifests: Iterable[Manifest], choice: Choice, step_bytes: int = STEP_BYTES) -> Iterator[Step]:
    """All steps of a replay. `manifests`: of all of the archive's steps, in order.

    A topic that was made anew has its earlier life in earlier steps, also within one step of the archive.
    """
    number = 0
    for manifest in manifests:
        files = [each for each in manifest.files if choice.takes(each)]
        for incarnation in sorted({each.incarnation for each in files}):
            life = [each for each in files if each.incarnation == incarnation]
            for parts in _shared(life, step_bytes):
                number += 1
                yield Step(number, parts)


def _shared(files: list[ArchiveFile], step_bytes: int) -> Iterator[tuple[Part, ...]]:
    """Parts of one step after the other, with some of each partition."""
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
            parts.append(Part(partition, tuple(taken)))
            if not queue:
                del waiting[partition]
        yield tuple(parts)


def replay_name(archive_id: str, choice: Choice, node: str, topic: str, incarnation: int) -> str:
    """The name under which the broker knows how far a replay is: the same archive, choice and target, the same name."""
    asked = json.dumps([archive_id, *choice, node, topic, incarnation])
    return hashlib.sha256(asked.encode()).hexdigest()[:32]


# The course of a replay: step by step, files of an archive become messages of a topic, each step one commit.
#
# The broker remembers the last step of each replay as the sequence of a commit group. So a run asks how far the ones
# before it came, and one that dies anywhere leaves a step done or not done; what it had prepared goes with the next
# commit.

SENT: Final = ("value", "attributes", "partition")
"""Key and tag are in the attributes, as they were sent."""

OTHER_COUNT: Final = (
    "{topic} has {counted}, and the archived {archived} had {known}: messages would not keep their partitions."
    " Make a topic with {known} (tfmq topic create), or say --repartition, which keeps the order of each key only."
)
ITSELF: Final = (
    "The archive was made of this very topic {topic}: it would get its own messages a second time, behind the others."
    " Name another topic with --to, or say --into-itself if that is meant."
)
DELETED: Final = (
    "{topic} was deleted while messages were replayed into it: run it again, into the topic that is made."
)


class Wish(NamedTuple):
    """What is to be replayed, and where to."""

    folder: Path
    choice: Choice
    servers: str
    topic: str
    timeout: float
    repartition: bool = False
    into_itself: bool = False


class Target(NamedTuple):
    """The topic that gets the messages; `done`: the last step that it has."""

    group: str
    incarnation: int
    partitions: int
    done: int


@dataclass
class Outcome:
    """What a run did; `before`: steps that earlier runs had done."""

    archived: str
    topic: str
    steps: int = 0
    before: int = 0
    messages: int = 0
    made: bool = False

    def row(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "archived": self.archived,
            "topic": self.topic,
            "messages": self.messages,
            "steps": self.steps,
            "steps_before": self.before,
            "topic_made": self.made,
        }


class Runner(Protocol):
    """Runs the tasks of a step: `SparkTasks`, or `inline`."""

    def __call__(
        self, work: Callable[[Part], Done[Written]], items: Sequence[Part], progress: Progress, title: str
    ) -> list[Written]: ...


class Order(NamedTuple):
    """What a task needs to know besides its part. `partitions`: of the target, where keys choose anew; else 0."""

    folder: Path
    choice: Choice
    settings: SinkSettings
    member: CommitMember
    partitions: int


def replay_part(order: Order, part: Part) -> Done[Written]:
    """One task: read a part's files, send its rows, prepare them."""
    written = write_rows(order.settings, order.member, rows_of(order, part))
    return Done(written, written.rows, part.log_bytes)


def rows_of(order: Order, part: Part) -> Iterator[pa.RecordBatch]:
    """What is meant of its files, as the sink takes it. Raises Damaged, which names the file."""
    turn = part.partition
    for file in part.files:
        for batch in batches_of(order.folder, file):
            chosen = within(batch, order.choice)
            if order.partitions and chosen.num_rows:
                column = partition_of(chosen, order.partitions, turn % order.partitions)
                turn += chosen.num_rows
                index = chosen.schema.get_field_index("partition")
                chosen = chosen.set_column(index, "partition", column.cast(pa.int32()))
            yield chosen.select(SENT)


def within(batch: pa.RecordBatch, choice: Choice) -> pa.RecordBatch:
    """The rows that were appended in the time that is meant; times never go back in a partition."""
    if choice.since_ms is None and choice.until_ms is None:
        return batch
    times = batch.column("timestamp").cast(pa.int64()).to_numpy() // 1000
    start = 0 if choice.since_ms is None else int(np.searchsorted(times, choice.since_ms))
    end = len(times) if choice.until_ms is None else int(np.searchsorted(times, choice.until_ms))
    return batch.slice(start, max(0, end - start))


class Replaying:
    """One run of a replay."""

    def __init__(self, wish: Wish, admin: Admin, run: Runner) -> None:
        self._wish, self._admin, self._run = wish, admin, run
        self._archive = ArchiveFolder.opened(wish.folder)
        self.outcome = Outcome(wish.choice.topic, wish.topic)

    def course(self, begin_progress: Callable[[int], Progress]) -> Outcome:
        """All that is in the archive and not in the target. `begin_progress` gets the bytes that there are to do.

        Raises BadRequest, UnknownTopic (not archived), Damaged, and what the broker refuses.
        """
        manifests = self._manifests()
        last = manifests[-1]
        target = self._target(manifests, last)
        todo = [each for each in steps(manifests, self._wish.choice) if each.number > target.done]
        self.outcome.before = target.done
        self._require_files(todo)
        if todo:
            progress = begin_progress(sum(each.log_bytes for each in todo))
            for step in todo:
                self._step(target, step, progress)
        return self.outcome

    def _manifests(self) -> list[Manifest]:
        topic = self._wish.choice.topic
        found = [self._archive.manifest(topic, step) for step in self._archive.steps(topic)]
        if not found:
            there = ", ".join(self._archive.topics()) or "nothing yet"
            raise UnknownTopic(f"The archive {self._wish.folder} has no topic {topic!r}; it has {there}.")
        wrong = [each for each in self._wish.choice.partitions if each >= found[-1].plan.partitions]
        if wrong:
            raise BadRequest(
                f"The archived {topic} has partitions 0 to {found[-1].plan.partitions - 1}, not {wrong[0]}."
            )
        return found

    def _target(self, manifests: Sequence[Manifest], last: Manifest) -> Target:
        """The topic, made where it is not there, and how far it is."""
        wish, known = self._wish, last.plan.partitions
        node = str(self._admin.status().get("node", ""))
        try:
            topic = self._admin.topic(wish.topic)
        except UnknownTopic:
            topic = self._made(known)
        count = len(topic.partitions)
        if count != known and not wish.repartition:
            raise BadRequest(
                OTHER_COUNT.format(
                    topic=wish.topic,
                    counted=counted(count, "partition"),
                    archived=wish.choice.topic,
                    known=known,
                )
            )
        lives = {incarnation for incarnation, _ in last.ends}
        same = wish.topic == wish.choice.topic and last.plan.node == node and topic.incarnation in lives
        if same and not wish.into_itself:
            raise BadRequest(ITSELF.format(topic=wish.topic))
        name = replay_name(self._archive.id, wish.choice, node, wish.topic, topic.incarnation)
        group = group_name("replay", name)
        reached = [each.sequence for each in self._admin.commit_groups() if each.group == group]
        return Target(group, topic.incarnation, count, max(reached, default=0))

    def _made(self, partitions: int) -> Any:
        try:
            made = self._admin.create_topic(self._wish.topic, partitions)
        except TopicExists:
            return self._admin.topic(self._wish.topic)
        self.outcome.made = True
        return made

    def _require_files(self, todo: Sequence[Step]) -> None:
        """Before anything is sent: what is missing is told now. Raises Damaged."""
        for step in todo:
            for part in step.parts:
                for file in part.files:
                    if not (self._wish.folder / file.path).is_file():
                        raise Damaged(parquet_files.MISSING.format(folder=self._wish.folder, path=file.path))

    def _step(self, target: Target, step: Step, progress: Progress) -> None:
        wish = self._wish
        settings = SinkSettings(wish.servers, wish.topic, wish.timeout, lenient=True)
        member = CommitMember(target.group, step.number, uuid.uuid4().hex)
        partitions = target.partitions if wish.repartition else 0
        order = Order(wish.folder, wish.choice, settings, member, partitions)
        title = f"replay {wish.choice.topic}, step {step.number}"
        try:
            written = self._run(partial(replay_part, order), step.parts, progress, title)
            verdict = verdict_of(written)
            assert verdict is not None, "a step has parts"
            if self._admin.topic(wish.topic).incarnation != target.incarnation:
                raise UnknownTopic(DELETED.format(topic=wish.topic))
            with GroupClient(wish.servers, wish.timeout) as client:
                reply = client.commit(verdict)
        except BaseException:
            abort_run(settings, member)
            raise
        if reply.dropped:
            raise UnknownTopic(DELETED.format(topic=wish.topic))
        self.outcome.steps += 1
        self.outcome.messages += verdict.rows


EXAMPLES = """\b
Examples:
  python -m tfmq.spark.pipelines.replay orders --from /mnt/archive --servers other-broker:8367
  python -m tfmq.spark.pipelines.replay orders --from /mnt/archive --to orders-again --since 2026-11-01
"""


class FixedMoment(Moment):
    """A point in time that is the same in each run."""

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> datetime:
        if isinstance(value, str) and value[:1] in ("-", "+"):
            self.fail(
                f"{value!r} is another time in each run, and a run again would be another replay:"
                " write a date or time, as 2026-11-21T09:30+01:00",
                param,
                context,
            )
        return super().convert(value, param, context)


@click.command(epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("topic")
@click.option(
    "--from",
    "folder",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The archive's folder. On a cluster all executors see it.",
)
@click.option(
    "--to", "target", metavar="TOPIC", help="Into this topic, made if it is not there [the same name]."
)
@click.option(
    "--partition",
    "partitions",
    type=click.IntRange(min=0),
    multiple=True,
    help="Only this one; may be repeated.",
)
@click.option("--since", type=FixedMoment(), help="Only what was appended at or after this time.")
@click.option("--until", type=FixedMoment(), help="Only what was appended before this time.")
@click.option(
    "--repartition",
    is_flag=True,
    help="Keys choose partitions anew: for a target with another number of them.",
)
@click.option("--into-itself", is_flag=True, help="Into the very topic that was archived.")
@click.option(
    "--servers", metavar="HOST:PORT", help="The broker's address [$TFMQ_SERVERS, else 127.0.0.1:8367]."
)
@click.option(
    "--timeout",
    type=Duration(),
    default=SECONDS,
    show_default=True,
    help="How long a broker that is away is waited for.",
)
@pipeline_options("replay")
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

    Run it again after whatever stopped it, or when the archive has grown: it goes on, and sends nothing twice.
    """
    if target is not None and not valid_name(target):
        raise click.BadParameter("a topic's name is 1 to 249 of A-Z a-z 0-9 . _ -", param_hint="--to")
    if since is not None and until is not None and until <= since:
        raise click.BadParameter("is not behind --since", param_hint="--until")
    choice = Choice(topic, tuple(sorted(set(partitions))), in_ms(since), in_ms(until))
    broker = broker_of(servers)
    wish = Wish(folder.resolve(), choice, broker, target or topic, timeout, repartition, into_itself)
    with ExitStack() as stack:
        admin = stack.enter_context(Admin(broker, timeout=timeout))
        tasks = SparkTasks(lambda: stack.enter_context(job.spark()))
        replaying = Replaying(wish, admin, tasks)
        outcome = replaying.course(
            lambda total: stack.enter_context(job.progress(f"replaying {topic}", total))
        )
    tell(job, outcome)
    return 0


def in_ms(moment: datetime | None) -> int | None:
    return None if moment is None else round(moment.timestamp() * 1000)


def tell(job: Job, outcome: Outcome) -> None:
    """JSON, or a sentence."""
    if job.output.json:
        job.output.object(outcome.row())
        return
    if not outcome.steps:
        what = "has all of it already" if outcome.before else "gets nothing: nothing of it is archived"
        job.output.say(f"{outcome.topic} {what}; nothing sent")
        return
    made = f"; the topic {outcome.topic} was made" if outcome.made else ""
    went_on = "; went on where a run before was stopped" if outcome.before else ""
    job.output.say(f"{counted(outcome.messages, 'message')} sent to {outcome.topic}{made}{went_on}")


if __name__ == "__main__":
    leave(replay, "replay")
