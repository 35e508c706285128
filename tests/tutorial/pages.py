"""What a page of the tutorial has its reader write and type, done: files are written, commands are typed into a shell,
one after the other as they are printed, and what they print is compared with the page.

Another than on the page are the ports, because others may use those, and what is another in each run (see `NAMELESS`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from importlib.metadata import distribution
from pathlib import Path
from typing import Final, NamedTuple

from tests import paths
from tests.scale import FRACTION, SCALE
from tests.tutorial.shell import SECONDS, Shell
from tools.demo_broker import free_port

ROOT = paths.ROOT
FENCE = re.compile(r"^```(\w*)(?: (\w+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
HEAD = re.compile(r"# (at the end of )?(\S+\.\w+)\n")
PORTS: Final = ("8367", "8000")
NAMELESS: Final = (
    (re.compile(r"\b[0-9a-f]{16}\b"), "ID"),
    (re.compile(r"\b[0-9a-f]{8}\b"), "BROKER"),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?"), "TIME"),
    (re.compile(r"[A-Z][a-z]+ \d+, \d{4} - \d\d:\d\d:\d\d"), "TIME"),
    (re.compile(r"\bversion \d+\.\d+[.\d]*"), "VERSION"),
    (re.compile(r"\b\d+\.\d+ ?s\b"), "SECONDS"),
    (re.compile(r"process \[\d+\]"), "PROCESS"),
    (re.compile("─+"), "─"),
    (re.compile(r'File "\S*/'), 'File "'),
    (re.compile(r"^ *~*\^+~*$"), "MARKS"),
)
"""Ids, times, durations, the widths of tables, and in tracebacks folders and the marks below an expression."""
AGAIN_SECONDS = 0.2


class Typed(NamedTuple):
    """A command, and what it prints. `until`: the reader types it again until it prints that."""

    command: str
    printed: list[str]
    until: bool


class Page:
    """One page of docs/tutorial, with a folder of its own for what is written. Nothing on it takes `seconds`, however
    busy the machine is.
    """

    def __init__(self, name: str, folder: Path, seconds: float = SECONDS) -> None:
        text = (ROOT / "docs" / "tutorial" / name).read_text()
        self.text = text
        self.folder = folder
        self.seconds = seconds
        ports = [str(free_port()) for _ in PORTS]
        for port, free in zip(PORTS, ports, strict=True):
            text = text.replace(port, free)
        self.blocks = FENCE.findall(text)
        self.servers = f"127.0.0.1:{ports[0]}"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TFMQ_"))}
        self.environment = inherited | {
            "HOME": str(folder),
            "XDG_STATE_HOME": str(folder / ".local" / "state"),
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "120",
            "TFMQ_SERVERS": self.servers,
            "TFMQ_SERVER_LISTEN": self.servers,
        }

    def write(self) -> None:
        """All its files, without typing anything."""
        for language, _, text in self.blocks:
            if language != "console":
                self._write(text)

    def follow(self) -> None:
        """All of it, from top to bottom; what is marked as long with the full counts only."""
        with Shell(self.folder, self.environment, self.seconds) as shell:
            for language, option, text in self.blocks:
                if option == "long" and SCALE <= FRACTION:
                    continue
                if language == "console":
                    for typed in commands(text, option == "until"):
                        self._type(shell, typed)
                elif language:
                    assert self._write(text), f"What is its reader to do with this?\n{text}"

    def found_out(self, test: str, program: str, before: str, after: str) -> str:
        """What pytest prints of one test of the page, with duplicates, when `before` is `after` in the program."""
        self.write()
        path = self.folder / program
        text = path.read_text()
        assert text.count(before) == 1, before
        path.write_text(text.replace(before, after))
        for tests in self.folder.glob("test_*.py"):
            marked = tests.read_text().replace(".tfmq_faults\n", ".tfmq_faults(faults='duplicate')\n")
            tests.write_text(marked)
        return self.run(f"pytest -q -k {test}", fails=True)

    def run(self, command: str, *, fails: bool = False) -> str:
        """What the command prints; it must do well, or not if it `fails`."""
        done = subprocess.run(
            command,
            shell=True,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=self.seconds,
        )
        assert (done.returncode != 0) == fails, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def _write(self, text: str) -> bool:
        head = HEAD.match(text)
        if head is None:
            return False
        path = self.folder / head[2]
        path.parent.mkdir(exist_ok=True)
        with path.open("a" if head[1] else "w") as file:
            # A reader copies the whole block. So the lines of a program have the numbers that its tracebacks name.
            file.write(text if path.suffix == ".py" else text[head.end() :])
        return True

    def _type(self, shell: Shell, typed: Typed) -> None:
        if typed.command.startswith("pip install "):
            for name in typed.command.split()[2:]:
                assert distribution(name), "the set-up has installed what its reader installs"
            return
        deadline = time.monotonic() + self.seconds
        wanted = steady(typed.printed)
        while True:
            printed = steady(shell.type(typed.command, 0 if typed.until else len(wanted)))
            if printed == wanted:
                return
            if not typed.until or time.monotonic() > deadline:
                raise AssertionError(f"$ {typed.command}\n" + "\n".join(["printed", *printed, "not", *wanted]))
            time.sleep(AGAIN_SECONDS)


def commands(text: str, until: bool) -> list[Typed]:
    """The commands of one block. A line that begins with `> ` goes on with the command before it."""
    found: list[Typed] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append(Typed(line[2:], [], until))
        elif line.startswith("> "):
            found[-1] = found[-1]._replace(command=f"{found[-1].command}\n{line[2:]}")
        else:
            found[-1].printed.append(line)
    return found


def steady(lines: list[str]) -> list[str]:
    """The lines, sorted, because what runs in the background prints when it likes; without what is another each time,
    and without spaces more than one, which fit the column of a table to it.
    """
    found = []
    for line in lines:
        for pattern, name in NAMELESS:
            line = pattern.sub(name, line)
        found.append(" ".join(line.split()))
    return sorted(line for line in found if line)
