"""The example of the unpaid order: its own tests, as a user would run them, and the show on a real broker."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = "examples/unpaid_order"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python of its own, that knows the plug-in as an installed one is known."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_its_own_tests_let_half_an_hour_pass() -> None:
    plain = ("-p", "tfmq.testing.plugin", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={ROOT}")
    done = run("pytest", "-q", *plain, f"{HERE}/test_shop.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


def test_on_a_real_broker_the_unpaid_are_cancelled_in_time_and_the_paid_are_not() -> None:
    done = run("examples.unpaid_order", "--minutes", "0.02")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "cancelled: 2, 3; to pay back: 3"
