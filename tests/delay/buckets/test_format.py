"""The format of buckets: golden bytes, bounds of everything that is read, every bit of it flipped."""

from __future__ import annotations

import random
import re
from array import array
from zlib import crc32

import pytest

from journal.errors import Corrupt, NewerFormat
from journal.record.format import make_id, make_log_id, make_record
from tests import paths
from tests.delay.bucket_rig import BILLS, NOW, ORDERS, record_of
from tests.scale import scaled, seeded
from tfmq.delay.buckets import format as module
from tfmq.delay.buckets.format import (
    CHUNK_SIZE,
    CRC,
    CRC_SIZE,
    HEAD_SIZE,
    LEVELS,
    ChunkColumns,
    MessageColumns,
    StoreIdentity,
    TimeSpan,
    bucket_name,
    checksum_failures,
    checksum_seed,
    cut,
    decode_chunk,
    decode_columns,
    decode_head,
    encode_chunk,
    encode_head,
    group_by_span,
    parse_bucket_name,
    single_target_column,
    span_of,
    with_checksums,
)
from tfmq.delay.buckets.recovery import BucketCheckpoint, ListedBucket, decode_checkpoint, encode_checkpoint
from tfmq.delay.due_time import DUE_MAX
from tfmq.delay.rows import Target

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


# Messages as columns: sealed under their numbers, picked, sorted and spread without losing one or its bytes.

TABLE_COLUMNS = [Target(ORDERS, "orders"), Target(BILLS, "bills")]


def some(generator: random.Random, count: int, reach: int = 1 << 20) -> MessageColumns:
    records = [record_of(n, generator.choice((0, 50))) for n in range(count)]
    sizes = array("I", map(len, records))
    dues = array("Q", [NOW + generator.randrange(reach) for _ in range(count)])
    targets = array("I", [generator.randrange(2) for _ in range(count)])
    flags = bytes(generator.randrange(2) for _ in range(count))
    data = with_checksums([b"".join(records)], sizes, 100)
    return MessageColumns(dues, array("Q", range(100, 100 + count)), targets, sizes, flags, TABLE_COLUMNS, data)


def rows(messages: MessageColumns) -> list[tuple[object, ...]]:
    """A tuple a message, with its bytes."""
    each = cut(b"".join(messages.data), [size + CRC_SIZE for size in messages.sizes])
    return list(zip(*messages[:5], map(bytes, each), strict=True))


@pytest.mark.parametrize("sizes", [(0, 0, 0, 0, 0), (40, 40, 40, 40, 40), (40, 40, 40, 40, 41), (3, 9, 0, 300, 1)])
def test_each_record_follows_a_checksum_that_begins_at_its_number(sizes: tuple[int, ...]) -> None:
    first = (1 << 40) - 2
    records = [record_of(n, size) for n, size in enumerate(sizes)]
    data = b"".join(
        with_checksums([b"".join(records[:2]), b"".join(records[2:])], array("I", map(len, records)), first)
    )
    for number, record in enumerate(records, first):
        (crc,) = CRC.unpack_from(data)
        assert data[CRC_SIZE:].startswith(record) and crc == crc32(record, number & 0xFFFF_FFFF)
        data = data[CRC_SIZE + len(record) :]
    assert data == b""


def test_each_record_that_fails_is_named_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECKSUMS_PER_CALL", 7)
    generator = seeded("failing")
    for _ in range(scaled(200)):
        messages = some(generator, generator.randrange(1, 40))
        each = [bytearray(data) for data in cut(b"".join(messages.data), [n + CRC_SIZE for n in messages.sizes])]
        bad = sorted(generator.sample(range(len(each)), generator.randrange(len(each) + 1)))
        for index in bad:
            each[index][generator.randrange(len(each[index]))] ^= 1 << generator.randrange(8)
        assert checksum_failures(b"".join(each), messages.sizes, messages.numbers) == bad


def test_sealing_in_pieces_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [record_of(n, n % 40) for n in range(50)]
    sizes, joined = array("I", map(len, records)), b"".join(records)
    whole = b"".join(with_checksums([joined], sizes, 7))
    for piece in (1, 7, 49, 50, 51):
        monkeypatch.setattr(module, "CHECKSUMS_PER_CALL", piece)
        assert b"".join(with_checksums([joined], sizes, 7)) == whole


def test_what_is_kept_is_what_was_marked() -> None:
    generator = seeded("kept")
    for _ in range(scaled(200)):
        messages = some(generator, generator.randrange(1, 30))
        keep = bytes(generator.randrange(2) for _ in range(messages.length))
        assert rows(messages.filtered(keep)) == [row for row, kept in zip(rows(messages), keep, strict=True) if kept]


def test_sorting_goes_by_due_and_keeps_the_order_of_equal_ones() -> None:
    generator = seeded("ordered")
    for _ in range(scaled(200)):
        messages = some(generator, generator.randrange(1, 30), reach=10)
        assert rows(messages.sorted_by_due()) == sorted(rows(messages), key=lambda row: row[:2])


def test_a_part_is_what_lies_between() -> None:
    messages = some(seeded("part"), 9)
    for start in range(9):
        for end in range(start, 10):
            assert rows(messages.section(start, end)) == rows(messages)[start:end]
            assert rows(messages.sorted_by_due().section(start, end)) == rows(messages.sorted_by_due())[start:end]


@pytest.mark.parametrize("sorted_max", [1, 5, 16_384])
def test_spreading_loses_nothing_and_puts_each_where_it_belongs(
    sorted_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SORT_MESSAGES_MAX", sorted_max)
    generator = seeded("spread", sorted_max)
    for _ in range(scaled(200)):
        messages = some(generator, generator.randrange(40), reach=generator.choice((1, 1 << 17, 1 << 22)))
        found: list[tuple[object, ...]] = []
        for span, part in group_by_span(messages, lambda due: span_of(due, 16)):
            assert part.length and all(due in span for due in part.dues)
            assert part.size_bytes == sum(map(len, part.data))
            found += rows(part)
        assert sorted(found) == sorted(rows(messages))


def test_one_span_takes_all_as_they_are() -> None:
    messages = some(seeded("one"), 20)
    ((span, part),) = group_by_span(messages, lambda due: TimeSpan(0, 58))
    assert part is messages and span.exponent == 58


def test_one_target_is_a_column_of_zeros() -> None:
    assert list(single_target_column(3)) == [0, 0, 0]
