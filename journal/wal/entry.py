"""One entry of the transaction journal: a header of 28 bytes and a body. docs/formats/journal.md is the format's page.

    size u32 | checksum u32 | kind u8 | flags u8 (0) | zero u16 | place u64 | forced u64 | body

    APPEND_MSG   epoch u64 | log id u64 | producer id u64 | sequence u32 | count u32 | blocks u32 | moved from u64
                 | blocks x (size u32, count u32, CRC-32 u32) | records
    TX_OP        operation u16 | zero u16 | epoch u64 | payload
    FILLER       zeros: what a repair puts where an entry was lost

All numbers are big-endian; `size` counts the header too. The checksum covers everything but itself and begins at the
journal's own `seed`, so bytes of another journal, or of a message that imitates an entry, do not pass. `place` is where
the entry begins in the journal's space of places, `forced` how far that was forced when the entry was written. Nothing
here trusts a length before it has compared it with the bytes that are there; what does not add up raises `BadRecord`
and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import Final, NamedTuple, TypeAlias
from zlib import crc32

from journal.errors import TooLarge
from journal.record.format import BadRecord, Buffer, Incomplete

KIND_APPEND_MSG: Final = 1
KIND_TX_OP: Final = 2
KIND_FILLER: Final = 3

PREPARE: Final = 1
COMMIT: Final = 2
ROLLBACK: Final = 3
LOCAL_COMMIT: Final = 4
LOCAL_ROLLBACK: Final = 5
HEURISTIC_COMMIT: Final = 6
HEURISTIC_ROLLBACK: Final = 7
FORGET: Final = 8
EPOCHS: Final = 9
GROUP_COMMIT: Final = 10
GROUP_ABORT: Final = 11
GROUP_FORGET: Final = 12

OPERATION_NAMES: Final = {
    PREPARE: "prepare",
    COMMIT: "commit",
    ROLLBACK: "rollback",
    LOCAL_COMMIT: "local commit",
    LOCAL_ROLLBACK: "local rollback",
    HEURISTIC_COMMIT: "heuristic commit",
    HEURISTIC_ROLLBACK: "heuristic rollback",
    FORGET: "forget",
    EPOCHS: "epochs",
    GROUP_COMMIT: "group commit",
    GROUP_ABORT: "group abort",
    GROUP_FORGET: "group forget",
}
"""What a dump calls them. A number that is not here is a later version's: it is kept and shown as a number."""

HEADER: Final = Struct(">IIIQQ")
"""Kind, flags and zero are read as one word: the last two are zero, so it is the kind, 24 bits up."""
HEADER_SIZE: Final = HEADER.size
KIND_SHIFT: Final = 24

MESSAGES: Final = Struct(">QQQIIIQ")
OPERATION: Final = Struct(">HHQ")
BLOCK: Final = Struct(">III")

ENTRY_SIZE_MAX: Final = 272 << 20
"""The largest frame that a broker can be set to take (256 MiB), with what describes it: a damaged size cannot ask for
more memory, however large the file is."""

SEED: Final = Struct(">QQ")
_SIZE: Final = Struct(">I")
_REST: Final = Struct(">IQQ")
_MESSAGES_REST: Final = Struct(">IQQQQQIIIQ")
_MESSAGES_WORD: Final = KIND_APPEND_MSG << KIND_SHIFT
_OPERATION_REST: Final = Struct(">IQQHHQ")
_OPERATION_WORD: Final = KIND_TX_OP << KIND_SHIFT


class AppendMsg(NamedTuple):
    """Records of a transaction for one partition: a piece of it.

    `log_id` is the partition's (journal.record.make_log_id), `blocks` is (bytes, count, CRC-32) a block as in
    journal.record.batch.Batch, `count` the number of records. `moved_from`: the place of the entry of which this is a
    copy that was carried forward, 0 if it is no copy. Of an entry that was read, `data` is a view of the bytes that
    were read.
    """

    epoch: int
    log_id: int
    producer_id: int
    sequence: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    blocks: Sequence[tuple[int, int, int]]
    data: Buffer
    moved_from: int = 0


class Operation(NamedTuple):
    """A change of a transaction's state, or of the counters. `payload` is opaque to the journal."""

    kind: int
    epoch: int
    payload: bytes = b""


class Filler(NamedTuple):
    """`size` bytes of the journal that were lost; a repair has closed the gap."""

    size: int


Content: TypeAlias = AppendMsg | Operation


class Entry(NamedTuple):
    """An entry where it lies: `size` bytes at `place`, header included; `forced` as it was when it was written."""

    kind: int
    place: int
    size: int
    content: AppendMsg | Operation | Filler
    forced: int

    @property
    def next(self) -> int:
        """The place behind it."""
        return self.place + self.size


def seed_of(journal_id: int, salt: int) -> int:
    """Where the checksums of a journal begin. `salt` is known to nobody outside, so no message can imitate an entry."""
    return crc32(SEED.pack(journal_id, salt))


def entry_size(content: Content) -> int:
    """Bytes of its entry."""
    if isinstance(content, AppendMsg):
        return HEADER_SIZE + MESSAGES.size + BLOCK.size * len(content.blocks) + len(content.data)
    return HEADER_SIZE + OPERATION.size + len(content.payload)


def encode_entries(
    contents: Sequence[Content], place: int, forced: int, seed: int
) -> tuple[list[Buffer], list[int], int]:
    """(buffers to be written at `place` one behind the other, the place of each entry, the place behind the last).

    The records are not copied: they must not change until they are written. Raises TooLarge.
    """
    buffers: list[Buffer] = []
    places: list[int] = []
    for content in contents:
        places.append(place)
        if isinstance(content, AppendMsg):
            epoch, log_id, producer_id, sequence, count, blocks, data, moved_from = content
            table = BLOCK.pack(*blocks[0]) if len(blocks) == 1 else b"".join([BLOCK.pack(*b) for b in blocks])
            rest = (
                _MESSAGES_REST.pack(
                    _MESSAGES_WORD,
                    place,
                    forced,
                    epoch,
                    log_id,
                    producer_id,
                    sequence,
                    count,
                    len(blocks),
                    moved_from,
                )
                + table
            )
        else:
            kind, epoch, data = content
            rest = _OPERATION_REST.pack(_OPERATION_WORD, place, forced, kind, 0, epoch)
        size = 8 + len(rest) + len(data)
        if size > ENTRY_SIZE_MAX:
            raise TooLarge("an entry of the transaction journal", size, ENTRY_SIZE_MAX)
        word = _SIZE.pack(size)
        checksum = crc32(data, crc32(rest, crc32(word, seed)))
        buffers.append(word + _SIZE.pack(checksum) + rest)
        if data:
            buffers.append(data)
        place += size
    return buffers, places, place


def encode_filler(size: int, place: int, forced: int, seed: int) -> bytes:
    """An entry of `size` bytes (at least a header's) that stands for what was lost."""
    rest = _REST.pack(KIND_FILLER << KIND_SHIFT, place, forced) + bytes(size - HEADER_SIZE)
    word = _SIZE.pack(size)
    return word + _SIZE.pack(crc32(rest, crc32(word, seed))) + rest


def entries_of(data: Buffer, place: int, seed: int) -> Iterator[Entry]:
    """The entries in `data`, which begins at `place`, each verified; what they hold are views of `data`.

    Raises BadRecord with the position in `data` where the first bad one begins; Incomplete if only bytes are missing.
    """
    view = memoryview(data)
    end = len(view)
    position = 0
    unpack = HEADER.unpack_from
    while position < end:
        if end - position < HEADER_SIZE:
            raise Incomplete(position, "it ends inside an entry's header")
        size, checksum, word, found, forced = unpack(view, position)
        decode = _DECODERS.get(word)
        if (
            decode is None
            or found != place + position
            or not HEADER_SIZE <= size <= ENTRY_SIZE_MAX
            or forced > found
        ):
            raise BadRecord(position, _fault(size, word, found, place + position))
        next = position + size
        if next > end:
            raise Incomplete(position, "it ends inside an entry")
        if crc32(view[position + 8 : next], crc32(view[position : position + 4], seed)) != checksum:
            raise BadRecord(position, "an entry fails its checksum")
        yield Entry(word >> KIND_SHIFT, found, size, decode(view, position, next), forced)
        position = next


def decode_entry(data: Buffer, place: int, seed: int) -> Entry:
    """The one entry that `data`, which begins at `place`, begins with. Raises BadRecord, Incomplete."""
    for entry in entries_of(data, place, seed):
        return entry
    raise Incomplete(0, "there is nothing")


def claimed_size(data: Buffer) -> int:
    """How many bytes an entry says it has, unproven; 0 if that cannot be true, or `data` is no whole header."""
    if len(data) < HEADER_SIZE:
        return 0
    size: int = HEADER.unpack_from(data)[0]
    return size if HEADER_SIZE <= size <= ENTRY_SIZE_MAX else 0


def _fault(size: int, word: int, found: int, place: int) -> str:
    if word not in _DECODERS:
        return f"no entry: its kind and flags are {word:#010x}"
    if found != place:
        return f"no entry: it says that it is at place {found}"
    if not HEADER_SIZE <= size <= ENTRY_SIZE_MAX:
        return f"no entry: {size} bytes are not possible"
    return "no entry: it says that more was forced than was written"


def _decode_messages(view: memoryview, position: int, next: int) -> AppendMsg:
    begins = position + HEADER_SIZE + MESSAGES.size
    if begins > next:
        raise BadRecord(position, "an APPEND_MSG that is too short")
    epoch, log_id, producer_id, sequence, count, blocks, moved_from = MESSAGES.unpack_from(
        view, position + HEADER_SIZE
    )
    records = begins + blocks * BLOCK.size
    if records > next:
        raise BadRecord(position, f"{blocks} blocks do not fit an entry of {next - position} bytes")
    if blocks == 1:
        table: tuple[tuple[int, int, int], ...] = (BLOCK.unpack_from(view, begins),)
    else:
        table = tuple(BLOCK.iter_unpack(view[begins:records]))
    return AppendMsg(epoch, log_id, producer_id, sequence, count, table, view[records:next], moved_from)


def _decode_operation(view: memoryview, position: int, next: int) -> Operation:
    begins = position + HEADER_SIZE + OPERATION.size
    if begins > next:
        raise BadRecord(position, "a TX_OP that is too short")
    kind, zero, epoch = OPERATION.unpack_from(view, position + HEADER_SIZE)
    if zero:
        raise BadRecord(position, "a TX_OP of a later version")
    return Operation(kind, epoch, bytes(view[begins:next]))


def _decode_filler(view: memoryview, position: int, next: int) -> Filler:
    return Filler(next - position)


_Decoder: TypeAlias = Callable[[memoryview, int, int], AppendMsg | Operation | Filler]
_DECODERS: Final[dict[int, _Decoder]] = {
    KIND_APPEND_MSG << KIND_SHIFT: _decode_messages,
    KIND_TX_OP << KIND_SHIFT: _decode_operation,
    KIND_FILLER << KIND_SHIFT: _decode_filler,
}
"""By the word of kind, flags and zero: a set flag is a later version's, and refused."""

_KINDS: Final = re.escape(bytes(sorted(word >> KIND_SHIFT for word in _DECODERS)))
_LOW_BITS: Final = 32
"""Places whose higher bits agree are searched for in one go: 4 GiB."""
_WORD_POSITION: Final = 8


def candidates(data: Buffer, place: int) -> Iterator[int]:
    """Positions in `data`, which begins at `place`, where the header of an entry seems to begin, rising.

    For the way back behind damage, where no start is known: an entry names its kind and its place, and its checksum,
    which is for the caller to prove, does the rest.
    """
    start = 0
    while start + HEADER_SIZE <= len(data):
        high = (place + start) >> _LOW_BITS
        limit = ((high + 1) << _LOW_BITS) - place
        for position, found in headers(data, start, high.to_bytes(4, "big")):
            if position >= limit:
                break
            if found == place + position:
                yield position
        start = limit


def headers(data: Buffer, start: int = 0, high: bytes = b"") -> Iterator[tuple[int, int]]:
    """(position, the place that it names) of whatever in `data` from `start` on looks like an entry's header.

    `high`: how the place, in its eight bytes, begins.
    """
    view = memoryview(data)
    pattern = re.compile(b"(?=[" + _KINDS + rb"]\0\0\0" + re.escape(high) + b")")
    for match in pattern.finditer(view, start + _WORD_POSITION):
        position = match.start() - _WORD_POSITION
        if position + HEADER_SIZE > len(view):
            return
        size, _, _, place, forced = HEADER.unpack_from(view, position)
        if HEADER_SIZE <= size <= ENTRY_SIZE_MAX and forced <= place:
            yield position, place
