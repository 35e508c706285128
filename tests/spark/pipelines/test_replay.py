"""The command `replay`: what it says, its exit codes, and a run of its own Spark that SIGKILL ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.scale import FRACTION, SCALE, scaled, seeded
from tests.spark.pipelines.messages import archived, content, count_of, in_topic, require_same, send, some
from tfmq.spark.log_reader import SourceAddress
from tfmq.spark.pipelines.archive_folder import ArchiveFile, Manifest, Plan
from tfmq.spark.pipelines.command import run_command
from tfmq.spark.pipelines.replay import ReplayFilter, ReplayStep, plan_steps, replay, replay_name
from tools.rigs import spark_session
from tools.rigs.live_server import LiveServer


@pytest.fixture(scope="module")
def folder(spark_server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of the topic `source`."""
    folder = tmp_path_factory.mktemp("replay") / "archive"
    send(spark_server.address, "source", some(seeded("source"), 300))
    address = SourceAddress(spark_server.address, None, 10.0)
    archived(folder, "source", address, piece_bytes=8 << 10, step_bytes=16 << 10)
    return folder


def replay_run(server: LiveServer, folder: Path, *arguments: str) -> int:
    return run_command(replay, "replay", [*arguments, "--from", str(folder), "--servers", server.address])


@pytest.mark.long
def test_it_says_what_it_did_and_that_there_is_no_more(
    spark: Any, spark_server: LiveServer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay_run(spark_server, folder, "source", "--to", "told", "--json") == 0
    reported = json.loads(capsys.readouterr().out)
    steps = reported.pop("steps")
    expected = {"archived": "source", "topic": "told", "messages": 300, "steps_before": 0}
    assert reported == {**expected, "topic_made": True} and steps > 2
    require_same(spark_server.address, "source", "told")
    assert replay_run(spark_server, folder, "source", "--to", "told") == 0
    assert capsys.readouterr().err == "told has all of it already; nothing sent\n"
    require_same(spark_server.address, "source", "told")


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        ([], 2, "Missing argument 'TOPIC'."),
        (["source", "--to", "a b"], 2, "'a b' cannot be a topic: a name has 1 to 249 letters"),
        (["source", "--since", "-1h"], 2, "'-1h' is another time in each run"),
        (["source", "--since", "2026-01-02", "--until", "2026-01-01"], 2, "is not after --since"),
        (["source", "--to", "x", "--partition", "9"], 2, "The archived source has partitions 0 to 1, not 9."),
        (["sauce", "--to", "x"], 1, "has no topic 'sauce'; it has source."),
        (["source", "--repartitions"], 2, "--repartition"),
    ],
)
def test_wrong_input_is_reported_in_a_sentence(
    spark_server: LiveServer,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    sentence: str,
) -> None:
    assert replay_run(spark_server, folder, *arguments) == code
    said = capsys.readouterr().err
    assert sentence in said and "Traceback" not in said


def test_what_is_no_archive_and_who_is_away_have_their_codes(
    spark_server: LiveServer, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay_run(spark_server, tmp_path, "source") == 2
    assert "is no archive of tfmq" in capsys.readouterr().err
    arguments = ["source", "--from", str(folder), "--servers", "127.0.0.1:1", "--timeout", "1s"]
    assert run_command(replay, "replay", arguments) == 3


@pytest.mark.long
def test_damage_has_its_own_exit_code(
    spark: Any, spark_server: LiveServer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = max(folder.rglob("*.parquet"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert replay_run(spark_server, folder, "source", "--to", "damaged") == 4
    path.write_bytes(whole)
    said = capsys.readouterr().err
    assert f"tfmq: {path.relative_to(folder)} in the archive {folder} is damaged: it has" in said
    assert "Traceback" not in said


@pytest.mark.skipif(
    SCALE <= FRACTION, reason="cannot be had here: under the full counts only, a Spark of its own takes long"
)
def test_a_spark_that_is_killed_and_run_again_sends_every_message_once(
    spark: Any, spark_server: LiveServer, folder: Path, tmp_path: Path
) -> None:
    generator = seeded("replay")
    environment = {**os.environ, **spark_session.environment(tmp_path), "PYSPARK_SUBMIT_ARGS": "pyspark-shell"}
    command = [sys.executable, "-m", "tfmq.spark.pipelines.replay", "source", "--to", "killed"]
    command += ["--from", str(folder), "--servers", spark_server.address, "--master", "local[2]"]
    was = content(in_topic(spark_server.address, "source"))

    for _ in range(scaled(10)):
        most = generator.randrange(1, 300)
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        while process.poll() is None and count_of(spark_server.address, "killed") < most:
            time.sleep(generator.random() / 10)
        process.kill()
        assert process.wait() in (0, -9)
        there = content(in_topic(spark_server.address, "killed"))
        assert all(was[partition][: len(rows)] == rows for partition, rows in there.items())
    assert replay_run(spark_server, folder, "source", "--to", "killed") == 0
    require_same(spark_server.address, "source", "killed")


# The steps of a replay: every file once, in order, the same each time, also when the archive has grown.


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
            assert sum(part.log_bytes for part in step.parts) <= 100 + 60 * len(step.parts) or one_each


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
