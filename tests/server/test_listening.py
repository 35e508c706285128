"""The address: bound, and what stands in the way said in words."""

import resource
import socket

import pytest

from tfmq.errors import ConfigError, NotAllowed
from tfmq.server import listener


def test_a_taken_port_is_said_with_who_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(NotAllowed, match=rf"{port} is taken: something answers there"):
            listener.bind_socket("127.0.0.1", port)


def test_an_address_of_another_machine_is_said_so() -> None:
    with pytest.raises(ConfigError, match="no address"):
        listener.bind_socket("192.0.2.1", 0)


def test_a_host_that_is_not_known_is_said_so() -> None:
    with pytest.raises(ConfigError, match="not known"):
        listener.bind_socket("no-such-host.invalid", 0)


def test_connections_leave_room_for_other_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limit))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limit.__setitem__(slice(None), new))
    assert listener.connections_max(500, 100) == 500
    assert limit == [1024, 4096]
    assert listener.connections_max(2000, 100) == 2000
    assert limit == [2356, 4096]
    assert listener.connections_max(10_000, 100) == 4096 - 100 - listener.DESCRIPTORS_KEPT
    assert limit == [4096, 4096]


@pytest.mark.parametrize(("open_files_max", "connections"), [(64, 23), (256, 119), (600, 326), (1024, 750)])
def test_a_low_limit_of_open_files_leaves_half_of_them_to_connections(
    monkeypatch: pytest.MonkeyPatch, open_files_max: int, connections: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (open_files_max, open_files_max))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: None)
    assert listener.connections_max(10_000, 18) == connections
