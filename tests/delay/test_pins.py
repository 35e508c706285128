"""Until when files must stay."""

from types import SimpleNamespace
from typing import Any

from tfmq.delay.storage_scheduler import FileReferences


def bucket(name: str) -> Any:
    return SimpleNamespace(name=name)


def test_what_was_near_at_a_spill_keeps_its_arrivals_until_it_fired() -> None:
    pins = FileReferences(100)
    pins.add_spill(500, 1000)
    pins.add_spill(900, 2000)
    assert (pins.offset, pins.oldest_window_end) == (100, 1000)
    assert pins.release_before(999) == []
    assert pins.offset == 100
    pins.release_before(1000)
    assert (pins.offset, pins.oldest_window_end) == (500, 2000)
    pins.release_before(5000)
    assert (pins.offset, pins.oldest_window_end) == (900, 0)


def test_a_split_bucket_goes_in_its_turn() -> None:
    pins = FileReferences(0)
    one, other = bucket("one"), bucket("other")
    pins.add_split(one, 1000)
    pins.add_spill(10, 1500)
    pins.add_split(other, 1200)
    assert pins.release_before(1200) == [one]
    assert pins.release_before(1499) == []
    assert pins.release_before(1500) == [other]
    assert pins.offset == 10
