"""`tfmq send`: send messages from arguments, files or standard input to a topic."""

import base64
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from tfmq.cli import main
from tfmq.cli.delay_view import due_fields
from tfmq.cli.option_types import Delay, Moment, Property, client_id_option
from tfmq.cli.output import Output, json_text, output_options, progress, report_connection, time_text, with_noun
from tfmq.cli.topic import check_name
from tfmq.client.connection.connection import ConnectionState
from tfmq.client.connection.requests import MetadataCache, fetch_topics
from tfmq.client.send.partitioner import KeyHash
from tfmq.ids import format_id
from tfmq.message import Message
from tfmq.protocol.delayed_handle import parse_handle

if TYPE_CHECKING:
    from tfmq.message import SendResult
    from tfmq.producer import Producer


BATCH_LINES = 10_000

SENT = ("payload", "payload_base64", "key", "key_base64", "tag", "properties")
"""The fields of a JSON object (`--json`) from which a message is made."""
TIMES = {"delay", "deliver_at"}
OPTIONS = {"delay": "--delay", "deliver_at": "--at", "at": "--at", "partition": "--partition"}

EXAMPLES = """\b
Examples:
  tfmq send greetings "hello" "goodbye"
  tfmq send orders '{"n": 1}' -k 42 -t new --property source=web
  tfmq send logs --lines app.log
  tail -f app.log | tfmq send logs
  tfmq send reminders "pay, please" -k 42 --delay 30m
  tfmq send greetings "happy new year" --at 2027-01-01T00:00+01:00
  tfmq read orders --json | tfmq send copy --json
  tail -f app.log | tfmq send logs --lines - --json
"""


@click.command(epilog=EXAMPLES)
@click.argument("topic", shell_complete=main.complete_topics)
@click.argument("payloads", nargs=-1, metavar="[PAYLOAD]...")
@click.option(
    "-f", "--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="One message: the file."
)
@click.option("--lines", type=click.File("rb"), help="One message per line of this file; - is standard input.")
@click.option("-0", "--null", is_flag=True, help="Messages end with NUL instead of a line end.")
@click.option("-k", "--key", help="Key of the messages; messages with the same key keep their order.")
@click.option("-t", "--tag", help="A tag that consumers can filter by.")
@click.option("--property", "properties", type=Property(), multiple=True, help="A property; may be repeated.")
@click.option("--partition", type=click.IntRange(min=0), help="This partition instead of the selector's choice.")
@click.option("--delay", type=Delay(), help="Deliver after this time: 250ms, 30s, 5m, 2h, 7d.")
@click.option(
    "--at", type=Moment(), help="Deliver at this time: 2027-01-01T09:00+01:00; without a zone it is local time."
)
@click.option(
    "--acks",
    type=click.Choice(["synced", "written", "none"]),
    help="When a send is acknowledged [the server's setting].",
)
@client_id_option
@output_options
def send(
    topic: str,
    payloads: tuple[str, ...],
    file: Path | None,
    lines: BinaryIO | None,
    null: bool,
    key: str | None,
    tag: str | None,
    properties: tuple[tuple[str, str], ...],
    partition: int | None,
    delay: float | None,
    at: datetime | None,
    acks: str | None,
    client_id: str | None,
    output: Output,
) -> None:
    """Send PAYLOADs to TOPIC, which is made on first use.

    Without PAYLOAD and file, or if - is the only PAYLOAD, each line of standard input is a message. With --json,
    standard input has objects as `tfmq read --json` prints them; payload, key, tag and properties of each object are
    sent. To send plain lines with --json, use `--lines -`. Messages without a key go to the partitions in turn;
    messages with the same key go to the same partition. Without --json, a topic that is made is named on standard
    error; two commands that run at the same moment may both name it. A message that cannot be delivered within 30 s
    ends the command with an error; no more input is read then. After Ctrl-C, the messages that were read are delivered,
    if the broker is reached before a second Ctrl-C or the end of the 30 s, and their number is printed; so is the
    number of those that may not be delivered.
    """
    from tfmq.producer import Producer

    check_name(topic)
    if payloads == ("-",):
        payloads = ()
    if sum((bool(payloads), file is not None, lines is not None)) > 1:
        raise click.UsageError("give only one of PAYLOADs, --file and --lines")
    shared = SharedOptions(key, tag, dict(properties), partition, delay, at)
    if at is not None and at <= datetime.now(UTC):
        output.info(f"{time_text(round(at.timestamp() * 1000))} is in the past: delivered as soon as possible")
    from_objects = output.json and not payloads and file is None and lines is None
    messages = (
        parse_objects(sys.stdin.buffer, shared)
        if from_objects
        else map(shared.make_message, named_payloads(payloads, file, lines, b"\0" if null else b"\n"))
    )
    read = CountedMessages(messages)
    is_stream = not payloads and file is None
    typed = is_stream and (lines or sys.stdin).isatty()
    if typed:
        end = "NUL after each" if null else "one per line"
        output.info(f"type the messages, {end}; Ctrl-D at the start of a line ends")
    producer = Producer(output.servers, acks=acks, selector=RoundRobinSelector(), client_id=client_id)
    try:
        with (
            report_connection(output, producer._core.link),
            producer,
            progress(output, f"sending to {topic}", None, typed or not is_stream) as advance,
        ):
            create = partial(create_missing_topic, producer, topic, output)
            try:
                handles = shared.is_delayed and output.json
                count, last, delayed = send_all(producer, topic, read, advance, handles, create)
            except KeyboardInterrupt:
                if producer._core.link.state != ConnectionState.READY and read.count > producer.stats()["messages"]:
                    output.info("interrupted: waiting for the broker until the timeout; another Ctrl-C ends at once")
                raise
    except KeyboardInterrupt:
        # `with` has delivered the messages that were read, unless a second Ctrl-C interrupted the delivery.
        if not output.quiet:
            count = producer.stats()["messages"]
            delivered = f"{with_noun(count, 'message')} {'was' if count == 1 else 'were'} delivered to {topic}"
            left = read.count - count
            rest = f"; {left:,} more may not be delivered" if left > 0 else ""
            click.echo(f"interrupted: {delivered}{rest}", err=True)
        raise
    print_result(output, topic, count, last, shared.is_delayed, delayed)


class CountedMessages:
    """Iterates over messages, and counts those that were read."""

    def __init__(self, messages: Iterator[Message]) -> None:
        self._messages = messages
        self.count = 0

    def __iter__(self) -> Iterator[Message]:
        return self

    def __next__(self) -> Message:
        message = next(self._messages)
        self.count += 1
        return message


class RoundRobinSelector(KeyHash):
    """Selects the partitions in turn, message by message, for messages without a key.

    The default selector changes the partition only after each batch, so a few lines would all go to one partition.
    """

    per_batch = False


def create_missing_topic(producer: "Producer", topic: str, output: Output) -> None:
    """Create the topic if it is missing, as the first message would, and print that it was created.

    The name may be mistyped. Raises the errors of the first message, such as UnknownTopic without `topics.auto_create`.
    """
    link, seconds = producer._core.link, producer._core.options.timeout
    metadata = MetadataCache(link.now)
    fetch = partial(fetch_topics, link, metadata, [topic], retry_while_busy=True, seconds=seconds)
    if not producer._driver.run(fetch()):
        for created in producer._driver.run(fetch(create=True)):
            output.info(f"created topic {topic} ({with_noun(len(created.partitions), 'partition')})")


def send_all(
    producer: "Producer",
    topic: str,
    messages: Iterator[Message],
    advance: Callable[[int], None],
    handles: bool = False,
    before_first: Callable[[], None] = lambda: None,
) -> tuple[int, "SendResult | None", list[str | None]]:
    """Send all messages and wait for their acks. Return their number, the last result, and the list of their handles.

    If there are no messages, the last result is None. If `handles` is false, the list is empty. `before_first` is
    called when the first message was read.
    """
    count, last, kept = 0, None, []
    try:
        for message in messages:
            if not count:
                before_first()
            if producer._core.accumulator.failed_messages:
                # Messages after a failed one would leave a gap that nothing shows before the end of the input.
                text = f"tfmq: reading stopped after {with_noun(count, 'message')}, because some could not be delivered"
                click.echo(text, err=True)
                break
            last = producer.send(topic, message)
            count += 1
            if handles:
                kept.append(last)
            if count % BATCH_LINES == 0:
                advance(BATCH_LINES)
    except click.UsageError as error:
        producer.flush()
        raise click.UsageError(f"{error.message}. {with_noun(count, 'message')} sent before it.") from None
    producer.flush()
    return count, last.result() if last is not None else None, [each.result().delayed for each in kept]


def print_result(
    output: Output,
    topic: str,
    count: int,
    last: "SendResult | None",
    waits: bool = False,
    delayed: Sequence[str | None] = (),
) -> None:
    """Print what was sent. `waits`: the messages have a due time; `delayed`: their handles."""
    if output.json:
        durability = last.durability if last else None
        row = {"topic": topic, "count": count, "durability": durability}
        if count == 1 and last:
            row |= {"partition": last.partition, "offset": last.offset, "id": format_id(last.message_id)}
            row |= {"delayed": last.delayed, **due_fields(last.delayed)} if last.delayed else {}
        elif any(delayed):
            row["delayed"] = delayed
        click.echo(json_text(row))
    elif count == 1 and last and waits and not last.delayed:
        output.info(f"sent to {topic}, partition {last.partition}, delivered when due ({last.durability})")
        output.info("it has no handle, because the broker's reply had none")
    elif count == 1 and last and last.delayed:
        due = time_text(parse_handle(last.delayed).due)
        output.info(f"sent to {topic}, partition {last.partition}, due {due} ({last.durability})")
        output.info(f"its handle until then: {last.delayed}")
    elif count == 1 and last:
        output.info(f"sent to {topic}, partition {last.partition}, offset {last.offset} ({last.durability})")
    else:
        output.info(f"sent {count:,} messages to {topic}" + (f" ({last.durability})" if last else ""))
        if last and last.delayed:
            output.info(f"they are delivered when due: tfmq delay list --topic {topic}")


@dataclass(frozen=True)
class SharedOptions:
    """The options that all messages of one command line share."""

    key: str | None
    tag: str | None
    properties: dict[str, str]
    partition: int | None
    delay: float | None
    at: datetime | None

    def __post_init__(self) -> None:
        if self.delay is not None and self.at is not None:
            raise click.UsageError("give either --delay or --at")

    @property
    def is_delayed(self) -> bool:
        return self.delay is not None or self.at is not None

    def make_message(self, payload: bytes | None) -> Message:
        return Message(
            payload, self.key, self.tag, self.properties, self.partition, delay=self.delay, deliver_at=self.at
        )


def named_payloads(payloads: tuple[str, ...], file: Path | None, lines: BinaryIO | None, end: bytes) -> Iterator[bytes]:
    if payloads:
        yield from (payload.encode(errors="surrogateescape") for payload in payloads)
    elif file is not None:
        yield file.read_bytes()
    else:
        yield from split_stream(lines or sys.stdin.buffer, end)


def split_stream(stream: BinaryIO, end: bytes) -> Iterator[bytes]:
    """Yield the parts of `stream` between the separators `end`, as they arrive. The last part may lack its `end`."""
    if end == b"\n":
        yield from (line[:-1] if line.endswith(b"\n") else line for line in stream)
        return
    rest = b""
    while chunk := stream.read1(1 << 16) if hasattr(stream, "read1") else stream.read(1 << 16):
        *pieces, rest = (rest + chunk).split(end)
        yield from pieces
    if rest:
        yield rest


def parse_objects(stream: BinaryIO, shared: SharedOptions) -> Iterator[Message]:
    """Yield a message for each JSON object of `read --json` (one per line); options in `shared` take precedence."""
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            yield message_of(json.loads(line), shared)
        except (ValueError, TypeError) as error:
            raise click.UsageError(
                f"line {number} is no object as `tfmq read --json` prints them: {error}. With --json standard input is"
                " such objects; for plain lines, and JSON as output, say --lines -"
            ) from None


def message_of(row: dict[str, object], shared: SharedOptions) -> Message:
    if not isinstance(row, dict) or not {"payload", "payload_base64"} & row.keys():
        raise TypeError("it should be an object with a payload")
    # An object with an offset was printed by `tfmq read` or `tfmq dlq export`. Its fields that are not in SENT are
    # ignored, but those in TIMES are rejected. In other objects, all fields that are not in SENT are rejected.
    unused = row.keys() & TIMES if "offset" in row else row.keys() - SENT
    for name in sorted(unused):
        option = OPTIONS.get(name)
        advice = f"say {option}, which is for all messages" if option else f"sent are {', '.join(SENT)}"
        raise TypeError(f"the field {name!r} is not used: {advice}")
    if "payload_base64" in row:
        payload: object = base64.b64decode(str(row["payload_base64"]), validate=True)
    else:
        payload = row["payload"]
    if not isinstance(payload, str | bytes | None):
        raise TypeError(f"payload should be text, not {type(payload).__name__}")
    key = base64.b64decode(str(row["key_base64"]), validate=True) if "key_base64" in row else row.get("key")
    if not isinstance(key, str | bytes | None):
        raise TypeError(f"key should be text, not {type(key).__name__}")
    tag, properties = row.get("tag"), row.get("properties") or {}
    if not isinstance(tag, str | None) or not isinstance(properties, dict):
        raise TypeError("tag should be text, and properties an object")
    if not all(isinstance(value, str) for value in properties.values()):
        raise TypeError("the values of properties should be text")
    return Message(
        payload.encode() if isinstance(payload, str) else payload,
        key=key if shared.key is None else shared.key,
        tag=tag if shared.tag is None else shared.tag,
        properties={**properties, **shared.properties},
        partition=shared.partition,
        delay=shared.delay,
        deliver_at=shared.at,
    )
