"""The command `archive`: what it says, its exit codes, and a run of its own Spark that SIGKILL ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tfmq
from journal.fsck.log_repair import repair
from tests.scale import scaled, seeded
from tests.spark.pipelines import messages
from tests.spark.pipelines.killing import runs_of
from tests.spark.pipelines.messages import archived, by_listing, by_manifest, in_topic, run_inline, send, some
from tests.spark.test_planning_gaps import damaged_broker
from tfmq.admin import Admin
from tfmq.cli.main import run as tfmq_command
from tfmq.errors import BadRequest, Busy, Damaged, LogTruncated, NotARecord, OffsetOutOfRange, UnknownTopic
from tfmq.spark.file_reader import FolderLogReader
from tfmq.spark.log_reader import LogReader, SourceAddress, open_log_reader
from tfmq.spark.pipelines import archive_folder
from tfmq.spark.pipelines.archive import (
    ArchiveOptions,
    TopicArchiver,
    archive,
    archive_piece,
    ends_after,
    find_new_ranges,
    plan_step,
)
from tfmq.spark.pipelines.archive_folder import ArchiveFolder, ArchivePiece, Gap, hold_lock
from tfmq.spark.pipelines.command import run_command
from tfmq.spark.pipelines.parquet_files import read_batches
from tfmq.spark.ranges import Bounds, OffsetRange, PartitionLog, split_range, split_targets
from tfmq.spark.wire_reader import BrokerLogReader
from tfmq.testing.broker import SimulatedBroker
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
    reported = json.loads(capsys.readouterr().out)
    (row,) = reported["topics"]
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
def test_wrong_input_is_reported_in_a_sentence(
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


def test_a_folder_that_cannot_be_made_is_reported_with_what_to_do(
    spark_server: LiveServer, topic: str, no_spark: None, capsys: pytest.CaptureFixture[str]
) -> None:
    send(spark_server.address, topic, some(seeded(topic), 1))
    assert archive_run(spark_server, Path("/proc/x"), topic) == 2
    assert capsys.readouterr().err == (
        "tfmq: Nothing can be written into the folder /proc/x: No such file or directory."
        " Name one with --to in which you may write.\n"
    )


def test_a_broker_that_is_away_has_its_own_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    environment = {**os.environ, **spark_session.environment(tmp_path), "PYSPARK_SUBMIT_ARGS": "pyspark-shell"}
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


# The course of an archive, against a real broker; its tasks run in this process, without Spark.

SMALL: dict[str, Any] = {"piece_bytes": 4 << 10, "step_bytes": 20 << 10}
"""Several steps of several pieces for a few hundred messages."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "archive"


def wire(server: LiveServer) -> SourceAddress:
    return SourceAddress(server.address, None, 10.0)


def files_in(folder: Path) -> dict[str, int]:
    """Every file with its time of change, but the lock."""
    files = (each for each in folder.rglob("*") if each.is_file() and each.name != "lock")
    return {str(each.relative_to(folder)): each.stat().st_mtime_ns for each in files}


def test_every_message_is_archived_once_as_it_is(spark_server: LiveServer, topic: str, folder: Path) -> None:
    send(spark_server.address, topic, some(seeded(topic), 300))
    outcome = archived(folder, topic, wire(spark_server), **SMALL)
    assert (outcome.messages, outcome.resumed, outcome.gaps) == (300, False, [])
    assert outcome.steps > 1 and outcome.files > outcome.steps
    kept = list(folder.rglob("*.parquet"))
    assert (outcome.files, outcome.size_bytes) == (len(kept), sum(each.stat().st_size for each in kept))
    rows = by_manifest(folder, topic)
    assert messages.as_sent(rows) == in_topic(spark_server.address, topic)
    assert by_listing(folder) == rows


def test_a_second_run_archives_what_is_new_and_a_third_writes_nothing(
    spark_server: LiveServer, topic: str, folder: Path
) -> None:
    generator = seeded(topic)
    send(spark_server.address, topic, some(generator, 50))
    archived(folder, topic, wire(spark_server), **SMALL)
    before = files_in(folder)
    send(spark_server.address, topic, some(generator, 70))
    second = archived(folder, topic, wire(spark_server), **SMALL)
    assert second.messages == 70
    after = files_in(folder)
    assert before.items() <= after.items()
    assert archived(folder, topic, wire(spark_server), **SMALL).steps == 0
    assert files_in(folder) == after
    rows = by_manifest(folder, topic)
    assert messages.as_sent(rows) == in_topic(spark_server.address, topic)
    assert by_listing(folder) == rows


def test_an_empty_topic_has_nothing_to_archive(spark_server: LiveServer, topic: str, folder: Path) -> None:
    with Admin(spark_server.address) as admin:
        admin.create_topic(topic)
    assert archived(folder, topic, wire(spark_server)).steps == 0
    assert ArchiveFolder.open(folder).topics() == []


class Stopped(Exception):
    """A run that ends here."""


def stopping(tasks: int) -> Callable[..., Any]:
    """A runner that does so many tasks of its step and then ends the run."""

    def run(work: Any, items: Any, progress: Any, title: str) -> Any:
        run_inline(work, items[:tasks], progress, title)
        raise Stopped

    return run


@pytest.mark.parametrize("tasks", [0, 1, 1000])
def test_a_step_that_was_begun_is_made_again_as_it_was_planned(
    spark_server: LiveServer, topic: str, folder: Path, tasks: int
) -> None:
    generator = seeded(topic)
    send(spark_server.address, topic, some(generator, 60))
    with pytest.raises(Stopped):
        archived(folder, topic, wire(spark_server), stopping(tasks), **SMALL)
    plan = ArchiveFolder.open(folder).started_plan(topic, 1)
    begun = set(files_in(folder))
    half = folder / f"topic={topic}" / "date=x" / ".x.parquet.0.part"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"")
    send(spark_server.address, topic, some(generator, 30))
    outcome = archived(folder, topic, wire(spark_server), piece_bytes=1 << 20, step_bytes=1 << 20)
    assert outcome.resumed and outcome.messages == 90
    assert plan is not None and ArchiveFolder.open(folder).manifest(topic, 1).plan == plan
    assert begun - set(files_in(folder)) == {archive_folder.plan_path(topic, 1)} and not half.exists()
    rows = by_manifest(folder, topic)
    assert messages.as_sent(rows) == in_topic(spark_server.address, topic)
    assert by_listing(folder) == rows


@pytest.mark.long
def test_killed_at_any_call_the_next_run_gives_the_same(spark_server: LiveServer, topic: str, folder: Path) -> None:
    """Every row once in what manifests say, and never twice in what a listing of the folder shows."""
    generator = seeded(topic)
    send(spark_server.address, topic, some(generator, 120))
    small = (4 << 10, 12 << 10)
    with runs_of("archive", spark_server.address, str(folder.with_name("whole")), topic, *small) as run:
        whole = run()
    assert whole.code == 0
    kills, most = 0, whole.calls
    with runs_of("archive", spark_server.address, str(folder), topic, *small) as run:
        while kills < max(4, scaled(100)):
            ended = run(generator.randrange(1, most))
            assert ended.code in (0, -9)
            kills += ended.code == -9
            if any(folder.rglob("*.parquet")):
                numbers = [row[2] for rows in by_listing(folder).values() for row in rows]
                assert len(set(numbers)) == len(numbers)
            if ended.code == 0:
                send(spark_server.address, topic, some(generator, 40))
                most = max(2, most * 3 // 4)  # how many calls a run has depends on what it waits for
    archived(folder, topic, wire(spark_server), **SMALL)
    rows = by_manifest(folder, topic)
    assert messages.as_sent(rows) == in_topic(spark_server.address, topic)
    assert by_listing(folder) == rows
    assert not list(folder.rglob("*.part")) and not list(folder.rglob("*.plan"))


def test_a_folder_of_data_is_archived_without_its_broker(spark_server: LiveServer, topic: str, folder: Path) -> None:
    generator = seeded(topic)
    send(spark_server.address, topic, some(generator, 80))
    archived(folder, topic, wire(spark_server), **SMALL)
    send(spark_server.address, topic, some(generator, 20))
    data = SourceAddress(None, str(spark_server.data))
    with open_log_reader(wire(spark_server)) as by_wire, open_log_reader(data) as by_files:
        ends = [each.end for each in by_wire.all_bounds(by_wire.partitions(topic))]
        deadline = time.monotonic() + 60
        while ends != [each.end for each in by_files.all_bounds(by_files.partitions(topic))]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert archived(folder, topic, data, **SMALL).messages == 20
    rows = by_manifest(folder, topic)
    assert messages.as_sent(rows) == in_topic(spark_server.address, topic)
    assert by_listing(folder) == rows


def test_one_run_at_a_time(spark_server: LiveServer, topic: str, folder: Path) -> None:
    send(spark_server.address, topic, some(seeded(topic), 5))
    with (
        hold_lock(folder / archive_folder.lock_path(topic), ""),
        pytest.raises(Busy, match=f"Another run archives {topic} into"),
    ):
        archived(folder, topic, wire(spark_server))


def test_a_topic_made_anew_is_archived_after_the_old_one(spark_server: LiveServer, topic: str, folder: Path) -> None:
    generator = seeded(topic)
    send(spark_server.address, topic, some(generator, 20))
    archived(folder, topic, wire(spark_server))
    old = by_manifest(folder, topic)
    with Admin(spark_server.address) as admin:
        admin.delete_topic(topic)
    with pytest.raises(UnknownTopic):
        archived(folder, topic, wire(spark_server))
    send(spark_server.address, topic, some(generator, 20))
    assert archived(folder, topic, wire(spark_server)).messages == 20
    rows = by_manifest(folder, topic)
    for partition, each in old.items():
        assert rows[partition][: len(each)] == each
    assert sum(map(len, rows.values())) == 40


def test_another_brokers_topic_of_that_name_is_refused(spark_server: LiveServer, topic: str, folder: Path) -> None:
    send(spark_server.address, topic, some(seeded(topic), 5))
    archived(folder, topic, wire(spark_server), node="a")
    with pytest.raises(BadRequest, match=r"from another broker \(node a, this one is b\)"):
        archived(folder, topic, wire(spark_server), node="b")


@pytest.mark.long
def test_damaged_blocks_end_the_run_and_once_they_are_repaired_it_goes_on(
    spark_server: LiveServer, topic: str, folder: Path, tmp_path: Path
) -> None:
    with tfmq.Producer(spark_server.address) as producer:  # blocks of many messages, and of several pieces
        producer.send_many(topic, some(seeded(topic), 200))
    with (
        open_log_reader(wire(spark_server)) as logs,
        open_log_reader(SourceAddress(None, str(spark_server.data))) as files,
    ):
        deadline = time.monotonic() + 60
        while logs.all_bounds(logs.partitions(topic)) != files.all_bounds(files.partitions(topic)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    data = Path(shutil.copytree(spark_server.data, tmp_path / "data"))
    (data / "lock").unlink()
    with pytest.raises(Stopped):
        archived(folder, topic, SourceAddress(None, str(data)), stopping(0), **SMALL)
    segment = next((data / f"{topic}-0").glob("*.zxQueue"))
    whole = segment.read_bytes()
    middle = len(whole.rstrip(b"\0")) // 3
    segment.write_bytes(whole[:middle] + b"\xff" * 5000 + whole[middle + 5000 :])
    with pytest.raises(Damaged, match=topic):
        archived(folder, topic, SourceAddress(None, str(data)), **SMALL)
    assert ArchiveFolder.open(folder).topics() == []
    assert tfmq_command(["log", "repair", str(data)]) == 0
    repaired = LiveServer(data)
    repaired.start()
    outcome = archived(folder, topic, wire(repaired), **SMALL)
    repaired.stop()
    rows = by_manifest(folder, topic)
    assert outcome.resumed and by_listing(folder) == rows
    sent = in_topic(spark_server.address, topic)
    assert messages.as_sent(rows)[1] == sent[1]
    assert set(rows.get(0, [])) < {tuple(row) for row in by_all(spark_server, topic, tmp_path)[0]}


def by_all(server: LiveServer, topic: str, tmp_path: Path) -> dict[int, list[messages.Row]]:
    """The rows of an undamaged archive."""
    archived(tmp_path / "undamaged", topic, wire(server), **SMALL)
    return by_manifest(tmp_path / "undamaged", topic)


class Shortened:
    """Logs of which retention took the first part, or that were set back."""

    def __init__(self, logs: Any, first: int = 0, cut: int = 0) -> None:
        self._logs, self._first, self._cut = logs, first, cut

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logs, name)

    def all_bounds(self, logs: Any) -> Any:
        found = self._logs.all_bounds(logs)
        return [
            each._replace(
                first=self._logs.next_message_offset(log, each.end * self._first // 100), end=each.end - self._cut
            )
            for log, each in zip(logs, found, strict=True)
        ]


def shortened(monkeypatch: pytest.MonkeyPatch, **how: int) -> None:
    before = TopicArchiver.__init__

    def changed(self: TopicArchiver, wish: Any, topic: str, logs: Any, run: Any) -> None:
        before(self, wish, topic, Shortened(logs, **how), run)

    monkeypatch.setattr(TopicArchiver, "__init__", changed)


def test_what_retention_took_between_two_runs_is_reported_or_noted(
    spark_server: LiveServer, topic: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = seeded(topic)
    send(spark_server.address, topic, some(generator, 20))
    archived(folder, topic, wire(spark_server))
    send(spark_server.address, topic, some(generator, 100))
    shortened(monkeypatch, first=50)
    with pytest.raises(OffsetOutOfRange, match="retention deleted the messages between"):
        archived(folder, topic, wire(spark_server))
    outcome = archived(folder, topic, wire(spark_server), on_loss="skip")
    assert {gap.partition for gap in outcome.gaps} == {0, 1}
    assert outcome.messages + 20 < 120
    assert archived(folder, topic, wire(spark_server)).steps == 0
    assert by_listing(folder) == by_manifest(folder, topic)


def test_what_retention_took_of_a_step_that_was_begun_is_reported_or_noted(
    spark_server: LiveServer, topic: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(spark_server.address, topic, some(seeded(topic), 100))
    with pytest.raises(Stopped):
        archived(folder, topic, wire(spark_server), stopping(1))
    shortened(monkeypatch, first=50)
    with pytest.raises(OffsetOutOfRange, match="was archiving offsets 0 to"):
        archived(folder, topic, wire(spark_server))
    outcome = archived(folder, topic, wire(spark_server), on_loss="skip")
    assert {gap.partition for gap in outcome.gaps} == {0, 1} and 0 < outcome.messages < 100
    assert len(list((folder / archive_folder.aside_folder(topic)).iterdir())) == 1
    assert by_listing(folder) == by_manifest(folder, topic)


DISK_FOLDER = "/data"
ADDRESS = SourceAddress("127.0.0.1:1")


@pytest.fixture(params=["folder", "wire"])
def simulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedBroker]:
    """A broker with damage in its topic "orders", which tasks read from its folder or from itself."""
    with damaged_broker() as broker:

        def opened(address: SourceAddress) -> LogReader:
            if request.param == "folder":
                return FolderLogReader(DISK_FOLDER, broker.disk)
            return BrokerLogReader(broker.servers)

        monkeypatch.setattr("tfmq.spark.pipelines.archive.open_log_reader", opened)
        yield broker


def whole_log(broker: SimulatedBroker) -> ArchivePiece:
    with FolderLogReader(DISK_FOLDER, broker.disk) as logs:
        (log,) = logs.partitions("orders")
        bounds = logs.bounds(log)
    return ArchivePiece(log.partition, log.incarnation, log.log_id, bounds.first, bounds.end)


def offsets_in(folder: Path, piece: ArchivePiece) -> list[int]:
    files = archive_piece(ArchiveOptions(ADDRESS, folder), "orders", piece).result
    return [row["offset"] for file in files for batch in read_batches(folder, file) for row in batch.to_pylist()]


def test_a_piece_that_starts_inside_a_repaired_range_has_the_messages_after_it(
    simulated: SimulatedBroker, folder: Path
) -> None:
    """A step that was planned before the repair can have such pieces."""
    every = whole_log(simulated)
    simulated.stop()
    (repaired,) = repair(simulated.disk, f"{DISK_FOLDER}/orders-0")
    simulated.start()
    offsets = offsets_in(folder, every)
    assert len(offsets) == 600 - repaired.lost
    (filler,) = [(start, start + size) for start, size, _ in repaired.fillers if size > 5000]
    assert not any(filler[0] <= offset < filler[1] for offset in offsets)
    for start in (*range(filler[0], filler[1], 499), filler[1] - 1, offsets[5]):
        assert offsets_in(folder, every._replace(start=start)) == [offset for offset in offsets if offset >= start]
        before = every._replace(end=start)
        assert offsets_in(folder, before) == [offset for offset in offsets if offset < start]
    assert offsets_in(folder, every._replace(start=filler[0] + 100, end=filler[1] - 100)) == []
    with pytest.raises(NotARecord, match=f"orders-0: no record starts at offset {offsets[5] + 1}"):
        offsets_in(folder, every._replace(start=offsets[5] + 1))


def test_what_retention_takes_before_a_piece_is_read_is_reported(simulated: SimulatedBroker, folder: Path) -> None:
    every = whole_log(simulated)
    first = simulated.admin().truncate_before("orders", 0, every.end - 5000)
    assert every.start < first < every.end
    assert offsets_in(folder, every._replace(start=first))
    with pytest.raises(OffsetOutOfRange, match=f"orders-0: offsets {every.start} to {first} were removed"):
        offsets_in(folder, every)


def test_a_log_that_was_set_back_is_refused(
    spark_server: LiveServer, topic: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(spark_server.address, topic, some(seeded(topic), 20))
    archived(folder, topic, wire(spark_server))
    shortened(monkeypatch, cut=1)
    with pytest.raises(LogTruncated, match="its data was restored from an older copy"):
        archived(folder, topic, wire(spark_server))


def test_a_topic_may_have_any_name(spark_server: LiveServer, folder: Path) -> None:
    names = ("archive.json", "_tfmq", "lock", "00000001.json", "...", "-", "t" * 249)
    for name in names:
        send(spark_server.address, name, some(seeded(name), 5))
        assert archived(folder, name, wire(spark_server)).messages == 5
        assert sum(map(len, by_manifest(folder, name).values())) == 5
    assert ArchiveFolder.open(folder).topics() == sorted(names)


@pytest.mark.parametrize("lost", [1, 3])
def test_a_lost_manifest_is_reported_and_nothing_comes_twice(
    spark_server: LiveServer, topic: str, folder: Path, lost: int
) -> None:
    for _ in range(lost):
        send(spark_server.address, topic, some(seeded(topic), 10))
        archived(folder, topic, wire(spark_server))
    before = by_listing(folder)
    (folder / archive_folder.manifest_path(topic, lost)).unlink()
    send(spark_server.address, topic, some(seeded(topic), 10))
    with pytest.raises(Damaged, match=f"in no complete step: _tfmq/{topic}/0000000{lost}.json was deleted"):
        archived(folder, topic, wire(spark_server))
    assert by_listing(folder) == before


# What the next step of an archive holds: every offset once, in steps and pieces of bounded size.

RECORD = 10
"""Every record of these logs begins at a multiple of it."""
LOGS = [PartitionLog("orders", number, 5, 5 << 24 | number) for number in range(3)]


class EvenLogs:
    """Logs whose records all have one size."""

    def next_message_offset(self, log: PartitionLog, offset: int) -> int:
        return -(-offset // RECORD) * RECORD

    def split(self, whole: OffsetRange, size: int) -> list[OffsetRange]:
        return split_range(whole, (self.next_message_offset(whole.log, each) for each in split_targets(whole, size)))


EVEN: Any = EvenLogs()


def bounds(first: int, end: int) -> Bounds:
    return Bounds(first, end, first // RECORD, end // RECORD)


def from_first(log: PartitionLog, found: Bounds) -> int:
    return found.first


def test_steps_and_pieces_hold_every_offset_once_and_in_order() -> None:
    random = seeded("planning")
    for _ in range(50):
        found = [(log, bounds(0, RECORD * random.randrange(200))) for log in LOGS]
        survey = find_new_ranges(found, {}, "stop", from_first)
        step_bytes, piece_bytes = random.randrange(1, 900), random.randrange(1, 300)
        got: dict[int, list[ArchivePiece]] = {}
        while survey.ranges:
            step, survey = plan_step(EVEN, survey, step_bytes, piece_bytes)
            assert step
            assert sum(each.end - each.start for each in step) <= step_bytes + RECORD * len(LOGS)
            for each in step:
                got.setdefault(each.partition, []).append(each)
        for log, known in found:
            ranges = [(each.start, each.end) for each in got.get(log.partition, [])]
            assert ranges == sorted(ranges)
            offsets = [offset for start, end in ranges for offset in range(start, end)]
            assert offsets == list(range(known.first, known.end))


def test_a_run_goes_on_where_the_last_one_ended() -> None:
    found = [(LOGS[0], bounds(0, 100)), (LOGS[1], bounds(0, 50))]
    survey = find_new_ranges(found, {(5, 0): 60, (5, 1): 50}, "stop", from_first)
    assert [(each.log, each.start, each.end) for each in survey.ranges] == [(LOGS[0], 60, 100)]
    assert sum(each.end - each.start for each in survey.ranges) == 40


def test_another_incarnation_begins_at_its_beginning() -> None:
    anew = PartitionLog("orders", 0, 6, 6 << 24)
    survey = find_new_ranges([(anew, bounds(20, 30))], {(5, 0): 1000}, "stop", from_first)
    assert [(each.start, each.end) for each in survey.ranges] == [(20, 30)]
    assert survey.gaps == ()


def test_what_retention_took_stops_the_archive_or_is_noted_as_a_gap() -> None:
    found = [(LOGS[0], bounds(80, 100))]
    with pytest.raises(OffsetOutOfRange, match="archived up to offset 60, and the broker has it only from 80"):
        find_new_ranges(found, {(5, 0): 60}, "stop", from_first)
    survey = find_new_ranges(found, {(5, 0): 60}, "skip", from_first)
    assert survey.gaps == (Gap(0, 5, 60, 80),)
    assert survey.ranges[0].start == 80


def test_a_log_that_is_shorter_than_its_archive_is_refused() -> None:
    with pytest.raises(LogTruncated, match="another broker's topic, or its data was restored"):
        find_new_ranges([(LOGS[0], bounds(0, 50))], {(5, 0): 60}, "skip", from_first)


def test_ends_only_grow_and_cover_gaps() -> None:
    ends = {(5, 0): 10, (4, 0): 99}
    after = ends_after(ends, [ArchivePiece(0, 5, 1, 20, 30), ArchivePiece(0, 5, 1, 30, 35)], [Gap(1, 5, 0, 7)])
    assert after == {(5, 0): 35, (4, 0): 99, (5, 1): 7}
    assert ends == {(5, 0): 10, (4, 0): 99}
