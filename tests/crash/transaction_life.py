"""One life of a broker with every kind of transaction in it, and each boundary at which it may be cut short.

A boundary is the moment after a call that changed something on the disk, or after an answer. It keeps the disk
as it was, what the client knew, and which of its requests had no answer. Boundaries bear the name of the point
of the crash matrix that they belong to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from journal.testing import Moment, SimulatedClock, SimulatedDisk
from tests.broker.helpers import Broker
from tests.crash.transaction_client import Step, TransactionClient
from tfmq.errors import TfmqError
from tfmq.protocol.commands import CommitMember
from tools.rigs.transaction_model import PREPARED, Knowledge, Transaction

TRANSACTIONS = "/transactions/"
JOURNAL = re.compile(r"/transactions/\d+\.journal$")
SAVED = re.compile(r"/transactions/(checkpoint|\d+\.snapshot)")
SEGMENT = re.compile(r"/(orders|bills)-\d+/\d+\.zxQueue$")

PARTITION = re.compile(r"/(orders|bills)-\d+(/|$)")

JOURNAL_FILE_BYTES = 1 << 16
"""The smallest that may be set, so that a short life rolls and relocates."""
RECORD_BYTES = 700
"""More than a sector: a write can be torn in the middle of a record."""
SEGMENT_BYTES = 1 << 16
LARGE_SENDS = 4
FILES = 15
"""Of the journal, that a life fills: more than those below which nothing is carried forward."""
FILLING = 3
FILLING_BYTES = 11_000
"""Transactions of two such messages in each of them."""

WRITES = frozenset({"write", "truncate"})
FORCES = frozenset({"force", "sync"})
DECIDING = frozenset({"commit", "transact", "commit group"})

POINTS = (
    "begin answer", "send", "send answer",
    "prepare write", "prepare force", "prepare answer",
    "commit write", "commit force", "partition append", "partition force", "partition files",
    "commit answer",
    "rollback write", "rollback force", "rollback answer",
    "checkpoint", "journal roll", "file delete", "relocation", "offsets",
)  # fmt: skip


class Call(NamedTuple):
    """One call on the disk: its kind, its path, how many of this kind came before, and the point."""

    kind: str
    path: str
    nth: int
    point: str


class Torn(NamedTuple):
    """The write before a boundary, which may have been done in part: its file as it was, and what came."""

    path: str
    before: bytes
    position: int
    data: bytes


class Boundary(NamedTuple):
    number: int
    point: str
    after: str
    moment: Moment
    known: Knowledge
    lost: tuple[Step, ...]
    torn: Torn | None
    wall_ms: int
    groups: frozenset[str]


class Cut(Exception):
    """The broker cannot go on: the story ends here."""


def point_of(action: str, kind: str, path: str) -> str:
    """The point of the matrix that a call belongs to, "" for none."""
    if SAVED.search(path):
        return "checkpoint"
    if JOURNAL.search(path):
        return _journal_point(action, kind)
    if path.endswith(TRANSACTIONS.rstrip("/")):
        return "journal roll"
    if SEGMENT.search(path):
        return f"partition {'append' if kind in WRITES else 'force' if kind in FORCES else 'files'}"
    if PARTITION.search(path):
        return "partition files"
    if "/meta/" in path and action in DECIDING:
        return "offsets"
    if kind == "sync":
        return f"{'commit' if action in DECIDING else action} force"
    return ""


def _journal_point(action: str, kind: str) -> str:
    if kind == "unlink":
        return "file delete"
    if kind in ("create", "open"):
        return "journal roll"
    if action == "tidying":
        return "relocation"
    name = "commit" if action in DECIDING else action
    if name == "expiring":
        name = "rollback"
    if name == "send":
        return name
    return f"{name} {'write' if kind in WRITES else 'force'}"


class Life:
    """Plays the story once. `calls` are all calls on the disk in their order; `boundaries` the cuts."""

    def __init__(self, *, keep_boundaries: bool = True) -> None:
        self.disk = SimulatedDisk()
        self.clock = SimulatedClock()
        self.broker = Broker(
            self.disk, self.clock, transaction__journal_file_bytes=JOURNAL_FILE_BYTES, log__segment_bytes=SEGMENT_BYTES
        )
        self.client = TransactionClient(self.broker, record_bytes=RECORD_BYTES)
        self.action = "start"
        self.calls: list[Call] = []
        self.boundaries: list[Boundary] = []
        self.counts: dict[str, int] = {}
        self.errors: list[TfmqError] = []
        self.answers: list[tuple[str, int]] = []
        """(point, how many calls there had been) of each answer."""
        self._new = ""
        self._written: tuple[str, bytes] | None = None
        self._keep = keep_boundaries
        self.broker.create("orders", 2)
        self.broker.create("bills", 1)
        self.disk.faults.before = self._before
        if keep_boundaries:
            self.disk.after = self._after

    # Watching

    def _point(self, kind: str, path: str) -> str:
        """As `point_of`; the head of a new file, until it is forced, belongs to the roll."""
        if kind == "create" and JOURNAL.search(path):
            self._new = path
        elif kind == "force_folder":
            self._new = ""
        if path == self._new and kind in ("write", "force"):
            return "journal roll"
        return point_of(self.action, kind, path)

    def _before(self, kind: str, path: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.calls.append(Call(kind, path, self.counts[kind], self._point(kind, path)))
        if self._keep and kind == "write":
            self._written = path, self.disk.read_file(path)

    def _after(self, kind: str, path: str) -> None:
        torn = None
        if kind == "write" and self._written is not None and self._written[0] == path:
            before = self._written[1]
            change = self.disk.tree.file(path).pending[-1]
            if change.data is not None:
                torn = Torn(path, before, change.position, change.data)
        self._bound(self.calls[-1].point, f"{self.action}: {kind} {path}", torn)

    def _bound(self, point: str, after: str, torn: Torn | None = None) -> None:
        self.client.look()
        self.boundaries.append(
            Boundary(
                len(self.boundaries),
                point,
                after,
                Moment(self.disk),
                self.client.model.knowledge(),
                tuple(self.client.steps),
                torn,
                self.clock.wall_ms(),
                frozenset(self.client.groups),
            )
        )

    @contextmanager
    def doing(self, action: str) -> Iterator[None]:
        """Calls in here belong to this action; after it is the boundary of its answer."""
        self.action = action
        try:
            yield
        except TfmqError as error:
            self.errors.append(error)
        finally:
            name = "commit" if action in DECIDING else action
            self.action = f"{name} answer"
            self.answers.append((self.action, len(self.calls)))
            if self._keep:
                self._bound(self.action, f"{action} answered")

    # The story

    def tell(self) -> None:
        """All chapters; each goes on as far as the disk lets it."""
        for chapter in (
            self.plain_and_local, self.at_once, self.two_phases, self.in_doubt, self.large, self.with_offsets,
            self.together, self.by_hand, self.unfinished, self.filling, self.end,
        ):  # fmt: skip
            chapter()
        self.disk.after = self.disk.faults.before = None

    def plain_and_local(self) -> None:
        self.plain("plain-0", "orders", 0)
        self.transact("one", {("orders", 0): 2, ("orders", 1): 1, ("bills", 0): 2})
        local = self.begin("local")
        self.send(local, "orders", 0, 2)
        self.send(local, "bills", 0, 1)
        self.plain("plain-0", "orders", 0)
        self.commit(local, one_phase=True)
        dropped = self.begin("dropped")
        self.send(dropped, "orders", 1, 3)
        self.rollback(dropped)
        self.transact("two", {("orders", 1): 2})

    def at_once(self) -> None:
        """Several in one turn: one write of the journal, one force, one append a partition."""
        with self.doing("transact"):
            for number in range(3):
                self.client.transact(f"at-once-{number}", {("orders", 0): 1, ("orders", 1): 2}, turn=False)
            self.client.plain("plain-0", "orders", 0, turn=False)
            self.broker.engine.broker.end_turn()
            self.client.look()

    def two_phases(self) -> None:
        for name, targets in (("a", [("orders", 0), ("orders", 1)]), ("b", [("bills", 0), ("orders", 0)])):
            transaction = self.begin(name, f"xid-{name}")
            for topic, partition in targets * 2:
                self.send(transaction, topic, partition, 2)
            self.prepare(transaction)
            self.transact(f"between-{name}", {("orders", 0): 1, ("bills", 0): 1})
            if name == "a":
                self.commit(transaction)
            else:
                self.rollback(transaction)
        once = self.begin("once", "xid-once")
        self.send(once, "bills", 0, 2)
        self.commit(once, one_phase=True)

    def in_doubt(self) -> None:
        """These stay prepared to the end."""
        for number in range(2):
            transaction = self.begin(f"doubt-{number}", f"doubt-{number}")
            self.send(transaction, "orders", number, 2)
            self.send(transaction, "bills", 0, 1)
            self.prepare(transaction)

    def large(self) -> None:
        """More for two partitions than one append of theirs takes: it goes there in slices."""
        self.client.record_bytes = FILLING_BYTES
        transaction = self.begin("large", "large")
        for _ in range(LARGE_SENDS):
            self.send(transaction, "orders", 0, 2)
            self.send(transaction, "bills", 0, 2)
        self.client.record_bytes = RECORD_BYTES
        self.prepare(transaction)
        self.commit(transaction)
        self.plain("plain-0", "orders", 0)

    def with_offsets(self) -> None:
        for number, name in enumerate(("read-one", "read-two", "read-three")):
            with self.doing("join"):
                self.client.join(name)
            offsets = {name: 10 + number}
            if number == 0:
                self.transact(name, {("bills", 0): 1, ("orders", 1): 1}, offsets)
                continue
            transaction = self.begin(name, name)
            self.send(transaction, "bills", 0, 1)
            self.prepare(transaction, offsets)
            if number == 1:
                self.commit(transaction)

    def together(self) -> None:
        members = []
        for number in range(3):
            member = self.begin(f"member-{number}", f"member-{number}", member=CommitMember("job", 1, "run"))
            self.send(member, "orders", number % 2, 2)
            self.send(member, "bills", 0, 1)
            self.prepare(member)
            members.append(member)
        if all(member.fates == {PREPARED} for member in members):
            with self.doing("commit group"):
                self.client.commit_group("job", 1, "run", members[:2], members[2:])

    def by_hand(self) -> None:
        for heuristic in ("commit", "rollback"):
            transaction = self.begin(f"hand-{heuristic}", f"hand-{heuristic}")
            self.send(transaction, "orders", 1, 1)
            self.prepare(transaction)
            getattr(self, heuristic)(transaction, heuristic=True)

    def unfinished(self) -> None:
        """One is left by its session, one runs out of time."""
        left = self.begin("left")
        self.send(left, "bills", 0, 1)
        late = self.begin("late", "late", timeout_ms=5_000)
        self.send(late, "orders", 0, 1)
        with self.doing("expiring"):
            self.client.session.close()
            self.broker.engine.broker.end_turn()
            self.broker.advance(10)
        self.client.dead |= {left, late}

    def filling(self) -> None:
        """Several files of journal, each with one transaction that stays in doubt: rolls, checkpoints, files that
        go, live pieces that are carried forward.
        """
        for number in range(FILES):
            self.client.record_bytes = RECORD_BYTES
            doubt = self.begin(f"old-{number}", f"old-{number}")
            self.send(doubt, "orders", 1, 1)
            self.prepare(doubt)
            self.client.record_bytes = FILLING_BYTES
            for turn in range(FILLING):
                self.transact(f"fill-{number}-{turn}", {("orders", turn % 2): 1, ("bills", 0): 1})
            with self.doing("tidying"):
                self.broker.advance(12)
        self.client.record_bytes = RECORD_BYTES

    def end(self) -> None:
        again = self.begin("again", "xid-a")
        self.send(again, "orders", 0, 1)
        self.prepare(again)
        self.commit(again)
        with self.doing("tidying"):
            self.broker.advance(60)

    # Steps, each left out where an earlier one of its transaction failed

    def plain(self, label: str, topic: str, partition: int) -> None:
        with self.doing("plain"):
            if not any(each.waiting or each.failed for each in self.client.plains.values()):
                self.client.plain(label, topic, partition, 2)

    def transact(self, label: str, targets: Any, offsets: Any = None) -> None:
        with self.doing("transact"):
            if offsets and any(self.client.groups[group].code != "ok" for group in offsets):
                return
            self.client.transact(label, targets, offsets)

    def begin(self, label: str, xid: str = "", **values: Any) -> Transaction:
        with self.doing("begin"):
            return self.client.begin(label, xid, **values)
        dead = self.client.model.begin(label, xid)
        self.client.dead.add(dead)
        return dead

    def send(self, transaction: Transaction, topic: str, partition: int, count: int) -> None:
        self._if_alive("send", transaction, lambda: self.client.send(transaction, topic, partition, count))

    def prepare(self, transaction: Transaction, offsets: Any = None) -> None:
        if offsets and any(self.client.groups[group].code != "ok" for group in offsets):
            return
        self._if_alive("prepare", transaction, lambda: self.client.prepare(transaction, offsets))

    def commit(self, transaction: Transaction, **values: Any) -> None:
        if not values.get("one_phase") and transaction.fates != {PREPARED}:
            return
        self._if_alive("commit", transaction, lambda: self.client.commit(transaction, **values))

    def rollback(self, transaction: Transaction, **values: Any) -> None:
        if values.get("heuristic") and transaction.fates != {PREPARED}:
            return
        self._if_alive("rollback", transaction, lambda: self.client.rollback(transaction, **values))

    def _if_alive(self, action: str, transaction: Transaction, verb: Callable[[], object]) -> None:
        if transaction in self.client.dead or not transaction.epoch:
            return
        with self.doing(action):
            verb()
