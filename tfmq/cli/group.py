"""`tfmq group`: consumer groups, how far they are, and setting them back or forth."""

from typing import Any

import click

from tfmq.cli.output import Output, output_options
from tfmq.cli.topics import known_topic
from tfmq.cli.values import Place

SHOW_COLUMNS = ("topic", "partition", "offset", "lag")


@click.group()
def group() -> None:
    """Consumer groups: list, show, reset."""


@group.command("list", epilog="\b\nExample:\n  tfmq group list")
@output_options
def list_command(output: Output) -> None:
    """List the groups."""
    from tfmq.admin import Admin

    with Admin(output.servers) as admin:
        rows = [dict(found) for found in admin.groups()]
    columns = tuple(rows[0]) if rows else ("group",)
    output.rows(rows, columns, "no groups yet: a consumer with group=NAME makes one")


@group.command(epilog="\b\nExample:\n  tfmq group show billing")
@click.argument("name")
@output_options
def show(name: str, output: Output) -> None:
    """Show a group: its member, its offsets, and its lag in messages."""
    from tfmq.admin import Admin

    with Admin(output.servers) as admin:
        found = dict(admin.group(name))
    if output.json:
        output.object(found)
        return
    offsets = found.pop("offsets", [])
    output.object(found)
    output.rows([dict(row) for row in offsets], SHOW_COLUMNS, f"{name} has saved no offset yet")


@group.command(
    epilog="\b\nExamples:\n  tfmq group reset billing orders --to earliest\n  tfmq group reset billing orders --to -1h"
)
@click.argument("name")
@click.argument("topic")
@click.option("--to", "place", type=Place(), required=True, help="earliest, latest, an offset, or a time.")
@click.option("--partition", type=click.IntRange(min=0), help="Only this partition.")
@output_options
def reset(name: str, topic: str, place: Any, partition: int | None, output: Output) -> None:
    """Set where group NAME goes on in TOPIC. Only while no member of it is running."""
    from tfmq.admin import Admin

    with Admin(output.servers) as admin:
        found = known_topic(admin, topic)
        numbers = [p.partition for p in found.partitions] if partition is None else [partition]
        places = {number: admin.locate(topic, number, place).offset for number in numbers}
        admin.reset_group(name, {(topic, number): offset for number, offset in places.items()})
    rows = [{"topic": topic, "partition": number, "offset": offset} for number, offset in places.items()]
    output.rows(rows, ("topic", "partition", "offset"), "")
