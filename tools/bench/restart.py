"""The start after kill -9 with 1 GB in 100 partitions."""

import tempfile
import time
from pathlib import Path

import tfmq
from tools.bench.broker import broker, start
from tools.bench.figures import Figure, median, spread

PARTITIONS = 100
TOTAL_BYTES = 1 << 30
PAYLOAD = b"x" * 1000
BATCH = 1_000


def same(partition: int, count: int) -> list[tfmq.Message]:
    return [tfmq.Message(PAYLOAD, partition=partition)] * count


def fill(address: str) -> None:
    with tfmq.Admin(address) as admin:
        admin.create_topic("many", partitions=PARTITIONS)
    with tfmq.Producer(address, acks="written") as producer:
        for number in range(TOTAL_BYTES // (BATCH * len(PAYLOAD))):
            producer.send_many("many", same(number % PARTITIONS, BATCH))
        producer.flush()


def measure(runs: int, peers: bool) -> list[Figure]:
    """Seconds from exec to `ready`, killed before each; in between some messages, so that no start is a clean one."""
    times = []
    with tempfile.TemporaryDirectory(prefix="tfmq-bench-", dir=".") as folder:
        data = Path(folder) / "data"
        with broker(data=data) as server:
            fill(server.address)
            server.process.kill()
            server.process.wait()
        for _ in range(runs):
            server = start(data)
            times.append(server.start_seconds)
            with tfmq.Producer(server.address) as producer:
                for partition in range(PARTITIONS):
                    producer.send_many("many", same(partition, 10))
                producer.flush()
            time.sleep(1.5)
            server.process.kill()
            server.process.wait()
    row = "start after kill -9, 1 GB in 100 partitions"
    return [Figure(row, "tfmq-server", median(times), "s", 2.0, least=False, note=spread(times))]
