"""From the decision to its targets: all of it, exactly once, told in time, and in small turns."""

from __future__ import annotations

import logging
import tracemalloc
from pathlib import Path

import pytest

from journal.disk import RealDisk
from journal.record.format import make_log_id
from tests.transaction.desk import BILLS, FOLDER, ORDERS, Answer, Desk
from tests.transaction.targets import Row, Targets
from tfmq import apply_queue
from tfmq.apply_queue import RETRY_SECONDS, RETRY_SECONDS_MAX, InFlightLimit
from tfmq.apply_target import ARRIVALS_KEY, OFFSETS_KEY, AppendDelayed, AppliedCallback, Effect
from tfmq.errors import StorageStopped
from tfmq.transaction.applier import (
    CHUNKED_MAX,
    LATE_SECONDS,
    TURN_BYTES,
)


def test_a_commit_is_answered_when_every_target_has_its_part() -> None:
    desk = Desk()
    began = desk.begin("x")
    desk.send(began, [b"o"], ORDERS)
    desk.send(began, [b"b"], BILLS)
    answer = desk.commit(began, one_phase=True)
    assert (answer.state, desk.visible(), desk.visible(BILLS)) == ("committed", [b"o"], [b"b"])


def test_one_target_that_takes_nothing_makes_the_answer_applying_at_once() -> None:
    desk = Desk()
    began = desk.begin("x")
    desk.send(began, [b"o"], ORDERS)
    desk.send(began, [b"b"], BILLS)
    desk.prepare(began)
    desk.targets.stop(BILLS)
    answer = desk.commit(began)
    assert answer.state == "applying"
    assert desk.visible() == [b"o"], "the other has its part"
    assert desk.state(began) == "applying"
    assert desk.handler.describe("x", 0)["waits_for"].keys() == {"topic17-0"}


def test_a_decision_that_comes_after_one_that_waits_is_answered_as_applying() -> None:
    desk = Desk()
    first, second = desk.prepared("x"), desk.prepared("y")
    desk.targets.stop(ORDERS)
    desk.commit(first)
    assert desk.commit(second).state == "applying"


def test_who_has_waited_for_ten_seconds_is_notified_that_it_is_being_applied() -> None:
    desk = Desk(queued=True)
    began = desk.begin("x")
    for number in range(3):
        desk.send(began, [b"%d" % number * 1_000_000])
    answer = desk.commit(began, one_phase=True)
    desk.step()
    desk.advance(LATE_SECONDS - 0.1)
    assert answer.code == "waiting", "a worker reads it, and is slow"
    desk.advance(0.2)
    assert answer.state == "applying"
    assert desk.commit(began).state == "applying"
    desk.work()
    assert desk.commit(began).state == "committed"


def test_many_small_decisions_are_brought_over_several_turns() -> None:
    """So that a pile of them does not keep the broker from everything else."""
    desk = Desk()
    count = 3 * TURN_BYTES // 500_000
    answers = [
        desk.transact([(ORDERS + number % 7, [b"x" * 500_000])], turn=False) for number in range(count)
    ]
    desk.turn()
    done = sum(answer.code == "ok" for answer in answers)
    assert 0 < done < count
    assert not desk.ready, "it waits for the next turn, and lets this one end"
    desk.tick()
    assert done < sum(answer.code == "ok" for answer in answers) < count
    desk.tick()
    desk.tick()
    assert {answer.state for answer in answers} == {"committed"}


def test_damage_of_the_journal_is_reported_and_blocks_what_is_after_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    desk = Desk()
    first, second = desk.prepared("x", [b"damaged" * 50]), desk.prepared("y", [b"behind"])
    path = f"{FOLDER}/0000000000000001.journal"
    desk.disk.damage(path, desk.disk.read_file(path).index(b"damageddamaged"), b"DAMAGED")
    with caplog.at_level(logging.ERROR, "tfmq.transaction"):
        refused = desk.commit(first)
        assert refused.code == "damaged" and "the transaction journal is damaged" in str(refused.failure)
        assert "0000000000000001.journal" in str(refused.failure) and "`tfmq log repair`" in str(
            refused.failure
        )
        assert desk.commit(second).state == "applying"
        desk.advance(10 * RETRY_SECONDS_MAX)
    assert desk.visible() == [], "nothing is brought that is not what was sent, and nothing before it"
    assert len(caplog.records) == 1
    assert "0000000000000001.journal" in caplog.text
    assert desk.transact([(BILLS, [b"b"])]).state == "committed", "other targets go on"
    assert desk.handler.status()["waits_for"] == ["topic16-0"]
    rows = desk.handler.list(None, 0, 10)[0]
    assert ["the transaction journal is damaged" in row["damage"] for row in rows] == [True, False]
    assert "the transaction journal is damaged" in desk.handler.describe("y", 0)["waits_for"]["topic16-0"]
    assert desk.commit(first).code == "damaged", "the same to who asks again"


def test_offsets_are_reported_only_where_they_are_on_the_disk() -> None:
    desk = Desk()
    answer = desk.transact([(ORDERS, [b"1"]), (BILLS, [b"2"]), (ORDERS, [b"3"])])
    assert answer.offsets == [-1, -1, -1]
    desk.targets.is_durable = lambda mark: mark.key == ORDERS  # type: ignore[method-assign]
    answer = desk.transact([(ORDERS, [b"1"]), (BILLS, [b"2"]), (ORDERS, [b"3"])])
    assert answer.offsets[1] == -1
    assert 0 < answer.offsets[0] < answer.offsets[2]


def test_it_is_idle_when_all_is_brought_or_waits_for_a_target() -> None:
    desk = Desk()
    applier = desk.handler._applier
    assert applier.idle
    began = desk.prepared("x")
    desk.targets.stop(ORDERS)
    desk.commit(began)
    assert applier.idle
    desk.handler.target_resumed(ORDERS)
    assert not applier.idle


def test_a_start_brings_what_was_decided_before_anything_is_asked() -> None:
    desk = Desk()
    began = desk.prepared("x", [b"1", b"2"])
    desk.targets.stop(ORDERS)
    desk.commit(began)
    again = desk.kill()
    assert again.recovered
    assert again.visible() == [b"1", b"2"]
    assert again.state(began) == "committed"


def test_a_start_does_not_wait_for_a_target_that_takes_nothing() -> None:
    desk = Desk()
    began = desk.prepared("x", [b"1"])
    desk.targets.stop(ORDERS)
    desk.commit(began)
    left = desk.targets.killed()
    left.stop(ORDERS)
    again = desk.again(desk.disk.crash(keep="everything"), left)
    assert again.recovered
    assert again.state(began) == "applying"
    left.resume(ORDERS)
    again.handler.target_resumed(ORDERS)
    again.turn()
    assert again.visible() == [b"1"]


def test_stopping_brings_what_is_small_and_forces_it() -> None:
    desk = Desk()
    desk.targets.automatic = False
    answer = desk.transact([(ORDERS, [b"1"])], turn=False)
    desk.handler.stop(lambda: None)
    desk.turn()
    assert answer.state == "committed"
    assert ("force", ORDERS) in desk.targets.asked


def test_stopping_breaks_off_what_is_large_and_the_next_start_goes_on() -> None:
    desk = Desk(queued=True)
    began = desk.begin("x")
    for number in range(8):
        desk.send(began, [b"%d" % number + b"x" * 1_000_000])
    answer = desk.commit(began, one_phase=True)
    while not desk.visible():
        desk.step()
    desk.stop()
    assert answer.state == "applying"
    assert 0 < len(desk.visible()) < 8
    again = desk.again(desk.disk, desk.targets.killed())
    assert [payload[:1] for payload in again.visible()] == [b"%d" % number for number in range(8)]


def test_a_target_that_stopped_before_its_force_is_reported_until_it_is_back() -> None:
    desk = Desk()
    desk.targets.automatic = False
    began = desk.begin("x")
    desk.send(began, [b"o"], ORDERS)
    desk.send(began, [b"b"], BILLS)
    assert desk.commit(began, one_phase=True).state == "committed"
    desk.advance(1)
    desk.targets.force(ORDERS)
    desk.targets.fail_force(BILLS)
    assert desk.commit(began).state == "applying"
    assert [row["state"] for row in desk.handler.list(None, 0, 10)[0]] == ["applying"]
    assert (desk.handler.status()["applying"], desk.handler.status()["waits_for"]) == (1, ["topic17-0"])
    assert desk.handler.describe("x", 0)["waits_for"].keys() == {"topic17-0"}
    desk.targets.resume(BILLS, keep=0)
    desk.targets.target(BILLS).full = True
    desk.handler.target_resumed(BILLS)
    desk.turn()
    assert desk.commit(began).state == "applying", "it lost its part, and cannot take it again yet"
    assert desk.handler.status()["applying"] == 1
    desk.targets.target(BILLS).full = False
    desk.advance(60)
    assert desk.visible(BILLS) == [b"b"]
    desk.targets.force()
    desk.advance(1)
    assert desk.handler.list(None, 0, 10)[0] == []
    assert desk.handler.status()["applying"] == 0


def test_a_topic_that_goes_after_its_force_failed_lets_go() -> None:
    desk = Desk()
    desk.targets.automatic = False
    desk.transact([(ORDERS, [b"o"])])
    desk.advance(1)
    desk.targets.fail_force(ORDERS)
    assert desk.handler.status()["applying"] == 1
    desk.targets.delete(16)
    desk.handler.topic_deleted(16)
    desk.advance(1)
    assert desk.handler.status()["applying"] == 0
    assert not desk.store.transactions


# A large part: read in a worker, in one piece where it may, and never so fast that others wait for its bytes.

MIB = 1 << 20


def large(desk: Desk, mib: int, key: int = ORDERS, xid: str = "big") -> Answer:
    """A prepared transaction of so many messages of one mebibyte."""
    began = desk.begin(xid)
    for number in range(mib):
        sent = desk.send(began, [b"%07d" % number + b"x" * (MIB - 100)], key)
        assert sent.code == "ok", sent.failure
    answer = desk.ask("prepare", began.xid, began.epoch, None, (), desk.session)
    desk.work()
    assert answer.code == "ok"
    return began


def on_disk(folder: Path, targets: Targets | None = None) -> Desk:
    """The simulated disk keeps everything in memory, and copies it."""
    return Desk(RealDisk(), targets=targets, folder=str(folder / "data" / "transactions"))


def numbers(desk: Desk, key: int = ORDERS) -> list[int]:
    return [int(payload[:7]) for payload in desk.visible(key)]


def test_it_comes_in_slices_that_name_how_far_it_is() -> None:
    desk = Desk()
    began = large(desk, 5)
    assert desk.commit(began).state == "committed"
    assert numbers(desk) == list(range(5))
    places = [append.place for append in desk.targets.target(ORDERS).appends]
    assert [low for _, low in places] == [1, 2, 3, 4, 5]
    assert len({high for high, _ in places}) == 1


def test_up_to_the_bound_its_partition_is_held_for_it_and_let_go_at_the_end() -> None:
    desk = Desk()
    desk.commit(large(desk, 4))
    asked = [each[0] for each in desk.targets.asked if each[0] != "force"]
    assert asked == ["hold", "apply", "apply", "apply", "apply", "unhold"]


def test_a_larger_one_lets_others_in_after_each_slice(tmp_path: Path) -> None:
    desk = on_disk(tmp_path)
    began = large(desk, 65)
    desk.commit(began)
    assert not [each for each in desk.targets.asked if each[0] == "hold"]
    assert numbers(desk) == list(range(65))


def test_others_are_served_between_two_slices() -> None:
    """Each slice waits for a worker; a transaction that comes meanwhile is written to another target at once."""
    desk = Desk(queued=True)
    began = large(desk, 6)
    answer = desk.commit(began, turn=True)
    desk.step()
    served = 0
    while answer.code == "waiting":
        other = desk.transact([(BILLS, [b"b%d" % served])])
        for _ in range(4):
            if other.code == "waiting":
                desk.step()
        assert other.state == "committed"
        served += 1
        if desk.jobs:
            desk.step()
    assert served >= 3
    assert numbers(desk) == list(range(6))


def test_no_more_than_the_window_is_written_and_not_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = 8 * MIB
    monkeypatch.setattr(apply_queue, "IN_FLIGHT_BYTES_MAX", window)
    desk = on_disk(tmp_path)
    began = large(desk, 30)
    desk.targets.automatic = False
    answer = desk.commit(began)
    target = desk.targets.target(ORDERS)
    most = 0
    while answer.code == "waiting":
        unforced = sum(each.size_bytes for each in target.appends[target.forced :])
        most = max(most, unforced)
        desk.targets.force(ORDERS)
        desk.turn()
    assert MIB < most <= window
    assert numbers(desk) == list(range(30))


def test_a_crash_between_slices_goes_on_after_the_last_one() -> None:
    desk = Desk()
    began = large(desk, 12)
    desk.targets.automatic = False
    assert desk.commit(began).code == "waiting"
    written = len(desk.visible())
    assert 0 < written < 12
    again = desk.kill()
    assert numbers(again) == list(range(12))
    places = [append.place for append in again.targets.target(ORDERS).appends]
    assert places == sorted(set(places))


def test_it_goes_on_after_the_last_message_although_slices_are_cut_otherwise_now() -> None:
    desk = Desk()
    desk.targets.automatic = False
    desk.commit(large(desk, 12))
    left = desk.targets.killed()
    assert len(left.payloads(ORDERS)) % 5
    left.limit = 5 * MIB
    again = desk.again(desk.disk.crash(keep="everything"), left)
    assert numbers(again) == list(range(12))


def test_a_large_one_that_is_there_is_over_with_the_next_start() -> None:
    desk = Desk()
    began = large(desk, 4)
    assert desk.commit(began).state == "committed"
    again = desk.kill()
    assert again.state(began) == "committed"
    assert numbers(again) == list(range(4))


def test_one_that_ended_makes_room_for_the_next() -> None:
    desk = Desk()
    for number in range(CHUNKED_MAX + 1):
        assert desk.commit(large(desk, 2, xid=f"big-{number}")).state == "committed"


def test_a_power_cut_that_took_slices_has_them_written_again() -> None:
    desk = Desk()
    began = large(desk, 12)
    desk.targets.automatic = False
    desk.commit(began)
    desk.targets.target(ORDERS).forced = 2
    again = desk.power_cut()
    assert numbers(again) == list(range(12))


def test_a_target_that_fails_in_the_middle_is_let_go_and_goes_on_where_it_is() -> None:
    desk = Desk(queued=True)
    began = large(desk, 6)
    answer = desk.commit(began)
    while len(desk.visible()) < 3:
        desk.step()
    desk.targets.target(ORDERS).full = True
    desk.work()
    assert answer.state == "applying"
    assert desk.targets.target(ORDERS).held == 0
    desk.targets.target(ORDERS).full = False
    desk.handler.target_resumed(ORDERS)
    desk.turn()
    desk.work()
    assert numbers(desk) == list(range(6))
    assert desk.targets.target(ORDERS).held == 0


def test_a_topic_that_goes_in_the_middle_ends_it() -> None:
    desk = Desk(queued=True)
    began = large(desk, 6)
    answer = desk.commit(began)
    while len(desk.visible()) < 2:
        desk.step()
    desk.targets.delete(16)
    desk.handler.topic_deleted(16)
    desk.work()
    assert (answer.state, answer.dropped) == ("committed", 6)


def test_what_comes_after_a_large_one_waits_for_all_of_it() -> None:
    desk = Desk(queued=True)
    desk.commit(large(desk, 4))
    desk.step()
    desk.transact([(ORDERS, [b"0000099"])])
    desk.work()
    desk.advance(1)
    desk.work()
    assert numbers(desk) == [0, 1, 2, 3, 99]


def test_a_large_transaction_costs_little_memory(tmp_path: Path) -> None:
    """Reading it takes a slice or two, whatever its size."""
    desk = on_disk(tmp_path, Forgetful())
    began = large(desk, 60)
    tracemalloc.start()
    try:
        assert desk.commit(began).state == "committed"
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()


class Forgetful(Targets):
    """Keeps the places only."""

    def _append(self, target, effect, place):  # type: ignore[no-untyped-def]
        offsets = super()._append(target, effect, place)
        target.appends[-1] = target.appends[-1]._replace(records=[])
        return offsets


def test_many_large_ones_take_turns() -> None:
    pace = InFlightLimit(CHUNKED_MAX)
    begun: list[int] = []
    for number in range(CHUNKED_MAX + 2):
        pace.acquire(1, lambda number=number: begun.append(number))  # type: ignore[misc]
    assert begun == list(range(CHUNKED_MAX))
    pace.release(1)
    assert begun == list(range(CHUNKED_MAX + 1))
    for _ in range(CHUNKED_MAX + 1):
        pace.release(1)
    pace.acquire(1, lambda: begun.append(99))
    assert begun[-1] == 99


# One target: everything in the order of the decisions, one effect at a time, once.


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


def test_decisions_come_in_their_order_also_after_a_target_that_was_stopped() -> None:
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


def test_a_stop_is_reported_once_and_its_end_too(caplog: pytest.LogCaptureFixture) -> None:
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


def test_messages_for_a_topic_that_is_gone_are_dropped_counted_and_reported(
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
