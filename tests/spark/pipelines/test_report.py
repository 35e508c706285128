"""The command `report` against a real broker: what it counts is what was sent."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import tfmq
from tests.dead_letters.test_store import keeping
from tests.scale import scaled, seeded
from tests.spark.pipelines.test_reconcile import work
from tests.spark.pipelines.test_report_render import EMPTY, FULL
from tfmq.admin import Admin
from tfmq.dead_letters.sql_store import BlockingSqlStore
from tfmq.dead_letters.store import StoreAddress as StoreAddress
from tfmq.errors import TfmqError
from tfmq.message import Message, decode_attribute, encode_attribute
from tfmq.spark.log_reader import SourceAddress
from tfmq.spark.pipelines.command import run_command
from tfmq.spark.pipelines.report import add_letters, collect_figures, combine_lags, count_bins, read_group_lags, report
from tools.rigs.live_server import LiveServer

MESSAGES = 200 + scaled(20_000)


def sent(address: str, topic: str) -> list[int]:
    """Messages of known sizes; these sizes."""
    sizes = [10 + n * n % 700 for n in range(MESSAGES)]
    with tfmq.Producer(address) as producer:
        producer.send_many(
            topic, [Message(b"%09d " % n + b"x" * (size - 10), partition=n % 2) for n, size in enumerate(sizes)]
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


@pytest.mark.long
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


@pytest.mark.long
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
def test_wrong_input_is_reported_in_a_sentence(
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
        (["--to", "/proc/x"], 2, "Nothing can be written into the folder /proc/x: No such file or directory."),
    ],
)
def test_what_is_not_there_is_reported_before_spark_is_started(
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


# Dead letters by topic; groups' lags are asked of a broker in test_report.py.


def test_dead_letters_are_counted_by_topic_state_and_calls(tmp_path: Path) -> None:
    store = BlockingSqlStore(StoreAddress("path", str(tmp_path / "dead.db")))
    store.apply([keeping(0), keeping(1), keeping(2, next_ms=10**15)])
    store.close()
    orders, empty = add_letters([FULL._replace(calls={}, letters={}), EMPTY], [str(tmp_path / "dead.db")], None)
    assert orders.letters == {"dead": 2, "waiting": 1} and sum(orders.calls.values()) == 3
    assert (empty.letters, empty.calls) == ({}, {})


def test_a_store_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(TfmqError, match="There are no dead letters at"):
        list(add_letters([FULL], [str(tmp_path / "no.db")], None))


def test_a_folder_knows_no_groups(tmp_path: Path) -> None:
    assert read_group_lags(SourceAddress(path=str(tmp_path)), ["orders"], 0) == {}


def test_an_unknown_lag_is_not_none() -> None:
    assert combine_lags("g", [3, 0, 4], [1.5, 2.5]) == ("g", 7, 2.5)
    assert combine_lags("g", [3, -1], []) == ("g", -1, 0.0)


# Births are read out of attributes by Spark's own expressions: held against the attributes' own decoder.

NOW = 1_763_700_000_000


def rows() -> list[tuple[bytes | None, str, int, int, bytes | None]]:
    """(value, topic, partition, append time ms, attributes): born, not born, with keys that look like a birth."""
    random = seeded("births")
    found: list[tuple[bytes | None, str, int, int, bytes | None]] = []
    for n in range(200):
        born = random.choice([None, NOW + n - 5, NOW + n + 9, NOW - 10**9])
        key = random.choice([None, "k", bytes([1, 0xCF]) * 6])
        attribute = encode_attribute(born, key, random.choice([None, "tag"])) or None
        value = random.choice([None, b"", b"x" * n])
        found.append((value, f"topic{n % 2}", n % 3, NOW + n, attribute))
    return found


@pytest.mark.long
def test_counts_births_and_sizes_are_those_of_each_message(spark: Any) -> None:
    given = rows()
    frame = spark.createDataFrame(
        given, "value binary, topic string, partition int, at bigint, attributes binary"
    ).selectExpr("value", "topic", "partition", "timestamp_millis(at) AS timestamp", "attributes")
    widths = {"topic0": 1, "topic1": 60, "empty": 1}
    found = {each.topic: each for each in collect_figures(count_bins(frame, widths), widths)}
    assert found["empty"].messages == 0
    for topic in ("topic0", "topic1"):
        mine = [row for row in given if row[1] == topic]
        assert {moment.seconds for moment in found[topic].moments} == {widths[topic]}
        assert all(moment.at % widths[topic] == 0 for moment in found[topic].moments)
        born = [None if row[4] is None else decode_attribute(row[4]).born_ms for row in mine]
        latencies = [row[3] - time for row, time in zip(mine, born, strict=True) if time is not None]
        each = found[topic]
        assert each.messages == len(mine) and each.size_bytes == sum(len(row[0] or b"") for row in mine)
        assert each.unborn == born.count(None) and each.early == sum(latency < 0 for latency in latencies)
        assert each.latencies.count_values == sum(latency >= 0 for latency in latencies)
        assert each.latencies.bins[-1].most == max(latencies)
        assert sum(bin.total for bin in each.latencies.bins) == sum(latency for latency in latencies if latency >= 0)


def test_births_that_no_sender_gives_end_no_report(spark: Any) -> None:
    wrong = [b"\x81\x01\xcf" + bytes([255] * 8), b"\x81\x01\xcf\xff", b"\x81\x01", b"", b"\xc1"]
    far = [b"\x81\x01\xcf\x7f" + bytes([255] * 7)] * 3
    given = [(b"v", "hostile", 0, NOW, attribute) for attribute in wrong + far]
    frame = spark.createDataFrame(
        given, "value binary, topic string, partition int, at bigint, attributes binary"
    ).selectExpr("value", "topic", "partition", "timestamp_millis(at) AS timestamp", "attributes")
    (found,) = collect_figures(count_bins(frame, {"hostile": 1}), {"hostile": 1})
    assert (found.messages, found.unborn, found.early, found.latencies.count_values) == (8, len(wrong), len(far), 0)
