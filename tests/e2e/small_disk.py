"""A file system of its own, small enough to fill: tmpfs, or ext4 in a file on a loop device."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tools.rigs.loop_image import LoopImage, Unavailable

SIZE_BYTES = 24 << 20
BALLAST_BYTES = 4 << 20
CHUNK = bytes(64 << 10)


@contextmanager
def small_disk(kind: str) -> Iterator[Path]:
    """Its mount point. Skips the test where mounting cannot be had."""
    if os.geteuid() != 0:
        pytest.skip("cannot be had here: mounting needs root")
    if kind == "tmpfs":
        with small_tmpfs() as place:
            yield place
        return
    try:
        image = LoopImage(size_bytes=SIZE_BYTES)
    except Unavailable as error:
        pytest.skip(f"cannot be had here: {error}")
    with image:
        yield Path(image.mount_point)


@contextmanager
def small_tmpfs() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tfmq-small-"))
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        shutil.rmtree(folder)
        pytest.skip(f"cannot be had here: mount says {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        shutil.rmtree(folder)


def fill(place: Path, leave_bytes: int = 0) -> None:
    """Fills the disk with a file `ballast`, to the last byte or up to `leave_bytes`."""
    with suppress(OSError), (place / "ballast").open("ab", buffering=0) as file:
        while (room := free_bytes(place) - leave_bytes) > 0 or not leave_bytes:
            file.write(CHUNK[: max(1, min(len(CHUNK), room))])


def empty(place: Path) -> None:
    (place / "ballast").unlink(missing_ok=True)


def free_bytes(place: Path) -> int:
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize
