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


@pytest.mark.long
def test_a_users_program_is_typed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", str(program)]
    root = paths.ROOT
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
    }  # where tfmq is an installed package, as it is for users
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
