"""The payments: reads orders, books each once, and tells of it.

Three things are one transaction here: the row of the payment, the message about it, and the place in the topic behind
which to read on. So no crash books an order twice, and none forgets one.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Mapped, Session, mapped_column

import tfmq
from examples.order_payment import shop

TOPIC = "payments"


class Payment(shop.Base):
    __tablename__ = "payments"
    order: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    amount: Mapped[int]


def reader(servers: str) -> tfmq.Consumer[Any]:
    """Of the orders that are not booked yet. Places are saved by transactions alone.

    Of one that was killed the next gets the orders a tenth of a `session` later: here that is not to be waited for.
    """
    return tfmq.Consumer(servers, topics=shop.TOPIC, group="payments", commits="manual", read="written", session=2)


def book(session: Session, producer: tfmq.Producer, consumer: tfmq.Consumer[Any], message: Any) -> None:
    """Book the order that `message`, the last one from `consumer`, tells of."""
    order = message.json()
    with tfmq.sql.transaction(session, producer) as tx:
        session.add(Payment(order=order["number"], amount=order["amount"]))
        tx.send(TOPIC, message.payload, key=message.key)
        tx.commit_offsets(consumer)
