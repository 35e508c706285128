"""Transactions through the engine: what is answered when, and what is visible then."""

from typing import Any

import pytest

from tests.broker.helpers import Answer, Broker, Session, batch, payloads_of
from tests.scale import scaled
from tfmq.broker.transaction_commands import COPY_BYTES, own_body
from tfmq.errors import Busy
from tfmq.protocol import commands

TWO = [("orders", 0, [b"a", b"b"]), ("orders", 1, [b"c"])]


@pytest.fixture
def broker() -> Broker:
    made = Broker()
    made.create(partitions=2)
    return made


def queued(**values: Any) -> Broker:
    """Workers wait until the test runs them; partitions and journal have been opened for writes."""
    made = Broker(queued=True, **values)
    made.create(partitions=2)
    made.transact(made.stream(), TWO)
    made.work()
    return made


def found(broker: Broker) -> tuple[list[bytes], list[bytes]]:
    return broker.payloads(partition=0), broker.payloads(partition=1)


# A whole transaction in one frame


def test_a_whole_transaction_is_answered_when_it_is_decided_and_written(broker: Broker) -> None:
    answer = broker.transact(broker.stream(), TWO)
    assert (answer.state, answer.dropped, answer.repeated) == ("committed", 0, False)
    assert answer.epoch > 0 and set(answer.offsets) <= {-1}, "nothing is forced yet in the partitions"
    assert found(broker) == ([b"a", b"b"], [b"c"])


def test_nothing_is_visible_and_nothing_answered_before_the_decision_is_fsynced() -> None:
    broker = queued()
    before, end, stream = found(broker), broker.log().end_offset, broker.stream()
    answer = broker.transact(stream, [("orders", 0, [b"new"])])
    assert answer.code == "waiting" and broker.log().end_offset == end
    left = broker.crashed(broker.disk.crash(keep="nothing"))
    assert found(left) == before
    broker.work()
    assert answer.state == "committed" and found(broker) == ([*before[0], b"new"], before[1])


def test_item_34_an_answered_commit_survives_a_power_cut_that_takes_every_partition_write() -> None:
    broker = queued()
    answers = [broker.transact(broker.stream(), [("orders", 0, [b"%d" % n])], turn=False) for n in range(10)]
    broker.engine.broker.end_turn()
    broker.work()
    assert [answer.state for answer in answers] == ["committed"] * 10
    left = broker.crashed(broker.disk.crash(keep="nothing"))
    assert left.payloads()[-10:] == [b"%d" % n for n in range(10)]


def test_transactions_of_one_turn_share_an_fsync_of_the_journal_and_a_write_of_the_partition() -> None:
    broker = queued()
    log, forcer = broker.log(), broker.engine.broker.forcer
    streams = [broker.stream() for _ in range(16)]
    writes, forces, end = [0], forcer.forces, log.end_offset

    def count(kind: str, path: str) -> None:
        writes[0] += kind == "write" and "/orders-0/" in path

    answers = [broker.transact(stream, [("orders", 0, [b"x"])], turn=False) for stream in streams]
    broker.disk.after = count
    broker.engine.broker.end_turn()
    while not all(answer.done for answer in answers):
        broker.step()
    broker.disk.after = None
    assert writes == [1] and forcer.forces - forces == 1
    assert log.end_offset - end == 16 * 21 + 100


def test_the_same_frame_again_gets_the_same_answer_and_changes_nothing(broker: Broker) -> None:
    stream = broker.stream()
    request, body = broker.transaction(stream, TWO)
    first = broker.ask(request, body)
    again = broker.ask(request, body, Session("another"))
    assert (again.state, again.epoch, again.repeated) == ("committed", first.epoch, True)
    assert found(broker) == ([b"a", b"b"], [b"c"])
    after = broker.restart()
    assert (after.ask(request, body).epoch, found(after)) == (first.epoch, ([b"a", b"b"], [b"c"]))


def test_a_repeat_is_answered_although_its_topic_is_gone(broker: Broker) -> None:
    request, body = broker.transaction(broker.stream(), TWO)
    first = broker.ask(request, body)
    broker.delete()
    again = broker.ask(request, body)
    assert (again.state, again.epoch, again.repeated) == ("committed", first.epoch, True)


def test_two_of_the_same_frame_in_one_turn_are_one_transaction(broker: Broker) -> None:
    request, body = broker.transaction(broker.stream(), TWO)
    answers = [broker.ask(request, body, turn=False) for _ in range(2)]
    broker.engine.broker.end_turn()
    assert [answer.state for answer in answers] == ["committed"] * 2
    assert answers[0].epoch == answers[1].epoch and found(broker)[1] == [b"c"]


def test_what_is_wrong_with_one_batch_refuses_the_whole(broker: Broker) -> None:
    stream = broker.stream()
    request, body = broker.transaction(stream, TWO)
    worse = [
        (request._replace(batches=[row._replace(size=row.size - 1) for row in request.batches]), body),
        (request, body[:-1]),
        (request, body + b"x"),
        (request, bytes(len(body))),
        (request, b"x" * len(body)),
    ]
    assert [broker.ask(each, data).code for each, data in worse] == ["bad_request"] * 5
    unknown = request._replace(batches=[row._replace(incarnation=99) for row in request.batches])
    assert broker.ask(unknown, body).code == "unknown_topic"
    beyond = request._replace(batches=[row._replace(partition=7) for row in request.batches])
    assert broker.ask(beyond, body).code == "unknown_partition"


def test_a_batch_larger_than_a_segment_is_committed_with_the_others() -> None:
    broker = Broker(log__segment_bytes=1 << 16)
    broker.create()
    payloads = [b"%d" % n * 30_000 for n in range(9)]
    batches = [("orders", 0, payloads[:3]), *(("orders", 0, [payload]) for payload in payloads[3:])]
    assert broker.transact(broker.stream(), batches).state == "committed"
    assert broker.payloads() == payloads


# Step by step


def test_item_16_nothing_is_visible_before_the_commit(broker: Broker) -> None:
    stream = broker.stream()
    began = broker.begin(stream)
    sent = broker.send(stream, began, [b"a", b"b"])
    assert (sent.positions, sent.first_ordinal, sent.durability) == ([], -1, commands.ACKS_WRITTEN)
    broker.send(stream, began, [b"c"], partition=1)
    assert found(broker) == ([], []) and broker.state(began) == "open"
    ended = broker.decide(began, one_phase=True)
    assert ended.state == "committed" and found(broker) == ([b"a", b"b"], [b"c"])


def test_a_two_phase_commit(broker: Broker) -> None:
    stream = broker.stream()
    began = broker.begin(stream, "order-42", timeout_ms=5000)
    assert (began.xid, began.state, began.timeout_ms) == ("order-42", "open", 5000)
    broker.send(stream, began, [b"a"])
    prepared = broker.prepare(began)
    assert (prepared.state, prepared.expires_ms) == ("prepared", 0)
    assert broker.prepare(began).state == "prepared"
    assert found(broker) == ([], [])
    ended = broker.decide(began)
    assert ended.state == "committed" and found(broker)[0] == [b"a"]
    assert broker.decide(began).state == "committed" and found(broker)[0] == [b"a"]
    late = broker.rollback(began)
    assert late.code == "transaction_committed"


def test_item_17_a_rollback_leaves_nothing_also_after_a_restart(broker: Broker) -> None:
    stream = broker.stream()
    for prepared in (False, True):
        began = broker.begin(stream, f"order-{prepared}")
        broker.send(stream, began, [b"a"])
        if prepared:
            broker.prepare(began)
        assert broker.rollback(began).state == "rolled_back"
        assert broker.decide(began, one_phase=not prepared).code == "transaction_rolled_back"
    assert found(broker) == ([], [])
    again = broker.restart()
    assert found(again) == ([], []) and again.listed() == []


def test_item_28_an_empty_prepare_is_read_only_and_an_unprepared_commit_a_one_phase_one(broker: Broker) -> None:
    stream = broker.stream()
    empty = broker.begin(stream, "empty")
    assert broker.prepare(empty).state == "read_only"
    unprepared = broker.begin(stream, "unprepared")
    broker.send(stream, unprepared)
    assert broker.decide(unprepared).code == "transaction_state"
    assert broker.decide(unprepared, one_phase=True).state == "committed"


def test_a_send_after_the_prepare_is_refused(broker: Broker) -> None:
    stream = broker.stream()
    began = broker.begin(stream, "order")
    broker.send(stream, began)
    broker.prepare(began)
    assert broker.send(stream, began).code == "transaction_state"


def test_a_repeated_send_is_in_the_transaction_once(broker: Broker) -> None:
    stream = broker.stream()
    began = broker.begin(stream)
    broker.send(stream, began, [b"a"], sequence=0)
    assert broker.send(stream, began, [b"a"], sequence=0).code == "ok"
    assert broker.send(stream, began, [b"z"], sequence=5).code == "sequence_gap"
    broker.decide(began, one_phase=True)
    assert found(broker)[0] == [b"a"]


def test_plain_and_transactional_sends_of_one_producer_beside_each_other(broker: Broker) -> None:
    producer, stream = broker.lease(), broker.stream()
    began = broker.begin(stream)
    for n in range(3):
        broker.produce(producer, n, [b"plain %d" % n])
        broker.send(stream, began, [b"inside %d" % n])
    broker.decide(began, one_phase=True)
    broker.produce(producer, 3, [b"plain 3"])
    wanted = [b"plain 0", b"plain 1", b"plain 2", b"inside 0", b"inside 1", b"inside 2", b"plain 3"]
    assert broker.payloads() == wanted
    again = broker.restart()
    assert again.produce(producer, 3, [b"plain 3"]).repeated
    assert again.produce(producer, 4, [b"plain 4"]).code == "ok"
    assert again.payloads() == [*wanted, b"plain 4"]


def test_transactions_on_a_turn_with_plain_sends_keep_everybody_s_order(broker: Broker) -> None:
    producers, streams = [broker.lease() for _ in range(4)], [broker.stream() for _ in range(4)]
    answers = []
    for n in range(5):
        for producer, stream in zip(producers, streams, strict=True):
            answers.append(broker.produce(producer, n, [b"p%d.%d" % (producer, n)], turn=False))
            answers.append(broker.transact(stream, [("orders", 0, [b"t%d.%d" % (stream.id, n)])], turn=False))
        broker.engine.broker.end_turn()
    assert {answer.code for answer in answers} == {"ok"}
    there = broker.payloads()
    for name in [b"p%d." % each for each in producers] + [b"t%d." % each.id for each in streams]:
        assert [each for each in there if each.startswith(name)] == [name + b"%d" % n for n in range(5)]


# Sessions, time, quotas


def test_a_local_transaction_ends_with_its_session_and_a_named_one_does_not(broker: Broker) -> None:
    session, stream, other = Session(), broker.stream(), broker.stream()
    local = broker.begin(stream, session=session)
    named = broker.begin(other, "order-42", session=session)
    broker.send(stream, local)
    broker.send(other, named)
    session.close()
    broker.engine.broker.end_turn()
    assert broker.decide(local, one_phase=True).code in ("transaction_rolled_back", "unknown_transaction")
    assert broker.decide(named, one_phase=True).state == "committed"


@pytest.mark.long
def test_item_26_an_unprepared_transaction_ends_by_its_timeout_and_a_prepared_one_does_not(broker: Broker) -> None:
    slow, stream = broker.stream(), broker.stream()
    open_one = broker.begin(slow, "slow", timeout_ms=2000)
    prepared = broker.begin(stream, "prepared", timeout_ms=2000)
    for each, began in ((slow, open_one), (stream, prepared)):
        broker.send(each, began)
    broker.prepare(prepared)
    broker.advance(1)
    assert broker.state(open_one) == "open"
    broker.advance(1.5)
    assert broker.send(slow, open_one).code in ("transaction_rolled_back", "unknown_transaction")
    assert broker.decide(open_one, one_phase=True).code in ("transaction_rolled_back", "unknown_transaction")
    broker.advance(100_000)
    assert broker.decide(prepared).state == "committed"


def test_what_waits_for_the_journal_counts_against_the_quota_and_is_given_back() -> None:
    broker = queued(limits__pending_bytes=4000)
    stream = broker.stream()
    answers = [broker.transact(stream, [("orders", 0, [bytes(1000)])], turn=False) for _ in range(5)]
    broker.engine.broker.end_turn()
    assert [answer.code for answer in answers].count("busy") >= 2
    broker.work()
    assert (
        broker.engine.broker.backpressure.pending_bytes == 0 and broker.engine.broker.backpressure.pending_requests == 0
    )
    assert {answer.code for answer in answers[:2]} == {"ok"}


def test_a_small_body_is_copied_and_a_large_one_held_until_the_answer() -> None:
    for size, released in ((COPY_BYTES, True), (COPY_BYTES + 1, False)):
        reply = Answer(1, commands.TransactReply)
        data = own_body(memoryview(bytes(size)), reply)
        assert len(data) == size and reply.released is released
        assert isinstance(data, bytes) is released


def test_the_memory_of_a_body_may_be_used_again_after_the_answer(broker: Broker) -> None:
    stream = broker.stream()
    for size in (100, COPY_BYTES // 20, COPY_BYTES // 2):
        rows, payloads = [], [b"%d" % n + bytes(size) for n in range(3)]
        first = stream.take(3)
        data = bytearray(batch(stream.id, first, payloads))
        rows.append(commands.TransactionBatch("orders", broker.incarnation(), 0, first, 3, len(data), []))
        began = broker.begin(stream, f"keeps {size}")
        request = commands.Produce(
            "orders", broker.incarnation(), 0, stream.id, first, 3, commands.ACKS_WRITTEN, [], None, began.epoch
        )
        answer = Answer(1, commands.ProduceReply)
        broker.engine.handle(request, memoryview(data), answer, broker.session)
        broker.engine.broker.end_turn()
        assert answer.code == "ok"
        data[:] = b"?" * len(data)
        broker.decide(began, one_phase=True)
        assert broker.payloads()[-3:] == payloads


# Offsets inside


def test_offsets_inside_are_saved_with_the_messages(broker: Broker) -> None:
    member = broker.join()
    broker.commit(member, 10)
    answer = broker.transact(broker.stream(), TWO, [broker.group_offsets(member, 100)])
    assert answer.state == "committed" and broker.saved() == {("orders", 0): 100}
    for keep in ("nothing", "everything"):
        left = broker.crashed(broker.disk.crash(keep=keep))
        assert left.saved() == {("orders", 0): 100} and found(left) == ([b"a", b"b"], [b"c"])


def test_offsets_alone_are_a_transaction(broker: Broker) -> None:
    member = broker.join()
    assert broker.transact(broker.stream(), [], [broker.group_offsets(member, 7)]).state == "committed"
    assert broker.saved() == {("orders", 0): 7}


def test_a_read_of_offsets_in_doubt_is_busy_also_after_a_restart(broker: Broker) -> None:
    member, stream = broker.join(), broker.stream()
    broker.commit(member, 10)
    began = broker.begin(stream, "order-42")
    broker.send(stream, began)
    assert broker.prepare(began, [broker.group_offsets(member, 100)]).state == "prepared"
    for each in (broker, broker.crashed(broker.disk.crash(keep="nothing"))):
        read = each.ask(commands.ReadOffsets("billing", None))
        assert read.code == "busy" and "order-42" in str(read.failure)
        assert each.commit(member, 500).code == "busy"
        assert each.decide(began).state == "committed"
        assert each.saved() == {("orders", 0): 100}


def test_a_rollback_frees_the_offsets_as_they_were(broker: Broker) -> None:
    member, stream = broker.join(), broker.stream()
    broker.commit(member, 10)
    began = broker.begin(stream, "order-42")
    broker.prepare(began, [broker.group_offsets(member, 100)])
    assert broker.ask(commands.ReadOffsets("billing", None)).code == "busy"
    broker.rollback(began)
    assert broker.saved() == {("orders", 0): 10}


def test_an_older_generation_is_fenced_at_prepare_and_at_a_one_phase_commit(broker: Broker) -> None:
    session = Session()
    member, stream = broker.join(session=session), broker.stream()
    old = [broker.group_offsets(member, 100)]
    began = broker.begin(stream, "order-42")
    broker.send(stream, began)
    session.close()
    broker.advance(4)
    assert broker.join().generation > member.generation
    assert broker.prepare(began, old).code == "fenced"
    assert broker.state(began) == "open"
    assert broker.decide(began, old, one_phase=True).code == "fenced"
    assert broker.transact(broker.stream(), TWO, old).code == "fenced"
    assert found(broker) == ([], []) and broker.saved() == {}
    assert broker.decide(began, one_phase=True).state == "committed"


def test_a_prepare_that_failed_frees_its_offsets(broker: Broker) -> None:
    member, stream = broker.join(), broker.stream()
    began = broker.begin(stream, "order-42")
    broker.send(stream, began)
    broker.disk.space_bytes = broker.disk.used_bytes()
    refused = broker.prepare(began, [broker.group_offsets(member, 100)])
    assert refused.code == "disk_full" and broker.state(began) == "open"
    broker.disk.space_bytes = None
    assert broker.saved() == {}
    assert broker.prepare(began, [broker.group_offsets(member, 100)]).state == "prepared"


# Looking, asking, groups


def test_what_is_in_doubt_is_listed_described_and_counted(broker: Broker) -> None:
    stream = broker.stream()
    for name in ("first", "second", "third"):
        began = broker.begin(stream, name, group="billing")
        broker.send(stream, began, [b"a", b"b"])
        broker.prepare(began)
    broker.advance(30)
    rows = broker.listed()
    assert [row["xid"] for row in rows] == ["first", "second", "third"]
    assert rows[0]["state"] == "prepared" and rows[0]["messages"] == 2 and rows[0]["age_seconds"] >= 30
    page = broker.ask(commands.ListTransactions(None, rows[0]["epoch"], 1))
    assert [row["xid"] for row in page.transactions] == ["second"] and page.more
    described = broker.ask(commands.DescribeTransaction("second", 0)).description
    assert described["state"] == "prepared" and "orders" in described["topics"]
    assert broker.ask(commands.DescribeTransaction("nobody", 0)).description["state"] == "unknown"
    assert broker.ask(commands.DescribeTransaction("", 0, 1 << 40)).description["state"] == "unknown"
    assert "needs an xid" in str(broker.ask(commands.DescribeTransaction("")).failure)
    status = broker.engine.broker.status()["transactions"]
    assert (status["prepared"], status["journal"]) == (3, "open")
    assert broker.engine.broker.transaction_commands.coordinator.status() == status


def test_an_operator_decides_and_the_late_caller_is_notified(broker: Broker) -> None:
    stream = broker.stream()
    began = broker.begin(stream, "order-42")
    broker.send(stream, began, [b"a"])
    broker.prepare(began)
    assert broker.decide(began, heuristic=True).state == "committed"
    assert found(broker)[0] == [b"a"]
    left = broker.crashed(broker.disk.crash(keep="nothing"))
    late = left.decide(began)
    assert late.code in ("heuristic_outcome", "ok")
    assert left.rollback(began).code == "heuristic_outcome"
    assert [row["state"] for row in left.listed()] == ["heuristic_committed"]
    left.advance(20)
    assert left.ask(commands.ForgetTransaction("order-42", began.epoch)).forgotten
    assert left.listed() == [] and found(left)[0] == [b"a"]


def test_a_waiting_check_is_answered_cancelled_or_ends_with_its_session(broker: Broker) -> None:
    asks = [commands.AwaitChecks("billing", 600_000 if n else 5_000) for n in range(4)]
    sessions = [Session() for _ in asks]
    answers = [broker.ask(request, session=session) for request, session in zip(asks, sessions, strict=True)]
    assert [answer.code for answer in answers] == ["waiting"] * 4
    broker.advance(6)
    assert answers[0].checks == []
    sessions[1].close()
    broker.engine.broker.end_turn()
    assert broker.ask(commands.Cancel(answers[2].correlation), session=sessions[2]).cancelled
    assert not broker.ask(commands.Cancel(answers[2].correlation), session=sessions[2]).cancelled
    assert not broker.ask(commands.Cancel(answers[3].correlation), session=sessions[2]).cancelled
    assert answers[2].checks == []
    stream = broker.stream()
    began = broker.begin(stream, "order-42", group="billing")
    broker.send(stream, began)
    broker.prepare(began)
    broker.advance(120)
    (check,) = answers[3].checks
    assert (check["xid"], check["epoch"], list(check["topics"])) == ("order-42", began.epoch, ["orders"])
    broker.engine.broker.end_turn()
    assert broker.engine.broker.backpressure.pending_requests == 0


def test_a_commit_group_is_all_or_none_and_repeatable(broker: Broker) -> None:
    names = []
    for n in range(3):
        stream = broker.stream()
        member = commands.CommitMember("query", 1, "run")
        began = broker.begin(stream, f"task-{n}", member=member)
        broker.send(stream, began, [b"%d" % n])
        if n < 2:
            broker.prepare(began)
        names.append(commands.TransactionName(began.xid, began.epoch))
        last = began
    group = commands.CommitGroup("query", 1, "run", names, 3)
    assert broker.ask(group).code == "group_incomplete" and found(broker)[0] == []
    broker.prepare(last)
    assert broker.ask(group).state == "committed"
    repeated = broker.ask(group)
    assert repeated.repeated and repeated.rows == 3
    assert sorted(found(broker)[0]) == [b"0", b"1", b"2"]
    assert [row["group"] for row in broker.ask(commands.ListCommitGroups()).groups] == ["query"]
    assert broker.ask(commands.AbortCommitGroup("query", 1, "run")).state == "committed"
    assert broker.ask(commands.ForgetCommitGroup("query")).forgotten
    assert broker.ask(commands.ListCommitGroups()).groups == []


# Stopping


def test_a_stop_waits_for_what_was_taken_and_takes_no_more() -> None:
    broker = queued()
    stream, other = broker.stream(), broker.stream()
    answer = broker.transact(stream, [("orders", 0, [b"last"])])
    parked = broker.ask(commands.AwaitChecks("billing", 600_000))
    stopped: list[bool] = []
    broker.engine.broker.stop(lambda: stopped.append(True))
    late = broker.transact(other, TWO)
    assert late.code == "busy" and isinstance(late.failure, Busy) and not stopped
    broker.work()
    assert stopped and answer.state == "committed" and parked.done
    again = Broker(broker.disk, broker.clock)
    assert again.payloads()[-1] == b"last" and again.settled()


def test_a_fetch_that_waits_is_woken_by_a_commit() -> None:
    broker = queued()
    end = broker.log().end_offset
    fetch = broker.fetch(end, wait_ms=60_000)
    stream = broker.stream()
    broker.work()
    broker.transact(stream, [("orders", 0, [b"new"])])
    assert fetch.code == "waiting"
    broker.work()
    assert payloads_of(fetch, end) == [b"new"]


# Many


@pytest.mark.long
def test_item_24_a_hundred_streams_of_transactions_beside_each_other_end_with_none_active() -> None:
    broker = Broker(flush__messages=1000)
    broker.create(partitions=2)
    streams, rounds = [broker.stream() for _ in range(100)], scaled(1000)
    for number in range(rounds):
        answers = [
            broker.transact(stream, [("orders", stream.id % 2, [b"%d.%d" % (stream.id, number)])], turn=False)
            for stream in streams
        ]
        broker.engine.broker.end_turn()
        assert {answer.state for answer in answers} == {"committed"}
    broker.advance(20)
    status = broker.engine.broker.transaction_commands.coordinator.status()
    assert (status["open"], status["prepared"], status["applying"]) == (0, 0, 0)
    assert broker.settled() and broker.engine.broker.backpressure.pending_requests == 0
    there = [payload for part in found(broker) for payload in part]
    assert len(there) == len(set(there)) == 100 * rounds
    for stream in streams[:10]:
        name = b"%d." % stream.id
        own = [payload for payload in there if payload.startswith(name)]
        assert own == [name + b"%d" % number for number in range(rounds)]


def test_item_25_files_of_the_journal_go_although_one_transaction_stays_in_doubt() -> None:
    broker = Broker(transaction__journal_file_bytes=1 << 16)
    broker.create(partitions=2)
    stream = broker.stream()
    began = broker.begin(stream, "forgotten")
    broker.send(stream, began, [b"kept"])
    broker.prepare(began)
    other = broker.stream()
    sizes = []
    for _ in range(12):
        for _ in range(20):
            assert broker.transact(other, [("orders", 1, [bytes(5000)])]).state == "committed"
        broker.advance(30)
        sizes.append(broker.engine.broker.transaction_commands.coordinator.status()["journal_bytes"])
    assert max(sizes[4:]) <= 10 * (1 << 16), sizes
    left = broker.crashed(broker.disk.crash(keep="nothing"))
    assert left.decide(began).state == "committed" and left.payloads(partition=0) == [b"kept"]
