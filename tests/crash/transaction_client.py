"""A client of the transactions of a simulated broker, with a model of the state that must follow.

Every verb sends one request and notes in the model what may have happened from then on; `look` notes the
answers that came. The memory of a request's body is scribbled over as soon as the broker lets go of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

from tests.broker.helpers import Answer, Broker, Session, batch
from tfmq.errors import NOT_DONE, Busy, HeuristicOutcome, StorageStopped, TransactionCommitted, TransactionRolledBack
from tfmq.protocol import commands
from tools.rigs.transaction_model import (
    ABSENT,
    COMMITTED,
    NEVER,
    PREPARED,
    Fate,
    Key,
    Model,
    Stream,
    Together,
    Transaction,
    View,
    require,
)

SCRIBBLE = b"\xee"
PAGE = 1000

Targets = Mapping[tuple[str, int], int]
"""How many messages to which (topic, partition)."""

DECIDED: Mapping[type, Fate] = {TransactionRolledBack: ABSENT, TransactionCommitted: COMMITTED}
"""Errors that say what became of a transaction."""

UNDER_WAY = frozenset({"preparing", "committing", "rolling_back"})

HEURISTICS = {"heuristic_committed": COMMITTED, "heuristic_rolled_back": ABSENT}


class BorrowedAnswer(Answer):
    """An answer that takes the request's memory back as the server does."""

    def __init__(self, correlation: int, shape: Any, memory: bytearray) -> None:
        super().__init__(correlation, shape)
        self.memory = memory

    def body_done(self) -> None:
        super().body_done()
        self._take_back()

    def ok(self, *fields: Any, body: Any = b"") -> None:
        super().ok(*fields, body=body)
        self._take_back()

    def error(self, error: BaseException) -> None:
        super().error(error)
        self._take_back()

    def _take_back(self) -> None:
        self.memory[:] = SCRIBBLE * len(self.memory)


@dataclass(eq=False)
class SequenceState:
    """A transactional stream: one transaction at a time."""

    producer_id: int
    number: int = 0
    sequence: int = 0


@dataclass(eq=False)
class Step:
    """A request that was sent. `done` says what its good answer means; `before` is what was known then."""

    name: str
    request: Any
    body: bytes
    answer: Answer
    before: dict[Transaction, frozenset[Fate]]
    done: Callable[[Answer], None]
    refused: Callable[[], None] = lambda: None
    may_be: Mapping[Transaction, Sequence[Fate]] = field(default_factory=dict)
    offsets: Mapping[str, int] = field(default_factory=dict)
    noted: bool = False


@dataclass(eq=False)
class Plain:
    """A plain stream and its batches that are under way: (how many messages with it, its answer)."""

    stream: Stream
    topic: str
    producer_id: int
    waiting: list[tuple[int, Answer]] = field(default_factory=list)
    failed: bool = False
    """A batch was refused, or has an unknown outcome: what follows would leave a gap."""


class TransactionClient:
    def __init__(self, broker: Broker, model: Model | None = None, *, record_bytes: int = 60) -> None:
        self.broker = broker
        self.model = model or Model()
        self.session = Session("somebody")
        self.record_bytes = record_bytes
        self.steps: list[Step] = []
        self.sequence_states: dict[Transaction, SequenceState] = {}
        self.numbers: dict[Transaction, tuple[SequenceState, int]] = {}
        self.free: list[SequenceState] = []
        self.plains: dict[str, Plain] = {}
        self.groups: dict[str, Answer] = {}
        self.dead: set[Transaction] = set()
        """Transactions that were rolled back, or failed in the middle: nothing more is sent in them."""

    # Names and memory

    def key(self, topic: str, partition: int) -> Key:
        return self.broker.incarnation(topic), partition

    def sequence_state(self) -> SequenceState:
        """One that is free, or a new one."""
        return self.free.pop() if self.free else SequenceState(self.broker.lease())

    def named(self, transaction: Transaction, epoch: int) -> None:
        """Its epoch is known."""
        twins = [each for each in self.model.transactions.values() if each.epoch == epoch]
        require(not twins or twins == [transaction], f"{transaction} gets the epoch {epoch} of {twins}")
        transaction.epoch = epoch

    def take_sequence(self, transaction: Transaction) -> SequenceState:
        sequence_state = self.sequence_states[transaction] = self.sequence_state()
        self.numbers[transaction] = (sequence_state, sequence_state.number)
        return sequence_state

    def is_remembered(self, transaction: Transaction, named: bool) -> bool:
        """Whether the broker must know what became of it: it has a name, or is the last one of its stream."""
        sequence_state, number = self.numbers[transaction]
        return named or sequence_state.number == number + 1

    def give_back(self, transaction: Transaction) -> None:
        sequence_state = self.sequence_states.pop(transaction, None)
        if sequence_state is not None:
            self.free.append(sequence_state)

    def payloads(self, transaction: Transaction, key: Key, count: int) -> list[bytes]:
        first = len(transaction.messages.get(key, ()))
        made = [
            f"{transaction.label}:{key}:{n}:".encode().ljust(self.record_bytes, b".")
            for n in range(first, first + count)
        ]
        transaction.messages[key].extend(made)
        return made

    # Asking

    def ask(self, request: Any, body: bytes = b"", *, turn: bool = True, answer: Answer | None = None) -> Answer:
        """One request; its memory is the server's, and taken back when the broker lets go of it."""
        if answer is None:
            answer = self.answer_to(request, body)
        memory = answer.memory if isinstance(answer, BorrowedAnswer) else body
        self.broker.engine.handle(request, memoryview(memory), answer, self.session)
        if turn:
            self.broker.engine.broker.end_turn()
        return answer

    def answer_to(self, request: Any, body: bytes) -> BorrowedAnswer:
        self.broker.correlation += 1
        shape = commands.BY_REQUEST[type(request)].reply.shape
        return BorrowedAnswer(self.broker.correlation, shape, bytearray(body))

    def step(
        self,
        name: str,
        request: Any,
        may_be: Mapping[Transaction, Sequence[Fate]],
        done: Callable[[Answer], None],
        *,
        refused: Callable[[], None] = lambda: None,
        offsets: Mapping[str, int] | None = None,
        body: bytes = b"",
        turn: bool = True,
    ) -> Step:
        """Sends a request that may change the fates of these transactions."""
        before = {transaction: transaction.fates for transaction in may_be}
        for transaction, fates in may_be.items():
            transaction.may_be(*fates)
        answer = self.answer_to(request, body)
        step = Step(name, request, body, answer, before, done, refused, may_be, offsets or {})
        return self._post(step, turn)

    def again(self, step: Step, *, turn: bool = True) -> Step:
        """The same request once more, as after a lost answer."""
        before = {transaction: transaction.fates for transaction in step.before}
        for transaction, fates in step.may_be.items():
            alive = PREPARED in transaction.fates or transaction not in self.dead
            if step.name == "transact" or alive:
                transaction.may_be(*fates)
                transaction.offsets.update(step.offsets)
                if COMMITTED in fates:
                    transaction.asked = min(transaction.asked, self.model.tick())
        answer = self.answer_to(step.request, step.body)
        return self._post(replace(step, answer=answer, before=before, noted=False), turn)

    def _post(self, step: Step, turn: bool) -> Step:
        self.steps.append(step)
        self.ask(step.request, step.body, turn=turn, answer=step.answer)
        self.look()
        return step

    def look(self) -> None:
        """Notes the answers that came."""
        for step in self.steps:
            if step.answer.done and not step.noted:
                step.noted = True
                self._note(step)
        self.steps = [step for step in self.steps if not step.noted]
        for plain in self.plains.values():
            for count, answer in plain.waiting:
                if answer.code == "ok" and answer.durability == commands.ACKS_SYNCED:
                    plain.stream.safe = max(plain.stream.safe, count)
                plain.failed |= answer.failure is not None
            plain.waiting = [each for each in plain.waiting if not each[1].done]

    def _note(self, step: Step) -> None:
        failure = step.answer.failure
        if failure is None:
            step.done(step.answer)
            return
        known = DECIDED.get(type(failure))
        if isinstance(failure, HeuristicOutcome):
            known = HEURISTICS[failure.state]
        for transaction, before in step.before.items():
            if known is not None:
                self.learn(transaction, known)
            elif failure.outcome == NOT_DONE and len(transaction.fates) > 1:
                transaction.fates = before
            if failure.outcome == NOT_DONE and COMMITTED not in transaction.fates:
                transaction.asked = NEVER
            if failure.outcome == NOT_DONE and transaction.fates == {ABSENT}:
                for group in step.offsets:
                    transaction.offsets.pop(group, None)
        step.refused()

    def learn(self, transaction: Transaction, fate: Fate) -> None:
        """The broker said what became of it."""
        require(fate in transaction.fates, f"{transaction} is said to be {fate.value}")
        transaction.is_now(fate)
        if fate is COMMITTED:
            transaction.answered = min(transaction.answered, self.model.tick())
        if fate is not PREPARED:
            self.give_back(transaction)
            self.dead.add(transaction)

    # Verbs

    def transact(
        self, label: str, targets: Targets, offsets: Mapping[str, int] | None = None, *, turn: bool = True
    ) -> Step:
        """A whole transaction in one request."""
        transaction = self.model.begin(label)
        sequence_state = self.take_sequence(transaction)
        rows, bodies = [], []
        for (topic, partition), count in targets.items():
            key = self.key(topic, partition)
            data = batch(sequence_state.producer_id, sequence_state.sequence, self.payloads(transaction, key, count))
            incarnation = self.broker.incarnation(topic)
            rows.append(
                commands.TransactionBatch(
                    topic, incarnation, partition, sequence_state.sequence, count, len(data), [blocks_of(data, count)]
                )
            )
            bodies.append(data)
            sequence_state.sequence += count
        inside = self.offsets_inside(transaction, offsets)
        transaction.asked = self.model.tick()
        request = commands.Transact(sequence_state.producer_id, sequence_state.number, rows, inside)
        sequence_state.number += 1

        def done(answer: Answer) -> None:
            self.named(transaction, answer.epoch)
            self.learn(transaction, COMMITTED)

        return self.step(
            "transact", request, {transaction: [COMMITTED]}, done,
            refused=lambda: self.drop_sequence(transaction), offsets=offsets, body=b"".join(bodies), turn=turn,
        )  # fmt: skip

    def begin(
        self,
        label: str,
        xid: str = "",
        *,
        group: str = "",
        member: commands.CommitMember | None = None,
        timeout_ms: int | None = None,
        turn: bool = True,
    ) -> Transaction:
        transaction = self.model.begin(label, xid)
        transaction.is_member = member is not None
        sequence_state = self.take_sequence(transaction)
        request = commands.BeginTransaction(
            sequence_state.producer_id, sequence_state.number, xid, timeout_ms, group, member
        )
        sequence_state.number += 1

        def done(answer: Answer) -> None:
            self.named(transaction, answer.epoch)
            transaction.xid = answer.xid

        self.step("begin", request, {transaction: []}, done, refused=lambda: self.drop_sequence(transaction), turn=turn)
        return transaction

    def send(self, transaction: Transaction, topic: str, partition: int, count: int = 1, *, turn: bool = True) -> Step:
        sequence_state, key = self.sequence_states[transaction], self.key(topic, partition)
        data = batch(sequence_state.producer_id, sequence_state.sequence, self.payloads(transaction, key, count))
        request = commands.Produce(
            topic,
            self.broker.incarnation(topic),
            partition,
            sequence_state.producer_id,
            sequence_state.sequence,
            count,
            commands.ACKS_WRITTEN,
            [blocks_of(data, count)],
            None,
            transaction.epoch,
        )
        sequence_state.sequence += count
        return self.step(
            "send", request, {transaction: []}, lambda answer: None,
            refused=lambda: self.drop_sequence(transaction), body=data, turn=turn,
        )  # fmt: skip

    def prepare(self, transaction: Transaction, offsets: Mapping[str, int] | None = None, *, turn: bool = True) -> Step:
        inside = self.offsets_inside(transaction, offsets)
        request = commands.PrepareTransaction(transaction.xid, transaction.epoch, None, inside)

        def done(answer: Answer) -> None:
            if answer.state == "read_only":
                require(not transaction.messages, f"{transaction} is called read only")
                self.learn(transaction, ABSENT)
            else:
                self.learn(transaction, PREPARED)

        return self.step("prepare", request, {transaction: [PREPARED]}, done, offsets=offsets, turn=turn)

    def commit(
        self,
        transaction: Transaction,
        offsets: Mapping[str, int] | None = None,
        *,
        one_phase: bool = False,
        heuristic: bool = False,
        turn: bool = True,
    ) -> Step:
        inside = self.offsets_inside(transaction, offsets)
        transaction.asked = min(transaction.asked, self.model.tick())
        request = commands.CommitTransaction(transaction.xid, transaction.epoch, one_phase, heuristic, inside)

        def done(answer: Answer) -> None:
            if answer.state == "read_only":
                require(not transaction.messages, f"{transaction} is called read only")
                self.learn(transaction, ABSENT if ABSENT in transaction.fates else COMMITTED)
            else:
                transaction.heuristic |= heuristic
                self.learn(transaction, COMMITTED)

        return self.step("commit", request, {transaction: [COMMITTED]}, done, offsets=offsets, turn=turn)

    def rollback(self, transaction: Transaction, *, heuristic: bool = False, turn: bool = True) -> Step:
        request = commands.RollbackTransaction(transaction.xid, transaction.epoch, heuristic)

        def done(answer: Answer) -> None:
            transaction.heuristic |= heuristic
            self.learn(transaction, ABSENT)

        return self.step("rollback", request, {transaction: [ABSENT]}, done, turn=turn)

    def forget(self, transaction: Transaction) -> Answer:
        return self.ask(commands.ForgetTransaction(transaction.xid, transaction.epoch))

    def commit_group(
        self,
        group: str,
        sequence: int,
        run: str,
        members: Sequence[Transaction],
        dropped: Sequence[Transaction] = (),
        *,
        turn: bool = True,
    ) -> Step:
        """`dropped`: the other members that a commit drops."""
        names = [commands.TransactionName(member.xid, member.epoch) for member in members]
        request = commands.CommitGroup(group, sequence, run, names, len(members))
        together = Together(f"{group}/{sequence}", tuple(members), tuple(dropped))
        self.model.together.append(together)
        for transaction in members:
            transaction.asked = min(transaction.asked, self.model.tick())

        def done(answer: Answer) -> None:
            for transaction in members:
                self.learn(transaction, COMMITTED)
            for transaction in dropped:
                self.learn(transaction, ABSENT)

        may_be: dict[Transaction, Sequence[Fate]] = {member: [COMMITTED] for member in members}
        may_be.update({transaction: [ABSENT] for transaction in dropped})

        def refused() -> None:
            if step.answer.failure is not None and step.answer.failure.outcome == NOT_DONE:
                self.model.together = [each for each in self.model.together if each is not together]

        answer = self.answer_to(request, b"")
        before = {transaction: transaction.fates for transaction in may_be}
        for transaction, fates in may_be.items():
            transaction.may_be(*fates)
        step = Step("commit group", request, b"", answer, before, done, refused, may_be)
        return self._post(step, turn)

    def abort_group(self, group: str, sequence: int, run: str, members: Sequence[Transaction]) -> Step:
        request = commands.AbortCommitGroup(group, sequence, run)

        def done(answer: Answer) -> None:
            if answer.state == "aborted":
                for transaction in members:
                    self.learn(transaction, ABSENT)

        return self.step("abort group", request, {member: [ABSENT] for member in members}, done)

    def plain(self, label: str, topic: str, partition: int, count: int = 1, *, turn: bool = True) -> Answer:
        """Messages outside of any transaction, on a stream of their own."""
        plain = self.plains.get(label)
        if plain is None:
            stream = self.model.stream(label, self.key(topic, partition))
            plain = self.plains[label] = Plain(stream, topic, self.broker.lease())
        first = len(plain.stream.sent)
        made = [f"{label}:{n}:".encode().ljust(self.record_bytes, b".") for n in range(first, first + count)]
        plain.stream.sent.extend(made)
        request = commands.Produce(
            topic, self.broker.incarnation(topic), partition, plain.producer_id, first, count, commands.ACKS_SYNCED, []
        )
        plain.waiting.append((first + count, Answer(0, None)))
        answer = self.ask(request, batch(plain.producer_id, first, made), turn=turn)
        plain.waiting[-1] = (first + count, answer)
        self.look()
        return answer

    # Offsets

    def join(self, group: str) -> None:
        """Becomes the group's member, under which offsets go into transactions."""
        self.groups[group] = self.broker.join(group, session=self.session)

    def offsets_inside(
        self, transaction: Transaction, offsets: Mapping[str, int] | None
    ) -> list[commands.TransactionOffsets]:
        """Rows that set groups to an offset of partition 0 of `orders`."""
        rows = []
        for group, offset in (offsets or {}).items():
            transaction.offsets[group] = offset
            member = self.groups[group]
            place = commands.GroupOffset("orders", self.broker.incarnation("orders"), 0, offset)
            rows.append(commands.TransactionOffsets(group, member.member, member.generation, [place]))
        return rows

    def saved(self, group: str) -> int | None:
        """The group's offset; None if it has none. Raises Busy while a transaction holds it."""
        answer = self.ask(commands.ReadOffsets(group, None))
        self.broker.work()
        rows = list(answer.offsets)
        return int(rows[0][3]) if rows else None

    # Crashes

    def drop_sequence(self, transaction: Transaction) -> None:
        """What was sent may have been taken or not: the next transaction begins on a stream of its own."""
        self.sequence_states.pop(transaction, None)
        self.dead.add(transaction)

    def moved(self, broker: Broker) -> list[Step]:
        """The broker is another one, on what a crash left; connections are new. The steps without an answer."""
        self.look()
        lost, self.steps = self.steps, []
        self.broker, self.session = broker, Session("somebody")
        self.dead |= {each for each in self.sequence_states if PREPARED not in each.fates}
        self.sequence_states, self.free = {}, []
        for plain in self.plains.values():
            plain.failed |= bool(plain.waiting)
            plain.waiting = []
        return lost

    # What the broker shows

    def rows(self, states: list[str] | None = None) -> list[dict[str, Any]]:
        """LIST_TRANSACTIONS, all pages."""
        found: list[dict[str, Any]] = []
        more, after = True, 0
        while more:
            answer = self.ask(commands.ListTransactions(states, after, PAGE))
            page = list(answer.transactions)
            found += page
            more = answer.more
            after = page[-1]["epoch"] if page else after
        return found

    def view(self) -> View:
        """Everything a user can see, read to the end. No request may be under way."""
        messages: dict[Key, list[bytes]] = {}
        forced: dict[Key, int] = {}
        stuck = set()
        names = self.broker.ask(commands.Metadata(None, False)).topics
        for row in names:
            for partition in range(len(row[2])):
                key = (row[1], partition)
                if self.broker.log(row[0], partition).stopped is not None:
                    stuck.add(key)
                messages[key] = self.broker.payloads(row[0], partition, commands.READ_WRITTEN)
                forced[key] = len(self.broker.payloads(row[0], partition, commands.READ_FORCED))
        rows = self.rows()
        late = {"applying"}
        if self.broker.engine.broker.transaction_commands.coordinator.status()["waits_for"]:
            late.add("heuristic_committed")
        known = {key for t in self.model.transactions.values() for key in t.messages}
        known |= {stream.key for stream in self.model.streams.values()}
        saved, locked, silent = {}, set(), set()
        for group in self.groups:
            try:
                offset = self.saved(group)
            except Busy:
                locked.add(group)
            except StorageStopped:
                silent.add(group)
            else:
                if offset is not None:
                    saved[group] = offset
        return View(
            messages,
            forced,
            frozenset(row["epoch"] for row in rows if row["state"] == "prepared"),
            frozenset(row["epoch"] for row in rows if row["state"] in late),
            saved,
            frozenset(locked),
            frozenset(known - messages.keys()),
            frozenset(stuck),
            frozenset(row["epoch"] for row in rows if row["state"] in UNDER_WAY),
            frozenset(silent),
            frozenset(row["epoch"] for row in rows if row["state"] in HEURISTICS),
        )


def blocks_of(data: bytes, count: int) -> commands.Block:
    """One block for the whole batch: the rigs' batches are small."""
    return commands.Block(len(data), count, crc32(data))
