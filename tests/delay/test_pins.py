"""Until when files must stay."""

from types import SimpleNamespace
from typing import Any

from tfmq.delay.storage_scheduler import Pins


def bucket(name: str) -> Any:
    return SimpleNamespace(name=name)


def test_what_was_near_at_a_spill_keeps_its_arrivals_until_it_fired() -> None:
    pins = Pins(100)
    pins.spilled(500, 1000)
    pins.spilled(900, 2000)
    assert (pins.offset, pins.next_horizon) == (100, 1000)
    assert pins.release(999) == []
    assert pins.offset == 100
    pins.release(1000)
    assert (pins.offset, pins.next_horizon) == (500, 2000)
    pins.release(5000)
    assert (pins.offset, pins.next_horizon) == (900, 0)


def test_a_split_bucket_goes_in_its_turn() -> None:
    pins = Pins(0)
    one, other = bucket("one"), bucket("other")
    pins.split(one, 1000)
    pins.spilled(10, 1500)
    pins.split(other, 1200)
    assert pins.release(1200) == [one]
    assert pins.release(1499) == []
    assert pins.release(1500) == [other]
    assert pins.offset == 10
