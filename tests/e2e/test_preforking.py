"""Programs that fork before, while and after they use clients: preforking servers, groups over a fork, an event loop
that is not there yet. Beside `test_forking`, which has the streams of producers and of readers without a group."""

import asyncio
import contextlib
import importlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tfmq
from tests.e2e.reading import payloads
from tests.scale import scaled
from tfmq import aio
from tools.rigs.live_server import LiveServer

SECONDS = 60.0
WORKERS = 3
CLOSE_SECONDS = 8.0
"""What a close with a timeout of 1 second may take on a busy machine."""

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="cannot be had here: fork")


class Worker:
    """A child of ours that does `work(say)`; `say(value)` puts a line into its file, at once."""

    def __init__(self, path: Path, work: Callable[[Callable[[Any], None]], object]) -> None:
        self.path = path
        self.process = os.fork()
        if self.process:
            return
        code = 1
        try:
            with path.open("a") as file:

                def say(value: Any) -> None:
                    file.write(json.dumps(value) + "\n")
                    file.flush()

                work(say)
            code = 0
        finally:
            os._exit(code)

    @property
    def said(self) -> list[Any]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def wait_for(self, count: int) -> None:
        until = time.monotonic() + SECONDS
        while len(self.said) < count:
            assert time.monotonic() < until, self.said
            time.sleep(0.01)

    def kill(self) -> None:
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)

    def end(self) -> int:
        """Its exit code; one that does not end is killed."""
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            ended, status = os.waitpid(self.process, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        self.kill()
        raise AssertionError("the child stood still")


def test_a_preforking_server_shares_one_producer_by_name_and_loses_nothing_with_a_worker(
    broker: LiveServer, topic: str, tmp_path: Path
) -> None:
    """As gunicorn with preload: made and used in the master, used in each worker; a killed worker is forked anew."""
    count = max(30, scaled(500))
    with tfmq.Producer(broker.address, timeout=SECONDS) as producer:
        producer.send(topic, "master first").result()

        def serve(name: str, forever: bool) -> Callable[[Callable[[Any], None]], None]:
            def work(say: Callable[[Any], None]) -> None:
                number = 0
                while number < count or forever:
                    text = f"{name} {number}"
                    producer.send(topic, text).result()
                    say(text)
                    number += 1
                producer.close()

            return work

        doomed = Worker(tmp_path / "doomed", serve("doomed", True))
        workers = [Worker(tmp_path / f"{n}", serve(f"worker{n}", False)) for n in range(WORKERS)]
        doomed.wait_for(count // 2)
        doomed.kill()
        workers.append(Worker(tmp_path / "again", serve("again", False)))
        producer.send(topic, "master last").result()
        assert [worker.end() for worker in workers] == [0] * len(workers)
        producer.send(topic, "master after").result()
    found = [payload.decode() for payload in payloads(broker.address, topic)]
    assert len(found) == len(set(found))
    acknowledged = [text for worker in (doomed, *workers) for text in worker.said]
    assert set(acknowledged) <= set(found)
    assert len(found) - len(acknowledged) in (3, 4), "the master's, and at most one that died before it was told"
    for worker in workers:
        name = worker.said[0].split()[0]
        assert [text for text in found if text.startswith(name + " ")] == worker.said, "in order"


SHOP = """
import tfmq

producer = tfmq.Producer(timeout=60)
consumer = tfmq.Consumer(
    topics="TOPIC", group="TOPIC", commits="manual", session=2, retries=0, dead_letters=None
)

@consumer.on("TOPIC")
def bill(message):
    with producer.transaction() as tx:
        tx.send("TOPIC-bills", message.payload)
        tx.commit_offsets(consumer)
"""


def test_preforked_workers_serve_a_group_with_clients_of_a_module(
    broker: LiveServer, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gunicorn with preload: the master imports the module, uses its producer, and forks. Each worker is a member of
    its own; one that is killed is forked anew; SIGTERM ends them in order; each message has one bill."""
    topic = topic[:40]
    (tmp_path / "shop.py").write_text(SHOP.replace("TOPIC", topic))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TFMQ_SERVERS", broker.address)
    with tfmq.Admin(broker.address) as admin:
        admin.create_topic(topic, partitions=WORKERS * 2)
    shop: Any = importlib.import_module("shop")

    def serve(say: Callable[[Any], None]) -> None:
        def tell_when_signals_are_handled() -> None:
            while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                time.sleep(0.01)
            say("begun")

        # A SIGTERM before `run` handles it would end the worker at once.
        threading.Thread(target=tell_when_signals_are_handled, daemon=True).start()
        shop.consumer.run()
        shop.producer.close()

    wanted = [f"{number}" for number in range(max(60, scaled(1_000)))]
    for text in wanted[::2]:
        shop.producer.send(topic, text, key=text)
    shop.producer.flush()
    workers = [Worker(tmp_path / f"{n}", serve) for n in range(WORKERS + 1)]
    try:
        wait_until(lambda: bills(broker, topic) > len(wanted) // 8)
        workers.pop().kill()
        workers.append(Worker(tmp_path / "again", serve))
        for text in wanted[1::2]:
            shop.producer.send(topic, text, key=text)
        shop.producer.flush()
        wait_until(lambda: bills(broker, topic) >= len(wanted))
    finally:
        for worker in workers:
            worker.wait_for(1)
            os.kill(worker.process, signal.SIGTERM)
    assert [worker.end() for worker in workers] == [0] * len(workers)
    shop.consumer.close()
    shop.producer.close()
    found = [payload.decode() for payload in payloads(broker.address, f"{topic}-bills")]
    assert sorted(found) == sorted(wanted), "each by one worker, none left out"


def bills(broker: LiveServer, topic: str) -> int:
    """How many there are."""
    with tfmq.Admin(broker.address) as admin, contextlib.suppress(tfmq.UnknownTopic):
        return sum(each.messages for each in admin.topic(f"{topic}-bills").partitions)
    return 0


def wait_until(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_fork_of_a_member_takes_nothing_from_it(broker: LiveServer, topic: str, tmp_path: Path) -> None:
    """The child of a consumer that reads is another member: where the parent has the only partition, it waits for its
    turn, and goes on after what the parent processed."""
    with tfmq.Producer(broker.address) as producer:
        producer.send_many(topic, [b"%d" % number for number in range(10)]).result()
    consumer = tfmq.Consumer(broker.address, topics=topic, group=topic)
    first = [message.text for message in consumer.poll(SECONDS, 4)]

    def take_over(say: Callable[[Any], None]) -> None:
        say("begun")
        found: list[str | None] = []
        until = time.monotonic() + SECONDS
        while len(found) < 3 and time.monotonic() < until:
            found += [message.text for message in consumer.poll(1.0)]
        say(found)
        consumer.close()

    child = Worker(tmp_path / "child", take_over)
    child.wait_for(1)
    time.sleep(0.5)  # in which the child would take what is not its
    second = [message.text for message in consumer.poll(SECONDS, 3)]
    consumer.commit()
    consumer.close()
    assert child.end() == 0
    assert (first, second) == (["0", "1", "2", "3"], ["4", "5", "6"])
    assert child.said[1] == ["7", "8", "9"]


@contextlib.contextmanager
def frozen(server: LiveServer) -> Iterator[None]:
    """The broker holds its connections and answers nothing."""
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


def test_close_is_bounded_where_the_broker_says_nothing_here_and_in_a_child(
    broker: LiveServer, topic: str, tmp_path: Path
) -> None:
    producer = tfmq.Producer(broker.address, timeout=1.0)
    consumer = tfmq.Consumer(broker.address, topics=topic, group=topic, timeout=1.0)
    admin = tfmq.Admin(broker.address, timeout=1.0)
    producer.send(topic, "x").result()
    assert consumer.poll(SECONDS)
    admin.status()

    def close_all() -> float:
        began = time.monotonic()
        producer.send(topic, "never told")
        with contextlib.suppress(tfmq.TfmqError):
            producer.close(1.0)
        for client in (consumer, admin):
            with contextlib.suppress(tfmq.TfmqError):
                client.close()
        return time.monotonic() - began

    with frozen(broker):
        child = Worker(tmp_path / "child", lambda say: say(close_all()))
        seconds = close_all()
        assert child.end() == 0
    assert max(seconds, child.said[0]) < CLOSE_SECONDS


def test_asyncio_clients_are_made_without_a_loop_and_serve_one_after_a_fork(
    broker: LiveServer, topic: str, tmp_path: Path
) -> None:
    """At module level, as many programs have it; then in the loop of each process."""
    producer = aio.Producer(broker.address)
    consumer: aio.Consumer[Any] = aio.Consumer(broker.address, topics=topic)
    admin = aio.Admin(broker.address)

    async def use(name: str) -> list[str]:
        await producer.send(topic, name)
        await admin.status()
        found: list[str] = []
        while name not in found:
            found += [message.text or "" for message in await consumer.poll(5.0)]
        for client in (producer, consumer, admin):
            await client.close()
        return found

    child = Worker(tmp_path / "child", lambda say: say(asyncio.run(use("child"))))
    assert "parent" in asyncio.run(use("parent"))
    assert child.end() == 0
    assert "child" in child.said[0]
