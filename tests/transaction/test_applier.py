"""From the decision to its targets: all of it, exactly once, reported in time, and in small turns."""

from __future__ import annotations

import logging
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest

from journal.disk import RealDisk
from journal.record.format import make_log_id
from tests.transaction.rig import BILLS, FOLDER, ORDERS, Answer, Rig
from tests.transaction.targets import Row, Targets
from tfmq import apply_queue
from tfmq.apply_queue import RETRY_SECONDS, RETRY_SECONDS_MAX, InFlightLimit
from tfmq.apply_target import ARRIVALS_KEY, OFFSETS_KEY, AppendDelayed, AppliedCallback, Effect
from tfmq.errors import StorageStopped
from tfmq.transaction import applier
from tfmq.transaction.applier import CHUNKED_MAX, TURN_BYTES
from tfmq.transaction.apply_progress import LATE_SECONDS
from tfmq.transaction.model import Decision


def test_a_commit_is_answered_when_every_target_has_its_part() -> None:
    rig = Rig()
    began = rig.begin("x")
    rig.send(began, [b"o"], ORDERS)
    rig.send(began, [b"b"], BILLS)
    answer = rig.commit(began, one_phase=True)
    assert (answer.state, rig.visible(), rig.visible(BILLS)) == ("committed", [b"o"], [b"b"])


def test_one_target_that_takes_nothing_makes_the_answer_applying_at_once() -> None:
    rig = Rig()
    began = rig.begin("x")
    rig.send(began, [b"o"], ORDERS)
    rig.send(began, [b"b"], BILLS)
    rig.prepare(began)
    rig.targets.stop(BILLS)
    answer = rig.commit(began)
    assert answer.state == "applying"
    assert rig.visible() == [b"o"], "the other has its part"
    assert rig.state(began) == "applying"
    assert rig.handler.describe("x", 0)["waits_for"].keys() == {"topic17-0"}


def test_a_decision_that_comes_after_one_that_waits_is_answered_as_applying() -> None:
    rig = Rig()
    first, second = rig.prepared("x"), rig.prepared("y")
    rig.targets.stop(ORDERS)
    rig.commit(first)
    assert rig.commit(second).state == "applying"


def test_who_has_waited_for_ten_seconds_is_notified_that_it_is_being_applied() -> None:
    rig = Rig(queued=True)
    began = rig.begin("x")
    for number in range(3):
        rig.send(began, [b"%d" % number * 1_000_000])
    answer = rig.commit(began, one_phase=True)
    rig.step()
    rig.advance(LATE_SECONDS - 0.1)
    assert answer.code == "waiting", "a worker reads it, and is slow"
    rig.advance(0.2)
    assert answer.state == "applying"
    assert rig.commit(began).state == "applying"
    rig.work()
    assert rig.commit(began).state == "committed"


def test_many_small_decisions_are_brought_over_several_turns() -> None:
    """So that a pile of them does not keep the broker from everything else."""
    rig = Rig()
    count = 3 * TURN_BYTES // 500_000
    answers = [rig.transact([(ORDERS + number % 7, [b"x" * 500_000])], turn=False) for number in range(count)]
    rig.turn()
    done = sum(answer.code == "ok" for answer in answers)
    assert 0 < done < count
    assert not rig.ready, "it waits for the next turn, and lets this one end"
    rig.tick()
    assert done < sum(answer.code == "ok" for answer in answers) < count
    rig.tick()
    rig.tick()
    assert {answer.state for answer in answers} == {"committed"}


def test_damage_of_the_journal_is_reported_and_blocks_what_is_after_it(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    first, second = rig.prepared("x", [b"damaged" * 50]), rig.prepared("y", [b"behind"])
    path = f"{FOLDER}/0000000000000001.journal"
    rig.disk.damage(path, rig.disk.read_file(path).index(b"damageddamaged"), b"DAMAGED")
    with caplog.at_level(logging.ERROR, "tfmq.transaction"):
        refused = rig.commit(first)
        assert refused.code == "damaged" and "the transaction journal is damaged" in str(refused.failure)
        assert "0000000000000001.journal" in str(refused.failure) and "`tfmq log repair`" in str(refused.failure)
        assert rig.commit(second).state == "applying"
        rig.advance(10 * RETRY_SECONDS_MAX)
    assert rig.visible() == [], "nothing is brought that is not what was sent, and nothing before it"
    assert len(caplog.records) == 1
    assert "0000000000000001.journal" in caplog.text
    assert rig.transact([(BILLS, [b"b"])]).state == "committed", "other targets go on"
    assert rig.handler.status()["waits_for"] == ["topic16-0"]
    rows = rig.handler.list(None, 0, 10)[0]
    assert ["the transaction journal is damaged" in row["damage"] for row in rows] == [True, False]
    assert "the transaction journal is damaged" in rig.handler.describe("y", 0)["waits_for"]["topic16-0"]
    assert rig.commit(first).code == "damaged", "the same to who asks again"


def test_offsets_are_reported_only_where_they_are_on_the_disk() -> None:
    rig = Rig()
    answer = rig.transact([(ORDERS, [b"1"]), (BILLS, [b"2"]), (ORDERS, [b"3"])])
    assert answer.offsets == [-1, -1, -1]
    rig.targets.is_durable = lambda mark: mark.key == ORDERS  # type: ignore[method-assign]
    answer = rig.transact([(ORDERS, [b"1"]), (BILLS, [b"2"]), (ORDERS, [b"3"])])
    assert answer.offsets[1] == -1
    assert 0 < answer.offsets[0] < answer.offsets[2]


def test_it_is_idle_when_all_is_brought_or_waits_for_a_target() -> None:
    rig = Rig()
    applier = rig.handler._applier
    assert applier.idle
    began = rig.prepared("x")
    rig.targets.stop(ORDERS)
    rig.commit(began)
    assert applier.idle
    rig.handler.target_resumed(ORDERS)
    assert not applier.idle


def test_a_start_brings_what_was_decided_before_anything_is_asked() -> None:
    rig = Rig()
    began = rig.prepared("x", [b"1", b"2"])
    rig.targets.stop(ORDERS)
    rig.commit(began)
    again = rig.kill()
    assert again.recovered
    assert again.visible() == [b"1", b"2"]
    assert again.state(began) == "committed"


def test_a_start_does_not_wait_for_a_target_that_takes_nothing() -> None:
    rig = Rig()
    began = rig.prepared("x", [b"1"])
    rig.targets.stop(ORDERS)
    rig.commit(began)
    left = rig.targets.killed()
    left.stop(ORDERS)
    again = rig.again(rig.disk.crash(keep="everything"), left)
    assert again.recovered
    assert again.state(began) == "applying"
    left.resume(ORDERS)
    again.handler.target_resumed(ORDERS)
    again.turn()
    assert again.visible() == [b"1"]


def test_stopping_brings_what_is_small_and_fsyncs_it() -> None:
    rig = Rig()
    rig.targets.automatic = False
    answer = rig.transact([(ORDERS, [b"1"])], turn=False)
    rig.handler.stop(lambda: None)
    rig.turn()
    assert answer.state == "committed"
    assert ("force", ORDERS) in rig.targets.asked


def test_stopping_breaks_off_what_is_large_and_the_next_start_goes_on() -> None:
    rig = Rig(queued=True)
    began = rig.begin("x")
    for number in range(8):
        rig.send(began, [b"%d" % number + b"x" * 1_000_000])
    answer = rig.commit(began, one_phase=True)
    while not rig.visible():
        rig.step()
    rig.stop()
    assert answer.state == "applying"
    assert 0 < len(rig.visible()) < 8
    again = rig.again(rig.disk, rig.targets.killed())
    assert [payload[:1] for payload in again.visible()] == [b"%d" % number for number in range(8)]


def test_a_target_that_stopped_before_its_fsync_is_reported_until_it_is_back() -> None:
    rig = Rig()
    rig.targets.automatic = False
    began = rig.begin("x")
    rig.send(began, [b"o"], ORDERS)
    rig.send(began, [b"b"], BILLS)
    assert rig.commit(began, one_phase=True).state == "committed"
    rig.advance(1)
    rig.targets.force(ORDERS)
    rig.targets.fail_force(BILLS)
    assert rig.commit(began).state == "applying"
    assert [row["state"] for row in rig.handler.list(None, 0, 10)[0]] == ["applying"]
    assert (rig.handler.status()["applying"], rig.handler.status()["waits_for"]) == (1, ["topic17-0"])
    assert rig.handler.describe("x", 0)["waits_for"].keys() == {"topic17-0"}
    rig.targets.resume(BILLS, keep=0)
    rig.targets.target(BILLS).full = True
    rig.handler.target_resumed(BILLS)
    rig.turn()
    assert rig.commit(began).state == "applying", "it lost its part, and cannot take it again yet"
    assert rig.handler.status()["applying"] == 1
    rig.targets.target(BILLS).full = False
    rig.advance(60)
    assert rig.visible(BILLS) == [b"b"]
    rig.targets.force()
    rig.advance(1)
    assert rig.handler.list(None, 0, 10)[0] == []
    assert rig.handler.status()["applying"] == 0


def test_a_topic_that_goes_after_its_fsync_failed_lets_go() -> None:
    rig = Rig()
    rig.targets.automatic = False
    rig.transact([(ORDERS, [b"o"])])
    rig.advance(1)
    rig.targets.fail_force(ORDERS)
    assert rig.handler.status()["applying"] == 1
    rig.targets.delete(16)
    rig.handler.topic_deleted(16)
    rig.advance(1)
    assert rig.handler.status()["applying"] == 0
    assert not rig.store.transactions


# A large part: read in a worker, in one piece where it may, and never so fast that others wait for its bytes.

MIB = 1 << 20


def large(rig: Rig, mib: int, key: int = ORDERS, xid: str = "big") -> Answer:
    """A prepared transaction of so many messages of one mebibyte."""
    began = rig.begin(xid)
    for number in range(mib):
        sent = rig.send(began, [b"%07d" % number + b"x" * (MIB - 100)], key)
        assert sent.code == "ok", sent.failure
    answer = rig.ask("prepare", began.xid, began.epoch, None, (), rig.session)
    rig.work()
    assert answer.code == "ok"
    return began


def on_disk(folder: Path, targets: Targets | None = None) -> Rig:
    """The simulated disk keeps everything in memory, and copies it."""
    return Rig(RealDisk(), targets=targets, folder=str(folder / "data" / "transactions"))


def numbers(rig: Rig, key: int = ORDERS) -> list[int]:
    return [int(payload[:7]) for payload in rig.visible(key)]


def test_it_comes_in_slices_that_name_how_far_it_is() -> None:
    rig = Rig()
    began = large(rig, 5)
    assert rig.commit(began).state == "committed"
    assert numbers(rig) == list(range(5))
    places = [append.place for append in rig.targets.target(ORDERS).appends]
    assert [low for _, low in places] == [1, 2, 3, 4, 5]
    assert len({high for high, _ in places}) == 1


def test_up_to_the_bound_its_partition_is_held_for_it_and_let_go_at_the_end() -> None:
    rig = Rig()
    rig.commit(large(rig, 4))
    asked = [each[0] for each in rig.targets.asked if each[0] != "force"]
    assert asked == ["hold", "apply", "apply", "apply", "apply", "unhold"]


def test_a_larger_one_lets_others_in_after_each_slice(tmp_path: Path) -> None:
    rig = on_disk(tmp_path)
    began = large(rig, 65)
    rig.commit(began)
    assert not [each for each in rig.targets.asked if each[0] == "hold"]
    assert numbers(rig) == list(range(65))


def test_others_are_served_between_two_slices() -> None:
    """Each slice waits for a worker; a transaction that comes meanwhile is written to another target at once."""
    rig = Rig(queued=True)
    began = large(rig, 6)
    answer = rig.commit(began, turn=True)
    rig.step()
    served = 0
    while answer.code == "waiting":
        other = rig.transact([(BILLS, [b"b%d" % served])])
        for _ in range(4):
            if other.code == "waiting":
                rig.step()
        assert other.state == "committed"
        served += 1
        if rig.jobs:
            rig.step()
    assert served >= 3
    assert numbers(rig) == list(range(6))


def test_no_more_than_the_limit_is_written_and_not_fsynced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    window = 8 * MIB
    monkeypatch.setattr(apply_queue, "IN_FLIGHT_BYTES_MAX", window)
    rig = on_disk(tmp_path)
    began = large(rig, 30)
    rig.targets.automatic = False
    answer = rig.commit(began)
    target = rig.targets.target(ORDERS)
    most = 0
    while answer.code == "waiting":
        unforced = sum(each.size_bytes for each in target.appends[target.forced :])
        most = max(most, unforced)
        rig.targets.force(ORDERS)
        rig.turn()
    assert MIB < most <= window
    assert numbers(rig) == list(range(30))


def test_a_crash_between_slices_goes_on_after_the_last_one() -> None:
    rig = Rig()
    began = large(rig, 12)
    rig.targets.automatic = False
    assert rig.commit(began).code == "waiting"
    written = len(rig.visible())
    assert 0 < written < 12
    again = rig.kill()
    assert numbers(again) == list(range(12))
    places = [append.place for append in again.targets.target(ORDERS).appends]
    assert places == sorted(set(places))


def test_it_goes_on_after_the_last_message_although_slices_are_cut_otherwise_now() -> None:
    rig = Rig()
    rig.targets.automatic = False
    rig.commit(large(rig, 12))
    left = rig.targets.killed()
    assert len(left.payloads(ORDERS)) % 5
    left.limit = 5 * MIB
    again = rig.again(rig.disk.crash(keep="everything"), left)
    assert numbers(again) == list(range(12))


def test_a_large_one_that_is_there_is_over_with_the_next_start() -> None:
    rig = Rig()
    began = large(rig, 4)
    assert rig.commit(began).state == "committed"
    again = rig.kill()
    assert again.state(began) == "committed"
    assert numbers(again) == list(range(4))


def test_one_that_ended_makes_room_for_the_next() -> None:
    rig = Rig()
    for number in range(CHUNKED_MAX + 1):
        assert rig.commit(large(rig, 2, xid=f"big-{number}")).state == "committed"


def test_a_power_cut_that_took_slices_has_them_written_again() -> None:
    rig = Rig()
    began = large(rig, 12)
    rig.targets.automatic = False
    rig.commit(began)
    rig.targets.target(ORDERS).forced = 2
    again = rig.power_cut()
    assert numbers(again) == list(range(12))


def test_a_target_that_fails_in_the_middle_is_let_go_and_goes_on_where_it_is() -> None:
    rig = Rig(queued=True)
    began = large(rig, 6)
    answer = rig.commit(began)
    while len(rig.visible()) < 3:
        rig.step()
    rig.targets.target(ORDERS).full = True
    rig.work()
    assert answer.state == "applying"
    assert rig.targets.target(ORDERS).held == 0
    rig.targets.target(ORDERS).full = False
    rig.handler.target_resumed(ORDERS)
    rig.turn()
    rig.work()
    assert numbers(rig) == list(range(6))
    assert rig.targets.target(ORDERS).held == 0


def test_a_topic_that_goes_in_the_middle_ends_it() -> None:
    rig = Rig(queued=True)
    began = large(rig, 6)
    answer = rig.commit(began)
    while len(rig.visible()) < 2:
        rig.step()
    rig.targets.delete(16)
    rig.handler.topic_deleted(16)
    rig.work()
    assert (answer.state, answer.dropped) == ("committed", 6)


def test_what_comes_after_a_large_one_waits_for_all_of_it() -> None:
    rig = Rig(queued=True)
    rig.commit(large(rig, 4))
    rig.step()
    rig.transact([(ORDERS, [b"0000099"])])
    rig.work()
    rig.advance(1)
    rig.work()
    assert numbers(rig) == [0, 1, 2, 3, 99]


def test_a_large_transaction_costs_little_memory(tmp_path: Path) -> None:
    """Reading it takes a slice or two, whatever its size."""
    rig = on_disk(tmp_path, Forgetful())
    began = large(rig, 60)
    tracemalloc.start()
    try:
        assert rig.commit(began).state == "committed"
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


def applies(rig: Rig, key: int) -> list[tuple[int, int]]:
    return [asked[2:] for asked in rig.targets.asked if asked[:2] == ("apply", key)]


def test_neighbours_of_one_turn_share_one_effect_under_the_last_place() -> None:
    rig = Rig()
    for number in range(5):
        rig.transact([(ORDERS, [b"%d" % number])], turn=False)
    rig.turn()
    assert rig.visible() == [b"0", b"1", b"2", b"3", b"4"]
    assert len(applies(rig, ORDERS)) == len(rig.targets.target(ORDERS).appends) == 1
    assert rig.kill().visible() == rig.visible(), "all of them are known to be there"


def test_neighbours_that_are_too_much_for_one_effect_go_in_several() -> None:
    rig = Rig()
    for number in range(6):
        rig.transact([(ORDERS, [b"%d" % number * 400_000])], turn=False)
    rig.turn()
    assert [each.size_bytes > 1 << 20 for each in rig.targets.target(ORDERS).appends] == [False] * 3
    assert [payload[:1] for payload in rig.visible()] == [b"0", b"1", b"2", b"3", b"4", b"5"]


def test_delayed_batches_share_an_effect_and_each_counts_from_its_own_decision() -> None:
    rig = Rig()
    seen: list[AppendDelayed] = []
    really = rig.targets.apply

    def noted(effect: Effect, done: AppliedCallback) -> None:
        assert isinstance(effect, AppendDelayed)
        seen.append(effect)
        really(effect, done)

    rig.targets.apply = noted  # type: ignore[method-assign]
    first = rig.clock.wall_ms()
    rig.transact([(ARRIVALS_KEY, [b"one", b"two"]), (ARRIVALS_KEY, [b"three"])], turn=False)
    rig.clock.advance(5)
    rig.transact([(ARRIVALS_KEY, [b"four"])], turn=False)
    rig.turn()
    (effect,) = seen
    assert [batch.count for batch in effect.batches] == [2, 1, 1]
    assert effect.decided_ms == [first, first, first + 5000]
    assert rig.visible(ARRIVALS_KEY) == [b"one", b"two", b"three", b"four"]


def test_a_target_with_small_segments_gets_small_effects() -> None:
    """No block is cut for it: only what has several is divided."""
    rig = Rig()
    rig.targets.limit = 100_000
    answer = rig.transact([(ORDERS, [b"x" * 30_000] * 12), (BILLS, [b"y"])])
    assert answer.state == "committed"
    assert max(each.size_bytes for each in rig.targets.target(ORDERS).appends) <= 100_000
    assert rig.visible() == [b"x" * 30_000] * 12


def test_decisions_come_in_their_order_also_after_a_target_that_was_stopped() -> None:
    rig = Rig()
    rig.transact([(ORDERS, [b"0"])])
    began = [rig.prepared(f"x{number}", [b"%d" % number]) for number in range(1, 5)]
    rig.targets.stop(ORDERS)
    answers = [rig.commit(each) for each in began]
    assert [answer.state for answer in answers] == ["applying"] * 4
    assert rig.visible() == [b"0"]
    rig.targets.resume(ORDERS)
    rig.handler.target_resumed(ORDERS)
    rig.turn()
    assert rig.visible() == [b"0", b"1", b"2", b"3", b"4"]
    assert rig.store.state_counts["applying"] == 0


def test_a_full_target_is_tried_again_by_itself_after_growing_pauses() -> None:
    rig = Rig()
    began = rig.prepared("x")
    rig.targets.target(ORDERS).full = True
    assert rig.commit(began).state == "applying"
    for _ in range(12):
        rig.advance(RETRY_SECONDS_MAX)
    tries = len(applies(rig, ORDERS))
    assert 12 <= tries <= 18
    rig.targets.target(ORDERS).full = False
    rig.advance(RETRY_SECONDS_MAX)
    assert rig.visible() == [b"m"]
    assert rig.handler.status()["waits_for"] == []


def test_the_first_pause_is_short() -> None:
    rig = Rig()
    began = rig.prepared("x")
    rig.targets.target(ORDERS).full = True
    rig.commit(began)
    rig.targets.target(ORDERS).full = False
    rig.advance(RETRY_SECONDS)
    assert rig.visible() == [b"m"]


@pytest.mark.parametrize("inline_max", [applier.COUNTED_INLINE_MAX, 0], ids=["inline", "in a worker"])
def test_a_decision_whose_targets_cannot_be_computed_is_tried_again_and_holds_up_those_behind_it_in_words(
    inline_max: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(applier, "COUNTED_INLINE_MAX", inline_max)
    rig = Rig()
    tries: list[float] = []

    def fails(_: Decision) -> None:
        tries.append(rig.clock.monotonic())
        raise MemoryError

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR, "tfmq.transaction"):
        patched.setattr(Decision, "compute_targets", fails)
        assert rig.transact([(ORDERS, [b"1"])]).state == "applying"
        assert rig.transact([(ORDERS, [b"2"])]).state == "applying", "it may not overtake the first one"
        for _ in range(5):
            rig.advance(RETRY_SECONDS_MAX)
        assert "MemoryError" in caplog.text
    assert [after - before for before, after in pairwise(tries)][:2] == [RETRY_SECONDS, 2 * RETRY_SECONDS]
    assert rig.visible() == [] and len(tries) < 12
    rig.advance(RETRY_SECONDS_MAX)
    assert rig.visible() == [b"1", b"2"]
    assert rig.transact([(ORDERS, [b"3"])]).state == "committed"
    assert rig.store.state_counts["applying"] == 0


def test_an_unexpected_error_of_one_queue_loses_nothing_and_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    answers = [rig.transact([(ORDERS, [b"o"])], turn=False), rig.transact([(BILLS, [b"b"])], turn=False)]

    def fails(*_: object) -> None:
        patched.undo()
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(applier.TargetQueue, "make_effect", fails)
        with pytest.raises(MemoryError):
            rig.turn()
    rig.advance(0)
    assert (rig.visible(), rig.visible(BILLS)) == ([], [b"b"])
    assert [answer.state for answer in answers] == ["applying", "committed"]
    rig.advance(RETRY_SECONDS)
    assert rig.visible() == [b"o"]
    assert rig.transact([(ORDERS, [b"p"])]).state == "committed"
    assert rig.store.state_counts["applying"] == 0


def test_a_stop_does_not_wait_for_targets_that_cannot_be_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()

    def fails(_: Decision) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(Decision, "compute_targets", fails)
        rig.transact([(ORDERS, [b"1"])])
        rig.stop()
    rig.start()
    assert rig.visible() == [b"1"]


def test_a_stop_is_reported_once_and_its_end_too(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    began = rig.prepared("x")
    rig.targets.stop(ORDERS, "its disk failed")
    with caplog.at_level(logging.INFO, "tfmq.transaction"):
        rig.commit(began)
        rig.advance(100)
        rig.targets.resume(ORDERS)
        rig.advance(100)
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    assert "topic16-0" in caplog.records[0].getMessage()


def test_a_target_that_takes_nothing_holds_up_no_other() -> None:
    rig = Rig()
    stuck = rig.prepared("x")
    rig.targets.stop(ORDERS)
    rig.commit(stuck)
    assert rig.transact([(BILLS, [b"b"])]).state == "committed"
    assert rig.visible(BILLS) == [b"b"]


def test_what_was_written_in_spite_of_an_error_is_not_written_again_with_what_came_meanwhile() -> None:
    rig = Rig()
    really = rig.targets._write

    def answer_lost(effect: Effect, done: AppliedCallback) -> None:
        rig.targets._write = really  # type: ignore[method-assign]
        really(effect, lambda mark, error: done(None, StorageStopped(reason="its answer was lost")))

    rig.targets._write = answer_lost  # type: ignore[method-assign]
    for payload in (b"1", b"2"):
        assert rig.transact([(ORDERS, [payload])]).state == "applying"
    rig.advance(RETRY_SECONDS)
    assert rig.visible() == [b"1", b"2"]


def test_what_was_written_before_is_not_written_again_after_a_start() -> None:
    rig = Rig()
    for number in range(3):
        rig.transact([(ORDERS, [b"%d" % number])])
    again = rig.kill()
    assert again.recovered
    assert again.visible() == [b"0", b"1", b"2"]
    again.advance(1)
    assert not again.store.transactions, "they are settled, too"


def test_a_start_writes_what_was_lost_in_its_order_and_before_anything_new() -> None:
    rig = Rig()
    rig.targets.automatic = False
    for number in range(4):
        rig.transact([(ORDERS, [b"%d" % number])])
    rig.targets.target(ORDERS).forced = 2
    again = rig.power_cut()
    assert again.visible() == [b"0", b"1", b"2", b"3"]
    again.transact([(ORDERS, [b"new"])])
    assert again.visible()[-1] == b"new"


def test_a_partition_that_lost_what_was_not_fsynced_gets_it_again_when_it_is_back() -> None:
    """Also decisions that were answered as committed, and before those that wait."""
    rig = Rig()
    rig.targets.automatic = False
    for number in range(3):
        assert rig.transact([(ORDERS, [b"%d" % number]), (BILLS, [b"b%d" % number])]).state == "committed"
    rig.targets.force(ORDERS)
    rig.transact([(ORDERS, [b"3"])])
    began = rig.prepared("x", [b"4"])
    rig.targets.fail_force(ORDERS)
    assert rig.commit(began).state == "applying"
    rig.targets.resume(ORDERS, keep=2)
    rig.handler.target_resumed(ORDERS)
    rig.turn()
    assert rig.visible() == [b"0", b"1", b"2", b"3", b"4"]
    assert rig.visible(BILLS) == [b"b0", b"b1", b"b2"]
    rig.targets.force()
    rig.advance(1)
    assert not rig.store.transactions
    assert rig.targets.reserved == 0


def test_messages_for_a_topic_that_is_gone_are_dropped_counted_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    began = rig.begin("x")
    rig.send(began, [b"1", b"2"], ORDERS)
    rig.send(began, [b"3"], BILLS)
    rig.prepare(began)
    rig.targets.delete(16)
    with caplog.at_level(logging.WARNING, "tfmq.transaction"):
        answer = rig.commit(began)
    assert (answer.state, answer.dropped) == ("committed", 2)
    assert rig.visible(BILLS) == [b"3"]
    assert "2 messages" in caplog.text
    assert rig.targets.reserved == 0


def test_a_topic_that_goes_while_its_messages_wait_lets_the_transaction_end() -> None:
    rig = Rig()
    began = rig.prepared("x", [b"1", b"2"])
    rig.targets.stop(ORDERS)
    assert rig.commit(began).state == "applying"
    rig.targets.delete(16)
    rig.handler.topic_deleted(16)
    rig.turn()
    assert rig.commit(began).dropped == 2
    assert rig.handler.status()["applying"] == 0


def test_a_topic_that_goes_just_when_its_messages_come_lets_the_transaction_end() -> None:
    rig = Rig()
    answer = rig.commit(rig.prepared("x", [b"1", b"2"]), turn=False)
    while not rig.targets.due:
        if not rig.handler.write():
            rig.forcer.start()
    rig.targets.delete(16)
    rig.turn()
    assert (answer.state, answer.dropped) == ("committed", 2)


def test_the_gone_topic_of_another_life_gets_nothing_and_the_new_one_neither() -> None:
    rig = Rig()
    began = rig.prepared("x")
    rig.targets.delete(16)
    fresh = make_log_id(18, 0)
    rig.commit(began)
    assert rig.visible(fresh) == []


def test_offsets_of_several_decisions_are_saved_together() -> None:
    rig = Rig()
    for offset in (10, 20):
        rig.transact([(ORDERS, [b"%d" % offset])], offsets=[Row(f"g{offset}", 1, offset)], turn=False)
    rig.turn()
    assert len(applies(rig, OFFSETS_KEY)) == 1
    assert (rig.targets.saved("g10"), rig.targets.saved("g20")) == (10, 20)
    rig.transact([(ORDERS, [b"more"])], offsets=[Row("g10", 1, 11)])
    assert (rig.targets.saved("g10"), rig.targets.saved("g20")) == (11, 20)


def test_a_decision_of_offsets_alone_is_one() -> None:
    rig = Rig()
    answer = rig.transact([], offsets=[Row("g", 1, 77)])
    assert (answer.state, rig.targets.saved("g"), rig.targets.locks) == ("committed", 77, {})
