"""Ctrl-C at any line of what goes on beside: the consumer is as usable as before, as in a notebook that goes on."""

from pathlib import Path

import pytest

from tests.client.handling_rig import TOPIC, Bench
from tests.client.test_stop_anywhere import TEXTS, Lines
from tfmq.client.consumer import assignment, membership
from tfmq.client.consumer.positions import Positions
from tfmq.testing.broker import SimulatedBroker


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.long
def test_interrupted_while_it_joins_and_looks_for_its_partitions_it_reads_on(tmp_path: Path) -> None:
    files = frozenset((assignment.__file__, membership.__file__))
    with SimulatedBroker() as broker:
        bench = Bench(broker, tmp_path)
        bench.send(*TEXTS)
        at, going, stuck = 0, True, []
        while going:
            at, going = at + 1, False
            consumer = broker.consumer(TOPIC, group=f"g{at}")
            try:
                with Lines(at, interrupt, files, frozenset((Positions.add.__code__,))):
                    consumer.poll(timeout=0)
            except KeyboardInterrupt:
                going = True
            texts = [message.text for message in consumer.poll(timeout=30)]
            consumer.close()
            if going and texts != list(TEXTS):
                stuck.append((at, texts))
        assert stuck == []
        assert at > 50, "it went through the lines"
