"""Report pipeline: rates, sizes, latencies and retries of topics, as tables, pictures and a page.

    python -m tfmq.spark.pipelines.report orders --to /tmp/report

Spark reads the messages once and counts them in bins, for example of similar sizes; only the counts of the bins are
collected on the driver. docs/pipelines.md shows a report.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from tfmq.admin import Admin
from tfmq.arrow.decoder import Decoder
from tfmq.arrow.schema import project
from tfmq.cli.option_types import Moment
from tfmq.cli.output import size_text, with_noun
from tfmq.client.connection.addresses import parse_servers, without_password
from tfmq.dead_letters.admin import Desk
from tfmq.errors import BadRequest
from tfmq.message import BORN_AT
from tfmq.spark.log_reader import LogReader, SourceAddress, open_log_reader
from tfmq.spark.pipelines import command, report_render
from tfmq.spark.pipelines.archive import select_topics
from tfmq.spark.pipelines.archive_folder import create_output_folder
from tfmq.spark.pipelines.command import Job
from tfmq.spark.pipelines.reconcile import UNKNOWN, GroupPosition, read_group_positions
from tfmq.spark.pipelines.report_render import GroupLag, RateSample, TopicFigures, make_distribution, step_seconds
from tfmq.spark.pipelines.spark_jobs import find_tfmq_error, show_progress, watch_progress
from tfmq.spark.ranges import Bounds, OffsetRange, PartitionLog

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_group_lags(address: SourceAddress, topics: Sequence[str], now_ms: int) -> dict[str, list[GroupLag]]:
    """Return for each topic the lags of all groups that read it; {} if `address` is a data folder."""
    if address.servers is None:
        return {}
    with Admin(address.servers, timeout=address.timeout) as admin, open_log_reader(address) as logs:
        standings = [
            each for each in read_group_positions(admin, without_password(address.servers), ()) if each.topic in topics
        ]
        there = {(log.topic, log.partition): log for topic in topics for log in logs.partitions(topic)}
        found: dict[str, list[GroupLag]] = {}
        for topic, group in sorted({(each.topic, each.group) for each in standings}):
            mine = [each for each in standings if (each.topic, each.group) == (topic, group)]
            ages = [_oldest_age(logs, there[topic, each.partition], each, now_ms) for each in mine if each.lag > 0]
            found.setdefault(topic, []).append(combine_lags(group, [each.lag for each in mine], ages))
    return found


def combine_lags(group: str, lags: Sequence[int], ages: Sequence[float]) -> GroupLag:
    """Return the sum of a group's lags in a topic's partitions (-1 if a lag is unknown), and the highest of `ages`."""
    return GroupLag(group, UNKNOWN if min(lags) < 0 else sum(lags), max(ages, default=0.0))


def _oldest_age(logs: LogReader, log: PartitionLog, standing: GroupPosition, now_ms: int) -> float:
    """Return the age in seconds of the first message in `log` that a group has not consumed; 0 if there is none."""
    bounds = logs.bounds(log)
    start = logs.next_message_offset(log, max(bounds.first, standing.offset))
    if start >= bounds.end:
        return 0.0
    decoder = Decoder(log.topic, log.partition, log.log_id, project(("timestamp",)))
    for chunk in logs.read_blocks(OffsetRange(log, start, bounds.end), 1):
        rows = decoder.decode(chunk.data, chunk.offset, start)
        if len(rows):
            appended_us: int = rows.column("timestamp")[0].value
            return max(0.0, round(now_ms / 1000 - appended_us / 1e6, 3))
    return 0.0


def add_letters(figures: Iterable[TopicFigures], stores: Sequence[str], servers: str | None) -> Iterator[TopicFigures]:
    """Yield `figures` with the counts of dead letters in `stores` added. Raises TfmqError for a missing store."""
    calls: dict[str, Counter[int]] = {}
    states: dict[str, Counter[str]] = {}
    for store in stores:
        with Desk(store, servers) as desk:
            desk.check()
            for letter in desk.letters():
                calls.setdefault(letter.topic, Counter())[letter.calls] += 1
                states.setdefault(letter.topic, Counter())[letter.state] += 1
    for each in figures:
        yield each._replace(calls=dict(calls.get(each.topic, {})), letters=dict(states.get(each.topic, {})))


DAY_SECONDS: Final = 86_400
"""Append times are searched up to one day from now, because the broker's clock may be ahead of the local clock."""
SCHEMA: Final = "value binary, topic string, partition int, timestamp timestamp, attributes binary"
_BIRTH_TIME_SQL: Final = (
    f"CASE WHEN length(attributes) > 10 AND substring(attributes, 2, 2) = X'{BORN_AT:02X}CF'"
    " THEN try_cast(conv(hex(substring(attributes, 4, 8)), 16, 10) AS BIGINT) END"
)
"""SQL for the birth time in ms, or null. A birth time is first in the encoded attributes: map header, key, u64."""
MOMENT, SIZE, LATENCY, PARTITION, UNBORN, EARLY = "moment", "size", "latency", "partition", "unborn", "early"


class TimeRange(NamedTuple):
    """Append times from `since_ms` (inclusive) to `until_ms` (exclusive); None: no bound."""

    since_ms: int | None = None
    until_ms: int | None = None


def read_messages(session: SparkSession, address: SourceAddress, topics: Sequence[str], window: TimeRange) -> DataFrame:
    where: dict[str, str | None] = {"path": address.path}
    if address.servers is not None:
        where = {"servers": without_password(address.servers)}
        if (credentials := parse_servers(address.servers)[0].credentials) is not None:
            where["password"] = credentials.password
    options: dict[str, str | None] = {**where, "subscribe": ",".join(topics), "timeout": f"{address.timeout}s"}
    if window.since_ms is not None:
        options["startingTimestamp"] = str(window.since_ms)
        options["startingOffsetsByTimestampStrategy"] = "latest"
    if window.until_ms is not None:
        options["endingTimestamp"] = str(window.until_ms)
    frame: DataFrame = session.read.format("tfmq").schema(SCHEMA).options(**options).load()
    return frame


def estimate_span_seconds(logs: LogReader, topic: str, window: TimeRange, now_ms: int) -> int:
    """Return the approximate number of seconds between a topic's first and last append in `window`."""
    partitions = logs.partitions(topic)
    found = [
        _append_times(logs, log, bounds, now_ms)
        for log, bounds in zip(partitions, logs.all_bounds(partitions), strict=True)
    ]
    times = [each for each in found if each is not None]
    if not times:
        return 1
    first = max(min(first for first, _ in times), (window.since_ms or 0) // 1000)
    last = max(last for _, last in times)
    if window.until_ms is not None:
        last = min(last, window.until_ms // 1000)
    return max(1, last - first + 1)


def _append_times(logs: LogReader, log: PartitionLog, bounds: Bounds, now_ms: int) -> tuple[int, int] | None:
    """Return the times of the first and the last append (seconds since 1970); None if `log` has no messages."""
    if bounds.first == bounds.end:
        return None
    seconds = range(now_ms // 1000 + DAY_SECONDS)
    first = bisect_left(seconds, True, key=lambda at: logs.offset_at_time(log, 1000 * at) > bounds.first)
    last = bisect_left(seconds, True, key=lambda at: logs.offset_at_time(log, 1000 * at) >= bounds.end)
    return max(0, first - 1), max(0, last - 1)


def count_bins(frame: DataFrame, widths: Mapping[str, int]) -> DataFrame:
    """Count the messages of each topic in bins by append time, size, partition and latency.

    Returns a frame with a row per bin: topic, kind (for example SIZE), bin, number of messages, and least, most and
    total value. `widths`: topic -> seconds of a bin of append times.
    """
    from pyspark.sql import functions

    plain = frame.selectExpr(
        "topic",
        "partition",
        "unix_millis(timestamp) AS at",
        "CAST(coalesce(length(value), 0) AS BIGINT) AS size",
        f"{_BIRTH_TIME_SQL} AS born",
    )
    latency = f"""CASE WHEN born IS NULL THEN {_fact_sql(UNBORN, "0L", "0L")}
        WHEN at < born THEN {_fact_sql(EARLY, "0L", "0L")}
        ELSE {_fact_sql(LATENCY, _bin_sql("(at - born)"), "at - born")} END"""
    width = "CASE topic " + " ".join(f"WHEN '{topic}' THEN {width}L" for topic, width in widths.items()) + " END"
    facts = (
        _fact_sql(MOMENT, f"at DIV 1000 DIV ({width}) * ({width})", "size"),
        _fact_sql(SIZE, _bin_sql("size"), "size"),
        _fact_sql(PARTITION, "CAST(partition AS BIGINT)", "0L"),
        latency,
    )
    values = plain.selectExpr("topic", f"explode(array({', '.join(facts)})) AS fact")
    values = values.selectExpr("topic", "fact.what AS what", "fact.bin AS bin", "fact.value AS value")
    return values.groupBy("topic", "what", "bin").agg(
        functions.count("*").alias("count"),
        functions.min("value").alias("least"),
        functions.max("value").alias("most"),
        # The sum is a double: it is exact up to 2^53 and cannot overflow.
        functions.sum(functions.col("value").cast("double")).alias("total"),
    )


def _fact_sql(what: str, bin: str, value: str) -> str:
    return f"named_struct('what', '{what}', 'bin', {bin}, 'value', {value})"


def _bin_sql(value: str) -> str:
    return f"CAST(floor(log2({value} + 1) * {report_render.BINS_PER_DOUBLING}) AS BIGINT)"


def collect_figures(bins: DataFrame, widths: Mapping[str, int]) -> list[TopicFigures]:
    """Collect the bins on the driver, and return the figures of each topic."""
    rows = bins.collect()
    return [
        _topic_figures(topic, width, [row for row in rows if row["topic"] == topic]) for topic, width in widths.items()
    ]


def _topic_figures(topic: str, width: int, rows: Sequence[Any]) -> TopicFigures:
    def of(what: str) -> list[Any]:
        return [row for row in rows if row["what"] == what]

    def spread(what: str) -> Any:
        return make_distribution((row["count"], row["least"], row["most"], int(row["total"])) for row in of(what))

    return TopicFigures(
        topic,
        {row["bin"]: row["count"] for row in of(PARTITION)},
        tuple(sorted(RateSample(row["bin"], width, row["count"], int(row["total"])) for row in of(MOMENT))),
        spread(SIZE),
        spread(LATENCY),
        sum(row["count"] for row in of(UNBORN)),
        sum(row["count"] for row in of(EARLY)),
    )


PAGE_NAME: Final = "report.html"
FIGURES_NAME: Final = "report.json"
COLUMNS: Final = ("topic", "messages", "payload", "a_second", "peak", "size_p50", "size_p99", "latency_p50_ms",
                  "latency_p99_ms", "dead")  # fmt: skip


@click.command(
    context_settings=command.HELP,
    epilog="\b\nExample:\n  python -m tfmq.spark.pipelines.report orders payments --to /tmp/report",
)
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option(
    "--to",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write pictures and a page there; created if missing.",
)
@click.option("--all", "everything", is_flag=True, help="All topics.")
@click.option("--since", type=Moment(), help="Only messages appended at or after this time.")
@click.option("--until", type=Moment(), help="Only messages appended before this time.")
@click.option("--format", "kind", type=click.Choice(["png", "svg"]), default="png", show_default=True)
@click.option(
    "--dead-letters", "stores", metavar="STORE", multiple=True,
    help="A path, a SQLAlchemy URL or topic:NAME, as `dead_letters=` of a consumer; repeat for several.",
)  # fmt: skip
@command.address_options
@command.pipeline_options("report")
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
    command.check_topics(topics, everything)
    window = TimeRange(*command.parse_window(since, until))
    address = command.parse_address(servers, path, timeout)
    now_ms = round(time.time() * 1000)
    with open_log_reader(address) as logs:
        meant = select_topics(topics, logs)
        widths = {topic: step_seconds(estimate_span_seconds(logs, topic, window, now_ms)) for topic in meant}
        bounds = [each for topic in meant for each in logs.all_bounds(logs.partitions(topic))]
    if not meant:
        raise BadRequest("There are no topics yet.")
    for store in stores:
        with Desk(store, address.servers) as desk:
            desk.check()
    if folder is not None:
        create_output_folder(folder)
    figures = measure_topics(address, widths, window, sum(each.end - each.first for each in bounds), job)
    lags = read_group_lags(address, meant, now_ms)
    figures = [each._replace(groups=tuple(lags.get(each.topic, ()))) for each in figures]
    figures = list(add_letters(figures, stores, address.servers))
    if folder is not None:
        write_report(folder, figures, kind, address, now_ms)
    print_report(job, figures, folder)
    return 0


def measure_topics(
    address: SourceAddress, widths: Mapping[str, int], window: TimeRange, size_bytes: int, job: Job
) -> list[TopicFigures]:
    """Let Spark count the messages. `widths`: topic -> seconds of a time bin. Raises the TfmqError of a failed task."""
    with ExitStack() as stack:
        session = stack.enter_context(job.spark())
        progress = stack.enter_context(show_progress(job.output, "reading", size_bytes))
        stack.enter_context(watch_progress(session.sparkContext, progress))
        try:
            frame = read_messages(session, address, list(widths), window)
            return collect_figures(count_bins(frame, widths), widths)
        except Exception as error:
            if (ours := find_tfmq_error(error)) is not None:
                raise ours from None
            raise


def write_report(folder: Path, figures: Sequence[TopicFigures], kind: str, address: SourceAddress, now_ms: int) -> None:
    """Write a picture per topic, the HTML page, and the figures as JSON. Raises OSError."""
    drawn = {each.topic: report_render.draw_topic(each, kind) for each in figures}
    for topic, picture in drawn.items():
        (folder / f"{topic}.{kind}").write_bytes(picture)
    source = address.path or without_password(address.servers or "")
    (folder / PAGE_NAME).write_text(report_render.render_page(figures, drawn, kind, source, now_ms))
    (folder / FIGURES_NAME).write_text(json.dumps([each.to_json() for each in figures], indent=1) + "\n")


def print_report(job: Job, figures: Sequence[TopicFigures], folder: Path | None) -> None:
    if job.output.json:
        written = None if folder is None else str(folder)
        job.output.print_object({"topics": [each.to_json() for each in figures], "written": written})
        return
    rows = []
    for each in figures:
        row = each.to_json()
        rows.append({
            "topic": each.topic, "messages": each.messages, "payload": size_text(each.size_bytes),
            "a_second": row["messages_per_second"], "peak": row["peak_per_second"],
            "size_p50": row["size_bytes"]["p50"], "size_p99": row["size_bytes"]["p99"],
            "latency_p50_ms": row["latency_ms"]["p50"], "latency_p99_ms": row["latency_ms"]["p99"],
            "dead": each.letters.get("dead", 0),
        })  # fmt: skip
    job.output.print_rows(rows, COLUMNS, "")
    if folder is not None:
        job.output.info(f"{with_noun(len(figures), 'picture')}, {PAGE_NAME} and {FIGURES_NAME} are in {folder}")


if __name__ == "__main__":
    command.run_and_exit(report, "report")
