"""Real power cuts on an ext4 image, as `python -m tools.rigs.power_cut` makes them, a few of each kind.

At scale 1: 200 of each. Skipped only where there is no root or no loop device, and it says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from journal.disk import RealDisk, RealFile
from tests import paths
from tests.scale import scaled, seeded
from tools.rigs import power_cut
from tools.rigs.loop_image import LoopImage, Unavailable, require_loop_devices

ROOT = paths.ROOT
CUTS = 200


@pytest.fixture(scope="module", autouse=True)
def _loop_devices() -> None:
    try:
        require_loop_devices()
        LoopImage().close()
    except Unavailable as reason:
        pytest.skip(f"real power cuts: {reason}")


@pytest.mark.long
@pytest.mark.parametrize("way", power_cut.WAYS, ids=[way.name for way in power_cut.WAYS])
def test_a_real_power_cut_takes_no_more_than_was_said(way: power_cut.Way) -> None:
    result = power_cut.run_way(way, scaled(CUTS), seeded("power cut", way.name))
    print(result)
    assert result.broken == 0, result.first_failure
    assert result.lost_synced == 0
    assert result.acknowledged > 0


def do_nothing(*_: object) -> None:
    """A force that does nothing."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "owner", "name"),
    [(power_cut.WAYS[0], RealFile, "force"), (power_cut.WAYS[1], RealDisk, "sync_file_system")],
    ids=["fdatasync", "syncfs"],
)
def test_the_rig_sees_an_fsync_that_does_nothing(
    monkeypatch: pytest.MonkeyPatch, way: power_cut.Way, owner: type, name: str
) -> None:
    monkeypatch.setattr(owner, name, do_nothing)
    result = power_cut.run_way(way, 3, seeded("a lie", way.name))
    assert result.broken > 0, "by what is lost, or by what the kernel had written of it, damaged"


def test_nothing_is_left() -> None:
    with LoopImage() as image:
        folder = Path(image.mount_point).parent
        (Path(image.mount_point) / "file").write_bytes(b"x")
        image.cut()
    assert not folder.exists()
    assert str(folder) not in Path("/proc/mounts").read_text()


def test_the_command_prints_what_it_found_as_json() -> None:
    command = [sys.executable, "-m", "tools.rigs.power_cut", "--cuts", "1", "--only", "fdatasync", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    assert (result["cuts"], result["broken"]) == (1, 0)


def test_without_root_the_command_says_so() -> None:
    command = [sys.executable, "-c", UNPRIVILEGED]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == power_cut.SKIPPED
    assert "needs root" in done.stderr


UNPRIVILEGED = """
import os, sys
from tools.rigs.power_cut import main
os.geteuid = lambda: 1000
sys.argv = ["power_cut"]
main()
"""
