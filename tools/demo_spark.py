"""The part of the demo that is about Spark: a streaming query copies the lines to another topic, through a kill of the
broker.

The query reads the topic and writes to another one, in micro-batches; in the middle the broker is killed. If the query
fails with it, it is started again; each line has to be in the copy exactly once.

Spark runs in a process of its own (`python -m tools.demo_spark`), so that it can start while the other parts of the
demo run. That process begins the query when it reads `go` on its standard input, and prints `started`, `batch` after
the first micro-batch, `failed` for each query that ended with an error, and `done`.
"""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.demo_broker import STOP_SECONDS, Broker, DemoFailed, Row, Steps, read_all
from tools.rigs import spark_session

COPY = "demo-copy"
BATCHES = 3
STEP_SECONDS = 300.0
QUERIES_MAX = 10


def missing() -> str | None:
    """What this part lacks here, in a sentence; None if nothing."""
    reason = spark_session.missing()
    return reason and f"the part with Spark is left out: {reason}"


class Spark:
    """The process with Spark in it; it starts at once. Everything that it prints besides its words is in `log`."""

    def __init__(self, broker: Broker, topic: str, count: int, folder: Path) -> None:
        folder.mkdir()
        self.log = folder / "spark.log"
        command = [sys.executable, "-m", "tools.demo_spark", broker.address, topic, str(count), str(folder)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def go(self) -> None:
        """Let the query begin."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, which its next word, or rather the lack of one, shows

    def said(self) -> str:
        """Its next word. Raises DemoFailed if it ended without one."""
        assert self.process.stdout is not None
        if word := self.process.stdout.readline().strip():
            return word
        raise DemoFailed(f"the process with Spark has failed; {self.log} says why")

    def stop(self) -> None:
        """End it; its Java process ends with it."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def run(broker: Broker, spark: Spark, steps: Steps, lines: Sequence[bytes]) -> list[Row]:
    """The whole part: what was promised, counted."""
    spark.go()
    failed = 0
    while (word := spark.said()) != "done":
        if word == "started":
            steps.say("Spark has started; its query begins")
        elif word == "batch":
            steps.say("the first micro-batch is written; [bold red]kill -9[/] of the broker in the middle of the next")
            broker.kill()
            steps.say(f"the broker is ready again, after {broker.start():.1f} s")
        elif word == "failed":
            failed += 1
            steps.say("the query has failed with the broker; it is started again")
    steps.say(f"the query is done{'' if failed else ', and was not interrupted'}")
    found = Counter(message.payload or b"" for message in read_all(broker.address, COPY))
    wanted = Counter(lines)
    missing, twice = (wanted - found).total(), (found - wanted).total()
    return [
        Row("lines in the copy made by Spark", found.total(), found == wanted),
        Row("not copied", missing, missing == 0),
        Row("copied more than once", twice, twice == 0),
    ]


def copy(spark: Any, servers: str, topic: str, count: int, checkpoint: Path, say: Callable[[str], None]) -> None:
    """The query, started again until it is done."""
    query = started(spark, servers, topic, count, checkpoint)
    wait_for_the_first(query)
    say("batch")
    for _ in range(QUERIES_MAX):
        if ended_well(query):
            return
        say("failed")
        query = started(spark, servers, topic, count, checkpoint)
    raise RuntimeError("the streaming query fails again and again")


def started(spark: Any, servers: str, topic: str, count: int, checkpoint: Path) -> Any:
    """All that is there, a third at a time."""
    stream = spark.readStream.format("tfmq").options(
        servers=servers, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=str(count // BATCHES)
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
    """Wait for the query's end. Raises RuntimeError if it takes too long."""
    from pyspark.errors import StreamingQueryException

    try:
        if not query.awaitTermination(STEP_SECONDS):
            raise RuntimeError("the streaming query does not end")
    except StreamingQueryException:
        return False
    return True


def main(servers: str, topic: str, count: int, folder: Path) -> None:
    """What the process with Spark does."""
    words = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that what Java prints is no word of ours

    def say(word: str) -> None:
        print(word, file=words, flush=True)

    spark = spark_session.start(folder)
    try:
        if sys.stdin.readline() != "go\n":
            return  # the demo has ended
        say("started")
        copy(spark, servers, topic, count, folder / "checkpoint", say)
        say("done")
    finally:
        spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
