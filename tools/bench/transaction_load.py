"""Load with transactions for the benchmarks: many synchronous clients in one process, frames made by hand.

As in tools/bench/load.py: each connection does just what a client does on the wire for a small transaction,
one TRANSACT with ten messages, waits for its answer, and sends the next.
"""

import select
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgpack

from journal.record.batch import split_blocks
from tools.bench.load import PAYLOAD, PAYLOAD_CRC, PREFIX, RECORD, Client, expect_ok, frame

MESSAGES = 10
TRANSACT, BEGIN, PRODUCE, PREPARE, COMMIT = 57, 50, 21, 51, 52
SEQUENCES = 1 << 24


def records(producer_id: int, sequence: int, count: int, payload: bytes = PAYLOAD, crc: int = PAYLOAD_CRC) -> bytes:
    """`count` records with the same payload, whose CRC-32 is `crc`."""
    return b"".join(
        RECORD.pack(len(payload), crc, producer_id << 24 | number, 0) + payload
        for number in range(sequence, sequence + count)
    )


class Transactor(Client):
    """A client that sends one whole transaction after the other to one partition."""

    def __init__(self, address: str, topic: str, partition: int = 0) -> None:
        super().__init__(address)
        self.topic_name, self.partition = topic, partition
        self.incarnation = self.topic(topic)
        self.lease()

    def lease(self) -> None:
        self.producer_id: int = self.call(20, 1)[0]
        self.sequence = self.number = 0

    def next_frame(self, messages: int = MESSAGES) -> bytes:
        body = records(self.producer_id, self.sequence, messages)
        batch = [
            self.topic_name, self.incarnation, self.partition, self.sequence, messages, len(body),
            split_blocks(body),
        ]  # fmt: skip
        header = [TRANSACT, self.number, self.producer_id, self.number, [batch], []]
        self.sequence += messages
        self.number += 1
        return frame(header, body)

    # Step by step

    def begin(self, xid: str) -> int:
        """A named transaction; its epoch."""
        epoch: int = self.call(BEGIN, self.producer_id, self.number, xid, 900_000, "")[0]
        self.number += 1
        return epoch

    def send(self, epoch: int, count: int, payload: bytes = PAYLOAD, crc: int = PAYLOAD_CRC) -> None:
        """One batch into a transaction, and its answer."""
        body = records(self.producer_id, self.sequence, count, payload, crc)
        header = [
            self.topic_name, self.incarnation, self.partition, self.producer_id, self.sequence, count, 1,
            split_blocks(body), None, epoch,
        ]  # fmt: skip
        self.call_with(PRODUCE, header, body)
        self.sequence += count

    def call_with(self, code: int, fields: list[object], body: bytes) -> None:
        self.correlation += 1
        self.socket.sendall(frame([code, self.correlation, *fields], body))
        expect_ok(self.socket.recv(4096))

    def prepared(self, xids: Iterable[str]) -> Generator[bytes, list[Any], None]:
        """Frames that prepare a transaction with one message for each name; takes each answer's fields."""
        for xid in xids:
            header = [BEGIN, 0, self.producer_id, self.number, xid, 900_000, ""]
            epoch = (yield frame(header))[0]
            body = records(self.producer_id, self.sequence, 1)
            header = [
                PRODUCE, 0, self.topic_name, self.incarnation, self.partition, self.producer_id, self.sequence, 1,
                1, split_blocks(body), None, epoch,
            ]  # fmt: skip
            yield frame(header, body)
            yield frame([PREPARE, 0, xid, epoch, None, []])
            self.number, self.sequence = self.number + 1, self.sequence + 1


def prepare_many(address: str, topic: str, count: int, clients: int = 64) -> None:
    """Leaves `count` transactions in doubt, named doubt-0 and so on."""
    poll, running = select.epoll(), {}
    for first in range(clients):
        client = Transactor(address, topic)
        program = client.prepared(f"doubt-{number}" for number in range(first, count, clients))
        running[client.socket.fileno()] = (client, program)
        poll.register(client.socket.fileno(), select.EPOLLIN)
        client.socket.sendall(next(program))
    while running:
        for descriptor, _ in poll.poll(10.0):
            client, program = running[descriptor]
            answer = client.socket.recv(4096)
            expect_ok(answer)
            fields = msgpack.unpackb(answer[8 : 8 + PREFIX.unpack_from(answer)[1]])[2:]
            try:
                client.socket.sendall(program.send(fields))
            except StopIteration:
                del running[descriptor]
                poll.unregister(descriptor)
                client.close()


def transactions_per_second(address: str, topic: str, clients: int, partitions: int, seconds: float) -> float:
    """`clients` clients over `partitions` for about `seconds`; acknowledged transactions a second."""
    senders = [Transactor(address, topic, number % partitions) for number in range(clients)]
    poll, by_descriptor = select.epoll(), {}
    for sender in senders:
        sender.socket.setblocking(False)
        by_descriptor[sender.socket.fileno()] = sender
        poll.register(sender.socket.fileno(), select.EPOLLIN)
        sender.socket.send(sender.next_frame())
    begun, done = time.perf_counter(), 0
    while (now := time.perf_counter()) < begun + seconds:
        for descriptor, _ in poll.poll(1.0):
            sender = by_descriptor[descriptor]
            expect_ok(sender.socket.recv(4096))
            done += 1
            sender.socket.send(sender.next_frame())
    for sender in senders:
        sender.close()
    return done / (now - begun)


def paced(address: str, topic: str, rate: float) -> None:
    """One client, `rate` transactions a second until the process is ended."""
    client = Transactor(address, topic)
    due = time.perf_counter()
    while True:
        client.socket.sendall(client.next_frame())
        expect_ok(client.socket.recv(4096))
        due = max(due + 1 / rate, time.perf_counter() - 1)
        time.sleep(max(0.0, due - time.perf_counter()))


@contextmanager
def beside(address: str, topic: str, rate: float) -> Iterator[None]:
    """While this lasts, another process commits `rate` transactions a second."""
    command = [sys.executable, "-m", "tools.bench.transaction_load", address, topic, str(rate)]
    process = subprocess.Popen(command)
    try:
        time.sleep(0.5)
        yield
        if process.poll() is not None:
            raise RuntimeError("the transactions beside have ended")
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    paced(sys.argv[1], sys.argv[2], float(sys.argv[3]))
