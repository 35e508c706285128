"""The address: bound, and what stands in the way said in words."""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tfmq.errors import ConfigError, NotAllowed
from tfmq.protocol import frames
from tfmq.server.connection_limits import DESCRIPTORS_KEPT, connections_max
from tfmq.server.server import bind_socket, describe_port_owner


def test_a_taken_port_is_said_with_who_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(NotAllowed, match=rf"{port} is taken: something answers there"):
            bind_socket("127.0.0.1", port)


def test_an_address_of_another_machine_is_said_so() -> None:
    with pytest.raises(ConfigError, match="no address"):
        bind_socket("192.0.2.1", 0)


def test_a_host_that_is_not_known_is_said_so() -> None:
    with pytest.raises(ConfigError, match="not known"):
        bind_socket("no-such-host.invalid", 0)


def test_connections_leave_room_for_other_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limit))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limit.__setitem__(slice(None), new))
    assert connections_max(500, 100) == 500
    assert limit == [1024, 4096]
    assert connections_max(2000, 100) == 2000
    assert limit == [2356, 4096]
    assert connections_max(10_000, 100) == 4096 - 100 - DESCRIPTORS_KEPT
    assert limit == [4096, 4096]


@pytest.mark.parametrize(("open_files_max", "connections"), [(64, 23), (256, 119), (600, 326), (1024, 750)])
def test_a_low_limit_of_open_files_leaves_half_of_them_to_connections(
    monkeypatch: pytest.MonkeyPatch, open_files_max: int, connections: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (open_files_max, open_files_max))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: None)
    assert connections_max(10_000, 18) == connections


# Who answers on a taken port: small servers on loopback that behave like the real ones.


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
