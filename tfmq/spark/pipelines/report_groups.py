"""What a report tells besides the messages: how far groups are behind, and how often dead letters were handled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from tfmq.admin import Admin
from tfmq.arrow.decoder import Decoder
from tfmq.arrow.schema import project
from tfmq.dead_letters.admin import Desk
from tfmq.spark.logs import Address, Logs, open_logs
from tfmq.spark.pipelines.reconcile import standings_of
from tfmq.spark.pipelines.reconcile_rows import UNKNOWN, Standing
from tfmq.spark.pipelines.report_figures import GroupLag, TopicFigures
from tfmq.spark.ranges import PartitionLog, Range


def lags(address: Address, topics: Sequence[str], now_ms: int) -> dict[str, list[GroupLag]]:
    """By topic, of every group with a place in it; {} for a folder, which has no broker that knows groups."""
    if address.servers is None:
        return {}
    with Admin(address.servers, timeout=address.timeout) as admin, open_logs(address) as logs:
        standings = [each for each in standings_of(admin, address.servers, ()) if each.topic in topics]
        there = {(log.topic, log.partition): log for topic in topics for log in logs.partitions(topic)}
        found: dict[str, list[GroupLag]] = {}
        for topic, group in sorted({(each.topic, each.group) for each in standings}):
            mine = [each for each in standings if (each.topic, each.group) == (topic, group)]
            ages = [_age(logs, there[topic, each.partition], each, now_ms) for each in mine if each.lag > 0]
            found.setdefault(topic, []).append(together(group, [each.lag for each in mine], ages))
    return found


def together(group: str, lags: Sequence[int], ages: Sequence[float]) -> GroupLag:
    """Of all partitions of a topic: where one cannot be told (-1), nobody knows the sum."""
    return GroupLag(group, UNKNOWN if min(lags) < 0 else sum(lags), max(ages, default=0.0))


def _age(logs: Logs, log: PartitionLog, standing: Standing, now_ms: int) -> float:
    """Seconds since the first message that a group has not consumed was appended; 0 where there is none to be read."""
    bounds = logs.bounds(log)
    start = logs.at_or_after(log, max(bounds.first, standing.offset))
    if start >= bounds.end:
        return 0.0
    decoder = Decoder(log.topic, log.partition, log.log_id, project(("timestamp",)))
    for chunk in logs.chunks(Range(log, start, bounds.end), 1):
        rows = decoder.decode(chunk.data, chunk.offset, start)
        if len(rows):
            appended_us: int = rows.column("timestamp")[0].value
            return max(0.0, round(now_ms / 1000 - appended_us / 1e6, 3))
    return 0.0


def check_stores(stores: Sequence[str], servers: str | None) -> None:
    """Raises TfmqError for one that is not there."""
    for store in stores:
        with Desk(store, servers) as desk:
            desk.check()


def with_letters(
    figures: Iterable[TopicFigures], stores: Sequence[str], servers: str | None
) -> Iterator[TopicFigures]:
    """The same with the dead letters of these stores. Raises TfmqError where there is no store."""
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
