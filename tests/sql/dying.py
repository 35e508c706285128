"""Processes that sell orders, and die: forked from one that has everything loaded, because many are wanted.

seller = Sellers(log); seller.sell(url, servers, ..., dies=...)
"""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import create_engine, event
from sqlalchemy.engine import Engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import tfmq.aio
from tests import paths
from tests.sql.shop import Order
from tfmq.sql import commit_protocol

ROOT = paths.ROOT
TOPICS = ("orders", "payments")
PATIENCE_SECONDS = 60.0
START_SECONDS = 10.0


class Death(NamedTuple):
    """Where a seller dies: at the step `step`, or at its `statement`-th statement, before or after it; or, whatever it
    does, `after_ms` from its first sale, which takes `START_SECONDS` at most.
    """

    step: str = ""
    statement: int = 0
    after: bool = False
    after_ms: int = 0


class Sale(NamedTuple):
    """What a seller does: sell `how_many` orders from `number` on, each in a transaction."""

    url: str
    servers: str
    number: int
    how_many: int = 1
    two_phase: bool = False
    is_async: bool = False
    death: Death = Death()


@contextmanager
def sellers(log: Path) -> Iterator["Sellers"]:
    """The process that they are forked from."""
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.sql.dying"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        yield Sellers(process, log)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(PATIENCE_SECONDS)


class Sellers:
    """`sell` has a process of its own do it, and waits for its end."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self._process, self._log = process, log

    def sell(self, sale: Sale) -> int:
        """How it ended: its exit code, or the negative number of the signal."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(sale) + "\n")
        stdin.flush()
        line = stdout.readline()
        assert line, self._log.read_text()[-3000:]
        return int(line)


# What follows runs in the other processes.


def main() -> None:
    """A line for each sale; its answer is how the seller ended."""
    for line in sys.stdin:
        sale = Sale(*json.loads(line))
        sale = sale._replace(death=Death(*sale.death))
        sold, tell = os.pipe()
        child = os.fork()
        if child == 0:
            sell_and_exit(sale, tell)
        os.close(tell)
        sys.stdout.write(f"{ended(child, sale.death, sold)}\n")
        sys.stdout.flush()
        os.close(sold)


def ended(child: int, death: Death, sold: int) -> int:
    """How the child ended; by this process, if its time is over."""
    if death.after_ms:
        select.select([sold], [], [], START_SECONDS)
    deadline = time.monotonic() + (death.after_ms / 1000 or PATIENCE_SECONDS)
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def sell_and_exit(sale: Sale, tell: int) -> None:
    code = 1
    try:
        commit_protocol.run_step = deadly(sale.death)
        if sale.is_async:
            asyncio.run(sell_async(sale, tell))
        else:
            sell(sale, tell)
        code = 0
    except tfmq.TfmqError as error:
        print(f"seller: {error}", file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(code)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(PATIENCE_SECONDS)


def deadly(death: Death) -> Any:
    """`course.perform` for one who dies at a step."""
    really = commit_protocol.run_step

    def perform(step: commit_protocol.Step) -> Any:
        if step.name != death.step:
            return really(step)
        if not death.after:
            die()
        result = really(step)
        if hasattr(result, "__await__"):
            return awaited_then_dead(result)
        die()
        return result

    return perform


async def awaited_then_dead(result: Any) -> None:
    await result
    die()


def die_at_statement(engine: Engine, death: Death) -> None:
    """Count what is sent to the database, commits and prepares too, and die at one of them."""
    seen = [0]

    def count(*_: Any) -> None:
        seen[0] += 1
        if seen[0] == death.statement:
            die()

    names = ("commit", "prepare_twophase", "commit_twophase")
    for name in ("after_cursor_execute" if death.after else "before_cursor_execute", *names):
        event.listen(engine, name, count)


def sell(sale: Sale, tell: int) -> None:
    engine = create_engine(sale.url)
    with tfmq.Producer(sale.servers) as producer:
        for number in range(sale.number, sale.number + sale.how_many):
            with Session(engine) as session:
                if sale.death.statement:
                    die_at_statement(engine, sale.death)
                with tfmq.sql.transaction(session, producer, two_phase=sale.two_phase) as tx:
                    session.add(Order(number=number))
                    for topic in TOPICS:
                        tx.send(topic, str(number))
            os.write(tell, b"." if number == sale.number else b"")


async def sell_async(sale: Sale, tell: int) -> None:
    engine = create_async_engine(sale.url.replace("sqlite:", "sqlite+aiosqlite:"))
    async with tfmq.aio.Producer(sale.servers) as producer:
        for number in range(sale.number, sale.number + sale.how_many):
            async with AsyncSession(engine) as session:
                if sale.death.statement:
                    die_at_statement(engine.sync_engine, sale.death)
                async with tfmq.sql.transaction(session, producer, two_phase=sale.two_phase) as tx:
                    session.add(Order(number=number))
                    for topic in TOPICS:
                        await tx.send(topic, str(number))
            os.write(tell, b"." if number == sale.number else b"")


if __name__ == "__main__":
    main()
