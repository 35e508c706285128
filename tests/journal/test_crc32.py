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
from tests.scale import seeded

crc_of_crcmod = crcmod.predefined.mkPredefinedCrcFun("crc-32")


@given(st.binary(max_size=2000), st.integers(0, 7), st.integers(0, 2**32 - 1))
@example(bytes(range(256)) * 8, 3, 0)
def test_a_checksum_is_the_one_that_crcmod_and_zlib_define(data: bytes, skipped: int, start: int) -> None:
    for part in (data[skipped:], bytearray(data)[skipped:], memoryview(data)[skipped:]):
        assert crc32(part, start) == zlib.crc32(part, start)
    assert crc32(data) == crc32(data[skipped:], crc32(data[:skipped])) == crc_of_crcmod(data)


def test_a_large_checksum_is_that_of_zlib() -> None:
    data = seeded("checksums").randbytes(1 << 20)
    for begin in range(9):
        assert crc32(memoryview(data)[begin:]) == zlib.crc32(memoryview(data)[begin:])


def test_without_the_faster_library_zlib_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "zlib_ng.zlib_ng", None)
        assert importlib.reload(journal.crc32).crc32 is zlib.crc32
    assert importlib.reload(journal.crc32).crc32 is crc32, "where the library is installed it is used"
