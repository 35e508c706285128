"""A seeded life of the buckets of delayed messages, with a moment kept after every call that changed the disk."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from typing import NamedTuple

from journal.errors import Full, Stopped
from journal.testing import Moment
from tests.delay.bucket_rig import BILLS, DAY, HOUR, MINUTE, NOW, ORDERS, SECOND, Bench
from tfmq.delay.buckets.bucket import Bucket

REACHES = (SECOND, MINUTE, 10 * MINUTE, HOUR, 3 * HOUR, 5 * DAY, 400 * DAY)


class Known(NamedTuple):
    """What had been promised at a boundary.

    `numbers`: how far the checkpoint may say that it is, the first was reported as durable; `settled`: numbers that
    need not be there any more, as they are settled or left out; `broker_ms`: the least that broker time may be.
    """

    numbers: tuple[int, ...]
    settled: frozenset[int]
    broker_ms: int


class Boundary(NamedTuple):
    """The disk after one call."""

    number: int
    after: str
    moment: Moment
    known: Known


KINDS = ("write", "create", "rename", "force", "force_folder", "truncate", "unlink", "open", "sync")
FULL_KINDS = ("write", "create", "rename")


class Life:
    """`run` lives it; `bench.arrived` are all messages then.

    `fail`: now and then a call fails, the disk is full for a while, or broken for good.
    """

    def __init__(self, generator: random.Random) -> None:
        self.generator = generator
        self.bench = Bench()
        self.now_ms = NOW
        self.settled: set[int] = set()
        self.retired: list[Bucket] = []
        self.split: list[Bucket] = []
        self.boundaries: list[Boundary] = []
        self.refused = 0
        """How often the disk was full."""
        self.numbers: tuple[int, ...] = (0,)
        self.broker_ms = self.bench.buckets.broker_ms
        self.bench.disk.after = self._note

    def fail(self) -> None:
        """Some later call of some kind fails."""
        kind = self.generator.choice(KINDS)
        error = errno.ENOSPC if kind in FULL_KINDS and self.generator.random() < 0.7 else errno.EIO
        path = self.generator.choice(("", ".bucket", "checkpoint"))
        nth = self.generator.randrange(1, 9)
        self.bench.disk.faults.fail(kind, nth=nth, error=error, path=path)

    def run(self, actions: int) -> list[Boundary]:
        """So many steps; the boundaries met."""
        choices = [self.arrive, self.arrive, self.spill, self.spill, self.cut, self.settle, self.release, self.commit]
        for _ in range(actions):
            self.now_ms += self.generator.randrange(5000)
            self._try(self.generator.choice(choices))
        self.bench.disk.after = None
        self.bench.disk.faults.clear()
        return self.boundaries

    def _note(self, kind: str, path: str) -> None:
        known = Known(self.numbers, frozenset(self.settled), self.broker_ms)
        self.boundaries.append(Boundary(len(self.boundaries), f"{kind} {path}", Moment(self.bench.disk), known))

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Full:
            self.refused += 1
            self.numbers = (self.bench.buckets.spilled_number,)
        except OSError:
            # It could not be read: all was taken back. Or written: it may be there or not, and nothing is any more.
            if self.bench.buckets.stop_reason is None:
                self.numbers = (self.bench.buckets.spilled_number,)
        except Stopped:
            assert self.bench.buckets.stop_reason is not None

    def arrive(self) -> None:
        reach = self.generator.choice(REACHES)
        dues = [self.now_ms + self.generator.randrange(1, reach) for _ in range(self.generator.randrange(1, 9))]
        size = self.generator.choice((0, 0, 700))
        self.bench.arrive(*dues, log_id=self.generator.choice((ORDERS, BILLS)), size=size)

    def spill(self) -> None:
        left_out = {each.number for each in self.bench.unspilled() if self.generator.random() < 0.1}
        self.settled |= left_out
        self._reported(self.bench.next_number)
        self.bench.spill(self.now_ms, lambda _, dues, numbers: bytes(n not in left_out for n in numbers))
        self._durable()
        # Those that came back into use are not settled as a whole any more, but need not be there either.
        leaves = set(self.bench.buckets.live_buckets)
        self.retired = [bucket for bucket in self.retired if bucket not in leaves]

    def cut(self) -> None:
        coarse = [bucket for bucket in self.bench.buckets.live_buckets if bucket.span.exponent > 10]
        if coarse:
            bucket = self.generator.choice(coarse)
            left_out = {n for n in self.bench.contents([bucket]) if self.generator.random() < 0.1}
            self.settled |= left_out
            pieces = self.bench.buckets.split(
                bucket, lambda _, dues, numbers: bytes(n not in left_out for n in numbers)
            )
            if pieces is not None:
                self.split.append(bucket)

    def settle(self) -> None:
        if self.bench.buckets.live_buckets:
            bucket = self.bench.buckets.live_buckets[0]
            self.settled |= set(self.bench.contents([bucket]))
            self.retired.append(bucket)
            self.bench.buckets.mark_obsolete(bucket)

    def release(self) -> None:
        if self.split:
            self.bench.buckets.release(self.split.pop(0))

    def commit(self) -> None:
        self._reported(*self.numbers)
        self.bench.buckets.commit(self.now_ms)
        self.broker_ms = self.now_ms

    def _reported(self, *numbers: int) -> None:
        self.numbers = tuple(sorted({self.bench.buckets.spilled_number, *numbers}))

    def _durable(self) -> None:
        self.numbers = (self.bench.buckets.spilled_number,)
        self.broker_ms = self.now_ms
