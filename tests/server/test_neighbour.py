"""Who answers on a taken port: small servers on loopback that behave like the real ones."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tfmq.protocol import frames
from tfmq.server.listener import describe_port_owner


@contextmanager
def server(behave: Callable[[socket.socket], None]) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(10)
                behave(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(20)


def tfmq(connection: socket.socket) -> None:
    connection.recv(1000)
    connection.sendall(b"".join(frames.encode((0, 0, 1, "tfmq 0.1.0", "node", {}, 2, []))))


def strange_tfmq(connection: socket.socket) -> None:
    connection.recv(1000)
    connection.sendall(b"".join(frames.encode((-28, 0))))


def text(answer: bytes) -> Callable[[socket.socket], None]:
    def behave(connection: socket.socket) -> None:
        got = b""
        while b"\r\n\r\n" not in got:
            got += connection.recv(1000)
        connection.sendall(answer)

    return behave


def silent(connection: socket.socket) -> None:
    connection.recv(1000)
    connection.recv(1000)
    connection.recv(1000)


@pytest.mark.long
@pytest.mark.parametrize(
    ("behave", "words"),
    [
        (tfmq, "another tfmq server (tfmq 0.1.0)"),
        (strange_tfmq, "another tfmq server"),
        (lambda connection: connection.sendall(b"SSH-2.0-OpenSSH"), "SSH"),
        (text(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "an HTTP server"),
        (text(b"-ERR unknown command\r\n"), "Redis"),
        (lambda connection: None, "neither tfmq nor anything known"),
        (silent, "does not say what it is"),
    ],
)
def test_the_one_who_answers_is_named(behave: Callable[[socket.socket], None], words: str) -> None:
    with server(behave) as port:
        assert words in describe_port_owner("127.0.0.1", port)


def test_a_port_that_is_held_but_not_served_is_said_so() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        assert "does not accept connections" in describe_port_owner("127.0.0.1", holder.getsockname()[1])
