"""The server as a service: the unit for systemd, and a user without privileges."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

import tfmq
from tests.e2e import commands
from tests.paths import ROOT

UNIT = ROOT / "conf" / "tfmq.service"
NOBODY = 65_534
SECONDS = 60.0
EXPOSURE_MAX = 15
"""Tenths of the figure of `systemd-analyze security`, of which 100 is a service without any restriction."""

systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", "--no-pager", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)


@systemd
def test_systemd_accepts_the_unit_and_finds_little_exposed() -> None:
    found = analyze("verify", str(UNIT))
    assert (found.returncode, found.stdout + found.stderr) == (0, "")
    rated = analyze("security", "--offline=true", f"--threshold={EXPOSURE_MAX}", str(UNIT))
    assert rated.returncode == 0, rated.stdout.splitlines()[-1]


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="cannot be had here: only root can become another user")
def test_a_user_without_privileges_runs_the_server() -> None:
    """With a data folder of its own. For a folder of others: tests/e2e/test_bad_input.py."""
    with tempfile.TemporaryDirectory() as folder:  # others can enter this one, not those of pytest
        os.chmod(folder, 0o755)
        data = Path(folder, "data")
        data.mkdir(mode=0o700)
        os.chown(data, NOBODY, NOBODY)
        line = commands.command(commands.SERVER, ["--data", str(data), "--listen", "127.0.0.1:0"], NOBODY)
        server = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[1]
            with tfmq.Producer(address) as producer:
                assert producer.send("orders", "hello").result(SECONDS).durability == "synced"
            server.terminate()
            _, log = server.communicate(timeout=SECONDS)
        finally:
            server.kill()
            server.wait(SECONDS)
        assert server.returncode == 0 and " ERROR " not in log and " WARNING " not in log, log
        assert {path.stat().st_uid for path in data.rglob("*")} == {NOBODY}
