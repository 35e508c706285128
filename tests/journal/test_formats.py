"""The pages of the formats show what the code writes: golden files, and the hex on each page, byte for byte.

A golden file is made once. One that no longer matches means that the format has changed, and the files on people's
disks have not.
"""

import re
from pathlib import Path

import pytest

from journal.checkpoint import Slots
from journal.mark import Marks, decode_marks, encode_marks
from journal.record import make_log_id
from journal.state import Snapshot, decode_snapshot, encode_snapshot
from journal.testing.simulated_disk import SimulatedDisk

TESTS = Path(__file__).parent.parent
GOLDEN = TESTS / "golden"
PAGES = TESTS.parent / "docs" / "formats"

LOG_ID = make_log_id(9, 3)
MARKS = Marks(4096, 10, 8192, 40, 1_700_000_000_000, 2, ((1, 5000), (2, 8192)), stopped="force: EIO")
SNAPSHOT = Snapshot(8192, 40, 1_700_000_000_000, {(1, 5): (6, 7), (2, 8): (9, 0)}, b"state")

BLOCK_SIZE = {"record": 208}
"""Pages that show the beginning of their golden file only: how much of it."""


def golden(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / f"{name}.hex").read_text())


@pytest.mark.parametrize("name", ["record", "index", "mark", "state"])
def test_the_page_shows_the_golden_file(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text()
    (shown,) = re.findall(r"```hex\n(.*?)```", page, re.DOTALL)
    assert bytes.fromhex(shown) == golden(name)[: BLOCK_SIZE.get(name)]


def test_every_golden_file_has_its_page() -> None:
    assert {path.stem for path in GOLDEN.glob("*.hex")} <= {path.stem for path in PAGES.glob("*.md")}


def test_the_golden_mark_is_written_and_read_as_ever() -> None:
    disk = SimulatedDisk()
    disk.make_folder("/log")
    Slots(disk, "/log/log.mark").write(encode_marks(LOG_ID, MARKS), force=True)
    data = disk.read_file("/log/log.mark")
    assert data[4096:] == golden("mark")
    disk.write_file("/log/other", data)
    found = Slots(disk, "/log/other").read()
    assert found is not None
    assert decode_marks(found[1], "/log/other", LOG_ID) == MARKS


def test_the_golden_snapshot_is_written_and_read_as_ever() -> None:
    assert encode_snapshot(LOG_ID, SNAPSHOT) == golden("state")
    assert decode_snapshot(golden("state"), "a.state", LOG_ID) == SNAPSHOT
