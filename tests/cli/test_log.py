"""`tfmq log`: a partition on the disk is dumped, verified, mended."""

from __future__ import annotations

import json
from array import array
from functools import partial
from pathlib import Path

import pytest

from journal import Log, RealDisk, SystemClock
from journal.record.batch import Batch, split_blocks
from journal.record.format import make_id, make_log_id, make_record
from tests.cli.conftest import Cli
from tfmq.cli.log import FileProgress, format_delayed, segments_of, verify_path
from tfmq.cli.output import time_text
from tfmq.delay.arrivals import header
from tfmq.delay.arrivals.header import TurnColumns
from tfmq.delay.arrivals.log import LOG_ID, ArrivalBatch, arrival_batches, arrival_options, header_batch
from tfmq.delay.buckets.store import BucketStore
from tfmq.delay.due_time import due_times_of
from tfmq.replication.entries import Position
from tfmq.replication.local_state import LocalState, LocalStateFile

PAYLOADS = [b"message %03d" % n for n in range(9)]


@pytest.fixture
def partition(tmp_path: Path) -> Path:
    folder = tmp_path / "orders-0"
    folder.mkdir()
    log = Log.open(RealDisk(), str(folder), log_id=make_log_id(1, 0), clock=SystemClock())
    for start in range(0, 9, 3):
        log.append_payloads(PAYLOADS[start : start + 3])
    log.force()
    log.close()
    return folder


def damage(partition: Path) -> None:
    """Flip a bit of the second block's payload."""
    (segment,) = partition.glob("*.zxQueue")
    data = bytearray(segment.read_bytes())
    data[data.index(b"message 004")] ^= 1
    segment.write_bytes(data)


def test_a_dump_shows_every_record(offline: Cli, partition: Path) -> None:
    ran = offline("log", "dump", str(partition), "--json")
    assert ran.code == 0
    assert [row["payload"].encode() for row in ran.objects] == PAYLOADS
    assert [row["ordinal"] for row in ran.objects] == list(range(9))
    assert len(offline("log", "dump", str(partition), "-n", "2").lines) == 2
    second = ran.objects[1]["offset"]
    assert offline("log", "dump", str(partition), "--from", str(second), "--json").objects == ran.objects[1:]
    kinds = [row["kind"] for row in offline("log", "dump", str(partition), "--control", "--json").objects]
    assert kinds.count("control") == 3


def test_a_dump_of_a_data_folder_names_each_log(offline: Cli, partition: Path) -> None:
    assert offline("log", "dump", str(partition.parent)).lines[0] == "orders-0:"
    assert offline("log", "dump", str(partition)).lines[0].endswith("message 000")


def test_a_partition_to_which_nothing_came_yet_is_empty_and_not_damaged(offline: Cli, partition: Path) -> None:
    empty = partition.parent / "checks-0"
    empty.mkdir()
    log = Log.open(RealDisk(), str(empty), log_id=make_log_id(2, 0), clock=SystemClock())
    log.force()
    log.close()
    assert offline("log", "dump", str(empty)) == (0, b"", "")
    whole = offline("log", "dump", str(partition.parent))
    assert whole.code == offline("log", "verify", str(partition.parent)).code == 0
    assert "checks-0" not in whole.out.decode()


def test_what_is_whole_has_no_damage(offline: Cli, partition: Path) -> None:
    ran = offline("log", "verify", str(partition), "--records")
    assert ran.code == 0
    assert "no damage" in ran.err
    reported = offline("log", "verify", str(partition.parent), "--json").json
    assert (reported["damaged"], reported["records"], reported["findings"]) == (False, 9, [])


def test_damage_is_found_named_and_repaired(offline: Cli, partition: Path) -> None:
    damage(partition)
    reported = offline("log", "verify", str(partition), "--json")
    assert reported.code == 4
    assert reported.json["damaged"]
    dumped = offline("log", "dump", str(partition), "--json")
    assert dumped.code == 4
    assert [row["kind"] for row in dumped.objects].count("damaged") == 1
    assert "DAMAGED up to" in offline("log", "dump", str(partition)).out.decode()
    before = offline("log", "repair", str(partition), "--dry-run")
    assert before.code == 0
    assert "would be kept" in before.err
    assert offline("log", "verify", str(partition)).code == 4
    mended = offline("log", "repair", str(partition), "--json")
    assert [(row["kept"], row["lost"]) for row in mended.json] == [(2, 1)]
    assert offline("log", "verify", str(partition), "--records").code == 0
    after = offline("log", "dump", str(partition), "--json")
    assert after.code == 0
    assert [row["ordinal"] for row in after.objects] == list(range(9))
    assert [row.get("payload") for row in after.objects if row["kind"] == "record"] == [
        payload.decode() for payload in PAYLOADS if payload != b"message 004"
    ]
    assert "removed 1 kept original" in offline("log", "repair", str(partition), "--remove-originals").err
    assert offline("log", "repair", str(partition)).err == "nothing to repair\n"


def test_a_repair_is_not_taken_for_a_state_of_the_replicas(offline: Cli, partition: Path) -> None:
    """Otherwise a standby would follow from a folder that is another one than the primary's."""
    data = partition.parent
    (data / "lock").touch()
    known = LocalStateFile(RealDisk(), str(data))
    state = LocalState("1234", "standby", Position(3, 7), True, 99)
    known.write(state)
    damage(partition)
    for arguments in (["verify", str(partition)], ["repair", str(data), "--dry-run"]):
        offline("log", *arguments)
        assert known.read(bytes) == state
    assert offline("log", "repair", str(partition)).code == 0
    assert known.read(bytes) == state._replace(is_clean=False)


@pytest.mark.parametrize("alone", [True, False])
def test_a_partition_without_a_record_file_is_damage(offline: Cli, partition: Path, alone: bool) -> None:
    (segment,) = partition.glob("*.zxQueue")
    segment.unlink()
    path = str(partition if alone else partition.parent)
    if not alone:
        (partition.parent / "meta").mkdir()
    reported = offline("log", "verify", path)
    assert reported.code == 4 and "no segment file" in " ".join(reported.out.decode().split())
    assert "missing" in offline("log", "repair", path).out.decode()
    assert not [row for row in offline("log", "verify", path, "--json").json["findings"] if "orders-0" in row["file"]]


def test_with_notes_alone_there_is_no_damage_and_the_sentence_counts_them(offline: Cli, partition: Path) -> None:
    for state in partition.glob("*.state"):
        state.write_bytes(state.read_bytes()[:-1] + b"#")
    mark = partition / "log.mark"
    mark.write_bytes(mark.read_bytes()[:4096])
    reported = offline("log", "verify", str(partition))
    assert reported.code == 0 and reported.out.count(b"note ") == 2
    assert "no damage, 2 notes: what the next start" in reported.err
    assert "without losing a message" in reported.err


def test_a_tail_of_which_nothing_says_whether_it_was_acknowledged_is_not_said_to_lose_nothing(
    offline: Cli, partition: Path
) -> None:
    (segment,) = partition.glob("*.zxQueue")
    segment.write_bytes(segment.read_bytes() + b"torn")
    reported = offline("log", "verify", str(partition))
    assert reported.code == 0 and "without losing" not in reported.err
    assert "1 place where acknowledged messages may be lost" in reported.err
    (row,) = offline("log", "verify", str(partition), "--json").json["findings"]
    assert (row["weight"], row["may_lose"]) == ("note", True)


def test_damage_at_the_end_of_a_log_that_was_closed_is_damage(offline: Cli, partition: Path) -> None:
    (segment,) = partition.glob("*.zxQueue")
    data = segment.read_bytes()
    segment.write_bytes(data[:-10] + bytes([data[-10] ^ 1]) + data[-9:])
    reported = offline("log", "verify", str(partition))
    assert reported.code == 4 and "was durable" in " ".join(reported.out.decode().split())


def test_what_cannot_be_looked_at_is_a_sentence(offline: Cli, tmp_path: Path, partition: Path) -> None:
    for command in ("dump", "verify", "repair"):
        ran = offline("log", command, str(tmp_path / "none"))
        assert ran.code == 1
        assert "is not there" in ran.err
    (segment,) = partition.glob("*.zxQueue")
    assert offline("log", "repair", str(segment)).code == 2


def test_block_trailers_have_a_line_of_their_own(offline: Cli, partition: Path) -> None:
    lines = offline("log", "dump", str(partition), "--control").out.decode().splitlines()
    assert len([line for line in lines if "control: " in line and "appended" in line]) == 3


def test_what_is_in_the_way_is_named_by_all_who_meet_it(offline: Cli, partition: Path) -> None:
    data = partition.parent
    (data / "meta").mkdir()
    mark = partition / "log.mark"
    mark.unlink()
    mark.mkdir()
    reported = offline("log", "verify", str(data))
    assert reported.code == 4 and "a folder where a file belongs" in reported.out.decode() + reported.err
    assert str(mark) in reported.out.decode().replace("\n", "")
    alone = offline("log", "repair", str(partition))
    assert alone.code == 1 and alone.err.startswith(f"tfmq: {mark} is a folder, and a file belongs there.")
    assert offline("log", "repair", str(data), "--dry-run").code == 0 and mark.is_dir()
    mended = offline("log", "repair", str(data), "--json")
    assert mended.code == 0 and mended.json[0]["file"] == str(mark)
    assert mark.is_file() and (partition / "log.mark.damaged").is_dir()
    assert offline("log", "verify", str(data)).code == 0
    assert offline("log", "repair", str(data), "--remove-originals").code == 0
    assert (partition / "log.mark.damaged").is_dir(), "a folder is not ours to remove"


def test_a_link_to_nothing_is_named_and_left_alone(offline: Cli, partition: Path) -> None:
    data = partition.parent
    (data / "meta").mkdir()
    mark = partition / "log.mark"
    mark.unlink()
    mark.symlink_to(data / "elsewhere")
    assert offline("log", "verify", str(data)).code == 4
    for path in (data, partition):
        ran = offline("log", "repair", str(path))
        assert ran.code == 1 and f"{mark} is a link to {data / 'elsewhere'}, which is not there" in ran.err
    assert mark.is_symlink()


# `tfmq log dump` says what a note says: for which messages it is, when they are due, which are cancelled.

DUE = 1_700_000_060_000


@pytest.fixture
def arrivals(tmp_path: Path) -> Path:
    """A batch of two, one of them given another turn, the other cancelled, and a record that is no note."""
    folder = tmp_path / "delay" / "arrivals"
    folder.mkdir(parents=True)
    log = Log.open(RealDisk(), str(folder), log_id=LOG_ID, clock=SystemClock(), options=arrival_options(1, 1.0))
    records = [make_record(b"message %d" % n, make_id(70, n)) for n in range(2)]
    body = b"".join(records)
    made = header.arrival_header(
        0x1000_0001, "orders", due_times_of(array("Q", (DUE, DUE + 1500)), b"\x00\x01"), len(body)
    )
    log.append(arrival_batches(made, body, split_blocks(body), 70, 0, 2))
    moved = due_times_of(array("Q", (DUE + 9000,)), b"\x00")
    old = TurnColumns(array("Q", (DUE,)), array("Q", (1,)))
    again = header.reschedule_header(0x1000_0001, "orders", moved, len(records[0]), old)
    log.append([header_batch(again), Batch(records[0], (), 70, 0, 1)])
    log.append([header_batch(header.cancel_header(TurnColumns(array("Q", (DUE + 1500,)), array("Q", (2,)))))])
    log.append([Batch(make_record(b"no note", header.HEADER_ID), (), 2, 0, 1)])
    log.close()
    return folder


def test_a_person_reads_what_a_note_says(offline: Cli, arrivals: Path) -> None:
    at = partial(time_text, exact=True)
    lines = offline("log", "dump", str(arrivals)).lines
    assert [line.split("arrival: ")[1] for line in lines if "arrival: " in line] == [
        f"arrival of 2 messages for orders, due {at(DUE)} to {at(DUE + 1500)}",
        f"reschedule of 1 message for orders, due {at(DUE + 9000)} instead of 1 message, the first with number 1",
        "cancel of 1 message, the first with number 2",
    ]
    assert [line.split()[-1] for line in lines if "message 0" in line or "no note" in line] == ["0", "0", "note"]


def test_a_program_reads_it_too(offline: Cli, arrivals: Path) -> None:
    rows = [json.loads(line) for line in offline("log", "dump", str(arrivals), "--json").lines]
    assert [(row["kind"], row["ordinal"]) for row in rows] == [
        ("note", 0), ("record", 1), ("record", 2), ("note", 3), ("record", 4), ("note", 5), ("record", 6),
    ]  # fmt: skip
    first, again, cancel = (row for row in rows if row["kind"] == "note")
    assert {key: first[key] for key in ("what", "topic", "count", "first_due", "last_due", "absolute")} == {
        "what": "arrival", "topic": "orders", "count": 2, "first_due": DUE, "last_due": DUE + 1500, "absolute": 1,
    }  # fmt: skip
    assert (again["what"], again["cancelled"]) == ("reschedule", [[DUE, 1]])
    assert (cancel["what"], cancel["cancelled"]) == ("cancel", [[DUE + 1500, 2]])


# `tfmq log` of the delayed messages: dumped, verified, mended, alone and in their data folder.

NOW = 1_700_000_000_000
HOUR, DAY = 3_600_000, 86_400_000


def batch(*dues: int) -> ArrivalBatch:
    records = [make_record(b"message %d" % n, make_id(70, n)) for n in range(len(dues))]
    sizes = array("I", map(len, records))
    column = array("Q", dues)
    offsets = array("Q", range(len(dues)))
    data = [b"".join(records)]
    log_id = make_log_id(16, 2)
    return ArrivalBatch(log_id, "orders", 0, column, bytes(len(dues)), min(dues), max(dues), offsets, sizes, data)


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


def damage_of_log_delay(data: Path, position: int) -> Path:
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
    kinds = [row["kind"] for row in offline("log", "dump", str(data / "delay"), "--control", "--json").objects]
    assert kinds.count("bucket") == 3 and kinds.count("chunk") == 3 and kinds.count("checkpoint") == 1


def test_a_dump_of_a_data_folder_names_arrivals_and_buckets(offline: Cli, data: Path) -> None:
    lines = offline("log", "dump", str(data)).lines
    assert [line for line in lines if line.endswith(":")] == ["arrivals:", "orders-0:", "delay:"]
    assert lines[-1].endswith("message 3") and "orders-2" in lines[-1]
    control = offline("log", "dump", str(data / "delay"), "--control").out.decode()
    assert "checkpoint of store 33: 3 buckets" in control and "bucket up to" in control


def test_what_is_whole_has_no_damage_of_log_delay(offline: Cli, data: Path) -> None:
    for path in (data, data / "delay"):
        reported = offline("log", "verify", str(path), "--records", "--json")
        assert (reported.code, reported.json["damaged"], reported.json["findings"]) == (0, False, [])
    assert offline("log", "repair", str(data)).err == "nothing to repair\n"


@pytest.mark.parametrize("position", [40, 80, -3], ids=["chunk", "columns", "record"])
def test_damage_is_found_named_and_repaired_of_log_delay(offline: Cli, data: Path, position: int) -> None:
    file = damage_of_log_delay(data, position)
    reported = offline("log", "verify", str(data), "--json")
    assert reported.code == 4 and reported.json["findings"][0]["file"] == str(file)
    dumped = offline("log", "dump", str(data / "delay"))
    assert dumped.code == 4 and "DAMAGED" in dumped.out.decode() and dumped.err == ""
    assert "would be lost" in offline("log", "repair", str(data), "--dry-run").err
    mended = offline("log", "repair", str(data), "--json")
    lost = 1 if position == -3 else 2
    assert [(row["kept"], row["lost"]) for row in mended.json] == [(2 - lost, lost)]
    assert offline("log", "verify", str(data), "--records").code == 0
    assert "removed 1 kept original" in offline("log", "repair", str(data / "delay"), "--remove-originals").err


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
    files = (*segments_of(data), *(data / "delay").glob("*.bucket"))
    assert sum(steps) == sum(file.stat().st_size for file in files) and min(steps) > 0
    moved, far = FileProgress(steps.append), len(steps)
    for path, done in (("a", 10), ("a", 30), ("b", 5)):
        moved(path, done, 100)
    assert steps[far:] == [10, 20, 5]
