"""Snapshots, sweeps and materializing beside the lives of brokers, with restarts and crashes."""

from __future__ import annotations

import random

import pytest

from journal.testing import SimulatedDisk
from tests.broker import helpers
from tests.crash import delay_life
from tests.replication import followed_disk
from tests.replication.followed_disk import DATA, FollowedDisk, Follower, Tally
from tests.replication.mixed_life import MixedLife
from tests.replication.objects import CallsItself, HookedStore, make_snapshotter, read_tree
from tests.scale import scaled, seeded
from tfmq.replication.entries import (
    IDENTITY_KEY,
    Begin,
    EntryKind,
    Fence,
    Identity,
    Position,
    Term,
    encode_entry,
    entry_key,
    term_key,
)
from tfmq.replication.materialize import find_start, materialize
from tfmq.replication.recording_disk import Body
from tfmq.replication.snapshot import FolderSource
from tfmq.replication.sweep import sweep
from tfmq.replication.verify import verify

HISTORY = 200.0
"""Seconds of the history. One passes at each operation."""


class History:
    """Stores what the brokers' disks record. After a crash that loses operations a term begins with a BASE."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.store = HookedStore()
        self.store.put_new(IDENTITY_KEY, Identity("node").encode())
        self.snapshotter = make_snapshotter(self.store, limit_seconds=HISTORY / 2)
        self.position = Position(0, 0)
        self.follower: Follower | None = None
        self.local = SimulatedDisk()
        self.local.make_folder(DATA)
        self.compared = self.snapshots = self.swept = 0

    def add(self, follower: Follower, body: Body) -> None:
        """Store the body that `follower` has applied."""
        self.store.now += 1
        if follower is self.follower:
            self._store_entry(EntryKind.OPERATIONS, body.parts, body.operation_count)
            return
        self.follower = follower
        parent = self.position if self.position.term else None
        if parent is not None:
            self._store_entry(EntryKind.FENCE, [Fence("member").encode()])
        self.position = Position(self.position.term + 1, -1)
        term = Term(self.position.term, "member", "host:1", "1")
        self.store.put_new(term_key(term.number), term.encode())
        self._store_entry(EntryKind.BEGIN, [Begin(parent, "member", "host:1").encode()])
        content = self.snapshotter.upload(FolderSource(follower.disk, DATA))
        self.snapshotter.store_manifest(Position(self.position.term, 1), self.time_ms, content)
        self._store_entry(EntryKind.BASE, [])

    @property
    def time_ms(self) -> int:
        return round(self.store.now * 1000)

    def _store_entry(self, kind: EntryKind, parts: list[bytes], count: int = 0) -> None:  # type: ignore[type-arg]
        self.position = Position(self.position.term, self.position.slot + 1)
        entry = encode_entry(kind, self.position, self.time_ms, parts, count)
        assert self.store.put_new(entry_key(self.position), entry)

    def look(self, disk: FollowedDisk) -> None:
        """Now and then store a snapshot, sweep, or make the local folder equal and compare it."""
        if disk.follower is not self.follower:
            return
        choice = self.chance.randrange(60)
        if choice == 0:
            view = disk.begin_snapshot()
            content = self.snapshotter.upload(view)
            view.commit(self.snapshotter.store_manifest(self.position, self.time_ms, content).position)
            self.snapshots += 1
        elif choice == 1:
            found = sweep(self.store, history_seconds=HISTORY, random_bytes=self.chance.randbytes)
            self.swept += found.entries
        elif choice == 2:
            found_at = materialize(self.store, self.local, DATA, CallsItself(), find_start(self.store)).position
            assert found_at == self.position
            assert read_tree(self.local, DATA) == read_tree(disk.simulated, DATA)
            self.compared += 1


class UndamagedLife(MixedLife):
    def repair(self) -> None:
        """Nothing: bytes that rot on a disk are not in the store."""


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.timeout(600)
def test_a_folder_made_from_the_store_is_the_folder_of_the_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(seeded("snapshots of a broker"))
    follow = Follower.follow

    def follow_and_store(follower: Follower, body: Body) -> None:
        follow(follower, body)
        history.add(follower, body)

    monkeypatch.setattr(followed_disk.Follower, "follow", follow_and_store)
    monkeypatch.setattr(FollowedDisk, "compare", lambda disk: None)  # that is tests/replication/test_theorem.py
    tally = Tally(history.look)
    for module in (helpers, delay_life):
        monkeypatch.setattr(module, "SimulatedDisk", lambda: FollowedDisk(tally=tally))
    number = 0
    while tally.compared < scaled(8_000):
        life = UndamagedLife(seeded("life with snapshots", number), FollowedDisk(tally=tally))
        for _ in range(120):
            life.step()
        number += 1
    assert history.compared > 2 and history.snapshots > 2 and history.swept > 2
    assert not verify(history.store, CallsItself()).is_damaged
