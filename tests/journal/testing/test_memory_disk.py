"""A simulated file: what readers see, what is on the platter, and every version between."""

from __future__ import annotations

import errno
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from journal.disk import write_all
from journal.errors import Full
from journal.testing import Moment, SimulatedDisk, crash_states
from journal.testing.memory_disk import (
    SECTOR_BYTES,
    FileContent,
    FolderTree,
    PendingChange,
    SimulatedFolder,
    path_names,
    walk_tree,
)

STEP = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 3000), st.binary(min_size=1, max_size=1500)),
    st.tuples(st.just("truncate"), st.integers(0, 3000), st.just(b"")),
    st.tuples(st.just("force"), st.just(0), st.just(b"")),
    st.tuples(st.just("lose"), st.just(0), st.just(b"")),
)


def live(steps: list[tuple[str, int, bytes]], *, with_losses: bool) -> tuple[FileContent, bytearray]:
    """A file after some steps, and what a plain array of bytes is after them."""
    content, model = FileContent(), bytearray()
    for number, (kind, position, data) in enumerate(steps, 1):
        if kind == "write":
            content.change(PendingChange(number, position, data))
            model.extend(bytes(max(0, position - len(model))))
            model[position : position + len(data)] = data
        elif kind == "truncate":
            content.change(PendingChange(number, position, None))
            model = model[:position].ljust(position, b"\0")
        elif kind == "force":
            content.fsync()
        elif with_losses:
            content.fail_fsync()
    return content, model


@given(st.lists(STEP, max_size=12))
def test_readers_see_every_write_at_once(steps: list[tuple[str, int, bytes]]) -> None:
    content, model = live(steps, with_losses=True)
    assert content.data == model


@given(st.lists(STEP, max_size=12))
def test_an_fsync_puts_on_the_platter_what_readers_see(steps: list[tuple[str, int, bytes]]) -> None:
    content, model = live(steps, with_losses=False)
    content.fsync()
    assert content.durable == model
    assert not content.pending


@given(st.lists(STEP, max_size=12))
def test_the_last_version_of_everything_is_what_readers_see(steps: list[tuple[str, int, bytes]]) -> None:
    content, model = live(steps, with_losses=False)
    image = content.image()
    assert image.sizes[-1][1] == len(model)
    assert image.sizes[0] == (0, len(content.durable))
    for sector, versions in image.versions.items():
        first = sector * SECTOR_BYTES
        assert versions[-1].data == bytes(model[first : first + SECTOR_BYTES]).ljust(SECTOR_BYTES, b"\0")
        forced = bytes(content.durable[first : first + SECTOR_BYTES])
        assert versions[0].data == forced.ljust(SECTOR_BYTES, b"\0")


def test_a_failed_fsync_loses_and_the_next_one_does_not_bring_back() -> None:
    content = FileContent()
    content.change(PendingChange(1, 0, b"a" * 512))
    content.fsync()
    content.change(PendingChange(2, 512, b"b" * 1024))
    content.fail_fsync()
    content.change(PendingChange(3, 1536, b"c" * 512))
    content.fsync()
    assert content.data == b"a" * 512 + b"b" * 1024 + b"c" * 512
    assert content.durable == b"a" * 512 + bytes(1024) + b"c" * 512


def test_a_lost_sector_that_is_written_again_is_on_the_platter_after_the_next_fsync() -> None:
    content = FileContent()
    content.change(PendingChange(1, 0, b"b" * 1024))
    content.fail_fsync()
    content.change(PendingChange(2, 600, b"c"))
    content.fsync()
    assert content.durable == bytes(512) + b"b" * 88 + b"c" + b"b" * 423


def test_an_image_stays_as_it_was() -> None:
    content = FileContent(b"x" * 10)
    content.change(PendingChange(1, 3, b"y"))
    image = content.image()
    content.change(PendingChange(2, 4, b"z"))
    content.fsync()
    assert image.durable == b"x" * 10
    assert [change.number for change in image.pending] == [1]


def test_rot_changes_both_and_is_not_a_write() -> None:
    content = FileContent(b"x" * 10)
    content.damage(2, b"?")
    assert content.data == content.durable == b"xx?xxxxxxx"
    assert not content.pending


# The states that a power cut could leave: all of them, each once, and nothing else.

SECTOR = 512


def new_disk() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.make_folder("d")
    disk.force_folder("")
    return disk


def all_states(disk: SimulatedDisk) -> list[SimulatedDisk]:
    states = list(crash_states(disk, 100_000, random.Random(1)))
    assert len({state.digest for state in states}) == len(states)
    return states


def contents(disk: SimulatedDisk, path: str = "d/a") -> set[bytes | None]:
    return {state.read_file(path) if state.exists(path) else None for state in all_states(disk)}


def test_one_write_within_a_sector_is_there_or_not_and_the_size_goes_its_own_way() -> None:
    disk = new_disk()
    disk.write_file("d/a", b"old")
    write_all(disk.open_write("d/a"), [b"NEW+"], 0)
    assert contents(disk) == {b"old", b"NEW", b"old\0", b"NEW+"}


def test_two_sectors_reach_the_platter_in_any_combination() -> None:
    disk = new_disk()
    disk.write_file("d/a", b"." * 2 * SECTOR)
    write_all(disk.open_write("d/a"), [b"x" * 2 * SECTOR], 0)
    old, new = b"." * SECTOR, b"x" * SECTOR
    assert contents(disk) == {old + old, old + new, new + old, new + new}


def test_a_sector_is_as_it_stood_after_some_write_and_never_a_mixture() -> None:
    disk = new_disk()
    disk.write_file("d/a", b"....")
    file = disk.open_write("d/a")
    write_all(file, [b"A"], 0)
    write_all(file, [b"B"], 1)
    assert contents(disk) == {b"....", b"A...", b"AB.."}


def test_a_grown_file_may_have_its_size_and_not_its_bytes() -> None:
    disk = new_disk()
    disk.write_file("d/a", b"")
    write_all(disk.open_write("d/a"), [b"x" * 6000], 0)
    sizes = {len(found) for found in contents_sample(disk)}
    assert sizes == {0, 4096, 6000}


def contents_sample(disk: SimulatedDisk) -> list[bytes]:
    return [state.read_file("d/a") for state in crash_states(disk, 300, random.Random(2))]


def test_names_reach_the_platter_in_any_combination_but_a_rename_is_whole() -> None:
    disk = new_disk()
    disk.write_file("d/a", b"x")
    disk.create("d/b")
    disk.rename("d/a", "d/c")
    found = {tuple(state.list("d")) for state in all_states(disk)}
    assert found == {("a",), ("a", "b"), ("c",), ("b", "c")}


def test_what_was_fsynced_is_in_every_state() -> None:
    disk = new_disk()
    file = disk.create("d/a")
    write_all(file, [b"forced"], 0)
    file.force()
    disk.force_folder("d")
    write_all(file, [b"later"], 6)
    assert all(found is not None and found[:6] == b"forced" for found in contents(disk))


def test_the_states_of_a_moment_do_not_change_when_the_disk_goes_on() -> None:
    disk = new_disk()
    disk.write_file("d/a", b"old")
    file = disk.open_write("d/a")
    write_all(file, [b"new"], 0)
    moment = Moment(disk)
    write_all(file, [b"xyz"], 0)
    file.force()
    disk.unlink("d/a")
    disk.force_folder("d")
    found = {state.read_file("d/a") for state in crash_states(moment, 100, random.Random(1))}
    assert found == {b"old", b"new"}


def test_a_state_is_a_disk_of_its_own() -> None:
    disk = new_disk()
    disk.write_file("d/a", b"old")
    state = disk.crash(keep="nothing")
    write_all(state.open_write("d/a"), [b"new"], 0)
    assert disk.read_file("d/a") == b"old"
    assert state.crash(keep="nothing").read_file("d/a") == b"old"
    assert state.crash(keep="everything").read_file("d/a") == b"new"


def test_many_states_are_sampled_each_once_and_the_same_seed_gives_the_same() -> None:
    disk = new_disk()
    file = disk.create("d/a")
    for number in range(40):
        write_all(file, [bytes([number]) * 300], number * 300)
    assert Moment(disk).count() > 10**9
    one = [state.digest for state in crash_states(disk, 200, random.Random(5))]
    again = [state.digest for state in crash_states(disk, 200, random.Random(5))]
    assert one == again
    assert len(set(one)) == 200


def test_a_draw_by_seed() -> None:
    disk = new_disk()
    disk.write_file("d/a", b"." * 5000)
    write_all(disk.open_write("d/a"), [b"x" * 5000], 0)
    found = {disk.crash(random.Random(seed)).digest for seed in range(50)}
    assert len(found) > 5


STEPS = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(["write", "force", "create", "unlink", "folder"])), max_size=12
)


@settings(max_examples=60)
@given(STEPS, st.integers(0, 1000))
def test_nothing_and_everything_are_among_the_states(steps: list[tuple[str, str]], seed: int) -> None:
    disk = new_disk()
    for number, (name, step) in enumerate(steps):
        path = f"d/{name}"
        if step == "folder":
            disk.force_folder("d")
        elif step == "create" and not disk.exists(path):
            disk.create(path)
        elif disk.exists(path) and step == "unlink":
            disk.unlink(path)
        elif disk.exists(path) and step == "write":
            write_all(disk.open_write(path), [bytes([number + 1]) * 10], 10 * number)
        elif disk.exists(path) and step == "force":
            disk.open_write(path).force()
    digests = {state.digest for state in crash_states(disk, 5000, random.Random(seed))}
    assert disk.crash(keep="nothing").digest in digests
    whole = disk.crash(keep="everything")
    assert whole.digest in digests
    assert {name: whole.read_file(f"d/{name}") for name in whole.list("d")} == {
        name: disk.read_file(f"d/{name}") for name in disk.list("d")
    }


NAMES = st.sampled_from(["d/a", "d/b", "e/a"])
MOVES = st.lists(st.tuples(st.sampled_from(["create", "rename", "unlink"]), NAMES, NAMES), max_size=10)


def seen(disk: SimulatedDisk) -> dict[str, bytes]:
    return {
        path: disk.read_file(path) for folder in "de" for path in (f"{folder}/{name}" for name in disk.list(folder))
    }


@settings(max_examples=100)
@given(MOVES)
def test_a_cut_between_two_calls_undoes_the_later_one_whole(moves: list[tuple[str, str, str]]) -> None:
    disk = new_disk()
    disk.make_folder("e")
    disk.write_file("d/a", b"first")
    stood = [seen(disk)]
    for number, (move, name, other) in enumerate(moves):
        if move == "create" and not disk.exists(name):
            file = disk.create(name)
            write_all(file, [b"%d" % number], 0)
            file.force()
        elif move == "rename" and disk.exists(name) and name != other:
            disk.rename(name, other)
        elif move == "unlink" and disk.exists(name):
            disk.unlink(name)
        else:
            continue
        stood.append(seen(disk))
    moment = Moment(disk)
    # With room for no state at all it gives those of the calls in their order, and nothing that is drawn.
    assert [seen(moment.build(choice)) for choice in moment.choices(0, random.Random(1))] == stood
    disk.force_folder("d")
    left = disk.crash(keep="nothing")
    assert {path: left.read_file(path) for path in seen(left) if path < "e"} == {
        path: data for path, data in seen(disk).items() if path < "e"
    }


# The simulated disk forgets what was not forced, fails on request, and keeps count.


@pytest.fixture
def disk() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.make_folder("d")
    disk.force_folder("")
    return disk


def test_what_was_not_fsynced_is_gone(disk: SimulatedDisk) -> None:
    file = disk.create("d/a")
    disk.force_folder("d")
    write_all(file, [b"forced"], 0)
    file.force()
    write_all(file, [b"not"], 6)
    assert disk.crash(keep="nothing").read_file("d/a") == b"forced"
    assert disk.crash(keep="everything").read_file("d/a") == b"forcednot"
    assert disk.read_file("d/a") == b"forcednot"
    assert disk.durable_file("d/a") == b"forced"


def test_an_fsynced_file_without_an_fsynced_name_is_gone(disk: SimulatedDisk) -> None:
    file = disk.create("d/a")
    write_all(file, [b"x"], 0)
    file.force()
    assert disk.crash(keep="nothing").list("d") == []


def test_a_file_in_a_folder_without_an_fsynced_name_is_gone(disk: SimulatedDisk) -> None:
    disk.make_folder("d/e")
    disk.create("d/e/a").force()
    disk.force_folder("d/e")
    assert disk.crash(keep="nothing").list("d") == []


def test_a_failed_fsync_lies_from_then_on(disk: SimulatedDisk) -> None:
    file = disk.create("d/a")
    disk.force_folder("d")
    write_all(file, [b"x" * 600], 0)
    disk.faults.fail("force")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        file.force()
    file.force()
    assert file.pread(600, 0) == b"x" * 600
    assert disk.crash(keep="everything").read_file("d/a") == b""


def test_a_lost_write_is_reported_to_other_open_files_too(disk: SimulatedDisk) -> None:
    one = disk.create("d/a")
    other = disk.open_write("d/a")
    write_all(one, [b"x"], 0)
    disk.faults.fail("force")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        one.force()
    later = disk.open_write("d/a")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        other.force()
    other.force()
    later.force()


def test_a_failed_sync_names_no_file_but_each_files_own_fsync_does(disk: SimulatedDisk) -> None:
    anchor = disk.open_anchor("d")
    good, bad = disk.create("d/good"), disk.create("d/bad")
    for file in (good, bad):
        write_all(file, [b"x"], 0)
    disk.faults.fail("sync_file", path="bad")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        disk.sync_file_system(anchor)
    disk.sync_file_system(anchor)
    good.force()
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        bad.force()
    left = disk.crash(keep="nothing")
    assert (left.read_file("d/good"), left.read_file("d/bad")) == (b"x", b"")


def test_a_lost_write_that_was_not_reported_is_reported_to_the_next_opener_of_the_file(disk: SimulatedDisk) -> None:
    anchor = disk.open_anchor("d")
    write_all(disk.create("d/a"), [b"x"], 0)
    disk.faults.fail("sync_file", path="a")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        disk.sync_file_system(anchor)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        disk.open_write("d/a").force()
    disk.open_write("d/a").force()


def test_space_runs_out_and_comes_back(disk: SimulatedDisk) -> None:
    disk.space_bytes = 10
    file = disk.create("d/a")
    assert file.pwritev([b"x" * 20], 0) == 10
    with pytest.raises(Full):
        file.pwritev([b"x"], 10)
    assert file.pwritev([b"y"], 3) == 1
    assert disk.free_space("d") == 0
    file.truncate(4)
    assert disk.free_space("d") == 6
    assert disk.used_bytes() == 4


def test_descriptors_run_out_and_come_back(disk: SimulatedDisk) -> None:
    disk.descriptors_max = 1
    file = disk.create("d/a")
    with pytest.raises(Full, match=os.strerror(errno.EMFILE)):
        disk.open_read("d/a")
    with pytest.raises(Full, match=os.strerror(errno.EMFILE)):
        disk.create("d/b")
    assert not disk.exists("d/b")
    file.close()
    disk.open_read("d/a").close()


def test_closing_a_file_with_non_durable_bytes_is_noticed(disk: SimulatedDisk) -> None:
    file = disk.create("d/a")
    write_all(file, [b"x"], 0)
    second = disk.open_read("d/a")
    second.close()
    assert disk.closed_unforced == []
    file.close()
    assert disk.closed_unforced == ["d/a"]


def test_every_change_is_reported(disk: SimulatedDisk) -> None:
    reported: list[tuple[str, str]] = []
    disk.after = lambda kind, path: reported.append((kind, path))
    file = disk.create("d/a")
    file.pwritev([b"x"], 0)
    file.force()
    disk.force_folder("d")
    disk.rename("d/a", "d/b")
    disk.unlink("d/b")
    kinds = [kind for kind, _ in reported]
    assert kinds == ["create", "write", "force", "force_folder", "rename", "unlink"]


def test_a_disk_that_caches_nothing(disk: SimulatedDisk) -> None:
    file = disk.create("d/a")
    assert file.pread_cached(1, 0) == b""
    disk.is_cached = False
    assert file.pread_cached(1, 0) is None


def test_a_test_may_put_files_and_rot_in_place(disk: SimulatedDisk) -> None:
    disk.write_file("d/a", b"hello")
    disk.damage("d/a", 1, b"?")
    assert disk.crash(keep="nothing").read_file("d/a") == b"h?llo"


# Names are durable when their folder was forced, and not before.


@pytest.fixture
def tree() -> FolderTree:
    tree = FolderTree()
    tree.add(1, "a", SimulatedFolder())
    tree.add(2, "b", SimulatedFolder())
    tree.fsync(None)
    return tree


def durable(tree: FolderTree, path: str) -> list[str]:
    return sorted(tree.folder(path).durable)


def test_a_path_is_split_at_slashes() -> None:
    assert path_names("/a//b/") == ["a", "b"]
    assert path_names("") == []


def test_a_new_name_lasts_after_the_fsync_of_its_folder(tree: FolderTree) -> None:
    tree.add(3, "a/x", FileContent())
    tree.fsync(tree.folder("b"))
    assert durable(tree, "a") == []
    tree.fsync(tree.folder("a"))
    assert durable(tree, "a") == ["x"]
    assert tree.pending == []


def test_a_rename_reaches_both_folders_at_once(tree: FolderTree) -> None:
    tree.add(3, "a/x", FileContent())
    tree.fsync(None)
    tree.rename(4, "a/x", "b/y")
    assert (durable(tree, "a"), durable(tree, "b")) == (["x"], [])
    tree.fsync(tree.folder("b"))
    assert (durable(tree, "a"), durable(tree, "b")) == ([], ["y"])


def test_an_fsync_brings_what_it_builds_on(tree: FolderTree) -> None:
    tree.add(3, "a/x", FileContent())
    tree.rename(4, "a/x", "b/y")
    tree.fsync(tree.folder("b"))
    assert tree.pending == []
    assert (durable(tree, "a"), durable(tree, "b")) == ([], ["y"])


def test_an_fsync_brings_what_it_builds_on_also_over_others_in_between(tree: FolderTree) -> None:
    tree.add(3, "a/x", FileContent())
    tree.add(4, "b/z", FileContent())
    tree.rename(5, "a/x", "b/y")
    tree.fsync(tree.folder("b"))
    assert tree.pending == [], "else the file could come back under its old name, too"
    assert (durable(tree, "a"), durable(tree, "b")) == ([], ["y", "z"])


def test_a_removed_name_may_be_used_again(tree: FolderTree) -> None:
    first, second = FileContent(b"1"), FileContent(b"2")
    tree.add(3, "a/x", first)
    tree.remove(4, "a/x")
    tree.add(5, "a/x", second)
    tree.fsync(tree.folder("a"))
    assert tree.folder("a").durable == {"x": second}


@pytest.mark.parametrize(
    ("call", "number"),
    [
        (lambda tree: tree.file("none"), errno.ENOENT),
        (lambda tree: tree.file("a"), errno.EISDIR),
        (lambda tree: tree.folder("a/none"), errno.ENOENT),
        (lambda tree: tree.folder("f"), errno.ENOTDIR),
        (lambda tree: tree.add(9, "a", SimulatedFolder()), errno.EEXIST),
        (lambda tree: tree.add(9, "", SimulatedFolder()), errno.EBUSY),
        (lambda tree: tree.rename(9, "none", "x"), errno.ENOENT),
        (lambda tree: tree.rename(9, "f", "a"), errno.EISDIR),
        (lambda tree: tree.rename(9, "a", "f"), errno.ENOTDIR),
    ],
)
def test_errors_are_the_systems(tree: FolderTree, call, number: int) -> None:  # type: ignore[no-untyped-def]
    tree.add(3, "f", FileContent())
    with pytest.raises(OSError, match=os.strerror(number)):
        call(tree)


def test_a_folder_that_holds_something_is_not_replaced(tree: FolderTree) -> None:
    tree.add(3, "b/x", FileContent())
    with pytest.raises(OSError, match=os.strerror(errno.ENOTEMPTY)):
        tree.rename(4, "a", "b")
    assert [path for path, _ in walk_tree(tree.root)] == ["a", "b", "b/x"]
    tree.rename(4, "b", "a")
    assert [path for path, _ in walk_tree(tree.root)] == ["a", "a/x"]


def test_walking_yields_every_path_in_order(tree: FolderTree) -> None:
    tree.add(3, "b/x", FileContent())
    tree.add(4, "c", FileContent())
    assert [path for path, _ in walk_tree(tree.root)] == ["a", "b", "b/x", "c"]
