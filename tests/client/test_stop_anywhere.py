"""`stop` at any line of the client, as a signal handler or another thread calls it: nothing that was not handed out is
processed, so nothing is passed over."""

import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import tfmq
from tests.client.handling_rig import TOPIC, Bench
from tfmq.client.consumer import positions
from tfmq.client.consumer.core import ConsumerCore
from tfmq.client.worker.runner import HandlerRunner
from tfmq.testing.broker import SimulatedBroker

FILES = frozenset(module.__file__ for module in (positions, positions))
CODES = frozenset(each.__code__ for each in (ConsumerCore._decode_next_batch, HandlerRunner._enqueue_next_batch))
TEXTS = ("a", "b")


class Lines:
    """Counts the lines that run there (of itself: where messages are taken and handed out), and calls `then` at number
    `at`."""

    def __init__(
        self,
        at: int,
        then: Callable[[], None],
        files: Collection[str | None] = FILES,
        codes: Collection[CodeType] = CODES,
    ) -> None:
        self.count = 0
        self._at, self._then = at, then
        self._files, self._codes = files, codes

    def __enter__(self) -> "Lines":
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in self._files and frame.f_code not in self._codes:
            return None
        if event == "line":
            self.count += 1
            if self.count == self._at:
                self._then()
        return self._trace


def in_a_loop(consumer: tfmq.Consumer[Any], handled: list[str]) -> None:
    with consumer:
        for message in consumer:
            handled.append(message.text)
            if len(handled) == len(TEXTS):
                break


def by_poll(consumer: tfmq.Consumer[Any], handled: list[str]) -> None:
    with consumer:
        for _ in range(3):
            handled += [message.text for message in consumer.poll(timeout=0.1, max_messages=1)]


def by_run(consumer: tfmq.Consumer[Any], handled: list[str]) -> None:
    def handle(message: Any) -> None:
        handled.append(message.text)
        if len(handled) == len(TEXTS):
            consumer.stop()

    consumer.run(handle, signals=False)


@pytest.mark.long
@pytest.mark.parametrize("read", [in_a_loop, by_poll, by_run])
def test_what_was_not_handed_out_before_a_stop_is_not_acked(
    tmp_path: Path, read: Callable[[tfmq.Consumer[Any], list[str]], None]
) -> None:
    with SimulatedBroker() as broker:
        bench = Bench(broker, tmp_path)
        bench.send(*TEXTS)
        at, last, passed_over = 1, 2, []
        while at < last:
            consumer = broker.consumer(TOPIC, group=f"g{at}", dead_letters=None)
            handled: list[str] = []
            with Lines(at, consumer.stop) as lines:
                read(consumer, handled)
            again = broker.consumer(TOPIC, group=f"g{at}", dead_letters=None)
            rest = [message.text for message in again.poll(timeout=0.1)]
            again.close()
            if sorted(set(handled + rest)) != sorted(TEXTS):
                passed_over.append((at, handled, rest))
            at, last = at + 1, lines.count + 1
        assert passed_over == []
        assert at > 50, "it went through the lines"
