"""A broker that runs out of file descriptors, of connections, and of patience: the others go on, nothing is lost."""

import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import tfmq as client
from tests.e2e.reading import payloads
from tests.server.wire import Process, Wire, batch, running
from tfmq.protocol import commands
from tools.rigs.live_server import LiveServer

SECONDS = 60.0
CONNECTIONS = 1_000
OPEN_FILES = 300
"""Of which 256 stay for logs: docs/limits.md."""
PATIENCE_SECONDS = 30.0


@pytest.fixture
def files() -> Iterator[None]:
    """Room for many connections in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * CONNECTIONS + 200
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"cannot be had here: the limit of open files is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def quick() -> Iterator[Path]:
    """A folder in memory where there is such a thing: many topics are many forces, which do not matter here."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="tfmq-", dir=memory if os.access(memory, os.W_OK) else None))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.long
def test_topics_beyond_the_open_files_are_refused_and_the_others_go_on(quick: Path) -> None:
    data = quick / "data"
    made: list[str] = []
    with running(data, "--set", "server.log_level=warning", open_files=OPEN_FILES) as (process, (host, port)):
        address = f"{host}:{port}"
        with client.Producer(address) as producer, client.Admin(address) as admin:
            producer.send("orders", b"before").result(SECONDS)
            for number in range(OPEN_FILES):
                try:
                    admin.create_topic(f"t{number}", partitions=2)
                except client.TfmqError as error:
                    refusal = error
                    break
                made.append(f"t{number}")
            else:
                raise AssertionError("more topics than files")
            assert refusal.code != "internal_error"
            assert "open files" in str(refusal), refusal
            assert len(made) > 10
            names = {topic.name for topic in admin.topics()}
            assert set(made) <= names
            assert producer.send("orders", b"while full").result(SECONDS).durability == "synced"
            assert payloads(address, "orders") == [b"before", b"while full"]
            for name in made[:5]:
                admin.delete_topic(name)
            admin.create_topic("fits-again")
        code, _, log = process.stop()
        assert (code, "Traceback" in log) == (0, False)
    server = LiveServer(data)
    server.start()
    assert payloads(server.address, "orders") == [b"before", b"while full"]
    with client.Admin(server.address) as admin:
        names = {topic.name for topic in admin.topics()}
        assert names >= {*made[5:], "orders", "fits-again"}
        assert not names & set(made[:5])
    assert server.stop() == 0


@pytest.mark.long
def test_a_start_without_enough_files_is_refused_in_words_and_loses_nothing(quick: Path) -> None:
    server = LiveServer(quick / "data")
    server.start()
    with client.Admin(server.address) as admin:
        admin.create_topic("wide", partitions=200)
    with client.Producer(server.address) as producer:
        for number in range(200):
            producer.send("wide", b"%03d" % number, partition=number)
    server.stop()
    few = Process("--data", str(server.data), "--listen", "127.0.0.1:0", open_files=100)
    code, out, err = few.finish()
    assert (code, out) == (1, "")
    assert "ulimit -n" in err
    assert "Traceback" not in err
    server.start()
    assert sorted(payloads(server.address, "wide")) == [b"%03d" % number for number in range(200)]
    server.stop()


@pytest.mark.usefixtures("files")
def test_a_thousand_connections_are_all_served(broker: LiveServer, topic: str) -> None:
    host, _, port = broker.address.rpartition(":")
    with ExitStack() as stack:
        wires = []
        for _ in range(CONNECTIONS):
            wire = Wire((host, int(port)))
            stack.callback(wire.close)
            wires.append(wire)
        incarnation = wires[0].topic(topic)
        first = wires[0].ask(commands.LeaseProducerIds(CONNECTIONS))[0]
        begun = time.monotonic()
        for number, wire in enumerate(wires):
            wire.send(*batch(topic, incarnation, first + number, 0, [b"%04d" % number]))
        for wire in wires:
            header = wire.receive().header
            assert header[0] == 0, header
        assert time.monotonic() - begun < SECONDS
        assert wires[-1].ask(commands.Status())[0]["connections"] >= CONNECTIONS
        with client.Producer(broker.address) as producer:
            producer.send(topic, b"and one more").result(SECONDS)
    assert sorted(payloads(broker.address, topic)) == [
        *(b"%04d" % number for number in range(CONNECTIONS)),
        b"and one more",
    ]


@pytest.mark.long
@pytest.mark.usefixtures("files")
def test_a_flood_that_never_says_hello_holds_no_place(tmp_path: Path) -> None:
    server = LiveServer(tmp_path / "data", "limits.connections=200", "limits.hello_seconds=1")
    server.start()
    host, _, port = server.address.rpartition(":")
    with client.Producer(server.address) as producer:
        producer.send("orders", b"before").result(SECONDS)
        flood = [socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) for _ in range(500)]
        assert producer.send("orders", b"during").result(SECONDS).durability == "synced"
        until = time.monotonic() + PATIENCE_SECONDS
        while True:  # places come back as the silent ones are sent away
            try:
                with client.Admin(server.address, timeout=2.0) as admin:
                    if admin.status()["connections"] < 10:
                        break
            except client.TfmqError:
                pass
            assert time.monotonic() < until, "the flood still holds its places"
            time.sleep(0.1)
        for each in flood:
            each.close()
        producer.send("orders", b"after").result(SECONDS)
    assert payloads(server.address, "orders") == [b"before", b"during", b"after"]
    server.stop()
    assert "Traceback" not in server.log.read_text()
