"""Groups: how fast a member reads, by `poll`, in a loop and by `run`; how soon others have what one left behind."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import tfmq
from tools.bench.broker import Broker, broker
from tools.bench.delay_load import SCALE
from tools.bench.figures import Figure, alternately, median, spread

COUNT = max(1_000, round(1_000_000 * SCALE))
RUN_COUNT = max(1_000, round(100_000 * SCALE))
PAYLOAD = b"x" * 100
READ_PARTITIONS = 4
PARTITIONS = 40
MEMBERS = 4
SEND_SECONDS = 0.01
"""Between two messages for each partition: no better is a time to be had."""
WAIT_SECONDS = 120.0
MEMBER = """
import sys, threading, tfmq
consumer = tfmq.Consumer(sys.argv[1], topics="shared", group=sys.argv[2], start="latest")
halt = threading.Event()

def watch():
    sys.stdin.read()
    halt.set()
    consumer.stop()

threading.Thread(target=watch, daemon=True).start()
with consumer:
    consumer.poll(60)
    print("reads", flush=True)
    while not halt.is_set():
        consumer.poll(1)
"""

_names = itertools.count()


def measure(runs: int, peers: bool) -> list[Figure]:
    """All rows."""
    return [*reading(runs), *handing_over(runs)]


# Reading


def options(group: bool) -> dict[str, Any]:
    """A group of its own each time, which begins at the beginning."""
    return {"group": f"reader-{next(_names)}", "dead_letters": None} if group else {}


def polled(server: Broker, group: bool) -> float:
    """Messages a second by `poll`, each payload looked at; the clock starts with the first batch."""
    with tfmq.Consumer(server.address, topics="read", **options(group)) as consumer:
        got = first = 0
        begun = 0.0
        while got < COUNT:
            messages = consumer.poll(timeout=5.0, max_messages=10_000)
            if not begun:
                begun, first = time.perf_counter(), len(messages)
            for message in messages:
                message.payload  # noqa: B018
            got += len(messages)
        return (got - first) / (time.perf_counter() - begun)


def iterated(server: Broker, group: bool) -> float:
    """The same by `for message in consumer`."""
    with tfmq.Consumer(server.address, topics="read", **options(group)) as consumer:
        messages = iter(consumer)
        next(messages)
        begun = time.perf_counter()
        for message in itertools.islice(messages, COUNT - 1):
            message.payload  # noqa: B018
        return (COUNT - 1) / (time.perf_counter() - begun)


def handled(server: Broker, workers: int, order: Any, seconds: float = 0.0) -> float:
    """Messages a second by `run`, with a listener that looks at the payload, or takes its time."""
    consumer: tfmq.Consumer[Any] = tfmq.Consumer(server.address, topics="read", **options(True))
    count = RUN_COUNT if not seconds else RUN_COUNT // 50
    counted = itertools.count(1)
    ends = [0.0, 0.0]

    def listener(message: Any) -> None:
        if seconds:
            time.sleep(seconds)
        message.payload  # noqa: B018
        number = next(counted)
        if number == 1:
            ends[0] = time.perf_counter()
        elif number == count:
            ends[1] = time.perf_counter()
            consumer.stop()

    consumer.run(listener, workers=workers, order=order, signals=False)
    return (count - 1) / (ends[1] - ends[0])


def reading(runs: int) -> list[Figure]:
    """With a group and without, in turn."""
    with ExitStack() as stack:
        server = stack.enter_context(broker())
        with tfmq.Admin(server.address) as admin:
            admin.create_topic("read", partitions=READ_PARTITIONS)
        with tfmq.Producer(server.address) as producer:
            producer.send_many("read", (tfmq.Message(PAYLOAD, key=f"{n % 100}") for n in range(COUNT))).result(
                WAIT_SECONDS
            )
        programs: dict[tuple[str, str], Callable[[], float]] = {
            ("consume 100 B, poll", "without a group"): lambda: polled(server, False),
            ("consume 100 B, poll", "with a group"): lambda: polled(server, True),
            ("consume 100 B, iterator", "without a group"): lambda: iterated(server, False),
            ("consume 100 B, iterator", "with a group"): lambda: iterated(server, True),
            ("run, a listener that does nothing", "1 worker"): lambda: handled(server, 1, "partition"),
            ("run, a listener that does nothing", "4 workers"): lambda: handled(server, 4, "partition"),
            ("run, a listener that does nothing", "4 workers, by key"): lambda: handled(server, 4, "key"),
            ("run, a listener that waits 1 ms", "1 worker"): lambda: handled(server, 1, "partition", 1e-3),
            ("run, a listener that waits 1 ms", "4 workers"): lambda: handled(server, 4, "partition", 1e-3),
        }
        found = alternately(runs, *programs.values())
    return [
        Figure(row, who, median(values), "msg/s", note=spread(values))
        for (row, who), values in zip(programs, found, strict=True)
    ]


# Handing over


class Members:
    """Three members in threads of this process, and a fourth in one of its own, which is the one that goes. All the
    time something is sent to each partition; `first` has when the three read of which for the first time."""

    def __init__(self, server: Broker) -> None:
        self.halt = threading.Event()
        self.server, self.group = server, f"group-{next(_names)}"
        self.consumers = [self.consumer() for _ in range(MEMBERS - 1)]
        self.first: dict[int, float] = {}
        self.threads = [threading.Thread(target=self.read, args=(each,)) for each in self.consumers]
        self.threads.append(threading.Thread(target=self.send))
        for thread in self.threads:
            thread.start()

    def consumer(self) -> tfmq.Consumer[Any]:
        return tfmq.Consumer(self.server.address, topics="shared", group=self.group, start="latest")

    def read(self, consumer: tfmq.Consumer[Any]) -> None:
        with consumer:
            while not self.halt.is_set():
                for message in consumer.poll(0.5):
                    self.first.setdefault(message.partition, time.perf_counter())

    def send(self) -> None:
        with tfmq.Producer(self.server.address, acks="written") as producer:
            while not self.halt.wait(SEND_SECONDS):
                for partition in range(PARTITIONS):
                    producer.send("shared", b"x", partition=partition)

    def shares(self) -> list[int]:
        return [len(each.stats()["assigned"]) for each in self.consumers]

    def wait_until(self, happened: Callable[[], bool]) -> float:
        """When it was so."""
        until = time.perf_counter() + WAIT_SECONDS
        while not happened():
            if time.perf_counter() > until:
                raise RuntimeError(f"the shares stay {self.shares()}")
            time.sleep(SEND_SECONDS / 10)
        return time.perf_counter()

    def others_read_all(self, since: float) -> float:
        """Seconds from `since` until the three have read something of each partition that was sent behind it."""
        self.first.clear()
        self.wait_until(lambda: len(self.first) == PARTITIONS)
        return max(self.first.values()) - since

    def close(self) -> None:
        self.halt.set()
        for thread in self.threads:
            thread.join(WAIT_SECONDS)


@contextmanager
def four(server: Broker) -> Iterator[tuple[Members, "subprocess.Popen[str]"]]:
    """Four members at rest, each with its share."""
    members = Members(server)
    goes = subprocess.Popen(
        [sys.executable, "-c", MEMBER, server.address, members.group],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        share = PARTITIONS // MEMBERS
        members.wait_until(lambda: members.shares() == [share] * (MEMBERS - 1))
        assert goes.stdout is not None and goes.stdin is not None
        if goes.stdout.readline() != "reads\n":
            raise RuntimeError("the fourth member reads nothing")
        yield members, goes
    finally:
        goes.kill()
        goes.wait()
        goes.stdin.close()  # type: ignore[union-attr]
        goes.stdout.close()  # type: ignore[union-attr]
        members.close()


def it_leaves(server: Broker) -> float:
    with four(server) as (members, goes):
        assert goes.stdin is not None
        began = time.perf_counter()
        goes.stdin.close()
        return members.others_read_all(began)


def it_is_killed(server: Broker) -> float:
    with four(server) as (members, goes):
        began = time.perf_counter()
        goes.kill()
        return members.others_read_all(began)


def it_hangs(server: Broker) -> float:
    with four(server) as (members, goes):
        began = time.perf_counter()
        os.kill(goes.pid, signal.SIGSTOP)
        return members.others_read_all(began)


def one_comes(server: Broker) -> float:
    """Until it has its share; the others give it up behind the messages that they have in work."""
    with four(server) as (members, _), members.consumer() as fifth:
        began = time.perf_counter()
        while len(fifth.stats()["assigned"]) < PARTITIONS // (MEMBERS + 1):
            fifth.poll(0.01)
        return time.perf_counter() - began


def handing_over(runs: int) -> list[Figure]:
    """Seconds until somebody reads on, with the default session of 30 s; the one that hangs once."""
    row = f"a group of {MEMBERS} over {PARTITIONS} partitions, until all are read again"
    with broker() as server:
        with tfmq.Admin(server.address) as admin:
            admin.create_topic("shared", partitions=PARTITIONS)
        programs: dict[str, Callable[[], float]] = {
            "a member leaves": lambda: it_leaves(server),
            "a member is killed": lambda: it_is_killed(server),
            "a fifth comes, and has its share": lambda: one_comes(server),
        }
        found = dict(zip(programs, alternately(runs, *programs.values()), strict=True))
        found["a member hangs"] = [it_hangs(server)]
    return [Figure(row, who, median(values), "s", note=spread(values)) for who, values in found.items()]
