"""Invariants over logs of every kind:

1. Arrow's decoder gives the rows that the client's gives as messages, in each way to verify.
2. A range gives the rows whose offsets are in it.
3. A flipped bit is never passed over: the error names the block that the client's error names; without
   verification the bytes decode or one of the two errors comes.
4. Bytes that end too early, and garbage, are `Damaged`.
"""

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.arrow.random_logs import logs
from tests.arrow.rows import decoded, decoder, expected
from tests.client.blocks import INCARNATION, Bytes
from tests.scale import scaled
from tfmq.arrow.decoder import VERIFY
from tfmq.client.consumer.decoder import Decoder
from tfmq.errors import Damaged, DecodeFailed, TfmqError


@settings(max_examples=max(30, scaled(1000)), deadline=None)
@given(logs(), st.sampled_from(VERIFY))
def test_the_rows_are_the_clients_messages(log: Bytes, verify: str) -> None:
    batch = decoded(log, verify=verify)
    batch.validate(full=True)
    assert batch.to_pylist() == expected(log)


@settings(max_examples=max(30, scaled(500)), deadline=None)
@given(logs(), st.data())
def test_a_range_gives_the_rows_in_it(log: Bytes, data: st.DataObject) -> None:
    places = st.integers(log.first - 1, log.end + 1)
    start, end = data.draw(places), data.draw(st.none() | places)
    found = decoder(log).decode(log.body(), log.first, start, end).to_pylist()
    last = log.end + 2 if end is None else end
    assert found == [row for row in expected(log) if start <= row["offset"] < last]


def clients_error(log: Bytes, body: bytes) -> TfmqError | None:
    reader = Decoder("orders", log.log_id & 0xFFFFFF, INCARNATION)
    try:
        list(reader.decode(body, log.first, log.first, log.end))
    except TfmqError as error:
        return error
    return None


def test_every_flipped_bit_is_found_where_the_client_finds_it() -> None:
    log = Bytes(first_offset=300)
    log.append(b"one", b"two", b"six", b"ten", b"0", key="k")
    log.append(b"alone", tag="t")
    log.append_records([log.record(b"", 0x10, key=b"gone"), log.record(b"mixed")])
    body = log.body()
    for position in range(len(body)):
        bad = bytearray(body)
        bad[position] ^= 1 << position % 8
        theirs = clients_error(log, bytes(bad))
        with pytest.raises((Damaged, DecodeFailed)) as found:
            decoder(log).decode(bad, log.first)
        assert type(theirs) is type(found.value)
        if isinstance(theirs, Damaged):
            error: Any = found.value
            assert (error.first, error.next) == (theirs.first, theirs.next), position
        with pytest.raises((Damaged, DecodeFailed)):
            decoder(log, verify="message").decode(bad, log.first)
        with contextlib.suppress(Damaged, DecodeFailed):
            decoder(log, verify="none").decode(bad, log.first).validate(full=True)


@settings(max_examples=max(30, scaled(1000)), deadline=None)
@given(logs(3), st.data())
def test_a_flipped_bit_in_any_log_is_found(log: Bytes, data: st.DataObject) -> None:
    bad = bytearray(log.body())
    position = data.draw(st.integers(0, len(bad) - 1))
    bad[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises((Damaged, DecodeFailed)) as found:
        decoder(log).decode(bad, log.first)
    if isinstance(found.value, Damaged):
        assert found.value.first <= log.first + position < found.value.next
    with contextlib.suppress(Damaged, DecodeFailed):
        decoder(log, verify="none").decode(bad, log.first).validate(full=True)


def test_bytes_that_end_too_early_are_damaged() -> None:
    log = Bytes()
    log.append(*[b"x" * 10] * 40)
    log.append(b"a", b"bc")
    body = log.body()
    ends = {0, log.pieces[1].offset, len(body)}
    for size in sorted(set(range(len(body))) - ends):
        with pytest.raises(Damaged):
            decoder(log, verify="none").decode(body[:size], 0)


@settings(max_examples=max(30, scaled(1000)), deadline=None)
@given(st.binary(min_size=1, max_size=500), st.sampled_from(VERIFY))
def test_garbage_is_damaged(garbage: bytes, verify: str) -> None:
    with pytest.raises((Damaged, DecodeFailed)):
        decoder(Bytes(), verify=verify).decode(garbage, 0)
