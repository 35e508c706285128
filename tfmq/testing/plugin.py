"""The pytest plug-in: fixtures `tfmq_broker`, `tfmq_server`, `tfmq_topic` and the marker `tfmq_faults`.

The plug-in imports no other module of tfmq until a test requests a fixture. So test runs without these fixtures are not
slower. And a coverage measurement, which starts after the plug-ins are loaded, includes the import of tfmq.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tfmq.testing.broker import SimulatedBroker


FAULT_RUN_KEY = pytest.StashKey[Any]()
"""Key of the `FaultRun` in the stash of a test with `@pytest.mark.tfmq_faults`; `tfmq_broker` attaches this run."""

NAME_CHARACTERS = 100  # maximum characters of a test's name that `tfmq_topic` uses
UNIQUE_DIGITS = 12


@pytest.fixture
def tfmq_broker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedBroker]:
    """A broker in this process, one for each test: no sockets, the disk in memory, and the test moves the clock.

    Create clients with `tfmq_broker.producer()` and `tfmq_broker.consumer(...)`, or in any other way with the address
    `tfmq_broker.servers`. While the test runs, $TFMQ_SERVERS has this address. See docs/testing.md.
    """
    from tfmq.testing.broker import SimulatedBroker

    with SimulatedBroker() as broker:
        monkeypatch.setenv("TFMQ_SERVERS", broker.servers)
        if FAULT_RUN_KEY in request.node.stash:
            broker.attach_fault_run(request.node.stash[FAULT_RUN_KEY])
        yield broker


# Hooks for tests with @pytest.mark.tfmq_faults; tfmq/testing/fault_runs.py runs these tests


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        'tfmq_faults(faults=("crash", "lost_reply", "duplicate", "rebalance"), runs=200): run the test again with each'
        " of these at each step that it has with its tfmq_broker",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> object | None:
    if item.get_closest_marker("tfmq_faults") is None:
        return None
    from tfmq.testing.fault_runs import run_protocol

    return run_protocol(item, nextitem, FAULT_RUN_KEY)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("tfmq_faults") is not None and FAULT_RUN_KEY not in item.stash:
        from tfmq.testing.fault_runs import check_marker

        check_marker(item)  # fails this test if its marker is invalid


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
    if FAULT_RUN_KEY in item.stash and call.excinfo is not None:
        from tfmq.testing.fault_runs import fault_note

        if note := fault_note(item.stash[FAULT_RUN_KEY]):
            call.excinfo.value.add_note(note)


@pytest.fixture(scope="session")
def tfmq_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address, host:port, of a real broker: one process on a real disk for the whole test run.

    All tests share this broker; tests that use `tfmq_topic` do not interfere with each other. See docs/testing.md.
    """
    from tfmq.embedded import local_server

    with local_server(tmp_path_factory.mktemp("tfmq") / "data") as servers:
        yield servers


@pytest.fixture
def tfmq_topic(request: pytest.FixtureRequest) -> str:
    """A topic name that no other test uses, in this run or another."""
    import re
    from uuid import uuid4

    words = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name).strip("-")
    return f"{words[:NAME_CHARACTERS]}-{uuid4().hex[:UNIQUE_DIGITS]}"
