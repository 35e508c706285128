"""Operations beside: stepped by what they wait for, by time, and ended without a trace."""

import pytest

from tfmq.client.operation import BackgroundTasks, Event, Operation, Wait


class Rig:
    def __init__(self) -> None:
        self.now = 0.0
        self.steps: list[str] = []
        self.errors: list[Exception] = []
        self.tasks = BackgroundTasks(lambda: self.now)
        self.flag = Event()

    def waits_for_flag(self) -> Operation[None]:
        self.steps.append("begun")
        yield Wait((self.flag,))
        self.steps.append("flag")

    def waits_for_time(self) -> Operation[None]:
        while True:
            yield Wait((), 2.0)
            self.steps.append(f"{self.now:g}")

    def fails(self) -> Operation[None]:
        yield Wait((), 1.0)
        raise ValueError("planted")


def test_a_task_begins_at_once_and_goes_on_with_its_target() -> None:
    rig = Rig()
    task = rig.tasks.start(rig.waits_for_flag(), rig.errors.append)
    assert rig.steps == ["begun"]
    rig.flag.complete()
    assert rig.steps == ["begun", "flag"]
    assert task.done


def test_a_task_that_is_thrown_away_is_not_stepped_by_what_it_gives_up() -> None:
    rig = Rig()

    def gives_up() -> Operation[None]:
        try:
            yield Wait((rig.flag,))
        finally:
            rig.flag.complete()

    operation = gives_up()
    task = rig.tasks.start(operation, rig.errors.append)
    operation.close()  # as the garbage collector does
    assert rig.errors == [] and not task.done


def test_a_target_that_is_done_already_is_not_waited_for() -> None:
    rig = Rig()
    rig.flag.complete()
    assert rig.tasks.start(rig.waits_for_flag(), rig.errors.append).done


def test_time_moves_tasks_on_only_when_it_has_come() -> None:
    rig = Rig()
    rig.tasks.start(rig.waits_for_time(), rig.errors.append)
    for rig.now in (1.0, 2.0, 3.0, 4.5):
        rig.tasks.tick()
    assert rig.steps == ["2", "4.5"]
    assert rig.tasks.next_time() == 6.5


def test_an_error_goes_to_its_owner_and_ends_only_its_task() -> None:
    rig = Rig()
    rig.tasks.start(rig.fails(), rig.errors.append)
    rig.tasks.start(rig.waits_for_time(), rig.errors.append)
    rig.now = 2.0
    rig.tasks.tick()
    assert [str(error) for error in rig.errors] == ["planted"]
    assert rig.steps == ["2"]


def test_a_cancelled_task_leaves_nothing_behind() -> None:
    rig = Rig()
    task = rig.tasks.start(rig.waits_for_flag(), rig.errors.append)
    rig.tasks.cancel()
    assert task.done
    assert rig.flag.callbacks == []
    rig.flag.complete()
    assert rig.steps == ["begun"]
    assert rig.tasks.next_time() == float("inf")


def test_a_task_that_is_cancelled_from_inside_ends_at_its_next_wait() -> None:
    rig = Rig()
    ended: list[str] = []

    def cancels() -> Operation[None]:
        try:
            yield Wait((rig.flag,))
            rig.tasks.cancel()
            yield Wait((), 1.0)
        finally:
            ended.append("yes")

    task = rig.tasks.start(cancels(), rig.errors.append)
    rig.flag.complete()
    assert (task.done, ended, rig.errors) == (True, ["yes"], [])


def test_one_that_ctrl_c_ends_has_ended_so_that_it_can_be_begun_anew() -> None:
    tasks = BackgroundTasks(lambda: 0.0)

    def interrupted() -> Operation[None]:
        yield Wait((), 0.0)
        raise KeyboardInterrupt

    task = tasks.start(interrupted(), lambda error: None)
    with pytest.raises(KeyboardInterrupt):
        tasks.tick()
    assert task.done
