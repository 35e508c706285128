"""One Spark for all tests of a run, and a broker for each module."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spark.drivers import Drivers
from tools.rigs import spark_session
from tools.rigs.live_server import LiveServer

PARTITIONS = 2
SECONDS = 300
"""What a test may take at most: a job of Spark's takes a second on an idle machine, and half a minute on a busy one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """More time for the tests of this folder that do not say themselves how much they need."""
    folder = f"{Path(__file__).parent}/"
    for item in items:
        if str(item.path).startswith(folder) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SECONDS))


@pytest.fixture(scope="session")
def spark_can_be_had() -> None:
    """Skips where there is no pyspark or no Java; with CI=true that is a failure."""
    if reason := spark_session.missing():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def spark(spark_can_be_had: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The SparkSession of this run, `local[2]`: a JVM takes seconds to start, so there is one."""
    before = dict(os.environ)
    running = spark_session.start(tmp_path_factory.mktemp("spark"))
    yield running
    running.stop()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def drivers(spark_can_be_had: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drivers]:
    """Spark drivers in processes of their own, for tests in which one dies or tasks are to be retried."""
    made = Drivers(tmp_path_factory.mktemp("drivers"))
    yield made
    made.end()


@pytest.fixture(autouse=True)
def no_query_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails before it stops its streaming queries leaves none running for the next one.

    And each begins with the session being the active one of the thread in the JVM that serves it: Spark finds data
    sources of Python by that alone, and gives a connection that was lost (an interrupted call) another thread.
    """
    if "spark" in request.fixturenames:
        session = request.getfixturevalue("spark")
        session._get_j_spark_session_class(session._jvm).setActiveSession(session._jsparkSession)
    yield
    if "spark" in request.fixturenames:
        for query in request.getfixturevalue("spark").streams.active:
            query.stop()


@pytest.fixture(autouse=True)
def no_server_is_left() -> Iterator[None]:
    """A test that fails before it stops its own broker leaves none running."""
    before = set(LiveServer.alive)
    yield
    for server in LiveServer.alive - before:
        server.kill()


@pytest.fixture(scope="module")
def spark_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A live broker that the tests of a module share; each takes topics of its own, of two partitions."""
    server = LiveServer(tmp_path_factory.mktemp("broker") / "data", f"topics.partitions={PARTITIONS}")
    server.start()
    yield server
    server.stop()
    assert "Traceback" not in server.log.read_text()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A name that no other test has."""
    kept = (letter if letter.isalnum() or letter in "._-" else "-" for letter in request.node.name)
    return "".join(kept)[:200].rstrip("-")
