"""The data folder: which folders a broker may take for its data; the file `address` in it."""

import logging
import os
from pathlib import Path

import pytest

from journal.disk import RealDisk
from journal.filenames import log_checkpoint_name, segment_name
from tfmq.broker.data_repair import is_data_folder
from tfmq.data_dir import IGNORED_NAMES, OWN_FOLDERS, check_data_folder, remove_address, write_address
from tfmq.errors import ConfigError


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


def test_what_is_not_there_or_empty_may_be_taken(tmp_path: Path) -> None:
    check_data_folder(str(tmp_path / "later"))
    check_data_folder(str(tmp_path))
    for name in IGNORED_NAMES:
        (tmp_path / name).touch()
    check_data_folder(str(tmp_path))


def test_a_file_is_refused_by_another_check(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_data_folder(str(tmp_path / "file"))


@pytest.mark.parametrize(
    "mark", [*sorted(OWN_FOLDERS), f"orders-0/{segment_name(0)}", f"orders-0/{log_checkpoint_name()}"]
)
def test_a_brokers_folder_may_be_taken_whatever_else_is_in_it(tmp_path: Path, mark: str) -> None:
    (tmp_path / "letter.txt").touch()
    (tmp_path / mark).mkdir(parents=True)
    check_data_folder(str(tmp_path))


def test_a_folder_named_like_a_partition_may_be_anybodys(tmp_path: Path) -> None:
    (tmp_path / "dbus-1" / "system.d").mkdir(parents=True)
    (tmp_path / "note-2").touch()
    (tmp_path / "lock").touch()
    with pytest.raises(ConfigError, match="other files in it"):
        check_data_folder(str(tmp_path))
    assert not is_data_folder(RealDisk(), str(tmp_path))


@pytest.mark.parametrize(("strangers", "reported"), [(("a.txt",), "a.txt"), (("a", "b", "c"), "a and 2 more")])
def test_a_folder_with_other_things_is_named_with_the_first_of_them(
    tmp_path: Path, strangers: tuple[str, ...], reported: str
) -> None:
    for name in (*strangers, *IGNORED_NAMES):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError) as caught:
        check_data_folder(str(tmp_path))
    assert f"The folder {tmp_path} has other files in it ({reported})" in caught.value.sentence
