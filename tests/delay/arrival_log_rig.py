"""Verbs for tests of the arrivals: a log with what it teaches, on a simulated disk, opened again and again."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from zlib import crc32

from journal.log.log import Log
from journal.record.batch import PLAIN, Appended, Batch, Source, split_blocks, succession_source
from journal.record.format import make_id, make_record
from journal.testing import SimulatedClock, SimulatedDisk
from tfmq.broker.producer_state import ProducerState
from tfmq.delay.arrivals import header, log
from tfmq.delay.arrivals.header import ArrivalHeader, TurnColumns
from tfmq.delay.arrivals.log import ArrivalBatch, arrival_batches
from tfmq.delay.arrivals.state import ArrivalLogState
from tfmq.delay.due_time import ABSOLUTE_FLAG, DueTimes, due_times_of

FOLDER = "/data/delay/arrivals"
ORDERS = 0x1000_0001
START_MS = 1_700_000_000_000
DAY_MS = 86_400_000


class Sent(NamedTuple):
    """One message that must be found again."""

    number: int
    due: int
    absolute: bool
    log_id: int
    topic: str
    record: bytes


class Wanted(NamedTuple):
    """A batch to send: due times and payloads, one of each a message."""

    producer_id: int
    dues: Sequence[int]
    payloads: Sequence[bytes]
    log_id: int = ORDERS
    topic: str = "orders"
    flags: bytes = b""


class Rig:
    """The log in its folder. `sent` and what `state` says come from the appends alone, never from reading."""

    def __init__(self, disk: SimulatedDisk | None = None, segment_bytes: int = 1 << 20) -> None:
        self.segment_bytes = segment_bytes
        self.clock = SimulatedClock()
        self.sent: list[Sent] = []
        self.sequences: dict[int, int] = {}
        if disk is None:
            disk = SimulatedDisk()
            for folder in ("/data", "/data/delay", FOLDER):
                disk.make_folder(folder)
            for folder in ("/", "/data", "/data/delay"):
                disk.force_folder(folder)
        self.disk = disk
        self.open()

    def open(self) -> None:
        self.state = ArrivalLogState(
            ProducerState(remembered=5, entries_max=100, idle_ms=7 * DAY_MS, leased_ms=lambda _: 0)
        )
        options = log.arrival_options(1000, 10.0, self.segment_bytes)
        self.log = Log.open(self.disk, FOLDER, log_id=log.LOG_ID, clock=self.clock, options=options, state=self.state)
        self.state.epochs.finish_recovery(self.log.whole_end[1])

    @property
    def producers(self) -> ProducerState:
        producers = self.state.producers
        assert isinstance(producers, ProducerState)
        return producers

    def append(self, batches: Sequence[Batch], source: Source = PLAIN) -> list[Appended]:
        before, tail = self.log.end_offset, b""
        for batch in batches:
            self.log.check(batch, tail)
            tail = bytes(batch.data[-20:])
        answers = self.log.append(batches, source, checked=True)
        assert self.log.end_offset > before
        return answers

    def send(self, *wanted: Wanted, source: Source = PLAIN) -> list[Appended]:
        """All of them in one append; the answers of the records' batches."""
        batches: list[Batch] = []
        notes: list[ArrivalHeader] = []
        for each in wanted:
            sequence = self.sequences.get(each.producer_id, 0)
            self.sequences[each.producer_id] = sequence + len(each.dues)
            body = body_of(each.payloads, each.producer_id, sequence)
            notes.append(header.arrival_header(each.log_id, each.topic, dues_in(each), len(body)))
            numbers = (each.producer_id, sequence, len(each.dues))
            batches += arrival_batches(notes[-1], body, split_blocks(body), *numbers)
        answers = self.append(batches, source)[1::2]
        for each, written, batch, answer in zip(wanted, notes, batches[1::2], answers, strict=True):
            if source == PLAIN:
                self.producers.record_batch(batch.producer_id, batch.sequence, batch.count, answer)
            self._stored(written, bytes(batch.data), answer, each.topic)
        return answers

    def _stored(self, written: ArrivalHeader, body: bytes, answer: Appended, topic: str) -> None:
        self.state.apply_header(written, answer.first_ordinal)
        self.state.epochs.record(answer.first_ordinal, self.log.epoch)
        start = 0
        for n, (due, flag) in enumerate(zip(written.dues.times, written.dues.absolute, strict=True)):
            end = start + 20 + int.from_bytes(body[start : start + 4], "big")
            number = answer.first_ordinal + n
            self.sent.append(Sent(number, due, bool(flag), written.log_id, topic, body[start:end]))
            start = end

    def cancel(self, *turns: tuple[int, int]) -> None:
        written = header.cancel_header(turns_of(turns))
        self.append([log.header_batch(written)])
        self.state.apply_header(written, 0)

    def reschedule(self, old: Sequence[Sent], dues: Sequence[int]) -> None:
        """Copies of these messages, all for one log, with other due times."""
        body = b"".join(each.record for each in old)
        made = due_times_of(array("Q", dues), bytes(len(dues)))
        written = header.reschedule_header(
            old[0].log_id, old[0].topic, made, len(body), turns_of((e.due, e.number) for e in old)
        )
        batches = [log.header_batch(written)]
        for each in old:
            producer_id, sequence = divmod(int.from_bytes(each.record[8:16], "big"), 1 << 24)
            batches.append(Batch(each.record, ((len(each.record), 1, crc32(each.record)),), producer_id, sequence, 1))
        answers = self.append(batches)
        joined = answers[1]._replace(positions=[])
        self._stored(written, body, joined, old[0].topic)

    def close_stream(self, producer_id: int, successor: int) -> None:
        last = self.producers.last_sequence(producer_id)
        answer = self.log.append_control(succession_source(producer_id, successor, last))
        self.producers.close(producer_id, successor, last, answer.append_time)
        self.sequences.pop(producer_id, None)

    def reopened(self, *, clean: bool) -> Rig:
        """The same folder in another life of the process."""
        if clean:
            self.log.close()
        else:
            self.log.force()
        again = Rig(self.disk, self.segment_bytes)
        again.sent, again.sequences = self.sent, dict(self.sequences)
        return again

    def read(self, start: int = 0, end: int | None = None) -> list[Sent]:
        """What `arrivals.read` gives, message by message."""
        found = log.read_batches(self.log, start, self.log.end_offset if end is None else end)
        return [each for batch in found for each in messages(batch)]


def messages(batch: ArrivalBatch) -> list[Sent]:
    """A piece as single messages; its columns fit together."""
    (data,) = batch.data
    count = len(batch.sizes)
    assert count == len(batch.dues) == len(batch.absolute) == len(batch.offsets) > 0
    assert sum(batch.sizes) == len(data)
    assert (batch.low, batch.high) == (min(batch.dues), max(batch.dues))
    found = []
    for n in range(count):
        start = batch.offsets[n] - batch.offsets[0]
        record = bytes(data[start : start + batch.sizes[n]])
        number, absolute = batch.first_number + n, batch.absolute[n : n + 1] == ABSOLUTE_FLAG
        found.append(Sent(number, batch.dues[n], absolute, batch.log_id, batch.topic, record))
    return found


def body_of(payloads: Sequence[bytes], producer_id: int, sequence: int) -> bytes:
    """The records of a batch."""
    ids = range(make_id(producer_id, sequence), make_id(producer_id, sequence) + len(payloads))
    return b"".join(make_record(payload, id) for payload, id in zip(payloads, ids, strict=True))


def dues_in(wanted: Wanted) -> DueTimes:
    return due_times_of(array("Q", wanted.dues), wanted.flags or bytes(len(wanted.dues)))


def turns_of(turns: Iterable[tuple[int, int]]) -> TurnColumns:
    rows = list(turns)
    return TurnColumns(array("Q", (due for due, _ in rows)), array("Q", (number for _, number in rows)))


def some(producer_id: int, count: int, size: int = 50, due: int = START_MS) -> Wanted:
    """`count` messages of one size, a ms apart."""
    payloads = [(b"%d/%d " % (producer_id, n) * size)[:size] for n in range(count)]
    return Wanted(producer_id, range(due, due + count), payloads)
