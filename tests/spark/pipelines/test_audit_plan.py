"""What is audited: every log of a folder, cut into pieces at ends of blocks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import tfmq
from journal.disk import RealDisk
from tests.spark.pipelines.audited import audit_here, batch, reported, segments, write_log
from tfmq.admin import Admin
from tfmq.errors import BadRequest
from tfmq.spark.pipelines import audit_plan
from tfmq.spark.pipelines.audit_plan import ADVICE, FOLDER, MARK, Finding, make_plan, read_catalog_topics


def written(data: Path) -> Path:
    return write_log(data, 3, [([batch(50, 100 * n, [80] * 100)], None) for n in range(12)])


def test_pieces_cover_every_byte_once_and_end_where_blocks_do(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "data", 3, [([batch(50, 200 * n, [80] * 200)], None) for n in range(30)])
    made = make_plan(RealDisk(), [str(tmp_path / "data")], piece_bytes=1)
    assert [(log.folder, log.topic, log.partition) for log in made.logs] == [("orders-3", "orders", 3)]
    covered = [(piece.base, piece.start, piece.end) for piece in made.pieces]
    for path in segments(folder):
        mine = [each[1:] for each in covered if each[0] == int(path.stem)]
        assert [start for start, _ in mine] == [0, *(end for _, end in mine[:-1])]
        assert mine[-1][1] == path.stat().st_size
    assert [piece.is_last for piece in made.pieces] == [False] * (len(covered) - 1) + [True]


def test_a_large_segment_is_cut_at_entries_of_its_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.spark.pipelines.audited.SEGMENT_BYTES", 1 << 20)
    folder = write_log(tmp_path / "data", 0, [([batch(50, 700 * n, [80] * 700)], None) for n in range(12)])
    made = make_plan(RealDisk(), [str(tmp_path / "data")], piece_bytes=100_000)
    assert len(segments(folder)) == 1 and len(made.pieces) > 4
    assert audit_here(tmp_path / "data", 100_000).findings == []
    index = next(folder.glob("*.index"))
    index.write_bytes(b"\0" * index.stat().st_size)
    assert len(make_plan(RealDisk(), [str(tmp_path / "data")], 100_000).pieces) == 1
    assert audit_here(tmp_path / "data", 100_000).findings == []


def test_no_piece_begins_where_a_block_trailer_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.spark.pipelines.audited.SEGMENT_BYTES", 1 << 20)
    folder = write_log(tmp_path / "data", 0, [([batch(50, 700 * n, [80] * 700)], None) for n in range(12)])
    second = make_plan(RealDisk(), [str(tmp_path / "data")], piece_bytes=100_000).pieces[1]
    (path,) = segments(folder)
    data = bytearray(path.read_bytes())
    data[second.start - 30] ^= 1
    path.write_bytes(data)
    assert second.start not in [
        piece.start for piece in make_plan(RealDisk(), [str(tmp_path / "data")], 100_000).pieces
    ]
    (finding,) = audit_here(tmp_path / "data", 100_000).findings
    assert finding.first < second.start <= finding.next


@pytest.mark.parametrize("how", ["missing", "empty", "zeros"])
def test_a_log_without_a_mark_is_reported_and_checked_all_the_same(tmp_path: Path, how: str) -> None:
    folder = written(tmp_path / "data")
    mark = folder / "log.mark"
    mark.write_bytes(bytes(mark.stat().st_size) if how == "zeros" else b"")
    if how == "missing":
        mark.unlink()
    result = audit_here(tmp_path / "data")
    assert [each[0] for each in reported(result)] == [MARK] and result.messages == 1200
    assert "nobody knows how far the log went" in result.findings[0].text
    with segments(folder)[-1].open("r+b") as file:
        file.truncate(file.seek(0, 2) - 100)
    result = audit_here(tmp_path / "data")
    assert [each[0] for each in reported(result)] == [MARK] and result.messages < 1200


def test_a_log_that_nothing_was_written_to_yet_needs_no_mark(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "data", 0, [])
    (folder / "log.mark").unlink()
    assert audit_here(tmp_path / "data").findings == []


class Retaining(RealDisk):
    """A disk whose oldest segment goes as soon as it was listed, `times` times."""

    def __init__(self, folder: Path, times: int) -> None:
        super().__init__()
        self.folder, self.times = folder, times

    def size(self, path: str) -> int:
        if self.times and path == str(segments(self.folder)[0]):
            self.times -= 1
            segments(self.folder)[0].unlink()
        return super().size(path)


def test_a_file_that_retention_takes_once_it_is_listed_is_not_asked_for(tmp_path: Path) -> None:
    folder = written(tmp_path / "data")
    bases = [int(path.stem) for path in segments(folder)]
    made = make_plan(Retaining(folder, 2), [str(tmp_path / "data")])
    assert [each.base for each in made.logs[0].segments] == bases[2:]
    assert [piece.base for piece in made.pieces] == bases[2:] and made.findings == []


def test_a_damaged_mark_is_reported_once(tmp_path: Path) -> None:
    folder = written(tmp_path / "data")
    mark = folder / "log.mark"
    mark.write_bytes(b"\xff" * mark.stat().st_size)
    result = audit_here(tmp_path / "data")
    assert [each[0] for each in reported(result)] == [MARK] and result.messages == 1200


@pytest.mark.parametrize("there", [False, True])
def test_what_is_no_data_folder_is_reported_in_a_sentence(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "data").mkdir()
    with pytest.raises(BadRequest, match=r"name the data folder of a broker \(its --data\)\.$"):
        make_plan(RealDisk(), [str(tmp_path / "data")])


# Folders that the catalog of a real broker names and that are not there.


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
    assert reported(audit_here(sound)) == []


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
    kinds = [each[:2] for each in reported(audit_here(data))]
    assert (FOLDER, 1) in kinds


def test_a_catalog_that_cannot_be_read_names_no_topic(sound: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(sound, tmp_path / "data"))
    (path,) = (data / "meta").glob("*.catalog")
    path.write_bytes(b"\xff" * path.stat().st_size)
    for state in (data / "meta").glob("*.state"):
        state.unlink()
    assert read_catalog_topics(RealDisk(), str(data)) == []
    assert {each[0] for each in reported(audit_here(data))} == {"damaged block"}


# Every kind of finding says what to do.


def test_each_kind_has_its_advice() -> None:
    words = {value for name, value in vars(audit_plan).items() if name.isupper() and isinstance(value, str)}
    assert set(ADVICE) <= words and len(ADVICE) == 14


def test_a_row_has_the_place_and_the_advice() -> None:
    finding = Finding(audit_plan.CUT, "/data", "orders", 3, "x.zxQueue", 5, 9, "it was cut")
    assert finding.to_json() == {
        "kind": "cut file", "data": "/data", "topic": "orders", "partition": 3, "segment": "x.zxQueue",
        "first": 5, "next": 9, "text": "it was cut", "do": ADVICE["cut file"],
    }  # fmt: skip
