"""Leftovers are looked for from the beginning, again and again, until the producer is closed."""

import asyncio
import gc
import os
import threading
import time
from pathlib import Path

import pytest
from sqlalchemy.engine import Engine

import tfmq.aio
from tests.sql.conftest import prepared_names
from tests.sql.test_commit_protocol import async_engine_of
from tests.sql.test_in_doubt import prepare, wait_until
from tfmq.sql import recovery
from tfmq.sql.in_doubt import prepared_name
from tfmq.sql.recovery import ScanResult, start_scanner
from tfmq.sql.session import broker_node
from tools.rigs.postgresql import PostgresServer


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "SCAN_SECONDS", 0.05)
    for each in list(recovery._scanners.values()):  # of tests before
        each.scan_now()
    wait_until(lambda: threads() == [])


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "tfmq-sql-leftovers"]


def test_a_leftover_goes_and_the_thread_ends_with_the_producer(postgres_engine: Engine, tmp_path: Path) -> None:
    with tfmq.local_server(tmp_path / "data") as servers, tfmq.Producer(servers) as producer:
        producer.begin("any").rollback()
        start_scanner(producer, postgres_engine)
        with tfmq.Producer(servers) as another:
            start_scanner(another, postgres_engine)
            assert len(threads()) == 1
        prepare(postgres_engine, prepared_name("tfmq.sql.x", broker_node(producer)), 1)
        wait_until(lambda: prepared_names(postgres_engine) == [])
    wait_until(lambda: threads() == [])


def test_a_producer_without_a_reference_ends_it_too(postgres_engine: Engine) -> None:
    producer = tfmq.Producer("127.0.0.1:1")
    start_scanner(producer, postgres_engine)
    producer.close()
    del producer
    gc.collect()
    wait_until(lambda: threads() == [])


def test_who_comes_later_is_looked_for_at_once(
    postgres_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "SCAN_SECONDS", 60.0)
    with tfmq.local_server(tmp_path / "data") as servers, tfmq.Producer(servers) as producer:
        producer.begin("any").rollback()
        start_scanner(producer, postgres_engine)
        time.sleep(0.2)
        prepare(postgres_engine, prepared_name("tfmq.sql.x", broker_node(producer)), 1)
        with tfmq.Producer(servers) as another:
            another.begin("other").rollback()
            start_scanner(another, postgres_engine)
            wait_until(lambda: prepared_names(postgres_engine) == [])


def test_a_forked_child_begins_its_own(postgres_engine: Engine) -> None:
    with tfmq.Producer("127.0.0.1:1", timeout=0.1) as producer:
        start_scanner(producer, postgres_engine)
        child = os.fork()
        if child == 0:
            os._exit(len(recovery._scanners))
        assert os.waitpid(child, 0)[1] == 0
        assert len(recovery._scanners) == 1


def test_while_something_waits_it_looks_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "SCAN_SECONDS", 30.0)
    assert recovery.scan_pause(ScanResult(finished=1, waiting=0)) == 30.0
    assert recovery.scan_pause(ScanResult(finished=0, waiting=1)) == recovery.WAITING_SCAN_SECONDS < 5


def test_in_a_loop_it_is_a_task(postgres_engine: Engine, tmp_path: Path) -> None:
    async def use(servers: str) -> None:
        engine = async_engine_of(postgres_engine)
        async with tfmq.aio.Producer(servers) as producer:
            await (await producer.begin("any")).rollback()
            start_scanner(producer, engine.sync_engine)
            prepare(postgres_engine, prepared_name("tfmq.sql.x", broker_node(producer)), 1)
            deadline = time.monotonic() + 10
            while prepared_names(postgres_engine):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
        while recovery._scanners:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        await engine.dispose()

    with tfmq.local_server(tmp_path / "data") as servers:
        asyncio.run(use(servers))
    assert threads() == []


def test_without_a_loop_it_waits_for_one(postgres_engine: Engine) -> None:
    engine = async_engine_of(postgres_engine)
    start_scanner(tfmq.aio.Producer("127.0.0.1:1"), engine.sync_engine)
    assert (recovery._scanners, threads()) == ({}, [])


def test_an_outage_is_reported_once_and_ends(
    postgres: PostgresServer, postgres_engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tfmq.local_server(tmp_path / "data") as servers, tfmq.Producer(servers) as producer:
        producer.begin("any").rollback()
        postgres.stop()
        start_scanner(producer, postgres_engine)
        wait_until(lambda: "scan for orphaned prepared transactions" in caplog.text)
        time.sleep(0.2)
        postgres.start()
        postgres_engine.dispose()
        prepare(postgres_engine, prepared_name("tfmq.sql.x", broker_node(producer)), 1)
        wait_until(lambda: prepared_names(postgres_engine) == [])
    assert caplog.text.count("scan for orphaned prepared transactions") == 1
