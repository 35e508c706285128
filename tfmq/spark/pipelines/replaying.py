"""The course of a replay: step by step, files of an archive become messages of a topic, each step one commit.

The broker remembers the last step of each replay as the sequence of a commit group. So a run asks how far the ones
before it came, and one that dies anywhere leaves a step done or not done; what it had prepared goes with the next
commit.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from tfmq.admin import Admin
from tfmq.arrow import partition_of
from tfmq.cli.output import counted
from tfmq.errors import BadRequest, Damaged, TopicExists, UnknownTopic
from tfmq.protocol.commands import CommitMember
from tfmq.spark.group_commit import GroupClient
from tfmq.spark.pipelines import archive_files
from tfmq.spark.pipelines.archive_files import batches_of
from tfmq.spark.pipelines.manifest import ArchiveFolder, Manifest
from tfmq.spark.pipelines.progress import Progress
from tfmq.spark.pipelines.replay_plan import Choice, Part, Step, replay_name, steps
from tfmq.spark.pipelines.tasks import Done
from tfmq.spark.sink_settings import SinkSettings, group_name
from tfmq.spark.task_writing import Written, abort_run, verdict_of, write_rows

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
                        raise Damaged(archive_files.MISSING.format(folder=self._wish.folder, path=file.path))

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
