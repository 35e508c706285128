"""The pytest plug-in. It imports nothing of tfmq until a test asks for a fixture: a test run that never does pays
nothing, and a measurement of coverage sees tfmq being imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tfmq.testing.broker import SimulatedBroker


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
