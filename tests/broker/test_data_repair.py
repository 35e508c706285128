"""The catalog, the version file, misplaced paths: a start refuses by name, a repair rebuilds what can be known."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable

import pytest

from journal.errors import Corrupt
from journal.filenames import segment_name
from journal.fsck.findings import RepairedFile
from journal.fsck.log_repair import repair
from journal.fsck.log_verify import NO_SEGMENT
from journal.log.log import Log
from journal.record.format import HEADER_SIZE
from journal.testing import Moment, SimulatedDisk
from tests.broker.helpers import DATA, Broker, after
from tests.scale import scaled, seeded
from tfmq.broker.catalog_state import LOST_IDS_MAX
from tfmq.broker.data_repair import DataRepairResult, PendingTransactions, repair_data, verify_data
from tfmq.data_dir import encode_version
from tfmq.protocol import commands
from tfmq.server.main import startup_sentence

META = f"{DATA}/meta"
VERSION = f"{META}/version"

Change = Callable[[bytes], bytes | None]
CUTS: dict[str, Change] = {
    "half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "deleted": lambda data: None,
    "rotten": lambda data: data[:200] + b"\xff" * 50 + data[250:],
}


def lived() -> Broker:
    broker = Broker()
    broker.create("orders", 2, flush__messages=7)
    broker.produce(broker.lease(), 0, [b"hello"])
    assert broker.commit(broker.join(), 77).code == "ok"
    return broker


def change(disk: SimulatedDisk, suffix: str, cut: Change) -> None:
    (path,) = [f"{META}/{name}" for name in disk.list(META) if name.endswith(suffix)]
    data = cut(disk.read_file(path))
    if data is None:
        disk.unlink(path)
    else:
        disk.write_file(path, data)


def contents(disk: SimulatedDisk) -> dict[str, bytes]:
    return {path: bytes(content.data) for path, content in disk.all_files() if not disk.is_folder(path)}


def mended(disk: SimulatedDisk) -> list[RepairedFile]:
    """What a repair did; the next one finds nothing, and a check no damage."""
    assert any(report.damaged for report in verify_data(disk, DATA))
    rehearsed = repair_data(disk, DATA, dry_run=True)
    done = repair_data(disk, DATA)
    assert [each.file for each in rehearsed.folder] == [each.file for each in done.folder]
    assert not any(report.damaged for report in verify_data(disk, DATA))
    assert repair_data(disk, DATA).folder == [] and not done.failed
    return done.folder


@pytest.mark.parametrize("how", CUTS)
def test_a_catalog_that_was_closed_is_rebuilt_from_its_snapshot_with_everything(how: str) -> None:
    broker = lived()
    broker.stop()
    before = broker.engine.broker.catalog.state.dump()
    change(broker.disk, ".catalog", CUTS[how])
    for _ in range(2):
        with pytest.raises(Corrupt, match="meta"):
            Broker(broker.disk, broker.clock)
    (done,) = mended(broker.disk)
    assert "which has everything" in done.note
    again = Broker(broker.disk, broker.clock)
    assert again.engine.broker.catalog.state.dump() == before
    again = again.restart().restart()
    assert (again.payloads(), again.saved()) == ([b"hello"], {("orders", 0): 77})


def test_a_flipped_bit_anywhere_in_a_catalog_that_was_closed_is_refused_and_nothing_is_changed() -> None:
    broker = lived()
    broker.stop()
    before = broker.engine.broker.catalog.state.dump()
    (path,) = [f"{META}/{name}" for name in broker.disk.list(META) if name.endswith(".catalog")]
    whole = broker.disk.read_file(path)
    for position in sorted({0, 80, 300, *range(7, len(whole), len(whole) // scaled(300)), len(whole) - 1}):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << 5
        broker.disk.write_file(path, bytes(flipped))
        files = contents(broker.disk)
        with pytest.raises(Corrupt, match="catalog") as caught:
            Broker(broker.disk, broker.clock)
        assert caught.value.first <= position < caught.value.next and caught.value.path == path
        assert "tfmq log repair" in (startup_sentence(caught.value, DATA) or "")
        assert contents(broker.disk) == files
    (done,) = mended(broker.disk)
    assert "which has everything" in done.note
    assert Broker(broker.disk, broker.clock).engine.broker.catalog.state.dump() == before


@pytest.mark.parametrize("how", ["half", "empty", "deleted"])
def test_a_catalog_that_was_not_closed_is_rebuilt_from_the_folders_and_no_id_comes_again(how: str) -> None:
    broker = lived()
    broker.create("bills")
    used = broker.lease()
    broker.produce(used, 0, [b"bill"], topic="bills")
    broker.advance(5)
    incarnations = [broker.incarnation(name) for name in ("orders", "bills")]
    disk = broker.disk.crash(keep="everything")
    change(disk, ".catalog", CUTS[how])
    with pytest.raises(Corrupt, match="meta"):
        Broker(disk, broker.clock)
    done = mended(disk)
    assert "not known" in done[0].note and "topic bills with 1 partitions taken from its folders" in done[0].note
    again = Broker(disk, broker.clock)
    assert [again.incarnation(name) for name in ("orders", "bills")] == incarnations
    assert again.payloads() == [b"hello"] and again.payloads("bills") == [b"bill"]
    assert again.lease() > used + LOST_IDS_MAX // 2
    again = again.restart().restart()
    assert again.create("more").code == "ok"
    assert again.incarnation("more") > used + LOST_IDS_MAX // 2


def test_a_catalog_that_is_gone_as_a_whole_is_rebuilt_from_the_folders() -> None:
    broker = lived()
    node = broker.engine.broker.node
    used = broker.lease()
    broker.stop()
    for name in broker.disk.list(META):
        if name != "version":
            broker.disk.unlink(f"{META}/{name}")
    with pytest.raises(Corrupt, match="the catalog is missing"):
        Broker(broker.disk, broker.clock)
    (done,) = mended(broker.disk)
    assert "topic orders with 2 partitions" in done.note
    again = Broker(broker.disk, broker.clock).restart()
    assert (again.payloads(), again.engine.broker.node, again.saved()) == ([b"hello"], node, {})
    assert again.lease() > used
    assert again.transact(again.stream(), [("orders", 0, [b"more"])]).state == "committed"
    assert again.delay(again.lease(), 0).code == "ok"


@pytest.mark.long
def test_a_power_cut_at_any_moment_of_a_repair_leaves_one_that_goes_on() -> None:
    broker = lived()
    broker.advance(5)
    disk = broker.disk.crash(keep="everything")
    change(disk, ".catalog", CUTS["half"])
    moments: list[Moment] = []
    disk.after = lambda kind, path: moments.append(Moment(disk))
    repair_data(disk, DATA)
    disk.after = None
    generator = seeded("repair of the catalog")
    for moment in moments:
        for keep in ("nothing", "everything", *["some"] * scaled(3)):
            left = moment.crash(generator, keep=keep)
            repair_data(left, DATA)
            again = Broker(left, broker.clock).restart()
            assert again.payloads() == [b"hello"]
            assert again.lease() > LOST_IDS_MAX


def test_a_damaged_version_file_is_written_anew_from_the_catalog() -> None:
    for cut in (*CUTS.values(), lambda data: encode_version("f" * 32)):
        broker = lived()
        node = broker.engine.broker.node
        broker.stop()
        data = cut(broker.disk.read_file(VERSION))
        broker.disk.unlink(VERSION)
        if data is not None:
            broker.disk.write_file(VERSION, data)
        with pytest.raises(Corrupt, match="version"):
            Broker(broker.disk, broker.clock)
        (done,) = mended(broker.disk)
        assert node in done.note
        again = Broker(broker.disk, broker.clock).restart()
        assert (again.engine.broker.node, again.payloads()) == (node, [b"hello"])


def test_a_node_that_nothing_knows_any_more_is_made_anew_and_reported() -> None:
    broker = lived()
    node = broker.engine.broker.node
    broker.stop()
    for name in broker.disk.list(META):
        broker.disk.unlink(f"{META}/{name}")
    done = mended(broker.disk)
    assert "nothing else in the folder had the old one" in done[-1].note
    again = Broker(broker.disk, broker.clock).restart()
    assert again.engine.broker.node != node and again.payloads() == [b"hello"]


def test_files_and_folders_in_each_others_place_are_put_aside() -> None:
    broker = lived()
    broker.stop()
    mark = f"{DATA}/orders-0/log.mark"
    broker.disk.unlink(mark)
    broker.disk.make_folder(mark)
    broker.disk.rename(f"{DATA}/orders-1", "/elsewhere")
    broker.disk.write_file(f"{DATA}/orders-1", b"")
    broker.disk.write_file(f"{DATA}/notes-7", b"somebody's")
    done = repair_data(broker.disk, DATA)
    assert {(each.file, each.reason) for each in done.folder} == {
        (mark, "a folder where a file belongs"),
        (f"{DATA}/orders-1", "no folder, where a folder belongs"),
    }
    assert broker.disk.is_folder(f"{mark}.damaged") and broker.disk.read_file(f"{DATA}/notes-7")
    (lost,) = done.failed
    assert lost.path == f"{DATA}/orders-1", "put aside, and nothing is in its place"
    again = Broker(broker.disk, broker.clock)
    assert again.payloads() == [b"hello"]
    again.stop()
    (lost,) = [found for report in verify_data(again.disk, DATA) for found in report.findings]
    assert lost.file == f"{DATA}/orders-1/log.mark" and "gone at a start" in lost.what
    done = repair_data(again.disk, DATA)
    assert [each.path for each in done.failed] == [f"{DATA}/orders-1"]
    assert done == DataRepairResult(failed=done.failed)


class Forbidding(SimulatedDisk):
    """No user may read the folder `forbidden`."""

    forbidden = ""

    def _look(self, path: str, *, inside: bool) -> None:
        if self.forbidden and (path.startswith(self.forbidden + "/") or (inside and path == self.forbidden)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    def exists(self, path: str) -> bool:
        self._look(path, inside=False)
        return super().exists(path)

    def is_folder(self, path: str) -> bool:
        self._look(path, inside=False)
        return super().is_folder(path)

    def list(self, path: str) -> list[str]:
        self._look(path, inside=True)
        return super().list(path)


@pytest.mark.parametrize("folder", ["meta", "orders-0", "delay", "transactions"])
def test_a_folder_that_may_not_be_read_is_no_damage_of_what_is_in_it(folder: str) -> None:
    disk = Forbidding()
    broker = Broker(disk)
    broker.create("orders", 2)
    broker.stop()
    disk.forbidden = f"{DATA}/{folder}"
    if folder != "orders-0":  # without one partition the others are served
        with pytest.raises(PermissionError, match=folder) as refused:
            Broker(broker.disk, broker.clock)
        reported = startup_sentence(refused.value, DATA)
        assert reported is not None and "no rights" in reported and "repair" not in reported
    findings = [each for report in verify_data(broker.disk, DATA) for each in report.findings]
    assert [(each.file, each.what) for each in findings] == [(f"{DATA}/{folder}", "cannot be read: Permission denied")]
    with pytest.raises(PermissionError):
        repair_data(broker.disk, DATA)
    disk.forbidden = ""
    assert Broker(broker.disk, broker.clock).engine.broker.node == broker.engine.broker.node


def left_without_records(name: str, suffix: str) -> tuple[SimulatedDisk, Broker, list[str]]:
    """Killed at once after its first sends: nothing but the record files has these, and they are gone."""
    broker = Broker()
    broker.create("orders", 2)
    producer = broker.lease()
    broker.produce(producer, 0, [b"hello"] * 20)
    broker.delay(producer, 20, [b"later"] * 5, due=after(3600_000))
    disk = broker.disk.crash(keep="everything")
    gone = [f"{DATA}/{name}/{each}" for each in disk.list(f"{DATA}/{name}") if each.endswith(suffix)]
    for path in gone:
        disk.unlink(path)
    assert gone and any(report.damaged for report in verify_data(disk, DATA))
    return disk, broker, gone


@pytest.mark.parametrize("how", ["resume", "repair"])
def test_a_partition_whose_only_record_file_is_gone_is_stopped_until_it_is_given_up(how: str) -> None:
    disk, broker, _ = left_without_records("orders-0", ".zxQueue")
    again = Broker(disk, broker.clock)
    (stopped,) = again.engine.broker.status()["stopped"]  # type: ignore[misc]
    assert stopped["partition"] == 0 and "were gone at a start" in stopped["reason"]
    again.stop()
    assert any(report.damaged for report in verify_data(disk, DATA))
    if how == "repair":
        (done,) = repair_data(disk, DATA).logs
        assert "were gone at a start" in done.reason and "given up" in done.note
    again = Broker(disk, broker.clock)
    if how == "resume":
        again.ask(commands.ResumePartition("orders", 0))
        again.work()
    assert again.produce(again.lease(), 0, [b"new"]).code == "ok"
    again.stop()
    assert not any(report.damaged for report in verify_data(disk, DATA))


def test_a_repair_of_a_partition_whose_only_record_file_is_gone_says_so_and_serves_it() -> None:
    disk, broker, _ = left_without_records("orders-0", ".zxQueue")
    done = repair_data(disk, DATA)
    assert [each.reason for each in done.logs] == [NO_SEGMENT] and not done.failed
    assert not any(report.damaged for report in verify_data(disk, DATA))
    again = Broker(disk, broker.clock)
    assert again.engine.broker.status()["stopped"] == []
    assert again.produce(again.lease(), 0, [b"new"]).code == "ok"


@pytest.mark.parametrize("repaired", [False, True])
def test_arrivals_whose_only_file_is_gone_are_named_and_what_else_is_there_is_served(
    repaired: bool, caplog: pytest.LogCaptureFixture
) -> None:
    disk, broker, _ = left_without_records("delay/arrivals", ".arrivals")
    if repaired:
        assert [each.reason for each in repair_data(disk, DATA).logs] == [NO_SEGMENT]
    caplog.clear()
    again = Broker(disk, broker.clock)
    named = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert repaired != any("record files were gone at a start" in each.getMessage() for each in named)
    assert again.payloads() == [b"hello"] * 20
    assert again.delay(again.lease(), 0, [b"new"]).code == "ok"
    again.stop()
    assert not any(report.damaged for report in verify_data(disk, DATA))


def test_a_catalog_whose_only_file_is_gone_is_refused_and_rebuilt() -> None:
    disk, broker, _ = left_without_records("meta", ".catalog")
    before = disk.list(META)
    with pytest.raises(Corrupt, match="the catalog is missing"):
        Broker(disk, broker.clock)
    assert [name for name in before if name not in disk.list(META)] == []
    assert repair_data(disk, DATA).folder
    again = Broker(disk, broker.clock)
    assert again.payloads() == [b"hello"] * 20 and again.lease() > LOST_IDS_MAX


@pytest.mark.parametrize("name", ["orders-1", "transactions", "delay", "delay/arrivals"])
@pytest.mark.parametrize("how", ["gone", "empty"])
def test_a_folder_that_is_gone_as_a_whole_is_damage_and_has_the_advice_of_the_start(name: str, how: str) -> None:
    broker = lived()
    broker.stop()
    disk, path = broker.disk, f"{DATA}/{name}"
    assert not any(report.damaged for report in verify_data(disk, DATA)) and not repair_data(disk, DATA).failed
    disk.rename(path, "/elsewhere")
    if how == "empty":
        disk.make_folder(path)
    (found,) = [each for report in verify_data(disk, DATA) for each in report.findings]
    assert (found.file, found.weight) == (path, "damage") and "missing" in found.what
    (refused,) = repair_data(disk, DATA).failed
    assert refused.path == path
    if name == "orders-1":
        assert "topic resume orders --partition 1" in str(refused)
        again = Broker(disk, broker.clock)
        (stopped,) = again.engine.broker.status()["stopped"]  # type: ignore[misc]
        assert stopped["partition"] == 1 and "gone at a start" in stopped["reason"]
        again.stop()
        (found,) = [each for report in verify_data(disk, DATA) for each in report.findings]
        assert (found.file, found.weight) == (f"{path}/log.mark", "damage") and "is lost" in found.what
        (refused,) = repair_data(disk, DATA).failed
        assert refused.path == path and "topic resume orders --partition 1" in str(refused)
        again = Broker(disk, broker.clock)
        again.ask(commands.ResumePartition("orders", 1))
        again.work()
        again.stop()
        assert not any(report.damaged for report in verify_data(disk, DATA))
        assert not repair_data(disk, DATA).failed
        return
    with pytest.raises(Corrupt) as raised:
        Broker(disk, broker.clock)
    assert refused.reason.partition(". ")[2] == raised.value.reason.partition(". ")[2]
    word = "new-journal" if name == "transactions" else "new-delay"
    disk.write_file(f"{META}/{word}", b"")
    assert not any(report.damaged for report in verify_data(disk, DATA))


def crashed_after_a_transaction(count: int = 30) -> tuple[SimulatedDisk, Broker, list[bytes]]:
    """The disk after a crash right after a commit whose messages are durable in the partition, and known to be."""
    broker = Broker()
    broker.create()
    broker.produce(broker.lease(), 0, [b"plain"])
    payloads = [b"%04d" % number * 20 for number in range(count)]
    broker.transact(broker.stream(), [("orders", 0, payloads)])
    broker.advance(1.5)
    return broker.disk.crash(keep="everything"), broker, [b"plain", *payloads]


def spoiled(disk: SimulatedDisk, log: Log, *from_end: tuple[int, int]) -> None:
    """Zero these (position from the end, size) of the partition's only file."""
    path = f"{log.folder}/{segment_name(0)}"
    data = bytearray(disk.read_file(path))
    for position, size in from_end:
        data[len(data) - position : len(data) - position + size] = bytes(size)
    disk.write_file(path, bytes(data))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    ("damage", "kept", "said"),
    [
        ([(90, 90)], 30, "nothing is applied again"),
        ([(500, 500)], 26, "nothing is applied again"),
        ([(1000, 90), (90, 90)], 0, "are left out"),
    ],
)
def test_a_transaction_is_there_once_after_the_repair_of_a_block_that_lost_its_source(
    damage: list[tuple[int, int]], kept: int, said: str, alone: bool
) -> None:
    disk, broker, payloads = crashed_after_a_transaction()
    spoiled(disk, broker.log(), *damage)
    assert any(report.damaged for report in verify_data(disk, DATA))
    if alone:
        (repaired,) = repair(disk, broker.log().folder, pending=PendingTransactions(disk, DATA))
    else:
        (repaired,) = repair_data(disk, DATA).logs
    assert (repaired.kept, said in repaired.note) == (kept, True)
    after_it = broker.crashed(disk)
    assert [each for each in after_it.payloads() if each.strip(b"\0")] == payloads  # a filler has zeros
    after_it.stop()
    assert not any(report.damaged for report in verify_data(disk, DATA))


def test_a_repair_without_the_journal_says_that_messages_may_be_there_twice() -> None:
    disk, broker, _ = crashed_after_a_transaction()
    spoiled(disk, broker.log(), (500, 500))
    (repaired,) = repair(disk, broker.log().folder)
    assert repaired.source_lost and "may be applied again" in repaired.note


def test_what_later_trailers_have_applied_is_kept_where_a_block_lost_its_source() -> None:
    broker = Broker()
    broker.create()
    stream = broker.stream()
    broker.transact(stream, [("orders", 0, [b"lost", b"kept"])])
    broker.transact(stream, [("orders", 0, [b"second"])])
    broker.advance(1.5)
    disk, log = broker.disk.crash(keep="everything"), broker.log()
    payload, trailer = log.end_offset - HEADER_SIZE, log.end_offset - log.read(0, 1).next + 90
    spoiled(disk, log, (payload, 4), (trailer, 90))
    (repaired,) = repair_data(disk, DATA).logs
    assert (repaired.kept, repaired.lost, "left out" in repaired.note) == (1, 1, False)
    assert broker.crashed(disk).payloads()[1:] == [b"kept", b"second"]


def test_delayed_messages_of_a_transaction_are_there_once_after_the_repair_of_their_arrivals() -> None:
    broker = Broker()
    broker.create()
    broker.transact(broker.stream(), [("orders", 0, [b"later %d" % n for n in range(4)], after(5000))])
    broker.advance(1.5)
    disk = broker.disk.crash(keep="everything")
    folder = f"{DATA}/delay/arrivals"
    (name,) = [name for name in disk.list(folder) if name.endswith(".arrivals")]
    data = disk.read_file(f"{folder}/{name}")
    disk.write_file(f"{folder}/{name}", data[:-90] + bytes(90))
    (repaired,) = repair_data(disk, DATA).logs
    assert (repaired.kept, "are left out" in repaired.note) == (1, True), "the arrival header alone"
    after_it = broker.crashed(disk)
    after_it.advance(10)
    assert after_it.payloads() == [b"later %d" % n for n in range(4)]
