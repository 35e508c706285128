"""A TCP proxy on loopback that understands frames, and does what a test says when a request or its reply comes by.

    tap.trap("COMMIT_GROUP", "request", lambda exchange: driver.kill())     # the broker never sees it
    tap.trap("COMMIT_GROUP", "reply", lambda exchange: "cut")               # the broker did it, the reply is lost

An act runs while the frame is held, so what it kills cannot be a step further. It gives "cut" to have the frame
swallowed and the connection ended, and anything else to let it pass.
"""

import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tfmq.protocol.commands import COMMANDS
from tfmq.protocol.frames import PREFIX, decode_header

NAMES = {command.code: command.name for command in COMMANDS}
CONNECT_SECONDS = 10.0
PATIENCE_SECONDS = 120.0

Moment = Literal["request", "reply"]


class Exchange(NamedTuple):
    """A request that came by, with the header of its reply if that is what is held."""

    command: str
    request: list[Any]
    reply: list[Any] | None
    client: tuple[str, int]

    def process(self) -> int:
        """The id of the process on this machine that sent the request."""
        return owner_of(self.client[1])


Act = Callable[[Exchange], object]


class Trap:
    """Acts once, at the `nth` frame of its kind; `sprung` is set when the act is done."""

    def __init__(self, command: str, moment: Moment, act: Act, nth: int) -> None:
        assert command in NAMES.values(), command
        self.command, self.moment, self.act, self.left = command, moment, act, nth
        self.sprung = threading.Event()
        self.failure: BaseException | None = None

    def wait(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Until it has acted."""
        assert self.sprung.wait(seconds), f"no {self.moment} of {self.command} came by"
        if self.failure is not None:
            raise self.failure


class Wiretap:
    """Between clients, which take `address`, and the broker at `target`."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self.target = (host, int(port))
        self.seen: list[str] = []
        """The commands of all requests that came by."""
        self._traps: list[Trap] = []
        self._lock = threading.Lock()
        self._done = False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def trap(self, command: str, moment: Moment, act: Act, nth: int = 1) -> Trap:
        """Have `act` called at the `nth` frame of that kind from now on."""
        trap = Trap(command, moment, act, nth)
        with self._lock:
            self._traps.append(trap)
        return trap

    def close(self) -> None:
        self._done = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while not self._done:
            try:
                near, client = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self.target, timeout=CONNECT_SECONDS)
                far.settimeout(None)
            except OSError:
                near.close()
                continue
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _Pipe(self, near, far, client)

    def passes(self, moment: Moment, exchange: Exchange) -> bool:
        """Whether that frame may go on; calls the act whose turn it is."""
        with self._lock:
            if moment == "request":
                self.seen.append(exchange.command)
            due = []
            for trap in self._traps:
                if (trap.command, trap.moment) == (exchange.command, moment):
                    trap.left -= 1
                    if trap.left == 0:
                        due.append(trap)
        verdicts = []
        for trap in due:
            try:
                verdicts.append(trap.act(exchange))
            except BaseException as error:  # wait() notifies the test
                trap.failure = error
            finally:
                trap.sprung.set()
        return "cut" not in verdicts


class _Pipe:
    """One connection: a thread for each direction."""

    def __init__(self, tap: Wiretap, near: socket.socket, far: socket.socket, client: tuple[str, int]) -> None:
        self.tap, self.near, self.far, self.client = tap, near, far, client
        self.requests: dict[int, list[Any]] = {}
        threading.Thread(target=self.run, args=(near, far, self.request), daemon=True).start()
        threading.Thread(target=self.run, args=(far, near, self.reply), daemon=True).start()

    def run(self, source: socket.socket, target: socket.socket, judge: Callable[[list[Any]], bool]) -> None:
        try:
            with source.makefile("rb") as stream:
                while prefix := stream.read(PREFIX.size):
                    size, header_size = PREFIX.unpack(prefix)
                    rest = stream.read(size - 4)
                    if not judge(decode_header(rest[:header_size])):
                        return
                    target.sendall(prefix + rest)
        except (OSError, ValueError, TypeError):
            return  # an end that was killed stops anywhere
        finally:
            self.cut()

    def request(self, header: list[Any]) -> bool:
        self.requests[header[1]] = header
        return self.tap.passes("request", self.exchange(header, None))

    def reply(self, header: list[Any]) -> bool:
        request = self.requests.pop(header[1])
        return self.tap.passes("reply", self.exchange(request, header))

    def exchange(self, request: list[Any], reply: list[Any] | None) -> Exchange:
        return Exchange(NAMES.get(request[0], str(request[0])), request, reply, self.client)

    def cut(self) -> None:
        for end in (self.near, self.far):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def owner_of(port: int) -> int:
    """The process that has the connection whose own end is that port of loopback."""
    wanted = None
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[1].rpartition(":")[2], 16) == port and fields[9] != "0":
            wanted = f"socket:[{fields[9]}]"
    assert wanted is not None, f"nobody has a connection from port {port}"
    owners = []
    for entry in Path("/proc").iterdir():
        if re.fullmatch(r"\d+", entry.name) and wanted in sockets_of(entry):
            owners.append(int(entry.name))
    # A process that was forked off later has its parent's connections too: the one that made it is the oldest.
    assert owners, wanted
    return min(owners)


def sockets_of(process: Path) -> set[str]:
    """What its files are links to."""
    found = set()
    with suppress(OSError):
        for file in (process / "fd").iterdir():
            with suppress(OSError):
                found.add(os.readlink(file))
    return found


@contextmanager
def tapped(target: str) -> Iterator[Wiretap]:
    """A tap in front of `target`, closed at the end."""
    tap = Wiretap(target)
    try:
        yield tap
    finally:
        tap.close()
