"""The library without a broker: opening a folder, walking records, and the page that shows it."""

import os
import re
from pathlib import Path

import pytest

from journal import open_log, records
from journal.errors import BelowStart, BeyondEnd, Locked
from journal.log.segments import LogOptions
from tests import paths

PAGE = paths.ROOT / "docs" / "journal.md"


def test_the_page_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 5
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)


def test_what_was_appended_is_there_at_the_next_opening(tmp_path: Path) -> None:
    folder = str(tmp_path / "log")
    with open_log(folder) as log:
        log.append_payloads([b"a", b"b"])
    with open_log(folder) as log:
        log.append_payloads([b"c"])
        log.force()
        assert [(r.ordinal, r.payload) for r in records(log)] == [(0, b"a"), (1, b"b"), (2, b"c")]
        assert log.recovery.damage == []


def test_unforced_records_are_shown_on_demand_only(tmp_path: Path) -> None:
    with open_log(str(tmp_path / "log")) as log:
        log.append_payloads([b"a"])
        assert list(records(log)) == []
        assert [r.payload for r in records(log, upto="written")] == [b"a"]


def test_an_offset_inside_a_record_means_that_record(tmp_path: Path) -> None:
    with open_log(str(tmp_path / "log")) as log:
        log.append_payloads([b"first", b"second", b"third"])
        log.force()
        second = list(records(log))[1]
        assert next(records(log, offset=second.offset + 3)).payload == b"second"


def test_records_come_across_segments_and_chunks(tmp_path: Path) -> None:
    with open_log(str(tmp_path / "log"), LogOptions(segment_bytes=1 << 20)) as log:
        for n in range(40):
            log.append_payloads([os.urandom(100_000) + b"%03d" % n])
        log.force()
        assert log.segment_count > 3
        assert [int(r.payload[-3:]) for r in records(log)] == list(range(40))
        assert [r.ordinal for r in records(log, ordinal=17)] == list(range(17, 40))


def test_places_out_of_range_are_told(tmp_path: Path) -> None:
    with open_log(str(tmp_path / "log")) as log:
        log.append_payloads([b"a"])
        log.force()
        with pytest.raises(BeyondEnd):
            list(records(log, offset=log.end_offset + 1))
        with pytest.raises(ValueError, match="one start position"):
            list(records(log, offset=0, ordinal=0))
        log.append_payloads([b"b"])
        log.force()
        log.truncate_before(next(records(log, ordinal=1)).offset)
        with pytest.raises(BelowStart):
            list(records(log, offset=0))


def test_a_folder_is_open_once(tmp_path: Path) -> None:
    with open_log(str(tmp_path / "log")), pytest.raises(Locked), open_log(str(tmp_path / "log")):
        pass
