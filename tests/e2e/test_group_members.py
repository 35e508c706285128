"""Members of a group in processes of their own: killed, stopped and continued, over a kill of the broker; Ctrl-C.

Each member writes a line for each message before it asks for the next one. What it had saved never comes again; what
it had not is delivered to another member: so each number is there, and twice only those near a kill.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tfmq
from tests.e2e.workers import Worker
from tools.rigs.live_server import LiveServer

PARTITIONS = 4
MESSAGES = 400
SESSION = 2.0
SAVE_EVERY = 0.2
PAUSE = 0.005
SECONDS = 60.0

MEMBER = """
import os, sys, time, tfmq
servers, log, session, save_every, pause = sys.argv[1:]
out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
times = {"session": float(session), "save_every": float(save_every)}
consumer = tfmq.Consumer(servers, topics="orders", group="billing", **times)
print("pid", os.getpid(), flush=True)
with consumer:
    for message in consumer:
        os.write(out, f"{message.partition} {message.text}\\n".encode())
        time.sleep(float(pause))
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    server = LiveServer(tmp_path / "data", f"topics.partitions={PARTITIONS}")
    server.start()
    yield server
    server.stop()


def send(server: LiveServer, first: int, count: int) -> None:
    with tfmq.Producer(server.address) as producer:
        for number in range(first, first + count):
            producer.send("orders", str(number), partition=number % PARTITIONS)


def member(server: LiveServer, log: Path) -> Worker:
    return Worker(MEMBER, server.address, str(log), str(SESSION), str(SAVE_EVERY), str(PAUSE))


def numbers(*logs: Path) -> Counter[int]:
    return Counter(int(line.split()[1]) for log in logs if log.exists() for line in log.read_text().splitlines())


def until(logs: list[Path], count: int) -> None:
    """So many different messages were handled."""
    end = time.monotonic() + SECONDS
    while len(numbers(*logs)) < count:
        assert time.monotonic() < end, f"{len(numbers(*logs))} of {count}"
        time.sleep(0.05)


@pytest.mark.long
def test_members_that_are_killed_or_stopped_lose_their_partitions_and_nothing_else(
    server: LiveServer, tmp_path: Path
) -> None:
    logs = [tmp_path / f"log-{number}" for number in range(3)]
    send(server, 0, MESSAGES)
    with member(server, logs[0]) as first, member(server, logs[1]) as second, member(server, logs[2]) as third:
        for each in (first, second, third):
            each.wait_for("pid")
        until(logs, MESSAGES // 8)
        first.kill()
        second.stand_still()
        until(logs, MESSAGES)
        send(server, MESSAGES, MESSAGES)
        until(logs, MESSAGES + MESSAGES // 8)
        second.go_on()  # a zombie: it drops what it had, and joins again by itself
        before = sum(numbers(logs[1]).values())
        server.kill()
        server.start()
        until(logs, 2 * MESSAGES)
        send(server, 2 * MESSAGES, MESSAGES)
        until(logs, 3 * MESSAGES)
        assert sum(numbers(logs[1]).values()) > before, "it works again"
    found = numbers(*logs)
    assert found.keys() == set(range(3 * MESSAGES))
    again = sum(count - 1 for count in found.values())
    window = 3 * PARTITIONS * (SAVE_EVERY / PAUSE + 1)
    assert again <= window, f"{again} messages came twice or more: more than three ends can leave unsaved"


def test_ctrl_c_saves_what_was_acked_and_leaves_the_group(server: LiveServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    send(server, 0, MESSAGES)
    with member(server, log) as only:
        only.wait_for("pid")
        until([log], 20)
        os.kill(only._process.pid, signal.SIGINT)
        only._process.wait(SECONDS)
    handled = numbers(log)
    assert set(handled.values()) == {1}
    with tfmq.Consumer(server.address, topics="orders", group="billing") as rest:
        began = time.monotonic()
        found: list[int] = []
        while len(found) + len(handled) < MESSAGES and time.monotonic() < began + SECONDS:
            found += [int(message.text) for message in rest.poll(timeout=1)]
        assert time.monotonic() - began < SESSION * 5, "it left, so nobody waited for it"
    both = handled + Counter(found)
    assert both.keys() == set(range(MESSAGES))
    assert sum(both.values()) <= MESSAGES + 1, "only the message in work comes again"


@pytest.mark.long
def test_a_handler_that_takes_longer_than_a_session_keeps_its_partition(server: LiveServer) -> None:
    send(server, 0, PARTITIONS)
    options: Any = {"group": "billing", "session": 1.0, "save_every": SAVE_EVERY}
    with (
        tfmq.Consumer(server.address, topics="orders", **options) as slow,
        tfmq.Consumer(server.address, topics="orders", **options) as other,
    ):
        message = next(slow)
        end = time.monotonic() + 3.0
        given: list[tfmq.ReceivedMessage] = []
        while time.monotonic() < end:
            given += other.poll(timeout=0.2)
        assert message.partition not in {each.partition for each in given}
        slow.commit(message)
