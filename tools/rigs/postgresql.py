"""A PostgreSQL server of one's own: a cluster in a temporary folder, on a Unix socket in it, without a network.

It runs as an unprivileged user, as PostgreSQL demands, and ends with the process that made it.
"""

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from tfmq.embedded import terminate_with_parent

START_SECONDS = 60.0
STOP_SECONDS = 30.0
PREPARED_TRANSACTIONS = 20
USERS = ("postgres", "nobody")
"""Whom a root asks to run it, the first that there is."""


def programs() -> Path | None:
    """The folder with `initdb` and `postgres`: Debian keeps the newest release's out of the PATH."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda each: each.parts[-2])
    found = shutil.which("postgres")
    if found:
        folders.append(Path(found).resolve().parent)
    usable = [each for each in folders if (each / "initdb").exists() and (each / "postgres").exists()]
    return usable[-1] if usable else None


def unprivileged() -> pwd.struct_passwd | None:
    """The user for it where this one is root; None: this one."""
    if os.geteuid() != 0:
        return None
    known = {each.pw_name: each for each in pwd.getpwall()}
    return next(known[name] for name in USERS if name in known)


class PostgresServer:
    """`start`, `stop`, `url()`. With `prepared` = 0 it knows no two-phase commit, as PostgreSQL is shipped.

    Without `fsync` it is faster, and loses data if the machine fails: in tests only processes do.
    """

    alive: ClassVar["set[PostgresServer]"] = set()

    def __init__(self, *, prepared: int = PREPARED_TRANSACTIONS, fsync: bool = False) -> None:
        found = programs()
        if found is None:
            raise FileNotFoundError("no PostgreSQL server is installed (Debian: apt-get install postgresql)")
        self._programs, self._user = found, unprivileged()
        # Not below pytest's folder: that one is closed to other users, and its path too long for a socket.
        self.folder = Path(tempfile.mkdtemp(prefix="tfmq-postgresql-"))
        self.log = self.folder / "log"
        self._prepared = prepared
        self._fsync = fsync
        self._process: subprocess.Popen[bytes] | None = None
        if self._user is not None:
            os.chown(self.folder, self._user.pw_uid, self._user.pw_gid)
        self._run("initdb", "--no-sync", "--auth=trust", "--username=tfmq", "--encoding=UTF8", "--locale=C")

    def _command(self, program: str, *arguments: str) -> list[str]:
        return [str(self._programs / program), "-D", str(self.folder / "data"), *arguments]

    def _as_user(self) -> dict[str, object]:
        """Arguments of `subprocess` that leave root behind."""
        if self._user is None:
            return {}
        return {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            self._command(program, *arguments),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            **self._as_user(),  # type: ignore[call-overload]
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stdout[-1000:]}{done.stderr[-1000:]}")

    def start(self) -> None:
        """Start it and wait until it takes connections. Raises RuntimeError with the end of its log else."""
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.folder),
            "max_prepared_transactions": str(self._prepared),
            "max_connections": "50",
            "fsync": "on" if self._fsync else "off",
        }
        chosen: Sequence[str] = [f"--{name}={value}" for name, value in settings.items()]
        self.alive.add(self)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command("postgres", *chosen),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=terminate_with_parent(),
                **self._as_user(),  # type: ignore[call-overload]
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL did not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.02)

    def _ready(self) -> bool:
        """The last line of its pid file says how far it is."""
        status = self.folder / "data" / "postmaster.pid"
        return status.exists() and status.read_text().endswith("ready   \n")

    def stop(self) -> None:
        """Stop it at once, its clients' connections with it; what they committed or prepared stays."""
        assert self._process is not None
        self._process.send_signal(3)  # SIGQUIT: an immediate shutdown, recovered from at the next start
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        (self.folder / "data" / "postmaster.pid").unlink(missing_ok=True)
        self.alive.discard(self)

    def remove(self) -> None:
        """Stop it and remove its folder."""
        if self in self.alive:
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def url(self, database: str = "postgres") -> str:
        """The address of one of its databases, for SQLAlchemy, blocking and asyncio."""
        return f"postgresql+psycopg://tfmq@/{database}?host={self.folder}"
