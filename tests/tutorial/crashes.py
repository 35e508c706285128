"""Takes orders in the shop of the tutorial's Django page, and is killed at a line of each; then the database and the
broker are compared. A program of its own, to be run in the folder of the shop: `crashes.py RUNS SEED`.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from types import FrameType, SimpleNamespace
from typing import Any

PLACES = (
    "shop/together.py",
    "shop/views.py",
    "django/db/transaction.py",
    "tfmq/transactions.py",
    "tfmq/client/transaction/transaction.py",
)
SECONDS = 60.0


class Watch:
    """Counts the lines that this thread comes by in `PLACES`, and at one of them the process is killed."""

    def __init__(self, killed_at: int = 0) -> None:
        self.lines: list[str] = []
        self._killed_at = killed_at

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        if not name.endswith(PLACES):
            return None
        self.lines.append(name)
        if len(self.lines) == self._killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return self


def order(item: str, watch: Watch) -> None:
    """One order, as a customer sends it."""
    from django.test import Client

    client = Client(raise_request_exception=False, SERVER_NAME="localhost")
    sys.settrace(watch)
    client.post("/orders", {"item": item})
    sys.settrace(None)


def in_a_child(work: Callable[[], int]) -> int:
    """The exit code of a process that does `work`; negative: it was killed by that signal."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def plan(runs: int, seed: str) -> list[int]:
    """At which lines: each of the shop's own, and `runs` of all others."""
    read, write = os.pipe()

    def count() -> int:
        watch = Watch()
        order("plain", watch)
        own = [number for number, name in enumerate(watch.lines, 1) if "/shop/" in name]
        os.write(write, f"{len(watch.lines)} {' '.join(map(str, own))}\n".encode())
        return 0

    assert in_a_child(count) == 0
    total, *own = map(int, os.read(read, 65_536).split())
    others = sorted({*range(1, total + 1)} - {*own})
    return sorted({*own, *random.Random(seed).sample(others, min(runs, len(others)))})


def kill(number: int, item: str) -> None:
    code = in_a_child(lambda: order(item, Watch(number)) or 0)
    assert code in (-signal.SIGKILL, 0), code  # 0: this time it needed fewer lines


def overtaken() -> int:
    """The answer “rollback” is given while the program that was asked about is still to write its rows: it was frozen,
    say. What it does then must come to nothing.
    """
    from django.db import IntegrityError
    from shop.models import Order
    from shop.together import decide, together

    try:
        with together() as tx:
            asked = threading.Thread(target=decide, args=(SimpleNamespace(xid=tx.xid),))
            asked.start()
            asked.join()
            Order.objects.create(item="overtaken")
            tx.send("orders", "overtaken")
    except IntegrityError:
        return 0
    return 1


def settle() -> None:
    """A service starts, is asked, and answers, until nothing is in doubt."""
    from shop.together import producer

    import tfmq

    deadline = time.monotonic() + SECONDS
    producer()
    with tfmq.Admin() as admin:
        while admin.transactions():
            assert time.monotonic() < deadline, admin.transactions()
            time.sleep(0.1)


def compare() -> tuple[list[str], list[str]]:
    from shop.models import Order

    import tfmq

    with tfmq.Consumer(topics="orders") as consumer:
        messages = []
        while batch := consumer.poll(timeout=0.5):
            messages += [message.text for message in batch]
    return sorted(row.item for row in Order.objects.all()), sorted(messages)


def main() -> None:
    import django

    django.setup()
    import_module("django.test.client")  # so that not each child loads them
    import_module("shop.urls")
    import_module("tfmq.client.drivers.blocking")
    lines = plan(int(sys.argv[1]), sys.argv[2])
    for number in lines:
        kill(number, f"item-{number}")
    assert in_a_child(overtaken) == 0
    settle()
    rows, messages = compare()
    assert rows == messages, (set(rows) - set(messages), set(messages) - set(rows), len(rows), len(messages))
    assert "plain" in rows and "overtaken" not in rows
    print(f"{len(lines)} killed, {len(rows) - 1} of these orders are there, and so are their messages")


if __name__ == "__main__":
    main()
