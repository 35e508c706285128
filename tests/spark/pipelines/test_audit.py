"""An audit of a real broker's folder: it is sound while it runs and afterwards, and all that is planted is found."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tfmq
from journal.record.batch import Source
from tests.scale import SCALE, scaled
from tests.spark.pipelines import broken
from tests.spark.pipelines.audited import audit_here, batch, reported, segments, write_log
from tfmq.message import Message
from tfmq.spark.pipelines import audit_plan as kinds
from tfmq.spark.pipelines.audit import AuditJobs, audit, audit_folders, group_pieces
from tfmq.spark.pipelines.audit_check import RUN, make_facts
from tfmq.spark.pipelines.audit_plan import AuditedLog, AuditPiece
from tfmq.spark.pipelines.command import run_command
from tfmq.spark.pipelines.spark_jobs import Progress
from tools.rigs.live_server import LiveServer

FULL_BYTES = 1_000_000_000
PAYLOAD = bytes(range(256)) * 3
MESSAGES = scaled(FULL_BYTES) // (2 * len(PAYLOAD)) * 2
SEGMENT_BYTES = max(1 << 20, int((64 << 20) * SCALE))
TRANSACTIONS = 60
ORDERS, PAID, LATER = "orders", "paid", "later"


def produce(address: str, ended: threading.Event) -> None:
    """Plain messages of one size and of many, transactions with delayed messages, some rolled back."""
    with tfmq.Producer(address) as producer:
        for start in range(0, MESSAGES, 2000):
            size = len(PAYLOAD) if start % 4000 else len(PAYLOAD) - start // 2000 % 300
            producer.send_many(ORDERS, [Message(PAYLOAD[: size - n % 3], partition=n % 2) for n in range(2000)])
        producer.flush()
        for n in range(TRANSACTIONS):
            transaction = producer.begin()
            transaction.send_many(PAID, [Message(b"paid %d" % n * 5, partition=p % 2) for p in range(20)])
            transaction.send(LATER, b"later", delay=0.01)
            if n % 7 == 6:
                transaction.rollback()
            else:
                transaction.commit()
    ended.set()


@pytest.fixture(scope="module")
def sound(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a broker that has stopped; audited again and again while it worked."""
    data = tmp_path_factory.mktemp("audit") / "data"
    server = LiveServer(data, "topics.partitions=2", f"log.segment_bytes={SEGMENT_BYTES}")
    server.start()
    ended = threading.Event()
    thread = threading.Thread(target=produce, args=(server.address, ended))
    thread.start()
    try:
        results = []
        while not ended.is_set() or not results:
            results.append(audit_folders(spark.sparkContext, [str(data)], Progress("auditing", None)))
            assert ended.is_set() or thread.is_alive()
    finally:
        thread.join()
        server.stop()
    assert [each.findings for each in results] == [[]] * len(results)
    yield data
    shutil.rmtree(data)


@pytest.fixture
def data(sound: Path, tmp_path: Path) -> Path:
    """A copy for one test, as cheap as a link for tests that write into no file of it."""
    return Path(shutil.copytree(sound, tmp_path / "data"))


@pytest.mark.long
def test_all_that_is_planted_is_found_and_nothing_else(spark: Any, data: Path) -> None:
    context = spark.sparkContext
    progress = Progress("auditing", None)
    clean = audit_folders(context, [str(data)], progress)
    logs = [path for path in data.rglob("*") if path.suffix in (".zxQueue", ".catalog", ".arrivals")]
    assert clean.findings == [] and clean.bytes == sum(path.stat().st_size for path in logs)
    assert progress.bytes == clean.bytes and progress.rows == clean.messages > MESSAGES

    even, odd, paid = data / f"{ORDERS}-0", data / f"{ORDERS}-1", data / f"{PAID}-1"
    assert len(segments(even)) > 6
    bit = broken.flip_bit(segments(even)[1], SEGMENT_BYTES // 2)
    cut = broken.cut(segments(even)[3], SEGMENT_BYTES // 3)
    missing = broken.remove(segments(even)[5])
    twice = broken.repeat(segments(even)[0], odd)
    torn = broken.tear(paid)

    result = audit_folders(context, [str(data)], progress)
    found = {(each.kind, each.topic, each.partition): each for each in result.findings}
    assert len(result.findings) == len(found) == 5, result.findings
    flipped = found[kinds.BLOCK, ORDERS, 0]
    assert flipped.first <= bit < flipped.next <= flipped.first + (66 << 10)
    assert (found[kinds.CUT, ORDERS, 0].next, found[kinds.CUT, ORDERS, 0].segment) == (cut[1], segments(even)[3].name)
    assert cut[0] - (66 << 10) < found[kinds.CUT, ORDERS, 0].first <= cut[0]
    assert found[kinds.MISSING, ORDERS, 0][5:7] == missing
    assert found[kinds.REPEATED, ORDERS, 1][5:7] == twice
    lost = found[kinds.TORN, PAID, 1]
    assert f"at place {torn.control.source_high}: " in lost.text and f"{torn.control.records} messages" in lost.text
    assert all(each.data == str(data) and each.advice for each in result.findings)


def test_appends_and_messages_of_transactions_without_a_commit_are_found(data: Path) -> None:
    assert reported(audit_here(data, 1 << 20)) == []
    stray = broken.append(data / f"{PAID}-0", batch(5000, 0, [50] * 4), Source(1, journal_id(data), 1 << 40, 3))
    (finding,) = audit_here(data, 1 << 20).findings
    assert (finding.kind, finding.topic, finding.partition) == (kinds.NO_DECISION, PAID, 0)
    assert finding.first == stray[0] and finding.next >= stray[1]


def journal_id(data: Path) -> int:
    return broken.blocks_of(segments(data / f"{PAID}-0")[0])[-1].control.source_id


@pytest.mark.long
def test_the_command_prints_json_and_says_by_its_exit_code_what_it_found(
    spark: Any, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = data / f"{PAID}-0"
    assert run_command(audit, "audit", [str(data), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []
    at = broken.flip_bit(segments(small)[0], 100)
    assert run_command(audit, "audit", [str(data), "--json"]) == 4
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["first"] <= at < finding["next"] and finding["do"]
    assert run_command(audit, "audit", [str(data)]) == 4
    printed = capsys.readouterr()
    assert "damaged block" in printed.out and "1 finding" in printed.err
    shutil.rmtree(data / f"{LATER}-1")
    assert run_command(audit, "audit", [str(data), "--json"]) == 4
    found = json.loads(capsys.readouterr().out)["findings"]
    assert {(each["kind"], each["topic"], each["partition"]) for each in found} >= {(kinds.FOLDER, LATER, 1)}


@pytest.mark.parametrize(("folder", "sentence"), [("", "holds no partition's folder"), ("none", "is not a folder")])
def test_what_is_no_data_folder_is_reported_before_spark_is_started(
    tmp_path: Path, folder: str, sentence: str, capsys: pytest.CaptureFixture[str], no_spark: None
) -> None:
    data = str(tmp_path / folder)
    assert run_command(audit, "audit", [data]) == 2
    assert capsys.readouterr().err == (f"tfmq: {data} {sentence}; name the data folder of a broker (its --data).\n")


# What an audit says in the end.


def test_sums_and_sentence(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "data", 0, [([batch(50, 40 * n, [80] * 40)], None) for n in range(20)])
    result = audit_here(tmp_path / "data")
    files = segments(folder)
    assert (result.logs, result.segments, result.messages, result.blocks) == (1, len(files), 800, 20)
    assert result.summary().startswith(f"1 data folder, 1 log, {len(files)} segments: 800 records in ")
    assert result.summary().endswith("; nothing is wrong")
    files[1].unlink()
    result = audit_here(tmp_path / "data")
    assert result.summary().endswith("; 1 finding")
    row = result.to_json()
    assert row["findings"][0]["kind"] == "missing segment" and row["messages"] == result.messages


def test_findings_are_in_the_order_of_topics_and_offsets(tmp_path: Path) -> None:
    for partition in (1, 0):
        folder = write_log(
            tmp_path / "data", partition, [([batch(50 + partition, 40 * n, [80] * 40)], None) for n in range(30)]
        )
        for path in segments(folder)[1:4:2]:
            path.unlink()
    findings = audit_here(tmp_path / "data").findings
    assert [(each.partition, each.first) for each in findings] == [(0, 20500), (0, 61500), (1, 20500), (1, 61500)]


# Work for Spark: even groups, and verdicts that do not depend on how facts are spread.

SIZE = 100


@given(sizes=st.lists(st.integers(1, 250), max_size=40))
def test_every_piece_is_in_one_group_and_small_ones_share_one(sizes: list[int]) -> None:
    pieces = [AuditPiece(n, 0, 0, size, False) for n, size in enumerate(sizes)]
    groups = group_pieces(pieces, SIZE)
    assert sorted(piece.log for group in groups for piece in group) == list(range(len(sizes)))
    sums = [sum(piece.size for piece in group) for group in groups]
    assert sums == sorted(sums, reverse=True)
    assert all(len(group) == 1 or total <= SIZE for group, total in zip(groups, sums, strict=True))


def test_facts_of_many_tasks_meet(spark: Any) -> None:
    logs = [AuditedLog(n, "/data", f"orders-{n}", "orders", n, ".zxQueue", None, None, ()) for n in range(2)]
    checked = AuditJobs(spark.sparkContext, logs, {"/data": 0})
    checked.check_pieces([], Progress("auditing", None))
    one = [make_facts(0, 0, [[producer << 24, RUN, 5, 100 * producer, 0, 0]]) for producer in range(50, 58)]
    other = [make_facts(0, 1, [[(producer << 24) + 3, RUN, 5, 7, 0, 0]]) for producer in (51, 56)]
    verdicts = checked.compare_facts([*one, *other], {}, {})
    found = sorted((each.first_id >> 24, each.first_id & 0xFFFF, each.count) for v in verdicts for each in v.repeats)
    assert found == [(51, 3, 2), (56, 3, 2)]
    checked.close()
