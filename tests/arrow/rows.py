"""What the client's own decoder reads out of the same bytes: the columns that Arrow must have."""

from typing import Any

import pyarrow as pa

from tests.client.blocks import INCARNATION, Bytes
from tfmq.arrow import SCHEMA
from tfmq.arrow import Decoder as ArrowDecoder
from tfmq.client.consumer.decoder import Decoder
from tfmq.client.consumer.message import ReceivedMessage


def decoder(log: Bytes, schema: pa.Schema = SCHEMA, verify: str = "chunk") -> ArrowDecoder:
    return ArrowDecoder("orders", log.log_id & 0xFFFFFF, log.log_id, schema, verify)


def decoded(log: Bytes, **options: Any) -> pa.RecordBatch:
    return decoder(log, **options).decode(log.body(), log.first)


def expected(log: Bytes) -> list[dict[str, Any]]:
    """The rows of `log` by the client's decoder."""
    partition = log.log_id & 0xFFFFFF
    reader = Decoder("orders", partition, INCARNATION)
    found = reader.decode(log.body(), log.first, log.first, log.end)
    return [row(message) for block in found for message in block.messages]


def row(message: ReceivedMessage) -> dict[str, Any]:
    key = message.key
    return {
        "key": key.encode() if isinstance(key, str) else key,
        "value": message.payload,
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "timestamp": message.appended_at,
        "tag": message.tag,
        "attributes": message.attribute_bytes,
        "id": message.id,
    }
