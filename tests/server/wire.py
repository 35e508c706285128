"""A real server process, and a plain client that speaks frames: for the tests that need both."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from journal.record.format import make_record
from tfmq.protocol import commands, frames
from tfmq.protocol.commands import BY_REQUEST

PATIENCE_SECONDS = 30.0


class Process:
    """`tfmq-server` with arguments, its address, what it logged."""

    def __init__(
        self, *arguments: str, environment: dict[str, str] | None = None, open_files: int | None = None
    ) -> None:
        def limit() -> None:
            if open_files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))

        self.process = subprocess.Popen(
            [sys.executable, "-m", "tfmq.server.main", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=limit,
            env={**os.environ, **(environment or {})},
        )

    def ready(self) -> tuple[str, int]:
        """Waits for the line; (host, port)."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready "), f"{line!r} {self.finish()}"
        host, _, port = line.split()[1].rpartition(":")
        return host, int(port)

    def finish(self) -> tuple[int, str, str]:
        """Waits for its end; (exit code, rest of standard output, standard error)."""
        out, err = self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode, out, err

    def stop(self) -> tuple[int, str, str]:
        """SIGTERM, and wait."""
        self.process.terminate()
        return self.finish()


@contextmanager
def running(data: Path, *arguments: str, open_files: int | None = None) -> Iterator[tuple[Process, tuple[str, int]]]:
    """A server on `data`, on a free port; killed at the end if it is still there."""
    process = Process("--data", str(data), "--listen", "127.0.0.1:0", *arguments, open_files=open_files)
    try:
        yield process, process.ready()
    finally:
        if process.process.poll() is None:
            process.process.kill()
            process.finish()


class Wire:
    """One connection; `ask` is a request and its reply."""

    def __init__(self, address: tuple[str, int], hello: bool = True) -> None:
        self.socket = socket.create_connection(address, timeout=PATIENCE_SECONDS)
        self._decoder = frames.Decoder()
        self._frames: list[frames.Frame] = []
        self._correlation = 0
        if hello:
            self.ask(commands.Hello("TFMQ", 1, 1, "test", {}))

    def send(self, request: Any, body: bytes = b"") -> int:
        """Send a request; its correlation number."""
        self._correlation += 1
        header = (BY_REQUEST[type(request)].code, self._correlation, *request)
        self.socket.sendall(b"".join(frames.encode(header, body)))
        return self._correlation

    def receive(self) -> frames.Frame:
        """The next reply."""
        while not self._frames:
            data = self.socket.recv(1 << 20)
            if not data:
                raise ConnectionError("the server ended the connection")
            self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    def ask(self, request: Any, body: bytes = b"") -> Any:
        """The reply's fields; an error reply raises AssertionError with its code."""
        correlation = self.send(request, body)
        header = self.receive().header
        assert header[0] == 0, header
        assert header[1] == correlation
        return header[2:]

    def close(self) -> None:
        self.socket.close()

    def topic(self, name: str) -> int:
        """Makes a topic; its incarnation."""
        incarnation: int = self.ask(commands.CreateTopic(name, 1, {}))[0]
        return incarnation

    def produce(self, topic: str, incarnation: int, payloads: list[bytes], acks: int = 2) -> Any:
        """Leases a producer id and appends the payloads as one batch; the reply's fields."""
        producer = self.ask(commands.LeaseProducerIds(1))[0]
        return self.ask(*batch(topic, incarnation, producer, 0, payloads, acks))


def batch(
    topic: str, incarnation: int, producer: int, sequence: int, payloads: list[bytes], acks: int = 2
) -> tuple[commands.Produce, bytes]:
    """The request and body for a batch in one block."""
    body = b"".join(
        make_record(payload, (producer << 24) + sequence + number) for number, payload in enumerate(payloads)
    )
    blocks = [commands.Block(len(body), len(payloads), zlib.crc32(body))]
    return (commands.Produce(topic, incarnation, 0, producer, sequence, len(payloads), acks, blocks), body)
