"""A live broker for the tests of the commands, and the command line as a function in this process."""

import io
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tfmq.cli.main import run
from tools.rigs.live_server import LiveServer

GUARD_SECONDS = 60.0


class Ran(NamedTuple):
    """What a command line did."""

    code: int
    out: bytes
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.decode().splitlines()

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def objects(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


Cli = Callable[..., Ran]


@pytest.fixture(autouse=True)
def _log_levels_are_restored() -> Iterator[None]:
    """Commands set levels of the process's loggers, and the process goes on with other tests."""
    loggers = [logging.getLogger(name) for name in ("tfmq", "tfmq.connection", "tfmq.client")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    server = LiveServer(tmp_path_factory.mktemp("cli") / "data")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[LiveServer]:
    """A broker that a test may kill and start again."""
    server = LiveServer(tmp_path / "data")
    server.start()
    yield server
    if server in LiveServer.alive:
        server.stop()


class Shown:
    """What a command has written so far, also while it runs."""

    def __init__(self, capture: pytest.CaptureFixture[bytes]) -> None:
        self._capture = capture
        self.out, self.err = b"", ""

    def read(self) -> None:
        found = self._capture.readouterr()
        self.out += found.out
        self.err += found.err.decode()

    def wait_for(self, text: str) -> None:
        """Wait until `text` was written on standard output or standard error."""
        ends = time.monotonic() + GUARD_SECONDS
        while text not in self.err and text.encode() not in self.out:
            assert time.monotonic() < ends, (text, self.out, self.err)
            time.sleep(0.02)
            self.read()


@pytest.fixture
def shown(capsysbinary: pytest.CaptureFixture[bytes]) -> Shown:
    return Shown(capsysbinary)


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return str(request.node.name).replace("[", "-").replace("]", "")


@pytest.fixture
def offline(
    capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch, impatient_clients: None
) -> Cli:
    """The command line without a broker."""
    monkeypatch.setenv("TFMQ_SERVERS", "127.0.0.1:1")

    def call(*arguments: str, given: bytes = b"") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        code = run(arguments)
        shown = capsysbinary.readouterr()
        return Ran(code, shown.out, shown.err.decode())

    return call


@pytest.fixture
def cli(broker: LiveServer, offline: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The command line with the broker as its default."""
    monkeypatch.setenv("TFMQ_SERVERS", broker.address)
    return offline
