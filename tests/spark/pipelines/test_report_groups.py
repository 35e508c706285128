"""Dead letters by topic; groups' lags are asked of a broker in test_report.py."""

from pathlib import Path

import pytest

from tests.dead_letters.test_shelf import keeping
from tests.spark.pipelines.test_report_plot import EMPTY, FULL
from tfmq.dead_letters.sql_store import BlockingSqlStore
from tfmq.dead_letters.store import StoreAddress as StoreAddress
from tfmq.errors import TfmqError
from tfmq.spark.log_reader import SourceAddress
from tfmq.spark.pipelines.report import add_letters, combine_lags, read_group_lags


def test_letters_are_counted_by_topic_state_and_calls(tmp_path: Path) -> None:
    store = BlockingSqlStore(StoreAddress("path", str(tmp_path / "dead.db")))
    store.apply([keeping(0), keeping(1), keeping(2, next_ms=10**15)])
    store.close()
    orders, empty = add_letters(
        [FULL._replace(calls={}, letters={}), EMPTY], [str(tmp_path / "dead.db")], None
    )
    assert orders.letters == {"dead": 2, "waiting": 1} and sum(orders.calls.values()) == 3
    assert (empty.letters, empty.calls) == ({}, {})


def test_a_store_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(TfmqError, match="There are no dead letters at"):
        list(add_letters([FULL], [str(tmp_path / "no.db")], None))


def test_a_folder_knows_no_groups(tmp_path: Path) -> None:
    assert read_group_lags(SourceAddress(path=str(tmp_path)), ["orders"], 0) == {}


def test_a_lag_that_nobody_can_tell_is_not_none() -> None:
    assert combine_lags("g", [3, 0, 4], [1.5, 2.5]) == ("g", 7, 2.5)
    assert combine_lags("g", [3, -1], []) == ("g", -1, 0.0)
