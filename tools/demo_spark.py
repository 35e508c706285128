"""The part of the demo that is about Spark: a streaming query copies the lines to another topic, through an accident.

Spark reads the topic as a table, and a streaming query writes it to another one, in micro-batches; in the middle the
broker dies, and the query with it. Both are started again; each line has to be in the copy exactly once.
"""

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tfmq
from tools.demo_transactions import Killable
from tools.rigs import spark_session

COPY = "demo-copy"
BATCHES = 3
STEP_SECONDS = 60.0
READ_SECONDS = 2.0


@dataclass
class Copying:
    """What happened."""

    table: int = 0
    """Lines that Spark found in the topic."""
    died: bool = False
    """Whether the query ended with the broker."""
    seconds: float = 0.0


def missing() -> str | None:
    """What this part lacks here, in a sentence; None if nothing."""
    reason = spark_session.missing()
    return reason and f"The part with Spark is left out: {reason}."


def run(
    broker: Killable, topic: str, lines: Sequence[bytes], folder: Path
) -> tuple[Copying, list[tuple[str, int, bool]]]:
    """The whole part: what happened, and (what was promised, a count, whether it holds). Spark's log is in `folder`."""
    copying = Copying()
    folder.mkdir()
    with errors_into(folder / "spark.log"):
        spark = spark_session.start(folder)
        try:
            copying.table = table(spark, broker.address, topic).count()
            copy(spark, broker, topic, len(lines), folder / "checkpoint", copying)
        finally:
            spark.stop()
    return copying, verdict(copying, Counter(lines), Counter(stored(broker.address)))


def table(spark: Any, servers: str, topic: str) -> Any:
    """All that is in the topic now."""
    return spark.read.format("tfmq").options(servers=servers, subscribe=topic).schema("offset long").load()


def copy(spark: Any, broker: Killable, topic: str, count: int, checkpoint: Path, copying: Copying) -> None:
    """The query, killed with its broker when it has done something, and started again until it is done."""
    begun = time.monotonic()
    query = started(spark, broker.address, topic, count, checkpoint)
    wait_for_the_first(query)
    broker.kill()
    broker.start()
    while not ended_well(query):
        copying.died = True
        query = started(spark, broker.address, topic, count, checkpoint)
    copying.seconds = time.monotonic() - begun


def started(spark: Any, servers: str, topic: str, count: int, checkpoint: Path) -> Any:
    """All that is there, a third at a time."""
    stream = spark.readStream.format("tfmq").options(
        servers=servers,
        subscribe=topic,
        startingOffsets="earliest",
        maxOffsetsPerTrigger=str(count // BATCHES),
    )
    return (
        stream.load()
        .select("key", "value")
        .writeStream.format("tfmq")
        .options(servers=servers, topic=COPY, checkpointLocation=str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )


def wait_for_the_first(query: Any) -> None:
    """Until a micro-batch is done, or the query is."""
    until = time.monotonic() + STEP_SECONDS
    while query.isActive and query.lastProgress is None and time.monotonic() < until:
        time.sleep(0.05)


def ended_well(query: Any) -> bool:
    """Waits for its end. Raises RuntimeError where it takes too long."""
    from pyspark.errors import StreamingQueryException

    try:
        if not query.awaitTermination(STEP_SECONDS):
            raise RuntimeError("the streaming query does not come to its end")
    except StreamingQueryException:
        return False
    return True


def stored(servers: str) -> list[bytes]:
    """What is in the copy."""
    found: list[bytes] = []
    with tfmq.Consumer(servers, topics=COPY, start="earliest") as consumer:
        while messages := consumer.poll(timeout=READ_SECONDS, max_messages=10_000):
            found += [message.payload or b"" for message in messages]
    return found


def verdict(copying: Copying, lines: Counter[bytes], copies: Counter[bytes]) -> list[tuple[str, int, bool]]:
    """What was promised, counted."""
    return [
        ("lines that Spark finds in the topic", copying.table, copying.table == lines.total()),
        ("lines that its query copied, each once", copies.total(), copies == lines),
    ]


@contextmanager
def errors_into(path: Path) -> Iterator[None]:
    """What this process and those that it starts print on standard error is in a file meanwhile."""
    before = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
