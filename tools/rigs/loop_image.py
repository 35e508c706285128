"""A real ext4 file system in a file, on a loop device, whose power can be cut.

`cut` shuts the file system down without flushing its journal (FS_IOC_SHUTDOWN): what was not forced is lost,
as with the power. Then it is mounted again. Whatever happens, `close` leaves no mount, no loop device and no
file behind.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

SHUTDOWN: Final = 0x8004587D
NO_LOG_FLUSH: Final = 2
IMAGE_BYTES: Final = 64 << 20
PAGE_BYTES: Final = 4096
BUSY_TRIES: Final = 50
BUSY_SECONDS: Final = 0.02
"""A killed process may hold the mount for a moment."""

NEEDED: Final = ("mkfs.ext4", "mount", "umount", "losetup")


class Unavailable(Exception):
    """This machine cannot run the rig; the text says why and what would help."""


def require_loop_devices() -> None:
    """Raises Unavailable unless we are root, have the tools, and a loop device can be had."""
    if os.name != "posix" or not Path("/proc").exists():
        raise Unavailable("power cuts need Linux")
    if os.geteuid() != 0:
        raise Unavailable("mounting a loop device needs root: run this as root")
    missing = [tool for tool in NEEDED if shutil.which(tool, path=_path()) is None]
    if missing:
        raise Unavailable(f"not installed: {', '.join(missing)} (Debian: apt-get install e2fsprogs mount)")
    found = _run("losetup", "-f", check=False)
    if found.returncode != 0:
        raise Unavailable(f"no loop device: {found.stderr.strip() or 'losetup -f found none'}")


class LoopImage:
    """A mounted file system of its own.

    `tmpfs_bytes`: its image lies on a tmpfs of that size; after `break_disk` writing back what is new fails
    with a real error, until `mend_disk`. `has_journal=False`: then ext4 does not go read-only at such an
    error.
    """

    def __init__(self, *, size_bytes: int = IMAGE_BYTES, tmpfs_bytes: int = 0, has_journal: bool = True) -> None:
        require_loop_devices()
        self._folder = Path(tempfile.mkdtemp(prefix="tfmq-rig-"))
        self._device = ""
        self._is_mounted = False
        self._has_tmpfs = False
        self.mount_point = str(self._folder / "mount")
        try:
            self._make(size_bytes, tmpfs_bytes, has_journal)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LoopImage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def cut(self) -> None:
        """The power goes. Every later call on the file system fails; `mount_again` brings it back."""
        descriptor = os.open(self.mount_point, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(descriptor)

    def mount_again(self) -> None:
        """What the machine does when the power is back: ext4 replays its journal. Nobody may hold a file
        open.
        """
        self._unmount()
        self._mount()

    def break_disk(self) -> None:
        """From now on a write to a place of the image that was never written fails.

        The tmpfs is filled to the last page: at the edge of its space the loop driver calls a short write a
        success.
        """
        with (self._folder / "small" / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
            while ballast.write(bytes(PAGE_BYTES)):
                pass

    def mend_disk(self) -> None:
        """Writes succeed again."""
        (self._folder / "small" / "ballast").unlink()

    def close(self) -> None:
        """Gives everything back; twice is harmless."""
        if self._is_mounted and _run("umount", self.mount_point, check=False).returncode != 0:
            # Somebody still has a file open. Out of sight now; the kernel gives the rest back with the last
            # descriptor.
            _run("umount", "-l", self.mount_point, check=False)
        self._is_mounted = False
        if self._device:
            _run("losetup", "-d", self._device, check=False)
            self._device = ""
        if self._has_tmpfs:
            _run("umount", "-l", str(self._folder / "small"), check=False)
            self._has_tmpfs = False
        shutil.rmtree(self._folder, ignore_errors=True)

    def _make(self, size_bytes: int, tmpfs_bytes: int, has_journal: bool) -> None:
        os.mkdir(self.mount_point)
        place = self._folder
        if tmpfs_bytes:
            place = self._folder / "small"
            place.mkdir()
            _run("mount", "-t", "tmpfs", "-o", f"size={tmpfs_bytes}", "tmpfs", str(place))
            self._has_tmpfs = True
        image = place / "image"
        with image.open("wb") as file:
            file.truncate(size_bytes)
        journal = ("-J", "size=4") if has_journal else ("-O", "^has_journal")
        _run("mkfs.ext4", "-q", "-F", *journal, "-E", "lazy_itable_init=0,nodiscard", str(image))
        try:
            self._device = _run("losetup", "-f", "--show", str(image)).stdout.strip()
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"no loop device: {error.stderr.strip()}") from error
        self._mount()

    def _mount(self) -> None:
        try:
            _run("mount", "-t", "ext4", self._device, self.mount_point)
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"mounting failed: {error.stderr.strip()}") from error
        self._is_mounted = True

    def _unmount(self) -> None:
        for _ in range(BUSY_TRIES):
            if not self._is_mounted:
                return
            if _run("umount", self.mount_point, check=False).returncode == 0:
                self._is_mounted = False
            else:
                time.sleep(BUSY_SECONDS)
        _run("umount", self.mount_point)
        self._is_mounted = False


def _path() -> str:
    """Where the tools are, also for a root whose PATH leaves sbin out."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": _path()}
    return subprocess.run(command, check=check, capture_output=True, text=True, env=environment)
