"""The start: everything before the listener, or a clear sentence why not."""

from __future__ import annotations

import errno
import gc
import json

import pytest

from journal.errors import Corrupt, Full, Locked, NewerFormat
from journal.filenames import TRANSACTIONS_FOLDER, segment_name
from journal.record.block import blocks_of
from journal.record.block_trailer import SOURCE_DELAY, TRAILER_SIZE
from journal.testing import Moment, SimulatedClock, SimulatedDisk
from tests.broker.helpers import DATA, Answer, Broker, after, handles
from tests.scale import scaled, seeded
from tfmq.apply_target import ARRIVALS_KEY
from tfmq.broker.data_repair import repair_data, verify_data
from tfmq.broker.startup import ARRIVALS_NAME, DELAY_FOLDER, NEW_DELAY_MARKER, NEW_JOURNAL_MARKER, STEPS
from tfmq.data_dir import decode_version, encode_version
from tfmq.delay.arrivals.log import ARRIVALS_SUFFIX, LOG_ID
from tfmq.protocol.commands import Metadata, ResumePartition
from tfmq.protocol.delayed_handle import decode_due_times
from tfmq.replication.entries import Position
from tfmq.replication.local_state import LocalState, LocalStateFile, Role
from tfmq.server.main import startup_sentence

VERSION = f"{DATA}/meta/version"


def test_a_data_folder_is_made_with_everything_above_it() -> None:
    broker = Broker(server__data="/srv/tfmq/one")
    broker.create()
    assert Broker(broker.disk.crash(keep="nothing"), server__data="/srv/tfmq/one").log().end_offset == 0


def test_the_node_s_id_is_made_once() -> None:
    broker = Broker()
    assert len(broker.engine.broker.node) == 32
    assert broker.restart().engine.broker.node == broker.engine.broker.node


def test_one_broker_a_data_folder() -> None:
    broker = Broker()
    with pytest.raises(Locked):
        Broker(broker.disk)
    broker.stop()
    assert Broker(broker.disk).engine.broker.is_open


def test_a_data_folder_of_a_later_release_is_refused_by_name() -> None:
    broker = Broker()
    broker.stop()
    broker.disk.unlink(VERSION)
    broker.disk.write_file(VERSION, json.dumps({"format": 2, "node": "x"}).encode())
    with pytest.raises(NewerFormat, match="upgrade"):
        Broker(broker.disk)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"format": "x"}', b"\xff"])
def test_a_damaged_version_file_is_named(text: bytes) -> None:
    broker = Broker()
    broker.stop()
    broker.disk.unlink(VERSION)
    broker.disk.write_file(VERSION, text)
    with pytest.raises(Corrupt, match="version"):
        Broker(broker.disk)


def test_no_flipped_bit_of_the_version_file_gives_another_node_or_format() -> None:
    node = "0123456789abcdef" * 2
    text = encode_version(node)
    for position in range(8 * len(text)):
        changed = bytearray(text)
        changed[position // 8] ^= 1 << position % 8
        try:
            found = decode_version(bytes(changed), "version")
        except Corrupt:
            continue
        assert (found.node, found.has_checksum) == (node, True), f"bit {position}"


def test_a_version_file_of_an_older_release_is_read_and_gets_its_checksum() -> None:
    broker = Broker()
    node = broker.engine.broker.node
    broker.engine.broker.catalog.state.node = ""
    broker.stop()
    broker.disk.write_file(VERSION, json.dumps({"format": 1, "node": node}).encode())
    again = Broker(broker.disk)
    assert again.engine.broker.node == again.engine.broker.catalog.state.node == node
    assert decode_version(broker.disk.read_file(VERSION), VERSION).has_checksum


def test_a_version_file_of_another_data_folder_is_refused_by_name() -> None:
    broker = Broker()
    broker.stop()
    broker.disk.write_file(VERSION, encode_version("f" * 32))
    with pytest.raises(Corrupt, match="the catalog beside it is of node"):
        Broker(broker.disk)


@pytest.mark.parametrize("name", ["meta", "delay", "delay/arrivals", "transactions", "archive"])
def test_a_file_where_a_folder_belongs_is_named(name: str) -> None:
    broker = Broker()
    broker.stop()
    path = f"{DATA}/{name}"
    if broker.disk.exists(path):
        broker.disk.rename(path, "/elsewhere")
    broker.disk.write_file(path, b"")
    with pytest.raises(NotADirectoryError) as refused:
        Broker(broker.disk)
    assert refused.value.filename == path


def test_what_recovery_found_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    broker = Broker()
    broker.create()
    broker.produce(broker.lease(), 0)
    broker.stop()
    path = f"{DATA}/orders-0/{segment_name(0)}"
    broker.disk.write_file(path, broker.disk.read_file(path)[:50])
    Broker(broker.disk)
    (said,) = [record.message for record in caplog.records if "orders-0" in record.message]
    assert "damaged from 0 to" in said and "tfmq log repair" in said


def test_a_damaged_catalog_is_no_ground_to_start_on() -> None:
    broker = Broker()
    for number in range(20):
        broker.create(f"topic{number}")
    path = f"{DATA}/meta/" + next(name for name in broker.disk.list(f"{DATA}/meta") if name.endswith(".catalog"))
    broker.disk.damage(path, 30, b"\xff\xff\xff\xff")
    broker.engine.broker.lock.release()
    with pytest.raises(Corrupt):
        Broker(broker.disk)


def test_a_failed_start_leaves_the_folder_free() -> None:
    broker = Broker()
    broker.create()
    broker.stop()
    broker.disk.faults.fail("list", path="meta")
    with pytest.raises(OSError):
        Broker(broker.disk)
    assert Broker(broker.disk).log().end_offset == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", ["open", "list", "read", "write", "force", "create", "force_folder", "rename", "sync"])
def test_a_disk_that_fails_anywhere_ends_the_start_or_stops_a_part_and_the_next_start_is_whole(kind: str) -> None:
    for nth in range(1, 12):
        before = Broker()
        before.create(partitions=2)
        producer = before.lease()
        assert before.produce(producer, 0).code == "ok"
        disk = before.disk.crash(keep="everything")
        disk.faults.fail(kind, nth=nth)
        try:
            first = Broker(disk)
        except OSError:
            pass
        else:
            first.engine.broker.lock.release()
        disk.faults.clear()
        again = Broker(disk)
        again.ask(ResumePartition("orders", 0))
        assert again.payloads() == [b"hello"]
        assert again.produce(again.lease(), 0).code == "ok"


def test_a_log_that_cannot_be_opened_leaves_the_others_as_they_are() -> None:
    broker = Broker()
    broker.create(partitions=2)
    producer = broker.lease()
    broker.produce(producer, 0, partition=1)
    broker.stop()
    broker.disk.faults.fail("open", times=None, path="orders-0/")
    again = Broker(broker.disk)
    (row,) = again.ask(Metadata(None, False)).topics
    assert [tuple(each) for each in row[2]] == [(0, "stopped"), (1, "open")]
    assert again.payloads(partition=1) == [b"hello"]
    refused = again.fetch(0)
    assert refused.code == "storage_stopped"
    broker.disk.faults.clear()
    assert again.ask(ResumePartition("orders", 0)).state == "open"
    assert again.fetch(0).code == "ok"


def test_a_partition_whose_folder_is_gone_is_stopped_not_made_anew_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    broker = Broker()
    broker.create()
    broker.stop()
    broker.disk.rename(f"{DATA}/orders-0", "/elsewhere")
    again = Broker(broker.disk)
    answer = again.produce(again.lease(), 0)
    assert answer.code == "storage_stopped" and "gone" in answer.failure.details["reason"]  # type: ignore[union-attr]
    assert "writes: its folder was gone at a start: its content is lost" in str(answer.failure)
    (reported,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "orders-0 takes no messages: its folder was gone" in reported
    assert "or give up what it held: tfmq topic resume orders --partition 0" in reported


def test_unknown_folders_are_left_unchanged_and_reported() -> None:
    broker = Broker()
    broker.disk.make_folder(f"{DATA}/mine-0")
    again = broker.restart()
    assert again.disk.exists(f"{DATA}/mine-0")
    assert again.engine.broker.status()["unknown_folders"] == ["mine-0"]
    assert again.create("mine").code != "topic_exists"


@pytest.mark.parametrize("role", ["primary", "standby"])
def test_a_start_without_the_replication_of_a_folder_is_noted_there(
    role: Role, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the replicas would never have what this broker writes, and what is written later would not fit them."""
    broker = Broker()
    broker.stop()
    file = LocalStateFile(broker.disk, DATA)
    state = LocalState("00ff", role, Position(1, 5), is_clean=True, time_ms=7, store="memory")
    file.write(state)
    Broker(broker.disk, replicate__url="s3://bucket/orders").stop()
    assert file.read(bytes) == state
    Broker(broker.disk)
    expected = state._replace(is_clean=False, role=role if role == "primary" else "")
    assert LocalStateFile(broker.disk, DATA).read(bytes) == expected
    assert f"that of a {role}, and replicate.url is not set" in caplog.text


def test_the_steps_are_in_their_order() -> None:
    names = [step.__name__ for step in STEPS]
    order = ["lock_data_folder", "open_catalog", "open_partitions", "start_housekeeping"]
    assert [each for each in names if each in order] == order


def test_everything_is_there_after_a_clean_stop() -> None:
    broker = Broker()
    broker.create(partitions=3)
    producer = broker.lease()
    for sequence in range(5):
        broker.produce(producer, sequence, [b"%d" % sequence])
    member = broker.join()
    broker.commit(member, 77)
    again = broker.restart()
    assert again.payloads() == [b"0", b"1", b"2", b"3", b"4"]
    assert again.saved() == {("orders", 0): 77}
    assert again.produce(producer, 5).code == "ok"
    assert not [path for path in again.disk.closed_unforced if path.endswith(".zxQueue")]


def test_a_start_on_a_full_disk_loses_nothing() -> None:
    broker = Broker()
    broker.create()
    producer = broker.lease()
    broker.produce(producer, 0)
    disk = broker.disk.crash(keep="everything")
    disk.space_bytes = disk.used_bytes()
    again = Broker(disk)
    assert again.produce(producer, 1).code in ("storage_stopped", "disk_full")
    disk.space_bytes = None
    assert again.ask(ResumePartition("orders", 0)).state == "open"
    assert again.produce(producer, 1, [b"more"]).code == "ok"
    assert again.payloads() == [b"hello", b"more"]


def test_the_collector_is_as_it_was_after_a_start_whether_it_succeeds_or_not() -> None:
    broker = Broker()
    assert gc.isenabled()
    with pytest.raises(Locked):
        Broker(broker.disk)
    assert gc.isenabled()
    gc.disable()
    try:
        broker.restart()
        assert not gc.isenabled()
    finally:
        gc.enable()


# The store of delayed messages that belongs to the data folder, and no other; a start that fails changes nothing.

FOLDER = f"{DATA}/{DELAY_FOLDER}"
ARRIVALS = f"{FOLDER}/{ARRIVALS_NAME}"
WORD = f"{DATA}/meta/{NEW_DELAY_MARKER}"

Kept = dict[str, bytes]


def with_one_waiting() -> tuple[Broker, Answer]:
    broker = Broker()
    broker.create()
    producer = broker.lease()
    broker.delay(producer, 0, [b"soon"], due=after(1000))
    broker.advance(2)
    answer = broker.delay(producer, 1, [b"later"], due=after(3_600_000))
    broker.stop()
    return broker, answer


def files(disk: SimulatedDisk) -> Kept:
    """Everything of the store, by path."""
    kept = {}
    for folder in (FOLDER, ARRIVALS):
        for name in disk.list(folder):
            path = f"{folder}/{name}"
            if path != ARRIVALS:
                kept[path] = disk.read_file(path)
    return kept


def remove(disk: SimulatedDisk, *, folder_too: bool = True) -> None:
    for path in files(disk):
        disk.unlink(path)
    disk.remove_folder(ARRIVALS)
    if folder_too:
        disk.remove_folder(FOLDER)


def put(disk: SimulatedDisk, kept: Kept) -> None:
    for folder in (FOLDER, ARRIVALS):
        if not disk.exists(folder):
            disk.make_folder(folder)
    for path in files(disk):
        disk.unlink(path)
    for path, data in kept.items():
        disk.write_file(path, data)


def delivered(broker: Broker, seconds: float = 4000) -> list[bytes]:
    broker.advance(seconds)
    return broker.payloads()


def test_the_log_of_arrivals_has_one_id_in_all_parts() -> None:
    assert LOG_ID == ARRIVALS_KEY


def test_the_first_start_makes_a_store_and_the_catalog_knows_it() -> None:
    broker = Broker()
    store_id = broker.engine.broker.delay_commands.store_id
    assert broker.engine.broker.catalog.state.delay_store == store_id
    assert not broker.disk.exists(WORD)
    left = broker.crashed(broker.disk.crash(keep="nothing"))
    assert left.engine.broker.delay_commands.store_id == store_id
    assert left.lease() > store_id


def test_a_data_folder_of_the_release_before_gets_its_store() -> None:
    broker = Broker()
    broker.create()
    broker.produce(broker.lease(), 0, [b"old"])
    broker.engine.broker.catalog.state.delay_store = 0
    broker.stop()
    remove(broker.disk)
    again = Broker(broker.disk, broker.clock)
    assert again.payloads() == [b"old"]
    assert again.engine.broker.catalog.state.delay_store > 0
    assert again.delay(again.lease(), 0).code == "ok"


def test_what_waits_is_delivered_by_the_next_start_and_nothing_twice() -> None:
    broker, answer = with_one_waiting()
    again = Broker(broker.disk, broker.clock)
    assert again.payloads() == [b"soon"]
    assert [row["handle"] for row in again.delayed()] == handles(answer)
    assert delivered(again) == [b"soon", b"later"]
    last = again.restart()
    assert delivered(last) == [b"soon", b"later"]


@pytest.mark.parametrize("folder_too", [True, False])
def test_a_missing_store_ends_the_start_with_a_sentence_and_changes_nothing(folder_too: bool) -> None:
    broker, _ = with_one_waiting()
    kept = files(broker.disk)
    remove(broker.disk, folder_too=folder_too)
    with pytest.raises(Corrupt, match=r"delayed messages is missing.*Put back.*new-delay") as raised:
        Broker(broker.disk, broker.clock)
    assert raised.value.path == FOLDER
    put(broker.disk, kept)
    assert delivered(Broker(broker.disk, broker.clock)) == [b"soon", b"later"]


@pytest.mark.parametrize("how", ["emptied", "deleted"])
def test_a_checkpoint_lost_before_the_first_bucket_is_made_again_for_what_is_in_the_arrivals(how: str) -> None:
    broker = Broker()
    broker.create()
    producer = broker.lease()
    broker.delay(producer, 0, [b"soon"], due=after(1000))
    broker.advance(2)
    answer = broker.delay(producer, 1, [b"later"], due=after(3_600_000))
    disk = broker.disk.crash(keep="everything")
    checkpoint = f"{FOLDER}/checkpoint"
    store_id = broker.engine.broker.delay_commands.store_id
    assert not [name for name in disk.list(FOLDER) if name.endswith(".bucket")]
    disk.unlink(checkpoint)
    if how == "emptied":
        disk.write_file(checkpoint, b"")
    named = [each for report in verify_data(disk, DATA) for each in report.findings if each.weight == "damage"]
    assert [each.file for each in named] == [checkpoint]
    with pytest.raises(Corrupt) as refused:
        Broker(disk, broker.clock)
    assert refused.value.path == checkpoint
    said = startup_sentence(refused.value, DATA)
    assert said is not None and "`tfmq log repair" in said and "new-delay" not in said
    planned = repair_data(disk, DATA, dry_run=True)
    done = repair_data(disk, DATA)
    assert not done.failed and done.buckets == planned.buckets
    (mended,) = done.buckets
    assert (mended.file, mended.lost) == (checkpoint, 0) and "messages in the arrivals" in mended.note
    assert not any(report.damaged for report in verify_data(disk, DATA))
    again = Broker(disk, broker.clock)
    assert again.engine.broker.delay_commands.store_id == store_id
    assert [row["handle"] for row in again.delayed()] == handles(answer)
    assert delivered(again) == [b"soon", b"later"]


def test_buckets_without_their_arrivals_are_refused() -> None:
    broker, _ = with_one_waiting()
    kept = files(broker.disk)
    for path in kept:
        if path.startswith(ARRIVALS):
            broker.disk.unlink(path)
    broker.disk.remove_folder(ARRIVALS)
    with pytest.raises(Corrupt, match=r"arrive is missing.*new-delay") as raised:
        Broker(broker.disk, broker.clock)
    assert raised.value.path == ARRIVALS
    put(broker.disk, kept)
    assert delivered(Broker(broker.disk, broker.clock)) == [b"soon", b"later"]


def test_the_operator_s_word_begins_a_new_store_once() -> None:
    broker, _ = with_one_waiting()
    old = broker.engine.broker.delay_commands.store_id
    remove(broker.disk)
    broker.disk.write_file(WORD, b"")
    again = Broker(broker.disk, broker.clock)
    assert again.engine.broker.delay_commands.store_id > old and not again.disk.exists(WORD)
    assert again.delayed() == []
    again.delay(again.lease(), 0, [b"new"])
    assert delivered(again) == [b"soon", b"new"]
    again.stop()
    remove(again.disk)
    with pytest.raises(Corrupt, match="missing"):
        Broker(again.disk, again.clock)


def test_another_one_s_store_is_refused_by_its_number() -> None:
    broker, _ = with_one_waiting()
    own = broker.engine.broker.delay_commands.store_id
    other = Broker()
    other.lease(100)
    other.create()
    other.stop()
    remove(other.disk)
    other.disk.write_file(WORD, b"")
    other = Broker(other.disk, other.clock)
    another = other.engine.broker.delay_commands.store_id
    other.stop()
    kept = files(broker.disk)
    put(broker.disk, files(other.disk))
    with pytest.raises(Corrupt, match=rf"of store {another}, and store {own} belongs") as raised:
        Broker(broker.disk, broker.clock)
    assert raised.value.path == FOLDER
    put(broker.disk, kept)
    assert delivered(Broker(broker.disk, broker.clock)) == [b"soon", b"later"]


def test_a_store_that_is_older_than_a_partition_is_refused() -> None:
    broker, _ = with_one_waiting()
    old = files(broker.disk)
    broker = Broker(broker.disk, broker.clock)
    broker.delay(broker.lease(), 0, [b"newer"])
    broker.advance(2)
    broker.stop()
    new = files(broker.disk)
    put(broker.disk, old)
    with pytest.raises(Corrupt, match=r"older than orders-0.*new-delay"):
        Broker(broker.disk, broker.clock)
    put(broker.disk, new)
    assert delivered(Broker(broker.disk, broker.clock)) == [b"soon", b"newer", b"later"]


def test_arrivals_that_are_older_than_the_buckets_are_refused_and_the_reverse() -> None:
    broker, _ = with_one_waiting()
    old = files(broker.disk)
    broker = Broker(broker.disk, broker.clock)
    producer = broker.lease()
    for sequence in range(3):
        broker.delay(producer, 4 * sequence, [bytes(1000)] * 4, due=after(10_000_000))
        broker.advance(61)
    broker.stop()
    new = files(broker.disk)
    mixed = {path: data for path, data in new.items() if not path.startswith(ARRIVALS)}
    put(broker.disk, mixed | {path: data for path, data in old.items() if path.startswith(ARRIVALS)})
    with pytest.raises(Corrupt, match=r"older than the buckets.*new-delay"):
        Broker(broker.disk, broker.clock)
    put(broker.disk, new)
    again = Broker(broker.disk, broker.clock)
    assert again.engine.broker.status()["delay"]["pending"] == 13


def test_a_journal_that_is_older_than_the_arrivals_is_refused() -> None:
    broker = Broker()
    broker.create()
    stream = broker.stream()
    broker.transact(stream, [("orders", 0, [b"now"])])
    broker.stop()
    folder = f"{DATA}/transactions"
    old = {name: broker.disk.read_file(f"{folder}/{name}") for name in broker.disk.list(folder)}
    broker = Broker(broker.disk, broker.clock)
    broker.transact(broker.stream(), [("orders", 0, [b"later"], after(3_600_000))])
    broker.stop()
    for name in broker.disk.list(folder):
        broker.disk.unlink(f"{folder}/{name}")
    for name, data in old.items():
        broker.disk.write_file(f"{folder}/{name}", data)
    with pytest.raises(Corrupt, match="older than the store of delayed messages"):
        Broker(broker.disk, broker.clock)


def test_a_catalog_that_is_older_than_the_store_gives_out_no_id_twice() -> None:
    broker = Broker()
    meta = f"{DATA}/meta"
    broker.create()
    broker.stop()
    old = {name: broker.disk.read_file(f"{meta}/{name}") for name in broker.disk.list(meta)}
    broker = Broker(broker.disk, broker.clock)
    ids = [broker.lease(1024) for _ in range(3)]
    broker.delay(ids[-1], 0, due=after(3_600_000))
    broker.stop()
    for name in broker.disk.list(meta):
        broker.disk.unlink(f"{meta}/{name}")
    for name, data in old.items():
        broker.disk.write_file(f"{meta}/{name}", data)
    again = Broker(broker.disk, broker.clock)
    assert again.lease() > ids[-1]


def test_broker_time_begins_where_a_partition_has_been_also_after_a_wall_clock_that_went_back() -> None:
    broker, _ = with_one_waiting()
    (fired, _) = broker.log().applied(SOURCE_DELAY, broker.engine.broker.delay_commands.store_id)
    broker.clock.jump_wall(-86_400)
    again = Broker(broker.disk, broker.clock)
    assert again.engine.broker.delay_commands.queue.now_ms() >= fired
    later = again.delay(again.lease(), 0, [b"behind"], due=after(1000))
    assert min(decode_due_times(later.delayed.dues)) >= fired + 1000
    assert delivered(again, 2) == [b"soon", b"behind"]


@pytest.mark.parametrize("keep", ["nothing", "everything", "some"])
def test_a_power_cut_at_any_moment_of_the_first_start_leaves_a_folder_that_starts(keep: str) -> None:
    generator = seeded("first start with a store", keep)
    first = Broker(start=False)
    moments = []
    first.disk.after = lambda kind, path: moments.append((kind, path, Moment(first.disk)))
    first.engine.start()
    first.disk.after = None
    for kind, path, moment in moments[:: max(1, len(moments) // scaled(len(moments)))]:
        left = Broker(moment.crash(generator, keep=keep), first.clock)
        assert left.create().code == "ok", f"after {kind} of {path}"
        assert left.delay(left.lease(), 0).code == "ok", f"after {kind} of {path}"
        again = left.crashed(left.disk.crash(keep="nothing"))
        assert delivered(again) == [b"later"], f"after {kind} of {path}"


@pytest.mark.parametrize("keep", ["nothing", "everything", "some"])
def test_a_power_cut_at_any_moment_while_a_new_store_is_begun_leaves_one_that_is_begun(keep: str) -> None:
    generator = seeded("new store", keep)
    broker, _ = with_one_waiting()
    remove(broker.disk)
    broker.disk.force_folder(DATA)
    broker.disk.write_file(WORD, b"")
    broker.disk.force_folder(f"{DATA}/meta")
    moments = []
    broker.disk.after = lambda kind, path: moments.append((kind, path, Moment(broker.disk)))
    begun = Broker(broker.disk, broker.clock)
    broker.disk.after = None
    assert begun.payloads() == [b"soon"]
    for kind, path, moment in moments[:: max(1, len(moments) // scaled(len(moments)))]:
        left = Broker(moment.crash(generator, keep=keep), broker.clock)
        assert left.delay(left.lease(), 0, [b"new"]).code == "ok", f"after {kind} of {path}"
        assert delivered(left) == [b"soon", b"new"], f"after {kind} of {path}"
        assert left.restart().payloads() == [b"soon", b"new"], f"after {kind} of {path}"


@pytest.mark.parametrize("spilled", [False, True], ids=["fired", "spilled"])
def test_arrivals_of_which_a_full_disk_keeps_the_end_back_are_not_taken_for_older(spilled: bool) -> None:
    broker = Broker()
    broker.create()
    broker.delay(broker.lease(), 0, [b"soon", b"later"], due=after(10) + after(60_000))
    broker.advance(1)
    if spilled:
        assert len(broker.delayed()) == 1
    disk = broker.disk.crash(keep="everything")
    disk.faults.fail("write", error=errno.ENOSPC, times=None, path=ARRIVALS)
    again = Broker(disk, broker.clock)
    assert again.arrivals.waits_for_space
    again.advance(5)
    disk.faults.clear()
    again.advance(60)
    assert again.payloads() == [b"soon", b"later"]


@pytest.mark.long
@pytest.mark.parametrize("at", ["note", "records"])
@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_arrivals_in_which_a_byte_is_wrong_lose_no_more_than_it_hit(at: str, end: str) -> None:
    """As a repair before the start would have it: what is whole beside it is kept, what is not is reported."""
    broker = Broker()
    broker.create()
    producer = broker.lease()
    broker.delay(producer, 0, [b"one", b"two", b"three"], due=after(3_600_000))
    broker.delay(producer, 3, [b"four"], due=after(3_600_000))
    disk = broker.disk
    if end == "stopped":
        broker.stop()
    else:
        disk = disk.crash(keep="everything")
    name = next(each for each in disk.list(ARRIVALS) if each.endswith(ARRIVALS_SUFFIX))
    data = disk.read_file(f"{ARRIVALS}/{name}")
    place = data.index(b"two") if at == "records" else data.index(b"orders")
    disk.damage(f"{ARRIVALS}/{name}", place, b"#")
    again = Broker(disk, broker.clock)
    expected = [b"one", b"three", b"four"] if at == "records" else [b"four"]
    assert again.engine.broker.delay_commands.status()["damaged"] >= 1
    assert f"{name}.damaged" in again.disk.list(ARRIVALS)
    again.advance(3_601)
    assert again.payloads() == expected


def test_arrivals_in_which_a_checksum_alone_is_wrong_lose_nothing() -> None:
    broker, answer = with_one_waiting()
    name = next(each for each in broker.disk.list(ARRIVALS) if each.endswith(ARRIVALS_SUFFIX))
    size = broker.disk.size(f"{ARRIVALS}/{name}")
    broker.disk.damage(f"{ARRIVALS}/{name}", size - 30, b"#")
    again = Broker(broker.disk, broker.clock)
    again.advance(3_600)
    assert again.engine.broker.delay_commands.status()["damaged"] == 0 and answer.fields
    assert again.payloads() == [b"soon", b"later"]


def test_arrivals_that_lost_their_end_are_reported_once_as_repaired(caplog: pytest.LogCaptureFixture) -> None:
    broker, _ = with_one_waiting()
    name = next(each for each in broker.disk.list(ARRIVALS) if each.endswith(ARRIVALS_SUFFIX))
    whole = broker.disk.read_file(f"{ARRIVALS}/{name}")
    broker.disk.write_file(f"{ARRIVALS}/{name}", whole[:-3])
    again = Broker(broker.disk, broker.clock)
    (reported,) = [each.getMessage() for each in caplog.records if "damaged" in each.getMessage()]
    assert "2 records are kept, 0 lost" in reported and "log repair" not in reported
    again.advance(3_600)
    assert again.payloads() == [b"soon", b"later"]


@pytest.mark.parametrize("which", range(4))
def test_a_flipped_bit_in_a_trailer_of_the_arrivals_loses_no_message_and_delivers_none_early(which: int) -> None:
    """Nor one that was cancelled: every note proves itself, though all notes have one id."""
    broker = Broker()
    broker.create()
    producer = broker.lease()
    first = broker.delay(producer, 0, [b"cancelled"], due=after(20_000))
    for number, payload in enumerate((b"one", b"two"), start=1):
        broker.delay(producer, number, [payload], due=after(20_000 * number))
    assert broker.cancel_delayed(handles(first)[0]).code == "ok"
    broker.advance(2)  # the mark says that all of it was forced
    disk = broker.disk.crash(keep="everything")
    (name,) = [each for each in disk.list(ARRIVALS) if each.endswith(ARRIVALS_SUFFIX)]
    data = disk.read_file(f"{ARRIVALS}/{name}")
    blocks = list(blocks_of(data, 0, LOG_ID))
    assert len(blocks) == 4
    kept = files(disk)
    rng = seeded("trailer of the arrivals", which)
    for byte in rng.sample(range(TRAILER_SIZE), max(12, scaled(40))):
        put(disk, kept)
        at = blocks[which].next - TRAILER_SIZE + byte
        disk.write_file(f"{ARRIVALS}/{name}", data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
        again = Broker(disk.crash(keep="everything"), SimulatedClock(broker.clock.wall_ms()))
        assert again.engine.broker.delay_commands.status()["damaged"] == 0, byte
        again.advance(17)
        assert again.payloads() == [], byte
        again.advance(2)
        assert again.payloads() == [b"one"], byte
        again.advance(20)
        assert again.payloads() == [b"one", b"two"], byte


@pytest.mark.parametrize("kind", ["create", "write", "force", "rename"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["full", "error"])
def test_a_start_that_cannot_repair_the_arrivals_ends_and_gives_up_nothing(kind: str, error: int) -> None:
    broker = Broker()
    broker.create()
    producer = broker.lease()
    broker.delay(producer, 0, [b"one", b"two", b"three"], due=after(3_600_000))
    broker.delay(producer, 3, [b"four"], due=after(3_600_000))
    broker.stop()
    name = next(each for each in broker.disk.list(ARRIVALS) if each.endswith(ARRIVALS_SUFFIX))
    place = broker.disk.read_file(f"{ARRIVALS}/{name}").index(b"two")
    broker.disk.damage(f"{ARRIVALS}/{name}", place, b"#")
    broker.disk.faults.fail(kind, error=error, path=f"{ARRIVALS}/{name}")
    with pytest.raises((OSError, Full)):
        Broker(broker.disk, broker.clock)
    broker.disk.faults.clear()
    again = Broker(broker.disk, broker.clock)
    assert again.engine.broker.delay_commands.status()["damaged"] == 1
    again.advance(3_601)
    assert again.payloads() == [b"one", b"three", b"four"]


@pytest.mark.long
@pytest.mark.parametrize("size", [None, 0, 100], ids=["deleted", "empty", "cut"])
def test_arrivals_cut_below_what_is_in_buckets_lose_only_what_is_in_none(size: int | None) -> None:
    """The start repairs them, as a repair would: what is in the buckets is served, the rest is reported as lost."""
    broker = Broker()
    broker.create()
    producer = broker.lease()
    broker.delay(producer, 0, [b"in a bucket"], due=after(3_600_000))
    broker.advance(300)
    broker.delay(producer, 1, [b"lost", b"lost"], due=after(3_600_000))
    broker.stop()
    disk = broker.disk
    (path,) = [f"{ARRIVALS}/{name}" for name in disk.list(ARRIVALS) if name.endswith(ARRIVALS_SUFFIX)]
    if size is None:
        disk.unlink(path)
    else:
        disk.write_file(path, disk.read_file(path)[:size])
    again = Broker(disk.crash(keep="everything"), broker.clock)
    # Two messages and the header of their send; what is in the bucket is not lost.
    assert again.engine.broker.delay_commands.status()["damaged"] == 3
    assert delivered(again) == [b"in a bucket"]
    done = repair_data(disk, DATA)
    assert sum(each.lost for each in done.logs) >= 2 and not done.failed
    assert not any(report.damaged for report in verify_data(disk, DATA))
    assert delivered(Broker(disk, broker.clock)) == [b"in a bucket"]


# The journal that belongs to the data folder, and no other; a start that fails leaves everything as it was.

FOLDER_TRANSACTION_OPENING = f"{DATA}/{TRANSACTIONS_FOLDER}"
WORD_TRANSACTION_OPENING = f"{DATA}/meta/{NEW_JOURNAL_MARKER}"


def with_one_prepared() -> tuple[Broker, Answer]:
    broker = Broker()
    broker.create()
    stream = broker.stream()
    broker.transact(stream, [("orders", 0, [b"committed"])])
    began = broker.begin(stream, "order-42")
    broker.send(stream, began, [b"prepared"])
    broker.prepare(began)
    broker.stop()
    return broker, began


def files_of_transaction_opening(disk: SimulatedDisk, folder: str) -> dict[str, bytes]:
    return {name: disk.read_file(f"{folder}/{name}") for name in disk.list(folder)}


def put_of_transaction_opening(disk: SimulatedDisk, kept: dict[str, bytes]) -> None:
    """The folder of the journal with these files and no others."""
    for name in disk.list(FOLDER_TRANSACTION_OPENING) if disk.exists(FOLDER_TRANSACTION_OPENING) else ():
        disk.unlink(f"{FOLDER_TRANSACTION_OPENING}/{name}")
    for name, data in kept.items():
        disk.write_file(f"{FOLDER_TRANSACTION_OPENING}/{name}", data)


def test_the_first_start_makes_a_journal_and_the_catalog_knows_it() -> None:
    broker = Broker()
    store = broker.engine.broker.transaction_commands.store
    assert broker.engine.broker.catalog.state.journal_id == store.journal_id
    left = broker.crashed(broker.disk.crash(keep="nothing"))
    assert left.engine.broker.transaction_commands.store.journal_id == store.journal_id
    assert left.lease() > store.journal_id


def test_a_data_folder_of_the_release_before_gets_its_journal() -> None:
    broker = Broker()
    broker.create()
    broker.produce(broker.lease(), 0, [b"old"])
    register = broker.engine.broker.catalog.state
    register.journal_id = 0
    broker.stop()
    put_of_transaction_opening(broker.disk, {})
    broker.disk.remove_folder(FOLDER_TRANSACTION_OPENING)
    again = Broker(broker.disk, broker.clock)
    assert again.payloads() == [b"old"]
    assert again.engine.broker.catalog.state.journal_id > 0
    assert again.transact(again.stream(), [("orders", 0, [b"new"])]).state == "committed"


def test_a_missing_journal_ends_the_start_with_a_sentence_and_changes_nothing() -> None:
    broker, began = with_one_prepared()
    kept = files_of_transaction_opening(broker.disk, FOLDER_TRANSACTION_OPENING)
    for folder_left in (True, False):
        put_of_transaction_opening(broker.disk, {})
        if not folder_left:
            broker.disk.remove_folder(FOLDER_TRANSACTION_OPENING)
        with pytest.raises(Corrupt, match=r"missing.*new-journal") as raised:
            Broker(broker.disk, broker.clock)
        assert raised.value.path == FOLDER_TRANSACTION_OPENING
    broker.disk.make_folder(FOLDER_TRANSACTION_OPENING)
    put_of_transaction_opening(broker.disk, kept)
    again = Broker(broker.disk, broker.clock)
    assert again.decide(began).state == "committed"
    assert again.payloads() == [b"committed", b"prepared"]


def test_the_operator_s_word_begins_a_new_journal_once() -> None:
    broker, began = with_one_prepared()
    put_of_transaction_opening(broker.disk, {})
    broker.disk.write_file(WORD_TRANSACTION_OPENING, b"")
    again = Broker(broker.disk, broker.clock)
    assert not again.disk.exists(WORD_TRANSACTION_OPENING)
    assert again.decide(began).code == "unknown_transaction"
    assert again.payloads() == [b"committed"]
    assert again.transact(again.stream(), [("orders", 0, [b"new"])]).state == "committed"
    left = again.crashed(again.disk.crash(keep="nothing"))
    assert left.payloads() == [b"committed", b"new"]


def test_another_broker_s_journal_is_refused() -> None:
    broker, _ = with_one_prepared()
    first = Broker()
    first.stop()
    put_of_transaction_opening(first.disk, {})
    first.disk.write_file(WORD_TRANSACTION_OPENING, b"")
    second = Broker(first.disk, first.clock)
    known = broker.engine.broker.catalog.state.journal_id
    assert second.engine.broker.transaction_commands.store.journal_id != known
    second.stop()
    put_of_transaction_opening(broker.disk, files_of_transaction_opening(second.disk, FOLDER_TRANSACTION_OPENING))
    for given_up in (False, True):
        if given_up:
            broker.disk.write_file(WORD_TRANSACTION_OPENING, b"")
        with pytest.raises(Corrupt, match="belongs to this data"):
            Broker(broker.disk, broker.clock)
        assert {file.path for file in broker.disk.open_files} <= {DATA}, "it holds no file of the journal"


def test_the_word_beside_a_whole_journal_is_taken_back_and_changes_nothing() -> None:
    broker, began = with_one_prepared()
    broker.disk.write_file(WORD_TRANSACTION_OPENING, b"")
    again = Broker(broker.disk, broker.clock)
    assert not again.disk.exists(WORD_TRANSACTION_OPENING) and again.decide(began).state == "committed"


def test_a_journal_from_an_older_backup_is_refused() -> None:
    """It would number new decisions like those that the partitions have applied, and they would be skipped."""
    broker = Broker()
    broker.create()
    stream = broker.stream()
    broker.transact(stream, [("orders", 0, [b"first"])])
    broker.stop()
    old = files_of_transaction_opening(broker.disk, FOLDER_TRANSACTION_OPENING)
    later = Broker(broker.disk, broker.clock)
    for n in range(10):
        later.transact(later.stream(), [("orders", 0, [b"%d" % n])])
    later.stop()
    put_of_transaction_opening(broker.disk, old)
    with pytest.raises(Corrupt, match="older than orders-0"):
        Broker(broker.disk, broker.clock)


def test_no_id_is_given_out_that_the_journal_knows() -> None:
    """A catalog from an older backup than the journal would lease the ids of its streams again."""
    broker = Broker()
    broker.create()
    broker.stop()
    old = files_of_transaction_opening(broker.disk, f"{DATA}/meta")
    later = Broker(broker.disk, broker.clock)
    later.lease(4000)
    stream = later.stream()
    began = later.begin(stream, "order-42")
    later.send(stream, began)
    later.prepare(began)
    later.stop()
    for name in later.disk.list(f"{DATA}/meta"):
        later.disk.unlink(f"{DATA}/meta/{name}")
    for name, data in old.items():
        later.disk.write_file(f"{DATA}/meta/{name}", data)
    again = Broker(later.disk, later.clock)
    assert again.lease() > stream.id
    assert [row["xid"] for row in again.listed()] == ["order-42"]


@pytest.mark.parametrize("kind", ["write", "force", "create", "force_folder", "open"])
def test_a_start_that_fails_lets_everything_go_and_the_next_one_succeeds(kind: str) -> None:
    for nth in range(1, 6):
        broker, began = with_one_prepared()
        broker.disk.faults.fail(kind, nth=nth, path="/transactions/")
        try:
            again = Broker(broker.disk, broker.clock)
        except (OSError, Exception) as error:
            assert not isinstance(error, AssertionError)
            broker.disk.faults.clear()
            again = Broker(broker.disk, broker.clock)
        broker.disk.faults.clear()
        if again.engine.broker.status()["transactions"]["journal"] != "open":
            again.engine.broker.lock.release()
            again = again.crashed(again.disk.crash(keep="everything"))
        assert [row["xid"] for row in again.listed()] == ["order-42"], f"{kind} failed at call {nth}"
        assert again.decide(began).state == "committed"
        assert again.payloads() == [b"committed", b"prepared"]


@pytest.mark.long
@pytest.mark.parametrize("keep", ["nothing", "everything", "some"])
def test_a_power_cut_at_any_moment_of_the_first_start_leaves_a_data_folder_that_starts(keep: str) -> None:
    generator = seeded("first start", keep)
    first = Broker(start=False)
    moments = []
    first.disk.after = lambda kind, path: moments.append((kind, path, Moment(first.disk)))
    first.engine.start()
    first.disk.after = None
    for kind, path, moment in moments:
        left = Broker(moment.crash(generator, keep=keep), first.clock)
        assert left.create().code == "ok", f"after {kind} of {path}"
        assert left.transact(left.stream(), [("orders", 0, [b"x"])]).state == "committed"
        again = left.crashed(left.disk.crash(keep="nothing"))
        assert again.payloads() == [b"x"], f"after {kind} of {path}"


@pytest.mark.long
@pytest.mark.parametrize("keep", ["nothing", "everything", "some"])
def test_a_power_cut_at_any_moment_while_a_new_journal_is_begun_leaves_one_that_is_begun(keep: str) -> None:
    generator = seeded("new journal", keep)
    broker, _ = with_one_prepared()
    put_of_transaction_opening(broker.disk, {})
    broker.disk.force_folder(FOLDER_TRANSACTION_OPENING)
    broker.disk.write_file(WORD_TRANSACTION_OPENING, b"")
    broker.disk.force_folder(f"{DATA}/meta")
    moments = []
    broker.disk.after = lambda kind, path: moments.append((kind, path, Moment(broker.disk)))
    begun = Broker(broker.disk, broker.clock)
    broker.disk.after = None
    assert begun.payloads() == [b"committed"]
    for kind, path, moment in moments:
        left = Broker(moment.crash(generator, keep=keep), broker.clock)
        assert left.transact(left.stream(), [("orders", 0, [b"x"])]).state == "committed"
        assert left.payloads() == [b"committed", b"x"], f"after {kind} of {path}"
        assert left.restart().payloads() == [b"committed", b"x"], f"after {kind} of {path}"


def test_what_the_opening_of_the_journal_found_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    broker, _ = with_one_prepared()
    newest = max(name for name in broker.disk.list(FOLDER_TRANSACTION_OPENING) if name.endswith(".snapshot"))
    broker.disk.damage(f"{FOLDER_TRANSACTION_OPENING}/{newest}", 5, b"\xff")
    Broker(broker.disk, broker.clock)
    assert [record for record in caplog.records if newest in record.message]
