"""The CRC-32 of every value is zlib's, however they are summed."""

from __future__ import annotations

from zlib import crc32

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scale import seeded
from tfmq.arrow.partitioner import COUNT_MIN, SHORT_SIZE_MAX, crc32_column, partition_of
from tfmq.client.send.partitioner import KeyHash
from tfmq.errors import BadRequest
from tfmq.message import Message, Partition


@given(st.lists(st.binary(max_size=SHORT_SIZE_MAX), min_size=1, max_size=40), st.integers(0, 3))
def test_values_of_any_length(values: list[bytes], skipped: int) -> None:
    values = values * COUNT_MIN
    column = pa.array(values, pa.binary())[skipped:]
    assert crc32_column(column).tolist() == [crc32(value) for value in values[skipped:]]


@pytest.mark.parametrize("count", [0, 1, COUNT_MIN - 1, COUNT_MIN, 8192, 20_000])
@pytest.mark.parametrize("size", [0, 8, SHORT_SIZE_MAX, SHORT_SIZE_MAX + 1])
def test_values_of_one_length(count: int, size: int) -> None:
    random = seeded("checksums", count, size)
    values = [random.randbytes(size) for _ in range(count)]
    assert crc32_column(pa.array(values, pa.binary())).tolist() == [crc32(value) for value in values]


# Rows go to the partitions to which the client's selector would send them.

KEYS = st.lists(st.none() | st.binary(max_size=5) | st.sampled_from([b"a", b"b"]), min_size=1, max_size=30)


@given(KEYS, st.integers(1, 9), st.integers(0, 20))
def test_keys_go_where_the_client_sends_them_and_the_rest_in_turn(
    keys: list[bytes | None], count: int, first: int
) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array(keys, pa.binary())], ["key"])
    found = partition_of(batch, count, first)
    assert found.type == pa.int32() and found.null_count == 0
    partitions = [Partition("t", n) for n in range(count)]
    selector, turn = KeyHash(), first
    for key, partition in zip(keys, found.to_pylist(), strict=True):
        if key is None:
            assert partition == turn % count
            turn += 1
        else:
            assert partition == selector.get_partition("t", partitions, Message(b"", key)).number


def test_text_keys_go_as_their_bytes_do() -> None:
    names = ["ä", "b", "c"]
    text = partition_of(pa.RecordBatch.from_pydict({"key": names}), 7)
    assert text == partition_of(pa.RecordBatch.from_pydict({"key": [name.encode() for name in names]}), 7)


def test_without_a_column_of_keys_all_take_turns() -> None:
    batch = pa.RecordBatch.from_pydict({"value": [b""] * 5})
    assert partition_of(batch, 3, 2).to_pylist() == [2, 0, 1, 2, 0]
    empty = pa.RecordBatch.from_arrays([pa.nulls(4)], ["key"])
    assert partition_of(empty, 3).to_pylist() == [0, 1, 2, 0]


def test_other_keys_are_refused() -> None:
    with pytest.raises(BadRequest, match="key must be binary or string, not int64"):
        partition_of(pa.RecordBatch.from_pydict({"key": [1]}), 3)
