"""Invariant: whichever process dies, and when, an order is in the database exactly when its messages are in the topics.

Sellers die by SIGKILL at every step, at every statement, and at any moment; the broker and the database die too. What
is left is settled by what settles it in earnest: the broker asks, PostgreSQL is looked into, time passes.
"""

import signal
import threading
import time
from collections.abc import Iterator
from itertools import count, product
from pathlib import Path
from typing import NamedTuple

import pytest
from sqlalchemy.engine import Engine

from tests.scale import SCALE, scaled, seeded
from tests.sql.crash_recovery import SETTINGS, settled, soon
from tests.sql.dying import Death, Sale, Sellers, sellers
from tests.sql.test_commit_protocol import STEPS
from tools.rigs.live_server import LiveServer
from tools.rigs.postgresql import PostgresServer

STRIDE = 1 if SCALE >= 1 else 3
"""Sellers die at each statement, or at each third one."""
DECISION = STEPS.index("database commits")
pytestmark = pytest.mark.timeout(max(300, int(3600 * SCALE)))
"""Seconds. Each wait in here has its own, shorter end. At the full counts one of these takes a minute on a machine that
has nothing else to do, so the two minutes of any test would measure how busy it is, and nothing more.
"""


class Way(NamedTuple):
    url: str
    two_phase: bool
    is_async: bool


WAYS = ["sqlite asyncio", "postgresql", "postgresql two-phase"]
MORE_WAYS = ["sqlite", "postgresql asyncio", "postgresql two-phase asyncio"]
"""With the full counts only: the others have had each database, each phase and each face."""


@pytest.fixture(params=WAYS + MORE_WAYS if SCALE >= 1 else WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    words = request.param.split()
    engine: Engine = request.getfixturevalue("sqlite_engine" if words[0] == "sqlite" else "postgres_engine")
    url = engine.url.render_as_string(hide_password=False)
    return Way(url, "two-phase" in words, "asyncio" in words)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    server = LiveServer(tmp_path / "data", *SETTINGS)
    server.start()
    yield server
    server.stop()
    assert "Traceback" not in server.log.read_text()


@pytest.fixture(scope="module")
def seller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sellers]:
    with sellers(tmp_path_factory.mktemp("sellers") / "log") as seller:
        yield seller


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with soon(monkeypatch):
        yield


@pytest.mark.long
def test_a_seller_that_dies_at_a_step_or_a_statement_leaves_both_or_neither(
    way: Way, server: LiveServer, seller: Sellers
) -> None:
    expected = set()
    for number, (step, after) in enumerate(product(STEPS, [False, True])):
        death = Death(step, after=after)
        assert seller.sell(sale_of(way, server, number, death)) == -signal.SIGKILL, death
        place = STEPS.index(step) + after
        # After the prepare of both, what PostgreSQL holds is committed when the broker asks.
        if place > DECISION or (way.two_phase and place == DECISION):
            expected.add(number)
    numbers = count(100)
    ended = [die_at_statement(way, server, seller, numbers, after) for after in {False, SCALE >= 1}]
    sold = settled(way.url, server.address)
    assert {each for each in sold if each < 100} == expected
    assert {each[-1] for each in ended} < sold
    assert not {each[0] for each in ended} & sold


def die_at_statement(way: Way, server: LiveServer, seller: Sellers, numbers: Iterator[int], after: bool) -> list[int]:
    """Sell an order for each statement of a sale, dying there; the last one lives. Their numbers."""
    sold = []
    for statement in count(1, STRIDE):
        assert statement < 40
        sold.append(next(numbers))
        end = seller.sell(sale_of(way, server, sold[-1], Death(statement=statement, after=after)))
        if end == 0:
            return sold
        assert end == -signal.SIGKILL
    return sold


def sale_of(way: Way, server: LiveServer, number: int, death: Death) -> Sale:
    return Sale(way.url, server.address, number, 1, way.two_phase, way.is_async, death)


@pytest.mark.long
def test_sellers_that_die_at_any_moment_leave_both_or_neither(way: Way, server: LiveServer, seller: Sellers) -> None:
    random = seeded("sellers", way.url.split(":")[0], way.two_phase, way.is_async)
    numbers = count(0, 1000)
    for _ in range(scaled(60) + 1):
        death = Death(after_ms=random.randint(1, 200))
        seller.sell(Sale(way.url, server.address, next(numbers), 1000, way.two_phase, way.is_async, death))
    assert settled(way.url, server.address)


@pytest.mark.long
@pytest.mark.parametrize("two_phase", [False, True], ids=["one phase", "two phases"])
def test_sellers_broker_and_database_that_die_at_any_moment_leave_both_or_neither(
    postgres_engine: Engine, postgres: PostgresServer, server: LiveServer, seller: Sellers, two_phase: bool
) -> None:
    random = seeded("all", two_phase)
    numbers = count(0, 1000)
    sold: set[int] = set()
    turns, most = scaled(60) + 2, scaled(60) + 40
    for turn in range(most):
        if turn >= turns and sold:  # on a busy machine it may take more until one of them sells anything
            break
        victim = (server_dies, database_dies, both_die, no_process_dies)[turn % 4]
        pause, death = random.uniform(0.05, 0.4), Death(after_ms=random.randint(100, 500))
        sale = Sale(postgres.url(), server.address, next(numbers), 1000, two_phase, False, death)
        # The database ends with the thread that starts it, so it is the sale that gets one of its own.
        selling = threading.Thread(target=seller.sell, args=(sale,))
        selling.start()
        victim(pause, server, postgres)
        selling.join()
        sold |= settled(postgres.url(), server.address)
    assert sold


def server_dies(pause: float, server: LiveServer, postgres: PostgresServer) -> None:
    time.sleep(pause)
    server.kill()
    server.start()


def database_dies(pause: float, server: LiveServer, postgres: PostgresServer) -> None:
    time.sleep(pause)
    postgres.stop()
    postgres.start()


def both_die(pause: float, server: LiveServer, postgres: PostgresServer) -> None:
    """The broker first; then neither says what became of it."""
    time.sleep(pause)
    server.kill()
    postgres.stop()
    server.start()
    postgres.start()


def no_process_dies(pause: float, server: LiveServer, postgres: PostgresServer) -> None:
    """The seller dies alone."""
