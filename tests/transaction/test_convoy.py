"""A large part: read in a worker, in one piece where it may, and never so fast that others wait for its bytes."""

import tracemalloc
from pathlib import Path

import pytest

from journal.disk import RealDisk
from tests.transaction.desk import BILLS, ORDERS, Answer, Desk
from tests.transaction.targets import Targets
from tfmq.apply_target import AppendResult
from tfmq.transaction import applier
from tfmq.transaction.applier import CHUNKED_MAX, WINDOW_BYTES, InFlightWindow

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
    monkeypatch.setattr(applier, "WINDOW_BYTES", window)
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


def test_a_crash_between_slices_goes_on_behind_the_last_one() -> None:
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


def test_it_goes_on_behind_the_last_message_although_slices_are_cut_otherwise_now() -> None:
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


def test_what_comes_behind_a_large_one_waits_for_all_of_it() -> None:
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
    pace = InFlightWindow(Targets())
    begun: list[int] = []
    for number in range(CHUNKED_MAX + 2):
        pace.acquire_slot(lambda number=number: begun.append(number))  # type: ignore[misc]
    assert begun == list(range(CHUNKED_MAX))
    pace.release_slot()
    assert begun == list(range(CHUNKED_MAX + 1))
    for _ in range(CHUNKED_MAX + 1):
        pace.release_slot()
    pace.acquire_slot(lambda: begun.append(99))
    assert begun[-1] == 99


def test_a_slice_larger_than_the_window_goes_alone() -> None:
    targets = Targets()
    targets.automatic = False
    pace = InFlightWindow(targets)
    went: list[str] = []
    pace.acquire(10, lambda: went.append("small"))
    pace.acquire(2 * WINDOW_BYTES, lambda: went.append("large"))
    pace.acquire(10, lambda: went.append("behind"))
    assert went == ["small"]
    pace.release(10)
    assert went == ["small", "large"]
    pace.release_when_durable(AppendResult(ORDERS, 0, ()), 2 * WINDOW_BYTES)
    targets.force(ORDERS)
    assert went == ["small", "large", "behind"]
