"""The shop: an order in its database and a message about it, together or not at all."""

from __future__ import annotations

import json

from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import tfmq

TOPIC = "orders"


class Base(DeclarativeBase):
    """The tables of both services; they share a database here, and need not."""


class Order(Base):
    __tablename__ = "orders"
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    amount: Mapped[int]


def place_order(session: Session, producer: tfmq.Producer, number: int, amount: int) -> None:
    """Sell. When this returns, the order is stored and its message will be read, whatever breaks from here on."""
    with tfmq.sql.transaction(session, producer) as tx:
        session.add(Order(number=number, amount=amount))
        tx.send(TOPIC, json.dumps({"number": number, "amount": amount}), key=str(number))
