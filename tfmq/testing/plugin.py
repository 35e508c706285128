"""The pytest plug-in. It imports nothing of tfmq until a test asks for a fixture: a test run that never does pays
nothing, and a measurement of coverage sees tfmq being imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tfmq.testing.broker import SimulatedBroker

TRIAL = pytest.StashKey[Any]()
"""At a test that `@pytest.mark.tfmq_faults` runs again: what its broker is to undergo this time."""

NAME_SHOWN = 100
"""Letters of a test's name in its topic's."""
UNIQUE_DIGITS = 12


@pytest.fixture
def tfmq_broker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedBroker]:
    """A broker in this process, one for each test: disk in memory, a clock that only the test moves, no sockets.

    Clients come to it by `tfmq_broker.producer()`, `tfmq_broker.consumer(...)`, or, wherever they are made, by
    `servers=tfmq_broker.servers`; $TFMQ_SERVERS says so too while the test runs. See docs/testing.md.
    """
    from tfmq.testing.broker import SimulatedBroker

    with SimulatedBroker() as broker:
        monkeypatch.setenv("TFMQ_SERVERS", broker.servers)
        if TRIAL in request.node.stash:
            broker.undergo(request.node.stash[TRIAL])
        yield broker


# @pytest.mark.tfmq_faults: see tfmq/testing/fault_runs.py


def pytest_configure(config: pytest.Config) -> None:
    """Tell pytest of the marker."""
    config.addinivalue_line(
        "markers",
        'tfmq_faults(faults=("crash", "lost_reply", "duplicate", "rebalance"), runs=200): run the test again with each'
        " of these at each step that it has with its tfmq_broker",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> object | None:
    """A marked test is many runs."""
    if item.get_closest_marker("tfmq_faults") is None:
        return None
    from tfmq.testing.fault_runs import run_protocol

    return run_protocol(item, nextitem, TRIAL)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A wrong marker is an error of its test."""
    if item.get_closest_marker("tfmq_faults") is not None and TRIAL not in item.stash:
        from tfmq.testing.fault_runs import check_marker as check

        check(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
    """What failed in a run with a fault says which that was."""
    if TRIAL in item.stash and call.excinfo is not None:
        from tfmq.testing.fault_runs import told

        if sentence := told(item.stash[TRIAL]):
            call.excinfo.value.add_note(sentence)


@pytest.fixture(scope="session")
def tfmq_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real broker, a process of its own on a real disk, one for the whole run: its address, host:port.

    All tests share it: a test that takes `tfmq_topic` too meets nobody there. See docs/testing.md.
    """
    from tfmq.embedded import local_server

    with local_server(tmp_path_factory.mktemp("tfmq") / "data") as servers:
        yield servers


@pytest.fixture
def tfmq_topic(request: pytest.FixtureRequest) -> str:
    """A name for a topic that no other test has, in this run or another."""
    import re
    from uuid import uuid4

    words = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name).strip("-")
    return f"{words[:NAME_SHOWN]}-{uuid4().hex[:UNIQUE_DIGITS]}"
