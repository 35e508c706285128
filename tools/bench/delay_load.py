"""Makes delayed messages for benchmarks: batches on the wire, with due times of any pattern."""

import os
import random
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tfmq
from journal.record.batch import split_blocks
from tools.bench.load import PAYLOAD, PAYLOAD_CRC, Client, expect_ok, frame
from tools.bench.transaction_load import PRODUCE, SEQUENCES, records

PART = 5_000
"""Messages a request."""
IN_FLIGHT = 8
"""Requests without an answer."""
RELATIVE = 1 << 63
WAIT_SECONDS = 900.0
SCALE = float(os.environ.get("TFMQ_BENCH_SCALE", "1"))
"""Of the counts of messages: less than 1 to see whether a row works at all. Its figures are no figures then."""


def scaled(count: int) -> int:
    """Whole requests."""
    return max(1, round(SCALE * count / PART)) * PART


class Delayer(Client):
    """Sends parts of delayed messages, some requests at a time."""

    def __init__(self, address: str, topic: str) -> None:
        super().__init__(address)
        self.topic_name = topic
        self.incarnation = self.topic(topic)
        self.unanswered = 0
        self.lease()

    def lease(self) -> None:
        self.producer_id: int = self.call(20, 1)[0]
        self.sequence = 0

    def send(self, dues: bytes, payload: bytes = PAYLOAD, crc: int = PAYLOAD_CRC) -> None:
        """One request; waits where too many have no answer. `dues` as on the wire."""
        count = len(dues) // 8
        if self.sequence + count >= SEQUENCES:
            self.settle()
            self.lease()
        body = records(self.producer_id, self.sequence, count, payload, crc)
        header = [
            PRODUCE, self.sequence, self.topic_name, self.incarnation, 0, self.producer_id, self.sequence, count, 2,
            split_blocks(body), dues,
        ]  # fmt: skip
        self.sequence += count
        self.socket.sendall(frame(header, body))
        self.unanswered += 1
        while self.unanswered >= IN_FLIGHT:
            self.answer()

    def answer(self) -> None:
        """One answer, with all its due times."""
        size = int.from_bytes(self._exactly(4), "big")
        expect_ok(size.to_bytes(4, "big") + self._exactly(size))
        self.unanswered -= 1

    def settle(self) -> None:
        while self.unanswered:
            self.answer()

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            if not more:
                raise ConnectionError("the broker closed the connection")
            data += more
        return bytes(data)


def words(values: Iterator[int]) -> bytes:
    """As on the wire."""
    found = array("Q", values)
    found.byteswap()
    return found.tobytes()


def spread_delays(first_ms: int, span_ms: int, count: int = PART) -> bytes:
    """Relative, and spread evenly over the span, in order."""
    return words(RELATIVE | max(0, first_ms + number * span_ms // count) for number in range(count))


def random_delays(first_ms: int, span_ms: int, count: int = PART) -> bytes:
    """Relative, anywhere in the span, in no order."""
    return words(RELATIVE | max(0, first_ms + random.randrange(span_ms)) for _ in range(count))


def wait_for(address: str, topic: str, count: int) -> None:
    """Until the topic has so many messages."""
    until = time.monotonic() + WAIT_SECONDS
    with tfmq.Admin(address) as admin:
        while admin.topic(topic).partitions[0].end_ordinal < count:
            if time.monotonic() > until:
                raise RuntimeError(f"{topic} has {admin.topic(topic).partitions[0].end_ordinal:,} of {count:,}")
            time.sleep(0.05)


@contextmanager
def kept() -> Iterator[Path]:
    """A data folder on the disk of this checkout."""
    with tempfile.TemporaryDirectory(prefix="tfmq-bench-", dir=".") as folder:
        yield Path(folder) / "data"
