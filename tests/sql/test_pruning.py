"""Housekeeping: old rows go, unless the broker has not ended their transaction."""

from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy.engine import Engine

import tfmq
from tests.sql.helpers import put
from tfmq.errors import BadRequest
from tfmq.sql import database as rows
from tfmq.sql.database import COMMITTED, TABLE


@pytest.mark.long
def test_rows_that_the_broker_may_still_ask_for_stay(engine: Engine, tmp_path: Path) -> None:
    old = rows.utc_now() - timedelta(days=30)
    with tfmq.local_server(tmp_path / "data") as servers, tfmq.Producer(servers) as producer:
        in_doubt = producer.begin("prepared")
        in_doubt.send("orders", "1")
        in_doubt.prepare()
        is_open = producer.begin("open", timeout=100)
        is_open.send("orders", "2")
        with engine.begin() as connection:
            for xid in ("prepared", "open", "over"):
                put(connection, xid, COMMITTED, old)
            put(connection, "young", COMMITTED, rows.utc_now() - timedelta(days=6))
        with tfmq.Admin(servers) as admin:
            assert tfmq.sql.prune(engine, admin) == 1
            in_doubt.commit()
            is_open.rollback()
            assert tfmq.sql.prune(engine, admin) == 2
            assert tfmq.sql.prune(engine, admin) == 0
    with engine.connect() as connection:
        assert rows.read_state(connection, TABLE, "young") == COMMITTED


def test_without_the_broker_nothing_goes(sqlite_engine: Engine) -> None:
    with sqlite_engine.begin() as connection:
        put(connection, "x", COMMITTED, rows.utc_now() - timedelta(days=30))
    with tfmq.Admin("127.0.0.1:1", timeout=0.2) as admin, pytest.raises(tfmq.TfmqError):
        tfmq.sql.prune(sqlite_engine, admin)
    with pytest.raises(BadRequest):
        tfmq.sql.prune(sqlite_engine)
    with sqlite_engine.connect() as connection:
        assert rows.read_state(connection, TABLE, "x") == COMMITTED


def test_some_time_is_kept(sqlite_engine: Engine) -> None:
    with pytest.raises(BadRequest, match="older"):
        tfmq.sql.prune(sqlite_engine, older_than=timedelta(0))
