"""The format of buckets: golden bytes, bounds of everything that is read, every bit of it flipped."""

from __future__ import annotations

import re
from array import array

import pytest

from journal.errors import Corrupt, NewerFormat
from journal.record.format import make_id, make_log_id, make_record
from tests import paths
from tests.scale import scaled, seeded
from tfmq.delay.buckets.format import (
    CHUNK_SIZE,
    CRC_SIZE,
    HEAD_SIZE,
    LEVELS,
    ChunkColumns,
    MessageColumns,
    StoreIdentity,
    Target,
    TimeSpan,
    bucket_name,
    checksum_seed,
    decode_chunk,
    decode_columns,
    decode_head,
    encode_chunk,
    encode_head,
    parse_bucket_name,
    with_checksums,
)
from tfmq.delay.buckets.recovery import BucketCheckpoint, ListedBucket, decode_checkpoint, encode_checkpoint
from tfmq.delay.due_time import DUE_MAX

ROOT = paths.ROOT
GOLDEN = bytes.fromhex((ROOT / "tests" / "golden" / "bucket.hex").read_text())

IDENTITY = StoreIdentity(5, 0x0102030405060708)
SPAN = TimeSpan(1_700_000_038_912, 16)
SEED = checksum_seed(IDENTITY, SPAN)
RECORDS = [make_record(b"hello", make_id(70, 5)), make_record(b"again", make_id(70, 6))]
TABLE = [Target(make_log_id(9, 3), "orders"), Target(make_log_id(10, 0), "bills")]
MESSAGES = MessageColumns(
    array("Q", [SPAN.start + 88, SPAN.start + 1]), array("Q", [12, 13]), array("I", [0, 1]),
    array("I", map(len, RECORDS)), b"\0\1", TABLE, with_checksums(RECORDS, array("I", map(len, RECORDS)), 12),
)  # fmt: skip


def file_bytes() -> bytes:
    buffers, _ = encode_chunk(MESSAGES, HEAD_SIZE, 1000, SEED)
    return encode_head(IDENTITY, SPAN) + b"".join(buffers)


FILE = file_bytes()
CHECKPOINT = BucketCheckpoint(
    IDENTITY, 1000, 14, 1_700_000_000_000, [ListedBucket(SPAN, len(FILE), 2, 1)], b"note", 1100
)


def read(data: bytes) -> ChunkColumns:
    """What a reader makes of a whole file with one chunk."""
    assert decode_head(data[:HEAD_SIZE], "f") == (IDENTITY, SPAN)
    chunk = decode_chunk(data[HEAD_SIZE : HEAD_SIZE + CHUNK_SIZE], HEAD_SIZE, SEED, "f")
    assert chunk.next_position == len(data)
    return decode_columns(data[HEAD_SIZE + CHUNK_SIZE : chunk.records_position], chunk, SPAN, SEED, "f")


def test_the_bytes_are_those_of_the_golden_file() -> None:
    assert FILE + encode_checkpoint(CHECKPOINT) == GOLDEN


def test_the_page_shows_the_golden_file() -> None:
    page = (ROOT / "docs" / "formats" / "bucket.md").read_text()
    (shown,) = re.findall(r"```hex\n(.*?)```", page, re.DOTALL)
    assert bytes.fromhex(shown) == GOLDEN


def test_the_golden_file_is_read() -> None:
    columns = read(GOLDEN[: len(FILE)])
    assert columns[:5] == MESSAGES[:5] and columns.table == TABLE
    for position, record in zip(columns.positions, RECORDS, strict=True):
        assert GOLDEN[position + CRC_SIZE :].startswith(record)
    assert decode_checkpoint(GOLDEN[len(FILE) :], 0, "c") == CHECKPOINT


def test_names_say_the_span_and_nothing_else_is_a_name() -> None:
    assert bucket_name(SPAN) == "0000018bcfe60000-16.bucket"
    for exponent in LEVELS:
        for start in (0, 1 << exponent, DUE_MAX >> exponent << exponent):
            assert parse_bucket_name(bucket_name(TimeSpan(start, exponent))) == (start, exponent)
    for name in (
        "0000018bcfe60001-16.bucket", "0000018bcfe60000-17.bucket", "0000018bcfe60000-16.bucket.damaged",
        "0000018BCFE60000-16.bucket", "18bcfe60000-16.bucket", "ffffffffffff0000-16.bucket", "checkpoint",
    ):  # fmt: skip
        assert parse_bucket_name(name) is None, name


def test_a_flipped_bit_in_head_or_columns_is_never_taken_for_something_else() -> None:
    end = len(FILE) - sum(map(len, RECORDS)) - CRC_SIZE * len(RECORDS)
    for bit in range(8 * end):
        data = bytearray(FILE)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises((Corrupt, NewerFormat)):
            read(bytes(data))


def test_a_cut_file_is_damage_at_every_length() -> None:
    end = len(FILE) - sum(map(len, RECORDS)) - CRC_SIZE * len(RECORDS)
    for size in range(end):
        data = FILE[:size]
        with pytest.raises(Corrupt):
            decode_head(data, "f")
            chunk = decode_chunk(data[HEAD_SIZE : HEAD_SIZE + CHUNK_SIZE], HEAD_SIZE, SEED, "f")
            decode_columns(data[HEAD_SIZE + CHUNK_SIZE : chunk.records_position], chunk, SPAN, SEED, "f")


def test_noise_is_refused_and_never_anything_but_refused() -> None:
    generator = seeded("bucket noise")
    for _ in range(scaled(3000)):
        data = generator.randbytes(generator.randrange(200))
        with pytest.raises(Corrupt):
            decode_head(data, "f")
        with pytest.raises(Corrupt):
            decode_chunk(data[:CHUNK_SIZE], 36, SEED, "f")
        with pytest.raises(Corrupt):
            decode_checkpoint(data, 0, "c")


def test_a_chunk_is_none_at_another_place_or_in_another_file() -> None:
    head = FILE[HEAD_SIZE : HEAD_SIZE + CHUNK_SIZE]
    for position, seed in (
        (HEAD_SIZE + 1, SEED),
        (HEAD_SIZE, checksum_seed(IDENTITY, TimeSpan(SPAN.start, 10))),
        (HEAD_SIZE, checksum_seed(StoreIdentity(5, 9), SPAN)),
    ):
        with pytest.raises(Corrupt, match="invalid head"):
            decode_chunk(head, position, seed, "f")


@pytest.mark.parametrize(
    "wrong",
    [
        MESSAGES._replace(dues=array("Q", [SPAN.start, SPAN.end])),
        MESSAGES._replace(dues=array("Q", [SPAN.start, SPAN.start - 1])),
        MESSAGES._replace(targets=array("I", [0, 2])),
        MESSAGES._replace(sizes=array("I", [10, 40])),
        MESSAGES._replace(table=[]),
    ],
    ids=["late", "early", "target", "size", "table"],
)
def test_columns_that_do_not_add_up_are_damage_whatever_their_checksum(wrong: MessageColumns) -> None:
    buffers, chunk = encode_chunk(wrong, HEAD_SIZE, 1000, SEED)
    with pytest.raises(Corrupt, match="2 messages are lost") as caught:
        decode_columns(buffers[1], chunk, SPAN, SEED, "f")
    assert (caught.value.first, caught.value.next) == (chunk.position, chunk.next_position)


def test_sizes_that_do_not_make_up_the_chunk_are_damage() -> None:
    buffers, chunk = encode_chunk(MESSAGES, HEAD_SIZE, 1000, SEED)
    with pytest.raises(Corrupt, match="sizes are inconsistent"):
        decode_columns(buffers[1], chunk._replace(size=chunk.size + 1), SPAN, SEED, "f")


def test_a_newer_version_is_named_as_that() -> None:
    from zlib import crc32

    fields = bytearray(encode_head(IDENTITY, SPAN)[:-4])
    fields[5] = 2
    with pytest.raises(NewerFormat):
        decode_head(bytes(fields) + crc32(fields).to_bytes(4, "big"), "f")
