"""Notes: what goes in comes out, every damage is seen, and no sender can hide a block trailer in one."""

import gc
import re
from array import array
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.errors import NewerFormat
from journal.record.block_trailer import BlockTrailer, contains_trailer_header, encode_trailer
from journal.record.format import HEADER, HEADER_SIZE, make_id, make_record
from tests import paths
from tests.delay.steps import steps
from tests.scale import scaled, seeded
from tfmq.delay.arrivals import header
from tfmq.delay.arrivals.header import ArrivalHeader, BadArrivalHeader, TurnColumns, decode_header, encode_header
from tfmq.delay.arrivals.log import LOG_ID
from tfmq.delay.due_time import AHEAD_MAX, DUE_MAX, DueTimes, due_times_of

GOLDEN = paths.TESTS / "golden" / "arrivals.hex"

DUE = 1_700_000_060_000
LOG = 0x1000_0001

MIXED = due_times_of(array("Q", (DUE, DUE + 1, DUE_MAX)), b"\x01\x00\x01")
OLD = TurnColumns(array("Q", (DUE, DUE + 5, 1)), array("Q", (7, 8, 1 << 50)))

ALL: dict[str, ArrivalHeader] = {
    "one due time for three": header.arrival_header(LOG, "orders", due_times_of(array("Q", (DUE,) * 3), bytes(3)), 408),
    "times": header.arrival_header(LOG, "orders", due_times_of(array("Q", (DUE, DUE + 1)), b"\x01\x01"), 272),
    "times and delays": header.arrival_header(LOG, "orders", MIXED, 408),
    "a cancel": header.cancel_header(TurnColumns(array("Q", (DUE,)), array("Q", (7,)))),
    "a reschedule": header.reschedule_header(LOG, "orders", MIXED, 408, OLD),
    "times of a clock behind broker time": header.arrival_header(
        LOG, "orders", due_times_of(array("Q", (DUE, DUE)), b"\x01\x01"), 272, 3_600_000
    ),
    "a reschedule where the clock is ahead": header.reschedule_header(LOG, "orders", MIXED, 408, OLD, -3_600_000),
}

words = st.integers(1, DUE_MAX)
aheads = st.one_of(st.just(0), st.integers(-AHEAD_MAX, AHEAD_MAX))
turns = st.lists(st.tuples(words, words), min_size=1, max_size=9)


@st.composite
def notes(draw: st.DrawFn) -> ArrivalHeader:
    kind = draw(st.sampled_from(sorted(header.KIND_NAMES)))
    rows = draw(turns)
    old = TurnColumns(array("Q", (due for due, _ in rows)), array("Q", (number for _, number in rows)))
    if kind == header.CANCEL:
        return header.cancel_header(old)
    times = draw(st.one_of(words.map(lambda due: [due] * len(rows)), st.just([due for due, _ in rows])))
    flags = draw(st.one_of(st.sampled_from((b"\x00", b"\x01")).map(lambda flag: flag * len(rows)),
                           st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)).map(bytes)))  # fmt: skip
    size = draw(st.integers(len(rows) * HEADER_SIZE, (1 << 32) - 1))
    log_id, topic = draw(words), draw(st.from_regex(r"[A-Za-z0-9._-]{1,249}", fullmatch=True))
    dues = due_times_of(array("Q", times), flags)
    if kind == header.ARRIVAL:
        return header.arrival_header(log_id, topic, dues, size, draw(aheads))
    return header.reschedule_header(log_id, topic, dues, size, old, draw(aheads))


def lines() -> list[str]:
    return [f"{name}: {encode_header(each).hex()}" for name, each in ALL.items()]


def test_the_bytes_are_those_of_the_golden_file() -> None:
    assert GOLDEN.read_text().splitlines() == lines()


@pytest.mark.parametrize("line", GOLDEN.read_text().splitlines() if GOLDEN.exists() else [])
def test_the_golden_file_is_read(line: str) -> None:
    name, record = line.split(": ")
    assert decode_header(bytes.fromhex(record)) == ALL[name]


def test_the_worked_examples_of_the_page_are_in_the_golden_file() -> None:
    page = (GOLDEN.parent.parent.parent / "docs" / "formats" / "arrivals.md").read_text()
    examples = [each.replace("\n", "") for each in re.findall(r"```hex\n([0-9a-f\n]+)```", page)]
    records = {line.split(" ")[-1] for line in GOLDEN.read_text().splitlines()}
    assert len(examples) == 2 and set(examples) <= records


@given(notes())
def test_what_was_written_is_read(written: ArrivalHeader) -> None:
    record = encode_header(written)
    assert decode_header(record) == decode_header(memoryview(record)) == written


@given(notes())
def test_every_cut_is_seen(written: ArrivalHeader) -> None:
    record = encode_header(written)
    for size in range(len(record)):
        with pytest.raises(BadArrivalHeader):
            decode_header(record[:size])
    with pytest.raises(BadArrivalHeader):
        decode_header(record + b"\xff")


@given(notes(), st.integers(1, 255))
def test_every_changed_byte_is_seen(written: ArrivalHeader, change: int) -> None:
    record = bytearray(encode_header(written))
    for position in range(len(record)):
        record[position] ^= change
        with pytest.raises(BadArrivalHeader):
            decode_header(record)
        record[position] ^= change


def test_bytes_after_a_checksum_that_holds_are_not_trusted_either() -> None:
    """What is taken is a note that its own bytes are written for again."""
    generator, taken = seeded("notes"), 0
    for _ in range(scaled(30_000)):
        payload = bytearray(encode_header(generator.choice(list(ALL.values())))[HEADER_SIZE:])
        for _ in range(generator.randrange(1, 3)):
            payload[generator.randrange(len(payload))] = generator.choice((0, 1, 2, 255, generator.randrange(256)))
        record = make_record(payload[: generator.choice((len(payload), generator.randrange(len(payload) + 1)))],
                             header.HEADER_ID)  # fmt: skip
        try:
            found = decode_header(record)
        except (BadArrivalHeader, NewerFormat):
            continue
        taken += 1
        assert decode_header(encode_header(found)) == found, record.hex()
    assert taken


@pytest.mark.parametrize("end", [b"", b"\xff" * 4, b"\xff" * 6, b"\xff" * 4 + b"\xfe", b"\xff" * 70])
@pytest.mark.parametrize("name", ALL)
def test_there_is_one_end_and_no_other(name: str, end: bytes) -> None:
    payload = encode_header(ALL[name])[HEADER_SIZE:].rstrip(b"\xff")
    with pytest.raises(BadArrivalHeader, match=r"do not match|has only"):
        decode_header(make_record(payload + end, header.HEADER_ID))


def test_a_count_that_no_batch_has_asks_for_no_memory() -> None:
    payload = header.FIXED_PART.pack(1, header.ARRIVAL, header.SHAPE_SAME_DUE, 0, (1 << 32) - 1, (1 << 32) - 1, LOG)
    with pytest.raises(BadArrivalHeader, match="arrival of 4294967295 messages"):
        decode_header(make_record(payload + b"\x80" + bytes(7) + b"\xff" * 5, header.HEADER_ID))


def test_what_a_later_version_wrote_is_named() -> None:
    payload = bytearray(encode_header(ALL["times"])[HEADER_SIZE:])
    payload[0] = 2
    with pytest.raises(NewerFormat, match="an arrival header"):
        decode_header(make_record(payload, header.HEADER_ID))


@pytest.mark.parametrize(
    "bad",
    [
        header.arrival_header(LOG, "orders", DueTimes(array("Q"), b"", 0, 0), 100),
        header.arrival_header(LOG, "orders", MIXED, 3 * HEADER_SIZE - 1),
        header.arrival_header(LOG, "o" * 256, MIXED, 408),
        header.arrival_header(LOG, "orders", MIXED._replace(absolute=b"\x00\x01"), 408),
        header.cancel_header(header.NO_TURN_COLUMNS),
        header.cancel_header(TurnColumns(array("Q", (1,)), array("Q"))),
        header.cancel_header(TurnColumns(*(array("Q", range(header.CHANGED_MESSAGES_MAX + 1)) for _ in range(2)))),
        header.reschedule_header(LOG, "orders", MIXED, 408, header.NO_TURN_COLUMNS),
        ArrivalHeader(9, LOG, "orders", MIXED, 408, header.NO_TURN_COLUMNS),
    ],
)
def test_what_no_reader_would_take_is_not_written(bad: ArrivalHeader) -> None:
    with pytest.raises(ValueError):
        encode_header(bad)


def test_what_broker_time_is_ahead_by_is_kept_for_times_only() -> None:
    delays, times = (due_times_of(array("Q", (DUE, DUE)), flag * 2) for flag in (b"\x00", b"\x01"))
    for ahead in (1, -1, AHEAD_MAX, -AHEAD_MAX):
        assert decode_header(encode_header(header.arrival_header(LOG, "o", times, 272, ahead))).ahead_ms == ahead
        assert header.arrival_header(LOG, "o", delays, 272, ahead) == header.arrival_header(LOG, "o", delays, 272)


def test_a_record_of_another_producer_is_no_arrival_header() -> None:
    payload = encode_header(ALL["times"])[HEADER_SIZE:]
    for id, flag in ((make_id(2, 1), 0), (make_id(3, 0), 0), (header.HEADER_ID, 1), (header.HEADER_ID, 1 << 16)):
        record = HEADER.pack(len(payload), crc32(payload), id, flag) + payload
        with pytest.raises(BadArrivalHeader):
            decode_header(record)


def test_a_small_send_costs_less_than_a_hundred_bytes_more() -> None:
    one = header.arrival_header(LOG, "orders", due_times_of(array("Q", (DUE,)), b"\x00"), 136)
    assert len(encode_header(one)) < 64


@pytest.mark.parametrize("flags", [b"\x00", b"\x01", b"\x00\x01"])
@pytest.mark.parametrize("apart", [0, 1])
def test_no_step_of_python_is_made_for_a_message(apart: int, flags: bytes) -> None:
    few, many = (
        header.arrival_header(LOG, "orders", due_times_of(times, (flags * len(times))[: len(times)]), len(times) * 99)
        for times in (array("Q", (DUE + n * apart for n in range(count))) for count in (100, 5_000))
    )
    for act in (encode_header, lambda each: decode_header(encode_header(each))):
        assert steps(lambda act=act: act(many)) == steps(lambda act=act: act(few)) < 200  # type: ignore[misc]


def test_what_runs_when_garbage_is_collected_is_no_step_of_what_is_counted() -> None:
    """Hypothesis has such a callback, once it ran in the process."""

    def collected(phase: str, info: dict[str, int]) -> None:
        assert phase in ("start", "stop") and info

    made = header.arrival_header(LOG, "orders", due_times_of(array("Q", range(DUE, DUE + 100)), bytes(100)), 9_900)
    expected, before = steps(lambda: encode_header(made)), gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(1)
    try:
        assert [steps(lambda: encode_header(made)) for _ in range(20)] == [expected] * 20
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collected)


# Control records. What a sender chooses: due times, and what lies before and after the note.

FORGED = encode_trailer(LOG_ID, BlockTrailer(3, 408, 0x40000040, DUE, 1, 2, 3, 4))


def test_a_forged_block_trailer_would_be_seen() -> None:
    assert contains_trailer_header(b"any" + FORGED, LOG_ID)


def test_no_due_times_make_a_block_trailers_header() -> None:
    """Its bytes as due times, from every place of it on, in every row of words."""
    source = FORGED * 2
    for start in range(len(FORGED)):
        data = source[start : start + 96]
        asked = array("Q", (int.from_bytes(data[n : n + 8], "big") & DUE_MAX for n in range(0, 96, 8)))
        for flags in (bytes(12), b"\x01" * 12, b"\x00\x01" * 6):
            for made in (
                header.arrival_header(LOG, "o", due_times_of(asked, flags), 240),
                header.cancel_header(TurnColumns(asked, asked)),
            ):
                assert not contains_trailer_header(encode_header(made), LOG_ID)


def test_no_record_beside_an_arrival_header_makes_a_block_trailers_header_with_it() -> None:
    """For notes of all sizes around those whose length looks like a flag."""
    counts = [*range(1, 30), *range(2038, 2090, 1), *scaled_counts()]
    for count in counts:
        for topic in ("o", "orders"):
            times = array("Q", range(DUE, DUE + count))
            record = encode_header(
                header.arrival_header(LOG, topic, due_times_of(times, bytes(count)), count * HEADER_SIZE)
            )
            assert not seams(record), len(record)


def scaled_counts() -> range:
    """Notes of 4 MiB and a little more, or one of them."""
    return range(524_285, 524_305, 20 // scaled(20))


def seams(record: bytes) -> list[int]:
    """How long the parts before the note are with which, or after which, a header would stand there."""
    found = []
    for size in range(1, HEADER_SIZE):
        before = FORGED[:size] + record[:HEADER_SIZE]
        after = record[-HEADER_SIZE:] + FORGED[size:HEADER_SIZE]
        found += [size for each in (before, after) if contains_trailer_header(each, LOG_ID)]
    return found


@pytest.mark.parametrize("length", [64, 16_384, 16_639, 4_194_304])
def test_a_record_of_such_a_length_would_make_one(length: int) -> None:
    """So the end of a note is needed: this is what it prevents."""
    assert seams(make_record(bytes(length), header.HEADER_ID))


def test_a_header_that_goes_on_after_would_make_one() -> None:
    """The least end that a note could have is one byte shorter than what it has."""
    assert seams(make_record(FORGED[:4], header.HEADER_ID))
