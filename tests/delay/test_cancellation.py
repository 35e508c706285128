"""Cancel and reschedule: exactly one outcome, reported when it is durable, the same when it is asked again."""

from __future__ import annotations

import pytest

from journal.errors import Full
from tests.delay.rig import BILLS, ORDERS, Handle, Rig
from tfmq.delay.arrivals.state import RescheduledMessages
from tfmq.delay.cancellation import FIRING
from tfmq.delay.requests import Turn
from tfmq.errors import Busy, DiskFull, StorageStopped


@pytest.mark.parametrize("delay", [100, 30_000, 10_000_000])
def test_a_cancelled_message_never_fires(delay: int) -> None:
    rig = Rig()
    a, b = rig.send([b"a", b"b"], delay)
    assert rig.cancel(a).known == "cancelled"
    rig.until(b.due + 20)
    assert rig.visible() == [b"b"]
    assert rig.cancel(a).known == "cancelled"
    assert rig.cancel(b).known == "delivered"


def test_cancelled_is_reported_only_when_it_is_on_the_disk() -> None:
    rig = Rig()
    (a,) = rig.send([b"a"], 1000)
    rig.landing.automatic = False
    answer = rig.cancel(a)
    assert not answer.calls
    rig.advance(2)
    assert rig.visible() == [], "while it is not sure, it does not fire"
    rig.landing.force()
    rig.turn()
    assert answer.known == "cancelled"
    rig.advance(2)
    assert rig.visible() == []


def test_delivered_is_reported_only_when_it_is_on_the_disk() -> None:
    rig = Rig()
    (a,) = rig.send([b"a"], 100)
    rig.targets.automatic = False
    rig.advance(0.2)
    assert rig.visible() == [b"a"]
    answer = rig.cancel(a)
    assert not answer.calls
    rig.targets.force()
    assert answer.known == "delivered"


def test_a_firing_that_is_refused_lets_the_cancel_through() -> None:
    rig = Rig()
    (a,) = rig.send([b"a"], 100)
    rig.targets.target(ORDERS).full = True
    rig.advance(0.2)
    assert rig.cancel(a).known == "cancelled"
    rig.targets.target(ORDERS).full = False
    rig.advance(60)
    assert rig.visible() == []


def test_what_a_stopped_target_may_have_is_unknown_until_it_is_back() -> None:
    rig = Rig()
    (a,) = rig.send([b"a"], 100)
    rig.targets.automatic = False
    rig.advance(0.2)
    rig.targets.fail_force(ORDERS)
    rig.turn()
    with pytest.raises(StorageStopped):
        rig.cancel(a).known  # noqa: B018
    rig.targets.automatic = True
    rig.targets.resume(ORDERS, keep=0)
    rig.queue.target_resumed(ORDERS)
    assert rig.cancel(a).known in ("cancelled", "delivered")


@pytest.mark.parametrize("steps", range(12))
def test_a_cancel_that_races_the_firing_has_one_of_two_outcomes(steps: int) -> None:
    """At every point between the alarm and the force."""
    rig = Rig(queued=True)
    (a,) = rig.send([b"a"], 100)
    rig.work()
    rig.clock.advance(0.11)
    actions = [lambda: rig.timers.tick(rig.clock.monotonic()), rig.queue.write, rig.landing.write, rig.targets.write]
    for number in range(steps):
        actions[number % 4]()
        rig.work()
    answer = rig.cancel(a)
    rig.work()
    rig.advance(1)
    assert answer.known == ("delivered" if rig.visible() else "cancelled")


def test_cancels_of_one_turn_share_a_note() -> None:
    rig = Rig()
    sent = rig.send([b"%d" % n for n in range(100)], 1000)
    end = rig.landing.log.end_ordinal
    answers = [rig.cancel(each, turn=False) for each in sent]
    rig.turn()
    assert [each.known for each in answers] == ["cancelled"] * 100
    assert rig.landing.log.end_ordinal == end + 1


def test_two_concurrent_cancels_get_the_same_reply() -> None:
    rig = Rig()
    (a,) = rig.send([b"a"], 1000)
    one, other = rig.cancel(a, turn=False), rig.cancel(a, turn=False)
    rig.turn()
    assert (one.known, other.known) == ("cancelled", "cancelled")


def test_a_refused_note_leaves_everything_as_it_was() -> None:
    rig = Rig()
    (a,) = rig.send([b"a"], 1000)
    rig.landing.refuse = DiskFull()
    with pytest.raises(DiskFull):
        rig.cancel(a).known  # noqa: B018
    with pytest.raises(DiskFull):
        rig.reschedule(a, 5000).known  # noqa: B018
    rig.landing.refuse = None
    rig.advance(2)
    assert rig.visible() == [b"a"]
    assert rig.cancel(a).known == "delivered"


def test_a_note_that_may_be_there_keeps_its_message_until_a_start_has_found_out() -> None:
    rig = Rig()
    a, b = rig.send([b"a", b"b"], [1000, 1001])
    rig.send([b"c"], 1000, key=BILLS)
    rig.landing.refuse = StorageStopped(reason="its disk failed")
    with pytest.raises(StorageStopped):
        rig.cancel(a).known  # noqa: B018
    rig.landing.refuse = None
    rig.advance(5)
    assert (rig.visible(), rig.visible(BILLS)) == ([], [b"c"])
    with pytest.raises(StorageStopped):
        rig.cancel(a).known  # noqa: B018
    again = rig.kill()
    again.advance(1)
    assert again.visible() == [b"a", b"b"]
    assert again.cancel(b).known == "delivered"


def test_more_than_may_be_remembered_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfmq.delay.arrivals.state.CANCELLED_MAX", 1)
    rig = Rig()
    a, b = rig.send([b"a", b"b"], 1000)
    assert rig.cancel(a).known == "cancelled"
    with pytest.raises(Busy):
        rig.cancel(b).known  # noqa: B018


@pytest.mark.parametrize("delay", [100, 30_000, 10_000_000])
def test_a_rescheduled_message_fires_at_its_new_time_once(delay: int) -> None:
    rig = Rig()
    a, b = rig.send([b"a", b"b"], delay)
    moved = rig.reschedule(a, delay + 60_000).known
    assert moved.state == "rescheduled"
    assert moved.turn.number > b.number
    rig.until(b.due + 20)
    assert rig.visible() == [b"b"]
    rig.until(moved.turn.due - 1)
    assert rig.visible() == [b"b"]
    rig.advance(0.02)
    assert rig.visible() == [b"b", b"a"]


def test_a_repeated_reschedule_leaves_the_message_there_once_and_has_the_same_answer() -> None:
    rig = Rig()
    (a,) = rig.send([b"a"], 1000)
    first = rig.reschedule(a, 5000).known
    rig.advance(0.5)
    assert rig.reschedule(a, 4500).known == first, "what was waited is taken off when it is sent again"
    rig.advance(10)
    assert rig.visible() == [b"a"]
    assert rig.reschedule(a, 60).known.state in ("delivered", "rescheduled")
    rig.advance(1)
    assert rig.visible() == [b"a"]


def test_by_an_old_handle_a_message_is_moved_once_more_and_nothing_is_early() -> None:
    rig = Rig()
    (a,) = rig.send([b"a"], 60_000)
    first = rig.reschedule(a, 60_000).known
    rig.advance(30)
    second = rig.reschedule(a, 90_000).known
    assert second.state == "rescheduled" and second.turn.due >= first.turn.due + 60_000
    third = rig.reschedule(a, 90_100).known
    assert third.turn.due == second.turn.due + 100, "also by a little"
    rig.until(third.turn.due - 1)
    assert rig.visible() == []
    rig.advance(0.02)
    assert rig.visible() == [b"a"]


def test_by_an_old_handle_a_cancelled_message_is_cancelled() -> None:
    rig = Rig()
    (a,) = rig.send([b"a"], 1000)
    moved = rig.reschedule(a, 1000).known
    assert rig.cancel(a).known == "cancelled"
    for handle in (a, a._replace(due=moved.turn.due, number=moved.turn.number)):
        assert rig.reschedule(handle, 1000).known.state == "cancelled"
    rig.advance(5)
    assert rig.visible() == []


def test_an_old_handle_leads_to_where_the_message_is() -> None:
    rig = Rig()
    (a,) = rig.send([b"a"], 1000)
    moved = rig.reschedule(a, 50_000).known
    assert rig.describe(a).turn == moved.turn
    assert rig.describe(a).state == "pending"
    assert rig.cancel(a).known == "cancelled"
    rig.advance(100)
    assert rig.visible() == []


def test_what_is_over_is_not_rescheduled() -> None:
    rig = Rig()
    a, b = rig.send([b"a", b"b"], [10, 1000])
    rig.cancel(b)
    rig.advance(0.1)
    assert [rig.reschedule(each, 50).known.state for each in (a, b)] == ["delivered", "cancelled"]
    unknown = a._replace(number=99)
    assert rig.reschedule(unknown, 50).known.state == "unknown"
    assert rig.cancel(unknown).known == "unknown"


@pytest.mark.parametrize("crash", ["kill", "power_cut"])
def test_what_was_reported_holds_after_a_crash(crash: str) -> None:
    rig = Rig()
    a, b, c = rig.send([b"a", b"b", b"c"], [1000, 1000, 1000])
    assert rig.cancel(a).known == "cancelled"
    moved = rig.reschedule(b, 5000).known
    rig = rig.kill() if crash == "kill" else rig.power_cut()
    assert rig.cancel(a).known == "cancelled"
    assert rig.reschedule(b, 5000).known == moved
    rig.advance(2)
    assert rig.visible() == [b"c"]
    rig.advance(5)
    assert rig.visible() == [b"c", b"b"]
    assert rig.cancel(c).known == "delivered"


def test_a_cancel_whose_fsync_failed_is_not_reported_and_its_message_waits() -> None:
    rig = Rig()
    (a,) = rig.send([b"a"], 1000)
    rig.landing.automatic = False
    answer = rig.cancel(a)
    rig.landing.log.stop("its disk failed")
    rig.landing.force()
    with pytest.raises(StorageStopped):
        answer.known  # noqa: B018
    rig.advance(5)
    assert rig.visible() == []


# The wall clock


def test_a_message_for_a_time_waits_for_the_wall_clock_that_stepped_back() -> None:
    rig = Rig()
    wall = rig.clock.wall_ms()
    (a,) = rig.send([b"a"], at=[wall + 60_000])
    rig.send([b"b"], 60_000)
    rig.advance(30)
    rig.clock.jump_wall(-3600)
    rig.advance(40)
    assert rig.visible() == [b"b"], "a delay counts by the broker's time"
    assert rig.describe(a).state == "pending"
    rig.advance(3600 - 15)
    assert rig.visible() == [b"b"]
    rig.advance(10)
    assert rig.clock.wall_ms() >= wall + 60_000
    assert rig.visible() == [b"b", b"a"]


def test_its_first_handle_cancels_it_wherever_it_is_now() -> None:
    rig = Rig()
    (a,) = rig.send([b"a"], at=[rig.clock.wall_ms() + 60_000])
    rig.advance(30)
    rig.clock.jump_wall(-3600)
    rig.advance(40)
    assert rig.cancel(a).known == "cancelled"
    rig.advance(8000)
    assert rig.visible() == []


def test_what_came_while_the_clock_was_slow_is_on_time_when_it_steps_again() -> None:
    rig = Rig()
    rig.clock.jump_wall(-3600)
    wall = rig.clock.wall_ms()
    rig.send([b"a"], at=[wall + 60_000])
    rig.advance(59.9)
    assert rig.visible() == []
    rig.advance(0.2)
    assert rig.visible() == [b"a"], "not an hour late"
    rig.send([b"b"], at=[wall + 120_000])
    rig.clock.jump_wall(-600)
    rig.advance(100)
    assert rig.visible() == [b"a"]
    rig.advance(600)
    assert rig.visible() == [b"a", b"b"]


def test_a_small_step_back_holds_the_line_for_a_moment() -> None:
    rig = Rig()
    wall = rig.clock.wall_ms()
    rig.send([b"a"], at=[wall + 1000])
    rig.clock.jump_wall(-0.03)
    rig.advance(1.02)
    assert rig.visible() == []
    rig.advance(0.03)
    assert rig.visible() == [b"a"]
    assert rig.clock.wall_ms() >= wall + 1000


def test_many_that_wait_for_the_wall_clock_move_together() -> None:
    rig = Rig()
    wall = rig.clock.wall_ms()
    rig.send([b"%03d" % n for n in range(500)], at=[wall + 10_000 + n for n in range(500)])
    rig.clock.jump_wall(-100)
    end = rig.landing.log.end_ordinal
    rig.advance(15)
    assert rig.visible() == []
    assert rig.landing.log.end_ordinal - end < 2 * 500
    rig.advance(100)
    assert rig.visible() == [b"%03d" % n for n in range(500)]


def test_steps_forward_move_nothing_early() -> None:
    rig = Rig()
    wall = rig.clock.wall_ms()
    rig.send([b"a"], 60_000)
    rig.send([b"b"], at=[wall + 60_000])
    for step in (3600, 10 * 365 * 86_400):
        rig.clock.jump_wall(step)
        rig.advance(10)
        assert rig.visible() == []
    rig.advance(41)
    assert rig.visible() == [b"a", b"b"]


def test_a_full_arrivals_log_refuses_a_send_and_goes_on() -> None:
    rig = Rig()
    rig.landing.refuse = Full("no space")
    assert rig.send([b"a"], 100) == []
    rig.landing.refuse = None
    rig.send([b"b"], 100)
    rig.advance(1)
    assert rig.visible() == [b"b"]


def test_many_that_wait_for_one_message_ask_again_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each finds it changed once more: if all asked each time, a thousand would ask half a million times."""
    rig = Rig()
    (sent,) = rig.send([b"a"], 100_000)
    asked: list[int] = []
    latest = RescheduledMessages.latest
    monkeypatch.setattr(RescheduledMessages, "latest", lambda self, *turn: asked.append(1) or latest(self, *turn))
    answers = [rig.reschedule(sent, 200_000 + 1000 * n, turn=False) for n in range(100)]
    gone = rig.cancel(sent, turn=False)
    rig.turn()
    assert len({answer.known.turn for answer in answers}) == 100 and gone.known == "cancelled"
    assert len(asked) <= 4 * len(answers)
    rig.advance(400)
    assert rig.visible() == []


# Single messages on the disk by their turns.


def test_it_is_found_in_the_arrivals_and_later_in_its_bucket() -> None:
    rig = Rig()
    a, b = rig.send([b"a", b"b"], [3_600_000, 3_600_000])
    rig.landing.log.force()
    finder = rig.queue._target_queues.record_reader
    for _ in range(2):
        for handle in (a, b):
            record = finder.find(handle.key, handle.turn)
            assert record is not None and record.endswith(handle.payload)
        rig.advance(120)
    assert sum(each.count for each in rig.buckets.live_buckets) == 2


def test_what_is_nowhere_is_not_found() -> None:
    rig = Rig()
    (a,) = rig.send([b"a"], 3_600_000)
    rig.landing.log.force()
    finder = rig.queue._target_queues.record_reader
    assert finder.find(a.key, Turn(a.due, a.number - 1)) is None, "that is the note"
    assert finder.find(a.key, Turn(a.due, 999)) is None
    rig.advance(120)
    assert finder.find(BILLS, a.turn) is None
    assert finder.find(a.key, Turn(a.due + 1, a.number)) is None


# What can be said of one message.


def state(rig: Rig, handle: Handle) -> str:
    return rig.queue._changes.state_of(handle.key, handle.turn, rig.landing.log.end_ordinal)


def test_a_message_goes_from_pending_to_delivered_to_unknown() -> None:
    rig = Rig(outcome_seconds=60)
    (a,) = rig.send([b"a"], 100)
    assert state(rig, a) == "pending"
    rig.targets.automatic = False
    rig.advance(0.2)
    assert state(rig, a) == FIRING
    rig.targets.force()
    assert state(rig, a) == "delivered"
    rig.advance(61)
    assert state(rig, a) == "unknown"


def test_numbers_that_were_not_given_out_are_unknown() -> None:
    rig = Rig()
    (a,) = rig.send([b"a"], 100)
    assert state(rig, a._replace(number=a.number + 1)) == "unknown"
    assert state(rig, a._replace(due=1)) == "unknown"


def test_where_its_log_could_not_be_opened_the_outcome_is_unknown() -> None:
    rig = Rig()
    (a,) = rig.send([b"a"], 100)
    rig.advance(1)
    rig.targets.stop(ORDERS)
    rig.targets.target(ORDERS).appends.clear()
    with pytest.raises(StorageStopped):
        state(rig, a)


def test_of_a_topic_that_is_gone_nothing_is_known() -> None:
    rig = Rig()
    (a,) = rig.send([b"a"], 100)
    rig.targets.delete(16)
    assert state(rig, a) == "unknown"
