"""What one effect brings."""

import pytest

from journal.record.block_trailer import BlockTrailer, encode_trailer
from journal.record.format import ATTRIBUTE_SIZE, BadRecord, make_id, make_log_id, make_record
from tfmq.delay.rows import attribute_of, join_records

KEY = make_log_id(16, 0)


def record(number: int, size: int = 50, payload: bytes | None = None) -> bytes:
    return make_record(
        payload if payload is not None else b"%d" % number + b"." * size, make_id(1000, number)
    )


def test_records_become_one_batch_cut_into_blocks() -> None:
    records = [record(n, 1000) for n in range(200)]
    piece = join_records(records, KEY, 1 << 20)
    (batch,) = piece.batches
    assert (batch.data, batch.count, piece.rows, piece.damaged) == (b"".join(records), 200, 200, 0)
    assert sum(size for size, _, _ in batch.blocks) == piece.size_bytes == len(batch.data)
    assert max(size for size, _, _ in batch.blocks) <= 64 << 10
    assert (batch.producer_id, batch.sequence) == (1000, 0)


def test_no_more_than_fits_but_at_least_one() -> None:
    records = [record(n, 1000) for n in range(10)]
    assert join_records(records, KEY, 3000).rows == 2
    assert join_records(records, KEY, 10).rows == 1
    assert join_records([None, None, *records], KEY, 10).rows == 3


def test_damaged_ones_are_left_out_and_counted() -> None:
    records = [record(0), None, record(2), None]
    piece = join_records(records, KEY, 1 << 20)
    assert (piece.rows, piece.damaged, piece.batches[0].count) == (4, 2, 2)
    assert join_records([None], KEY, 100) == ((), 1, 0, 1)


def test_it_ends_where_two_records_would_look_like_a_control_record() -> None:
    header = encode_trailer(KEY, BlockTrailer(1, 100, 0, 0, 0, 0, 0, 0))[:20]
    records = [record(0), record(1, payload=b"a" + header[:16]), record(2, payload=b"x" * 0x40), record(3)]
    assert join_records(records, KEY, 1 << 20).rows == 2
    assert join_records(records[2:], KEY, 1 << 20).rows == 2
    assert join_records(records, make_log_id(17, 0), 1 << 20).rows == 4


def test_the_attribute_of_a_record() -> None:
    assert attribute_of(make_record(b"payload", 1, 0, b"attribute")) == b"attribute"
    assert attribute_of(make_record(b"payload", 1)) is None
    broken = bytearray(make_record(b"payload", 1, 0, b"attribute"))
    broken[20:24] = ATTRIBUTE_SIZE.pack(1000)
    with pytest.raises(BadRecord):
        attribute_of(bytes(broken))
