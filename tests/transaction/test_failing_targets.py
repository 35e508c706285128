"""Decided transactions, small and large, over partitions that stop, lose what was not forced, and are resumed at any
moment: in the end each partition has all of them, each message once."""

import random

import pytest

from journal.record.format import make_log_id
from tests.scale import scaled
from tests.transaction.rig import Answer, Rig
from tfmq import apply_queue

KEYS = [make_log_id(16, number) for number in range(3)]
SIZES = (5, 300, 700)
Batches = list[tuple[int, list[bytes]]]


class Life:
    """One run, by a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rig = Rig(queued=True)
        self.targets = self.rig.targets
        self.targets.limit = 1000
        self.targets.automatic = False
        self.asked: list[tuple[Answer, Batches]] = []
        self.count = 0

    def transact(self) -> None:
        batches: Batches = []
        for key in self.random.sample(KEYS, self.random.randint(1, len(KEYS))):
            for _ in range(self.random.randint(1, 5)):
                self.count += 1
                batches.append((key, [b"%d-" % self.count + b"." * self.random.choice(SIZES)]))
        self.asked.append((self.rig.transact(batches, turn=self.random.random() < 0.7), batches))

    def step(self) -> None:
        if self.rig.jobs:
            self.rig.step(self.random.randrange(len(self.rig.jobs)))

    def fail(self) -> None:
        self.targets.fail_force(self.random.choice(KEYS))
        self.rig.turn()

    def resume(self) -> None:
        self.rig.turn()  # a partition that is resumed refuses what waits in it
        key = self.random.choice(KEYS)
        target = self.targets.target(key)
        if target.stopped is not None:
            self.targets.resume(key, keep=self.random.randint(target.forced, len(target.appends)))
            self.rig.handler.target_resumed(key)

    def force(self) -> None:
        self.targets.force(self.random.choice(KEYS))

    def wait(self) -> None:
        self.rig.advance(self.random.choice([0.01, 1, 40]))

    def live(self) -> None:
        verbs = (self.transact, self.step, self.fail, self.resume, self.force, self.wait)
        for verb in self.random.choices(verbs, weights=(25, 35, 10, 15, 7, 8), k=120):
            verb()

    def mend(self) -> None:
        self.rig.turn()
        for key in KEYS:
            target = self.targets.target(key)
            if target.stopped is not None:
                self.targets.resume(key, keep=target.forced)
                self.rig.handler.target_resumed(key)
        self.targets.automatic = True
        self.targets.force()
        for _ in range(6):
            self.rig.work()
            self.rig.advance(60)

    def sent(self, key: int) -> list[bytes]:
        return [
            payload
            for answer, batches in self.asked
            if answer.code == "ok"
            for each, (payload,) in batches
            if each == key
        ]


@pytest.mark.parametrize("seed", range(scaled(1000)))
def test_every_decision_arrives_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply_queue, "IN_FLIGHT_BYTES_MAX", 1500)
    life = Life(seed)
    life.live()
    life.mend()
    assert all(answer.calls == 1 for answer, _ in life.asked), f"seed {seed}"
    for key in KEYS:
        assert life.rig.visible(key) == life.sent(key), f"seed {seed}"
    assert not life.rig.store.transactions and not life.targets.reserved, f"seed {seed}"
