"""A disk that fails or is slow, under a live server: real system calls that return EIO, ENOSPC, or come late."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tfmq as client
from tests.e2e.commands import tfmq
from tests.e2e.reading import payloads
from tests.e2e.tracing import ThreadedServer, injected
from tests.scale import scaled, seeded
from tools.rigs.live_server import LiveServer
from tools.rigs.loop_image import LoopImage, Unavailable

SECONDS = 30.0
SLOW_SECONDS = 1.5
QUICK_SECONDS = 0.5
DEVICE_BYTES = 16 << 20
SEGMENT = "0" * 32 + ".zxQueue"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    made = ThreadedServer(tmp_path / "data", "flush.messages=0")
    made.start()
    with client.Admin(made.address) as admin:
        admin.create_topic("orders", partitions=2)
    yield made
    made.stop()
    assert "Traceback" not in made.log.read_text()


def segment(server: LiveServer, partition: int) -> Path:
    return server.data / f"orders-{partition}" / SEGMENT


def send(address: str, payload: bytes, partition: int = 0, **options: Any) -> client.SendResult:
    with client.Producer(address, timeout=SECONDS, **options) as producer:
        return producer.send("orders", payload, partition=partition).result(SECONDS)


def failing_writes(error: str) -> list[str]:
    """Whichever call a write uses."""
    return [f"{call}:error={error}:when=1+" for call in ("pwrite64", "pwritev", "pwritev2")]


def refused(address: str, payload: bytes, partition: int = 0) -> client.StorageStopped:
    with pytest.raises(client.StorageStopped) as stopped:
        send(address, payload, partition)
    return stopped.value


def states(address: str) -> list[str]:
    with client.Admin(address) as admin:
        return [partition.state for partition in admin.topic("orders").partitions]


def fresh(address: str, partition: int) -> list[bytes]:
    """What a reader that begins now gets of one partition."""
    return payloads(address, "orders", partition)


@pytest.mark.long
def test_a_failed_fsync_stops_that_partition_and_no_other(tmp_path: Path, server: LiveServer) -> None:
    address = server.address
    send(address, b"before", 0)
    send(address, b"before", 1)
    assert server.process is not None
    faults = ["fdatasync:error=EIO:when=1+"]
    with injected(server.process, tmp_path, *faults, path=segment(server, 0)) as tracer:
        assert refused(address, b"lost?", 0).outcome == "unknown"
        tracer.wait_for("EIO")
    assert send(address, b"next", 1).durability == "synced"
    forces = len(tracer.calls())
    assert refused(address, b"never", 0).outcome == "not done"
    assert len(tracer.calls()) == forces == 1, "a failed force is never tried again"
    assert states(address) == ["stopped", "open"]
    assert fresh(address, 0) == [b"before"], "reads up to the forced mark go on"
    reported = tfmq("send", "orders", "x", "--partition", "0", servers=address)
    assert reported.code == 1
    assert "tfmq topic resume" in reported.sentence
    assert "orders-0 takes no messages: an fsync failed" in server.log.read_text()
    for end in (server.stop, server.kill):
        end()
        server.start()
        assert states(address) == ["stopped", "open"]
        refused(address, b"never", 0)
        send(address, b"more", 1)
        assert fresh(address, 0) == [b"before"]
    resumed = tfmq("topic", "resume", "orders", servers=address)
    assert (resumed.code, states(address)) == (0, ["open", "open"])
    send(address, b"after", 0)
    found = fresh(address, 0)
    assert found in ([b"before", b"after"], [b"before", b"lost?", b"after"])
    assert fresh(address, 1) == [b"before", b"next", b"more", b"more"]


@pytest.mark.long
def test_a_failed_joint_fsync_stops_only_what_cannot_be_fsynced_alone(tmp_path: Path, server: LiveServer) -> None:
    address = server.address
    assert server.process is not None
    server.stop()
    server.settings = (*server.settings, "flush.method=syncfs")
    server.start()
    with (
        injected(server.process, tmp_path, "syncfs:error=EIO:when=1+", "fdatasync:delay_exit=1000:when=1+") as tracer,
        client.Producer(address, timeout=SECONDS) as first,
        client.Producer(address, timeout=SECONDS) as second,
        client.Producer(address, timeout=SECONDS) as third,
    ):
        senders = [(one, number) for one in (first, second, third) for number in (0, 1)]
        for turn in range(200):  # what comes while a force is under way makes both partitions dirty
            deliveries = [one.send("orders", b"%d" % turn, partition=number) for one, number in senders]
            results = [delivery.result(SECONDS) for delivery in deliveries]
            assert {result.durability for result in results} == {"synced"}
            if tracer.calls("syncfs"):
                break
        tracer.wait_for("EIO")  # two dirty partitions were forced by one syncfs
    assert states(address) == ["open", "open"], "each file's own force vouched for it"
    assert sorted(fresh(address, 0)) == sorted(fresh(address, 1)) != []


@pytest.mark.long
def test_an_error_at_any_moment_loses_nothing_acknowledged(tmp_path: Path, server: LiveServer) -> None:
    address = server.address
    random = seeded("errors at any moment")
    acknowledged: list[bytes] = []
    for turn in range(max(2, scaled(60))):
        assert server.process is not None
        count = random.randrange(1, 30)
        with (
            injected(server.process, tmp_path, f"fdatasync:error=EIO:when={count}+", path=segment(server, 0)),
            client.Producer(address, timeout=SECONDS) as producer,
        ):
            for number in range(200):
                payload = b"%d:%d" % (turn, number)
                try:
                    producer.send("orders", payload, partition=0).result(SECONDS)
                except client.StorageStopped:
                    break
                acknowledged.append(payload)
            else:
                raise AssertionError("200 forces and none failed")
        assert states(address)[0] == "stopped"
        if random.random() < 0.5:
            server.kill()
            server.start()
        with client.Admin(address) as admin:
            assert admin.resume("orders", 0) == "open"
        found = [payload for payload in fresh(address, 0) if payload in set(acknowledged)]
        assert found == acknowledged, f"turn {turn}"


@pytest.mark.long
def test_no_space_at_a_write_is_reported_and_goes_by(tmp_path: Path, server: LiveServer) -> None:
    address = server.address
    send(address, b"before")
    assert server.process is not None
    with (
        injected(server.process, tmp_path, *failing_writes("ENOSPC"), path=segment(server, 0)),
        client.Producer(address, timeout=1.0) as producer,
    ):
        delivery = producer.send("orders", b"never", partition=0)
        with pytest.raises(client.DiskFull) as full:
            delivery.result(SECONDS)
        assert full.value.outcome == "not done"
        assert fresh(address, 0) == [b"before"]
    assert states(address) == ["open", "open"]
    send(address, b"after")
    server.kill()
    server.start()
    assert fresh(address, 0) == [b"before", b"after"]


def test_an_input_output_error_at_a_write_stops_that_partition(tmp_path: Path, server: LiveServer) -> None:
    send(server.address, b"before")
    assert server.process is not None
    with injected(server.process, tmp_path, *failing_writes("EIO"), path=segment(server, 0)):
        refused(server.address, b"never")
    assert send(server.address, b"other", 1).durability == "synced"
    assert states(server.address) == ["stopped", "open"]
    assert fresh(server.address, 0) == [b"before"]
    with client.Admin(server.address) as admin:
        assert admin.resume("orders", 0) == "open"
    send(server.address, b"after")
    assert fresh(server.address, 0)[0] == b"before"
    assert fresh(server.address, 0)[-1] == b"after"


@pytest.mark.long
def test_a_slow_disk_answers_nothing_early_and_delays_no_other_request(tmp_path: Path, server: LiveServer) -> None:
    address = server.address
    send(address, b"forced")
    assert server.process is not None
    slow = f"fdatasync:delay_enter={int(SLOW_SECONDS * 1e6)}"
    slow_together = f"syncfs:delay_enter={int(SLOW_SECONDS * 1e6)}"
    with (
        injected(server.process, tmp_path, slow, slow_together),
        client.Producer(address) as producer,
        client.Producer(address, acks="written") as quick,
        client.Admin(address) as admin,
    ):
        quick.send("orders", b"", partition=1).result(SECONDS)  # connected before the clock runs
        begun = time.monotonic()
        ends: list[float] = []
        waiting = threading.Thread(target=lambda: ends.append(end_of(producer.send("orders", b"slow", partition=0))))
        waiting.start()
        while not ends and time.monotonic() - begun < SLOW_SECONDS * 0.6:
            asked = time.monotonic()
            admin.ping()
            admin.topics()
            assert at_once(address) == [b"forced"]
            assert quick.send("orders", b"quick", partition=1).result(SECONDS).durability == "written"
            assert time.monotonic() - asked < QUICK_SECONDS
        assert not ends, "answered before the disk had it"
        waiting.join(SECONDS)
        assert ends[0] - begun >= SLOW_SECONDS * 0.9
    assert fresh(address, 0) == [b"forced", b"slow"]


def at_once(address: str) -> list[bytes]:
    """What a reader gets without waiting for more."""
    with client.Consumer(address, partitions=[("orders", 0)]) as consumer:
        return [message.payload or b"" for message in consumer.poll(SECONDS)]


def end_of(delivery: client.Delivery) -> float:
    assert delivery.result(SECONDS).durability == "synced"
    return time.monotonic()


@pytest.mark.long
def test_what_waits_for_a_slow_disk_is_bounded(tmp_path: Path) -> None:
    limits = ("limits.pending_bytes=4194304", "limits.pending_bytes_per_session=4194304")
    server = ThreadedServer(tmp_path / "data", *limits)
    server.start()
    assert server.process is not None
    send(server.address, b"")
    producers = [client.Producer(server.address, timeout=SECONDS) for _ in range(4)]
    acknowledged: list[bytes] = []
    with injected(server.process, tmp_path, "fdatasync:delay_enter=400000"):
        deliveries = []
        for number in range(48):
            payload = b"%d:" % number + bytes(500_000)
            deliveries.append((payload, producers[number % 4].send("orders", payload, partition=0)))
        deadline, most = time.monotonic() + SECONDS, 0
        with client.Admin(server.address) as admin:
            while not all(delivery.done() for _, delivery in deliveries) and time.monotonic() < deadline:
                most = max(most, admin.status()["pending_bytes"])
        for payload, delivery in deliveries:
            assert delivery.result(SECONDS).durability == "synced", "a busy broker is asked again"
            acknowledged.append(payload)
    assert 0 < most <= 4 << 20
    for producer in producers:
        producer.close()
    found = [payload for payload in payloads(server.address, "orders") if payload]
    assert sorted(found) == sorted(acknowledged)
    server.stop()


@pytest.mark.long
def test_a_real_error_of_the_device_stops_and_loses_nothing_acknowledged(tmp_path: Path) -> None:
    """The file system's image lies on a tmpfs that is too small for it: writing back fails, as on a broken disk."""
    if os.geteuid() != 0:
        pytest.skip("cannot be had here: mounting needs root")
    try:
        image = LoopImage(tmpfs_bytes=DEVICE_BYTES, has_journal=False)
    except Unavailable as error:
        pytest.skip(f"cannot be had here: {error}")
    with image:
        server = LiveServer(tmp_path / "data")
        server.data.symlink_to(image.mount_point)
        server.start()
        acknowledged: list[bytes] = []
        with client.Producer(server.address, timeout=SECONDS) as producer:
            for number in range(1_000):
                if number == 10:
                    image.break_disk()
                payload = b"%d:" % number + os.urandom(100_000)
                try:
                    producer.send("orders", payload).result(SECONDS)
                except client.StorageStopped as stopped:
                    assert stopped.outcome == "unknown"
                    break
                acknowledged.append(payload)
            else:
                raise AssertionError("the device took more than it has")
        assert len(acknowledged) >= 10
        refused(server.address, b"never")
        assert "takes no messages" in server.log.read_text()
        assert fresh(server.address, 0) == acknowledged
        image.mend_disk()
        server.kill()
        server.start()
        assert states(server.address) == ["stopped"]
        assert fresh(server.address, 0) == acknowledged
        assert tfmq("topic", "resume", "orders", servers=server.address).code == 0
        send(server.address, b"after")
        found = fresh(server.address, 0)
        assert found[: len(acknowledged)] == acknowledged
        assert found[-1] == b"after"
        assert server.stop() == 0
