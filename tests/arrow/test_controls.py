"""Control records as columns: each of their fields is read, and each that can be wrong is looked at."""

from typing import Any
from zlib import crc32

import numpy as np
import pytest

from journal.record import block_trailer
from journal.record.block_trailer import TRAILER_SIZE, decode_trailer, encode_trailer
from tests.client.blocks import Bytes
from tfmq.arrow.decoder import TRAILER, BlockTrailers

FIRST = 500


def log() -> Bytes:
    made = Bytes(first_offset=FIRST)
    made.append(b"a", b"b")
    made.append(b"c")
    return made


def controls(body: bytes) -> BlockTrailers:
    return BlockTrailers(body, np.array([42, 42 + TRAILER_SIZE + 21]))


def changed(name: str, value: Any, log_id: int | None = None) -> bool:
    """Whether all hold after the second control record says something else."""
    made = log()
    at = 42 + TRAILER_SIZE + 21
    control = decode_trailer(made.body(), at, made.log_id)
    body = made.body()[:at] + encode_trailer(log_id or made.log_id, control._replace(**{name: value}))
    return controls(body).match(FIRST, made.log_id, [2, 1])


def test_the_fields_are_those_of_the_format() -> None:
    assert TRAILER.itemsize == block_trailer.TRAILER.size == TRAILER_SIZE
    values = tuple(range(1, 19))
    row = np.frombuffer(block_trailer.TRAILER.pack(*values), TRAILER)[0]
    assert tuple(int(each) for each in row) == values


def test_right_ones_hold_and_cover_their_blocks() -> None:
    made = log()
    found = controls(made.body())
    assert found.match(FIRST, made.log_id, [2, 1]) and found.checksums_match()
    assert found.column("append_time").tolist() == [1_700_000_000_000] * 2
    assert found.starts.tolist() == [0, 142]


@pytest.mark.parametrize(
    ("name", "value"), [("records", 2), ("size", 20), ("offset", 500), ("first_ordinal", 3)]
)
def test_what_contradicts_the_bytes_does_not_hold(name: str, value: int) -> None:
    assert not changed(name, value)


def test_what_says_nothing_of_the_bytes_holds() -> None:
    assert changed("epoch", 7) and changed("durable_offset", 9) and changed("more_follows", True)


def test_another_logs_does_not_hold() -> None:
    made = log()
    assert changed("epoch", 1, made.log_id) and not changed("epoch", 1, made.log_id + 1)


@pytest.mark.parametrize("field", ["version", "bits", "length"])
def test_another_version_unknown_bits_and_another_length_do_not_hold(field: str) -> None:
    made = log()
    body = bytearray(made.body())
    rows = np.frombuffer(body, TRAILER, 1, 42)
    changed_row = rows.copy()
    changed_row[field] = 2
    raw = bytearray(changed_row.tobytes())

    raw[4:8] = crc32(raw[20:]).to_bytes(4, "big")
    body[42 : 42 + TRAILER_SIZE] = raw
    assert not controls(bytes(body)).match(FIRST, made.log_id, [2, 1])


def test_a_wrong_checksum_does_not_hold() -> None:
    made = log()
    body = bytearray(made.body())
    body[-1] ^= 1
    assert not controls(bytes(body)).match(FIRST, made.log_id, [2, 1])


def test_other_bytes_are_not_covered() -> None:
    made = log()
    body = bytearray(made.body())
    body[20] ^= 1
    assert not controls(bytes(body)).checksums_match()


def test_ordinals_of_blocks_must_be_those_that_are_there() -> None:
    made = log()
    assert not controls(made.body()).match(FIRST, made.log_id, [2, 2])
