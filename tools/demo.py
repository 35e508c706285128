"""The first run, with two accidents in it: `make demo`.

Starts a broker in a new folder, sends the 60,000 lines of a web shop's log while a consumer reads along, kills the
broker with SIGKILL in the middle of it, with lines acknowledged and others on their way, starts it again on the same
folder and port, and counts: every acknowledged line has to be there exactly once, in order. Then transactions through
another crash (tools/demo_transactions.py), delayed messages through a third (tools/demo_delays.py), and, where there is
a Java, Spark through a fourth (tools/demo_spark.py). Ends with what to type to look at the files.
"""

import gzip
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

import tfmq
from tools import demo_delays, demo_spark, demo_transactions

TEXT = Path(__file__).parent / "demo_data" / "shop.log.gz"
TOPIC = "shop-log"
START_SECONDS = 30.0
READ_SECONDS = 60.0
DOWN_SECONDS = 0.5


class Broker:
    """A tfmq-server process that can be killed and started again on its folder and port."""

    def __init__(self, data: Path) -> None:
        self.data, self.address = data, "127.0.0.1:0"
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> float:
        """Start it; the seconds until it said that it is ready."""
        begun = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "tfmq.server.main",
            "--data",
            str(self.data),
            "--listen",
            self.address,
        ]
        with (self.data.parent / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        if len(words) != 2 or words[0] != "ready":
            raise SystemExit(f"the broker did not start; see {self.data.parent / 'server.log'}")
        self.address = words[1]
        return time.monotonic() - begun

    def kill(self) -> None:
        """SIGKILL: no warning, no farewell."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(START_SECONDS)


@dataclass
class Story:
    """What happened, for the table at the end."""

    sent: int = 0
    acknowledged: int = 0
    send_seconds: float = 0.0
    restart_seconds: float = 0.0
    followed: list[bytes] = field(default_factory=list)
    stored: list[bytes] = field(default_factory=list)
    read_seconds: float = 0.0
    killed_at: int = 0


def text_lines() -> list[bytes]:
    return gzip.decompress(TEXT.read_bytes()).splitlines()


@contextmanager
def bars(console: Console) -> Iterator[Progress]:
    columns = (
        TextColumn("  {task.description:<28}"),
        BarColumn(40),
        TextColumn("{task.completed:>7,.0f} lines"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield progress


def follow(address: str, story: Story, total: int, tick: "Tick") -> None:
    """Read along while the lines come in, through the crash, until all are here or it takes too long."""
    until = time.monotonic() + READ_SECONDS
    with tfmq.Consumer(address, topics=TOPIC, group="demo") as consumer:
        while len(story.followed) < total and time.monotonic() < until:
            messages = consumer.poll(timeout=1.0, max_messages=2_000)
            story.followed.extend(message.payload or b"" for message in messages)
            tick(len(messages))


class Tick:
    """Moves one bar."""

    def __init__(self, progress: Progress, text: str, total: int) -> None:
        self.progress, self.task = progress, TaskID(progress.add_task(text, total=total))

    def __call__(self, count: int) -> None:
        self.progress.advance(self.task, count)


def send_through_a_crash(broker: Broker, lines: list[bytes], story: Story, tick: Tick, say: Console) -> None:
    """Send all lines; somewhere in the middle, with batches on their way, the broker dies and comes back."""
    story.killed_at = random.randrange(len(lines) * 2 // 5, len(lines) * 3 // 5)
    restart = threading.Thread(target=come_back, args=(broker, story))
    deliveries: list[tfmq.Delivery] = []
    begun = time.monotonic()
    with tfmq.Producer(broker.address, timeout=START_SECONDS) as producer:
        for number, line in enumerate(lines):
            if number == story.killed_at:
                deliveries[number // 4].result()  # so that there is something to lose
                broker.kill()
                restart.start()
                known = sum(delivery.done() for delivery in deliveries)
                say.print(
                    f"  [bold red]kill -9[/] of the broker: {known:,} lines are acknowledged, "
                    f"{number - known:,} on their way",
                    soft_wrap=True,
                )
            deliveries.append(producer.send(TOPIC, line))
            if number % 500 == 499:
                tick(500)
        producer.flush()
        story.acknowledged = sum(delivery.result().durability == "synced" for delivery in deliveries)
    story.sent, story.send_seconds = len(lines), time.monotonic() - begun
    restart.join()


def come_back(broker: Broker, story: Story) -> None:
    time.sleep(DOWN_SECONDS)
    story.restart_seconds = broker.start()


def read_back(broker: Broker, story: Story) -> None:
    """A second reader, from the start to the end, for the count that matters."""
    begun = time.monotonic()
    with tfmq.Consumer(broker.address, topics=TOPIC, start="earliest") as consumer:
        while messages := consumer.poll(timeout=1.0, max_messages=10_000):
            story.stored.extend(message.payload or b"" for message in messages)
            story.read_seconds = time.monotonic() - begun


def verdict(lines: list[bytes], story: Story) -> list[tuple[str, int, bool]]:
    """What was promised, counted."""
    stored = Counter(story.stored)
    missing = sum(stored[line] == 0 for line in lines)
    twice = sum(count - 1 for count in stored.values())
    return [
        ("lines sent", story.sent, True),
        ("acknowledged as synced", story.acknowledged, story.acknowledged == story.sent),
        ("found in the topic", len(story.stored), len(story.stored) == len(lines)),
        ("acknowledged, but missing", missing, missing == 0),
        ("there more than once", twice, twice == 0),
        (
            "out of order",
            sum(a != b for a, b in zip(story.stored, lines, strict=False)),
            story.stored == lines,
        ),
        ("seen by the one who read along", len(story.followed), story.followed == lines),
    ]


def table(console: Console, rows: list[tuple[str, int, bool]]) -> None:
    """What was promised, counted, and whether it holds."""
    view = Table(show_header=False, box=None, padding=(0, 2))
    view.add_column()
    view.add_column(justify="right")
    view.add_column()
    for text, number, good in rows:
        mark = Text("ok", style="green") if good else Text("NOT ok", style="bold red")
        view.add_row(text, f"{number:,}", mark)
    console.print(view)


def show(console: Console, rows: list[tuple[str, int, bool]], story: Story) -> None:
    table(console, rows)
    down = DOWN_SECONDS + story.restart_seconds
    console.print(
        f"  sending took {story.send_seconds:.2f} s with {down:.2f} s of it without a broker "
        f"(restart with recovery: {story.restart_seconds:.2f} s); "
        f"reading all back: {len(story.stored) / max(story.read_seconds, 1e-9):,.0f} lines/s",
        highlight=False,
        soft_wrap=True,
    )


def where_to_look(console: Console, data: Path) -> None:
    partition = data / f"{TOPIC}-0"
    console.print("\nThe files are still there; look at them:")
    for command in (
        f"ls -l {partition}",
        f".venv/bin/tfmq log dump {partition} -n 5",
        f".venv/bin/tfmq log verify {partition}",
        f".venv/bin/tfmq-server --data {data}      and in another window",
        f".venv/bin/tfmq read {TOPIC} -n 3 --format '%o %i %s'",
    ):
        console.print(f"  {command}", highlight=False, soft_wrap=True)
    console.print(f"and when you are done: rm -r {data.parent}", highlight=False, soft_wrap=True)


Copied = tuple[demo_spark.Copying | None, list[tuple[str, int, bool]]]


def copy_with_spark(console: Console, broker: Broker, lines: list[bytes], folder: Path) -> Copied:
    """The part with Spark, or a line that says what it lacks."""
    if lack := demo_spark.missing():
        console.print(lack, soft_wrap=True)
        return None, []
    console.print(
        "Then Spark: a streaming query copies the lines to another topic, and an accident.", soft_wrap=True
    )
    return demo_spark.run(broker, TOPIC, lines, folder / "spark")


def tell_of_spark(console: Console, copied: Copied) -> None:
    copying, rows = copied
    if copying is None:
        return
    table(console, rows)
    console.print(
        f"  copying took {copying.seconds:.1f} s, the accident included;"
        f" the query {'died with the broker and was started again' if copying.died else 'lived through it'}",
        highlight=False,
        soft_wrap=True,
    )


def main() -> int:
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="tfmq-demo-"))
    data, lines, story = folder / "data", text_lines(), Story()
    broker = Broker(data)
    console.print(
        f"A broker on {data}, the {len(lines):,} lines of a web shop's log, and an accident.", soft_wrap=True
    )
    console.print(f"  broker ready at first start in {broker.start():.2f} s, {broker.address}")
    try:
        with tfmq.Admin(broker.address) as admin:
            admin.create_topic(
                TOPIC
            )  # a send would make it, too; so the one who reads along finds it at once
        with bars(console) as progress:
            reading = Tick(progress, "read along by a consumer", len(lines))
            reader = threading.Thread(
                target=follow, args=(broker.address, story, len(lines), reading), daemon=True
            )
            reader.start()
            send_through_a_crash(broker, lines, story, Tick(progress, "sent", len(lines)), progress.console)
            reader.join(READ_SECONDS)
        read_back(broker, story)
        console.print(
            f"Then {demo_transactions.COUNT:,} orders, each with its payment in one transaction, and another accident.",
            soft_wrap=True,
        )
        shop, sold = demo_transactions.run(broker)
        console.print(
            f"Then {demo_delays.COUNT:,} messages for the next seconds, and an accident while they wait.",
            soft_wrap=True,
        )
        waiting, came = demo_delays.run(broker)
        copied = copy_with_spark(console, broker, lines, folder)
    finally:
        broker.stop()
    rows = verdict(lines, story)
    show(console, rows, story)
    table(console, sold)
    console.print(
        f"  {len(shop.acknowledged) / shop.seconds:,.0f} transactions/s from one thread, the accident included;"
        f" in doubt behind it: {shop.in_doubt}",
        highlight=False,
        soft_wrap=True,
    )
    table(console, came)
    console.print(
        f"  {waiting.waited:,} of them still waited behind the accident; late by {waiting.median_ms:.0f} ms (median),"
        " with those that were due while there was no broker",
        highlight=False,
        soft_wrap=True,
    )
    tell_of_spark(console, copied)
    where_to_look(console, data)
    return 0 if all(good for _, _, good in rows + sold + came + copied[1]) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("stopped; what was written so far is in a folder tfmq-demo-… of " + tempfile.gettempdir())
