"""The processes whose power is cut: each writes logs on the mounted file system and says what is promised to
it.

A writer tells its parent through a pipe, one fixed-size word a promise. A word written is a promise made:
what it says must be there when the power is back.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from struct import Struct
from typing import Any, Final, NamedTuple

from journal.clock import SystemClock
from journal.disk import RealDisk
from journal.fsync import Forcer
from journal.log.log import Log
from journal.log.options import LogOptions
from journal.record.batch import Batch
from journal.record.format import make_id, make_log_id, make_record

SYNCED: Final = 0
WRITTEN: Final = 1

PRODUCER_ID: Final = 7
FILL: Final = b"abcdefghijklmnopqrstuvwxyz" * 40
SEGMENT_BYTES: Final = 64 << 10
"""Small, so that many cuts meet a roll."""
LARGE_SEGMENT_BYTES: Final = 16 << 20


class Word(NamedTuple):
    """One promise: `log` has everything before `end`, `records` of it, `kind` SYNCED or WRITTEN, at `time`
    (s).

    `pause`: the longest that the writer was away from its log (s): a force, or the scheduler.
    """

    kind: int
    log: int
    end: int
    records: int
    time: float
    pause: float


WORD: Final = Struct(">BBQQdd")


def words(data: bytes) -> Iterator[Word]:
    """The promises in what came through the pipe; a torn last one was never made."""
    for position in range(0, len(data) - WORD.size + 1, WORD.size):
        yield Word(*WORD.unpack_from(data, position))


def payload_of(sequence: int) -> bytes:
    """What the record of that sequence must hold: its number and a length that changes."""
    return b"%d " % sequence + FILL[: sequence * 37 % 900]


def log_folder(mount_point: str, generation: int, number: int) -> str:
    return f"{mount_point}/g{generation}-{number}"


def open_log(mount_point: str, generation: int, number: int, **options: Any) -> Log:
    """Opens the log, or makes it as the broker does: the folder first, and its name forced."""
    disk = RealDisk()
    folder = log_folder(mount_point, generation, number)
    if not disk.exists(folder):
        disk.make_folder(folder)
        disk.force_folder(mount_point)
    log_id = make_log_id(1000 + generation, number)
    chosen = LogOptions(**{"segment_bytes": SEGMENT_BYTES, **options})
    return Log.open(disk, folder, log_id=log_id, clock=SystemClock(), options=chosen)


def batch_at(sequence: int, count: int) -> Batch:
    records = [make_record(payload_of(n), make_id(PRODUCER_ID, n)) for n in range(sequence, sequence + count)]
    return Batch(b"".join(records), (), PRODUCER_ID, sequence, count)


class Writer:
    """Runs `write` in a forked process; `end` kills it and answers its promises."""

    def __init__(self, write: Callable[[int], None]) -> None:
        self._reader, pipe = os.pipe()
        self._process = os.fork()
        if self._process:
            os.close(pipe)
            return
        try:
            os.close(self._reader)
            write(pipe)
        except BaseException:
            # After the cut every call fails, and that is how a writer ends. What it could not promise, it did
            # not.
            os._exit(1)
        os._exit(0)

    def wait_for_word(self) -> bytes:
        """Its first promise: from then on it is at work. Empty if it ended without one."""
        return os.read(self._reader, WORD.size)

    def end(self) -> bytes:
        """Everything promised after the first word."""
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        parts = []
        while part := os.read(self._reader, 1 << 20):
            parts.append(part)
        os.close(self._reader)
        return b"".join(parts)


def tell(pipe: int, word: Word) -> None:
    os.write(pipe, WORD.pack(*word))


def write_with_fdatasync(mount_point: str, generation: int, pipe: int) -> None:
    """One log; each append is forced before it is promised."""
    log = open_log(mount_point, generation, 0)
    clock = SystemClock()
    count = 1
    while True:
        log.append([batch_at(log.end_ordinal, count)])
        log.force()
        tell(pipe, Word(SYNCED, 0, log.forced_offset, log.end_ordinal, clock.monotonic(), 0.0))
        count = count % 7 + 1


def write_with_syncfs(mount_point: str, generation: int, pipe: int, *, logs: int) -> None:
    """Several logs, one syncfs for all of them."""
    clock = SystemClock()
    opened = [open_log(mount_point, generation, number) for number in range(logs)]
    forcer = Forcer(
        RealDisk(), lambda fn, done: done(fn(), None), anchor_path=mount_point, method="syncfs", clock=clock
    )
    while True:
        for log in opened:
            log.append([batch_at(log.end_ordinal, 2)])
            forcer.dirty(log)
        errors: list[Exception | None] = []
        forcer.flush_all(errors.append)
        if errors != [None]:
            raise RuntimeError(f"the force failed: {errors}")
        for number, log in enumerate(opened):
            tell(pipe, Word(SYNCED, number, log.forced_offset, log.end_ordinal, clock.monotonic(), 0.0))


def write_without_waiting(mount_point: str, generation: int, pipe: int, *, messages: int, seconds: float) -> None:
    """One log, forced after N messages or T seconds; every append is promised as written."""
    clock = SystemClock()
    # Large segments: a roll forces, and would hide what the flush rule leaves unforced.
    options = {"segment_bytes": LARGE_SEGMENT_BYTES, "flush_messages": messages, "flush_seconds": seconds}
    log = open_log(mount_point, generation, 0, **options)
    pause, last = 0.0, clock.monotonic()
    while True:
        due = log.flush_due(clock.monotonic())
        if due is not None and due <= clock.monotonic():
            log.force()
        log.append([batch_at(log.end_ordinal, 1)])
        now = clock.monotonic()
        pause, last = max(pause, now - last), now
        tell(pipe, Word(WRITTEN, 0, log.end_offset, log.end_ordinal, now, pause))
