"""A follower has, after every single operation, exactly the folder that a crash of the primary would leave.

Brokers live on a recording disk; each operation becomes an entry, is decoded and applied to another disk, and then the
whole folders are compared. At some of these boundaries a broker starts on either folder: its users find the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from journal.testing import SimulatedClock, SimulatedDisk
from tests.broker import helpers, test_schedule_simulation
from tests.broker.group_simulation import World
from tests.broker.helpers import Broker
from tests.crash import delay_life, transaction_life
from tests.replication.followed_disk import FollowedDisk, Tally
from tests.replication.mixed_life import SETTINGS, MixedLife, contents
from tests.scale import SEED, scaled, seeded
from tfmq.replication.operations import Kind

BOUNDARIES = {"mixed": 34_000, "delays": 9_000, "groups": 4_000, "schedules": 4_000}
"""How many comparisons there are at full count, by what the brokers do; those of the transactions come to them."""
STARTS_ONE_IN = 300
"""A broker starts at one of so many boundaries."""


def started(disk: SimulatedDisk) -> dict[str, object] | str:
    """What is found by a broker that starts after a crash, or why it does not start."""
    try:
        return contents(Broker(disk.crash(keep="everything"), SimulatedClock(), **SETTINGS))
    except Exception as error:  # in the middle of a repair it may be any
        return repr(error)


class Starts:
    """Starts brokers on both folders, at random boundaries."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.count = self.served = 0
        self.left = 0

    def __call__(self, disk: FollowedDisk) -> None:
        if self.left:
            self.left -= 1
            return
        self.left = self.chance.randrange(2 * STARTS_ONE_IN)
        found, expected = started(disk.follower.disk), started(disk.simulated)
        assert found == expected, f"after operation {disk.number}"
        self.count += 1
        self.served += isinstance(found, dict)


def mixed(chance: random.Random, new_disk: Callable[[], FollowedDisk]) -> None:
    life = MixedLife(chance, new_disk())
    try:
        for _ in range(120):
            life.step()
    except BaseException:
        print(" ".join(life.story))
        raise


class DelayLife(delay_life.Life):
    def _bound(self, kind: str, path: str) -> None:
        """Keeps no boundaries."""
        self.client.look()


def delays(chance: random.Random, new_disk: Callable[[], FollowedDisk]) -> None:
    DelayLife(chance).run(40)


def groups(chance: random.Random, new_disk: Callable[[], FollowedDisk]) -> None:
    world = World(chance)
    for _ in range(200):
        world.step()


def schedules(chance: random.Random, new_disk: Callable[[], FollowedDisk]) -> None:
    life = test_schedule_simulation.Life(chance)
    for _ in range(test_schedule_simulation.STEPS):
        life.step()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] if kind != "mixed" else []) for kind in BOUNDARIES]
)
def test_after_every_operation_the_follower_has_the_folder_of_the_primary(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    play: Callable[[random.Random, Any], None] = globals()[kind]
    starts = Starts(seeded("starts", kind))
    tally = Tally(starts)

    def new_disk() -> FollowedDisk:
        return FollowedDisk(tally=tally)

    for module in (helpers, delay_life):
        monkeypatch.setattr(module, "SimulatedDisk", new_disk)
    if kind == "delays":
        delay_life.small(monkeypatch)
    number = 0
    while tally.compared < scaled(BOUNDARIES[kind]):
        try:
            play(seeded("theorem", kind, number), new_disk)
        except BaseException:
            print(f"life {number} of {kind}, seed {SEED}, after {tally.compared} comparisons")
            raise
        number += 1
    print(f"{kind}: {number} lives, {tally.compared} boundaries, {starts.count} starts, {dict(tally.kinds)}")
    assert starts.count and starts.served >= starts.count * 0.9
    if kind == "mixed":
        assert tally.kinds.keys() == set(Kind)


def test_every_operation_of_every_kind_of_transaction_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts(seeded("starts", "transactions"))
    tally = Tally(starts)
    monkeypatch.setattr(transaction_life, "SimulatedDisk", lambda: FollowedDisk(tally=tally))
    life = transaction_life.Life(keep_boundaries=False)
    life.tell()
    assert tally.compared > 700 and starts.count == starts.served > 0
