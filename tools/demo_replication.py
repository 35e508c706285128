"""The part of the demo that is about replication: a primary is killed and its data folder removed while lines are sent.

Two more servers on this machine share a folder as their store. The first one is primary, the other follows. In the
middle of sending the primary gets SIGKILL and its folder is deleted, as if its machine were lost. The standby serves
when the lease is over, and has every line that was acknowledged, once and in order. The lost server is started again
with an empty folder, and follows.
"""

import random
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import tfmq
from tools.demo_broker import WAIT_SECONDS, Broker, Row, Steps, Task, read_all

TOPIC = "demo-replicated"
COUNT = 20_000
HEARTBEAT_SECONDS = 0.5
LEASE_SECONDS = 2.0


@dataclass
class Copies:
    """What happened to the lines."""

    replicated: int = 0
    stored: list[bytes] = field(default_factory=list)


def pair(folder: Path) -> list[Broker]:
    """Two servers that share the folder `store`."""
    store = folder / "store"
    store.mkdir()
    settings = (
        f"replicate.url={store.as_uri()}",
        f"replicate.heartbeat_seconds={HEARTBEAT_SECONDS}",
        f"replicate.lease_seconds={LEASE_SECONDS}",
    )
    return [Broker(folder / f"data-{name}", folder / f"server-{name}.log", *settings) for name in ("one", "two")]


def send_through_a_loss(servers: list[Broker], lines: list[bytes], copies: Copies, steps: Steps) -> None:
    """Send all lines; in the middle, with batches in flight, the primary and its folder are lost."""
    primary, standby = servers
    killed_at = random.randrange(len(lines) * 2 // 5, len(lines) * 3 // 5)
    takeover: Task | None = None
    deliveries: list[tfmq.Delivery] = []
    counting = steps.counting("lines sent", len(lines))
    with tfmq.Producer([primary.address, standby.address], timeout=WAIT_SECONDS) as producer:
        for number, line in enumerate(lines):
            if number == killed_at:
                deliveries[number // 4].result()  # so that something acknowledged could be lost
                primary.kill()
                shutil.rmtree(primary.data)
                known = sum(delivery.done() for delivery in deliveries)
                flying = number - known
                steps.say(
                    f"[bold red]kill -9[/] of the primary, and its folder is removed: "
                    f"{known:,} lines acknowledged, {flying:,} in flight"
                )
                takeover = Task(lambda: take_over(standby, steps))
            deliveries.append(producer.send(TOPIC, line))
            if number % 500 == 499:
                counting.add(500)
        producer.flush()
        copies.replicated = sum(delivery.result().durability == "replicated" for delivery in deliveries)
    if takeover is not None:
        takeover.join()
    counting.end()
    steps.say(f"all {len(lines):,} lines are sent")


def take_over(standby: Broker, steps: Steps) -> None:
    begun = steps.clock()
    standby.wait_for("ready")
    steps.say(f"the standby is primary now, {steps.clock() - begun:.1f} s later (lease: {LEASE_SECONDS:g} s)")


def run(folder: Path, steps: Steps, lines: list[bytes]) -> list[Row]:
    """The whole part: what was promised, counted."""
    copies = Copies()
    servers = pair(folder)
    one, two = servers
    try:
        one.start()
        two.start("standby")
        steps.say(f"a primary on {one.address}, a standby on {two.address}, their store is {folder / 'store'}")
        send_through_a_loss(servers, lines, copies, steps)
        one.start("standby")
        steps.say("the lost server is back with an empty folder, and follows")
        copies.stored = [message.payload or b"" for message in read_all([one.address, two.address], TOPIC)]
    finally:
        for server in servers:
            server.stop()
    return verdict(lines, copies)


def verdict(lines: list[bytes], copies: Copies) -> list[Row]:
    """What was promised, counted."""
    stored, sent = Counter(copies.stored), Counter(lines)
    missing, twice = (sent - stored).total(), (stored - sent).total()
    return [
        Row("lines acknowledged as replicated", copies.replicated, copies.replicated == len(lines)),
        Row("lost with the machine", missing, missing == 0),
        Row("there more than once, or out of order", twice, copies.stored == lines),
    ]
