"""What a crash left, settled by those who live: the broker's questions, its timeouts, a look for leftovers."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import create_engine

import tfmq
from tests.sql.conftest import prepared_names
from tests.sql.dying import TOPICS
from tests.sql.shop import orders
from tfmq.client.transaction import check_back
from tfmq.sql import recovery
from tfmq.sql.pruning import UNFINISHED_STATES

PATIENCE_SECONDS = 60.0
SETTINGS = ("transaction.check_seconds=0.1", "transaction.timeout_seconds=2", "flush.seconds=0.1")
"""Of a broker that asks, and gives up, soon."""


@contextmanager
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In this process questions are seen, and leftovers looked for, at once."""
    with monkeypatch.context() as patch:
        patch.setattr(check_back, "POLL_SECONDS", 0.05)
        patch.setattr(recovery, "SCAN_SECONDS", 0.1)
        yield


def settled(url: str, servers: str) -> set[int]:
    """The orders that were sold, by both accounts. Fails unless both agree, and nothing is in doubt, in the end."""
    engine = create_engine(url)
    with tfmq.Producer(servers) as producer, tfmq.Admin(servers) as admin:
        tfmq.sql.check(producer, engine)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while in_doubt := [*admin.transactions(UNFINISHED_STATES), *held(url)]:
            assert time.monotonic() < deadline, f"still in doubt: {in_doubt}"
            time.sleep(0.02)
    sold = orders(engine)
    engine.dispose()
    reported = [messages(servers, topic) for topic in TOPICS]
    assert reported == [sold] * len(TOPICS), "database and broker disagree"
    return set(sold)


def held(url: str) -> list[str]:
    """What PostgreSQL holds prepared."""
    if not url.startswith("postgresql"):
        return []
    engine = create_engine(url)
    names = prepared_names(engine)
    engine.dispose()
    return names


def messages(servers: str, topic: str) -> list[int]:
    """The orders in a topic, sorted; each message counts."""
    found: list[int] = []
    with tfmq.Admin(servers) as admin:
        if topic not in {each.name for each in admin.topics()}:
            return found
        expected = admin.topic(topic).messages
    with tfmq.Consumer(servers, topics=topic, read="written") as consumer:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(found) < expected:
            assert time.monotonic() < deadline
            found += [int(each.text) for each in consumer.poll(timeout=1.0)]
    return sorted(found)
