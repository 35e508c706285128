"""The sink of batch writes through real Spark: all or nothing, and once with an application's version."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import tfmq
from tests.spark.test_stream_sink import messages, payloads
from tools.rigs.live_server import LiveServer


@pytest.fixture
def admin(spark_server: LiveServer) -> Iterator[tfmq.Admin]:
    with tfmq.Admin(spark_server.address) as made:
        yield made


@pytest.fixture(autouse=True)
def registered(spark: Any) -> None:
    from tfmq.spark import register

    register(spark)


def write(frame: Any, server: LiveServer, mode: str = "append", **options: Any) -> None:
    frame.write.format("tfmq").mode(mode).options(servers=server.address, **options).save()


def refused(frame: Any, server: LiveServer, mode: str = "append", **options: Any) -> str:
    """What the user reads."""
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException) as caught:
        write(frame, server, mode, **options)
    return str(caught.value)


def spark_groups(admin: tfmq.Admin) -> list[tuple[str, int, int]]:
    return [(each.group, each.sequence, each.rows) for each in admin.commit_groups()]


def test_all_columns_arrive_where_they_belong(spark: Any, spark_server: LiveServer, topic: str) -> None:
    rows = spark.sql(
        f"""select * from values
        ('one', cast('k1' as binary), 'red', '{topic}-a', 0), ('two', cast('k2' as binary), null, '{topic}-a', 1),
        (null, cast('k1' as binary), null, '{topic}-b', null), ('four', null, null, '{topic}-b', 1)
        as (value, key, tag, topic, partition)"""
    )
    write(rows.repartition(2), spark_server)
    first = [
        (each.partition, each.key, each.payload, each.tag) for each in messages(spark_server, f"{topic}-a")
    ]
    assert first == [(0, b"k1", b"one", "red"), (1, b"k2", b"two", None)]
    second = {each.payload: each for each in messages(spark_server, f"{topic}-b")}
    assert second[None].key == b"k1" and second[b"four"].partition == 1


def test_a_version_is_written_once_and_older_ones_are_refused(
    spark: Any, spark_server: LiveServer, topic: str, admin: tfmq.Admin
) -> None:
    rows = spark.range(10).selectExpr("cast(id as string) as value")
    for _ in range(2):
        write(rows, spark_server, topic=topic, txnAppId=topic, txnVersion=5)
    write(rows.limit(1), spark_server, topic=topic, txnAppId=topic, txnVersion=6)
    assert len(payloads(spark_server, topic)) == 11
    assert (f"spark-batch-{topic}", 6, 1) in spark_groups(admin)
    told = refused(rows, spark_server, topic=topic, txnAppId=topic, txnVersion=5)
    assert "has committed sequence 6 already, and 5 is older" in told and "only go up" in told
    told = refused(rows, spark_server, topic=topic, txnAppId=topic, txnVersion=6)
    assert "with 1 rows, and this is another total, 10" in told and "Traceback" not in told
    write(rows, spark_server, topic=topic, txnAppId=topic, txnVersion=6, allowOtherTotal="true")
    assert len(payloads(spark_server, topic)) == 11


def test_without_a_version_it_is_written_each_time_and_the_broker_keeps_nothing_of_it(
    spark: Any, spark_server: LiveServer, topic: str, admin: tfmq.Admin
) -> None:
    rows = spark.range(3).selectExpr("cast(id as string) as value")
    for _ in range(2):
        write(rows, spark_server, topic=topic)
    write(rows.limit(0), spark_server, topic=topic)
    assert payloads(spark_server, topic) == ["0", "0", "1", "1", "2", "2"]
    assert [each for each in spark_groups(admin) if each[0].startswith("spark-write-")] == []


def test_a_write_of_which_a_task_fails_leaves_nothing(
    spark: Any, spark_server: LiveServer, topic: str, admin: tfmq.Admin
) -> None:
    admin.create_topic(topic)
    bad = "if(id = 19, cast(raise_error('a bad row') as string), cast(id as string)) as value"
    rows = spark.range(0, 20, 1, 2).selectExpr(bad)
    assert "a bad row" in refused(rows, spark_server, topic=topic)
    assert [each for each in spark_groups(admin) if each[0].startswith("spark-write-")] == []
    assert "a bad row" in refused(rows, spark_server, topic=topic, txnAppId=topic, txnVersion=0)
    assert payloads(spark_server, topic) == []
    group = f"spark-batch-{topic}"
    while any(each.commit_group == group for each in admin.transactions(["open", "prepared"])):
        time.sleep(0.05)  # a task that Spark stops may live for a moment; its run is shut out
    write(rows.where("id < 19"), spark_server, topic=topic, txnAppId=topic, txnVersion=0)
    assert len(payloads(spark_server, topic)) == 19


def test_what_is_wrong_is_told_in_a_sentence_without_our_traceback(
    spark: Any, spark_server: LiveServer, topic: str
) -> None:
    rows = spark.range(3).selectExpr("cast(id as string) as value")
    told = refused(rows, spark_server, "overwrite", topic=topic)
    assert 'A topic only grows: use mode("append"), not "overwrite".' in told
    assert "The column value must be binary or string, not bigint: cast it." in refused(
        spark.range(3).withColumnRenamed("id", "value"), spark_server, topic=topic
    )
    told = refused(rows.selectExpr("repeat('x', 9000000) as value").limit(1), spark_server, topic=topic)
    assert "has 9000000 bytes, the broker takes 8388608" in told
    assert "Traceback" not in told and ".py" not in told


def test_a_broker_that_is_not_there_is_told_in_a_sentence(spark: Any, topic: str) -> None:
    from pyspark.errors import PySparkException

    rows = spark.range(3).selectExpr("cast(id as string) as value")
    with pytest.raises(PySparkException, match=r"Nothing listens at 127\.0\.0\.1:1:") as caught:
        rows.write.format("tfmq").mode("append").options(
            servers="127.0.0.1:1", topic=topic, timeout="300s"
        ).save()
    assert "Traceback" not in str(caught.value)
