"""A ZooKeeper server of one's own: data in a temporary folder, on loopback, without anything else that it can open.

The jars are Debian's (libzookeeper-java), or those that pyspark brings. It ends with the process that made it.
"""

import importlib.util
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from tfmq.embedded import terminate_with_parent

DEBIAN_JARS = Path("/usr/share/java")
JAR_NAMES = ("zookeeper", "zookeeper-jute", "slf4j-api", "snappy-java", "metrics-core", "slf4j-nop")
"""What the server itself loads; the last one, which keeps the log quiet, only where it is to be had."""
NEEDED = 5
START_SECONDS = 60.0
STOP_SECONDS = 30.0
TICK_MS = 100
"""Sessions are looked at so often, so that tests need not wait long for the end of one."""
HEAP = "64m"
JAVA_OPTIONS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
"""A quick start, and little of a small machine."""


def jars() -> list[Path]:
    """The jars of a ZooKeeper server, [] where none are installed."""
    for folder in folders():
        found = [sorted(folder.glob(f"{name}.jar")) + sorted(folder.glob(f"{name}-[0-9]*.jar")) for name in JAR_NAMES]
        if all(found[:NEEDED]):
            return [each[0] for each in found if each]
    return []


def folders() -> Iterator[Path]:
    """Where jars may be, the best place first."""
    yield DEBIAN_JARS
    spark = importlib.util.find_spec("pyspark")
    for place in (spark.submodule_search_locations or []) if spark is not None else []:
        yield Path(place) / "jars"


def can_be_had() -> bool:
    """Whether there is everything to start one."""
    return shutil.which("java") is not None and bool(jars())


class ZooKeeperServer:
    """`start`, `kill`, `freeze`, `thaw`, `address`. Sessions last from 2 ticks on, and over a restart."""

    alive: ClassVar["set[ZooKeeperServer]"] = set()

    def __init__(self) -> None:
        if not can_be_had():
            raise FileNotFoundError("no ZooKeeper is installed (Debian: apt-get install libzookeeper-java)")
        self.folder = Path(tempfile.mkdtemp(prefix="tfmq-zookeeper-"))
        self.log = self.folder / "log"
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        (self.folder / "zoo.cfg").write_text(
            f"dataDir={self.folder / 'data'}\n"
            "clientPortAddress=127.0.0.1\n"
            f"clientPort={self.port}\n"
            f"tickTime={TICK_MS}\n"
            "maxSessionTimeout=60000\n"
            "maxClientCnxns=0\n"
            "admin.enableServer=false\n"
            "4lw.commands.whitelist=srvr\n"
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it answers. Raises RuntimeError with the end of its log else."""
        java = shutil.which("java")
        assert java is not None
        self.alive.add(self)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    java,
                    f"-Xmx{HEAP}",
                    *JAVA_OPTIONS,
                    "-Dzookeeper.forceSync=no",  # the machine does not fail in these tests, only processes do
                    "-cp",
                    ":".join(map(str, jars())),
                    "org.apache.zookeeper.server.ZooKeeperServerMain",
                    str(self.folder / "zoo.cfg"),
                ],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=terminate_with_parent(),
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"ZooKeeper did not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        """A port that is open says nothing: without all of its jars it drops each connection."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"srvr")
                return b"Mode: " in connection.recv(4096)
        except OSError:
            return False

    def kill(self) -> None:
        """SIGKILL; what it has answered stays, sessions too."""
        process = self._running()
        process.kill()
        process.wait(STOP_SECONDS)
        self.alive.discard(self)

    def freeze(self) -> None:
        """It answers nothing, and connections stay open."""
        self._running().send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on where it was."""
        self._running().send_signal(signal.SIGCONT)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It stands still in the block, and goes on behind it, whatever happens there."""
        self.freeze()
        try:
            yield
        finally:
            self.thaw()

    def remove(self) -> None:
        """End it and remove its folder."""
        if self in self.alive:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _running(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None
        return self._process


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
