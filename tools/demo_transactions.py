"""The part of the demo that is about transactions: orders, each with its payment, and another kill of the broker.

Each order goes to one topic and its payment to another, in one transaction. The broker is killed in the middle; one
transaction was prepared before and not decided. After the restart every order has its payment and every payment its
order, what was acknowledged is there, and the prepared one waits for a decision, which another producer makes.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import tfmq
from tools.demo_broker import WAIT_SECONDS, Broker, Row, Steps, Task, read_all

ORDERS, PAYMENTS = "demo-orders", "demo-payments"
COUNT = 1_000
XID = "order-in-doubt"


@dataclass
class Shop:
    """What happened."""

    count: int
    acknowledged: list[str] = field(default_factory=list)
    unsure: int = 0
    orders: list[str] = field(default_factory=list)
    payments: list[str] = field(default_factory=list)


def sell(broker: Broker, shop: Shop, steps: Steps) -> None:
    """Orders with payments; in the middle of them the broker is killed and started again."""
    accident: Task | None = None
    killed_at = random.randrange(shop.count * 2 // 5, shop.count * 3 // 5)
    counting = steps.counting("orders with payments", shop.count)
    begun = steps.clock()
    with tfmq.Producer(broker.address, timeout=WAIT_SECONDS) as producer:
        doubtful = producer.begin(xid=XID)
        doubtful.send(ORDERS, XID)
        doubtful.send(PAYMENTS, XID)
        doubtful.prepare()
        for number in range(shop.count):
            if number == killed_at:
                accident = Task(lambda: die_and_come_back(broker, steps))
            name = f"order-{number}"
            try:
                with producer.transaction() as tx:
                    tx.send(ORDERS, name)
                    tx.send(PAYMENTS, name)
            except tfmq.TfmqError:
                shop.unsure += 1
            else:
                shop.acknowledged.append(name)
            counting.add()
        if accident is not None:
            accident.join()
    counting.end()
    seconds = steps.clock() - begun
    steps.say(f"{len(shop.acknowledged):,} transactions committed, {shop.count / seconds:,.0f} a second")


def die_and_come_back(broker: Broker, steps: Steps) -> None:
    steps.say("[bold red]kill -9[/] of the broker between two orders")
    broker.kill()
    steps.say(f"the broker is ready again, after {broker.start():.1f} s")


def look(broker: Broker, shop: Shop, steps: Steps) -> None:
    """Which transactions wait for a decision; then another producer decides, and everything is read."""
    with tfmq.Admin(broker.address, timeout=WAIT_SECONDS) as admin:
        waiting = [each.xid for each in admin.transactions() if each.state == "prepared"]
    with tfmq.Producer(broker.address, timeout=WAIT_SECONDS) as other:
        other.resume(XID).commit()
    steps.say(f"prepared and not decided: {', '.join(waiting)}; another producer has committed it")
    shop.orders = [message.text for message in read_all(broker.address, ORDERS)]
    shop.payments = [message.text for message in read_all(broker.address, PAYMENTS)]


def run(broker: Broker, steps: Steps, count: int = COUNT) -> list[Row]:
    """The whole part: what was promised, counted."""
    shop = Shop(count)
    sell(broker, shop, steps)
    look(broker, shop, steps)
    return verdict(shop)


def verdict(shop: Shop) -> list[Row]:
    """What was promised, counted."""
    orders, payments = Counter(shop.orders), Counter(shop.payments)
    lost = sum(name not in orders for name in shop.acknowledged)
    torn = len(orders.keys() ^ payments.keys())
    twice = sum(count - 1 for counts in (orders, payments) for count in counts.values())
    return [
        Row("transactions committed", len(shop.acknowledged), bool(shop.acknowledged)),
        Row("rolled back, or outcome unknown", shop.unsure, None),
        Row("committed, but missing", lost, lost == 0),
        Row("orders without payment, payments without order", torn, torn == 0),
        Row("there more than once", twice, twice == 0),
        Row("prepared before the crash, decided after it", orders[XID], orders[XID] == payments[XID] == 1),
    ]
