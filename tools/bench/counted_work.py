"""The work of each operation, counted in client and broker: Python calls, system calls, allocations, bytes allocated.

Counts hardly depend on the load of the machine, so they show what a change of the code costs before any clock does.
`counted_work.json` has the recorded counts, and tests/test_counted_work.py compares the calls and system calls with it:

    python -m tools.bench.counted_work             all counts, beside the recorded ones
    python -m tools.bench.counted_work --record    store them, after a change that is meant to cost more or less

Python calls are counted by sys.setprofile, system calls by strace, allocations by memray, with every object that Python
allocates; one after the other, as each disturbs the others. Bytes allocated stand for the bytes copied: a copy needs a
buffer of its size. A broker's turn without work is counted as the work of an idle second with a consumer that waits.
Both programs block at each wait here, because the number of polls of busy polling depends on time, not on the work.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol
from unittest import mock

import click
from rich.console import Console
from rich.table import Table

import tfmq
from tfmq import busy_poll

TOPIC = "counted"
PAYLOAD = b"x" * 100
MANY = 1_000
MIB_MESSAGES = (1 << 20) // (len(PAYLOAD) + 20)
WARM_UP = 20
IDLE = "an idle second"
BATCHES = 5
"""The batch with the least work counts: a timer or a heartbeat falls into some of them."""
STRACE_SECONDS = 20.0
RECORDED = Path(__file__).with_name("counted_work.json")
SIDES = ("client", "broker")

Counts = dict[str, dict[str, dict[str, float]]]
"""operation -> kind of work -> side -> count of one operation."""


class Counter(Protocol):
    """Counts the work of this process between `start` and `stop`; `counts` has the totals by kind."""

    counts: dict[str, float]

    def start(self) -> None: ...

    def stop(self) -> None: ...


class CallCounter:
    """Counts the Python calls of the thread that starts it."""

    def __init__(self) -> None:
        self.counts = {"calls": 0.0}
        self._calls = 0

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._calls += 1

    def start(self) -> None:
        sys.setprofile(self._profile)

    def stop(self) -> None:
        sys.setprofile(None)
        self.counts["calls"] = float(self._calls)


class AllocationCounter:
    """Counts the allocations of all threads with memray, also those that are freed at once."""

    def __init__(self) -> None:
        self.counts = {"allocations": 0.0, "bytes": 0.0}
        self._folder = tempfile.TemporaryDirectory(prefix="tfmq-counted-")
        self._runs = 0

    def start(self) -> None:
        import memray

        self._runs += 1
        self._file = Path(self._folder.name) / f"{self._runs}"
        self._tracker = memray.Tracker(self._file, trace_python_allocators=True)
        self._tracker.__enter__()

    def stop(self) -> None:
        import memray

        self._tracker.__exit__(None, None, None)
        freeing = {memray.AllocatorType.FREE, memray.AllocatorType.PYMALLOC_FREE, memray.AllocatorType.MUNMAP}
        with memray.FileReader(self._file) as reader:
            for record in reader.get_allocation_records():
                if record.allocator not in freeing:
                    self.counts["allocations"] += record.n_allocations
                    self.counts["bytes"] += record.size
        self._file.unlink()


class IdleCounter:
    """Counts nothing: strace counts the system calls from outside."""

    def __init__(self) -> None:
        self.counts: dict[str, float] = {}

    def start(self) -> None: ...

    def stop(self) -> None: ...


COUNTERS: dict[str, Callable[[], Counter]] = {
    "calls": CallCounter,
    "allocations": AllocationCounter,
    "system calls": IdleCounter,
}


@contextmanager
def no_busy_polling() -> Iterator[None]:
    with mock.patch.object(busy_poll, "SHORT_WAITS_MIN", sys.maxsize):
        yield


def serve(data: str, kind: str) -> None:
    """Run a server that counts its work. Each SIGUSR1 starts or stops the count; a stop prints the totals."""
    from tfmq.server.main import main as server

    counter, counting = COUNTERS[kind](), False

    def toggle(number: int, frame: FrameType | None) -> None:
        nonlocal counting
        if counting:
            counter.stop()
        answer = f"counts {json.dumps(counter.counts)}\n".encode()
        counting = not counting
        if counting:
            counter.start()
        # Unlike print, this may be interrupted by the next signal, which the answer brings about.
        os.write(sys.stdout.fileno(), answer)

    signal.signal(signal.SIGUSR1, toggle)
    with no_busy_polling():
        server.main(["--data", data, "--listen", "127.0.0.1:0", "--set", "http.listen="], standalone_mode=False)


class CountedServer:
    """A broker process that counts its work. Use it as a context manager; `address` is where it listens."""

    def __init__(self, data: str, kind: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from tools.bench.counted_work import serve; serve({data!r}, {kind!r})"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.address = self._line().split()[1]

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise click.ClickException("The server ended before it was ready.")
        return line

    def toggle(self) -> dict[str, float]:
        """Start or stop the count; return the totals so far."""
        self.process.send_signal(signal.SIGUSR1)
        totals: dict[str, float] = json.loads(self._line().removeprefix("counts "))
        return totals

    def __enter__(self) -> CountedServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.wait(20)


class Strace:
    """Counts the system calls of a process's main thread from `start` to `stop`.

    Other threads only wait or fsync, and how often they are woken depends on the scheduler.
    """

    def __init__(self, process_id: int) -> None:
        self._command = ["strace", "-c", "-p", str(process_id)]

    def start(self) -> None:
        self._strace = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        assert self._strace.stderr is not None
        said = ""
        while "attached" not in (line := self._strace.stderr.readline()):
            said += line
            if not line:
                raise click.ClickException(f"strace cannot count system calls here: {said.strip()}")

    def stop(self) -> int:
        self._strace.send_signal(signal.SIGINT)
        _, said = self._strace.communicate(timeout=STRACE_SECONDS)
        found = re.search(r"^\s*[\d.]+\s+[\d.]+\s+(?:\d+\s+)?(\d+)(?:\s+\d+)?\s+total$", said, re.MULTILINE)
        return int(found[1]) if found else 0


def count_work(server: CountedServer, kind: str, count: int, operation: Callable[[], object]) -> dict[str, Any]:
    """Return the work of one `operation`, the mean of `count`: kind of work -> side -> count."""
    if kind == "system calls":
        observers = (Strace(os.getpid()), Strace(server.process.pid))
        for observer in observers:
            observer.start()
        for _ in range(count):
            operation()
        return {kind: {side: each.stop() / count for side, each in zip(SIDES, observers, strict=True)}}
    counter = COUNTERS[kind]()
    before = server.toggle()
    counter.start()
    for _ in range(count):
        operation()
    counter.stop()
    after = server.toggle()
    return {
        name: {"client": counter.counts[name] / count, "broker": (after[name] - before[name]) / count}
        for name in counter.counts
    }


@contextmanager
def operations(address: str) -> Iterator[dict[str, tuple[Callable[[], object], int]]]:
    """Yield the operations by name, each with how many of the small ones take as long."""
    with ExitStack() as stack:
        enter = stack.enter_context
        with tfmq.Admin(address) as admin:
            for topic in (TOPIC, f"{TOPIC}-full"):
                admin.create_topic(topic, partitions=1)
        written = enter(tfmq.Producer(address, acks="written"))
        synced = enter(tfmq.Producer(address, acks="synced"))
        written.send_many(f"{TOPIC}-full", [PAYLOAD] * (80 * MIB_MESSAGES)).result(60)
        last = enter(tfmq.Consumer(address, topics=TOPIC, partitions=[0], start="latest", read="written"))
        last.poll(timeout=0.2)
        full = enter(tfmq.Consumer(address, topics=f"{TOPIC}-full", start="earliest", read="written"))
        group = enter(tfmq.Consumer(address, topics=TOPIC, group="g", start="latest", read="written", commits="manual"))
        group.poll(timeout=0.2)

        def send_and_poll() -> None:
            written.send(TOPIC, PAYLOAD).result()
            assert last.poll(timeout=5.0)

        def send_and_poll_in_group() -> None:
            written.send(TOPIC, PAYLOAD).result()
            assert group.poll(timeout=5.0)

        def send_poll_and_commit() -> None:
            send_and_poll_in_group()
            group.commit()

        def fetch_one_mib() -> None:
            left = MIB_MESSAGES
            while left:
                left -= len(full.poll(timeout=5.0, max_messages=left))

        def transact(count: int) -> None:
            with synced.transaction() as transaction:
                for _ in range(count):
                    transaction.send(TOPIC, PAYLOAD)

        yield {
            IDLE: (lambda: time.sleep(1), 100),
            "send, written": (lambda: written.send(TOPIC, PAYLOAD).result(), 1),
            "send, synced": (lambda: synced.send(TOPIC, PAYLOAD).result(), 1),
            f"send_many of {MANY:,}, synced": (lambda: synced.send_many(TOPIC, [PAYLOAD] * MANY).result(), 10),
            "delayed send, written": (lambda: written.send(TOPIC, PAYLOAD, delay=3600).result(), 1),
            "transaction of 1": (lambda: transact(1), 1),
            "transaction of 10": (lambda: transact(10), 1),
            "send and poll of 1": (send_and_poll, 1),
            "send and poll of 1 in a group": (send_and_poll_in_group, 1),
            "send, poll and commit of 1": (send_poll_and_commit, 1),
            "fetch of 1 MiB": (fetch_one_mib, 10),
        }


def measure(kind: str, count: int) -> Counts:
    """Return the counts of one kind of every operation; `count` operations of the small ones."""
    found: Counts = {}
    with (
        no_busy_polling(),
        tempfile.TemporaryDirectory(prefix="tfmq-counted-") as data,
        CountedServer(data, kind) as server,
        operations(server.address) as every,
    ):
        for name, (operation, weight) in every.items():
            batches_wanted = 1 if name == IDLE else BATCHES
            each = max(1, count // weight // batches_wanted)
            for _ in range(min(WARM_UP, each)):
                operation()
            batches = [count_work(server, kind, each, operation) for _ in range(batches_wanted)]
            found[name] = {
                kind: {side: min(batch[kind][side] for batch in batches) for side in SIDES} for kind in batches[0]
            }
    return found


def measure_all(count: int, kinds: tuple[str, ...]) -> Counts:
    found: Counts = {}
    for kind in kinds:
        for name, counts in measure(kind, count).items():
            found.setdefault(name, {}).update(counts)
    return found


def read_recorded() -> Counts:
    recorded: Counts = json.loads(RECORDED.read_text())["counts"]
    return recorded


def table(found: Counts, recorded: Counts) -> Table:
    view = Table("operation", "work", *SIDES, *(f"{side}, recorded" for side in SIDES), box=None)
    for name, kinds in found.items():
        for kind, sides in kinds.items():
            old = recorded.get(name, {}).get(kind, {})
            cells = [f"{sides[side]:,.1f}" for side in SIDES] + [f"{old.get(side, 0):,.1f}" for side in SIDES]
            view.add_row(name, kind, *cells)
    return view


@click.command(epilog="Example: python -m tools.bench.counted_work --record")
@click.option("--count", default=500, show_default=True, type=click.IntRange(10, 100_000), help="Operations.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(list(COUNTERS)), help="Only this kind of work.")
@click.option("--record", is_flag=True, help="Store the counts in counted_work.json.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(count: int, kinds: tuple[str, ...], record: bool, as_json: bool) -> None:
    """Count the work of each operation, in the client and in the broker."""
    if record and kinds:
        raise click.UsageError("--record stores all kinds of work: leave out --kind")
    found = measure_all(count, kinds or tuple(COUNTERS))
    if record:
        rounded = {
            name: {kind: {side: round(number, 1) for side, number in sides.items()} for kind, sides in kinds.items()}
            for name, kinds in found.items()
        }
        RECORDED.write_text(json.dumps({"python": platform.python_version(), "counts": rounded}, indent=1) + "\n")
    if as_json:
        click.echo(json.dumps(found))
    else:
        Console(width=150).print(table(found, read_recorded() if RECORDED.exists() else {}))


if __name__ == "__main__":
    main()
