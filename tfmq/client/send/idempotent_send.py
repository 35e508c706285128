"""Sending with a place that the sender wrote down before: a producer id and a sequence, kept where a crash cannot take
them. Whoever comes back sends the same under the same place again, and the broker stores it once.

The rule is the broker's for streams (docs/protocol.md, Producing): the records of one producer id on one partition
follow each other without a gap. So a caller takes an id of its own (`lease_id`), settles the places of a run of
records, writes them down, sends the run, writes down that it arrived, and only then goes on with the next one.

Where `send_numbered` raises, nothing is certain: another process may have the same places written down, and send them
later. Certainty is had by closing the stream for good (`close_stream`): it says how far the stream came, and nothing
follows. Where the broker forgot the id, and so takes nothing under it any more, `find_records` looks into the log.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

from journal.record.format import FLAG_TOMBSTONE, tag_flag
from tfmq.bounded_msgpack import Buffer
from tfmq.client.connection.connection import SECONDS, Call, Link
from tfmq.client.connection.requests import PAUSE_SECONDS, PAUSE_SECONDS_MAX, ask
from tfmq.client.consumer.decoder import Decoder
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.operation import Operation, Wait
from tfmq.client.send.record_encoder import Encoded, attribute_part, encode_each
from tfmq.errors import TfmqError, UnknownPartition, UnknownTopic
from tfmq.ids import pack_id
from tfmq.protocol.commands import (
    ACKS_SYNCED,
    BY_LATEST,
    EPOCH_UNKNOWN,
    Fetch,
    LeaseProducerIds,
    Locate,
    Metadata,
    Produce,
    ProduceReply,
    SucceedProducer,
)

FETCH_BYTES: Final = 1 << 20
"""Asked for at once where records are looked for."""


class Stream(NamedTuple):
    """One producer id on one partition of one life of a topic."""

    topic: str
    incarnation: int
    partition: int
    producer_id: int


class Content(NamedTuple):
    """A record as it is sent: `payload` None is a tombstone · `attribute`: its bytes · `tag`: the one in it."""

    payload: bytes | None
    attribute: bytes
    tag: str | None = None


def lease_id(link: Link, until: float) -> Operation[int]:
    """A producer id that nobody had before; new for as long as the broker remembers the idle ones."""
    reply = yield from ask(link, LeaseProducerIds(1), until)
    found: int = reply.first
    return found


def begin_stream(link: Link, topic: str, partition: int, until: float) -> Operation[tuple[Stream, int]]:
    """A stream under an id that nobody had, to the topic as it is now, and the end of the log before it.

    Raises `UnknownTopic`, `UnknownPartition`.
    """
    reply = yield from ask(link, Metadata([topic], True), until)
    if not reply.topics:
        raise UnknownTopic(f"There is no topic {topic}, and the broker makes none by itself.")
    row = reply.topics[0]
    if partition >= len(row.partitions):
        raise UnknownPartition(f"{topic} has partitions 0 to {len(row.partitions) - 1}, not {partition}.")
    producer_id = yield from lease_id(link, until)
    stream = Stream(topic, row.incarnation, partition, producer_id)
    end = yield from locate_end(link, stream, BY_LATEST, until)
    return stream, end


def locate_end(link: Link, stream: Stream, by: int, until: float) -> Operation[int]:
    """The offset at an end of the partition: `by` BY_EARLIEST, or BY_LATEST, behind the last record that is forced."""
    reply = yield from ask(link, Locate(stream.topic, stream.incarnation, stream.partition, by), until)
    found: int = reply.offset
    return found


def send_numbered(
    link: Link, stream: Stream, sequence: int, contents: Sequence[Content], until: float
) -> Operation[list[int]]:
    """Store `contents` as the records `sequence` and following of `stream`, all or none, once however often it is
    called. Their offsets, when they are forced; -1 where the broker does not remember it.

    Asks again until `until` (the link's clock) while nothing is known, then raises what it met last.
    """
    encoded = _encoded(stream, sequence, contents)
    reply = yield from send_encoded(link, stream, sequence, encoded, len(contents), until)
    return _offsets(encoded, len(contents), reply.positions)


def send_encoded(
    link: Link, stream: Stream, sequence: int, encoded: Encoded, count: int, until: float
) -> Operation[ProduceReply]:
    """As `send_numbered`, for records that have their numbers already; what PRODUCE answered."""
    place = (stream.topic, stream.incarnation, stream.partition, stream.producer_id, sequence, count)
    request = Produce(*place, ACKS_SYNCED, encoded.blocks)  # type: ignore[arg-type]
    call = yield from _answered(link, request, encoded.data, until=until)
    reply: ProduceReply = call.reply
    return reply


def close_stream(link: Link, stream: Stream, until: float) -> Operation[int]:
    """Nothing is stored in `stream` from now on; the last sequence that is, forced; -1: none. A second time it says the
    same. Raises `UnknownProducer` where the broker forgot the id, or never gave it; that is for good, too.
    """
    reply = yield from ask(link, SucceedProducer(*stream), until)
    found: int = reply.last_sequence
    return found


def find_records(
    link: Link, stream: Stream, sequences: Collection[int], from_offset: int, until: float
) -> Operation[dict[int, int]]:
    """Which of `sequences` are stored, by reading from `from_offset` to the forced end: sequence -> offset.

    Raises `OffsetOutOfRange` where the log does not reach back so far, and `Damaged`: then nobody can tell.
    """
    wanted = {pack_id(stream.producer_id, each): each for each in sequences}
    found: dict[int, int] = {}
    offset = from_offset
    while len(found) < len(wanted):
        chunk = yield from read_chunk(link, stream, offset, until)
        found.update((wanted[each.id], each.offset) for each in chunk.messages if each.id in wanted)
        if chunk.at_end:
            break
        offset = chunk.next_offset
    return found


class Chunk(NamedTuple):
    """What one look at a partition gave. `at_end`: nothing that is forced lies behind it."""

    messages: list[ReceivedMessage[Any]]
    next_offset: int
    at_end: bool


def read_chunk(
    link: Link, stream: Stream, offset: int, until: float, bytes_max: int = FETCH_BYTES
) -> Operation[Chunk]:
    """The messages of one fetch, from `offset` on. Raises `OffsetOutOfRange`, `Damaged`."""
    fetch = Fetch(stream.topic, stream.incarnation, stream.partition, offset, EPOCH_UNKNOWN, bytes_max)
    call = yield from _answered(link, fetch, until=until)
    reply, decoder = call.reply, Decoder(stream.topic, stream.partition, stream.incarnation)
    blocks = decoder.decode(bytes(call.reply_body), reply.start, reply.skip_to, reply.next)
    messages = [message for block in blocks for message in block.messages]
    return Chunk(messages, reply.next, reply.next >= reply.forced or reply.next <= offset)


def _answered(link: Link, request: Any, *body: Buffer, until: float) -> Operation[Call]:
    """The call when it is answered. It is made again while nothing is known, until `until`; then that is raised."""
    pause = PAUSE_SECONDS
    while True:
        call = link.call(request, *body, seconds=max(0.0, min(SECONDS, until - link.now())))
        try:
            while not call.done:
                yield Wait((call,))
            call.result()
            return call
        except TfmqError as error:
            if not error.retriable or not link.connections or link.now() + pause >= until:
                raise
        finally:
            link.abandon(call)
        yield Wait((), pause)
        pause = min(pause * 2, PAUSE_SECONDS_MAX)


def _encoded(stream: Stream, sequence: int, contents: Sequence[Content]) -> Encoded:
    flags = [
        (tag_flag(each.tag) if each.tag else 0) | (FLAG_TOMBSTONE if each.payload is None else 0)
        for each in contents
    ]
    payloads = [each.payload or b"" for each in contents]
    parts = [attribute_part(each.attribute) for each in contents]
    return encode_each(payloads, parts, flags, stream.producer_id, sequence)


def _offsets(encoded: Encoded, count: int, positions: Sequence[tuple[int, int]]) -> list[int]:
    """Of each record; -1 where the answer names no place before it."""
    offsets, runs = [], list(positions)
    first, offset = -1, -1
    for index in range(count):
        if runs and runs[0][0] <= index:
            first, offset = runs.pop(0)
        known = first >= 0
        offsets.append(offset + encoded.start_of(index) - encoded.start_of(first) if known else -1)
    return offsets
