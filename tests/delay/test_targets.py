"""Short numbers for logs."""

import pytest

from tfmq.delay import rows
from tfmq.delay.rows import TargetIds


def test_a_log_keeps_its_number_and_its_name() -> None:
    known = TargetIds()
    assert [known.id_of(key, f"t{key}") for key in (70, 80, 70)] == [0, 1, 0]
    assert (known.target_of(1).key, known.target_of(1).topic) == (80, "t80")
    assert len(known) == 2


def test_there_are_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "TARGETS_MAX", 1)
    known = TargetIds()
    known.id_of(1, "a")
    with pytest.raises(OverflowError):
        known.id_of(2, "b")
    known.clear()
    assert known.id_of(2, "b") == 0
