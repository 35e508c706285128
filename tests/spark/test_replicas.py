"""Spark beside a replicated broker: the folder of a standby is read by path, and queries go on at the next primary."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tfmq
from tests.replica_servers import addresses, primary_and_standby
from tools.rigs.failover import ReplicaServer

WAIT_SECONDS = 90.0


@pytest.fixture
def servers(tmp_path: Path, spark_can_be_had: None) -> Iterator[list[ReplicaServer]]:
    with primary_and_standby(tmp_path) as made:
        yield made


def send(servers: list[ReplicaServer], first: int, count: int) -> None:
    with tfmq.Producer(addresses(servers), timeout=60) as producer:
        sent = [producer.send("orders", str(number)) for number in range(first, first + count)]
        for each in sent:
            assert each.result(60).durability == "replicated"


def start(frame: Any, folder: Path, **options: str) -> Any:
    writer = frame.writeStream.option("checkpointLocation", str(folder / "checkpoint"))
    return writer.trigger(processingTime="200 milliseconds").options(**options)


def numbers(messages: Any) -> list[int]:
    return sorted(int(each) for each in messages)


@pytest.mark.long
def test_the_folder_of_a_standby_is_read_by_path_while_it_follows(
    spark: Any, servers: list[ReplicaServer], tmp_path: Path
) -> None:
    send(servers, 0, 300)
    two = servers[1]
    options = {"path": str(two.data), "subscribe": "orders", "startingOffsets": "earliest"}
    until = time.monotonic() + WAIT_SECONDS
    while not (two.data / "orders-0" / "log.mark").exists() and time.monotonic() < until:
        time.sleep(0.05)
    frame = spark.readStream.format("tfmq").options(**options).load()
    query = start(frame, tmp_path).format("memory").queryName("copied").start()

    def copied() -> list[int]:
        return numbers(row.value.decode() for row in spark.table("copied").select("value").collect())

    for count in (300, 600):
        while copied() != list(range(count)) and time.monotonic() < until:
            assert query.exception() is None
            time.sleep(0.3)
        assert copied() == list(range(count))
        if count == 300:
            send(servers, 300, 300)
    query.stop()
    assert two.state == "standby"


@pytest.mark.long
def test_a_query_goes_on_at_the_next_primary_and_copies_each_message_once(
    spark: Any, servers: list[ReplicaServer], tmp_path: Path
) -> None:
    one, two = servers
    send(servers, 0, 300)
    options = {"servers": addresses(servers), "timeout": "60s"}
    frame = spark.readStream.format("tfmq").options(**options, subscribe="orders", startingOffsets="earliest").load()
    query = start(frame.select("value"), tmp_path, **options, topic="copies").format("tfmq").start()
    until = time.monotonic() + WAIT_SECONDS
    while not query.recentProgress and time.monotonic() < until:
        assert query.exception() is None
        time.sleep(0.1)
    send(servers, 300, 300)
    one.kill()
    shutil.rmtree(one.data)
    send(servers, 600, 300)
    assert two.state == "ready"
    found: list[str] = []
    with tfmq.Consumer(addresses(servers), topics="copies") as consumer:
        while len(found) < 900 and time.monotonic() < until:
            assert query.exception() is None
            found += [message.text for message in consumer.poll(timeout=1.0)]
        found += [message.text for message in consumer.poll(timeout=0.5)]
    query.stop()
    assert numbers(found) == list(range(900))
