"""Materialize: at every position of a history the folder equals the model, also after power cuts and damage."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from journal.disk import RealDisk
from journal.errors import Full
from journal.filenames import LOG_CHECKPOINT_NAME
from journal.testing import SimulatedDisk, crash_states
from tests.replication.objects import (
    DATA,
    CallsItself,
    HookedStore,
    Primary,
    Tree,
    empty_disk,
    encode,
    failing_after,
    read_tree,
)
from tests.scale import scaled, seeded
from tfmq.replication.chain import read_chain
from tfmq.replication.entries import EntryKind, Position, encode_entry, entry_key, manifest_key
from tfmq.replication.errors import InvalidObject, NewerObject, NoReplica, StoreUnavailable
from tfmq.replication.materialize import MARKER_PATH, Materialized, find_start, is_incomplete, materialize
from tfmq.replication.operations import Kind, Operation
from tfmq.replication.snapshot import FolderSource
from tfmq.replication.store import Store

pytestmark = pytest.mark.usefixtures("small_chunks")
ASIDE = "/srv/data/replica/deposed"


def materialized(store: Store, disk: SimulatedDisk, **options: Any) -> Materialized:
    start = {name: options.pop(name) for name in ("until", "at_ms") if name in options}
    return materialize(store, disk, DATA, CallsItself(), find_start(store, **start), **options)


def random_history(store: HookedStore, generator: Random) -> Primary:
    """A history of several terms, with fences, void entries and manifests, terms that never began, and BASE entries."""
    primary = Primary(store, generator)
    parent: Position | None = None
    for _ in range(generator.randrange(1, 5)):
        primary.begin(parent, skipped=generator.choice((0, 0, 1)))
        if len(primary.trees) == 1:
            primary.change_randomly(5)
            primary.base()
        first = primary.position
        for _ in range(generator.randrange(1, 8)):
            primary.write_randomly()
            if generator.randrange(4) == 0:
                primary.snapshot()
            if generator.randrange(10) == 0:
                primary.change_randomly(4)
                primary.base()
        # The next primary may have put its fence below some of the last entries, but not below a manifest.
        newest = max(position for position in primary.trees if manifest_key(position) in store.objects)
        lowest = max(first, newest) if newest.term == first.term else first
        parent = Position(first.term, generator.randrange(lowest.slot, primary.position.slot + 1))
        if parent == primary.position or generator.randrange(2):
            void = primary.position.slot > parent.slot
            if void:
                primary.fence(Position(parent.term, parent.slot + 1))
        else:
            parent = primary.position
        if generator.randrange(3) == 0:
            # What a frozen primary stores after its fence does not count, a manifest neither.
            tree, times = dict(primary.trees), dict(primary.times)
            primary.position = Position(parent.term, primary.position.slot + 2)
            primary.change_randomly(3)
            primary.write_randomly()
            primary.snapshot()
            primary.trees, primary.times = tree, times
            primary.position = Position(parent.term, primary.position.slot)
    if parent != primary.position:
        primary.begin(parent)
    for _ in range(generator.randrange(4)):
        primary.write_randomly()
    primary.claim(primary.position.term + 1)
    return primary


def test_the_snapshot_of_a_base_does_not_count_before_the_base() -> None:
    """It is stored first, and its primary may die or be fenced between."""
    primary = Primary(HookedStore())
    primary.begin()
    primary.write_file("a", b"a")
    primary.snapshot()
    last = primary.position
    primary.disk.write_file(f"{DATA}/a", b"changed")
    content = primary.snapshotter.upload(FolderSource(primary.disk, DATA))
    base = primary.snapshotter.store_manifest(Position(1, last.slot + 1), primary.time_ms, content).position
    assert materialized(primary.store, empty_disk()).position == last
    primary.fence(base)
    assert materialized(primary.store, empty_disk()).position == last
    del primary.store.objects[entry_key(base)]
    primary.store_entry(EntryKind.BASE, b"")
    assert materialized(primary.store, empty_disk()).position == base


def restorable(primary: Primary) -> list[Position]:
    first = read_chain(primary.store).manifests[0]
    return sorted(position for position in primary.trees if position >= first)


def changed(disk: SimulatedDisk, generator: Random) -> SimulatedDisk:
    """The disk with some files changed, removed or added."""
    for path, content in read_tree(disk).items():
        choice = generator.randrange(4)
        if content is not None and choice == 0:
            disk.write_file(f"{DATA}/{path}", content[: generator.randrange(len(content) + 1)] + b"beyond")
        elif content and choice == 1:
            disk.damage(f"{DATA}/{path}", generator.randrange(len(content)), b"#")
    disk.write_file(f"{DATA}/other", b"only here")
    return disk


@pytest.mark.parametrize("number", range(scaled(200)))
def test_at_every_position_the_folder_equals_the_model(number: int) -> None:
    generator = seeded("materialize", number)
    store = HookedStore()
    primary = random_history(store, generator)
    disk = empty_disk()
    for position in restorable(primary):
        found = materialized(store, disk, until=position)
        assert found[:2] == (position, primary.times[position])
        assert read_tree(disk) == primary.trees[position]
        assert read_tree(disk.crash(keep="nothing")) == primary.trees[position], "everything is durable"
        if generator.randrange(2):
            disk = changed(disk, generator) if generator.randrange(2) else empty_disk()
    found = materialized(store, disk)
    assert read_tree(disk) == primary.trees[found.position]
    assert found.position == primary.position


def test_a_term_that_was_claimed_and_not_begun_changes_nothing() -> None:
    store = HookedStore()
    primary = Primary(store)
    primary.begin()
    primary.write_file("a", b"1")
    primary.snapshot()
    primary.claim(2)
    store.put_new(entry_key(Position(2, 0)), encode_entry(EntryKind.FENCE, Position(2, 0), 0, [b""]))
    primary.claim(3)
    assert materialized(store, empty_disk()).position == primary.position


def test_a_position_above_a_fence_is_refused() -> None:
    store = HookedStore()
    primary = Primary(store)
    primary.begin()
    primary.snapshot()
    primary.write_file("a", b"1")
    primary.write_file("b", b"1")
    primary.fence(Position(1, 2))
    primary.begin(Position(1, 1))
    with pytest.raises(InvalidObject, match=r"entries/0+1/0+2 does not count: another server continued before it"):
        find_start(store, until=Position(1, 2))
    with pytest.raises(InvalidObject, match=r"entries/0+2/0+1 is missing"):
        materialized(store, empty_disk(), until=Position(2, 7))


def test_entries_in_flight_above_a_free_slot_do_not_count() -> None:
    store = HookedStore()
    primary = Primary(store)
    primary.begin()
    primary.snapshot()
    for name in "abc":
        primary.write_file(name, b"1")
    del store.objects[entry_key(Position(1, 2))]
    assert materialized(store, empty_disk()).position == Position(1, 1)


def history_of_three_snapshots() -> Primary:
    primary = Primary(HookedStore())
    primary.begin()
    primary.write(Operation(Kind.MAKE_FOLDER, "orders-0"))
    primary.snapshot()
    for number in range(1, 4):
        primary.write_file("orders-0/segment", b"%d" % number * 5000, (number - 1) * 5000)
        primary.write_file(f"small{number}", b"small")
        primary.snapshot()
    primary.write_file("orders-0/segment", b"tail", 15_000)
    return primary


def test_damage_of_a_snapshot_is_evaded_by_an_earlier_one() -> None:
    primary = history_of_three_snapshots()
    newest, middle = (manifest_key(Position(1, slot)) for slot in (7, 5))
    primary.store.damage(newest)
    disk = empty_disk()
    assert materialized(primary.store, disk).damage == ""
    assert read_tree(disk) == primary.trees[primary.position]
    lost = next(
        chunk.key
        for chunk in find_start(primary.store).manifest.chunks()
        if chunk not in set(find_start(primary.store, until=Position(1, 4)).manifest.chunks())
    )
    del primary.store.objects[lost]
    disk = empty_disk()
    assert materialized(primary.store, disk).damage == f"{lost} is missing"
    assert read_tree(disk) == primary.trees[primary.position]
    for key in primary.store.keys("manifests/"):
        if key != newest:
            primary.store.damage(key)
    with pytest.raises(InvalidObject, match=f"{newest} fails its checksum|{middle} fails its checksum"):
        find_start(primary.store)


def test_a_damaged_chunk_is_one_sentence_if_nothing_can_replace_it() -> None:
    primary = Primary(HookedStore())
    primary.begin()
    primary.write_file("a", b"x" * 700)
    (chunk, _) = primary.snapshot().chunks()
    primary.store.damage(chunk.key)
    disk = empty_disk()
    for _ in range(2):
        with pytest.raises(InvalidObject, match=f"^{chunk.key} does not have the content that its name says$"):
            materialized(primary.store, disk)
        assert is_incomplete(disk, DATA)


def forged(primary: Primary, body: bytes, count: int) -> None:
    position = Position(1, primary.position.slot + 1)
    primary.store.put_new(
        entry_key(position), encode_entry(EntryKind.OPERATIONS, position, primary.time_ms, [body], count)
    )


@pytest.mark.parametrize(
    ("operation", "count", "why"),
    [
        (Operation(Kind.WRITE, "missing", 0, b"1"), 1, "does not fit the folder"),
        (Operation(Kind.CREATE, "a"), 1, "does not fit the folder"),
        (Operation(Kind.UNLINK, "folder"), 1, "does not fit the folder"),
        (Operation(Kind.REMOVE_FOLDER, "folder"), 1, "does not fit the folder"),
        (Operation(Kind.RENAME, "missing", target="b"), 1, "does not fit the folder"),
        (Operation(Kind.CREATE, "missing/b"), 1, "does not fit the folder"),
        (Operation(Kind.CREATE, "../b"), 1, "is invalid: the path '../b' does not name a file"),
        (Operation(Kind.CREATE, "lock"), 1, "is invalid: the path 'lock' is one that is not replicated"),
        (Operation(Kind.CREATE, "b"), 2, "has 1 operations instead of 2"),
    ],
)
def test_a_forged_entry_is_one_sentence(operation: Operation, count: int, why: str) -> None:
    primary = Primary(HookedStore())
    primary.begin()
    primary.write_file("a", b"1")
    primary.write(Operation(Kind.MAKE_FOLDER, "folder"), Operation(Kind.CREATE, "folder/x"))
    primary.snapshot()
    forged(primary, encode([operation]), count)
    disk = empty_disk()
    for _ in range(2):
        with pytest.raises(InvalidObject, match=rf"^entries/0+1/0+3 {why}"):
            materialized(primary.store, disk)
        assert is_incomplete(disk, DATA)


def test_a_missing_or_cut_entry_is_named_and_what_is_newer_refused() -> None:
    primary = history_of_three_snapshots()
    key = entry_key(Position(1, 8))
    entry, modified = primary.store.objects[key]
    primary.begin()
    for data, why in ((entry[:-1], "fails its checksum"), (b"", "is no entry"), (None, "is missing")):
        primary.store.objects[key] = (data or b"", modified)
        if data is None:
            del primary.store.objects[key]
        with pytest.raises(InvalidObject, match=f"^{key} {why}$"):
            materialized(primary.store, empty_disk())
    newer = bytearray(entry)
    newer[4] = 2
    primary.store.objects[key] = (bytes(newer), modified)
    with pytest.raises(NewerObject, match=f"^{key} has format 2, this version knows up to 1$"):
        materialized(primary.store, empty_disk())
    manifest = manifest_key(Position(1, 7))
    newer = bytearray(primary.store.objects[manifest][0])
    newer[4] = 2
    primary.store.objects[manifest] = (bytes(newer), modified)
    with pytest.raises(NewerObject, match=f"^{manifest} has format 2"):
        materialized(primary.store, empty_disk())


def test_nothing_is_made_of_nothing() -> None:
    store = HookedStore()
    with pytest.raises(NoReplica, match=r"^there is no replica at memory://$"):
        find_start(store)
    primary = Primary(store)
    with pytest.raises(NoReplica, match="no primary has begun the replica"):
        find_start(store)
    primary.begin()
    primary.write_file("a", b"1")
    with pytest.raises(NoReplica, match="has no snapshot yet: its primary has not completed the first"):
        find_start(store)
    primary.snapshot()
    with pytest.raises(NoReplica, match=r"has no snapshot at or below entries/0+1/0+0: its history begins later"):
        find_start(store, until=Position(1, 0))


def test_restore_to_random_times() -> None:
    for number in range(scaled(100)):
        generator = seeded("restore", number)
        store = HookedStore()
        primary = random_history(store, generator)
        positions = restorable(primary)
        for _ in range(5):
            at_ms = generator.randrange(primary.times[positions[0]], primary.time_ms + 2)
            wanted = max(position for position in positions if primary.times[position] <= at_ms)
            disk = empty_disk()
            found = materialized(store, disk, at_ms=at_ms)
            assert found.position == wanted
            assert read_tree(disk) == primary.trees[wanted]
        with pytest.raises(NoReplica, match="its history begins later"):
            find_start(store, at_ms=primary.times[positions[0]] - 1)


def local_changes(disk: SimulatedDisk) -> Tree:
    """Let the folder go on for itself, as a deposed primary did."""
    disk.write_file(f"{DATA}/orders-0/segment", disk.read_file(f"{DATA}/orders-0/segment") + b"mine")
    disk.make_folder(f"{DATA}/mine")
    disk.make_folder(f"{DATA}/mine/deep")
    disk.write_file(f"{DATA}/mine/deep/file", b"mine too")
    for path in ("lock", "replica/state", "meta/reserve"):
        folder = path.rpartition("/")[0]
        if folder and not disk.exists(f"{DATA}/{folder}"):
            disk.make_folder(f"{DATA}/{folder}")
        disk.write_file(f"{DATA}/{path}", b"local")
    return read_tree(disk)


def all_bytes(disk: SimulatedDisk) -> set[bytes]:
    return {bytes(content.data) for _, content in disk.all_files()}


def test_what_only_went_on_is_not_kept_a_second_time() -> None:
    """A primary that lost its term has little that its successor has not: its folder is not doubled."""
    primary = history_of_three_snapshots()
    disk = empty_disk()
    materialized(primary.store, disk, until=primary.position)
    primary.write_file("orders-0/segment", b"more", 15_004)
    # No snapshot has the present segment, so it is moved aside at first. The checkpoint of a log says how far that is.
    disk.write_file(f"{DATA}/orders-0/{LOG_CHECKPOINT_NAME}", b"how far its fsyncs were")
    found = materialized(primary.store, disk, aside=ASIDE)
    assert read_tree(disk) == primary.trees[primary.position]
    assert found.moved == 0 and not disk.exists(ASIDE)


def test_what_the_folder_had_otherwise_is_moved_aside() -> None:
    primary = history_of_three_snapshots()
    disk = empty_disk()
    materialized(primary.store, disk, until=Position(1, 6))
    before = local_changes(disk)
    disk.write_file(f"{DATA}/orders-0/{LOG_CHECKPOINT_NAME}", b"of the segment that is kept")
    found = materialized(primary.store, disk, aside=ASIDE)
    assert read_tree(disk) == primary.trees[primary.position]
    aside = read_tree(disk, ASIDE)
    assert aside["orders-0/segment"] == before["orders-0/segment"]
    assert aside["mine/deep/file"] == b"mine too"
    assert aside[f"orders-0/{LOG_CHECKPOINT_NAME}"] == b"of the segment that is kept"
    assert found.moved == 3
    assert disk.read_file(f"{DATA}/replica/state") == disk.read_file(f"{DATA}/lock") == b"local"
    assert not disk.closed_unforced
    crashed = disk.crash(keep="nothing")
    assert read_tree(crashed, ASIDE).items() >= aside.items()
    assert read_tree(crashed) == primary.trees[primary.position]


def test_without_a_place_aside_it_is_removed() -> None:
    primary = history_of_three_snapshots()
    disk = empty_disk()
    materialized(primary.store, disk, until=Position(1, 6))
    local_changes(disk)
    materialized(primary.store, disk)
    assert read_tree(disk) == primary.trees[primary.position]
    assert not disk.exists(f"{DATA}/mine")
    assert not disk.exists(f"{DATA}/meta"), "with the reserve in it, which a start writes again"


def test_a_file_and_a_folder_of_one_name_change_places() -> None:
    primary = Primary(HookedStore())
    primary.begin()
    primary.write_file("a", b"file")
    primary.write(Operation(Kind.MAKE_FOLDER, "b"), Operation(Kind.CREATE, "b/x"))
    primary.snapshot()
    disk = empty_disk()
    disk.make_folder(f"{DATA}/a")
    disk.write_file(f"{DATA}/a/file", b"1")
    disk.write_file(f"{DATA}/b", b"2")
    materialized(primary.store, disk, aside=ASIDE)
    assert read_tree(disk) == primary.trees[primary.position]
    assert read_tree(disk, ASIDE) == {"a": None, "a/file": b"1", "b": b"2"}


def test_chunks_that_are_here_are_not_downloaded() -> None:
    primary = history_of_three_snapshots()
    disk = empty_disk()
    size = 15_000
    assert materialized(primary.store, disk, until=Position(1, 7)).downloaded_bytes == size
    primary.store.gets.clear()
    found = materialized(primary.store, disk, until=Position(1, 7))
    assert (found.downloaded_bytes, found.kept_bytes) == (0, size + 15)
    assert not [key for key in primary.store.gets if key.startswith("chunks/")]
    for aside in (None, ASIDE):
        disk.damage(f"{DATA}/orders-0/segment", 9000, b"!")
        assert materialized(primary.store, disk, until=Position(1, 7), aside=aside).downloaded_bytes == 4096
        assert read_tree(disk) == primary.trees[Position(1, 7)]


class PowerCut(Exception):
    pass


def cut_after(disk: SimulatedDisk, changes: int) -> None:
    count = 0

    def check(kind: str, path: str) -> None:
        nonlocal count
        count += 1
        if count > changes:
            raise PowerCut

    disk.after = check


@pytest.mark.parametrize("aside", [ASIDE, None], ids=["moved", "removed"])
def test_a_power_cut_anywhere_and_a_repetition_give_the_same(aside: str | None) -> None:
    primary = history_of_three_snapshots()
    wanted = primary.trees[primary.position]
    generator = seeded("power cut", aside)
    begin = empty_disk()
    materialized(primary.store, begin, until=Position(1, 4))
    mine = local_changes(begin)
    steps = range(200) if scaled(100) > 10 else sorted(generator.sample(range(70), 35))
    for changes in steps:
        disk = begin.crash(keep="everything")
        cut_after(disk, changes)
        try:
            materialized(primary.store, disk, aside=aside)
        except PowerCut:
            was_cut = True
        else:
            was_cut = False
        disk.after = None
        for state in crash_states(disk, max(8, scaled(40)), generator):
            assert was_cut or not is_incomplete(state, DATA)
            if not is_incomplete(state, DATA) and read_tree(state) != mine:
                assert read_tree(state) == wanted, "a folder that counts as complete is complete"
            materialized(primary.store, state, aside=aside)
            assert read_tree(state) == wanted
            assert not is_incomplete(state, DATA)
            assert read_tree(state.crash(keep="nothing")) == wanted
            if aside is not None:
                moved = read_tree(state, ASIDE)
                assert moved["orders-0/segment"] == mine["orders-0/segment"]
                assert moved["mine/deep/file"] == b"mine too"
        if not was_cut:
            break
    else:
        assert steps[-1] < 150, "it ends"


def test_a_store_that_fails_in_the_middle_loses_nothing() -> None:
    primary = history_of_three_snapshots()
    disk = empty_disk()
    materialized(primary.store, disk, until=Position(1, 4))
    mine = local_changes(disk)
    calls = 0
    while True:
        primary.store.before = failing_after(primary.store, calls)
        try:
            found = materialized(primary.store, disk, aside=ASIDE)
        except StoreUnavailable:
            calls += 1
            continue
        break
    assert calls > 10
    assert found.position == primary.position
    assert read_tree(disk) == primary.trees[primary.position]
    assert read_tree(disk, ASIDE)["orders-0/segment"] == mine["orders-0/segment"]


def test_a_full_disk_in_the_middle_is_freed_and_repeated() -> None:
    primary = history_of_three_snapshots()
    disk = empty_disk()
    disk.space_bytes = 12_000
    for _ in range(2):
        with pytest.raises(Full):
            materialized(primary.store, disk)
        assert is_incomplete(disk, DATA)
        assert not disk.exists(f"{DATA}/replica/new-file"), "it takes the space that is missing"
    assert not disk.open_files
    disk.space_bytes = 40_000
    materialized(primary.store, disk)
    assert read_tree(disk) == primary.trees[primary.position]


def test_a_full_disk_while_entries_are_applied() -> None:
    primary = history_of_three_snapshots()
    primary.write_file("large", b"l" * 9000)
    disk = empty_disk()
    disk.space_bytes = 20_000
    with pytest.raises(Full):
        materialized(primary.store, disk)
    assert not disk.open_files
    disk.space_bytes = None
    materialized(primary.store, disk)
    assert read_tree(disk) == primary.trees[primary.position]


def test_a_failed_fsync_is_not_swallowed() -> None:
    primary = history_of_three_snapshots()
    for path in ("new-file", "orders-0/segment", "small1"):
        disk = empty_disk()
        materialized(primary.store, disk, until=Position(1, 7))
        if path == "new-file":
            disk.unlink(f"{DATA}/small1")
        disk.faults.fail("force", path=path, nth=3 if path == "new-file" else 1)  # two of them are markers
        with pytest.raises(OSError) as caught:
            materialized(primary.store, disk)
        assert caught.value.errno == errno.EIO
        assert is_incomplete(disk, DATA)


def test_the_result_is_recorded_when_it_is_durable_and_before_it_counts() -> None:
    primary = history_of_three_snapshots()
    disk = empty_disk()

    def record(found: Materialized) -> None:
        assert found.position == primary.position
        crashed = disk.crash(keep="nothing")
        assert read_tree(crashed) == primary.trees[primary.position]
        assert is_incomplete(crashed, DATA)
        raise PowerCut

    with pytest.raises(PowerCut):
        materialized(primary.store, disk, record=record)
    assert is_incomplete(disk, DATA)


def test_an_unreadable_marker_counts_as_a_begin() -> None:
    primary = history_of_three_snapshots()
    disk = empty_disk()
    disk.make_folder(f"{DATA}/replica")
    disk.write_file(f"{DATA}/{MARKER_PATH}", b"\0torn")
    disk.write_file(f"{DATA}/mine", b"mine")
    materialized(primary.store, disk, aside=ASIDE)
    assert read_tree(disk, ASIDE) == {"mine": b"mine"}


def test_with_threads_and_real_files(tmp_path: Any) -> None:
    primary = history_of_three_snapshots()
    folder = tmp_path / "data"
    folder.mkdir()
    done: list[int] = []
    with ThreadPoolExecutor(3) as threads:
        for _ in range(2):
            start = find_start(primary.store)
            materialize(primary.store, RealDisk(), str(folder), threads, start, progress=done.append)
            found = {
                str(each.relative_to(folder)): None if each.is_dir() else each.read_bytes()
                for each in folder.rglob("*")
                if each.name != "replica"
            }
            assert found == primary.trees[primary.position]
            assert sum(done) >= start.manifest.content.size_bytes
            (folder / "orders-0/segment").write_bytes(b"1" * 5000)


def test_the_times_of_a_history_increase() -> None:
    """The model of these tests, as `restore to a moment` needs it."""
    primary = random_history(HookedStore(), seeded("times"))
    times = [primary.times[position] for position in sorted(primary.times)]
    assert all(before <= after for before, after in pairwise(times))


def test_a_history_with_a_gap_below_a_manifest_does_not_end_there() -> None:
    primary = history_of_three_snapshots()
    for slot in (5, 7):
        primary.store.damage(manifest_key(Position(1, slot)))
    disk = empty_disk()
    materialized(primary.store, disk)
    assert read_tree(disk) == primary.trees[primary.position]
    del primary.store.objects[entry_key(Position(1, 6))]
    with pytest.raises(InvalidObject, match=r"entries/0+1/0+6 is missing"):
        materialized(primary.store, disk)


def test_files_that_stay_are_made_durable_too() -> None:
    """Their bytes may be in the system's cache alone, after the process that wrote them was killed."""
    primary = history_of_three_snapshots()
    start = find_start(primary.store, until=Position(1, 7))
    disk = empty_disk()
    disk.make_folder(f"{DATA}/orders-0")
    for path, content in primary.trees[Position(1, 7)].items():
        if content is not None:
            with closing(disk.create(f"{DATA}/{path}")) as file:
                file.pwritev([content], 0)
    found = materialize(primary.store, disk, DATA, CallsItself(), start)
    assert found.downloaded_bytes == 0
    assert read_tree(disk.crash(keep="nothing")) == primary.trees[Position(1, 7)]
