"""The soak: a broker with every feature, its clients, kills and faults for an hour: `python -m tools.rigs.soak --all`.

One broker on a file system of its own (an ext4 image) with TLS, users, HTTP and the verification of cold segments;
retention keeps its disk use bounded. Clients (tools/rigs/soak_worker.py, tools/rigs/rebalancing_worker.py) send plain
messages, transactions and delayed messages, copy a topic exactly once as a group that is rebalanced, and handle
messages of which some become dead letters; schedules send each minute. Meanwhile the broker is killed, stopped, frozen
and loses its disk space, clients are killed, stopped, frozen and lose their network. All that is stored is read along
and compared with what was acknowledged (tools/rigs/soak_audit.py). What must hold:

  1. nothing acknowledged is lost, nothing is stored twice, copies and dead letters included;
  2. transactions are whole, or nothing of them is there;
  3. delayed messages are stored once, not early, and not if they are cancelled; schedules send each time once;
  4. memory and descriptors of the broker and of its clients do not grow: slopes within the lives of the processes,
     after the warm-up; disk use stays under its cap;
  5. each scrape of /metrics that no fault disturbs is answered;
  6. `tfmq log verify` finds no damage at the end.

The broker is restarted only during the first part of the run (RESTARTS_SHARE); the rest is one life, for the slopes,
also of one client of each role.
The report (`--report`) is written again each half minute, so a run that is ended early leaves its figures.
`--table REPORT` prints a report as the tables of docs/soak.md.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import click
import trustme

import tfmq
from tfmq.dead_letters.admin import Desk
from tfmq.embedded import terminate_with_parent
from tfmq.errors import TfmqError
from tfmq.settings_table import SETTINGS
from tfmq.tls import client_context
from tfmq.units import parse_duration
from tools.bench.__main__ import commit
from tools.rigs import memory_in_use
from tools.rigs.live_server import LiveServer
from tools.rigs.loop_image import LoopImage, Unavailable, require_loop_devices
from tools.rigs.proxy import Proxy
from tools.rigs.soak_audit import BILLING, SHIPPING, SOURCE, TARGET, TICKS, WORK, Audit, Diary
from tools.rigs.soak_worker import LATER, PAIRS, PARTITIONS, end_prepared

MIB: Final = 1 << 20
BROKER_SETTINGS: Final = (
    "log.segment_bytes=1MiB",
    "retention.bytes=8MiB",
    "transaction.journal_file_bytes=1MiB",
    "transaction.outcome_seconds=300",
    "delay.outcome_seconds=300",
)
"""Small files, and short memories: what the broker keeps for a time reaches its full size during the warm-up."""
IMAGE_BYTES: Final = 512 * MIB
DISK_CAP_BYTES: Final = 96 * MIB
"""The topics of TOPIC_SETTINGS take 20 MiB; dead letters, the journal and delayed messages some of the rest."""
TOPIC_SETTINGS: Final = {
    SOURCE: {"retention.bytes": 2 * MIB, "log.segment_bytes": 256 << 10},
    TARGET: {"retention.bytes": 2 * MIB, "log.segment_bytes": 256 << 10},
    WORK: {"retention.bytes": 512 << 10, "log.segment_bytes": 64 << 10},
    LATER: {"retention.bytes": 256 << 10, "log.segment_bytes": 64 << 10},
    **{topic: {"retention.bytes": 512 << 10, "log.segment_bytes": 64 << 10} for topic, _ in PAIRS},
}
"""Each topic has all of its segments, which cost descriptors, before the slopes begin. No reader is so far behind."""
WARM_UP_SECONDS: Final = 600.0
AGE_SECONDS: Final = 300.0
"""Samples of a process that is younger do not count for the slopes: it still fills its caches. In a run of less than 50
minutes a tenth of the run."""
RESTARTS_SHARE: Final = 0.5
SAMPLE_SECONDS: Final = 5.0
REPORT_SECONDS: Final = 30.0
PAUSE_SECONDS: Final = (2.0, 18.0)
"""Between two events. In the second part of the run, twice as long."""
SHORTEST_SECONDS: Final = 60.0
"""In a shorter run events follow one another as quickly as in one of this length with a tenth of the pauses."""
START_SECONDS: Final = 120.0
"""Ten interpreters that start on a busy machine take long. Events begin when each kind of client has done something."""
END_SECONDS: Final = 180.0
ANSWER_SECONDS: Final = 120.0
HTTP_SECONDS: Final = 5.0
LONGEST_DELAY_SECONDS: Final = 90.0
GROWTH_MAX: Final = 0.05
"""A process is flat if its slope, over the time that was measured, is less than this part of its mean, ..."""
GROWTH_MB_MIN: Final = 3.0
"""... or less than this: allocators keep memory in pieces of about that size."""
IN_USE_MB_MIN: Final = 1.0
"""The same for the bytes that a client has allocated and not freed (tools/rigs/memory_in_use.py): no allocator is in
them, only what was under way when they were counted. Of a client, these are judged, and its resident memory only ..."""
RESIDENT_MB_MAX: Final = 10.0
"""... for growing by no more than this, which would be memory that no allocator of the process knows."""
DESCRIPTORS_MAX: Final = 8.0
"""A process is flat if its descriptors grow by no more during the time that was measured."""
SLOPE_SECONDS_MIN: Final = 300.0
"""A slope over less time says nothing."""
SCHEDULES: Final = 3
FEATURES: Final = {
    "tls": "server.tls_certificate",
    "users": "server.users",
    "http": "http.listen",
    "verification": "verification.interval_seconds",
    "disk": "",
}
"""What a run may have, and the setting that a commit must have for it."""
USER, PASSWORD = "soak", "soak-and-nothing-else"
EVENTS: Final = {
    "broker killed": 4,
    "broker stopped": 1,
    "broker frozen": 2,
    "client killed": 4,
    "client stopped": 2,
    "client frozen": 3,
    "network cut": 3,
    "disk full": 1,
}
"""What happens, and how often beside the others."""
RESTARTS: Final = frozenset({"broker killed", "broker stopped"})


@dataclass
class Report:
    """What was measured; `faults` is empty when everything held."""

    commit: str
    machine: str
    seed: int
    features: list[str]
    missing: list[str]
    """Features that this commit or this machine does not have."""
    settings: list[str]
    planned_seconds: float
    seconds: float = 0.0
    state: str = "running"
    events: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    troubles: dict[str, int] = field(default_factory=dict)
    """Errors that clients met, by code."""
    scrapes: dict[str, int] = field(default_factory=dict)
    processes: dict[str, dict[str, float]] = field(default_factory=dict)
    """By role: memory and descriptors, with their slopes."""
    series: dict[str, list[tuple[int, int, float, int, float | None]]] = field(default_factory=dict)
    """By role: (process id, minute, memory in MB, descriptors, MB in use), the last sample of each minute of each
    process."""
    disk: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    verdict: str = ""


# Samples of processes


@dataclass(frozen=True, slots=True)
class Sample:
    at: float
    """Seconds since the start of the run."""
    life: int
    """The process id."""
    age: float
    memory_mb: float
    descriptors: int
    processor_seconds: float
    in_use_mb: float | None = None
    """Bytes that are allocated and not freed; None of a process that does not tell."""


def sample_of(pid: int, at: float, age: float, in_use: int | None = None) -> Sample | None:
    """Return memory, descriptors and processor time of a process; None if it has ended. `in_use`: in bytes."""
    folder = Path(f"/proc/{pid}")
    try:
        pages = int((folder / "statm").read_text().split()[1])
        descriptors = len(os.listdir(folder / "fd"))
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    ticks = int(fields[11]) + int(fields[12])
    memory_mb, processor_seconds = pages * os.sysconf("SC_PAGE_SIZE") / 1e6, ticks / os.sysconf("SC_CLK_TCK")
    return Sample(at, pid, age, memory_mb, descriptors, processor_seconds, None if in_use is None else in_use / 1e6)


def pooled_slope(points: Sequence[tuple[int, float, float]]) -> tuple[float, float]:
    """Return the slope of y over x within lives, and the length of the longest life. `points`: (life, x, y).

    Each life has a level of its own, so a restart, which begins at another level, changes no slope.
    """
    lives: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for life, x, y in points:
        lives[life].append((x, y))
    squares = products = longest = 0.0
    for values in lives.values():
        mean_x = statistics.fmean(x for x, _ in values)
        mean_y = statistics.fmean(y for _, y in values)
        squares += sum((x - mean_x) ** 2 for x, _ in values)
        products += sum((x - mean_x) * (y - mean_y) for x, y in values)
        longest = max(longest, values[-1][0] - values[0][0])
    return (products / squares if squares else 0.0), longest


def summarize(samples: Sequence[Sample], warm_up: float, age: float = AGE_SECONDS) -> dict[str, float]:
    """Return the figures of one role. What was sampled before `warm_up`, or at a lower age, has no slope."""
    counted = [each for each in samples if each.at >= warm_up and each.age >= age]
    memory, seconds = pooled_slope([(each.life, each.at, each.memory_mb) for each in counted])
    descriptors, _ = pooled_slope([(each.life, each.at, float(each.descriptors)) for each in counted])
    used: dict[int, tuple[float, float]] = {}
    for each in samples:
        used[each.life] = each.processor_seconds, each.age
    in_use = [(each.life, each.at, each.in_use_mb) for each in counted if each.in_use_mb is not None]
    told = (
        {
            "in_use_mb_mean": statistics.fmean(size for _, _, size in in_use),
            "in_use_mb_per_hour": pooled_slope(in_use)[0] * 3600,
        }
        if in_use
        else {}
    )
    return {
        **told,
        "lives": float(len(used)),
        "memory_mb_mean": statistics.fmean(each.memory_mb for each in counted or samples),
        "memory_mb_max": max(each.memory_mb for each in samples),
        "memory_mb_per_hour": memory * 3600,
        "descriptors_max": float(max(each.descriptors for each in samples)),
        "descriptors_per_hour": descriptors * 3600,
        "slope_seconds": seconds,
        "processor_percent": 100 * sum(t for t, _ in used.values()) / max(1.0, sum(age for _, age in used.values())),
    }


def growth_faults(role: str, figures: dict[str, float]) -> list[str]:
    """Return a sentence for each figure of a role that grows."""
    seconds, faults = figures["slope_seconds"], []
    if seconds < SLOPE_SECONDS_MIN:
        return []
    resident = figures["memory_mb_per_hour"] * seconds / 3600
    limit = max(GROWTH_MB_MIN, GROWTH_MAX * figures["memory_mb_mean"])
    if "in_use_mb_mean" in figures:
        grown = figures["in_use_mb_per_hour"] * seconds / 3600
        if grown > max(IN_USE_MB_MIN, GROWTH_MAX * figures["in_use_mb_mean"]):
            faults.append(f"the memory in use of {role} grew by {grown:.1f} MB in {seconds:.0f} s")
        limit = RESIDENT_MB_MAX
    if resident > limit:
        faults.append(f"the memory of {role} grew by {resident:.1f} MB in {seconds:.0f} s")
    more = figures["descriptors_per_hour"] * seconds / 3600
    if more > DESCRIPTORS_MAX:
        faults.append(f"the descriptors of {role} grew by {more:.0f} in {seconds:.0f} s")
    return faults


# The processes


class SoakServer(LiveServer):
    """The broker; it ends with the rig."""

    begun = 0.0

    def start(self) -> None:
        super().start()
        self.begun = time.monotonic()


class Client:
    """A client process; one that ended is replaced by another with the next name."""

    def __init__(self, role: str, number: int, rig: Rig, program: Callable[[str, Path], list[str]]) -> None:
        self.role, self.number, self._rig, self._program = role, number, rig, program
        self._generation = 0
        self.diaries: list[Diary] = []
        self.frozen_until = 0.0
        self.start()

    @property
    def name(self) -> str:
        return f"{self.role}{self.number}.{self._generation}"

    def start(self) -> None:
        self._generation += 1
        path = self._rig.folder / f"{self.name}.diary"
        self._memory = self._rig.folder / f"{self.name}.memory"
        if self.role != MEMBER:
            self.diaries.append(Diary(path))
        self.log = self._rig.folder / f"{self.role}{self.number}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._program(self.name, path),
                stdout=log,
                stderr=log,
                env={**os.environ, **memory_in_use.ENVIRONMENT, memory_in_use.FILE_VARIABLE: str(self._memory)},
                preexec_fn=terminate_with_parent(),
            )
        self.begun = time.monotonic()
        self.frozen_until = 0.0

    def memory_in_use(self) -> int | None:
        """What the process has told last, in bytes; None if it has not told yet."""
        return memory_in_use.read_in_use(self._memory, self.process.pid)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self, seconds: float) -> None:
        self.process.send_signal(signal.SIGSTOP)
        self.frozen_until = time.monotonic() + seconds

    def thaw(self) -> None:
        if self.frozen_until:
            self.process.send_signal(signal.SIGCONT)
            self.frozen_until = 0.0

    def terminate(self) -> None:
        """Tell it to end in order, once: a second signal would meet an interpreter that has ended its handlers."""
        self.thaw()
        self.process.terminate()

    def end(self) -> str:
        """Wait until it has ended. Return what went wrong, or ""."""
        try:
            code = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return f"{self.name} did not end"
        return f"{self.name} ended with {code}: {self.last_words()}" if code else ""

    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-600:]


MEMBER: Final = "member"


class Reader(threading.Thread):
    """Reads every topic along, through every fault, and passes each message to the audit once."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(daemon=True)
        self._rig = rig
        self.halt = threading.Event()
        self.failure: BaseException | None = None
        self._next: dict[tuple[str, int], int] = {}

    def run(self) -> None:
        try:
            while not self.halt.is_set():
                try:
                    self._read()
                except TfmqError as error:
                    with self._rig.lock:
                        self._rig.audit.troubles[error.code] += 1
                    self.halt.wait(0.5)
        except BaseException as error:  # the rig reports it as a fault
            self.failure = error

    def _read(self) -> None:
        """Read until an error. A new consumer continues after the last message, so nothing is counted twice."""
        with tfmq.Consumer(
            self._rig.address, topics=list(self._rig.topics), start="earliest", timeout=ANSWER_SECONDS
        ) as consumer:
            for (topic, partition), offset in self._next.items():
                consumer.seek(topic, partition, offset=offset)
            while not self.halt.is_set():
                messages = consumer.poll(timeout=0.5, max_messages=5_000)
                with self._rig.lock:
                    for message in messages:
                        self._next[message.topic, message.partition] = message.next_offset
                        appended_ms = round(message.appended_at.timestamp() * 1000)
                        self._rig.audit.receive(
                            message.topic, message.partition, message.text, appended_ms, message.properties
                        )


class Watcher(threading.Thread):
    """Samples the processes, scrapes the HTTP server, reads diaries and writes the report."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(daemon=True)
        self._rig = rig
        self.halt = threading.Event()
        self.samples: dict[str, list[Sample]] = defaultdict(list)
        self.disk: list[float] = []
        self.scrapes: Counter[str] = Counter()
        self.failure: BaseException | None = None

    def run(self) -> None:
        reported = time.monotonic()
        try:
            while not self.halt.wait(SAMPLE_SECONDS if self._rig.is_long else SAMPLE_SECONDS / 10):
                self.sample()
                self.scrape()
                if time.monotonic() - reported >= REPORT_SECONDS:
                    reported = time.monotonic()
                    self._rig.write_report()
        except BaseException as error:  # the rig reports it as a fault
            self.failure = error

    def sample(self) -> None:
        rig = self._rig
        now = time.monotonic()
        process = rig.server.process
        rows: list[tuple[str, int, float, int | None]] = []
        if process is not None:
            rows.append(("broker", process.pid, rig.server.begun, None))
        rows += [(each.role, each.process.pid, each.begun, each.memory_in_use()) for each in rig.clients]
        for role, pid, begun, in_use in rows:
            found = sample_of(pid, now - rig.begun, now - begun, in_use)
            if found is not None and found.memory_mb:  # a process that was killed just now has none
                self.samples[role].append(found)
        with suppress(OSError):
            self.disk.append(folder_bytes(rig.data) / 1e6)
        rig.learn()

    def scrape(self) -> None:
        """Get /live, /ready and /metrics. What a fault disturbed does not count."""
        rig = self._rig
        if not rig.http:
            return
        disturbed = rig.disturbances, rig.is_disturbed
        for path in ("/live", "/ready", "/metrics"):
            result = "answered"
            try:
                with self._open(path) as response:
                    if path == "/metrics" and b"tfmq_" not in response.read():
                        result = "failed: no metrics in the answer"
            except OSError as error:
                result = f"failed: {path} {error}"
            if result != "answered" and (rig.is_disturbed or disturbed != (rig.disturbances, False)):
                result = "disturbed by a fault"
            self.scrapes[result] += 1

    def _open(self, path: str) -> Any:
        rig = self._rig
        request = urllib.request.Request(f"http{'s' if rig.ca else ''}://{rig.http}{path}")
        if "users" in rig.features:
            login = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
            request.add_header("Authorization", f"Basic {login}")
        context = client_context(rig.ca) if rig.ca else None
        return urllib.request.urlopen(request, timeout=HTTP_SECONDS, context=context)


def folder_bytes(folder: Path) -> int:
    """Return the space that the files of a folder use on the disk."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(path, name)).st_blocks * 512
    return total


# The rig


class Rig:
    def __init__(
        self, seconds: float, seed: int, folder: Path, features: Sequence[str], missing: Sequence[str]
    ) -> None:
        self.folder, self.seconds, self.random = folder, seconds, random.Random(seed)
        self.seed, self.features = seed, features
        self.is_long = seconds >= SHORTEST_SECONDS
        self.warm_up, self.age = min(WARM_UP_SECONDS, seconds / 3), min(AGE_SECONDS, seconds / 10)
        self.lock = threading.Lock()
        self.audit = Audit()
        self.clients: list[Client] = []
        self.ended: list[Client] = []
        """Clients that were told to end, and were not replaced."""
        self.events: Counter[str] = Counter()
        self.disturbances = 0
        self.is_disturbed = False
        self.faults: list[str] = []
        self.topics: dict[str, int] = {
            SOURCE: PARTITIONS[SOURCE], TARGET: PARTITIONS[SOURCE], WORK: PARTITIONS[WORK], LATER: 1, TICKS: 1,
            **dict(PAIRS),
        }  # fmt: skip
        self.image: LoopImage | None = None
        self.data = folder / "data"
        self.http = self.ca = ""
        settings = list(BROKER_SETTINGS)
        self._scheme, self._login, self._query = "tfmq", "", ""
        if "tls" in features:
            settings += self._make_certificates()
        if "users" in features:
            settings += self._make_users()
        if "http" in features:
            self.http = f"127.0.0.1:{free_port()}"
            settings.append(f"http.listen={self.http}")
        if "verification" in features:
            settings.append("verification.interval_seconds=60")
        if "disk" in features:
            self.image = LoopImage(size_bytes=IMAGE_BYTES)
            self.data = Path(self.image.mount_point) / "data"
            self.data.mkdir()
        self.server = SoakServer(self.data, *settings)
        self.server.log = folder / "server.log"
        self.proxy: Proxy | None = None
        self.reader, self.watcher = Reader(self), Watcher(self)
        machine = f"{platform.machine()}, Python {platform.python_version()}, {platform.system()} {platform.release()}"
        shown = [each for each in settings if "=" in each and str(folder) not in each]
        self.report = Report(commit(), machine, seed, list(features), list(missing), shown, seconds)
        self.report_path: Path | None = None
        self.begun = time.monotonic()

    def _make_certificates(self) -> list[str]:
        authority = trustme.CA()
        ca, certificate = self.folder / "ca.pem", self.folder / "server.pem"
        authority.cert_pem.write_to_path(str(ca))
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(certificate))
        self._scheme, self._query, self.ca = "tfmqs", f"?ca={ca}", str(ca)
        return [f"server.tls_certificate={certificate}"]

    def _make_users(self) -> list[str]:
        users = self.folder / "users.json"
        command = "import sys; from tfmq.cli.main import main; main(sys.argv[1:])"
        arguments = ["user", "add", USER, "--file", str(users), "--right", "admin", "--password-stdin"]
        program = [sys.executable, "-c", command, *arguments]
        subprocess.run(program, input=PASSWORD + "\n", text=True, check=True, capture_output=True, timeout=60)
        self._login = f"{USER}:{PASSWORD}@"
        return [f"server.users={users}"]

    def address_of(self, place: str) -> str:
        """Return the address for clients that reach the broker at `place`."""
        return f"{self._scheme}://{self._login}{place}{self._query}"

    @property
    def address(self) -> str:
        return self.address_of(self.server.address)

    # The run

    def run(self) -> Report:
        """Run everything once, and return the report. Ends all processes, also after an error."""
        try:
            self._start()
            try:
                self._make_events()
            finally:
                self._end_events()
            self._come_to_rest()
            self._check()
        except BaseException as error:
            self.faults.append(f"the rig failed: {error!r}")
            raise
        finally:
            self._end_processes()
            self.report.state = "complete" if not isinstance(sys.exc_info()[1], KeyboardInterrupt) else "interrupted"
            self.write_report()
        return self.report

    def _start(self) -> None:
        self.server.start()
        self.proxy = Proxy(self.server.address)
        with tfmq.Admin(self.address, timeout=ANSWER_SECONDS) as admin:
            for topic, partitions in self.topics.items():
                admin.create_topic(topic, partitions=partitions, settings=TOPIC_SETTINGS.get(topic, {}))
            for number in range(SCHEDULES):
                admin.schedule("* * * * *", TICKS, f"tick {number}", name=f"each-minute-{number}", misfire="all")
        self.begun = time.monotonic()
        self.reader.start()
        longest = str(min(LONGEST_DELAY_SECONDS, self.seconds / 4))
        for number in range(2):
            self._add("source", number)
            self._add("transactions", number)
            self._add(MEMBER, number)
        self._add("work", 0)
        self._add("timers", 0, longest)
        for group in (BILLING, SHIPPING):
            self._add(group, 0, self._store(group))
        until = time.monotonic() + START_SECONDS
        while not self.audit.is_under_way() and time.monotonic() < until:
            self._live(0.2)
            self.learn()
        self.begun = time.monotonic()
        self.watcher.start()

    def _add(self, role: str, number: int, argument: str = "") -> None:
        """Start a client. The second one of a role reaches the broker through the proxy."""
        assert self.proxy is not None
        address = self.address_of(self.proxy.address) if number else self.address
        work = "handler" if role in (BILLING, SHIPPING) else role

        def program(name: str, diary: Path) -> list[str]:
            seed = str(self.seed)
            if role == MEMBER:
                # The other ways have a transaction for each message, and would not keep up.
                return [sys.executable, "-m", "tools.rigs.rebalancing_worker", address, name, seed, "poll", str(diary)]
            return [sys.executable, "-m", "tools.rigs.soak_worker", work, address, name, seed, str(diary), argument]

        self.clients.append(Client(role, number, self, program))

    # What happens

    def _make_events(self) -> None:
        until = self.begun + self.seconds
        scale = 1.0 if self.is_long else 0.1
        while (now := time.monotonic()) < until:
            pause = scale * self.random.uniform(*PAUSE_SECONDS) * (1 if self._may_restart() else 2)
            self._live(min(until - now, pause))
            if time.monotonic() >= until:
                return
            events = [each for each in EVENTS if self._may_restart() or each not in RESTARTS]
            if self.image is None:
                events.remove("disk full")
            event = self.random.choices(events, [EVENTS[each] for each in events])[0]
            self._show(event)
            getattr(self, "_" + event.replace(" ", "_"))(scale)
            self.events[event] += 1

    def _may_restart(self) -> bool:
        return time.monotonic() - self.begun < RESTARTS_SHARE * self.seconds

    def _live(self, seconds: float) -> None:
        """Let everything work. Replace clients that ended, and continue those that were frozen for long enough."""
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            for client in self.clients:
                if client.frozen_until and client.frozen_until < now:
                    client.thaw()
                if (code := client.process.poll()) is not None:
                    self.faults.append(f"{client.name} ended by itself with {code}: {client.last_words()}")
                    client.start()
            if self.server.process is not None and (code := self.server.process.poll()) is not None:
                raise RuntimeError(f"the broker ended by itself with {code}: {self._server_words()}")
            for thread in (self.reader, self.watcher):
                if thread.failure is not None:
                    raise thread.failure
            time.sleep(min(0.2, max(0.0, until - now)))

    def _disturb(self) -> None:
        self.disturbances += 1
        self.is_disturbed = True

    def _broker_killed(self, scale: float) -> None:
        self._disturb()
        self.server.kill()
        time.sleep(scale * self.random.uniform(0, 2))
        self.server.start()
        self.is_disturbed = False

    def _broker_stopped(self, scale: float) -> None:
        self._disturb()
        if code := self.server.stop():
            self.faults.append(f"the broker stopped with {code}: {self._server_words()}")
        time.sleep(scale * self.random.uniform(0, 2))
        self.server.start()
        self.is_disturbed = False

    def _broker_frozen(self, scale: float) -> None:
        process = self.server.process
        assert process is not None
        self._disturb()
        process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(scale * self.random.uniform(0.5, 5))
        finally:
            process.send_signal(signal.SIGCONT)
        self.is_disturbed = False

    def _victim(self) -> Client:
        """A client that may end; in the second part of the run not the first one of each role."""
        return self.random.choice([client for client in self.clients if client.number or self._may_restart()])

    def _client_killed(self, scale: float) -> None:
        client = self._victim()
        client.kill()
        client.start()

    def _client_stopped(self, scale: float) -> None:
        client = self._victim()
        client.terminate()
        if fault := client.end():
            self.faults.append(fault)
        client.start()

    def _client_frozen(self, scale: float) -> None:
        awake = [client for client in self.clients if not client.frozen_until]
        self.random.choice(awake).freeze(scale * self.random.uniform(1, 20))

    def _network_cut(self, scale: float) -> None:
        """What the clients of the proxy send, and what is sent to them, is lost for a time; then they are cut off."""
        assert self.proxy is not None
        self.proxy.cut_when_short = False
        self.proxy.up = self.proxy.down = lambda data: b""
        time.sleep(scale * self.random.uniform(0, 6))
        self.proxy.cut()
        self.proxy.up = self.proxy.down = None

    def _disk_full(self, scale: float) -> None:
        """Not a block is free for some seconds. What the broker cannot write then is refused."""
        assert self.image is not None
        self._disturb()
        ballast = Path(self.image.mount_point) / "ballast"
        until = time.monotonic() + scale * self.random.uniform(2, 6)
        try:
            with ballast.open("wb") as file:
                size = 0
                while time.monotonic() < until:
                    found = os.statvfs(self.image.mount_point)
                    if free := found.f_bavail * found.f_frsize:
                        with suppress(OSError):
                            os.posix_fallocate(file.fileno(), size, free)
                            size += free
                    time.sleep(0.05)
        finally:
            ballast.unlink(missing_ok=True)
        self.is_disturbed = False

    def _end_events(self) -> None:
        for client in self.clients:
            client.thaw()

    # The end

    def _come_to_rest(self) -> None:
        """End the clients that send; wait until everything that they were promised is there; end the others."""
        self._show("the clients that send end")
        self._stop_clients([each for each in self.clients if each.role not in (MEMBER, BILLING, SHIPPING)])
        self._end_those_in_doubt()
        until = time.monotonic() + END_SECONDS + LONGEST_DELAY_SECONDS
        while missing := self._missing():
            if time.monotonic() > until:
                self.faults.append(f"still missing after {END_SECONDS + LONGEST_DELAY_SECONDS:.0f} s: {missing}")
                break
            self._show(f"missing: {missing}")
            self._live(2.0 if self.is_long else 0.2)
        self._show("kill -9 once more")
        self._broker_killed(0.0)
        self._live(3.0 if self.is_long else 0.5)  # nothing may be stored again
        self._stop_clients(self.clients)

    def _stop_clients(self, clients: Sequence[Client]) -> None:
        for client in clients:
            client.terminate()
        for client in clients:
            if fault := client.end():
                self.faults.append(fault)
        self.clients = [each for each in self.clients if each not in clients]
        self.ended += clients
        self.learn()

    def _missing(self) -> str:
        self.learn()
        with self.lock:
            missing = self.audit.missing()
            poison = self.audit.poison()
        left = {group: len(poison - set(self._dead(group))) for group in (BILLING, SHIPPING)}
        return ", ".join(filter(None, (missing, *(f"dead letters of {g} {n}" for g, n in left.items() if n))))

    def _dead(self, group: str) -> list[tuple[str, int, int]]:
        """Return (name, partition, number) of the dead letters of a group."""
        found = []
        with Desk(self._store(group), self.address) as desk:
            for letter in desk.letters(whole=True):
                if letter.state == "dead":
                    _, name, number, *_ = letter.message().text.split("|")
                    found.append((name, letter.partition, int(number)))
        return found

    def _store(self, group: str) -> str:
        return str(self.folder / "dead.db") if group == BILLING else "topic:letters"

    def _end_those_in_doubt(self) -> None:
        for line in end_prepared(self.address):
            with self.lock:
                self.audit.learn(line)
            self.events["ended by another process"] += 1

    def _check(self) -> None:
        ended_at = datetime.now(UTC) - timedelta(minutes=1)
        letters = {group: self._dead(group) for group in (BILLING, SHIPPING)}
        with self.lock:
            self.audit.check_complete()
            for group, dead in letters.items():
                self.audit.check_handled(group, dead)
            self.audit.check_ticks(ended_at)
        self.watcher.halt.set()
        self.watcher.join(2 * SAMPLE_SECONDS)
        self.reader.halt.set()
        self.reader.join(ANSWER_SECONDS)
        self._show("stop, and verify the files")
        if code := self.server.stop():
            self.faults.append(f"the broker stopped with {code}: {self._server_words()}")
        command = "import sys; from tfmq.cli.main import main; main(sys.argv[1:])"
        verified = subprocess.run(
            [sys.executable, "-c", command, "log", "verify", str(self.data)],
            capture_output=True,
            text=True,
            timeout=600,
        )
        if verified.returncode:
            self.faults.append(f"tfmq log verify ended with {verified.returncode}: {verified.stdout[-600:]}")
        if "Traceback" in self.server.log.read_text(errors="replace"):
            self.faults.append("the log of the broker has a traceback")

    def _end_processes(self) -> None:
        for thread in (self.watcher, self.reader):
            thread.halt.set()
        for client in self.clients:
            client.kill()
        if self.server in LiveServer.alive:
            self.server.kill()
        if self.proxy is not None:
            self.proxy.close()
        if self.image is not None:
            self.image.close()

    # The report

    def learn(self) -> None:
        """Take over what the diaries have that is new, and compare what can be compared already."""
        with self.lock:
            for client in (*self.clients, *self.ended):
                for diary in client.diaries:
                    for line in diary.read():
                        self.audit.learn(line, client.role)
            self.audit.check_times()

    def write_report(self) -> None:
        """Write what was measured so far, and the verdict when the run is complete."""
        report = self.report
        report.seconds = round(time.monotonic() - self.begun, 1)
        with self.lock:
            report.counts, report.troubles = self.audit.counts(), dict(self.audit.troubles)
            faults = [*self.faults, *self.audit.faults]
            more = self.audit.fault_count - len(self.audit.faults)
        report.events = dict(self.events)
        report.scrapes = dict(self.watcher.scrapes)
        for role, samples in list(self.watcher.samples.items()):
            figures = summarize(list(samples), self.warm_up, self.age)
            report.processes[role] = {name: round(value, 2) for name, value in figures.items()}
            minutes = {(each.life, int(each.at // 60)): each for each in list(samples)}
            report.series[role] = [
                (life, at, round(each.memory_mb, 1), each.descriptors, each.in_use_mb and round(each.in_use_mb, 2))
                for (life, at), each in sorted(minutes.items())
            ]
        disk = list(self.watcher.disk)
        if disk:
            report.disk = {"mb_max": round(max(disk), 1), "mb_last": round(disk[-1], 1), "mb_cap": DISK_CAP_BYTES / 1e6}
            if max(disk) > DISK_CAP_BYTES / 1e6:
                faults.append(f"the data folder used {max(disk):.0f} MB, the cap is {DISK_CAP_BYTES / 1e6:.0f} MB")
        for role, figures in report.processes.items():
            faults += growth_faults(role, figures)
        faults += [f"{count} scrapes {result}" for result, count in report.scrapes.items() if result[:6] == "failed"]
        faults += [f"{more} other faults"] if more else []
        report.faults = faults
        if report.state != "running":
            report.verdict = "failed" if faults else "everything held" if report.state == "complete" else report.state
        if self.report_path is not None:
            unfinished = self.report_path.with_name(f"{self.report_path.name}.new")
            unfinished.write_text(json.dumps(asdict(report), indent=1) + "\n")
            unfinished.replace(self.report_path)

    def _show(self, line: str) -> None:
        counts = self.audit.counts()
        click.echo(
            f"{time.monotonic() - self.begun:7.1f} s  {line:<40}  {counts['messages_received']:,} received,"
            f" {counts['transactions_committed']:,} transactions, {self.audit.fault_count + len(self.faults)} faults",
            err=True,
        )

    def _server_words(self) -> str:
        return self.server.log.read_text(errors="replace")[-1500:]


def free_port() -> int:
    """Return a port of loopback that no program uses now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def missing_features() -> dict[str, str]:
    """Return the features that cannot be had, with the reasons."""
    missing = {}
    for feature, key in FEATURES.items():
        if key and key not in SETTINGS:
            missing[feature] = f"this commit has no {key}"
    try:
        require_loop_devices()
    except Unavailable as error:
        missing["disk"] = str(error)
    return missing


def describe(report: Report) -> str:
    """Return the outcome in a few lines."""
    lines = [
        f"{report.seconds:.0f} s, seed {report.seed}, features: {', '.join(report.features)}",
        f"events: {report.events}",
        f"counts: {report.counts}",
        f"errors that clients met: {report.troubles}",
        f"scrapes: {report.scrapes}; disk: {report.disk}",
        *(f"{role}: {figures}" for role, figures in report.processes.items()),
        *(f"FAULT {fault}" for fault in report.faults[:20]),
        report.verdict,
    ]
    return "\n".join(lines)


def table(report: dict[str, Any]) -> str:
    """Return the tables of docs/soak.md."""
    lines = [
        f"Commit {report['commit']}, {report['machine']}; {report['seconds']:,.0f} s, seed {report['seed']}, with"
        f" {', '.join(report['features'])}; settings {', '.join(f'`{each}`' for each in report['settings'])}.",
        "",
        f"**{report['verdict'] or report['state']}**" + "".join(f"; {fault}" for fault in report["faults"]),
        "",
        "| what happened | times |",
        "|---|---|",
        *(f"| {event} | {count} |" for event, count in sorted(report["events"].items())),
        "",
        "| what was counted | |",
        "|---|---|",
        *(f"| {name.replace('_', ' ')} | {count:,} |" for name, count in report["counts"].items()),
        *(f"| scrapes {name} | {count:,} |" for name, count in report["scrapes"].items()),
        *(f"| errors that clients met: `{name}` | {count:,} |" for name, count in sorted(report["troubles"].items())),
        *(f"| disk use, {name.replace('mb_', '')} | {size:,.0f} MB |" for name, size in report["disk"].items()),
        "",
        "| process | lives | memory, mean | most | per hour | in use | per hour | descriptors, most | per hour | over"
        " | of a core |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for role, each in report["processes"].items():
        in_use = " | |"
        if "in_use_mb_mean" in each:
            in_use = f" | {each['in_use_mb_mean']:.2f} MB | {each['in_use_mb_per_hour']:+.2f} MB"
        lines.append(
            f"| {role} | {each['lives']:.0f} | {each['memory_mb_mean']:.1f} MB | {each['memory_mb_max']:.1f} MB"
            f" | {each['memory_mb_per_hour']:+.1f} MB{in_use} | {each['descriptors_max']:.0f}"
            f" | {each['descriptors_per_hour']:+.1f} | {each['slope_seconds']:.0f} s"
            f" | {each['processor_percent']:.1f} % |"
        )
    return "\n".join(lines)


@click.command(epilog="Example: python -m tools.rigs.soak --all --report soak.json")
@click.option("--duration", default="1h", show_default=True, help="How long events happen; the end takes minutes more.")
@click.option("--seed", default=8367, show_default=True)
@click.option("--all", "everything", is_flag=True, help="Fail at once if a feature cannot be had here.")
@click.option("--without", default="", help="Features to leave out, separated by commas.")
@click.option(
    "--report", "path", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures as JSON here."
)
@click.option("--keep", is_flag=True, help="Keep diaries and logs where there are faults.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--table",
    "shown",
    type=click.Path(exists=True, path_type=Path),
    help="Print this report as tables, and run nothing.",
)
def main(
    duration: str,
    seed: int,
    everything: bool,
    without: str,
    path: Path | None,
    keep: bool,
    as_json: bool,
    shown: Path | None,
) -> None:
    """Run the soak, and print the verdict; exit code 1 if something did not hold."""
    if shown is not None:
        click.echo(table(json.loads(shown.read_text())))
        return
    seconds = parse_duration(duration)
    if seconds is None:
        raise click.UsageError(f"{duration!r} is no time, such as 1h, 10min, 30s")
    left_out = [each.strip() for each in without.split(",") if each.strip()]
    if unknown := [each for each in left_out if each not in FEATURES]:
        raise click.UsageError(f"there is no feature {unknown[0]!r}; there are {', '.join(FEATURES)}")
    missing = {feature: why for feature, why in missing_features().items() if feature not in left_out}
    if everything and (missing or left_out):
        raise click.ClickException(f"--all: {'; '.join(f'{a}: {b}' for a, b in missing.items()) or without}")
    features = [each for each in FEATURES if each not in missing and each not in left_out]
    # A stop by SIGTERM ends the processes too, and leaves a report.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    folder = Path(tempfile.mkdtemp(prefix="tfmq-soak-"))
    rig = Rig(seconds, seed, folder, features, [f"{a}: {b}" for a, b in missing.items()])
    rig.report_path = path
    try:
        report = rig.run()
    finally:
        if keep and rig.report.faults:
            click.echo(f"diaries and logs: {folder}", err=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    click.echo(json.dumps(asdict(report)) if as_json else describe(report))
    sys.exit(1 if report.faults else 0)


if __name__ == "__main__":
    main()
