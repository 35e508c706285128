"""Logs of every kind that a broker writes, for hypothesis."""

from typing import Any

from hypothesis import strategies as st

from journal.record.block_trailer import (
    SOURCE_DELAY,
    SOURCE_PLAIN,
    SOURCE_SCHEDULE,
    SOURCE_SUCCESSION,
    SOURCE_TRANSACTION,
)
from journal.record.format import FLAG_TOMBSTONE, make_filler
from tests.client.blocks import APPEND_MS, Bytes

KEYS = st.none() | st.binary(max_size=40) | st.text(max_size=40) | st.sampled_from([b"k" * 300, "k" * 300])
TAGS = st.none() | st.text(max_size=20) | st.sampled_from(["t" * 100, "ä" * 100])
PROPERTIES = st.none() | st.just(None) | st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2)
BORN = st.none() | st.integers(0, APPEND_MS * 2)
SOURCES = (SOURCE_PLAIN, SOURCE_TRANSACTION, SOURCE_DELAY, SOURCE_SCHEDULE)


@st.composite
def attributes(draw: st.DrawFn) -> dict[str, Any]:
    found = {
        "born_ms": draw(BORN),
        "key": draw(KEYS),
        "tag": draw(TAGS),
        "properties": draw(PROPERTIES),
        "attempts": draw(st.sampled_from([0, 0, 0, 3])),
    }
    return {name: value for name, value in found.items() if value}


@st.composite
def block(draw: st.DrawFn, log: Bytes) -> None:
    """One more block of `log`: of one size and one attribute, or of everything."""
    control = {
        "source_kind": draw(st.sampled_from(SOURCES)),
        "source_id": draw(st.integers(0, (1 << 64) - 1)),
        "source_high": draw(st.integers(0, (1 << 64) - 1)),
        "more_follows": draw(st.booleans()),
        "append_time": APPEND_MS + log.ordinal,
    }
    kind = draw(st.sampled_from(["equal", "equal", "mixed", "mixed", "filler", "succession"]))
    if kind == "succession":
        log.append_records([], 0, **{**control, "source_kind": SOURCE_SUCCESSION})
        return
    shared = draw(attributes())
    if kind == "equal":
        size, count = draw(st.integers(0, 150)), draw(st.integers(1, 80))
        log.append_records([log.record(bytes([n % 256]) * size, **shared) for n in range(count)], **control)
        return
    records, ordinals = [], 0
    for _ in range(draw(st.integers(1, 6))):
        if kind == "filler" and draw(st.booleans()):
            count = draw(st.integers(0, 1000))
            records.append(make_filler(log.log_id, draw(st.integers(20, 200)), count))
            ordinals += count
            continue
        own = shared if draw(st.booleans()) else draw(attributes())
        tombstone = draw(st.integers(0, 5)) == 0
        payload = b"" if tombstone else draw(st.binary(max_size=60))
        records.append(log.record(payload, FLAG_TOMBSTONE if tombstone else 0, **own))
        ordinals += 1
    log.append_records(records, ordinals, **control)


@st.composite
def logs(draw: st.DrawFn, blocks_max: int = 6) -> Bytes:
    log = Bytes(partition=draw(st.integers(0, 300)), first_offset=draw(st.integers(0, 1 << 45)))
    for _ in range(draw(st.integers(1, blocks_max))):
        draw(block(log))
    return log
