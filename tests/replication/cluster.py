"""Servers, their clients and one store under a simulated clock: everything happens when a generator decides it.

A store call takes effect some time after it was made, and its answer arrives some time after that: later calls can
overtake it, calls and answers are lost, calls take effect twice. Servers lose power, freeze and go on, and lose the
connection to the store. What a server had sent before may take effect after its end.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from typing import Any

from journal.disk import File, FileReferences
from journal.fsync import Forcer, FsyncGate, FsyncPlan
from journal.testing import SimulatedDisk
from tfmq.replication.entry_writer import store_entry
from tfmq.replication.errors import Deposed, StoreUnavailable
from tfmq.replication.primary import Primary, Settings, StoredJobs
from tfmq.replication.replica import Replica
from tfmq.replication.snapshot import FolderSource
from tfmq.replication.store import StoredObject
from tfmq.replication.terms import PutNew
from tfmq.testing.clock import VirtualClock

FOLDER = "/srv/data"
LOG = f"{FOLDER}/log"
RECORD_BYTES = 8


class World:
    """The clock, the events, the objects in the store, and what clients know."""

    def __init__(self, seed: int, *, delay: float = 0.02, is_sync: bool = True) -> None:
        self.generator = random.Random(seed)
        self.clock = VirtualClock()
        self.delay = delay
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.failing = 0.0
        """Probability that a call of the store fails, before or after its effect."""
        self.is_down = False
        self.store_name = "memory"
        self.settings = Settings(
            is_sync=is_sync,
            linger_seconds=0.05,
            interval_seconds=1.0,
            heartbeat_seconds=1.0,
            lease_seconds=5.0,
            history_seconds=7 * 86_400.0,
        )
        self.acked: list[int] = []
        self.seen: set[int] = set()
        """Numbers that a reader has seen."""
        self.promotions: list[tuple[float, int, str]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.clock.monotonic() + seconds, next(self._order), call))

    def draw_delay(self) -> float:
        return self.generator.expovariate(1 / self.delay)

    def run(self, seconds: float) -> None:
        """Let time pass."""
        until = self.clock.monotonic() + seconds
        while self._events and self._events[0][0] <= until:
            due, _, call = heapq.heappop(self._events)
            self.clock.move(max(due, self.clock.monotonic()))
            call()
        self.clock.move(until)


class Link:
    """The store, as one server reaches it."""

    def __init__(self, world: World, server: Server) -> None:
        self._world, self._server = world, server
        self.name = world.store_name

    def put_new(self, key: str, data: bytes) -> bool:
        lost = self._reach()
        is_new = key not in self._world.objects
        if is_new:
            self._world.objects[key] = data, self._world.clock.time()
        if lost:
            raise StoreUnavailable("the answer was lost")
        return is_new

    def get(self, key: str) -> bytes | None:
        if self._reach():
            raise StoreUnavailable("the answer was lost")
        found = self._world.objects.get(key)
        return None if found is None else found[0]

    def list(self, prefix: str, after: str = "") -> Iterator[StoredObject]:
        if self._reach():
            raise StoreUnavailable("the answer was lost")
        for key in sorted(self._world.objects):
            if key.startswith(prefix) and key > after:
                data, modified = self._world.objects[key]
                yield StoredObject(key, len(data), modified)

    def delete(self, *keys: str) -> None:
        lost = self._reach()
        for key in keys:
            self._world.objects.pop(key, None)
        if lost:
            raise StoreUnavailable("the answer was lost")

    def close(self) -> None:
        pass

    def _reach(self) -> bool:
        """Raise StoreUnavailable if the call does not arrive. Return whether its answer is lost."""
        world = self._world
        if world.is_down or self._server.is_cut_off:
            raise StoreUnavailable("the store cannot be reached")
        draw = world.generator.random()
        if draw < world.failing / 2:
            raise StoreUnavailable("the call was lost")
        return draw < world.failing


class InlineExecutor(Executor):
    """Runs each call at once."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Server:
    """A server: its disk, a `Replica`, and as primary a small broker that appends numbers to a file."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.disk = SimulatedDisk()
        make_folders(self.disk)
        self.life = 0
        """Counts the starts; what was scheduled in an earlier life does not happen."""
        self.is_frozen = False
        self.is_cut_off = False
        self.is_running = False
        self._frozen: list[Callable[[], None]] = []
        self.replica: Replica | None = None
        self.primary: Primary | None = None
        self.broker: Broker | None = None
        self.errors: list[BaseException] = []
        self.stalled_reason = ""

    # The life of the process

    def start(self) -> None:
        if self.is_running:
            return
        self.life += 1
        self.is_running, self.is_frozen, self._frozen = True, False, []
        self.primary = self.broker = None
        self.stalled_reason = ""
        world = self.world
        random_bytes = world.generator.randbytes
        self.link = Link(world, self)
        self.replica = Replica(
            self.link, self.disk, FOLDER, self.name, world.settings, self, self.run_job, InlineExecutor(), world.clock,
            self.call_later, random_bytes, lambda seconds: None, world.generator.random, self.woken,
            self.disk.lock(f"{FOLDER}/lock"), create_folder,
        )  # fmt: skip
        self._begin()

    def _begin(self) -> None:
        assert self.replica is not None
        try:
            self.replica.check_identity()
        except StoreUnavailable:
            self.call_later(1.0, self._begin)
            return
        self.replica.start()

    def stop(self, keep: str = "everything", at_end: Callable[[], None] = lambda: None) -> None:
        """Stop as on SIGTERM; then the process ends, or with another `keep` the power is lost."""
        assert self.replica is not None
        if self.broker is not None:
            self.broker.is_closed = True
        ended: list[bool] = []
        self.replica.stop(lambda: ended.append(True))
        while not ended:
            self.world.run(0.01)
        at_end()
        self.kill(keep)

    def kill(self, keep: str = "some") -> None:
        """Lose power; with "everything", only the process ends."""
        self.life += 1
        self.is_running = False
        self.broker = self.primary = self.replica = None
        self.disk = self.disk.crash(self.world.generator, keep=keep)

    def lose_folder(self) -> None:
        self.disk = SimulatedDisk()
        make_folders(self.disk)

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = False
        frozen, self._frozen = self._frozen, []
        for call in frozen:
            self.happen(self.life, call)

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self.world.later(seconds, partial(self.happen, self.life, call))

    def happen(self, life: int, call: Callable[[], None]) -> None:
        if life != self.life or not self.is_running:
            return
        if self.is_frozen:
            self._frozen.append(call)
        else:
            call()

    def run_job(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Execute `work` after some time, and deliver its result after some more."""
        world, life = self.world, self.life
        is_put = isinstance(work, partial) and (work.func is store_entry or isinstance(work.func, PutNew))

        def execute() -> None:
            is_alive = life == self.life and self.is_running
            if is_put and (not is_alive or self.is_frozen):
                # It was sent before the end, or before the freeze: it may arrive.
                if world.generator.random() < 0.5:
                    try_again(work)
                if not is_alive:
                    return
            if not is_alive:
                return
            if self.is_frozen:
                self._frozen.append(execute)
                return
            if is_put and world.generator.random() < world.failing:
                world.later(world.draw_delay(), lambda: try_again(work))  # the network delivers it twice
            try:
                result = work()
            except Exception as error:
                outcome = partial(done, None, error)
            else:
                outcome = partial(done, result, None)
            world.later(world.draw_delay(), partial(self.happen, life, outcome))

        world.later(world.draw_delay(), execute)

    def woken(self) -> None:
        self.call_later(0, self.end_turn)

    def end_turn(self) -> None:
        if self.primary is not None:
            self.primary.woken()

    # The host of the replica

    def following(self) -> None:
        pass

    def promoted(self, primary: Primary) -> None:
        self.primary = primary
        self.world.promotions.append((self.world.clock.monotonic(), primary.writer.position.term, self.name))
        self.start_broker(primary)
        primary.start()

    def start_broker(self, primary: Primary) -> None:
        self.broker = Broker(self, primary)

    def stalled(self, reason: str) -> None:
        self.stalled_reason = reason

    def hand_over(self) -> None:
        if self.broker is not None:
            self.broker.is_closed = True
        assert self.replica is not None
        self.replica.stop(lambda: self.deposed(Deposed("handed over")))

    def deposed(self, error: Deposed) -> None:
        # The process ends and starts again; the disk has what the system has.
        self.kill("everything")
        self.world.later(0.5, self.start)

    def failed(self, error: BaseException) -> None:
        self.errors.append(error)
        self.is_running = False


def content_of(server: Server) -> dict[str, bytes]:
    """Return the bytes of the replicated files, by path."""
    source = FolderSource(server.disk, FOLDER)
    return {f"{FOLDER}/{file.path}": server.disk.read_file(f"{FOLDER}/{file.path}") for file in source.files}


def cause_faults(world: World, servers: Sequence[Server], steps: int) -> None:
    """Let time pass, with faults at random of the store and the servers."""
    generator = world.generator
    world.delay = generator.choice((0.005, 0.02, 0.1))
    for _ in range(steps):
        world.failing = generator.choice((0.0, 0.0, 0.1, 0.3))
        world.is_down = generator.random() < 0.1
        server = generator.choice(servers)
        choice = generator.random()
        if choice < 0.3 and server.is_running:
            server.kill(generator.choice(("nothing", "some", "everything")))
        elif choice < 0.35 and not server.is_running and sum(each.is_running for each in servers) >= 1:
            server.lose_folder()
        elif choice < 0.5 and server.is_running:
            server.freeze()
        elif choice < 0.6:
            server.is_cut_off = not server.is_cut_off
        elif choice < 0.7 and server.replica is not None and server.replica.role == "standby" and not server.is_frozen:
            server.replica.request_hand_over(lambda error: None)
        for each in servers:
            if generator.random() < 0.4:
                if not each.is_running and not each.errors:
                    each.start()
                elif each.is_frozen:
                    each.thaw()
        world.run(generator.choice((0.5, 2.0, 8.0)))


def end_faults(world: World, servers: Sequence[Server]) -> None:
    """Let the store work, and all servers run."""
    world.failing, world.is_down = 0.0, False
    for each in servers:
        each.is_cut_off = False
        if each.is_frozen:
            each.thaw()
        if not each.is_running and not each.errors:
            each.start()


def make_folders(disk: SimulatedDisk) -> None:
    for folder in ("/srv", FOLDER):
        disk.make_folder(folder)
    disk.force_folder("/")
    disk.force_folder("/srv")


def try_again(work: Callable[[], Any]) -> None:
    with suppress(StoreUnavailable):
        work()


def create_folder(disk: Any, node: str) -> None:
    from tfmq.broker.catalog import write_version

    if not disk.exists(f"{FOLDER}/meta"):
        disk.make_folder(f"{FOLDER}/meta")
        disk.force_folder(FOLDER)
        write_version(disk, f"{FOLDER}/meta", node)


class Broker:
    """Appends numbers to a file. A number that is there already is not appended again, as a broker does."""

    def __init__(self, server: Server, primary: Primary) -> None:
        self.server, self.primary = server, primary
        self.is_closed = False
        disk = primary.disk
        self.file = disk.open_write(LOG) if disk.exists(LOG) else disk.create(LOG)
        data = self.file.pread(self.file.size(), 0)
        records = [data[at : at + RECORD_BYTES] for at in range(0, len(data), RECORD_BYTES)]
        # A power loss may have left anything of what was not durable.
        whole = list(itertools.takewhile(lambda record: len(record) == RECORD_BYTES and record.isdigit(), records))
        self.file.truncate(len(whole) * RECORD_BYTES)
        self.numbers = list(map(int, whole))
        self.check()
        run, clock = server.run_job, server.world.clock
        jobs = StoredJobs(primary, run) if server.world.settings.is_sync else None
        self.run = run if jobs is None else jobs.run
        replicate = None if jobs is None else jobs.begin_round
        self.forcer = Forcer(disk, run, anchor_path=FOLDER, method="fdatasync", clock=clock, replicate=replicate)
        self.log = NumbersLog(self)
        self.is_serving = False
        primary.has_broker = True
        # What the start has found counts only when it is stored and durable.
        self.file.force()
        disk.force_folder(FOLDER)
        disk.cut()
        primary.writer.pump()
        primary.writer.when_stored(disk.number, self._serve)

    def _serve(self) -> None:
        self.is_serving = True
        self.server.world.seen |= set(self.numbers)

    def check(self) -> None:
        """What was acknowledged or seen is there, once, in order."""
        world = self.server.world
        assert len(set(self.numbers)) == len(self.numbers), "a number is there twice"
        assert self.numbers == sorted(self.numbers), "the order has changed"
        missing = (set(world.acked) | world.seen) - set(self.numbers)
        if not world.settings.is_sync:
            return  # what was acknowledged in the last seconds before a failover may be missing
        if any(term > self.primary.writer.position.term for _, term, _ in world.promotions):
            return  # another server has served since, and this one learns that when it stores something
        assert not missing, f"{self.server.name} lacks {sorted(missing)[:5]}, which were acknowledged or seen"

    def send(self, number: int, acked: Callable[[], None]) -> None:
        """Append `number` unless it is there, and call `acked()` when it is durable and stored."""
        if self.is_closed or not self.is_serving or self.server.stalled_reason:
            return
        if number not in self.numbers:
            self.file.pwritev([b"%0*d" % (RECORD_BYTES, number)], len(self.numbers) * RECORD_BYTES)
            self.numbers.append(number)
        if number % 2:
            # As messages are fsynced; the others are as what a worker does, such as a new topic.
            self.forcer.want(self.log, len(self.numbers), lambda error: None if self.is_closed or error else acked())
            return

        def force() -> int:
            count = len(self.numbers)
            self.file.force()
            return count

        def done(count: int | None, error: BaseException | None) -> None:
            if error is None and not self.is_closed:
                assert count is not None
                self.server.world.seen |= set(self.numbers[:count])
                acked()

        self.run(force, done)


class NumbersLog:
    """The file of a `Broker`, as its `Forcer` knows it. Offsets are counts of numbers."""

    stopped: str | None = None
    sealed = False

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._gate = FsyncGate(FileReferences())
        self.forced_offset = 0

    @property
    def file(self) -> File:
        return self._broker.file

    @property
    def end(self) -> int:
        return self.end_offset

    @property
    def end_offset(self) -> int:
        return len(self._broker.numbers)

    def force_plan(self) -> FsyncPlan | None:
        end = self.end_offset
        return FsyncPlan(self, self._gate, self, end) if self.forced_offset < end else None

    def force_done(self, plan: FsyncPlan, error: Exception | None) -> None:
        assert error is None and plan.end >= self.forced_offset
        self.forced_offset = plan.end
        self._broker.server.world.seen |= set(self._broker.numbers[: plan.end])


class Client:
    """Sends the numbers 1, 2, 3, ... one at a time, to the server that serves, again until it is acknowledged."""

    def __init__(self, world: World, servers: list[Server], pause: float = 0.05) -> None:
        self.world, self.servers, self.pause = world, servers, pause
        self.number = 1
        self.longest_gap = 0.0
        self._last = world.clock.monotonic()
        self._send()

    def _send(self) -> None:
        number = self.number
        brokers = [each.broker for each in self.servers if each.broker is not None and not each.is_frozen]
        if brokers:
            self.world.generator.choice(brokers).send(number, partial(self._acked, number))
        self.world.later(self.pause, self._send)

    def _acked(self, number: int) -> None:
        if number == self.number:
            self.world.acked.append(number)
            self.number += 1
            now = self.world.clock.monotonic()
            self.longest_gap, self._last = max(self.longest_gap, now - self._last), now
