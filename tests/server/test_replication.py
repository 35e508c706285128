"""What the replication of a server does with the reactor; what it does with others is in `tests/replication`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from journal.clock import SystemClock
from journal.disk import RealDisk
from tfmq.config import load
from tfmq.server.reactor import Turn, TurnReactor
from tfmq.server.replication import Replication

PATIENCE_SECONDS = 20


@pytest.fixture
def reactor() -> Any:
    made = TurnReactor()
    yield made
    made._poller.close()


def test_a_turn_ends_after_a_result_of_the_store(reactor: Any, tmp_path: Path) -> None:
    """In it the broker goes on with what has waited for the store."""
    (tmp_path / "store").mkdir()
    config = load(flags={"server.data": str(tmp_path / "data"), "replicate.url": f"file://{tmp_path}/store"})
    turn = Turn(reactor)
    server: Any = None  # nothing of it is needed
    replication = Replication(config, reactor, RealDisk(), SystemClock(), os.urandom, server, turn)
    replication.open("localhost:1")
    results: list[Any] = []
    seen: list[int] = []
    turn.at_end(lambda: seen.append(len(results)))
    replication.promote(results.append)
    until = time.monotonic() + PATIENCE_SECONDS
    while not results:
        assert time.monotonic() < until, "it took too long"
        reactor.doPoll(0.1)
    replication.close()
    assert seen[-1:] == [1]
