"""`tfmq log`: a partition on the disk is dumped, verified, mended."""

from pathlib import Path

import pytest

from journal import Log, RealDisk, SystemClock
from journal.record.format import make_log_id
from tests.cli.conftest import Cli

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


def test_a_partition_to_which_nothing_came_yet_is_empty_and_not_damaged(
    offline: Cli, partition: Path
) -> None:
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
    told = offline("log", "verify", str(partition.parent), "--json").json
    assert (told["damaged"], told["records"], told["findings"]) == (False, 9, [])


def test_damage_is_found_named_and_mended(offline: Cli, partition: Path) -> None:
    damage(partition)
    told = offline("log", "verify", str(partition), "--json")
    assert told.code == 4
    assert told.json["damaged"]
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


@pytest.mark.parametrize("alone", [True, False])
def test_a_partition_without_a_record_file_is_damage(offline: Cli, partition: Path, alone: bool) -> None:
    (segment,) = partition.glob("*.zxQueue")
    segment.unlink()
    path = str(partition if alone else partition.parent)
    if not alone:
        (partition.parent / "meta").mkdir()
    told = offline("log", "verify", path)
    assert told.code == 4 and "no segment file" in " ".join(told.out.decode().split())
    assert "missing" in offline("log", "repair", path).out.decode()
    assert not [
        row for row in offline("log", "verify", path, "--json").json["findings"] if "orders-0" in row["file"]
    ]


def test_with_notes_alone_there_is_no_damage_and_the_sentence_counts_them(
    offline: Cli, partition: Path
) -> None:
    for state in partition.glob("*.state"):
        state.write_bytes(state.read_bytes()[:-1] + b"#")
    mark = partition / "log.mark"
    mark.write_bytes(mark.read_bytes()[:4096])
    told = offline("log", "verify", str(partition))
    assert told.code == 0 and told.out.count(b"note ") == 2
    assert "no damage, 2 notes: what the next start" in told.err
    assert "without losing a message" in told.err


def test_a_tail_of_which_nothing_says_whether_it_was_acknowledged_is_not_said_to_lose_nothing(
    offline: Cli, partition: Path
) -> None:
    (segment,) = partition.glob("*.zxQueue")
    segment.write_bytes(segment.read_bytes() + b"torn")
    told = offline("log", "verify", str(partition))
    assert told.code == 0 and "without losing" not in told.err
    assert "1 place where acknowledged messages may be lost" in told.err
    (row,) = offline("log", "verify", str(partition), "--json").json["findings"]
    assert (row["weight"], row["may_lose"]) == ("note", True)


def test_damage_at_the_end_of_a_log_that_was_closed_is_damage(offline: Cli, partition: Path) -> None:
    (segment,) = partition.glob("*.zxQueue")
    data = segment.read_bytes()
    segment.write_bytes(data[:-10] + bytes([data[-10] ^ 1]) + data[-9:])
    told = offline("log", "verify", str(partition))
    assert told.code == 4 and "was durable" in " ".join(told.out.decode().split())


def test_what_cannot_be_looked_at_is_a_sentence(offline: Cli, tmp_path: Path, partition: Path) -> None:
    for command in ("dump", "verify", "repair"):
        ran = offline("log", command, str(tmp_path / "none"))
        assert ran.code == 1
        assert "is not there" in ran.err
    (segment,) = partition.glob("*.zxQueue")
    assert offline("log", "repair", str(segment)).code == 2


def test_control_records_have_a_line_of_their_own(offline: Cli, partition: Path) -> None:
    lines = offline("log", "dump", str(partition), "--control").out.decode().splitlines()
    assert len([line for line in lines if "control: " in line and "appended" in line]) == 3


def test_what_is_in_the_way_is_named_by_all_who_meet_it(offline: Cli, partition: Path) -> None:
    data = partition.parent
    (data / "meta").mkdir()
    mark = partition / "log.mark"
    mark.unlink()
    mark.mkdir()
    told = offline("log", "verify", str(data))
    assert told.code == 4 and "a folder where a file belongs" in told.out.decode() + told.err
    assert str(mark) in told.out.decode().replace("\n", "")
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
