"""Rows of the audit: how fast segments are proven and compared, Spark's start aside.

"By processor time" counts that of the JVM and its Python workers, so that busy neighbours do not count; the segments
lie in the page cache. Every job runs once before it is measured.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from pathlib import Path
from typing import Final

import tfmq
from journal.disk import RealDisk
from tfmq.spark.pipelines.audit import audit_folders
from tfmq.spark.pipelines.audit_check import check_piece
from tfmq.spark.pipelines.audit_plan import make_plan
from tfmq.spark.pipelines.spark_jobs import Progress
from tools.bench.figures import Figure, median, spread
from tools.bench.spark import Session, job, session
from tools.rigs import spark_session

TARGET: Final = 0.3
BYTES: Final = int(os.environ.get("TFMQ_BENCH_AUDIT_BYTES", 10**9))
BATCH: Final = 20_000
LARGEST: Final = b"y" * 200
SHAPES: Final = {"100 B": (80, 81), "20 to 180 B": (0, 161), "1 KB": (1000, 1001)}
"""What a topic holds: bounds of its payloads' sizes, the second excluded; a record has 20 bytes besides."""


def measure(runs: int, peers: bool) -> list[Figure]:
    """All rows; there is no peer."""
    with tempfile.TemporaryDirectory(prefix="tfmq-bench-audit-") as folder:
        places = {name: fill(Path(folder) / str(n), *bounds) for n, (name, bounds) in enumerate(SHAPES.items())}
        rows = [alone(name, place, runs) for name, place in places.items()]
        if reason := spark_session.missing():
            return [*rows, Figure("audit", "on Spark", float("nan"), "", note=reason)]
        with session() as spark:
            for name, place in places.items():
                rows += on_spark(spark, name, place, runs)
    return rows


def fill(data: Path, least: int, end: int) -> str:
    """A data folder with a topic of about BYTES."""
    source = random.Random(1)
    count = BYTES // ((least + end - 1) // 2 + 20)
    body = LARGEST * (end // len(LARGEST) + 1)
    with tfmq.local_server(data, settings={"topics.partitions": 2}) as servers, tfmq.Producer(servers) as producer:
        for _ in range(0, count, BATCH):
            producer.send_many("same", [body[: source.randrange(least, end)] for _ in range(BATCH)])
        producer.flush(600)
    return str(data)


def alone(name: str, data: str, runs: int) -> Figure:
    """What a task does, in this process."""
    disk = RealDisk()
    made = make_plan(disk, [data])
    size = sum(piece.size for piece in made.pieces)
    rates = []
    for run in range(runs + 1):
        begun = time.process_time()
        found = [check_piece(disk, made.logs[piece.log], piece, 0) for piece in made.pieces]
        if run:
            rates.append(size / (time.process_time() - begun) / 1e9)
        assert sum(each.bytes for each in found) == size
    return Figure(f"audit, {name}", "a task alone", median(rates), "GB/s a core", TARGET, note=spread(rates))


def on_spark(spark: Session, name: str, data: str, runs: int) -> list[Figure]:
    """The whole audit, all that is compared included."""
    sizes = []

    def work() -> None:
        result = audit_folders(spark.spark.sparkContext, [data], Progress("auditing", None))
        assert not result.findings
        sizes.append(result.bytes)

    clock, processor = ([sizes[0] / each / 1e9 for each in times] for times in job(spark, runs, work))
    return [
        Figure(f"audit, {name}", "on Spark, by processor time", median(processor), "GB/s a core", TARGET,
               note=spread(processor)),
        Figure(f"audit, {name}", "on Spark, by the clock, two tasks", median(clock), "GB/s", note=spread(clock)),
    ]  # fmt: skip
