"""Sizes on the command line."""

from __future__ import annotations

import pytest

from tfmq.spark.pipelines.command import parse_size


def test_sizes_have_units_of_1024() -> None:
    sizes = ("65536", "64K", "64 KiB", "64kb", "4g", "1TiB")
    assert list(map(parse_size, sizes)) == [65536, 65536, 65536, 65536, 4 << 30, 1 << 40]


@pytest.mark.parametrize("text", ["", "0", "64X", "-1", "1.5M", "M"])
def test_what_is_no_size_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="is no size: write a number above 0 and K, M, G or T, as in 64M"):
        parse_size(text)
