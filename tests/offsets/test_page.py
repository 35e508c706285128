"""Every example of docs/offsets.md runs as it stands there."""

import ast
import asyncio
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, insert
from sqlalchemy.engine import Engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import tfmq
import tfmq.aio
from tests import paths
from tests.sql.billing import Base, Invoice
from tfmq.offsets.storage import ClaimingStorage
from tfmq.testing.broker import SimulatedBroker

PAGE = paths.ROOT / "docs" / "offsets.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def block_with(words: str) -> str:
    (found,) = [each for each in BLOCKS if words in each]
    return str(found)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'books.db'}"


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    engine = create_engine(url)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    with SimulatedBroker() as broker:
        for number in range(3):
            broker.producer().send("orders", str(number)).result()
        yield broker


def billed(engine: Engine) -> list[int]:
    with Session(engine) as session:
        return [invoice.order for invoice in session.query(Invoice).order_by(Invoice.id)]


def kept(broker: SimulatedBroker, url: str) -> list[str]:
    """What the group's next member gets."""
    with broker.consumer("orders", group="billing", commits="manual", offsets=f"sql:{url}") as consumer:
        return [message.text for message in consumer.poll(30)]


def test_a_loop_bills_each_order_once(broker: SimulatedBroker, engine: Engine, url: str) -> None:
    def count(order: int) -> Invoice:
        if order == 2:
            names["consumer"].stop()
        return Invoice(order=order)

    names: dict[str, Any] = {"servers": broker.servers, "URL": url, "engine": engine, "Invoice": count}
    exec(compile(block_with("with consumer:"), PAGE.name, "exec"), names)
    assert billed(engine) == [0, 1, 2]
    assert kept(broker, url) == []


def test_a_poll_bills_all_of_it_once(broker: SimulatedBroker, engine: Engine, url: str) -> None:
    with broker.consumer("orders", group="billing", commits="manual", offsets=f"sql:{url}") as consumer:
        names = {"consumer": consumer, "engine": engine, "Invoice": Invoice, "insert": insert, "tfmq": tfmq}
        exec(compile(block_with("consumer.poll"), PAGE.name, "exec"), names)
    assert billed(engine) == [0, 1, 2]
    assert kept(broker, url) == []


def test_an_asyncio_loop_bills_each_order_once(tmp_path: Path, engine: Engine, url: str) -> None:
    async def run(servers: str) -> None:
        async_engine = create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"))
        async with tfmq.aio.Producer(servers) as producer:
            for number in range(3):
                await producer.send("orders", str(number))
        async with tfmq.aio.Consumer(
            servers, topics="orders", group="billing", commits="manual", offsets=f"sql:{url}"
        ) as consumer:

            def count(order: int) -> Invoice:
                if order == 2:
                    consumer.stop()
                return Invoice(order=order)

            names = {"consumer": consumer, "async_engine": async_engine, "AsyncSession": AsyncSession}
            code = compile(block_with("async for"), PAGE.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            made = eval(code, names | {"Invoice": count, "tfmq": tfmq})
            assert inspect.isawaitable(made)
            await made
        await async_engine.dispose()

    with tfmq.local_server(tmp_path / "data") as servers:
        asyncio.run(run(servers))
    assert billed(engine) == [0, 1, 2]


def test_the_interface_on_the_page_is_the_one_in_the_code() -> None:
    (shown,) = [node for node in ast.parse(block_with("Protocol")).body if isinstance(node, ast.ClassDef)]
    methods = {each.name: [a.arg for a in each.args.args] for each in shown.body if isinstance(each, ast.FunctionDef)}
    for name, arguments in methods.items():
        assert list(inspect.signature(getattr(ClaimingStorage, name)).parameters) == arguments
    assert set(methods) == {"read", "claim", "save", "close"}
