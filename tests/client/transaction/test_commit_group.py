"""Parts of a commit group on a simulated broker: nothing is visible before the commit, and nothing twice after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tfmq.client.send.record_encoder import EncodedRecords, encode_shared
from tfmq.client.transaction.commit_group import MemberBatch
from tfmq.errors import Busy, GroupFenced, GroupIncomplete, GroupStale, TfmqError, TimedOut, TransactionRolledBack
from tfmq.protocol.commands import CommitGroup, CommitMember, PrepareTransaction
from tfmq.spark.sink_task import CommitGroupClient, TaskPart
from tfmq.testing.broker import SimulatedBroker

GROUP = "query"


class Writer:
    """What Spark does with a sink: tasks send and prepare, then the driver commits or aborts."""

    def __init__(self, broker: SimulatedBroker, seconds: float = 60.0) -> None:
        self.broker = broker
        self.clients: list[CommitGroupClient] = []
        self.seconds = seconds

    def client(self) -> CommitGroupClient:
        made = CommitGroupClient(self.broker.servers, self.seconds)
        self.clients.append(made)
        return made

    def part(self, sequence: int, run: str = "run-1", ttl_ms: int | None = None) -> tuple[CommitGroupClient, TaskPart]:
        client = self.client()
        return client, client.open_part(CommitMember(GROUP, sequence, run), ttl_ms)

    def prepared(self, sequence: int, payloads: list[bytes], run: str = "run-1", **times: Any) -> list[Any]:
        """The members of a task with these rows."""
        client, part = self.part(sequence, run, **times)
        with client, part:
            for payload in payloads:
                if not part.send(batch(client, [payload])):
                    return []
            return list(part.prepare())

    def commit(self, sequence: int, members: list[Any], rows: int, run: str = "run-1", **options: Any) -> Any:
        with self.client() as client:
            return client.commit(CommitGroup(GROUP, sequence, run, members, rows, **options))

    def abort(self, sequence: int, run: str = "run-1") -> str:
        with self.client() as client:
            return client.abort(GROUP, sequence, run)

    def micro_batch(self, sequence: int, tasks: list[list[bytes]]) -> None:
        """As a query does, however often it has to begin anew."""
        for attempt in range(20):
            run = f"run-{sequence}-{attempt}"
            try:
                members = [name for rows in tasks for name in self.prepared(sequence, rows, run)]
                self.commit(sequence, members, sum(map(len, tasks)), run)
                return
            except TfmqError:
                try:
                    self.abort(sequence, run)
                except TfmqError:
                    continue
        raise AssertionError("it never comes to an end")


def batch(client: CommitGroupClient, payloads: list[bytes], topic: str = "orders") -> MemberBatch:
    found = client.topic(topic)

    def made(producer_id: int, sequence: int) -> EncodedRecords:
        return encode_shared(payloads, b"", producer_id, sequence)

    size = sum(map(len, payloads)) + 20 * len(payloads)
    return MemberBatch(topic, found.incarnation, 0, len(payloads), size, made)


@pytest.fixture
def writer(tfmq_broker: SimulatedBroker) -> Iterator[Writer]:
    made = Writer(tfmq_broker)
    yield made
    for client in made.clients:
        client.close()


def visible(broker: SimulatedBroker, topic: str = "orders") -> list[bytes]:
    return [message.payload or b"" for message in broker.sent(topic)]


def test_nothing_is_visible_before_the_commit_and_all_after_it(writer: Writer) -> None:
    members = writer.prepared(0, [b"a", b"b"]) + writer.prepared(0, [b"c"])
    assert visible(writer.broker) == []
    reply = writer.commit(0, members, 3)
    assert (reply.state, reply.repeated, reply.rows) == ("committed", False, 3)
    assert visible(writer.broker) == [b"a", b"b", b"c"]


@pytest.mark.tfmq_faults(faults=("crash", "lost_reply"), runs=400)
def test_batches_come_once_whatever_is_lost_at_whatever_step(tfmq_broker: SimulatedBroker) -> None:
    writer = Writer(tfmq_broker)
    for sequence in range(2):
        writer.micro_batch(sequence, [[b"%d-a" % sequence, b"%d-b" % sequence], [b"%d-c" % sequence]])
    assert sorted(visible(tfmq_broker)) == sorted(
        b"%d-%s" % (sequence, letter) for sequence in range(2) for letter in (b"a", b"b", b"c")
    )
    assert [each.sequence for each in tfmq_broker.admin().commit_groups()] == [1]


@pytest.mark.parametrize("what", ["begin", "send", "prepare", "commit_group"])
def test_what_a_busy_broker_does_not_take_is_asked_again(writer: Writer, what: str) -> None:
    writer.broker.fail_next(what, Busy, times=3)
    members = writer.prepared(0, [b"a", b"b"])
    writer.commit(0, members, 2)
    assert visible(writer.broker) == [b"a", b"b"]


class Silent:
    """A reply that is lost, although the connection stays."""

    def ok(self, *fields: Any, body: Any = b"") -> None: ...

    def error(self, error: BaseException) -> None: ...


@pytest.mark.parametrize("kind", [PrepareTransaction, CommitGroup])
@pytest.mark.parametrize("done", [False, True])
def test_a_step_that_takes_long_is_waited_for_as_long_as_the_broker_answers(
    writer: Writer, kind: type, done: bool
) -> None:
    left = 5

    def watch(engine: Any, request: Any, reply: Any, session: Any) -> Any:
        nonlocal left
        if not isinstance(request, kind) or not left:
            return reply
        left -= 1
        return Silent() if done else None

    writer.broker._faults.observer = watch
    writer.commit(0, writer.prepared(0, [b"a"]), 1)
    assert left == 0 and visible(writer.broker) == [b"a"]


def test_a_broker_that_answers_nothing_is_given_up(writer: Writer) -> None:
    members = writer.prepared(0, [b"a"])
    writer.broker._faults.observer = lambda *served: None
    with pytest.raises(TimedOut):
        writer.commit(0, members, 1)
    writer.broker._faults.observer = None
    assert writer.commit(0, members, 1).rows == 1


def test_what_is_committed_is_superfluous_when_it_is_begun_again(writer: Writer) -> None:
    writer.commit(0, writer.prepared(0, [b"a"]), 1)
    client, part = writer.part(0, "run-2")
    assert part.send(batch(client, [b"a"])) is False and part.already_committed
    assert part.prepare() == []
    assert writer.commit(0, [], 1, "run-2").repeated
    assert visible(writer.broker) == [b"a"]


def test_another_total_and_an_older_sequence_are_refused(writer: Writer) -> None:
    writer.commit(5, writer.prepared(5, [b"a"]), 1)
    with pytest.raises(GroupStale, match="with 1 rows, and this is another total, 2"):
        writer.commit(5, [], 2, "run-2")
    assert writer.commit(5, [], 2, "run-2", other_total=True).rows == 1
    client, part = writer.part(4, "run-2")
    with pytest.raises(GroupStale, match="sequence 5 already, and 4 is older"):
        part.send(batch(client, [b"b"]))


def test_a_part_of_an_aborted_run_is_refused_wherever_it_is(writer: Writer) -> None:
    client, part = writer.part(0)
    part.send(batch(client, [b"a"]))
    members = writer.prepared(0, [b"b"])
    assert writer.abort(0) == "aborted"
    with pytest.raises((GroupFenced, TransactionRolledBack)):
        part.prepare()
    with pytest.raises(GroupFenced):
        writer.prepared(0, [b"c"])
    with pytest.raises(GroupFenced):
        writer.commit(0, members, 1)
    writer.commit(0, writer.prepared(0, [b"d"], "run-2"), 1, "run-2")
    assert visible(writer.broker) == [b"d"]


def test_an_abort_after_the_commit_changes_nothing(writer: Writer) -> None:
    writer.commit(0, writer.prepared(0, [b"a"]), 1)
    assert writer.abort(0) == "committed"
    assert visible(writer.broker) == [b"a"]
    writer.commit(1, writer.prepared(1, [b"b"]), 1)


def test_what_other_attempts_prepared_goes_with_the_commit(writer: Writer) -> None:
    writer.prepared(0, [b"orphan"])
    open_client, open_part = writer.part(0)
    open_part.send(batch(open_client, [b"open"]))
    writer.commit(0, writer.prepared(0, [b"a"]), 1)
    assert visible(writer.broker) == [b"a"]
    admin = writer.broker.admin()
    assert admin.transactions(["open", "prepared"]) == []
    admin.close()


def test_a_member_that_expired_makes_the_group_incomplete(writer: Writer) -> None:
    early = writer.prepared(0, [b"a"], ttl_ms=5000)
    late = writer.prepared(0, [b"b"], ttl_ms=50_000)
    writer.broker.clock.advance(10)
    with pytest.raises(GroupIncomplete):
        writer.commit(0, early + late, 2)
    assert visible(writer.broker) == []


def test_a_writer_that_is_gone_leaves_nothing_open(writer: Writer) -> None:
    client, part = writer.part(0)
    part.send(batch(client, [b"a"]))
    admin = writer.broker.admin()
    assert len(admin.transactions(["open"])) == 1
    client.close()
    assert admin.transactions(["open"]) == []
    admin.close()


def test_a_part_that_fails_drops_what_it_prepared(writer: Writer) -> None:
    client, part = writer.part(0)
    with pytest.raises(ZeroDivisionError), part:
        part.send(batch(client, [b"a"]))
        part.prepare()
        part.send(batch(client, [b"b"]))
        1 / 0  # noqa: B018
    admin = writer.broker.admin()
    assert admin.transactions(["open", "prepared"]) == []
    admin.close()


# Members as large and as old as the broker takes them


@pytest.fixture
def small_writer() -> Iterator[Writer]:
    with SimulatedBroker({"limits.transaction_bytes": 10_000, "limits.transaction_pieces": 1000}) as broker:
        yield Writer(broker)


def test_more_than_the_broker_takes_in_one_transaction_goes_in_several(small_writer: Writer) -> None:
    payloads = [b"%05d" % number * 100 for number in range(50)]
    members = small_writer.prepared(0, payloads)
    with small_writer.broker.admin() as admin:
        sizes = [each.size_bytes for each in admin.transactions()]
    assert len(sizes) == len(members) == 3 and max(sizes) <= 10_000
    assert visible(small_writer.broker) == []
    small_writer.commit(0, members, 50)
    assert visible(small_writer.broker) == payloads


def test_a_part_that_is_too_slow_fails_and_its_next_attempt_learns_that_all_is_done(small_writer: Writer) -> None:
    client, part = small_writer.part(0, "run-slow")
    for _ in range(20):
        assert part.send(batch(client, [b"x" * 480]))
    small_writer.commit(0, small_writer.prepared(0, [b"fast"], "run-fast"), 1, "run-fast")
    with pytest.raises(TransactionRolledBack), part:
        part.prepare()
    client, part = small_writer.part(0, "run-slow")
    assert part.send(batch(client, [b"y"])) is False
    assert small_writer.commit(0, part.prepare(), 1, "run-slow").repeated
    assert visible(small_writer.broker) == [b"fast"]


def test_more_batches_than_the_broker_takes_in_one_transaction_go_in_several() -> None:
    with SimulatedBroker({"limits.transaction_pieces": 4}) as broker:
        writer = Writer(broker)
        payloads = [b"%d" % number for number in range(10)]
        members = writer.prepared(0, payloads)
        assert len(members) == 3
        writer.commit(0, members, 10)
        assert visible(broker) == payloads


def test_a_member_that_grows_old_while_it_is_prepared_is_prepared_once(writer: Writer) -> None:
    client, part = writer.part(0)
    part.send(batch(client, [b"a"]))
    writer.broker.clock.advance(449.5)  # half of the time that the broker gives it is 450 s
    writer.broker.fail_next("prepare", Busy, times=8)
    members = part.prepare()
    writer.broker.clock.advance(2)
    assert len(members) == 1 and part.prepare() == members
    writer.commit(0, members, 1)
    assert visible(writer.broker) == [b"a"]


def test_a_member_is_prepared_before_its_time_is_over_while_it_gets_no_rows(writer: Writer) -> None:
    client, part = writer.part(0)
    sent = [b"a", b"b", b"c"]
    for payload in sent:
        part.send(batch(client, [payload]))
        writer.broker.clock.advance(1000)
    members = part.prepare()
    assert len(members) == 3
    writer.commit(0, members, 3)
    assert visible(writer.broker) == sent
