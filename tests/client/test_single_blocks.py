"""The fast way through blocks of one record gives what the slow way gives, wherever a bit is wrong."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.client.blocks import INCARNATION, Bytes
from tfmq.client.consumer.decoder import Decoder, SingleBlockDecoder, SingleBlockRun
from tfmq.errors import TfmqError

FIELDS: dict[str, dict[str, Any]] = {
    "plain": {"born_ms": 5},
    "bare": {},
    "tombstone": {"key": "k"},
    "tag": {"tag": "t"},
}


class Slow(SingleBlockDecoder):
    """Takes nothing."""

    def take(self, body: bytes, position: int, place: int, limit: int) -> SingleBlockRun:
        return SingleBlockRun([], position, place, 0, 0)


def decoder(fast: bool) -> Decoder:
    made = Decoder("orders", 0, INCARNATION)
    if not fast:
        made._singles = Slow("orders", 0, INCARNATION, made.log_id, None)
    return made


def outcome(
    body: bytes, *, fast: bool, start: int = 0, skip_to: int = 0, end: int | None = None, gaps: bool = False
) -> list[Any]:
    """Every field of every message, where reading goes on behind them, and the error."""
    found: list[Any] = []
    behind: tuple[int, ...] = ()
    try:
        end = start + len(body) if end is None else end
        for decoded in decoder(fast).decode(body, start, skip_to, end, gaps=gaps):
            for each in decoded.messages:
                attribute = (each.key, each.tag, each.properties, each.born_at)
                found.append((*each[:7], *attribute, each.appended_at, each.origin.epoch))
            behind = (decoded.next_offset, decoded.next_ordinal, decoded.epoch)
    except TfmqError as error:
        found.append((type(error), str(error), getattr(error, "first", None), getattr(error, "next", None)))
    return [*found, behind]


def singles(count: int, **attribute: Any) -> Bytes:
    log = Bytes()
    for number in range(count):
        log.append(b"payload %d" % number, born_ms=1000 + number, **attribute)
    return log


def test_a_run_is_taken_at_once_and_every_field_is_there() -> None:
    body = singles(20, key="k", tag="t", properties={"a": "b"}).body()
    assert len(list(decoder(fast=True).decode(body, 0, 0, len(body)))) == 1
    assert outcome(body, fast=True) == outcome(body, fast=False)


def test_messages_of_blocks_that_were_written_together_share_their_origin() -> None:
    log = Bytes()
    for number in range(4):
        record = log.record(b"x", born_ms=1)
        log.append_records([record], append_time=number // 2, epoch=number // 3)
    origins = [
        each.origin for block in decoder(True).decode(log.body(), 0, 0, log.end) for each in block.messages
    ]
    assert origins[0] is origins[1] and len(set(map(id, origins))) == 3
    assert outcome(log.body(), fast=True) == outcome(log.body(), fast=False)


@pytest.mark.parametrize("mask", [0x01, 0x80])
def test_a_flipped_bit_anywhere_is_told_as_in_the_slow_way(mask: int) -> None:
    body = singles(3).body()
    for position in range(len(body)):
        bad = body[:position] + bytes([body[position] ^ mask]) + body[position + 1 :]
        assert outcome(bad, fast=True) == outcome(bad, fast=False), f"byte {position}"


def test_bytes_that_end_anywhere_are_told_as_in_the_slow_way() -> None:
    body = singles(3).body()
    for size in range(len(body)):
        cut = body[:size]
        assert outcome(cut, fast=True, end=len(body)) == outcome(cut, fast=False, end=len(body)), (
            f"{size} bytes"
        )
        assert outcome(cut, fast=True) == outcome(cut, fast=False), f"{size} bytes, all that was announced"


def test_a_block_behind_the_answers_end_or_from_another_place_is_refused_alike() -> None:
    log = singles(3)
    for place in ({"end": log.end - 1}, {"start": 7, "skip_to": 7}, {"gaps": True, "end": log.end + 5}):
        assert outcome(log.body(), fast=True, **place) == outcome(log.body(), fast=False, **place)  # type: ignore[arg-type]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(sorted(FIELDS))), max_size=12),
    st.data(),
)
def test_blocks_of_all_kinds_one_after_the_other(kinds: list[tuple[int, str]], data: st.DataObject) -> None:
    log = Bytes()
    for count, kind in kinds:
        fields = FIELDS[kind]
        flag = 0x10 if kind == "tombstone" else 0
        payload = b"" if kind == "tombstone" else b"payload"
        log.append_records([log.record(payload, flag, **fields) for _ in range(count)])
    places = [0, *(piece.offset for piece in log.pieces)]
    skip_to = data.draw(st.sampled_from(places))
    assert outcome(log.body(), fast=True, skip_to=skip_to) == outcome(log.body(), fast=False, skip_to=skip_to)


def test_a_record_id_of_0_is_refused_as_in_the_slow_way() -> None:
    log = Bytes()
    record = bytearray(log.record(b"x", born_ms=1))
    record[8:16] = bytes(8)
    log.append_records([bytes(record)])
    assert outcome(log.body(), fast=True) == outcome(log.body(), fast=False)
