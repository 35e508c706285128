"""A handler with its real store on a simulated disk, over targets in memory, and verbs to talk to it.

`Targets` is a `Destination` that can stop, fill up, lose what was not forced, and forget a topic. `Rig` owns disk,
clock, forces and workers: inline, or queued with `queued=True` (then `work()` does the jobs). Every verb asks one
thing, ends the turn unless `turn=False`, and gives the `Answer`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from journal.fsck.wal_repair import repair_journal
from journal.fsync import Forcer
from journal.record.format import make_id, make_log_id, make_record, records_of, split_id
from journal.testing import SimulatedClock, SimulatedDisk
from tests.transaction.targets import Targets
from tfmq import limits as limits_table
from tfmq.broker.timers import Timers
from tfmq.errors import TfmqError
from tfmq.transaction.coordinator import TransactionCoordinator
from tfmq.transaction.model import IncomingBatch
from tfmq.transaction.requests import BeginRequest, CommitGroupMember, GroupCommitRequest, TransactRequest
from tfmq.transaction.store import TransactionStore

FOLDER = "/data/transactions"
SETTINGS = {
    "timeout_seconds": 60,
    "outcome_seconds": 7 * 86_400,
    "check_seconds": 60,
    "alarm_seconds": 3600,
    "group_ttl_seconds": 86_400,
    "journal_file_bytes": 64 << 20,
}
ORDERS = make_log_id(16, 0)
BILLS = make_log_id(17, 0)


class Answer:
    """What `done` was called with, once."""

    def __init__(self) -> None:
        self.calls = 0
        self.result: Any = None
        self.failure: BaseException | None = None

    def __call__(self, result: Any, error: BaseException | None) -> None:
        self.calls += 1
        assert self.calls == 1, "one answer for one request"
        assert error is None or isinstance(error, TfmqError), repr(error)
        self.result, self.failure = result, error

    @property
    def code(self) -> str:
        if self.failure is not None:
            return str(self.failure.code)  # type: ignore[attr-defined]
        return "ok" if self.calls else "waiting"

    def __getattr__(self, name: str) -> Any:
        if self.__dict__.get("failure") is not None:
            raise self.__dict__["failure"]
        assert self.__dict__.get("calls"), f"no answer yet, and {name} is asked"
        return getattr(self.__dict__["result"], name)


class Session:
    user = ""

    def __init__(self, identity: str = "shop@127.0.0.1:5000") -> None:
        self.identity = identity


class Stream:
    """A producer's transactional stream: the sequence and the number that come next."""

    def __init__(self, producer_id: int) -> None:
        self.id = producer_id
        self.sequence = 0
        self.number = 0

    def piece(self, key: int, payloads: Sequence[bytes], sequence: int | None = None) -> IncomingBatch:
        first = self.sequence if sequence is None else sequence
        self.sequence = max(self.sequence, first + len(payloads))
        return piece(self.id, first, key, payloads)

    def next_number(self) -> int:
        self.number += 1
        return self.number


def piece(producer_id: int, sequence: int, key: int, payloads: Sequence[bytes]) -> IncomingBatch:
    data = b"".join(make_record(payload, make_id(producer_id, sequence + n)) for n, payload in enumerate(payloads))
    incarnation, _ = split_id(key)
    return IncomingBatch(key, f"topic{incarnation}", producer_id, sequence, len(payloads), (), data)


def payloads_of(data: bytes) -> list[bytes]:
    return [bytes(data[each.position + 20 : each.position + each.size]) for each in records_of(data)]


class Rig:
    def __init__(
        self,
        disk: Any = None,
        clock: SimulatedClock | None = None,
        targets: Targets | None = None,
        *,
        queued: bool = False,
        start: bool = True,
        limits: dict[str, int] | None = None,
        settings: dict[str, float] | None = None,
        folder: str = FOLDER,
    ) -> None:
        self.disk: Any = disk or SimulatedDisk()
        self.folder = folder
        self.clock = clock or SimulatedClock()
        self.targets = targets or Targets()
        self.queued, self.limits, self.settings = queued, limits or {}, settings or {}
        self.jobs: deque[tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]] = deque()
        self.timers = Timers(self.clock)
        self.session = Session()
        self.streams = 100
        self.recovering: Callable[[], None] = lambda: None
        """Called when a start says that it is over."""
        if start:
            self.start()

    def start(self) -> None:
        data = self.folder.rsplit("/", 1)[0]
        for folder in (data, self.folder):
            if not self.disk.exists(folder):
                self.disk.make_folder(folder)
                self.disk.force_folder(folder.rsplit("/", 1)[0] or "/")
        self.forcer = Forcer(self.disk, self.run, anchor_path=data, clock=self.clock)
        self.ready = False
        settings: Any = {**SETTINGS, **self.settings}
        self.store = TransactionStore(
            self.disk,
            self.folder,
            clock=self.clock,
            randomness=lambda size: b"7" * size,
            new_id=lambda: 5,
            lease_time=lambda producer_id: self.clock.wall_ms(),
            request_fsync=lambda journal, place, waiter: self.forcer.want(journal, place, waiter, start=False),
            run=self.run,
            limits=limits_table.effective_limits(self.limits),
            settings=settings,
            mark_ready=self._mark_ready,
        )
        self.handler = TransactionCoordinator(
            self.store,
            self.targets,
            timers=self.timers,
            clock=self.clock,
            run=self.run,
            limits=limits_table.effective_limits(self.limits),
            settings=settings,
            mark_ready=self._mark_ready,
        )
        self.recovered = False
        self.handler.recover(self._is_recovered)
        self.turn()

    def _is_recovered(self) -> None:
        self.recovered = True
        self.recovering()

    # Threads and time

    def run(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        if self.queued:
            self.jobs.append((work, done))
        else:
            do(work, done)

    def step(self, index: int = 0) -> None:
        """One job of a worker, and the end of the poll in which its result came in."""
        work, done = self.jobs[index]
        del self.jobs[index]
        do(work, done)
        self.turn()

    def work(self) -> None:
        """Every job, and those that follow from them."""
        while self.jobs:
            self.step()

    def _mark_ready(self) -> None:
        self.ready = True

    def turn(self) -> None:
        """The end of a poll."""
        busy = True
        while busy:
            self.ready = False
            busy = self.handler.write()
            busy = self.targets.write() or busy
            if not busy:
                self.forcer.start()
                busy = self.ready or self.targets.due

    def advance(self, seconds: float) -> None:
        """Time goes on, in steps to whatever is due."""
        end = self.clock.monotonic() + seconds
        while (due := self.timers.next_due()) is not None and due <= end:
            self.clock.advance(max(0.0, due - self.clock.monotonic()))
            self.timers.tick(self.clock.monotonic())
            self.turn()
        self.clock.advance(max(0.0, end - self.clock.monotonic()))
        self.turn()

    def tick(self) -> None:
        """What is due now."""
        self.timers.tick(self.clock.monotonic())
        self.turn()

    # Ends

    def power_cut(self, targets: Targets | None = None) -> Rig:
        """Return a new rig on what was forced of the journal and of the targets."""
        self.forget()
        return self.again(self.disk.crash(keep="nothing"), targets or self.targets.power_cut())

    def kill(self) -> Rig:
        """Return a new rig on what was written."""
        self.forget()
        return self.again(self.disk.crash(keep="everything"), self.targets.killed())

    def damaged(self, found: bytes, *, clean: bool = True, mended: bool = True) -> Rig:
        """A new rig after the bytes `found` of the journal were damaged, and `tfmq log repair` repaired them; `clean`:
        the broker had been stopped, so that the start goes on from a snapshot."""
        if clean:
            self.stop()
        disk = self.disk.crash(keep="everything")
        names = (f"{self.folder}/{name}" for name in disk.list(self.folder) if name.endswith(".journal"))
        path = next(each for each in names if found in disk.read_file(each))
        disk.damage(path, disk.read_file(path).index(found), found.swapcase())
        if mended:
            assert repair_journal(disk, self.folder)
        return self.again(disk, self.targets.killed())

    def again(self, disk: SimulatedDisk, targets: Targets) -> Rig:
        rig = Rig(disk, self.clock, targets, limits=self.limits, settings=self.settings)
        rig.streams = self.streams + 100
        return rig

    def forget(self) -> None:
        self.jobs.clear()

    def stop(self) -> None:
        stopped: list[bool] = []
        self.handler.stop(lambda: stopped.append(True))
        self.turn()
        self.work()
        assert stopped, "the handler did not stop"
        self.store.close()

    # Verbs

    def stream(self) -> Stream:
        self.streams += 1
        return Stream(self.streams)

    def ask(self, method: str, *asked: Any, turn: bool = True) -> Answer:
        answer = Answer()
        getattr(self.handler, method)(*asked, answer)
        if turn:
            self.turn()
        return answer

    def begin(
        self,
        xid: str = "",
        stream: Stream | None = None,
        *,
        session: Session | None = None,
        number: int | None = None,
        member: CommitGroupMember | None = None,
        turn: bool = True,
        **fields: Any,
    ) -> Answer:
        stream = stream or self.stream()
        request = BeginRequest(stream.id, number or stream.next_number(), xid, member=member, **fields)
        answer = self.ask("begin", request, session or self.session, turn=turn)
        answer.stream = stream  # type: ignore[attr-defined]
        return answer

    def send(self, began: Answer, payloads: Sequence[bytes], key: int = ORDERS, *, turn: bool = True) -> Answer:
        stream = began.__dict__["stream"]
        return self.ask("send", began.epoch, stream.piece(key, payloads), turn=turn)

    def prepare(
        self, began: Answer, offsets: Sequence[Any] = (), *, ttl_ms: int | None = None, turn: bool = True
    ) -> Answer:
        return self.ask("prepare", began.xid, began.epoch, ttl_ms, offsets, self.session, turn=turn)

    def commit(
        self,
        began: Answer,
        offsets: Sequence[Any] = (),
        *,
        one_phase: bool = False,
        by_hand: bool = False,
        force: bool = False,
        turn: bool = True,
    ) -> Answer:
        asked = (began.xid, began.epoch, one_phase, by_hand, offsets, force, self.session)
        return self.ask("commit", *asked, turn=turn)

    def rollback(self, began: Answer, *, by_hand: bool = False, turn: bool = True) -> Answer:
        return self.ask("rollback", began.xid, began.epoch, by_hand, turn=turn)

    def forget_outcome(self, began: Answer) -> Answer:
        return self.ask("forget", began.xid, began.epoch)

    def prepared(self, xid: str, payloads: Sequence[bytes] = (b"m",), key: int = ORDERS, **fields: Any) -> Answer:
        """One that is begun, sent and prepared."""
        began = self.begin(xid, **fields)
        assert self.send(began, payloads, key).code == "ok"
        assert self.prepare(began).code == "ok"
        return began

    def prepared_unforced(self, xid: str, payloads: Sequence[bytes] = (b"m",), key: int = ORDERS) -> Answer:
        """The same, without waiting for the answer of the prepare."""
        began = self.begin(xid)
        self.send(began, payloads, key)
        self.prepare(began)
        return began

    def transact(
        self,
        batches: Sequence[tuple[int, Sequence[bytes]]],
        stream: Stream | None = None,
        offsets: Sequence[Any] = (),
        *,
        number: int | None = None,
        turn: bool = True,
    ) -> Answer:
        stream = stream or self.stream()
        pieces = [stream.piece(key, payloads) for key, payloads in batches]
        request = TransactRequest(stream.id, number or stream.next_number(), pieces, offsets)
        answer = self.ask("transact", request, self.session, turn=turn)
        answer.request = request  # type: ignore[attr-defined]
        return answer

    def member(self, group: str, sequence: int, run: str = "run", name: str = "", **fields: Any) -> Answer:
        return self.begin(
            name or f"{group}-{sequence}-{self.streams}", member=CommitGroupMember(group, sequence, run), **fields
        )

    def commit_group(
        self,
        group: str,
        sequence: int,
        members: Sequence[Answer],
        rows: int = 0,
        *,
        run: str = "run",
        other_total: bool = False,
        turn: bool = True,
    ) -> Answer:
        names = [(each.xid, each.epoch) for each in members]
        request = GroupCommitRequest(group, sequence, run, names, rows, other_total)
        return self.ask("commit_group", request, turn=turn)

    # Looking

    def visible(self, key: int = ORDERS) -> list[bytes]:
        return self.targets.payloads(key)

    def state(self, began: Answer) -> str:
        return str(self.handler.describe(began.xid, began.epoch)["state"])


def do(work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
    try:
        result = work()
    except BaseException as error:
        done(None, error)
    else:
        done(result, None)
