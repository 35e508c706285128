"""A decision on its way: who waits is told once, and the truth."""

from tfmq.errors import StorageStopped
from tfmq.transaction.apply_progress import OFFSETS_MAX, ApplyProgress
from tfmq.transaction.model import Decision


def course(batches: int = 0) -> ApplyProgress:
    return ApplyProgress(Decision(100, 0, ()), batches=batches)


class Ears:
    def __init__(self) -> None:
        self.heard: list[tuple[str, BaseException | None]] = []

    def __call__(self, course: ApplyProgress, error: BaseException | None) -> None:
        self.heard.append((course.state, error))


def test_who_waits_is_told_when_it_is_applied() -> None:
    each, ears = course(), Ears()
    each.add_callback(ears)
    assert ears.heard == []
    each.applied = True
    each.notify()
    each.notify()
    assert ears.heard == [("committed", None)]


def test_who_comes_later_is_told_at_once() -> None:
    each, ears = course(), Ears()
    each.applied = True
    each.add_callback(ears)
    assert ears.heard == [("committed", None)]


def test_one_that_takes_long_is_called_applying_to_all_who_ask() -> None:
    each, early, late = course(), Ears(), Ears()
    each.add_callback(early)
    each.notify_late()
    each.add_callback(late)
    each.applied = True
    each.notify()
    assert early.heard == late.heard == [("applying", None)]


def test_a_decision_that_may_be_lost_is_told_as_an_error_to_all_who_ask() -> None:
    each, early, late, error = course(), Ears(), Ears(), StorageStopped()
    each.add_callback(early)
    each.notify_failed(error)
    each.add_callback(late)
    assert early.heard == late.heard == [("applying", error)]


def test_offsets_are_noted_by_the_number_of_the_batch() -> None:
    each = course(batches=3)
    each.record_offsets([2, -1, 0], [500, 600, 700])
    assert each.offsets == [700, -1, 500]


def test_offsets_of_very_many_batches_are_not_kept() -> None:
    each = course(batches=OFFSETS_MAX + 1)
    each.record_offsets([1], [5])
    assert each.offsets == []


def test_it_is_safe_when_all_of_it_is_written_and_forced() -> None:
    each = course()
    assert not each.is_durable
    each.applied, each.undurable_parts = True, 1
    assert not each.is_durable
    each.undurable_parts, each.pending_targets = 0, 1
    assert not each.is_durable, "a target lost its part and has to get it again"
    each.pending_targets = 0
    assert each.is_durable
