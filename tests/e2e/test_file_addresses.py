"""`file:PATH` with real brokers: joined or started, without a terminal, back after a kill, gone when unused."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfmq
from tests.scale import SCALE
from tfmq import aio
from tfmq.client.connection import addresses
from tools.rigs.live_server import LiveServer

SECONDS = 60.0
STARTERS = 5 if SCALE >= 1 else 3
SENDER = """
import sys, tfmq
with tfmq.Producer(timeout=60) as producer:
    producer.send("orders", sys.argv[1])
"""


def process_of(data: Path) -> int:
    """The broker that runs on the folder."""
    return int((data / addresses.ADDRESS_NAME).read_text().split()[1])


def runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for_end(process: int) -> None:
    until = time.monotonic() + SECONDS
    while runs(process):
        assert time.monotonic() < until, "it runs on"
        time.sleep(0.02)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose broker, if one was started, has ended with the test."""
    monkeypatch.setattr(addresses, "IDLE_SECONDS", 2)
    yield tmp_path / "data"
    if (tmp_path / "data" / addresses.ADDRESS_NAME).exists():
        process = process_of(tmp_path / "data")
        if runs(process):
            os.kill(process, signal.SIGTERM)
            wait_for_end(process)


def read(servers: str, count: int) -> list[bytes]:
    with tfmq.Consumer(servers, topics="orders") as consumer:
        found: list[bytes] = []
        until = time.monotonic() + SECONDS
        while len(found) < count and time.monotonic() < until:
            found += [each.payload or b"" for each in consumer.poll(5.0)]
        return found


@pytest.mark.long
def test_one_is_started_comes_back_after_a_kill_and_ends_when_it_is_not_used(data: Path) -> None:
    """By the blocking face, and after the kill by the asyncio one."""

    async def send(text: bytes) -> None:
        async with aio.Producer(servers, timeout=SECONDS) as producer:
            await producer.send("orders", text)

    servers = f"file:{data}"
    with tfmq.Producer(servers, timeout=SECONDS) as producer:
        producer.send("orders", b"one").result()
        first = process_of(data)
        assert os.getsid(first) != os.getsid(0), "Ctrl-C in our terminal is not for it"
        os.kill(first, signal.SIGKILL)
    asyncio.run(send(b"two"))
    with tfmq.Producer(servers, timeout=SECONDS) as producer:  # while it is connected the broker stays
        producer.send("orders", b"three").result()
        second = process_of(data)
        assert second != first
        assert read(servers, 3) == [b"one", b"two", b"three"]
    wait_for_end(second)
    assert not (data / addresses.ADDRESS_NAME).exists()
    assert "Traceback" not in (data / addresses.LOG_NAME).read_text()


@pytest.mark.long
def test_of_many_starters_one_wins_and_all_are_served(data: Path) -> None:
    """Also where the folder is that of a program, whose modules are not for the broker."""
    (data / "meta").mkdir(parents=True)  # it was a broker's before
    for name in ("click", "logging", "tfmq"):
        (data / f"{name}.py").write_text("raise SystemExit('a module of the folder')")
    environment = os.environ | {"TFMQ_SERVERS": f"file:{data}"}
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", SENDER, str(number)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for number in range(STARTERS)
    ]
    assert [(each.communicate(timeout=SECONDS)[1], each.returncode) for each in starters] == [("", 0)] * STARTERS
    assert sorted(read(f"file:{data}", STARTERS)) == [b"%d" % number for number in range(STARTERS)]
    assert (data / addresses.LOG_NAME).read_text() == "", "nobody else tried to start one"


@pytest.mark.long
def test_one_that_was_started_by_hand_is_joined_and_left_running(data: Path) -> None:
    server = LiveServer(data)
    server.start()
    assert process_of(data) == server.process.pid  # type: ignore[union-attr]
    with tfmq.Admin(f"file:{data}") as admin:
        assert admin.status()["listen"] == server.address
    assert server.stop() == 0
    assert not (data / addresses.ADDRESS_NAME).exists()


def test_why_it_cannot_be_started_is_reported(data: Path) -> None:
    data.mkdir()
    (data / "meta").write_text("a file where a folder belongs")
    with (
        tfmq.Admin(f"file:{data}") as admin,
        pytest.raises(tfmq.ConnectionFailed, match="Last line of its log: tfmq-server"),
    ):
        admin.status()
