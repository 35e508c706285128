"""Everybody gets everything: each machine, or each name, reads the whole topic and goes on where it was."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

import tfmq
from tfmq.testing.broker import SimulatedBroker

PARTITIONS = 3


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    with SimulatedBroker({"topics.partitions": PARTITIONS}) as made:
        made.admin().create_topic("prices", partitions=PARTITIONS)
        send(made, range(6))
        yield made


def send(broker: SimulatedBroker, numbers: range) -> None:
    producer = broker.producer()
    for number in numbers:
        producer.send("prices", str(number), partition=number % PARTITIONS).result()


def shop(broker: SimulatedBroker, name: bool | str, **options: Any) -> tfmq.Consumer[Any]:
    return broker.consumer("prices", group="shop", broadcast=name, **{"session": 10, **options})


def read(broker: SimulatedBroker, consumer: tfmq.Consumer[Any]) -> str:
    return "".join(sorted(message.text for message in broker.drain(consumer)))


def lags(broker: SimulatedBroker, group: str) -> dict[int, int]:
    """The lag of a group after its saved offsets, by partition."""
    rows = broker.admin().group(group).offsets
    return {each["partition"]: each["lag"] for each in rows}


def test_each_of_two_reads_all_of_it_with_all_of_its_partitions(broker: SimulatedBroker) -> None:
    left, right = shop(broker, "left"), shop(broker, "right")
    assert read(broker, left) == read(broker, right) == "012345"
    send(broker, range(6, 9))
    assert read(broker, right) == read(broker, left) == "678"
    names = {f"prices-{number}" for number in range(PARTITIONS)}
    assert set(left.stats()["assigned"]) == set(right.stats()["assigned"]) == names


def test_each_has_offsets_of_its_own_and_goes_on_where_it_was(broker: SimulatedBroker) -> None:
    with shop(broker, "left") as left:
        assert read(broker, left) == "012345"
    send(broker, range(6, 9))
    broker.restart()
    with shop(broker, "left") as left:
        assert read(broker, left) == "678", "what it had saved does not come again"
    with shop(broker, "right") as right:
        assert read(broker, right) == "012345678", "what another one saved is nothing to it"
    assert lags(broker, "shop-left") == lags(broker, "shop-right") == dict.fromkeys(range(PARTITIONS), 0)


def test_one_that_dies_or_stands_still_takes_nothing_from_the_others(broker: SimulatedBroker) -> None:
    left, right = shop(broker, "left"), shop(broker, "right")
    assert read(broker, left) == "012345"
    broker._simulation.clients.remove(left._driver)  # type: ignore[arg-type]
    broker.clock.advance(60)
    assert read(broker, right) == "012345"
    send(broker, range(6, 9))
    assert read(broker, right) == "678"
    broker._simulation.clients.append(left._driver)  # type: ignore[arg-type]
    found = ""
    for _ in range(60):  # it is notified that it was declared dead, and joins again
        found += "".join(message.text for message in left.poll(timeout=0))
        broker.clock.advance(0.5)
    assert set("678") <= set(found)


def test_the_name_of_the_machine_is_taken_where_no_other_is_given(
    broker: SimulatedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of one machine share the topic; another machine has it all."""
    monkeypatch.setattr("socket.gethostname", lambda: "till 1")
    one, two = shop(broker, True), shop(broker, True)
    monkeypatch.setattr("socket.gethostname", lambda: "till 2")
    far = shop(broker, True)
    found = ""
    for _ in range(20):
        for consumer in (one, two):
            found += "".join(message.text for message in consumer.poll(timeout=0))
        broker.clock.advance(0.5)
    assert sorted(found) == list("012345")
    assert len(one.stats()["assigned"]) + len(two.stats()["assigned"]) == PARTITIONS
    assert one.stats()["assigned"] and two.stats()["assigned"]
    assert read(broker, far) == "012345"
    groups = {each.group for each in broker.admin().groups()}
    assert {"shop-till_1", "shop-till_2"} <= groups
    assert all(re.fullmatch(r"shop-till_\d", each) for each in groups)
