"""Snapshots: what is stored, what is used again, and what it costs."""

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.replication.objects import (
    DATA,
    HookedStore,
    Primary,
    Tree,
    empty_disk,
    failing_after,
    make_snapshotter,
    read_tree,
)
from tests.scale import scaled, seeded
from tfmq.replication.entries import Position, manifest_key
from tfmq.replication.errors import NewerObject, ReplicationError, SnapshotLost, SnapshotTooSlow, StoreUnavailable
from tfmq.replication.manifest import CHUNK_BYTES, PIECE_BYTES, Content, Manifest, encode_manifest
from tfmq.replication.recording_disk import RecordingDisk
from tfmq.replication.snapshot import UPLOADS, FolderFile, FolderSource, Snapshotter

FILE = "orders-0/segment"


class Growing:
    """A source with one file, whose bytes it makes up, and which notes what is read."""

    def __init__(self, size: int, changed: int = 0, base: Position | None = None) -> None:
        self.base = base
        self.folders = ("orders-0",)
        self.files = [FolderFile(FILE, size, changed, FILE if base else None)]
        self.reads: list[tuple[int, int]] = []
        self.released: list[str] = []

    def read(self, file: FolderFile, position: int, size: int) -> bytes:
        self.reads.append((position, size))
        return random.Random(position).randbytes(16) * -(-size // 16) if size % 16 == 0 else bytes(size)

    def release(self, file: FolderFile) -> None:
        self.released.append(file.path)


def store_snapshot(snapshotter: Snapshotter, source: Any, slot: int) -> Manifest:
    return snapshotter.store_manifest(Position(1, slot), 0, snapshotter.upload(source))


def test_a_tail_costs_at_most_the_new_bytes_and_a_piece_and_full_chunks_are_read_once() -> None:
    store = HookedStore()
    snapshotter = make_snapshotter(store)
    size, slot, base = 2 * CHUNK_BYTES + 300_000, 1, None
    for grown in (0, 100, 200_000, PIECE_BYTES, 3 * PIECE_BYTES + 17):
        size += grown
        source = Growing(size, size - grown if base else 0, base)
        before = snapshotter.uploaded_bytes
        store_snapshot(snapshotter, source, slot)
        if base is not None:
            uploaded = snapshotter.uploaded_bytes - before
            assert uploaded <= grown + PIECE_BYTES
            assert all(position >= 2 * CHUNK_BYTES for position, _ in source.reads)
            assert sum(length for _, length in source.reads) <= grown + PIECE_BYTES
        assert source.released == [FILE]
        base, slot = Position(1, slot), slot + 1


def test_a_chunk_is_made_of_pieces_once() -> None:
    """A byte is uploaded in a piece, and once more when its chunk is full."""
    store = HookedStore()
    snapshotter = make_snapshotter(store)
    base = store_snapshot(snapshotter, Growing(CHUNK_BYTES - PIECE_BYTES), 1).position
    before = snapshotter.uploaded_bytes
    store_snapshot(snapshotter, Growing(CHUNK_BYTES + 10, CHUNK_BYTES - PIECE_BYTES, base), 2)
    assert snapshotter.uploaded_bytes - before == CHUNK_BYTES + 10


def test_what_is_said_to_be_unchanged_counts_only_for_the_newest_manifest() -> None:
    store = HookedStore()
    mine, other = make_snapshotter(store), make_snapshotter(store, seed=1)
    size = 3 * PIECE_BYTES
    base = store_snapshot(mine, Growing(size), 1).position
    store_snapshot(other, Growing(size), 2)
    source = Growing(size, size, base)
    store_snapshot(mine, source, 3)
    assert len(source.reads) == 3, "the newest manifest is not the one that the source compares with"
    source = Growing(size, size, Position(1, 3))
    found = store_snapshot(mine, source, 4)
    assert source.reads == []
    assert sum(chunk.size for chunk in found.chunks()) == size


@pytest.mark.usefixtures("small_chunks")
def test_only_chunks_of_the_newest_manifest_are_used_again() -> None:
    store = HookedStore()
    primary = Primary(store)
    primary.begin()
    primary.write_file("a", b"x" * 700)
    first = set(primary.snapshot().chunks())
    primary.write_file("b", b"x" * 700)
    assert set(primary.snapshot().chunks()) == first, "the same content, under another name"
    primary.disk.write_file(f"{DATA}/a", b"short")
    primary.disk.write_file(f"{DATA}/b", b"short")
    primary.store_entry(1, b"")
    assert not list(primary.snapshot().chunks())
    primary.disk.write_file(f"{DATA}/b", b"x" * 700)
    primary.store_entry(1, b"")
    assert not set(primary.snapshot().chunks()) & first, "a sweep may delete them"


@pytest.mark.usefixtures("small_chunks")
def test_a_snapshot_has_every_replicated_file_and_nothing_else() -> None:
    disk = empty_disk()
    for folder in ("meta", "replica", "orders-0", "orders-0/deep", "empty"):
        disk.make_folder(f"{DATA}/{folder}")
    contents = {"meta/version": b"v", "orders-0/segment": b"s" * 9001, "orders-0/deep/file": b"f" * 64, "none": b""}
    for path, data in contents.items():
        disk.write_file(f"{DATA}/{path}", data)
    for path in ("lock", "address", "address.12", "replica/state", "meta/reserve", "server.log"):
        disk.write_file(f"{DATA}/{path}", b"local")
    store = HookedStore()
    found = make_snapshotter(store).upload(FolderSource(disk, DATA))
    assert found.folders == ("empty", "meta", "orders-0", "orders-0/deep")
    assert {file.path: file.size for file in found.files} == {path: len(data) for path, data in contents.items()}
    stored = {f.path: f.content + b"".join(store.objects[c.key][0] for c in f.chunks) for f in found.files}
    assert stored == contents


def test_a_name_that_is_no_text_is_named() -> None:
    disk = empty_disk()
    disk.write_file(f"{DATA}/\udcff", b"")
    with pytest.raises(ReplicationError, match="is no UTF-8, so it cannot be replicated: rename it"):
        make_snapshotter(HookedStore()).upload(FolderSource(disk, DATA))


def test_few_chunks_are_in_memory() -> None:
    class Counting(Growing):
        alive = most = 0

        def read(self, file: FolderFile, position: int, size: int) -> bytes:
            self.alive += 1
            self.most = max(self.most, self.alive)
            return super().read(file, position, size)

    source = Counting(40 * PIECE_BYTES)
    store = HookedStore()

    def put_done(call: str, key: str) -> None:
        if call == "put_new" and key.startswith("chunks/"):
            source.alive -= 1

    store.before = put_done
    with ThreadPoolExecutor(8) as threads:
        snapshotter = Snapshotter(
            store,
            threads,
            clock=lambda: 0.0,
            random_bytes=random.Random(1).randbytes,
            pause=lambda seconds: None,
            limit_seconds=1.0,
        )
        snapshotter.upload(source)
    assert source.most <= UPLOADS


def test_what_was_uploaded_before_a_failure_is_not_uploaded_again() -> None:
    store = HookedStore()
    pauses: list[float] = []
    snapshotter = make_snapshotter(store, pause=pauses.append)
    source = Growing(6 * PIECE_BYTES)
    store.before = failing_after(store, 4)  # a list, and three chunks
    with pytest.raises(StoreUnavailable):
        snapshotter.upload(source)
    assert pauses[:3] == [0.25, 1.0, 4.0]
    stored = snapshotter.uploaded_bytes
    assert stored == 3 * PIECE_BYTES
    store.before = lambda call, key: None
    store_snapshot(snapshotter, source, 1)
    assert snapshotter.uploaded_bytes == 6 * PIECE_BYTES


def test_an_upload_whose_answer_was_lost_is_repeated_under_another_name() -> None:
    class Losing(HookedStore):
        lost = 0

        def put_new(self, key: str, data: bytes) -> bool:
            done = super().put_new(key, data)
            if done and self.lost < 2:
                self.lost += 1
                raise StoreUnavailable("no answer")
            return done

    store = Losing()
    found = make_snapshotter(store).upload(Growing(PIECE_BYTES))
    assert len(store.keys("chunks/")) == 3
    (chunk,) = found.files[0].chunks
    chunk.check(store.objects[chunk.key][0])


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_snapshot_that_takes_too_long_is_given_up_and_begun_again() -> None:
    store, clock = HookedStore(), Clock()
    store_snapshot(make_snapshotter(store, seed=1), Growing(0), 0)
    snapshotter = make_snapshotter(store, clock=clock, limit_seconds=100)
    content = snapshotter.upload(Growing(PIECE_BYTES))
    clock.now = 101
    with pytest.raises(SnapshotTooSlow, match="took more than 100 s"):
        snapshotter.store_manifest(Position(1, 1), 0, content)
    assert len(store.keys("manifests/")) == 1
    store_snapshot(snapshotter, Growing(PIECE_BYTES), 1)
    assert len(store.keys("chunks/")) == 2, "a sweep may have deleted the first"

    slow = Growing(3 * PIECE_BYTES)
    store.before = lambda call, key: setattr(clock, "now", clock.now + 60)
    with pytest.raises(SnapshotTooSlow):
        snapshotter.upload(slow)
    assert len(slow.reads) < 3


def test_a_manifest_that_was_frozen_on_its_way_is_removed() -> None:
    store, clock = HookedStore(), Clock()
    store_snapshot(make_snapshotter(store, seed=1), Growing(0), 0)
    snapshotter = make_snapshotter(store, clock=clock, limit_seconds=100)
    content = snapshotter.upload(Growing(PIECE_BYTES))
    store.before = lambda call, key: setattr(clock, "now", clock.now + 201 * (call == "put_new"))
    with pytest.raises(SnapshotTooSlow):
        snapshotter.store_manifest(Position(1, 1), 0, content)
    assert len(store.keys("manifests/")) == 1


def test_a_first_snapshot_takes_as_long_as_it_needs() -> None:
    """Nothing sweeps before it, and a second attempt would take no less time."""
    store, clock = HookedStore(), Clock()
    snapshotter = make_snapshotter(store, clock=clock, limit_seconds=100)
    source = Growing(3 * PIECE_BYTES)
    store.before = failing_after(store, 3)  # a list, and two chunks
    with pytest.raises(StoreUnavailable):
        snapshotter.upload(source)
    clock.now += 1000
    store.before = lambda call, key: setattr(clock, "now", clock.now + 60)
    store_snapshot(snapshotter, source, 1)
    assert snapshotter.uploaded_bytes == 3 * PIECE_BYTES, "also over a failure, nothing is uploaded twice"
    slower = Growing(9 * PIECE_BYTES)
    with pytest.raises(SnapshotTooSlow):
        snapshotter.upload(slower)


def test_of_two_manifests_at_one_position_the_first_counts() -> None:
    store = HookedStore()
    first, second = make_snapshotter(store), make_snapshotter(store, seed=1)
    contents = [each.upload(Growing(PIECE_BYTES)) for each in (first, second)]
    stored = first.store_manifest(Position(1, 1), 5, contents[0])
    assert second.store_manifest(Position(1, 1), 5, contents[1]) == stored


def test_a_lost_or_shorter_source_fails_the_snapshot_alone() -> None:
    class Lost(Growing):
        def read(self, file: FolderFile, position: int, size: int) -> bytes:
            raise SnapshotLost("the folder changed too much")

    class Shorter(Growing):
        def read(self, file: FolderFile, position: int, size: int) -> bytes:
            return super().read(file, position, size)[1:]

    for source in (Lost(PIECE_BYTES), Shorter(PIECE_BYTES)):
        with pytest.raises(SnapshotLost):
            make_snapshotter(HookedStore()).upload(source)


def test_a_chunk_that_the_store_has_lost_is_uploaded_again() -> None:
    store = HookedStore()
    snapshotter = make_snapshotter(store)
    first = store_snapshot(snapshotter, Growing(3 * PIECE_BYTES), 1)
    chunks = list(first.chunks())
    del store.objects[chunks[0].key]
    store.objects[chunks[1].key] = (b"cut", store.now)
    for slot, base in ((2, first.position), (3, None)):
        found = store_snapshot(snapshotter, Growing(3 * PIECE_BYTES, 3 * PIECE_BYTES * bool(base), base), slot)
        for chunk in found.chunks():
            chunk.check(store.objects[chunk.key][0])
    assert snapshotter.uploaded_bytes == 5 * PIECE_BYTES


@pytest.mark.usefixtures("small_chunks")
def test_damage_of_the_newest_manifest_is_healed_and_a_newer_format_respected() -> None:
    store = HookedStore()
    primary = Primary(store)
    primary.begin()
    primary.write_file("a", b"x" * 700)
    store.damage(primary.snapshot().key)
    primary.write_file("b", b"y" * 700)
    found = primary.snapshot()
    assert sum(chunk.size for chunk in found.chunks()) == 1400
    newer = bytearray(encode_manifest(Manifest(Position(1, 9), 0, Content((), ()))))
    newer[4] = 2
    store.put_new(manifest_key(Position(1, 9)), bytes(newer))
    with pytest.raises(NewerObject):
        primary.snapshot()


@pytest.mark.usefixtures("small_chunks")
def test_snapshots_of_a_folder_in_use_are_the_folder_when_they_began() -> None:
    """With a `RecordingDisk`, whose folder is changed at each call of the store."""
    for number in range(scaled(60)):
        generator = seeded("in use", number)
        store = HookedStore()
        primary = Primary(store, generator)
        disk = RecordingDisk(primary.disk, DATA)
        primary.through = disk

        def change(call: str, key: str, primary: Primary = primary, generator: random.Random = generator) -> None:
            if generator.randrange(3) == 0:
                primary.change_randomly(1)

        lost = 0
        for slot in range(1, 6):
            primary.change_randomly(generator.randrange(8))
            view, tree = disk.begin_snapshot(), read_tree(primary.disk)
            store.before = change
            try:
                manifest = store_snapshot(primary.snapshotter, view, slot)
            except SnapshotLost:
                lost += 1
                view.close()
                continue
            finally:
                store.before = lambda call, key: None
            view.commit(manifest.position)
            found: Tree = dict.fromkeys(manifest.content.folders)
            for file in manifest.content.files:
                found[file.path] = file.content + b"".join(store.objects[chunk.key][0] for chunk in file.chunks)
            assert found == tree
        assert lost < 5


@pytest.mark.usefixtures("small_chunks")
def test_full_chunks_of_a_file_in_use_are_not_read_again() -> None:
    store, simulated = HookedStore(), empty_disk()
    disk = RecordingDisk(simulated, DATA)
    snapshotter = make_snapshotter(store)
    file = disk.create(f"{DATA}/segment")
    size = reads = 0
    for slot in range(1, 30):
        size += file.pwritev([bytes([slot]) * 1000], size)
        view = disk.begin_snapshot()
        before, uploaded = simulated.faults.counts["read"], snapshotter.uploaded_bytes
        view.commit(store_snapshot(snapshotter, view, slot).position)
        reads = simulated.faults.counts["read"] - before
        cost = snapshotter.uploaded_bytes - uploaded
        is_chunk_full = size // 4096 > (size - 1000) // 4096
        assert cost <= 1000 + 512 + 4096 * is_chunk_full
        assert reads <= 4
