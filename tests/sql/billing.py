"""Processes that consume orders into a database, each result with its offset in one transaction, and are killed.

Forked from one that has everything loaded, because many are wanted: `with billers(log) as crew: crew.start(work)`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import create_engine
from sqlalchemy.engine import Engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import tfmq
import tfmq.sql
from tests.sql.dying import ROOT, Death, die_at_statement

GROUP = "billing"
SESSION_SECONDS = 1.0


class Base(DeclarativeBase):
    pass


class Invoice(Base):
    """Nothing is unique but its own number: an order that was processed twice has two."""

    __tablename__ = "invoices"
    id: Mapped[int] = mapped_column(primary_key=True)
    order: Mapped[int]
    by: Mapped[int] = mapped_column(default=os.getpid)


class Work(NamedTuple):
    """`many`: messages in one transaction; above 1 by `poll` · `statement`: where it dies by itself; 0: nowhere."""

    url: str
    servers: str
    topic: str
    many: int = 1
    statement: int = 0
    after: bool = False


class Billers:
    """Those that were started and not killed; the process that they are forked from ends them all.

    `kills` counts those that SIGKILL has ended, `deaths` those of them that it was sent to by themselves, at a
    statement. No other end is one for them.
    """

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log
        self.running: list[int] = []
        self.kills = self.deaths = 0

    def start(self, work: Work) -> None:
        """One more."""
        self.running.append(int(self._ask(work)))

    def kill(self, process: int) -> None:
        """SIGKILL; one that has died by itself is dead already. It is buried by the process that it is a child of, so
        its number is not used by another yet.
        """
        self.running.remove(process)
        status, by_itself = map(int, self._ask(process).split())
        assert status == -signal.SIGKILL, f"it ended with {status}: {self._log.read_text()[-3000:]}"
        self.kills += 1
        self.deaths += by_itself

    def freeze(self, process: int) -> None:
        """SIGSTOP, until it is thawed: it has whatever it had, also locks in the database."""
        os.kill(process, signal.SIGSTOP)

    def thaw(self, process: int) -> None:
        """SIGCONT: it goes on as if nothing had been."""
        os.kill(process, signal.SIGCONT)

    def _ask(self, what: Work | int) -> str:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(what) + "\n")
        stdin.flush()
        line = stdout.readline()
        assert line, self._log.read_text()[-3000:]
        return line


@contextmanager
def billers(log: Path) -> Iterator[Billers]:
    """The process that they are forked from."""
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.sql.billing"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    found = Billers(process, log)
    try:
        yield found
    finally:
        for each in list(found.running):
            found.kill(each)
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


# What follows runs in the other processes.


def main() -> None:
    """A line for each piece of work, whose answer is the process that does it, or for each that is to be killed, whose
    answer is how it has ended, and whether it had before.
    """
    for line in sys.stdin:
        what = json.loads(line)
        if isinstance(what, int):
            found, status = os.waitpid(what, os.WNOHANG)
            if not found:
                os.kill(what, signal.SIGKILL)
                status = os.waitpid(what, 0)[1]
            answer = f"{os.waitstatus_to_exitcode(status)} {int(bool(found))}"
        else:
            child = os.fork()
            if child == 0:
                bill_and_exit(Work(*what))
            answer = str(child)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


def bill_and_exit(work: Work) -> None:
    try:
        engine = create_engine(work.url, connect_args={"timeout": 30} if "sqlite" in work.url else {})
        if work.statement:
            die_at_statement(engine, Death(statement=work.statement, after=work.after))
        while True:
            with suppress(tfmq.ConnectionFailed):  # it was started while the broker was down
                bill(work, engine)
            time.sleep(0.02)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


def bill(work: Work, engine: Engine) -> None:
    with tfmq.Consumer(
        work.servers,
        topics=work.topic,
        group=GROUP,
        commits="manual",
        offsets=f"sql:{work.url}",
        session=SESSION_SECONDS,
        refresh_every=0.2,
    ) as consumer:
        while True:
            messages = [next(consumer)] if work.many == 1 else consumer.poll(1.0, work.many)
            with suppress(tfmq.Fenced), Session(engine) as session, session.begin():
                session.add_all(Invoice(order=int(message.text)) for message in messages)
                tfmq.sql.commit_offsets(session, consumer, messages[0] if work.many == 1 else None)


if __name__ == "__main__":
    main()
