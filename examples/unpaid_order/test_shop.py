"""Half an hour in no time: the broker of these tests is in this process, and its clock moves when the test says so.

To copy, with shop.py beside it, into a project of your own: `tfmq_broker` comes with tfmq, pytest finds it by itself.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest
import shop

import tfmq


class Shop:
    """The shop with its clerk, and a clock to turn."""

    def __init__(self, broker: Any) -> None:
        self.broker = broker
        self.producer: tfmq.Producer = broker.producer()
        self.consumer: tfmq.Consumer = broker.consumer(topics=[shop.ORDERS], group="clerk", commits="manual")
        self.book: sqlite3.Connection = shop.open_book(":memory:")

    def later(self, **time: float) -> None:
        """Time goes by, and the clerk does what there is to do."""
        self.broker.clock.advance(**time)
        while shop.work(self.producer, self.consumer, self.book, timeout=0):
            pass

    def told(self, topic: str) -> list[str]:
        """The orders that a topic tells of."""
        return [message.text for message in self.broker.sent(topic)]


@pytest.fixture
def my_shop(tfmq_broker: Any) -> Iterator[Shop]:
    yield Shop(tfmq_broker)


def test_an_order_that_is_not_paid_is_cancelled_after_half_an_hour(my_shop: Shop) -> None:
    shop.place(my_shop.producer, "42", "one kettle")
    my_shop.later(minutes=29, seconds=59)
    assert shop.state(my_shop.book, "42") == "open"
    my_shop.later(seconds=2)
    assert shop.state(my_shop.book, "42") == "cancelled"
    assert my_shop.told(shop.CANCELLED) == ["42"]


def test_an_order_that_is_paid_in_time_is_left_alone(my_shop: Shop) -> None:
    shop.place(my_shop.producer, "42", "one kettle")
    my_shop.later(minutes=29, seconds=59)
    shop.pay(my_shop.producer, "42")
    my_shop.later(hours=1)
    assert shop.state(my_shop.book, "42") == "paid"
    assert my_shop.told(shop.CANCELLED) == my_shop.told(shop.REFUNDS) == []


def test_who_pays_too_late_gets_it_back(my_shop: Shop) -> None:
    shop.place(my_shop.producer, "42", "one kettle")
    my_shop.later(minutes=31)
    shop.pay(my_shop.producer, "42")
    my_shop.later(seconds=1)
    assert my_shop.told(shop.CANCELLED) == my_shop.told(shop.REFUNDS) == ["42"]


def test_an_order_that_could_not_be_placed_is_never_checked(my_shop: Shop) -> None:
    with pytest.raises(RuntimeError), my_shop.producer.transaction() as tx:
        tx.send(shop.ORDERS, "is it paid?", key="42", tag="check", delay=shop.PATIENCE)
        raise RuntimeError("the shop changed its mind")
    my_shop.later(hours=1)
    assert my_shop.told(shop.ORDERS) == my_shop.told(shop.CANCELLED) == []


def test_each_order_has_its_own_half_hour(my_shop: Shop) -> None:
    for number in ("1", "2", "3"):
        shop.place(my_shop.producer, number, "one kettle")
        my_shop.later(minutes=9)
    assert my_shop.told(shop.CANCELLED) == []
    my_shop.later(minutes=4)
    assert my_shop.told(shop.CANCELLED) == ["1"]
    my_shop.later(minutes=20)
    assert my_shop.told(shop.CANCELLED) == ["1", "2", "3"]
