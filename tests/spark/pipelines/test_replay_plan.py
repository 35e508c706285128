"""The steps of a replay: every file once, in order, the same each time, also when the archive has grown."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scale import seeded
from tfmq.spark.pipelines.manifest import ArchiveFile, Manifest, Plan
from tfmq.spark.pipelines.replay import ReplayFilter, ReplayStep, plan_steps, replay_name


def file(partition: int, first: int, size: int, incarnation: int = 5, hour: int = 0) -> ArchiveFile:
    path = f"{incarnation}-{partition}-{first}-{hour}"
    times = (hour * 100, hour * 100 + 99)
    return ArchiveFile(path, partition, incarnation, first, first + 1, 3, 9, 7, size, first, first, *times)


def manifest(step: int, files: list[ArchiveFile]) -> Manifest:
    return Manifest(Plan(step, "orders", 3, "", (), ()), tuple(files), {})


def archive(generator: Any) -> list[Manifest]:
    found, offset = [], 0
    for step in range(1, generator.randrange(2, 8)):
        files = []
        for _ in range(generator.randrange(0, 12)):
            offset += 1
            files.append(file(generator.randrange(3), offset, generator.randrange(1, 60), 5 + step // 4))
        generator.shuffle(files)
        found.append(manifest(step, files))
    return found


def sent(found: list[ReplayStep]) -> dict[int, list[ArchiveFile]]:
    by_partition: dict[int, list[ArchiveFile]] = {}
    for step in found:
        for part in step.parts:
            by_partition.setdefault(part.partition, []).extend(part.files)
    return by_partition


def test_every_file_is_sent_once_and_partitions_keep_their_order() -> None:
    generator = seeded("replay plan")
    for _ in range(100):
        manifests = archive(generator)
        found = list(plan_steps(manifests, ReplayFilter("orders"), 50))
        assert [each.number for each in found] == list(range(1, len(found) + 1))
        for files in sent(found).values():
            places = [(each.incarnation, each.first_offset) for each in files]
            assert places == sorted(places)
        files = [each for partition in sent(found).values() for each in partition]
        assert sorted(files) == sorted(each for one in manifests for each in one.files)
        assert all(len(step.parts) == len({part.partition for part in step.parts}) for step in found)


def test_a_step_has_as_much_as_it_should_or_one_file_of_each_partition() -> None:
    generator = seeded("replay steps")
    for _ in range(100):
        for step in plan_steps(archive(generator), ReplayFilter("orders"), 100):
            one_each = all(len(part.files) == 1 for part in step.parts)
            assert step.log_bytes <= 100 + 60 * len(step.parts) or one_each


def test_what_is_archived_later_adds_steps_and_changes_none() -> None:
    generator = seeded("replay grows")
    for _ in range(50):
        manifests = archive(generator)
        known = list(plan_steps(manifests[:-1], ReplayFilter("orders"), 40))
        assert list(plan_steps(manifests, ReplayFilter("orders"), 40))[: len(known)] == known


def test_a_choice_leaves_out_whole_files() -> None:
    files = [file(0, 1, 1, hour=1), file(1, 2, 1, hour=2), file(2, 3, 1, hour=3)]
    found = list(plan_steps([manifest(1, files)], ReplayFilter("orders", (1, 2), 250, None)))
    assert sent(found) == {1: [files[1]], 2: [files[2]]}
    found = list(plan_steps([manifest(1, files)], ReplayFilter("orders", (), None, 200)))
    assert sent(found) == {0: [files[0]]}
    assert list(plan_steps([manifest(1, files)], ReplayFilter("orders", (), 400, None))) == []


@pytest.mark.parametrize("number", range(5))
def test_another_archive_choice_or_target_is_another_replay(number: int) -> None:
    same = ("id", ReplayFilter("orders"), "node", "orders", 7)
    others: list[Any] = ["other", ReplayFilter("orders", (1,)), "other", "other", 8]
    changed: Any = (*same[:number], others[number], *same[number + 1 :])
    assert replay_name(*same) == replay_name(*same) != replay_name(*changed)
    assert len(replay_name(*same)) == 32
