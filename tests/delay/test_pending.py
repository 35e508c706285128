"""Which messages on the disk are still to be fired."""

from types import SimpleNamespace
from typing import Any

from tests.delay.steps import steps
from tfmq.delay.arrivals.state import CancelledMessages
from tfmq.delay.pending import PendingSnapshot
from tfmq.delay.requests import Turn

KEY = 7


def made(
    cancelled: list[tuple[int, int]], through: Turn | None = None, gone: bool = False, unsure: Any = ()
) -> PendingSnapshot:
    known = CancelledMessages()
    for turn in cancelled:
        known.add(*turn)
    state: Any = SimpleNamespace(cancelled=known)
    queues: Any = SimpleNamespace(
        apply_target=SimpleNamespace(display_name=lambda key: None if gone else "orders-0"),
        durable_turn=lambda key: through,
        locked=unsure,
    )
    return PendingSnapshot(state, queues)


def test_everything_is_pending_where_nothing_is_known() -> None:
    assert made([])(KEY, [1, 2], [1, 2]) is True
    assert made([], Turn(0, 99))(KEY, [1, 2], [1, 2]) is True


def test_nothing_of_a_topic_that_is_gone() -> None:
    assert made([], gone=True)(KEY, [1], [1]) is False


def test_what_its_target_has_is_settled() -> None:
    assert made([], Turn(10, 5))(KEY, [1, 9], [1, 99]) is False
    assert list(made([], Turn(10, 5))(KEY, [10, 10, 9, 11], [5, 6, 9, 1])) == [0, 1, 0, 1]  # type: ignore[arg-type]


def test_what_is_cancelled_for_sure_is_not_pending() -> None:
    assert list(made([(5, 1)])(KEY, [5, 5], [1, 2])) == [0, 1]  # type: ignore[arg-type]
    assert list(made([(5, 1)], Turn(4, 9))(KEY, [5, 4], [1, 2])) == [0, 0]  # type: ignore[arg-type]
    assert list(made([(5, 1)], unsure={(5, 1)})(KEY, [5, 5], [1, 2])) == [1, 1]  # type: ignore[arg-type]


def test_where_something_may_be_cancelled_is_reported() -> None:
    pending = made([(5, 1), (70_000, 2)])
    assert pending.may_have_cancelled(0, 65_535) and pending.may_have_cancelled(65_536, 100_000)
    assert not pending.may_have_cancelled(131_072, 1 << 60)


def test_a_look_at_one_batch_costs_the_same_however_many_are_cancelled() -> None:
    """Each batch of a spill is looked at: cancelled timeouts of a month are forty thousand spans."""
    counts = [
        steps(lambda each=each: each(KEY, [1 << 50], [1]))  # type: ignore[misc]
        for each in (made([(n << 16, n) for n in range(count)]) for count in (100, 40_000))
    ]
    assert counts[0] == counts[1] < 50
