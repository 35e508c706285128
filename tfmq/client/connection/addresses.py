"""`file:PATH` as an address: the broker that runs on that folder, or one that is started for it.

A broker writes DATA/address, `HOST:PORT PROCESS`, when it is ready, and removes it at a clean stop. It is believed
while DATA/lock is held, and by that process: what a kill left behind is found out so. Where none runs, one is started:
in a session of its own, so that neither Ctrl-C nor the end of the program that started it ends it; it ends by itself
when nobody was connected for `IDLE_SECONDS`. Of several starters one holds DATA/starting; it hands the lock to the
broker, which has it for as long as it lives, so there is one start at a time, and the others wait for its address.

Nothing here waits for a broker: `Folder.find` says "not ready yet", and a link asks again.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from tfmq.data_dir import STARTING_NAME, check_data_folder
from tfmq.errors import NOT_DONE, BadRequest, ConfigError, ConnectionFailed, NotSupported

# Addresses of brokers: what a user may write, and what becomes of it.

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8367  # T-F-M-Q on a telephone
ENVIRONMENT = "TFMQ_SERVERS"
FOLDER_SCHEME = "file:"
"""Before the path of a data folder, instead of a host and port; see `folders`."""


class Server(NamedTuple):
    """One broker's address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def folder_of(servers: str | Sequence[str] | None) -> str | None:
    """The path in `file:PATH`, or in $TFMQ_SERVERS for None; None where `servers` are hosts and ports.

    Raises `BadRequest` for a `file:` without a path, or with another address beside it.
    """
    given = os.environ.get(ENVIRONMENT) if servers is None else servers
    texts = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    folders = [each for each in texts if isinstance(each, str) and each.strip().startswith(FOLDER_SCHEME)]
    if not folders:
        return None
    path = folders[0].strip().removeprefix(FOLDER_SCHEME).strip()
    if path.startswith("//"):  # as in a URL: file:///var/lib/tfmq
        host, slash, rest = path[2:].partition("/")
        path = slash + rest if host in ("", "localhost") else ""
    if len(texts) > 1 or not path:
        raise BadRequest(f"{given!r}: file: is followed by the path of a data folder, and stands alone.")
    return path


def parse_servers(servers: str | Sequence[str] | None = None) -> tuple[Server, ...]:
    """The addresses in `servers`: `host:port`, a comma list, `tfmq://host:port`, or a sequence of these.

    None means $TFMQ_SERVERS, else 127.0.0.1:8367; a missing port is 8367. Raises `BadRequest` naming the part that
    cannot be read, `NotSupported` for `tfmqs://` and for a user in the address.
    """
    if servers is None:
        servers = os.environ.get(ENVIRONMENT) or f"{DEFAULT_HOST}:{DEFAULT_PORT}"
    texts = [servers] if isinstance(servers, str) else servers
    if not isinstance(texts, Sequence) or not all(isinstance(each, str) for each in texts):
        raise BadRequest(f"Servers are text, host:port, or a list of such texts, not {servers!r}.")
    parts = [part for each in texts for part in each.split(",")]
    found = [parse_server(part.strip()) for part in parts if part.strip()]
    if not found:
        raise BadRequest(
            f"The list of servers is empty; write host:port, or leave it out for ${ENVIRONMENT}."
        )
    return tuple(dict.fromkeys(found))


def parse_server(text: str) -> Server:
    """One address. Raises as `parse_servers` does."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "tfmq", text
    if "@" in text:  # before any sentence that shows it
        raise NotSupported("An address with a user and password needs a later release; write host:port.")
    if scheme == "tfmqs":
        raise NotSupported(f"{text!r} asks for TLS, which this release does not have; write tfmq://.")
    if scheme != "tfmq":
        raise BadRequest(
            f"{text!r} is not a broker's address: {scheme}:// is another protocol, tfmq:// is ours."
        )
    host, port = _split(rest.rstrip("/"), text)
    return Server(host or DEFAULT_HOST, port)


def _split(rest: str, text: str) -> tuple[str, int]:
    if rest.startswith("["):
        host, bracket, tail = rest[1:].partition("]")
        if not bracket or (tail and not tail.startswith(":")):
            raise BadRequest(
                f"{text!r} is not a broker's address; an IPv6 one is written [::1]:{DEFAULT_PORT}."
            )
        return host, _port(tail[1:], text)
    if rest.count(":") > 1:
        raise BadRequest(
            f"{text!r} has more than one colon; an IPv6 address is written [::1]:{DEFAULT_PORT}."
        )
    host, _, port = rest.partition(":")
    if "/" in host or "/" in port:
        raise BadRequest(f"{text!r} is not a broker's address; write host:port without a path.")
    return host, _port(port, text)


def _port(port: str, text: str) -> int:
    if not port:
        return DEFAULT_PORT
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise BadRequest(f"{port!r} in {text!r} is not a port; a port is a number from 1 to 65535.")
    return int(port)


def described(client: object, servers: Iterable[object], **told: object) -> str:
    """A client as `repr` shows it, with what it was told: <tfmq.Consumer 127.0.0.1:8367 group='billing'>."""
    module = type(client).__module__.partition("_")[0]
    face = "tfmq" if module in ("tfmq.producer", "tfmq.consumer", "tfmq.admin") else module
    words = [f"{name}={value!r}" for name, value in told.items() if value]
    return f"<{' '.join([f'{face}.{type(client).__name__}', ','.join(map(str, servers)), *words])}>"


ADDRESS_NAME: Final = "address"
LOCK_NAME: Final = "lock"
LOG_NAME: Final = "server.log"
LOG_BYTES_MAX: Final = 1 << 20
"""A longer log is put aside at the next start, in place of the one before: it is read when a start failed."""
IDLE_SECONDS: Final = 10
"""A broker that was started here ends when nobody was connected for so long: enough for a shell script between two
commands, short enough to be gone when somebody looks what still runs."""
PATIENCE_SECONDS: Final = 30.0
"""How long a first connection is waited for: Python starts, and what a crash left is looked through."""
WORDS_BYTES: Final = 2000
"""So much of the end of the log is told when a start failed."""
FOLDER_MODE: Final = 0o750
FILE_MODE: Final = 0o640
"""As those of the broker: what is in it is not for everybody."""
_NEW: Final = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
"""Never through a link that somebody left there, to a file that is none of a broker's."""
_ANYWHERE: Final = {"0.0.0.0": DEFAULT_HOST, "::": "::1"}
"""What a broker that listens everywhere is reached under from the same machine."""
_PROGRAM: Final = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv.pop(1)];"
    " from tfmq.server.main import main; main()"
)
"""Without the current folder, which is the broker's: nothing in there is a module of its."""
_IN_BACKGROUND: Final = '"$@" &'
"""For a shell: nobody here is the parent of what it starts, so nobody need wait for its end."""


class Folder:
    """The address of whichever broker runs on the data folder at `path`."""

    def __init__(self, path: str, start: Callable[[str, int], None] | None = None) -> None:
        if "\0" in path:
            raise BadRequest(f"file:{path!r}: no path has a byte 0 in it.")
        self.path = os.path.abspath(os.path.expanduser(path))
        self._start = start or start_broker
        self._started = False

    def __str__(self) -> str:
        return f"file:{self.path}"

    def find(self) -> Server:
        """Where the broker listens. Starts one where none runs.

        Raises `ConnectionFailed`: retriable while the broker is not ready, and not where it cannot be started.
        Nothing is written into a folder that has somebody else's things in it.
        """
        try:
            os.makedirs(self.path, FOLDER_MODE, exist_ok=True)
            check_data_folder(self.path)
            return self._address() or self._join_or_start()
        except ConfigError as error:
            raise ConnectionFailed(error.sentence, outcome=NOT_DONE, retriable=False) from None
        except OSError as error:
            if isinstance(error, ConnectionFailed):
                raise
            raise ConnectionFailed(
                f"The folder {self.path} cannot be used for a broker: {error.strerror}.",
                outcome=NOT_DONE,
                retriable=False,
            ) from error

    def _address(self) -> Server | None:
        """What DATA/address says, where the process that wrote it holds the lock."""
        words = self._text(ADDRESS_NAME).split()
        if len(words) != 2 or words[1] != self._text(LOCK_NAME).strip() or not self._is_held():
            return None
        host, _, port = words[0].rpartition(":")
        if not (port.isdigit() and 0 < int(port) < 1 << 16):
            return None
        host = host.strip("[]")
        self._started = False
        return Server(_ANYWHERE.get(host, host), int(port))

    def _join_or_start(self) -> Server:
        descriptor = os.open(os.path.join(self.path, STARTING_NAME), os.O_RDWR | _NEW, FILE_MODE)
        handed_over = False
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._not_ready("starts, or stops") from None
            if self._is_held():
                holder = self._text(LOCK_NAME).strip()
                raise self._not_ready(f"is held by process {holder}, which has no address yet")
            if self._started:
                self._started = False
                raise self._failed()
            self._remove_stale()
            self._start(self.path, descriptor)
            handed_over = self._started = True
        finally:
            if not handed_over:  # also where another thread forks meanwhile: its copy must not keep the lock
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)
        raise self._not_ready("starts")

    def _is_held(self) -> bool:
        """Whether a process has the data folder. Shared for a moment, so that two who look do not see each other."""
        try:
            descriptor = os.open(os.path.join(self.path, LOCK_NAME), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)

    def _remove_stale(self) -> None:
        try:
            os.unlink(os.path.join(self.path, ADDRESS_NAME))
        except FileNotFoundError:
            return

    def _text(self, name: str) -> str:
        try:
            with open(os.path.join(self.path, name), encoding="ascii", errors="replace") as file:
                return file.read(100)
        except FileNotFoundError:
            return ""

    def _not_ready(self, what: str) -> ConnectionFailed:
        return ConnectionFailed(f"The broker on {self.path} is not ready: it {what}.", outcome=NOT_DONE)

    def _failed(self) -> ConnectionFailed:
        log = os.path.join(self.path, LOG_NAME)
        with open(log, "rb") as file:
            file.seek(max(0, os.path.getsize(log) - WORDS_BYTES))
            said = file.read().decode(errors="replace").strip().rpartition("\n")[2]
        return ConnectionFailed(
            f"A broker was started on {self.path} and ended at once. It said: {said or 'nothing'} ({log}).",
            outcome=NOT_DONE,
            retriable=False,
        )


def start_broker(path: str, descriptor: int) -> None:
    """Start a broker on the folder `path`, nobody's child and of no terminal; `descriptor` stays open in it.

    Raises OSError, and `ConnectionFailed` where there is no Python to start it with.
    """
    if not sys.executable:
        raise ConnectionFailed(
            "This program knows no Python to start a broker with: start tfmq-server yourself.",
            retriable=False,
        )
    log = os.path.join(path, LOG_NAME)
    if os.path.exists(log) and os.path.getsize(log) > LOG_BYTES_MAX:
        os.replace(log, log + ".1")
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    settings = ["--data", path, "--listen", f"{DEFAULT_HOST}:0", "--log-level", "warning"]
    settings += ["--set", f"server.idle_exit_seconds={IDLE_SECONDS}"]
    command = ["/bin/sh", "-c", _IN_BACKGROUND, "sh", sys.executable, "-c", _PROGRAM, root, *settings]
    environment = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
    with open(os.open(log, os.O_WRONLY | os.O_APPEND | _NEW, FILE_MODE), "ab") as out:
        shell = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=out,
            pass_fds=(descriptor,),
            cwd=path,
            env=environment,  # the service manager waits for the program, not for its broker
            start_new_session=True,
        )
    if shell.returncode:
        raise ConnectionFailed(
            f"A broker cannot be started on {path}: the shell ended with {shell.returncode} ({log}).",
            outcome=NOT_DONE,
            retriable=False,
        )
