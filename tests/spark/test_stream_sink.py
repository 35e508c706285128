"""The sink of a streaming query through real Spark: each micro-batch once, whatever is run again."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import tfmq
from tfmq.errors import BadRequest, GroupFenced, GroupIncomplete, GroupStale
from tfmq.testing.broker import SimulatedBroker
from tools.rigs.live_server import LiveServer


@pytest.fixture
def sink(tfmq_broker: SimulatedBroker, spark_can_be_had: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`sink(batch, **options)` is one as Spark makes it for a task of that micro-batch, without Spark."""
    from pyspark import TaskContext

    from tfmq.spark import sinks as stream_sink

    def made(batch: int = 0, **options: str) -> Any:
        place = {stream_sink.QUERY_ID: "query-7", stream_sink.BATCH_ID: str(batch)}
        context = SimpleNamespace(getLocalProperty=place.get, partitionId=lambda: 0, taskAttemptId=lambda: 9)
        monkeypatch.setattr(TaskContext, "get", lambda: context)
        return stream_sink.stream_writer(
            {"servers": tfmq_broker.servers, "topic": "orders", **options}, text("value"), False
        )

    return made


def text(*columns: str) -> Any:
    from pyspark.sql.types import StringType, StructField, StructType

    return StructType([StructField(name, StringType()) for name in columns])


def rows(*values: str) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pydict({"value": pa.array(values, pa.string())})


def sent(broker: SimulatedBroker) -> list[bytes | None]:
    return [each.payload for each in broker.sent("orders")]


# One after the other, as Spark does it


def test_the_query_is_the_group_and_the_batch_its_sequence(
    sink: Callable[..., Any], tfmq_broker: SimulatedBroker
) -> None:
    for batch in (3, 4):
        message = sink(batch).write(rows("a", "b"))
        assert len(sent(tfmq_broker)) == 2 * (batch - 3)
        sink(batch).commit([message, None], batch)
    assert sent(tfmq_broker) == [b"a", b"b"] * 2
    (group,) = tfmq_broker.admin().commit_groups()
    assert (group.group, group.sequence, group.rows) == ("spark-stream-query-7..orders", 4, 2)


def test_each_attempt_is_a_run_of_its_own_and_an_aborted_one_is_shut_out(
    sink: Callable[..., Any], tfmq_broker: SimulatedBroker
) -> None:
    first = sink()
    message = first.write(rows("a"))
    sink().abort([message, None], 0)
    with pytest.raises(GroupFenced):
        first.write(rows("late"))
    sink().commit([sink().write(rows("b"))], 0)
    assert sent(tfmq_broker) == [b"b"]


def test_a_commit_that_is_done_again_changes_nothing_unless_the_total_is_another(
    sink: Callable[..., Any], tfmq_broker: SimulatedBroker
) -> None:
    sink().commit([sink().write(rows("a"))], 0)
    sink().commit([sink().write(rows("a"))], 0)
    with pytest.raises(GroupStale, match=r"Nothing was written\. Begin with a new checkpoint"):
        sink().commit([sink().write(rows("a", "b"))], 0)
    other = {"allowOtherTotal": "true"}
    sink(**other).commit([sink(**other).write(rows("a", "b"))], 0)
    assert sent(tfmq_broker) == [b"a"]


def test_a_batch_that_is_passed_over_is_said(
    sink: Callable[..., Any], tfmq_broker: SimulatedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """After a restart that is right; to a query with a copy of the checkpoint it says where its rows went."""
    with caplog.at_level(logging.WARNING, "tfmq.spark"):
        for _ in range(2):
            assert not caplog.messages
            sink().commit([sink().write(rows("a"))], 0)
    (said,) = caplog.messages
    assert said.startswith("Batch 0 was committed before, so these 1 rows were passed over")


def test_a_copy_of_a_checkpoint_with_another_topic_loses_nothing(
    sink: Callable[..., Any], tfmq_broker: SimulatedBroker
) -> None:
    for topic in ("orders", "copies"):
        sink(topic=topic).commit([sink(topic=topic).write(rows("a"))], 0)
        assert [each.payload for each in tfmq_broker.sent(topic)] == [b"a"]


def test_what_took_too_long_is_reported_with_the_option_for_it(
    sink: Callable[..., Any], tfmq_broker: SimulatedBroker
) -> None:
    message = sink(transactionTtl="5s").write(rows("a"))
    tfmq_broker.clock.advance(6)
    with pytest.raises(GroupIncomplete, match="waits for the option transactionTtl"):
        sink().commit([message], 0)


def test_nothing_is_requested_where_no_task_reports_anything(
    sink: Callable[..., Any], tfmq_broker: SimulatedBroker
) -> None:
    tfmq_broker.stop()
    sink().commit([], 0)
    sink().abort([None], 0)
    tfmq_broker.start()


def test_outside_of_a_micro_batch_nothing_is_written(spark_can_be_had: None) -> None:
    from tfmq.spark.sinks import stream_writer

    made = stream_writer({"servers": "127.0.0.1:1", "topic": "orders"}, text("value"), False)
    with pytest.raises(BadRequest, match="Spark does not pass the number of this micro-batch"):
        made.write(rows("a"))


def test_what_makes_no_sense_for_a_topic_is_refused(spark_can_be_had: None) -> None:
    from tfmq.spark.sinks import stream_writer

    options = {"servers": "127.0.0.1:1", "topic": "orders"}
    with pytest.raises(BadRequest, match='not "complete"'):
        stream_writer(options, text("value"), True)
    with pytest.raises(BadRequest, match="no column 'price'"):
        stream_writer(options, text("value", "price"), False)


# Through Spark


class Query:
    """A query from a folder of JSON files to a topic: one file is one micro-batch."""

    def __init__(self, spark: Any, server: LiveServer, folder: Path, topic: str) -> None:
        self.spark, self.server, self.topic = spark, server, topic
        self.input, self.checkpoint = folder / "input", folder / "checkpoint"
        self.input.mkdir()
        self.files = 0
        self.schema = "value string"
        self.options: dict[str, str] = {"topic": topic}

    def put(self, *rows: dict[str, Any] | str) -> None:
        """One more file."""
        written = [json.dumps(row if isinstance(row, dict) else {"value": row}) for row in rows]
        whole = self.input.parent / "whole"
        whole.write_text("\n".join(written))
        os.utime(whole, (1_700_000_000 + self.files,) * 2)  # files are read in the order of their times
        whole.rename(self.input / f"{self.files:05}.json")
        self.files += 1

    def frame(self) -> Any:
        return (
            self.spark.readStream.schema(self.schema)
            .option("maxFilesPerTrigger", 1)
            .option("latestFirst", "false")
            .json(str(self.input))
        )

    def start(self, frame: Any = None, mode: str = "append") -> Any:
        writer = (self.frame() if frame is None else frame).writeStream.format("tfmq").outputMode(mode)
        writer = writer.option("servers", self.server.address).options(**self.options)
        return writer.option("checkpointLocation", str(self.checkpoint)).trigger(availableNow=True).start()

    def run(self, frame: Any = None, mode: str = "append") -> Any:
        """To the end of what is there."""
        query = self.start(frame, mode)
        query.awaitTermination()
        return query

    def fails(self, frame: Any = None, mode: str = "append") -> str:
        """What the user reads."""
        from pyspark.errors import PySparkException

        with pytest.raises(PySparkException) as caught:
            self.run(frame, mode)
        return str(caught.value)

    def forget(self, *folders: str, batch: int) -> None:
        """The checkpoint does not know of that batch: "commits" not that it is done, "offsets" not what is in it."""
        for folder in folders:
            (self.checkpoint / folder / str(batch)).unlink()
            (self.checkpoint / folder / f".{batch}.crc").unlink(missing_ok=True)

    def fails_complete(self) -> str:
        self.put("a")
        return self.fails(self.frame().groupBy("value").count().select("value"), "complete")

    @property
    def group(self) -> str:
        query = json.loads((self.checkpoint / "metadata").read_text())["id"]
        return f"spark-stream-{query}..{self.topic}"


@pytest.fixture
def query(spark: Any, spark_server: LiveServer, tmp_path: Path, topic: str) -> Query:
    from tfmq.spark import register

    register(spark)
    return Query(spark, spark_server, tmp_path, topic)


@pytest.fixture
def admin(spark_server: LiveServer) -> Iterator[tfmq.Admin]:
    with tfmq.Admin(spark_server.address) as made:
        yield made


def messages(server: LiveServer, topic: str) -> list[Any]:
    """All that is there, a partition after the other."""
    found: list[Any] = []
    with tfmq.Consumer(server.address, topics=topic) as consumer:
        while batch := consumer.poll(0.0 if consumer.lag() == 0 else 60.0, 50_000):
            found += batch
    return sorted(found, key=lambda each: (each.partition, each.offset))


def fresh(query: Query) -> Path:
    folder = query.input.parent / "fresh"
    folder.mkdir()
    return folder


def payloads_or_none(query: Query) -> list[str]:
    """Also where the topic is not made yet."""
    with tfmq.Admin(query.server.address) as admin:
        there = query.topic in [each.name for each in admin.topics()]
    return payloads(query.server, query.topic) if there else []


def payloads(server: LiveServer, topic: str) -> list[str]:
    return sorted((each.payload or b"").decode() for each in messages(server, topic))


@pytest.mark.long
def test_each_micro_batch_is_in_the_topic_once_also_one_that_has_no_rows(query: Query) -> None:
    query.put("a", "b")
    query.put("nothing")
    query.run(query.frame().filter("value != 'nothing'"))
    query.put("c")
    query.run()
    assert payloads(query.server, query.topic) == ["a", "b", "c"]


@pytest.mark.long
def test_a_batch_that_is_committed_already_is_passed_over_however_many_tasks_it_has_now(
    query: Query, admin: tfmq.Admin
) -> None:
    query.put("a", "b", "c")
    query.run()
    query.forget("commits", batch=0)  # as a driver leaves it that is killed after the broker's commit
    query.put("d")
    query.run(query.frame().repartition(3))
    assert payloads(query.server, query.topic) == ["a", "b", "c", "d"]
    (group,) = [each for each in admin.commit_groups() if each.group == query.group]
    assert (group.sequence, group.rows, group.details["members"]) == (1, 1, 0)


@pytest.mark.long
def test_a_checkpoint_that_was_set_back_stops_the_query(query: Query) -> None:
    query.put("a")
    query.put("b", "c")
    query.run()
    query.forget("commits", batch=1)
    query.put("x", "y", "z")
    query.files = 1
    query.put("other", "rows", "than", "before")
    reported = query.fails()
    assert "has committed sequence 1 with 2 rows, and this is another total, 4" in reported
    assert f"tfmq tx forget-group {query.group}" in reported and "allowOtherTotal=true" in reported
    query.forget("commits", batch=0)
    query.forget("offsets", batch=1)
    reported = query.fails()
    assert "has committed sequence 1 already, and 0 is older" in reported and "tfmq tx forget-group" in reported
    assert payloads(query.server, query.topic) == ["a", "b", "c"]


@pytest.mark.long
def test_a_query_that_gives_other_rows_each_time_may_pass_over_what_is_committed(query: Query) -> None:
    query.options["allowOtherTotal"] = "true"
    query.put("a")
    query.run()
    query.forget("commits", batch=0)
    query.files = 0
    query.put("a", "b")
    query.put("c")
    query.run()
    assert payloads(query.server, query.topic) == ["a", "c"]


@pytest.mark.long
def test_a_batch_of_which_a_task_fails_leaves_nothing_and_is_run_again(query: Query, admin: tfmq.Admin) -> None:
    query.put("good", "bad")
    rows = query.frame().repartition(2)
    failing = rows.selectExpr("if(value = 'bad', cast(raise_error('a bad row') as string), value) as value")
    assert "a bad row" in query.fails(failing)
    assert payloads_or_none(query) == []
    query.run()
    assert payloads(query.server, query.topic) == ["bad", "good"]
    while any(each.commit_group == query.group for each in admin.transactions(["open", "prepared"])):
        time.sleep(0.05)  # a task that Spark stops may live for a moment; its sequence is committed


@pytest.mark.long
def test_what_is_wrong_is_reported_in_a_sentence_without_our_traceback(query: Query) -> None:
    query.put("a")
    query.options["topik"] = "orders"
    reported = query.fails()
    assert "tfmq has no option 'topik'. Did you mean 'topic'?" in reported
    assert "Traceback" not in reported and ".py" not in reported
    del query.options["topik"]
    reported = query.fails(query.frame().selectExpr("value", "7 as partition"))
    assert "A row asks for partition 7 of" in reported and "which has 2, from 0 on" in reported
    assert "Traceback" not in reported and ".py" not in reported
    assert (
        'use outputMode("append"), not "complete"'
        in Query(query.spark, query.server, fresh(query), query.topic).fails_complete()
    )
