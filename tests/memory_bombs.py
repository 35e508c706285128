"""msgpack that announces far more than it has, and a check that decoding it takes little memory."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

NESTED_LISTS = b"\xdd\x00\x01\x00\x00" * 200 + bytes(1 << 16)
"""200 lists inside each other, each of 65,536 items, which fit at each level, but not at all together: 105 MB."""


@contextmanager
def refused_in_little_memory(match: str, error: type[Exception] = ValueError) -> Iterator[None]:
    """Expect an error with `match`, and less than 2 MiB of memory until then."""
    tracemalloc.start()
    try:
        with pytest.raises(error, match=match):
            yield
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
