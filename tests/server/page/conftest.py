"""The API on a simulated broker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.page.helpers import ApiOnBroker
from tfmq.testing.broker import SimulatedBroker


@pytest.fixture
def api() -> Iterator[ApiOnBroker]:
    with SimulatedBroker({"topics.partitions": 2}) as broker:
        yield ApiOnBroker(broker)
