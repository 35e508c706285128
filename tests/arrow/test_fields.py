"""Numbers and byte strings gathered out of a buffer."""

import itertools

import numpy as np
import pyarrow as pa

from tfmq.arrow.attributes import column_edges, every_second_mask, gather_bytes, read_numbers, validity_bitmap

DATA = bytes(range(40))


def test_numbers_are_big_endian_at_any_place() -> None:
    assert read_numbers(DATA, np.array([0, 1, 36]), "u4").tolist() == [0x00010203, 0x01020304, 0x24252627]
    assert read_numbers(DATA, np.array([32]), "u8").tolist() == [0x2021222324252627]
    assert read_numbers(b"abc", np.array([], dtype=np.int64), "u4").tolist() == []


def test_byte_strings_are_what_lies_between_begin_and_end() -> None:
    begins, ends = np.array([2, 5, 5, 38]), np.array([5, 5, 9, 40])
    assert gather_bytes(DATA, begins, ends).to_pylist() == [DATA[2:5], b"", DATA[5:9], DATA[38:40]]
    valid = np.array([True, False, True, True])
    found = gather_bytes(memoryview(DATA), begins, ends, valid)
    assert found.to_pylist() == [DATA[2:5], None, DATA[5:9], DATA[38:40]]
    found.validate(full=True)
    assert gather_bytes(DATA, begins[:0], ends[:0]).to_pylist() == []


def test_byte_strings_outlive_the_buffer() -> None:
    buffer = bytearray(DATA)
    found = gather_bytes(buffer, np.array([1]), np.array([4]))
    buffer[:] = bytes(40)
    assert found.to_pylist() == [b"\x01\x02\x03"]


def test_every_second_and_bitmaps_at_any_count() -> None:
    for count in (1, 7, 8, 9, 17):
        assert every_second_mask(count).to_pylist() == [n % 2 == 0 for n in range(count)]
    valid = np.array([True, False, False, True, True, True, False, True, True])
    column = pa.BooleanArray.from_buffers(pa.bool_(), 9, [None, validity_bitmap(valid)])
    assert column.to_pylist() == valid.tolist()


def test_the_edges_of_a_slice_are_its_own() -> None:
    data, edges = column_edges(pa.array([b"ab", b"c", b"", b"def"])[1:])
    assert [bytes(data[begin:end]) for begin, end in itertools.pairwise(edges)] == [
        b"c",
        b"",
        b"def",
    ]
