"""The requests of one transaction: what is in them, and which answers are certain."""

import pytest

from tests.client.fake_broker import CUT, LOSE, SWALLOW
from tests.client.transaction_rig import TransactionRig, large
from tfmq.client.transaction.commit import SEQUENCES_TRIED
from tfmq.errors import (
    NOT_DONE,
    UNKNOWN,
    Busy,
    DiskFull,
    HeuristicOutcome,
    SequenceGap,
    StorageStopped,
    TfmqError,
    TimedOut,
    TransactionCommitted,
    TransactionExists,
    TransactionRolledBack,
    TransactionState,
    UnknownProducer,
    UnknownTransaction,
)
from tfmq.protocol.commands import (
    BeginTransaction,
    CommitTransaction,
    PrepareTransaction,
    Produce,
    RollbackTransaction,
    Transact,
)


@pytest.fixture
def rig() -> TransactionRig:
    return TransactionRig()


def visible(rig: TransactionRig) -> list[bytes]:
    return rig.broker.payloads("orders")


@pytest.mark.parametrize("error", [SequenceGap(), UnknownProducer()])
def test_a_frame_in_an_unknown_sequence_goes_again_in_a_fresh_one(rig: TransactionRig, error: Exception) -> None:
    rig.broker.plan(Transact, error)  # type: ignore[arg-type]
    tx = rig.begin()
    delivery = rig.send(tx, b"a")
    assert rig.commit(tx) == "committed" and visible(rig) == [b"a"]
    first, second = rig.frames()
    assert first.producer_id != second.producer_id
    assert delivery.result().message_id >> 24 == second.producer_id


def test_a_frame_that_may_be_done_never_goes_in_another_sequence(rig: TransactionRig) -> None:
    rig.broker.plan(Transact, LOSE, UnknownProducer())
    tx = rig.begin()
    rig.send(tx, b"a")
    with pytest.raises(UnknownProducer) as caught:
        rig.commit(tx)
    assert caught.value.outcome == UNKNOWN and tx.state == "unknown"
    rig.broker.plan(Transact, UnknownProducer())
    with pytest.raises(UnknownProducer):
        rig.commit(tx)
    assert visible(rig) == [b"a"] and len({each.producer_id for each in rig.frames()}) == 1


@pytest.mark.parametrize("plan", [[SWALLOW], [SWALLOW, SWALLOW]])
def test_a_frame_that_was_certainly_not_done_is_sent_anew_by_a_later_commit(
    rig: TransactionRig, plan: list[str]
) -> None:
    """Its answer never came, and the broker came back without it: the gap says that nothing of it was done."""
    tx = rig.begin()
    delivery = rig.send(tx, b"a")
    rig.broker.plan(Transact, *plan)
    for _ in plan:
        with pytest.raises(TimedOut):
            rig.commit(tx)
    forget_frames(rig)
    rig.broker.plan(Transact, SequenceGap())
    assert rig.commit(tx) == "committed" and visible(rig) == [b"a"]
    first, last = rig.frames()[0], rig.frames()[-1]
    assert first.producer_id != last.producer_id
    assert delivery.result().message_id >> 24 == last.producer_id


def test_a_frame_is_sent_anew_as_often_as_it_is_lost(rig: TransactionRig) -> None:
    tx = rig.begin()
    rig.send(tx, b"a")
    rig.broker.plan(Transact, CUT, SequenceGap(), CUT, SequenceGap(), CUT, SequenceGap())
    assert rig.commit(tx) == "committed" and visible(rig) == [b"a"]
    assert len({each.producer_id for each in rig.frames()}) == 4


def test_a_broker_that_calls_every_sequence_unknown_is_reported(rig: TransactionRig) -> None:
    tx = rig.begin()
    rig.send(tx, b"a")
    rig.broker.plan(Transact, *[SequenceGap() for _ in range(SEQUENCES_TRIED)])
    with pytest.raises(SequenceGap):
        rig.commit(tx)
    assert tx.state == "open" and len(rig.frames()) == SEQUENCES_TRIED
    assert rig.commit(tx) == "committed" and visible(rig) == [b"a"]


def test_a_frame_sent_anew_whose_answer_is_lost_stays_in_its_sequence(rig: TransactionRig) -> None:
    tx = rig.begin()
    rig.send(tx, b"a")
    rig.broker.plan(Transact, CUT, SequenceGap(), LOSE, UnknownProducer())
    with pytest.raises(UnknownProducer) as caught:
        rig.commit(tx)
    assert caught.value.outcome == UNKNOWN and tx.state == "unknown"
    assert rig.commit(tx) == "committed" and visible(rig) == [b"a"]
    assert len({each.producer_id for each in rig.frames()}) == 2


def test_a_frame_of_unknown_end_that_is_refused_for_sure_is_open_again(rig: TransactionRig) -> None:
    tx = rig.begin()
    rig.send(tx, b"a")
    rig.broker.plan(Transact, SWALLOW)
    with pytest.raises(TimedOut):
        rig.commit(tx)
    forget_frames(rig)
    rig.broker.plan(Transact, DiskFull())
    with pytest.raises(DiskFull):
        rig.commit(tx)
    assert tx.state == "open" and rig.rollback(tx) == "rolled_back" and visible(rig) == []


def forget_frames(rig: TransactionRig) -> None:
    """A power cut took what the broker had and had not reported."""
    broker = rig.broker
    for each in (broker.logs, broker.transactions, broker.tx_streams, broker.tx_numbers):
        each.clear()


def test_messages_beyond_a_frames_batches_are_sent_otherwise() -> None:
    rig = TransactionRig()
    rig.broker.limits["transact_batches"] = 3
    tx = rig.begin()
    for number in range(4):
        rig.send(tx, b"x", f"topic-{number}")
    assert rig.commit(tx) == "committed"
    assert rig.frames() == [] and len(rig.requests(Produce)) == 4


def test_a_frame_full_of_short_sends_is_sent_otherwise(rig: TransactionRig) -> None:
    """The short way counts nothing, so it is the commit that sees how much there is."""
    tx = rig.begin()
    for topic in "abcdefgh":
        rig.send(tx, b"x", topic)
    for batch in tx.shared_batches.values():
        while batch.room_bytes > 2000:
            batch.payloads.append(bytes(1000))
            batch.room_bytes -= 1000 + batch.overhead_bytes
    assert rig.frames() == [] and rig.requests(Produce) == []
    assert rig.commit(tx) == "committed" and rig.frames() == []
    assert sum(len(rig.broker.payloads(topic)) for topic in "abcdefgh") > 1500


def test_a_commit_that_was_sent_once_and_finds_nothing_has_not_happened(rig: TransactionRig) -> None:
    tx = rig.begin("order-42")
    rig.send(tx, b"a")
    rig.broker.plan(CommitTransaction, SWALLOW, UnknownTransaction())
    with pytest.raises(TimedOut):
        rig.commit(tx)
    with pytest.raises(UnknownTransaction) as caught:  # sent twice by now: it may have been the first
        rig.commit(tx)
    assert caught.value.outcome == UNKNOWN and tx.state == "unknown"
    other = rig.begin("order-43")
    rig.send(other, b"b")
    rig.broker.plan(CommitTransaction, UnknownTransaction())
    rig.leave_failing(other)
    assert other.state == "rolled_back"


def test_one_that_was_taken_up_can_be_sent_to(rig: TransactionRig) -> None:
    rig.send(rig.begin("order-42"), b"first")
    other = TransactionRig(rig.broker)
    found = other.resume("order-42")
    assert found.state == "open"
    other.send(found, b"second")
    assert other.commit(found) == "committed"
    assert rig.broker.payloads("orders") == [b"second"]  # the first one's was not sent before


def test_one_that_was_taken_up_is_prepared_as_it_is(rig: TransactionRig) -> None:
    tx = rig.begin("order-42")
    rig.send(tx, b"first")
    rig.run(tx.requests._send_all())
    other = TransactionRig(rig.broker)
    found = other.resume("order-42")
    assert other.prepare(found) == "prepared" and other.requests(Produce)[1:] == []
    assert other.commit(found) == "committed" and visible(rig) == [b"first"]


def test_a_frame_that_does_not_fit_its_sequence_goes_in_another_one(rig: TransactionRig) -> None:
    for number in range(2):
        tx = rig.begin()
        rig.send_many(tx, [b"x"] * 100)
        rig.commit(tx)
        rig.transactions.sequences._free[-1].sequence = (1 << 24) - 50
        rig.broker.tx_streams[rig.frames()[-1].producer_id] = (1 << 24) - 50
        assert len({each.producer_id for each in rig.frames()}) == number + 1
    assert len(visible(rig)) == 200


def test_rolling_back_a_local_one_needs_no_answer(rig: TransactionRig) -> None:
    tx = rig.begin()
    rig.send_many(tx, large())
    rig.broker.plan(RollbackTransaction, SWALLOW)
    assert rig.rollback(tx) == "rolled_back"


def test_rolling_back_a_named_one_is_certain_only_with_an_answer(rig: TransactionRig) -> None:
    tx = rig.begin("order-42")
    rig.send(tx, b"a")
    rig.broker.plan(RollbackTransaction, SWALLOW)
    with pytest.raises(TimedOut, match="resume"):
        rig.rollback(tx)
    assert tx.state == "unknown" and rig.rollback(tx) == "rolled_back"


def test_rolling_back_after_a_prepare_of_unknown_end_is_certain_only_with_an_answer(rig: TransactionRig) -> None:
    tx = rig.begin()
    rig.send(tx, b"a")
    rig.broker.plan(PrepareTransaction, SWALLOW)
    rig.broker.plan(RollbackTransaction, SWALLOW)
    for step in (rig.prepare, rig.rollback):
        with pytest.raises(TimedOut):
            step(tx)
    assert rig.broker.states() == ["rolled_back"] and rig.rollback(tx) == "rolled_back"


def test_a_transaction_that_is_gone_is_rolled_back(rig: TransactionRig) -> None:
    tx = rig.begin("order-42")
    rig.send(tx, b"a")
    rig.broker.transactions.clear()
    assert rig.rollback(tx) == "rolled_back"


def test_dropped_messages_are_counted(rig: TransactionRig) -> None:
    tx = rig.begin("order-42")
    rig.send(tx, b"a")
    rig.prepare(tx)
    rig.broker.dropped = 3
    assert rig.commit(tx) == "committed" and tx.requests.dropped_messages == 3


def test_an_error_that_was_not_sent_is_not_done(rig: TransactionRig) -> None:
    tx = rig.begin()
    rig.send(tx, b"a")
    rig.reachable = False
    rig.cut()
    with pytest.raises(ConnectionError) as caught:
        rig.commit(tx)
    assert caught.value.outcome == NOT_DONE and tx.state == "open"  # type: ignore[attr-defined]
    rig.reachable = True
    assert rig.commit(tx) == "committed" and visible(rig) == [b"a"]


def test_two_phases(rig: TransactionRig) -> None:
    tx = rig.begin("order-42", timeout=60)
    assert rig.requests(BeginTransaction)[0][2:5] == ("order-42", 60_000, "")
    rig.send(tx, b"a")
    assert rig.prepare(tx) == rig.prepare(tx) == tx.state == "prepared"
    with pytest.raises(TransactionState):
        rig.send(tx, b"b")
    assert visible(rig) == []
    assert rig.commit(tx) == rig.commit(tx) == "committed"
    assert rig.requests(CommitTransaction)[0].one_phase is False
    assert visible(rig) == [b"a"]


def test_an_unprepared_one_with_a_name_commits_in_one_phase(rig: TransactionRig) -> None:
    tx = rig.begin("order-42")
    rig.send(tx, b"a")
    assert rig.commit(tx) == "committed"
    assert rig.requests(CommitTransaction)[0].one_phase is True and visible(rig) == [b"a"]


def test_one_without_a_name_gets_it_when_it_is_prepared(rig: TransactionRig) -> None:
    tx = rig.begin()
    rig.send(tx, b"a")
    assert tx.xid is None
    assert rig.prepare(tx) == "prepared" and tx.xid == "local-1"
    other = TransactionRig(rig.broker)
    assert other.commit(other.resume("local-1")) == "committed"


@pytest.mark.parametrize("plan", [[LOSE], [CUT], [Busy(), LOSE, CUT]])
@pytest.mark.parametrize("request_", [BeginTransaction, PrepareTransaction, CommitTransaction])
def test_every_step_may_lose_its_answer(rig: TransactionRig, plan: list[str | TfmqError], request_: type) -> None:
    rig.broker.plan(request_, *plan)
    tx = rig.begin("order-42")
    rig.send(tx, b"a")
    assert rig.prepare(tx) == "prepared"
    assert rig.commit(tx) == "committed"
    assert visible(rig) == [b"a"] and rig.broker.states() == ["committed"]


def test_a_prepare_whose_answer_never_comes_is_prepared_again_by_commit(rig: TransactionRig) -> None:
    tx = rig.begin("order-42")
    rig.send(tx, b"a")
    rig.broker.plan(PrepareTransaction, SWALLOW)
    with pytest.raises(TimedOut, match=r"producer\.resume\('order-42'\) in any process"):
        rig.prepare(tx)
    assert tx.state == "unknown"
    assert rig.commit(tx) == "committed" and visible(rig) == [b"a"]
    assert rig.requests(CommitTransaction)[0].one_phase is False


def test_a_commit_whose_answer_never_comes_can_be_found_out_elsewhere(rig: TransactionRig) -> None:
    tx = rig.begin("order-42")
    rig.send(tx, b"a")
    rig.broker.plan(CommitTransaction, SWALLOW)
    with pytest.raises(TimedOut) as caught:
        rig.commit(tx)
    assert caught.value.outcome == UNKNOWN and tx.state == "unknown"
    other = TransactionRig(rig.broker)
    found = other.resume("order-42")
    assert found.state == other.commit(found) == "committed"
    with pytest.raises(TransactionCommitted):
        rig.rollback(tx)
    assert tx.state == "committed" and visible(rig) == [b"a"]


def test_a_refused_prepare_leaves_it_open(rig: TransactionRig) -> None:
    tx = rig.begin("order-42")
    rig.send(tx, b"a")
    rig.broker.plan(PrepareTransaction, StorageStopped("stopped", outcome=NOT_DONE))
    with pytest.raises(StorageStopped):
        rig.prepare(tx)
    assert tx.state == "open"
    rig.send(tx, b"b")
    assert rig.prepare(tx) == "prepared" and rig.commit(tx) == "committed"
    assert visible(rig) == [b"a", b"b"]


def test_a_refused_commit_leaves_a_prepared_one_prepared(rig: TransactionRig) -> None:
    tx = rig.begin("order-42")
    rig.send(tx, b"a")
    rig.prepare(tx)
    rig.broker.plan(CommitTransaction, DiskFull())
    with pytest.raises(DiskFull):
        rig.commit(tx)
    assert tx.state == "prepared" and rig.rollback(tx) == "rolled_back"


def test_an_unprepared_one_whose_time_was_over_is_rolled_back(rig: TransactionRig) -> None:
    tx = rig.begin("order-42")
    delivery = rig.send(tx, b"a")
    rig.run(tx.requests._send_all())
    rig.broker.transactions.clear()
    with pytest.raises(TransactionRolledBack, match="it timed out"):
        rig.commit(tx)
    assert tx.state == "rolled_back" and isinstance(delivery.error(), TransactionRolledBack)


def test_a_name_in_use_is_refused(rig: TransactionRig) -> None:
    rig.begin("order-42")
    with pytest.raises(TransactionExists):
        rig.begin("order-42")
    assert len(rig.transactions) == 1


@pytest.mark.parametrize("by_hand", [True, False])
def test_what_an_operator_decided_is_reported(rig: TransactionRig, by_hand: bool) -> None:
    tx = rig.begin("order-42")
    delivery = rig.send(tx, b"a")
    rig.prepare(tx)
    rig.broker.by_hand(1, by_hand)
    with pytest.raises(HeuristicOutcome) as caught:
        rig.commit(tx)
    assert caught.value.state == tx.state == ("heuristic_committed" if by_hand else "heuristic_rolled_back")
    assert (delivery.error() is None) == by_hand
    with pytest.raises(HeuristicOutcome):
        rig.rollback(tx)


def test_applying_is_committed_and_asked_for_again(rig: TransactionRig) -> None:
    tx, small = rig.begin("order-42"), rig.begin()
    delivery = rig.send(tx, b"a")
    rig.send(small, b"b")
    rig.broker.applying |= {"order-42", "local-2"}
    assert rig.commit(tx) == tx.state == "applying"
    assert delivery.result().durability == "synced"
    assert rig.commit(small) == rig.commit(small) == "applying"
    with pytest.raises(TransactionCommitted):
        rig.rollback(tx)
    rig.broker.applying.clear()
    assert rig.commit(tx) == "committed"
    assert rig.transactions.committed == 2 and rig.core.accumulator.sent_messages == 2, "each is counted once"
