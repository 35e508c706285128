"""Memory, processor time and start: idle, with 1,000 connections, parked, with 100 partitions, under load."""

import subprocess
import sys
import time

from tools.bench.broker import Broker, broker
from tools.bench.figures import Figure, median
from tools.bench.load import Client, idle, messages_per_second, park

CONNECTIONS = 1_000
WATCH_SECONDS = 10.0
IMPORT = "import time; t = time.perf_counter(); import tfmq; {use}print(time.perf_counter() - t)"
USE = "tfmq.Producer, tfmq.Consumer, tfmq.Admin; "
"""Names are loaded when they are first used, so that `import tfmq` alone says little."""


def import_seconds(use: str = "") -> float:
    """`import tfmq` in a new interpreter, and what `use` adds."""
    program = IMPORT.format(use=use)
    return float(subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True).stdout)


def processor_percent(server: Broker) -> float:
    """The share of one core that the server uses while we look on."""
    before = server.cpu_seconds()
    time.sleep(WATCH_SECONDS)
    return 100 * (server.cpu_seconds() - before) / WATCH_SECONDS


def connections(rows: list[Figure]) -> None:
    with broker() as server:
        rows.append(Figure("memory, idle", "tfmq-server", server.rss_mb(), "MB", 60, least=False))
        clients = idle(server.address, CONNECTIONS)
        time.sleep(0.5)
        rows.append(Figure("memory, 1,000 idle connections", "tfmq-server", server.rss_mb(), "MB", 60, least=False))
        park(clients, "parked", 30_000)
        time.sleep(1.0)
        rows.append(Figure("memory, 1,000 parked fetches", "tfmq-server", server.rss_mb(), "MB", 60, least=False))
        used = processor_percent(server)
        rows.append(Figure("processor, 1,000 parked fetches", "tfmq-server", used, "% of a core", 2, least=False))
        for client in clients:
            client.close()


def partitions(rows: list[Figure]) -> None:
    with broker() as server:
        client = Client(server.address)
        client.call(11, "hundred", 100, {})
        messages_per_second(server.address, "hundred", 100, 100, 1.0)
        rows.append(Figure("memory, 100 partitions written to", "tfmq-server", server.rss_mb(), "MB"))
        time.sleep(1.0)
        rows.append(Figure("processor, 100 idle partitions", "tfmq-server", processor_percent(server), "% of a core"))
        client.close()


def load(rows: list[Figure]) -> None:
    from tools.bench.consume import COUNT, LARGE_COUNT, fill, payloads, polled
    from tools.bench.produce import PAYLOAD, many

    with broker() as server:
        for _ in range(3):
            many(server, "load", [PAYLOAD] * 1_000_000)
        messages_per_second(server.address, "load", 64, 1, 2.0)
        fill(server)
        for topic in ("same", "large"):
            polled(server, topic, COUNT if topic == "same" else LARGE_COUNT, payloads)
        peak = server.peak_rss_mb()
        rows.append(Figure("memory, most under load", "tfmq-server", peak, "MB", 150, least=False, note="peak"))


def starts(runs: int, rows: list[Figure]) -> None:
    ready = []
    for _ in range(runs):
        with broker() as server:
            ready.append(server.start_seconds)
    rows.append(Figure("start to ready, new folder", "tfmq-server", median(ready), "s", 0.5, least=False))
    loaded = median([import_seconds() for _ in range(runs)])
    rows.append(Figure("import tfmq", "client", loaded, "s", 0.15, least=False))
    used = median([import_seconds(USE) for _ in range(runs)])
    rows.append(Figure("import tfmq, and its three API variants", "client", used, "s"))


def measure(runs: int, peers: bool) -> list[Figure]:
    """The footprint rows; peers have none here."""
    rows: list[Figure] = []
    starts(runs, rows)
    connections(rows)
    partitions(rows)
    load(rows)
    return rows
