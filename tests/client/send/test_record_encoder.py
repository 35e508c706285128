"""The bytes of batches, held against the record format's own writer and verifier."""

from hypothesis import given
from hypothesis import strategies as st

from journal.record.batch import verify_batch
from journal.record.format import make_record
from tests.scale import seeded
from tfmq.client.send.record_encoder import (
    EncodedRecords,
    attribute_part,
    birth_part,
    encode_each,
    encode_one,
    encode_shared,
    rewrite_ids,
)
from tfmq.limits import BLOCK_BYTES
from tfmq.message import BORN_MS_MAX, encode_attribute

PRODUCER = 0x12_3456_789A
SEQUENCES = st.one_of(st.integers(0, 5), st.integers(250, 260), st.integers(65_500, 65_540), st.integers(0, 1 << 23))


def check(encoded: EncodedRecords, payloads: list[bytes], attribute: bytes, sequence: int) -> None:
    records = [
        make_record(payload, PRODUCER << 24 | sequence + number, attribute=attribute or None)
        for number, payload in enumerate(payloads)
    ]
    assert bytes(encoded.data) == b"".join(records)
    verify_batch(encoded.data, encoded.blocks, PRODUCER, sequence, len(payloads), verify="records")
    position = 0
    for number, record in enumerate(records):
        assert encoded.start_of(number) == position
        position += len(record)


@given(st.integers(0, 300), st.integers(1, 1500), SEQUENCES, st.sampled_from([b"", b"\x81\x01\x05"]))
def test_records_of_one_size(size: int, count: int, sequence: int, attribute: bytes) -> None:
    random = seeded("equal", size, count)
    payloads = [random.randbytes(size) for _ in range(count)]
    check(encode_shared(payloads, attribute_part(attribute), PRODUCER, sequence), payloads, attribute, sequence)


@given(st.binary(max_size=400), SEQUENCES, st.binary(max_size=20))
def test_a_single_record(payload: bytes, sequence: int, attribute: bytes) -> None:
    check(encode_one(payload, attribute_part(attribute), PRODUCER, sequence), [payload], attribute, sequence)


@given(st.one_of(st.integers(0, BORN_MS_MAX), st.sampled_from([0, (1 << 32) - 1, 1 << 32, BORN_MS_MAX])))
def test_the_attribute_of_a_record_with_nothing_but_its_birth(born_ms: int) -> None:
    assert birth_part(born_ms) == attribute_part(encode_attribute(born_ms))


@given(st.lists(st.binary(max_size=400), min_size=1, max_size=60), SEQUENCES, st.binary(max_size=20))
def test_records_of_mixed_sizes(payloads: list[bytes], sequence: int, attribute: bytes) -> None:
    check(encode_shared(payloads, attribute_part(attribute), PRODUCER, sequence), payloads, attribute, sequence)


@given(
    st.lists(
        st.tuples(st.binary(max_size=90), st.binary(max_size=30), st.sampled_from([0, 0x10, 0xABCD_0000])), min_size=1
    )
)
def test_records_with_attributes_and_flags_of_their_own(rows: list[tuple[bytes, bytes, int]]) -> None:
    payloads = [b"" if flag == 0x10 else payload for payload, _, flag in rows]
    parts = [attribute_part(attribute) for _, attribute, _ in rows]
    encoded = encode_each(payloads, parts, [flag for _, _, flag in rows], PRODUCER, 9)
    expected = [
        make_record(payload, PRODUCER << 24 | 9 + number, flag, attribute or None)
        for number, (payload, (_, attribute, flag)) in enumerate(zip(payloads, rows, strict=True))
    ]
    assert bytes(encoded.data) == b"".join(expected)


def test_blocks_hold_whole_records_and_only_a_giant_passes_their_size() -> None:
    payloads = [b"x" * size for size in (10, 70_000, 10, 40_000, 40_000, 10)]
    encoded = encode_shared(payloads, b"", PRODUCER, 0)
    assert [(size, count) for size, count, _ in encoded.blocks] == [
        (30, 1),
        (70_020, 1),
        (30 + 40_020, 2),
        (40_020 + 30, 2),
    ]
    verify_batch(encoded.data, encoded.blocks, PRODUCER, 0, len(payloads), verify="records")


def test_equal_records_fill_their_blocks() -> None:
    encoded = encode_shared([b"x" * 80] * 3000, b"", PRODUCER, 0)
    assert {size for size, _, _ in encoded.blocks[:-1]} == {BLOCK_BYTES // 100 * 100}


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=40), SEQUENCES)
def test_another_id_changes_the_ids_and_nothing_else(payloads: list[bytes], sequence: int) -> None:
    first = encode_shared(payloads, b"", 7, 3)
    again = rewrite_ids(first, PRODUCER, sequence)
    assert bytes(first.data) == bytes(encode_shared(payloads, b"", 7, 3).data)
    check(again, payloads, b"", sequence)
