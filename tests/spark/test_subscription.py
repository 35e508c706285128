"""Which partitions are read."""

import pytest

from tests.spark.fake_logs import FakeLogs
from tfmq.errors import BadRequest, UnknownPartition, UnknownTopic
from tfmq.spark.offsets import Subscription, parse_subscription


@pytest.fixture
def logs() -> FakeLogs:
    found = FakeLogs()
    found.create("orders", 2)
    found.create("orders-old")
    found.create("payments")
    return found


def found(logs: FakeLogs, chosen: Subscription, lenient: bool = False) -> list[str]:
    return [f"{topic}-{number}" for topic, number in chosen.find_partitions(logs, lenient=lenient)]


def test_topics_by_name(logs: FakeLogs) -> None:
    chosen = parse_subscription({"subscribe": ("payments", "orders")})
    assert found(logs, chosen) == ["orders-0", "orders-1", "payments-0"]
    assert chosen.includes("orders")
    assert not chosen.includes("orders-old")


def test_topics_by_a_pattern_of_the_whole_name(logs: FakeLogs) -> None:
    chosen = parse_subscription({"subscribePattern": "orders|pay"})
    assert found(logs, chosen) == ["orders-0", "orders-1"]
    assert not chosen.includes("orders-old")


def test_a_pattern_that_matches_nothing_yet_is_no_error(logs: FakeLogs) -> None:
    assert found(logs, Subscription(pattern="none-.*")) == []


def test_partitions(logs: FakeLogs) -> None:
    chosen = parse_subscription({"assign": {"orders": [1]}})
    assert found(logs, chosen) == ["orders-1"]
    assert chosen.includes("orders")


def test_an_unknown_topic_is_named_with_the_nearest_one(logs: FakeLogs) -> None:
    with pytest.raises(UnknownTopic, match=r"There is no topic 'paymens'. Did you mean 'payments'\?"):
        found(logs, Subscription(("orders", "paymens")))
    assert found(logs, Subscription(("orders", "paymens")), lenient=True) == ["orders-0", "orders-1"]


def test_an_unknown_partition_is_named(logs: FakeLogs) -> None:
    chosen = Subscription(assigned=(("orders", 0), ("orders", 5)))
    with pytest.raises(UnknownPartition, match="there is no partition orders-5"):
        found(logs, chosen)
    assert found(logs, chosen, lenient=True) == ["orders-0"]


def test_exactly_one_way_is_chosen() -> None:
    with pytest.raises(BadRequest, match="subscribe and assign exclude each other"):
        parse_subscription({"subscribe": ("orders",), "assign": {"orders": [0]}})
    with pytest.raises(BadRequest, match="Give one of the options subscribe, subscribePattern and assign"):
        parse_subscription({})
