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

async def main() -> None:
    async with tfmq.aio.Consumer(topics="orders", codec=tfmq.codecs.pydantic(Order)) as consumer:
        async for message in consumer:
            assert_type(message.value, Order)
    async with tfmq.aio.Producer() as producer:
        assert_type(await producer.send("orders", b"x"), tfmq.SendResult)
"""

ADMINS = """
from typing import assert_type

from twisted.internet.defer import Deferred

import tfmq
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

async def main() -> None:
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
"""


@pytest.mark.long
@pytest.mark.parametrize("text", [PROGRAM, ADMINS], ids=["clients", "admins"])
def test_a_users_program_is_typed(tmp_path: Path, text: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", str(program)]
    root = paths.ROOT
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
    }  # where tfmq is an installed package, as it is for users
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
