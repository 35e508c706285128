"""The example of the unpaid order: its own tests, as a user would run them, and the show on a real broker."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import paths

ROOT = paths.ROOT
HERE = "examples/unpaid_order"


def run(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A Python of its own, that knows the plug-in as an installed one is known."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT) if folder == ROOT else "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )


@pytest.mark.long
def test_its_own_tests_let_half_an_hour_pass() -> None:
    plain = ("-p", "tfmq.testing.plugin", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={ROOT}")
    done = run("pytest", "-q", *plain, f"{HERE}/test_shop.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


@pytest.mark.long
def test_its_tests_run_where_they_were_copied(tmp_path: Path) -> None:
    for name in ("shop.py", "test_shop.py"):
        shutil.copy(ROOT / HERE / name, tmp_path)
    done = run("pytest", "-q", "-p", "tfmq.testing.plugin", "-p", "no:cacheprovider", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


@pytest.mark.long
def test_on_a_real_broker_the_unpaid_are_cancelled_in_time_and_the_paid_are_not() -> None:
    done = run("examples.unpaid_order", "--minutes", "0.02")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "cancelled: 2, 3; to pay back: 3"
