"""kill -9 of the broker at each step of a micro-batch: the query goes on, and its output is its input, row by row."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spark.drivers import Drivers
from tests.spark.trial import Trial, trial_of
from tests.spark.wiretap import Exchange
from tools.rigs.live_driver import Failed
from tools.rigs.live_server import LiveServer

pytestmark = pytest.mark.timeout(600)  # a JVM on a busy machine takes its time to start
STEPS = ("BEGIN_TRANSACTION", "PRODUCE", "PREPARE_TRANSACTION", "COMMIT_GROUP")


@pytest.fixture
def trial(drivers: Drivers, spark_server: LiveServer, topic: str, tmp_path: Path) -> Iterator[Trial]:
    with trial_of(drivers, spark_server, topic, tmp_path) as each:
        yield each


@pytest.mark.long
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("moment", ["request", "reply"])
def test_a_broker_that_is_killed_at_a_step_loses_and_doubles_nothing(trial: Trial, step: str, moment: str) -> None:
    """Before it knows of the request, or after the reply that is lost."""
    trap = trial.tap.trap(step, moment, trial.kill_broker)  # type: ignore[arg-type]
    trial.run()
    trap.wait()
    assert trial.committed() == (0, len(trial.wanted))
    trial.check()


@pytest.mark.long
def test_a_broker_that_is_killed_after_its_answer_knows_what_it_said(trial: Trial) -> None:
    """The answer was heard; the next batch, and the same one again, are of the broker that came back."""
    trial.run()
    trial.server.kill()
    trial.server.start()
    trial.check()
    trial.more()
    trial.run()
    trial.forget_batches(1)
    trial.run()
    assert trial.committed()[0] == 1
    trial.check()


@pytest.mark.long
def test_a_broker_that_is_away_for_too_long_fails_the_query_and_nothing_else(trial: Trial) -> None:
    def away(exchange: Exchange) -> str:
        trial.server.kill()
        return "cut"

    trial.query |= {"sink": {**trial.query["sink"], "timeout": "1s"}, "tasks": 1}
    trap = trial.tap.trap("PREPARE_TRANSACTION", "request", away)
    with pytest.raises(Failed, match=r"127\.0\.0\.1"):
        trial.run()
    trap.wait()
    trial.server.start()
    trial.check_nothing_is_there()
    trial.run()
    trial.check()
