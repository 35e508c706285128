"""The sink of batch writes through real Spark: all or nothing, and once with an application's version."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

import tfmq
from tests.spark.test_stream_sink import messages, payloads, rows, sent, text
from tfmq.errors import BadRequest, ConnectionFailed, GroupFenced, GroupIncomplete, GroupStale, TfmqError
from tfmq.testing.broker import SimulatedBroker
from tools.rigs.live_server import LiveServer


@pytest.fixture
def admin(spark_server: LiveServer) -> Iterator[tfmq.Admin]:
    with tfmq.Admin(spark_server.address) as made:
        yield made


def one_by_one(broker: SimulatedBroker, *tasks: tuple[str, ...], overwrite: bool = False, **options: str) -> Any:
    """A sink, and the messages of its tasks, as Spark does it, without Spark."""
    from tfmq.spark.sinks import batch_writer

    given = {"servers": broker.servers, "topic": "orders", **options}
    made = batch_writer(given, text("value"), overwrite)
    return made, [made.write(rows(*each)) for each in tasks]


# One after the other, as Spark does it


@pytest.mark.usefixtures("spark_can_be_had")
def test_a_write_is_committed_and_nothing_of_it_stays(tfmq_broker: SimulatedBroker) -> None:
    for _ in range(2):
        made, reported = one_by_one(tfmq_broker, ("a", "b"), ("c",))
        assert len(sent(tfmq_broker)) % 3 == 0
        made.commit([*reported, None])
    assert sent(tfmq_broker) == [b"a", b"b", b"c"] * 2
    assert tfmq_broker.admin().commit_groups() == []
    made, reported = one_by_one(tfmq_broker, ())
    made.commit(reported)
    assert tfmq_broker.admin().commit_groups() == []


@pytest.mark.usefixtures("spark_can_be_had")
def test_an_abort_drops_also_unreported_members(tfmq_broker: SimulatedBroker) -> None:
    made, _ = one_by_one(tfmq_broker, ("a",))
    made.abort([None])
    assert tfmq_broker.admin().transactions(["open", "prepared"]) == []


@pytest.mark.usefixtures("spark_can_be_had")
def test_a_task_that_comes_after_the_abort_leaves_nothing(tfmq_broker: SimulatedBroker) -> None:
    """Spark aborts while tasks that it could not stop are at work."""
    made, reported = one_by_one(tfmq_broker, ("a",))

    def slow() -> Iterator[Any]:
        yield from rows("b")
        made.abort([*reported, None])
        yield from rows("c")

    with pytest.raises(TfmqError, match=r"Nothing of it is visible|was aborted"):
        made.write(slow())
    with pytest.raises(GroupFenced):
        made.write(rows("d"))
    assert tfmq_broker.admin().transactions(["open", "prepared"]) == []
    assert [each.details["members"] for each in tfmq_broker.admin().commit_groups()] == [0]
    tfmq_broker.clock.advance(86_401)
    made, reported = one_by_one(tfmq_broker, ("e",))
    made.commit(reported)
    assert tfmq_broker.admin().commit_groups() == []
    assert sent(tfmq_broker) == [b"e"]


@pytest.mark.usefixtures("spark_can_be_had")
def test_an_applications_version_is_written_once_and_stays_known(tfmq_broker: SimulatedBroker) -> None:
    for _ in range(2):
        made, reported = one_by_one(tfmq_broker, ("a",), txnAppId="app", txnVersion="3")
        made.commit(reported)
    assert sent(tfmq_broker) == [b"a"]
    (group,) = tfmq_broker.admin().commit_groups()
    assert (group.group, group.sequence) == ("spark-batch-app..orders", 3)
    with pytest.raises(GroupStale, match="only go up"):
        one_by_one(tfmq_broker, ("b",), txnAppId="app", txnVersion="2")


@pytest.mark.usefixtures("spark_can_be_had")
def test_a_version_that_is_passed_over_is_said(tfmq_broker: SimulatedBroker, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tfmq.spark"):
        for _ in range(2):
            made, reported = one_by_one(tfmq_broker, ("a",), txnAppId="app", txnVersion="3")
            assert not caplog.records
            made.commit(reported)
    assert sent(tfmq_broker) == [b"a"]
    (said,) = caplog.messages
    assert said.startswith(
        "Version 3 of spark-batch-app..orders was committed before, so these 1 rows were passed over"
    )


@pytest.mark.usefixtures("spark_can_be_had")
def test_one_version_of_an_application_goes_to_each_of_its_topics(tfmq_broker: SimulatedBroker) -> None:
    for topic in ("orders", "copies"):
        made, reported = one_by_one(tfmq_broker, ("a",), topic=topic, txnAppId="app", txnVersion="3")
        made.commit(reported)
        assert [each.payload for each in tfmq_broker.sent(topic)] == [b"a"]


@pytest.mark.usefixtures("spark_can_be_had")
def test_a_new_beginning_is_explained(tfmq_broker: SimulatedBroker) -> None:
    """A checkpoint was deleted, and its foreachBatch counts from 0 again."""
    for version in ("0", "1"):
        made, reported = one_by_one(tfmq_broker, ("a",), txnAppId="app", txnVersion=version)
        made.commit(reported)
    with pytest.raises(GroupStale, match=r"another txnAppId, or .*: tfmq tx forget-group spark-batch-app\.\.orders\."):
        one_by_one(tfmq_broker, ("a",), txnAppId="app", txnVersion="0")


@pytest.mark.usefixtures("spark_can_be_had")
def test_a_write_that_takes_longer_than_its_rows_wait_gets_an_error_with_the_option(
    tfmq_broker: SimulatedBroker,
) -> None:
    made, reported = one_by_one(tfmq_broker, ("a",), transactionTtl="10s")
    tfmq_broker.clock.advance(11)
    with pytest.raises(GroupIncomplete, match="the option transactionTtl, which must be longer"):
        made.commit(reported)
    assert sent(tfmq_broker) == []


@pytest.mark.usefixtures("spark_can_be_had")
def test_overwriting_is_refused(tfmq_broker: SimulatedBroker) -> None:
    with pytest.raises(BadRequest, match='not "overwrite"'):
        one_by_one(tfmq_broker, overwrite=True)


@pytest.mark.usefixtures("spark_can_be_had")
def test_where_no_broker_is_the_driver_says_so_soon(tfmq_broker: SimulatedBroker) -> None:
    tfmq_broker.stop()
    began = tfmq_broker.clock.monotonic()
    with pytest.raises(ConnectionFailed):
        one_by_one(tfmq_broker, timeout="300s")
    assert tfmq_broker.clock.monotonic() - began < 5
    tfmq_broker.start()


# Through Spark


@pytest.fixture
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


@pytest.mark.long
def test_all_columns_arrive_where_they_belong(
    spark: Any, registered: None, spark_server: LiveServer, topic: str
) -> None:
    frame = spark.sql(
        f"""select * from values
        ('one', cast('k1' as binary), 'red', '{topic}-a', 0), ('two', cast('k2' as binary), null, '{topic}-a', 1),
        (null, cast('k1' as binary), null, '{topic}-b', null), ('four', null, null, '{topic}-b', 1)
        as (value, key, tag, topic, partition)"""
    )
    write(frame.repartition(2), spark_server)
    first = [(each.partition, each.key, each.payload, each.tag) for each in messages(spark_server, f"{topic}-a")]
    assert first == [(0, b"k1", b"one", "red"), (1, b"k2", b"two", None)]
    second = {each.payload: each for each in messages(spark_server, f"{topic}-b")}
    assert second[None].key == b"k1" and second[b"four"].partition == 1


@pytest.mark.long
def test_a_version_is_written_once_and_older_ones_are_refused(
    spark: Any, registered: None, spark_server: LiveServer, topic: str, admin: tfmq.Admin
) -> None:
    frame = spark.range(10).selectExpr("cast(id as string) as value")
    for _ in range(2):
        write(frame, spark_server, topic=topic, txnAppId=topic, txnVersion=5)
    write(frame.limit(1), spark_server, topic=topic, txnAppId=topic, txnVersion=6)
    assert len(payloads(spark_server, topic)) == 11
    assert (f"spark-batch-{topic}..{topic}", 6, 1) in spark_groups(admin)
    reported = refused(frame, spark_server, topic=topic, txnAppId=topic, txnVersion=5)
    assert "has committed sequence 6 already, and 5 is older" in reported and "only go up" in reported
    reported = refused(frame, spark_server, topic=topic, txnAppId=topic, txnVersion=6)
    assert "with 1 rows, and this is another total, 10" in reported and "Traceback" not in reported
    write(frame, spark_server, topic=topic, txnAppId=topic, txnVersion=6, allowOtherTotal="true")
    assert len(payloads(spark_server, topic)) == 11


@pytest.mark.long
def test_without_a_version_it_is_written_each_time_and_the_broker_keeps_nothing_of_it(
    spark: Any, registered: None, spark_server: LiveServer, topic: str, admin: tfmq.Admin
) -> None:
    frame = spark.range(3).selectExpr("cast(id as string) as value")
    before = spark_groups(admin)
    for _ in range(2):
        write(frame, spark_server, topic=topic)
    write(frame.limit(0), spark_server, topic=topic)
    assert payloads(spark_server, topic) == ["0", "0", "1", "1", "2", "2"]
    assert spark_groups(admin) == before


@pytest.mark.long
def test_a_write_of_which_a_task_fails_leaves_nothing(
    spark: Any, registered: None, spark_server: LiveServer, topic: str, admin: tfmq.Admin
) -> None:
    admin.create_topic(topic)
    bad = "if(id = 19, cast(raise_error('a bad row') as string), cast(id as string)) as value"
    frame = spark.range(0, 20, 1, 2).selectExpr(bad)
    assert "a bad row" in refused(frame, spark_server, topic=topic)
    while any(each.commit_group.startswith("spark-write-") for each in admin.transactions(["open", "prepared"])):
        time.sleep(0.05)
    assert {each[1:] for each in spark_groups(admin) if each[0].startswith("spark-write-")} == {(-1, 0)}
    assert "a bad row" in refused(frame, spark_server, topic=topic, txnAppId=topic, txnVersion=0)
    assert payloads(spark_server, topic) == []
    group = f"spark-batch-{topic}..{topic}"
    while any(each.commit_group == group for each in admin.transactions(["open", "prepared"])):
        time.sleep(0.05)  # a task that Spark stops may live for a moment; its run is shut out
    write(frame.where("id < 19"), spark_server, topic=topic, txnAppId=topic, txnVersion=0)
    assert len(payloads(spark_server, topic)) == 19


@pytest.mark.long
def test_what_is_wrong_is_reported_in_a_sentence_without_our_traceback(
    spark: Any, registered: None, spark_server: LiveServer, topic: str
) -> None:
    frame = spark.range(3).selectExpr("cast(id as string) as value")
    reported = refused(frame, spark_server, "overwrite", topic=topic)
    assert 'A topic only grows: use mode("append"), not "overwrite".' in reported
    assert "The column value must be binary or string, not bigint: cast it." in refused(
        spark.range(3).withColumnRenamed("id", "value"), spark_server, topic=topic
    )
    reported = refused(frame.selectExpr("repeat('x', 9000000) as value").limit(1), spark_server, topic=topic)
    assert "has 9000000 bytes, the broker takes 8388608" in reported
    assert "Traceback" not in reported and ".py" not in reported


def test_a_broker_that_is_not_there_is_reported_in_a_sentence(spark: Any, registered: None, topic: str) -> None:
    from pyspark.errors import PySparkException

    frame = spark.range(3).selectExpr("cast(id as string) as value")
    with pytest.raises(PySparkException, match=r"Nothing listens at 127\.0\.0\.1:1:") as caught:
        frame.write.format("tfmq").mode("append").options(servers="127.0.0.1:1", topic=topic, timeout="300s").save()
    assert "Traceback" not in str(caught.value)
