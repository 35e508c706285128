"""Seeded lives of logs on a simulated disk, and at each boundary what is known then.

A boundary is the moment after a call that changed something on the disk: the power may go there. It keeps the
disk as it was and, for each log, what its user knew: what must still be there, and what may be there.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from journal.errors import Full
from journal.filenames import parse_segment_name
from journal.fsync import Forcer
from journal.log.log import Log
from journal.log.options import LogOptions
from journal.record.batch import Source, succession_source
from journal.testing import Moment, SimulatedClock, SimulatedDisk, crash_states
from tests.journal.logs import CountingState, make_batch

DATA = "data"
TRASH = "data/trash"
STATES_TO_GO_ON_FROM = 8
"""A life goes on from one of so many states that a power cut left."""


STOP_REASON = "a test stops it"


class Stop(Enum):
    """Whether a log that is opened now is stopped."""

    NO = auto()
    MAYBE = auto()
    YES = auto()


class Image(NamedTuple):
    """A log as its bytes lie in the files that are seen: `data` begins at offset `base`."""

    base: int
    data: bytes

    @property
    def end(self) -> int:
        return self.base + len(self.data)


class Known(NamedTuple):
    """What was known of one log at a boundary.

    `forced`: everything below was acknowledged as synced, or could be read by default. `first` is the lowest
    first offset that was acknowledged, `first_next` what a truncation under way may make of it. `ends` are
    the ends of all whole appends. `written` and `epoch` are what a reader of "written" may have seen.
    """

    log_id: int
    image: Image
    forced: int
    first: int
    first_next: int
    ends: frozenset[int]
    written: int
    epoch: int
    stop: Stop
    is_optional: bool


class Boundary(NamedTuple):
    """`candidates`: for each folder, what may be found there, the newest incarnation first."""

    number: int
    after: str
    moment: Moment
    candidates: dict[str, tuple[Known, ...]]


@dataclass(eq=False)
class Subject:
    """One log, over crashes, deletion and re-creation."""

    folder: str
    log_id: int
    log: Log | None = None
    state: CountingState = field(default_factory=CountingState)
    sequence: int = 0
    forced: int = 0
    first: int = 0
    first_next: int = 0
    ends: set[int] = field(default_factory=lambda: {0})
    written: int = 0
    epoch: int = 0
    stop: Stop = Stop.NO
    is_optional: bool = True
    before: Known | None = None
    """The incarnation whose deletion is not yet certain."""

    def known(self, disk: SimulatedDisk) -> tuple[Known, ...]:
        log = self.log
        if log is not None and not log.closed:
            self.forced = max(self.forced, log.forced_offset)
            self.epoch = max(self.epoch, log.epoch)
        known = Known(
            self.log_id, image_of(disk, self.folder), self.forced, self.first, max(self.first,
            self.first_next), frozenset(self.ends), self.written, self.epoch, self.stop, self.is_optional,
        )  # fmt: skip
        return (known,) if self.before is None else (known, self.before)


def image_of(disk: SimulatedDisk, folder: str) -> Image:
    """The bytes of all segments, one after the other; from the last hole on."""
    if not disk.is_folder(folder):
        return Image(0, b"")
    base, data = 0, b""
    for name in disk.list(folder):
        offset = parse_segment_name(name)
        if offset is not None:
            if offset != base + len(data):
                base, data = offset, b""
            data += disk.read_file(f"{folder}/{name}")
    return Image(base, data)


class Life:
    """Runs seeded actions; `boundaries` collects the moments between them and inside them."""

    def __init__(self, generator: random.Random, *, logs: int = 1, options: LogOptions | None = None) -> None:
        self.generator = generator
        self.clock = SimulatedClock()
        self.options = options or LogOptions(
            segment_bytes=generator.choice((2500, 4000)), state_bytes=generator.choice((700, 3000)),
            retention_bytes=generator.choice((0, 5000)), flush_messages=3,
        )  # fmt: skip
        self.boundaries: list[Boundary] = []
        self.next_id = 100
        self.reported = ""
        self.disk = SimulatedDisk()
        self.disk.make_folder(DATA)
        self.disk.make_folder(TRASH)
        self.disk.force_folder("")
        self.disk.force_folder(DATA)
        self.disk.after = self._boundary
        self.subjects = [Subject(f"{DATA}/t-{n}", self._new_id()) for n in range(logs)]
        for subject in self.subjects:
            self._create(subject)

    def run(self, actions: int) -> list[Boundary]:
        """Lives through so many actions."""
        table: list[tuple[int, Callable[[Subject], None]]] = [
            (30, self.append), (12, self.force), (8, self.force_with_appends_between), (6, self.wait),
            (4, self.truncate), (4, self.retain), (3, self.close_and_open), (3, self.stop_and_resume),
            (2, self.succeed), (2, self.stream), (2, self.delete), (3, self.kill), (4, self.power_cut),
            (4, self.force_all), (2, self.full_disk),
        ]  # fmt: skip
        weights = [weight for weight, _ in table]
        for _ in range(actions):
            action = self.generator.choices(table, weights)[0][1]
            self.reported = action.__name__
            action(self.generator.choice(self.subjects))
        self.disk.after = None
        return self.boundaries

    # What may happen.

    def append(self, subject: Subject) -> None:
        """One to three batches in one append."""
        log = self._log(subject)
        batches = []
        for _ in range(self.generator.choice((1, 1, 2, 3))):
            count = self.generator.randint(1, 3)
            batches.append(make_batch(count, self.generator.randint(1, 130), sequence=subject.sequence))
            subject.sequence += count
        source = Source(1, 5, 0, subject.sequence) if self.generator.random() < 0.2 else Source(0, 0, 0, 0)
        try:
            answers = log.append(batches, source)
        except Full:
            subject.sequence = batches[0].sequence
            return
        for batch, answer in zip(batches, answers, strict=True):
            subject.state.appended(batch, answer)
        self._wrote(subject)

    def force(self, subject: Subject) -> None:
        self._log(subject).force()

    def force_with_appends_between(self, subject: Subject) -> None:
        """A force in a worker: the owner appends before, while and after the system does it."""
        log = self._log(subject)
        plan = log.force_plan()
        if plan is None:
            return
        for _ in range(self.generator.randint(0, 2)):
            self.append(subject)
        plan.gate.fsync(plan.file)
        if self.generator.random() < 0.5:
            self.append(subject)
        work = log.force_done(plan, None)
        if work is not None:
            work()

    def force_all(self, _: Subject) -> None:
        """One syncfs for all logs."""
        forcer = Forcer(
            self.disk, lambda fn, done: done(fn(), None), anchor_path=DATA, method="syncfs", clock=self.clock
        )
        errors: list[Exception | None] = []
        for subject in self.subjects:
            forcer.dirty(self._log(subject))
        forcer.flush_all(errors.append)
        forcer.close()
        assert errors == [None]

    def wait(self, _: Subject) -> None:
        self.clock.advance(self.generator.choice((0.01, 1.5, 30.0)))

    def truncate(self, subject: Subject) -> None:
        log = self._log(subject)
        subject.first_next = self.generator.randint(log.first_offset, log.end_offset)
        subject.first_next = max(subject.first_next, log.seek_offset(subject.first_next))
        subject.first = log.truncate_before(subject.first_next)

    def retain(self, subject: Subject) -> None:
        log = self._log(subject)
        subject.first_next = log.end_offset
        log.retain(self.clock.wall_ms())
        subject.first = subject.first_next = log.first_offset

    def close_and_open(self, subject: Subject) -> None:
        self._log(subject).close()
        self._open(subject)

    def stop_and_resume(self, subject: Subject) -> None:
        log = self._log(subject)
        subject.stop = Stop.MAYBE
        log.stop(STOP_REASON)
        subject.stop = Stop.YES
        if self.generator.random() < 0.5:
            self._open(subject, stopped=True)
            log = self._log(subject)
        subject.stop = Stop.MAYBE
        log.resume()
        subject.stop = Stop.NO
        self._take(subject)

    def succeed(self, subject: Subject) -> None:
        self._log(subject).append_control(succession_source(9, 10, subject.sequence - 1))
        self._wrote(subject)

    def stream(self, subject: Subject) -> None:
        log = self._log(subject)
        batch = make_batch(3, 100, sequence=subject.sequence)
        answer = log.append_stream(io.BytesIO(batch.data), batch.producer_id, batch.sequence, batch.count)
        subject.sequence += batch.count
        subject.state.appended(batch, answer)
        self._wrote(subject)

    def kill(self, subject: Subject) -> None:
        """The process ends; what it wrote is still in the system's memory."""
        self._open(subject)

    def full_disk(self, subject: Subject) -> None:
        """Space for a part of the next append, then space again."""
        log = self._log(subject)
        if log.before_append(1000) is not None:
            return
        self.disk.space_bytes = self.disk.used_bytes() + self.generator.randint(0, 150)
        try:
            self.append(subject)
        finally:
            self.disk.space_bytes = None

    def power_cut(self, _: Subject) -> None:
        """The power goes, and life goes on with what is left."""
        states = list(crash_states(self.disk, STATES_TO_GO_ON_FROM, self.generator))
        self.disk.after = None
        self.disk = self.generator.choice(states)
        self.disk.after = self._boundary
        for subject in self.subjects:
            if not self.disk.is_folder(subject.folder):
                assert subject.is_optional, f"{subject.folder} is gone"
                subject.log = None
                subject.before = None
                self._create(subject)
            else:
                self._open(subject)

    def delete(self, subject: Subject) -> None:
        """The topic goes and comes again under the same name, as the broker does it."""
        self._log(subject).abandon("deleted")
        subject.before = subject.known(self.disk)[0]._replace(is_optional=True)
        subject.log = None
        subject.is_optional = True
        gone = f"{TRASH}/{subject.log_id}"
        subject.log_id = self._new_id()
        subject.sequence = subject.forced = subject.first = subject.first_next = 0
        subject.written = subject.epoch = 0
        subject.ends = {0}
        self.disk.rename(subject.folder, gone)
        self.disk.force_folder(DATA)
        subject.before = None
        for name in self.disk.list(gone):
            self.disk.unlink(f"{gone}/{name}")
        self.disk.remove_folder(gone)
        self._create(subject)

    # Helpers.

    def _create(self, subject: Subject) -> None:
        self.disk.make_folder(subject.folder)
        self.disk.force_folder(DATA)
        subject.is_optional = False
        self._open(subject)

    def _open(self, subject: Subject, *, stopped: bool = False) -> None:
        subject.state = CountingState()
        subject.log = None
        subject.log = Log.open(
            self.disk, subject.folder, log_id=subject.log_id, clock=self.clock, options=self.options,
            state=subject.state,
        )  # fmt: skip
        if stopped:
            assert subject.log.stopped == STOP_REASON
        else:
            self._take(subject)

    def _take(self, subject: Subject) -> None:
        """What an opened log says is what is known from then on."""
        log = self._log(subject)
        assert log.stopped is None and not log.damage, (log.stopped, log.damage, self.reported)
        assert log.end_offset >= subject.forced, (self.reported, subject.folder)
        subject.ends = {end for end in subject.ends if end <= log.end_offset} | {log.end_offset}
        subject.written = log.end_offset
        subject.first = subject.first_next = log.first_offset
        subject.sequence = max((run[1] + run[2] for run in subject.state.runs), default=0)

    def _wrote(self, subject: Subject) -> None:
        log = self._log(subject)
        subject.ends.add(log.end_offset)
        subject.written = log.end_offset

    def _log(self, subject: Subject) -> Log:
        assert subject.log is not None
        return subject.log

    def _new_id(self) -> int:
        self.next_id += 1
        return self.next_id << 24

    def _boundary(self, kind: str, path: str) -> None:
        candidates = {subject.folder: subject.known(self.disk) for subject in self.subjects}
        after = f"{self.reported}: {kind} {path}"
        self.boundaries.append(Boundary(len(self.boundaries), after, Moment(self.disk), candidates))
