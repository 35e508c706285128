"""A partition's bytes, made in memory: what a scripted broker hands out, and what tests damage."""

from collections.abc import Sequence
from typing import Any, NamedTuple
from zlib import crc32

from journal.record.block_trailer import TRAILER_SIZE, BlockTrailer, encode_trailer
from journal.record.format import make_id, make_log_id, make_record, tag_flag
from tfmq.message import encode_attribute

INCARNATION = 5
PRODUCER = 9
APPEND_MS = 1_700_000_000_000


class Piece(NamedTuple):
    """One control block where it lies."""

    offset: int
    data: bytes
    records: int


class Bytes:
    """One partition: append to it, then ask for the bytes from an offset on, as a broker would answer."""

    def __init__(self, partition: int = 0, incarnation: int = INCARNATION, first_offset: int = 0) -> None:
        self.log_id = make_log_id(incarnation, partition)
        self.first = self.end = first_offset
        self.ordinal = 0
        self.epoch = 1
        self.sequence = 0
        self.pieces: list[Piece] = []

    def record(self, payload: bytes, flag: int = 0, **attribute: Any) -> bytes:
        """One record with the next id; attributes as of `encode_attribute`."""
        encoded = encode_attribute(**attribute) if attribute else None
        tag = attribute.get("tag")
        flag |= tag_flag(tag) if isinstance(tag, str) else 0
        self.sequence += 1
        return make_record(payload, make_id(PRODUCER, self.sequence - 1), flag, encoded)

    def append_records(self, records: Sequence[bytes], count: int | None = None, **control: Any) -> Piece:
        """One control block of `records` as they are; `count` ordinals, else one a record."""
        data = b"".join(records)
        counted = len(records) if count is None else count
        closing = BlockTrailer(counted, len(data), crc32(data), APPEND_MS, self.epoch, 0, self.ordinal, self.end)
        piece = Piece(self.end, data + encode_trailer(self.log_id, closing._replace(**control)), counted)
        self.pieces.append(piece)
        self.end += len(data) + TRAILER_SIZE
        self.ordinal += counted
        return piece

    def append(self, *payloads: bytes, **attribute: Any) -> Piece:
        """One control block with a record for each payload."""
        return self.append_records([self.record(payload, **attribute) for payload in payloads])

    def replace(self, piece: Piece, data: bytes) -> None:
        """The disk has other bytes there now."""
        self.pieces[self.pieces.index(piece)] = piece._replace(data=data)

    def body(self) -> bytes:
        return b"".join(piece.data for piece in self.pieces)

    def read(self, offset: int, max_bytes: int) -> tuple[int, int, bytes]:
        """(start, next, bytes) of whole blocks from the one that holds `offset` on, at least one."""
        found: list[Piece] = []
        size = 0
        for piece in self.pieces:
            if piece.offset + len(piece.data) > offset and (not found or size + len(piece.data) <= max_bytes):
                found.append(piece)
                size += len(piece.data)
            elif found:
                break
        start = found[0].offset if found else offset
        return start, start + size, b"".join(piece.data for piece in found)
