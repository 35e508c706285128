"""Clients of every kind go on with another primary: nothing is lost that was acknowledged, nothing is doubled, the
order stays. The broker, the standbys and the clients are the real ones, in a simulation.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

import tfmq
from tests.client.replicated_broker import ReplicatedBroker
from tests.scale import SEED, scaled
from tfmq import aio
from tfmq.errors import NotPrimary, TfmqError


@pytest.fixture
def broker() -> Iterator[ReplicatedBroker]:
    with ReplicatedBroker() as made:
        yield made


def payloads(broker: ReplicatedBroker, topic: str = "orders") -> list[bytes]:
    return [bytes(each.payload) for each in broker.sent(topic)]


def primary_at(broker: ReplicatedBroker, number: int) -> None:
    broker.fail_over(number, seconds=0)
    broker.replicas.down.clear()


def test_a_producer_finds_the_primary_and_its_answers_say_replicated(broker: ReplicatedBroker) -> None:
    primary_at(broker, 2)
    with tfmq.Producer(broker.servers) as producer:
        assert producer.send("orders", b"1").result().durability == "replicated"
        assert producer.send("orders", b"2", delay=3600).result().durability == "replicated"
        with producer.transaction() as transaction:
            sent = transaction.send("orders", b"3")
        assert sent.result().durability == "replicated"
        broker.fail_over(1)
        assert producer.send("orders", b"4").result().durability == "replicated"
    assert payloads(broker) == [b"1", b"3", b"4"]


@pytest.mark.parametrize("acks", ["written", "none"])
def test_what_was_not_asked_to_be_durable_is_not_said_to_be_replicated(broker: ReplicatedBroker, acks: str) -> None:
    with tfmq.Producer(broker.servers, acks=acks) as producer:
        assert producer.send("orders", b"1").result().durability == acks


def test_messages_in_flight_are_stored_once_and_in_order(broker: ReplicatedBroker) -> None:
    with tfmq.Producer(broker.servers, linger_ms=0) as producer:
        sent = [producer.send("orders", b"%d" % number) for number in range(5)]
        sent[0].result()
        more = [producer.send("orders", b"%d" % number) for number in range(5, 10)]
        broker.fail_over(1, seconds=12, silent_name=True)
        more += [producer.send("orders", b"%d" % number) for number in range(10, 15)]
        assert [each.result().durability for each in sent + more] == ["replicated"] * 15
    assert payloads(broker) == [b"%d" % number for number in range(15)]


def test_a_consumer_goes_on_with_its_group(broker: ReplicatedBroker) -> None:
    with (
        tfmq.Producer(broker.servers) as producer,
        tfmq.Consumer(broker.servers, topics="orders", group="billing", commits="manual") as consumer,
    ):
        producer.send_many("orders", [b"1", b"2"]).result()
        assert [each.payload for each in consumer.poll(timeout=60)] == [b"1", b"2"]
        consumer.commit()
        broker.fail_over(1)
        producer.send("orders", b"3").result()
        assert [bytes(each.payload) for each in consumer.poll(timeout=60)] == [b"3"]
        consumer.commit()
        broker.fail_over(2)
        producer.send("orders", b"4").result()
        assert [bytes(each.payload) for each in consumer.poll(timeout=60)] == [b"4"]


def test_a_prepared_transaction_is_decided_on_the_new_primary(broker: ReplicatedBroker) -> None:
    with tfmq.Producer(broker.servers) as producer:
        kept, dropped = producer.begin("kept"), producer.begin("dropped")
        for each in (kept, dropped):
            each.send("orders", each.xid.encode())
            each.prepare()
        broker.fail_over(1)
        kept.commit()
        broker.fail_over(2)
        producer.resume("dropped").rollback()
    with tfmq.Producer(broker.servers) as producer:
        assert producer.resume("kept").state == "committed"
    assert payloads(broker) == [b"kept"]


def test_the_handle_of_a_delayed_message_stays_valid(broker: ReplicatedBroker) -> None:
    with tfmq.Producer(broker.servers) as producer:
        handles = [producer.send("orders", name, delay=60).result().delayed for name in ("gone", "due")]
        broker.fail_over(1)
        assert producer.cancel(handles[0]) == "cancelled"
        broker.clock.advance(seconds=61)
        assert producer.cancel(handles[1]) == "delivered"
    assert payloads(broker) == [b"due"]


def test_an_admin_client_works_on_and_one_for_standbys_stays_there(broker: ReplicatedBroker) -> None:
    with tfmq.Admin(broker.servers) as admin:
        admin.create_topic("orders")
        broker.fail_over(1)
        assert [each.name for each in admin.topics()] == ["orders"]
        standby = broker.replicas.addresses[2]
        with tfmq.Admin(standby, standby=True) as there:
            assert there.status()["replication"]["role"] == "standby" and there.ping() > 0
            with pytest.raises(NotPrimary, match=f"The primary is {broker.replicas.primary}"):
                there.topics()
            assert there.promote_replica() == "requested"
        assert broker.replicas.promoted == [standby]
        with pytest.raises(tfmq.BadRequest, match="the one standby"):
            admin.promote_replica()
    with tfmq.Admin(broker.replicas.primary) as admin, pytest.raises(tfmq.NotAllowed, match="not a standby"):
        admin.promote_replica()


def test_without_a_primary_calls_wait_and_then_say_so(broker: ReplicatedBroker) -> None:
    with tfmq.Admin(broker.servers, timeout=20) as admin:
        admin.ping()
        broker.replicas.kill()
        broker.replicas.down, broker.replicas.primary = {broker.replicas.primary}, ""
        started = broker.clock.monotonic()
        with pytest.raises(NotPrimary, match="None of the servers of this client is primary yet"):
            admin.ping()
        assert 19 < broker.clock.monotonic() - started < 22


def test_an_asyncio_client_goes_on(broker: ReplicatedBroker) -> None:
    async def course() -> list[bytes]:
        async with (
            aio.Producer(broker.servers) as producer,
            aio.Consumer(broker.servers, topics="orders", group="billing") as consumer,
            aio.Admin(broker.servers) as admin,
        ):
            await producer.send("orders", b"1")
            first = await consumer.poll(timeout=60)
            broker.fail_over(1, seconds=0)
            await producer.send("orders", b"2")
            await admin.ping()
            return [bytes(each.payload) for each in [*first, *await consumer.poll(timeout=60)]]

    assert asyncio.run(course()) == [b"1", b"2"]


COURSES = 100


@pytest.mark.parametrize("number", range(scaled(COURSES)))
def test_random_failovers_lose_and_double_nothing(number: int) -> None:
    """Producers with plain, delayed and transactional messages, and a group of two, through six changes of the primary.

    What was acknowledged is there once and in its order; what failed is there once at most; and the group has all.
    """
    seed = SEED + number
    print(f"seed {seed}")
    chance = random.Random(seed)
    with ReplicatedBroker({"topics.partitions": 2}, seed=seed) as broker:
        producer = tfmq.Producer(broker.servers, linger_ms=chance.choice([0, 5]), timeout=120)
        consumers = [tfmq.Consumer(broker.servers, topics="orders", group="billing", commits="manual") for _ in "ab"]
        sent: list[tuple[bytes, Any]] = []
        seen: list[bytes] = []
        for step in range(30):
            kind = chance.random()
            name = b"%03d" % step
            if kind < 0.5:
                sent += [
                    (name + b"-%d" % each, producer.send("orders", name + b"-%d" % each, key="k")) for each in (0, 1)
                ]
            elif kind < 0.6:
                sent.append((name, producer.send("orders", name, delay=1)))
            elif kind < 0.7:
                try:
                    with producer.transaction() as transaction:
                        found = transaction.send("orders", name)
                    sent.append((name, found))
                except TfmqError as error:
                    assert error.outcome == "not done", error
            elif kind < 0.9:
                consumer = chance.choice(consumers)
                messages = consumer.poll(timeout=0.5)
                try:
                    consumer.commit()
                    seen += [bytes(each.payload) for each in messages]
                except tfmq.Fenced:
                    pass
            if chance.random() < 0.2:
                broker.fail_over(
                    chance.randrange(3), seconds=chance.choice([0, 1, 11]), silent_name=chance.random() < 0.5
                )
            elif chance.random() < 0.1:
                broker.disconnect()
        producer.flush()
        broker.clock.advance(seconds=5)
        acknowledged = [name for name, each in sent if each.result().durability == "replicated"]
        stored = payloads(broker)
        assert sorted(stored) == sorted(acknowledged), "each once"
        keyed = [each for each in stored if b"-" in each]
        assert keyed == sorted(keyed), "in order"
        quiet = 0
        while quiet < 30:  # a partition moves when its owner polls again, or is taken for dead
            quiet += 1
            for consumer in consumers:
                messages = consumer.poll(timeout=2)
                quiet = 0 if messages else quiet
                seen += [bytes(each.payload) for each in messages]
                consumer.commit()
        assert set(seen) == set(acknowledged)
        for each in (producer, *consumers):
            each.close()
