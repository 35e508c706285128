"""Offsets in a file: whole or the old ones after any crash, never two writers, never a replaced member."""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from journal.disk import RealDisk, RealFile
from journal.testing.memory_disk import SimulatedDisk, crash_states
from tests.offsets.contention import OpenShaky
from tests.offsets.contract import Contract, Open
from tests.scale import scaled, seeded
from tfmq.errors import Busy, Damaged, Fenced, NotSupported, StoreFailed
from tfmq.offsets.file import FileOffsets
from tfmq.offsets.storage import PartitionName, StoredOffset
from tfmq.testing.broker import SimulatedBroker

A, B = PartitionName("orders", 0), PartitionName("orders", 11)
PLACE = StoredOffset(offset=700, index=0, incarnation=5, epoch=2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "offsets.json"


@pytest.fixture
def open_one(path: Path) -> Open:
    return lambda: FileOffsets(str(path))


class Shaky(RealDisk):
    """Fails one call in ten that changes something, done or not."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.random = random

    def _perhaps(self) -> None:
        if self.random.random() < 0.1:
            raise OSError(5, "planted")

    def create(self, path: str) -> RealFile:
        self._perhaps()
        return super().create(path)

    def rename(self, source: str, target: str) -> None:
        self._perhaps()
        super().rename(source, target)
        self._perhaps()

    def force_folder(self, path: str) -> None:
        self._perhaps()
        super().force_folder(path)


@pytest.fixture
def open_shaky(path: Path) -> OpenShaky:
    return lambda random: FileOffsets(str(path), Shaky(random))


class TestFile(Contract):
    """As every storage."""


def test_several_members_on_one_machine_share_a_file(path: Path) -> None:
    """Invariant: what any of them saved is there, whatever the others did in the same moment."""

    def member(number: int) -> None:
        storage = FileOffsets(str(path))
        for offset in range(1, 11):
            storage.save("billing", 1, {PartitionName("orders", number): StoredOffset(offset)})

    threads = [threading.Thread(target=member, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    names = [PartitionName("orders", number) for number in range(8)]
    assert {name: row.offset for name, row in FileOffsets(str(path)).read("billing", names).items()} == dict.fromkeys(
        names, 10
    )


def test_a_lock_that_is_not_given_back_is_said_with_its_holder(path: Path) -> None:
    held = RealDisk().lock(f"{path}.lock")
    waited: list[float] = []
    storage = FileOffsets(str(path), pause=waited.append)
    with pytest.raises(Busy, match=rf"offsets\.json has been locked by process {os.getpid()}"):
        storage.save("billing", 1, {A: PLACE})
    assert sum(waited) == pytest.approx(10)
    assert (
        storage.read("billing", [A]) == {}
    )  # a reader finds the old file or the new one, whichever process has the lock
    held.release()
    storage.save("billing", 1, {A: PLACE})


def test_a_claim_that_changes_nothing_writes_nothing(path: Path) -> None:
    FileOffsets(str(path)).claim("billing", 4, [A])
    assert FileOffsets(str(path), Failing(1)).claim("billing", 4, [A]) == {}


def test_a_file_of_the_first_version_fences_with_its_group(path: Path) -> None:
    row = {"offset": 5, "index": 0, "incarnation": 1, "epoch": 0, "generation": 3}
    path.write_text(json.dumps({"version": 1, "groups": {"g": {"generation": 7, "offsets": {"orders": {"0": row}}}}}))
    storage = FileOffsets(str(path))
    assert storage.read("g", [A]) == {A: StoredOffset(5, 0, 1, 0, 7)}
    with pytest.raises(Fenced):
        storage.save("g", 6, {A: PLACE})
    storage.save("g", 7, {A: PLACE})
    assert json.loads(path.read_text())["version"] == 2


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"version": 1}',
        '{"version": 1, "groups": []}',
        '{"version": 1, "groups": {"g": {"generation": 1, "offsets": {"t": {"0": {"offset": -1}}}}}}',
        '{"version": 1, "groups": {"g": {"generation": "1", "offsets": {}}}}',
        '{"version": 1, "groups": {"g": {"generation": 1, "offsets": {"t": {"x": {}}}}}}',
        '{"version": 1, "groups": {"g": {"generation": 1, "offsets": {"t": {"0": 5}}}}}',
        '{"version": 1, "groups": {"g": {"generation": 1, "offsets": {"t": 5}}}}',
        '{"version": 1, "groups": {"g": 5}}',
        '{"version": 2, "groups": {"g": {"t": {"0": {"offset": -2, "index": 0, "incarnation": 0, "epoch": 0}}}}}',
        '{"version": 2, "groups": {"g": {"t": {"0": {"offset": -2, "index": 0, "incarnation": 0, "epoch": 0,'
        ' "generation": 0}}}}}',
        '{"version": 2, "groups": {"g": {"t": {"0": {"offset": 5, "index": 0, "incarnation": 0, "epoch": 0,'
        ' "generation": "1"}}}}}',
        '{"version": 2, "groups": {"g": {"t": []}}}',
        "\0" * 100,
    ],
)
def test_a_file_that_is_something_else_is_refused_and_kept(path: Path, content: str) -> None:
    path.write_text(content)
    storage = FileOffsets(str(path))
    for _ in range(2):
        with pytest.raises(Damaged, match=r"offsets\.json"):
            storage.read("g", [PartitionName("t", 0)])
    assert path.read_text() == content


def test_a_newer_file_is_refused_clearly(path: Path) -> None:
    path.write_text(json.dumps({"version": 3, "groups": {}}))
    with pytest.raises(NotSupported, match="version 3"):
        FileOffsets(str(path)).read("g", [A])


class Failing(RealDisk):
    """Fails the n-th call that changes something."""

    def __init__(self, at: int) -> None:
        self.left = at

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(5, "planted")

    def create(self, path: str):  # type: ignore[no-untyped-def]
        self._count()
        return super().create(path)

    def rename(self, source: str, target: str) -> None:
        self._count()
        super().rename(source, target)

    def force_folder(self, path: str) -> None:
        self._count()
        super().force_folder(path)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_save_that_fails_says_so_and_leaves_a_whole_file(path: Path, at: int) -> None:
    before = FileOffsets(str(path))
    before.save("billing", 1, {A: PLACE})
    before.close()
    storage = FileOffsets(str(path), Failing(at))
    with pytest.raises(StoreFailed, match=r"offsets\.json: planted") as caught:
        storage.save("billing", 1, {A: PLACE._replace(offset=900)})
    assert caught.value.retriable
    storage.close()
    assert FileOffsets(str(path)).read("billing", [A])[A].offset in (700, 900)


def test_what_a_crash_left_is_no_obstacle(path: Path) -> None:
    path.with_name("offsets.json.new").write_text("half a fi")
    storage = FileOffsets(str(path))
    storage.save("billing", 1, {A: PLACE})
    assert storage.read("billing", [A])[A].offset == 700


# Crashes, processes, disks

NAMES = [PartitionName("orders", number) for number in range(3)]


def test_a_power_cut_at_any_step_leaves_the_old_offsets_or_the_new_ones() -> None:
    """And after it a save goes on as if nothing had been."""
    disk, random = SimulatedDisk(), seeded("offset file")
    disk.make_folder("/offsets")
    disk.force_folder("/")
    storage = FileOffsets("/offsets/billing.json", disk)
    done = 0
    states: list[int] = []

    def offsets_of(left: SimulatedDisk) -> int:
        again = FileOffsets("/offsets/billing.json", left)
        kept = again.read("billing", NAMES)
        found = {kept[name].offset if name in kept else 0 for name in NAMES}
        assert len(found) == 1, f"a mixture: {kept}"
        again.save("billing", 1, dict.fromkeys(NAMES, StoredOffset(1000)))
        assert again.read("billing", NAMES)[A].offset == 1000
        return found.pop()

    def cut(kind: str, path: str) -> None:
        for left in crash_states(disk, 6, random):
            states.append(offsets_of(left))
            assert states[-1] in (done, done + 1), f"{states[-1]} behind {kind} {path}, {done} were saved"

    disk.after = cut
    for done in range(3):
        storage.save("billing", 1, dict.fromkeys(NAMES, StoredOffset(done + 1)))
        assert {offsets_of(left) for left in crash_states(disk, 6, random)} == {done + 1}
    assert set(states) == {0, 1, 2, 3}


def test_a_full_disk_keeps_the_old_offsets_and_passes() -> None:
    disk = SimulatedDisk(space_bytes=2000)
    disk.make_folder("/offsets")
    storage = FileOffsets("/offsets/billing.json", disk)
    storage.save("billing", 1, {A: PLACE})
    many = {PartitionName("orders", number): PLACE for number in range(100)}
    with pytest.raises(StoreFailed, match=r"billing\.json: .*space") as caught:
        storage.save("billing", 1, many)
    assert caught.value.retriable
    assert list(storage.read("billing", [*many])) == [A]
    storage.save("billing", 1, {A: PLACE._replace(offset=800)})
    assert storage.read("billing", [A])[A].offset == 800


def unprivileged(what: Callable[[], None]) -> int:
    """How a process of a user who may nothing ends that does it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.getuid() == 0:
                os.setuid(NOBODY)
            what()
            code = 0
        except StoreFailed as error:
            code = 3 if "Permission denied; its folder must exist" in str(error) and not error.retriable else 4
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


NOBODY = 65534


def test_a_folder_that_may_not_be_written_is_a_final_failure() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own may not even be read
        os.chmod(folder, 0o555)
        storage = FileOffsets(f"{folder}/offsets.json")
        assert unprivileged(lambda: storage.save("billing", 1, {A: PLACE})) == 3


@pytest.mark.parametrize("place", ["gone/offsets.json", "a-file/offsets.json", ""])
def test_a_place_where_no_file_can_be_is_a_final_failure(tmp_path: Path, place: str) -> None:
    (tmp_path / "a-file").touch()
    storage = FileOffsets(str(tmp_path / place))
    with pytest.raises(StoreFailed, match="its folder must exist") as caught:
        storage.save("billing", 1, {A: PLACE})
    assert not caught.value.retriable and str(tmp_path) in str(caught.value)


def test_a_consumer_ends_with_the_sentence_about_its_file(path: Path) -> None:
    path.write_text("{")
    with SimulatedBroker() as broker:
        broker.producer().send("orders", "1").result()
        with (
            pytest.raises(Damaged, match=r"offsets\.json is not a file of offsets") as caught,
            broker.consumer("orders", group="billing", offsets=f"file:{path}") as consumer,
        ):
            consumer.poll(30)
    assert "\n" not in str(caught.value)


SAVING = """
import os, sys
from tfmq.offsets.file import FileOffsets
from tfmq.offsets.storage import PartitionName, StoredOffset
storage, name = FileOffsets(sys.argv[1]), PartitionName("orders", int(sys.argv[2]))
for offset in range(1, 1000000):
    storage.save("billing", 1, {name: StoredOffset(offset)})
    os.write(1, b"%d\\n" % offset)
"""


def test_members_that_are_killed_lose_nothing_of_each_other(path: Path) -> None:
    """Two processes on one machine, killed again and again in the middle of saves."""
    random, names = seeded("killed"), NAMES[:2]
    for _ in range(scaled(40)):
        members = [
            subprocess.Popen(
                [sys.executable, "-c", SAVING, str(path), str(name.partition)], stdout=subprocess.PIPE, text=True
            )
            for name in names
        ]
        for member in members:
            assert member.stdout is not None
            assert member.stdout.readline() == "1\n"
        time.sleep(random.uniform(0, 0.1))
        for member in members:
            member.kill()
        kept = FileOffsets(str(path)).read("billing", names)
        for member, name in zip(members, names, strict=True):
            said = [1, *map(int, re.findall(r"(\d+)\n", member.communicate()[0]))]
            assert kept[name].offset in (said[-1], said[-1] + 1)
        FileOffsets(str(path)).save("billing", 1, dict.fromkeys(names, StoredOffset(0)))


def test_a_child_that_was_forked_in_the_middle_of_a_save_does_not_keep_the_lock(path: Path) -> None:
    held = RealDisk().lock(f"{path}.lock")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    held.release()
    try:
        FileOffsets(str(path), pause=lambda _: pytest.fail("the child has the lock")).save("billing", 1, {A: PLACE})
    finally:
        os.close(writing)
        os.waitpid(child, 0)


def test_a_link_and_what_it_names_are_the_same_file(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    FileOffsets(str(path)).save("billing", 1, {A: PLACE})
    link.symlink_to(path)
    FileOffsets(str(link)).save("billing", 2, {A: PLACE._replace(offset=800)})
    assert link.is_symlink()
    assert FileOffsets(str(path)).read("billing", [A])[A].offset == 800
    with pytest.raises(Fenced):
        FileOffsets(str(path)).save("billing", 1, {A: PLACE})


def test_a_link_in_the_lock_s_place_is_not_written_through(path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    Path(f"{path}.lock").symlink_to(victim)
    with pytest.raises(StoreFailed):
        FileOffsets(str(path)).save("billing", 1, {A: PLACE})
    assert victim.read_text() == "precious"
