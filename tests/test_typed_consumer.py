"""`Consumer[Order]` was refused by type checkers, although it ran: the class was not generic for them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import paths

PROGRAM = """
import tfmq
from typing import assert_type

class Order:
    number: int

orders: "tfmq.Consumer[Order]" = tfmq.Consumer(topics="orders", codec=tfmq.codecs.pydantic(Order))
for message in orders:
    assert_type(message.value, Order)
inferred = tfmq.Consumer(topics="orders", codec=tfmq.codecs.pydantic(Order))
assert_type(inferred.poll()[0].value.number, int)
plain = tfmq.Consumer(topics="orders")
plain.commit(plain.poll()[0])
plain.poll()[0].payload = b"x"  # type: ignore[misc]
tfmq.ReceivedMessage("a payload alone")  # type: ignore[arg-type]

async def main() -> None:
    async with tfmq.aio.Consumer(topics="orders", codec=tfmq.codecs.pydantic(Order)) as consumer:
        async for message in consumer:
            assert_type(message.value, Order)
    async with tfmq.aio.Producer() as producer:
        assert_type(await producer.send("orders", b"x"), tfmq.SendResult)
"""

DERIVED = """
from typing import Any, assert_type

from twisted.internet.defer import Deferred

import tfmq
from tfmq.aio import Transaction as AwaitedTransaction
from tfmq.client.admin.delayed import Rescheduled
from tfmq.client.admin.models import TopicDescription, TransactionEnd

with tfmq.Admin() as admin:
    assert_type(admin.grow_topic("orders", partitions=4), int)
    assert_type(admin.create_topic("orders"), TopicDescription)
    assert_type(admin.commit_transaction("x", heuristic=False), TransactionEnd)
    assert_type(admin.reset_group("g", "orders", "latest", create=True), dict[int, int])
    assert_type(admin.topics()[0].name, str)
    admin.grow_topic("orders")  # type: ignore[call-arg]
    admin.grow_topic("orders", "4")  # type: ignore[arg-type]
    admin.commit_transaction("x", 0, False)  # type: ignore[call-arg]
    admin.reset_group("g", "orders", "latest", creat=True)  # type: ignore[call-arg]

consumer = tfmq.Consumer(topics="orders", group="g")
assert_type(consumer.position("orders", 0), int)
assert_type(consumer.committed("orders", partition=0), int | None)
consumer.seek("orders", 0, to="latest")
consumer.seek("orders", 0, to="end")  # type: ignore[arg-type]
consumer.seek("orders", 0, 7)  # type: ignore[call-arg]
with tfmq.Producer() as producer:
    assert_type(producer.cancel("handle"), str)
    assert_type(producer.xa().start("x", resume=True), tfmq.Transaction)
    assert_type(producer.xa().commit("x", one_phase=True), str)

async def main() -> None:
    async with tfmq.aio.Producer() as producer:
        assert_type(await producer.reschedule("handle", 5.0), Rescheduled)
        assert_type(await producer.xa().start("x"), AwaitedTransaction)
    async with tfmq.aio.Consumer(topics="orders") as consumer:
        assert_type(await consumer.committed("orders", 0), int | None)
        await consumer.seek("orders", 0, 7)  # type: ignore[call-arg]
    async with tfmq.aio.Admin() as admin:
        assert_type(await admin.grow_topic("orders", partitions=4), int)
        assert_type(await admin.create_topic("orders"), TopicDescription)
        assert_type(await admin.commit_transaction("x", heuristic=False), TransactionEnd)
        await admin.grow_topic("orders")  # type: ignore[call-arg]
        admin.ping()  # type: ignore[unused-coroutine]
        await admin.commit_transaction("x", 0, False)  # type: ignore[call-arg]

def later(admin: tfmq.twisted.Admin) -> None:
    assert_type(admin.grow_topic("orders", partitions=4), Deferred[int])
    assert_type(admin.commit_transaction("x", heuristic=False), Deferred[TransactionEnd])
    admin.grow_topic("orders", "4")  # type: ignore[arg-type]
    admin.commit_transaction("x", 0, False)  # type: ignore[call-arg]

def sent(producer: tfmq.twisted.Producer, consumer: tfmq.twisted.Consumer[bytes]) -> None:
    assert_type(producer.send("orders", b"x", key="1"), Deferred[tfmq.SendResult])
    assert_type(producer.xa().start("x"), Deferred[tfmq.twisted.Transaction])
    assert_type(producer.transaction().commit(), Deferred[str])
    assert_type(producer.stats(), dict[str, Any])
    producer.transaction().commit_offsets(consumer)
    assert_type(consumer.position("orders", 0), Deferred[int])
    assert_type(consumer.run(workers=2, order="key"), Deferred[None])
    producer.send("orders", b"x", keys="1")  # type: ignore[call-arg]
    consumer.run(order="all")  # type: ignore[arg-type]
    consumer.run(None, 2)  # type: ignore[call-arg]

async def within(producer: tfmq.twisted.Producer) -> None:
    async with producer, producer.transaction() as tx:
        assert_type(tx, tfmq.twisted.Transaction)
        await tx.send("orders", b"x")
"""


@pytest.mark.long
@pytest.mark.parametrize("text", [PROGRAM, DERIVED], ids=["clients", "derived"])
def test_a_users_program_is_typed(tmp_path: Path, text: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", str(program)]
    root = paths.ROOT
    environment = {**os.environ, "PYTHONPATH": str(root)}  # where tfmq is an installed package, as it is for users
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
