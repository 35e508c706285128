"""The side of Redis, NATS, RabbitMQ and beanstalkd in the rows, run by the peers' own Python.

    python_clients.py PEER MODE ADDRESS TOPIC COUNT [EACH]

Prints the figure as JSON. Each client in its own best mode that we know, its acknowledgements checked:

    redis       redis-py: pipelines of 1,000 XADD; XREAD of up to 10,000
    nats        nats-py: 1,000 publications of JetStream at once; a pull subscription that fetches 1,000
    quorum      pika to a quorum queue: publications with confirms, 1,000 before each wait; consumption without acks
    stream      rstream to a stream: publications with confirms in batches of 1,000; a subscription
    beanstalkd  greenstalk: one job after the other, as its protocol has no batches; reserve and delete

`clients` is threads with a connection each, for nats-py and rstream tasks with a connection each.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

PAYLOAD = b"x" * 100
BATCH = 1_000


def host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def rate_of(count: int, work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return count / (time.perf_counter() - begun)


def median_seconds(count: int, work: Callable[[], object]) -> float:
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return sorted(times)[count // 2]


def in_threads(each: int, sends: list[Callable[[], object]]) -> float:
    """Messages per second of one thread for each of `sends`, which it calls `each` times."""

    def work(send: Callable[[], object]) -> None:
        for _ in range(each):
            send()

    threads = [threading.Thread(target=work, args=(send,)) for send in sends]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return each * len(sends) / (time.perf_counter() - begun)


async def median_awaited(count: int, work: Callable[[], Awaitable[object]]) -> float:
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        await work()
        times.append(time.perf_counter() - begun)
    return sorted(times)[count // 2]


async def in_tasks(each: int, sends: list[Callable[[], Awaitable[object]]]) -> float:
    async def work(send: Callable[[], Awaitable[object]]) -> None:
        for _ in range(each):
            await send()

    begun = time.perf_counter()
    await asyncio.gather(*map(work, sends))
    return each * len(sends) / (time.perf_counter() - begun)


def redis(mode: str, address: str, topic: str, count: int, each: int) -> float:
    from redis import Redis

    host, port = host_port(address)

    def sender() -> Callable[[], object]:
        link = Redis(host, port)
        link.ping()
        return lambda: link.xadd(topic, {"p": PAYLOAD})

    link = Redis(host, port)
    if mode == "one_at_a_time":
        return median_seconds(count, sender())
    if mode == "clients":
        return in_threads(each, [sender() for _ in range(count)])
    if mode == "produce":

        def produce() -> None:
            for _ in range(count // BATCH):
                with link.pipeline(transaction=False) as pipeline:
                    for _ in range(BATCH):
                        pipeline.xadd(topic, {"p": PAYLOAD})
                    assert len(pipeline.execute()) == BATCH

        return rate_of(count, produce)

    def consume() -> None:
        last, got = b"0", 0
        while got < count:
            [[_, messages]] = link.xread({topic: last}, count=10_000)
            for _, fields in messages:
                assert fields[b"p"]
            last = messages[-1][0]
            got += len(messages)

    return rate_of(count, consume)


def nats(mode: str, address: str, topic: str, count: int, each: int) -> float:
    return asyncio.run(_nats(mode, address, topic, count, each))


async def _nats(mode: str, address: str, topic: str, count: int, each: int) -> float:
    import nats as client

    async def connect() -> Any:
        return (await client.connect(f"nats://{address}")).jetstream(publish_async_max_pending=2 * BATCH)

    stream = await connect()
    if mode != "consume":
        await stream.add_stream(name=topic, subjects=[topic])
    if mode == "one_at_a_time":
        return await median_awaited(count, lambda: stream.publish(topic, PAYLOAD))
    if mode == "clients":
        streams = [await connect() for _ in range(count)]
        return await in_tasks(each, [partial(one.publish, topic, PAYLOAD) for one in streams])
    begun = time.perf_counter()
    if mode == "produce":
        for _ in range(count // BATCH):
            await asyncio.gather(*[await stream.publish_async(topic, PAYLOAD) for _ in range(BATCH)])
        return count / (time.perf_counter() - begun)
    subscription = await stream.pull_subscribe(topic, config=client.js.api.ConsumerConfig(ack_policy="none"))
    got, begun = 0, time.perf_counter()
    while got < count:
        messages = await subscription.fetch(BATCH, timeout=5)
        for message in messages:
            assert message.data
        got += len(messages)
    return got / (time.perf_counter() - begun)


def quorum(mode: str, address: str, topic: str, count: int, each: int) -> float:
    import pika

    host, port = host_port(address)

    def channel() -> Any:
        link = pika.BlockingConnection(pika.ConnectionParameters(host, port, heartbeat=0))
        made = link.channel()
        made.queue_declare(topic, durable=True, arguments={"x-queue-type": "quorum"})
        return made

    def sender() -> Callable[[], object]:
        made = channel()
        made.confirm_delivery()
        properties = pika.BasicProperties(delivery_mode=2)
        return lambda: made.basic_publish("", topic, PAYLOAD, properties)

    if mode == "one_at_a_time":
        return median_seconds(count, sender())
    if mode == "clients":
        return in_threads(each, [sender() for _ in range(count)])
    if mode == "produce":
        return _pika_produce(host, port, topic, count)
    got, first, begun = 0, 0, 0.0
    made = channel()
    for _method, _properties, body in made.consume(topic, auto_ack=True, inactivity_timeout=5):
        assert body
        got += 1
        if not begun:
            begun, first = time.perf_counter(), 1
        if got >= count:
            break
    return (got - first) / (time.perf_counter() - begun)


def _pika_produce(host: str, port: int, topic: str, count: int) -> float:
    """Publish with confirms without waiting for each: pika's own event loop, at most 2,000 unconfirmed."""
    import pika

    published = confirmed = 0
    begun = ended = 0.0
    properties = pika.BasicProperties(delivery_mode=2)
    channel: Any = None

    def publish() -> None:
        nonlocal published
        while published < count and published - confirmed < 2 * BATCH:
            channel.basic_publish("", topic, PAYLOAD, properties)
            published += 1

    def on_confirm(frame: Any) -> None:
        nonlocal confirmed, ended
        assert isinstance(frame.method, pika.spec.Basic.Ack)
        confirmed = frame.method.delivery_tag if frame.method.multiple else confirmed + 1
        if confirmed >= count:
            ended = time.perf_counter()
            link.close()
        else:
            publish()

    def on_queue(_frame: Any) -> None:
        nonlocal begun
        begun = time.perf_counter()
        publish()

    def on_channel(opened: Any) -> None:
        nonlocal channel
        channel = opened
        channel.confirm_delivery(on_confirm)
        channel.queue_declare(topic, durable=True, arguments={"x-queue-type": "quorum"}, callback=on_queue)

    link = pika.SelectConnection(
        pika.ConnectionParameters(host, port, heartbeat=0),
        on_open_callback=lambda connection: connection.channel(on_open_callback=on_channel),
        on_close_callback=lambda connection, _reason: connection.ioloop.stop(),
    )
    link.ioloop.start()
    return count / (ended - begun)


def stream(mode: str, address: str, topic: str, count: int, each: int) -> float:
    return asyncio.run(_stream(mode, address, topic, count, each))


async def _stream(mode: str, address: str, topic: str, count: int, each: int) -> float:
    import rstream

    host, port = host_port(address)
    login: dict[str, Any] = {"host": host, "port": port, "username": "guest", "password": "guest"}
    if mode == "consume":
        got, first, begun, done = 0, 0, 0.0, asyncio.Event()

        async def on_message(message: Any, _context: Any) -> None:
            nonlocal got, first, begun
            got += 1
            if not begun:
                begun, first = time.perf_counter(), 1
            if got == count:
                done.set()

        consumer = rstream.Consumer(**login)
        await consumer.start()
        earliest = rstream.ConsumerOffsetSpecification(rstream.OffsetType.FIRST)
        await consumer.subscribe(topic, on_message, offset_specification=earliest, initial_credit=100)
        await done.wait()
        figure = (got - first) / (time.perf_counter() - begun)
        await consumer.close()
        return figure

    async def producer() -> Any:
        made = rstream.Producer(**login)
        await made.start()
        return made

    publisher = await producer()
    await publisher.create_stream(topic, exists_ok=True)
    if mode == "one_at_a_time":
        return await median_awaited(count, lambda: publisher.send_wait(topic, PAYLOAD))
    if mode == "clients":
        publishers = [publisher] + [await producer() for _ in range(count - 1)]
        return await in_tasks(each, [partial(one.send_wait, topic, PAYLOAD) for one in publishers])
    confirmed, done = 0, asyncio.Event()

    def on_confirm(confirmation: Any) -> None:
        nonlocal confirmed
        assert confirmation.is_confirmed
        confirmed += 1
        if confirmed == count:
            done.set()

    begun = time.perf_counter()
    for _ in range(count // BATCH):
        await publisher.send_batch(topic, [PAYLOAD] * BATCH, on_publish_confirm=on_confirm)
    await done.wait()
    return count / (time.perf_counter() - begun)


def beanstalkd(mode: str, address: str, topic: str, count: int, each: int) -> float:
    import greenstalk

    target = host_port(address)

    def sender() -> Callable[[], object]:
        link = greenstalk.Client(target, use=topic, watch=topic, encoding=None)
        return lambda: link.put(PAYLOAD)

    if mode == "one_at_a_time":
        return median_seconds(count, sender())
    if mode == "clients":
        return in_threads(each, [sender() for _ in range(count)])
    if mode == "produce":
        put = sender()
        return rate_of(count, lambda: [put() for _ in range(count)])
    link = greenstalk.Client(target, use=topic, watch=topic, encoding=None)

    def consume() -> None:
        for _ in range(count):
            job = link.reserve(timeout=5)
            assert job.body
            link.delete(job)

    return rate_of(count, consume)


PEERS = {each.__name__: each for each in (redis, nats, quorum, stream, beanstalkd)}

if __name__ == "__main__":
    peer, mode, address, topic, count, *each = sys.argv[1:]
    print(json.dumps(PEERS[peer](mode, address, topic, int(count), int(each[0]) if each else 0)))
