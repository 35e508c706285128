"""A shop that cancels an order if it is not paid in time.

All that happens to an order goes to one topic under the order's number, so it lies in one partition, one behind the
other. Whether payment or check came first is settled there, once, for everybody who reads it.
"""

from __future__ import annotations

import sqlite3
from datetime import timedelta

import tfmq

ORDERS, CANCELLED, REFUNDS = "orders", "cancelled", "refunds"
PATIENCE = timedelta(minutes=30)


def place(producer: tfmq.Producer, number: str, goods: str, patience: timedelta = PATIENCE) -> None:
    """An order, and the question whether it is paid: both or neither. The time counts from the commit."""
    with producer.transaction() as tx:
        tx.send(ORDERS, goods, key=number, tag="placed")
        tx.send(ORDERS, "is it paid?", key=number, tag="check", delay=patience)


def pay(producer: tfmq.Producer, number: str) -> None:
    """The payment. Nothing needs to be taken back: the check will find the order paid."""
    producer.send(ORDERS, "paid", key=number, tag="paid").result()


def open_book(path: str) -> sqlite3.Connection:
    """What the clerk knows of orders. It is written before the transaction commits, and saying it twice is harmless."""
    book = sqlite3.connect(path)
    book.execute("CREATE TABLE IF NOT EXISTS orders (number TEXT PRIMARY KEY, state TEXT NOT NULL)")
    return book


def work(producer: tfmq.Producer, consumer: tfmq.Consumer, book: sqlite3.Connection, timeout: float = 1.0) -> int:
    """The clerk's next step: what came, what follows from it, and how far was read, together. How many came."""
    messages = consumer.poll(timeout=timeout)
    if messages:
        with producer.transaction() as tx, book:
            for message in messages:
                decide(tx, book, str(message.key), message.tag)
            tx.commit_offsets(consumer)
    return len(messages)


def decide(tx: tfmq.Transaction, book: sqlite3.Connection, number: str, happened: str | None) -> None:
    """What one message means. After a crash it is decided again, with the same result."""
    if happened == "placed":
        book.execute("INSERT OR IGNORE INTO orders VALUES (?, 'open')", (number,))
    elif happened == "paid":
        close(book, number, "paid")
        if state(book, number) == "cancelled":
            tx.send(REFUNDS, number, key=number)
    elif happened == "check":
        close(book, number, "cancelled")
        if state(book, number) == "cancelled":
            tx.send(CANCELLED, number, key=number)


def close(book: sqlite3.Connection, number: str, how: str) -> None:
    """The first of payment and check counts."""
    book.execute("UPDATE orders SET state = ? WHERE number = ? AND state = 'open'", (how, number))


def state(book: sqlite3.Connection, number: str) -> str | None:
    """ "open", "paid" or "cancelled"; None: an order that was never placed."""
    row = book.execute("SELECT state FROM orders WHERE number = ?", (number,)).fetchone()
    return row and str(row[0])
