"""Python calls per send, poll, transaction and delayed send, in the client and in the broker (sys.setprofile).

Counts do not depend on the load of the machine, so they show what a change of the code costs before any clock does:

    python -m tools.bench.calls --count 500
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from types import FrameType
from typing import Any

import click

import tfmq

TOPIC = "calls"


class CallCounter:
    """Counts the Python calls of the thread that starts it."""

    def __init__(self) -> None:
        self.count = 0

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.count += 1

    def start(self) -> None:
        sys.setprofile(self._profile)

    def stop(self) -> None:
        sys.setprofile(None)


def serve(data: str) -> None:
    """Run a server that counts its calls; it prints the count so far on standard output for each SIGUSR1."""
    from tfmq.server.main import main as server

    counter = CallCounter()

    def report(number: int, frame: FrameType | None) -> None:
        counter.stop()
        print(f"calls {counter.count}", flush=True)
        counter.start()

    signal.signal(signal.SIGUSR1, report)
    counter.start()
    server.main(["--data", data, "--listen", "127.0.0.1:0"], standalone_mode=False)


class CountedServer:
    """A broker process that counts its calls. Use it as a context manager; `address` is where it listens."""

    def __init__(self, data: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from tools.bench.calls import serve; serve({data!r})"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.address = self._line().split()[1]

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise click.ClickException("The server ended before it was ready.")
        return line

    def calls(self) -> int:
        """Return how many calls its main thread made so far."""
        self._process.send_signal(signal.SIGUSR1)
        return int(self._line().split()[1])

    def __enter__(self) -> CountedServer:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait(20)


def counted(server: CountedServer, count: int, operation: Callable[[], object]) -> tuple[float, float]:
    """Return the calls of one `operation` in (client, broker), as means of `count`."""
    for _ in range(20):
        operation()
    counter, before = CallCounter(), server.calls()
    idle = server.calls() - before
    before = server.calls()
    counter.start()
    for _ in range(count):
        operation()
    counter.stop()
    return counter.count / count, (server.calls() - before - idle) / count


def measured(count: int) -> dict[str, tuple[float, float]]:
    """Return the calls of each operation in (client, broker)."""
    found: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory(prefix="tfmq-calls-") as data, CountedServer(data) as server:
        with tfmq.Admin(server.address) as admin:
            admin.create_topic(TOPIC, partitions=1)
        for acks in ("written", "synced"):
            with tfmq.Producer(server.address, acks=acks) as producer:
                found[f"send ({acks})"] = counted(server, count, lambda: producer.send(TOPIC, b"x" * 100).result())
        with tfmq.Producer(server.address, acks="written") as producer:
            found["delayed send (written)"] = counted(
                server, count, lambda: producer.send(TOPIC, b"x" * 100, delay=3600).result()
            )
            # Held open, so that the poll below finds what it is counted for.
            with tfmq.Consumer(
                server.address, topics=TOPIC, partitions=[0], start="latest", read="written"
            ) as consumer:
                consumer.poll(timeout=0.2)

                def send_and_poll() -> None:
                    producer.send(TOPIC, b"x" * 100).result()
                    assert consumer.poll(timeout=5.0)

                client, broker = counted(server, count, send_and_poll)
                sent = found["send (written)"]
                found["poll of one message"] = (client - sent[0], broker - sent[1])
        with tfmq.Producer(server.address) as producer:

            def transact() -> None:
                with producer.transaction() as transaction:
                    transaction.send(TOPIC, b"x" * 100)

            found["transaction of one message"] = counted(server, count, transact)
    return found


@click.command(epilog="Example: python -m tools.bench.calls --json")
@click.option("--count", default=500, show_default=True, type=click.IntRange(10, 100_000), help="Operations.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(count: int, as_json: bool) -> None:
    """Count the Python calls of each operation, in the client and in the broker."""
    found = measured(count)
    if as_json:
        click.echo(json.dumps({name: {"client": c, "broker": b} for name, (c, b) in found.items()}))
        return
    for name, (client, broker) in found.items():
        click.echo(f"{name:28} client {client:7.1f}  broker {broker:7.1f}")


if __name__ == "__main__":
    main()
