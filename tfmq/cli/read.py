"""`tfmq read`: messages of a topic to standard output, up to its present end or on and on."""

import sys
from datetime import datetime
from typing import TYPE_CHECKING

import click

from tfmq.cli.output import Output, output_options, progress
from tfmq.cli.values import Place

if TYPE_CHECKING:
    pass

EXAMPLES = """\b
Examples:
  tfmq read greetings
  tfmq read orders --from latest --follow
  tfmq read orders --from -15m --tag new
  tfmq read orders -n 10 --format '%T %k %s'
  tfmq read orders --json | jq .payload

\b
--format: %s payload, %k key, %t tag, %T append time, %o offset, %O ordinal, %p partition, %i id, %P properties, %%
"""


@click.command(epilog=EXAMPLES)
@click.argument("topic")
@click.option("--partition", type=click.IntRange(min=0), help="Only this partition.")
@click.option(
    "--from", "start", type=Place(), default="earliest", help="Where to begin [earliest]; -15m is a time too."
)
@click.option("-n", "count", type=click.IntRange(min=1), help="Stop after so many messages.")
@click.option("--follow", is_flag=True, help="Go on as new messages arrive.")
@click.option("-g", "--group", help="Read as this consumer group, and save how far it got.")
@click.option("-t", "--tag", help="Only messages of this tag.")
@click.option("--format", "template", help="A line a message, as in '%k %o %s'.")
@click.option("--skip-damage", is_flag=True, help="Go on behind a damaged place; the exit code still says 4.")
@output_options
def read(
    topic: str,
    partition: int | None,
    start: str | int | datetime,
    count: int | None,
    follow: bool,
    group: str | None,
    tag: str | None,
    template: str | None,
    skip_damage: bool,
    output: Output,
) -> None:
    """Print the messages of TOPIC, one payload a line, from the earliest to the present end."""
    from tfmq.consumer import Consumer

    line = formatter(output, template)
    ends = present_ends(output, topic, partition)
    consumer = Consumer(
        output.servers,
        topics=None if partition is not None else topic,
        partitions=[(topic, partition)] if partition is not None else None,
        group=group,
        start=start,
        tags=tag,
        on_damage="skip" if skip_damage else "stop",
    )
    out = sys.stdout.buffer
    with consumer, progress(output, f"reading {topic}", None) as advance:
        for message in wanted(consumer, None if follow else ends, count):
            out.write(line(message))
            if follow:
                out.flush()
            advance(1)
    out.flush()
