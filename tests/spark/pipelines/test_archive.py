"""The command `archive`: what it says, its exit codes, and a run of its own Spark that SIGKILL ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.scale import scaled, seeded
from tests.spark.pipelines import messages
from tests.spark.pipelines.messages import by_listing, by_manifest, in_topic, send, some
from tfmq.spark.pipelines.archive import archive
from tfmq.spark.pipelines.command import run_command
from tools.rigs import spark_session
from tools.rigs.live_server import LiveServer

INTERRUPTED = "tfmq: interrupted. Run the same command again: the result is that of one complete run.\n"


def archive_run(server: LiveServer, folder: Path, *arguments: str) -> int:
    return run_command(archive, "archive", [*arguments, "--to", str(folder), "--servers", server.address])


@pytest.mark.long
def test_it_says_what_it_did_and_that_nothing_is_new(
    spark: Any, spark_server: LiveServer, topic: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    send(spark_server.address, topic, some(seeded(topic), 90))
    assert archive_run(spark_server, tmp_path / "a", topic, "--file-bytes", "4K", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    (row,) = told["topics"]
    assert (row["topic"], row["messages"], row["resumed"], row["gaps"]) == (topic, 90, False, [])
    assert row["files"] == len(list((tmp_path / "a").rglob("*.parquet"))) > 2
    assert archive_run(spark_server, tmp_path / "a", topic) == 0
    assert capsys.readouterr().err == f"{topic}: nothing new, nothing written\n"
    rows = by_manifest(tmp_path / "a", topic)
    assert messages.as_sent(rows) == in_topic(spark_server.address, topic)
    shown = spark.read.parquet(str(tmp_path / "a"))
    assert {"topic", "date", "hour", "key", "value"} < set(shown.columns)
    assert shown.where(f"topic = '{topic}'").count() == 90
    assert sorted(row.offset for row in shown.where("partition = 0").select("offset").collect()) == [
        row[0] for row in rows[0]
    ]
    send(spark_server.address, topic, some(seeded(topic), 1))
    assert archive_run(spark_server, tmp_path / "a", topic) == 0
    assert f"{topic}: 1 message in 1 file, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        ([], 2, "name the topics, or give --all."),
        (["orders", "--all"], 2, "name the topics, or give --all, not both."),
        (["orders", "--format", "csv"], 2, "No such option '--format'.\n"),
        (["orders", "--path", "."], 2, "tfmq: Name either --servers or --path, not both.\n"),
        (["orders", "--file-bytes", "many"], 2, "'many' is no size: write a number above 0"),
        (["orders", "--on-loss", "cry"], 2, "'cry' is not one of 'stop', 'skip'."),
        (["orders", "--compresion", "none"], 2, "--compression"),
        (["no-such-topic"], 1, "tfmq: There is no topic 'no-such-topic'.\n"),
    ],
)
def test_wrong_input_is_told_in_a_sentence(
    spark_server: LiveServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    sentence: str,
) -> None:
    assert archive_run(spark_server, tmp_path / "a", *arguments) == code
    said = capsys.readouterr().err
    assert sentence in said and "Traceback" not in said
    assert not (tmp_path / "a").exists()


def test_a_folder_that_cannot_be_made_is_told_with_what_to_do(
    spark_server: LiveServer, topic: str, no_spark: None, capsys: pytest.CaptureFixture[str]
) -> None:
    send(spark_server.address, topic, some(seeded(topic), 1))
    assert archive_run(spark_server, Path("/proc/x"), topic) == 2
    assert capsys.readouterr().err == (
        "tfmq: Nothing can be written into the folder /proc/x: No such file or directory."
        " Name one with --to in which you may write.\n"
    )


def test_a_broker_that_is_away_has_its_own_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["orders", "--to", str(tmp_path / "a"), "--servers", "127.0.0.1:1", "--timeout", "1s"]
    assert run_command(archive, "archive", arguments) == 3
    assert "Nothing listens at 127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.long
def test_a_spark_that_is_killed_and_run_again_archives_every_message_once(
    spark: Any, spark_server: LiveServer, topic: str, tmp_path: Path
) -> None:
    generator = seeded(topic)
    send(spark_server.address, topic, some(generator, 600))
    folder = tmp_path / "a"
    options = [topic, "--file-bytes", "8K", "--step-bytes", "40K"]
    environment = {
        **os.environ,
        **spark_session.environment(tmp_path),
        "PYSPARK_SUBMIT_ARGS": "pyspark-shell",
    }
    command = [sys.executable, "-m", "tfmq.spark.pipelines.archive", *options]
    command += ["--to", str(folder), "--servers", spark_server.address, "--master", "local[2]"]
    for ending in [signal.SIGINT, *[signal.SIGKILL] * scaled(10)]:
        log = (tmp_path / "log").open("w+")
        process = subprocess.Popen(command, env=environment, stderr=log, start_new_session=True)
        more = 1 if ending == signal.SIGINT else generator.randrange(1, 40)
        most = more + len(list(folder.rglob("*.parquet")))
        while process.poll() is None and len(list(folder.rglob("*.parquet"))) < most:
            time.sleep(0.001)
        if process.returncode is None:
            os.killpg(process.pid, ending)  # as a terminal does
        code = process.wait()
        log.seek(0)
        said = log.read()
        assert code in (0, 130 if ending == signal.SIGINT else -9), said
        if code == 130:
            assert said.endswith(INTERRUPTED), said
            assert "Traceback" not in said and "ERROR:" not in said, said
    assert archive_run(spark_server, folder, *options) == 0
    rows = by_manifest(folder, topic)
    assert messages.as_sent(rows) == in_topic(spark_server.address, topic)
    assert by_listing(folder) == rows
