"""`python -m tfmq.spark.pipelines.archive TOPIC... --to FOLDER`: topics become Parquet files by date and hour."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from tfmq.cli.output import counted, did_you_mean, size_text
from tfmq.cli.values import Moment
from tfmq.errors import UnknownTopic
from tfmq.spark.logs import Logs, open_logs
from tfmq.spark.pipelines.address import address_of, address_options
from tfmq.spark.pipelines.archiving import PIECE_BYTES, STEP_BYTES, Archiving, Outcome, Wish
from tfmq.spark.pipelines.command import Job, check_topics, leave, pipeline_options
from tfmq.spark.pipelines.hour_files import COMPRESSIONS
from tfmq.spark.pipelines.planning import ON_LOSS
from tfmq.spark.pipelines.sizes import Size
from tfmq.spark.pipelines.tasks import SparkTasks

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
    help="The archive's folder; it is made. On a cluster all executors see it.",
)
@click.option("--all", "everything", is_flag=True, help="All topics that are there.")
@click.option("--since", type=Moment(), help="A partition that was never archived begins here [all].")
@click.option(
    "--on-loss",
    type=click.Choice(ON_LOSS),
    default="stop",
    show_default=True,
    help="Where retention took messages that were not archived: stop, or note the gap and go on.",
)
@click.option(
    "--verify",
    type=click.Choice(["chunk", "message"]),
    default="chunk",
    show_default=True,
    help="Prove the checksums of blocks, or of each message, too.",
)
@click.option("--compression", type=click.Choice(COMPRESSIONS), default="zstd", show_default=True)
@click.option(
    "--file-bytes",
    type=Size(),
    default=PIECE_BYTES,
    help="So much of a log goes into one file, at most about [64 MiB].",
)
@click.option(
    "--step-bytes", type=Size(), default=STEP_BYTES, help="After so much, what is done is kept [4 GiB]."
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

    Run it again for what is new; after a kill at any point it goes on and makes the same files.
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
    """The topics that are meant, each once. Raises UnknownTopic."""
    there = logs.topics()
    for name in topics:
        if name not in there:
            raise UnknownTopic(f"There is no topic {name!r}.{did_you_mean(name, there)}")
    return list(dict.fromkeys(topics)) or there


def archived(job: Job, wish: Wish, topic: str, logs: Logs, tasks: SparkTasks) -> Outcome:
    """One topic, with its progress shown."""
    with ExitStack() as stack:
        return Archiving(wish, topic, logs, tasks).course(
            lambda total: stack.enter_context(job.progress(f"archiving {topic}", total))
        )


def tell(job: Job, folder: Path, outcomes: Sequence[Outcome]) -> None:
    """JSON, or a sentence a topic."""
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
            f" {size_text(each.size_bytes)}{'; went on where a run before was stopped' if each.resumed else ''}"
        )
        for gap in each.gaps:
            job.output.say(
                f"{each.topic}: partition {gap.partition} has a gap, offsets {gap.start:,} to {gap.end:,}"
            )


if __name__ == "__main__":
    leave(archive, "archive")
