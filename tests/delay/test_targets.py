"""Short numbers for logs."""

import pytest

from tfmq.delay import rows
from tfmq.delay.rows import Targets


def test_a_log_keeps_its_number_and_its_name() -> None:
    known = Targets()
    assert [known.number(key, f"t{key}") for key in (70, 80, 70)] == [0, 1, 0]
    assert (known.row(1).key, known.row(1).topic) == (80, "t80")
    assert len(known) == 2


def test_there_are_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "TARGETS_MAX", 1)
    known = Targets()
    known.number(1, "a")
    with pytest.raises(OverflowError):
        known.number(2, "b")
    known.clear()
    assert known.number(2, "b") == 0
