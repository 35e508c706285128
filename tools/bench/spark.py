"""Rows of Spark: batch reads and writes, the latency of an idle stream, and what all that costs as a topic grows.

One JVM with local[2], one broker, this program: all on the same cores. "Per core" divides by processor time, that of
the JVM and its Python workers, so that a busy neighbour does not count; the rate by the clock stands beside it. Every
job runs once before it is measured.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import tfmq
from tools.bench.broker import TICKS_PER_SECOND, Broker, broker
from tools.bench.figures import Figure, median, percentile, spread
from tools.rigs import spark_session

COUNT = 4_000_000
PAYLOAD = b"x" * 100
PER_CORE_TARGET = 1e6
LOOK_SECONDS = 0.1
LATENCIES = 30
"""How many messages, one after the other."""
WAIT_SECONDS = 120.0
GROWN_BYTES = (10**8, 10**9, 10**10)
"""How large the topic is whose end is read."""
GROWING = b"y" * 10_000
TAIL = 1_000
FLAT_TARGET = 1.25

SETTINGS = {"spark.driver.memory": "2g"}


class Session:
    """A Spark of its own, and how much processor time it has used. Nobody waits for its workers, so what they have used
    is gone with them: it is looked at all the time."""

    def __init__(self, folder: Path) -> None:
        self._used: dict[tuple[int, str], int] = {}
        """Ticks of each process, by its id and when it began; ended ones stay."""
        self._ended = threading.Event()
        self._lock = threading.Lock()
        options = spark_session.settings(folder)["spark.driver.extraJavaOptions"]
        quick = options.replace("-XX:TieredStopAtLevel=1", "")
        self.spark = spark_session.start(folder, "local[2]", {**SETTINGS, "spark.driver.extraJavaOptions": quick})

    def read(self, **options: Any) -> Any:
        return self.spark.read.format("tfmq").options(**options)

        threading.Thread(target=self._watch, daemon=True).start()

    def stop(self) -> None:
        self._ended.set()
        self.spark.stop()

    def processor_seconds(self) -> float:
        """Of all processes below this one but brokers: the JVM and its Python workers, ended ones too, but for what
        they used in their last moment.
        """
        with self._lock:
            self._look()
            return sum(self._used.values()) / TICKS_PER_SECOND

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            with self._lock:
                self._look()

    def _look(self) -> None:
        stats = dict(_stats())
        ours = {os.getpid()}
        while more := {each for each, stat in stats.items() if int(stat[1]) in ours} - ours:
            ours |= more
        for each in ours - {os.getpid()}:
            if "tfmq.server" not in _command(each):
                self._used[each, stats[each][19]] = sum(map(int, stats[each][11:13]))


def _stats() -> Iterator[tuple[int, list[str]]]:
    """(process, the fields of its stat behind the name) of all that live."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            yield int(path.name), (path / "stat").read_text().rpartition(")")[2].split()


def _command(process: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
    return ""


@contextmanager
def session() -> Iterator[Session]:
    with tempfile.TemporaryDirectory(prefix="tfmq-bench-spark-") as folder:
        found = Session(Path(folder))
        try:
            yield found
        finally:
            found.stop()


def measure(runs: int, peers: bool) -> list[Figure]:
    """All rows; there is no peer."""
    if reason := spark_session.missing():
        return [Figure("spark", "-", float("nan"), "", note=reason)]
    with session() as spark, broker("topics.partitions=2", "topics.auto_create=true") as server:
        fill(server, "same", PAYLOAD, COUNT)
        rows = reads(spark, server, runs) + writes(spark, server, runs)
        rows += latency(spark, server)
    with session() as spark, broker("topics.auto_create=true") as server:
        rows += growth(spark, server, runs)
    return rows


def fill(server: Broker, topic: str, payload: bytes, count: int) -> None:
    with tfmq.Producer(server.address, selector="round_robin") as producer:
        for first in range(0, count, 100_000):
            producer.send_many(topic, [payload] * min(100_000, count - first))
        producer.flush(600)


def job(spark: Session, runs: int, work: Callable[[], object]) -> tuple[list[float], list[float]]:
    """(seconds by the clock, processor seconds) of each run but the first."""
    clock, processor = [], []
    for run in range(runs + 1):
        used, begun = spark.processor_seconds(), time.perf_counter()
        work()
        if run:
            clock.append(time.perf_counter() - begun)
            processor.append(spark.processor_seconds() - used)
    return clock, processor


def rates(row: str, who: str, count: int, times: tuple[list[float], list[float]]) -> list[Figure]:
    clock, processor = ([count / each for each in some] for some in times)
    target = PER_CORE_TARGET
    return [
        Figure(row, f"{who}, by processor time", median(processor), "rec/s a core", target, note=spread(processor)),
        Figure(row, f"{who}, by the clock, two tasks", median(clock), "rec/s", note=spread(clock)),
    ]


def reads(spark: Session, server: Broker, runs: int) -> list[Figure]:
    """The whole topic into Spark's columns, which a sink that does nothing takes."""
    every = "value binary, partition int, offset bigint, timestamp timestamp"
    places = {"over the wire": {"servers": server.address}, "from the folder": {"path": str(server.data)}}
    rows: list[Figure] = []
    for who, place in places.items():
        for name, schema in (("value", "value binary"), ("value, place and time", every)):
            frame = spark.read(**place, subscribe="same").schema(schema).load()
            assert frame.count() == COUNT
            times = job(spark, runs, frame.write.format("noop").mode("overwrite").save)
            rows += rates(f"Spark reads 100 B, {name}", who, COUNT, times)
    return rows


def writes(spark: Session, server: Broker, runs: int) -> list[Figure]:
    made = spark.spark.range(0, COUNT, 1, 2).selectExpr("id", f"X'{PAYLOAD.hex()}' value")
    keyed = made.selectExpr("value", "cast(id as string) key")
    made = made.select("value")
    alone = job(spark, runs, made.write.format("noop").mode("overwrite").save)
    rows = [Figure("Spark makes 100 B", "by processor time", COUNT / median(alone[1]), "rec/s a core")]
    for number, (name, frame) in enumerate((("", made), (", a key each", keyed))):
        writer = frame.write.format("tfmq").mode("append").option("servers", server.address)
        times = job(spark, runs, writer.option("topic", f"out{number}").save)
        rows += rates(f"Spark writes 100 B{name}", "exactly once, synced", COUNT, times)
    return rows


def latency(spark: Session, server: Broker) -> list[Figure]:
    """From a message that is sent, while the stream has nothing to do, to its copy in the hand of a consumer."""
    times, batches = echoes(spark, server, LATENCIES)
    row = "a message through an idle stream, topic to topic"
    return [
        Figure(row, "p50", median(times) * 1000, "ms"),
        Figure(row, "p99", percentile(times, 99) * 1000, "ms"),
        Figure(row, "of it the micro-batch, p50", median([each["triggerExecution"] for each in batches]), "ms"),
        Figure(row, "of it asking for the end, p50", median([each["latestOffset"] for each in batches]), "ms"),
    ]


def echoes(
    spark: Session, server: Broker, count: int, topic: str = "asked", start: str = "latest"
) -> tuple[list[float], list[dict[str, int]]]:
    """(seconds of each echo, `durationMs` of each micro-batch that had one); the first three do not count."""
    with (
        tempfile.TemporaryDirectory(prefix="tfmq-bench-checkpoint-") as folder,
        tfmq.Producer(server.address) as producer,
    ):
        producer.send(topic, b"first").result()
        producer.send(f"{topic}-out", b"first").result()
        stream = spark.spark.readStream.format("tfmq").schema("value binary")
        stream = stream.options(servers=server.address, subscribe=topic, startingOffsets=start)
        writer = stream.load().writeStream.format("tfmq").option("checkpointLocation", folder)
        query = writer.options(servers=server.address, topic=f"{topic}-out").start()
        try:
            with tfmq.Consumer(server.address, topics=f"{topic}-out", start="latest") as consumer:
                consumer.poll(timeout=1.0)
                while not query.lastProgress:
                    time.sleep(0.05)
                times = [echo(producer, consumer, topic, b"%d" % n) for n in range(count + 3)][3:]
            batches = [each["durationMs"] for each in query.recentProgress if each["numInputRows"]]
            return times, batches[3:]
        finally:
            query.stop()


def echo(producer: tfmq.Producer, consumer: tfmq.Consumer, topic: str, value: bytes) -> float:
    begun = time.perf_counter()
    producer.send(topic, value).result()
    while time.perf_counter() - begun < WAIT_SECONDS:
        if any(message.payload == value for message in consumer.poll(timeout=1.0)):
            return time.perf_counter() - begun
    raise RuntimeError(f"{value!r} did not come back within {WAIT_SECONDS} s")


def growth(spark: Session, server: Broker, runs: int) -> list[Figure]:
    """What the end of a topic costs, as all that is before it grows."""
    sent = 0
    rows: list[Figure] = []
    first: dict[str, float] = {}
    places = {"over the wire": {"servers": server.address}, "from the folder": {"path": str(server.data)}}
    for size in GROWN_BYTES:
        fill(server, "grown", GROWING, (size - sent) // len(GROWING))
        sent = size
        with tfmq.Producer(server.address) as producer:
            offset = producer.send_many("grown", [PAYLOAD] * TAIL).result()[0].offset
        time.sleep(2)  # log.mark, up to which a folder is read, is written once a second
        for who, place in places.items():
            options = {**place, "subscribe": "grown", "startingOffsets": f'{{"grown": {{"0": {offset}}}}}'}
            clock, processor = job(spark, max(runs, 3), partial(read_tail, spark, options))
            row = f"the last {TAIL:,} messages of {size / 1e9:g} GB"
            rows += [
                Figure(row, who, median(clock), "s", note=spread(clock)),
                Figure(row, f"{who}, processor time", median(processor), "s", note=spread(processor)),
            ]
            ratio = median(clock) / first.setdefault(who, median(clock))
            if size != GROWN_BYTES[0]:
                least = f"{who}, beside {GROWN_BYTES[0] / 1e9:g} GB"
                rows.append(Figure(row, least, ratio, "x", FLAT_TARGET, least=False))
        times, batches = echoes(spark, server, 10, "grown")
        row = f"a message through an idle stream behind {size / 1e9:g} GB"
        rows.append(Figure(row, "p50", median(times) * 1000, "ms", note=spread([each * 1000 for each in times])))
        ends = median([each["latestOffset"] for each in batches])
        rows.append(Figure(row, "of it asking for the end, p50", ends, "ms"))
    return rows


def read_tail(spark: Session, options: dict[str, Any]) -> None:
    count = spark.read(**options).load().count()
    if count < TAIL:
        raise RuntimeError(f"{count} messages of {TAIL} were read")
