"""Positions of records by columns and by walking are those that the journal walks to."""

import random

import pytest

from journal.record.batch import BLOCK_SIZE_MAX
from journal.record.format import header_positions, make_record
from tests.client.blocks import Bytes
from tfmq.arrow.decoder import RUN_COUNT_MIN, BrokenChain, record_positions


def log_of(*sizes: list[int]) -> bytes:
    log = Bytes()
    for block in sizes:
        log.append(*[b"x" * size for size in block])
    return log.body()


def test_rows_of_one_size_and_mixed_blocks_in_any_order() -> None:
    rng = random.Random(3)
    equal = [
        [n] * count
        for n, count in ((0, 40), (5, RUN_COUNT_MIN), (5, RUN_COUNT_MIN - 1), (80, 500), (80, 500))
    ]
    mixed = [[rng.randrange(60) for _ in range(rng.randrange(1, 400))] for _ in range(10)]
    nearly = [[7] * 100 + [8], [8] + [7] * 100, [7] * 100 + [8] + [7] * 100]
    blocks = equal + mixed + nearly
    rng.shuffle(blocks)
    body = log_of(*blocks)
    assert record_positions(body).tolist() == header_positions(body)
    assert record_positions(memoryview(body)).tolist() == header_positions(body)


def test_records_of_the_size_of_a_control_record_are_told_from_it() -> None:
    body = log_of([80] * 50, [80] * 50, [80])
    assert record_positions(body).tolist() == header_positions(body)


def test_blocks_as_large_as_they_get() -> None:
    body = log_of([180] * (BLOCK_SIZE_MAX // 200), [0] * (BLOCK_SIZE_MAX // 20), [300_000], [180] * 20)
    assert record_positions(body).tolist() == header_positions(body)


@pytest.mark.parametrize("size", [1, 19, 20, 24, 501, 515])
def test_bytes_that_end_inside_a_record_have_no_chain(size: int) -> None:
    with pytest.raises(BrokenChain):
        record_positions((make_record(b"x" * 5, 1 << 24) * 100)[:size])


def test_nothing_has_no_records() -> None:
    assert record_positions(b"").tolist() == []
