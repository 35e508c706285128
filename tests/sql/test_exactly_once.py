"""Invariant: whichever process is killed, and when, each message has its result in the database exactly once.

Consumers of one group write results and offsets in one transaction. They die by SIGKILL at any moment and at each
statement, while others of the group go on; they freeze, and come back as zombies; the broker dies, too.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from sqlalchemy import func, select
from sqlalchemy.engine import Engine
from sqlalchemy.orm import Session

import tfmq
from tests.scale import FRACTION, SCALE, scaled, seeded
from tests.sql.billing import SESSION_SECONDS, Base, Billers, Invoice, Work, billers
from tfmq.offsets.sql import TABLE
from tools.rigs.live_server import LiveServer

KILLS = 200 if SCALE > FRACTION else 100
"""Of consumers at work, in each database; the broker's and the freezes are not among them."""
PARTITIONS = 4
MESSAGES = 20
"""More to do after each kill."""
ROUNDS_MAX = 4 * KILLS
STANDSTILL_SECONDS = 20.0
pytestmark = pytest.mark.timeout(max(300, int(3600 * SCALE)))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    server = LiveServer(tmp_path_factory.mktemp("broker") / "data", f"topics.partitions={PARTITIONS}")
    server.start()
    yield server
    server.stop()
    assert "Traceback" not in server.log.read_text()


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Billers]:
    with billers(tmp_path_factory.mktemp("billers") / "log") as crew:
        yield crew


@pytest.fixture
def books(engine: Engine) -> Engine:
    """A database with no invoice and no offset."""
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    TABLE.drop(engine, checkfirst=True)
    return engine


def freeze_one(crew: Billers, random: Random) -> None:
    """For longer than its session, so that it comes back as one that has lost everything and does not know it."""
    if crew.running:
        frozen = random.choice(crew.running)
        crew.freeze(frozen)
        time.sleep(SESSION_SECONDS * random.uniform(1, 1.6))
        crew.thaw(frozen)


def counts(engine: Engine) -> dict[int, int]:
    """How many invoices each order has."""
    with Session(engine) as session:
        rows = session.execute(select(Invoice.order, func.count()).group_by(Invoice.order))
        return {row[0]: row[1] for row in rows}


def workers(engine: Engine) -> set[int]:
    """The processes that have results in the database."""
    with Session(engine) as session:
        return set(session.scalars(select(Invoice.by).distinct()))


def is_dead(process: int) -> bool:
    """Whether it has ended; its number is its own until it is buried."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].startswith("Z")


class Course:
    """What befalls the consumers of one database until `wanted` of them were killed at work: with results in the
    database, or at a statement. `kills` counts all of them.
    """

    def __init__(self, books: Engine, server: LiveServer, crew: Billers, wanted: int) -> None:
        self.books, self.server, self.crew, self.wanted = books, server, crew, wanted
        self.random = seeded("exactly once", books.dialect.name)
        self.topic = f"orders-{books.dialect.name}"
        self.url = books.url.render_as_string(hide_password=False)
        self.sent = self.at_work = self.brokers = self.freezes = 0
        self._before = crew.kills

    @property
    def kills(self) -> int:
        return self.crew.kills - self._before

    def run(self) -> None:
        for number in range(ROUNDS_MAX):
            if self.at_work >= self.wanted:
                return
            self._send()
            self._start()
            if number % 10 == 2:
                self.server.kill()
                self.server.start()
                self.brokers += 1
            elif number % 10 == 1:
                freeze_one(self.crew, self.random)
                self.freezes += 1
            elif self.random.random() < 0.3:
                time.sleep(self.random.uniform(0.02, 0.3))
                self._kill(self.random.choice(self.crew.running))
            else:
                self._kill(self._one_at_work())

    def _send(self) -> None:
        with tfmq.Producer(self.server.address) as producer:
            producer.send_many(self.topic, [str(self.sent + each) for each in range(MESSAGES)]).result()
        self.sent += MESSAGES

    def _start(self) -> None:
        many = self.random.choice([1, 1, 7])
        if self.random.random() < 0.4:  # it dies by itself, at a statement
            statement, after = self.random.randint(1, 12), self.random.random() < 0.5
            self.crew.start(Work(self.url, self.server.address, self.topic, many, statement, after))
        elif len(self.crew.running) < 3:
            self.crew.start(Work(self.url, self.server.address, self.topic, many))
        if not self.crew.running:
            self.crew.start(Work(self.url, self.server.address, self.topic, many))

    def _one_at_work(self) -> int:
        """One that has results, or has died at a statement; the last that was started, if none reaches that."""
        deadline = time.monotonic() + STANDSTILL_SECONDS
        while time.monotonic() < deadline:
            found = [each for each in self.crew.running if is_dead(each) or each in workers(self.books)]
            if found:
                return self.random.choice(found)
            time.sleep(0.01)
        return self.crew.running[-1]

    def _kill(self, process: int) -> None:
        deaths = self.crew.deaths
        self.crew.kill(process)
        self.at_work += self.crew.deaths > deaths or process in workers(self.books)

    def finish(self) -> dict[int, int]:
        """A process does what is left: how many invoices each order has then."""
        self.crew.start(Work(self.url, self.server.address, self.topic, 20))
        done, moved_at = 0, time.monotonic()
        while done < self.sent and time.monotonic() < moved_at + STANDSTILL_SECONDS:
            time.sleep(0.05)
            now = len(counts(self.books))
            if now > done:
                done, moved_at = now, time.monotonic()
        for each in list(self.crew.running):
            self._kill(each)
        return counts(self.books)


@pytest.mark.long
def test_results_are_there_exactly_once_whichever_process_is_killed(
    books: Engine, server: LiveServer, crew: Billers
) -> None:
    course = Course(books, server, crew, scaled(KILLS))
    course.run()
    found = course.finish()
    print(
        f"{books.dialect.name}: {course.kills} consumers killed, of whom {course.at_work} at work,"
        f" {course.brokers} brokers, {course.freezes} freezes; {course.sent} orders"
    )
    assert {order: count for order, count in found.items() if count != 1} == {}
    assert set(found) == set(range(course.sent))
    assert course.at_work >= course.wanted
