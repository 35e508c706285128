"""`tfmq bench`: measure the throughput of the running broker, in a few seconds."""

import time
from typing import Any

import click

from tfmq.cli.output import Output, output_options, progress, size_text

BULK_CHUNK = 20_000
SINGLES = 500
READ_BATCH = 10_000
COLUMNS = ("what", "messages", "seconds", "messages/s", "bytes/s", "µs each")


@click.command(
    short_help="Measure the running broker.", epilog="\b\nExample:\n  tfmq bench --messages 1000000 --size 100"
)
@click.option("--messages", type=click.IntRange(1_000), default=200_000, show_default=True, help="How many.")
@click.option("--size", type=click.IntRange(1, 1 << 20), default=100, show_default=True, help="Bytes of each payload.")
@click.option("--topic", default=None, help="Use this topic and keep it [a new topic, deleted at the end].")
@click.option(
    "--acks",
    type=click.Choice(["synced", "written"]),
    default="synced",
    show_default=True,
    help="When a send is acknowledged.",
)
@output_options
def bench(messages: int, size: int, topic: str | None, acks: str, output: Output) -> None:
    """Measure the running broker: sending in bulk, one at a time, and reading back."""
    name = topic or f"bench-{time.time_ns():x}"
    try:
        bulk = measure_send(output, name, messages, size, acks, in_bulk=True)
        singles = measure_send(output, name, SINGLES, size, acks, in_bulk=False)
        rows = [
            json_row("send in bulk", messages, size, bulk),
            json_row("send one at a time", SINGLES, size, singles),
            json_row("read", messages, size, measure_read(output, name, messages)),
        ]
    finally:
        if topic is None:
            with output.admin(may_create=True) as admin:
                admin.delete_topic(name)
    output.print_rows(rows if output.json else [table_row(each) for each in rows], COLUMNS, "")


def table_row(found: dict[str, Any]) -> dict[str, Any]:
    return {
        **found,
        "messages/s": found["messages_per_second"],
        "bytes/s": size_text(found["bytes_per_second"]),
        "µs each": found["microseconds_each"],
    }


def json_row(what: str, messages: int, size: int, seconds: float) -> dict[str, Any]:
    return {
        "what": what,
        "messages": messages,
        "seconds": round(seconds, 3),
        "messages_per_second": round(messages / seconds),
        "bytes_per_second": round(messages * size / seconds),
        "microseconds_each": round(seconds / messages * 1e6, 1),
    }


def measure_send(output: Output, topic: str, messages: int, size: int, acks: str, *, in_bulk: bool) -> float:
    """Return the seconds that sending takes. Unless `in_bulk`, each message waits for the ack of the previous one."""
    from tfmq.producer import Producer

    payload, step = b"x" * size, BULK_CHUNK if in_bulk else 1
    with (
        Producer(output.servers, acks=acks) as producer,
        progress(output, "sending in bulk" if in_bulk else "one at a time", messages) as advance,
    ):
        producer.send(topic, b"first").result()
        begun = time.perf_counter()
        for start in range(0, messages, step):
            count = min(step, messages - start)
            if in_bulk:
                producer.send_many(topic, [payload] * count)
            else:
                producer.send(topic, payload).result()
            advance(count)
        producer.flush()
        return time.perf_counter() - begun


def measure_read(output: Output, topic: str, messages: int) -> float:
    from tfmq.consumer import Consumer

    with Consumer(output.servers, topics=topic) as consumer, progress(output, "reading", messages) as advance:
        begun, got = time.perf_counter(), 0
        while got < messages and (batch := consumer.poll(timeout=5.0, max_messages=READ_BATCH)):
            got += len(batch)
            advance(len(batch))
        return time.perf_counter() - begun
