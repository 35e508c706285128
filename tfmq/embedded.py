"""A broker as a child process, for scripts, notebooks and tests.

The broker that a client starts for a `file:` address is no child process. Its start, and how long it waits without
clients, are in `tfmq.client.connection.addresses`, because the client must not import this module or the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from tfmq.errors import BadRequest, ConnectionFailed

START_SECONDS = 15.0
STOP_SECONDS = 10.0  # between SIGTERM and SIGKILL
_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def local_server(
    path: str | os.PathLike[str] = "tfmq-data",
    *,
    listen: str = "127.0.0.1:0",
    settings: Mapping[str, object] | None = None,
    start_seconds: float = START_SECONDS,
) -> Iterator[str]:
    """Start a broker with its data in `path`, yield its "host:port", and stop it afterwards.

        with tfmq.local_server("./data") as servers:
            tfmq.Producer(servers)

    `settings`: keys as in the configuration file, for example {"log.segment_bytes": 1 << 20}. `start_seconds`: how
    long the start may take; recovery after a crash may need more. The broker also ends when this process dies. Raises
    `ConnectionFailed`, with the broker's last output, if it is not ready in time.
    """
    if not isinstance(path, str | os.PathLike):
        raise BadRequest(f"A broker's data are in a folder; {path!r} is no path.")
    command = [sys.executable, "-m", "tfmq.server.main", "--data", os.fspath(path), "--listen", listen]
    # Without HTTP unless asked for: several brokers of scripts and tests run on one machine, which has one such port.
    for key, value in {"http.listen": "", **(settings or {})}.items():
        command += ["--set", f"{key}={value}"]
    child = _ServerProcess(command)
    try:
        yield _wait_until_ready(child, time.monotonic() + start_seconds, start_seconds)
    finally:
        child.stop()


def _wait_until_ready(child: _ServerProcess, deadline: float, seconds: float) -> str:
    stream = child.process.stdout
    assert stream is not None
    line = b""
    while b"\n" not in line:
        remaining = deadline - time.monotonic()
        found, _, _ = select.select([stream], [], [], max(0.0, remaining))
        if not found:
            raise ConnectionFailed(f"tfmq-server was not ready within {seconds:g} s. {child.last_output_text()}")
        data = os.read(stream.fileno(), 4096)
        if not data:
            code = child.process.wait(STOP_SECONDS)
            raise ConnectionFailed(
                f"tfmq-server ended with code {code} before it was ready. {child.last_output_text()}"
            )
        line += data
    word, _, address = line.decode(errors="replace").splitlines()[0].partition(" ")
    if word != "ready" or not address:
        raise ConnectionFailed(f"tfmq-server said {line!r} instead of ready HOST:PORT.")
    return address


class _ServerProcess:
    """The child process that runs tfmq-server, and the thread that starts it.

    Linux ends the child when the *thread* that started it ends. So a thread of its own starts the child, and runs as
    long as the child does. The thread also reads the child's standard error, so that the child never blocks on writing
    to it, and keeps the last bytes.
    """

    KEPT_BYTES = 4096

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._last_output = b""
        self._error: OSError | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tfmq-local-server", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise ConnectionFailed(f"tfmq-server could not be started: {self._error}") from self._error

    def _run(self) -> None:
        try:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=terminate_with_parent(),
                start_new_session=True,  # Ctrl-C ends this program first, which then stops its broker
            )
        except OSError as error:
            self._error = error
            return
        finally:
            self._started.set()
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._last_output = (self._last_output + line)[-self.KEPT_BYTES :]

    def last_output_text(self) -> str:
        self._thread.join(0.5)
        output = self._last_output.decode(errors="replace").strip()
        return f"It said: {output}" if output else "It said nothing."

    def stop(self) -> None:
        process = self.process
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_SECONDS)
        self._thread.join(STOP_SECONDS)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def terminate_with_parent() -> Callable[[], None] | None:
    """Return a function for `preexec_fn`: it makes Linux end the child when the parent ends. None on other systems."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def request_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent died before prctl was called
            os._exit(1)

    return request_signal
