"""What waits at the broker: cancelled, rescheduled, described, listed, counted; typos never travel."""

import json
import pickle
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.client.fake_broker import CUT, LOSE, SWALLOW
from tests.client.fake_delays import NOW_MS, STORE_ID, Waiting
from tests.client.rig import Rig
from tfmq.client.admin.admin import AdminCore
from tfmq.client.admin.delayed import (
    DelayedCounts,
    DelayedDescription,
    Rescheduled,
    cancel_delayed_message,
    delayed_description,
    reschedule_delayed_message,
)
from tfmq.errors import BadRequest, TimedOut
from tfmq.limits import DELAYED_HISTOGRAM_EDGES
from tfmq.protocol.commands import DUE_MAX, DUE_RELATIVE, CancelDelayed, ListDelayed, RescheduleDelayed
from tfmq.protocol.delayed_handle import Handle, format_handle, parse_handle

NOW = datetime.fromtimestamp(NOW_MS / 1000, UTC)


class Pending(Rig):
    """A broker at which some messages wait, one each second."""

    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.broker.waiting = [
            Waiting(NOW_MS + 1000 * n, n, ("orders", "bills")[n % 2], n % 3, b"r" * (20 + n)) for n in range(count)
        ]
        self.broker.numbers = count

    def handle(self, number: int) -> str:
        return next(each.handle for each in self.broker.waiting if each.number == number)


@pytest.fixture
def rig() -> Pending:
    return Pending()


def test_a_message_is_cancelled_once_and_the_answer_stays(rig: Pending) -> None:
    handle = rig.handle(2)
    for _ in range(3):
        assert rig.run(cancel_delayed_message(rig.link, handle, 5.0)) == "cancelled"
    assert [each.number for each in rig.broker.waiting] == [0, 1, 3, 4]


def test_what_was_delivered_is_not_taken_back(rig: Pending) -> None:
    handle = rig.handle(0)
    rig.broker.fire(0)
    assert rig.run(cancel_delayed_message(rig.link, handle, 5.0)) == "delivered"
    late = rig.run(reschedule_delayed_message(rig.link, handle, 5, None, 5.0))
    assert (late.state, late.handle, late) == ("delivered", None, "") and not late


def test_another_broker_s_handle_is_unknown(rig: Pending) -> None:
    other = format_handle(parse_handle(rig.handle(0))._replace(store_id=STORE_ID + 1))
    assert rig.run(cancel_delayed_message(rig.link, other, 5.0)) == "unknown"
    assert len(rig.broker.waiting) == 5


@pytest.mark.parametrize("action", [LOSE, CUT])
def test_a_lost_answer_is_asked_for_again(rig: Pending, action: str) -> None:
    handle, second = rig.handle(2), rig.handle(3)
    rig.broker.plan(CancelDelayed, action)
    rig.broker.plan(RescheduleDelayed, action)
    assert rig.run(cancel_delayed_message(rig.link, handle, 5.0)) == "cancelled"
    moved = rig.run(reschedule_delayed_message(rig.link, second, 60, None, 5.0))
    assert moved.state == "rescheduled" and moved.handle == rig.broker.waiting[-1].handle
    assert len(rig.broker.waiting) == 4


def test_a_broker_that_does_not_answer_is_waited_for_so_long(rig: Pending) -> None:
    rig.broker.plan(CancelDelayed, SWALLOW)
    with pytest.raises(TimedOut):
        rig.run(cancel_delayed_message(rig.link, rig.handle(2), 2.0))


@pytest.mark.parametrize("work", [AdminCore.cancel, AdminCore.describe_delayed])
def test_a_typo_is_refused_before_it_travels(rig: Pending, work: Any) -> None:
    for wrong in (rig.handle(0)[:-1] + "!", "", "order-42"):
        with pytest.raises(BadRequest, match="no handle"):
            rig.run(work(AdminCore(rig.link, 5.0), wrong))
    for none, sentence in ((None, "was not delayed"), (5, "not int"), (b"d", "not bytes")):
        with pytest.raises(TypeError, match=sentence):
            rig.run(work(AdminCore(rig.link, 5.0), none))
    assert not rig.broker.requests


def test_a_message_gets_another_time_and_another_handle(rig: Pending) -> None:
    moved = rig.run(reschedule_delayed_message(rig.link, rig.handle(1), timedelta(hours=1), None, 5.0))
    assert moved.state == "rescheduled" and parse_handle(moved).due == NOW_MS + 3_600_000
    again = rig.run(reschedule_delayed_message(rig.link, moved, None, NOW + timedelta(days=1), 5.0))
    assert again.state == "rescheduled" and parse_handle(again).due == NOW_MS + 86_400_000
    assert [each.number for each in rig.broker.waiting] == [0, 2, 3, 4, 6]


def test_the_answer_to_a_reschedule_is_the_new_handle_wherever_a_text_is_wanted() -> None:
    moved = Rescheduled("rescheduled", "dabc")
    assert moved == moved.handle == "dabc" and type(moved.handle) is str
    assert json.dumps({"handle": moved}) == '{"handle": "dabc"}' and "rescheduled" in repr(moved)
    again = pickle.loads(pickle.dumps(moved))
    assert (again, again.state) == (moved, "rescheduled")


def test_a_reschedule_needs_a_time(rig: Pending) -> None:
    with pytest.raises(TypeError, match="Give the new time"):
        rig.run(reschedule_delayed_message(rig.link, rig.handle(1), None, None, 5.0))
    with pytest.raises(TypeError, match="not both"):
        rig.run(reschedule_delayed_message(rig.link, rig.handle(1), 5, NOW, 5.0))
    assert not rig.broker.requests


def test_a_new_delay_counts_from_the_call_however_late_it_gets_there(rig: Pending) -> None:
    rig.link.send_request(CancelDelayed(rig.handle(0)))
    rig.exchange()
    rig.cut()
    rig.reachable = False
    operation = reschedule_delayed_message(rig.link, rig.handle(1), 60, None, 30.0)
    next(operation)
    rig.advance(10)
    rig.reachable = True
    rig.advance(5)
    with pytest.raises(StopIteration):
        next(operation)
    (request,) = [each for each in rig.broker.requests if isinstance(each, RescheduleDelayed)]
    assert DUE_RELATIVE + 40_000 < request.due <= DUE_RELATIVE + 50_000


def test_one_is_described_whether_it_waits_or_not(rig: Pending) -> None:
    handle = rig.handle(1)
    found = rig.run(AdminCore(rig.link, 5.0).describe_delayed(handle))
    assert (found.handle, found.state, found.topic, found.partition) == (handle, "pending", "bills", 1)
    assert (found.due_ms, found.size_bytes, found.born_ms) == (NOW_MS + 1000, 21, 5)
    assert found.due_at == NOW + timedelta(seconds=1) and found.details == {"number": 1}
    assert type(rig.run(AdminCore(rig.link, 5.0).describe_delayed(Rescheduled("rescheduled", handle))).handle) is str
    rig.broker.fire(1)
    assert rig.run(AdminCore(rig.link, 5.0).describe_delayed(handle))[:3] == (handle, "delivered", -1)


def test_a_due_time_that_no_calendar_has_is_reported_in_ms_only() -> None:
    for due_ms in (-1, DUE_MAX, 253_402_300_800_000):
        assert DelayedDescription("d", "pending", due_ms).due_at is None


def test_nil_is_as_good_as_not_said() -> None:
    row = delayed_description({"handle": "d", "state": "pending", "topic": None, "due_ms": None, "tag": None})
    assert row == DelayedDescription("d", "pending")


def listed(rig: Pending, after: str | None = None, limit: int | None = None, **asked: Any) -> list[int]:
    found = rig.run(AdminCore(rig.link, 5.0).delayed(**asked, after=after, limit=limit))
    return [parse_handle(each.handle).number for each in found]


def test_all_that_wait_are_listed_however_many_pages_they_fill(rig: Pending) -> None:
    assert listed(rig) == [0, 1, 2, 3, 4]
    assert len([each for each in rig.broker.requests if isinstance(each, ListDelayed)]) == 3


def test_a_list_has_an_end_and_a_place_to_go_on(rig: Pending) -> None:
    assert listed(rig, limit=3) == [0, 1, 2] and listed(rig, limit=0) == []
    assert listed(rig, after=rig.handle(2)) == [3, 4]
    assert listed(rig, after=rig.handle(0), limit=1) == [1]
    with pytest.raises(BadRequest, match="no handle"):
        listed(rig, after="typo")
    with pytest.raises(BadRequest, match="limit is 0 or more"):
        listed(rig, limit=-1)
    with pytest.raises(TypeError, match="limit is a whole number"):
        listed(rig, limit="x")  # type: ignore[arg-type]


def test_a_list_may_be_of_some(rig: Pending) -> None:
    assert listed(rig, topic="bills") == [1, 3] and listed(rig, partition=0) == [0, 3]
    assert listed(rig, first=NOW + timedelta(seconds=1), end=NOW_MS / 1000 + 3) == [1, 2]
    listed(rig, key="ä")
    assert rig.broker.requests[-1].key == "ä".encode()
    with pytest.raises(TypeError, match="no time zone"):
        listed(rig, first=datetime(2026, 1, 1))


def test_a_name_that_is_empty_does_not_mean_all_topics(rig: Pending) -> None:
    with pytest.raises(BadRequest, match="is empty"):
        listed(rig, topic="")
    with pytest.raises(BadRequest, match="is empty"):
        rig.run(AdminCore(rig.link, 5.0).delayed_histogram([NOW, NOW + timedelta(seconds=2)], ""))
    assert not rig.broker.requests


def test_a_page_may_be_empty_although_there_is_more(rig: Pending) -> None:
    """The broker looks at a bounded number of messages for each page."""
    real, empty = rig.broker.list_delayed, [True, True]

    def looking(request: ListDelayed) -> Any:
        reply = real(request)
        if empty and empty.pop():
            last_handle = request.after or format_handle(Handle(STORE_ID, 9, NOW_MS - 2 + len(empty), 0))
            return reply._replace(
                delayed=[], more=True, after=format_handle(parse_handle(last_handle)._replace(log_id=1 + len(empty)))
            )
        return reply

    rig.broker.list_delayed = looking  # type: ignore[method-assign]
    assert listed(rig) == [0, 1, 2, 3, 4]


def test_they_are_counted_between_edges(rig: Pending) -> None:
    edges: list[datetime | float] = [NOW, NOW + timedelta(seconds=2), NOW_MS / 1000 + 60]
    assert rig.run(AdminCore(rig.link, 5.0).delayed_histogram(edges, None)) == DelayedCounts(
        (NOW_MS, NOW_MS + 2000, NOW_MS + 60_000), (2, 3), 5
    )
    assert rig.run(AdminCore(rig.link, 5.0).delayed_histogram(edges[:2], "bills"))[1:] == ((1,), 2)


@pytest.mark.parametrize(
    "edges", [[], [NOW], [NOW, NOW], [NOW, 0], list(range(DELAYED_HISTOGRAM_EDGES + 1)), [1.0001, 1.0002]]
)
def test_edges_that_do_not_ascend_are_refused_here(rig: Pending, edges: Any) -> None:
    with pytest.raises(BadRequest, match="edges"):
        rig.run(AdminCore(rig.link, 5.0).delayed_histogram(edges, None))
    assert not rig.broker.requests
