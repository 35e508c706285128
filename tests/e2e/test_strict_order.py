"""`StrictPartitions` over real kills: of the process that sends, and of the broker; and in the background of a program
that waits for nothing."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfmq
from tests.e2e.reading import payloads
from tests.scale import scaled
from tfmq import aio
from tools.rigs.live_server import LiveServer

SECONDS = 60.0
LAST = f"{10**12}"
SENDER = """
import sys, time, tfmq
servers, store, first, said = sys.argv[1:]
selector = tfmq.StrictPartitions({"orders": [0]}, store)
with open(said, "a") as file, tfmq.Producer(servers, selector=selector, timeout=60) as producer:
    number = int(first)
    while True:
        producer.send("orders", str(number)).result()
        file.write(f"{number}\\n")
        file.flush()
        number += 1
        time.sleep(0.002)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    made = LiveServer(tmp_path / "data")
    made.start()
    yield made
    if made in LiveServer.alive:
        made.stop()


def wait_for(count: int, server: LiveServer) -> list[bytes]:
    until = time.monotonic() + SECONDS
    while len(found := stored(server)) < count:
        assert time.monotonic() < until, found
        time.sleep(0.1)
    return found


def stored(server: LiveServer) -> list[bytes]:
    """What is there by now; the first message makes the topic."""
    try:
        return payloads(server.address, "orders")
    except tfmq.UnknownTopic:
        return []


def test_what_was_kept_goes_out_although_nobody_waits(server: LiveServer, tmp_path: Path) -> None:
    selector = tfmq.StrictPartitions({"orders": [0]}, tmp_path / "store")
    with tfmq.Producer(server.address, selector=selector) as producer:
        assert producer.send("orders", "0").result().durability == "synced"
        server.kill()
        kept = [producer.send("orders", f"{number}") for number in range(1, 5)]
        assert {each.result(SECONDS).durability for each in kept} == {"kept"}
        server.start()
        assert wait_for(5, server) == [b"0", b"1", b"2", b"3", b"4"]
        assert producer.send("orders", "5").result().durability in ("kept", "synced")
    assert wait_for(6, server)[5] == b"5"


def test_one_that_starts_before_its_broker_keeps(server: LiveServer, tmp_path: Path) -> None:
    server.stop()
    selector = tfmq.StrictPartitions({"orders": [0]}, tmp_path / "store")
    with tfmq.Producer(server.address, selector=selector) as producer:
        assert producer.send("orders", "0").result().durability == "kept"
        server.start()
        assert wait_for(1, server) == [b"0"]


def test_the_asyncio_face_keeps_and_forwards_too(server: LiveServer, tmp_path: Path) -> None:
    async def story() -> list[str]:
        selector = tfmq.StrictPartitions({"orders": [0]}, tmp_path / "store")
        async with aio.Producer(server.address, selector=selector) as producer:
            said = [(await producer.send("orders", "0")).durability]
            await asyncio.to_thread(server.kill)
            said.append((await producer.send("orders", "1")).durability)
            await asyncio.to_thread(server.start)
            found = await asyncio.to_thread(wait_for, 2, server)
            assert found == [b"0", b"1"]
        return said

    assert asyncio.run(story()) == ["synced", "kept"]


def test_kills_of_the_sender_and_of_the_broker(server: LiveServer, tmp_path: Path) -> None:
    """Each process goes on behind what the one before had told; what was told is there, in order and once."""
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    said = tmp_path / "said"
    said.touch()
    for turn in range(max(4, scaled(40))):
        told = [int(line) for line in said.read_text().split()]
        first = 1_000_000 * (turn + 1)  # numbers of each process begin anew, so order is theirs
        assert told == sorted(set(told)), seed
        sender = subprocess.Popen(
            [sys.executable, "-c", SENDER, server.address, str(tmp_path / "store"), str(first), str(said)],
            env=os.environ | {"PYTHONPATH": os.getcwd()},
        )
        until = time.monotonic() + SECONDS
        while not said.read_text().endswith("\n") or len(said.read_text().split()) < len(told) + 3:
            assert time.monotonic() < until, seed
            assert sender.poll() is None, seed
            time.sleep(0.01)
        if turn % 2:
            server.kill()
        time.sleep(chance.random() * 0.3 + (2.2 if turn % 4 == 1 else 0))
        if turn % 2 and chance.random() < 0.5:
            server.start()
            time.sleep(chance.random() * 0.2)
        sender.send_signal(signal.SIGKILL)
        sender.wait()
        if server not in LiveServer.alive:
            server.start()
    with tfmq.Producer(
        server.address, selector=tfmq.StrictPartitions({"orders": [0]}, tmp_path / "store")
    ) as producer:
        assert producer.send("orders", LAST).result(SECONDS)
        until = time.monotonic() + SECONDS
        while payloads(server.address, "orders")[-1] != LAST.encode():
            assert time.monotonic() < until, seed
            time.sleep(0.1)
    found = [int(payload) for payload in payloads(server.address, "orders")]
    assert found == sorted(set(found)), f"in order, each once (seed {seed})"
    missing = {int(line) for line in said.read_text().split()} - set(found)
    assert not missing, seed
