"""What a task gives, and what it does where its range is gone or damaged while it reads."""

import logging
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from tfmq.arrow.schema import SCHEMA, project
from tfmq.errors import (
    BadRequest,
    Damaged,
    DecodeFailed,
    LogTruncated,
    NotARecord,
    OffsetOutOfRange,
    TfmqError,
    UnknownTopic,
)
from tfmq.protocol.commands import CommitMember
from tfmq.spark import batch_reader
from tfmq.spark.batch_reader import RangeReader
from tfmq.spark.log_reader import SourceAddress, open_log_reader
from tfmq.spark.ranges import BlockRun, OffsetRange
from tfmq.spark.settings import SinkSettings
from tfmq.spark.sink_task import CommitGroupClient, collect_commit, write_rows
from tfmq.testing.broker import SimulatedBroker

COUNT = 60


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    with SimulatedBroker() as made:
        made.admin().create_topic("orders", 1)
        with made.producer(linger_ms=0) as producer:
            for number in range(COUNT):
                producer.send("orders", f"v{number}", partition=0)
                producer.flush()
        yield made


def reading(broker: SimulatedBroker, fail: bool = True, schema: pa.Schema = SCHEMA) -> RangeReader:
    return RangeReader(SourceAddress(servers=broker.servers), schema, "chunk", fail)


def whole(broker: SimulatedBroker) -> OffsetRange:
    with open_log_reader(SourceAddress(servers=broker.servers)) as logs:
        (log,) = logs.partitions("orders")
        bounds = logs.bounds(log)
        return OffsetRange(log, bounds.first, bounds.end)


def offsets(batches: Iterator[pa.RecordBatch]) -> list[int]:
    return [offset for batch in batches for offset in batch.column("offset").to_pylist()]


class Trouble:
    """Logs of which each reading of a range meets the next of `errors`, after its first chunk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *errors: TfmqError, chunk: int = 1) -> None:
        self.errors = list(errors)

        def opened(address: SourceAddress) -> Any:
            logs = open_log_reader(address)
            plain = logs.read_blocks

            def chunks(range: OffsetRange, max_bytes: int = 0) -> Iterator[BlockRun]:
                if not self.errors:
                    yield from plain(range)
                    return
                for number, each in enumerate(plain(range, 1)):
                    if number == chunk:
                        raise self.errors.pop(0)
                    yield each

            monkeypatch.setattr(logs, "read_blocks", chunks)
            return logs

        monkeypatch.setattr(batch_reader, "open_log_reader", opened)


def test_a_task_reads_its_ranges_one_after_the_other(broker: SimulatedBroker) -> None:
    every = whole(broker)
    starts = offsets(reading(broker).read((every,)))
    assert len(starts) == COUNT
    middle = starts[COUNT // 2]
    parts = (OffsetRange(every.log, middle, every.end), OffsetRange(every.log, every.start, middle))
    assert offsets(reading(broker).read(parts)) == starts[COUNT // 2 :] + starts[: COUNT // 2]
    assert offsets(reading(broker).read(())) == []


def test_batches_have_the_schema_to_the_letter(broker: SimulatedBroker) -> None:
    schema = pa.schema([pa.field("offset", pa.int64(), nullable=False), pa.field("value", pa.binary())])
    for batch in reading(broker, schema=schema).read((whole(broker),)):
        assert batch.schema.equals(schema)


def test_what_retention_takes_while_it_is_read(
    broker: SimulatedBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    every = whole(broker)
    starts = offsets(reading(broker).read((every,)))
    Trouble(monkeypatch, OffsetOutOfRange("Gone.", first=starts[40], end=every.end))
    with pytest.raises(OffsetOutOfRange, match=r"Gone\. The query stops, because failOnDataLoss is true"):
        offsets(reading(broker).read((every,)))
    Trouble(monkeypatch, OffsetOutOfRange("Gone.", first=starts[40], end=every.end))
    with caplog.at_level(logging.WARNING):
        assert offsets(reading(broker, fail=False).read((every,))) == [starts[0], *starts[40:]]
    assert "Gone. The query continues after them" in caplog.text


def test_what_is_gone_when_it_was_read_is_not_read_again(
    broker: SimulatedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = whole(broker)
    starts = offsets(reading(broker).read((every,)))
    Trouble(monkeypatch, OffsetOutOfRange("Cut.", first=starts[2], end=starts[5]), chunk=5)
    assert offsets(reading(broker, fail=False).read((every,))) == starts[:5]


def test_what_is_damaged(broker: SimulatedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    every = whole(broker)
    starts = offsets(reading(broker).read((every,)))
    for _ in range(2):
        Trouble(monkeypatch, Damaged("Bad.", first=starts[1], next=starts[7]))
        found = reading(broker, fail=False).read((every,))
        assert offsets(found) == [starts[0], *starts[7:]]
    Trouble(monkeypatch, Damaged("Bad.", first=starts[1], next=starts[7]))
    with pytest.raises(Damaged, match=r"Bad\. The query stops"):
        offsets(reading(broker).read((every,)))


def test_what_is_whole_before_and_after_damage_in_one_chunk_is_read(
    broker: SimulatedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = whole(broker)
    starts = offsets(reading(broker).read((every,)))

    def opened(address: SourceAddress) -> Any:
        logs = open_log_reader(address)
        plain = logs.read_blocks

        def chunks(range: OffsetRange, max_bytes: int = 0) -> Iterator[BlockRun]:
            for chunk in plain(range):
                data = bytearray(chunk.data)
                if chunk.offset <= starts[30]:
                    data[starts[30] - chunk.offset + 22] ^= 1
                yield BlockRun(chunk.offset, bytes(data))

        monkeypatch.setattr(logs, "read_blocks", chunks)
        return logs

    monkeypatch.setattr(batch_reader, "open_log_reader", opened)
    assert offsets(reading(broker, fail=False).read((every,))) == [*starts[:30], *starts[31:]]
    read = []
    with pytest.raises(Damaged, match="failOnDataLoss is true"):
        for batch in reading(broker).read((every,)):
            read += batch.column("offset").to_pylist()
    assert read == starts[:30]


@pytest.mark.parametrize("error", [UnknownTopic("Deleted."), LogTruncated("Cut.", cut=5), Damaged("Bad.")])
def test_what_has_no_end_ends_the_range(
    broker: SimulatedBroker, monkeypatch: pytest.MonkeyPatch, error: TfmqError
) -> None:
    every = whole(broker)
    Trouble(monkeypatch, error)
    assert len(offsets(reading(broker, fail=False).read((every,)))) == 1


def test_columns_that_were_not_requested_are_absent(broker: SimulatedBroker) -> None:
    [first, *_] = reading(broker, schema=project(["topic", "offset"])).read((whole(broker),))
    assert first.schema.names == ["topic", "offset"]


def test_a_null_where_the_schema_has_none_is_reported(broker: SimulatedBroker) -> None:
    never_null = pa.schema([pa.field("value", pa.binary(), nullable=False), SCHEMA.field("offset")])
    assert len(offsets(reading(broker, schema=never_null).read((whole(broker),)))) == COUNT
    with broker.producer(linger_ms=0) as producer:
        producer.send("orders", None, key="gone", partition=0)
    with pytest.raises(BadRequest, match="the column value is never null, and in orders-0 it is: leave out NOT NULL"):
        offsets(reading(broker, schema=never_null).read((whole(broker),)))


def test_a_place_where_no_message_begins_is_a_loss_of_another_history(broker: SimulatedBroker) -> None:
    """A broker that was restored from a backup may have grown beyond what a query had read."""
    every = offsets(reading(broker).read((whole(broker),)))
    inside = whole(broker)._replace(start=every[3] + 5)
    with pytest.raises(NotARecord, match=r"no record starts at offset .* restored from a backup, and the messages"):
        offsets(reading(broker).read((inside,)))
    assert offsets(reading(broker, fail=False).read((inside,))) == every[4:]


def test_an_attribute_that_cannot_be_decoded_costs_a_message_its_key_and_tag_where_that_is_allowed(
    broker: SimulatedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Any producer can send one: it must not block all queries for good."""
    rows = {"value": [b"before", b"it", b"behind"], "attributes": [None, b"\xc1", b"\x81\x02\xa1k"]}
    settings = SinkSettings(broker.servers, "orders", 10.0, lenient=True)
    verdict = collect_commit(
        [write_rows(settings, CommitMember("group", 1, "run"), iter([pa.RecordBatch.from_pydict(rows)]))]
    )
    assert verdict is not None
    with CommitGroupClient(broker.servers, 10.0) as client:
        client.commit(verdict)
    with pytest.raises(DecodeFailed, match="failOnDataLoss is true; with false it continues with neither key nor"):
        list(reading(broker).read((whole(broker),)))
    with caplog.at_level(logging.WARNING, "tfmq.spark"):
        batches = list(reading(broker, fail=False).read((whole(broker),)))
    found = [row for batch in batches for row in batch.to_pylist()][-3:]
    assert [(row["value"], row["key"]) for row in found] == [(b"before", None), (b"it", None), (b"behind", b"k")]
    assert "continues with neither key nor tag" in caplog.text
    values = project(["value"])
    assert sum(batch.num_rows for batch in reading(broker, schema=values).read((whole(broker),))) == COUNT + 3
