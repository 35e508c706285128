"""Anything in any order against a plain model, on a simulated disk and clock.

Held: no message fires early; each that arrived fires exactly once, or was reported cancelled, never both; those of one
partition fire in the order of their turns; reports are still true after kill -9 and power cuts; nothing is late by
more than a tick unless its partition was stopped or the broker was down; in the end nothing is left on the disk.
"""

from __future__ import annotations

import random

import pytest

from tests.delay.rig import BILLS, ORDERS, Answer, Handle, Rig
from tests.scale import scaled

KEYS = (ORDERS, ORDERS + 1, BILLS)
DELAYS = (0, 1, 5, 10, 100, 999, 5_000, 12_000, 60_000, 70_000, 300_000, 5_000_000)


class Story:
    """One run."""

    def __init__(self, seed: int, queued: bool) -> None:
        self.dice = random.Random(seed)
        self.seed = seed
        self.rig = Rig(queued=queued, segment_bytes=self.dice.choice([1 << 20, 70_000]))
        self.alive: dict[bytes, Handle] = {}
        """What must fire: payload -> where it is now."""
        self.gone: set[bytes] = set()
        """Reported as cancelled."""
        self.seen: dict[int, int] = dict.fromkeys(KEYS, 0)
        self.fired: dict[bytes, int] = {}
        self.asked: list[tuple[str, bytes, Answer]] = []
        self.doubtful: set[bytes] = set()
        self.stopped: set[int] = set()
        self.broken = False
        """Files failed, or were full: so may requests."""
        self.number = 0
        self.held_until = 0
        self.counted = 0

    def run(self, steps: int) -> None:
        choices = [self.send, self.send, self.send, self.advance, self.advance, self.cancel, self.reschedule]
        choices += [self.stop, self.resume, self.kill, self.leap, self.look]
        for _ in range(steps):
            self.dice.choice(choices)()
            self.check()
        self.end()

    def send(self) -> None:
        key = self.dice.choice(KEYS)
        count = self.dice.choice([1, 1, 3, 20])
        payloads = [b"%d-%d" % (self.seed, self.number + n) + b"." * self.dice.choice([0, 90]) for n in range(count)]
        self.number += count
        same = self.dice.random() < 0.3
        delays = [self.dice.choice(DELAYS) + self.dice.randrange(20) for _ in payloads]
        sent = self.rig.send(payloads, delays[0] if same else delays, key=key)
        for handle in sent:
            self.alive[handle.payload] = handle
        assert len(sent) == count, "the disk took it"

    def advance(self) -> None:
        self.rig.advance(self.dice.choice([0.001, 0.01, 0.5, 3, 20, 100]))

    def leap(self) -> None:
        seconds = self.dice.choice([0.05, 5, 400])
        self.held_until = self.rig.now_ms + int(seconds * 1000) + 2000
        self.rig.leap(seconds)

    def _any(self) -> Handle | None:
        payloads = [payload for payload in self.alive if payload not in self.doubtful]
        return self.alive[self.dice.choice(payloads)] if payloads else None

    def cancel(self) -> None:
        handle = self._any()
        if handle is None:
            return
        self.doubtful.add(handle.payload)
        answer = self.rig.cancel(handle, turn=self.dice.random() < 0.7)
        self.asked.append(("cancel", handle.payload, answer))

    def reschedule(self) -> None:
        handle = self._any()
        if handle is None:
            return
        self.doubtful.add(handle.payload)
        answer = self.rig.reschedule(handle, self.dice.choice(DELAYS), turn=self.dice.random() < 0.7)
        self.asked.append(("reschedule", handle.payload, answer))

    def stop(self) -> None:
        if self.dice.random() < 0.5:
            key = self.dice.choice(KEYS)
            self.stopped.add(key)
            self.rig.targets.stop(key)

    def resume(self) -> None:
        for key in list(self.stopped):
            target = self.rig.targets.target(key)
            keep = self.dice.randint(target.forced, len(target.appends))
            lost = [payload for append in target.appends[keep:] for _, payload in append.records]
            for payload in lost:
                del self.fired[payload]
            self.rig.targets.resume(key, keep=keep)
            self.seen[key] = min(self.seen[key], keep)
            self.stopped.discard(key)
            self.held_until = self.rig.now_ms + 2000
            self.rig.queue.target_resumed(key)
        self.rig.turn()

    def kill(self) -> None:
        if self.dice.random() < 0.5:
            return
        self.rig.work() if self.dice.random() < 0.5 else None
        self.check()
        down = self.dice.choice([0, 0, 5, 200])
        self.rig.clock.advance(down)
        cut = self.dice.random() < 0.5
        for key in KEYS:
            target = self.rig.targets.target(key)
            keep = target.forced if cut else len(target.appends)
            for append in target.appends[keep:]:
                for _, payload in append.records:
                    del self.fired[payload]
            self.seen[key] = min(self.seen[key], keep)
        if cut:
            self.lose()
        self.rig = self.rig.power_cut() if cut else self.rig.kill()
        self.stopped.clear()
        self.held_until = self.rig.now_ms + 3000
        # Who asked and got no answer asks again.
        asked, self.asked = self.asked, []
        for what, payload, answer in asked:
            if answer.calls:
                self.asked.append((what, payload, answer))
            elif what == "cancel":
                self.asked.append((what, payload, self.rig.cancel(self.alive[payload])))
            else:
                self.asked.append((what, payload, self.rig.reschedule(self.alive[payload], 50)))

    def lose(self) -> None:
        """What arrived and was not forced: no client was notified of more than that it is written."""
        log = self.rig.landing.log
        forced = log.end_ordinal - (log.dirty.records if log.dirty is not None else 0)
        lost = {payload for payload, handle in self.alive.items() if handle.number >= forced}
        for payload in lost:
            del self.alive[payload]
        self.asked = [each for each in self.asked if each[1] not in lost]
        self.doubtful -= lost

    def look(self) -> None:
        if self.dice.random() < 0.5:
            self.rig.work()
        else:
            self.rig.turn()

    def check(self) -> None:
        where = f"seed {self.seed}"
        now = self.rig.now_ms
        for key in KEYS:
            target = self.rig.targets.target(key)
            for append in target.appends[self.seen[key] :]:
                for _, payload in append.records:
                    assert payload not in self.fired, f"{where}: {payload!r} twice"
                    assert payload not in self.gone, f"{where}: {payload!r} was cancelled"
                    self.fired[payload] = now
                    handle = self.alive[payload]
                    if payload not in self.doubtful:
                        assert append.place is not None
                        assert handle.turn <= append.place, f"{where}: {payload!r} out of order"
            self.seen[key] = len(target.appends)
            places = [append.place for append in target.appends if append.place]
            assert places == sorted(places), where
        left = []
        for what, payload, answer in self.asked:
            if not answer.calls:
                left.append((what, payload, answer))
                continue
            self.doubtful.discard(payload)
            if answer.error is not None:
                assert self.stopped or self.broken, f"{where}: {answer.error}"
                continue
            state = answer.result if what == "cancel" else answer.result.state
            if state == "cancelled":
                assert payload not in self.fired, f"{where}: {payload!r} fired and was cancelled"
                self.gone.add(payload)
                self.alive.pop(payload, None)
            elif state == "rescheduled":
                turn = answer.result.turn
                self.alive[payload] = self.alive[payload]._replace(due=turn.due, number=turn.number)
            else:
                assert state == "delivered", f"{where}: {state}"
                assert payload in self.fired, f"{where}: {payload!r} is told as delivered"
        self.asked = left
        times = {payload: at for at, payload in self.rig.fired}
        for payload, at in times.items():
            if payload in self.alive and payload not in self.doubtful and payload in self.fired:
                assert at >= self.alive[payload].due, f"{where}: {payload!r} early"

        self.count()

    def count(self) -> None:
        """Where nothing is under way, what is said to wait is what waits, to the last one."""
        queue = self.rig.queue
        if self.rig.jobs or self.doubtful or queue._scheduler.running_step is not None or queue._row_counter.has_work:
            return
        self.counted += 1
        waiting = len(self.alive.keys() - self.fired.keys())
        # How much a stopped partition has is unknown.
        unsure = sum(self.alive[payload].key in self.stopped for payload in self.fired)
        assert waiting <= queue._metrics.count_now() <= waiting + unsure, f"seed {self.seed}"

    def end(self) -> None:
        self.resume()
        self.rig.work()
        self.rig.advance(400)
        self.check()
        self.rig.advance(6000)
        self.check()
        missing = [payload for payload in self.alive if payload not in self.fired]
        assert not missing, f"seed {self.seed}: {missing[:5]} of {len(missing)} never fired"
        assert not self.asked, f"seed {self.seed}: no answer"
        for key in KEYS:
            turns = [self.alive[p] for p in self.rig.targets.payloads(key)]
            assert [each.turn for each in turns] == sorted(each.turn for each in turns), f"seed {self.seed}: order"
        self.rig.advance(30)
        assert self.rig.queue.pending == 0 and self.counted
        assert not self.rig.buckets.live_buckets, f"seed {self.seed}: buckets are left"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(scaled(300)))
def test_anything_in_any_order(seed: int) -> None:
    Story(seed, queued=False).run(60)


@pytest.mark.parametrize("seed", range(10_000, 10_000 + scaled(300)))
def test_anything_in_any_order_while_workers_are_slow(seed: int) -> None:
    Story(seed, queued=True).run(60)
