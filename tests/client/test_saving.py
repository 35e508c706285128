"""Saves: one at a time, newest last, and a store's failure told once."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.client.scripted import Broker, Script
from tfmq.errors import StoreFailed, TimedOut
from tfmq.offsets.storage import PartitionName, StoredOffset

NAME = PartitionName("orders", 0)


class Memory:
    """A storage of a user's own."""

    def __init__(self) -> None:
        self.kept: dict[PartitionName, StoredOffset] = {}
        self.fail: Exception | None = None
        self.closed = False

    def read(self, group: str, partitions: Sequence[PartitionName]) -> Mapping[PartitionName, StoredOffset]:
        return {name: self.kept[name] for name in partitions if name in self.kept}

    def save(self, group: str, generation: int, offsets: Mapping[PartitionName, StoredOffset]) -> None:
        if self.fail is not None:
            raise self.fail
        self.kept.update(offsets)

    def close(self) -> None:
        self.closed = True


def consumer(broker: Broker, **arguments: Any) -> Script:
    log = broker.create("orders")
    for n in range(4):
        log.append(b"%d" % n)
    return Script(broker, group="g", **arguments)


def test_a_storage_of_ones_own_is_used_and_closed() -> None:
    store, broker = Memory(), Broker()
    script = consumer(broker, offsets=store)
    script.poll(count=2)
    script.commit()
    script.close()
    place = store.kept[NAME]
    assert (place.offset, place.generation, place.epoch) == (
        broker.topics["orders"][1][0].pieces[2].offset,
        1,
        1,
    )
    assert store.closed
    assert Script(broker, group="g", offsets=store).poll() == [b"2", b"3"]


def test_what_a_store_raises_in_the_background_is_told_by_the_next_call_and_tried_again() -> None:
    store = Memory()
    script = consumer(Broker(), offsets=store)
    script.poll(count=2)
    script.poll(count=1)
    store.fail = OSError("planted")
    script.pass_time(6)
    with pytest.raises(OSError, match="planted"):
        script.poll()
    store.fail = None
    assert script.poll() == [b"3"]
    script.commit()
    assert NAME in store.kept


def test_a_store_that_does_not_answer_for_a_while_is_tried_again_and_nobody_is_bothered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Memory()
    script = consumer(Broker(), offsets=store)
    script.poll(count=2)
    script.poll(count=1)
    store.fail = StoreFailed("planted")
    script.pass_time(6)
    assert script.poll() == [b"3"]
    assert "not saved, trying again" in caplog.text and store.kept == {}
    store.fail = None
    script.pass_time(6)
    assert NAME in store.kept


def test_a_save_waits_for_the_one_before_and_takes_the_places_that_hold_then() -> None:
    broker = Broker()
    script = consumer(broker)
    script.poll(count=1)
    script.commit()
    first = script.core.commit(None)
    script.core.positions.ack_delivered()
    script.poll(count=2)
    next(first)
    second = script.core.commit(None)
    next(second)
    assert len(broker.sent(type(broker.requests[-1]))) == 2, "the second is not on its way yet"
    script.run(first)
    script.run(second)
    assert broker.saved("g") == broker.topics["orders"][1][0].pieces[3].offset


def test_a_save_that_never_gets_its_turn_ends_in_time() -> None:
    broker = Broker()
    script = consumer(broker, timeout=1)
    script.poll(count=1)
    stuck = script.core.commit(None)
    next(stuck)
    broker.down = True
    script.link.connection_count = 1
    with pytest.raises(TimedOut):
        script.commit()
