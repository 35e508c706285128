"""The start: everything before the listener, or a clear sentence why not."""

import gc
import json

import pytest

from journal.errors import Corrupt, Locked, NewerFormat
from journal.filenames import segment_name
from tests.broker.helpers import DATA, Broker
from tfmq.broker.startup import STEPS
from tfmq.data_dir import decode_version, encode_version
from tfmq.protocol.commands import Metadata, ResumePartition

VERSION = f"{DATA}/meta/version"


def test_a_data_folder_is_made_with_everything_above_it() -> None:
    broker = Broker(server__data="/srv/tfmq/one")
    broker.create()
    assert Broker(broker.disk.crash(keep="nothing"), server__data="/srv/tfmq/one").log().end_offset == 0


def test_the_node_s_id_is_made_once() -> None:
    broker = Broker()
    assert len(broker.engine.node) == 32
    assert broker.restart().engine.node == broker.engine.node


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
    node = broker.engine.node
    broker.engine.broker.catalog.state.node = ""
    broker.stop()
    broker.disk.write_file(VERSION, json.dumps({"format": 1, "node": node}).encode())
    again = Broker(broker.disk)
    assert again.engine.node == again.engine.broker.catalog.state.node == node
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
    path = f"{DATA}/meta/" + next(
        name for name in broker.disk.list(f"{DATA}/meta") if name.endswith(".catalog")
    )
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
@pytest.mark.parametrize(
    "kind", ["open", "list", "read", "write", "force", "create", "force_folder", "rename", "sync"]
)
def test_a_disk_that_fails_anywhere_ends_the_start_or_stops_a_part_and_the_next_start_is_whole(
    kind: str,
) -> None:
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


def test_a_partition_whose_folder_is_gone_is_stopped_not_made_anew_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker = Broker()
    broker.create()
    broker.stop()
    broker.disk.rename(f"{DATA}/orders-0", "/elsewhere")
    again = Broker(broker.disk)
    answer = again.produce(again.lease(), 0)
    assert answer.code == "storage_stopped" and "gone" in answer.failure.details["reason"]  # type: ignore[union-attr]
    assert "writes: its folder was gone at a start: its content is lost" in str(answer.failure)
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "orders-0 takes no messages: its folder was gone" in told
    assert "or give up what it held: tfmq topic resume orders --partition 0" in told


def test_folders_of_nobody_are_left_alone_and_told_of() -> None:
    broker = Broker()
    broker.disk.make_folder(f"{DATA}/mine-0")
    again = broker.restart()
    assert again.disk.exists(f"{DATA}/mine-0")
    assert again.engine.status_fields()["unknown_folders"] == ["mine-0"]
    assert again.create("mine").code != "topic_exists"


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
