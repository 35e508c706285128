"""The drivers that trials kill: they work, they say what fails, and nothing of them stays behind."""

import signal
from collections import Counter
from typing import Any

import pytest

from tests.spark.drivers import Drivers, Row, differing, sent, stored
from tools.rigs.live_driver import Died, Failed, LiveDriver, processes_of, stat_of

WAIT = {"do": "call", "function": "tests.spark.test_drivers:wait_in_a_task", "arguments": {}}
FAIL = {"do": "call", "function": "tests.spark.test_drivers:ask_for_nothing", "arguments": {}}


def ask_for_nothing(spark: Any) -> None:
    """What Spark refuses."""
    spark.sql("select * from nowhere").collect()


def wait_in_a_task(spark: Any) -> None:
    """Nothing, for ever, in a Python worker."""
    spark.sparkContext.parallelize([0], 1).foreach(lambda _: signal.pause())


def test_a_killed_driver_takes_its_jvm_and_its_python_workers_along(drivers: Drivers) -> None:
    driver = drivers.driver()
    assert drivers.driver() is driver, "as long as it lives there is one"
    with pytest.raises(Failed, match="nowhere"):
        driver.do(FAIL)
    driver.begin(WAIT)
    while not driver.workers():
        assert processes_of(driver.processes()[0]), "it is alive"
    mine = driver.processes()
    assert len(mine) >= 4, "the driver, the JVM, the daemon, a worker"
    driver.kill()
    assert [each for each in mine if stat_of(each)[:1] not in ([], ["Z"])] == []
    assert driver not in LiveDriver.alive
    with pytest.raises(Died):
        driver.answer()


def test_rows_are_compared_one_by_one() -> None:
    wanted: Counter[Row] = Counter({(b"a", b"1"): 1, (b"a", b"2"): 2, (None, b"3"): 1})
    assert differing(wanted, wanted) == {}
    found: Counter[Row] = Counter({(b"a", b"1"): 2, (b"a", b"2"): 1, (b"", b"3"): 1})
    assert set(differing(found, wanted)) == {"lost", "doubled", "strange"}
    assert differing(found, wanted)["lost"][0] == 2, "one that is to be there twice counts twice"


def test_what_was_sent_is_read_again(spark_server: Any, topic: str) -> None:
    wanted = sent(spark_server.address, topic, 250)
    assert len(wanted) == 250
    assert stored(spark_server.address, topic) == wanted
