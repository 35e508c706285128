"""The whole broker with transactions on a simulated disk: workers that finish in any order, faults, power cuts.

What must hold is listed in tools/rigs/transaction_model.py; it is checked after every crash and restart, at the
end, and in between whenever everything was answered. Beyond that:

 1. every request gets at most one answer, and exactly one as long as the broker lives;
 2. a request that is repeated after a good answer is answered well again, and changes nothing;
 3. a transaction in doubt stays so until it is decided, and can be decided;
 4. what a step of an older transaction of the same xid asks for never touches the newer one.

A failure prints the steps that lead to it; hypothesis replays them. Counts follow TFMQ_TEST_SCALE.
"""

from __future__ import annotations

import random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.broker.helpers import Answer, Broker
from tests.crash.transaction_client import Step, TransactionClient
from tests.scale import scaled
from tfmq.errors import TfmqError
from tfmq.protocol.commands import (
    CommitMember,
    CommitTransaction,
    CreateTopic,
    DeleteTopic,
    GrowTopic,
    Metadata,
    ResumePartition,
    RollbackTransaction,
)
from tools.rigs.transaction_model import ABSENT, COMMITTED, PREPARED, Transaction

NAMES = ("orders", "bills")
XIDS = ("x", "y", "z")
GROUPS = ("g", "h")
SMALL, LARGE = 100, 19_000
"""Sizes of messages: a few large ones are more than an append of a partition with small segments takes."""
OPEN_MAX = 12
TROUBLE = 8
"""Steps after which the disk is mended."""
LONGEST = 2_000_000
"""Milliseconds that a transaction which must not run out of time is given."""

EXPECTED = {
    "ok", "waiting", "storage_stopped", "disk_full", "busy", "unknown_topic", "unknown_partition", "not_allowed",
    "unknown_transaction", "transaction_rolled_back", "transaction_committed", "transaction_exists",
    "transaction_state", "stale_epoch", "group_stale", "group_fenced", "group_incomplete", "heuristic_outcome",
    "unknown_producer", "sequence_gap", "bad_request", "stale_producer", "fenced", "topic_exists", "internal_error",
}  # fmt: skip
BAD = {"internal_error", "sequence_gap", "bad_request"}
"""Answers that no step here should get."""


class Simulation(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1 << 32))
    def begin_life(self, seed: int) -> None:
        self.generator = random.Random(seed)
        self.broker = Broker(
            queued=True,
            transaction__journal_file_bytes=1 << 16,
            log__segment_bytes=1 << 16,
            log__state_bytes=1 << 16,
            flush__messages=50,
            flush__seconds=5,
            limits__transaction_seconds=LONGEST // 1000,
        )
        self.client = TransactionClient(self.broker, record_bytes=SMALL)
        self.count = 0
        self.answers: list[Answer] = []
        self.done: list[Step] = []
        self.sequences = dict.fromkeys(GROUPS, 0)
        self.members: dict[Transaction, tuple[str, int]] = {}
        self.sessions: dict[Transaction, Any] = {}
        self.named: set[Transaction] = set()
        self.trouble = 0
        self.kept(self.broker.ask(CreateTopic("orders", 2, {})))
        self.broker.work()
        for name in ("one", "two"):
            self.client.join(name)
            self.broker.work()

    # Helpers

    def kept(self, answer: Answer) -> Answer:
        self.answers.append(answer)
        return answer

    def label(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    def places(self) -> list[tuple[str, int]]:
        rows = self.broker.ask(Metadata(None, False)).topics
        return [(row[0], partition) for row in rows for partition in range(len(row[2]))]

    def busy(self) -> set[Transaction]:
        """Transactions with a request under way."""
        return {transaction for step in self.client.steps for transaction in step.before}

    def alive(self) -> list[Transaction]:
        """Open ones that can be worked with."""
        busy = self.busy()
        return [
            each
            for each in self.client.sequence_states
            if each.epoch and each.fates == {ABSENT} and each not in busy and each not in self.client.dead
        ]

    def doubtful(self) -> list[Transaction]:
        busy = self.busy()
        return [each for each in self.client.model.transactions.values() if PREPARED in each.fates and each not in busy]

    def posted(self, step: Step) -> None:
        self.answers.append(step.answer)
        self.done.append(step)

    def free_offsets(self, group: str | None) -> dict[str, int] | None:
        if group is None:
            return None
        self.count += 1
        return {group: self.count}

    # Topics and plain messages

    @rule(name=st.sampled_from(NAMES), partitions=st.integers(1, 2))
    def create(self, name: str, partitions: int) -> None:
        self.kept(self.broker.ask(CreateTopic(name, partitions, {})))

    @rule(name=st.sampled_from(NAMES))
    def grow(self, name: str) -> None:
        self.kept(self.broker.ask(GrowTopic(name, 3)))

    @rule()
    def delete(self) -> None:
        """Only bills: the offsets are of orders."""
        names = {name for name, _ in self.places()}
        if "bills" in names:
            self.kept(self.broker.ask(DeleteTopic("bills", self.broker.incarnation("bills"))))

    @rule(data=st.data(), count=st.integers(1, 3), turn=st.booleans())
    def plain(self, data: Any, count: int, turn: bool) -> None:
        usable = [
            label
            for label, each in self.client.plains.items()
            if not each.failed and not each.waiting and each.stream.key in self.keys()
        ]
        places = self.places()
        if not places:
            return
        try:
            if usable and data.draw(st.booleans()):
                label = data.draw(st.sampled_from(usable))
                plain = self.client.plains[label]
                self.kept(self.client.plain(label, plain.topic, plain.stream.key[1], count, turn=turn))  # type: ignore[index]
            else:
                topic, partition = data.draw(st.sampled_from(places))
                self.kept(self.client.plain(self.label("p"), topic, partition, count, turn=turn))
        except TfmqError as error:
            assert error.code in EXPECTED, error

    def keys(self) -> set[object]:
        return {self.client.key(topic, partition) for topic, partition in self.places()}

    # Transactions

    @rule(data=st.data(), group=st.sampled_from([None, None, "one", "two"]), turn=st.booleans())
    def transact(self, data: Any, group: str | None, turn: bool) -> None:
        places = self.places()
        if not places:
            return
        chosen = data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=3, unique=True))
        targets = {place: data.draw(st.integers(1, 3)) for place in chosen}
        if len(self.client.sequence_states) < OPEN_MAX:
            try:
                self.posted(self.client.transact(self.label("t"), targets, self.free_offsets(group), turn=turn))
            except TfmqError as error:
                assert error.code in EXPECTED, error

    @rule(xid=st.sampled_from(["", "", *XIDS]), turn=st.booleans(), member=st.sampled_from([None, None, *GROUPS]))
    def begin(self, xid: str, turn: bool, member: str | None) -> None:
        if len(self.client.sequence_states) >= OPEN_MAX:
            return
        place = None
        label = self.label("b")
        if member is not None:
            sequence = self.sequences[member] + 1
            place = CommitMember(member, sequence, f"run-{sequence}")
            xid = label
        try:
            transaction = self.client.begin(label, xid, member=place, timeout_ms=LONGEST if xid else None, turn=turn)
        except TfmqError as error:
            assert error.code in EXPECTED, error
            return
        self.sessions[transaction] = self.client.session
        if xid:
            self.named.add(transaction)
        if member is not None:
            self.members[transaction] = (member, sequence)

    @rule(
        data=st.data(),
        xid=st.sampled_from(["", *XIDS]),
        member=st.sampled_from([None, None, None, *GROUPS]),
        group=st.sampled_from([None, None, "one", "two"]),
        step=st.sampled_from(["send", "prepare", "prepare", "prepare", "commit"]),
        turn=st.booleans(),
    )
    def begin_and_go_on(
        self, data: Any, xid: str, member: str | None, group: str | None, step: str, turn: bool
    ) -> None:
        """Most of the way of one, in one go."""
        before = len(self.client.model.transactions)
        self.begin(xid or self.label("n"), True, member)
        self.broker.work()
        self.client.look()
        if len(self.client.model.transactions) == before:
            return
        transaction = list(self.client.model.transactions.values())[-1]
        self.client.record_bytes = data.draw(st.sampled_from([SMALL, SMALL, LARGE]))
        for _ in range(data.draw(st.integers(1, 3))):
            if transaction in self.alive() and (places := self.places()):
                topic, partition = data.draw(st.sampled_from(places))
                self.posted(self.client.send(transaction, topic, partition, data.draw(st.integers(1, 3))))
                self.broker.work()
                self.client.look()
        self.client.record_bytes = SMALL
        if transaction in self.alive() and transaction.messages:
            if step == "prepare":
                self.posted(self.client.prepare(transaction, self.free_offsets(group), turn=turn))
            elif step == "commit" and transaction not in self.members:
                offsets = self.free_offsets(group)
                self.posted(self.client.commit(transaction, offsets, one_phase=True, turn=turn))

    @rule(data=st.data(), count=st.integers(1, 4), turn=st.booleans())
    def send(self, data: Any, count: int, turn: bool) -> None:
        alive, places = self.alive(), self.places()
        if alive and places:
            transaction = data.draw(st.sampled_from(alive))
            topic, partition = data.draw(st.sampled_from(places))
            self.posted(self.client.send(transaction, topic, partition, count, turn=turn))

    @rule(data=st.data(), group=st.sampled_from([None, None, "one", "two"]), turn=st.booleans())
    def prepare(self, data: Any, group: str | None, turn: bool) -> None:
        alive = [each for each in self.alive() if each.messages]
        if alive:
            transaction = data.draw(st.sampled_from(alive))
            self.posted(self.client.prepare(transaction, self.free_offsets(group), turn=turn))

    @rule(data=st.data(), turn=st.booleans())
    def commit_at_once(self, data: Any, turn: bool) -> None:
        alive = [each for each in self.alive() if each not in self.members]
        if alive:
            transaction = data.draw(st.sampled_from(alive))
            self.posted(self.client.commit(transaction, one_phase=True, turn=turn))

    @rule(data=st.data(), turn=st.booleans())
    def roll_back(self, data: Any, turn: bool) -> None:
        alive = self.alive()
        if alive:
            self.posted(self.client.rollback(data.draw(st.sampled_from(alive)), turn=turn))

    @rule(data=st.data(), commit=st.booleans(), heuristic=st.sampled_from([False, False, True]), turn=st.booleans())
    def decide(self, data: Any, commit: bool, heuristic: bool, turn: bool) -> None:
        doubtful = [each for each in self.doubtful() if each not in self.members]
        if doubtful:
            transaction = data.draw(st.sampled_from(doubtful))
            verb = self.client.commit if commit else self.client.rollback
            self.posted(verb(transaction, heuristic=heuristic, turn=turn))

    @rule(group=st.sampled_from(GROUPS), drop=st.integers(0, 1), turn=st.booleans())
    def commit_group(self, group: str, drop: int, turn: bool) -> None:
        sequence = self.sequences[group] + 1
        doubtful = [each for each in self.doubtful() if self.members.get(each, ("", 0))[0] == group]
        members = [each for each in doubtful if self.members[each][1] == sequence]
        if not members or any(self.members.get(each, ("", 0))[0] == group for each in self.busy()):
            return
        kept = members[drop:] or members
        dropped = [each for each in doubtful if each not in kept]
        step = self.client.commit_group(group, sequence, f"run-{sequence}", kept, dropped, turn=turn)
        self.posted(step)
        self.sequences[group] = sequence

    @rule(data=st.data(), turn=st.booleans())
    def ask_again(self, data: Any, turn: bool) -> None:
        """As a client does after a lost answer."""
        busy = self.busy()
        last = {transaction: step for step in self.done for transaction in step.before}
        steps = [
            each
            for each in self.done[-30:]
            if each.name not in ("begin", "send")
            and each.noted
            and not busy & set(each.before)
            and all(last[transaction] is each for transaction in each.before)
            and (each.name != "commit group" or each.answer.code == "ok")  # else other members may be dropped now
        ]
        if not steps:
            return
        step = data.draw(st.sampled_from(steps))
        before = {transaction: transaction.fates for transaction in step.before}
        repeat = self.client.again(step, turn=turn)
        self.answers.append(repeat.answer)
        self.broker.work()
        self.client.look()
        was_good = step.answer.code == "ok" and step.name != "rollback"
        changed = any(len(fates) > 1 for fates in before.values()) or repeat.answer.code in (
            "storage_stopped", "busy", "disk_full", "waiting", "heuristic_outcome", "unknown_topic",
        )  # fmt: skip
        known = all(each.messages and self.client.is_remembered(each, each in self.named) for each in before)
        ended = step.name == "prepare" and any(fates != {PREPARED} for fates in before.values())
        if step.name == "commit group":
            ended = step.request.sequence < self.sequences[step.request.group]
        if was_good and known and not changed and not ended:
            assert repeat.answer.code == "ok", f"{step.name} was answered well, and then {repeat.answer.failure!r}"

    @rule(data=st.data(), commit=st.booleans())
    def meddle_with_an_older_one(self, data: Any, commit: bool) -> None:
        """A late step of a transaction that ended, while another one has its xid."""
        newest = {each.xid: each for each in self.client.model.transactions.values() if each.xid and each.epoch}
        older = [
            each
            for each in self.client.model.transactions.values()
            if each.epoch
            and each.messages
            and each.xid in newest
            and newest[each.xid] is not each
            and len(each.fates) == 1
        ]
        if not older:
            return
        transaction = data.draw(st.sampled_from(older))
        if PREPARED in transaction.fates:
            return
        request: Any = RollbackTransaction(transaction.xid, transaction.epoch, False)
        if commit:
            request = CommitTransaction(transaction.xid, transaction.epoch, False, False, [])
        answer = self.kept(self.client.ask(request))
        self.broker.work()
        if answer.code == "ok":
            assert transaction.fates == ({COMMITTED} if commit else {ABSENT}), f"{transaction} changed its mind"

    # The world

    @rule()
    def close_session(self) -> None:
        """Local ones that are open end with it."""
        busy = self.busy()
        session = self.client.session
        self.client.session.close()
        for transaction in list(self.client.sequence_states):
            is_open = transaction.fates == {ABSENT} and transaction not in busy
            if self.sessions.get(transaction) is session and is_open:
                self.client.dead.add(transaction)
        self.client.session = type(session)("somebody else")
        for name in ("one", "two"):
            member = self.client.groups[name]
            again = self.broker.join(name, member.member, session=self.client.session)
            self.broker.work()
            if again.code == "ok":
                self.client.groups[name] = again

    @rule(index=st.integers(0, 5))
    def work(self, index: int) -> None:
        if self.broker.jobs:
            self.broker.step(index % len(self.broker.jobs))
            self.client.look()

    @rule()
    def work_all(self) -> None:
        self.broker.work()
        self.client.look()

    @rule(seconds=st.sampled_from([0.1, 3.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.broker.advance(seconds)
        self.client.look()

    @precondition(lambda self: self.trouble == 0)
    @rule(
        kind=st.sampled_from(["force", "write", "create", "sync_file", "unlink", "read"]),
        nth=st.integers(1, 5),
        path=st.sampled_from(["-", "-", "/transactions/"]),
    )
    def fault(self, kind: str, nth: int, path: str) -> None:
        """Reads fail only of the journal: it is from there that decisions are applied."""
        self.trouble = TROUBLE
        self.broker.disk.faults.fail(kind, nth=nth, path="/transactions/" if kind == "read" else path)

    @precondition(lambda self: self.trouble == 0)
    @rule(room=st.sampled_from([0, 2_000, 20_000]))
    def full(self, room: int) -> None:
        self.trouble = TROUBLE
        self.broker.disk.space_bytes = self.broker.disk.used_bytes() + room

    @invariant()
    def trouble_ends(self) -> None:
        """A disk that always fails would let nothing happen any more."""
        self.trouble = max(0, self.trouble - 1)
        if self.trouble == 1:
            self.settle_faults()
            if self.broker.engine.broker.transaction_commands.coordinator.status()["journal"] != "open":
                self.restart()
            self.resume()

    @rule()
    def resume(self) -> None:
        self.settle_faults()
        for topic, partition in self.places():
            self.kept(self.broker.ask(ResumePartition(topic, partition)))
        self.broker.work()
        self.client.look()

    @precondition(lambda self: not self.client.steps)
    @rule()
    def look_around(self) -> None:
        """Everything was answered: whatever can be seen is right, in the middle of life too. A partition that has
        stopped is reported a moment later."""
        self.broker.work()
        self.broker.advance(0.05)
        self.broker.work()
        self.client.look()
        if not self.client.steps:
            self.client.model.check(self.client.view(), final=False)

    @rule()
    def restart(self) -> None:
        self.settle_faults()
        self.broker.work()
        self.client.look()
        self.broker.stop()
        self.go_on(self.broker.disk)

    @rule(keep=st.sampled_from(["some", "some", "nothing", "everything"]))
    def crash(self, keep: str) -> None:
        self.client.look()
        self.go_on(self.broker.disk.crash(self.generator, keep=keep))

    def go_on(self, disk: Any) -> None:
        """A new broker; sometimes everything that had no answer is asked again."""
        old = self.broker
        broker = Broker(disk, old.clock, queued=True, start=False, **old.values)
        broker.random.count = old.random.count
        broker.engine.start()
        self.broker = broker
        lost = self.client.moved(broker)
        self.settle_faults()
        self.answers = []
        self.client.model.check(self.client.view())
        for step in lost:
            if step.name not in ("begin", "send"):
                self.posted(self.client.again(step))
                self.broker.work()
        self.client.look()

    def settle_faults(self) -> None:
        self.broker.disk.faults.clear()
        self.broker.disk.space_bytes = None

    def teardown(self) -> None:
        if not hasattr(self, "broker"):
            return
        self.settle_faults()
        self.broker.work()
        self.broker.advance(60)
        self.broker.work()
        self.client.look()
        waiting = [step.name for step in self.client.steps]
        assert not waiting and all(answer.done for answer in self.answers), f"no answer to {waiting}"
        for answer in self.answers:
            assert answer.code in EXPECTED, answer.failure
        for step in self.done:
            again = step.name == "transact" and step.answer.failure is not None
            assert again or step.answer.code not in BAD, f"{step.name}: {step.answer.failure!r}"
        for keep in ("nothing", "everything"):
            self.go_on(self.broker.disk.crash(self.generator, keep=keep))
            self.resume()
            self.broker.advance(60)
            self.broker.work()
            self.client.look()
            view = self.client.view()
            assert not view.applying, "decided ones are still not applied, and nothing is in their way"
            self.client.model.check(view)
        self.client.model.together.clear()
        for number, transaction in enumerate(self.doubtful()):
            commits = number % 2 == 1 and not transaction.is_member
            step = (self.client.commit if commits else self.client.rollback)(transaction)
            self.broker.work()
            self.client.look()
            assert step.answer.code == "ok", f"{transaction}: {step.answer.failure!r}"
        self.client.model.check(self.client.view())


TestSimulation = Simulation.TestCase
TestSimulation.settings = settings(max_examples=scaled(300), stateful_step_count=60)
