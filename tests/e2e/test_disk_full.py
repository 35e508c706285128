"""A real disk that runs full under a live server: senders get an error, reads go on, space brings it back."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import tfmq as client
from tests.e2e.commands import tfmq, tfmq_server
from tests.e2e.reading import payloads
from tests.e2e.small_disk import BALLAST_BYTES, empty, fill, free_bytes, small_disk
from tools.rigs.live_server import LiveServer

PAYLOAD = 3_000
SENDERS = 3
SECONDS = 60.0
ROOM_BYTES = 1 << 20
SETTINGS = ("log.segment_bytes=2097152",)


@pytest.fixture(params=["ext4", "tmpfs"])
def disk(request: pytest.FixtureRequest) -> Iterator[Path]:
    with small_disk(request.param) as place:
        yield place


@pytest.fixture
def server(disk: Path, tmp_path: Path) -> Iterator[LiveServer]:
    (tmp_path / "data").symlink_to(disk / "data")
    (disk / "data").mkdir()
    made = LiveServer(tmp_path / "data", *SETTINGS)
    made.start()
    yield made
    with suppress(OSError):
        empty(disk)
    if made.process is not None and made.process.poll() is None:
        made.stop()
    assert "Traceback" not in made.log.read_text()


class FullSender(threading.Thread):
    """Sends numbered messages, each acknowledged before the next, until the disk is full."""

    def __init__(self, address: str, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.address = address
        self.acknowledged: list[bytes] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        # Longer than an fsync takes on a busy machine: a time-out would say nothing about the disk.
        with client.Producer(self.address, timeout=5.0) as producer:
            for number in range(1_000_000):
                payload = f"{self.name}:{number}:".encode().ljust(PAYLOAD, b".")
                try:
                    producer.send("orders", payload, partition=0).result(SECONDS)
                except BaseException as error:  # the test looks at it
                    self.error = error
                    return
                self.acknowledged.append(payload)


def send_until_full(address: str) -> list[bytes]:
    """What several senders got acknowledged before each got the error of the full disk."""
    senders = [FullSender(address, f"s{number}") for number in range(SENDERS)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join(2 * SECONDS)
        assert isinstance(sender.error, client.DiskFull), sender.error
        assert sender.error.outcome == "not done"
        assert sender.error.retriable
    return [payload for sender in senders for payload in sender.acknowledged]


def send_one(address: str, payload: bytes, topic: str = "orders") -> None:
    with client.Producer(address, timeout=SECONDS) as producer:
        producer.send(topic, payload).result(SECONDS)


def assert_stored(address: str, acknowledged: list[bytes]) -> None:
    """All that was acknowledged is there, once, in each sender's order, and nothing else."""
    found = payloads(address, "orders")
    assert sorted(found) == sorted(acknowledged)
    for name in {payload.split(b":")[0] for payload in acknowledged}:
        mine = [payload for payload in found if payload.startswith(name + b":")]
        assert mine == [payload for payload in acknowledged if payload.startswith(name + b":")]


@pytest.mark.long
def test_senders_get_an_error_reads_go_on_and_space_brings_it_back(disk: Path, server: LiveServer) -> None:
    fill(disk, leave_bytes=BALLAST_BYTES)
    acknowledged = send_until_full(server.address)
    assert acknowledged
    assert_stored(server.address, acknowledged)
    fill(disk)  # blocks that the file system gives back late would take one more message
    reported = tfmq("send", "orders", "x" * PAYLOAD, servers=server.address)
    assert reported.code == 1
    assert "no space left" in reported.sentence
    with client.Admin(server.address) as admin:
        assert admin.topic("orders").partitions[0].state == "open"
        assert admin.ping() > 0
    assert "no space is left" in server.log.read_text()
    empty(disk)
    after = b"after".ljust(2 * PAYLOAD, b".")  # a smaller one than those refused is no sign of space
    send_one(server.address, after)
    assert_stored(server.address, [*acknowledged, after])
    wait_for_line(server, "partitions take messages again")
    server.kill()
    server.start()
    assert_stored(server.address, [*acknowledged, after])


def wait_for_line(server: LiveServer, words: str) -> None:
    """The server says that a full disk is over some seconds after it last refused a message."""
    until = time.monotonic() + SECONDS
    while words not in server.log.read_text() and time.monotonic() < until:
        time.sleep(0.1)
    assert words in server.log.read_text()


def wait_for_room(disk: Path) -> None:
    """A file system may free what was unlinked a moment later."""
    until = time.monotonic() + SECONDS
    while free_bytes(disk) < ROOM_BYTES and time.monotonic() < until:
        time.sleep(0.02)
    assert free_bytes(disk) >= ROOM_BYTES


@pytest.mark.long
def test_a_deleted_topic_makes_room(disk: Path, server: LiveServer) -> None:
    with client.Producer(server.address) as producer:
        for _ in range(5):
            producer.send("waste", bytes(1 << 20)).result(SECONDS)
    fill(disk, leave_bytes=2 << 20)
    acknowledged = send_until_full(server.address)
    fill(disk)  # not a block is free: the deletion itself is written into the room that is kept for it
    with client.Admin(server.address) as admin:
        admin.delete_topic("waste")
    wait_for_room(disk)
    send_one(server.address, b"after")
    assert_stored(server.address, [*acknowledged, b"after"])


@pytest.mark.long
def test_kill_9_and_starts_on_a_full_disk_lose_nothing(disk: Path, server: LiveServer) -> None:
    fill(disk, leave_bytes=BALLAST_BYTES)
    acknowledged = send_until_full(server.address)
    fill(disk)
    for _ in range(3):
        server.kill()
        server.start()
        assert_stored(server.address, acknowledged)
        fill(disk)  # a start removes what the kill left unfinished, whose blocks would take one more message
        with client.Producer(server.address, timeout=1.0) as producer:
            delivery = producer.send("orders", bytes(PAYLOAD))
            with pytest.raises(client.DiskFull) as full:
                delivery.result(SECONDS)
            assert full.value.outcome == "not done"
    empty(disk)
    send_one(server.address, b"after")
    assert_stored(server.address, [*acknowledged, b"after"])
    with client.Admin(server.address) as admin:
        assert admin.topic("orders").partitions[0].state == "open"
    assert server.stop() == 0
    server.start()
    assert_stored(server.address, [*acknowledged, b"after"])


@pytest.mark.long
def test_a_first_start_on_a_full_disk_is_refused_in_words(disk: Path) -> None:
    fill(disk)
    ended = tfmq_server("--data", str(disk / "fresh"), "--listen", "127.0.0.1:0")
    assert ended.code == 1
    assert "no space left" in ended.sentence
    empty(disk)
    server = LiveServer(disk / "fresh")
    server.start()
    send_one(server.address, b"first")
    assert payloads(server.address, "orders") == [b"first"]
    assert server.stop() == 0
