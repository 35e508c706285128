"""Folders that the catalog of a real broker names and that are not there."""

import shutil
from pathlib import Path

import pytest

import tfmq
from journal.disk import RealDisk
from tests.spark.pipelines.audited import audit_here, told
from tfmq.admin import Admin
from tfmq.spark.pipelines.audit_plan import FOLDER, read_catalog_topics


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("catalog") / "data"
    with tfmq.local_server(data) as servers, Admin(servers) as admin, tfmq.Producer(servers) as producer:
        for name, partitions in (("orders", 3), ("gone", 2), ("grown", 1)):
            admin.create_topic(name, partitions)
            producer.send_many(name, [b"x"] * 30)
        producer.flush()
        admin.delete_topic("gone")
        admin.grow_topic("grown", 2)
    return data


def test_topics_are_those_that_are_there_with_all_their_partitions(sound: Path) -> None:
    found = [(topic.name, topic.partitions) for topic in read_catalog_topics(RealDisk(), str(sound))]
    assert sorted(found) == [("grown", 2), ("orders", 3)]
    assert told(audit_here(sound)) == []


def test_a_partitions_folder_that_is_missing_is_found(sound: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(sound, tmp_path / "data"))
    shutil.rmtree(data / "orders-1")
    (finding,) = audit_here(data).findings
    assert (finding.kind, finding.topic, finding.partition) == (FOLDER, "orders", 1)
    assert finding.text == "the folder orders-1 is missing; the catalog has the topic with 3 partitions"


def test_a_folder_of_another_log_is_found(sound: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(sound, tmp_path / "data"))
    shutil.rmtree(data / "orders-1")
    shutil.copytree(data / "orders-2", data / "orders-1")
    kinds = [each[:2] for each in told(audit_here(data))]
    assert (FOLDER, 1) in kinds


def test_a_catalog_that_cannot_be_read_names_no_topic(sound: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(sound, tmp_path / "data"))
    (path,) = (data / "meta").glob("*.catalog")
    path.write_bytes(b"\xff" * path.stat().st_size)
    for state in (data / "meta").glob("*.state"):
        state.unlink()
    assert read_catalog_topics(RealDisk(), str(data)) == []
    assert {each[0] for each in told(audit_here(data))} == {"damaged block"}
