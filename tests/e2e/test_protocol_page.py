"""docs/protocol.md is enough to write a client from: `PageClient` knows that page and nothing of tfmq.

Only socket, struct, msgpack and zlib; it is held against a real server process.
"""

import base64
import re
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from tests import paths

CHECK_SECONDS = 0.2
PAGE = paths.ROOT / "docs" / "protocol.md"


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

    def refused(self, command: int, *fields: Any) -> str:
        """The code of the error that answers it."""
        with pytest.raises(PageError) as caught:
            self.call(command, *fields)
        return str(caught.value.args[1])

    @staticmethod
    def records(producer_id: int, sequence: int, payloads: list[bytes]) -> bytes:
        return b"".join(
            struct.pack(">IIQI", len(payload), zlib.crc32(payload), producer_id << 24 | number, 0) + payload
            for number, payload in enumerate(payloads, sequence)
        )

    def produce(
        self,
        topic: str,
        incarnation: int,
        producer_id: int,
        sequence: int,
        payloads: list[bytes],
        acks: int = 2,
        transaction: int | None = None,
        due: bytes | None = None,
    ) -> list[Any]:
        body = self.records(producer_id, sequence, payloads)
        blocks = [[len(body), len(payloads), zlib.crc32(body)]]
        fields = (topic, incarnation, 0, producer_id, sequence, len(payloads), acks, blocks)
        more = () if transaction is None and due is None else (due, transaction)
        return self.call(21, *fields, *more, body=body)[0]

    @staticmethod
    def handle(reported: list[Any], index: int) -> str:
        """The handle of message `index` of a delayed batch, made from the reply."""
        store_id, log_id, first_number, dues = reported
        (due,) = struct.unpack_from(">Q", dues, 8 * index)
        packed = struct.pack(">QQQQ", store_id, log_id, due, first_number + index)
        packed += struct.pack(">I", zlib.crc32(packed))
        return "d" + base64.b32encode(packed).decode().lower().rstrip("=")

    def transact(
        self,
        producer_id: int,
        number: int,
        sequence: int,
        sends: list[tuple[str, int, list[bytes]]],
        offsets: list[Any] | None = None,
    ) -> list[Any]:
        batches, body = [], b""
        for topic, incarnation, payloads in sends:
            data = self.records(producer_id, sequence, payloads)
            blocks = [[len(data), len(payloads), zlib.crc32(data)]]
            batches.append([topic, incarnation, 0, sequence, len(payloads), len(data), blocks, None])
            sequence += len(payloads)
            body += data
        return self.call(57, producer_id, number, batches, offsets or [], None, body=body)[0]

    def payloads(self, topic: str, incarnation: int) -> list[bytes]:
        """Everything that is written, whether a power cut could take it back or not."""
        return [payload for _, payload in self.fetch(topic, incarnation, 0, read=1)[0]]

    def fetch(
        self, topic: str, incarnation: int, offset: int, wait_ms: int = 0, read: int = 0
    ) -> tuple[list[tuple[int, bytes]], int]:
        reply, body = self.call(30, topic, incarnation, 0, offset, -1, 262_144, wait_ms, read, None, None)
        start, skip_to, following, *_, log_id, partitions = reply
        assert partitions == 1
        found, position, block = [], 0, 0
        while position < len(body):
            length, checksum, record_id, flag = struct.unpack_from(">IIQI", body, position)
            end = position + 20 + length
            content = body[position + 20 : end]
            if flag & 64:
                control = struct.unpack(">HHIIIQIIQQQQQQ", content)
                assert record_id == log_id and zlib.crc32(content) == checksum
                assert zlib.crc32(body[block:position]) == control[4] and control[10] == start + block
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
    command += ["--set", f"transaction.check_seconds={CHECK_SECONDS}"]
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
    version, _server, node, limits, acks, features, properties = client.welcome
    assert version == 1 and node and acks == 2 and isinstance(features, list) and properties == {}
    named = re.search(r"<!-- generated: hello-limits -->\n(.*?)<!--", PAGE.read_text(), re.DOTALL)
    assert named is not None
    assert set(limits) == set(re.findall(r"`(\w+)`", named[1]))


def test_what_is_produced_is_fetched(client: PageClient) -> None:
    incarnation, sender = topic(client, "page-a"), producer(client)
    positions, durability, repeated, append_time, ordinal, *_ = client.produce(
        "page-a", incarnation, sender, 0, [b"one", b"two", b"three"]
    )
    assert (positions, durability, repeated, ordinal) == ([[0, 0]], 2, False, 0) and append_time > 1_700_000_000_000
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
    for sequence, payloads, code in ((5, [b"z"], "sequence_gap"), (1, [b"y", b"z"], "bad_request")):
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


def test_a_waiting_fetch_can_be_cancelled(client: PageClient) -> None:
    incarnation = topic(client, "page-e")
    parked = client.send(30, "page-e", incarnation, 0, 0, -1, 1 << 20, 15_000)
    asked = client.send(4, parked)
    replies = {}
    for _ in range(2):
        correlation, fields, body = client.receive()
        replies[correlation] = (fields, body)
    assert replies[asked][0] == [True]
    assert replies[parked][0][2] == 0 and replies[parked][1] == b""


BEGIN, PREPARE, COMMIT, ROLLBACK, FORGET, LIST, DESCRIBE, TRANSACT, AWAIT_CHECKS = range(50, 59)
COMMIT_GROUP, ABORT_COMMIT_GROUP, LIST_COMMIT_GROUPS, FORGET_COMMIT_GROUP = range(80, 84)
READ_OFFSETS, JOIN_GROUP = 44, 40


def begun(client: PageClient, sender: int, number: int, xid: str, *more: Any) -> int:
    """The epoch of a new transaction."""
    fields = more or (60_000, "")
    (epoch, name, state, timeout_ms), _ = client.call(BEGIN, sender, number, xid, *fields)
    assert state == "open" and epoch > 0 and timeout_ms > 0
    assert name == xid if xid else name
    return int(epoch)


def test_a_transaction_in_one_frame(client: PageClient) -> None:
    orders, bills, sender = topic(client, "page-g"), topic(client, "page-h"), producer(client)
    sends = [("page-g", orders, [b"one", b"two"]), ("page-h", bills, [b"bill"])]
    state, epoch, dropped, offsets, repeated, *_ = client.transact(sender, 1, 0, sends)
    assert (state, dropped, repeated) == ("committed", 0, False) and epoch > 0
    assert all(offset in (0, -1) for offset in offsets)
    assert client.payloads("page-g", orders) == [b"one", b"two"]
    assert client.payloads("page-h", bills) == [b"bill"]
    again = client.transact(sender, 1, 0, sends)
    assert again[0] == "committed" and again[1] == epoch and again[4] is True
    client.transact(sender, 2, 3, [("page-g", orders, [b"three"])])
    assert client.payloads("page-g", orders) == [b"one", b"two", b"three"]
    with pytest.raises(PageError) as caught:
        client.transact(sender, 1, 0, sends)
    assert caught.value.args[1] == "unknown_transaction", "a lower number"
    with pytest.raises(PageError) as caught:
        client.transact(sender, 3, 9, [("page-g", orders, [b"gap"])])
    assert caught.value.args[1] == "sequence_gap" and caught.value.args[2] == "not done"


def test_a_transaction_step_by_step_over_two_connections(client: PageClient, port: int) -> None:
    orders, sender = topic(client, "page-i"), producer(client)
    epoch = begun(client, sender, 1, "page order 1")
    (again, *_), _ = client.call(BEGIN, sender, 1, "page order 1", 60_000, "")
    assert again == epoch, "the same number is the same request"
    positions, durability, *_ = client.produce("page-i", orders, sender, 0, [b"x", b"y"], 2, epoch)
    assert (positions, durability) == ([], 1)
    assert client.refused(COMMIT, "page order 1", epoch, False, False, []) == "transaction_state"
    assert client.call(PREPARE, "page order 1", epoch, None, [])[0] == ["prepared", 0]
    assert client.call(PREPARE, "page order 1", epoch, None, [])[0] == ["prepared", 0]
    assert client.payloads("page-i", orders) == []
    with pytest.raises(PageError) as caught:
        client.produce("page-i", orders, sender, 2, [b"late"], 2, epoch)
    assert caught.value.args[1] == "transaction_state"
    client.socket.close()
    other = PageClient(port)
    (found,), _ = other.call(DESCRIBE, "page order 1")
    assert (found["xid"], found["epoch"], found["state"]) == ("page order 1", epoch, "prepared")
    assert found["messages"] == 2 and found["topics"] == ["page-i"]
    (state, dropped, *_), _ = other.call(COMMIT, "page order 1", epoch, False, False, [])
    assert (state, dropped) == ("committed", 0)
    assert other.payloads("page-i", orders) == [b"x", b"y"]
    assert other.call(COMMIT, "page order 1", epoch, False, False, [])[0][0] == "committed"
    assert other.refused(ROLLBACK, "page order 1", epoch) == "transaction_committed"
    assert other.payloads("page-i", orders) == [b"x", b"y"]
    other.socket.close()


def test_what_is_rolled_back_leaves_nothing(client: PageClient) -> None:
    orders, sender = topic(client, "page-j"), producer(client)
    epoch = begun(client, sender, 1, "page order 2")
    client.produce("page-j", orders, sender, 0, [b"x"], 2, epoch)
    assert client.call(ROLLBACK, "page order 2", epoch)[0] == ["rolled_back"]
    assert client.call(ROLLBACK, "page order 2", epoch)[0] == ["rolled_back"]
    assert client.refused(COMMIT, "page order 2", epoch, True, False, []) == "transaction_rolled_back"
    later = begun(client, sender, 2, "page order 2")
    assert later > epoch
    assert client.refused(ROLLBACK, "page order 2", epoch + 1000) == "unknown_transaction"
    client.produce("page-j", orders, sender, 1, [b"y"], 2, later)
    assert client.call(COMMIT, "page order 2", later, True, False, [])[0][0] == "committed"
    assert client.payloads("page-j", orders) == [b"y"]
    assert client.refused(COMMIT, "nobody's", 1, True, False, []) == "unknown_transaction"


def table_of_steps() -> list[tuple[str, str, str]]:
    """(request, state, what the page says of it) of the table of steps."""
    rows = re.findall(r"^\| ((?:PRODUCE|PREPARE_|COMMIT_|ROLLBACK_)[^|]*) \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    states = ("open", "prepared", "committed", "rolled back")
    return [
        (request, state, cell.strip())
        for request, cells in rows
        for state, cell in zip(states, cells.split("|"), strict=True)
    ]


@pytest.mark.parametrize(("request_", "state", "says"), table_of_steps())
def test_each_step_in_each_state_does_what_the_page_says(
    client: PageClient, request_: str, state: str, says: str
) -> None:
    orders, sender = topic(client, "page-steps"), producer(client)
    xid = f"page {request_} {state}"
    epoch = begun(client, sender, 1, xid)
    client.produce("page-steps", orders, sender, 0, [b"x"], 2, epoch)
    if state == "prepared":
        client.call(PREPARE, xid, epoch, None, [])
    elif state == "committed":
        client.call(COMMIT, xid, epoch, True, False, [])
    elif state == "rolled back":
        client.call(ROLLBACK, xid, epoch)

    def ask() -> str:
        if request_ == "PRODUCE":
            return "taken" if client.produce("page-steps", orders, sender, 1, [b"y"], 2, epoch) else ""
        if request_.startswith("PREPARE"):
            return str(client.call(PREPARE, xid, epoch, None, [])[0][0])
        if request_.startswith("COMMIT"):
            return str(client.call(COMMIT, xid, epoch, "not" not in request_, False, [])[0][0])
        return str(client.call(ROLLBACK, xid, epoch)[0][0])

    try:
        found = ask()
    except PageError as error:
        found = error.args[1]
        assert error.args[2] == "not done"
    assert found in (re.findall(r"`(\w+)`", says) or [says])


def test_the_table_of_steps_is_whole() -> None:
    assert len(table_of_steps()) == 5 * 4


def test_a_local_transaction_ends_with_its_connection(client: PageClient, port: int) -> None:
    orders, sender = topic(client, "page-k"), producer(client)
    other = PageClient(port)
    epoch = begun(other, sender, 1, "")
    other.produce("page-k", orders, sender, 0, [b"x"], 2, epoch)
    assert epoch in [row["epoch"] for row in client.call(LIST, ["open"])[0][0]]
    other.socket.close()
    deadline = time.monotonic() + 20
    while epoch in [row["epoch"] for row in client.call(LIST, ["open"])[0][0]]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with pytest.raises(PageError) as caught:
        client.produce("page-k", orders, sender, 1, [b"y"], 2, epoch)
    assert caught.value.args[1] in ("unknown_transaction", "transaction_rolled_back")
    assert client.payloads("page-k", orders) == []


def test_one_without_anything_in_it_is_over_when_it_is_prepared(client: PageClient) -> None:
    epoch = begun(client, producer(client), 1, "page empty")
    assert client.call(PREPARE, "page empty", epoch, None, [])[0] == ["read_only", 0]


def test_offsets_inside_are_locked_until_the_end(client: PageClient) -> None:
    orders, sender = topic(client, "page-l"), producer(client)
    client.produce("page-l", orders, producer(client), 0, [b"x"])
    (member, generation, ((_, _, _, grant),), _), _ = client.call(JOIN_GROUP, "page-readers", "", ["page-l"])
    offsets = [["page-readers", member, generation, [["page-l", orders, 0, 0]]]]
    epoch = begun(client, sender, 1, "page offsets")
    client.produce("page-l", orders, sender, 0, [b"y"], 2, epoch)
    wrong = [["page-readers", member, grant - 1, [["page-l", orders, 0, 0]]]]
    assert client.refused(PREPARE, "page offsets", epoch, None, wrong) == "fenced"
    assert client.call(PREPARE, "page offsets", epoch, None, offsets)[0][0] == "prepared"
    with pytest.raises(PageError) as caught:
        client.call(READ_OFFSETS, "page-readers")
    assert caught.value.args[1] == "busy" and "page offsets" in caught.value.args[3]
    assert client.call(COMMIT, "page offsets", epoch, False, False, [])[0][0] == "committed"
    (saved,), _ = client.call(READ_OFFSETS, "page-readers")
    assert [each[:4] for each in saved] == [["page-l", orders, 0, 0]]


def test_only_clients_that_can_know_are_asked(client: PageClient, port: int) -> None:
    orders, sender = topic(client, "page-m"), producer(client)
    asked = PageClient(port)
    parked = asked.send(AWAIT_CHECKS, "page-shop", 15_000)
    epoch = begun(client, sender, 1, "page in doubt", 60_000, "page-shop")
    client.produce("page-m", orders, sender, 0, [b"x"], 2, epoch)
    client.call(PREPARE, "page in doubt", epoch, None, [])
    correlation, ((check,),), _ = asked.receive()
    assert correlation == parked
    assert (check["xid"], check["epoch"], check["topics"]) == ("page in doubt", epoch, ["page-m"])
    assert check["prepared_ms"] > 1_700_000_000_000
    asked.call(COMMIT, check["xid"], check["epoch"], False, False, [])
    assert client.payloads("page-m", orders) == [b"x"]
    parked = asked.send(AWAIT_CHECKS, "page-shop", 15_000)
    cancelled = asked.send(4, parked)
    replies = {correlation: fields for correlation, fields, _ in (asked.receive(), asked.receive())}
    assert replies == {parked: [[]], cancelled: [True]}
    assert asked.call(AWAIT_CHECKS, "page-shop", 0)[0] == [[]]
    asked.socket.close()


def test_an_operator_decides_and_the_owner_is_notified(client: PageClient) -> None:
    orders, sender = topic(client, "page-n"), producer(client)
    epoch = begun(client, sender, 1, "page by hand")
    client.produce("page-n", orders, sender, 0, [b"x"], 2, epoch)
    client.call(PREPARE, "page by hand", epoch, None, [])
    assert "page by hand" in [row["xid"] for row in client.call(LIST)[0][0]]
    assert client.call(ROLLBACK, "page by hand", epoch, True)[0] == ["heuristic_rolled_back"]
    with pytest.raises(PageError) as caught:
        client.call(COMMIT, "page by hand", epoch, False, False, [])
    assert caught.value.args[1] == "heuristic_outcome"
    assert caught.value.args[4]["state"] == "heuristic_rolled_back"
    (rows, more, _), _ = client.call(LIST, ["heuristic_rolled_back"])
    assert [(row["xid"], row["messages"]) for row in rows] == [("page by hand", 1)] and more is False
    assert client.call(FORGET, "page by hand", epoch)[0] == [True]
    assert client.call(FORGET, "page by hand", epoch)[0] == [False]
    assert client.payloads("page-n", orders) == []


def member_prepared(client: PageClient, xid: str, sequence: int, run: str, incarnation: int, payload: bytes) -> int:
    sender = producer(client)
    epoch = begun(client, sender, 1, xid, 60_000, "", ["page-query", sequence, run])
    client.produce("page-o", incarnation, sender, 0, [payload], 2, epoch)
    (state, expires_ms), _ = client.call(PREPARE, xid, epoch, 3_600_000, [])
    assert state == "prepared" and expires_ms > 1_700_000_000_000
    return epoch


def test_a_commit_group_commits_all_or_none(client: PageClient) -> None:
    rows = topic(client, "page-o")
    one = member_prepared(client, "q-1", 5, "run-1", rows, b"a")
    two = member_prepared(client, "q-2", 5, "run-1", rows, b"b")
    orphan = member_prepared(client, "q-3", 5, "run-1", rows, b"lost attempt")
    missing = [["q-1", one], ["q-9", 99]]
    assert client.refused(COMMIT_GROUP, "page-query", 5, "run-1", missing, 2) == "group_incomplete"
    names = [["q-1", one], ["q-2", two]]
    assert client.call(COMMIT_GROUP, "page-query", 5, "run-1", names, 2)[0] == ["committed", False, 2, 0]
    assert client.call(COMMIT_GROUP, "page-query", 5, "run-1", names, 2)[0] == ["committed", True, 2, 0]
    assert client.payloads("page-o", rows) == [b"a", b"b"]
    assert client.refused(COMMIT, "q-3", orphan, False, False, []) == "transaction_rolled_back"
    assert client.refused(COMMIT_GROUP, "page-query", 5, "run-1", names, 3) == "group_stale"
    assert client.refused(COMMIT_GROUP, "page-query", 4, "run-1", names, 2) == "group_stale"
    (epoch, _, state, _), _ = client.call(BEGIN, producer(client), 1, "q-4", None, "", ["page-query", 5, "run-1"])
    assert (epoch, state) == (0, "done")
    assert client.call(ABORT_COMMIT_GROUP, "page-query", 5, "run-1")[0] == ["committed"]
    assert client.call(ABORT_COMMIT_GROUP, "page-query", 6, "run-2")[0] == ["aborted"]
    fenced = (producer(client), 1, "q-5", None, "", ["page-query", 6, "run-2"])
    assert client.refused(BEGIN, *fenced) == "group_fenced"
    (groups, _), _ = client.call(LIST_COMMIT_GROUPS)
    assert [(each["group"], each["sequence"], each["rows"]) for each in groups] == [("page-query", 5, 2)]
    assert client.call(FORGET_COMMIT_GROUP, "page-query")[0] == [True]
    assert client.call(FORGET_COMMIT_GROUP, "page-query")[0] == [False]


def test_requests_of_transactions_that_make_no_sense_are_refused(client: PageClient) -> None:
    sender = producer(client)
    for fields in (
        (sender, 1, "x", 0, ""),
        (sender, 1, "x" * 250, None, ""),
        (sender, 1, "x", 1 << 32, ""),
        (sender, 1, "x", None, "", ["g", 1]),
        (0, 1, "x", None, ""),
    ):
        assert client.refused(BEGIN, *fields) == "bad_request"
    assert client.refused(PREPARE, "", 1, None, []) == "bad_request"
    assert client.refused(COMMIT, "x", 0, True, False, []) == "bad_request"
    assert client.refused(COMMIT, "x", 1, 1, False, []) == "bad_request"
    assert client.refused(TRANSACT, sender, 1, [["t", 1, 0, 0, 1, 5, [[5, 1, 0]]]], []) in (
        "bad_request",
        "unknown_topic",
    )
    client.call(2)


@pytest.mark.parametrize(("code", "error"), [(79, "not_supported"), (99, "unknown_command")])
def test_unknown_commands_are_answered_and_the_connection_goes_on(client: PageClient, code: int, error: str) -> None:
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


def test_a_browser_gets_an_explanation_of_the_port(port: int) -> None:
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


def test_the_handle_of_the_page_is_what_a_client_makes_of_a_reply() -> None:
    example = re.search(r"<!-- generated: delayed-example -->\n+Store (.*?)<!--", PAGE.read_text(), re.DOTALL)
    assert example is not None
    store_id, log_id, due, number = (int(each, 0) for each in re.findall(r"(?:id|due|number|^) ?(\w+)[,:]", example[1]))
    assert PageClient.handle([store_id, log_id, number, dues(due)], 0) == example[1].split()[-1]


def test_the_worked_examples_are_what_a_client_sends_and_reads() -> None:
    request, reply = printed("produce-example")
    client = Recorded(9, reply)
    answer = client.call(21, "orders", 5, 0, 7, 0, 1, 2, [[25, 1, 1687078920]], None, None, None, body=request[-25:])
    assert client.sent == request and answer[0] == [[[0, 0]], 2, False, 1_763_700_000_000, 0, None]

    request, reply = printed("fetch-example")
    client = Recorded(10, reply)
    assert client.fetch("orders", 5, 0, 500) == ([(0, b"hello")], 125)
    assert client.sent == request

    request, reply = printed("transact-example")
    client = Recorded(11, reply)
    sends = [("orders", 5, [b"hello"]), ("bills", 6, [b"world!"])]
    assert client.transact(7, 1, 0, sends) == ["committed", 42, 0, [1200, -1], False, []]
    assert client.sent == request


SUCCEED, CANCEL_DELAYED, RESCHEDULE_DELAYED = 22, 60, 61
LIST_DELAYED, DESCRIBE_DELAYED, HISTOGRAM = 62, 63, 64
RELATIVE = 1 << 63
SLACK_MS = 2
"""Broker time and PING's wall clock are two clocks, each read in whole ms."""


def dues(*each: int) -> bytes:
    return struct.pack(f">{len(each)}Q", *each)


def delayed(client: PageClient, name: str, delays_ms: list[int]) -> tuple[int, list[Any]]:
    """A batch of messages 0, 1 ... with these delays; the topic's incarnation, and the reply."""
    incarnation, sender = topic(client, name), producer(client)
    payloads = [b"%d" % number for number in range(len(delays_ms))]
    due = dues(*(RELATIVE | each for each in delays_ms))
    positions, durability, repeated, _, ordinal, reported = client.produce(
        name, incarnation, sender, 0, payloads, due=due
    )
    assert (positions, durability, repeated, ordinal) == ([], 2, False, -1)
    return incarnation, reported


def waited_for(client: PageClient, name: str, incarnation: int, count: int) -> list[bytes]:
    deadline = time.monotonic() + 20
    while len(found := client.payloads(name, incarnation)) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_delayed_messages_come_when_they_are_due_and_in_that_order(client: PageClient) -> None:
    (before_ms,), _ = client.call(2)
    incarnation, reported = delayed(client, "page-later-a", [400, 100, 60_000, 0])
    effective = struct.unpack(">4Q", reported[3])
    there = client.payloads("page-later-a", incarnation)
    (now_ms,), _ = client.call(2)
    assert all(effective[int(each)] <= now_ms + SLACK_MS for each in there), "none is early"
    assert all(
        before_ms - SLACK_MS <= due - delay <= now_ms + SLACK_MS
        for due, delay in zip(effective, [400, 100, 60_000, 0], strict=True)
    )
    assert waited_for(client, "page-later-a", incarnation, 3) == [b"3", b"1", b"0"]
    (after_ms,), _ = client.call(2)
    assert after_ms >= effective[0] - SLACK_MS


def test_a_repeated_delayed_batch_has_the_first_answer_even_with_shorter_delays(client: PageClient) -> None:
    incarnation, sender = topic(client, "page-later-b"), producer(client)
    first = client.produce("page-later-b", incarnation, sender, 0, [b"x"], due=dues(RELATIVE | 60_000))
    again = client.produce("page-later-b", incarnation, sender, 0, [b"x"], due=dues(RELATIVE | 59_000))
    assert again[2] is True and again[5] == first[5]
    (found, _, _), _ = client.call(LIST_DELAYED, "page-later-b")
    assert [row["handle"] for row in found] == [client.handle(first[5], 0)]


def test_the_sequence_of_delayed_messages_goes_over_all_topics(client: PageClient) -> None:
    one, other, sender = topic(client, "page-later-c"), topic(client, "page-later-d"), producer(client)
    later = dues(RELATIVE | 60_000)
    client.produce("page-later-c", one, sender, 0, [b"x"], due=later)
    client.produce("page-later-d", other, sender, 1, [b"y"], due=later)
    with pytest.raises(PageError) as caught:
        client.produce("page-later-c", one, sender, 5, [b"gap"], due=later)
    assert caught.value.args[1] == "sequence_gap"
    (successor, last, durability), _ = client.call(SUCCEED, "", 0, 0, sender)
    assert successor > sender and (last, durability) == (1, 2)
    with pytest.raises(PageError) as caught:
        client.produce("page-later-c", one, sender, 2, [b"z"], due=later)
    assert caught.value.args[1] == "stale_producer"
    client.produce("page-later-c", one, successor, 0, [b"z"], due=later)


def test_due_times_must_be_as_many_as_the_records(client: PageClient) -> None:
    incarnation, sender = topic(client, "page-later-e"), producer(client)
    for wrong in (b"", bytes(7), dues(1), dues(1, 2, 3)):
        with pytest.raises(PageError) as caught:
            client.produce("page-later-e", incarnation, sender, 0, [b"x", b"y"], due=wrong)
        assert caught.value.args[1] == "bad_request"


def test_what_waits_is_cancelled_moved_described_listed_and_counted(client: PageClient) -> None:
    incarnation, reported = delayed(client, "page-later-f", [60_000, 120_000, 180_000, 0])
    handles = [client.handle(reported, index) for index in range(4)]
    assert waited_for(client, "page-later-f", incarnation, 1) == [b"3"]
    (found, more, _), _ = client.call(LIST_DELAYED, "page-later-f", None, None, 0, RELATIVE - 1, "", 2)
    assert [row["handle"] for row in found] == handles[:2] and more
    (found, more, _), _ = client.call(LIST_DELAYED, "page-later-f", 0, None, 0, RELATIVE - 1, handles[1], 2)
    assert [row["handle"] for row in found] == handles[2:3] and not more
    assert (found[0]["topic"], found[0]["partition"], found[0]["state"]) == ("page-later-f", 0, "pending")
    due = found[0]["due_ms"]
    (counts, pending), _ = client.call(HISTOGRAM, "page-later-f", [0, due, due + 1])
    assert counts == [2, 1] and pending >= 3
    assert client.call(CANCEL_DELAYED, handles[0])[0] == ["cancelled"]
    assert client.call(CANCEL_DELAYED, handles[0])[0] == ["cancelled"], "and so when it is asked for again"
    assert client.call(CANCEL_DELAYED, handles[3])[0] == ["delivered"]
    (state, moved), _ = client.call(RESCHEDULE_DELAYED, handles[1], RELATIVE | 1)
    assert state == "rescheduled" and moved != handles[1]
    assert waited_for(client, "page-later-f", incarnation, 2) == [b"3", b"1"]
    assert client.call(CANCEL_DELAYED, moved)[0] == ["delivered"], "answered once that is on the disk"
    for handle, wanted in ((handles[0], "cancelled"), (handles[2], "pending"), (moved, "delivered")):
        (described,), _ = client.call(DESCRIBE_DELAYED, handle)
        assert described["state"] == wanted
    assert client.call(RESCHEDULE_DELAYED, handles[0], RELATIVE | 1)[0] == ["cancelled", ""]
    assert client.call(CANCEL_DELAYED, handles[2])[0] == ["cancelled"]
    store_id, log_id, number, times = reported
    foreign = client.handle([store_id ^ 1, log_id, number, times], 2)
    assert client.call(CANCEL_DELAYED, foreign)[0] == ["unknown"]
    typo = handles[2][:-1] + ("a" if handles[2][-1] != "a" else "b")
    assert client.refused(CANCEL_DELAYED, typo) == "bad_request"


def test_delayed_messages_of_a_transaction_wait_from_its_commit_on(client: PageClient) -> None:
    orders, sender = topic(client, "page-later-g"), producer(client)
    epoch = begun(client, sender, 1, "page later")
    reply = client.produce("page-later-g", orders, sender, 0, [b"x"], 2, epoch, dues(RELATIVE | 60_000))
    assert reply[0] == [] and reply[5:] in ([], [None])
    client.produce("page-later-g", orders, sender, 1, [b"soon"], 2, epoch, dues(RELATIVE | 1))
    assert client.call(LIST_DELAYED, "page-later-g")[0][0] == []
    (now_ms,), _ = client.call(2)
    (state, dropped, offsets, handles, *_), _ = client.call(COMMIT, "page later", epoch, True, False, [])
    assert (state, dropped, offsets) == ("committed", 0, [-1, -1]) and handles
    (then_ms,), _ = client.call(2)
    (found, _, _), _ = client.call(LIST_DELAYED, "page-later-g")
    # The one of a millisecond may still be among them or have ended: both are right.
    (due_ms,) = [row["due_ms"] for row in found if row["due_ms"] - now_ms > 30_000]
    assert now_ms - SLACK_MS <= due_ms - 60_000 <= then_ms + SLACK_MS
    assert waited_for(client, "page-later-g", orders, 1) == [b"soon"], "its time counted from the commit"
