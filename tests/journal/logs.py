"""Verbs for tests of logs: a simulated disk, a clock that stands still, a log that can be opened again and again."""

from __future__ import annotations

import random
from typing import Any
from zlib import crc32

from journal.log.log import Log
from journal.log.options import LogOptions
from journal.record.batch import BLOCK_SIZE_MAX, Appended, Batch
from journal.record.block import Block, blocks_of, producer_runs
from journal.record.format import make_id, make_log_id, make_record, records_of
from journal.testing import SimulatedClock, SimulatedDisk

LOG_ID = make_log_id(77, 3)
FOLDER = "/data/orders-3"


class CountingState:
    """A state that any mistake shows in: every run that was ever learned, in order."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, int, int, int]] = []
        self.loads = 0

    def load(self, data: bytes) -> None:
        self.loads += 1
        numbers = [int(word) for word in data.split()]
        self.runs = [tuple(numbers[n : n + 4]) for n in range(0, len(numbers), 4)]  # type: ignore[misc]

    def dump(self) -> bytes:
        return b" ".join(str(number).encode() for run in self.runs for number in run)

    def apply(self, block: Block) -> None:
        self.runs.extend(tuple(run) for run in producer_runs(block))  # type: ignore[misc]

    def appended(self, batch: Batch, answer: Appended) -> None:
        """What the broker does with an answer: learns the same as recovery will."""
        ends = [record for record, _ in answer.positions[1:]] + [batch.count]
        for (record, offset), end in zip(answer.positions, ends, strict=True):
            self.runs.append((batch.producer_id, batch.sequence + record, end - record, offset))


def make_disk() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.make_folder("/data")
    disk.make_folder(FOLDER)
    disk.force_folder("/")
    disk.force_folder("/data")
    return disk


def make_batch(count: int, size: int = 50, producer_id: int = 9, sequence: int = 0, blocks: bool = True) -> Batch:
    """`count` records whose payloads have `size` bytes and say their sequence."""
    records = [make_record(_payload(sequence + n, size), make_id(producer_id, sequence + n)) for n in range(count)]
    data = b"".join(records)
    named = ((len(data), count, crc32(data)),) if blocks and len(data) <= BLOCK_SIZE_MAX else ()
    return Batch(data, named, producer_id, sequence, count)


def _payload(number: int, size: int) -> bytes:
    return (b"%d." % number * size)[:size]


def payloads_of(data: bytes, offset: int, log_id: int = LOG_ID) -> list[bytes]:
    """What a reader of a chunk gets."""
    found: list[bytes] = []
    for block in blocks_of(data, offset, log_id):
        for record in records_of(block.data):
            found.append(bytes(block.data[record.position + 20 : record.position + record.size]))
    return found


class Bench:
    """One folder with one log in it, over crashes."""

    def __init__(self, disk: SimulatedDisk | None = None, **options: Any) -> None:
        self.disk = disk or make_disk()
        self.clock = SimulatedClock()
        self.options = LogOptions(**options)
        self.sequence = 0
        self.state = CountingState()
        self.log: Log

    def open(self, start_offset: int = 0, log_id: int = LOG_ID) -> Log:
        self.state = CountingState()
        self.log = Log.open(
            self.disk, FOLDER, log_id=log_id, clock=self.clock, options=self.options, state=self.state,
            start_offset=start_offset,
        )  # fmt: skip
        return self.log

    def send(self, count: int = 1, size: int = 50) -> Appended:
        """Appends one batch of the next sequences."""
        batch = make_batch(count, size, sequence=self.sequence)
        answer = self.log.append([batch])[0]
        self.sequence += count
        self.state.appended(batch, answer)
        return answer

    def crash(self, keep: str = "everything", generator: random.Random | None = None) -> Log:
        """The power goes, and the log is opened from what is left."""
        self.disk = self.disk.crash(generator, keep=keep)
        return self.open()

    def kill(self) -> Log:
        """The process ends without a word; the system lives on."""
        return self.open()

    def read_all(self, upto: str = "written", max_bytes: int = 1 << 20) -> list[bytes]:
        found: list[bytes] = []
        offset = self.log.first_offset
        while True:
            chunk = self.log.read(offset, max_bytes, upto=upto)  # type: ignore[arg-type]
            if not chunk.data:
                return found
            found += payloads_of(chunk.data, chunk.start)
            offset = chunk.next

    def expected(self, first: int, next: int, size: int = 50) -> list[bytes]:
        return [_payload(n, size) for n in range(first, next)]

    def path(self, name: str) -> str:
        return f"{FOLDER}/{name}"

    def names(self, suffix: str) -> list[str]:
        return [name for name in self.disk.list(FOLDER) if name.endswith(suffix)]
