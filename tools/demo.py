"""Send, kill the broker with SIGKILL in the middle, restart it, and count: `make demo`.

Starts a broker in a new folder, sends the 60,000 lines of a web shop's log while a consumer reads them, kills the
broker with lines acknowledged and others in flight, starts it again on the same folder and port, and counts: every
acknowledged line has to be there exactly once, in order. Then transactions (tools/demo_transactions.py), delayed
messages (tools/demo_delays.py), a machine that is lost (tools/demo_replication.py) and, where there is a Java, Spark
(tools/demo_spark.py), each with one more kill. Ends with what was promised, counted, and the commands that show the
files. It takes about a minute on an idle machine; each step is printed with the seconds since the start, on a terminal
there are bars as well.

Exit code: 0 all promises kept, 1 not, 2 wrong usage.
"""

import argparse
import gzip
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

import tfmq
from tools import demo_delays, demo_replication, demo_spark, demo_transactions
from tools.demo_broker import WAIT_SECONDS, Broker, Counting, DemoFailed, Row, Steps, Task, read_all

TEXT = Path(__file__).parent / "demo_data" / "shop.log.gz"
TOPIC = "shop-log"
DOWN_SECONDS = 0.5


@dataclass
class Story:
    """What happened to the lines."""

    acknowledged: int = 0
    followed: list[bytes] = field(default_factory=list)
    stored: list[bytes] = field(default_factory=list)


def text_lines() -> list[bytes]:
    return gzip.decompress(TEXT.read_bytes()).splitlines()


def follow(consumer: tfmq.Consumer[bytes], story: Story, total: int, counting: Counting) -> None:
    """Read the lines while they are sent, and wait for the broker while it is down; ends when all are read, or nothing
    is for `WAIT_SECONDS`."""
    until = time.monotonic() + WAIT_SECONDS
    with consumer:
        while len(story.followed) < total and time.monotonic() < until:
            try:
                messages = consumer.poll(timeout=1.0, max_messages=2_000)
            except tfmq.ConnectionFailed:
                continue  # a first connection is tried for two seconds only, and the broker may be down for longer
            if messages:
                story.followed.extend(message.payload or b"" for message in messages)
                counting.add(len(messages))
                until = time.monotonic() + WAIT_SECONDS


def send_through_a_crash(broker: Broker, lines: list[bytes], story: Story, steps: Steps) -> None:
    """Send all lines; in the middle, with batches in flight, the broker is killed and started again."""
    killed_at = random.randrange(len(lines) * 2 // 5, len(lines) * 3 // 5)
    restart: Task | None = None
    deliveries: list[tfmq.Delivery] = []
    counting = steps.counting("lines sent", len(lines))
    with tfmq.Producer(broker.address, timeout=WAIT_SECONDS) as producer:
        for number, line in enumerate(lines):
            if number == killed_at:
                deliveries[number // 4].result()  # so that something acknowledged could be lost
                broker.kill()
                restart = Task(lambda: come_back(broker, steps))
                known = sum(delivery.done() for delivery in deliveries)
                flying = number - known
                steps.say(f"[bold red]kill -9[/] of the broker: {known:,} lines acknowledged, {flying:,} in flight")
            deliveries.append(producer.send(TOPIC, line))
            if number % 500 == 499:
                counting.add(500)
        producer.flush()
        story.acknowledged = sum(delivery.result().durability == "synced" for delivery in deliveries)
    if restart is not None:
        restart.join()
    counting.end()
    steps.say(f"all {len(lines):,} lines are sent")


def come_back(broker: Broker, steps: Steps) -> None:
    time.sleep(DOWN_SECONDS)
    steps.say(f"the broker is ready again, after {DOWN_SECONDS + broker.start():.1f} s")


def copy_a_log(broker: Broker, lines: list[bytes], steps: Steps) -> list[Row]:
    """The first part: what was promised, counted."""
    story = Story()
    with tfmq.Admin(broker.address, timeout=WAIT_SECONDS) as admin:
        admin.create_topic(TOPIC)  # a send would create it too; this way the consumer finds it at once
    consumer = tfmq.Consumer(broker.address, topics=TOPIC, group="demo", timeout=WAIT_SECONDS)
    counting = steps.counting("lines read meanwhile", len(lines))
    reader = Task(lambda: follow(consumer, story, len(lines), counting))
    send_through_a_crash(broker, lines, story, steps)
    reader.join()
    counting.end()
    begun = steps.clock()
    story.stored = [message.payload or b"" for message in read_all(broker.address, TOPIC)]
    speed = len(story.stored) / max(steps.clock() - begun, 1e-9)
    steps.say(f"all are read by the consumer, and once more from the start, {speed:,.0f} lines a second")
    return verdict(lines, story)


def verdict(lines: list[bytes], story: Story) -> list[Row]:
    """What was promised, counted."""
    stored, count = Counter(story.stored), len(lines)
    missing = sum(stored[line] == 0 for line in lines)
    twice = sum(count - 1 for count in stored.values())
    moved = sum(a != b for a, b in zip(story.stored, lines, strict=False))
    return [
        Row("lines acknowledged as synced", story.acknowledged, story.acknowledged == count),
        Row("found in the topic", len(story.stored), len(story.stored) == count),
        Row("acknowledged, but missing", missing, missing == 0),
        Row("there more than once", twice, twice == 0),
        Row("out of order", moved, story.stored == lines),
        Row("read by the consumer meanwhile", len(story.followed), story.followed == lines),
    ]


def table(console: Console, rows: list[Row]) -> None:
    """What was promised, counted, and whether it was kept."""
    view = Table(show_header=False, box=None, padding=(0, 2))
    view.add_column()
    view.add_column(justify="right")
    view.add_column()
    marks = {True: Text("ok", style="green"), False: Text("NOT ok", style="bold red"), None: Text("")}
    for text, number, kept in rows:
        view.add_row(text, f"{number:,}", marks[kept])
    console.print(view)


def where_to_look(console: Console, folder: Path) -> None:
    """The commands that show the files."""
    data = folder / "data"
    partition = data / f"{TOPIC}-0"
    console.print("\nThe files are still there; look at them:")
    for command in (
        f"ls -l {partition}",
        f".venv/bin/tfmq log dump {partition} -n 5",
        f".venv/bin/tfmq log verify {partition}",
        f".venv/bin/tfmq replica verify {(folder / 'store').as_uri()}",
        f".venv/bin/tfmq-server --data {data}      and in another window",
        f".venv/bin/tfmq read {TOPIC} -n 3 --format '%o %i %s'",
    ):
        console.print(f"  {command}", highlight=False, soft_wrap=True)
    console.print(f"and when you are done: rm -r {folder}", highlight=False, soft_wrap=True)


def run(
    folder: Path,
    console: Console,
    lines: list[bytes],
    transactions: int = demo_transactions.COUNT,
    delayed: int = demo_delays.COUNT,
    with_spark: bool = True,
) -> list[Row]:
    """All parts, with these counts: what was promised, counted. Raises DemoFailed if it cannot go on."""
    steps = Steps(console)
    broker = Broker(folder / "data", folder / "server.log")
    lack = demo_spark.missing()
    spark: demo_spark.Spark | None = None
    try:
        with steps.progress:
            steps.say(f"a broker starts on {escape(str(broker.data))}")
            steps.say(f"it is ready after {broker.start():.1f} s, {broker.address}")
            if with_spark and not lack:
                spark = demo_spark.Spark(broker, TOPIC, len(lines), folder / "spark")
            steps.say(f"1. the {len(lines):,} lines of a web shop's log, and a consumer that reads them meanwhile")
            rows = copy_a_log(broker, lines, steps)
            steps.say(f"2. {transactions:,} orders, each with its payment in one transaction")
            rows += demo_transactions.run(broker, steps, transactions)
            steps.say(f"3. {delayed:,} messages for the next seconds")
            rows += demo_delays.run(broker, steps, delayed)
            steps.say("4. a primary and a standby with a common store, and the loss of the primary's machine")
            rows += demo_replication.run(folder, steps, lines[: demo_replication.COUNT])
            if spark is not None:
                steps.say("5. Spark copies the lines to another topic, with a streaming query")
                rows += demo_spark.run(broker, spark, steps, lines)
            elif with_spark:
                steps.say(f"5. {lack}")
            steps.say("counted:")
    finally:
        if spark is not None:
            spark.stop()
        broker.stop()
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    about, _, rest = (__doc__ or "").partition("\n\n")
    argparse.ArgumentParser(
        prog="python -m tools.demo",
        description=about,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(arguments)
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="tfmq-demo-"))
    logging.basicConfig(filename=folder / "clients.log", level=logging.INFO)
    try:
        rows = run(folder, console, text_lines())
    except (DemoFailed, tfmq.TfmqError) as error:
        print(f"The demo cannot go on: {error}. Its files are in {folder}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"Stopped. What was written until now is in {folder}.", file=sys.stderr)
        return 1
    table(console, rows)
    where_to_look(console, folder)
    return 1 if any(row.kept is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
