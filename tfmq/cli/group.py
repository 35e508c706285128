"""`tfmq group`: list and show consumer groups, reset their offsets, delete them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from tfmq.cli import main
from tfmq.cli.option_types import StartPosition
from tfmq.cli.output import Output, age_text, confirm, did_you_mean, escape_unprintable, output_options, with_noun
from tfmq.cli.topic import find_topic
from tfmq.errors import TfmqError

if TYPE_CHECKING:
    from tfmq.admin import Admin
    from tfmq.client.admin.models import GroupDescription


LIST_COLUMNS = ("group", "generation", "members", "live", "partitions", "lag (messages)")
OFFSET_COLUMNS = ("topic", "partition", "member", "offset (bytes)", "end offset (bytes)", "lag (messages)")
MEMBER_COLUMNS = ("member", "client", "live", "last_heard", "partitions", "leaving", "note")


@click.group()
def group() -> None:
    """Consumer groups: list, show, reset, delete."""


@group.command("list", epilog="\b\nExample:\n  tfmq group list")
@output_options
def list_command(output: Output) -> None:
    """List the groups with their lag: groups of consumers, and those of Spark queries."""
    with output.admin() as admin:
        rows = [{**found._asdict(), "lag": admin.group(found.group).lag} for found in admin.groups()]
    if not output.json:
        rows = [{**row, "lag (messages)": row["lag"]} for row in rows]
    output.print_rows(rows, LIST_COLUMNS, "no groups yet: a consumer with group=NAME makes one")


@group.command(epilog="\b\nExample:\n  tfmq group show billing")
@click.argument("name", shell_complete=main.complete_groups)
@output_options
def show(name: str, output: Output) -> None:
    """Show a group: its members and their partitions, its offsets, and its lag in messages."""
    with output.admin() as admin:
        found = find_group(admin, name)
    summary: dict[str, Any] = {"group": name, "generation": found.generation, "live": found.live}
    summary |= {"strategy": found.strategy, "lag": found.lag}
    offsets = [{**row, **{key: known_value(row[key]) for key in ("offset", "lag")}} for row in found.offsets]
    if output.json:
        output.print_object({**summary, "members": found.members, "offsets": offsets})
        return
    output.print_object(summary)
    members = [
        {
            **row,
            "last_heard": f"{age_text(row['silent_ms'] / 1000)} ago",
            "client": escape_unprintable(row["client"]),
            "partitions": format_partitions(row["partitions"]),
            "leaving": format_partitions(row["leaving"]),
            "note": escape_unprintable(row["note"]),
        }
        for row in found.members
    ]
    output.print_rows(members, MEMBER_COLUMNS, f"{name} has no member at the moment")
    committed = [
        {**row, "offset (bytes)": row["offset"], "end offset (bytes)": row["end_offset"], "lag (messages)": row["lag"]}
        for row in offsets
    ]
    output.print_rows(committed, OFFSET_COLUMNS, f"{name} has saved no offset yet")


def known_value(number: int) -> int | None:
    """Return an offset or a lag from a group's description, with None in place of -1."""
    return None if number < 0 else number


def format_partitions(partitions: Mapping[str, Sequence[int]]) -> str:
    """Format partitions: {"orders": [0, 1, 2, 7]} -> 'orders 0-2 7'."""
    found = []
    for topic, numbers in sorted(partitions.items()):
        ranges: list[list[int]] = []
        for number in sorted(numbers):
            if ranges and ranges[-1][1] == number - 1:
                ranges[-1][1] = number
            else:
                ranges.append([number, number])
        texts = (str(first) if first == last else f"{first}-{last}" for first, last in ranges)
        found.append(" ".join([topic, *texts]))
    return ", ".join(found)


def find_group(admin: "Admin", name: str) -> "GroupDescription":
    found = admin.group(name)
    check_group(admin, name)
    return found


def check_group(admin: "Admin", name: str, advice: str = "") -> None:
    """Raise TfmqError, with the most similar name and `advice`, if the group does not exist."""
    names = [each.group for each in admin.groups()]
    if name not in names:
        others = " `tfmq group list` has all." if names else " There are no groups yet."
        hint = did_you_mean(name, names) or others
        raise TfmqError(f"There is no group {name!r}.{hint}{advice}", outcome="not done")


@group.command(
    epilog="\b\nExamples:\n  tfmq group reset billing orders --to earliest\n"
    "  tfmq group reset billing orders --to -1h\n"
    "  tfmq group reset new-reports orders --to latest --create\n"
    "  tfmq group reset billing orders --to -1h --dry-run"
)
@click.argument("name", shell_complete=main.complete_groups)
@click.argument("topic", shell_complete=main.complete_topics)
@click.option("--to", "start", type=StartPosition(), required=True, help="earliest, latest, an offset, or a time.")
@click.option("--partition", type=click.IntRange(min=0), help="Only this partition.")
@click.option("--create", is_flag=True, help="Create the group if it does not exist.")
@click.option("--dry-run", is_flag=True, help="Only print what would be changed.")
@output_options
def reset(
    name: str, topic: str, start: Any, partition: int | None, create: bool, dry_run: bool, output: Output
) -> None:
    """Set where group NAME continues in TOPIC. No member of the group may be running."""
    from tfmq.client.admin.admin import refuse_reset_beyond_end

    with output.admin() as admin:
        described = find_topic(admin, topic)
        count = len(described.partitions)
        if isinstance(start, int) and partition is None and count > 1:
            raise click.UsageError(f"{topic} has {count} partitions, an offset needs --partition")
        if not create:
            check_group(admin, name, " With --create it is created.")
        group = admin.group(name)
        before = {row["partition"]: known_value(row["offset"]) for row in group.offsets if row["topic"] == topic}
        if dry_run:
            numbers = range(count) if partition is None else [partition]
            located = {number: admin.locate(topic, number, start) for number in numbers}
            for number in numbers:
                refuse_reset_beyond_end(topic, number, start, located[number])
            offsets = {number: located[number].offset for number in numbers}
        else:
            offsets = admin.reset_group(name, topic, start, partition, create=True)
    rows: list[dict[str, Any]] = [
        {"topic": topic, "partition": number, "before": before.get(number), "offset": offset}
        for number, offset in offsets.items()
    ]
    if not output.json:  # print offsets without separators, so that options accept them
        for row in rows:
            row |= {key: None if row[key] is None else str(row[key]) for key in ("before", "offset")}
    output.print_rows(rows, ("topic", "partition", "before", "offset"), "")
    if dry_run:
        live = "; a member of it is running, so the reset would be rejected" if group.live else ""
        output.info(f"nothing was changed: this was a dry run{live}")
    for number, offset in offsets.items():
        if isinstance(start, int) and offset != start:
            output.info(f"partition {number}: no message begins at {start}; the group continues at {offset}")


@group.command(epilog="\b\nExample:\n  tfmq group delete old-reports --yes")
@click.argument("name", shell_complete=main.complete_groups)
@click.option("--yes", is_flag=True, help="Do not ask.")
@output_options
def delete(name: str, yes: bool, output: Output) -> None:
    """Delete a group with all its offsets. No member of the group may be running."""
    with output.admin() as admin:
        found = find_group(admin, name)
        if not yes:
            saved = sum(row["offset"] >= 0 for row in found.offsets)
            confirm(f"delete the group {name} with {with_noun(saved, 'saved offset')}", "not deleted")
        admin.delete_group(name)
    output.report({"group": name, "deleted": True}, f"deleted the group {name}")
