"""Which blocks are proven: exactly those that were added, from any place inside, and a bounded number of them."""

import pytest

from tests.scale import scaled, seeded
from tfmq.delay.arrivals import log
from tfmq.delay.arrivals.log import VerifiedBlockCache


def test_each_byte_of_a_proven_block_and_no_other() -> None:
    generator, found = seeded("proven blocks"), VerifiedBlockCache()
    blocks = [(start, start + generator.randrange(1, 90)) for start in range(100, 100 * scaled(300), 100)]
    generator.shuffle(blocks)
    known: dict[int, int] = {}
    for start, end in blocks:
        assert found.end_of(start) == 0
        found.add(start, end)
        found.add(start, end)
        known[start] = end
        some = generator.randrange(0, 30_000)
        in_block = next((end for start, end in known.items() if start <= some < end), 0)
        assert found.end_of(some) == in_block
    for start, end in blocks:
        assert found.end_of(start) == found.end_of(end - 1) == end
        assert found.end_of(start - 1) == found.end_of(end) == 0


def test_with_too_many_all_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "VERIFIED_BLOCKS_MAX", 3)
    found = VerifiedBlockCache()
    for start in (30, 10, 20):
        found.add(start, start + 5)
    assert [found.end_of(start) for start in (10, 20, 30, 40)] == [15, 25, 35, 0]
    found.add(40, 45)
    assert [found.end_of(start) for start in (10, 20, 30, 40)] == [0, 0, 0, 45]
