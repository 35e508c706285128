"""Addresses of brokers: what a user may write, and what becomes of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tfmq.errors import BadRequest, NotSupported

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
