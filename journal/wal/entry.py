"""Format of an entry of the transaction journal: a header of 28 bytes and a body. See docs/formats/journal.md.

Every checksum starts with the journal's secret `seed`, so that bytes of another journal, or of a message that imitates
an entry, are invalid. Lengths are checked against the available bytes before they are used. Invalid bytes raise
`BadRecord` and no other error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import Final, NamedTuple, TypeAlias

from journal.crc32 import crc32
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

_NAMES: Final = (
    "prepare, commit, rollback, local commit, local rollback, heuristic commit, heuristic rollback, forget, epochs,"
    " group commit, group abort, group forget"
)
OPERATION_NAMES: Final = dict(enumerate(_NAMES.split(", "), PREPARE))
"""Names of the operations, by number. An unknown number is of a later version; it is kept and shown as a number."""

HEADER: Final = Struct(">IIIQQ")
"""Header of an entry. The third field has kind, flags and reserved bits. Flags and reserved bits are 0 in this
version."""
HEADER_SIZE: Final = HEADER.size
KIND_SHIFT: Final = 24

MESSAGES: Final = Struct(">QQQIIIQ")
OPERATION: Final = Struct(">HHQ")
BLOCK: Final = Struct(">III")

ENTRY_SIZE_MAX: Final = 272 << 20
"""Maximum size of an entry: the largest frame of a broker (256 MiB), and fields that describe it. A damaged size cannot
make a reader allocate more memory."""

SEED: Final = Struct(">QQ")
_SIZE: Final = Struct(">I")
_REST: Final = Struct(">IQQ")
_MESSAGES_REST: Final = Struct(">IQQQQQIIIQ")
_MESSAGES_WORD: Final = KIND_APPEND_MSG << KIND_SHIFT
_OPERATION_REST: Final = Struct(">IQQHHQ")
_OPERATION_WORD: Final = KIND_TX_OP << KIND_SHIFT


class AppendMsg(NamedTuple):
    """Some of the records that a transaction sends to one partition.

    `log_id`: id of the partition's log (journal.record.format.make_log_id). `blocks`: (bytes, count, CRC-32) of each
    block, as in journal.record.batch.Batch. `count`: number of records. `moved_from`: 0, or if compaction has copied
    this entry, the LSN of the original. In an entry that was read, `data` is a view of the bytes read.
    """

    epoch: int
    log_id: int
    producer_id: int
    sequence: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used here
    blocks: Sequence[tuple[int, int, int]]
    data: Buffer
    moved_from: int = 0


class Operation(NamedTuple):
    """A change of the state of a transaction or commit group, or of the epoch counter. `payload` is opaque here."""

    kind: int
    epoch: int
    payload: bytes = b""


class LostEntries(NamedTuple):
    """`size` bytes of the journal that were lost, and that a repair has replaced by a filler."""

    size: int


Content: TypeAlias = AppendMsg | Operation


class JournalEntry(NamedTuple):
    """An entry of `size` bytes (with header) at `lsn`. `durable_lsn`: durable LSN when the entry was written."""

    kind: int
    lsn: int
    size: int
    content: AppendMsg | Operation | LostEntries
    durable_lsn: int

    @property
    def next(self) -> int:
        return self.lsn + self.size


def checksum_seed(journal_id: int, salt: int) -> int:
    """Initial value of the checksums of a journal. `salt` is secret, so that no message can imitate an entry."""
    return crc32(SEED.pack(journal_id, salt))


def encode_entries(
    contents: Sequence[Content], lsn: int, durable_lsn: int, seed: int
) -> tuple[list[Buffer], list[int], int]:
    """Return (buffers to write one after the other, LSN of each entry, LSN after the last). Raises TooLarge.

    The records in `contents` are not copied, so they must not change until the buffers are written.
    """
    buffers: list[Buffer] = []
    lsns: list[int] = []
    for content in contents:
        lsns.append(lsn)
        if isinstance(content, AppendMsg):
            epoch, log_id, producer_id, sequence, count, blocks, data, moved_from = content
            table = BLOCK.pack(*blocks[0]) if len(blocks) == 1 else b"".join([BLOCK.pack(*b) for b in blocks])
            fields = (epoch, log_id, producer_id, sequence, count, len(blocks), moved_from)
            rest = _MESSAGES_REST.pack(_MESSAGES_WORD, lsn, durable_lsn, *fields) + table
        else:
            kind, epoch, data = content
            rest = _OPERATION_REST.pack(_OPERATION_WORD, lsn, durable_lsn, kind, 0, epoch)
        size = 8 + len(rest) + len(data)
        if size > ENTRY_SIZE_MAX:
            raise TooLarge("an entry of the transaction journal", size, ENTRY_SIZE_MAX)
        word = _SIZE.pack(size)
        checksum = crc32(data, crc32(rest, crc32(word, seed)))
        buffers.append(word + _SIZE.pack(checksum) + rest)
        if data:
            buffers.append(data)
        lsn += size
    return buffers, lsns, lsn


def encode_filler(size: int, lsn: int, durable_lsn: int, seed: int) -> bytes:
    """Encode a filler of `size` bytes (at least a header) in place of lost entries."""
    rest = _REST.pack(KIND_FILLER << KIND_SHIFT, lsn, durable_lsn) + bytes(size - HEADER_SIZE)
    word = _SIZE.pack(size)
    return word + _SIZE.pack(crc32(rest, crc32(word, seed))) + rest


def entries_of(data: Buffer, lsn: int, seed: int) -> Iterator[JournalEntry]:
    """Yield the verified entries in `data`, which starts at `lsn`. Their contents are views of `data`.

    At the first invalid entry, raises Incomplete if `data` ends inside this entry, else BadRecord. `position` of the
    error is the start of the entry in `data`.
    """
    view = memoryview(data)
    end = len(view)
    position = 0
    unpack = HEADER.unpack_from
    while position < end:
        if end - position < HEADER_SIZE:
            raise Incomplete(position, "it ends inside an entry's header")
        size, checksum, word, found, durable_lsn = unpack(view, position)
        decode = _DECODERS.get(word)
        if (
            decode is None
            or found != lsn + position
            or not HEADER_SIZE <= size <= ENTRY_SIZE_MAX
            or durable_lsn > found
        ):
            raise BadRecord(position, _describe_header_error(size, word, found, lsn + position))
        next = position + size
        if next > end:
            raise Incomplete(position, "it ends inside an entry")
        if crc32(view[position + 8 : next], crc32(view[position : position + 4], seed)) != checksum:
            raise BadRecord(position, "an entry fails its checksum")
        yield JournalEntry(word >> KIND_SHIFT, found, size, decode(view, position, next), durable_lsn)
        position = next


def decode_entry(data: Buffer, lsn: int, seed: int) -> JournalEntry:
    """Decode and verify the entry at the start of `data`, whose LSN is `lsn`. Raises BadRecord, Incomplete."""
    for entry in entries_of(data, lsn, seed):
        return entry
    raise Incomplete(0, "there is nothing")


def claimed_size(data: Buffer) -> int:
    """Return the unverified size in the header at the start of `data`; 0 if header or size is invalid."""
    if len(data) < HEADER_SIZE:
        return 0
    size: int = HEADER.unpack_from(data)[0]
    return size if HEADER_SIZE <= size <= ENTRY_SIZE_MAX else 0


def _describe_header_error(size: int, word: int, found: int, lsn: int) -> str:
    if word not in _DECODERS:
        return f"no entry: its kind and flags are {word:#010x}"
    if found != lsn:
        return f"no entry: its LSN is {found}"
    if not HEADER_SIZE <= size <= ENTRY_SIZE_MAX:
        return f"no entry: {size} bytes are not possible"
    return "no entry: its durable LSN is above its own"


def _decode_messages(view: memoryview, position: int, next: int) -> AppendMsg:
    begins = position + HEADER_SIZE + MESSAGES.size
    if begins > next:
        raise BadRecord(position, "an APPEND_MSG that is too short")
    epoch, log_id, producer_id, sequence, count, blocks, moved_from = MESSAGES.unpack_from(view, position + HEADER_SIZE)
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


_Decoder: TypeAlias = Callable[[memoryview, int, int], AppendMsg | Operation | LostEntries]
_DECODERS: Final[dict[int, _Decoder]] = {
    KIND_APPEND_MSG << KIND_SHIFT: _decode_messages,
    KIND_TX_OP << KIND_SHIFT: _decode_operation,
    KIND_FILLER << KIND_SHIFT: lambda view, position, next: LostEntries(next - position),
}
"""Decoders by the third field of HEADER. An entry with a flag of a later version has no decoder."""

_KINDS: Final = re.escape(bytes(sorted(word >> KIND_SHIFT for word in _DECODERS)))
_LOW_BITS: Final = 32
"""One search pattern serves a range of 4 GiB: all LSNs in this range have the same higher bits."""
_WORD_POSITION: Final = 8


def possible_entries(data: Buffer, lsn: int) -> Iterator[int]:
    """Yield the positions in `data` where an entry may start, ascending: to find the next entry after damage.

    `lsn`: LSN of `data[0]`. At each position is a header with a known kind and the LSN of that position. The caller
    must verify the checksum.
    """
    start = 0
    while start + HEADER_SIZE <= len(data):
        high = (lsn + start) >> _LOW_BITS
        limit = ((high + 1) << _LOW_BITS) - lsn
        for position, found in possible_headers(data, start, high.to_bytes(4, "big")):
            if position >= limit:
                break
            if found == lsn + position:
                yield position
        start = limit


def possible_headers(data: Buffer, start: int = 0, high: bytes = b"") -> Iterator[tuple[int, int]]:
    """Yield (position, LSN) of possible entry headers in `data` whose LSN begins with the bytes `high`."""
    view = memoryview(data)
    pattern = re.compile(b"(?=[" + _KINDS + rb"]\0\0\0" + re.escape(high) + b")")
    for match in pattern.finditer(view, start + _WORD_POSITION):
        position = match.start() - _WORD_POSITION
        if position + HEADER_SIZE > len(view):
            return
        size, _, _, lsn, durable_lsn = HEADER.unpack_from(view, position)
        if HEADER_SIZE <= size <= ENTRY_SIZE_MAX and durable_lsn <= lsn:
            yield position, lsn
