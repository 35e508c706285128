"""A load generator for many small clients: one process, one thread, one poll, frames made by hand.

A Python client in a thread each would measure the interpreter's lock, not the broker; so each connection here does
just what a synchronous producer does on the wire: send one batch of one message, wait for its answer, send the next.
"""

import select
import socket
import struct
import time
import zlib
from collections.abc import Sequence
from typing import Any

import msgpack

from tfmq.protocol import commands

PAYLOAD = b"x" * 100
PREFIX = struct.Struct(">II")
RECORD = struct.Struct(">IIQI")
PAYLOAD_CRC = zlib.crc32(PAYLOAD)


def frame(header: Sequence[Any], body: bytes = b"") -> bytes:
    packed: bytes = msgpack.packb(list(header))
    return PREFIX.pack(4 + len(packed) + len(body), len(packed)) + packed + body


class Client:
    """One connection, blocking until it is told to run in the poll."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.correlation = 0
        self.call(1, commands.MAGIC, commands.VERSION_MIN, commands.VERSION_MAX, "bench", {})

    def call(self, code: int, *fields: Any) -> list[Any]:
        """One request, one reply: the reply's fields."""
        self.correlation += 1
        self.socket.sendall(frame([code, self.correlation, *fields]))
        data = b""
        while len(data) < 8 or len(data) < 4 + PREFIX.unpack_from(data)[0]:
            more = self.socket.recv(1 << 16)
            if not more:
                raise ConnectionError("the broker closed the connection")
            data += more
        header: list[Any] = msgpack.unpackb(data[8 : 8 + PREFIX.unpack_from(data)[1]])
        if header[0] != 0:
            raise RuntimeError(f"refused: {header}")
        return header[2:]

    def topic(self, name: str) -> int:
        """The incarnation of a topic, made where it is not there."""
        incarnation: int = self.call(10, [name], True)[0][0][1]
        return incarnation

    def close(self) -> None:
        self.socket.close()


class Sender(Client):
    """A synchronous producer of one message after the other to one partition."""

    def __init__(self, address: str, topic: str, partition: int, acks: int) -> None:
        super().__init__(address)
        self.topic_name, self.partition, self.acks = topic, partition, acks
        self.incarnation = self.topic(topic)
        self.producer_id: int = self.call(20, 1)[0]
        self.sequence = 0

    def next_frame(self) -> bytes:
        body = RECORD.pack(len(PAYLOAD), PAYLOAD_CRC, self.producer_id << 24 | self.sequence, 0) + PAYLOAD
        header = [21, self.sequence, self.topic_name, self.incarnation, self.partition, self.producer_id]
        header += [self.sequence, 1, self.acks, [[len(body), 1, zlib.crc32(body)]]]
        self.sequence += 1
        return frame(header, body)


def messages_per_second(
    address: str, topic: str, clients: int, partitions: int, seconds: float, acks: int = 2
) -> float:
    """`clients` synchronous senders over `partitions` for about `seconds`; acknowledged messages a second."""
    senders = [Sender(address, topic, number % partitions, acks) for number in range(clients)]
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
            answer = sender.socket.recv(4096)
            expect_ok(answer)
            done += 1
            sender.socket.send(sender.next_frame())
    for sender in senders:
        sender.close()
    return done / (now - begun)


def expect_ok(answer: bytes) -> None:
    """An answer this small comes in one piece; its header's second byte is the status, 0 for ok."""
    if len(answer) < 10 or answer[9] != 0:
        raise RuntimeError(f"the broker refused a message: {answer[:200]!r}")


def idle(address: str, count: int) -> list[Client]:
    """`count` connections that have said hello and nothing more."""
    return [Client(address) for _ in range(count)]


def park(clients: list[Client], topic: str, wait_ms: int) -> None:
    """Let every client wait at the end of partition 0 of `topic`, one parked fetch each."""
    incarnation = clients[0].topic(topic)
    end = clients[0].call(31, topic, incarnation, 0, commands.BY_LATEST, 0)[0]
    for client in clients:
        client.socket.sendall(frame([30, 1 << 20, topic, incarnation, 0, end, -1, 1 << 18, wait_ms]))
