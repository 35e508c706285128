"""Records out of columns: the broker's own check takes them, and the decoder reads the same rows."""

from typing import Any

import pyarrow as pa
import pytest

from journal.batch import verify_batch
from journal.record import Control, encode_control, make_log_id
from tfmq.arrow import Decoder, Encoded, encode
from tfmq.errors import BadRequest, MessageTooLarge

LOG_ID = make_log_id(5, 1)


def batch(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def stored(encoded: Encoded) -> bytes:
    """The blocks as a log has them."""
    parts, position, offset, ordinal = [], 0, 0, 0
    for size, count, crc in encoded.blocks:
        control = Control(count, size, crc, 1, 1, 0, ordinal, offset)
        parts += [bytes(encoded.data[position : position + size]), encode_control(LOG_ID, control)]
        position, offset, ordinal = position + size, control.next, control.next_ordinal
    return b"".join(parts)


def round_trip(rows: pa.RecordBatch) -> pa.RecordBatch:
    encoded = encode(rows, 9, 40)
    verify_batch(encoded.data, encoded.blocks, 9, 40, encoded.count, "records")
    return Decoder("t", 1, LOG_ID).decode(stored(encoded), 0)


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


def test_without_values_nothing_is_sent() -> None:
    with pytest.raises(BadRequest, match="column value; it has key"):
        encode(batch(key=[b"k"]), 1, 0)


def test_a_value_above_the_limit_is_named() -> None:
    with pytest.raises(MessageTooLarge, match="row 1 has 11 bytes, the broker takes 10"):
        encode(batch(value=[b"a", b"b" * 11]), 1, 0, message_bytes=10)
