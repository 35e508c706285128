"""The independent checker agrees with the journal: sound is sound, and one flipped bit anywhere is damage."""

import ast
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from journal.disk import RealDisk
from journal.log.segment import Segment
from journal.record.block import blocks_of
from journal.record.format import HEADER, BadRecord
from tests.journal.blocks import LOG_ID, closed, flipped, log_bytes, mixed, records
from tests.scale import scaled, seeded
from tools import fsck

SOURCE = Path(fsck.__file__)


def write_log(folder: Path, groups: list[list[bytes]], base: int = 0, ordinal: int = 0) -> Path:
    """A sealed segment with its index, made by the journal."""
    data, starts = log_bytes(groups, base, ordinal)
    segment = Segment.create(RealDisk(), str(folder), base, LOG_ID)
    for start, end in itertools.pairwise([*starts, len(data)]):
        segment.append([data[start:end]], [b.control for b in blocks_of(data[start:end], base + start, LOG_ID)])
    segment.seal()
    segment.close()
    return Path(segment.path)


def test_it_shares_no_code_with_what_it_checks() -> None:
    imported = [
        name
        for node in ast.walk(ast.parse(SOURCE.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
    ]
    assert not [name for name in imported if name.split(".")[0] in ("journal", "tfmq", "tests", "zlib")]


def test_what_the_journal_wrote_is_sound(tmp_path: Path) -> None:
    groups = [records(700, size=90), [], mixed(200, seeded("fsck"), sequence=700), records(900, sequence=900, size=100)]
    first = write_log(tmp_path, groups)
    write_log(tmp_path, [records(5)], base=first.stat().st_size, ordinal=1800)
    result = fsck.check(tmp_path)
    assert result.problems == []
    assert (result.segments, result.blocks, result.records) == (2, 5, 1805)
    assert result.bytes == sum(p.stat().st_size for p in tmp_path.glob("*.zxQueue"))
    assert fsck.check(first).problems == []
    assert fsck.main([str(tmp_path)]) == 0


def test_every_flipped_bit_is_damage(tmp_path: Path) -> None:
    path = write_log(tmp_path, [records(3), records(2, sequence=3)])
    path.with_suffix(".index").unlink()
    data = path.read_bytes()
    bits = range(len(data) * 8)
    for bit in bits if scaled(10) >= 10 else seeded("fsck bits").sample(bits, scaled(1000)):
        path.write_bytes(flipped(data, bit))
        assert fsck.check(path).problems, f"bit {bit}"


def test_it_finds_the_same_blocks_as_the_journal_in_random_damage(tmp_path: Path) -> None:
    rng = seeded("fsck damage")
    path = write_log(tmp_path, [mixed(rng.randrange(1, 9), rng, sequence=20 * n) for n in range(12)])
    path.with_suffix(".index").unlink()
    data = path.read_bytes()
    for _ in range(scaled(300)):
        first = rng.randrange(len(data))
        path.write_bytes((data[:first] + rng.randbytes(rng.choice([1, 50, 500])) + data[first + 60 :])[: len(data)])
        segment = Segment.open(RealDisk(), str(tmp_path), 0, LOG_ID, writable=False)
        sound = sum(1 for _ in segment.valid_blocks(verify=True))
        segment.close()
        result = fsck.check(path)
        assert result.blocks == sound, f"damage at {first}"
        assert result.problems


def test_every_truncation_inside_a_block_is_damage(tmp_path: Path) -> None:
    path = write_log(tmp_path, [records(2)])
    path.with_suffix(".index").unlink()
    data = path.read_bytes()
    for size in range(1, len(data)):
        path.write_bytes(data[:size])
        assert fsck.check(path).problems


def test_a_wrong_checksum_of_one_record_is_found_though_its_block_holds(tmp_path: Path) -> None:
    found = records(3)
    found[1] = HEADER.pack(10, 1, int.from_bytes(found[1][8:16], "big"), 0) + found[1][20:]
    path = tmp_path / f"{0:032d}.zxQueue"
    path.write_bytes(closed(found, 0, 0))
    assert list(blocks_of(path.read_bytes(), 0, LOG_ID))
    (problem,) = fsck.check(path).problems
    assert "fails its checksum" in problem.what


def test_a_gap_between_segments_and_a_wrong_index_are_found(tmp_path: Path) -> None:
    first = write_log(tmp_path, [records(900, size=100)])
    write_log(tmp_path, [records(2)], base=first.stat().st_size + 7, ordinal=900)
    index = first.with_suffix(".index")
    index.write_bytes(flipped(index.read_bytes(), 77))
    files = {Path(problem.file).suffix for problem in fsck.check(tmp_path).problems}
    assert files == {".zxQueue", ".index"}


@pytest.mark.parametrize("damaged", [False, True])
def test_the_command_says_it_in_json_and_by_its_exit_code(tmp_path: Path, damaged: bool) -> None:
    path = write_log(tmp_path, [records(3), records(3, sequence=3)])
    if damaged:
        path.write_bytes(flipped(path.read_bytes(), 8 * 25))
    done = subprocess.run([sys.executable, str(SOURCE), str(tmp_path), "--json"], capture_output=True, timeout=60)
    assert done.returncode == (4 if damaged else 0), done.stderr
    said = json.loads(done.stdout)
    assert said["blocks"] == (1 if damaged else 2)
    if damaged:
        with pytest.raises(BadRecord):
            list(blocks_of(path.read_bytes(), 0, LOG_ID))
        assert [said["problems"][0][key] for key in ("first", "next")] == [0, 190]


def test_wrong_usage_is_distinguished_from_damage(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(SystemExit) as caught:
            fsck.main([str(path)])
        assert caught.value.code == 2
