"""Buckets on a simulated disk, with verbs; the arrivals are a list, and every record names its number."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from journal.errors import Corrupt
from journal.record.format import make_id, make_log_id, make_record
from journal.testing import SimulatedDisk
from tfmq.delay.arrivals.log import ArrivalBatch
from tfmq.delay.buckets.bucket import Bucket
from tfmq.delay.buckets.format import TimeSpan
from tfmq.delay.buckets.store import BucketStore
from tfmq.delay.buckets.writer import PendingFilter

FOLDER = "data/delay"
NOW = 1_700_000_000_000
ORDERS = make_log_id(9, 3)
BILLS = make_log_id(10, 0)
TOPICS = {ORDERS: "orders", BILLS: "bills"}
OFFSETS = 100
"""Of the arrivals, for each number: what one message has there."""

SECOND, MINUTE, HOUR, DAY = 1000, 60_000, 3_600_000, 86_400_000
NEAR = (NOW >> 22) + 1 << 22
"""The beginning of a span of 70 minutes, soon."""


class Waiting(NamedTuple):
    """A delayed message."""

    number: int
    due: int
    log_id: int
    absolute: bool
    record: bytes


class Kept(NamedTuple):
    """What a bucket says of one."""

    due: int
    log_id: int
    absolute: bool
    record: bytes | None


def record_of(number: int, size: int = 0) -> bytes:
    """A record whose payload names the number; `size`: of the payload, at least."""
    return make_record(b"message %d" % number + bytes(max(0, size - 20)), make_id(70, number & 0xFFFF))


def everything(log_id: int, dues: Sequence[int], numbers: Sequence[int]) -> bool:
    """Nothing was settled."""
    return True


def kept_of(waiting: Waiting) -> Kept:
    return Kept(waiting.due, waiting.log_id, waiting.absolute, waiting.record)


class Bench:
    """`arrived` are all messages ever, by number."""

    def __init__(self, disk: SimulatedDisk | None = None) -> None:
        self.disk = disk or SimulatedDisk()
        if disk is None:
            self.disk.make_folder("data")
            self.disk.make_folder(FOLDER)
            self.disk.force_folder("data")
            self.disk.force_folder("")
        self.ids = 0
        self.arrived: dict[int, Waiting] = {}
        self.next_number = 0
        self.buckets = self.open()

    def open(self) -> BucketStore:
        def new_id() -> int:
            self.ids += 1
            return 7

        self.buckets = BucketStore.open(self.disk, FOLDER, new_id=new_id, randomness=lambda size: b"s" * size)
        return self.buckets

    def crash(self, keep: str = "nothing") -> Bench:
        """The same life on what a power cut leaves."""
        return self.on(self.disk.crash(keep=keep))

    def on(self, disk: SimulatedDisk) -> Bench:
        """The same life on another disk."""
        again = Bench.__new__(Bench)
        again.disk, again.ids = disk, 0
        again.arrived, again.next_number = dict(self.arrived), self.next_number
        again.open()
        return again

    def arrive(self, *dues: int, log_id: int = ORDERS, absolute: bool = False, size: int = 0) -> list[Waiting]:
        """Messages that are not spilled yet."""
        new = []
        for due in dues:
            record = record_of(self.next_number, size)
            new.append(Waiting(self.next_number, due, log_id, absolute, record))
            self.next_number += 1
        self.arrived |= {each.number: each for each in new}
        self.next_number += 1  # The note of the next batch has a number, too.
        return new

    def unspilled(self) -> list[Waiting]:
        return [each for number, each in self.arrived.items() if number >= self.buckets.spilled_number]

    def batches(self) -> list[ArrivalBatch]:
        """What is not spilled, as the arrivals give it."""
        result: list[ArrivalBatch] = []
        run: list[Waiting] = []
        for each in [*self.unspilled(), None]:
            follows = each is not None and run and each.number == run[-1].number + 1 and each.log_id == run[0].log_id
            if run and not follows:
                result.append(batch_of(run))
                run = []
            if each is not None:
                run.append(each)
        return result

    def spill(self, now_ms: int = NOW, pending: PendingFilter = everything) -> int:
        """Everything that arrived."""
        end = self.next_number
        return self.buckets.spill(self.batches(), end * OFFSETS, end, now_ms, pending)

    def put(self, *dues: int, **named: object) -> list[Waiting]:
        """Arrive, and are spilled."""
        new = self.arrive(*dues, **named)  # type: ignore[arg-type]
        self.spill()
        return new

    def bucket(self, due: int) -> Bucket:
        found = self.buckets.bucket_at(due)
        assert found is not None
        return found

    def contents(self, buckets: Sequence[Bucket] | None = None) -> dict[int, Kept]:
        """By number, what the leaves (or these) have, read in full. A number that is there twice is a fault."""
        found: dict[int, Kept] = {}
        for bucket in self.buckets.live_buckets if buckets is None else buckets:
            for columns in bucket.read_columns(self.buckets.files):
                records = self.buckets.read(bucket.bucket_id, columns.positions, columns.numbers)
                rows = zip(columns.numbers, columns.dues, columns.targets, columns.flags, records, strict=True)
                for number, due, target, flag, record in rows:
                    assert number not in found, f"number {number} is there twice"
                    assert due in bucket.span
                    log_id, topic = columns.table[target]
                    assert topic == TOPICS[log_id]
                    found[number] = Kept(due, log_id, bool(flag), record)
        return found

    def expected(self) -> dict[int, Kept]:
        """What `contents` should give if nothing was settled."""
        spilled = self.buckets.spilled_number
        return {number: kept_of(each) for number, each in self.arrived.items() if number < spilled}

    def spans(self) -> list[TimeSpan]:
        return [bucket.span for bucket in self.buckets.live_buckets]

    def files(self) -> list[str]:
        """Names in the folder, without the checkpoint's."""
        return [name for name in self.disk.list(FOLDER) if name != "checkpoint"]

    def damage_file(self, name: str, change: Callable[[bytearray], object]) -> None:
        """Changes the bytes of a file without the store."""
        path = f"{FOLDER}/{name}"
        data = bytearray(self.disk.read_file(path))
        change(data)
        self.disk.write_file(path, bytes(data))


def damage_in(buckets: BucketStore) -> list[Corrupt]:
    """What was found so far in the buckets that count."""
    return [error for bucket in buckets.live_buckets for error in bucket.damage]


def batch_of(run: Sequence[Waiting]) -> ArrivalBatch:
    """Messages with rising numbers, of one log."""
    first = run[0]
    dues = array("Q", [each.due for each in run])
    sizes = array("I", [len(each.record) for each in run])
    absolute = bytes(each.absolute for each in run)
    offsets = array("Q", [each.number * OFFSETS for each in run])
    data = [memoryview(b"".join(each.record for each in run))]
    return ArrivalBatch(
        first.log_id, TOPICS[first.log_id], first.number, dues, absolute, min(dues), max(dues), offsets, sizes, data
    )


def flip(position: int) -> Callable[[bytearray], None]:
    """Changes one bit there."""

    def change(data: bytearray) -> None:
        data[position] ^= 0x10

    return change
