"""Whatever dies or fails between Spark and the broker, the output of a query is its input, row by row."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scale import FRACTION, SCALE
from tests.spark.drivers import Drivers
from tests.spark.trial import Trial, kill_client, lose, trial_of, until_empty
from tests.spark.wiretap import Exchange
from tools.rigs.live_driver import Died, Failed, LiveDriver, command_of, stat_of
from tools.rigs.live_server import LiveServer

pytestmark = pytest.mark.timeout(600)  # a JVM on a busy machine takes its time to start
TASK_STEPS = ("BEGIN_TRANSACTION", "PRODUCE", "PREPARE_TRANSACTION")
STEPS = (*TASK_STEPS, "COMMIT_GROUP")


@pytest.fixture
def trial(drivers: Drivers, spark_server: LiveServer, topic: str, tmp_path: Path) -> Iterator[Trial]:
    with trial_of(drivers, spark_server, topic, tmp_path) as each:
        yield each


# Tasks


@pytest.mark.long
@pytest.mark.parametrize("moment", ["request", "reply"])
def test_a_task_that_is_killed_around_its_prepare_is_done_again(trial: Trial, moment: str) -> None:
    killed: list[str] = []

    def kill(exchange: Exchange) -> str:
        killed.append(command_of(exchange.process()))
        return kill_client(exchange)

    trap = trial.tap.trap("PREPARE_TRANSACTION", moment, kill)  # type: ignore[arg-type]
    trial.run()
    trap.wait()
    assert "pyspark.daemon" in killed[0], "a worker that ran a task"
    assert trial.tap.seen.count("PREPARE_TRANSACTION") > trial.query["tasks"], "it was done again"
    trial.check()


@pytest.mark.long
def test_a_task_that_fails_once_is_done_again(trial: Trial) -> None:
    for number in range(3):
        (trial.failing / f"once-{number}").touch()
    trial.run(failing=str(trial.failing))
    assert list(trial.failing.iterdir()) == [], "they have failed"
    trial.check()


@pytest.mark.long
def test_a_query_that_fails_always_writes_nothing_and_all_of_it_when_it_is_repaired(trial: Trial) -> None:
    (trial.failing / "always").touch()
    for _ in range(2):
        with pytest.raises(Failed, match="planted: this task fails always"):
            trial.run(failing=str(trial.failing))
    trial.check_nothing_is_there()
    (trial.failing / "always").unlink()
    trial.run(failing=str(trial.failing))
    trial.check()


# The driver


@pytest.mark.long
@pytest.mark.parametrize("moment", ["request", "reply"])
def test_a_driver_that_is_killed_around_its_commit_goes_on_from_its_checkpoint(trial: Trial, moment: str) -> None:
    trap = trial.tap.trap("COMMIT_GROUP", moment, trial.kill_driver)  # type: ignore[arg-type]
    driver = trial.driver
    with pytest.raises(Died):
        trial.run()
    trap.wait()
    assert driver not in LiveDriver.alive
    assert len(trial.killed) >= 4, "the driver, its JVM, Python workers and the process that commits"
    assert [each for each in trial.killed if stat_of(each)[:1] not in ([], ["Z"])] == []
    batch, rows = trial.committed()
    assert (batch, rows) == ((-1, 0) if moment == "request" else (0, len(trial.wanted)))
    trial.more()
    trial.run(tasks=2)
    assert trial.committed()[0] == 1
    trial.check()


@pytest.mark.skipif(SCALE <= FRACTION, reason="cannot be had here: under the full counts only, a JVM more")
def test_a_task_that_outlives_its_driver_adds_nothing(trial: Trial) -> None:
    alone: list[int] = []

    def orphan(exchange: Exchange) -> None:
        """The driver and its JVM die, and the task goes on."""
        driver, worker = trial.driver, exchange.process()
        for process in driver.processes():
            if "java" in command_of(process) or process == driver.processes()[0]:
                os.kill(process, signal.SIGKILL)
        alone.append(worker)

    trap = trial.tap.trap("PREPARE_TRANSACTION", "request", orphan)
    dying = trial.driver
    with pytest.raises(Died):
        trial.run()
    trap.wait()
    left = until_empty(lambda: [each for each in trial.unfinished() if each.state == "open"])
    assert not left, "it has prepared, or is gone"
    dying.kill()
    assert alone
    trial.run()
    trial.check()


# The network


@pytest.mark.long
def test_lost_replies_of_each_step_are_asked_for_again(trial: Trial) -> None:
    traps = [trial.tap.trap(step, "reply", lose) for step in STEPS]
    trial.run()
    for trap in traps:
        trap.wait()
    assert trial.tap.seen.count("COMMIT_GROUP") == 2
    trial.check()


# Time, and what a user does


@pytest.mark.long
def test_what_expired_before_its_commit_is_sent_again(trial: Trial) -> None:
    def hold(exchange: Exchange) -> None:
        """Until nothing is prepared any more; of slow tasks the first may have expired before the last is done."""
        assert trial.tap.seen.count("PREPARE_TRANSACTION") >= trial.query["tasks"]
        assert not until_empty(trial.unfinished), "they have expired"

    trial.query["sink"]["transactionTtl"] = "1s"
    trap = trial.tap.trap("COMMIT_GROUP", "request", hold)
    with pytest.raises(Failed, match="prepared") as failed:
        trial.run()
    trap.wait()
    assert "Traceback" not in str(failed.value)
    trial.check_nothing_is_there()
    trial.query["sink"]["transactionTtl"] = "10m"
    trial.run()
    trial.check()


@pytest.mark.long
@pytest.mark.parametrize("tasks", [(3, 1), (1, 4)][: 1 if SCALE <= FRACTION else 2])
def test_a_restart_may_have_another_number_of_tasks(trial: Trial, tasks: tuple[int, int]) -> None:
    """The process that commits dies: the batch that is done again was only prepared, or is committed already."""
    before, after = tasks
    trial.run(tasks=before)
    for moment in ("request", "reply"):
        trial.more()
        trap = trial.tap.trap("COMMIT_GROUP", moment, kill_client)
        with pytest.raises(Failed):
            trial.run(tasks=before)
        trap.wait()
        trial.run(tasks=after)
    assert trial.committed()[0] == 2
    trial.check()


@pytest.mark.long
def test_a_checkpoint_that_was_rolled_back_is_refused_and_nothing_is_written(trial: Trial) -> None:
    for _ in range(3):
        trial.more(100)
        trial.run()
    trial.check()
    written = trial.wanted.copy()
    trial.more(100)
    trial.forget_batches(1)
    with pytest.raises(Failed, match="has committed sequence 2 already, and 1 is older") as failed:
        trial.run()
    assert "Traceback" not in str(failed.value)
    assert trial.committed()[0] == 2
    trial.wanted = written
    trial.check()


@pytest.mark.long
def test_the_last_batch_with_other_rows_is_refused_and_nothing_is_written(trial: Trial) -> None:
    trial.run()
    trial.check()
    written = trial.wanted.copy()
    trial.more(100)
    trial.forget_batches(0)
    with pytest.raises(Failed, match="this is another total"):
        trial.run()
    trial.wanted = written
    trial.check()
