"""Consumers on a real server: both faces, restarts, a takeover, a handler that takes its time."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.sending import Sender, Server
from tfmq import aio_consumer
from tfmq.consumer import Consumer
from tfmq.errors import Closed, ConnectionFailed, UnknownTopic
from tfmq.protocol import commands

SECONDS = 20.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("server")).start()
    yield running
    running.stop()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return str(request.node.name).replace("[", "-").replace("]", "")


@pytest.fixture
def sender(server: Server, topic: str) -> Iterator[Sender]:
    made = Sender(server.address, topic, partitions=2)
    yield made
    made.close()


def numbers(first: int, count: int) -> list[bytes]:
    return [b"%08d" % n for n in range(first, first + count)]


def drain(consumer: Consumer, count: int, seconds: float = SECONDS) -> list[bytes]:
    found: list[bytes] = []
    until = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < until:
        found += [message.payload or b"" for message in consumer.poll(0.5, 10_000)]
    return found


def test_a_group_goes_on_where_it_was(server: Server, sender: Sender, topic: str) -> None:
    sender.send(numbers(0, 1000))
    with Consumer(server.address, topics=topic, group=topic) as consumer:
        for message in consumer:
            if message.payload == b"%08d" % 299:
                break
        assert consumer.lag() == 700
    with Consumer(server.address, topics=topic, group=topic) as consumer:
        assert drain(consumer, 700) == numbers(300, 700)
        assert consumer.poll(0.0) == []
        assert consumer.lag() == 0
    with pytest.raises(KeyError), Consumer(server.address, topics=topic, group=topic, start="latest") as consumer:
        sender.send([b"fails"])
        for _ in consumer:
            raise KeyError
    with Consumer(server.address, topics=topic, group=topic) as consumer:
        assert next(consumer).payload == b"fails"


def test_partitions_keep_their_order_and_large_messages_do_not_stick(
    server: Server, sender: Sender, topic: str
) -> None:
    for turn in range(5):
        for partition in range(2):
            sender.send(numbers(turn * 100, 100), partition)
    sender.send([b"x" * 3_000_000], 1)
    sender.send([b"end"], 1)
    with Consumer(server.address, topics=topic, prefetch_bytes=200_000) as consumer:
        seen: dict[int, list[bytes]] = {0: [], 1: []}
        for message in consumer:
            seen[message.partition].append(message.payload or b"")
            if sum(map(len, seen.values())) == 1002:
                break
    assert seen[0] == numbers(0, 500)
    assert seen[1][:500] == numbers(0, 500)
    assert [len(payload) for payload in seen[1][500:]] == [3_000_000, 3]


def test_a_new_message_comes_at_once(server: Server, sender: Sender, topic: str) -> None:
    with Consumer(server.address, topics=topic) as consumer:
        assert consumer.poll(0.2) == []
        waiting = threading.Timer(0.3, sender.send, ([b"now"],))
        waiting.start()
        begun = time.monotonic()
        assert [message.payload for message in consumer.poll(10.0)] == [b"now"]
        assert time.monotonic() - begun < 5
        waiting.join()


def test_a_topic_is_waited_for_and_not_made(server: Server, topic: str) -> None:
    with Consumer(server.address, topics=topic, start="latest") as consumer:
        assert consumer.poll(0.5) == []
        made = Sender(server.address, topic)
        made.send([b"first"])
        assert drain(consumer, 1) == [b"first"]
        made.close()


def test_tags_are_filtered_at_the_broker_and_the_position_moves_on(server: Server, sender: Sender, topic: str) -> None:
    sender.send(numbers(0, 5000), tag="old")
    with Consumer(server.address, topics=topic, group=topic, tags="new") as consumer:
        assert consumer.poll(0.5) == []
        sender.send([b"wanted"], tag="new")
        assert drain(consumer, 1) == [b"wanted"]
        assert consumer.position(topic, 0) > 5000 * 8
        assert consumer.stats()["bytes"] < 1000, "the broker left the blocks out"


def test_seek_pause_and_resume(server: Server, sender: Sender, topic: str) -> None:
    sender.send(numbers(0, 100))
    with Consumer(server.address, partitions=[(topic, 0)]) as consumer:
        consumer.seek(topic, 0, ordinal=90)
        assert drain(consumer, 10) == numbers(90, 10)
        consumer.seek(topic, 0, offset=0)
        consumer.pause(topic, 0)
        assert consumer.poll(0.3) == []
        consumer.resume(topic, 0)
        assert drain(consumer, 100) == numbers(0, 100)
        consumer.seek(topic, 0, to="latest")
        assert consumer.poll(0.3) == []


def test_a_second_member_takes_over_from_one_that_is_gone(server: Server, sender: Sender, topic: str) -> None:
    sender.send(numbers(0, 10))
    first = Consumer(server.address, topics=topic, group=topic, session=5.0)
    assert next(first).payload == b"%08d" % 0
    with Consumer(server.address, topics=topic, group=topic, session=5.0) as second:
        assert second.poll(1.0) == []
        first._driver.close()  # as a process that died, without a farewell
        assert drain(second, 10) == numbers(0, 10)


@pytest.mark.long
def test_a_slow_handler_keeps_its_group_and_what_is_acked_is_saved_meanwhile(
    server: Server, sender: Sender, topic: str
) -> None:
    sender.send(numbers(0, 3))
    with Consumer(server.address, topics=topic, group=topic, session=1.0, save_every=0.2) as consumer:
        next(consumer), next(consumer)
        other = Consumer(server.address, topics=topic, group=topic)
        for _ in range(5):
            time.sleep(0.6)
            assert other.poll(0.1) == []
        other.close()
        assert consumer.stats()["partitions"][f"{topic}-0"]["saved_offset"] > 0
        assert next(consumer).payload == b"%08d" % 2


def test_offsets_in_a_file(server: Server, sender: Sender, topic: str, tmp_path: Path) -> None:
    sender.send(numbers(0, 10))
    path = f"file:{tmp_path / 'offsets.json'}"
    with Consumer(server.address, topics=topic, group=topic, offsets=path) as consumer:
        assert len(consumer.poll(5.0, 4)) == 4
    with Consumer(server.address, topics=topic, group=topic, offsets=path) as consumer:
        assert drain(consumer, 6) == numbers(4, 6)
    with Consumer(server.address, topics=topic, group=topic) as consumer:
        assert drain(consumer, 10) == numbers(0, 10), "the broker has none"


def test_a_deleted_topic_is_reported(server: Server, sender: Sender, topic: str) -> None:
    sender.send([b"a"])
    with Consumer(server.address, topics=topic) as consumer:
        assert drain(consumer, 1) == [b"a"]
        sender.ask(commands.DeleteTopic(topic))
        with pytest.raises(UnknownTopic, match=topic):
            consumer.poll(10.0)


def test_stop_from_another_thread_ends_a_waiting_loop(server: Server, sender: Sender, topic: str) -> None:
    sender.send([b"a"])
    with Consumer(server.address, topics=topic) as consumer:
        threading.Timer(0.3, consumer.stop).start()
        assert [message.payload for message in consumer] == [b"a"]
        assert consumer.poll(5.0) == []


@pytest.mark.usefixtures("impatient_clients")
def test_a_closed_port_is_reported_in_one_sentence() -> None:
    with Consumer("127.0.0.1:1", topics="x") as consumer, pytest.raises(ConnectionFailed, match=r"127\.0\.0\.1:1"):
        consumer.poll(10.0)
    with pytest.raises(Closed):
        consumer.poll()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_restarts_of_the_broker_skip_and_double_nothing(tmp_path: Path, number: int) -> None:
    running = Server(tmp_path).start()
    sender = Sender(running.address)
    found: list[bytes] = []
    try:
        with Consumer(running.address, topics="orders", group="g", save_every=0.1) as consumer:
            for turn in range(3):
                sender.send(numbers(turn * 1000, 1000))
                found += drain(consumer, 500)
                running.stop(number)
                time.sleep(0.2)
                running.start()
                found += drain(consumer, (turn + 1) * 1000 - len(found))
            assert consumer.stats()["connections"] >= 3
        assert found == numbers(0, 3000)
        with Consumer(running.address, topics="orders", group="g") as consumer:
            sender.send([b"next"])
            assert drain(consumer, 1) == [b"next"]
    finally:
        sender.close()
        running.stop()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="cannot be had here: fork")
def test_a_forked_child_reads_on_by_itself(server: Server, sender: Sender, topic: str) -> None:
    sender.send(numbers(0, 10))
    with Consumer(server.address, topics=topic) as consumer:
        assert len(consumer.poll(5.0, 4)) == 4
        child = os.fork()
        if child == 0:
            os._exit(0 if drain(consumer, 6) == numbers(4, 6) else 1)
        assert drain(consumer, 6) == numbers(4, 6)
        assert os.waitpid(child, 0)[1] == 0


def test_asyncio_reads_saves_and_survives_cancellation(server: Server, sender: Sender, topic: str) -> None:
    async def program() -> list[bytes]:
        found: list[bytes] = []
        async with aio_consumer.Consumer(server.address, topics=topic, group=topic) as consumer:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(consumer.poll(None), 0.3)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(anext(consumer), 0.3)
            await asyncio.get_running_loop().run_in_executor(None, sender.send, numbers(0, 100))
            async for message in consumer:
                found.append(message.payload or b"")
                if len(found) == 60:
                    break
            assert await consumer.lag() == 40
        async with aio_consumer.Consumer(server.address, topics=topic, group=topic) as consumer:
            found += [message.payload or b"" for message in await consumer.poll(5.0)]
            await consumer.commit()
            assert await consumer.committed(topic, 0) == await consumer.position(topic, 0)
        return found

    assert asyncio.run(program()) == numbers(0, 100)


def test_asyncio_with_a_file_for_its_offsets(server: Server, sender: Sender, topic: str, tmp_path: Path) -> None:
    sender.send(numbers(0, 10))
    path = f"file:{tmp_path / 'offsets.json'}"

    async def read(count: int) -> list[bytes]:
        async with aio_consumer.Consumer(server.address, topics=topic, group=topic, offsets=path) as consumer:
            return [message.payload or b"" for message in await consumer.poll(5.0, count)]

    assert asyncio.run(read(4)) + asyncio.run(read(10)) == numbers(0, 10)
