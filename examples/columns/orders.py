"""What the three examples share: the broker that they use, and their orders."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import tfmq

TOPIC = "orders"
CUSTOMERS = ("ada", "grace", "edsger")
COUNT = 3_000


@contextmanager
def servers() -> Iterator[str]:
    """Yield the address after `--servers`, or that of a broker that runs as long as the context."""
    if sys.argv[1:2] == ["--servers"] and len(sys.argv) == 3:
        yield sys.argv[2]
        return
    if len(sys.argv) > 1:
        sys.exit("Usage: python -m examples.columns.NAME [--servers HOST:PORT]")
    with tempfile.TemporaryDirectory(prefix="tfmq-columns-") as folder, tfmq.local_server(folder) as address:
        yield address


def amount(number: int) -> int:
    """The amount of an order, in cents."""
    return 100 + number % 50
