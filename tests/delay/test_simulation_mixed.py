"""As `test_simulation_queue`, with bounds so small that every line reads ahead, gives up rows and loads them again, and
with all that may meet that: workers that end late, forces that fail, disks that are full for a while also at a start,
reads that fail, a topic that goes.
"""

from __future__ import annotations

import errno
from typing import Any

import pytest

from journal.record.format import split_id
from journal.testing import SimulatedDisk
from tests.delay.rig import ARRIVALS, BILLS, Rig
from tests.delay.test_simulation_queue import KEYS, Story
from tests.scale import scaled
from tests.transaction.targets import Targets
from tfmq import apply_queue
from tfmq.delay import append_limits, dispatcher, memory_window, record_reader, storage_scheduler, target_queue
from tfmq.delay.arrivals import log
from tfmq.delay.buckets import store


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (store, "SPLIT_MESSAGES", 12), (memory_window, "SPLIT_ROWS", 12), (memory_window, "MEMORY_ROWS_MAX", 40),
        (memory_window, "LOAD_ROWS_MAX", 20), (memory_window, "CATCH_UP_ROWS", 6),
        (memory_window, "RESCAN_BYTES_MAX", 600),
        (memory_window, "SPILL_BYTES", 4000), (target_queue, "QUEUE_ROWS_MAX", 9),
        (storage_scheduler, "QUEUE_ROWS_MAX", 9),
        (target_queue, "READ_ROWS_MAX", 5), (target_queue, "SLICE_BYTES_MAX", 300),
        (record_reader, "SLICE_BYTES_MAX", 300),
        (target_queue, "BLOCKED_ROWS_MAX", 15), (record_reader, "READ_AHEAD_ROWS_MIN", 3),
        (record_reader, "READ_AHEAD_BYTES", 900),
        (apply_queue, "IN_FLIGHT_BYTES_MAX", 500), (append_limits, "TURN_ROWS_MAX", 7), (dispatcher, "POP_ROWS_MAX", 5),
        (dispatcher, "FIREABLE_ROWS_MAX", 24), (storage_scheduler, "ADD_ROWS_MAX", 7), (log, "VERIFIED_BLOCKS_MAX", 3),
        (log, "VERIFIED_PER_CALL_MAX", 2),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)


FULL = 0.4
"""The part of starts with a full disk."""


class MixedStory(Story):
    """One run."""

    def __init__(self, seed: int, queued: bool) -> None:
        super().__init__(seed, queued)
        self.keys = list(KEYS)
        self.opened: Rig | None = None
        """Whose arrivals were written to: before that, a read that fails stops them."""

    def run(self, steps: int) -> None:
        choices = [self.send, self.send, self.send, self.advance, self.advance, self.cancel, self.reschedule]
        choices += [self.stop, self.resume, self.kill, self.leap, self.look, self.some, self.some, self.slow]
        choices += [self.fail_force, self.break_files, self.heal, self.heal, self.delete]
        for _ in range(steps):
            self.dice.choice(choices)()
            self.check()
        self.end()

    def send(self) -> None:
        super().send()
        self.opened = self.rig
        for payload, handle in list(self.alive.items()):
            if handle.key not in self.keys:
                del self.alive[payload]

    def some(self) -> None:
        """Some of what workers have ends; the rest goes on."""
        for _ in range(self.dice.randrange(1, 4)):
            self.rig.step()
            if self.dice.random() < 0.5:
                self.rig.turn()
            if self.dice.random() < 0.5:
                self.rig.clock.advance(self.dice.choice([0.001, 0.01, 1]))
                self.rig.turn()

    def slow(self) -> None:
        """Targets are forced late, or at once again."""
        targets = self.rig.targets
        targets.automatic = self.dice.random() < 0.5
        if self.dice.random() < 0.7:
            targets.force()

    def fail_force(self) -> None:
        key = self.dice.choice(self.keys)
        self.stopped.add(key)
        self.rig.targets.fail_force(key)

    def resume(self) -> None:
        self.rig.turn()  # a partition that is resumed refuses the effects that wait
        self.check()
        super().resume()

    def break_files(self) -> None:
        if self.rig.landing.log.waits_for_space:
            return
        self.broken = True
        faults = self.rig.disk.faults
        kind, error, path = self.dice.choice(
            [
                ("write", errno.ENOSPC, ".bucket"),
                ("create", errno.ENOSPC, ".bucket"),
                ("read", errno.EIO, "" if self.opened is self.rig else ".bucket"),
            ]
        )
        faults.fail(kind, error=error, path=path, nth=self.dice.randrange(1, 4), times=self.dice.choice([1, None]))

    def heal(self) -> None:
        self.rig.disk.faults.clear()

    def kill(self) -> None:
        self.heal()
        rig, full = self.rig, self.dice.random() < FULL

        def again(disk: SimulatedDisk, targets: Targets, **options: Any) -> Rig:
            if full:
                self.broken = True
                disk.faults.fail("write", error=errno.ENOSPC, times=None, path=ARRIVALS)
            found = Rig.again(rig, disk, targets, **options)
            if full:
                found.advance(self.dice.choice([0, 0.3, 3, 100]))
                disk.faults.clear()
                found.advance(self.dice.choice([0, 0.001, 1, 5]))
            return found

        rig.again = again  # type: ignore[method-assign]
        super().kill()

    def lose(self) -> None:
        if not self.rig.landing.log.waits_for_space:  # else all that was written was there at the start
            super().lose()

    def count(self) -> None:
        self.counted += 1

    def delete(self) -> None:
        if BILLS not in self.keys or self.dice.random() < 0.8:
            return
        self.keys.remove(BILLS)
        self.stopped.discard(BILLS)
        mine = {payload for payload, handle in self.alive.items() if handle.key == BILLS}
        self.asked = [each for each in self.asked if each[1] not in mine]
        self.doubtful -= mine
        for payload in mine:
            del self.alive[payload]
            self.fired.pop(payload, None)
        self.seen[BILLS] = 0
        self.rig.targets.delete(split_id(BILLS)[0])
        self.rig.queue.topic_deleted(split_id(BILLS)[0])

    def end(self) -> None:
        self.heal()
        self.rig.targets.automatic = True
        self.rig.targets.force()
        self.resume()
        self.rig.advance(7000)
        for _ in range(50):
            self.rig.advance(1)
        super().end()


@pytest.mark.parametrize("seed", range(20_000, 20_000 + scaled(150)))
def test_anything_in_any_order_with_small_bounds(seed: int) -> None:
    MixedStory(seed, queued=False).run(60)


@pytest.mark.parametrize("seed", range(30_000, 30_000 + scaled(150)))
def test_anything_in_any_order_with_small_bounds_while_workers_are_slow(seed: int) -> None:
    MixedStory(seed, queued=True).run(80)
