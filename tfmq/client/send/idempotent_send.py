"""Idempotent sending, for callers that record their producer sequences themselves before they send.

Ordinary sends use the sequences of partition_sender.py instead. After a crash, a caller of this module sends the same
records with the same sequences again, and the broker stores them once. The broker requires that records of a producer
id in a partition have consecutive sequences (docs/protocol.md, Producing). So a caller leases its own producer id
(`lease_producer_id`) and assigns sequences to some records. The caller writes down these sequences, sends the records,
writes down that the records are stored, and only then continues with more records.

After an exception of `send_idempotent` it is unknown whether the records are stored, and another process that has read
the same sequences may still send them. After `close_producer` the caller knows the last stored sequence, and the broker
stores nothing more under that producer id. If the producer id has expired, the broker rejects it for good and no longer
knows its last sequence: then `find_records` searches the log.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

from journal.record.format import FLAG_TOMBSTONE, tag_flag
from tfmq.client.connection.connection import ClientConnection
from tfmq.client.connection.requests import request_with_retries, send_with_retries
from tfmq.client.consumer.decoder import Decoder
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.operation import Operation
from tfmq.client.send.record_encoder import EncodedRecords, attribute_part, encode_each
from tfmq.errors import UnknownPartition, UnknownTopic
from tfmq.ids import pack_id
from tfmq.protocol import commands

FETCH_BYTES: Final = 1 << 20
"""How many bytes of the log `find_records` fetches at a time."""


class ProducerPartition(NamedTuple):
    """A producer id, and the partition (of one incarnation of a topic) to which it sends."""

    topic: str
    incarnation: int
    partition: int
    producer_id: int


class RecordContent(NamedTuple):
    """A record to send: `payload` (None: a tombstone), the encoded `attribute`, and the tag in this attribute."""

    payload: bytes | None
    attribute: bytes
    tag: str | None = None


def lease_producer_id(link: ClientConnection, until: float) -> Operation[int]:
    """Lease an unused producer id. The id expires if nothing is sent under it for `limits.producer_idle_seconds`."""
    reply = yield from request_with_retries(link, commands.LeaseProducerIds(1), until)
    return int(reply.first)


def start_producer(
    link: ClientConnection, topic: str, partition: int, until: float
) -> Operation[tuple[ProducerPartition, int]]:
    """Lease a producer id for a partition. Return it and the durable offset. Raises UnknownTopic, UnknownPartition."""
    reply = yield from request_with_retries(link, commands.Metadata([topic], True), until)
    if not reply.topics:
        raise UnknownTopic(f"There is no topic {topic}, and the broker makes none by itself.")
    row = reply.topics[0]
    if partition >= len(row.partitions):
        raise UnknownPartition(f"{topic} has partitions 0 to {len(row.partitions) - 1}, not {partition}.")
    producer_id = yield from lease_producer_id(link, until)
    producer = ProducerPartition(topic, row.incarnation, partition, producer_id)
    end = yield from locate_log_end(link, producer, commands.BY_LATEST, until)
    return producer, end


def locate_log_end(link: ClientConnection, producer: ProducerPartition, by: int, until: float) -> Operation[int]:
    """Return the first offset of the log if `by` is BY_EARLIEST, or the durable offset if `by` is BY_LATEST."""
    reply = yield from request_with_retries(
        link, commands.Locate(producer.topic, producer.incarnation, producer.partition, by), until
    )
    return int(reply.offset)


def send_idempotent(
    link: ClientConnection, producer: ProducerPartition, sequence: int, contents: Sequence[RecordContent], until: float
) -> Operation[list[int]]:
    """Store the records `contents`, all or none, with the sequences from `sequence` on. Repeated calls store them once.

    Return the records' offsets once the records are durable; -1 for an offset that the broker no longer knows. After a
    retriable error the request is repeated; at the time `until` (in the connection's clock) the last error is raised.
    """
    flags = [
        (tag_flag(each.tag) if each.tag else 0) | (FLAG_TOMBSTONE if each.payload is None else 0) for each in contents
    ]
    payloads = [each.payload or b"" for each in contents]
    parts = [attribute_part(each.attribute) for each in contents]
    encoded = encode_each(payloads, parts, flags, producer.producer_id, sequence)
    reply = yield from send_encoded(link, producer, sequence, encoded, len(contents), until)
    return _offsets(encoded, len(contents), reply.positions)


def send_encoded(
    link: ClientConnection,
    producer: ProducerPartition,
    sequence: int,
    encoded: EncodedRecords,
    count: int,
    until: float,
) -> Operation[commands.ProduceReply]:
    """Store `count` encoded records, with the retries of `send_idempotent`. Return the reply to the PRODUCE request."""
    fields = (producer.topic, producer.incarnation, producer.partition, producer.producer_id, sequence, count)
    request = commands.Produce(*fields, commands.ACKS_SYNCED, encoded.blocks)  # type: ignore[arg-type]
    pending = yield from send_with_retries(link, request, encoded.data, until=until)
    reply: commands.ProduceReply = pending.reply
    return reply


def close_producer(link: ClientConnection, producer: ProducerPartition, until: float) -> Operation[int]:
    """Close the producer id permanently. Return the last sequence that is stored under it, durably; -1: none.

    A repeated call returns the same sequence. Raises UnknownProducer if the id expired or never existed. In this case,
    too, the broker will never store anything under the id.
    """
    reply = yield from request_with_retries(link, commands.SucceedProducer(*producer), until)
    return int(reply.last_sequence)


def find_records(
    link: ClientConnection, producer: ProducerPartition, sequences: Collection[int], from_offset: int, until: float
) -> Operation[dict[int, int]]:
    """Search the log for records of a producer id with these `sequences`. Return the offset of each found sequence.

    The search goes from `from_offset` to the durable offset. Raises OffsetOutOfRange if messages from `from_offset` on
    were removed, Damaged if part of the log is unreadable; then it is unknown which sequences are stored.
    """
    wanted = {pack_id(producer.producer_id, each): each for each in sequences}
    found: dict[int, int] = {}
    offset = from_offset
    while len(found) < len(wanted):
        response = yield from fetch_messages(link, producer, offset, until)
        found.update((wanted[each.id], each.offset) for each in response.messages if each.id in wanted)
        if response.at_end:
            break
        offset = response.next_offset
    return found


class FetchedMessages(NamedTuple):
    """Messages of one fetch response. `at_end`: whether the log had no further durable messages at that time."""

    messages: list[ReceivedMessage[Any]]
    next_offset: int
    at_end: bool


def fetch_messages(
    link: ClientConnection, producer: ProducerPartition, offset: int, until: float, bytes_max: int = FETCH_BYTES
) -> Operation[FetchedMessages]:
    """Fetch messages from `offset` on. Raises OffsetOutOfRange if they were removed, Damaged if they are unreadable."""
    fetch = commands.Fetch(
        producer.topic, producer.incarnation, producer.partition, offset, commands.EPOCH_UNKNOWN, bytes_max
    )
    pending = yield from send_with_retries(link, fetch, until=until)
    reply, decoder = pending.reply, Decoder(producer.topic, producer.partition, producer.incarnation)
    blocks = decoder.decode(bytes(pending.reply_body), reply.start, reply.skip_to, reply.next)
    messages = [message for block in blocks for message in block.messages]
    return FetchedMessages(messages, reply.next, reply.next >= reply.forced or reply.next <= offset)


def _offsets(encoded: EncodedRecords, count: int, positions: Sequence[tuple[int, int]]) -> list[int]:
    """Return the offset of each record; -1 for records before the first entry of `positions` (index, offset)."""
    offsets, runs = [], list(positions)
    first, offset = -1, -1
    for index in range(count):
        if runs and runs[0][0] <= index:
            first, offset = runs.pop(0)
        known = first >= 0
        offsets.append(offset + encoded.start_of(index) - encoded.start_of(first) if known else -1)
    return offsets
