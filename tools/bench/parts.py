"""What one record costs in each part of the journal's record code, in ns; no disk, no network.

    python -m tools.bench.parts [--count 1000] [--size 100]

One line a part, the best of five runs. Measure before and after a change in the same minute: the machine's
moods are larger than most changes.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from zlib import crc32

import crcmod.predefined

from journal.record.batch import split_blocks, verify_batch
from journal.record.block import Block, blocks_of, producer_runs
from journal.record.block_trailer import BlockTrailer, encode_trailer
from journal.record.format import header_positions, make_id, make_log_id, make_record

RUNS = 5
RUN_SECONDS = 0.1
"""Long enough that the clock's steps and one stray interrupt do not show."""

PRODUCER = 7
LOG_ID = make_log_id(3, 1)


def nanoseconds(part: Callable[[], object], count: int) -> float:
    """The best time of `part` over RUNS runs, divided by `count`."""
    begun = time.perf_counter()
    part()
    turns = max(1, int(RUN_SECONDS / max(time.perf_counter() - begun, 1e-7)))
    best = float("inf")
    for _ in range(RUNS):
        begun = time.perf_counter()
        for _ in range(turns):
            part()
        best = min(best, (time.perf_counter() - begun) / turns)
    return best * 1e9 / count


def payloads(count: int, size: int, mixed: bool) -> list[bytes]:
    """`count` payloads of `size` bytes, or of half to one and a half of it."""
    rng = random.Random(1)
    return [rng.randbytes(rng.randrange(size // 2, size * 3 // 2) if mixed else size) for _ in range(count)]


def control_blocks(data: bytes) -> bytes:
    """The records of a batch as control blocks of a log."""
    parts: list[bytes] = []
    position = offset = ordinal = 0
    for size, count, crc in split_blocks(data):
        control = BlockTrailer(count, size, crc, 0, 0, 0, ordinal, offset)
        parts += [data[position : position + size], encode_trailer(LOG_ID, control)]
        position, offset, ordinal = position + size, control.next, control.next_ordinal
    return b"".join(parts)


def figures(count: int, size: int) -> list[tuple[str, float]]:
    """(part, ns a record) of every part."""
    equal, mixed = payloads(count, size, False), payloads(count, size, True)
    return [*record_figures(equal), *batch_figures(equal, "equal sizes"), *batch_figures(mixed, "mixed sizes")]


def record_figures(bodies: list[bytes]) -> list[tuple[str, float]]:
    """What does not depend on whether sizes are equal."""
    crcmod_crc = crcmod.predefined.mkPredefinedCrcFun("crc-32")
    data = b"".join(make_record(body, make_id(PRODUCER, n)) for n, body in enumerate(bodies))
    control = BlockTrailer(1, 120, 5, 0, 0, 0, 0, 0)
    count = len(bodies)
    return [
        ("encode", nanoseconds(lambda: b"".join([make_record(b, n) for n, b in enumerate(bodies, 1 << 24)]), count)),
        ("cut into blocks", nanoseconds(lambda: split_blocks(data), count)),
        ("walk", nanoseconds(lambda: header_positions(data), count)),
        ("crc32 of a body, zlib", nanoseconds(lambda: [crc32(body) for body in bodies], count)),
        ("crc32 of a body, crcmod", nanoseconds(lambda: [crcmod_crc(body) for body in bodies], count)),
        ("a block trailer, encoded", nanoseconds(lambda: encode_trailer(LOG_ID, control), 1)),
    ]


def batch_figures(bodies: list[bytes], kind: str) -> list[tuple[str, float]]:
    """A batch as the broker checks it, and the log as readers and recovery go through it."""
    data = b"".join(make_record(body, make_id(PRODUCER, n)) for n, body in enumerate(bodies))
    count, batch, log = len(bodies), split_blocks(data), control_blocks(data)
    blocks: list[Block] = list(blocks_of(log, 0, LOG_ID))
    parts: dict[str, Callable[[], object]] = {
        "verify a batch": lambda: verify_batch(data, batch, PRODUCER, 0, count),
        "verify with each record's checksum": lambda: verify_batch(data, batch, PRODUCER, 0, count, "records"),
        "blocks of a log": lambda: list(blocks_of(log, 0, LOG_ID)),
        "blocks without checksums": lambda: list(blocks_of(log, 0, LOG_ID, verify=False)),
        "runs of a block": lambda: [producer_runs(block) for block in blocks],
    }
    return [(f"{name}, {kind}", nanoseconds(part, count)) for name, part in parts.items()]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="ns a record in each part of the record code")
    parser.add_argument("--count", type=int, default=1000, help="records in a batch")
    parser.add_argument("--size", type=int, default=100, help="bytes of a payload")
    options = parser.parse_args()
    print(f"{options.count} records of {options.size} bytes, ns a record")
    for name, value in figures(options.count, options.size):
        print(f"{value:10.1f}  {name}")


if __name__ == "__main__":
    main()
