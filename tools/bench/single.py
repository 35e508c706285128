"""One synchronous send after the other: `written` beside a raw Twisted echo, `synced` beside write + fdatasync.

Each is measured twice. "pinned": the servers run on one processor, this program on another. Otherwise the scheduler
puts both ends on one processor or on two, which alone makes an echo of 14 or of 60 to 80 us (measured). Users pin no
programs. A send runs on two processors in both ways, so it is compared with the pinned echo of the same run, and a
`written` send also with the echo that is placed as it is.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import tfmq
from tools.bench import disk
from tools.bench.broker import broker
from tools.bench.figures import Figure, median, spread
from tools.bench.peers.brokers import PeerMissing, kafka

COUNT = 2_000
PAYLOAD = b"x" * 100
FRAME_BYTES = 220  # what such a send puts on the wire, about: the echo moves as much

ECHO = """
from twisted.internet import epollreactor; epollreactor.install()
from twisted.internet import protocol, reactor
class Echo(protocol.Protocol):
    def dataReceived(self, data): self.transport.write(data)
factory = protocol.Factory.forProtocol(Echo)
port = reactor.listenTCP(0, factory, interface="127.0.0.1")
print(port.getHost().port, flush=True)
reactor.run()
"""


@contextmanager
def echo() -> Iterator[int]:
    """A Twisted echo server in a process of its own; yields its port."""
    process = subprocess.Popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


@contextmanager
def on_processor(number: int) -> Iterator[None]:
    """This thread, and the processes started meanwhile, run on the `number`-th processor, if there are several."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(allowed)[number % len(allowed)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def echo_seconds(port: int) -> float:
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data, times = b"e" * FRAME_BYTES, []
        for _ in range(COUNT):
            begun = time.perf_counter()
            link.sendall(data)
            got = 0
            while got < FRAME_BYTES:
                got += len(link.recv(4096))
            times.append(time.perf_counter() - begun)
        return median(times)


def send_seconds(address: str, acks: str) -> float:
    with tfmq.Producer(address, acks=acks) as producer:
        producer.send(f"single-{acks}", PAYLOAD).result()
        times = []
        for _ in range(COUNT):
            begun = time.perf_counter()
            producer.send(f"single-{acks}", PAYLOAD).result()
            times.append(time.perf_counter() - begun)
        return median(times)


PLACEMENTS = ("", ", pinned")
ECHO_US = 47.0
"""The pinned echo at which a synced send may take `SYNCED_US_MAX` more than the bare fsync; else in proportion."""
SYNCED_US_MAX = 150.0
WRITTEN_RATIO_MAX = 2.2


def measure(runs: int, peers: bool) -> list[Figure]:
    """The medians of each run, in turn; the targets hold against the pinned echo and the force of the same run.

    Kafka comes after them, not in turn: a Java process that waits takes processor time all the same, which lengthens
    the median of tfmq.
    """
    names = [name + placement for placement in PLACEMENTS for name in ("echo", "written", "force", "synced")]
    values: dict[str, list[float]] = {name: [] for name in (*names, "kafka", "kafka forced")}
    note = ""
    with ExitStack() as stack:
        ends = {}
        for placement in PLACEMENTS:
            with on_processor(1) if placement else nullcontext():
                ends[placement] = stack.enter_context(broker()), stack.enter_context(echo())
        for _ in range(runs):
            for placement, (server, port) in ends.items():
                with on_processor(0) if placement else nullcontext():
                    values["echo" + placement].append(echo_seconds(port))
                    values["written" + placement].append(send_seconds(server.address, "written"))
                    force = median(disk.force_seconds(FRAME_BYTES, COUNT, str(server.data.parent)))
                    values["force" + placement].append(force)
                    values["synced" + placement].append(send_seconds(server.address, "synced"))
    for name in ("kafka", "kafka forced") if peers else ():
        try:
            with kafka(forced=name != "kafka") as other:
                values[name] += [other.rate("one_at_a_time", "single", COUNT) for _ in range(runs)]
        except PeerMissing as missing:
            note = str(missing)
    return figures({name: [v * 1e6 for v in times] for name, times in values.items()}, note)


def _ratio(row: str, who: str, ratios: list[float]) -> Figure:
    return Figure(row, who, median(ratios), "x", WRITTEN_RATIO_MAX, least=False, note=spread(ratios))


def figures(us: dict[str, list[float]], note: str) -> list[Figure]:
    rows = []
    pinned_us = us["echo, pinned"]
    for placement in PLACEMENTS:
        echo_us, written, force, synced = (us[name + placement] for name in ("echo", "written", "force", "synced"))
        beside_own = [a / b for a, b in zip(written, echo_us, strict=True)]
        beside_pinned = [a / b for a, b in zip(written, pinned_us, strict=True)]
        over = median([a - b for a, b in zip(synced, force, strict=True)])
        over_max = round(SYNCED_US_MAX * median(pinned_us) / ECHO_US)
        row_written, row_synced = f"one send, written{placement}, p50", f"one send, synced{placement}, p50"
        rows += [
            Figure(row_written, "tfmq", median(written), "us", note=spread(written)),
            Figure(row_written, "raw Twisted echo", median(echo_us), "us", note=spread(echo_us)),
            _ratio(row_written, "ratio to the echo", beside_own),
            *([] if placement else [_ratio(row_written, "ratio to the pinned echo", beside_pinned)]),
            Figure(row_synced, "tfmq", median(synced), "us", note=spread(synced)),
            Figure(row_synced, "write + fdatasync", median(force), "us", note=spread(force)),
            Figure(row_synced, "above write + fdatasync", over, "us", over_max, least=False),
        ]
    for name in ("kafka", "kafka forced"):
        if us[name]:
            rows.append(
                Figure("one send, p50", f"{name}, confluent-kafka", median(us[name]), "us", note=spread(us[name]))
            )
    if note:
        rows.append(Figure("one send, p50", "Kafka", float("nan"), "us", note=note))
    return rows
