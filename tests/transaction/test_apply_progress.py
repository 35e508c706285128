"""A decision that is being applied: waiting clients are notified once, with the true state."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from journal.testing import SimulatedClock
from tests.transaction.rig import BILLS, ORDERS
from tests.transaction.targets import Append, Targets
from tfmq.apply_target import AppendResult, StoredDelayedBatch
from tfmq.broker.timers import Timers
from tfmq.errors import StorageStopped
from tfmq.transaction.applier import Applier
from tfmq.transaction.apply_progress import (
    FSYNC_DELAY_SECONDS,
    OFFSETS_MAX,
    RETRY_SECONDS,
    ApplyProgress,
    ApplyTask,
    FlushTracker,
)
from tfmq.transaction.model import Decision, TargetPart


def course(batches: int = 0) -> ApplyProgress:
    return ApplyProgress(Decision(100, 0, ()), batches=batches)


class Ears:
    def __init__(self) -> None:
        self.heard: list[tuple[str, BaseException | None]] = []

    def __call__(self, course: ApplyProgress, error: BaseException | None) -> None:
        self.heard.append((course.state, error))


def test_who_waits_is_notified_when_it_is_applied() -> None:
    each, ears = course(), Ears()
    each.add_callback(ears)
    assert ears.heard == []
    each.applied = True
    each.notify()
    each.notify()
    assert ears.heard == [("committed", None)]


def test_a_later_callback_is_called_at_once() -> None:
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


def test_a_decision_that_may_be_lost_is_reported_as_an_error_to_all_who_ask() -> None:
    each, early, late, error = course(), Ears(), Ears(), StorageStopped()
    each.add_callback(early)
    each.failure = error
    each.notify()
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


def test_it_is_safe_when_all_of_it_is_written_and_fsynced() -> None:
    each = course()
    assert not each.is_durable
    each.applied, each.undurable_tasks = True, 1
    assert not each.is_durable
    each.undurable_tasks, each.pending_targets = 0, 1
    assert not each.is_durable, "a target lost its part and has to get it again"
    each.pending_targets = 0
    assert each.is_durable


# Written everywhere is not enough: a decision is settled when all of it is on the disk.


class Scene:
    """Targets to which parts are written by hand."""

    def __init__(self) -> None:
        self.clock = SimulatedClock()
        self.timers = Timers(self.clock)
        self.targets = Targets()
        self.targets.automatic = False
        self.settled: list[int] = []
        self.settling = FlushTracker(self.targets, self.timers, lambda course: self.settled.append(course.decision.lsn))

    def write(self, key: int, *courses: ApplyProgress) -> None:
        """One append with a part of each of the courses."""
        target = self.targets.target(key)
        place = courses[-1].decision.lsn
        target.appends.append(Append((place, 1), [], 0))
        parts = [ApplyTask(course, TargetPart(key, "topic", 1, 10, 1)) for course in courses]
        self.settling.add_written(AppendResult(key, target.end, ()), parts)

    def advance(self, seconds: float = 2 * FSYNC_DELAY_SECONDS) -> None:
        end = self.clock.monotonic() + seconds
        while (due := self.timers.next_due()) is not None and due <= end:
            self.clock.advance(max(0.0, due - self.clock.monotonic()))
            self.timers.tick(self.clock.monotonic())
        self.clock.advance(max(0.0, end - self.clock.monotonic()))

    def forces(self) -> list[int]:
        return [asked[1] for asked in self.targets.asked if asked[0] == "force"]


def course_of_settling(place: int) -> ApplyProgress:
    made = ApplyProgress(Decision(place, 0, ()))
    made.applied = True
    return made


def test_a_decision_is_settled_when_every_target_has_fsynced_its_part() -> None:
    scene, each = Scene(), course_of_settling(100)
    scene.write(ORDERS, each)
    scene.write(BILLS, each)
    scene.advance()
    assert sorted(scene.forces()) == sorted([ORDERS, BILLS])
    scene.targets.force(ORDERS)
    assert scene.settled == []
    scene.targets.force(BILLS)
    assert scene.settled == [100]
    assert not scene.settling._written


def test_many_share_one_fsync_and_none_waits_for_long() -> None:
    scene = Scene()
    for place in range(100, 150):
        scene.write(ORDERS, course_of_settling(place))
    scene.advance(0.9 * FSYNC_DELAY_SECONDS)
    assert scene.forces() == []
    scene.advance(0.2 * FSYNC_DELAY_SECONDS)
    assert scene.forces() == [ORDERS]
    scene.targets.force()
    assert scene.settled == list(range(100, 150))
    scene.advance(10)
    assert scene.forces() == [ORDERS], "there is nothing left to ask for"


def test_what_was_written_during_an_fsync_is_asked_for_after_it() -> None:
    scene = Scene()
    scene.write(ORDERS, course_of_settling(100))
    scene.advance()
    scene.targets.target(ORDERS).forced = 1
    scene.write(ORDERS, course_of_settling(200))
    scene.targets._report_forced()
    assert scene.settled == [100]
    scene.advance()
    scene.targets.force()
    assert scene.settled == [100, 200]


def test_one_that_others_have_fsynced_is_settled_without_asking() -> None:
    scene = Scene()
    scene.write(ORDERS, course_of_settling(100))
    scene.targets.force()
    scene.advance()
    assert scene.settled == [100]
    assert scene.forces() == []


def test_one_that_is_not_applied_everywhere_waits() -> None:
    scene, each = Scene(), course_of_settling(100)
    each.applied = False
    scene.write(ORDERS, each)
    scene.targets.force()
    scene.advance()
    assert scene.settled == []
    assert each.undurable_tasks == 0, "the caller that ends it sees that all of it is durable"


def test_after_a_failed_fsync_nothing_is_settled_and_it_is_asked_again_later() -> None:
    scene = Scene()
    scene.write(ORDERS, course_of_settling(100))
    scene.advance()
    scene.targets.fail_force(ORDERS)
    scene.advance(RETRY_SECONDS / 2)
    assert (scene.settled, scene.forces()) == ([], [ORDERS])
    scene.advance(RETRY_SECONDS)
    assert scene.forces() == [ORDERS, ORDERS]


def test_a_target_that_came_back_is_asked_for_everything_not_known_to_be_there() -> None:
    scene = Scene()
    first, second, third = course_of_settling(100), course_of_settling(200), course_of_settling(300)
    scene.write(ORDERS, first)
    scene.write(ORDERS, second, third)
    scene.write(BILLS, third)
    parts = scene.settling.remove_undurable(ORDERS)
    assert [part.progress for part in parts] == [first, second, third]
    assert [each.undurable_tasks for each in (first, second, third)] == [0, 0, 1]
    assert scene.settling.remove_undurable(ORDERS) == []
    scene.targets.force()
    scene.advance()
    assert scene.settled == [300]


def test_what_is_for_a_topic_that_is_gone_needs_no_fsync() -> None:
    scene = Scene()
    scene.write(ORDERS, course_of_settling(100))
    scene.targets.delete(16)
    scene.advance()
    assert scene.settled == [100]


def force_all(scene: Scene) -> Callable[[], int]:
    ended: list[bool] = []
    scene.settling.fsync_all(lambda: ended.append(True))
    return lambda: len(ended)


def test_at_the_end_everything_is_fsynced_that_can_be() -> None:
    scene = Scene()
    scene.write(ORDERS, course_of_settling(100))
    scene.write(BILLS, course_of_settling(200))
    scene.settling.close()
    ended = force_all(scene)
    assert ended() == 0
    scene.targets.force(ORDERS)
    scene.targets.fail_force(BILLS)
    assert ended() == 1
    assert scene.settled == [100]
    assert scene.timers.next_due() is None


def test_with_nothing_to_fsync_the_end_comes_at_once() -> None:
    assert force_all(Scene())() == 1


def test_due_times_are_given_back_also_where_a_sweep_sees_the_fsync_before_they_are_noted() -> None:
    """A force notifies its callers one after the other: the first removes what the others wait for."""
    scene, each, settled = Scene(), course_of_settling(100), list[Decision]()
    each.offsets = [-1]
    store = cast(Any, SimpleNamespace(journal_id=5, complete=settled.append))
    applier = Applier(
        store,
        scene.targets,
        timers=scene.timers,
        run=lambda work, done: None,
        release_space=lambda size: None,
        on_applied=lambda ended: None,
        mark_ready=lambda: None,
    )
    scene.settling = applier.flush_tracker
    delayed = StoredDelayedBatch(7, 0, array("Q", [1, 2, 3]))
    applier.record_delayed(AppendResult(ORDERS, 1000, (), [delayed]), [(each, [0], [delayed])])
    scene.write(ORDERS, each)
    scene.targets.target(ORDERS).forced = 1
    scene.advance()
    scene.targets.force(ORDERS)
    assert each.delayed == {0: delayed} and settled == [each.decision]
    assert applier.due_words == 0
