"""The whole broker on a simulated disk, with workers that finish in any order, faults and power cuts anywhere.

What must hold, checked after every crash and at the end:
 1. what was answered as synced is there, unless its topic was deleted;
 2. nothing is there twice, whatever was resent;
 3. what one stream sent is there in its order, without a hole;
 4. what a reader of forced data has seen stays, at the same place in the order;
 5. no id is leased twice;
 6. saved offsets never go back before one that was acknowledged, nor beyond what was asked for;
 7. a topic whose deletion was answered stays deleted, one whose creation was answered is there;
 8. every request gets at most one answer, and exactly one as long as the broker lives.

A failure prints the steps that lead to it; hypothesis replays them. Counts follow TFMQ_TEST_SCALE.
"""

import random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.broker.helpers import Answer, Broker, Session
from tests.scale import scaled
from tfmq.errors import UnknownTopic
from tfmq.protocol.commands import (
    ACKS_NONE,
    ACKS_SYNCED,
    ACKS_WRITTEN,
    READ_FORCED,
    READ_WRITTEN,
    CommitOffsets,
    CreateTopic,
    DeleteTopic,
    GroupOffset,
    GrowTopic,
    LeaseProducerIds,
    Metadata,
    ResumePartition,
)

NAMES = ("orders", "bills")
UNSURE_MAX = 20
"""Batches of a stream that may be unanswered: fewer than the broker remembers."""

EXPECTED_CODES = {
    "ok", "waiting", "storage_stopped", "disk_full", "busy", "unknown_topic", "unknown_partition", "sequence_gap",
    "unknown_producer", "internal_error",
}  # fmt: skip


class Batch:
    """A batch as its producer remembers it."""

    def __init__(self, sequence: int, payloads: list[bytes]) -> None:
        self.sequence = sequence
        self.payloads = payloads
        self.safe = False
        self.answer: Answer | None = None

    def look(self) -> None:
        """Takes note of an answer that came."""
        answer = self.answer
        if answer is not None and answer.code == "ok" and answer.durability == ACKS_SYNCED:
            self.safe = True


class Stream:
    """One producer on one partition: what it sent, in order."""

    def __init__(self, name: str, incarnation: int, partition: int, producer: int) -> None:
        self.name, self.incarnation, self.partition, self.producer = name, incarnation, partition, producer
        self.batches: list[Batch] = []

    @property
    def place(self) -> tuple[int, int]:
        return self.incarnation, self.partition

    def unsure(self) -> list[Batch]:
        """Batches from the first that is not surely stored."""
        for batch in self.batches:
            batch.look()
        safe = max((n for n, batch in enumerate(self.batches) if batch.safe), default=-1)
        return self.batches[safe + 1 :]


class Simulation(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1 << 32))
    def begin(self, seed: int) -> None:
        self.generator = random.Random(seed)
        self.broker = Broker(
            queued=True, log__segment_bytes=1 << 16, log__state_bytes=1 << 16, flush__messages=50, flush__seconds=5
        )
        self.count = 0
        self.streams: list[Stream] = []
        self.topics: dict[str, tuple[int, int]] = {}
        self.deleted: set[int] = set()
        self.deleting: list[tuple[str, int, Answer]] = []
        self.seen: dict[tuple[int, int], list[bytes]] = {}
        self.leased: set[int] = set()
        self.members: dict[str, Answer] = {}
        self.commits: dict[str, list[tuple[int, Answer]]] = {}
        self.floor: dict[str, int] = {}
        self.answers: list[Answer] = []

    # Topics

    @rule(name=st.sampled_from(NAMES), partitions=st.integers(1, 2))
    def create(self, name: str, partitions: int) -> None:
        self.kept(self.broker.ask(CreateTopic(name, partitions, {})))

    @rule(name=st.sampled_from(NAMES))
    def grow(self, name: str) -> None:
        self.kept(self.broker.ask(GrowTopic(name, 3)))

    @rule(name=st.sampled_from(NAMES))
    def delete(self, name: str) -> None:
        self.refresh()
        if name in self.topics:
            incarnation = self.topics[name][0]
            answer = self.kept(self.broker.ask(DeleteTopic(name, incarnation)))
            self.deleting.append((name, incarnation, answer))

    def refresh(self) -> None:
        """What the broker lists now; a listed topic is answered for."""
        rows = self.broker.ask(Metadata(None, False)).topics
        self.topics = {row[0]: (row[1], len(row[2])) for row in rows}
        assert not self.deleted & {row[1] for row in rows}, "a deleted topic is back"

    def kept(self, answer: Answer) -> Answer:
        self.answers.append(answer)
        return answer

    # Producing

    @rule(name=st.sampled_from(NAMES), partition=st.integers(0, 2))
    def new_stream(self, name: str, partition: int) -> None:
        self.refresh()
        answer = self.broker.ask(LeaseProducerIds(2))
        self.broker.work()
        if answer.code != "ok":
            return
        ids = {answer.first, answer.first + 1}
        assert not ids & self.leased, "an id was leased twice"
        self.leased |= ids
        incarnation, partitions = self.topics.get(name, (0, 0))
        if partition < partitions:
            self.streams.append(Stream(name, incarnation, partition, answer.first))

    @precondition(lambda self: self.streams)
    @rule(
        data=st.data(),
        records=st.integers(1, 3),
        size=st.sampled_from([1, 100, 9000]),
        acks=st.sampled_from([ACKS_SYNCED, ACKS_SYNCED, ACKS_WRITTEN, ACKS_NONE]),
        turn=st.booleans(),
    )
    def send(self, data: Any, records: int, size: int, acks: int, turn: bool) -> None:
        stream = data.draw(st.sampled_from(self.streams))
        unsure = stream.unsure()
        if len(unsure) >= UNSURE_MAX or any(batch.answer is None for batch in unsure):
            return
        if any(batch.answer is not None and batch.answer.failure is not None for batch in unsure):
            return
        self.count += 1
        last = stream.batches[-1] if stream.batches else None
        sequence = last.sequence + len(last.payloads) if last is not None else 0
        payloads = [b"%d.%d." % (self.count, n) + bytes(size) for n in range(records)]
        batch = Batch(sequence, payloads)
        stream.batches.append(batch)
        self.post(stream, batch, acks, turn)

    def post(self, stream: Stream, batch: Batch, acks: int, turn: bool) -> None:
        # A gap is never passed on purpose here, so acks none stands for written.
        batch.answer = self.kept(
            self.broker.produce(
                stream.producer,
                batch.sequence,
                batch.payloads,
                topic=stream.name,
                partition=stream.partition,
                incarnation=stream.incarnation,
                acks=ACKS_WRITTEN if acks == ACKS_NONE else acks,
                turn=turn,
            )
        )

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def resend(self, data: Any) -> None:
        """As a client does after a lost connection: everything that it is not sure of, in order."""
        stream = data.draw(st.sampled_from(self.streams))
        for batch in stream.unsure():
            self.post(stream, batch, ACKS_SYNCED, turn=False)
        self.broker.engine.broker.end_turn()

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def repeat_an_old_one(self, data: Any) -> None:
        stream = data.draw(st.sampled_from(self.streams))
        if stream.batches:
            batch = data.draw(st.sampled_from(stream.batches[-UNSURE_MAX:]))
            before = batch.answer
            self.post(stream, batch, ACKS_SYNCED, turn=True)
            if batch.answer is not None and batch.answer.failure is not None:
                batch.answer = before

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def succeed(self, data: Any) -> None:
        stream = data.draw(st.sampled_from(self.streams))
        if not self.is_there(stream):
            return
        answer = self.kept(self.broker.succeed(stream.producer, stream.name, stream.partition))
        self.broker.work()
        if answer.code != "ok" or not self.is_there(stream):
            return
        self.streams.remove(stream)
        stored = self.read(stream, READ_WRITTEN) or []
        mine = [payload for batch in stream.batches for payload in batch.payloads]
        found = [payload for payload in stored if payload in set(mine)]
        assert len(found) == answer.last_sequence + 1, "the successor's answer tells the last sequence"

    def is_there(self, stream: Stream) -> bool:
        self.refresh()
        incarnation, partitions = self.topics.get(stream.name, (0, 0))
        return incarnation == stream.incarnation and stream.partition < partitions

    # Reading

    def read(self, stream: Stream, read: int) -> list[bytes] | None:
        """What is there; None if the topic went while it was read."""
        try:
            return self.broker.payloads(stream.name, stream.partition, read)
        except UnknownTopic:
            assert any(incarnation == stream.incarnation for _, incarnation, _ in self.deleting)
            return None

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), read=st.sampled_from([READ_FORCED, READ_WRITTEN]))
    def consume(self, data: Any, read: int) -> None:
        stream = data.draw(st.sampled_from(self.streams))
        if self.is_there(stream):
            safe = self.safe_counts(stream.place)
            found = self.read(stream, read)
            if found is None:
                return
            self.check_partition(stream.place, found, safe)
            if read == READ_FORCED:
                self.seen[stream.place] = max(self.seen.get(stream.place, []), found, key=len)

    @rule(name=st.sampled_from(NAMES), wait_ms=st.integers(1, 20_000))
    def park(self, name: str, wait_ms: int) -> None:
        self.refresh()
        if name in self.topics:
            end = self.broker.log(name, 0).end_offset
            self.kept(self.broker.fetch(end, topic=name, wait_ms=wait_ms))

    # Groups

    @rule(group=st.sampled_from(["a", "b"]), again=st.booleans())
    def join(self, group: str, again: bool) -> None:
        before = self.members.get(group)
        if not again:
            self.broker.session.close()
            self.broker.session = Session()
        answer = self.kept(self.broker.join(group, session=self.broker.session))
        self.broker.work()
        if answer.code == "ok":
            assert before is None or answer.generation > before.generation, "a generation was given twice"
            self.members[group] = answer

    @precondition(lambda self: self.members)
    @rule(data=st.data(), offset=st.integers(0, 1000))
    def commit(self, data: Any, offset: int) -> None:
        group = data.draw(st.sampled_from(sorted(self.members)))
        self.refresh()
        if "orders" not in self.topics:
            return
        self.count += 1
        member = self.members[group]
        offsets = [GroupOffset("orders", self.topics["orders"][0], 0, self.count)]
        request = CommitOffsets(group, member.member, member.generation, offsets)
        self.commits.setdefault(group, []).append((self.count, self.kept(self.broker.ask(request))))

    # The world

    @rule(index=st.integers(0, 5))
    def work(self, index: int) -> None:
        if self.broker.jobs:
            self.broker.step(index % len(self.broker.jobs))

    @rule()
    def work_all(self) -> None:
        self.broker.work()

    @rule(seconds=st.sampled_from([0.1, 3.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.broker.advance(seconds)

    @rule(kind=st.sampled_from(["force", "write", "create", "rename"]), nth=st.integers(1, 5))
    def fault(self, kind: str, nth: int) -> None:
        self.broker.disk.faults.fail(kind, nth=nth, path="-")

    @rule()
    def full(self) -> None:
        self.broker.disk.space_bytes = self.broker.disk.used_bytes() + 5000

    @rule()
    def space(self) -> None:
        self.broker.disk.space_bytes = None

    @rule(name=st.sampled_from(NAMES), partition=st.integers(0, 2))
    def resume(self, name: str, partition: int) -> None:
        self.broker.disk.faults.clear()
        self.broker.disk.space_bytes = None
        self.kept(self.broker.ask(ResumePartition(name, partition)))
        self.broker.work()

    @rule()
    def restart(self) -> None:
        self.settle_faults()
        self.broker.work()
        self.note()
        self.broker = self.broker.restart()
        self.check_all()

    @rule(keep=st.sampled_from(["some", "some", "nothing", "everything"]))
    def crash(self, keep: str) -> None:
        self.note()
        self.broker = self.broker.crashed(self.broker.disk.crash(self.generator, keep=keep))
        self.settle_faults()
        self.broker.session = Session()
        self.check_all()

    def settle_faults(self) -> None:
        self.broker.disk.faults.clear()
        self.broker.disk.space_bytes = None

    # What must hold

    def note(self) -> None:
        """The answers that came count from now on; those that did not will not."""
        for stream in self.streams:
            stream.unsure()
            for batch in stream.batches:
                batch.answer = None
        for _, incarnation, answer in self.deleting:
            if answer.code == "ok":
                self.deleted.add(incarnation)
        self.answers = []

    def check_all(self) -> None:
        self.refresh()
        doubtful = {incarnation for _, incarnation, _ in self.deleting}
        alive = {incarnation for incarnation, _ in self.topics.values()}
        for stream in list(self.streams):
            if stream.incarnation not in alive:
                assert stream.incarnation in doubtful, "a topic is gone that nobody deleted"
                self.streams.remove(stream)
                continue
            safe = self.safe_counts(stream.place)
            found = self.read(stream, READ_FORCED)
            assert found is not None
            self.check_partition(stream.place, found, safe)
            seen = self.seen.get(stream.place, [])
            assert found[: len(seen)] == seen, "a reader saw what is not there any more"
        self.check_offsets()

    def safe_counts(self, place: tuple[int, int]) -> dict[Stream, int]:
        """How many records of each stream were answered as synced up to now."""
        counts = {}
        for stream in self.streams:
            if stream.place == place:
                unsure = sum(len(batch.payloads) for batch in stream.unsure())
                counts[stream] = sum(len(batch.payloads) for batch in stream.batches) - unsure
        return counts

    def check_partition(self, place: tuple[int, int], found: list[bytes], safe: dict[Stream, int]) -> None:
        assert len(found) == len(set(found)), "something is there twice"
        for stream in self.streams:
            if stream.place == place:
                sent = [payload for batch in stream.batches for payload in batch.payloads]
                ours = set(sent)
                there = [payload for payload in found if payload in ours]
                assert there == sent[: len(there)], "a stream is out of order, or has a hole"
                assert len(there) >= safe[stream], "something that was answered as synced is lost"

    def check_offsets(self) -> None:
        for group, commits in self.commits.items():
            done = [offset for offset, answer in commits if answer.code == "ok" and answer.committed]
            floor = max([*done, self.floor.get(group, 0)])
            saved = self.broker.saved(group).get(("orders", 0))
            if saved is not None:
                doubtful = {offset for offset, _ in commits if offset > floor}
                assert saved == floor or saved in doubtful, "an offset went back"
                self.floor[group] = saved
            self.commits[group] = []

    @invariant()
    def every_answer_is_one_that_may_be(self) -> None:
        for answer in self.answers:
            assert answer.calls <= 1
            assert answer.code in EXPECTED_CODES | {
                "topic_exists", "not_allowed", "fenced", "abandoned", "stale_producer", "storage_stopped",
            }, answer.failure  # fmt: skip

    def teardown(self) -> None:
        if not hasattr(self, "broker"):
            return
        self.settle_faults()
        self.broker.work()
        self.broker.advance(120)
        self.broker.work()
        assert all(answer.done for answer in self.answers), "a request has no answer"
        self.note()
        self.broker = self.broker.crashed(self.broker.disk.crash(self.generator, keep="nothing"))
        self.check_all()


TestSimulation = Simulation.TestCase
TestSimulation.settings = settings(max_examples=scaled(60), stateful_step_count=60)
