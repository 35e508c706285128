"""The CRC-32 of every value is zlib's, however they are summed."""

from zlib import crc32

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scale import seeded
from tfmq.arrow.checksums import COUNT_MIN, SHORT_SIZE_MAX, crc32_column


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
