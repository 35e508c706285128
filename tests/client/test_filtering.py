"""A user's filter over a batch."""

from typing import Any

import pytest

from tests.client.scripted import Broker, Script
from tfmq.client.consumer.fetcher import filter_batch
from tfmq.client.consumer.positions import Batch, ReadPosition
from tfmq.errors import BadRequest
from tfmq.offsets.storage import PartitionName

NAME = PartitionName("orders", 0)
END = ReadPosition(9999, 4, 1)


@pytest.fixture
def batch() -> Batch:
    broker = Broker()
    broker.create("orders").append(b"0", b"1", b"2", b"3")
    return Batch(NAME, Script(broker).messages(), END)


def test_what_it_says_yes_to_is_kept_and_the_place_behind_it_all_too(batch: Batch) -> None:
    found, again = filter_batch(batch, lambda message: int(message.text) % 2)
    assert ([message.text for message in found.messages], found.end_position, again) == (
        ["1", "3"],
        END,
        None,
    )


def test_what_stands_before_a_failure_comes_first(batch: Batch) -> None:
    def where(message: Any) -> bool:
        if message.text == "2":
            raise ValueError("planted")
        return message.text != "0"

    found, again = filter_batch(batch, where)
    assert [message.text for message in found.messages] == ["1"]
    assert again == found.end_position == (batch.messages[2].offset, 2, batch.messages[2].origin.epoch)
    with pytest.raises(ValueError, match="planted"):
        filter_batch(batch._replace(messages=batch.messages[2:]), where)


def test_an_interrupt_is_raised_at_once(batch: Batch) -> None:
    def where(message: Any) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        filter_batch(batch, where)


def test_what_is_to_be_awaited_is_no_yes(batch: Batch) -> None:
    async def wanted(message: Any) -> bool:
        return False

    with pytest.raises(BadRequest, match="but a coroutine"):
        filter_batch(batch, lambda message: wanted(message))
    found, _ = filter_batch(batch, lambda message: [] if message.text == "0" else "yes")
    assert [message.text for message in found.messages] == ["1", "2", "3"], "any yes is one"
