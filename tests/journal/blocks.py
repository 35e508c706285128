"""Verbs for tests: make records, blocks and appends, and spoil them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from zlib import crc32

from journal.record.batch import BatchBlock, split_blocks
from journal.record.block_trailer import TRAILER_SIZE, BlockTrailer, encode_trailer
from journal.record.format import make_id, make_log_id, make_record

LOG_ID = make_log_id(9, 3)
PRODUCER = 7


def records(count: int, *, sequence: int = 0, size: int = 10, producer: int = PRODUCER) -> list[bytes]:
    """`count` records with payloads of one size, each different."""
    return [
        make_record(f"{sequence + n:0{size}d}".encode()[-size:], make_id(producer, sequence + n)) for n in range(count)
    ]


def mixed(count: int, rng: random.Random, *, sequence: int = 0, producer: int = PRODUCER) -> list[bytes]:
    """`count` records of many sizes, some with an attribute."""
    return [
        make_record(
            rng.randbytes(rng.randrange(0, 60)),
            make_id(producer, sequence + n),
            attribute=rng.randbytes(rng.randrange(9)) if rng.random() < 0.3 else None,
        )
        for n in range(count)
    ]


def batch(found: Sequence[bytes]) -> tuple[bytes, list[BatchBlock]]:
    """The bytes of a batch and its blocks."""
    data = b"".join(found)
    return data, split_blocks(data)


def closed(
    found: Sequence[bytes], offset: int, ordinal: int, *, time: int = 1000, log_id: int = LOG_ID, **more: int
) -> bytes:
    """One control block: the records and the block trailer after them."""
    data = b"".join(found)
    control = BlockTrailer(len(found), len(data), crc32(data), time, 1, 0, ordinal, offset, **more)  # type: ignore[arg-type]
    return data + encode_trailer(log_id, control)


def log_bytes(
    groups: Sequence[Sequence[bytes]], offset: int = 0, ordinal: int = 0, *, time: int = 1000
) -> tuple[bytes, list[int]]:
    """The control blocks of `groups`, and the position of each."""
    parts: list[bytes] = []
    starts: list[int] = []
    size = 0
    for number, group in enumerate(groups):
        starts.append(size)
        part = closed(group, offset + size, ordinal, time=time + number)
        parts.append(part)
        size += len(part)
        ordinal += len(group)
    return b"".join(parts), starts


def flipped(data: bytes, bit: int) -> bytes:
    """`data` with one bit the other way."""
    spoiled = bytearray(data)
    spoiled[bit // 8] ^= 1 << bit % 8
    return bytes(spoiled)


def controls_of(data: bytes, starts: Sequence[int]) -> list[int]:
    """Where the block trailers of `log_bytes` begin."""
    return [end - TRAILER_SIZE for end in (*starts[1:], len(data))]
