"""The part of the demo that is about transactions: orders, each with its payment, and another accident.

Each order goes to one topic and its payment to another, in one transaction. The broker dies in the middle; one
transaction was prepared before and not decided. After the restart every order has its payment and every payment its
order, what was acknowledged is there, and the prepared one waits for a decision, which another producer makes.
"""

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

import tfmq

ORDERS, PAYMENTS = "demo-orders", "demo-payments"
COUNT = 2_000
XID = "order-in-doubt"
SECONDS = 30.0


class Killable(Protocol):
    """The demo's broker."""

    address: str

    def kill(self) -> None: ...
    def start(self) -> float: ...


@dataclass
class Shop:
    """What happened."""

    acknowledged: list[str] = field(default_factory=list)
    unsure: int = 0
    in_doubt: str = ""
    orders: list[str] = field(default_factory=list)
    payments: list[str] = field(default_factory=list)
    seconds: float = 0.0


def sell(broker: Killable, shop: Shop) -> None:
    """Orders with payments; at some moment the broker dies and comes back."""
    with tfmq.Producer(broker.address, timeout=SECONDS) as producer:
        doubtful = producer.begin(xid=XID)
        doubtful.send(ORDERS, XID)
        doubtful.send(PAYMENTS, XID)
        doubtful.prepare()
        accident = threading.Thread(target=die_and_come_back, args=(broker,))
        accident.start()
        begun = time.monotonic()
        for number in range(COUNT):
            name = f"order-{number}"
            try:
                with producer.transaction() as tx:
                    tx.send(ORDERS, name)
                    tx.send(PAYMENTS, name)
            except tfmq.TfmqError:
                shop.unsure += 1
            else:
                shop.acknowledged.append(name)
        shop.seconds = time.monotonic() - begun
        accident.join()


def die_and_come_back(broker: Killable) -> None:
    time.sleep(random.uniform(0.1, 0.5))
    broker.kill()
    broker.start()


def look(broker: Killable, shop: Shop) -> None:
    """Who waits for a decision; then somebody else decides, and everything is read."""
    with tfmq.Admin(broker.address) as admin:
        shop.in_doubt = " ".join(f"{each.xid} ({each.state})" for each in admin.transactions())
    with tfmq.Producer(broker.address) as other:
        other.resume(XID).commit()
    shop.orders, shop.payments = read(broker.address, ORDERS), read(broker.address, PAYMENTS)


def read(address: str, topic: str) -> list[str]:
    """Everything in a topic."""
    found: list[str] = []
    with tfmq.Consumer(address, topics=topic, start="earliest") as consumer:
        while messages := consumer.poll(timeout=1.0, max_messages=10_000):
            found += [message.text for message in messages]
    return found


def run(broker: Killable) -> tuple[Shop, list[tuple[str, int, bool]]]:
    """The whole part: what happened, and (what was promised, a count, whether it holds)."""
    shop = Shop()
    sell(broker, shop)
    look(broker, shop)
    return shop, verdict(shop)


def verdict(shop: Shop) -> list[tuple[str, int, bool]]:
    """What was promised, counted."""
    orders, payments = Counter(shop.orders), Counter(shop.payments)
    lost = sum(name not in orders for name in shop.acknowledged)
    torn = len(orders.keys() ^ payments.keys())
    twice = sum(count - 1 for counts in (orders, payments) for count in counts.values())
    return [
        ("transactions committed", len(shop.acknowledged), bool(shop.acknowledged)),
        ("rolled back, or nobody knows", shop.unsure, len(shop.acknowledged) + shop.unsure == COUNT),
        ("committed, but missing", lost, lost == 0),
        ("orders without payment, payments without order", torn, torn == 0),
        ("there more than once", twice, twice == 0),
        ("prepared before the crash, decided behind it", orders[XID], orders[XID] == payments[XID] == 1),
    ]
