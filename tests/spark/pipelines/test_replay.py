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
from tfmq.spark.pipelines.command import run_command
from tfmq.spark.pipelines.replay import replay
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
    told = json.loads(capsys.readouterr().out)
    steps = told.pop("steps")
    expected = {"archived": "source", "topic": "told", "messages": 300, "steps_before": 0}
    assert told == {**expected, "topic_made": True} and steps > 2
    require_same(spark_server.address, "source", "told")
    assert replay_run(spark_server, folder, "source", "--to", "told") == 0
    assert capsys.readouterr().err == "told has all of it already; nothing sent\n"
    require_same(spark_server.address, "source", "told")


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        ([], 2, "Missing argument 'TOPIC'."),
        (["source", "--to", "a b"], 2, "a topic's name is 1 to 249 of A-Z a-z 0-9 . _ -"),
        (["source", "--since", "-1h"], 2, "'-1h' is another time in each run"),
        (["source", "--since", "2026-01-02", "--until", "2026-01-01"], 2, "is not after --since"),
        (["source", "--to", "x", "--partition", "9"], 2, "The archived source has partitions 0 to 1, not 9."),
        (["sauce", "--to", "x"], 1, "has no topic 'sauce'; it has source."),
        (["source", "--repartitions"], 2, "--repartition"),
    ],
)
def test_wrong_input_is_told_in_a_sentence(
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
    environment = {
        **os.environ,
        **spark_session.environment(tmp_path),
        "PYSPARK_SUBMIT_ARGS": "pyspark-shell",
    }
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
