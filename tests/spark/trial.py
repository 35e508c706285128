"""A query topic -> topic with real processes, at which a trial plants one failure; then both topics are compared."""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tfmq
from tests.scale import scaled
from tests.spark.drivers import Drivers, Row, differing, sent, stored
from tests.spark.wiretap import Exchange, Wiretap, tapped
from tools.rigs.live_driver import LiveDriver
from tools.rigs.live_server import LiveServer

ROWS = 100_000
PARTITIONS = 2
PATIENCE_SECONDS = 60.0
UNFINISHED = ["open", "preparing", "prepared", "committing", "applying"]


class Trial:
    """`run` what is there to its end, `more` input, `check` that the output is the input. The driver is the one that
    all share, as long as it lives, and a new one then.
    """

    def __init__(self, drivers: Drivers, server: LiveServer, tap: Wiretap, name: str, folder: Path) -> None:
        self.drivers, self.server, self.tap = drivers, server, tap
        self.source, self.target = f"{name}-in", f"{name}-out"
        self.checkpoint = folder / "checkpoint"
        self.failing = folder / "failing"
        self.failing.mkdir()
        self.killed: list[int] = []
        """The processes of the last driver that was killed."""
        self.wanted: Counter[Row] = Counter()
        self.query: dict[str, Any] = {
            "servers": tap.address,
            "source": {"subscribe": self.source, "startingOffsets": "earliest"},
            "sink": {"topic": self.target},
            "checkpoint": str(self.checkpoint),
            "tasks": 3,
        }
        with tfmq.Admin(server.address) as admin:
            for topic in (self.source, self.target):
                admin.create_topic(topic, PARTITIONS)
        self.more()

    @property
    def driver(self) -> LiveDriver:
        return self.drivers.driver()

    def more(self, rows: int | None = None) -> None:
        """Send some rows that the query is to copy."""
        count = max(200, scaled(ROWS)) if rows is None else rows
        self.wanted += sent(self.server.address, self.source, count, len(self.wanted))

    def run(self, **changed: Any) -> dict[str, Any]:
        """Copy what is there. Raises Failed with what Spark says, Died when the driver was killed."""
        return self.driver.do({"do": "run", "query": {**self.query, **changed}})

    def kill_driver(self, exchange: Exchange) -> str:
        """An act: SIGKILL to all of it."""
        self.killed = self.driver.processes()
        self.driver.kill()
        return "cut"

    def kill_broker(self, exchange: Exchange) -> str:
        """An act: SIGKILL to the broker, and a new one on what it left."""
        self.server.kill()
        self.server.start()
        return "cut"

    def check(self) -> None:
        """Each row is there once, and nothing waits in the broker."""
        self.settle()
        found = stored(self.server.address, self.target)
        assert differing(found, self.wanted) == {}

    def check_nothing_is_there(self) -> None:
        """Not a single row was written."""
        assert stored(self.server.address, self.target) == Counter()

    def settle(self) -> None:
        """Until every commit is done to its end. What is prepared then is a leftover."""
        left = until_empty(lambda: [each for each in self.unfinished() if each.state != "prepared"])
        assert not left, left
        left = until_empty(self.unfinished)
        assert not left, left

    def unfinished(self) -> list[Any]:
        """The transactions of this query that are not at their end."""
        group = self.group()
        with tfmq.Admin(self.server.address) as admin:
            return [each for each in admin.transactions(UNFINISHED) if group in str(each)]

    def group(self) -> str:
        """The commit group of the query."""
        query = json.loads((self.checkpoint / "metadata").read_text())["id"]
        return f"spark-stream-{query}..{self.target}"

    def committed(self) -> tuple[int, int]:
        """(number of the last batch that the broker committed, its rows); (-1, 0) if there is none."""
        with tfmq.Admin(self.server.address) as admin:
            for each in admin.commit_groups():
                if each.group == self.group():
                    return each.sequence, each.rows
        return -1, 0

    def forget_batches(self, first: int) -> None:
        """Set the checkpoint back: batch `first` and what followed it did not happen."""
        for kind in ("offsets", "commits"):
            for file in (self.checkpoint / kind).iterdir():
                number = file.name.removeprefix(".").removesuffix(".crc")
                if number.isdigit() and int(number) >= first:
                    file.unlink()


def kill_client(exchange: Exchange) -> str:
    """An act: SIGKILL to the process that sent it."""
    os.kill(exchange.process(), signal.SIGKILL)
    return "cut"


def lose(exchange: Exchange) -> str:
    """An act: it is lost."""
    return "cut"


def until_empty(what: Callable[[], list[Any]], seconds: float = PATIENCE_SECONDS) -> list[Any]:
    """What is left of it after some time; returns at once when nothing is."""
    until = time.monotonic() + seconds
    while (found := what()) and time.monotonic() < until:
        time.sleep(0.02)
    return found


@contextmanager
def trial_of(drivers: Drivers, server: LiveServer, name: str, folder: Path) -> Iterator[Trial]:
    """A trial with a tap of its own."""
    with tapped(server.address) as tap:
        yield Trial(drivers, server, tap, name, folder)
