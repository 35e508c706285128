"""Who answers on a port that is taken: another tfmq, an HTTP server, Redis, something else; said in words.

It listens first (some greet), then says HELLO, then sends an empty line, which makes text protocols complain
in their own manner. Every step is bounded; nothing is changed at the other end.
"""

from __future__ import annotations

import socket

from tfmq.errors import BadFrame
from tfmq.protocol import commands, frames

PATIENCE_SECONDS = 0.4
"""How long each step waits: a neighbour on the same machine answers at once or never."""
LOOK_BYTES = 4096


def who_answers(host: str, port: int) -> str:
    """One clause about what listens there: "another tfmq server (tfmq 0.1.0) answers there"."""
    try:
        with socket.create_connection((host, port), timeout=PATIENCE_SECONDS) as connection:
            return _ask(connection)
    except OSError:
        return "something holds it that does not accept connections"


def _ask(connection: socket.socket) -> str:
    hello = commands.Hello(commands.MAGIC, commands.VERSION_MIN, commands.VERSION_MAX, "neighbour", {})
    questions = (
        b"",
        b"".join(frames.encode((commands.BY_REQUEST[commands.Hello].code, 0, *hello))),
        b"\r\n\r\n",
    )
    for question in questions:
        connection.sendall(question)
        answer = _listen(connection)
        if answer is not None:
            return name_of(answer)
    return "something answers there that does not say what it is"


def _listen(connection: socket.socket) -> bytes | None:
    """What comes within the time; None if nothing does."""
    try:
        return connection.recv(LOOK_BYTES)
    except TimeoutError:
        return None


def name_of(answer: bytes) -> str:
    """What kind of program gave this answer, b"" for one that hung up."""
    speaker = frames.speaker(answer)
    if speaker is not None:
        return f"{speaker} answers there"
    try:
        frame, _ = frames.frame_at(memoryview(answer), 0)
    except BadFrame:
        frame = None
    if frame is not None:
        server = frame.header[3] if len(frame.header) > 3 else "of another version"
        return f"another tfmq server ({server}) answers there"
    return "something answers there that is neither tfmq nor anything known"
