"""Frames. However the bytes are cut they give the same frames; whatever they are, `BadFrame` and nothing
else.
"""

import struct
import tracemalloc
from itertools import pairwise

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scale import scaled, seeded
from tfmq import bounded_msgpack, limits
from tfmq.bounded_msgpack import pack
from tfmq.errors import BadFrame, BadRequest
from tfmq.protocol import commands
from tfmq.protocol.frames import Decoder, Frame, check_size, decode_header, encode, frame_at, parse_prefix

headers = st.tuples(st.integers(-40, 80), st.integers(0, (1 << 32) - 1)).flatmap(
    lambda start: st.lists(st.integers(0, 1 << 40) | st.text(max_size=30) | st.none(), max_size=8).map(
        lambda rest: [*start, *rest]
    )
)
frames = st.lists(st.tuples(headers, st.binary(max_size=400)), min_size=1, max_size=5)


def stream(*pairs: tuple[list[object], bytes]) -> bytes:
    return b"".join(bytes(part) for header, body in pairs for part in encode(header, body))


def plain(found: list[Frame]) -> list[tuple[list[object], bytes]]:
    return [(frame.header, bytes(frame.body)) for frame in found]


def test_a_frame_is_what_the_page_says() -> None:
    assert b"".join(bytes(part) for part in encode([2, 7], b"ab", memoryview(b"c"))) == bytes.fromhex(
        "0000000a00000003920207616263"
    )


def test_every_cut_in_two_gives_the_same_frames() -> None:
    pairs: list[tuple[list[object], bytes]] = [([1, 5, "x"], b"body"), ([-3, 6], b""), ([2, 0, None, [1]], b"z" * 90)]
    data = stream(*pairs)
    for cut in range(len(data) + 1):
        decoder = Decoder()
        assert plain(decoder.feed(data[:cut]) + decoder.feed(data[cut:])) == pairs, f"cut at {cut}"
        assert not decoder.is_incomplete


def test_byte_by_byte_gives_the_same_frames() -> None:
    pairs: list[tuple[list[object], bytes]] = [([1, 5, "x" * 500], b"body"), ([2, 6], b"")]
    decoder, found = Decoder(), []
    for byte in stream(*pairs):
        assert decoder.missing_bytes >= 1
        found += decoder.feed(bytes([byte]))
    assert plain(found) == pairs


@settings(max_examples=scaled(1000))
@given(frames, st.lists(st.integers(0, 2500), max_size=12))
def test_any_cuts_give_the_same_frames(pairs: list[tuple[list[object], bytes]], cuts: list[int]) -> None:
    data = stream(*pairs)
    decoder, found = Decoder(), []
    for start, end in pairwise([0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]):
        found += decoder.feed(data[start:end])
    assert plain(found) == pairs


@settings(max_examples=scaled(1000))
@given(frames)
def test_feeding_exactly_what_is_missing_never_runs_over(pairs: list[tuple[list[object], bytes]]) -> None:
    data, decoder, found, position = stream(*pairs), Decoder(), [], 0
    while position < len(data):
        wanted = decoder.missing_bytes
        found += decoder.feed(data[position : position + wanted])
        position += wanted
    assert position == len(data) and plain(found) == pairs


def test_a_body_is_a_view_of_what_was_fed() -> None:
    data = stream(([1, 1], b"body"))
    (frame,) = Decoder().feed(data)
    assert frame.body.obj is data


def test_a_frame_in_the_middle_of_a_buffer_is_read_in_place() -> None:
    data = memoryview(b"...." + stream(([1, 2], b"b")) + b"....")
    frame, end = frame_at(data, 4)
    assert frame is not None and plain([frame]) == [([1, 2], b"b")] and end == len(data) - 4
    assert frame_at(data[:6], 4) == (None, 4)
    assert frame_at(data[:10], 4) == (None, 8)
    assert frame_at(data[:13], 4) == (None, end - 4)


@settings(max_examples=scaled(5000))
@given(st.binary(max_size=200), st.integers(0, 200))
def test_any_bytes_are_frames_or_a_bad_frame(data: bytes, cut: int) -> None:
    decoder = Decoder()
    try:
        decoder.feed(data[:cut])
        decoder.feed(data[cut:])
    except BadFrame as error:
        assert str(error) and error.closes


@settings(max_examples=scaled(3000))
@given(st.binary(max_size=300))
def test_any_header_in_a_right_frame_is_read_or_a_bad_frame(header: bytes) -> None:
    data = struct.pack(">II", 4 + len(header), len(header)) + header
    try:
        (frame,) = Decoder().feed(data)
    except BadFrame:
        return
    assert type(frame.header) is list and type(frame.header[0]) is int and 0 <= frame.header[1] < 1 << 32


def test_flipped_bits_are_another_frame_or_a_bad_frame() -> None:
    data = stream(([21, 5, "orders", 9, 0, 1, 0, 1, 2, [[120, 1, 77]]], b"r" * 120))
    random = seeded("flipped bits")
    for _ in range(scaled(20_000)):
        broken = bytearray(data)
        for _ in range(random.randint(1, 4)):
            broken[random.randrange(len(data))] ^= 1 << random.randrange(8)
        try:
            Decoder().feed(bytes(broken))
        except BadFrame:
            continue


@pytest.mark.parametrize(
    ("size", "header_size", "why"),
    [
        (0, None, "no room"),
        (3, None, "no room"),
        (limits.FRAME_BYTES + 1, None, "larger than"),
        (0xFFFFFFFF, None, "larger than"),
        (4, 1, "does not fit"),
        (100, 97, "does not fit"),
        (100, 0xFFFFFFFF, "does not fit"),
        (limits.FRAME_BYTES, limits.HEADER_BYTES + 1, "header of"),
    ],
)
def test_wrong_sizes_are_reported_before_anything_is_taken(size: int, header_size: int | None, why: str) -> None:
    data = struct.pack(">I", size) + (b"" if header_size is None else struct.pack(">I", header_size))
    tracemalloc.start()
    try:
        with pytest.raises(BadFrame, match=why):
            Decoder().feed(data)
        assert tracemalloc.get_traced_memory()[1] < 64 * limits.KIB
    finally:
        tracemalloc.stop()
    with pytest.raises(BadFrame, match=why):
        parse_prefix(data + bytes(8))


def test_the_cap_of_the_moment_holds() -> None:
    data = stream(([1, 1], bytes(70_000)))
    with pytest.raises(BadFrame, match="larger than the 65536"):
        Decoder(limits.FRAME_BYTES_BEFORE_HELLO).feed(data[:4])
    assert check_size(data) == len(data) - 4


@pytest.mark.parametrize(
    "header",
    [b"", b"\x01", b"\x90", b"\x91\x01", b"\x92\x01\xff", b"\x92\xa1a\x01", b"\x92\xc3\x01", b"\x80", b"\x92\x01"],
)
def test_headers_that_begin_otherwise_are_bad_frames(header: bytes) -> None:
    with pytest.raises(BadFrame):
        decode_header(header)


def test_a_stream_of_small_pieces_takes_the_memory_of_one_frame() -> None:
    data = stream(([1, 1], bytes(4 * limits.MIB)))
    tracemalloc.start()
    try:
        decoder = Decoder()
        for start in range(0, len(data) - 1, 1000):
            decoder.feed(data[start : min(start + 1000, len(data) - 1)])
        assert tracemalloc.get_traced_memory()[1] < 2.5 * len(data)
    finally:
        tracemalloc.stop()


BOMBS = (b"\xdd\x00\x0f\xff\xff", b"\x91", b"\xdf\x00\x0f\xff\xff", b"\xdb\xff\xff\xff\xff", b"\x90")


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb.hex())
def test_a_header_cannot_claim_more_memory_than_its_cap(bomb: bytes) -> None:
    header = (b"\xdd\x00\x0f\x00\x00" + bomb * limits.MIB)[: limits.MIB]
    data = struct.pack(">II", 4 + len(header), len(header)) + header
    tracemalloc.start()
    try:
        with pytest.raises(BadFrame):
            frame_at(memoryview(data), 0)
        assert tracemalloc.get_traced_memory()[1] < limits.HEADER_BYTES
    finally:
        tracemalloc.stop()


BOUNDS = commands.header_bounds(20_000)
SURPLUS = [0] * 500_000


@pytest.mark.parametrize(
    "header",
    [
        [2, 1, *SURPLUS],
        [21, 1, "orders", 0, 1, 1, 0, 1, [[5, 1, 1, *SURPLUS]]],
        [21, 1, "orders", 0, 1, 1, 0, 1, SURPLUS],
        [43, 1, "g", 1, [["orders", 0, 1, 1, 1]], dict.fromkeys(map(str, range(250_000)))],
        [99, 1, *SURPLUS],
        [1 << 40, 1, *SURPLUS],
    ],
    ids=["fields", "in a row", "rows", "map", "reserved command", "unknown command"],
)
def test_surplus_values_are_refused_before_they_are_decoded(
    header: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pack(header)

    def decoded(*_: object, **__: object) -> None:
        pytest.fail("the header was decoded")

    monkeypatch.setattr(bounded_msgpack, "_unpackb", decoded)
    with pytest.raises(BadFrame, match=r"fields|more than"):
        decode_header(data, BOUNDS)


@pytest.mark.parametrize("spare", [0, 60], ids=["of this release", "with fields of a later one"])
@pytest.mark.parametrize(
    "header",
    [
        [21, 1, "orders", 0, 1, 1, 0, 1, [[60_000, 1, 1 << 31]] * limits.BATCH_BLOCKS],
        [43, 1, "g", 1, "m", [["t" * 100, 9, 1, 1 << 40, 1 << 40, 5]] * limits.OFFSETS_PER_COMMIT],
        [41, 1, "g", "m", 1, [["t" * 40, 9, 1, 5, 5, 1 << 40, 7, 1, 1, 1, 1, 1]] * 20_000],
        [10, 1, ["t" * 30] * limits.TOPICS.cap],
        [57, 1, [["orders", 0, 1, 1, [[60_000, 1, 1 << 31]] * 20]] * 4000],
        [80, 1, "g", 1, "run", 1, [["x" * 40, 1, 2]] * limits.COMMIT_GROUP_MEMBERS],
    ],
    ids=["blocks", "offsets", "held partitions", "topics", "batches of a transaction", "members"],
)
def test_the_largest_headers_of_requests_are_decoded(header: list[object], spare: int) -> None:
    header = [*header, *[None] * spare]
    assert decode_header(pack(header), BOUNDS) == header


@pytest.mark.parametrize("code", [b"\x02", b"\xcc\x02", b"\xcd\x00\x02"], ids=len)
def test_the_command_of_a_header_is_known_however_its_number_is_packed(code: bytes) -> None:
    with pytest.raises(BadFrame, match="at most 66 "):
        decode_header(b"\xdc\x01\x90" + code + b"\x01" * 399, BOUNDS)


def test_what_cannot_be_sent_is_a_bad_request() -> None:
    for field in (object(), 1 << 70, "\ud800", {1: {2: object()}}):
        with pytest.raises(BadRequest, match="cannot be sent"):
            encode([1, 1, field])
    with pytest.raises(BadRequest, match="ask for less"):
        encode([1, 1, "x" * limits.HEADER_BYTES])


def test_fields_that_msgpack_writes_otherwise_are_the_same_header() -> None:
    long = msgpack.packb([1, 5]).replace(b"\x05", b"\xce\x00\x00\x00\x05")
    assert decode_header(long) == [1, 5]
