"""Random kills of driver, tasks and broker of one long query; and that the rig sees sinks that lie."""

from pathlib import Path

import pytest

from tests.scale import SEED, scaled
from tests.spark.drivers import Drivers
from tools.rigs.live_server import LiveServer
from tools.rigs.spark import Rig
from tools.rigs.spark_liar import LIARS

KILLS = 50


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_fifty_random_kills_lose_and_double_no_row(drivers: Drivers, tmp_path: Path) -> None:
    before = set(LiveServer.alive)
    outcome = Rig(SEED, tmp_path, driver=drivers.driver()).run(max(2, scaled(KILLS)))
    assert outcome.faults == [], f"seed {outcome.seed}, {outcome}"
    assert sum(outcome.killed.values()) == max(2, scaled(KILLS))
    assert outcome.stored == outcome.sent > 0
    assert LiveServer.alive <= before


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("liar", LIARS)
def test_the_rig_sees_a_sink_that_lies(drivers: Drivers, tmp_path: Path, liar: str) -> None:
    outcome = Rig(SEED, tmp_path, liar, drivers.driver()).run(0)
    assert outcome.faults, liar
    assert {"losing": "lost", "doubling": "twice"}[liar] in outcome.faults[0]
