"""DATA/address: written whole, removed, and no reason not to serve."""

import logging
import os
from pathlib import Path

import pytest

from tfmq.data_dir import remove_address, write_address


def test_it_names_the_address_and_the_process_and_nothing_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "address").write_text("127.0.0.1:1 1\n")
    write_address(str(tmp_path), "127.0.0.1:8367")
    assert (tmp_path / "address").read_text() == f"127.0.0.1:8367 {os.getpid()}\n"
    assert os.listdir(tmp_path) == ["address"]
    remove_address(str(tmp_path))
    remove_address(str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_a_disk_that_refuses_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tfmq.server"):
        write_address(str(tmp_path / "gone"), "127.0.0.1:8367")
    assert "could not be written" in caplog.text
    (tmp_path / "address").mkdir()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tfmq.server"):
        remove_address(str(tmp_path))
    assert "could not be removed" in caplog.text
