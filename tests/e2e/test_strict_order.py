"""`StrictPartitions` over real kills: of the process that sends, and of the broker; and in the background of a program
that waits for nothing."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tfmq
from tests.e2e.reading import payloads
from tests.scale import scaled, seeded
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


def wait_for(count: int, server: LiveServer, topic: str) -> list[bytes]:
    until = time.monotonic() + SECONDS
    while len(found := stored(server, topic)) < count:
        assert time.monotonic() < until, found
        time.sleep(0.05)
    return found


def stored(server: LiveServer, topic: str) -> list[bytes]:
    """What is there by now; the first message makes the topic."""
    try:
        return payloads(server.address, topic)
    except tfmq.UnknownTopic:
        return []


@pytest.mark.long
def test_what_was_kept_is_sent_although_no_caller_waits(broker: LiveServer, tmp_path: Path) -> None:
    """By a blocking producer, by one that began before its broker, and by an asyncio one; in one downtime."""

    def strict(topic: str) -> tfmq.StrictPartitions:
        return tfmq.StrictPartitions({topic: [0]}, tmp_path / topic)

    async def story() -> None:
        with tfmq.Producer(broker.address, selector=strict("blocking")) as producer:
            async with aio.Producer(broker.address, selector=strict("asyncio")) as other:
                said = [producer.send("blocking", "0").result(), await other.send("asyncio", "0")]
                assert [each.durability for each in said] == ["synced"] * 2
                await asyncio.to_thread(broker.kill)
                kept = [producer.send("blocking", f"{number}") for number in range(1, 5)]
                assert {each.result(SECONDS).durability for each in kept} == {"kept"}
                assert (await other.send("asyncio", "1")).durability == "kept"
                with tfmq.Producer(broker.address, selector=strict("early")) as early:
                    assert early.send("early", "0").result(SECONDS).durability == "kept"
                    await asyncio.to_thread(broker.start)
                    assert await asyncio.to_thread(wait_for, 1, broker, "early") == [b"0"]
                assert await asyncio.to_thread(wait_for, 2, broker, "asyncio") == [b"0", b"1"]
            assert wait_for(5, broker, "blocking") == [b"0", b"1", b"2", b"3", b"4"]
            assert producer.send("blocking", "5").result().durability in ("kept", "synced")
            assert wait_for(6, broker, "blocking")[5] == b"5"

    asyncio.run(story())


@pytest.mark.long
def test_kills_of_the_sender_and_of_the_broker(broker: LiveServer, tmp_path: Path) -> None:
    """Each process continues after what the one before had reported; what was reported is there, in order and once."""
    chance = seeded("strict order")
    said = tmp_path / "said"
    said.touch()

    def wait_for_more(sender: "subprocess.Popen[bytes]", count: int) -> None:
        """Until it has reported so many more; the last may be half a line where the one before was killed."""
        until, known = time.monotonic() + SECONDS, said.read_text().count("\n")
        while said.read_text().count("\n") < known + count:
            assert time.monotonic() < until
            assert sender.poll() is None
            time.sleep(0.01)

    for turn in range(max(3, scaled(40))):
        first = 1_000_000 * (turn + 1)  # numbers of each process begin anew, so order is theirs
        sender = subprocess.Popen(
            [sys.executable, "-c", SENDER, broker.address, str(tmp_path / "store"), str(first), str(said)],
            env=os.environ | {"PYTHONPATH": os.getcwd()},
        )
        wait_for_more(sender, 3)
        if turn % 2:
            broker.kill()
        if turn % 4 == 1:
            wait_for_more(sender, 3)  # these are kept
        time.sleep(chance.random() * 0.3)
        if turn % 2 and chance.random() < 0.5:
            broker.start()
            time.sleep(chance.random() * 0.2)
        sender.send_signal(signal.SIGKILL)
        sender.wait()
        if broker not in LiveServer.alive:
            broker.start()
    selector = tfmq.StrictPartitions({"orders": [0]}, tmp_path / "store")
    with tfmq.Producer(broker.address, selector=selector) as producer:
        assert producer.send("orders", LAST).result(SECONDS)
        until = time.monotonic() + SECONDS
        while payloads(broker.address, "orders")[-1] != LAST.encode():
            assert time.monotonic() < until
            time.sleep(0.05)
    found = [int(payload) for payload in payloads(broker.address, "orders")]
    assert found == sorted(set(found)), "in order, each once"
    reported = [int(line) for line in said.read_text().splitlines()]
    assert reported == sorted(set(reported))
    assert set(reported) <= set(found)
