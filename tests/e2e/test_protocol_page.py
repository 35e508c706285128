"""docs/protocol.md is enough to write a client from: `PageClient` knows that page and nothing of tfmq.

Only socket, struct, msgpack and zlib; it is held against a real server process.
"""

import re
import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "protocol.md"


class PageError(Exception):
    """An error reply: number, code, outcome, sentence, details."""


class PageClient:
    """A client written from the page."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self.correlation = 0
        self.welcome, _ = self.call(1, "TFMQ", 1, 1, "page", {})

    def send(self, command: int, *fields: Any, body: bytes = b"") -> int:
        self.correlation += 1
        header = msgpack.packb([command, self.correlation, *fields])
        size = 4 + len(header) + len(body)
        self.socket.sendall(struct.pack(">II", size, len(header)) + header + body)
        return self.correlation

    def exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.socket.recv(size - len(data))
            if not piece:
                raise ConnectionError("the broker ended the connection")
            data += piece
        return data

    def receive(self) -> tuple[int, list[Any], bytes]:
        size, header_size = struct.unpack(">II", self.exactly(8))
        rest = self.exactly(size - 4)
        number, correlation, *fields = msgpack.unpackb(rest[:header_size])
        if number:
            raise PageError(-number, *fields)
        return correlation, fields, rest[header_size:]

    def call(self, command: int, *fields: Any, body: bytes = b"") -> tuple[list[Any], bytes]:
        correlation = self.send(command, *fields, body=body)
        answered, reply, reply_body = self.receive()
        assert answered == correlation
        return reply, reply_body

    def produce(
        self,
        topic: str,
        incarnation: int,
        producer_id: int,
        sequence: int,
        payloads: list[bytes],
        acks: int = 2,
    ) -> list[Any]:
        body = b""
        for number, payload in enumerate(payloads, sequence):
            body += (
                struct.pack(">IIQI", len(payload), zlib.crc32(payload), producer_id << 24 | number, 0)
                + payload
            )
        blocks = [[len(body), len(payloads), zlib.crc32(body)]]
        fields = (topic, incarnation, 0, producer_id, sequence, len(payloads), acks, blocks)
        return self.call(21, *fields, body=body)[0]

    def fetch(
        self, topic: str, incarnation: int, offset: int, wait_ms: int = 0
    ) -> tuple[list[tuple[int, bytes]], int]:
        reply, body = self.call(30, topic, incarnation, 0, offset, -1, 262_144, wait_ms, 0, None)
        start, skip_to, following, *_, log_id = reply
        found, position, block = [], 0, 0
        while position < len(body):
            length, checksum, record_id, flag = struct.unpack_from(">IIQI", body, position)
            end = position + 20 + length
            content = body[position + 20 : end]
            if flag & 64:
                control = struct.unpack(">HHIIIQIIQQQQQQ", content)
                assert record_id == log_id and zlib.crc32(content) == checksum
                assert zlib.crc32(body[block:position]) == control[4] and control[9] == start + block
                block = end
            elif not flag & 32 and start + position >= skip_to:
                assert zlib.crc32(content) == checksum
                attribute = 4 + struct.unpack_from(">I", content)[0] if flag & 1 else 0
                found.append((start + position, content[attribute:]))
            position = end
        return found, following


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    data = tmp_path_factory.mktemp("page") / "data"
    command = [sys.executable, "-m", "tfmq.server.main", "--data", str(data), "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        ready = process.stdout.readline()
        assert ready.startswith("ready "), ready
        yield int(ready.rsplit(":", 1)[1])
    finally:
        process.terminate()
        assert process.wait(30) == 0


@pytest.fixture
def client(port: int) -> Iterator[PageClient]:
    client = PageClient(port)
    yield client
    client.socket.close()


def topic(client: PageClient, name: str) -> int:
    """The incarnation of a topic that is made if need be."""
    (topics,), _ = client.call(10, [name], True)
    ((found, incarnation, partitions, _),) = topics
    assert found == name and partitions == [[0, "open"]]
    return int(incarnation)


def producer(client: PageClient) -> int:
    (first, count), _ = client.call(20, 1)
    assert count == 1
    return int(first)


def test_hello_says_version_node_limits_and_acks(client: PageClient) -> None:
    version, _server, node, limits, acks, features = client.welcome
    assert version == 1 and node and acks == 2 and isinstance(features, list)
    named = re.search(r"<!-- generated: hello-limits -->\n(.*?)<!--", PAGE.read_text(), re.DOTALL)
    assert named is not None
    assert set(limits) == set(re.findall(r"`(\w+)`", named[1]))


def test_what_is_produced_is_fetched(client: PageClient) -> None:
    incarnation, sender = topic(client, "page-a"), producer(client)
    positions, durability, repeated, append_time, ordinal = client.produce(
        "page-a", incarnation, sender, 0, [b"one", b"two", b"three"]
    )
    assert (positions, durability, repeated, ordinal) == (
        [[0, 0]],
        2,
        False,
        0,
    ) and append_time > 1_700_000_000_000
    messages, following = client.fetch("page-a", incarnation, 0)
    assert messages == [(0, b"one"), (23, b"two"), (46, b"three")]
    assert client.fetch("page-a", incarnation, 23)[0] == messages[1:], "a fetch inside a block skips"
    assert client.fetch("page-a", incarnation, following, 50) == ([], following), "a parked fetch ends empty"


def test_a_repeat_is_answered_alike_and_stored_once(client: PageClient) -> None:
    incarnation, sender = topic(client, "page-b"), producer(client)
    first = client.produce("page-b", incarnation, sender, 0, [b"x", b"y"])
    again = client.produce("page-b", incarnation, sender, 0, [b"x", b"y"])
    assert again[2] is True and [*again[:2], *again[3:]] == [*first[:2], *first[3:]]
    assert [payload for _, payload in client.fetch("page-b", incarnation, 0)[0]] == [b"x", b"y"]


def test_the_rules_of_sequences_hold(client: PageClient) -> None:
    incarnation, sender = topic(client, "page-c"), producer(client)
    client.produce("page-c", incarnation, sender, 0, [b"x", b"y"])
    for sequence, payloads, code in (
        (5, [b"z"], "sequence_gap"),
        (1, [b"y", b"z"], "bad_request"),
    ):
        with pytest.raises(PageError) as caught:
            client.produce("page-c", incarnation, sender, sequence, payloads)
        assert caught.value.args[1] == code
    (successor, last, durability), _ = client.call(22, "page-c", incarnation, 0, sender)
    assert successor > sender and last == 1 and durability == 2
    assert client.call(22, "page-c", incarnation, 0, sender)[0] == [successor, last, durability]
    with pytest.raises(PageError) as caught:
        client.produce("page-c", incarnation, sender, 2, [b"z"])
    assert caught.value.args[1] == "stale_producer" and caught.value.args[4]["successor"] == successor
    client.produce("page-c", incarnation, successor, 0, [b"z"])
    with pytest.raises(PageError) as caught:
        client.produce("page-c", incarnation, (1 << 40) - 1, 7, [b"z"])
    assert caught.value.args[1] == "unknown_producer" and caught.value.args[2] == "unknown"


def test_places_that_are_none_are_named(client: PageClient) -> None:
    incarnation, sender = topic(client, "page-d"), producer(client)
    client.produce("page-d", incarnation, sender, 0, [b"x"])
    for offset, code in ((5, "not_a_record"), (10_000, "offset_out_of_range")):
        with pytest.raises(PageError) as caught:
            client.fetch("page-d", incarnation, offset)
        assert caught.value.args[1] == code
    with pytest.raises(PageError) as caught:
        client.fetch("page-d", incarnation + 1000, 0)
    assert caught.value.args[1] == "unknown_topic"
    assert client.call(31, "page-d", incarnation, 0, 4, 5)[0][0] == 0


def test_a_parked_fetch_can_be_cancelled(client: PageClient) -> None:
    incarnation = topic(client, "page-e")
    parked = client.send(30, "page-e", incarnation, 0, 0, -1, 1 << 20, 15_000)
    asked = client.send(4, parked)
    replies = {}
    for _ in range(2):
        correlation, fields, body = client.receive()
        replies[correlation] = (fields, body)
    assert replies[asked][0] == [True]
    assert replies[parked][0][2] == 0 and replies[parked][1] == b""


@pytest.mark.parametrize(
    ("code", "error"), [(50, "not_supported"), (79, "not_supported"), (99, "unknown_command")]
)
def test_unknown_commands_are_answered_and_the_connection_goes_on(
    client: PageClient, code: int, error: str
) -> None:
    with pytest.raises(PageError) as caught:
        client.call(code, "field", {"of": "the future"})
    assert caught.value.args[1] == error
    assert client.call(2)[0][0] > 1_700_000_000_000


def test_a_request_that_makes_no_sense_is_answered_and_the_connection_goes_on(client: PageClient) -> None:
    with pytest.raises(PageError) as caught:
        client.call(30, "../etc", 0, 0, 0)
    assert caught.value.args[1] == "bad_request"
    client.call(2)


@pytest.mark.parametrize(
    "junk", [b"\xff" * 8, struct.pack(">II", 10, 7) + bytes(6), struct.pack(">II", 6, 2) + b"\xc1\xc1"]
)
def test_a_frame_that_is_none_ends_the_connection(client: PageClient, junk: bytes) -> None:
    client.socket.sendall(junk)
    with pytest.raises(PageError) as caught:
        client.receive()
    assert caught.value.args[1] == "bad_frame"
    with pytest.raises(ConnectionError):
        client.receive()


def test_a_browser_is_told_what_the_port_is(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as browser:
        browser.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b"".join(iter(lambda: browser.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 400 ") and b"tfmq broker" in answer


def test_no_version_in_common_is_said(port: int) -> None:
    client = PageClient(port)
    client.socket.close()
    client.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
    with pytest.raises(PageError) as caught:
        client.call(1, "TFMQ", 90, 99, "future", {})
    assert caught.value.args[1] == "version_mismatch" and "1 to 1" in caught.value.args[3]


def printed(part: str) -> list[bytes]:
    """The frames that stand in a generated part of the page."""
    found = re.search(rf"generated: {part} -->(.*?)<!--", PAGE.read_text(), re.DOTALL)
    assert found is not None
    lines = re.findall(r"(?:^    [0-9a-f ]+\n)+", found[1], re.MULTILINE)
    return [bytes.fromhex("".join(each.split())) for each in lines]


class Recorded(PageClient):
    """A client whose socket is a list: what it sends, and one reply that it gets."""

    def __init__(self, correlation: int, reply: bytes) -> None:
        self.correlation, self.reply, self.sent = correlation - 1, reply, b""
        self.socket = self  # type: ignore[assignment]

    def sendall(self, data: bytes) -> None:
        self.sent += data

    def recv(self, size: int) -> bytes:
        taken, self.reply = self.reply[:size], self.reply[size:]
        return taken


def test_the_worked_examples_are_what_a_client_sends_and_reads() -> None:
    request, reply = printed("produce-example")
    client = Recorded(9, reply)
    answer = client.call(
        21, "orders", 5, 0, 7, 0, 1, 2, [[25, 1, 1687078920]], None, None, body=request[-25:]
    )
    assert client.sent == request and answer[0] == [[[0, 0]], 2, False, 1_763_700_000_000, 0]

    request, reply = printed("fetch-example")
    client = Recorded(10, reply)
    assert client.fetch("orders", 5, 0, 500) == ([(0, b"hello")], 125)
    assert client.sent == request
