"""Records from wherever they lie, in the order that was asked for, and no more bytes than asked for."""

import random

import pytest

from tests.delay.desk import Desk, Handle
from tfmq.delay.buckets.format import BUCKET_ID_SHIFT
from tfmq.delay.record_reader import RecordReader


def payloads(fetched: object) -> list[bytes]:
    return [record[20:] for record in fetched.records]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def mixed() -> tuple[Desk, RecordReader, dict[int, int], list[Handle]]:
    """Half of the messages in a bucket, half in the arrivals; where each lies, by number."""
    desk = Desk()
    sent = desk.send([b"%d" % n + b"x" * (n % 300) for n in range(200)], 3_600_000)
    desk.advance(70)
    sent += desk.send([b"%d" % n + b"y" * (n % 300) for n in range(200, 400)], 20_000)
    places: dict[int, int] = {}
    for bucket in desk.buckets.live_buckets:
        for columns in desk.buckets.read_columns(bucket):
            for number, position in zip(columns.numbers, columns.positions, strict=True):
                places[number] = bucket.bucket_id << BUCKET_ID_SHIFT | position
    for batch in desk.queue._loader.read_arrivals(desk.buckets.spilled_offset, desk.landing.log.end_offset):
        for index, offset in enumerate(batch.offsets):
            places[batch.first_number + index] = offset
    return desk, RecordReader(desk.landing.log, desk.buckets), places, sent


@pytest.mark.parametrize("seed", range(20))
def test_in_any_order(mixed: tuple[Desk, RecordReader, dict[int, int], list[Handle]], seed: int) -> None:
    _, fetching, places, sent = mixed
    some = random.Random(seed).sample(sent, 50)
    if seed % 2:
        some.sort(key=lambda each: places[each.number])
    locators, numbers = [places[each.number] for each in some], [each.number for each in some]
    expected = [each.payload for each in some]
    assert payloads(fetching.read(locators, numbers, 1 << 20)) == expected
    assert payloads(fetching.read_cached(locators, numbers, 1 << 20)) == expected
    for most in (1, 100, 3000):
        found = payloads(fetching.read(locators, numbers, most))
        assert found == expected[: len(found)]
        assert 1 <= len(found) <= len(expected)
        assert sum(map(len, found[:-1])) <= most + 50 * 350


def test_no_row_is_no_record(mixed: tuple[Desk, RecordReader, dict[int, int], list[Handle]]) -> None:
    assert mixed[1].read([], [], 100).records == []
