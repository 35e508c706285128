"""What `tfmq log` works on, found by path; the lock of a running server is respected."""

from pathlib import Path

import click
import pytest

from journal.disk import RealDisk
from tfmq.cli.log import (
    check_path,
    is_broker_file,
    lock_data_folder,
    partitions_of,
    repair_command,
    segments_of,
    suffix_of,
    verify_command,
)

NAME = "0" * 32


def data_folder(path: Path) -> Path:
    for folder, suffix in (("orders-0", ".zxQueue"), ("orders-1", ".zxQueue"), ("meta", ".catalog")):
        (path / folder).mkdir(parents=True)
        (path / folder / f"{NAME}{suffix}").touch()
    (path / "meta" / "version").touch()
    (path / "empty").mkdir()
    return path


def test_a_file_a_partition_and_a_data_folder(tmp_path: Path) -> None:
    data = data_folder(tmp_path / "data")
    segment = data / "orders-0" / f"{NAME}.zxQueue"
    assert segments_of(segment) == segments_of(segment.parent) == [segment]
    assert [folder.name for folder in partitions_of(data)] == ["meta", "orders-0", "orders-1"]
    assert len(segments_of(data)) == 3
    assert suffix_of(data / "meta") == ".catalog"
    for name in ("version", "reserve", "new-journal", "new-delay"):
        assert is_broker_file(data / "meta" / name)
    assert not is_broker_file(data / "orders-0" / "version")


def test_what_is_not_there_or_no_log_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(click.ClickException, match="is not there"):
        check_path(tmp_path / "none")
    (tmp_path / "letter.txt").touch()
    for path in (tmp_path, tmp_path / "letter.txt"):
        with pytest.raises(click.ClickException, match="no data folder"):
            check_path(path)


def test_the_lock_of_a_server_is_respected(tmp_path: Path) -> None:
    data = data_folder(tmp_path / "data")
    with lock_data_folder(data):
        pass
    held = RealDisk().lock(str(data / "lock"))
    for path in (data, data / "orders-0", data / "orders-0" / f"{NAME}.zxQueue"):
        with pytest.raises(click.ClickException, match="a server is running"), lock_data_folder(path):
            pass
    held.release()
    with lock_data_folder(data / "orders-0"):
        pass


def test_a_folder_of_a_deposed_primary_is_told_as_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deposed = data_folder(tmp_path / "data" / "replica" / "deposed-3")
    monkeypatch.chdir(deposed)
    for path in (deposed, deposed / "orders-0", Path(), Path("orders-0")):
        for command in (verify_command, repair_command):
            with pytest.raises(click.ClickException, match=f"{deposed} has only the files that .* `tfmq log dump`"):
                command.main([str(path)], standalone_mode=False)
    assert verify_command.main([f"orders-0/{NAME}.zxQueue", "--quiet"], standalone_mode=False) == 0
