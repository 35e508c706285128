"""The source through a real Spark from a real broker: what is read, how queries end, what users read when wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

import tfmq
from tests.scale import scaled
from tfmq.cli.main import run
from tfmq.spark import missing_requirement, pyspark_version
from tfmq.spark.log_reader import SourceAddress, open_log_reader
from tools.rigs.live_server import LiveServer

COLUMNS = ["key", "value", "topic", "partition", "offset", "timestamp", "tag", "attributes", "id"]
WAIT_SECONDS = 100


@pytest.fixture
def read(spark: Any, spark_server: LiveServer) -> Callable[..., Any]:
    """`read(topic, option=...)`: a batch."""

    def read(topic: str, **options: str) -> Any:
        given = {"servers": spark_server.address, "subscribe": topic, **options}
        return spark.read.format("tfmq").options(**given).load()

    return read


class Stream:
    """A streaming query of one topic into Parquet files; `options` may change between its runs."""

    def __init__(self, spark: Any, server: LiveServer, topic: str, folder: Path) -> None:
        self.spark, self.folder = spark, folder
        self.options = {"servers": server.address, "subscribe": topic, "startingOffsets": "earliest"}

    def start(self, **trigger: Any) -> Any:
        writer = self.spark.readStream.format("tfmq").options(**self.options).load().writeStream
        writer = writer.format("parquet").option("checkpointLocation", str(self.folder / "checkpoint"))
        return (writer.trigger(**trigger) if trigger else writer).start(str(self.folder / "out"))

    def run(self) -> Any:
        """To the end of what is there."""
        query = self.start(availableNow=True)
        assert query.awaitTermination(WAIT_SECONDS)
        return query

    def fails(self) -> str:
        """What the user reads."""
        from pyspark.errors import StreamingQueryException

        with pytest.raises(StreamingQueryException) as caught:
            self.run()
        return str(caught.value)

    def values(self) -> list[str]:
        return values(self.spark.read.parquet(str(self.folder / "out")))


@pytest.fixture
def stream(spark: Any, spark_server: LiveServer, topic: str, tmp_path: Path) -> Stream:
    return Stream(spark, spark_server, topic, tmp_path)


@pytest.fixture
def send(spark_server: LiveServer) -> Callable[..., None]:
    """`send(topic, *values, partition=...)`: durable when it returns; by a producer that knows the topic as it is."""

    def send(topic: str, *values: str, partition: int | None = None) -> None:
        with tfmq.Producer(spark_server.address) as producer:
            sent = [producer.send(topic, each, key=f"key of {each[:9]}", partition=partition) for each in values]
            for each in sent:
                each.result(60)

    return send


@pytest.fixture
def admin(spark_server: LiveServer) -> Iterator[tfmq.Admin]:
    with tfmq.Admin(spark_server.address) as made:
        yield made


def values(frame: Any) -> list[str]:
    return sorted(row.value.decode() for row in frame.select("value").collect())


def words(count: int, first: int = 0) -> list[str]:
    return sorted(f"v{number}" for number in range(first, first + count))


def refused(act: Callable[[], Any]) -> str:
    """What the user reads."""
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException) as caught:
        act()
    return str(caught.value)


@pytest.mark.long
def test_a_batch_has_every_message_with_all_its_columns(
    read: Callable[..., Any], send: Callable[..., None], topic: str
) -> None:
    expected = words(scaled(10_000))
    send(topic, *expected)
    frame = read(topic)
    assert frame.columns == COLUMNS
    rows = frame.collect()
    assert sorted(row.value.decode() for row in rows) == expected
    assert all(row.key.decode() == f"key of {row.value.decode()}" for row in rows)
    assert {row.topic for row in rows} == {topic}
    assert {row.partition for row in rows} == {0, 1}
    assert len({(row.partition, row.offset) for row in rows}) == len({row.id for row in rows}) == len(rows)


@pytest.mark.long
def test_the_schema_of_a_user_is_a_projection(
    spark: Any, spark_server: LiveServer, send: Callable[..., None], topic: str
) -> None:
    send(topic, "a", partition=1)
    reader = spark.read.format("tfmq").options(servers=spark_server.address, subscribe=topic)
    assert [tuple(row) for row in reader.schema("partition int, value binary").load().collect()] == [(1, b"a")]
    text = refused(reader.schema("value string").load().collect)
    assert "The column value is binary, not string" in text and "Traceback" not in text


@pytest.mark.long
def test_a_stream_has_every_message_once_whatever_is_said_of_its_beginning_later(
    stream: Stream, send: Callable[..., None], topic: str
) -> None:
    send(topic, *words(50))
    stream.options["maxOffsetsPerTrigger"] = "20"
    query = stream.run()
    assert [each["numInputRows"] for each in query.recentProgress if each["numInputRows"]] == [20, 20, 10]
    send(topic, *words(50, 50))
    stream.options["startingOffsets"] = "latest"
    stream.run()
    stream.run()
    assert stream.values() == words(100)


@pytest.mark.long
def test_partitions_that_come_while_a_query_runs_and_its_lag_in_the_group(
    stream: Stream,
    spark_server: LiveServer,
    admin: tfmq.Admin,
    send: Callable[..., None],
    topic: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    send(topic, *words(20))
    stream.options["groupId"] = topic
    query = stream.start()
    query.processAllAvailable()
    await_lag(admin, topic, 0)
    admin.grow_topic(topic, 3)
    send(topic, *words(20, 20), partition=2)
    query.processAllAvailable()
    await_lag(admin, topic, 0)
    query.stop()
    assert stream.values() == words(40)
    send(topic, *words(7, 40))
    assert run(("group", "list", "--json", "--servers", spark_server.address)) == 0
    listed = json.loads(capsys.readouterr().out)
    [row] = [row for row in listed if row["group"] == topic]
    assert (row["lag"], row["partitions"], row["live"]) == (7, 3, False)


def await_lag(admin: tfmq.Admin, group: str, lag: int) -> None:
    """The group is written when the next micro-batch is planned, at once where there is none."""
    deadline = time.monotonic() + WAIT_SECONDS
    while admin.group(group).lag != lag or not admin.group(group).offsets:
        assert time.monotonic() < deadline, admin.group(group)
        time.sleep(0.05)


@pytest.mark.long
def test_what_retention_took_stops_a_stream_with_one_sentence_or_is_passed_over(
    stream: Stream, admin: tfmq.Admin, send: Callable[..., None], topic: str
) -> None:
    admin.create_topic(topic, 1, {"log.segment_bytes": 1 << 20})
    stream.run()
    value = "x" * (1 << 19)
    for _ in range(4):
        send(topic, value)
    first = admin.truncate_before(topic, 0, admin.topic(topic).partitions[0].end_offset)
    assert first > 0
    text = stream.fails()
    assert f"Messages of {topic}-0 from offset 0 to {first} are gone" in text
    assert "failOnDataLoss is true" in text
    assert_no_frames(text)
    stream.options["failOnDataLoss"] = "false"
    stream.run()
    assert len(stream.values()) == admin.topic(topic).messages < 4


@pytest.mark.long
def test_a_topic_made_anew_is_no_continuation_of_the_old_one(
    stream: Stream, admin: tfmq.Admin, send: Callable[..., None], topic: str
) -> None:
    send(topic, "old")
    stream.run()
    admin.delete_topic(topic)
    send(topic, "new")
    text = stream.fails()
    assert f"The topic {topic} was deleted, and perhaps created again" in text
    assert_no_frames(text)
    stream.options["failOnDataLoss"] = "false"
    stream.run()
    assert stream.values() == ["new", "old"]


@pytest.mark.long
def test_segment_files_are_read_as_the_broker_sends_them(
    spark: Any, spark_server: LiveServer, read: Callable[..., Any], send: Callable[..., None], topic: str
) -> None:
    send(topic, *words(200))
    wire = sorted(map(tuple, read(topic).collect()))
    await_mark(spark_server, topic)
    straight = spark.read.format("tfmq").options(path=str(spark_server.data), subscribe=topic)
    assert len(wire) == 200
    assert sorted(map(tuple, straight.load().collect())) == wire


def await_mark(server: LiveServer, topic: str) -> None:
    """Until the folder shows all that the broker has."""
    deadline = time.monotonic() + WAIT_SECONDS

    def ends(address: SourceAddress) -> list[int]:
        with open_log_reader(address) as logs:
            return [each.end for each in logs.all_bounds(logs.partitions(topic))]

    while ends(SourceAddress(path=str(server.data))) != ends(SourceAddress(servers=server.address)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def assert_no_frames(text: str) -> None:
    assert "Traceback" not in text
    assert 'File "' not in text


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"subscrib": "orders"}, "tfmq has no option 'subscrib'. Did you mean 'subscribe'?"),
        ({"failOnDataLoss": "maybe"}, "failOnDataLoss must be true or false, not 'maybe'."),
        ({"servers": "127.0.0.1:1"}, "Nothing listens at 127.0.0.1:1: start tfmq-server, or correct the address."),
        ({"subscribe": "no-such-topic"}, "There is no topic 'no-such-topic'."),
    ],
)
def test_what_is_wrong_with_a_batch_is_one_sentence(
    read: Callable[..., Any], admin: tfmq.Admin, options: dict[str, str], sentence: str
) -> None:
    if "orders" not in {each.name for each in admin.topics()}:
        admin.create_topic("orders", 1)
    text = refused(lambda: read("orders", **options).collect())
    assert sentence in text
    assert_no_frames(text)


@pytest.mark.long
def test_what_is_wrong_with_a_stream_is_one_sentence(stream: Stream) -> None:
    stream.options["subscribe"] = "no-such-topic"
    text = stream.fails()
    assert "There is no topic 'no-such-topic'." in text
    assert_no_frames(text)
    stream.options["endingOffsets"] = "latest"
    text = refused(stream.run)
    assert "endingOffsets is an option of spark.read only" in text
    assert_no_frames(text)


@pytest.mark.long
def test_what_a_task_meets_is_one_sentence_too(
    read: Callable[..., Any], spark_server: LiveServer, send: Callable[..., None], topic: str
) -> None:
    send(topic, *words(100), partition=0)
    [segment] = (spark_server.data / f"{topic}-0").glob("*.zxQueue")
    with segment.open("r+b") as file:
        file.seek(100)
        file.write(b"XXXX")
    text = refused(read(topic).collect)
    assert f"{topic}-0" in text and "damaged" in text
    assert_no_frames(text)


def test_spark_finds_the_format_by_itself(spark: Any) -> None:
    import pyspark_tfmq
    from tfmq.spark.source import TfmqSource

    assert pyspark_tfmq.DefaultSource is TfmqSource
    assert TfmqSource.name() == "tfmq"
    tfmq.spark.register(spark)
    tfmq.spark.register(spark)


# What is said where PySpark is missing or too old, and that Spark goes on without tfmq then.


def pyspark(folder: Path, line: str) -> Path:
    """A pyspark that says of itself what `line` does."""
    (folder / "pyspark").mkdir()
    (folder / "pyspark" / "__init__.py").touch()
    (folder / "pyspark" / "version.py").write_text(line)
    return folder / "pyspark"


def spec(folder: Path) -> ModuleSpec:
    return ModuleSpec("pyspark", None, origin=str(folder / "__init__.py"))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('__version__: str = "4.0.1"', (4, 0)),
        ('__version__ = "4.2.0.dev1"', (4, 2)),
        ("__version__ = '5.10.0'", (5, 10)),
        ("nothing", None),
    ],
)
def test_the_version_of_a_pyspark(tmp_path: Path, line: str, found: tuple[int, int] | None) -> None:
    assert pyspark_version(pyspark(tmp_path, line)) == found
    assert pyspark_version(tmp_path / "not there") is None


def test_what_is_missing_is_said_with_what_to_do(tmp_path: Path) -> None:
    assert missing_requirement() is None
    assert missing_requirement(lambda _: None) == (
        "tfmq.spark needs pyspark, which is not installed: pip install 'pyspark>=4.2' pyarrow numpy matplotlib"
    )
    there = spec(pyspark(tmp_path, '__version__ = "4.3.0"'))
    assert missing_requirement(lambda name: there if name == "pyspark" else None) == (
        "tfmq.spark needs pyarrow, which is not installed: pip install 'pyspark>=4.2' pyarrow numpy matplotlib"
    )


@pytest.mark.parametrize(("found", "wrong"), [("4.1.2", True), ("3.5.0", True), ("4.2.0", False), ("10.0.0", False)])
def test_an_old_pyspark_is_named(tmp_path: Path, found: str, wrong: bool) -> None:
    there = spec(pyspark(tmp_path, f'__version__ = "{found}"'))
    said = missing_requirement(lambda _: there)
    assert (said is not None) == wrong
    if wrong:
        number = found[:3]
        assert said == (
            f"tfmq.spark needs pyspark 4.2 or newer, and {number} is installed: pip install -U 'pyspark>=4.2'"
        )


def test_spark_finds_a_source_that_says_what_is_missing() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100)
    assert done.stdout == "said\n", done.stderr


def test_without_pyspark_the_module_that_spark_looks_for_says_how_to_install_it() -> None:
    program = "import sys; sys.modules['pyspark'] = None; import pyspark_tfmq"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert "tfmq.spark needs pyspark, which is not installed: pip install" in done.stderr.splitlines()[-1]


PROGRAM = """
import importlib.util, sys

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "pyarrow" else find_spec(name, *rest)

from pyspark.sql.types import StructType
from pyspark_tfmq import DefaultSource

assert DefaultSource.name() == "tfmq"
source = DefaultSource({})
for ask in (source.schema, lambda: source.reader(schema=StructType()), lambda: source.streamReader(schema=None)):
    try:
        ask()
    except ImportError as error:
        assert str(error).startswith("tfmq.spark needs pyarrow, which is not installed"), error
    else:
        raise AssertionError
print("said")
"""
