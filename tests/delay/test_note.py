"""Notes: what goes in comes out, every damage is seen, and no sender can hide a control record in one."""

import gc
import re
from array import array
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.errors import NewerFormat
from journal.record.block_trailer import Control, encode_control, holds_control_header
from journal.record.format import HEADER, HEADER_SIZE, make_id, make_record
from tests import paths
from tests.delay.steps import steps
from tests.scale import scaled, seeded
from tfmq.delay.arrivals import header
from tfmq.delay.arrivals.header import BadNote, Note, Turns, decode_note, encode_note
from tfmq.delay.arrivals.log import LOG_ID
from tfmq.delay.due_time import AHEAD_MAX, DUE_MAX, Dues, dues_of

GOLDEN = paths.TESTS / "golden" / "arrivals.hex"

DUE = 1_700_000_060_000
LOG = 0x1000_0001

MIXED = dues_of(array("Q", (DUE, DUE + 1, DUE_MAX)), b"\x01\x00\x01")
OLD = Turns(array("Q", (DUE, DUE + 5, 1)), array("Q", (7, 8, 1 << 50)))

ALL: dict[str, Note] = {
    "one due time for three": header.arrival(LOG, "orders", dues_of(array("Q", (DUE,) * 3), bytes(3)), 408),
    "times": header.arrival(LOG, "orders", dues_of(array("Q", (DUE, DUE + 1)), b"\x01\x01"), 272),
    "times and delays": header.arrival(LOG, "orders", MIXED, 408),
    "a cancel": header.cancel(Turns(array("Q", (DUE,)), array("Q", (7,)))),
    "a reschedule": header.reschedule(LOG, "orders", MIXED, 408, OLD),
    "times of a clock behind broker time": header.arrival(
        LOG, "orders", dues_of(array("Q", (DUE, DUE)), b"\x01\x01"), 272, 3_600_000
    ),
    "a reschedule where the clock is ahead": header.reschedule(LOG, "orders", MIXED, 408, OLD, -3_600_000),
}

words = st.integers(1, DUE_MAX)
aheads = st.one_of(st.just(0), st.integers(-AHEAD_MAX, AHEAD_MAX))
turns = st.lists(st.tuples(words, words), min_size=1, max_size=9)


@st.composite
def notes(draw: st.DrawFn) -> Note:
    kind = draw(st.sampled_from(sorted(header.KIND_NAMES)))
    rows = draw(turns)
    old = Turns(array("Q", (due for due, _ in rows)), array("Q", (number for _, number in rows)))
    if kind == header.CANCEL:
        return header.cancel(old)
    times = draw(st.one_of(words.map(lambda due: [due] * len(rows)), st.just([due for due, _ in rows])))
    flags = draw(st.one_of(st.sampled_from((b"\x00", b"\x01")).map(lambda flag: flag * len(rows)),
                           st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)).map(bytes)))  # fmt: skip
    size = draw(st.integers(len(rows) * HEADER_SIZE, (1 << 32) - 1))
    log_id, topic = draw(words), draw(st.from_regex(r"[A-Za-z0-9._-]{1,249}", fullmatch=True))
    dues = dues_of(array("Q", times), flags)
    if kind == header.ARRIVAL:
        return header.arrival(log_id, topic, dues, size, draw(aheads))
    return header.reschedule(log_id, topic, dues, size, old, draw(aheads))


def lines() -> list[str]:
    return [f"{name}: {encode_note(each).hex()}" for name, each in ALL.items()]


def test_the_bytes_are_those_of_the_golden_file() -> None:
    assert GOLDEN.read_text().splitlines() == lines()


@pytest.mark.parametrize("line", GOLDEN.read_text().splitlines() if GOLDEN.exists() else [])
def test_the_golden_file_is_read(line: str) -> None:
    name, record = line.split(": ")
    assert decode_note(bytes.fromhex(record)) == ALL[name]


def test_the_worked_examples_of_the_page_are_in_the_golden_file() -> None:
    page = (GOLDEN.parent.parent.parent / "docs" / "formats" / "arrivals.md").read_text()
    examples = [each.replace("\n", "") for each in re.findall(r"```hex\n([0-9a-f\n]+)```", page)]
    records = {line.split(" ")[-1] for line in GOLDEN.read_text().splitlines()}
    assert len(examples) == 2 and set(examples) <= records


@given(notes())
def test_what_was_written_is_read(written: Note) -> None:
    record = encode_note(written)
    assert decode_note(record) == decode_note(memoryview(record)) == written


@given(notes())
def test_every_cut_is_seen(written: Note) -> None:
    record = encode_note(written)
    for size in range(len(record)):
        with pytest.raises(BadNote):
            decode_note(record[:size])
    with pytest.raises(BadNote):
        decode_note(record + b"\xff")


@given(notes(), st.integers(1, 255))
def test_every_changed_byte_is_seen(written: Note, change: int) -> None:
    record = bytearray(encode_note(written))
    for position in range(len(record)):
        record[position] ^= change
        with pytest.raises(BadNote):
            decode_note(record)
        record[position] ^= change


def test_bytes_behind_a_checksum_that_holds_are_not_trusted_either() -> None:
    """What is taken is a note that its own bytes are written for again."""
    generator, taken = seeded("notes"), 0
    for _ in range(scaled(30_000)):
        payload = bytearray(encode_note(generator.choice(list(ALL.values())))[HEADER_SIZE:])
        for _ in range(generator.randrange(1, 3)):
            payload[generator.randrange(len(payload))] = generator.choice(
                (0, 1, 2, 255, generator.randrange(256))
            )
        record = make_record(payload[: generator.choice((len(payload), generator.randrange(len(payload) + 1)))],
                             header.NOTE_ID)  # fmt: skip
        try:
            found = decode_note(record)
        except (BadNote, NewerFormat):
            continue
        taken += 1
        assert decode_note(encode_note(found)) == found, record.hex()
    assert taken


@pytest.mark.parametrize("end", [b"", b"\xff" * 4, b"\xff" * 6, b"\xff" * 4 + b"\xfe", b"\xff" * 70])
@pytest.mark.parametrize("name", ALL)
def test_there_is_one_end_and_no_other(name: str, end: bytes) -> None:
    payload = encode_note(ALL[name])[HEADER_SIZE:].rstrip(b"\xff")
    with pytest.raises(BadNote, match=r"do not match|has only"):
        decode_note(make_record(payload + end, header.NOTE_ID))


def test_a_count_that_no_batch_has_asks_for_no_memory() -> None:
    payload = header.HEAD.pack(1, header.ARRIVAL, header.SHAPE_SAME_DUE, 0, (1 << 32) - 1, (1 << 32) - 1, LOG)
    with pytest.raises(BadNote, match="arrival of 4294967295 messages"):
        decode_note(make_record(payload + b"\x80" + bytes(7) + b"\xff" * 5, header.NOTE_ID))


def test_what_a_later_version_wrote_is_named() -> None:
    payload = bytearray(encode_note(ALL["times"])[HEADER_SIZE:])
    payload[0] = 2
    with pytest.raises(NewerFormat, match="an arrival header"):
        decode_note(make_record(payload, header.NOTE_ID))


@pytest.mark.parametrize(
    "bad",
    [
        header.arrival(LOG, "orders", Dues(array("Q"), b"", 0, 0), 100),
        header.arrival(LOG, "orders", MIXED, 3 * HEADER_SIZE - 1),
        header.arrival(LOG, "o" * 256, MIXED, 408),
        header.arrival(LOG, "orders", MIXED._replace(absolute=b"\x00\x01"), 408),
        header.cancel(header.NO_TURNS),
        header.cancel(Turns(array("Q", (1,)), array("Q"))),
        header.cancel(Turns(*(array("Q", range(header.TURNS_MAX + 1)) for _ in range(2)))),
        header.reschedule(LOG, "orders", MIXED, 408, header.NO_TURNS),
        Note(9, LOG, "orders", MIXED, 408, header.NO_TURNS),
    ],
)
def test_what_no_reader_would_take_is_not_written(bad: Note) -> None:
    with pytest.raises(ValueError):
        encode_note(bad)


def test_what_broker_time_is_ahead_by_is_kept_for_times_only() -> None:
    delays, times = (dues_of(array("Q", (DUE, DUE)), flag * 2) for flag in (b"\x00", b"\x01"))
    for ahead in (1, -1, AHEAD_MAX, -AHEAD_MAX):
        assert decode_note(encode_note(header.arrival(LOG, "o", times, 272, ahead))).ahead_ms == ahead
        assert header.arrival(LOG, "o", delays, 272, ahead) == header.arrival(LOG, "o", delays, 272)


def test_a_record_of_somebody_else_is_no_note() -> None:
    payload = encode_note(ALL["times"])[HEADER_SIZE:]
    for id, flag in ((make_id(2, 1), 0), (make_id(3, 0), 0), (header.NOTE_ID, 1), (header.NOTE_ID, 1 << 16)):
        record = HEADER.pack(len(payload), crc32(payload), id, flag) + payload
        with pytest.raises(BadNote):
            decode_note(record)


def test_a_small_send_costs_less_than_a_hundred_bytes_more() -> None:
    one = header.arrival(LOG, "orders", dues_of(array("Q", (DUE,)), b"\x00"), 136)
    assert len(encode_note(one)) < 64


@pytest.mark.parametrize("flags", [b"\x00", b"\x01", b"\x00\x01"])
@pytest.mark.parametrize("apart", [0, 1])
def test_no_step_of_python_is_made_for_a_message(apart: int, flags: bytes) -> None:
    few, many = (
        header.arrival(LOG, "orders", dues_of(times, (flags * len(times))[: len(times)]), len(times) * 99)
        for times in (array("Q", (DUE + n * apart for n in range(count))) for count in (100, 5_000))
    )
    for act in (encode_note, lambda each: decode_note(encode_note(each))):
        assert steps(lambda act=act: act(many)) == steps(lambda act=act: act(few)) < 200  # type: ignore[misc]


def test_what_runs_when_garbage_is_collected_is_no_step_of_what_is_counted() -> None:
    """Hypothesis has such a callback, once it ran in the process."""

    def collected(phase: str, info: dict[str, int]) -> None:
        assert phase in ("start", "stop") and info

    made = header.arrival(LOG, "orders", dues_of(array("Q", range(DUE, DUE + 100)), bytes(100)), 9_900)
    expected, before = steps(lambda: encode_note(made)), gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(1)
    try:
        assert [steps(lambda: encode_note(made)) for _ in range(20)] == [expected] * 20
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collected)


# Control records. What a sender chooses: due times, and what lies before and behind the note.

FORGED = encode_control(LOG_ID, Control(3, 408, 0x40000040, DUE, 1, 2, 3, 4))


def test_a_forged_control_record_would_be_seen() -> None:
    assert holds_control_header(b"any" + FORGED, LOG_ID)


def test_no_due_times_make_a_control_records_header() -> None:
    """Its bytes as due times, from every place of it on, in every row of words."""
    source = FORGED * 2
    for start in range(len(FORGED)):
        data = source[start : start + 96]
        asked = array("Q", (int.from_bytes(data[n : n + 8], "big") & DUE_MAX for n in range(0, 96, 8)))
        for flags in (bytes(12), b"\x01" * 12, b"\x00\x01" * 6):
            for made in (
                header.arrival(LOG, "o", dues_of(asked, flags), 240),
                header.cancel(Turns(asked, asked)),
            ):
                assert not holds_control_header(encode_note(made), LOG_ID)


def test_no_neighbour_of_a_note_makes_a_control_records_header_with_it() -> None:
    """For notes of all sizes around those whose length looks like a flag."""
    counts = [*range(1, 30), *range(2038, 2090, 1), *scaled_counts()]
    for count in counts:
        for topic in ("o", "orders"):
            times = array("Q", range(DUE, DUE + count))
            record = encode_note(
                header.arrival(LOG, topic, dues_of(times, bytes(count)), count * HEADER_SIZE)
            )
            assert not seams(record), len(record)


def scaled_counts() -> range:
    """Notes of 4 MiB and a little more, or one of them."""
    return range(524_285, 524_305, 20 // scaled(20))


def seams(record: bytes) -> list[int]:
    """How long the parts before the note are with which, or behind which, a header would stand there."""
    found = []
    for size in range(1, HEADER_SIZE):
        before = FORGED[:size] + record[:HEADER_SIZE]
        behind = record[-HEADER_SIZE:] + FORGED[size:HEADER_SIZE]
        found += [size for each in (before, behind) if holds_control_header(each, LOG_ID)]
    return found


@pytest.mark.parametrize("length", [64, 16_384, 16_639, 4_194_304])
def test_a_record_of_such_a_length_would_make_one(length: int) -> None:
    """So the end of a note is needed: this is what it prevents."""
    assert seams(make_record(bytes(length), header.NOTE_ID))


def test_a_header_that_goes_on_behind_would_make_one() -> None:
    """The least end that a note could have is one byte shorter than what it has."""
    assert seams(make_record(FORGED[:4], header.NOTE_ID))
