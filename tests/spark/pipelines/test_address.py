"""Which broker or folder is meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfmq.errors import BadRequest
from tfmq.spark.log_reader import SourceAddress
from tfmq.spark.pipelines.command import parse_address


def test_a_broker_is_named_or_in_the_environment_or_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TFMQ_SERVERS", raising=False)
    assert parse_address(None, None, 5.0) == SourceAddress("127.0.0.1:8367", None, 5.0)
    monkeypatch.setenv("TFMQ_SERVERS", "b:1")
    assert parse_address(None, None, 5.0).servers == "b:1"
    assert parse_address("c:2", None, 5.0).servers == "c:2"


def test_a_folder_is_named_whole_and_never_beside_a_broker(tmp_path: Path) -> None:
    assert parse_address(None, tmp_path / "x" / ".." / "data", 5.0).path == str(tmp_path / "data")
    with pytest.raises(BadRequest, match="either --servers or --path"):
        parse_address("b:1", tmp_path, 5.0)
