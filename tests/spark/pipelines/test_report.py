"""The command `report` against a real broker: what it counts is what was sent."""

import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import tfmq
from tests.scale import scaled
from tests.spark.pipelines.test_reconcile import work
from tfmq.admin import Admin
from tfmq.message import Message
from tfmq.spark.pipelines.command import run_command
from tfmq.spark.pipelines.report import report
from tools.rigs.live_server import LiveServer

MESSAGES = 200 + scaled(20_000)


def sent(address: str, topic: str) -> list[int]:
    """Messages of known sizes; these sizes."""
    sizes = [10 + n * n % 700 for n in range(MESSAGES)]
    with tfmq.Producer(address) as producer:
        producer.send_many(
            topic,
            [Message(b"%09d " % n + b"x" * (size - 10), partition=n % 2) for n, size in enumerate(sizes)],
        )
        producer.send(topic, None, key="k")
    return [*sizes, 0]


@pytest.mark.long
def test_a_report_counts_what_was_sent(
    spark: Any, spark_server: LiveServer, topic: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = sent(spark_server.address, topic)
    arguments = ["--servers", spark_server.address, "--to", str(tmp_path / "r")]
    assert run_command(report, "report", [topic, *arguments]) == 0
    printed = capsys.readouterr()
    assert topic[:9] in printed.out and "1 picture, report.html and report.json are in" in printed.err
    (row,) = json.loads((tmp_path / "r" / "report.json").read_text())
    assert (row["messages"], row["payload_bytes"]) == (len(sizes), sum(sizes))
    ordered = sorted(sizes)
    assert (row["size_bytes"]["min"], row["size_bytes"]["max"]) == (ordered[0], ordered[-1])
    assert abs(row["size_bytes"]["p50"] - ordered[len(sizes) // 2]) <= 1 + 0.05 * ordered[len(sizes) // 2]
    assert row["size_bytes"]["mean"] == round(sum(sizes) / len(sizes), 1)
    with Admin(spark_server.address) as admin:
        counts = {str(each.partition): each.messages for each in admin.topic(topic).partitions}
    assert row["partitions"] == counts
    assert row["latency_ms"]["values"] + row["before_birth"] + row["without_birth"] == len(sizes)
    assert row["latency_ms"]["values"] and sum(each["messages"] for each in row["moments"]) == len(sizes)
    written = {path.name for path in (tmp_path / "r").iterdir()}
    assert written == {f"{topic}.png", "report.html", "report.json"}


def test_groups_and_dead_letters_are_in_it(
    spark: Any, spark_server: LiveServer, topic: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "dead.db"
    with tfmq.Producer(spark_server.address) as producer:
        producer.send_many(topic, [b"%d" % n for n in range(60)])
    refused = work(spark_server.address, topic, store, 60)
    with tfmq.Producer(spark_server.address) as producer:
        producer.send_many(topic, [b"late"] * 7)
    arguments = ["--servers", spark_server.address, "--dead-letters", str(store)]
    assert run_command(report, "report", [topic, *arguments, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["topics"]
    assert (row["letters"], row["calls"]) == ({"dead": refused}, {"1": refused})
    (group,) = row["groups"]
    assert (group["group"], group["lag"]) == (f"{topic}-group", 7) and 0 <= group["age_seconds"] < 300


def test_a_time_from_and_a_time_until_leave_the_others_out(
    spark: Any, spark_server: LiveServer, topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sent(spark_server.address, topic)
    now = datetime.now(UTC)
    base = [topic, "--servers", spark_server.address, "--json"]
    counts: Counter[str] = Counter()
    for name, since, until in (("later", 1, 2), ("now", -1, 1)):
        bounds = [(now + timedelta(hours=hours)).isoformat() for hours in (since, until)]
        window = ["--since", bounds[0], "--until", bounds[1]]
        assert run_command(report, "report", [*base, *window]) == 0
        counts[name] = json.loads(capsys.readouterr().out)["topics"][0]["messages"]
    assert counts == Counter(now=MESSAGES + 1)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        ([], 2, "name the topics, or give --all."),
        (["no-such-topic"], 1, "There is no topic 'no-such-topic'."),
        (["x", "--format", "gif"], 2, "'gif' is not one of 'png', 'svg'."),
        (["x", "--since", "2026-11-22", "--until", "2026-11-21"], 2, "--until: is not after --since"),
    ],
)
def test_wrong_input_is_told_in_a_sentence(
    spark_server: LiveServer,
    no_spark: None,
    arguments: list[str],
    code: int,
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(report, "report", [*arguments, "--servers", spark_server.address]) == code
    printed = capsys.readouterr().err
    assert sentence in printed and "Traceback" not in printed


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--dead-letters", "/nowhere/dead.db"], 1, "There are no dead letters at /nowhere/dead.db: "),
        (
            ["--to", "/proc/x"],
            2,
            "Nothing can be written into the folder /proc/x: No such file or directory.",
        ),
    ],
)
def test_what_is_not_there_is_told_before_spark_is_started(
    spark_server: LiveServer,
    topic: str,
    no_spark: None,
    arguments: list[str],
    code: int,
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with tfmq.Producer(spark_server.address) as producer:
        producer.send(topic, b"one")
    assert run_command(report, "report", [topic, "--servers", spark_server.address, *arguments]) == code
    assert capsys.readouterr().err.startswith(f"tfmq: {sentence}")
