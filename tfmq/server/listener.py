"""Binds the listening address, describes a program that uses it, and computes how many connections are possible."""

from __future__ import annotations

import errno
import resource
import socket
from contextlib import suppress

from tfmq.errors import BadFrame, ConfigError, NotAllowed, TfmqError
from tfmq.protocol import commands, frames
from tfmq.server.transport import address_text

DESCRIPTORS_KEPT = 256
"""Number of file descriptors that connections leave free for logs opened after the start, folders and threads. If the
limit of open files is low, connections leave half of the descriptors that are free at the start."""


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound but does not listen yet. An empty host means all addresses.
    Raises ConfigError if the host is unknown or is not this machine, NotAllowed if the port cannot be used."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"server.listen: the host {host!r} is not known ({error.strerror}).") from None
    bound = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise listen_error(error, host, port) from None
    return bound


def listen_error(error: OSError, host: str, port: int) -> TfmqError:
    """Return the error that describes why the server cannot bind this address or listen on it."""
    where = address_text(host, port)
    if error.errno == errno.EADDRINUSE:
        return NotAllowed(
            f"The port {where} is taken: {describe_port_owner(host, port)}. Stop it, or choose another port with "
            f"--listen {address_text(host, port + 1 if port < 65_535 else 0)} (0 takes a free one)."
        )
    if error.errno == errno.EACCES:
        return NotAllowed(f"The port {where} may not be used by this user: take one from 1024 on.")
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"server.listen: this machine has no address {host}.")
    return NotAllowed(f"The server cannot listen at {where}: {error.strerror}.")


def connections_max(wanted: int, open_files: int) -> int:
    """Increase the soft limit of open files for `wanted` connections; return how many connections it then allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + open_files + DESCRIPTORS_KEPT
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return wanted
    free = soft - open_files
    return max(1, min(wanted, free - min(DESCRIPTORS_KEPT, free // 2)))


PROBE_SECONDS = 0.4
"""Timeout of each step of `describe_port_owner`. A program on this machine responds immediately or never."""
RESPONSE_BYTES_MAX = 4096


def describe_port_owner(host: str, port: int) -> str:
    """Return a clause that describes what uses a port, like "another tfmq server (tfmq 0.1.0) answers there".

    This waits for a greeting from the program. If none comes, it sends HELLO, and then an empty line, to which text
    protocols respond with an error. Each step has a timeout, and no step changes anything in the other program.
    """
    try:
        with socket.create_connection((host, port), timeout=PROBE_SECONDS) as connection:
            return _probe(connection)
    except OSError:
        return "something holds it that does not accept connections"


def _probe(connection: socket.socket) -> str:
    hello = commands.Hello(commands.MAGIC, commands.VERSION_MIN, commands.VERSION_MAX, "neighbour", {})
    questions = (b"", b"".join(frames.encode((commands.BY_REQUEST[commands.Hello].code, 0, *hello))), b"\r\n\r\n")
    for question in questions:
        connection.sendall(question)
        with suppress(TimeoutError):
            return describe_response(connection.recv(RESPONSE_BYTES_MAX))
    return "something answers there that does not say what it is"


def describe_response(response: bytes) -> str:
    """Return a clause that describes the program that sent `response`; b"" means that it closed the connection."""
    speaker = frames.detect_protocol(response)
    if speaker is not None:
        return f"{speaker} answers there"
    with suppress(BadFrame):
        frame, _ = frames.frame_at(memoryview(response), 0)
        if frame is not None:
            server = frame.header[3] if len(frame.header) > 3 else "of another version"
            return f"another tfmq server ({server}) answers there"
    return "something answers there that is neither tfmq nor anything known"
