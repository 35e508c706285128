"""What Spark counts for a report: one pass over topics through the source "tfmq", into bins; only these come back."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tfmq.message import BORN_AT
from tfmq.spark.logs import Address, Logs
from tfmq.spark.pipelines.report_figures import BINS_PER_DOUBLING, Moment, TopicFigures, spread_of
from tfmq.spark.ranges import Bounds, PartitionLog

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DAY_SECONDS: Final = 86_400
"""A broker's clock may be ahead of ours."""
SCHEMA: Final = "value binary, topic string, partition int, timestamp timestamp, attributes binary"
_BORN: Final = (
    f"CASE WHEN length(attributes) > 10 AND substring(attributes, 2, 2) = X'{BORN_AT:02X}CF'"
    " THEN try_cast(conv(hex(substring(attributes, 4, 8)), 16, 10) AS BIGINT) END"
)
"""An attribute begins with when it was born, where it says so: a map's head, the key, a u64. docs/protocol.md. Null
where that is more than any time."""
MOMENT, SIZE, LATENCY, PARTITION, UNBORN, EARLY = "moment", "size", "latency", "partition", "unborn", "early"


class Window(NamedTuple):
    """Append times from `since_ms` on and before `until_ms`; None: no bound."""

    since_ms: int | None = None
    until_ms: int | None = None


def read(session: SparkSession, address: Address, topics: Sequence[str], window: Window) -> DataFrame:
    """The topics' messages, as far as a report looks at them."""
    where = {"servers": address.servers} if address.servers is not None else {"path": address.path}
    options: dict[str, str | None] = {
        **where,
        "subscribe": ",".join(topics),
        "timeout": f"{address.timeout}s",
    }
    if window.since_ms is not None:
        options["startingTimestamp"] = str(window.since_ms)
        options["startingOffsetsByTimestampStrategy"] = "latest"
    if window.until_ms is not None:
        options["endingTimestamp"] = str(window.until_ms)
    frame: DataFrame = session.read.format("tfmq").schema(SCHEMA).options(**options).load()
    return frame


def span_seconds(logs: Logs, topic: str, window: Window, now_ms: int) -> int:
    """About how many seconds lie between a topic's first and last append within the window."""
    partitions = logs.partitions(topic)
    found = [
        _ends(logs, log, bounds, now_ms)
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


def _ends(logs: Logs, log: PartitionLog, bounds: Bounds, now_ms: int) -> tuple[int, int] | None:
    """(s since 1970 of the first append, of the last), to the second; None of a partition with nothing in it."""
    if bounds.first == bounds.end:
        return None
    seconds = range(now_ms // 1000 + DAY_SECONDS)
    first = bisect_left(seconds, True, key=lambda at: logs.at_time(log, 1000 * at) > bounds.first)
    last = bisect_left(seconds, True, key=lambda at: logs.at_time(log, 1000 * at) >= bounds.end)
    return max(0, first - 1), max(0, last - 1)


def bins_of(frame: DataFrame, widths: Mapping[str, int]) -> DataFrame:
    """A row a bin: topic, what is counted, the bin, how many, the least, the most and the total value. `widths`:
    seconds of a moment, by topic."""
    plain = frame.selectExpr(
        "topic",
        "partition",
        "unix_millis(timestamp) AS at",
        "CAST(coalesce(length(value), 0) AS BIGINT) AS size",
        f"{_BORN} AS born",
    )
    latency = f"""CASE WHEN born IS NULL THEN {_fact(UNBORN, "0L", "0L")}
        WHEN at < born THEN {_fact(EARLY, "0L", "0L")}
        ELSE {_fact(LATENCY, _bin("(at - born)"), "at - born")} END"""
    width = (
        "CASE topic " + " ".join(f"WHEN '{topic}' THEN {width}L" for topic, width in widths.items()) + " END"
    )
    facts = (
        _fact(MOMENT, f"at DIV 1000 DIV ({width}) * ({width})", "size"),
        _fact(SIZE, _bin("size"), "size"),
        _fact(PARTITION, "CAST(partition AS BIGINT)", "0L"),
        latency,
    )
    values = plain.selectExpr("topic", f"explode(array({', '.join(facts)})) AS fact")
    values = values.selectExpr("topic", "fact.what AS what", "fact.bin AS bin", "fact.value AS value")
    return values.groupBy("topic", "what", "bin").agg(*_sums())


def _sums() -> list[Any]:
    from pyspark.sql import functions

    return [
        functions.count("*").alias("count"),
        functions.min("value").alias("least"),
        functions.max("value").alias("most"),
        functions.sum(functions.col("value").cast("double")).alias(
            "total"
        ),  # exact up to 2^53, and no overflow
    ]


def _fact(what: str, bin: str, value: str) -> str:
    return f"named_struct('what', '{what}', 'bin', {bin}, 'value', {value})"


def _bin(value: str) -> str:
    return f"CAST(floor(log2({value} + 1) * {BINS_PER_DOUBLING}) AS BIGINT)"


def figures_of(bins: DataFrame, widths: Mapping[str, int]) -> list[TopicFigures]:
    """What the bins add up to, a topic each."""
    rows = bins.collect()
    return [
        _figures(topic, width, [row for row in rows if row["topic"] == topic])
        for topic, width in widths.items()
    ]


def _figures(topic: str, width: int, rows: Sequence[Any]) -> TopicFigures:
    def of(what: str) -> list[Any]:
        return [row for row in rows if row["what"] == what]

    def spread(what: str) -> Any:
        return spread_of((row["count"], row["least"], row["most"], int(row["total"])) for row in of(what))

    return TopicFigures(
        topic,
        {row["bin"]: row["count"] for row in of(PARTITION)},
        tuple(sorted(Moment(row["bin"], width, row["count"], int(row["total"])) for row in of(MOMENT))),
        spread(SIZE),
        spread(LATENCY),
        sum(row["count"] for row in of(UNBORN)),
        sum(row["count"] for row in of(EARLY)),
    )
