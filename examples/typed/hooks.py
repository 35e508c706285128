"""Code around every send and every handling: a count of what was sent, and how long handlers take."""

import time
from collections import Counter
from typing import Any, assert_type

import tfmq


class Count(tfmq.Hook):
    """How many messages went to each topic, and how many did not get there."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    def before_send(self, topic: str, message: tfmq.Message) -> tfmq.Message:
        return message._replace(properties={**(message.properties or {}), "from": "the example"})

    def after_send(
        self, topic: str, message: tfmq.Message, result: tfmq.SendResult | None, error: tfmq.TfmqError | None
    ) -> None:
        (self.sent if error is None else self.failed)[topic] += 1


class Stopwatch(tfmq.Hook):
    """How long the last handler took."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def before_handle(self, message: Any) -> None:
        self._begun = time.monotonic()

    def after_handle(self, message: Any, error: BaseException | None) -> None:
        self.seconds = time.monotonic() - self._begun


def main() -> None:
    count, watch = Count(), Stopwatch()
    with tfmq.Producer(hooks=[count]) as producer:
        producer.send("hooked", "hello").result()
    seen: list[str | None] = []
    consumer = tfmq.Consumer(topics="hooked", hooks=[watch])
    assert_type(consumer, tfmq.Consumer[Any])

    @consumer.on("hooked")
    def handle(message: tfmq.ReceivedMessage) -> None:
        seen.append(message.properties.get("from"))
        consumer.stop()

    with consumer:
        consumer.run()
    print(dict(count.sent), dict(count.failed), seen, watch.seconds < 10)


if __name__ == "__main__":
    main()
