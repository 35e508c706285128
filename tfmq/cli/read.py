"""`tfmq read`: print the messages of a topic, up to its current end or continuously.

If parts of the topic are damaged, the command reports the damaged ranges on standard error, prints the other messages
and exits with code 4.
"""

import base64
import re
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import nullcontext
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from tfmq.cli import main
from tfmq.cli.main import DAMAGE_FOUND
from tfmq.cli.option_types import StartPosition, client_id_option
from tfmq.cli.output import (
    Output,
    iso_text,
    json_text,
    output_options,
    payload_fields,
    progress,
    report_connection,
    time_text,
    with_noun,
)
from tfmq.cli.topic import check_name, find_topic, unknown_topic
from tfmq.ids import format_id
from tfmq.message import PartitionState

if TYPE_CHECKING:
    from tfmq.client.admin.models import PartitionDescription
    from tfmq.client.consumer.message import ReceivedMessage
    from tfmq.consumer import Consumer


POLL_SECONDS = 1.0
CONTROLS = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]")
"""All control characters but tab and line feed; the second part matches the C1 controls in UTF-8."""
BATCH = 5_000

EXAMPLES = """\b
Examples:
  tfmq read greetings
  tfmq read orders --from latest --follow
  tfmq read orders --from -15m --tag new
  tfmq read orders -n 10 --format '%T %k %s'
  tfmq read orders --json | jq .payload

\b
--format: %s payload, %k key, %t tag, %T append time, %o offset, %O ordinal,
  %p partition, %i id, %P properties, %% a percent sign
"""


@click.command(epilog=EXAMPLES, short_help="Print the messages of a topic.")
@click.argument("topic", shell_complete=main.complete_topics)
@click.option("--partition", type=click.IntRange(min=0), help="Only this partition.")
@click.option(
    "--from",
    "start",
    type=StartPosition(),
    default="earliest",
    help="Where to begin [earliest]; a time may be relative, as -15m. A group continues at its offsets.",
)
@click.option("-n", "count", type=click.IntRange(min=1), help="Stop after this many messages.")
@click.option("--follow", is_flag=True, help="Continue as new messages arrive.")
@click.option(
    "-g", "--group", shell_complete=main.complete_groups, help="Read as this consumer group, and save its offsets."
)
@click.option(
    "--standby", is_flag=True, help="Of --servers, read also at a standby with replicate.read, about a second behind."
)
@click.option("-t", "--tag", help="Only messages of this tag.")
@click.option("--format", "template", help="One line for each message, as in '%k %o %s'.")
@client_id_option
@output_options
def read(
    topic: str,
    partition: int | None,
    start: str | int | datetime,
    count: int | None,
    follow: bool,
    group: str | None,
    standby: bool,
    tag: str | None,
    template: str | None,
    client_id: str | None,
    output: Output,
) -> int:
    """Print the messages of TOPIC, one payload per line, from the earliest to the current end.

    A stopped partition that may have unreadable messages is reported on standard error after the messages, and the exit
    code is 1, unless -n COUNT messages were printed.
    """
    from tfmq.consumer import Consumer
    from tfmq.errors import NotARecord

    line = make_formatter(output, template, escape_controls if sys.stdout.isatty() else bytes)
    if standby and group is not None:
        raise click.UsageError("--standby reads without a group: the primary keeps offsets and members")
    ends, unserved, troubles = partition_states(output, topic, partition, standby)
    if isinstance(start, int):
        check_offset(topic, start, ends)
    from_given = click.get_current_context().get_parameter_source("start") is ParameterSource.COMMANDLINE
    if group is not None and from_given and has_offset(output, group, topic, ends):
        output.info(
            f"--from is not used where the group {group} has an offset: it continues there."
            f" Another place: tfmq group reset {group} {topic} --to ..."
        )
    if follow or unserved == ends.keys():
        print_problems(troubles)
    if unserved == ends.keys():
        return 1
    ends = {number: end for number, end in ends.items() if number not in unserved}
    # A partition that is not served would make the consumer fail, so only the other partitions are read.
    chosen = sorted(ends) if unserved or partition is not None else []
    consumer = Consumer(
        output.servers,
        topics=None if chosen else topic,
        partitions=[(topic, number) for number in chosen] or None,
        group=group,
        start=start,
        tags=tag,
        on_damage="skip",
        standby=standby,
        client_id=client_id,
    )
    out, printed = sys.stdout.buffer, 0
    with (
        # Without --follow, the command ends when the broker does not answer at the next look at the partitions' ends.
        report_connection(output, consumer._core.link) if follow else nullcontext(),
        consumer,
        progress(output, f"reading {topic}", None, follow or sys.stdout.isatty()) as advance,
    ):
        try:
            for messages in read_batches(
                consumer, None if follow else ReadEnds(output, topic, ends, group, standby), count
            ):
                out.writelines(map(line, messages))
                out.flush()  # the next poll acknowledges these messages
                advance(len(messages))
                printed += len(messages)
        except NotARecord as error:
            if not isinstance(start, int) or error.offset != start:
                raise
            raise NotARecord(wrong_offset_sentence(consumer, topic, min(ends), start), offset=start) from None
        damaged = bool(consumer.stats()["skipped"])
    if not follow:
        print_problems(troubles)
    return DAMAGE_FOUND if damaged else int(bool(troubles) and printed != count)


def wrong_offset_sentence(consumer: "Consumer", topic: str, partition: int, offset: int) -> str:
    """Return the error text for `--from OFFSET` where no record starts, with the offset of the record before it."""
    consumer.seek(topic, partition, offset=offset)  # finds the nearest record before the offset
    nearest = consumer.position(topic, partition)
    return (
        f"No message of {topic}-{partition} starts at offset {offset}; the one before it starts at {nearest}: --from"
        f" {nearest}. `tfmq read {topic} --format '%o %s'` prints the offsets."
    )


def has_offset(output: Output, group: str, topic: str, partitions: Container[int]) -> bool:
    """Return whether the group has a committed offset in one of the partitions."""
    with output.admin() as admin:
        offsets = admin.group(group).offsets
    return any(row["topic"] == topic and row["partition"] in partitions and row["offset"] >= 0 for row in offsets)


def print_problems(troubles: list[str]) -> None:
    for trouble in troubles:
        click.echo(f"tfmq: {trouble}", err=True)


def partition_states(
    output: Output, topic: str, partition: int | None, standby: bool
) -> tuple[dict[int, int], set[int], list[str]]:
    """Return {partition: end offset}, the partitions that are not served, and a sentence for each problem.

    A standby has all partitions that it has, and knows of no problem.
    """
    if standby:
        return standby_ends(output, topic, partition), set(), []
    with output.admin() as admin:
        found = find_topic(admin, topic)
    parts = [each for each in found.partitions if partition in (None, each.partition)]
    check_partition(topic, partition, [each.partition for each in found.partitions])
    # `end_offset` includes messages that are not durable yet. The broker fsyncs such messages when a client reads them,
    # except in a stopped partition, which can be read only up to its durable offset.
    ends = {p.partition: p.forced_offset if p.state == PartitionState.STOPPED else p.end_offset for p in parts}
    unserved = {p.partition for p in parts if not p.is_served}
    return ends, unserved, [why for p in parts if (why := unread_reason(topic, p))]


def standby_ends(output: Output, topic: str, partition: int | None) -> dict[int, int]:
    """Return {partition: end offset} of a standby, or of a primary if that has answered."""
    check_name(topic)
    with output.admin(reads_standby=True) as admin:
        topics = {each.name: each for each in admin.topics()}
        if topic not in topics:
            raise unknown_topic(topic, list(topics))
        numbers = [each.number for each in topics[topic].partitions]
        check_partition(topic, partition, numbers)
        chosen = numbers if partition is None else [partition]
        return {number: admin.locate(topic, number, "latest").end_offset for number in chosen}


def check_partition(topic: str, partition: int | None, numbers: Sequence[int]) -> None:
    """Raise UnknownPartition if the topic does not have `partition`."""
    from tfmq.errors import UnknownPartition

    if partition is not None and partition not in numbers:
        count = with_noun(len(numbers), "partition")
        raise UnknownPartition(f"{topic} has {count}, numbered from 0; there is no {partition}.")


def unread_reason(topic: str, found: "PartitionDescription") -> str:
    """Return why the output may lack messages of the partition; "" if it cannot lack any."""
    if found.state != PartitionState.STOPPED:
        return ""
    name = f"{topic}-{found.partition}"
    if not found.is_served:
        return f"{name} is not served, its messages are missing here: {found.reason}"
    if found.is_lost:
        return f"{name} is stopped, its messages may be missing here: {found.reason}"
    if found.end_offset > found.forced_offset:
        return f"{name} is stopped, its last messages may be missing here: {found.reason}"
    return ""


def check_offset(topic: str, offset: int, ends: dict[int, int]) -> None:
    """Raise UsageError if several partitions are read, OffsetOutOfRange if `offset` is after the partition's end."""
    from tfmq.errors import OffsetOutOfRange

    if len(ends) > 1:
        raise click.UsageError(f"{topic} has {len(ends)} partitions: an offset needs --partition")
    ((partition, end),) = ends.items()
    if offset > end:
        raise OffsetOutOfRange(f"Partition {partition} of {topic} ends at offset {end}, before {offset}.")


class ReadEnds:
    """The offset up to which each partition is read: its end at the start of the command."""

    def __init__(self, output: Output, topic: str, ends: dict[int, int], group: str | None, standby: bool) -> None:
        self.output, self.topic, self.offsets, self.group, self._standby = output, topic, ends, group, standby

    def refresh(self, consumer: "Consumer") -> None:
        """Lower ends that a truncation made unreachable, and remove partitions that other members of the group read."""
        now, _, _ = partition_states(self.output, self.topic, None, self._standby)
        theirs: set[int] = set()
        if self.group is not None:
            with self.output.admin() as admin:
                members = admin.group(self.group).members
            theirs = {n for each in members if each["live"] for n in each["partitions"].get(self.topic, ())}
        self.offsets = {
            number: min(end, now[number])
            for number, end in self.offsets.items()
            if number not in theirs or self._position(consumer, number) is not None
        }

    def are_reached(self, consumer: "Consumer") -> bool:
        positions = ((self._position(consumer, number), end) for number, end in self.offsets.items())
        return all(position is not None and position >= end for position, end in positions)

    def _position(self, consumer: "Consumer", number: int) -> int | None:
        """Return the read position in a partition; None if the partition is not assigned to this member yet."""
        from tfmq.errors import UnknownPartition

        try:
            return consumer.position(self.topic, number)
        except UnknownPartition:
            if self.group is None:
                raise
            return None


def read_batches(consumer: "Consumer", ends: ReadEnds | None, count: int | None) -> Iterator[list["ReceivedMessage"]]:
    """Yield lists of messages until each partition has reached its offset in `ends` (None: without end).

    At most `count` messages are yielded. The last poll may return messages after the offsets in `ends`. These messages
    are yielded too, since they count as read for the consumer's group and would otherwise never be printed.
    """
    left = count
    while left is None or left > 0:
        if ends is not None and ends.are_reached(consumer):
            return
        messages = consumer.poll(timeout=POLL_SECONDS, max_messages=min(left or BATCH, BATCH))
        if messages:
            yield messages
        elif ends is not None:
            ends.refresh(consumer)
        left = None if left is None else left - len(messages)


def escape_controls(text: bytes) -> bytes:
    """Escape control characters as `\\x1b`, except tab and line feed, so that no message controls the terminal."""
    return CONTROLS.sub(lambda found: b"\\x%02x" % found[0][-1], text)


def make_formatter(
    output: Output, template: str | None, written: Callable[[bytes], bytes] = bytes
) -> Callable[["ReceivedMessage"], bytes]:
    """Return a function that formats a message. `written` converts payload and fields, for example to escape them."""
    if output.json:
        return lambda message: json_text(message_row(message)).encode() + b"\n"
    if template is None:
        return lambda message: written(bytes(message.payload or b"")) + b"\n"
    for letter in re.findall(r"%(.?)", template, re.DOTALL):
        if letter not in FIELDS:
            known = " ".join(f"%{each}" for each in FIELDS)
            raise click.UsageError(f"--format has no %{letter}: it has {known}, where %% is a percent sign")
    return lambda message: fill_template(template, message, written) + b"\n"


def message_row(message: "ReceivedMessage") -> dict[str, Any]:
    """Return the JSON object that `read --json` prints, and `send --json` accepts."""
    row: dict[str, Any] = {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "ordinal": message.ordinal,
        "id": format_id(message.id),
        "key": message.key,
        "tag": message.tag,
        "properties": dict(message.properties),
        "born_at": message.born_at.isoformat(timespec="milliseconds") if message.born_at else None,
        "appended_at": iso_text(message.origin.append_ms),
    }
    if isinstance(message.key, bytes):
        row["key_base64"] = base64.b64encode(message.key).decode()
        row["key"] = None
    return {**row, **payload_fields(message.payload)}


FIELDS: dict[str, Callable[["ReceivedMessage"], object]] = {
    "s": lambda m: bytes(m.payload or b""),
    "k": lambda m: m.key if m.key is not None else "",
    "t": lambda m: m.tag or "",
    "T": lambda m: time_text(m.origin.append_ms, exact=True),
    "o": lambda m: m.offset,
    "O": lambda m: m.ordinal,
    "p": lambda m: m.partition,
    "i": lambda m: format_id(m.id),
    "P": lambda m: ",".join(f"{k}={v}" for k, v in m.properties.items()),
    "%": lambda m: "%",
}


def fill_template(template: str, message: "ReceivedMessage", written: Callable[[bytes], bytes] = bytes) -> bytes:
    def fill(found: re.Match[bytes]) -> bytes:
        value = FIELDS[found[1].decode()](message)
        return written(value if isinstance(value, bytes) else str(value).encode())

    return re.sub(rb"%(.)", fill, template.encode(errors="surrogateescape"), flags=re.DOTALL)
