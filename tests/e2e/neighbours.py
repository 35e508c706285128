"""Other programs that may sit on the port where a broker was expected: small ones on loopback."""

import http.server
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

HELD_SECONDS = 60.0

Behaviour = Callable[[socket.socket], None]


@contextmanager
def neighbour(behave: Behaviour) -> Iterator[str]:
    """HOST:PORT of a server that does `behave(connection)` for each connection."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)

        def one(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                connection.settimeout(HELD_SECONDS)
                behave(connection)

        def serve() -> None:
            while not done.is_set():
                with suppress(TimeoutError):
                    threading.Thread(target=one, args=(listener.accept()[0],), daemon=True).start()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            done.set()
            thread.join(5)


@contextmanager
def http_server() -> Iterator[str]:
    """HOST:PORT of Python's own HTTP server."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Nothing on the test's standard error."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(5)


def silent(connection: socket.socket) -> None:
    """Takes everything, says nothing."""
    while connection.recv(1 << 16):
        pass


def redis(connection: socket.socket) -> None:
    """Answers what it does not know as Redis does."""
    connection.recv(1 << 16)
    connection.sendall(b"-ERR unknown command 'x', with args beginning with: \r\n")
    connection.recv(1 << 16)


def ssh(connection: socket.socket) -> None:
    """Greets first."""
    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
    connection.recv(1 << 16)


def hangs_up(connection: socket.socket) -> None:
    """Takes the connection and ends it."""


def noise(connection: socket.socket) -> None:
    """Answers with bytes that mean nothing."""
    connection.recv(1 << 16)
    connection.sendall(bytes(range(255, 0, -1)))
    connection.recv(1 << 16)
