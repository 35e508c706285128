"""Invariant: whoever is killed, and when, each message has its result in the database exactly once.

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
from tests.scale import SCALE, scaled, seeded
from tests.sql.billing import SESSION_SECONDS, TOPIC, Base, Billers, Invoice, Work, billers
from tfmq.offsets.table import TABLE
from tools.rigs.live_server import LiveServer

KILLS = 200
PARTITIONS = 4
MESSAGES = 20
"""More to do behind each kill."""
STANDSTILL_SECONDS = 20.0
pytestmark = pytest.mark.timeout(max(300, int(3600 * SCALE)))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    server = LiveServer(tmp_path / "data", f"topics.partitions={PARTITIONS}")
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
        time.sleep(SESSION_SECONDS * random.uniform(1, 2.5))
        crew.thaw(frozen)


def counts(engine: Engine) -> dict[int, int]:
    """How many invoices each order has."""
    with Session(engine) as session:
        rows = session.execute(select(Invoice.order, func.count()).group_by(Invoice.order))
        return {row[0]: row[1] for row in rows}


def test_results_are_there_exactly_once_whoever_is_killed(
    books: Engine, server: LiveServer, crew: Billers
) -> None:
    random = seeded("exactly once", books.dialect.name)
    url = books.url.render_as_string(hide_password=False)
    sent = 0
    for kill in range(scaled(KILLS)):
        with tfmq.Producer(server.address) as producer:
            producer.send_many(TOPIC, [str(sent + each) for each in range(MESSAGES)]).result()
            sent += MESSAGES
        many = random.choice([1, 1, 7])
        if random.random() < 0.4:  # it dies by itself, at a statement
            crew.start(Work(url, server.address, many, random.randint(1, 12), random.random() < 0.5))
        elif len(crew.running) < 3:
            crew.start(Work(url, server.address, many))
        time.sleep(random.uniform(0.02, 0.5))
        if kill % 10 == 4:
            server.kill()
            server.start()
        elif kill % 10 == 7 or kill == 1:
            freeze_one(crew, random)
        elif crew.running:
            crew.kill(random.choice(crew.running))
    crew.start(Work(url, server.address, 20))
    done, moved_at = 0, time.monotonic()
    while done < sent and time.monotonic() < moved_at + STANDSTILL_SECONDS:
        time.sleep(0.1)
        now = len(counts(books))
        if now > done:
            done, moved_at = now, time.monotonic()
    found = counts(books)
    assert {order: count for order, count in found.items() if count != 1} == {}
    assert set(found) == set(range(sent))
    for each in list(crew.running):
        crew.kill(each)
