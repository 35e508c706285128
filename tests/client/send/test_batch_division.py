"""The payloads of one `send_many`, and where batches end."""

import pytest

from tfmq.client.send.batch import CHUNK_COUNT, CHUNK_COUNT_MAX, PayloadChunker, batch_ends, with_delivery_time
from tfmq.client.send.delivery_time import IMMEDIATE, DeliveryTime
from tfmq.message import Message


def chunks(taking: PayloadChunker) -> list[list[object]]:
    found = []
    while True:
        taking.read()
        if not taking.chunk:
            return found
        found.append(taking.chunk)


def test_everything_is_taken_once_and_in_order() -> None:
    found = chunks(PayloadChunker(iter(range(3 * CHUNK_COUNT + 1))))
    assert [len(each) for each in found] == [CHUNK_COUNT] * 3 + [1]
    assert [item for each in found for item in each] == list(range(3 * CHUNK_COUNT + 1))


@pytest.mark.parametrize("wrong", ["text", b"bytes", {"a": 1}])
def test_one_payload_is_not_many(wrong: object) -> None:
    with pytest.raises(TypeError, match="use send, or a list"):
        PayloadChunker(wrong)  # type: ignore[arg-type]


def test_what_is_no_iterable_is_reported() -> None:
    with pytest.raises(TypeError, match="send_many takes an iterable of payloads, not 5"):
        PayloadChunker(5)  # type: ignore[arg-type]


def test_bytes_and_text_are_plain_and_nothing_else() -> None:
    taking = PayloadChunker([b"a", "ü"])
    taking.read()
    assert taking.as_bytes() == [b"a", "ü".encode()]
    taking = PayloadChunker([b"a", None])
    taking.read()
    assert taking.as_bytes() is None


@pytest.mark.parametrize(("size", "count"), [(1_000_000_000, 1), (50_000, 4750), (1, CHUNK_COUNT_MAX)])
def test_the_next_chunk_fills_a_batch(size: int, count: int) -> None:
    taking = PayloadChunker([b"x"] * CHUNK_COUNT)
    taking.read()
    taking.adjust_count(size, 500_000)
    assert taking.count == count


def test_batches_end_after_the_last_payload_that_fits() -> None:
    assert batch_ends([10, 10, 10], 100, 5) == [3]
    assert batch_ends([10, 10, 10], 30, 5) == [2, 3]
    assert batch_ends([100, 1, 1, 100], 30, 5) == [1, 3, 4]


def test_each_has_the_time_of_all_unless_it_has_its_own() -> None:
    assert (
        with_delivery_time(b"x", IMMEDIATE)
        == Message(b"x")
        == with_delivery_time(Message(b"x"), DeliveryTime(None, None))
    )
    assert with_delivery_time(b"x", DeliveryTime(5)) == Message(b"x", delay=5)
    assert with_delivery_time(Message(b"x", "k"), DeliveryTime(None, 7)) == Message(b"x", "k", deliver_at=7)
    for own in (Message(b"x", delay=1), Message(b"x", deliver_at=2)):
        assert with_delivery_time(own, DeliveryTime(5)) is own
