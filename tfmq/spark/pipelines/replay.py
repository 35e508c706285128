"""`python -m tfmq.spark.pipelines.replay TOPIC --from FOLDER`: what was archived becomes messages again."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from tfmq.admin import Admin
from tfmq.cli.output import counted
from tfmq.cli.values import Duration, Moment
from tfmq.client.connection.connection import SECONDS
from tfmq.limits import valid_name
from tfmq.spark.pipelines.address import broker_of
from tfmq.spark.pipelines.command import Job, leave, pipeline_options
from tfmq.spark.pipelines.replay_plan import Choice
from tfmq.spark.pipelines.replaying import Outcome, Replaying, Wish
from tfmq.spark.pipelines.tasks import SparkTasks

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
