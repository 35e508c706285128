"""Which change of which file begins anew."""

import os
from pathlib import Path

from tfmq.cli.worker import Sources


def test_files_of_python_that_come_go_or_change_are_seen(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    file = tmp_path / "app" / "billing.py"
    file.write_text("1")
    sources = Sources(tmp_path)
    assert not sources.changed()
    os.utime(file, ns=(1, 1))
    assert sources.changed() and not sources.changed()
    (tmp_path / "more.py").touch()
    assert sources.changed()
    file.unlink()
    assert sources.changed()


def test_other_files_hidden_folders_and_environments_are_left_out(tmp_path: Path) -> None:
    for folder in (".git", "env", "__pycache__"):
        (tmp_path / folder).mkdir()
    (tmp_path / "env" / "pyvenv.cfg").touch()
    sources = Sources(tmp_path)
    for folder in (".git", "env", "__pycache__"):
        (tmp_path / folder / "x.py").touch()
    (tmp_path / "notes.txt").touch()
    assert not sources.changed()
