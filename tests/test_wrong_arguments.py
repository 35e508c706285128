"""What a user types wrong and was taken silently: a key beside a Message, one text for many payloads, a codec's name,
a time that is no number. Each sent something else than was meant, or went round without a pause.
"""

from typing import Any

import pytest

from tests.client.fake_broker import FakeBroker, listening
from tfmq import aio
from tfmq.consumer import Consumer
from tfmq.errors import BadRequest
from tfmq.message import Message
from tfmq.producer import Producer


@pytest.mark.parametrize("arguments", [{"key": "k"}, {"tag": "t"}, {"properties": {"a": "b"}}, {"partition": 0}])
def test_what_stands_beside_a_message_is_not_dropped(arguments: dict[str, Any]) -> None:
    producer = Producer("127.0.0.1:1")
    with pytest.raises(TypeError, match="in it"):
        producer.send("orders", Message(b"x"), **arguments)
    with pytest.raises(TypeError, match="in it"):
        aio.Producer("127.0.0.1:1").send_nowait("orders", Message(b"x"), **arguments)


@pytest.mark.parametrize("payloads", ["abc", b"abc", bytearray(b"abc"), Message(b"x", "key"), {"a": 1}])
def test_one_payload_is_not_taken_for_many(payloads: Any) -> None:
    broker = FakeBroker()
    refused = pytest.raises(TypeError, match="iterable of payloads")
    with listening(broker) as servers, Producer(servers) as producer, refused:
        producer.send_many("orders", payloads)
    assert broker.payloads("orders") == []


@pytest.mark.parametrize("partition", ["0", 0.0, True])
def test_a_partition_is_a_number(partition: Any) -> None:
    with pytest.raises(TypeError, match="partition"):
        Producer("127.0.0.1:1").send("orders", b"x", partition=partition)


@pytest.mark.parametrize("properties", [[("a", "b")], "abc"])
def test_properties_are_a_map(properties: Any) -> None:
    broker = FakeBroker()
    with listening(broker) as servers, Producer(servers) as producer, pytest.raises(TypeError, match="map"):
        producer.send("orders", b"x", properties=properties)


@pytest.mark.parametrize(
    "arguments",
    [{"codec": "json"}, {"timeout": float("nan")}, {"linger_ms": float("nan")}, {"servers": 5}, {"group": 5}],
)
def test_a_producer_refuses(arguments: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        Producer(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"codec": "json"},
        {"refresh_every": 0},
        {"refresh_every": -1},
        {"timeout": "5"},
        {"timeout": None},
        {"session": 0.1},
        {"session": 3601},
        {"fetch_bytes": 1.5},
        {"group": 5},
        {"servers": b"localhost"},
        {"servers": ["localhost", 5]},
    ],
)
def test_a_consumer_refuses(arguments: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        Consumer(topics="orders", **arguments)
