"""Messages of every kind for a topic, and what an archive or a topic holds, in a form that can be compared."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow.dataset

import tfmq
from tfmq.bounded_msgpack import unpack
from tfmq.client.consumer.message import utc_datetime
from tfmq.spark.log_reader import SourceAddress, open_log_reader
from tfmq.spark.pipelines.archive import ArchiveOptions, ArchiveResult, TopicArchiver
from tfmq.spark.pipelines.archive_folder import ArchiveFile, ArchiveFolder
from tfmq.spark.pipelines.parquet_files import read_batches
from tfmq.spark.pipelines.spark_jobs import Item, Progress, Result, TaskFailure, TaskResult, attempt

Row = tuple[Any, ...]
"""(offset, append time, id, key, tag, attributes, value), of one partition."""


def some(generator: random.Random, count: int) -> list[tfmq.Message]:
    """With and without key, tag, properties; tombstones, empty payloads, bytes that are no text."""
    keys: Sequence[Any] = (None, "k1", "schlüssel", b"\x00\xff", "k" * 300)
    return [
        tfmq.Message(
            payload=generator.choice((None, b"", generator.randbytes(generator.randrange(1, 400)))),
            key=generator.choice(keys),
            tag=generator.choice((None, "new", "größe")),
            properties=generator.choice(({}, {"n": str(generator.random()), "é": ""})),
        )
        for _ in range(count)
    ]


def send(servers: str, topic: str, messages: Sequence[tfmq.Message]) -> None:
    with tfmq.Producer(servers) as producer:
        for message in messages:
            producer.send(topic, message)
        producer.flush()


def in_topic(servers: str, topic: str) -> dict[int, list[tuple[Any, ...]]]:
    """Partition -> (offset, id, key, tag, properties, born, payload, append time) of its messages in order; of a topic
    that is not there, nothing.
    """
    left = count_of(servers, topic)
    found: dict[int, list[tuple[Any, ...]]] = {}
    with tfmq.Consumer(servers, topics=topic) as consumer:
        while left > 0:
            for each in consumer.poll(timeout=10.0, max_messages=10_000):
                left -= 1
                row = (each.offset, each.id, each.key, each.tag, dict(each.properties), each.born_at)
                found.setdefault(each.partition, []).append((*row, each.payload, each.appended_at))
    return {partition: sorted(rows) for partition, rows in sorted(found.items())}


def count_of(servers: str, topic: str) -> int:
    """How many messages it has; 0 of one that is not there."""
    with tfmq.Admin(servers) as admin:
        try:
            return admin.topic(topic).messages
        except tfmq.UnknownTopic:
            return 0


def require_same(servers: str, topic: str, copy: str, other: str | None = None) -> None:
    """The copy has the messages of the topic, no more and no fewer.
    `other`: the broker of the copy.
    """
    was = content(in_topic(servers, topic))
    assert content(arrived(other or servers, copy, sum(map(len, was.values())))) == was


def arrived(servers: str, topic: str, count: int) -> dict[int, list[tuple[Any, ...]]]:
    """`in_topic`, once it has so many messages; what is committed is applied soon, not at once."""
    deadline = time.monotonic() + 60
    while count_of(servers, topic) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    return in_topic(servers, topic)


def content(rows: dict[int, list[tuple[Any, ...]]]) -> dict[int, list[tuple[Any, ...]]]:
    """What a replay must give back of `in_topic`: all but offset, id and append time."""
    return {partition: [row[2:-1] for row in each] for partition, each in rows.items()}


def by_manifest(folder: Path, topic: str) -> dict[int, list[Row]]:
    """Partition -> its rows as the archive's own manifests have them, proven."""
    archive = ArchiveFolder.open(folder)
    files: list[ArchiveFile] = []
    for step in archive.steps(topic):
        files += archive.manifest(topic, step).files
    found: dict[int, list[Row]] = {}
    for file in files:
        for batch in read_batches(folder, file):
            rows = batch.to_pylist()
            assert {row["partition"] for row in rows} == {file.partition}
            found.setdefault(file.partition, []).extend(map(as_row, rows))
    return dict(sorted(found.items()))


def as_row(row: dict[str, Any]) -> Row:
    return tuple(row[name] for name in ("offset", "timestamp", "id", "key", "tag", "attributes", "value"))


def by_listing(folder: Path) -> dict[int, list[Row]]:
    """The same as any reader of Parquet sees it, who knows nothing of manifests; by offset."""
    table = pyarrow.dataset.dataset(folder, format="parquet", partitioning="hive").to_table()
    found: dict[int, list[Row]] = {}
    for row in table.to_pylist():
        assert f"{row['timestamp']:%Y-%m-%d}" == row["date"] and row["timestamp"].hour == row["hour"]
        found.setdefault(row["partition"], []).append(as_row(row))
    return {partition: sorted(rows, key=lambda row: row[0]) for partition, rows in sorted(found.items())}


def as_sent(rows: dict[int, list[Row]]) -> dict[int, list[tuple[Any, ...]]]:
    """Archived rows in the form of `in_topic`."""
    found: dict[int, list[tuple[Any, ...]]] = {}
    for partition, each in rows.items():
        found[partition] = []
        for offset, appended, number, key, tag, attributes, value in each:
            names = unpack(attributes, text_keys=False) if attributes else {}
            written_key = names.get(2)
            text = written_key.encode() if isinstance(written_key, str) else written_key
            assert (key, tag) == (text, names.get(3))
            row = (offset, number, names.get(2), tag, names.get(4, {}), born(names.get(1)))
            found[partition].append((*row, value, appended))
    return found


def born(ms: int | None) -> Any:
    return None if ms is None else utc_datetime(ms)


def run_inline(
    work: Callable[[Item], TaskResult[Result]], items: Sequence[Item], progress: Progress, title: str
) -> list[Result]:
    """Run the tasks in this thread, without Spark; otherwise as a `SparkTaskRunner`."""
    results = []
    for item in items:
        done = attempt(work, item)
        if isinstance(done, TaskFailure):
            raise done.to_error()
        progress.add(done.rows, done.size_bytes)
        results.append(done.result)
    return results


def archived(
    folder: Path, topic: str, address: SourceAddress, run: Callable[..., Any] = run_inline, **wishes: Any
) -> ArchiveResult:
    """One run of the archive in this process, without Spark where `run` is not one of it."""
    wish = ArchiveOptions(address, folder, **wishes)
    with open_log_reader(address) as logs:
        return TopicArchiver(wish, topic, logs, run).archive_new(lambda total: nullcontext(Progress(topic, total)))
