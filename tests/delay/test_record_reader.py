"""Records from wherever they lie, in the order that was asked for, and no more bytes than asked for."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.delay.rig import ORDERS, Handle, Rig
from tests.scale import scaled, seeded
from tfmq.delay import append_limits, record_reader
from tfmq.delay.arrivals.log import Records
from tfmq.delay.buckets.format import BUCKET_ID_SHIFT
from tfmq.delay.record_reader import ReadAhead, RecordReader
from tfmq.delay.rows import RowColumns, RowQueue


def payloads(fetched: object) -> list[bytes]:
    return [record[20:] for record in fetched]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def mixed() -> tuple[Rig, RecordReader, dict[int, int], list[Handle]]:
    """Half of the messages in a bucket, half in the arrivals; where each lies, by number."""
    rig = Rig()
    sent = rig.send([b"%d" % n + b"x" * (n % 300) for n in range(200)], 3_600_000)
    rig.advance(70)
    sent += rig.send([b"%d" % n + b"y" * (n % 300) for n in range(200, 400)], 20_000)
    places: dict[int, int] = {}
    for bucket in rig.buckets.live_buckets:
        for columns in bucket.read_columns(rig.buckets.files):
            for number, position in zip(columns.numbers, columns.positions, strict=True):
                places[number] = bucket.bucket_id << BUCKET_ID_SHIFT | position
    for batch in rig.queue._loader.read_arrivals(rig.buckets.spilled_offset, rig.landing.log.end_offset):
        for index, offset in enumerate(batch.offsets):
            places[batch.first_number + index] = offset
    return rig, RecordReader(rig.landing.log, rig.buckets), places, sent


@pytest.mark.parametrize("seed", range(20))
def test_in_any_order(mixed: tuple[Rig, RecordReader, dict[int, int], list[Handle]], seed: int) -> None:
    _, fetching, places, sent = mixed
    some = random.Random(seed).sample(sent, 50)
    if seed % 2:
        some.sort(key=lambda each: places[each.number])
    locators, numbers = [places[each.number] for each in some], [each.number for each in some]
    expected = [each.payload for each in some]
    assert payloads(fetching.read(locators, numbers, 1 << 20)) == expected
    assert payloads(fetching.read_cached(locators, numbers, 1 << 20)) == expected
    for most in (1, 100, 3000):
        found = payloads(fetching.read(locators, numbers, most))
        assert found == expected[: len(found)]
        assert 1 <= len(found) <= len(expected)
        assert sum(map(len, found[:-1])) <= most + 50 * 350


def test_no_row_is_no_record(mixed: tuple[Rig, RecordReader, dict[int, int], list[Handle]]) -> None:
    assert mixed[1].read([], [], 100) == []


# Records of a line's next rows: those of exactly these rows, however they are read ahead, cut, dropped or given up.


def record_of(number: int) -> bytes:
    return b"record %d" % number


class Files:
    """In the place of `Fetching`: answers at most `most` records a call, and says which it was asked for."""

    def __init__(self) -> None:
        self.most = 1 << 30
        self.cold = False
        self.error: Exception | None = None
        self.bad = -1
        """A number whose record cannot be read."""
        self.reads: list[int] = []

    def read(self, locators: Sequence[int], numbers: Sequence[int], bytes_max: int) -> Records:
        assert list(locators) == [7 * number for number in numbers]
        if self.error is not None:
            raise self.error
        if self.bad in numbers:
            raise OSError(5, "a bad sector")
        self.reads.append(len(numbers))
        return [record_of(number) for number in numbers[: self.most]]

    def read_cached(self, locators: Sequence[int], numbers: Sequence[int], bytes_max: int) -> Records | None:
        return None if self.cold else self.read(locators, numbers, bytes_max)


class Bench:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(record_reader, "READ_AHEAD_ROWS_MIN", 20)
        self.files, self.jobs = Files(), list[tuple[Callable[[], Any], Callable[..., None]]]()
        self.supply = ReadAhead(self.files, lambda work, done: self.jobs.append((work, done)))  # type: ignore[arg-type]
        self.rows = RowQueue()

    def add(self, numbers: Sequence[int]) -> None:
        column = array("Q", numbers)
        locators = array("Q", [7 * number for number in numbers])
        self.rows.append(RowColumns(column, column[:], locators, bytearray(len(column))))

    def work(self) -> None:
        while self.jobs:
            work, done = self.jobs.pop(0)
            try:
                result = work()
            except Exception as error:
                done(None, error)
            else:
                done(result, None)

    def fetch(self, count: int, record_bytes: int = 10) -> list[bytes | None]:
        part, reported = self.rows.head(count), list[tuple[Records | None, BaseException | None]]()
        self.supply.fetch(part, self.rows, record_bytes, lambda *answer: reported.append(answer))
        self.work()
        ((found, error),) = reported
        if error is not None:
            raise error
        assert found is not None and 1 <= len(found) <= len(part.numbers)
        assert found == [record_of(number) for number in part.numbers[: len(found)]]
        return list(found)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_few_rows_are_read_as_they_are_asked_for(bench: Bench) -> None:
    bench.add(range(19))
    assert len(bench.fetch(5)) == 5
    bench.files.cold = True
    bench.rows.drop_head(5)
    assert len(bench.fetch(5)) == 5
    assert bench.files.reads == [5, 5]


def test_many_rows_are_read_ahead_once(bench: Bench) -> None:
    bench.add(range(50))
    for _ in range(10):
        bench.rows.drop_head(len(bench.fetch(5)))
    assert bench.files.reads == [50]


def test_no_more_bytes_than_a_bound_are_read_ahead(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_reader, "READ_AHEAD_BYTES", 300)
    bench.add(range(50))
    bench.fetch(5)
    bench.supply.clear()
    bench.fetch(5, 100)
    bench.supply.clear()
    bench.fetch(5, 1000)
    assert bench.files.reads == [30, 5, 5]


def test_rows_that_were_passed_over_are_left_out(bench: Bench) -> None:
    """As cancelled ones are: they go from the front, or end the part before them."""
    bench.add(range(100))
    bench.fetch(10)
    bench.rows.drop_head(13)
    assert bench.fetch(4)[0] == record_of(13)
    bench.rows.drop_head(20)
    assert bench.fetch(10)[0] == record_of(33)
    assert bench.files.reads == [100]


def test_what_was_given_up_is_read_again(bench: Bench) -> None:
    bench.add(range(100))
    bench.fetch(10)
    bench.supply.clear()
    bench.fetch(10)
    assert bench.files.reads == [100, 100]


def test_what_is_read_while_it_is_given_up_is_not_kept(bench: Bench) -> None:
    bench.add(range(100))
    reported: list[object] = []
    bench.supply.fetch(bench.rows.head(10), bench.rows, 10, lambda *answer: reported.append(answer))
    bench.supply.clear()
    bench.work()
    assert reported == [([record_of(number) for number in range(10)], None)]
    bench.fetch(10)
    assert bench.files.reads == [100, 100]


def test_what_cannot_be_read_keeps_nothing_before_it_waiting(bench: Bench) -> None:
    bench.add(range(100))
    bench.files.bad = 40
    for _ in range(4):
        bench.rows.drop_head(len(bench.fetch(10)))
    with pytest.raises(OSError, match="a bad sector"):
        bench.fetch(10)
    assert bench.files.reads == [10] * 4


def test_a_target_that_stops_while_is_read_ahead_is_what_the_queue_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_reader, "READ_AHEAD_ROWS_MIN", 3)
    rig = Rig(queued=True)
    rig.targets.automatic = False
    payloads = [b"%d" % number for number in range(10)]
    rig.send([b"first", *payloads], [10, *range(100, 110)])
    rig.until(rig.now_ms + 50)
    rig.leap(0)
    rig.clock.advance(0.1)
    rig.turn()
    assert rig.jobs, "a read is under way"
    rig.targets.fail_force(ORDERS, "its force failed")
    (waits,) = rig.queue.status()["waits_for"]
    rig.work()
    rig.turn()
    assert [target for target, _ in rig.queue.status()["waits_for"]] == [waits[0]]
    rig.targets.resume(ORDERS, keep=0)
    rig.queue.target_resumed(ORDERS)
    rig.advance(1)
    assert rig.visible() == [b"first", *payloads]


def test_another_message_of_the_same_number_elsewhere_is_not_taken_for_it(bench: Bench) -> None:
    """After a reload a row may name another place: what was read from the one before is not used."""
    bench.add(range(100))
    bench.fetch(10)
    part = bench.rows.head(10)
    moved = RowColumns(part.dues, part.numbers, array("Q", [7 * each + 1 for each in part.numbers]), part.flags)
    assert bench.supply._buffered(part) is not None
    assert bench.supply._buffered(moved) is None


def test_errors_are_reported(bench: Bench) -> None:
    bench.add(range(100))
    bench.files.error = OSError("the disk")
    for rows in (100, 19):
        bench.rows.drop_head(len(bench.rows) - rows)
        with pytest.raises(OSError, match="the disk"):
            bench.fetch(10)
    bench.files.error = None
    assert bench.fetch(10)


def test_any_sequence_gives_each_row_its_record(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, number = seeded("supply"), 0
    monkeypatch.setattr(record_reader, "READ_AHEAD_BYTES", 500)
    for _ in range(scaled(2000)):
        if len(bench.rows) < 60:
            more = [number + each for each in range(generator.randrange(1, 40)) if generator.random() < 0.9]
            number += 40
            bench.add(more)
        bench.files.cold = generator.random() < 0.2
        bench.files.most = generator.choice((1, 3, 1000))
        if len(bench.rows):
            found = bench.fetch(generator.randrange(1, 30), generator.choice((5, 10, 100)))
            bench.rows.drop_head(generator.choice((0, 1, len(found), len(found))))
        if generator.random() < 0.05:
            bench.supply.clear()


@pytest.mark.parametrize("seed", range(5))
def test_a_target_queue_fires_what_was_read_ahead_without_those_cancelled_meanwhile(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Read ahead in a worker, and a message cancelled at each moment before, meanwhile and after it."""
    monkeypatch.setattr(record_reader, "READ_AHEAD_ROWS_MIN", 10)
    monkeypatch.setattr(append_limits, "TURN_ROWS_MAX", 7)
    generator, rig, reads = random.Random(seed), Rig(queued=True), list[int]()
    plain = rig.queue._target_queues.record_reader.read

    def read(locators: Sequence[int], numbers: Sequence[int], bytes_max: int) -> Records:
        reads.append(len(numbers))
        return plain(locators, numbers, bytes_max)

    monkeypatch.setattr(rig.queue._target_queues.record_reader, "read", read)
    sent = rig.send([b"%d" % number for number in range(300)], [5000 + n % 3 for n in range(300)])
    rig.advance(4.9)
    rest, answers = generator.sample(sent, 100), list[tuple[Handle, Any]]()
    rig.clock.advance(0.2)
    while len(rig.visible()) + sum(answer.result == "cancelled" for _, answer in answers) < 300:
        rig.timers.tick(rig.clock.monotonic())
        rig.queue.write()
        rig.landing.write()
        rig._write_targets()
        if rest and generator.random() < 0.5:
            answers.append((rest[0], rig.cancel(rest.pop(0), turn=False)))
        if generator.random() < 0.3:
            rig.step()
        rig.clock.advance(0.001)
    rig.advance(1)
    assert max(reads) >= 100
    gone = {handle.number for handle, answer in answers if answer.result == "cancelled"}
    assert gone and len(gone) < len(answers)
    kept = sorted((each.due, each.number) for each in sent if each.number not in gone)
    payload_of = {each.number: each.payload for each in sent}
    assert rig.visible() == [payload_of[number] for _, number in kept]
