"""report: rates, sizes, latencies and retries of topics, as tables, pictures and one page.

    python -m tfmq.spark.pipelines.report orders --to /tmp/report

docs/pipelines.md shows one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Final

import click

from tfmq.cli.output import counted, size_text
from tfmq.cli.values import Moment
from tfmq.errors import BadRequest
from tfmq.spark.logs import Address, open_logs
from tfmq.spark.pipelines.address import address_of, address_options
from tfmq.spark.pipelines.archive import named
from tfmq.spark.pipelines.command import Job, check_topics, leave, pipeline_options
from tfmq.spark.pipelines.durable import make_named
from tfmq.spark.pipelines.report_figures import TopicFigures, width_of
from tfmq.spark.pipelines.report_groups import check_stores, lags, with_letters
from tfmq.spark.pipelines.report_page import page
from tfmq.spark.pipelines.report_plot import pictures
from tfmq.spark.pipelines.report_query import Window, bins_of, figures_of, read, span_seconds
from tfmq.spark.pipelines.spark_errors import error_in
from tfmq.spark.pipelines.watching import watched

PAGE: Final = "report.html"
FIGURES: Final = "report.json"
COLUMNS: Final = ("topic", "messages", "payload", "a_second", "peak", "size_p50", "size_p99", "latency_p50_ms",
                  "latency_p99_ms", "dead")  # fmt: skip


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nExample:\n  python -m tfmq.spark.pipelines.report orders payments --to /tmp/report",
)
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option(
    "--to",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write pictures and a page there; it is made.",
)
@click.option("--all", "everything", is_flag=True, help="All topics that are there.")
@click.option("--since", type=Moment(), help="Only messages appended from then on.")
@click.option("--until", type=Moment(), help="Only messages appended before.")
@click.option("--format", "kind", type=click.Choice(["png", "svg"]), default="png", show_default=True)
@click.option(
    "--dead-letters", "stores", metavar="STORE", multiple=True,
    help="A path, a SQLAlchemy URL or topic:NAME, as `dead_letters=` of a consumer; several by repeating it.",
)  # fmt: skip
@address_options
@pipeline_options("report")
def report(
    topics: tuple[str, ...],
    folder: Path | None,
    everything: bool,
    since: datetime | None,
    until: datetime | None,
    kind: str,
    stores: tuple[str, ...],
    servers: str | None,
    path: Path | None,
    timeout: float,
    job: Job,
) -> int:
    """Report rates, sizes, latencies, lags and retries of TOPICs."""
    check_topics(topics, everything)
    if since is not None and until is not None and until <= since:
        raise click.BadParameter("is not behind --since", param_hint="--until")
    address = address_of(servers, path, timeout)
    window = Window(*(None if each is None else round(each.timestamp() * 1000) for each in (since, until)))
    now_ms = round(time.time() * 1000)
    with open_logs(address) as logs:
        meant = named(topics, logs)
        widths = {topic: width_of(span_seconds(logs, topic, window, now_ms)) for topic in meant}
        bounds = [each for topic in meant for each in logs.all_bounds(logs.partitions(topic))]
    if not meant:
        raise BadRequest("There are no topics yet.")
    check_stores(stores, address.servers)
    if folder is not None:
        make_named(folder)
    figures = measured(address, widths, window, sum(each.end - each.first for each in bounds), job)
    behind = lags(address, meant, now_ms)
    figures = [each._replace(groups=tuple(behind.get(each.topic, ()))) for each in figures]
    figures = list(with_letters(figures, stores, address.servers))
    if folder is not None:
        write(folder, figures, kind, address, now_ms)
    tell(job, figures, folder)
    return 0


def measured(
    address: Address, widths: Mapping[str, int], window: Window, size_bytes: int, job: Job
) -> list[TopicFigures]:
    """What the messages say, counted by Spark; `widths` by topic. Raises the source's errors."""
    with ExitStack() as stack:
        session = stack.enter_context(job.spark())
        progress = stack.enter_context(job.progress("reading", size_bytes))
        stack.enter_context(watched(session.sparkContext, progress))
        try:
            frame = read(session, address, list(widths), window)
            return figures_of(bins_of(frame, widths), widths)
        except Exception as error:
            if (ours := error_in(error)) is not None:
                raise ours from None
            raise


def write(folder: Path, figures: Sequence[TopicFigures], kind: str, address: Address, now_ms: int) -> None:
    """Into the folder: a picture a topic, the page, and the figures as JSON. Raises OSError."""
    drawn = pictures(figures, kind)
    for topic, picture in drawn.items():
        (folder / f"{topic}.{kind}").write_bytes(picture)
    source = address.servers or address.path or ""
    (folder / PAGE).write_text(page(figures, drawn, kind, source, now_ms))
    (folder / FIGURES).write_text(json.dumps([each.row() for each in figures], indent=1) + "\n")


def tell(job: Job, figures: Sequence[TopicFigures], folder: Path | None) -> None:
    """JSON, or a table and what was written."""
    if job.output.json:
        written = None if folder is None else str(folder)
        job.output.object({"topics": [each.row() for each in figures], "written": written})
        return
    rows = []
    for each in figures:
        row = each.row()
        rows.append({
            "topic": each.topic, "messages": each.messages, "payload": size_text(each.size_bytes),
            "a_second": row["messages_per_second"], "peak": row["peak_per_second"],
            "size_p50": row["size_bytes"]["p50"], "size_p99": row["size_bytes"]["p99"],
            "latency_p50_ms": row["latency_ms"]["p50"], "latency_p99_ms": row["latency_ms"]["p99"],
            "dead": each.letters.get("dead", 0),
        })  # fmt: skip
    job.output.rows(rows, COLUMNS, "")
    if folder is not None:
        job.output.say(f"{counted(len(figures), 'picture')}, {PAGE} and {FIGURES} are in {folder}")


if __name__ == "__main__":
    leave(report, "report")
