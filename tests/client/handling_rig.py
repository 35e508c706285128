"""A simulated broker with a topic, and consumers that run handlers on it: verbs for tests of `run`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tfmq
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.dead_letters import Desk
from tfmq.testing.broker import SimulatedBroker

Handler = Callable[[ReceivedMessage[Any]], Any]
GROUP = "billing"
TOPIC = "orders"


class Bench:
    """`send`, then `run` a handler; `handled` are the texts that it was called with, in order."""

    def __init__(self, broker: SimulatedBroker, folder: Path, partitions: int = 1) -> None:
        self.broker = broker
        self.store = str(folder / "dead.db")
        self.handled: list[str] = []
        self.offsets: dict[str, int] = {}
        self.consumer: tfmq.Consumer[Any] | None = None
        with broker.admin() as admin:
            admin.create_topic(TOPIC, partitions=partitions)

    def send(self, *texts: str, partition: int = 0, **fields: Any) -> None:
        with self.broker.producer() as producer:
            for text in texts:
                result = producer.send(TOPIC, text, partition=partition, **fields).result()
                assert result.offset is not None
                self.offsets[text] = result.offset

    def open(self, **options: Any) -> tfmq.Consumer[Any]:
        reported = {"group": GROUP, "dead_letters": self.store, **options}
        self.consumer = self.broker.consumer(reported.pop("topics", TOPIC), **reported)
        return self.consumer

    def run(
        self, handler: Handler | None = None, until: int = 0, run: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Until `until` calls returned or failed, or something is raised."""
        consumer = self.open(**options)
        calls = 0

        def handle(message: ReceivedMessage[Any]) -> None:
            nonlocal calls
            calls += 1
            self.handled.append(message.text)
            if calls == until:
                consumer.stop()
            if handler is not None:
                handler(message)

        consumer.run(handle, **(run or {}))

    def saved(self, partition: int = 0) -> int | None:
        """The offset that the group has; None: none."""
        with self.broker.admin() as admin:
            for each in admin.group(GROUP).offsets:
                if (each["topic"], each["partition"]) == (TOPIC, partition):
                    return int(each["offset"]) if each["offset"] >= 0 else None
        return None

    def place(self, text: str) -> int:
        """The offset of that message."""
        return self.offsets[text]

    def letters(self) -> dict[str, Any]:
        """Dead letters by their text."""
        with Desk(self.store) as desk:
            return {each.message().text: each for each in desk.letters(whole=True)}
