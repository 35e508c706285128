"""A user's filter over a batch."""

from typing import Any

import pytest

from tests.client.scripted import Broker, Script
from tfmq.client.consumer.fetcher import filtered
from tfmq.client.consumer.positions import Batch, Place
from tfmq.errors import BadRequest
from tfmq.offsets.storage import PartitionName

NAME = PartitionName("orders", 0)
END = Place(9999, 4, 1)


@pytest.fixture
def batch() -> Batch:
    broker = Broker()
    broker.create("orders").append(b"0", b"1", b"2", b"3")
    return Batch(NAME, Script(broker).messages(), END)


def test_what_it_says_yes_to_is_kept_and_the_place_behind_it_all_too(batch: Batch) -> None:
    found, again = filtered(batch, lambda message: int(message.text) % 2)
    assert ([message.text for message in found.messages], found.following, again) == (["1", "3"], END, None)


def test_what_stands_before_a_failure_comes_first(batch: Batch) -> None:
    def where(message: Any) -> bool:
        if message.text == "2":
            raise ValueError("planted")
        return message.text != "0"

    found, again = filtered(batch, where)
    assert [message.text for message in found.messages] == ["1"]
    assert again == found.following == (batch.messages[2].offset, 2, batch.messages[2].origin.epoch)
    with pytest.raises(ValueError, match="planted"):
        filtered(batch._replace(messages=batch.messages[2:]), where)


def test_an_interrupt_is_raised_at_once(batch: Batch) -> None:
    def where(message: Any) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        filtered(batch, where)


def test_what_is_to_be_awaited_is_no_yes(batch: Batch) -> None:
    async def wanted(message: Any) -> bool:
        return False

    with pytest.raises(BadRequest, match="but a coroutine"):
        filtered(batch, lambda message: wanted(message))
    found, _ = filtered(batch, lambda message: [] if message.text == "0" else "yes")
    assert [message.text for message in found.messages] == ["1", "2", "3"], "any yes is one"
