"""Spark drivers that may die: one that the tests of a run share as long as it lives, and what its queries write."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tfmq
from tools.rigs.live_driver import LiveDriver

READ_SECONDS = 60.0
Row = tuple[bytes | str | None, bytes | None]


class Drivers:
    """`driver()` is alive, and the same one until it is killed: a JVM takes seconds to start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made = 0
        self._driver: LiveDriver | None = None

    def driver(self) -> LiveDriver:
        """One that takes work, with two tasks at a time that are retried three times."""
        if self._driver is None or self._driver not in LiveDriver.alive:
            self.made += 1
            self._driver = LiveDriver(self.folder / str(self.made))
            self._driver.start()
        return self._driver

    def end(self) -> None:
        if self._driver is not None and self._driver in LiveDriver.alive:
            self._driver.kill()


def sent(address: str, topic: str, count: int, first: int = 0) -> "Counter[Row]":
    """`count` rows in that topic, each of them different, some without a key, as they must come out again."""
    rows: list[Row] = [
        (None if number % 10 == 3 else b"key-%d" % (number % 97), b"%07d of %s" % (number, topic.encode()))
        for number in range(first, first + count)
    ]
    with tfmq.Producer(address, timeout=READ_SECONDS) as producer:
        for key, value in rows:
            producer.send(topic, value, key=key)
        producer.flush()
    return Counter(rows)


def stored(address: str, topic: str) -> "Counter[Row]":
    """All rows that are in that topic, how often each."""
    return Counter(read(address, topic))


def read(address: str, topic: str) -> Iterator[Row]:
    """The rows of a topic that exists."""
    with tfmq.Consumer(address, topics=topic, start="earliest") as consumer:
        while batch := consumer.poll(0.0 if consumer.lag() == 0 else READ_SECONDS, 50_000):
            for message in batch:
                yield message.key, message.payload


def differing(found: "Counter[Row]", wanted: "Counter[Row]") -> dict[str, Any]:
    """What is lost, doubled and strange; {} if each row is there once. Row by row."""
    lost, more = wanted - found, found - wanted
    doubled = {row: found[row] for row in more if row in wanted}
    strange = {row: count for row, count in more.items() if row not in wanted}
    said = {"lost": lost, "doubled": doubled, "strange": strange}
    return {name: (len(rows), list(rows)[:3]) for name, rows in said.items() if rows}
