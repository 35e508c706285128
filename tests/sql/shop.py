"""The tables of the tests: orders, and a stock that refuses to be sold twice, as late as at the commit."""

from sqlalchemy import ForeignKey, String, select
from sqlalchemy.engine import Engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column


class Base(DeclarativeBase):
    """Of the tables of the tests."""


class Customer(Base):
    __tablename__ = "customer"
    name: Mapped[str] = mapped_column(String(60), primary_key=True)


class Order(Base):
    """An order; that its customer is there is looked at when the transaction commits."""

    __tablename__ = "order"
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    customer: Mapped[str | None] = mapped_column(
        ForeignKey("customer.name", deferrable=True, initially="DEFERRED"), default=None
    )


def orders(engine: Engine) -> list[int]:
    """The numbers of the orders that are committed."""
    with Session(engine) as session:
        return list(session.scalars(select(Order.number).order_by(Order.number)))
