"""Sweeps: they delete what no restore needs, and nothing that a manifest refers to or will refer to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, partial
from random import Random

import pytest
from greenlet import getcurrent, greenlet

from tests.replication.objects import (
    DATA,
    CallsItself,
    HookedStore,
    Primary,
    empty_disk,
    failing_after,
    make_snapshotter,
    read_tree,
)
from tests.replication.test_materialize import materialized, random_history, restorable
from tests.scale import scaled, seeded
from tfmq.replication.entries import Position, entry_key, handover_key, manifest_key, parse_position, term_key
from tfmq.replication.errors import NewerObject, NoReplica, SnapshotTooSlow, StoreUnavailable
from tfmq.replication.operations import Kind, Operation
from tfmq.replication.snapshot import FolderSource
from tfmq.replication.sweep import Swept, begin_sweep, sweep
from tfmq.replication.verify import verify

pytestmark = pytest.mark.usefixtures("small_chunks")
HISTORY = 1000.0


def swept(store: HookedStore, seed: int = 0) -> Swept:
    return sweep(store, history_seconds=HISTORY, random_bytes=Random(seed).randbytes)


def is_whole(store: HookedStore) -> bool:
    return not verify(store, CallsItself()).is_damaged


def history_of_snapshots(count: int, pause: float = HISTORY / 2) -> Primary:
    """A history with `count` snapshots, one in `pause` seconds. A file that stays, one that changes."""
    primary = Primary(HookedStore())
    primary.begin()
    primary.write_file("stays", b"s" * 700)
    for number in range(count):
        primary.store.now += pause
        primary.write_file("changes", b"%d" % number * 512)
        primary.snapshot()
    return primary


def test_the_history_and_what_it_needs_is_kept_and_the_rest_is_deleted() -> None:
    primary = history_of_snapshots(6)
    store = primary.store
    store.put_new(handover_key(1), b"m 1")
    found = swept(store)
    assert found.oldest == Position(1, 5), "stored exactly when the history begins"
    assert store.keys("manifests/") == [manifest_key(Position(1, slot)) for slot in (5, 6, 7)]
    assert store.keys("entries/") == [entry_key(Position(1, slot)) for slot in (5, 6, 7)]
    assert (found.manifests, found.entries, found.chunks) == (3, 5, 3)
    assert found.chunk_bytes == 3 * 512
    assert is_whole(store)
    assert store.keys("sweeps/") == []
    assert swept(store)[1:] == (0, 0, 0, 0, "")
    assert [materialized(store, empty_disk(), until=Position(1, slot)).position.slot for slot in (5, 6, 7)] == [5, 6, 7]
    with pytest.raises(NoReplica):
        materialized(store, empty_disk(), until=Position(1, 4))
    assert store.keys("handovers/") == [handover_key(1)]


def test_terms_below_the_history_are_deleted_and_the_newest_stays() -> None:
    """Their fences stay: a primary that slept since then meets its own."""
    primary = history_of_snapshots(1)
    fences = []
    for _ in range(3):
        fences.append(Position(primary.position.term, primary.position.slot + 1))
        primary.fence(fences[-1])
        primary.fence(Position(primary.position.term + 1, 0))
        primary.begin(skipped=1)
        primary.store.put_new(handover_key(primary.position.term), b"m 1")
        primary.snapshot()
    primary.store.now += HISTORY
    swept(primary.store)
    entries = [[each for each in keys if each.startswith("entries/")] for keys in primary.store.deletes]
    together = [{position.term for each in keys if (position := parse_position(each))} for keys in entries]
    assert {frozenset(terms) for terms in together} > {frozenset([1]), frozenset([3])}, "many are deleted in any order"
    assert all(len(terms) <= 1 for terms in together), "so the BEGIN of a term goes after all that is below it"
    assert primary.store.keys("terms/") == [term_key(7)]
    assert primary.store.keys("handovers/") == [handover_key(7)]
    assert primary.store.keys("entries/") == [entry_key(each) for each in (*fences, primary.position)]
    assert materialized(primary.store, empty_disk()).position == primary.position
    fences.append(Position(7, 1))
    primary.fence(fences[-1])
    primary.begin()
    primary.snapshot()
    primary.store.now += HISTORY
    swept(primary.store)
    assert primary.store.keys("entries/") == [entry_key(each) for each in (*fences, primary.position)]


def test_without_a_snapshot_that_is_old_enough_nothing_but_garbage_goes() -> None:
    primary = history_of_snapshots(2, 1.0)
    for _ in range(2):
        content = make_snapshotter(primary.store, seed=9).upload(FolderSource(primary.disk, DATA))
        assert content.files
    primary.disk.write_file(f"{DATA}/changes", b"garbage" * 100)
    make_snapshotter(primary.store, seed=9).upload(FolderSource(primary.disk, DATA))
    before = set(primary.store.objects)
    assert swept(primary.store) == Swept()
    assert set(primary.store.objects) == before
    primary.store.now += HISTORY - 1
    primary.write_file("x", b"1")
    primary.snapshot()
    primary.store.now += 2
    found = swept(primary.store)
    assert found.oldest == Position(1, 3)
    assert found.chunks == 2 + 1, "of an abandoned snapshot, and of the first"
    assert is_whole(primary.store)


def test_a_manifest_that_does_not_count_is_no_begin_of_the_history() -> None:
    primary = history_of_snapshots(1)
    end = primary.position
    primary.write_file("void", b"v" * 100)
    void = primary.snapshot().position
    primary.fence(Position(1, end.slot + 1))
    primary.begin(end)
    primary.write_file("a", b"a")
    primary.store.now += 2 * HISTORY
    assert swept(primary.store).oldest == end < void
    assert materialized(primary.store, empty_disk(), until=Position(2, 0)).position == Position(2, 0)


def test_ages_are_by_the_clock_of_the_store() -> None:
    store = HookedStore()
    store.now = 5.0
    store.put_new("sweeps/left-behind", b"\0")
    store.now = 10_000.0
    key, now = begin_sweep(store, Random(1).randbytes)
    assert now == 10_000.0 and store.keys("sweeps/") == [key]

    class Forgetful(HookedStore):
        def put_new(self, key: str, data: bytes) -> bool:
            return True

    with pytest.raises(StoreUnavailable, match="does not list sweeps/"):
        begin_sweep(Forgetful(), Random(1).randbytes)


def test_an_unreadable_manifest_keeps_all_chunks_and_a_newer_one_everything() -> None:
    primary = history_of_snapshots(6)
    store = primary.store
    key = manifest_key(Position(1, 6))
    sound = store.objects[key]
    store.objects[key] = (bytes([*sound[0][:4], 2, *sound[0][5:]]), sound[1])
    before = set(store.objects)
    with pytest.raises(NewerObject, match=f"{key} has format 2"):
        swept(store)
    assert set(store.objects) == before
    store.objects[key] = sound
    store.damage(key)
    chunks = store.keys("chunks/")
    found = swept(store)
    assert found.damage == f"{key} fails its checksum"
    assert found.oldest == Position(1, 5)
    assert store.keys("chunks/") == chunks
    primary.store.now += 2 * HISTORY
    primary.write_file("x", b"1")
    primary.snapshot()
    primary.store.now += HISTORY
    assert swept(store).chunks > 0
    assert is_whole(store)


def test_a_sweep_that_ends_anywhere_leaves_a_whole_history() -> None:
    calls = 0
    while True:
        primary = history_of_snapshots(6)
        primary.begin()
        primary.snapshot()
        primary.store.before = failing_after(primary.store, calls)
        try:
            swept(primary.store)
        except StoreUnavailable:
            primary.store.before = lambda call, key: None
            assert is_whole(primary.store)
            for position in restorable(primary):
                disk = empty_disk()
                materialized(primary.store, disk, until=position)
                assert read_tree(disk) == primary.trees[position]
            swept(primary.store, 1)
            assert len(primary.store.keys("manifests/")) == 3 + 1
            calls += 1
            continue
        break
    assert calls > 20


@pytest.mark.parametrize("number", range(scaled(100)))
def test_of_a_random_history_what_is_kept_can_be_restored(number: int) -> None:
    generator = seeded("sweep", number)
    store = HookedStore()
    store.before = lambda call, key: setattr(store, "now", store.now + 0.05 * HISTORY * (call == "put_new"))
    primary = random_history(store, generator)
    kept = [p for p in restorable(primary) if store.objects[entry_key(p)][1] > store.now - HISTORY]
    swept(store)
    for position in kept:
        disk = empty_disk()
        materialized(store, disk, until=position)
        assert read_tree(disk) == primary.trees[position]
    assert is_whole(store)


# Interleavings


def run_interleaved(store: HookedStore, actors: list[Callable[[], object]], order: Iterable[int], step: float) -> int:
    """Run the actors, each up to its next call of the store in turn, in the `order` of their numbers, then one after
    the other. The store's clock advances by `step` at each call. Return how many calls were made."""
    main = getcurrent()
    tasks = [greenlet(actor) for actor in actors]
    calls = 0

    def before(call: str, key: str) -> None:
        nonlocal calls
        calls += 1
        begun = store.now
        main.switch()
        store.now += step
        if store.now - begun > HISTORY / 2:
            raise StoreUnavailable("the request has timed out")

    store.before = before
    for number in order:
        if not tasks[number].dead:
            tasks[number].switch()
    for task in tasks:
        while not task.dead:
            task.switch()
    store.before = lambda call, key: None
    return calls


@cache
def concurrent_history() -> Primary:
    """A history with something to sweep, whose folder has changed since the last snapshot.

    The chunks that an abandoned snapshot of this folder has left behind are old enough to be swept.
    """
    primary = history_of_snapshots(2, HISTORY / 4)
    new = Operation(Kind.WRITE, "changes", 0, b"new!" * 128)
    primary.write(new)
    make_snapshotter(primary.store, seed=8).upload(FolderSource(primary.disk, DATA))
    primary.store.now += HISTORY * 1.1
    return primary


class Concurrent:
    """Sweeps and snapshots of one history. `outcomes`: of the snapshots. `checked`: results that were checked."""

    def __init__(self, checked: set[frozenset[str]]) -> None:
        self.checked = checked
        self.primary = concurrent_history()
        self.store = HookedStore()
        self.store.objects.update(self.primary.store.objects)
        self.store.now = self.primary.store.now
        self.outcomes: list[str] = []

    def write_snapshot(self, seed: int) -> None:
        snapshotter = make_snapshotter(self.store, seed=seed, limit_seconds=HISTORY / 2)
        try:
            content = snapshotter.upload(FolderSource(self.primary.disk, DATA))
            snapshotter.store_manifest(self.primary.position, self.primary.time_ms, content)
        except (SnapshotTooSlow, StoreUnavailable):
            self.outcomes.append("too slow")
        else:
            self.outcomes.append("stored")

    def sweep(self, seed: int) -> None:
        with suppress(StoreUnavailable):
            swept(self.store, seed)

    def run(self, writers: int, sweepers: int, order: Iterable[int], step: float) -> int:
        """Run that many writers and sweepers. Return how many calls of the store they have made."""
        actors: list[Callable[[], object]] = [partial(self.write_snapshot, seed) for seed in range(writers)]
        actors += [partial(self.sweep, seed) for seed in range(sweepers)]
        calls = run_interleaved(self.store, actors, order, step)
        result = frozenset([*self.store.objects, *self.outcomes])
        if result in self.checked:
            return calls
        self.checked.add(result)
        assert is_whole(self.store)
        disk = empty_disk()
        assert materialized(self.store, disk).position == self.primary.position
        assert read_tree(disk) == self.primary.trees[self.primary.position]
        if self.outcomes == ["stored"]:  # of two, one may have been too late, and has removed what the other found
            assert manifest_key(self.primary.position) in self.store.objects
        return calls


STEPS = (0.0, HISTORY / 60, HISTORY / 12, HISTORY / 9)
"""How much time passes at each call of the store: at the third, a snapshot that is interrupted is too slow, and a sweep
takes longer than the grace period."""


def test_every_interleaving_of_a_snapshot_and_a_sweep() -> None:
    generator = seeded("interleavings")
    checked: set[frozenset[str]] = set()
    writer, sweeper = Concurrent(checked).run(1, 0, (), 0.0), Concurrent(checked).run(0, 1, (), 0.0)
    outcomes: set[str] = set()
    all_places = list(itertools.combinations(range(writer + sweeper), writer))
    for places in generator.sample(all_places, scaled(len(all_places))):
        both = Concurrent(checked)
        order = [int(turn not in places) for turn in range(writer + sweeper)]
        both.run(1, 1, order, generator.choice(STEPS))
        outcomes.update(both.outcomes)
    assert outcomes == {"stored", "too slow"}


@pytest.mark.parametrize(("writers", "sweepers"), [(0, 2), (1, 2), (2, 1), (2, 2)])
def test_interleavings_of_several_snapshots_and_sweeps(writers: int, sweepers: int) -> None:
    generator = seeded("interleavings", writers, sweepers)
    checked: set[frozenset[str]] = set()
    for _ in range(scaled(1500)):
        step = generator.choice(STEPS)
        # Some advance much faster than others.
        weights = [generator.choice((1, 5, 25)) for _ in range(writers + sweepers)]
        order = generator.choices(range(writers + sweepers), weights, k=120)
        Concurrent(checked).run(writers, sweepers, order, step)
