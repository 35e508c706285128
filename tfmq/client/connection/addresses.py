"""Broker addresses: `host:port`, with user and password if need be, and `file:PATH` for the broker of a data folder.

A password is never in the `str` or `repr` of an address. A text that may have a password, because it has an `@`, is not
quoted in errors, whatever is wrong with it.

`LocalBrokerAddress` finds the broker that runs on a data folder, or starts a broker. When a broker is ready, it writes
`HOST:PORT PROCESS` to DATA/address; at a clean stop it removes the file. The address is valid only while the process
named in the file holds the lock on DATA/lock. So a file that a killed broker has left is ignored.

A broker started by a client runs in its own session, so neither Ctrl-C nor the exit of the client's program ends it. It
exits after `IDLE_SECONDS` without clients. The client locks DATA/starting and passes the locked descriptor to the
broker, which keeps the lock until it exits. So only one broker starts at a time; other clients wait for its address.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tfmq.data_dir import STARTING_NAME, check_data_folder
from tfmq.errors import NOT_DONE, BadRequest, ConfigError, ConnectionFailed
from tfmq.limits import NAME_RULE, is_valid_name

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8367  # T-F-M-Q on a telephone keypad
SERVERS_VARIABLE = "TFMQ_SERVERS"
PASSWORD_VARIABLE = "TFMQ_PASSWORD"
"""The password for an address that names a user without one."""
PLAIN_SCHEME: Final = "tfmq"
TLS_SCHEME: Final = "tfmqs"
FILE_SCHEME = "file:"
"""Prefix of an address that is a data folder path instead of host and port."""


class TlsFiles(NamedTuple):
    """Paths of PEM files for the TLS of a client; "" for none.

    `ca` has the certificates of the authorities that the client trusts, by default those that the system trusts.
    `certificate` and `key` are its own certificate and private key; without `key`, both are in `certificate`.
    """

    ca: str = ""
    certificate: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user and the password, which `repr` leaves out."""

    user: str
    password: str = field(repr=False)


class BrokerAddress(NamedTuple):
    """The network address of one broker.

    `tls`: the files for a connection with TLS; None: without TLS. `credentials`: who logs in; None: no login.
    """

    host: str
    port: int
    tls: TlsFiles | None = None
    credentials: Credentials | None = None

    def url(self) -> str:
        """Return the address as `parse_servers` takes it, with the password and the files: not for display."""
        from urllib.parse import quote

        host = f"[{self.host}]" if ":" in self.host else self.host
        login = ""
        if self.credentials is not None:
            login = f"{quote(self.credentials.user, safe='')}:{quote(self.credentials.password, safe='')}@"
        files = "" if self.tls is None else "&".join(f"{k}={quote(v)}" for k, v in self.tls._asdict().items() if v)
        scheme = PLAIN_SCHEME if self.tls is None else TLS_SCHEME
        return f"{scheme}://{login}{host}:{self.port}{f'?{files}' if files else ''}"

    def __str__(self) -> str:
        """Return the address as it is written, without the password."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        scheme = "tfmqs://" if self.tls is not None else "tfmq://" if self.credentials is not None else ""
        return f"{scheme}{'' if self.credentials is None else f'{self.credentials.user}@'}{host}:{self.port}"


def data_folder_of(servers: str | Sequence[str] | None) -> str | None:
    """Return the path in `file:PATH`; None if `servers` are hosts and ports.

    If `servers` is None, the value of $TFMQ_SERVERS is used. Raises `BadRequest` if `file:` has no path, or is not the
    only address.
    """
    given = os.environ.get(SERVERS_VARIABLE) if servers is None else servers
    texts = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    folders = [each for each in texts if isinstance(each, str) and each.strip().startswith(FILE_SCHEME)]
    if not folders:
        return None
    path = folders[0].strip().removeprefix(FILE_SCHEME).strip()
    if path.startswith("//"):  # The address is a URL, for example file:///var/lib/tfmq.
        host, slash, rest = path[2:].partition("/")
        path = slash + rest if host in ("", "localhost") else ""
    if len(texts) > 1 or not path:
        raise BadRequest(
            f"{_quote(given)}: file: must be followed by the path of a data folder, and be the only address."
        )
    return path


def parse_servers(servers: str | Sequence[str] | None = None) -> tuple[BrokerAddress, ...]:
    """Parse `host:port`, a comma-separated list, `tfmq://host:port`, `tfmqs://host:port` (TLS), or a sequence of these.

    Before the host may follow `USER:PASSWORD@` or `USER@`, percent-encoded as in a URL. In a list or sequence, scheme
    and user hold until the next ones. After `tfmqs://` addresses may follow `?ca=FILE`, `certificate=FILE` and
    `key=FILE`, joined by `&`; they hold for that text, and until the next ones of a sequence.

    If `servers` is None, $TFMQ_SERVERS is parsed, or 127.0.0.1:8367 if it is not set. The default port is 8367. The
    password of a user without one is $TFMQ_PASSWORD. Raises `BadRequest` for an invalid address.
    """
    if servers is None:
        servers = os.environ.get(SERVERS_VARIABLE) or f"{DEFAULT_HOST}:{DEFAULT_PORT}"
    texts = [servers] if isinstance(servers, str) else servers
    if not isinstance(texts, Sequence) or not all(isinstance(each, str) for each in texts):
        raise BadRequest(f"Servers are text, host:port, or a list of such texts, not {type(servers).__name__}.")
    found: list[BrokerAddress] = []
    inherited = _Inherited()
    for each in texts:
        inherited = _parse_list(each, inherited, found)
    if not found:
        raise BadRequest(f"The list of servers is empty; write host:port, or leave it out for ${SERVERS_VARIABLE}.")
    return tuple(dict.fromkeys(found))


class _Inherited(NamedTuple):
    """What an address takes from those before it, unless it has its own."""

    scheme: str = PLAIN_SCHEME
    files: TlsFiles = TlsFiles()
    credentials: Credentials | None = None


def _parse_list(text: str, inherited: _Inherited, found: list[BrokerAddress]) -> _Inherited:
    """Append the addresses of one text to `found`. Return what the next text of a sequence inherits."""
    scheme, files, credentials = inherited
    addresses, question, query = text.partition("?")
    uses_tls = False
    if question:
        files = _parse_files(query)
    may_have_password = "@" in text
    for part in filter(None, map(str.strip, addresses.split(","))):
        try:
            given, separator, rest = part.partition("://")
            if separator:
                scheme = given
            else:
                rest = part
            if scheme not in (PLAIN_SCHEME, TLS_SCHEME):
                raise BadRequest(
                    f"{part!r} is not a broker's address: {scheme}:// is another protocol, tfmq:// and tfmqs:// are"
                    " ours."
                )
            user, at, rest = rest.rpartition("@")
            if at:
                credentials = _parse_credentials(user, scheme)
            host, port = _split_host_port(rest.rstrip("/"), part)
        except _WrongCredentials as error:
            raise BadRequest(error.sentence) from None
        except BadRequest:
            if may_have_password:
                # Also where this part has no @: an unencoded comma in a password divides it into two parts.
                raise BadRequest(
                    f"An address with a user is wrong: write tfmq://USER:PASSWORD@HOST:PORT or {TLS_SCHEME}://, and in"
                    f" the password %2C for a comma, %2F for /, %40 for @. It is not shown, because of the password."
                ) from None
            raise
        uses_tls = uses_tls or scheme == TLS_SCHEME
        tls = files if scheme == TLS_SCHEME else None
        found.append(BrokerAddress(host or DEFAULT_HOST, port, tls, credentials))
    if question and not uses_tls:
        raise BadRequest(f"{_quote(text)} names files for TLS: write tfmqs:// before the address.")
    return _Inherited(scheme, files, credentials)


ENCODING: Final = (
    "in a user and a password, write %40 for @, %3A for :, %2F for /, %2C for a comma, %3F for ?, %25 for %."
)


class _WrongCredentials(BadRequest):
    """Its sentence has no part of the password."""


def _parse_credentials(text: str, scheme: str) -> Credentials:
    """Parse `USER:PASSWORD`, or `USER` with the password in $TFMQ_PASSWORD. `scheme` is for the error."""
    from urllib.parse import unquote_to_bytes

    if "@" in text or "/" in text or re.search("%(?![0-9A-Fa-f]{2})", text):
        raise _WrongCredentials(f"An address has a character that must be percent-encoded: {ENCODING}")
    user, _, password = text.partition(":")
    try:
        user, password = unquote_to_bytes(user).decode(), unquote_to_bytes(password).decode()
    except UnicodeDecodeError:
        raise _WrongCredentials("The user and the password in an address must be UTF-8, percent-encoded.") from None
    if not user:
        raise _WrongCredentials("An address has an @ without a user before it: write tfmq://USER:PASSWORD@HOST:PORT.")
    if not is_valid_name(user):
        # The name is not shown, because a password may have been written in its place.
        raise _WrongCredentials(f"The user in an address cannot be one: {NAME_RULE}.")
    password = password or os.environ.get(PASSWORD_VARIABLE, "")
    if not password:
        raise _WrongCredentials(
            f"The address of the user {user} has no password: set ${PASSWORD_VARIABLE}, or write"
            f" {scheme}://{user}:PASSWORD@HOST:PORT."
        )
    return Credentials(user, password)


_USER: Final = re.compile(r"((?:^|,)\s*(?:[a-z]+://)?[^:@/,?]+)(:[^@]*)?@")
"""The user of an address, with the password in the second group."""


def with_password(servers: str, password: str) -> str:
    """Return `servers` with this password for each user without one, for a process that has no $TFMQ_PASSWORD."""
    from urllib.parse import quote

    return _USER.sub(lambda user: f"{user[1]}{user[2] or ':' + quote(password, safe='')}@", servers)


def without_password(servers: str) -> str:
    """Return `servers` with users, but without their passwords."""
    return _USER.sub(r"\1@", servers)


def _quote(servers: object) -> str:
    """Return the `repr` of what a user has written as addresses, unless a password may be in it."""
    shown = repr(servers)
    return "This address (not shown, because it may have a password)" if "@" in shown else shown


def _parse_files(query: str) -> TlsFiles:
    """Parse `ca=FILE&certificate=FILE&key=FILE`, percent-encoded as in a URL; `~` is the home folder."""
    from urllib.parse import unquote

    found: dict[str, str] = {}
    if "," in query:  # what follows may be a further address, with a password, which must not be shown
        raise BadRequest(
            "In a list of addresses the files follow the last one: tfmqs://HOST:PORT,HOST:PORT?ca=FILE. A comma in the"
            " name of a file is %2C."
        )
    for pair in query.split("&"):
        name, _, path = pair.partition("=")
        if name not in TlsFiles._fields or not path or name in found:
            if "@" in query:  # Part of a password with a question mark, which must not be shown.
                raise BadRequest(f"After the ? of an address follow files for TLS, not an @: {ENCODING}")
            raise BadRequest(
                f"?{query}: after a broker's address follow ca=FILE, certificate=FILE and key=FILE, joined by &."
            )
        found[name] = os.path.expanduser(unquote(path))
    if "key" in found and "certificate" not in found:
        raise BadRequest("A key needs a certificate: ?certificate=FILE&key=FILE.")
    return TlsFiles(**found)


def _split_host_port(rest: str, text: str) -> tuple[str, int]:
    if rest.startswith("["):
        host, bracket, tail = rest[1:].partition("]")
        if not bracket or (tail and not tail.startswith(":")):
            raise BadRequest(f"{text!r} is not a broker's address; an IPv6 one is written [::1]:{DEFAULT_PORT}.")
        return host, _parse_port(tail[1:], text)
    if rest.count(":") > 1:
        raise BadRequest(f"{text!r} has more than one colon; an IPv6 address is written [::1]:{DEFAULT_PORT}.")
    if rest.isascii() and rest.isdigit():
        raise BadRequest(f"{rest!r} is a port: write {DEFAULT_HOST}:{rest}.")
    host, _, port = rest.partition(":")
    if "/" in host or "/" in port:
        raise BadRequest(f"{text!r} is not a broker's address; write host:port without a path.")
    return host, _parse_port(port, text)


_HOST_PORT: Final = re.compile(r"[A-Za-z0-9._-]{1,253}:[0-9]{1,5}|\[[0-9A-Fa-f:.%]{2,60}\]:[0-9]{1,5}")


def is_address(text: str) -> bool:
    """Return whether `text`, which a server sent, is HOST:PORT, so that it may be shown and compared."""
    return _HOST_PORT.fullmatch(text) is not None


def find_address(text: str, servers: Sequence[object]) -> int | None:
    """Return the index of the first of `servers` that has the host and port of `text`, which a server sent."""
    if not is_address(text):
        return None
    host, _, port_text = text.rpartition(":")
    wanted = host.strip("[]").casefold(), int(port_text)
    for index, each in enumerate(servers):
        if isinstance(each, BrokerAddress) and (each.host.casefold(), each.port) == wanted:
            return index
    return None


def _parse_port(port: str, text: str) -> int:
    if not port:
        return DEFAULT_PORT
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise BadRequest(f"{port!r} in {text!r} is not a port; a port is a number from 1 to 65535.")
    return int(port)


def describe_client(client: object, servers: Iterable[object], **arguments: object) -> str:
    """Return the `repr` of a client: <tfmq.Consumer 127.0.0.1:8367 group='billing'>. False values are left out."""
    module = type(client).__module__.partition("_")[0]
    variant = "tfmq" if module in ("tfmq.producer", "tfmq.consumer", "tfmq.admin") else module
    words = [f"{name}={value!r}" for name, value in arguments.items() if value]
    return f"<{' '.join([f'{variant}.{type(client).__name__}', ','.join(map(str, servers)), *words])}>"


ADDRESS_NAME: Final = "address"
LOCK_NAME: Final = "lock"
LOG_NAME: Final = "server.log"
REPLICA_FOLDER: Final = "replica"
REPLICATE_VARIABLE: Final = "TFMQ_REPLICATE_URL"
LOG_BYTES_MAX: Final = 1 << 20
"""If the log of the brokers that clients start is longer, the next start renames it to `server.log.1`."""
IDLE_SECONDS: Final = 10
"""A broker started by a client exits after this time without clients; scripts usually pause less between commands."""
START_TIMEOUT_SECONDS: Final = 30.0
"""Timeout of the first connection to a `file:` address. It includes the broker's start, with recovery after a crash."""
LOG_TAIL_BYTES: Final = 2000
"""How much of the log's end is read to find its last line after a failed start."""
FOLDER_MODE: Final = 0o750
FILE_MODE: Final = 0o640
"""Permissions of folders and files that the client creates, as the broker does: other users may not read the files."""
_CREATE_FLAGS: Final = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
"""O_NOFOLLOW, because a symbolic link in the folder must not make the client write to another file."""
_WILDCARD_ADDRESSES: Final = {"0.0.0.0": DEFAULT_HOST, "::": "::1"}
"""Maps an address by which a broker listens on all interfaces to the address by which this machine can connect."""
_PROGRAM: Final = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv.pop(1)]; from tfmq.server.main import main; main()"
)
"""Python program of the broker. It removes the current folder, which is the data folder, from `sys.path`."""
_BACKGROUND_SCRIPT: Final = '"$@" &'
"""Shell script that starts a command and exits. So the command is no child that this process must wait for."""


class LocalBrokerAddress:
    """The address of the broker on the data folder `path`. `start` is called to start a broker (see `start_broker`)."""

    def __init__(self, path: str, start: Callable[[str, int], None] | None = None) -> None:
        if "\0" in path:
            raise BadRequest(f"file:{path!r}: no path has a byte 0 in it.")
        self.path = os.path.abspath(os.path.expanduser(path))
        self._start_broker = start or start_broker
        self._broker_started = False

    def __str__(self) -> str:
        return f"file:{self.path}"

    def resolve(self) -> BrokerAddress:
        """Return the broker's network address. If no broker runs, start one and raise a retriable `ConnectionFailed`.

        The error is raised also by later calls until the broker is ready. If no broker can be started, or the folder
        has files that are not a broker's, a `ConnectionFailed` is raised that is not retriable.
        """
        try:
            os.makedirs(self.path, FOLDER_MODE, exist_ok=True)
            check_data_folder(self.path)
            return self._read_address() or self._join_or_start()
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

    def _read_address(self) -> BrokerAddress | None:
        """Return the address in DATA/address if the process that wrote it holds the lock, else None."""
        words = self._read_text(ADDRESS_NAME).split()
        if len(words) != 2 or words[1] != self._read_text(LOCK_NAME).strip() or not self._is_locked():
            return None
        host, _, port = words[0].rpartition(":")
        if not (port.isdigit() and 0 < int(port) < 1 << 16):
            return None
        host = host.strip("[]")
        self._broker_started = False
        return BrokerAddress(_WILDCARD_ADDRESSES.get(host, host), int(port))

    def _join_or_start(self) -> BrokerAddress:
        descriptor = os.open(os.path.join(self.path, STARTING_NAME), os.O_RDWR | _CREATE_FLAGS, FILE_MODE)
        handed_over = False
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._not_ready_error("starts, or stops") from None
            if self._is_locked():
                owner = self._read_text(LOCK_NAME).strip()
                raise self._not_ready_error(
                    f"is held by process {owner}, which has no address yet (a standby has none: name HOST:PORT)"
                )
            if self._broker_started:
                self._broker_started = False
                raise self._start_error()
            self._check_alone()
            with contextlib.suppress(FileNotFoundError):  # No broker runs, so the file has a former broker's address.
                os.unlink(os.path.join(self.path, ADDRESS_NAME))
            self._start_broker(self.path, descriptor)
            handed_over = self._broker_started = True
        finally:
            # Closing alone may not unlock: if another thread forks now, the child has a copy of the descriptor.
            if not handed_over:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)
        raise self._not_ready_error("starts")

    def _check_alone(self) -> None:
        """Raise ConnectionFailed for the folder of a server with replicas, which a broker without them must not change
        only because a client has asked for it."""
        if not os.path.isdir(os.path.join(self.path, REPLICA_FOLDER)) or os.environ.get(REPLICATE_VARIABLE):
            return
        # Imported here because clients of other addresses need none of it.
        from journal.disk import RealDisk
        from tfmq.replication.local_state import LocalStateFile

        role = LocalStateFile(RealDisk(), self.path).read(bytes).role
        if role:
            raise ConnectionFailed(
                f"{self.path} is the folder of a {role}, whose server does not run: start tfmq-server with its"
                f" replicate.url, or set ${REPLICATE_VARIABLE} to that. For a broker without replicas, start"
                " tfmq-server on the folder yourself.",
                outcome=NOT_DONE,
                retriable=False,
            )

    def _is_locked(self) -> bool:
        """Return whether a broker has locked the folder. Clients can test in parallel, because their lock is shared."""
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

    def _read_text(self, name: str) -> str:
        try:
            with open(os.path.join(self.path, name), encoding="ascii", errors="replace") as file:
                return file.read(100)
        except FileNotFoundError:
            return ""

    def _not_ready_error(self, what: str) -> ConnectionFailed:
        return ConnectionFailed(f"The broker on {self.path} is not ready: it {what}.", outcome=NOT_DONE)

    def _start_error(self) -> ConnectionFailed:
        """Return the error for a broker that exited right after its start, with the last line of its log."""
        log = os.path.join(self.path, LOG_NAME)
        with open(log, "rb") as file:
            file.seek(max(0, os.path.getsize(log) - LOG_TAIL_BYTES))
            last_line = file.read().decode(errors="replace").strip().rpartition("\n")[2]
        return ConnectionFailed(
            f"A broker was started on {self.path} and exited at once."
            f" Last line of its log: {last_line or 'none'} ({log}).",
            outcome=NOT_DONE,
            retriable=False,
        )


def start_broker(path: str, descriptor: int) -> None:
    """Start a broker on the data folder `path`, detached from this process.

    `descriptor`: the descriptor of the locked file DATA/starting. The broker inherits it, so the file stays locked.
    Raises OSError if the log or the shell cannot be opened, `ConnectionFailed` without `sys.executable` or if the shell
    returns an error.
    """
    if not sys.executable:
        raise ConnectionFailed(
            "sys.executable is empty, so no broker can be started: start tfmq-server yourself.", retriable=False
        )
    log = os.path.join(path, LOG_NAME)
    if os.path.exists(log) and os.path.getsize(log) > LOG_BYTES_MAX:
        os.replace(log, log + ".1")
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))
    settings = ["--data", path, "--listen", f"{DEFAULT_HOST}:0", "--log-level", "warning", "--set", "http.listen="]
    settings += ["--set", f"server.idle_exit_seconds={IDLE_SECONDS}"]
    command = ["/bin/sh", "-c", _BACKGROUND_SCRIPT, "sh", sys.executable, "-c", _PROGRAM, root, *settings]
    environment = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
    with open(os.open(log, os.O_WRONLY | os.O_APPEND | _CREATE_FLAGS, FILE_MODE), "ab") as out:
        shell = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=out,
            pass_fds=(descriptor,),
            cwd=path,
            # NOTIFY_SOCKET is removed: the service manager waits for a message from this program, not from the broker.
            env=environment,
            start_new_session=True,
        )
    if shell.returncode:
        raise ConnectionFailed(
            f"A broker cannot be started on {path}: the shell ended with {shell.returncode} ({log}).",
            outcome=NOT_DONE,
            retriable=False,
        )
