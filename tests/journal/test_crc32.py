"""The checksums are those of the formats, whatever library computes them."""

import importlib
import sys
import zlib

import crcmod.predefined
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import journal.crc32
from journal.crc32 import crc32

crc_of_crcmod = crcmod.predefined.mkPredefinedCrcFun("crc-32")


@given(st.integers(0, 2000), st.integers(0, 7), st.integers(0, 2**32 - 1), st.randoms(use_true_random=False))
@example(1 << 20, 3, 0, None)
def test_a_checksum_is_the_one_that_crcmod_and_zlib_define(size: int, skipped: int, start: int, random: object) -> None:
    data = (random.randbytes(size) if hasattr(random, "randbytes") else bytes(range(256)) * (size // 256)) + b"end"
    for part in (data[skipped:], bytearray(data)[skipped:], memoryview(data)[skipped:]):
        assert crc32(part, start) == zlib.crc32(part, start)
    if len(data) < 3000:
        assert crc32(data) == crc_of_crcmod(data)
        assert crc32(data[skipped:], crc32(data[:skipped])) == crc_of_crcmod(data)


def test_without_the_faster_library_zlib_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zlib_ng", None)
    monkeypatch.setitem(sys.modules, "zlib_ng.zlib_ng", None)
    try:
        assert importlib.reload(journal.crc32).crc32 is zlib.crc32
    finally:
        monkeypatch.undo()
        assert importlib.reload(journal.crc32).crc32 is not zlib.crc32
