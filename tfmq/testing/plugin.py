"""The pytest plug-in. It imports nothing of tfmq until a test asks for a fixture: a test run that never does pays
nothing, and a measurement of coverage sees tfmq being imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tfmq.testing.broker import SimulatedBroker

NAME_SHOWN = 100
"""Letters of a test's name in its topic's."""
UNIQUE_DIGITS = 12


@pytest.fixture
def tfmq_broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedBroker]:
    """A broker in this process, one for each test: disk in memory, a clock that only the test moves, no sockets.

    Clients come to it by `tfmq_broker.producer()`, `tfmq_broker.consumer(...)`, or, wherever they are made, by
    `servers=tfmq_broker.servers`; $TFMQ_SERVERS says so too while the test runs. See docs/testing.md.
    """
    from tfmq.testing.broker import SimulatedBroker

    with SimulatedBroker() as broker:
        monkeypatch.setenv("TFMQ_SERVERS", broker.servers)
        yield broker


@pytest.fixture(scope="session")
def tfmq_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real broker, a process of its own on a real disk, one for the whole run: its address, host:port.

    All tests share it: a test that takes `tfmq_topic` too meets nobody there. See docs/testing.md.
    """
    from tfmq.local import local_server

    with local_server(tmp_path_factory.mktemp("tfmq") / "data") as servers:
        yield servers


@pytest.fixture
def tfmq_topic(request: pytest.FixtureRequest) -> str:
    """A name for a topic that no other test has, in this run or another."""
    import re
    from uuid import uuid4

    words = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name).strip("-")
    return f"{words[:NAME_SHOWN]}-{uuid4().hex[:UNIQUE_DIGITS]}"
