"""Records out of columns: the broker's own check takes them, and the decoder reads the same rows."""

import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from journal.record.batch import verify_batch
from journal.record.block_trailer import BlockTrailer, encode_trailer
from journal.record.format import PRODUCER_ID_MAX, SEQUENCE_COUNT, make_log_id, tag_flag
from tests.arrow.random_logs import attributes
from tests.scale import scaled
from tfmq.arrow import Decoder, Encoded, encode
from tfmq.client.send.record_encoder import attribute_part, encode_each
from tfmq.client.send.record_encoder import encode_shared as client_encode
from tfmq.errors import BadRequest, MessageTooLarge
from tfmq.message import encode_attribute

LOG_ID = make_log_id(5, 1)


def batch(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def stored(encoded: Encoded) -> bytes:
    """The blocks as a log has them."""
    parts, position, offset, ordinal = [], 0, 0, 0
    for size, count, crc in encoded.blocks:
        control = BlockTrailer(count, size, crc, 1, 1, 0, ordinal, offset)
        parts += [bytes(encoded.data[position : position + size]), encode_trailer(LOG_ID, control)]
        position, offset, ordinal = position + size, control.next, control.next_ordinal
    return b"".join(parts)


def round_trip(rows: pa.RecordBatch) -> pa.RecordBatch:
    encoded = encode(rows, 9, 40)
    verify_batch(encoded.data, encoded.blocks, 9, 40, encoded.count, "records")
    return Decoder("t", 1, LOG_ID).decode(stored(encoded), 0)


ROWS = st.lists(
    st.tuples(
        st.none() | st.binary(max_size=300), attributes().map(lambda each: encode_attribute(**each) or None)
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=max(30, scaled(1000)), deadline=None)
@given(ROWS, st.booleans())
def test_any_rows_come_back(rows: list[tuple[bytes | None, bytes | None]], equal: bool) -> None:
    values = [b"12345" if equal else value for value, _ in rows]
    columns = [pa.array(values, pa.binary()), pa.array([each for _, each in rows], pa.binary())]
    sent = pa.RecordBatch.from_arrays(columns, ["value", "attributes"])
    found = round_trip(sent)
    assert found.select(["value", "attributes"]).to_pylist() == sent.to_pylist()
    assert bytes(encode(found, 9, 40).data) == bytes(encode(sent, 9, 40).data)
    rest = sent.slice(len(rows) // 2)
    assert round_trip(rest).select(["value", "attributes"]).to_pylist() == rest.to_pylist()


def test_the_bytes_are_the_clients() -> None:
    rng = random.Random(5)
    for sizes in ([100] * 3000, [rng.randrange(200) for _ in range(3000)], [70_000, 3, 66_000, 0]):
        values = [rng.randbytes(size) for size in sizes]
        found, theirs = encode(batch(value=values), 3, 7), client_encode(values, b"", 3, 7)
        assert (bytes(found.data), found.blocks) == (bytes(theirs.data), theirs.blocks)


def test_keys_and_tags_are_the_clients() -> None:
    values, keys, tags = [b"a", b"bb", b"c"], ["k", None, "l"], ["t", "u", None]
    parts = [attribute_part(encode_attribute(None, key, tag)) for key, tag in zip(keys, tags, strict=True)]
    theirs = encode_each(values, parts, [tag_flag(tag or "") for tag in tags], 3, 7)
    found = encode(batch(value=values, key=keys, tag=tags), 3, 7)
    assert (bytes(found.data), found.blocks) == (bytes(theirs.data), theirs.blocks)


def test_values_alone() -> None:
    values = [b"%04d" % n for n in range(5000)]
    found = round_trip(batch(value=values))
    assert found.column("value").to_pylist() == values
    assert found.column("id").to_pylist() == [(9 << 24) + 40 + n for n in range(5000)]
    assert found.column("attributes").null_count == 5000


def test_keys_tags_and_tombstones() -> None:
    rows = batch(value=["a", None, "", "b"], key=[b"k", b"l", None, b"m"], tag=["t", None, "u", "t"])
    found = round_trip(rows)
    assert found.column("value").to_pylist() == [b"a", None, b"", b"b"]
    assert found.column("key").to_pylist() == rows.column("key").to_pylist()
    assert found.column("tag").to_pylist() == rows.column("tag").to_pylist()


def test_no_rows() -> None:
    assert encode(batch(value=[]), 1, 0) == Encoded(b"", 0, [])


def test_other_columns_are_passed_over_and_other_types_refused() -> None:
    plain = encode(batch(value=["a"]), 1, 0)
    assert encode(batch(value=["a"], topic=["t"], offset=[5]), 1, 0) == plain
    large = pa.RecordBatch.from_arrays([pa.array(["a"], pa.large_string())], ["value"])
    assert encode(large, 1, 0) == plain
    with pytest.raises(BadRequest, match="The column value must be binary or string, not int64"):
        encode(batch(value=[1]), 1, 0)
    with pytest.raises(BadRequest, match="The column tag must be string, not binary"):
        encode(batch(value=["a"], tag=[b"t"]), 1, 0)
    with pytest.raises(BadRequest, match="The column attributes must be binary, not string"):
        encode(batch(value=["a"], attributes=["t"]), 1, 0)


def test_the_last_sequences_of_an_id_are_used_and_no_more() -> None:
    last = SEQUENCE_COUNT - 2
    encoded = encode(batch(value=["a", "b"]), 1, last)
    verify_batch(encoded.data, encoded.blocks, 1, last, 2)
    with pytest.raises(BadRequest, match="pass the limit of 16777216"):
        encode(batch(value=["a", "b", "c"]), 1, last)


def test_the_largest_producer_id_fits() -> None:
    encoded = encode(batch(value=["a"]), PRODUCER_ID_MAX, 5)
    verify_batch(encoded.data, encoded.blocks, PRODUCER_ID_MAX, 5, 1)
    found = Decoder("t", 1, LOG_ID).decode(stored(encoded), 0)
    assert found.column("id").to_pylist() == [(PRODUCER_ID_MAX << 24 | 5) - (1 << 64)]


def test_without_values_nothing_is_sent() -> None:
    with pytest.raises(BadRequest, match="column value; it has key"):
        encode(batch(key=[b"k"]), 1, 0)


def test_a_value_above_the_limit_is_named() -> None:
    with pytest.raises(MessageTooLarge, match="row 1 has 11 bytes, the broker takes 10"):
        encode(batch(value=[b"a", b"b" * 11]), 1, 0, message_bytes=10)
