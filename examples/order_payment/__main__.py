"""Orders and payments under crashes: python -m examples.order_payment [--database URL]

Sells an order for each step at which a shop can die, then books the orders with a payment service that dies at each of
its steps too, and at last lets both go on undisturbed. In the end every order that was kept is booked, once, the topics
say the same, and nothing is in doubt.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from typing import NamedTuple

from sqlalchemy import create_engine, select
from sqlalchemy.orm import Session

import tfmq
from examples.order_payment import accidents, payments, shop
from examples.order_payment.services import PATIENCE_SECONDS, Where, book, in_process, sell, until_idle

SETTINGS = {"transaction.check_seconds": 0.5, "transaction.timeout_seconds": 3}
"""The broker asks, and gives up, sooner than it would in earnest (60 seconds both)."""
LATER_ORDERS = 12
"""As many as the payment service's accidents may cost it."""


def settle(where: Where) -> None:
    """Wait until the broker has nothing in doubt any more: it asks, and the row in the database answers."""
    accidents.hurry()
    deadline = time.monotonic() + PATIENCE_SECONDS
    with tfmq.Producer(where.servers) as producer, tfmq.Admin(where.servers) as admin:
        tfmq.sql.check(producer, create_engine(where.database))
        while waiting := admin.transactions(["open", "prepared"]):
            if time.monotonic() > deadline:
                raise SystemExit(f"still in doubt: {[each.xid for each in waiting]}")
            time.sleep(0.1)


class Accounts(NamedTuple):
    """What everybody says in the end: numbers of orders, sorted."""

    orders: list[int]
    told: list[int]
    payments: list[int]
    confirmed: list[int]

    @property
    def agree(self) -> bool:
        """And there is something to agree about: what nothing disturbed is there."""
        return len(self.orders) > LATER_ORDERS and self.orders == self.told == self.payments == self.confirmed


def accounts(where: Where) -> Accounts:
    with Session(create_engine(where.database)) as session:
        ordered = list(session.scalars(select(shop.Order.number).order_by(shop.Order.number)))
        paid = list(session.scalars(select(payments.Payment.order).order_by(payments.Payment.order)))
    return Accounts(ordered, numbers(where, shop.TOPIC), paid, numbers(where, payments.TOPIC))


def numbers(where: Where, topic: str) -> list[int]:
    """The orders that a topic tells of."""
    with tfmq.Consumer(where.servers, topics=topic, read="written") as consumer:
        return sorted(message.json()["number"] for message in until_idle(consumer))


def run(where: Where) -> Accounts:
    """All of it."""
    engine = create_engine(where.database)
    shop.Base.metadata.create_all(engine)
    tfmq.sql.create_table(engine)

    for number, accident in enumerate(accidents.EACH):
        print(f"order {number}: the shop dies {told(accident)}")
        in_process(sell, where, number, accident)
    settle(where)
    kept = accounts(where)
    print(f"orders kept: {kept.orders}, orders told of: {kept.told}")

    for number in range(len(accidents.EACH), len(accidents.EACH) + LATER_ORDERS):
        in_process(sell, where, number)
    for accident in accidents.EACH:
        print(f"the payments die {told(accident)}")
        in_process(book, where, accident)
    settle(where)
    in_process(book, where)
    return accounts(where)


def told(accident: accidents.Accident) -> str:
    step, behind = accident
    return f"{'behind' if behind else 'before'} “{step}”"


def main() -> int:
    parser = argparse.ArgumentParser(description="Orders and payments under crashes.")
    parser.add_argument("--database", help="its URL; an SQLite file by default")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        database = chosen.database or f"sqlite:///{folder}/shop.db"
        with tfmq.local_server(f"{folder}/data", settings=SETTINGS) as servers:
            found = run(Where(servers, database))
    for name, value in found._asdict().items():
        print(f"{name:10} {value}")
    print("all agree" if found.agree else "THEY DO NOT AGREE")
    return 0 if found.agree else 1


if __name__ == "__main__":
    sys.exit(main())
