"""The line on standard output, and systemd's datagram."""

import io
import socket
from pathlib import Path

import pytest

from tfmq.server.main import notify_systemd, print_ready


def test_the_line_is_exactly_that() -> None:
    out = io.StringIO()
    print_ready(out, "127.0.0.1:8367")
    assert out.getvalue() == "ready 127.0.0.1:8367\n"


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told_where_it_asks(tmp_path: Path, abstract: bool) -> None:
    path = f"@tfmq-test-{tmp_path.name}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + path[1:] if abstract else path)
        manager.settimeout(10)
        assert notify_systemd("READY=1", {"NOTIFY_SOCKET": path})
        assert manager.recv(100) == b"READY=1"


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "/nowhere/at/all"}])
def test_nobody_is_told_where_nobody_asks(environment: dict[str, str]) -> None:
    assert not notify_systemd("READY=1", environment)
