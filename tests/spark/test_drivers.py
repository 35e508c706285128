"""The drivers that trials kill: they work, they say what fails. test_trials.py sees that nothing of them stays."""

from collections import Counter
from typing import Any

import pytest

from tests.spark.drivers import Drivers, Row, differing, sent, stored
from tools.rigs.live_driver import Failed

pytestmark = pytest.mark.timeout(600)  # a JVM on a busy machine takes its time to start
FAIL = {"do": "call", "function": "tests.spark.test_drivers:ask_for_nothing", "arguments": {}}


def ask_for_nothing(spark: Any) -> None:
    """What Spark refuses."""
    spark.sql("select * from nowhere").collect()


def test_a_driver_says_what_fails_and_goes_on(drivers: Drivers) -> None:
    driver = drivers.driver()
    assert drivers.driver() is driver, "as long as it lives there is one"
    for _ in range(2):
        with pytest.raises(Failed, match="nowhere"):
            driver.do(FAIL)


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
