"""The same broker with and without pooled receive memory: produce rate and memory under many connections.

    python -m tools.bench.buffers_server [--connections 200] [--frames 100]

Each connection sends frames of 1,000 records of 100 bytes, written acknowledgement, one in flight. "without"
replaces the shared arena by a fresh `bytearray` for every read and pooled tails by plain ones.
"""

from __future__ import annotations

import argparse
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from types import SimpleNamespace
from typing import Any

from journal.record.format import make_record
from tfmq.protocol import commands, frames
from tfmq.server.connection_limits import READ_BYTES

RECORDS = 1000
PAYLOAD = b"x" * 100
RUNS = 3


class PlainBuffer:
    """As a pooled buffer, on memory of its own that the collector takes back."""

    def __init__(self, size: int) -> None:
        self.size = self.capacity = size
        self.view = memoryview(bytearray(size))
        self.holds = 1

    def retain(self) -> PlainBuffer:
        """Nothing to count: references keep the memory."""
        return self

    def release(self) -> None:
        """Nothing to give back."""


class PlainPool:
    """Allocates without a pool."""

    def allocate(self, size: int) -> PlainBuffer:
        """A fresh one."""
        return PlainBuffer(size)

    def stats(self) -> Any:
        """Nothing is known."""
        return SimpleNamespace(live_bytes=0, live_count=0, chunk_counts=(), allocated_count=0)

    def trim(self) -> None:
        """Nothing is kept."""


class FreshArena:
    """A new `bytearray` for every read."""

    def __init__(self, pool: PlainPool) -> None:
        self.buffer = PlainBuffer(0)

    def room(self) -> memoryview:
        """Memory for one read."""
        self.buffer = PlainBuffer(READ_BYTES)
        return self.buffer.view

    def used(self, size_bytes: int) -> None:
        """The rest of it is lost."""

    def turn_ended(self) -> None:
        """Nothing to rewind."""

    def close(self) -> None:
        """Nothing to give back."""


def serve(plain: bool, data: str) -> None:
    """Run the server in this process."""
    from tfmq.server import connection_limits as traffic
    from tfmq.server import main
    from tfmq.server import server as service

    if plain:
        vars(service)["Pool"] = PlainPool
        vars(traffic)["ReceiveArena"] = FreshArena
    main.main(["--data", data, "--listen", "127.0.0.1:0", "--log-level", "error"])


class Client:
    """One connection with a producer id of its own."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address)
        self.decoder = frames.Decoder()
        self.sequence = 0
        self.ask(commands.Hello("TFMQ", 1, 1, "bench", {}))

    def send(self, request: Any, body: bytes = b"") -> None:
        code = commands.BY_REQUEST[type(request)].code
        self.socket.sendall(b"".join(frames.encode((code, 1, *request), body)))

    def receive(self) -> list[Any]:
        """The fields of the next reply."""
        while True:
            for frame in self.decoder.feed(self.socket.recv(1 << 16)):
                if frame.header[0]:
                    raise RuntimeError(f"refused: {frame.header}")
                return frame.header[2:]

    def ask(self, request: Any) -> list[Any]:
        self.send(request)
        return self.receive()

    def prepare(self, incarnation: int) -> None:
        """Make the records of every batch once; only their ids would change, so each uses its own id range."""
        self.producer = self.ask(commands.LeaseProducerIds(1))[0]
        self.incarnation = incarnation

    def produce(self) -> None:
        """Send the next batch."""
        first = (self.producer << 24) + self.sequence
        body = b"".join(make_record(PAYLOAD, first + number) for number in range(RECORDS))
        half = len(body) // 2
        blocks = [commands.Block(half, RECORDS // 2, zlib.crc32(part)) for part in (body[:half], body[half:])]
        request = commands.Produce(
            "bench", self.incarnation, 0, self.producer, self.sequence, RECORDS, commands.ACKS_WRITTEN, blocks
        )
        self.sequence += RECORDS
        self.send(request, body)


def processor_seconds(process: int) -> float:
    """What the process has used so far, in user and system mode."""
    with open(f"/proc/{process}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(way: str, connections: int, count: int) -> tuple[float, float, float]:
    """(records a second, server's processor time a frame in us, its memory in MB) of one run."""
    with tempfile.TemporaryDirectory() as data:
        server = subprocess.Popen(
            [sys.executable, "-m", "tools.bench.buffers_server", "--serve", way, "--data", data],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout is not None
            host, _, port = server.stdout.readline().split()[1].rpartition(":")
            clients = [Client((host, int(port))) for _ in range(connections)]
            incarnation = clients[0].ask(commands.CreateTopic("bench", 1, {}))[0]
            for client in clients:
                client.prepare(incarnation)
            before = processor_seconds(server.pid)
            rate = drive(clients, count)
            used = (processor_seconds(server.pid) - before) / (count + connections) * 1e6
            memory = clients[0].ask(commands.Status())[0]["memory_bytes"] / 1e6
        finally:
            server.kill()
            server.wait()
        return rate, used, memory


def drive(clients: list[Client], count: int) -> float:
    """Each client keeps one batch in flight until `count` batches are answered; records a second."""
    poller = select.epoll()
    by_descriptor = {client.socket.fileno(): client for client in clients}
    for descriptor in by_descriptor:
        poller.register(descriptor, select.EPOLLIN)
    started = time.perf_counter()
    for client in clients:
        client.produce()
    answered = 0
    while answered < count:
        for descriptor, _ in poller.poll():
            by_descriptor[descriptor].receive()
            by_descriptor[descriptor].produce()
            answered += 1
    elapsed = time.perf_counter() - started
    for client in clients:
        client.receive()
    return answered * RECORDS / elapsed


def main() -> None:
    """Both ways, in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--frames", type=int, default=2000)
    parser.add_argument("--serve", choices=("pool", "plain"), help=argparse.SUPPRESS)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve == "plain", arguments.data)
        return
    found: dict[str, list[tuple[float, float, float]]] = {"pool": [], "plain": []}
    for _ in range(RUNS):
        for way in found:
            found[way].append(measure(way, arguments.connections, arguments.frames))
    print(f"{arguments.connections} connections, batches of {RECORDS} x {len(PAYLOAD)} B, written")
    for way, name in (("pool", "with the pool"), ("plain", "without")):
        rates, used, memories = zip(*found[way], strict=True)
        print(
            f"  {name:<14} {statistics.median(rates) / 1e6:5.2f} M records/s  "
            f"{statistics.median(used):6.0f} us of the server's processor a frame  {max(memories):6.1f} MB"
        )


if __name__ == "__main__":
    main()
