"""One transaction on the fake broker: what is sent when, what is visible when, and how it ends."""

from __future__ import annotations

import gc
import logging

import pytest

from tests.client.fake_broker import CUT, HOLD, LOSE, SWALLOW, FakeBroker
from tests.client.fake_delays import NOW_MS
from tests.client.transaction_rig import MEGABYTE, TransactionRig, large
from tfmq.client.producer.xa import XaBranches
from tfmq.client.transaction.transaction import TransactionCore, TransactionHandle
from tfmq.errors import (
    NOT_DONE,
    UNKNOWN,
    Abandoned,
    Busy,
    Closed,
    DiskFull,
    NotAllowed,
    TimedOut,
    TransactionCommitted,
    TransactionRolledBack,
    TransactionState,
    UnknownTopic,
    UnknownTransaction,
)
from tfmq.protocol.commands import BeginTransaction, Produce, RollbackTransaction, Transact


@pytest.fixture
def rig() -> TransactionRig:
    return TransactionRig()


def visible(rig: TransactionRig, topic: str = "orders") -> list[bytes]:
    return rig.broker.payloads(topic)


# Small ones


def test_a_small_one_is_one_frame_and_invisible_before_it(rig: TransactionRig) -> None:
    tx = rig.begin()
    deliveries = [rig.send(tx, b"a"), rig.send(tx, b"b", "bills", key="k"), rig.send(tx, "c")]
    assert visible(rig) == [] and rig.frames() == [] and not deliveries[0].done()
    assert rig.commit(tx) == tx.state == "committed"
    assert (visible(rig), visible(rig, "bills")) == ([b"a", b"c"], [b"b"])
    assert len(rig.frames()) == 1 and rig.requests(BeginTransaction) == []
    assert [each.result().offset is not None for each in deliveries] == [True] * 3
    assert deliveries[0].result().durability == "synced"


def test_partitions_of_one_frame_keep_their_order() -> None:
    rig = TransactionRig(FakeBroker(partitions=3))
    tx = rig.begin()
    for number in range(30):
        rig.send(tx, b"%02d" % number, partition=number % 3)
    rig.commit(tx)
    for partition in range(3):
        assert rig.broker.payloads("orders", partition) == [b"%02d" % n for n in range(partition, 30, 3)]


def test_nothing_in_it_needs_no_broker(rig: TransactionRig) -> None:
    tx = rig.begin()
    assert rig.commit(tx) == "read_only"
    assert rig.prepare(rig.begin()) == "read_only"
    assert rig.broker.requests == []


def test_one_producer_sequence_is_lent_to_one_transaction_after_the_other(rig: TransactionRig) -> None:
    for number in range(3):
        tx = rig.begin()
        rig.send_many(tx, [b"%d" % number] * 2)
        rig.commit(tx)
    assert len({frame.producer_id for frame in rig.frames()}) == 1
    assert [frame.number for frame in rig.frames()] == [1, 2, 3]
    assert [frame.batches[0].sequence for frame in rig.frames()] == [0, 2, 4]


def test_transactions_at_the_same_time_have_producer_sequences_of_their_own(rig: TransactionRig) -> None:
    first, second = rig.begin(), rig.begin()
    rig.send(first, b"1"), rig.send(second, b"2")
    rig.broker.plan(Transact, HOLD)
    committing = rig.begun(first.commit(), Transact)
    assert rig.commit(second) == "committed"
    rig.broker.release()
    assert rig.run(committing) == "committed"
    assert len({frame.producer_id for frame in rig.frames()}) == 2


def test_plain_and_transactional_sends_never_share_a_producer_sequence(rig: TransactionRig) -> None:
    for number in range(3):
        message = rig.core.make_message("orders", b"plain")
        delivery = rig.run(rig.core.send("orders", message, b"plain"))
        rig.run(rig.core.wait_for_batches([delivery[0]]))
        tx = rig.begin()
        rig.send(tx, b"%d" % number)
        rig.commit(tx) if number != 1 else rig.rollback(tx)
    plain = {each.producer_id for each in rig.requests(Produce)}
    assert plain.isdisjoint(frame.producer_id for frame in rig.frames())
    assert visible(rig) == [b"plain", b"0", b"plain", b"plain", b"2"]


# Answers that do not come, and refusals


@pytest.mark.parametrize("plan", [[LOSE], [CUT], [CUT, LOSE, CUT, LOSE]])
def test_a_lost_answer_is_asked_for_again_and_commits_once(rig: TransactionRig, plan: list[str]) -> None:
    rig.broker.plan(Transact, *plan)
    tx = rig.begin()
    delivery = rig.send(tx, b"a")
    assert rig.commit(tx) == "committed"
    assert visible(rig) == [b"a"] and delivery.result().offset == 0
    assert len(rig.frames()) == 1 + len(plan)
    assert len({(frame.producer_id, frame.number) for frame in rig.frames()}) == 1


def test_a_reply_that_is_lost_is_unknown_and_commit_again_returns_the_outcome(rig: TransactionRig) -> None:
    rig.broker.plan(Transact, SWALLOW)
    tx = rig.begin()
    delivery = rig.send(tx, b"a")
    with pytest.raises(TimedOut, match="calling it again returns the outcome, and cannot execute it twice") as caught:
        rig.commit(tx)
    assert caught.value.outcome == UNKNOWN and tx.state == "unknown"
    with pytest.raises(TransactionState):
        rig.send(tx, b"b")
    with pytest.raises(TransactionState, match="cannot commit twice"):
        rig.rollback(tx)
    assert tx.state == "unknown" and not delivery.done()
    assert rig.commit(tx) == "committed"
    assert visible(rig) == [b"a"] and delivery.result().offset == 0


def test_a_busy_broker_is_asked_again(rig: TransactionRig) -> None:
    rig.broker.plan(Transact, Busy(), Busy(), Busy())
    tx = rig.begin()
    rig.send(tx, b"a")
    assert rig.commit(tx) == "committed" and visible(rig) == [b"a"]


def test_one_that_stays_busy_is_reported_in_time_and_can_be_tried_again(rig: TransactionRig) -> None:
    rig.broker.plan(Transact, *[Busy()] * 1000)
    tx = rig.begin()
    rig.send(tx, b"a")
    begun = rig.time
    with pytest.raises(Busy) as caught:
        rig.commit(tx)
    assert caught.value.outcome == NOT_DONE and rig.time - begun <= 2.1
    rig.broker.plans.clear()
    assert tx.state == "open" and rig.commit(tx) == "committed"
    assert visible(rig) == [b"a"]


def test_a_refused_commit_leaves_it_open_and_may_be_tried_again(rig: TransactionRig) -> None:
    rig.broker.plan(Transact, DiskFull())
    tx = rig.begin()
    first = rig.send(tx, b"a")
    with pytest.raises(DiskFull):
        rig.commit(tx)
    assert tx.state == "open" and not first.done()
    second = rig.send(tx, b"b")
    assert rig.commit(tx) == "committed"
    assert visible(rig) == [b"a", b"b"]
    assert [first.result().offset, second.result().offset] == [0, rig.broker.logs["orders", 0][1].offset]


def test_a_topic_that_was_made_anew_refuses_and_the_next_one_succeeds(rig: TransactionRig) -> None:
    first = rig.begin()
    rig.send(first, b"old")
    rig.broker.delete("orders")
    rig.broker.incarnations["orders"] = 99
    with pytest.raises(UnknownTopic):
        rig.commit(first)
    assert rig.rollback(first) == "rolled_back"
    again = rig.begin()
    rig.send(again, b"new")
    rig.commit(again)
    assert visible(rig) == [b"new"]


def test_a_topic_that_was_made_anew_ends_a_large_one_and_the_next_one_succeeds(rig: TransactionRig) -> None:
    first = rig.begin("first")
    rig.send(first, b"old")
    rig.broker.delete("orders")
    rig.broker.incarnations["orders"] = 99
    with pytest.raises(UnknownTopic):
        rig.commit(first)
    again = rig.begin("again")
    rig.send(again, b"new")
    assert rig.commit(again) == "committed" and visible(rig) == [b"new"]


def test_a_missing_topic_is_reported_at_once(rig: TransactionRig) -> None:
    rig.broker.auto_create = False
    with pytest.raises(UnknownTopic):
        rig.send(rig.begin(), b"a")


# Rollback


def test_rollback_leaves_nothing_and_fails_the_deliveries(rig: TransactionRig) -> None:
    tx = rig.begin()
    delivery = rig.send(tx, b"a")
    assert rig.rollback(tx) == rig.rollback(tx) == "rolled_back"
    with pytest.raises(TransactionRolledBack) as caught:
        delivery.result()
    assert caught.value.outcome == NOT_DONE
    assert rig.frames() == [] and visible(rig) == []
    rig.run(rig.core.flush(1.0))  # a rollback is no failure that was overlooked


def test_steps_out_of_turn_name_the_rule(rig: TransactionRig) -> None:
    rolled_back, committed = rig.begin(), rig.begin()
    rig.send(rolled_back, b"a"), rig.send(committed, b"b")
    rig.rollback(rolled_back), rig.commit(committed)
    with pytest.raises(TransactionRolledBack):
        rig.commit(rolled_back)
    with pytest.raises(TransactionCommitted):
        rig.rollback(committed)
    with pytest.raises(TransactionState, match="it cannot be prepared any more"):
        rig.prepare(committed)
    with pytest.raises(TransactionState, match="is committed: begin another one for further messages"):
        rig.send(committed, b"c")
    assert rig.commit(committed) == "committed" and len(rig.frames()) == 1


# `with`


def test_leaving_commits_what_is_open_or_prepared_and_leaves_the_rest(rig: TransactionRig) -> None:
    first, prepared, over = rig.begin(), rig.begin("p"), rig.begin()
    for tx in (first, prepared, over):
        rig.send(tx, b"x")
    rig.prepare(prepared)
    rig.rollback(over)
    for tx in (first, prepared, over):
        rig.leave(tx)
    assert [first.state, prepared.state, over.state] == ["committed", "committed", "rolled_back"]


@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt()])
def test_an_exception_rolls_back(rig: TransactionRig, error: BaseException) -> None:
    small, grown, named = rig.begin(), rig.begin(), rig.begin("n")
    deliveries = [rig.send(small, b"x"), rig.send(named, b"x")]
    rig.send_many(grown, large())
    for tx in (small, grown, named):
        rig.leave(tx, error)
        assert tx.state == "rolled_back"
    assert set(rig.broker.states()) == {"rolled_back"} and visible(rig) == []
    assert all(isinstance(each.error(), TransactionRolledBack) for each in deliveries)
    assert not getattr(error, "__notes__", [])


def test_after_an_exception_a_prepared_one_stays_and_a_note_says_so(rig: TransactionRig) -> None:
    tx = rig.begin("order-42")
    rig.send(tx, b"x")
    rig.prepare(tx)
    error = KeyError("mine")
    rig.leave(tx, error)
    assert tx.state == "prepared" and rig.broker.states() == ["prepared"]
    assert "producer.resume('order-42')" in error.__notes__[0]


def test_an_exception_does_not_wait_long_for_a_broker_that_is_away(rig: TransactionRig) -> None:
    tx = rig.begin("order-42")
    rig.send(tx, b"x")
    rig.reachable = False
    rig.cut()
    begun = rig.time
    rig.leave(tx, KeyError("mine"))
    assert tx.state == "rolled_back" and rig.time - begun < 6
    rig.reachable = True
    rig.advance(3)
    assert rig.broker.states() == ["rolled_back"]


def test_a_commit_that_fails_at_the_end_of_with_rolls_back(rig: TransactionRig) -> None:
    tx = rig.begin()
    delivery = rig.send(tx, b"x")
    rig.broker.plan(Transact, DiskFull())
    with pytest.raises(DiskFull):
        rig.leave(tx)
    assert tx.state == "rolled_back" and isinstance(delivery.error(), DiskFull)


def test_a_commit_of_unknown_end_stays_unknown_after_with(rig: TransactionRig) -> None:
    tx = rig.begin()
    rig.send(tx, b"x")
    rig.broker.plan(Transact, SWALLOW)
    with pytest.raises(TimedOut):
        rig.leave(tx)
    assert tx.state == "unknown" and rig.commit(tx) == "committed"


def test_with_is_entered_once(rig: TransactionRig) -> None:
    tx = rig.begin()
    tx.enter()
    with pytest.raises(NotAllowed, match="begin another one"):
        tx.enter()


# Interruptions and threads


def test_a_commit_that_is_interrupted_is_unknown_and_can_go_on(rig: TransactionRig) -> None:
    tx = rig.begin()
    delivery = rig.send(tx, b"x")
    rig.broker.plan(Transact, HOLD)
    rig.begun(tx.commit(), Transact).close()
    assert tx.state == "unknown" and visible(rig) == [b"x"]
    assert rig.commit(tx) == "committed"
    assert visible(rig) == [b"x"] and delivery.result().offset == 0


def test_a_commit_that_is_interrupted_before_it_was_asked_for_leaves_it_open(rig: TransactionRig) -> None:
    tx = rig.begin("order-42")
    rig.broker.plan(Produce, HOLD)
    rig.send(tx, b"x")
    rig.begun(tx.commit(), Produce).close()
    assert tx.state == "open" and rig.rollback(tx) == "rolled_back"


def test_a_step_waits_for_the_one_under_way(rig: TransactionRig) -> None:
    tx = rig.begin()
    rig.send(tx, b"x")
    rig.broker.plan(Transact, HOLD)
    first, second = rig.begun(tx.commit(), Transact), tx.commit()
    next(second)
    with pytest.raises(TransactionState):
        rig.send(tx, b"y")
    rig.broker.release()
    assert rig.run(first) == rig.run(second) == "committed"
    assert len(rig.frames()) == 1


# Handles


def test_waiting_inside_is_refused_and_after_a_commit_answered(rig: TransactionRig) -> None:
    tx = rig.begin()
    delivery = rig.send(tx, b"x")
    with pytest.raises(NotAllowed, match="the transaction is open"):
        delivery.result()
    rig.commit(tx)
    assert delivery.result(0.0).offset == 0


def test_a_caller_that_waits_while_it_commits_is_answered(rig: TransactionRig) -> None:
    tx = rig.begin()
    delivery = rig.send(tx, b"x")
    rig.broker.plan(Transact, HOLD)
    committing = rig.begun(tx.commit(), Transact)
    waiting = tx._wait_for_batches([delivery[0]], 1.0)
    next(waiting)
    rig.broker.release()
    rig.run(committing)
    rig.run(waiting)
    assert delivery.result().offset == 0


def test_callbacks_and_hooks_are_called_although_no_handle_is_referenced() -> None:
    rig = TransactionRig()
    reported: list[object] = []
    tx = rig.begin()
    for payload in large(100):
        rig.send(tx, payload).add_callback(lambda done: reported.append(done.peek()))
    rig.send_many(tx, large())
    rig.commit(tx)
    rig.callbacks.run()
    assert reported == [None] * 100


def test_offsets_are_those_of_the_records_as_far_as_the_commit_returns_them(rig: TransactionRig) -> None:
    tx = rig.begin()
    deliveries = [rig.send(tx, b"x" * size) for size in (10, 200, 30)]
    many = [rig.send(tx, bytes(1000), "bills") for _ in range(200)]
    rig.commit(tx)
    offsets = [each.result().offset for each in deliveries]
    assert offsets[0] == 0 and offsets[2] is not None and offsets[1] is not None
    assert offsets[2] - offsets[1] > 200
    assert many[0].result().offset == 0 and many[-1].result().offset is None


# Forks and ends


def test_in_a_forked_child_it_is_the_parents(rig: TransactionRig) -> None:
    tx = rig.begin("order-42")
    delivery = rig.send(tx, b"x")
    for forget in rig.on_fork:
        forget()  # type: ignore[operator]
    assert tx.state == "abandoned" and isinstance(delivery.error(), Abandoned)
    for use in (tx.commit, tx.roll_back, tx.prepare):
        with pytest.raises(Abandoned, match="the parent process"):
            rig.run(use())
    with pytest.raises(Abandoned):
        rig.leave(tx)
    assert rig.core.transactions is not rig.transactions and len(rig.core.transactions) == 0


def test_closing_rolls_back_what_is_open_and_says_so(rig: TransactionRig) -> None:
    small, grown, empty, prepared = rig.begin(), rig.begin(), rig.begin(), rig.begin("p")
    delivery = rig.send(small, b"x")
    rig.send_many(grown, large())
    rig.send(prepared, b"y")
    rig.prepare(prepared)
    with pytest.raises(TransactionRolledBack, match="2 open transactions were rolled back"):
        rig.run(rig.core.close(5.0))
    assert [each.state for each in (small, grown, empty)] == ["rolled_back"] * 3
    assert prepared.state == "prepared" and "prepared" in rig.broker.states()
    assert isinstance(delivery.error(), TransactionRolledBack)
    assert len(rig.requests(RollbackTransaction)) == 1
    with pytest.raises(Closed):
        rig.begin()
    with pytest.raises(TransactionRolledBack, match="The producer was closed"):
        rig.commit(small)


def test_closing_with_nothing_open_says_nothing(rig: TransactionRig, caplog: pytest.LogCaptureFixture) -> None:
    tx = rig.begin()
    rig.send(tx, b"x")
    rig.commit(tx)
    rig.begin()
    rig.run(rig.core.close(5.0))
    assert rig.requests(RollbackTransaction) == []
    assert caplog.records == []


def test_one_that_the_broker_forgot_is_unknown_when_taken_up(rig: TransactionRig) -> None:
    with pytest.raises(UnknownTransaction, match="no outcome of one"):
        rig.resume("nobody")


# Where the broker is slow


def test_many_partitions_of_a_large_one_do_not_gather_without_end() -> None:
    rig = TransactionRig(FakeBroker(partitions=40))
    tx = rig.begin()
    for number in range(4000):
        rig.send(tx, bytes(1000), partition=number % 40)
        assert tx.accumulator.size_bytes() < 2 * MEGABYTE
    assert rig.commit(tx) == "committed" and rig.broker.counts("orders") == [100] * 40


def test_an_exception_is_not_held_up_by_a_rollback_without_an_answer(rig: TransactionRig) -> None:
    tx = rig.begin("order-42")
    delivery = rig.send(tx, b"x")
    rig.broker.plan(RollbackTransaction, SWALLOW)
    rig.leave(tx, KeyError("mine"))
    assert tx.state == "rolled_back" and isinstance(delivery.error(), TransactionRolledBack)


def test_rolling_back_what_the_broker_has_not_begun_yet(rig: TransactionRig) -> None:
    tx = rig.begin()
    rig.broker.plan(BeginTransaction, SWALLOW)
    rig.send_many(tx, large(2000))
    begun = rig.time
    assert rig.rollback(tx) == "rolled_back" and rig.time - begun < 2.1
    assert rig.requests(RollbackTransaction) == []


def test_closing_waits_for_a_commit_under_way(rig: TransactionRig) -> None:
    tx = rig.begin()
    rig.send(tx, b"x")
    rig.broker.plan(Transact, HOLD)
    committing = rig.begun(tx.commit(), Transact)
    closing = rig.core.close(5.0)
    next(closing)
    rig.broker.release()
    rig.run(committing)
    rig.run(closing)
    assert tx.state == "committed" and visible(rig) == [b"x"]


def test_closing_logs_a_transaction_without_an_xid(rig: TransactionRig, caplog: pytest.LogCaptureFixture) -> None:
    tx = rig.begin()
    tx.state = "unknown"
    rig.run(rig.core.close(5.0))
    assert "while the state of a transaction was unknown." in caplog.text


def test_a_wait_for_a_delivery_is_bounded_while_it_commits(rig: TransactionRig) -> None:
    tx = rig.begin()
    delivery = rig.send(tx, b"x")
    rig.broker.plan(Transact, HOLD)
    committing = rig.begun(tx.commit(), Transact)
    with pytest.raises(TimedOut, match="has not ended yet"):
        delivery.result(0.1)
    rig.broker.release()
    rig.run(committing)
    assert delivery.result().offset == 0


def test_one_whose_time_was_over_while_it_grew_says_so(rig: TransactionRig) -> None:
    tx = rig.begin("order-42")
    rig.broker.transactions.clear()
    with pytest.raises(UnknownTransaction, match=r"It timed out.*Nothing of it is visible") as caught:
        rig.send_many(tx, large())
        rig.commit(tx)
    assert caught.value.outcome == NOT_DONE and rig.rollback(tx) == "rolled_back"


@pytest.mark.parametrize("xid", [None, "named"])
def test_delayed_messages_of_a_transaction_begin_to_wait_with_its_commit(rig: TransactionRig, xid: str | None) -> None:
    transaction = rig.begin(xid)
    delayed = rig.send(transaction, b"later", delay=30)
    at = rig.send(transaction, b"at", deliver_at=2_000_000_000)
    plain = rig.send(transaction, b"now")
    rig.time += 500
    assert not rig.broker.waiting
    rig.commit(transaction)
    assert rig.broker.payloads("orders") == [b"now"] and rig.broker.delayed_payloads() == [b"later", b"at"]
    assert [each.due for each in rig.broker.waiting] == [NOW_MS + 30_000, 2_000_000_000_000]
    assert plain.result().offset == 0
    for delivery in (delayed, at):
        result = delivery.result()
        assert (result.offset, result.delayed, result.durability) == (None, None, "synced")


def test_nothing_waits_of_one_that_is_rolled_back(rig: TransactionRig) -> None:
    for xid in (None, "named"):
        transaction = rig.begin(xid)
        rig.send(transaction, b"never", delay=30)
        rig.rollback(transaction)
    assert not rig.broker.waiting


def test_plain_delayed_and_transactional_sends_mixed_never_trip_the_sequence_rule(rig: TransactionRig) -> None:
    rig.broker.plan(Produce, None, LOSE, None, Busy(), LOSE)
    rig.broker.plan(Transact, None, LOSE, Busy())
    deliveries = []
    for number in range(30):
        delay = 10 if number % 3 else None
        transaction = rig.begin(f"x{number}" if number % 4 == 0 else None)
        deliveries.append(rig.send(transaction, b"t%02d" % number, delay=delay))
        message = rig.core.make_message("orders", b"p%02d" % number, delay=delay)
        deliveries.append(rig.run(rig.core.send("orders", message, rig.core.encode_payload("orders", message))))
        rig.commit(transaction)
    rig.run(rig.core.flush(30.0))
    assert all(each.error() is None for each in deliveries)
    found = sorted(rig.broker.payloads("orders") + rig.broker.delayed_payloads())
    assert found == sorted(b"%c%02d" % (kind, number) for number in range(30) for kind in b"pt")


# A transaction as its holder sees it; one without a reference.


class Handle(TransactionHandle):
    """Without any waiting."""

    def __init__(self, core: TransactionCore) -> None:
        self._core = core


def test_it_shows_its_name_and_state() -> None:
    rig = TransactionRig()
    handle = Handle(rig.begin("order-42"))
    assert (handle.xid, handle.state, handle.dropped) == ("order-42", "open", 0)
    assert repr(handle) == "<Transaction order-42 open>"


def test_one_that_is_forgotten_is_rolled_back_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    rig = TransactionRig()
    core = rig.begin("order-42")
    handle = Handle(core)
    rig.send(core, b"x")
    del handle
    gc.collect()
    assert core.state == "open"
    with caplog.at_level(logging.WARNING):
        rig.transactions.roll_back_unreferenced()
    rig.exchange()
    assert core.state == "rolled_back" and rig.broker.states() == ["rolled_back"]
    assert "order-42 was dropped without commit or rollback" in caplog.text


def test_one_that_is_held_by_its_name_is_not_forgotten() -> None:
    rig = TransactionRig()
    core = rig.run(XaBranches(rig.transactions).start("branch"))
    handle = Handle(core)
    del handle
    gc.collect()
    rig.transactions.roll_back_unreferenced()
    assert core.state == "open" and rig.broker.states() == ["open"]


def test_one_that_is_over_or_prepared_is_forgotten_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    rig = TransactionRig()
    over, prepared = rig.begin(), rig.begin("p")
    for core in (over, prepared):
        rig.send(core, b"x")
    rig.commit(over), rig.prepare(prepared)
    handles = [Handle(over), Handle(prepared)]
    del handles
    gc.collect()
    rig.transactions.roll_back_unreferenced()
    assert prepared.state == "prepared" and "prepared" in rig.broker.states() and caplog.text == ""
    assert len(rig.transactions) == 0
