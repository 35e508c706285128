"""`tfmq log` of the delayed messages: dumped, verified, mended, alone and in their data folder."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from journal import Log, RealDisk, SystemClock
from journal.record.format import make_id, make_log_id, make_record
from tests.cli.conftest import Cli
from tfmq.cli.log import FileProgress, bucket_files_of, format_delayed, segments_of, verify_path
from tfmq.delay.arrivals.log import LOG_ID, ArrivalBatch, arrival_options
from tfmq.delay.buckets.store import BucketStore

NOW = 1_700_000_000_000
HOUR, DAY = 3_600_000, 86_400_000


def batch(*dues: int) -> ArrivalBatch:
    records = [make_record(b"message %d" % n, make_id(70, n)) for n in range(len(dues))]
    sizes = array("I", map(len, records))
    column = array("Q", dues)
    offsets = array("Q", range(len(dues)))
    data = [b"".join(records)]
    log_id = make_log_id(16, 2)
    return ArrivalBatch(
        log_id, "orders", 0, column, bytes(len(dues)), min(dues), max(dues), offsets, sizes, data
    )


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder with a partition, arrivals and three buckets."""
    (tmp_path / "orders-0").mkdir()
    log = Log.open(RealDisk(), str(tmp_path / "orders-0"), log_id=make_log_id(1, 0), clock=SystemClock())
    log.append_payloads([b"plain"])
    log.close()
    (tmp_path / "delay" / "arrivals").mkdir(parents=True)
    folder = str(tmp_path / "delay")
    arrivals = Log.open(
        RealDisk(), f"{folder}/arrivals", log_id=LOG_ID, clock=SystemClock(), options=arrival_options(1, 1.0)
    )
    arrivals.append_payloads([b"arrived"])
    arrivals.close()
    buckets = BucketStore.open(RealDisk(), folder, new_id=lambda: 33, randomness=bytes)
    buckets.spill([batch(NOW + 5, NOW + 2, NOW + 9 * HOUR, NOW + 30 * DAY)], 900, 4, NOW, lambda *_: True)
    buckets.close(NOW)
    return tmp_path


def damage(data: Path, position: int) -> Path:
    file = sorted((data / "delay").glob("*.bucket"))[0]
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)
    return file


def test_a_dump_shows_every_message_by_buckets(offline: Cli, data: Path) -> None:
    ran = offline("log", "dump", str(data / "delay"), "--json")
    rows = [row for row in ran.objects if row["kind"] == "delayed"]
    assert ran.code == 0
    assert [row["payload"] for row in rows] == ["message 1", "message 0", "message 2", "message 3"]
    assert rows[0]["due"] == NOW + 2 and rows[0]["number"] == 1
    assert (rows[0]["topic"], rows[0]["partition"], rows[0]["absolute"]) == ("orders", 2, False)
    later = offline("log", "dump", str(data / "delay"), "--from", str(NOW + HOUR), "--json").objects
    assert [row["payload"] for row in later if row["kind"] == "delayed"] == ["message 2", "message 3"]
    (file, *_) = sorted((data / "delay").glob("*.bucket"))
    assert len(offline("log", "dump", str(file), "--json").objects) == 2
    kinds = [
        row["kind"] for row in offline("log", "dump", str(data / "delay"), "--control", "--json").objects
    ]
    assert kinds.count("bucket") == 3 and kinds.count("chunk") == 3 and kinds.count("checkpoint") == 1


def test_a_dump_of_a_data_folder_names_arrivals_and_buckets(offline: Cli, data: Path) -> None:
    lines = offline("log", "dump", str(data)).lines
    assert [line for line in lines if line.endswith(":")] == ["arrivals:", "orders-0:", "delay:"]
    assert lines[-1].endswith("message 3") and "orders-2" in lines[-1]
    control = offline("log", "dump", str(data / "delay"), "--control").out.decode()
    assert "checkpoint of store 33: 3 buckets" in control and "bucket up to" in control


def test_what_is_whole_has_no_damage(offline: Cli, data: Path) -> None:
    for path in (data, data / "delay"):
        told = offline("log", "verify", str(path), "--records", "--json")
        assert (told.code, told.json["damaged"], told.json["findings"]) == (0, False, [])
    assert offline("log", "repair", str(data)).err == "nothing to repair\n"


@pytest.mark.parametrize("position", [40, 80, -3], ids=["chunk", "columns", "record"])
def test_damage_is_found_named_and_mended(offline: Cli, data: Path, position: int) -> None:
    file = damage(data, position)
    told = offline("log", "verify", str(data), "--json")
    assert told.code == 4 and told.json["findings"][0]["file"] == str(file)
    dumped = offline("log", "dump", str(data / "delay"))
    assert dumped.code == 4 and "DAMAGED" in dumped.out.decode() and dumped.err == ""
    assert "would be lost" in offline("log", "repair", str(data), "--dry-run").err
    mended = offline("log", "repair", str(data), "--json")
    lost = 1 if position == -3 else 2
    assert [(row["kept"], row["lost"]) for row in mended.json] == [(2 - lost, lost)]
    assert offline("log", "verify", str(data), "--records").code == 0
    assert (
        "removed 1 kept original" in offline("log", "repair", str(data / "delay"), "--remove-originals").err
    )


def test_a_lost_checkpoint_is_damage_and_made_anew(offline: Cli, data: Path) -> None:
    (data / "delay" / "checkpoint").unlink()
    assert offline("log", "verify", str(data / "delay")).code == 4
    assert "DAMAGED" in offline("log", "dump", str(data / "delay")).out.decode()
    assert "delayed: 1 file" in offline("log", "repair", str(data)).err
    assert offline("log", "verify", str(data)).code == 0


def test_a_running_server_is_not_disturbed(offline: Cli, data: Path) -> None:
    lock = RealDisk().lock(str(data / "lock"))
    try:
        for path in (data / "delay", data / "delay" / "arrivals", next((data / "delay").glob("*.bucket"))):
            ran = offline("log", "verify", str(path))
            assert ran.code == 1 and "a server is running" in ran.err
    finally:
        lock.release()


def test_a_bucket_that_cannot_be_read_is_named() -> None:
    row = {"kind": "damaged", "due": 0, "file": "f", "position": 1, "next": 9, "reason": "rotten"}
    assert format_delayed(row).endswith("DAMAGED from 1 to 9 of f: rotten")


def test_the_bar_of_a_verification_moves_by_each_file_once(data: Path) -> None:
    steps: list[int] = []
    assert len(list(verify_path(RealDisk(), data, False, FileProgress(steps.append)))) == 3
    files = (*segments_of(data), *bucket_files_of(data))
    assert sum(steps) == sum(file.stat().st_size for file in files) and min(steps) > 0
    moved, far = FileProgress(steps.append), len(steps)
    for path, done in (("a", 10), ("a", 30), ("b", 5)):
        moved(path, done, 100)
    assert steps[far:] == [10, 20, 5]
