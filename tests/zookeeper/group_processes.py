"""Processes that work in one group, each through a proxy of its own, and their records of who had what when.

An `Observer` beside them looks at the offsets in ZooKeeper all the time, as any other client would.
"""

import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException
from kazoo.handlers.threading import KazooTimeoutError

from tests.zookeeper.worker import GROUP, TOPIC
from tools.rigs.proxy import Proxy
from tools.rigs.zookeeper import ZooKeeperServer

PARTITIONS = 10
LOOK_SECONDS = 0.02


class Event(NamedTuple):
    """What a worker has written down."""

    began: float
    ended: float
    partition: int
    generation: int
    offset: int
    what: str
    who: str


class Crew:
    """`join`, then whatever befalls them, then `examine`."""

    def __init__(self, zookeeper: ZooKeeperServer, root: str, folder: Path, session_seconds: float) -> None:
        self.zookeeper, self.root, self.folder = zookeeper, root, folder
        self.session_seconds = session_seconds
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.proxies: dict[str, Proxy] = {}
        self._events: list[Event] = []
        self._read: dict[str, int] = {}
        self._halves: dict[str, str] = {}

    def join(self, name: str) -> None:
        proxy = self.proxies[name] = Proxy(self.zookeeper.address)
        self.processes[name] = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.zookeeper.worker",
                f"zookeeper://{proxy.address}{self.root}",
                name,
                str(self.session_seconds),
                str(PARTITIONS),
                str(self.folder / f"{name}.log"),
            ],
            stdin=subprocess.DEVNULL,
            stderr=(self.folder / f"{name}.errors").open("wb"),
        )

    def signal(self, name: str, number: int) -> None:
        self.processes[name].send_signal(number)

    def events(self) -> list[Event]:
        """What all have written until now, in the order in which it began."""
        for name in self.processes:
            path = self.folder / f"{name}.log"
            if path.exists():
                with path.open() as log:
                    log.seek(self._read.get(name, 0))
                    text = self._halves.get(name, "") + log.read()
                    self._read[name] = log.tell()
                *lines, self._halves[name] = text.split("\n")
                for words in map(str.split, lines):
                    times, numbers = map(float, words[:2]), map(int, words[2:5])
                    self._events.append(Event(*times, *numbers, words[5], name))
        self._events.sort()
        return self._events

    def outs(self, since: float) -> list[Event]:
        """What was handed out from then on."""
        return [event for event in self.events() if event.began > since and event.what == "out"]

    def working(self, names: set[str], since: float) -> bool:
        """Whether every partition was handed out after `since`, and each of `names` has handed out something."""
        events = self.outs(since)
        partitions, workers = {each.partition for each in events}, {each.who for each in events}
        return partitions == set(range(PARTITIONS)) and workers >= names

    def examine(self) -> None:
        """0 dual owners, 0 offsets going back, nothing skipped."""
        for partition in range(PARTITIONS):
            mine = [event for event in self.events() if event.partition == partition]
            owners: dict[int, list[Event]] = {}
            for event in mine:
                if event.what == "out":
                    owners.setdefault(event.generation, []).append(event)
            for before, after in pairwise(owners[generation] for generation in sorted(owners)):
                check_handover(before, after)
            reached = 0
            for generation in sorted(owners):
                offsets = [event.offset for event in owners[generation]]
                assert offsets == list(range(offsets[0], offsets[-1] + 1))
                assert offsets[0] <= reached, f"{partition}: what is before {offsets[0]} was never handed out"
                reached = max(reached, offsets[-1] + 1)
            saved = sorted((event.generation, event.ended, event.offset) for event in mine if event.what == "saved")
            for earlier, later in pairwise(saved):
                assert earlier[2] <= later[2], f"{partition} went back: {earlier} {later}"

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        for proxy in self.proxies.values():
            proxy.close()


def check_handover(before: list[Event], after: list[Event]) -> None:
    """The time of an owner is over when that of the next begins. One message that it had in work at that moment may end
    later: where its process stood still.
    """
    taken_at = after[0].began
    late = [event for event in before if event.began >= taken_at]
    assert not late, f"two owners: {late[0]} is handed out although there is {after[0]}"
    overlapping = [event for event in before if event.ended > taken_at]
    assert len(overlapping) <= 1, f"two owners: {overlapping} beside {after[0]}"


@contextmanager
def crew_of(zookeeper: ZooKeeperServer, root: str, folder: Path, session_seconds: float) -> Iterator[Crew]:
    crew = Crew(zookeeper, root, folder, session_seconds)
    try:
        yield crew
    finally:
        crew.end()


@contextmanager
def cut_off(proxies: Mapping[str, Proxy], silent: bool) -> Iterator[None]:
    """Nothing passes: connections stay open and silent, or break at once, each new one too."""
    for proxy in proxies.values():
        proxy.cut_when_short = False
        proxy.up = proxy.down = (lambda data: b"") if silent else (lambda data: None)
        if not silent:
            proxy.cut()
    try:
        yield
    finally:
        for proxy in proxies.values():
            proxy.up = proxy.down = None
            proxy.cut()


class Observer:
    """Looks at the offsets of the group, and remembers the first that was smaller than one before."""

    def __init__(self, zookeeper: ZooKeeperServer, root: str) -> None:
        self.looks = 0
        self.went_back = ""
        self._highest: dict[str, int] = {}
        self._paths = [f"{root}/consumers/{GROUP}/offsets/{TOPIC}/0-{each}" for each in range(PARTITIONS)]
        self._client = KazooClient(zookeeper.address)
        self._client.start()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self._thread.start()

    def _look_on(self) -> None:
        while not self._done.wait(LOOK_SECONDS):
            with suppress(KazooException, KazooTimeoutError):  # away, as for everybody
                self._client.sync("/")
                for path in self._paths:
                    self._look(path)
                self.looks += 1

    def _look(self, path: str) -> None:
        data = self._client.get(path)[0] if self._client.exists(path) else b""
        offset = int(data.rpartition(b"-")[2] or 0)
        highest = self._highest.get(path, 0)
        if offset < highest and not self.went_back:
            self.went_back = f"{path} went back from {highest} to {offset}"
        self._highest[path] = max(highest, offset)

    def end(self) -> None:
        self._done.set()
        self._thread.join(60)
        self._client.stop()
        self._client.close()
