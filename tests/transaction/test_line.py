"""One target: everything in the order of the decisions, one effect at a time, once."""

import logging

import pytest

from journal.record.format import make_log_id
from tests.transaction.desk import BILLS, ORDERS, Desk
from tests.transaction.targets import Row
from tfmq.apply_target import ARRIVALS_KEY, OFFSETS_KEY, AppendDelayed, AppliedCallback, Effect
from tfmq.errors import StorageStopped
from tfmq.transaction.applier import RETRY_SECONDS, RETRY_SECONDS_MAX


def applies(desk: Desk, key: int) -> list[tuple[int, int]]:
    return [asked[2:] for asked in desk.targets.asked if asked[:2] == ("apply", key)]


def test_neighbours_of_one_turn_share_one_effect_under_the_last_place() -> None:
    desk = Desk()
    for number in range(5):
        desk.transact([(ORDERS, [b"%d" % number])], turn=False)
    desk.turn()
    assert desk.visible() == [b"0", b"1", b"2", b"3", b"4"]
    assert len(applies(desk, ORDERS)) == len(desk.targets.target(ORDERS).appends) == 1
    assert desk.kill().visible() == desk.visible(), "all of them are known to be there"


def test_neighbours_that_are_too_much_for_one_effect_go_in_several() -> None:
    desk = Desk()
    for number in range(6):
        desk.transact([(ORDERS, [b"%d" % number * 400_000])], turn=False)
    desk.turn()
    assert [each.size_bytes > 1 << 20 for each in desk.targets.target(ORDERS).appends] == [False] * 3
    assert [payload[:1] for payload in desk.visible()] == [b"0", b"1", b"2", b"3", b"4", b"5"]


def test_delayed_batches_share_an_effect_and_each_counts_from_its_own_decision() -> None:
    desk = Desk()
    seen: list[AppendDelayed] = []
    really = desk.targets.apply

    def noted(effect: Effect, done: AppliedCallback) -> None:
        assert isinstance(effect, AppendDelayed)
        seen.append(effect)
        really(effect, done)

    desk.targets.apply = noted  # type: ignore[method-assign]
    first = desk.clock.wall_ms()
    desk.transact([(ARRIVALS_KEY, [b"one", b"two"]), (ARRIVALS_KEY, [b"three"])], turn=False)
    desk.clock.advance(5)
    desk.transact([(ARRIVALS_KEY, [b"four"])], turn=False)
    desk.turn()
    (effect,) = seen
    assert [batch.count for batch in effect.batches] == [2, 1, 1]
    assert effect.decided_ms == [first, first, first + 5000]
    assert desk.visible(ARRIVALS_KEY) == [b"one", b"two", b"three", b"four"]


def test_a_target_with_small_segments_gets_small_effects() -> None:
    """No block is cut for it: only what has several is divided."""
    desk = Desk()
    desk.targets.limit = 100_000
    answer = desk.transact([(ORDERS, [b"x" * 30_000] * 12), (BILLS, [b"y"])])
    assert answer.state == "committed"
    assert max(each.size_bytes for each in desk.targets.target(ORDERS).appends) <= 100_000
    assert desk.visible() == [b"x" * 30_000] * 12


def test_decisions_come_in_their_order_also_behind_a_target_that_was_stopped() -> None:
    desk = Desk()
    desk.transact([(ORDERS, [b"0"])])
    began = [desk.prepared(f"x{number}", [b"%d" % number]) for number in range(1, 5)]
    desk.targets.stop(ORDERS)
    answers = [desk.commit(each) for each in began]
    assert [answer.state for answer in answers] == ["applying"] * 4
    assert desk.visible() == [b"0"]
    desk.targets.resume(ORDERS)
    desk.handler.target_resumed(ORDERS)
    desk.turn()
    assert desk.visible() == [b"0", b"1", b"2", b"3", b"4"]
    assert desk.store.state_counts["applying"] == 0


def test_a_full_target_is_tried_again_by_itself_after_growing_pauses() -> None:
    desk = Desk()
    began = desk.prepared("x")
    desk.targets.target(ORDERS).full = True
    assert desk.commit(began).state == "applying"
    for _ in range(12):
        desk.advance(RETRY_SECONDS_MAX)
    tries = len(applies(desk, ORDERS))
    assert 12 <= tries <= 18
    desk.targets.target(ORDERS).full = False
    desk.advance(RETRY_SECONDS_MAX)
    assert desk.visible() == [b"m"]
    assert desk.handler.status()["waits_for"] == []


def test_the_first_pause_is_short() -> None:
    desk = Desk()
    began = desk.prepared("x")
    desk.targets.target(ORDERS).full = True
    desk.commit(began)
    desk.targets.target(ORDERS).full = False
    desk.advance(RETRY_SECONDS)
    assert desk.visible() == [b"m"]


def test_a_stop_is_told_once_and_its_end_too(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    began = desk.prepared("x")
    desk.targets.stop(ORDERS, "its disk failed")
    with caplog.at_level(logging.INFO, "tfmq.transaction"):
        desk.commit(began)
        desk.advance(100)
        desk.targets.resume(ORDERS)
        desk.advance(100)
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    assert "topic16-0" in caplog.records[0].getMessage()


def test_a_target_that_takes_nothing_holds_up_no_other() -> None:
    desk = Desk()
    stuck = desk.prepared("x")
    desk.targets.stop(ORDERS)
    desk.commit(stuck)
    assert desk.transact([(BILLS, [b"b"])]).state == "committed"
    assert desk.visible(BILLS) == [b"b"]


def test_what_was_written_in_spite_of_an_error_is_not_written_again_with_what_came_meanwhile() -> None:
    desk = Desk()
    really = desk.targets._write

    def answer_lost(effect: Effect, done: AppliedCallback) -> None:
        desk.targets._write = really  # type: ignore[method-assign]
        really(effect, lambda mark, error: done(None, StorageStopped(reason="its answer was lost")))

    desk.targets._write = answer_lost  # type: ignore[method-assign]
    for payload in (b"1", b"2"):
        assert desk.transact([(ORDERS, [payload])]).state == "applying"
    desk.advance(RETRY_SECONDS)
    assert desk.visible() == [b"1", b"2"]


def test_what_was_written_before_is_not_written_again_after_a_start() -> None:
    desk = Desk()
    for number in range(3):
        desk.transact([(ORDERS, [b"%d" % number])])
    again = desk.kill()
    assert again.recovered
    assert again.visible() == [b"0", b"1", b"2"]
    again.advance(1)
    assert not again.store.transactions, "they are settled, too"


def test_a_start_writes_what_was_lost_in_its_order_and_before_anything_new() -> None:
    desk = Desk()
    desk.targets.automatic = False
    for number in range(4):
        desk.transact([(ORDERS, [b"%d" % number])])
    desk.targets.target(ORDERS).forced = 2
    again = desk.power_cut()
    assert again.visible() == [b"0", b"1", b"2", b"3"]
    again.transact([(ORDERS, [b"new"])])
    assert again.visible()[-1] == b"new"


def test_a_partition_that_lost_what_was_not_forced_gets_it_again_when_it_is_back() -> None:
    """Also decisions that were answered as committed, and before those that wait."""
    desk = Desk()
    desk.targets.automatic = False
    for number in range(3):
        assert desk.transact([(ORDERS, [b"%d" % number]), (BILLS, [b"b%d" % number])]).state == "committed"
    desk.targets.force(ORDERS)
    desk.transact([(ORDERS, [b"3"])])
    began = desk.prepared("x", [b"4"])
    desk.targets.fail_force(ORDERS)
    assert desk.commit(began).state == "applying"
    desk.targets.resume(ORDERS, keep=2)
    desk.handler.target_resumed(ORDERS)
    desk.turn()
    assert desk.visible() == [b"0", b"1", b"2", b"3", b"4"]
    assert desk.visible(BILLS) == [b"b0", b"b1", b"b2"]
    desk.targets.force()
    desk.advance(1)
    assert not desk.store.transactions
    assert desk.targets.reserved == 0


def test_messages_for_a_topic_that_is_gone_are_dropped_counted_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    desk = Desk()
    began = desk.begin("x")
    desk.send(began, [b"1", b"2"], ORDERS)
    desk.send(began, [b"3"], BILLS)
    desk.prepare(began)
    desk.targets.delete(16)
    with caplog.at_level(logging.WARNING, "tfmq.transaction"):
        answer = desk.commit(began)
    assert (answer.state, answer.dropped) == ("committed", 2)
    assert desk.visible(BILLS) == [b"3"]
    assert "2 messages" in caplog.text
    assert desk.targets.reserved == 0


def test_a_topic_that_goes_while_its_messages_wait_lets_the_transaction_end() -> None:
    desk = Desk()
    began = desk.prepared("x", [b"1", b"2"])
    desk.targets.stop(ORDERS)
    assert desk.commit(began).state == "applying"
    desk.targets.delete(16)
    desk.handler.topic_deleted(16)
    desk.turn()
    assert desk.commit(began).dropped == 2
    assert desk.handler.status()["applying"] == 0


def test_a_topic_that_goes_just_when_its_messages_come_lets_the_transaction_end() -> None:
    desk = Desk()
    answer = desk.commit(desk.prepared("x", [b"1", b"2"]), turn=False)
    while not desk.targets.due:
        if not desk.handler.write():
            desk.forcer.start()
    desk.targets.delete(16)
    desk.turn()
    assert (answer.state, answer.dropped) == ("committed", 2)


def test_the_gone_topic_of_another_life_gets_nothing_and_the_new_one_neither() -> None:
    desk = Desk()
    began = desk.prepared("x")
    desk.targets.delete(16)
    fresh = make_log_id(18, 0)
    desk.commit(began)
    assert desk.visible(fresh) == []


def test_offsets_of_several_decisions_are_saved_together() -> None:
    desk = Desk()
    for offset in (10, 20):
        desk.transact([(ORDERS, [b"%d" % offset])], offsets=[Row(f"g{offset}", 1, offset)], turn=False)
    desk.turn()
    assert len(applies(desk, OFFSETS_KEY)) == 1
    assert (desk.targets.saved("g10"), desk.targets.saved("g20")) == (10, 20)
    desk.transact([(ORDERS, [b"more"])], offsets=[Row("g10", 1, 11)])
    assert (desk.targets.saved("g10"), desk.targets.saved("g20")) == (11, 20)


def test_a_decision_of_offsets_alone_is_one() -> None:
    desk = Desk()
    answer = desk.transact([], offsets=[Row("g", 1, 77)])
    assert (answer.state, desk.targets.saved("g"), desk.targets.locks) == ("committed", 77, {})
