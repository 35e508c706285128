"""Every example of docs/database-transactions.md runs as it stands there."""

import ast
import asyncio
import inspect
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import ForeignKey, select
from sqlalchemy.engine import Engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import tfmq.aio
from tests import paths
from tests.sql.crash_recovery import PATIENCE_SECONDS, messages
from tests.sql.shop import Order, orders
from tests.sql.test_commit_protocol import async_engine_of

PAGE = paths.ROOT / "docs" / "database-transactions.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


class Base(DeclarativeBase):
    """As a user has one."""


class Payment(Base):
    __tablename__ = "payment"
    order: Mapped[int] = mapped_column(ForeignKey(Order.__table__.c.number), primary_key=True)


def run(block: str, names: dict[str, Any]) -> Any:
    """The block, at the top of a module with those names; something to await if it awaits."""
    return eval(compile(block, PAGE.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)


def block_with(words: str) -> str:
    (found,) = [each for each in BLOCKS if words in each]
    return str(found)


async def run_async(engine: Engine, servers: str) -> None:
    awaited = async_engine_of(engine)
    async with tfmq.aio.Producer(servers) as producer:
        names = {"async_engine": awaited, "producer": producer, "AsyncSession": AsyncSession}
        made = run(block_with("async with"), names | {"tfmq": tfmq, "Order": Order})
        assert inspect.isawaitable(made)
        await made
    await awaited.dispose()


@pytest.mark.long
def test_the_examples_of_the_page_run(engine: Engine, tmp_path: Path) -> None:
    Base.metadata.tables["payment"].drop(engine, checkfirst=True)
    Base.metadata.tables["payment"].create(engine)
    settings = {"transaction.timeout_seconds": 10}
    with tfmq.local_server(tmp_path / "data", settings=settings) as servers, tfmq.Producer(servers) as producer:
        names = {"engine": engine, "producer": producer, "servers": servers, "tfmq": tfmq}
        names |= {"Session": Session, "Order": Order, "Payment": Payment, "Base": Base}
        run(block_with("tfmq.sql.create_table(engine)"), names)
        producer.flush()
        asyncio.run(run_async(engine, servers))
        assert (orders(engine), reported(servers, "orders")) == ([1, 2], ["order 1", "order 2"])

        producer.send_many("work", ["1", "2"]).result()
        reader = tfmq.Consumer(servers, topics="work", group="page", commits="manual", read="written")
        with reader as consumer:
            run(block_with("commit_offsets"), names | {"consumer": upto(consumer, 2)})
        assert messages(servers, "payments") == [1, 2]
        for words in ("transaction_table", "tfmq.sql.prune"):
            run(block_with(words), names)
        assert "tfmq_transaction" in Base.metadata.tables
    assert len(BLOCKS) == 5, "a new example is to be run here"
    Base.metadata.tables["payment"].drop(engine)


PROGRAM = """
import os, sys
import tfmq
from sqlalchemy import create_engine, event
from sqlalchemy.orm import Session
from tests.sql.test_page import Payment
from tfmq.client.transaction import check_back

check_back.POLL_SECONDS = 0.05
servers, url, dies = sys.argv[1:]
engine = create_engine(url)
with (
    tfmq.Producer(servers) as producer,
    tfmq.Consumer(servers, topics="work", group="page", commits="manual", session=2) as consumer,
):
    if dies == "dies":
        event.listen(engine, "commit", lambda connection: os._exit(9))
    exec(sys.stdin.read())
"""
"""The loop of the page, as a program; it dies at the database's commit, after the broker's prepare."""


def loop_program(servers: str, url: str, dies: str) -> "subprocess.Popen[str]":
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, servers, url, dies], cwd=paths.ROOT, stdin=subprocess.PIPE, text=True
    )
    assert program.stdin is not None
    program.stdin.write(block_with("commit_offsets"))
    program.stdin.close()
    return program


@pytest.mark.long
def test_the_loop_that_is_killed_between_prepare_and_commit_goes_on_as_it_stands_there(
    sqlite_engine: Engine, tmp_path: Path
) -> None:
    Base.metadata.tables["payment"].create(sqlite_engine)
    with Session(sqlite_engine) as session, session.begin():
        session.add_all([Order(number=number) for number in (1, 2, 3)])
    url = str(sqlite_engine.url)
    settings = {"transaction.check_seconds": 0.1}
    with (
        tfmq.local_server(tmp_path / "data", settings=settings) as servers,
        tfmq.Producer(servers) as producer,
        tfmq.Admin(servers) as admin,
    ):
        producer.send_many("work", ["1", "2", "3"]).result()
        assert loop_program(servers, url, "dies").wait(PATIENCE_SECONDS) == 9
        assert [each.state for each in admin.transactions()] == ["prepared"]
        restarted = loop_program(servers, url, "lives")
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while messages(servers, "payments") != [1, 2, 3]:
                assert time.monotonic() < deadline and restarted.poll() is None
                time.sleep(0.1)
        finally:
            restarted.kill()
            restarted.wait(PATIENCE_SECONDS)
        with Session(sqlite_engine) as session:
            assert sorted(session.scalars(select(Payment.order))) == [1, 2, 3]


def reported(servers: str, topic: str) -> list[str]:
    with tfmq.Consumer(servers, topics=topic, read="written") as consumer:
        return sorted(each.text for each in upto(consumer, 2))


class upto:
    """A consumer whose loop ends after so many messages, as none on the page does."""

    def __init__(self, consumer: tfmq.Consumer[Any], count: int) -> None:
        self._consumer, self._left = consumer, count

    def __iter__(self) -> Any:
        for message in self._consumer:
            yield message
            self._left -= 1
            if not self._left:
                return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)
