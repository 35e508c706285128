"""A real pseudo-terminal around the command line, and a small emulator of it that remembers every line it showed."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import Final, NamedTuple

import pyte

ROWS: Final = 60
SECONDS: Final = 60.0
"""After that a command is ended, and its test fails."""
BAR: Final = re.compile(r"[━╸╺]")
BAR_ALONE: Final = re.compile(r"[\w /.…-]+ [━╸╺]+ +[\d,]+ \d+:\d\d:\d\d")
"""A line of the bar as it should be: what is done, the bar, how many, for how long."""
PRELOADED: Final = (
    "tests.cli.terminal",
    "tfmq.admin",
    "tfmq.cli.log",
    "tfmq.cli.main",
    "tfmq.consumer",
    "tfmq.dead_letters.admin",
    "tfmq.dead_letters.sql_store",
    "tfmq.producer",
)
STEERING: Final = re.compile(rb"(?=[\r\n]|\x1b\[[0-9]*[A-H])")
"""Before these the cursor is about to leave its line: what that line shows then, a person has seen."""


class Shown(NamedTuple):
    """What a command did: its exit code, each text that a line of the screen showed, and the screen at the end."""

    code: int
    seen: list[str]
    screen: list[str]
    sent: bytes

    @property
    def bars(self) -> list[str]:
        return [line for line in self.seen if BAR.search(line)]

    @property
    def mixed(self) -> list[str]:
        """Lines on which a bar and something that is no part of it stood together."""
        return [line for line in self.bars if not BAR_ALONE.fullmatch(line)]


def in_terminal(
    arguments: Sequence[str],
    columns: int,
    environment: Mapping[str, str],
    typed: Sequence[tuple[str, str]] = (),
    output: str | None = None,
    bar_after: float = 0.0,
) -> Shown:
    """`tfmq ARGUMENTS` with a terminal of so many columns; `typed`: (text that is waited for, text typed then).

    `output`: a file that standard output goes to instead. `bar_after`: seconds until a progress bar is shown.
    The process is forked from one that has the modules loaded.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    process = context.Process(
        target=_command, args=(os.ttyname(slave), tuple(arguments), dict(environment), output, bar_after)
    )
    process.start()
    try:
        sent, screen, seen = _watched(process, master, columns, list(typed))
    finally:
        if process.is_alive():
            process.kill()
        process.join()
        os.close(master)
        os.close(slave)
    assert process.exitcode is not None
    return Shown(process.exitcode, seen, [line.rstrip() for line in screen.display], sent)


def _command(
    terminal: str, arguments: Sequence[str], environment: Mapping[str, str], output: str | None, bar_after: float
) -> None:
    """In the new process: its standard streams are the terminal, then the command line as the shell begins it."""
    os.setsid()
    opened = os.open(terminal, os.O_RDWR)
    for number in range(3):
        os.dup2(opened, number)
    if output is not None:
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(environment["PWD"])
    time.tzset()
    from tfmq.cli import output as cli_output
    from tfmq.cli.main import main

    cli_output.BAR_AFTER_SECONDS = bar_after
    main(arguments)


def _watched(
    process: BaseProcess, master: int, columns: int, typed: list[tuple[str, str]]
) -> tuple[bytes, pyte.Screen, list[str]]:
    """Feed the emulator until the process is over; look at the screen each time the cursor leaves a line."""
    screen = pyte.Screen(columns, ROWS)
    screen.set_mode(pyte.modes.LNM)
    stream = pyte.ByteStream(screen)
    seen: dict[str, None] = {}
    sent = b""
    until = time.monotonic() + SECONDS
    while True:
        ready, _, _ = select.select([master, process.sentinel], [], [], max(0.0, until - time.monotonic()))
        if master in ready:
            data = os.read(master, 1 << 16)
            sent += data
            for piece in STEERING.split(data):
                _look(screen, seen)
                stream.feed(piece)
            _look(screen, seen)
            if typed and any(typed[0][0] in line for line in seen):
                os.write(master, typed.pop(0)[1].encode())
        elif process.sentinel in ready:
            return sent, screen, list(seen)
        elif not ready:
            raise AssertionError(f"the command did not end: {sent.decode(errors='replace')[-2000:]}")


def _look(screen: pyte.Screen, seen: dict[str, None]) -> None:
    for number in screen.dirty:
        if number < ROWS:
            line = screen.buffer[number]
            seen.setdefault("".join(line[column].data for column in range(screen.columns)).rstrip())
    screen.dirty.clear()
