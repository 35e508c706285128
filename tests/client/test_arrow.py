"""Tables sent by `send_arrow`, and messages read by `arrow_batches`: the same messages as by `send` and `poll`."""

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import tfmq
from tfmq import aio, codecs
from tfmq.errors import BadRequest, MessageTooLarge
from tfmq.testing.broker import SimulatedBroker

COUNT = 5_000


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    with SimulatedBroker() as running:
        yield running


def table(count: int = COUNT, **columns: Any) -> pa.Table:
    return pa.table({"value": [b"%06d" % n for n in range(count)], **columns})


def read(consumer: tfmq.Consumer[Any], **options: Any) -> list[dict[str, Any]]:
    return [row for rows in consumer.arrow_batches(timeout=0.5, **options) for row in rows.to_pylist()]


def values(consumer: tfmq.Consumer[Any]) -> list[int]:
    return [int(row["value"]) for row in read(consumer, columns=["value"])]


def test_rows_are_messages_with_key_tag_and_offset(broker: SimulatedBroker) -> None:
    rows = pa.table(
        {"value": [b"a", None, b"c"], "key": ["k1", None, "k3"], "tag": ["t", None, ""], "other": [1, 2, 3]}
    )
    with broker.producer() as producer:
        [result] = producer.send_arrow(rows, "orders").result()
    assert (result.count, result.durability, result.offset) == (3, "synced", 0)
    with broker.consumer("orders") as consumer:
        found = broker.drain(consumer)
    assert [(m.payload, m.key, m.tag) for m in found] == [(b"a", "k1", "t"), (None, None, None), (b"c", "k3", None)]
    assert found[0].offset == result.offset


def test_messages_of_send_are_rows_of_arrow_batches(broker: SimulatedBroker) -> None:
    with broker.producer() as producer:
        sent = producer.send("orders", "hello", key="k", tag="t", properties={"a": "b"}).result()
        producer.send("orders", None, key=b"gone").result()
    with broker.consumer("orders") as consumer:
        [first, second] = read(consumer, columns=["key", "value", "topic", "partition", "offset", "tag"])
    expected = {"key": b"k", "value": b"hello", "topic": "orders", "partition": 0, "offset": sent.offset, "tag": "t"}
    assert first == expected
    assert (second["key"], second["value"]) == (b"gone", None)


def test_a_table_is_divided_into_batches_and_keeps_its_order(broker: SimulatedBroker) -> None:
    with broker.producer(batch_bytes=4_096) as producer:
        before = producer.send("orders", b"before")
        results = producer.send_arrow(table(), "orders").result()
        after = producer.send("orders", b"after").result()
    assert len(results) > 10 and sum(each.count for each in results) == COUNT
    assert before.result().offset < results[0].offset < results[-1].offset < after.offset
    with broker.consumer("orders") as consumer:
        found = [row["value"] for row in read(consumer)]
    assert found == [b"before", *(b"%06d" % n for n in range(COUNT)), b"after"]


def test_keyed_rows_go_where_the_default_selector_sends_their_keys(broker: SimulatedBroker) -> None:
    with broker.admin() as admin:
        for topic in ("columns", "messages"):
            admin.create_topic(topic, partitions=4)
    keys = [f"key-{n % 37}" for n in range(500)]
    with broker.producer() as producer:
        producer.send_arrow(table(500, key=keys), "columns").result()
        for number, key in enumerate(keys):
            producer.send("messages", b"%06d" % number, key=key)
        producer.flush()
    found: dict[str, Counter[tuple[int, bytes]]] = {}
    for topic in ("columns", "messages"):
        with broker.consumer(topic) as consumer:
            found[topic] = Counter((row["partition"], row["value"]) for row in read(consumer))
    assert found["columns"] == found["messages"] and len({partition for partition, _ in found["columns"]}) == 4


def test_rows_without_keys_use_every_partition(broker: SimulatedBroker) -> None:
    with broker.admin() as admin:
        admin.create_topic("orders", partitions=3)
    with broker.producer(batch_bytes=4_096) as producer:
        producer.send_arrow(table(), "orders").result()
    with broker.consumer("orders") as consumer:
        found = read(consumer)
    assert sorted(int(row["value"]) for row in found) == list(range(COUNT))
    assert {row["partition"] for row in found} == {0, 1, 2}


def test_a_batch_is_acked_when_the_next_is_requested(broker: SimulatedBroker) -> None:
    with broker.producer(batch_bytes=4_096) as producer:
        producer.send_arrow(table(), "orders").result()
    with pytest.raises(RuntimeError), broker.consumer("orders", group="g", fetch_bytes=16_384) as consumer:
        batches = consumer.arrow_batches(["value"])
        done = next(batches).num_rows
        unfinished = next(batches)
        assert unfinished.num_rows
        raise RuntimeError("while the second batch was handled")
    with broker.consumer("orders", group="g") as consumer:
        assert values(consumer) == list(range(done, COUNT))
    with broker.consumer("orders", group="g") as consumer:
        assert values(consumer) == []


def test_messages_follow_where_the_batches_end(broker: SimulatedBroker) -> None:
    with broker.producer(batch_bytes=4_096) as producer:
        producer.send_arrow(table(), "orders").result()
    with broker.consumer("orders", fetch_bytes=16_384) as consumer:
        first = next(batches := consumer.arrow_batches(["value"]))
        batches.close()  # type: ignore[attr-defined]
        found = [int(message.payload) for message in broker.drain(consumer)]
        assert found == list(range(first.num_rows, COUNT))
        assert consumer.stats()["messages"] == COUNT


def test_offsets_are_committed_in_a_transaction_with_its_messages(broker: SimulatedBroker) -> None:
    with broker.producer() as producer:
        producer.send_arrow(table(10), "orders").result()
        with broker.consumer("orders", group="g", commits="manual") as consumer:
            rows = next(consumer.arrow_batches(["value"]))
            with producer.transaction() as transaction:
                transaction.send_many("copies", rows.column("value").to_pylist())
                transaction.commit_offsets(consumer)
    with broker.consumer("orders", group="g", commits="manual") as consumer:
        assert values(consumer) == []
    with broker.consumer("copies") as consumer:
        assert values(consumer) == list(range(10))


def test_asyncio_has_both(broker: SimulatedBroker) -> None:
    async def copy() -> list[int]:
        async with aio.Producer(broker.servers) as producer:
            results = await producer.send_arrow(table(100), "orders")
            assert sum(each.count for each in results) == 100
        async with aio.Consumer(broker.servers, topics="orders") as consumer:
            return [
                int(value)
                async for rows in consumer.arrow_batches(["value"], timeout=0.2)
                for value in rows.column("value").to_pylist()
            ]

    assert asyncio.run(copy()) == list(range(100))


@pytest.mark.parametrize(
    ("rows", "error", "said"),
    [
        ({"key": [b"k"]}, BadRequest, "needs the column value"),
        ({"value": [1]}, BadRequest, "The column value must be binary or string, not int64"),
        ({"value": [b"v"], "tag": [b"t"]}, BadRequest, "The column tag must be string"),
        ({"value": [b"x" * (9 << 20)]}, MessageTooLarge, "The message of row 0 has 9437184 bytes"),
    ],
)
def test_columns_that_cannot_be_sent_are_refused(
    broker: SimulatedBroker, rows: dict[str, Any], error: type[Exception], said: str
) -> None:
    with broker.producer() as producer, pytest.raises(error, match=said):
        producer.send_arrow(pa.table(rows), "orders")


def test_what_is_no_table_is_refused(broker: SimulatedBroker) -> None:
    with broker.producer() as producer, pytest.raises(TypeError, match="send_arrow takes a table"):
        producer.send_arrow([b"value"], "orders")


def test_producers_and_consumers_that_convert_messages_have_no_columns(broker: SimulatedBroker) -> None:
    for options in ({"codec": codecs.json}, {"hooks": [tfmq.Hook()]}):
        with broker.producer(**options) as producer, pytest.raises(BadRequest, match="send_arrow sends the columns"):
            producer.send_arrow(table(1), "orders")
    for options in ({"tags": "t"}, {"where": bool}, {"codec": codecs.json}):
        with broker.consumer("orders", **options) as consumer, pytest.raises(BadRequest, match="leave out tags"):
            next(consumer.arrow_batches())
    with broker.consumer("orders", group="g", commits="before") as consumer, pytest.raises(BadRequest, match="before"):
        next(consumer.arrow_batches())
    with broker.consumer("orders") as consumer, pytest.raises(BadRequest, match="did you mean 'value'"):
        next(consumer.arrow_batches(["valu"]))


def test_an_unsent_empty_table_has_no_results(broker: SimulatedBroker) -> None:
    with broker.producer() as producer:
        assert producer.send_arrow(table(0), "orders").result() == []


def test_pyarrow_is_loaded_only_where_it_is_used() -> None:
    program = "import sys, tfmq, tfmq.aio; tfmq.Producer, tfmq.Consumer; assert 'pyarrow' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
