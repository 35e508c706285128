"""Records out of columns: the broker's own check takes them, and the decoder reads the same rows."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from journal.record.batch import verify_batch
from journal.record.block_trailer import BlockTrailer, encode_trailer
from journal.record.format import PRODUCER_ID_MAX, SEQUENCE_COUNT, make_log_id, tag_flag, tag_hash
from tests.arrow.random_logs import BORN, KEYS, TAGS, attributes
from tests.scale import scaled
from tfmq import limits
from tfmq.arrow import Decoder, Encoded, encode
from tfmq.arrow.attributes import AttributeParts, build_parts
from tfmq.client.send.record_encoder import attribute_part, encode_each
from tfmq.client.send.record_encoder import encode_shared as client_encode
from tfmq.errors import BadRequest, MessageTooLarge
from tfmq.message import decode_attribute, encode_attribute

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
    st.tuples(st.none() | st.binary(max_size=300), attributes().map(lambda each: encode_attribute(**each) or None)),
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


# What a sender packs, out of columns: attributes as they are, keys and tags where they say something else.

GOOD = attributes().map(lambda fields: encode_attribute(**fields) or None)


def columns(**given: tuple[list[Any], pa.DataType]) -> pa.RecordBatch:
    arrays = [pa.array(values, type) for values, type in given.values()]
    return pa.RecordBatch.from_arrays(arrays, list(given))


def joined(found: AttributeParts) -> list[bytes]:
    return [b"".join(pieces) for pieces in zip(*(each.to_pylist() for each in found.pieces), strict=True)]


def attributes_of(batch: pa.RecordBatch) -> list[bytes | None]:
    """The attributes as they would stand in the records."""
    found = build_parts(batch)
    if found is None:
        return [None] * len(batch)
    parts = joined(found)
    assert [bool(part) for part in parts] == found.has_attribute.tolist()
    attributes = [part[4:] if part else None for part in parts]
    assert parts == [b"" if each is None else len(each).to_bytes(4, "big") + each for each in attributes]
    tags = [decode_attribute(each).tag if each else None for each in attributes]
    assert np.broadcast_to(found.tag_hashes, len(batch)).tolist() == [tag_hash(tag or "") for tag in tags]
    return attributes


@settings(max_examples=max(50, scaled(1000)), deadline=None)
@given(st.lists(GOOD, min_size=1, max_size=10))
def test_attributes_are_taken_as_they_are(given: list[bytes | None]) -> None:
    assert attributes_of(columns(attributes=(given, pa.binary()))) == given


@settings(max_examples=max(50, scaled(1000)), deadline=None)
@given(st.lists(st.tuples(st.none() | st.binary(max_size=300), TAGS), min_size=1, max_size=10))
def test_keys_and_tags_alone_are_packed_as_a_sender_packs_them(rows: list[tuple[bytes | None, str | None]]) -> None:
    keys, tags = [key for key, _ in rows], [tag for _, tag in rows]
    found = attributes_of(columns(key=(keys, pa.binary()), tag=(tags, pa.string())))
    assert found == [encode_attribute(None, key, tag) or None for key, tag in rows]
    batch = columns(value=(keys, pa.binary()), key=(keys, pa.binary()))
    assert attributes_of(batch) == [encode_attribute(None, key) or None for key in keys]


@pytest.mark.long
@settings(max_examples=max(50, scaled(1000)), deadline=None)
@given(st.lists(st.tuples(GOOD, KEYS, TAGS), min_size=1, max_size=10), st.sampled_from(["key", "tag", "both"]))
def test_columns_beside_attributes_decide(rows: list[tuple[bytes | None, Any, str | None]], which: str) -> None:
    given = [row[0] for row in rows]
    keys = [row[1].encode() if isinstance(row[1], str) else row[1] for row in rows]
    tags = [row[2] for row in rows]
    batch: dict[str, Any] = {"attributes": (given, pa.binary())}
    batch |= {"key": (keys, pa.binary())} if which != "tag" else {}
    batch |= {"tag": (tags, pa.string())} if which != "key" else {}
    for before, after, key, tag in zip(given, attributes_of(columns(**batch)), keys, tags, strict=True):
        old = decode_attribute(before or b"\x80")
        new = decode_attribute(after or b"\x80")
        as_bytes = [each.encode() if isinstance(each, str) else each for each in (old.key, new.key)]
        same_key = which == "tag" or as_bytes[0] == key
        same_tag = which == "key" or (old.tag or "") == (tag or "")
        assert as_bytes[1] == (as_bytes[0] if which == "tag" else key)
        assert (new.tag or "") == ((old.tag if which == "key" else tag) or "")
        assert new.key == old.key or not same_key
        assert new._replace(key=None, tag=None) == old._replace(key=None, tag=None)
        assert after == before or not (same_key and same_tag)


@given(BORN, KEYS, TAGS)
def test_columns_that_say_the_same_leave_every_byte(born: int | None, key: Any, tag: str | None) -> None:
    odd = b"\x83\x01\xcf" + (born or 0).to_bytes(8, "big") + b"\x02\xd9\x01k\x03\xd9\x01t"
    given = [encode_attribute(born, key, tag) or None, odd, b"", b"\x80"]
    as_bytes = key.encode() if isinstance(key, str) else key
    batch = columns(
        attributes=(given, pa.binary()),
        key=([as_bytes, b"k", None, None], pa.binary()),
        tag=([tag, "t", None, ""], pa.string()),
    )
    assert attributes_of(batch) == given


def test_text_keys_are_packed_as_text_and_kept_so() -> None:
    batch = columns(key=(["k", None, "ä"], pa.string()))
    assert attributes_of(batch) == [encode_attribute(key="k"), None, encode_attribute(key="ä")]
    given = [encode_attribute(7, "k", "old")]
    other = columns(attributes=(given, pa.binary()), key=([b"k"], pa.binary()), tag=(["new"], pa.string()))
    assert attributes_of(other) == [encode_attribute(7, "k", "new")]


def test_null_removes_what_the_attributes_say() -> None:
    given = [
        encode_attribute(7, "k", "t", {"a": "b"}),
        encode_attribute(7, "k", "t"),
        encode_attribute(key="k", tag="t"),
    ]
    batch = columns(attributes=(given, pa.binary()), key=([None] * 3, pa.binary()), tag=([None] * 3, pa.string()))
    assert attributes_of(batch) == [encode_attribute(7, properties={"a": "b"}), encode_attribute(7), None]


def test_what_later_releases_add_stays() -> None:
    given = [b"\x82\x02\xa1k\x09\xa1x"]
    assert attributes_of(columns(attributes=(given, pa.binary()), key=([b"l"], pa.binary()))) == [
        b"\x82\x02\xc4\x01l\x09\xa1x"
    ]


@pytest.mark.parametrize("given", [b"\xc1", b"\x81\x03\xc4\x01t", b"\x81\x02\xa1\xff", b"\x91\x01", b"\x80\x80"])
def test_what_is_no_attribute_is_refused_with_its_row(given: bytes) -> None:
    with pytest.raises(BadRequest, match="The attributes of row 1 cannot be sent"):
        build_parts(columns(attributes=([b"\x80", given], pa.binary())))


@pytest.mark.parametrize("given", [b"\xc1\xff", b"\x91\x01", b"\x80\x80"])
def test_what_is_no_attribute_stays_as_it_is_where_lenient_but_takes_no_other_key(given: bytes) -> None:
    alone = columns(attributes=([b"\x80", given], pa.binary()))
    found = build_parts(alone, lenient=True)
    assert found is not None and joined(found)[1] == attribute_part(given)
    with pytest.raises(BadRequest, match=r"attributes of row 1 cannot be sent with another key or tag: .+[^.]\.$"):
        build_parts(alone.append_column("key", pa.array([None, b"k"], pa.binary())), lenient=True)


def test_why_it_is_none_is_one_sentence() -> None:
    with pytest.raises(BadRequest) as caught:
        build_parts(columns(attributes=([b"junk"], pa.binary())))
    said = str(caught.value)
    assert said.startswith("The attributes of row 0 cannot be sent. A message's attribute cannot be read:")
    assert ".." not in said and said.count(":") == 1


def test_what_is_too_long_is_refused_with_its_row() -> None:
    with pytest.raises(MessageTooLarge, match="The key of row 1 has 65537 bytes, 65536 are allowed"):
        build_parts(columns(key=([b"", b"k" * (limits.KEY_BYTES + 1)], pa.binary())))
    with pytest.raises(MessageTooLarge, match="The tag of row 0 has 256 bytes, 255 are allowed"):
        build_parts(columns(tag=(["ä" * 128], pa.string())))
    full = encode_attribute(properties={str(n): "x" * 60_000 for n in range(4)})
    with pytest.raises(MessageTooLarge, match=r"The attribute .* of row 0 has"):
        build_parts(columns(attributes=([full], pa.binary()), key=([b"k" * 60_000], pa.binary())))
    longest = columns(key=([b"k" * limits.KEY_BYTES], pa.binary()))
    assert attributes_of(longest) == [encode_attribute(key=b"k" * limits.KEY_BYTES)]


def test_text_that_is_not_utf_8_is_refused() -> None:
    bad = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff"))
    for name in ("key", "tag"):
        with pytest.raises(BadRequest, match=f"The column {name} holds text that is not UTF-8"):
            build_parts(pa.RecordBatch.from_arrays([bad], [name]))


def test_a_slice_has_its_own_rows() -> None:
    given = [encode_attribute(n, f"k{n}", "t") for n in range(6)]
    batch = columns(attributes=(given, pa.binary()), tag=(["t", "u"] * 3, pa.string()))
    assert attributes_of(batch.slice(2, 3)) == [given[2], encode_attribute(3, "k3", "u"), given[4]]


def test_nothing_to_say_is_no_part() -> None:
    assert build_parts(columns(value=([b"v"], pa.binary()))) is None
    assert build_parts(columns(key=([None], pa.binary()), tag=([None], pa.string()))) is None
    assert attributes_of(columns(tag=(["", None, "t"], pa.string()))) == [None, None, encode_attribute(tag="t")]


def test_the_part_is_what_the_client_puts_into_a_record() -> None:
    found = build_parts(columns(key=([b"k", b"l"], pa.binary())))
    assert found is not None and joined(found) == [attribute_part(encode_attribute(key=k)) for k in (b"k", b"l")]


def test_names_of_fields_that_are_no_numbers_stay() -> None:
    given = columns(
        attributes=([b"\x82\xa1z\x01\x07\x05", b"\x81\xc0\x01"], pa.binary()), key=([b"k", b"k"], pa.binary())
    )
    assert attributes_of(given) == [b"\x83\x02\xc4\x01k\x07\x05\xa1z\x01", b"\x82\x02\xc4\x01k\xc0\x01"]


def test_bytes_below_a_null_are_not_looked_at() -> None:
    data = pa.py_buffer(b"\xc1garbage\x81\x02\xa1\xff\x81\x02\xa1k")
    edges = pa.py_buffer(np.array([0, 8, 12, 16], np.int32))
    given = pa.BinaryArray.from_buffers(pa.binary(), 3, [pa.py_buffer(b"\x04"), edges, data])
    assert attributes_of(pa.RecordBatch.from_arrays([given], ["attributes"])) == [None, None, b"\x81\x02\xa1k"]
    bent = pa.BinaryArray.from_buffers(pa.binary(), 3, [pa.py_buffer(b"\x06"), edges, data])
    with pytest.raises(BadRequest, match="row 1 cannot be sent"):
        build_parts(pa.RecordBatch.from_arrays([bent], ["attributes"]))
