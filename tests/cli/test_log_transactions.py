"""`tfmq log` of the transaction journal: dumped, verified, mended, alone and in its data folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from journal import Log, RealDisk, SystemClock
from journal.record.format import make_id, make_log_id, make_record
from journal.wal.entry import AppendMsg, JournalEntry, Operation
from journal.wal.store import JournalOptions, JournalStore
from tests.cli.conftest import Cli
from tfmq.cli.log import entry_row, format_entry
from tfmq.transaction import journal_records
from tfmq.transaction.journal_records import Origin

ORIGIN = Origin("order-42", False, 70, 1, 1_700_000_000_000, "billing")


class NoState:
    """Nothing is learned."""

    def load(self, data: bytes) -> None: ...
    def apply(self, entry: JournalEntry) -> None: ...
    def held(self) -> list[int]:
        return []

    def dump(self) -> Callable[[], bytes]:
        return lambda: b""


def piece(epoch: int, sequence: int, moved_from: int = 0) -> AppendMsg:
    from zlib import crc32

    data = make_record(b"message %d" % sequence, make_id(70, sequence))
    return AppendMsg(epoch, make_log_id(16, 2), 70, sequence, 1, ((len(data), 1, crc32(data)),), data, moved_from)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder with a partition and a journal of two files."""
    (tmp_path / "orders-0").mkdir()
    log = Log.open(RealDisk(), str(tmp_path / "orders-0"), log_id=make_log_id(1, 0), clock=SystemClock())
    log.append_payloads([b"plain"])
    log.close()
    store = JournalStore.open(
        RealDisk(), str(tmp_path / "transactions"), new_id=lambda: 33, clock=SystemClock(), state=NoState(),
        options=JournalOptions(file_bytes=500),
    )  # fmt: skip
    prepare = journal_records.PrepareRecord(12, 1_700_000_001_000, ORIGIN, ((make_log_id(16, 2), "orders"),), (), 2, 0)
    store.append([piece(12, 1), piece(12, 2)])
    store.append([Operation(*journal_records.pack(prepare))])
    store.append([piece(12, 3, moved_from=44)])
    store.append([Operation(*journal_records.pack(journal_records.CommitRecord(12, 1_700_000_002_000)))])
    store.append([Operation(99, 13, b"?")])
    store.close()
    return tmp_path


@pytest.fixture
def journal(data: Path) -> Path:
    return data / "transactions"


def damage(journal: Path) -> None:
    """Flip a bit of the second piece."""
    first = min(journal.glob("*.journal"))
    found = bytearray(first.read_bytes())
    found[found.index(b"message 2")] ^= 1
    first.write_bytes(found)


def test_a_dump_shows_every_entry_and_what_it_says(offline: Cli, journal: Path) -> None:
    ran = offline("log", "dump", str(journal), "--json")
    rows = ran.objects
    assert ran.code == 0
    assert [row["kind"] for row in rows] == ["messages"] * 2 + ["operation", "messages", "operation", "operation"]
    assert {"epoch": 12, "incarnation": 16, "partition": 2, "count": 1, "sequence": 1}.items() <= rows[0].items()
    prepared = rows[2]
    assert (prepared["operation"], prepared["xid"], prepared["group"], prepared["messages"]) == (
        "prepare", "order-42", "billing", 2,
    )  # fmt: skip
    assert rows[3]["moved_from"] == 44
    assert (rows[4]["operation"], rows[4]["time_ms"]) == ("commit", 1_700_000_002_000)
    assert (rows[5]["operation"], rows[5]["payload"]) == ("operation 99", "3f")
    places = [row["place"] for row in rows]
    assert places == sorted(places)
    assert offline("log", "dump", str(journal), "--from", str(places[3]), "--json").objects == rows[3:]
    assert offline("log", "dump", str(journal), "-n", "2", "--json").objects == rows[:2]


def test_a_dump_for_a_person_names_transactions_and_decisions(offline: Cli, journal: Path) -> None:
    lines = offline("log", "dump", str(journal)).lines
    assert "transaction 12: 1 message," in lines[0]
    assert "PREPARE of transaction 12 'order-42', 2023-11-14" in lines[2]
    assert "moved from 44" in lines[3]
    assert "COMMIT of transaction 12" in lines[4]


def test_a_dump_with_control_shows_files_and_snapshots(offline: Cli, journal: Path) -> None:
    rows = offline("log", "dump", str(journal), "--control", "--json").objects
    kinds = [row["kind"] for row in rows]
    assert kinds[0] == "checkpoint" and rows[0]["journal"] == 33
    assert kinds.count("snapshot") == 2 and kinds.count("file") == 2
    assert "snapshot 2, which needs files [2]" in offline("log", "dump", str(journal), "--control").out.decode()


def test_one_file_can_be_dumped_alone(offline: Cli, journal: Path) -> None:
    files = sorted(journal.glob("*.journal"))
    rows = [offline("log", "dump", str(file), "--json").objects for file in files]
    assert rows[0] + rows[1] == offline("log", "dump", str(journal), "--json").objects
    assert all(rows)


def test_a_data_folder_has_both(offline: Cli, data: Path) -> None:
    lines = offline("log", "dump", str(data)).lines
    assert lines[0] == "orders-0:" and "transactions:" in lines
    reported = offline("log", "verify", str(data), "--json", "--records")
    assert reported.code == 0
    assert (reported.json["damaged"], reported.json["records"], reported.json["segments"]) == (False, 4, 3)


def test_damage_is_found_named_and_repaired(offline: Cli, journal: Path) -> None:
    damage(journal)
    reported = offline("log", "verify", str(journal), "--json")
    assert reported.code == 4
    (finding,) = reported.json["findings"]
    assert finding["weight"] == "damage" and "messages of transaction 12" in finding["what"]
    assert offline("log", "dump", str(journal)).code == 4
    assert "DAMAGED up to" in offline("log", "dump", str(journal)).out.decode()
    before = {path.name: path.read_bytes() for path in journal.iterdir()}
    rehearsal = offline("log", "repair", str(journal), "--dry-run")
    assert rehearsal.code == 0 and "would be lost" in rehearsal.err
    assert {path.name: path.read_bytes() for path in journal.iterdir()} == before
    mended = offline("log", "repair", str(journal.parent), "--json")
    assert [row["lost_bytes"] > 0 for row in mended.json] == [True]
    assert offline("log", "verify", str(journal)).code == 0
    assert "filler for" in offline("log", "dump", str(journal)).out.decode()
    assert "removed 1 kept original" in offline("log", "repair", str(journal), "--remove-originals").err
    assert offline("log", "repair", str(journal)).err == "nothing to repair\n"


def test_a_repair_that_leaves_damage_has_exit_code_4(
    offline: Cli, data: Path, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(journal)
    for module in ("tfmq.cli.log", "tfmq.broker.data_repair"):
        monkeypatch.setattr(f"{module}.repair_journal", lambda *_, **__: [])
    for folder in (data, journal):
        for options in ((), ("--dry-run",)):
            ran = offline("log", "repair", str(folder), *options)
            assert ran.code == 4 and "a start is refused" in ran.err and "nothing to repair" not in ran.err


def test_a_checkpoint_that_is_gone_is_reported_and_made_anew(offline: Cli, journal: Path) -> None:
    (journal / "checkpoint").unlink()
    assert offline("log", "verify", str(journal)).code == 4
    assert "checkpoint" in offline("log", "dump", str(journal), "--control").out.decode()
    assert "created again from snapshot" in offline("log", "repair", str(journal), "--json").out.decode()
    assert offline("log", "verify", str(journal)).code == 0


def test_a_running_server_keeps_its_journal_to_itself(offline: Cli, data: Path, journal: Path) -> None:
    (data / "lock").touch()
    held = RealDisk().lock(str(data / "lock"))
    for command in ("verify", "repair"):
        ran = offline("log", command, str(journal))
        assert ran.code == 1 and "a server is running" in ran.err
    held.release()


def test_every_operation_has_a_line() -> None:
    said = [
        journal_records.RollbackRecord(1, 5), journal_records.LocalCommitRecord(1, 5, ORIGIN, (), (), 3),
        journal_records.LocalRollbackRecord(1, 5, ORIGIN),
        journal_records.HeuristicCommitRecord(1, 5), journal_records.HeuristicRollbackRecord(1, 5),
        journal_records.ForgetRecord(1, 5),
        journal_records.GroupAbortRecord("g", 4, "run", (1, 2), 5), journal_records.GroupForgetRecord("g", 5),
    ]  # fmt: skip
    for place, operation in enumerate(said, 100):
        content = Operation(*journal_records.pack(operation))
        row = entry_row(JournalEntry(2, place, 50, content, 0))
        assert "reason" not in row
        line = format_entry(row)
        assert line.split()[0] == str(place) and row["operation"].upper() in line
    assert "of commit group 'g', sequence 4" in format_entry(
        entry_row(JournalEntry(2, 1, 50, Operation(*journal_records.pack(said[6])), 0))
    )
