"""Rows of the Arrow columns: through a server, and the decoder and the encoder alone beside the client's in Python.

Alone is on one core, without broker, disk and Spark. A log is `COUNT` records in blocks of 64 KiB, as batches leave it,
each with the time of birth; decoded in chunks of 4 MiB. The Python decoder makes messages, of which each payload is
looked at.
"""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

import tfmq
from journal.record.batch import split_blocks
from journal.record.block_trailer import TRAILER_SIZE, BlockTrailer, encode_trailer
from journal.record.format import make_id, make_log_id, make_record
from tfmq.arrow import SCHEMA, Decoder, encode, project
from tfmq.client.consumer.decoder import Decoder as MessageDecoder
from tfmq.client.send.record_encoder import attribute_part, encode_each
from tfmq.client.send.record_encoder import encode_shared as encode_messages
from tfmq.message import encode_attribute
from tools.bench.broker import broker
from tools.bench.figures import Figure, alternately, median, spread

COUNT = 300_000
CHUNK_BYTES = 4 << 20
BATCH = 40_000
LOG_ID = make_log_id(5, 0)
PRODUCER = 7
BORN_MS = APPEND_MS = 1_700_000_000_000
PLAIN = project(["value", "topic", "partition", "offset", "timestamp", "id"])

DECODER_TARGET, ENCODER_TARGET = 3e6, 1e6
SERVER_COUNT = 1_000_000
SEND_TARGET, READ_TARGET = 2e6, 3e6

Chunks = list[tuple[int, bytes]]
Values = list[bytes]


def values(least: int, most: int) -> Values:
    source = random.Random(1)
    return [source.randbytes(source.randint(least, most)) for _ in range(COUNT)]


def keyed(number: int) -> bytes:
    return encode_attribute(BORN_MS, b"customer-%06d" % (number % 50_000), f"tag-{number % 7}")


def log(payloads: Values, attribute: Callable[[int], bytes], block_bytes: int = 64 << 10) -> Chunks:
    """The control blocks of these records as (offset, bytes) chunks."""
    records = [make_record(payload, make_id(PRODUCER, n), 0, attribute(n)) for n, payload in enumerate(payloads)]
    data, blocks, position, offset, ordinal = b"".join(records), [], 0, 0, 0
    for size, count, crc in split_blocks(data, block_bytes):
        control = BlockTrailer(count, size, crc, APPEND_MS, 1, 0, ordinal, offset)
        blocks.append((offset, data[position : position + size] + encode_trailer(LOG_ID, control)))
        position, offset, ordinal = position + size, control.next, control.next_ordinal
    return list(joined(blocks))


def joined(blocks: Chunks) -> Iterator[tuple[int, bytes]]:
    per_chunk = max(1, CHUNK_BYTES // (len(blocks[0][1]) + TRAILER_SIZE))
    for first in range(0, len(blocks), per_chunk):
        yield blocks[first][0], b"".join(data for _, data in blocks[first : first + per_chunk])


def per_second(work: Callable[[], int]) -> float:
    """Records a second of a processor: what others do on the machine does not count."""
    begun = time.process_time()
    count = work()
    return count / (time.process_time() - begun)


def decoding(chunks: Chunks, schema: pa.Schema = PLAIN, verify: str = "chunk") -> Callable[[], float]:
    decoder = Decoder("orders", 0, LOG_ID, schema, verify)
    return lambda: per_second(lambda: sum(decoder.decode(data, offset).num_rows for offset, data in chunks))


def messages(chunks: Chunks) -> Callable[[], float]:
    decoder = MessageDecoder("orders", 0, LOG_ID >> 24)

    def work() -> int:
        count = 0
        for offset, data in chunks:
            for block in decoder.decode(data, offset, offset, offset + len(data)):
                for message in block.messages:
                    message.payload  # noqa: B018 - reading it is what is measured
                count += len(block.messages)
        return count

    return lambda: per_second(work)


def encoding(table: pa.Table) -> Callable[[], float]:
    batches = table.to_batches(BATCH)
    return lambda: per_second(lambda: sum(encode(batch, PRODUCER, 0).count for batch in batches))


def encoding_messages(payloads: Values, attribute: Callable[[int], bytes] | None = None) -> Callable[[], float]:
    def work() -> int:
        for first in range(0, COUNT, BATCH):
            batch = payloads[first : first + BATCH]
            if attribute is None:
                encode_messages(batch, b"", PRODUCER, 0)
            else:
                parts = [attribute_part(attribute(first + n)) for n in range(len(batch))]
                encode_each(batch, parts, [0] * len(batch), PRODUCER, 0)
        return COUNT

    return lambda: per_second(work)


def table(payloads: Values, **columns: Any) -> pa.Table:
    return pa.table({"value": pa.array(payloads, pa.binary()), **columns})


def send_rows(address: str, rows: pa.Table) -> float:
    """Messages a second from the call of `send_arrow` to the last acknowledgement."""
    with tfmq.Producer(address) as producer:
        producer.send("columns", b"warm").result()
        begun = time.perf_counter()
        results = producer.send_arrow(rows, "columns").result(120)
        seconds = time.perf_counter() - begun
    if any(each.durability != "synced" for each in results):
        raise RuntimeError("not every message was answered as synced")
    return len(rows) / seconds


def read_rows(address: str, count: int, columns: list[str]) -> float:
    """Messages a second, the clock started by the first batch, as for messages."""
    with tfmq.Consumer(address, topics="columns") as consumer:
        got = first = 0
        begun = 0.0
        for batch in consumer.arrow_batches(columns, timeout=10.0):
            if not begun:
                begun, first = time.perf_counter(), batch.num_rows
            got += batch.num_rows
            if got >= count:
                break
        return (got - first) / (time.perf_counter() - begun)


def through_a_server(runs: int) -> Iterator[Figure]:
    rows = pa.table({"value": pa.array([b"x" * 100] * SERVER_COUNT, pa.binary())})
    with broker() as server:
        send_rows(server.address, rows)
        programs = {
            ("produce 100 B, send_arrow", SEND_TARGET): lambda: send_rows(server.address, rows),
            ("consume 100 B, arrow_batches", READ_TARGET): lambda: read_rows(
                server.address, SERVER_COUNT, ["value", "offset"]
            ),
            ("consume 100 B, arrow_batches, all columns", None): lambda: read_rows(
                server.address, SERVER_COUNT, SCHEMA.names
            ),
        }
        found = alternately(runs, *programs.values())
    for (row, target), rates in zip(programs, found, strict=True):
        yield Figure(row, "tfmq", median(rates), "msg/s", target, note=spread(rates))


def measure(runs: int, peers: bool) -> list[Figure]:
    """All rows; `peers` changes nothing, the peer is the client's own Python."""
    return [*through_a_server(runs), *alone(runs)]


def alone(runs: int) -> list[Figure]:
    equal, mixed = values(100, 100), values(50, 150)
    shared = encode_attribute(BORN_MS)
    same, various = log(equal, lambda _: shared), log(mixed, lambda _: shared)
    own, small = log(equal, keyed), log(equal, lambda _: shared, 4 << 10)
    keys = pa.array([b"customer-%06d" % (n % 50_000) for n in range(COUNT)], pa.binary())
    tags = pa.array([f"tag-{n % 7}" for n in range(COUNT)])
    attributes = pa.array([keyed(n) for n in range(COUNT)], pa.binary())
    programs = {
        "decode 100 B": (decoding(same), DECODER_TARGET),
        "decode 100 B, messages of Python": (messages(same), None),
        "decode 100 B, verify=none": (decoding(same, verify="none"), None),
        "decode 100 B, verify=message": (decoding(same, verify="message"), None),
        "decode 100 B, all columns": (decoding(same, SCHEMA), None),
        "decode 100 B, blocks of 4 KiB": (decoding(small), None),
        "decode 50-150 B": (decoding(various), DECODER_TARGET),
        "decode 50-150 B, messages of Python": (messages(various), None),
        "decode 100 B, a key and a tag each, all columns": (decoding(own, SCHEMA), None),
        "encode 100 B": (encoding(table(equal)), ENCODER_TARGET),
        "encode 100 B, messages of Python": (encoding_messages(equal), None),
        "encode 50-150 B": (encoding(table(mixed)), ENCODER_TARGET),
        "encode 100 B, a key and a tag each": (encoding(table(equal, key=keys, tag=tags)), ENCODER_TARGET),
        "encode 100 B, a key and a tag each, messages of Python": (encoding_messages(equal, keyed), None),
        "encode 100 B, attributes as they were": (encoding(table(equal, attributes=attributes)), ENCODER_TARGET),
    }
    found = dict(zip(programs, alternately(runs, *(each for each, _ in programs.values())), strict=True))
    return list(figures(found, {row: target for row, (_, target) in programs.items()}))


def figures(found: dict[str, list[float]], targets: dict[str, float | None]) -> Iterator[Figure]:
    end = ", messages of Python"
    for row, rates in found.items():
        if row.endswith(end):
            continue
        yield Figure(row, "tfmq.arrow, one core", median(rates), "rec/s", targets[row], note=spread(rates))
        if theirs := found.get(row + end):
            yield Figure(row, "tfmq.client, one core", median(theirs), "rec/s", note=spread(theirs))
            ratios = [a / b for a, b in zip(rates, theirs, strict=True)]
            yield Figure(row, "ratio", median(ratios), "x", note=spread(ratios))
