"""What passes on the simulated broker passes on a real one: the same program on both, and every answer the same."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import tfmq.aio
from tfmq.testing.broker import SimulatedBroker

Answers = list[Any]


def reported(answers: Answers, call: Callable[[], Any]) -> None:
    """What `call` gives or raises."""
    try:
        answers.append(call())
    except tfmq.TfmqError as error:
        answers.append((type(error).__name__, error.code, error.outcome, error.retriable))


def sending(servers: str, answers: Answers) -> None:
    with tfmq.Producer(servers, timeout=10) as producer, tfmq.Admin(servers) as admin:
        admin.create_topic("orders", partitions=2)
        for number in range(6):
            result = producer.send("orders", f"order {number}", key=str(number), tag="new").result()
            answers.append((result.partition, result.offset is not None, result.durability, result.count))
        answers.append(sum(each.count for each in producer.send_many("many", ["x"] * 5000).result()))
        reported(answers, lambda: producer.send("orders", b"x" * (70 << 20)).result())
        reported(answers, lambda: producer.send("orders", "x", partition=7).result())
        reported(answers, lambda: admin.create_topic("orders"))
        reported(answers, lambda: admin.topic("nothing"))
        reported(answers, lambda: producer.send("not a name", "x"))
        reported(answers, lambda: producer.cancel("no handle"))
        answers.append([(topic.name, len(topic.partitions)) for topic in admin.topics()])


def reading(servers: str, answers: Answers) -> None:
    with tfmq.Consumer(servers, topics="orders", group="billing") as consumer:
        found: list[Any] = []
        while len(found) < 6:
            found += consumer.poll(timeout=5)
        answers.append(sorted((m.text, m.key, m.tag, m.partition, m.ordinal) for m in found))
        consumer.commit()
        answers.append((int(consumer.lag()), consumer.poll(timeout=0.2)))
        second = tfmq.Consumer(servers, topics="orders", group="billing")
        reported(answers, lambda: second.poll(timeout=0.2))
        with suppress(tfmq.TfmqError):
            second.close()
    with tfmq.Consumer(servers, topics="orders", group="billing") as consumer:
        answers.append(consumer.poll(timeout=0.2))
    with tfmq.Consumer(servers, partitions=[("orders", 0)], start=3) as consumer:
        reported(answers, lambda: consumer.poll(timeout=5))


def transactions(servers: str, answers: Answers) -> None:
    with tfmq.Producer(servers, timeout=10) as producer, tfmq.Admin(servers) as admin:
        with producer.transaction() as tx:
            tx.send("together", "one")
            tx.send("apart", "two")
        answers.append(tx.state)
        tx = producer.begin("order-1", timeout=60)
        tx.send("together", "three")
        answers.append((tx.prepare(), admin.transaction("order-1").state, len(admin.transactions())))
        reported(answers, lambda: producer.begin("order-1"))
        answers.append((producer.resume("order-1").commit(), admin.transaction("order-1").state))
        reported(answers, lambda: tx.rollback())
        reported(answers, lambda: producer.resume("order-2"))
        handle = producer.send("later", "x", delay=3600).result().delayed or ""
        answers.append((producer.cancel(handle), producer.cancel(handle), len(admin.delayed("later"))))


async def with_asyncio(servers: str, answers: Answers) -> None:
    async with (
        tfmq.aio.Producer(servers) as producer,
        tfmq.aio.Consumer(servers, topics="beside", group="beside") as consumer,
    ):
        results = await asyncio.gather(*(producer.send("beside", str(number)) for number in range(10)))
        answers.append([result.durability for result in results])
        found: list[Any] = []
        while len(found) < 10:
            found += await consumer.poll(timeout=5)
        answers.append(sorted(message.text for message in found))
        answers.append(await consumer.poll(timeout=0.2))


def program(servers: str) -> Answers:
    answers: Answers = []
    sending(servers, answers)
    reading(servers, answers)
    transactions(servers, answers)
    asyncio.run(with_asyncio(servers, answers))
    return answers


@pytest.mark.long
def test_every_answer_is_that_of_a_real_server(tmp_path: Path) -> None:
    with SimulatedBroker() as broker:
        simulated = program(broker.servers)
    with tfmq.local_server(tmp_path / "data") as servers:
        real = program(servers)
    assert len(simulated) > 25
    for number, (here, there) in enumerate(zip(simulated, real, strict=True)):
        assert here == there, f"answer {number}"
