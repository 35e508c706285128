"""The address: read, judged, bound, and what stands in the way said in words."""

import resource
import socket

import pytest

from tfmq.errors import ConfigError, NotAllowed
from tfmq.server import listening


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("127.0.0.1:8367", ("127.0.0.1", 8367)),
        ("[::1]:0", ("::1", 0)),
        ("localhost:65535", ("localhost", 65_535)),
    ],
)
def test_an_address_is_read(listen: str, address: tuple[str, int]) -> None:
    assert listening.parse(listen) == address


@pytest.mark.parametrize(
    "listen", ["8367", ":8367", "localhost:", "localhost:http", "localhost:65536", "h:-1", "h:²"]
)
def test_what_is_no_address_is_refused_with_an_example(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:8367"):
        listening.parse(listen)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_leave(host: str) -> None:
    listening.check_exposure(host, insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_other_addresses_need_leave(host: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.insecure = true"):
        listening.check_exposure(host, insecure=False)
    listening.check_exposure(host, insecure=True)


def test_a_taken_port_is_said_with_who_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(NotAllowed, match=rf"{port} is taken: something answers there"):
            listening.bind("127.0.0.1", port)


def test_an_address_of_another_machine_is_said_so() -> None:
    with pytest.raises(ConfigError, match="no address"):
        listening.bind("192.0.2.1", 0)


def test_a_host_that_is_not_known_is_said_so() -> None:
    with pytest.raises(ConfigError, match="not known"):
        listening.bind("no-such-host.invalid", 0)


def test_connections_leave_room_for_other_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limit))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limit.__setitem__(slice(None), new))
    assert listening.connections_max(500, 100) == 500
    assert limit == [1024, 4096]
    assert listening.connections_max(2000, 100) == 2000
    assert limit == [2356, 4096]
    assert listening.connections_max(10_000, 100) == 4096 - 100 - listening.DESCRIPTORS_KEPT
    assert limit == [4096, 4096]
