"""What can be saved of a stretch of a segment whose control record no longer vouches for it. Pure.

Offsets and ordinals are for ever, so the stretch keeps its size and its count: records whose own checksum
holds stay where they are, what lies between becomes fillers, and a new control record closes it in the 100
bytes where one stood before. A record's checksum covers its body only: ids and flags in the stretch are as
they were found, not proven.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple
from zlib import crc32

from journal.control import CONTROL_SIZE, CONTROL_VERSION, BadControl, Control, decode_control, encode_control
from journal.header import (
    FLAG_CONTROL,
    FLAG_FILLER,
    FLAG_REFUSED_MASK,
    HEADER,
    HEADER_SIZE,
    RECORD_SIZE_MAX,
    BadRecord,
    make_filler,
    split_body,
)

STRETCH_SIZE_MAX: Final = RECORD_SIZE_MAX // 2
"""A longer stretch is a lost piece of the disk: it becomes fillers alone, each with a control record of its
own."""

SEARCH_SIZE_MAX: Final = 4 << 20
"""Bytes that are looked at one by one for the next sound record: a second's work; behind them all is given
up."""

UNKNOWN: Final = -1

_LENGTH_BITS: Final = 32


class Piece(NamedTuple):
    """`size` bytes at `position` of the stretch: a record that is kept, or a place for a filler. `count`
    ordinals; UNKNOWN where nothing says how many there were."""

    position: int
    size: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    kept: bool


class Trailer(NamedTuple):
    """A control record whose own checksum holds, at `position` of the stretch. The checksum covers `control`, not the
    `log_id` in the header."""

    position: int
    log_id: int
    control: Control


class Salvaged(NamedTuple):
    """`data` replaces the stretch, of the same size. `kept` and `lost` count ordinals."""

    data: bytes
    pieces: list[Piece]
    kept: int
    lost: int


def salvage(stretch: bytes, count: int, log_id: int, closing: Control) -> Salvaged:
    """Makes a sound stretch of the same size, which stands for `count` ordinals, out of a damaged one.

    `closing` gives its offset, first ordinal, append time, epoch, forced mark, source and more-follows. The
    stretch must be a control record's size or longer by at least a header's.
    """
    room = len(stretch) - CONTROL_SIZE
    if room < 0 or 0 < room < HEADER_SIZE:
        raise ValueError(f"{len(stretch)} bytes cannot be a block")
    if len(stretch) > STRETCH_SIZE_MAX:
        return _give_up(len(stretch), count, log_id, closing)
    pieces = _counted(_widened(list(_pieces(stretch[:room], log_id))), count)
    if pieces is None:
        pieces = [Piece(0, room, count, False)] if room else []
    parts = [
        stretch[p.position : p.position + p.size] if p.kept else make_filler(log_id, p.size, p.count)
        for p in pieces
    ]
    records = b"".join(parts)
    control = closing._replace(records=count, size=room, crc=crc32(records))
    kept = sum(piece.count for piece in pieces if piece.kept)
    return Salvaged(records + encode_control(log_id, control), pieces, kept, count - kept)


def known_count(stretch: bytes, log_id: int) -> tuple[int, bool]:
    """(the ordinals that a stretch must have at least, whether it may have had more)."""
    if len(stretch) > STRETCH_SIZE_MAX:
        return 0, True
    pieces = _widened(list(_pieces(stretch[: max(0, len(stretch) - CONTROL_SIZE)], log_id)))
    return sum(p.count for p in pieces if p.count != UNKNOWN), any(p.count == UNKNOWN for p in pieces)


def without_foreign(
    stretch: bytes, offset: int, log_id: int, ordinal: int | None, next_ordinal: int | None
) -> bytes:
    """`stretch`, which stands at `offset` of the log `log_id`, with zeros in the place of blocks of another offset or
    of another log: their records are there, or were, and would be delivered twice. `ordinal` is that of the stretch's
    first record, `next_ordinal` that of the first after it.

    Only a control record whose checksum holds says that its block is foreign, and only where the chain of lengths has
    one: bytes of a payload that look like one say nothing. It speaks for the bytes that it covers if their CRC-32
    holds, otherwise for the records that follow each other without a gap up to it, and for those after it up to the
    next gap or control record.

    The checksum does not cover the log's id. A control record that names this place and these ordinals, and an id that
    differs in one bit and that no other here has, is this log's own, with a flipped bit.
    """
    room = len(stretch) - CONTROL_SIZE
    if room < 0 or len(stretch) > STRETCH_SIZE_MAX:
        return stretch
    pieces = list(_pieces(stretch[:room], log_id))
    trailers = _trailers(stretch, pieces)
    named = Counter(trailer.log_id for trailer in trailers)

    def is_own(trailer: Trailer) -> bool:
        control = trailer.control
        if control.offset + control.size != offset + trailer.position:
            return False
        if trailer.log_id == log_id:
            return True
        return (
            (trailer.log_id ^ log_id).bit_count() == 1
            and named[trailer.log_id] == 1
            and (control.offset != offset or ordinal in (None, control.first_ordinal))
            and (trailer.position != room or next_ordinal in (None, control.next_ordinal))
        )

    edges = [(p.position, p.position + p.size) for p in pieces if p.count == UNKNOWN]
    edges += [(trailer.position, trailer.position + CONTROL_SIZE) for trailer in trailers]
    # Up to where an own control record says that its block begins, the bytes are not those of a foreign one.
    begun = {trailer.position: trailer.control.offset - offset for trailer in trailers if is_own(trailer)}
    left = bytearray(stretch)
    for trailer in trailers:
        if is_own(trailer):
            continue
        position, end = trailer.position, trailer.position + CONTROL_SIZE
        first = position - trailer.control.size
        if first < 0 or crc32(memoryview(stretch)[first:position]) != trailer.control.crc:
            # A gap that ends with this control record is lost anyway; what lies before it is not this one's.
            floors = (after if after <= position else before for before, after in edges if before < position)
            first = max(0, first, *floors)
        following = min((before for before, _ in edges if before >= end), default=len(stretch))
        next = end if begun.get(following) == end else following
        left[first:next] = bytes(next - first)
    return bytes(left)


def _trailers(stretch: bytes, pieces: list[Piece]) -> list[Trailer]:
    """The control records at places where the chain of lengths has one, or may have had one: between records, at the
    end of a gap of unknown contents, at the end of the stretch."""
    ends = [p.position + p.size for p in pieces if p.count == UNKNOWN or (p.count == 0 and not p.kept)]
    found = (_trailer_at(stretch, end - CONTROL_SIZE) for end in [*ends, len(stretch)])
    return [trailer for trailer in found if trailer is not None]


def _trailer_at(data: bytes, position: int) -> Trailer | None:
    if position < 0 or position + CONTROL_SIZE > len(data):
        return None
    log_id = HEADER.unpack_from(data, position)[2]
    try:
        return Trailer(position, log_id, decode_control(data, position, log_id))
    except BadControl:
        return None


def _give_up(size: int, count: int, log_id: int, closing: Control) -> Salvaged:
    """Fillers alone; the first stands for all ordinals."""
    parts, pieces = [], []
    position = 0
    control = closing
    while position < size:
        rest = size - position
        # The last part must not be shorter than the smallest block.
        part = rest if rest <= STRETCH_SIZE_MAX else STRETCH_SIZE_MAX - CONTROL_SIZE - HEADER_SIZE
        covered = 0 if position else count
        filler = make_filler(log_id, part - CONTROL_SIZE, covered)
        control = control._replace(records=covered, size=len(filler), crc=crc32(filler))
        parts += [filler, encode_control(log_id, control)]
        pieces.append(Piece(position, len(filler), covered, False))
        control = control._replace(offset=control.next, first_ordinal=control.next_ordinal)
        position += part
    return Salvaged(b"".join(parts), pieces, 0, count)


def _pieces(data: bytes, log_id: int) -> Iterator[Piece]:
    """Sound records, and the gaps between them."""
    position, end = 0, len(data)
    while position < end:
        size = _size_at(data, position)
        count = _count_if_sound(data, position, size, log_id)
        if _is_trailer(data, position, log_id):
            size = CONTROL_SIZE
            yield Piece(position, size, 0, False)
        elif count is not None:
            yield Piece(position, size, count, True)
        elif (mended := _size_of_flipped(data, position)) is not None:
            size = mended
            yield Piece(position, size, 1, False)
        elif _plausible(data, position + size, log_id):
            # What follows is in order, so the length is right and one record is lost.
            yield Piece(position, size, 1, False)
        else:
            size = (
                next(
                    (
                        p
                        for p in range(position + HEADER_SIZE, min(end, position + SEARCH_SIZE_MAX))
                        if _begins_chain(data, p, log_id)
                    ),
                    end,
                )
                - position
            )
            yield Piece(position, size, UNKNOWN, False)
        position += size


def _size_of_flipped(data: bytes, position: int) -> int | None:
    """The size of a record of which one bit of the length is wrong, as its checksum proves; None if it is none: so that
    nothing in its payload is taken for what follows it."""
    if position + HEADER_SIZE > len(data):
        return None
    length, checksum, id, flag = HEADER.unpack_from(data, position)
    if not id >> 24 or flag & FLAG_REFUSED_MASK:
        return None
    body = memoryview(data)[position + HEADER_SIZE :]
    for bit in range(_LENGTH_BITS):
        size = length ^ 1 << bit
        if size <= len(body) and crc32(body[:size]) == checksum:
            return HEADER_SIZE + int(size)
    return None


def _size_at(data: bytes, position: int) -> int:
    """The size that the header at `position` names; beyond every end if there is no header."""
    if position + HEADER_SIZE > len(data):
        return RECORD_SIZE_MAX
    return HEADER_SIZE + int.from_bytes(data[position : position + 4], "big")


def _count_if_sound(data: bytes, position: int, size: int, log_id: int) -> int | None:
    """The ordinals of a record that is whole by its own checksum; None if it is not."""
    if position + size > len(data):
        return None
    _, checksum, id, flag = HEADER.unpack_from(data, position)
    if flag == FLAG_FILLER and id == log_id:
        return int(checksum)
    if not id >> 24 or flag & FLAG_REFUSED_MASK:
        return None
    body = memoryview(data)[position + HEADER_SIZE : position + size]
    try:
        split_body(body, flag)
    except BadRecord:
        return None
    return 1 if crc32(body) == checksum else None


def _plausible(data: bytes, position: int, log_id: int) -> bool:
    """True if the stretch ends at `position`, or a sound record begins there."""
    if position == len(data):
        return True
    return (
        position < len(data) and _count_if_sound(data, position, _size_at(data, position), log_id) is not None
    )


def _is_trailer(data: bytes, position: int, log_id: int) -> bool:
    """True for a control record of any log, also one with damage: then its length and two of its flag, its id and its
    checksum say it."""
    if position + CONTROL_SIZE > len(data):
        return False
    length, checksum, id, flag = HEADER.unpack_from(data, position)
    if length != CONTROL_SIZE - HEADER_SIZE or flag == FLAG_FILLER:
        return False
    body = memoryview(data)[position + HEADER_SIZE : position + CONTROL_SIZE]
    if flag == FLAG_CONTROL:
        return bool(id == log_id) or crc32(body) == checksum
    # Of the broker's own records some have the number of their log as their id, but none begins like this.
    return bool(id == log_id) and body[:2] == CONTROL_VERSION.to_bytes(2, "big") and crc32(body) == checksum


def _begins_chain(data: bytes, position: int, log_id: int) -> bool:
    """True if a sound record begins at `position`, and what follows it is one too, or the end: so that bytes
    in a payload are hardly taken for a record."""
    size = _size_at(data, position)
    return _count_if_sound(data, position, size, log_id) is not None and _plausible(
        data, position + size, log_id
    )


def _widened(pieces: list[Piece]) -> list[Piece]:
    """Gaps too short for a filler take in their neighbour; neighbouring gaps of unknown count become one."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        short = (not piece.kept and piece.size < HEADER_SIZE) or (
            last is not None and not last.kept and last.size < HEADER_SIZE
        )
        if last is not None and (short or (last.count == piece.count == UNKNOWN)):
            found[-1] = Piece(last.position, last.size + piece.size, UNKNOWN, False)
        else:
            found.append(piece)
    return found


def _counted(pieces: list[Piece], count: int) -> list[Piece] | None:
    """Every gap with its count, so that they sum up to `count`; None if they cannot."""
    known = sum(piece.count for piece in pieces if piece.count != UNKNOWN)
    rest = count - known
    gaps = [number for number, piece in enumerate(pieces) if piece.count == UNKNOWN]
    if rest < 0 or (rest and not gaps):
        return None
    for number in gaps:
        pieces[number] = pieces[number]._replace(count=rest)
        rest = 0
    return pieces
