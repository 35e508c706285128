"""The connection of a task, or of the driver's verdict, with a simulated broker."""

from __future__ import annotations

import pytest

from tests.client.test_commit_group import batch
from tfmq.errors import ConnectionFailed, TfmqError
from tfmq.protocol.commands import CommitMember
from tfmq.spark.sink_task import CommitGroupClient, PendingCommit
from tfmq.testing.broker import SimulatedBroker

MEMBER = CommitMember("query", 0, "run-1")


def test_the_owner_that_an_operator_sees_is_the_task(tfmq_broker: SimulatedBroker) -> None:
    with CommitGroupClient(tfmq_broker.servers, 30.0, "tfmq-spark query 0 task 3") as client:
        part = client.open_part(MEMBER)
        part.send(batch(client, [b"a"]))
        part.prepare()
        (found,) = tfmq_broker.admin().transactions()
        assert "task 3" in found.owner
        assert (found.commit_group, found.state, found.messages) == ("query", "prepared", 1)


def test_a_broker_that_comes_back_in_time_is_waited_for(tfmq_broker: SimulatedBroker) -> None:
    with CommitGroupClient(tfmq_broker.servers, 30.0) as client:
        part = client.open_part(MEMBER)
        part.send(batch(client, [b"a"]))
        names = part.prepare()
        tfmq_broker.crash(down=20)
        assert client.commit(PendingCommit("query", 0, "run-1", names, 1)).rows == 1
    assert [each.payload for each in tfmq_broker.sent("orders")] == [b"a"]


def test_one_that_stays_away_is_told_after_the_time(tfmq_broker: SimulatedBroker) -> None:
    tfmq_broker.stop()
    began = tfmq_broker.clock.monotonic()
    with CommitGroupClient(tfmq_broker.servers, 12.0) as client, pytest.raises(ConnectionFailed):
        client.topic("orders")
    assert 11 <= tfmq_broker.clock.monotonic() - began <= 15
    tfmq_broker.start()


def test_how_long_a_part_waits_for_the_verdict_is_its_own_choice(tfmq_broker: SimulatedBroker) -> None:
    with CommitGroupClient(tfmq_broker.servers, 30.0) as client:
        part = client.open_part(MEMBER, ttl_ms=60_000)
        part.send(batch(client, [b"a"]))
        part.prepare()
    (found,) = tfmq_broker.admin().transactions()
    assert found.expires_ms - found.prepared_ms == 60_000
    tfmq_broker.clock.advance(61)
    assert tfmq_broker.admin().transactions() == []


def test_a_time_that_the_broker_does_not_give_is_refused(tfmq_broker: SimulatedBroker) -> None:
    with CommitGroupClient(tfmq_broker.servers, 30.0) as client:
        part = client.open_part(MEMBER, ttl_ms=400 * 86_400_000)
        part.send(batch(client, [b"a"]))
        with pytest.raises(TfmqError, match=r"a commit group may be prepared for|ttl_ms"):
            part.prepare()


def test_a_group_is_forgotten_once(tfmq_broker: SimulatedBroker) -> None:
    with CommitGroupClient(tfmq_broker.servers, 30.0) as client:
        client.commit(PendingCommit("query", 0, "run-1", [], 0))
        assert client.delete_group("query") is True
        assert client.delete_group("query") is False
