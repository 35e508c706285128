"""The two commands as processes of their own: what they print, how they end, and never a traceback."""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

PATIENCE_SECONDS = 60.0
TFMQ = ("tfmq.cli.main", "main")
SERVER = ("tfmq.server.main", "main")

# Another user may not be allowed to read Python and the checkout, so everything is loaded before root is left.
AS_USER = """
import importlib, os, pkgutil, sys
import journal, tfmq, tfmq.server.reactor, click, rich.console, rich.table, encodings.ascii, encodings.idna, stringprep
for package in (journal, tfmq):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(found.name)
tfmq.server.reactor.install_reactor()
user = int(sys.argv.pop(1))
if user:
    os.setgroups([]); os.setgid(user); os.setuid(user)
main = getattr(importlib.import_module(sys.argv.pop(1)), sys.argv.pop(1))
main()
"""
DIRECTLY = "import importlib, sys; getattr(importlib.import_module(sys.argv.pop(1)), sys.argv.pop(1))()"


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: bytes
    err: str

    @property
    def sentence(self) -> str:
        """The one line on standard error that is not a line of a server's log."""
        lines = [line for line in self.err.splitlines() if line.startswith(("tfmq: ", "tfmq-server: ", "Error: "))]
        assert len(lines) == 1, self.err
        return lines[0]


def tfmq(*arguments: str, servers: str | None = None, given: bytes = b"", user: int = 0) -> Ended:
    """`tfmq ARGUMENTS`, with `servers` in the environment; by another user than root where `user` is one's number."""
    return ended(command(TFMQ, arguments, user), servers, given)


def tfmq_server(*arguments: str, user: int = 0) -> Ended:
    """A `tfmq-server ARGUMENTS` that is not going to be ready."""
    return ended(command(SERVER, arguments, user), None, b"")


def command(program: tuple[str, str], arguments: Sequence[str], user: int = 0) -> list[str]:
    """The command line of one of the two programs."""
    if user:
        return [sys.executable, "-c", AS_USER, str(user), *program, *arguments]
    return [sys.executable, "-c", DIRECTLY, *program, *arguments]


def environment(servers: str | None = None) -> dict[str, str]:
    """This process's, with the broker's address."""
    return os.environ | ({} if servers is None else {"TFMQ_SERVERS": servers})


def ended(line: list[str], servers: str | None, given: bytes) -> Ended:
    done = subprocess.run(line, input=given, capture_output=True, timeout=PATIENCE_SECONDS, env=environment(servers))
    found = Ended(done.returncode, done.stdout, done.stderr.decode(errors="replace"))
    assert "Traceback" not in found.err, found.err
    return found
