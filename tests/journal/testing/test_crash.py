"""The states that a power cut could leave: all of them, each once, and nothing else."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from journal.disk import write_all
from journal.testing import Moment, SimulatedDisk, crash_states

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


def test_what_was_forced_is_in_every_state() -> None:
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
    st.tuples(st.sampled_from("ab"), st.sampled_from(["write", "force", "create", "unlink", "folder"])),
    max_size=12,
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
        path: disk.read_file(path)
        for folder in "de"
        for path in (f"{folder}/{name}" for name in disk.list(folder))
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
