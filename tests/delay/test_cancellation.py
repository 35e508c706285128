"""Cancel and reschedule: exactly one outcome, told when it is sure, the same when it is asked again."""

from __future__ import annotations

import pytest

from journal.errors import Full
from tests.delay.desk import BILLS, ORDERS, Desk, Handle
from tfmq.delay.arrivals.state import RescheduledMessages
from tfmq.delay.cancellation import FIRING
from tfmq.delay.requests import Turn
from tfmq.errors import Busy, DiskFull, StorageStopped


@pytest.mark.parametrize("delay", [100, 30_000, 10_000_000])
def test_a_cancelled_message_never_fires(delay: int) -> None:
    desk = Desk()
    a, b = desk.send([b"a", b"b"], delay)
    assert desk.cancel(a).known == "cancelled"
    desk.until(b.due + 20)
    assert desk.visible() == [b"b"]
    assert desk.cancel(a).known == "cancelled"
    assert desk.cancel(b).known == "delivered"


def test_cancelled_is_reported_only_when_it_is_on_the_disk() -> None:
    desk = Desk()
    (a,) = desk.send([b"a"], 1000)
    desk.landing.automatic = False
    answer = desk.cancel(a)
    assert not answer.calls
    desk.advance(2)
    assert desk.visible() == [], "while it is not sure, it does not fire"
    desk.landing.force()
    desk.turn()
    assert answer.known == "cancelled"
    desk.advance(2)
    assert desk.visible() == []


def test_delivered_is_reported_only_when_it_is_on_the_disk() -> None:
    desk = Desk()
    (a,) = desk.send([b"a"], 100)
    desk.targets.automatic = False
    desk.advance(0.2)
    assert desk.visible() == [b"a"]
    answer = desk.cancel(a)
    assert not answer.calls
    desk.targets.force()
    assert answer.known == "delivered"


def test_a_firing_that_is_refused_lets_the_cancel_through() -> None:
    desk = Desk()
    (a,) = desk.send([b"a"], 100)
    desk.targets.target(ORDERS).full = True
    desk.advance(0.2)
    assert desk.cancel(a).known == "cancelled"
    desk.targets.target(ORDERS).full = False
    desk.advance(60)
    assert desk.visible() == []


def test_what_a_stopped_target_may_have_is_unknown_until_it_is_back() -> None:
    desk = Desk()
    (a,) = desk.send([b"a"], 100)
    desk.targets.automatic = False
    desk.advance(0.2)
    desk.targets.fail_force(ORDERS)
    desk.turn()
    with pytest.raises(StorageStopped):
        desk.cancel(a).known  # noqa: B018
    desk.targets.automatic = True
    desk.targets.resume(ORDERS, keep=0)
    desk.queue.target_resumed(ORDERS)
    assert desk.cancel(a).known in ("cancelled", "delivered")


@pytest.mark.parametrize("steps", range(12))
def test_a_cancel_that_races_the_firing_has_one_of_two_outcomes(steps: int) -> None:
    """At every point between the alarm and the force."""
    desk = Desk(queued=True)
    (a,) = desk.send([b"a"], 100)
    desk.work()
    desk.clock.advance(0.11)
    actions = [
        lambda: desk.timers.tick(desk.clock.monotonic()),
        desk.queue.write,
        desk.landing.write,
        desk.targets.write,
    ]
    for number in range(steps):
        actions[number % 4]()
        desk.work()
    answer = desk.cancel(a)
    desk.work()
    desk.advance(1)
    assert answer.known == ("delivered" if desk.visible() else "cancelled")


def test_cancels_of_one_turn_share_a_note() -> None:
    desk = Desk()
    sent = desk.send([b"%d" % n for n in range(100)], 1000)
    end = desk.landing.log.end_ordinal
    answers = [desk.cancel(each, turn=False) for each in sent]
    desk.turn()
    assert [each.known for each in answers] == ["cancelled"] * 100
    assert desk.landing.log.end_ordinal == end + 1


def test_two_concurrent_cancels_get_the_same_reply() -> None:
    desk = Desk()
    (a,) = desk.send([b"a"], 1000)
    one, other = desk.cancel(a, turn=False), desk.cancel(a, turn=False)
    desk.turn()
    assert (one.known, other.known) == ("cancelled", "cancelled")


def test_a_refused_note_leaves_everything_as_it_was() -> None:
    desk = Desk()
    (a,) = desk.send([b"a"], 1000)
    desk.landing.refuse = DiskFull()
    with pytest.raises(DiskFull):
        desk.cancel(a).known  # noqa: B018
    with pytest.raises(DiskFull):
        desk.reschedule(a, 5000).known  # noqa: B018
    desk.landing.refuse = None
    desk.advance(2)
    assert desk.visible() == [b"a"]
    assert desk.cancel(a).known == "delivered"


def test_a_note_that_may_be_there_keeps_its_message_until_a_start_has_found_out() -> None:
    desk = Desk()
    a, b = desk.send([b"a", b"b"], [1000, 1001])
    desk.send([b"c"], 1000, key=BILLS)
    desk.landing.refuse = StorageStopped(reason="its disk failed")
    with pytest.raises(StorageStopped):
        desk.cancel(a).known  # noqa: B018
    desk.landing.refuse = None
    desk.advance(5)
    assert (desk.visible(), desk.visible(BILLS)) == ([], [b"c"])
    with pytest.raises(StorageStopped):
        desk.cancel(a).known  # noqa: B018
    again = desk.kill()
    again.advance(1)
    assert again.visible() == [b"a", b"b"]
    assert again.cancel(b).known == "delivered"


def test_more_than_may_be_remembered_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfmq.delay.arrivals.state.CANCELLED_MAX", 1)
    desk = Desk()
    a, b = desk.send([b"a", b"b"], 1000)
    assert desk.cancel(a).known == "cancelled"
    with pytest.raises(Busy):
        desk.cancel(b).known  # noqa: B018


@pytest.mark.parametrize("delay", [100, 30_000, 10_000_000])
def test_a_rescheduled_message_fires_at_its_new_time_once(delay: int) -> None:
    desk = Desk()
    a, b = desk.send([b"a", b"b"], delay)
    moved = desk.reschedule(a, delay + 60_000).known
    assert moved.state == "rescheduled"
    assert moved.turn.number > b.number
    desk.until(b.due + 20)
    assert desk.visible() == [b"b"]
    desk.until(moved.turn.due - 1)
    assert desk.visible() == [b"b"]
    desk.advance(0.02)
    assert desk.visible() == [b"b", b"a"]


def test_a_repeated_reschedule_leaves_the_message_there_once_and_has_the_same_answer() -> None:
    desk = Desk()
    (a,) = desk.send([b"a"], 1000)
    first = desk.reschedule(a, 5000).known
    desk.advance(0.5)
    assert desk.reschedule(a, 4500).known == first, "what was waited is taken off when it is sent again"
    desk.advance(10)
    assert desk.visible() == [b"a"]
    assert desk.reschedule(a, 60).known.state in ("delivered", "rescheduled")
    desk.advance(1)
    assert desk.visible() == [b"a"]


def test_by_an_old_handle_a_message_is_moved_once_more_and_nothing_is_early() -> None:
    desk = Desk()
    (a,) = desk.send([b"a"], 60_000)
    first = desk.reschedule(a, 60_000).known
    desk.advance(30)
    second = desk.reschedule(a, 90_000).known
    assert second.state == "rescheduled" and second.turn.due >= first.turn.due + 60_000
    third = desk.reschedule(a, 90_100).known
    assert third.turn.due == second.turn.due + 100, "also by a little"
    desk.until(third.turn.due - 1)
    assert desk.visible() == []
    desk.advance(0.02)
    assert desk.visible() == [b"a"]


def test_by_an_old_handle_a_cancelled_message_is_cancelled() -> None:
    desk = Desk()
    (a,) = desk.send([b"a"], 1000)
    moved = desk.reschedule(a, 1000).known
    assert desk.cancel(a).known == "cancelled"
    for handle in (a, a._replace(due=moved.turn.due, number=moved.turn.number)):
        assert desk.reschedule(handle, 1000).known.state == "cancelled"
    desk.advance(5)
    assert desk.visible() == []


def test_an_old_handle_leads_to_where_the_message_is() -> None:
    desk = Desk()
    (a,) = desk.send([b"a"], 1000)
    moved = desk.reschedule(a, 50_000).known
    assert desk.describe(a).turn == moved.turn
    assert desk.describe(a).state == "pending"
    assert desk.cancel(a).known == "cancelled"
    desk.advance(100)
    assert desk.visible() == []


def test_what_is_over_is_not_rescheduled() -> None:
    desk = Desk()
    a, b = desk.send([b"a", b"b"], [10, 1000])
    desk.cancel(b)
    desk.advance(0.1)
    assert [desk.reschedule(each, 50).known.state for each in (a, b)] == ["delivered", "cancelled"]
    unknown = a._replace(number=99)
    assert desk.reschedule(unknown, 50).known.state == "unknown"
    assert desk.cancel(unknown).known == "unknown"


@pytest.mark.parametrize("crash", ["kill", "power_cut"])
def test_what_was_reported_holds_after_a_crash(crash: str) -> None:
    desk = Desk()
    a, b, c = desk.send([b"a", b"b", b"c"], [1000, 1000, 1000])
    assert desk.cancel(a).known == "cancelled"
    moved = desk.reschedule(b, 5000).known
    desk = desk.kill() if crash == "kill" else desk.power_cut()
    assert desk.cancel(a).known == "cancelled"
    assert desk.reschedule(b, 5000).known == moved
    desk.advance(2)
    assert desk.visible() == [b"c"]
    desk.advance(5)
    assert desk.visible() == [b"c", b"b"]
    assert desk.cancel(c).known == "delivered"


def test_a_cancel_whose_force_failed_is_not_reported_and_its_message_waits() -> None:
    desk = Desk()
    (a,) = desk.send([b"a"], 1000)
    desk.landing.automatic = False
    answer = desk.cancel(a)
    desk.landing.log.stop("its disk failed")
    desk.landing.force()
    with pytest.raises(StorageStopped):
        answer.known  # noqa: B018
    desk.advance(5)
    assert desk.visible() == []


# The wall clock


def test_a_message_for_a_time_waits_for_the_wall_clock_that_stepped_back() -> None:
    desk = Desk()
    wall = desk.clock.wall_ms()
    (a,) = desk.send([b"a"], at=[wall + 60_000])
    desk.send([b"b"], 60_000)
    desk.advance(30)
    desk.clock.jump_wall(-3600)
    desk.advance(40)
    assert desk.visible() == [b"b"], "a delay counts by the broker's time"
    assert desk.describe(a).state == "pending"
    desk.advance(3600 - 15)
    assert desk.visible() == [b"b"]
    desk.advance(10)
    assert desk.clock.wall_ms() >= wall + 60_000
    assert desk.visible() == [b"b", b"a"]


def test_its_first_handle_cancels_it_wherever_it_is_now() -> None:
    desk = Desk()
    (a,) = desk.send([b"a"], at=[desk.clock.wall_ms() + 60_000])
    desk.advance(30)
    desk.clock.jump_wall(-3600)
    desk.advance(40)
    assert desk.cancel(a).known == "cancelled"
    desk.advance(8000)
    assert desk.visible() == []


def test_what_came_while_the_clock_was_slow_is_on_time_when_it_steps_again() -> None:
    desk = Desk()
    desk.clock.jump_wall(-3600)
    wall = desk.clock.wall_ms()
    desk.send([b"a"], at=[wall + 60_000])
    desk.advance(59.9)
    assert desk.visible() == []
    desk.advance(0.2)
    assert desk.visible() == [b"a"], "not an hour late"
    desk.send([b"b"], at=[wall + 120_000])
    desk.clock.jump_wall(-600)
    desk.advance(100)
    assert desk.visible() == [b"a"]
    desk.advance(600)
    assert desk.visible() == [b"a", b"b"]


def test_a_small_step_back_holds_the_line_for_a_moment() -> None:
    desk = Desk()
    wall = desk.clock.wall_ms()
    desk.send([b"a"], at=[wall + 1000])
    desk.clock.jump_wall(-0.03)
    desk.advance(1.02)
    assert desk.visible() == []
    desk.advance(0.03)
    assert desk.visible() == [b"a"]
    assert desk.clock.wall_ms() >= wall + 1000


def test_many_that_wait_for_the_wall_clock_move_together() -> None:
    desk = Desk()
    wall = desk.clock.wall_ms()
    desk.send([b"%03d" % n for n in range(500)], at=[wall + 10_000 + n for n in range(500)])
    desk.clock.jump_wall(-100)
    end = desk.landing.log.end_ordinal
    desk.advance(15)
    assert desk.visible() == []
    assert desk.landing.log.end_ordinal - end < 2 * 500
    desk.advance(100)
    assert desk.visible() == [b"%03d" % n for n in range(500)]


def test_steps_forward_move_nothing_early() -> None:
    desk = Desk()
    wall = desk.clock.wall_ms()
    desk.send([b"a"], 60_000)
    desk.send([b"b"], at=[wall + 60_000])
    for step in (3600, 10 * 365 * 86_400):
        desk.clock.jump_wall(step)
        desk.advance(10)
        assert desk.visible() == []
    desk.advance(41)
    assert desk.visible() == [b"a", b"b"]


def test_a_full_arrivals_log_refuses_a_send_and_goes_on() -> None:
    desk = Desk()
    desk.landing.refuse = Full("no space")
    assert desk.send([b"a"], 100) == []
    desk.landing.refuse = None
    desk.send([b"b"], 100)
    desk.advance(1)
    assert desk.visible() == [b"b"]


def test_many_that_wait_for_one_message_ask_again_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each finds it changed once more: if all asked each time, a thousand would ask half a million times."""
    desk = Desk()
    (sent,) = desk.send([b"a"], 100_000)
    asked: list[int] = []
    latest = RescheduledMessages.latest
    monkeypatch.setattr(
        RescheduledMessages, "latest", lambda self, *turn: asked.append(1) or latest(self, *turn)
    )
    answers = [desk.reschedule(sent, 200_000 + 1000 * n, turn=False) for n in range(100)]
    gone = desk.cancel(sent, turn=False)
    desk.turn()
    assert len({answer.known.turn for answer in answers}) == 100 and gone.known == "cancelled"
    assert len(asked) <= 4 * len(answers)
    desk.advance(400)
    assert desk.visible() == []


# Single messages on the disk by their turns.


def test_it_is_found_in_the_arrivals_and_later_in_its_bucket() -> None:
    desk = Desk()
    a, b = desk.send([b"a", b"b"], [3_600_000, 3_600_000])
    desk.landing.log.force()
    finder = desk.queue._record_finder
    for _ in range(2):
        for handle in (a, b):
            record = finder.find(handle.key, handle.turn)
            assert record is not None and record.endswith(handle.payload)
        desk.advance(120)
    assert sum(each.count for each in desk.buckets.live_buckets) == 2


def test_what_is_nowhere_is_not_found() -> None:
    desk = Desk()
    (a,) = desk.send([b"a"], 3_600_000)
    desk.landing.log.force()
    finder = desk.queue._record_finder
    assert finder.find(a.key, Turn(a.due, a.number - 1)) is None, "that is the note"
    assert finder.find(a.key, Turn(a.due, 999)) is None
    desk.advance(120)
    assert finder.find(BILLS, a.turn) is None
    assert finder.find(a.key, Turn(a.due + 1, a.number)) is None


# What can be said of one message.


def state(desk: Desk, handle: Handle) -> str:
    return desk.queue._state_resolver.state_of(handle.key, handle.turn, desk.landing.log.end_ordinal)


def test_a_message_goes_from_pending_to_delivered_to_unknown() -> None:
    desk = Desk(outcome_seconds=60)
    (a,) = desk.send([b"a"], 100)
    assert state(desk, a) == "pending"
    desk.targets.automatic = False
    desk.advance(0.2)
    assert state(desk, a) == FIRING
    desk.targets.force()
    assert state(desk, a) == "delivered"
    desk.advance(61)
    assert state(desk, a) == "unknown"


def test_numbers_that_were_not_given_out_are_unknown() -> None:
    desk = Desk()
    (a,) = desk.send([b"a"], 100)
    assert state(desk, a._replace(number=a.number + 1)) == "unknown"
    assert state(desk, a._replace(due=1)) == "unknown"


def test_where_its_log_could_not_be_opened_the_outcome_is_unknown() -> None:
    desk = Desk()
    (a,) = desk.send([b"a"], 100)
    desk.advance(1)
    desk.targets.stop(ORDERS)
    desk.targets.target(ORDERS).appends.clear()
    with pytest.raises(StorageStopped):
        state(desk, a)


def test_of_a_topic_that_is_gone_nothing_is_known() -> None:
    desk = Desk()
    (a,) = desk.send([b"a"], 100)
    desk.targets.delete(16)
    assert state(desk, a) == "unknown"
