"""A transaction that is sent while it grows: order, refusals, strange and full streams."""

import pytest

from tests.client.fake_broker import CUT, HOLD, LOSE, SWALLOW
from tests.client.transaction_rig import MEGABYTE, TransactionRig, large
from tfmq.client.operation import CallUserCode
from tfmq.client.send.partition_sender import IN_FLIGHT_BATCHES_MAX
from tfmq.client.transaction.pipeline import BUFFER_BYTES, Pipeline
from tfmq.client.transaction.transaction import TransactionCore
from tfmq.errors import (
    NOT_DONE,
    Busy,
    SequenceGap,
    TfmqError,
    TimedOut,
    TransactionRolledBack,
    TransactionState,
    TransactionTooLarge,
    UnknownProducer,
)
from tfmq.protocol.commands import BeginTransaction, CommitTransaction, LeaseProducerIds, Produce


@pytest.fixture
def rig() -> TransactionRig:
    return TransactionRig()


def visible(rig: TransactionRig) -> list[bytes]:
    return rig.broker.payloads("orders")


def grown(rig: TransactionRig, xid: str | None = "order-42") -> tuple[TransactionCore, Pipeline]:
    tx = rig.begin(xid)
    rig.send_many(tx, large())
    rig.run(tx.requests._send_all())
    pipeline = tx.requests.pipeline
    assert pipeline is not None
    return tx, pipeline


def committed(rig: TransactionRig, tx: TransactionCore, payloads: list[bytes]) -> None:
    assert rig.commit(tx) == "committed"
    assert rig.broker.payloads("orders") == payloads


def test_several_batches_are_under_way_at_once_and_not_too_many(rig: TransactionRig) -> None:
    tx, pipeline = grown(rig)
    rig.broker.plan(Produce, *[SWALLOW] * 1000)
    for payload in large():
        tx.append("orders", rig.core.make_message("orders", payload), payload)
    rig.exchange()
    assert 3 < len(pipeline._in_flight) <= IN_FLIGHT_BATCHES_MAX
    assert rig.requests(Produce)[-1].transaction == pipeline.epoch


@pytest.mark.parametrize(
    "plan", [[Busy()] * 3, [None, Busy(), None, Busy(), Busy()], [None, None, LOSE, Busy(), CUT, None, Busy(), LOSE]]
)
def test_what_a_busy_broker_does_not_take_goes_again_in_order(
    rig: TransactionRig, plan: list[str | TfmqError | None]
) -> None:
    rig.broker.plan(Produce, *plan)
    tx, _ = grown(rig)
    committed(rig, tx, large())


def test_a_transaction_waits_as_long_as_the_broker_asks_for(rig: TransactionRig) -> None:
    rig.broker.plan(Produce, None, Busy(wait_ms=1500))
    begun = rig.time
    tx, _ = grown(rig)
    committed(rig, tx, large())
    assert 1.5 <= rig.time - begun < 2.0


def test_what_goes_again_goes_before_what_has_not_gone_yet(
    rig: TransactionRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfmq.client.transaction.pipeline.IN_FLIGHT_BATCHES_MAX", 2)
    rig.broker.plan(Produce, None, Busy(), Busy())
    tx, _ = grown(rig)
    committed(rig, tx, large())


def test_a_broker_that_stays_busy_ends_it(rig: TransactionRig) -> None:
    tx = rig.begin("order-42")
    rig.broker.plan(Produce, *[Busy()] * 10_000)
    rig.send_many(tx, large())
    with pytest.raises(Busy) as caught:
        rig.commit(tx)
    assert caught.value.outcome == NOT_DONE and tx.state == "open"
    with pytest.raises(Busy, match="can only be rolled back"):
        rig.send(tx, b"more")
    rig.broker.plans.clear()
    assert rig.rollback(tx) == "rolled_back"


def test_a_refusal_is_reported_by_the_next_send_and_by_the_commit(rig: TransactionRig) -> None:
    tx = rig.begin()
    rig.broker.plan(Produce, None, None, TransactionTooLarge("too large"))
    with pytest.raises(TransactionTooLarge, match="too large"):
        for _ in range(10):
            rig.send_many(tx, large())
    with pytest.raises(TransactionTooLarge):
        rig.commit(tx)
    rig.leave(tx, ValueError())
    assert tx.state == "rolled_back" and rig.broker.states() == ["rolled_back"]


def test_a_batch_whose_answer_never_comes_ends_it_and_nothing_is_done(rig: TransactionRig) -> None:
    tx = rig.begin("order-42")
    rig.broker.plan(Produce, None, *[SWALLOW] * 100)
    rig.send_many(tx, large())
    with pytest.raises(TimedOut) as caught:
        rig.commit(tx)
    assert caught.value.outcome == NOT_DONE and tx.state == "open"


def test_an_unknown_sequence_is_replaced_before_anything_is_stored(rig: TransactionRig) -> None:
    first = rig.begin()
    rig.send(first, b"x")
    rig.commit(first)
    known = rig.frames()[0].producer_id
    rig.broker.logs.clear()
    rig.broker.tx_streams[known] = 50
    tx, _ = grown(rig, None)
    committed(rig, tx, large())
    assert {each.producer_id for each in rig.requests(Produce)} > {known}


def test_a_sequence_that_was_forgotten_is_replaced_at_begin(rig: TransactionRig) -> None:
    rig.broker.forgotten_ids.add(100)
    tx, _ = grown(rig)
    committed(rig, tx, large())
    assert [each.producer_id for each in rig.requests(BeginTransaction)] == [100, 101]


@pytest.mark.parametrize("error", [SequenceGap(), UnknownProducer()])
def test_a_sequence_that_gets_unknown_in_the_middle_ends_it(rig: TransactionRig, error: TfmqError) -> None:
    tx = rig.begin("order-42")
    rig.broker.plan(Produce, None, None, error)
    with pytest.raises(type(error), match="Nothing of it is visible") as caught:
        rig.send_many(tx, large())
        rig.commit(tx)
    assert caught.value.outcome == NOT_DONE and rig.rollback(tx) == "rolled_back"


def test_a_full_sequence_is_followed_by_another_one(rig: TransactionRig) -> None:
    tx, pipeline = grown(rig)
    assert pipeline._sequence is not None
    pipeline._sequence.sequence = rig.broker.tx_streams[pipeline._sequence.producer_id] = (1 << 24) - 400
    rig.send_many(tx, large())
    committed(rig, tx, large() * 2)
    assert len({each.producer_id for each in rig.requests(Produce)}) == 2


def test_a_begin_of_a_local_one_that_lost_its_connection_begins_another_one(rig: TransactionRig) -> None:
    rig.send(rig.begin(), b"to be connected")
    rig.broker.plan(BeginTransaction, LOSE, CUT)
    tx, _ = grown(rig, None)
    committed(rig, tx, large())
    assert [each.number for each in rig.requests(BeginTransaction)] == [1, 2, 3]
    assert rig.broker.states() == ["rolled_back", "committed"]


def test_a_begin_that_is_refused_is_reported_by_the_step(rig: TransactionRig) -> None:
    tx = rig.begin()
    rig.broker.plan(BeginTransaction, TransactionTooLarge("too many"))
    with pytest.raises(TransactionTooLarge, match="too many"):
        rig.send_many(tx, large())
        rig.commit(tx)
    assert rig.rollback(tx) == "rolled_back"


def test_its_sequence_goes_back_to_the_pool_only_if_all_is_answered(rig: TransactionRig) -> None:
    tx, _ = grown(rig)
    rig.commit(tx)
    small = rig.begin()
    rig.send(small, b"x")
    rig.commit(small)
    assert rig.frames()[0].producer_id == rig.requests(Produce)[0].producer_id
    again = rig.begin("again")
    rig.broker.plan(Produce, None, *[SWALLOW] * 100)
    rig.send_many(again, large())
    rig.exchange()
    rig.rollback(again)
    other = rig.begin()
    rig.send(other, b"y")
    rig.commit(other)
    assert rig.frames()[1].producer_id != rig.requests(Produce)[-1].producer_id
    assert len(rig.requests(LeaseProducerIds)) == 1


def test_one_that_another_process_committed_is_not_said_to_be_invisible() -> None:
    rig = TransactionRig()
    tx = rig.begin("order-42")
    rig.send(tx, b"late")
    other = TransactionRig(rig.broker)
    found = other.resume("order-42")
    other.send(found, b"in time")
    other.commit(found)
    with pytest.raises(TransactionState, match="these messages are not in it") as caught:
        rig.commit(tx)
    assert "visible" not in str(caught.value) and rig.broker.payloads("orders") == [b"in time"]


def test_one_that_outgrows_a_frame_is_begun_and_sent_while_it_grows(rig: TransactionRig) -> None:
    tx = rig.begin()
    payloads = large()
    deliveries = rig.send_many(tx, payloads)
    rig.exchange()
    assert len(rig.requests(BeginTransaction)) == 1 and visible(rig) == []
    assert len(rig.requests(Produce)) > 5 and tx.xid == "local-1"
    assert rig.commit(tx) == "committed"
    assert visible(rig) == payloads and rig.frames() == []
    assert {each.durability for each in deliveries.result()} == {"synced"}
    assert sum(each.count for each in deliveries.result()) == len(payloads)


def test_single_sends_outgrow_a_frame_too(rig: TransactionRig) -> None:
    tx = rig.begin()
    payloads = large(1500)
    for number, payload in enumerate(payloads):
        rig.send(tx, payload, key=str(number))
    assert rig.commit(tx) == "committed"
    assert visible(rig) == payloads and len(rig.requests(BeginTransaction)) == 1


def test_what_the_broker_has_is_not_held_here(rig: TransactionRig) -> None:
    tx = rig.begin()
    deliveries = rig.send_many(tx, large(20_000))
    rig.exchange()
    pipeline = tx.requests.pipeline
    assert pipeline is not None and pipeline.unacked_bytes < 5 * MEGABYTE and pipeline.batch_count > 50
    assert all(not each.encoded.data for each in deliveries.batches[:50] if each.encoded is not None)
    del deliveries
    held = [batch for batch in tx.requests.batches() if batch is not None]
    assert len(held) < 30
    assert rig.commit(tx) == "committed"
    assert len(visible(rig)) == 20_000


def test_senders_wait_while_too_much_is_under_way(rig: TransactionRig) -> None:
    tx = rig.begin()
    rig.broker.plan(Produce, *[HOLD] * 10_000)
    sending = tx.send_many("orders", large(40_000))
    for _ in range(400):
        step = next(sending)
        if isinstance(step, CallUserCode):
            step.function()
        rig.exchange()
    pipeline = tx.requests.pipeline
    assert pipeline is not None and BUFFER_BYTES <= pipeline.unacked_bytes < BUFFER_BYTES + 2 * MEGABYTE
    rig.broker.plans.clear()
    rig.broker.release()
    rig.run(sending)
    assert rig.commit(tx) == "committed" and len(visible(rig)) == 40_000


def test_a_large_one_rolls_back_at_the_broker(rig: TransactionRig) -> None:
    tx = rig.begin()
    deliveries = rig.send_many(tx, large())
    assert rig.rollback(tx) == "rolled_back"
    assert rig.broker.states() == ["rolled_back"] and visible(rig) == []
    with pytest.raises(TransactionRolledBack):
        deliveries.result()


def test_a_large_local_one_ends_with_its_connection_and_says_so(rig: TransactionRig) -> None:
    tx = rig.begin()
    rig.send_many(tx, large())
    rig.exchange()
    assert rig.session is not None
    rig.broker.session_lost(rig.session)
    rig.cut()
    with pytest.raises(TfmqError, match="The connection was lost, and with it the transaction") as caught:
        rig.send_many(tx, large())
        rig.commit(tx)
    assert caught.value.outcome == NOT_DONE and tx.state == "open", "nothing of it may have happened"
    assert rig.rollback(tx) == "rolled_back" and visible(rig) == []


def test_a_large_named_one_survives_its_connection(rig: TransactionRig) -> None:
    tx = rig.begin("order-42")
    rig.broker.plan(Produce, None, LOSE, None, CUT, LOSE)
    payloads = large()
    rig.send_many(tx, payloads)
    rig.broker.plan(CommitTransaction, LOSE)
    assert rig.commit(tx) == "committed"
    assert visible(rig) == payloads


def test_one_message_may_be_larger_than_a_frame(rig: TransactionRig) -> None:
    tx = rig.begin()
    rig.send(tx, b"small")
    rig.send(tx, bytes(5 * MEGABYTE))
    assert rig.commit(tx) == "committed"
    assert [len(each) for each in visible(rig)] == [5, 5 * MEGABYTE]
