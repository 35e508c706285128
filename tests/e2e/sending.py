"""A server process of a test's own, and a sender that is nothing but requests: what consumers are tried with."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from journal.record.format import make_id, make_record, tag_flag
from tfmq.client.connection.addresses import parse_servers
from tfmq.client.connection.connection import ClientConnection
from tfmq.client.connection.requests import request
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.message import encode_attribute
from tfmq.protocol import commands

READY_SECONDS = 30.0
BLOCK_BYTES = 64 << 10


class Server:
    """One tfmq-server; `start` again brings it up on the same port and folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = 0
        self.process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> "Server":
        command = [sys.executable, "-m", "tfmq.server.main", "--data", str(self.folder / "data")]
        command += ["--listen", f"127.0.0.1:{self.port}"]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        assert len(words) == 2, (self.folder / "server.log").read_text()[-2000:]
        self.port = int(words[1].rpartition(":")[2])
        return self

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(READY_SECONDS)
            self.process = None


class Sender:
    """Sends plain batches to one topic, each forced when the call returns."""

    def __init__(self, address: str, topic: str = "orders", partitions: int = 1) -> None:
        self.link = ClientConnection(parse_servers(address), time.monotonic)
        self.driver = BlockingDriver(self.link)
        self.topic = topic
        self.incarnation = self.ask(commands.CreateTopic(topic, partitions, {})).incarnation
        self.producer = self.ask(commands.LeaseProducerIds(partitions)).first
        self.sequences = [0] * 64

    def ask(self, message: Any, *body: bytes) -> Any:
        return self.driver.run(request(self.link, message, *body))

    def send(self, payloads: Sequence[bytes], partition: int = 0, tag: str | None = None) -> None:
        begin = self.sequences[partition]
        attribute = encode_attribute(born_ms=int(time.time() * 1000), tag=tag)
        flag = tag_flag(tag) if tag else 0
        records = [
            make_record(payload, make_id(self.producer + partition, begin + n), flag, attribute)
            for n, payload in enumerate(payloads)
        ]
        self.sequences[partition] += len(records)
        blocks = [commands.Block(len(data), count, crc32(data)) for data, count in cut(records)]
        self.ask(
            commands.Produce(
                self.topic,
                self.incarnation,
                partition,
                self.producer + partition,
                begin,
                len(records),
                commands.ACKS_SYNCED,
                blocks,
            ),
            b"".join(records),
        )

    def close(self) -> None:
        self.driver.close()


def cut(records: Sequence[bytes]) -> Iterator[tuple[bytes, int]]:
    """(bytes, count) of blocks of whole records."""
    gathered: list[bytes] = []
    size = 0
    for record in records:
        if gathered and size + len(record) > BLOCK_BYTES:
            yield b"".join(gathered), len(gathered)
            gathered, size = [], 0
        gathered.append(record)
        size += len(record)
    yield b"".join(gathered), len(gathered)
