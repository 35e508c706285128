"""Orders that are cancelled if they are not paid in time: python -m examples.unpaid_order [--minutes N]

Three customers order: one pays, one forgets, one pays too late. In a shop the time is half an hour; here it is three
seconds, unless you say how long. The clerk is this program, too.
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
import tempfile
import time
from datetime import timedelta

import tfmq
from examples.unpaid_order import shop

PATIENCE_SECONDS = 60.0
"""Longer than anything here takes on the slowest machine, beyond the time that the orders are given."""


def run(servers: str, folder: str, patience: timedelta) -> dict[str, list[str]]:
    """The show; the numbers of the orders that were cancelled, and of those to pay back."""
    book = shop.open_book(f"{folder}/shop.db")
    with (
        tfmq.Producer(servers) as producer,
        tfmq.Consumer(servers, topics=[shop.ORDERS], group="clerk", commits="manual") as consumer,
    ):
        for number, goods in (("1", "one kettle"), ("2", "two cups"), ("3", "a teapot")):
            shop.place(producer, number, goods, patience)
            print(f"order {number}: {goods}, to be paid within {patience}")
        shop.pay(producer, "1")
        print("order 1: paid")
        until_state(producer, consumer, book, "3", patience)
        shop.pay(producer, "3")
        print("order 3: paid, too late")
        while shop.work(producer, consumer, book):
            pass
    return {topic: numbers(servers, topic) for topic in (shop.CANCELLED, shop.REFUNDS)}


def until_state(
    producer: tfmq.Producer, consumer: tfmq.Consumer, book: sqlite3.Connection, number: str, patience: timedelta
) -> None:
    """The clerk works until the order is cancelled."""
    began = time.monotonic()
    while shop.state(book, number) != "cancelled":
        if time.monotonic() - began > patience.total_seconds() + PATIENCE_SECONDS:
            raise SystemExit(f"order {number} was not cancelled")
        shop.work(producer, consumer, book)
    print(f"after {time.monotonic() - began:.2f} seconds: order {number} was not paid, and is cancelled")


def numbers(servers: str, topic: str) -> list[str]:
    """The orders that a topic tells of."""
    with tfmq.Consumer(servers, topics=topic) as consumer:
        return sorted(message.text for message in consumer.poll(timeout=5.0))


def main() -> int:
    parser = argparse.ArgumentParser(description="Orders that are cancelled if they are not paid in time.")
    parser.add_argument("--minutes", type=float, default=0.05, help="how long a customer has [0.05]")
    patience = timedelta(minutes=parser.parse_args().minutes)
    with tempfile.TemporaryDirectory() as folder, tfmq.local_server(f"{folder}/data") as servers:
        found = run(servers, folder, patience)
    print(f"cancelled: {', '.join(found[shop.CANCELLED])}; to pay back: {', '.join(found[shop.REFUNDS])}")
    return 0 if found == {shop.CANCELLED: ["2", "3"], shop.REFUNDS: ["3"]} else 1


if __name__ == "__main__":
    sys.exit(main())
