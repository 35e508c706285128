"""Which change of which file begins anew."""

import os
from pathlib import Path

from tfmq.cli.worker import SourceWatcher


def test_files_of_python_that_come_go_or_change_are_seen(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    file = tmp_path / "app" / "billing.py"
    file.write_text("1")
    sources = SourceWatcher(tmp_path)
    assert not sources.has_changed()
    os.utime(file, ns=(1, 1))
    assert sources.has_changed() and not sources.has_changed()
    (tmp_path / "more.py").touch()
    assert sources.has_changed()
    file.unlink()
    assert sources.has_changed()


def test_other_files_hidden_folders_and_environments_are_left_out(tmp_path: Path) -> None:
    for folder in (".git", "env", "__pycache__"):
        (tmp_path / folder).mkdir()
    (tmp_path / "env" / "pyvenv.cfg").touch()
    sources = SourceWatcher(tmp_path)
    for folder in (".git", "env", "__pycache__"):
        (tmp_path / folder / "x.py").touch()
    (tmp_path / "notes.txt").touch()
    assert not sources.has_changed()
