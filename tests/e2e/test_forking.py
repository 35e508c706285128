"""Processes that fork with messages on their way: nothing doubles, nothing is lost, both sides go on."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

import tfmq as client
from tests.e2e.commands import environment
from tests.e2e.reading import payloads
from tests.scale import scaled
from tools.rigs.live_server import LiveServer

SECONDS = 60.0
CHILD_SECONDS = 60.0

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="cannot be had here: fork")


def wait_for(child: int) -> int:
    """The exit code of a child of ours; one that does not end is killed."""
    until = time.monotonic() + CHILD_SECONDS
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child stood still")


def in_child(work: "object") -> int:
    """Forks, does `work()` in the child, ends it at once; the child's process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        assert callable(work)
        work()
        code = 0
    finally:
        os._exit(code)


def test_unsent_messages_are_the_parents_alone(broker: LiveServer, topic: str) -> None:
    wanted: list[bytes] = []
    for turn in range(max(3, scaled(50))):
        with client.Producer(broker.address, linger_ms=200, timeout=SECONDS) as producer:
            before = [b"%d before %d" % (turn, number) for number in range(20)]
            handles = [producer.send(topic, payload) for payload in before]
            mine = [b"%d child %d" % (turn, number) for number in range(20)]

            def child_sends(producer: client.Producer = producer, mine: list[bytes] = mine) -> None:
                for payload in mine:
                    producer.send(topic, payload)
                producer.flush()
                producer.close()

            child = in_child(child_sends)
            after = [b"%d after %d" % (turn, number) for number in range(20)]
            handles += [producer.send(topic, payload) for payload in after]
            assert wait_for(child) == 0
            for handle in handles:
                handle.result(SECONDS)
            wanted += before + after + mine
    found = payloads(broker.address, topic)
    assert sorted(found) == sorted(wanted)
    for word in (b"child", b"before", b"after"):
        assert [p for p in found if word in p] == [p for p in wanted if word in p], "each keeps its order"


def test_a_fork_in_the_middle_of_a_stream_keeps_both_streams(broker: LiveServer, topic: str) -> None:
    count = max(200, scaled(5_000))
    with client.Producer(broker.address, timeout=SECONDS) as producer:
        children: list[int] = []
        for number in range(count):
            producer.send(topic, b"parent %06d" % number)
            if number % (count // 4) == count // 8:
                name = b"child %d" % len(children)

                def child_sends(name: bytes = name) -> None:
                    for number in range(count):
                        producer.send(topic, b"%s %06d" % (name, number))
                    producer.close()

                children.append(in_child(child_sends))
        producer.flush()
        assert [wait_for(child) for child in children] == [0] * 4
    found = payloads(broker.address, topic)
    assert len(found) == 5 * count
    for name in (b"parent", *(b"child %d" % number for number in range(4))):
        assert [p for p in found if p.startswith(name + b" ")] == [b"%s %06d" % (name, n) for n in range(count)]


def send_some(producer: client.Producer, topic: str, name: str, count: int) -> None:
    for number in range(count):
        producer.send(topic, f"{name} {number:06}")
    producer.flush()


def test_multiprocessing_by_fork_shares_a_producer(broker: LiveServer, topic: str) -> None:
    context = multiprocessing.get_context("fork")
    count = max(100, scaled(2_000))
    with client.Producer(broker.address, timeout=SECONDS) as producer:
        producer.send(topic, "parent first")
        workers = [context.Process(target=send_some, args=(producer, topic, f"w{n}", count)) for n in range(4)]
        for worker in workers:
            worker.start()
        send_some(producer, topic, "parent", count)
        for worker in workers:
            worker.join(CHILD_SECONDS)
            assert worker.exitcode == 0
    found = [payload.decode() for payload in payloads(broker.address, topic)]
    assert len(found) == len(set(found)) == 5 * count + 1
    for name in ("w0", "w1", "w2", "w3", "parent"):
        assert [p for p in found if p.startswith(f"{name} 0")] == [f"{name} {n:06}" for n in range(count)]


POOL = """
import multiprocessing, sys
import tfmq

producer = tfmq.Producer()   # at module level, as many programs have it
consumer = tfmq.Consumer(topics=sys.argv[1])

def work(number):
    for message in consumer:      # with spawn and forkserver they are made anew in each process
        if message.text == "main before":
            break
    for n in range(50):
        producer.send(sys.argv[1], f"{number} {n:03}")
    producer.flush()
    consumer.seek(sys.argv[1], 0, to="earliest")
    return number

if __name__ == "__main__":
    producer.send(sys.argv[1], "main before").result()
    with multiprocessing.get_context(sys.argv[2]).Pool(2) as pool:
        assert sorted(pool.map(work, range(4), 1)) == list(range(4))
    producer.send(sys.argv[1], "main after")
"""


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_pool_with_clients_of_a_module(broker: LiveServer, topic: str, method: str, tmp_path: object) -> None:
    program = os.path.join(str(tmp_path), "program.py")
    with open(program, "w") as file:
        file.write(POOL)
    ran = subprocess.run(
        [sys.executable, program, topic, method],
        capture_output=True,
        timeout=CHILD_SECONDS,
        env=environment(broker.address) | {"PYTHONPATH": os.getcwd()},
        text=True,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    found = [payload.decode() for payload in payloads(broker.address, topic)]
    wanted = [f"{number} {n:03}" for number in range(4) for n in range(50)]
    assert sorted(found) == sorted([*wanted, "main before", "main after"])


def test_a_forked_reader_and_its_parent_both_read_on(broker: LiveServer, topic: str) -> None:
    wanted = [b"%05d" % number for number in range(3_000)]
    with client.Producer(broker.address) as producer:
        producer.send_many(topic, wanted)
    with client.Consumer(broker.address, topics=topic, fetch_bytes=10_000) as consumer:
        seen = [message.payload for message in consumer.poll(5.0, 100)]

        def child_reads() -> None:
            rest = list(seen)
            while len(rest) < len(wanted):
                rest += [message.payload for message in consumer.poll(5.0, 500)]
            assert rest == wanted

        child = in_child(child_reads)
        while len(seen) < len(wanted):
            seen += [message.payload for message in consumer.poll(5.0, 500)]
        assert seen == wanted
        assert wait_for(child) == 0
