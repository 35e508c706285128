"""`tfmq topic`: list, create, show, set, grow, purge, resume, delete."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from tfmq.cli import main
from tfmq.cli.option_types import PositiveInteger, Property, StartPosition
from tfmq.cli.output import Output, confirm, did_you_mean, output_options, size_text, time_text, with_noun, with_times
from tfmq.errors import UnknownTopic
from tfmq.limits import NAME_RULE, is_valid_name
from tfmq.message import PartitionState

if TYPE_CHECKING:
    from tfmq.admin import Admin
    from tfmq.client.admin.models import PartitionDescription, TopicDescription


LIST_COLUMNS = ("topic", "partitions", "messages", "size", "state")
OFFSET_COLUMNS = ("first_offset", "forced_offset", "end_offset")
SHOW_COLUMNS = ("partition", "state", *OFFSET_COLUMNS, "messages", "size", "segments")


@click.group()
def topic() -> None:
    """Topics: list, create, show, set, grow, purge, resume, delete."""


def json_row(found: TopicDescription) -> dict[str, Any]:
    parts = found.partitions
    states = sorted({p.state for p in parts}, key=lambda state: (state == PartitionState.OPEN, state))
    return {
        "topic": found.name,
        "partitions": len(parts),
        "messages": found.messages,
        "size_bytes": found.size_bytes,
        "state": ", ".join(states),
        "states": {state: sum(p.state == state for p in parts) for state in states},
    }


def table_row(row: dict[str, Any]) -> dict[str, Any]:
    shown = {key: value for key, value in row.items() if key not in ("size_bytes", "states")}
    return {**shown, "size": size_text(row["size_bytes"])}


@topic.command("list", epilog="\b\nExample:\n  tfmq topic list --json")
@output_options
def list_command(output: Output) -> None:
    """List the topics."""
    with output.admin() as admin:
        rows = [json_row(admin.topic(found.name)) for found in admin.topics()]
    empty = "no topics yet: tfmq send TOPIC PAYLOAD makes one"
    output.print_rows(rows if output.json else [table_row(row) for row in rows], LIST_COLUMNS, empty)


@topic.command(epilog="\b\nExample:\n  tfmq topic create orders --partitions 4 --set retention.seconds=7d")
@click.argument("name")
@click.option(
    "--partitions", type=PositiveInteger("partitions"), help="Number of partitions [the server's topics.partitions]."
)
@click.option("--set", "settings", type=Property(), multiple=True, help="A setting of this topic; may be repeated.")
@output_options
def create(name: str, partitions: int | None, settings: tuple[tuple[str, str], ...], output: Output) -> None:
    """Create a topic."""
    check_name(name)
    with output.admin(may_create=True) as admin:
        made = admin.create_topic(name, partitions=partitions, settings=dict(settings))
    count = len(made.partitions)
    sentence = f"created {name} with {with_noun(count, 'partition')}"
    output.report({"topic": name, "partitions": count}, sentence)


@topic.command(epilog="\b\nExample:\n  tfmq topic show orders")
@click.argument("name", shell_complete=main.complete_topics)
@output_options
def show(name: str, output: Output) -> None:
    """Show a topic: its partitions, offsets, sizes, states, damage, and findings of the background verification."""
    with output.admin() as admin:
        found = find_topic(admin, name)
    rows = [partition_row(p) for p in found.partitions]
    if output.json:
        effective = {key: {"value": value, "from": origin} for key, (value, origin) in found.effective.items()}
        output.print_object(
            {**json_row(found), "settings": dict(found.settings), "effective": effective, "partitions": rows}
        )
        return
    own = ", ".join(f"{key}={setting_text(value)}" for key, value in found.settings.items())
    output.print_object({**table_row(json_row(found)), "settings": own or None})
    # The settings that differ from the defaults, in the format that --set accepts.
    different = [
        {"setting": key, "value": setting_text(value), "from": "the topic's own" if origin == "topic" else origin}
        for key, (value, origin) in found.effective.items()
        if origin != "default"
    ]
    output.print_rows(different, ("setting", "value", "from"), "")
    output.print_rows([table_row(row) for row in rows], SHOW_COLUMNS, "")
    for row in rows:
        print_problem(output, name, row)


def setting_text(value: Any) -> str:
    """Format a value as --set and `topic set` accept it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def partition_row(found: PartitionDescription) -> dict[str, Any]:
    names = ("partition", "state", "reason", *OFFSET_COLUMNS, "messages", "size_bytes", "segments")
    damage = [{"first": first, "next": following, "reason": why} for first, following, why in found.damage]
    findings = [with_times(each._asdict(), "found") for each in found.findings]
    return {name: getattr(found, name) for name in names} | {"damage": damage, "findings": findings}


def print_problem(output: Output, name: str, row: dict[str, Any]) -> None:
    number = row["partition"]
    if row["state"] == PartitionState.STOPPED:
        output.info(f"partition {number} accepts no messages: {row['reason']}")
        output.info(f"  when the cause is corrected: tfmq topic resume {name} --partition {number}")
    for damage in row["damage"]:
        output.info(f"partition {number} is damaged from {damage['first']} to {damage['next']}: {damage['reason']}")
    for found in row["findings"]:
        what = "an index" if found["kind"] == "index" else f"{found['kind']}, {found['first']} to {found['next']}"
        where = f"{found['file']} of partition {number}"
        output.info(f"verification found at {time_text(found['found_ms'])} in {where}: {what}: {found['reason']}")
    if any(found["kind"] != "index" for found in row["findings"]):
        output.info(
            "  the rest is served; with the server stopped, tfmq log verify and tfmq log repair: docs/operations.md"
        )


@topic.command(
    "set",
    epilog="\b\nExamples:\n  tfmq topic set orders retention.seconds=7d flush.messages=1\n"
    "  tfmq topic set orders --unset retention.seconds",
)
@click.argument("name", shell_complete=main.complete_topics)
@click.argument("settings", nargs=-1, type=Property(), metavar="[KEY=VALUE]...")
@click.option("--unset", multiple=True, metavar="KEY", help="Use the server's value again, like KEY=; may be repeated.")
@output_options
def set_command(name: str, settings: tuple[tuple[str, str], ...], unset: tuple[str, ...], output: Output) -> None:
    """Change settings of a topic, at once and permanently; KEY= restores the server's value."""
    if not settings and not unset:
        raise click.UsageError("give KEY=VALUE or --unset KEY")
    for key, value in settings:
        if value and key in unset:
            raise click.UsageError(f"{key}={value} and --unset {key} contradict each other: give one of them")
    changes = {key: value or None for key, value in settings} | dict.fromkeys(unset)
    with output.admin() as admin:
        find_topic(admin, name)
        found = admin.set_topic(name, changes)
    if output.json:
        output.print_object({"topic": name, "settings": dict(found.settings)})
        return
    for key in changes:
        value, origin = found.effective[key]
        output.info(f"{name}: {key} = {value} ({'its own' if origin == 'topic' else origin})")


@topic.command(epilog="\b\nExample:\n  tfmq topic grow orders 8")
@click.argument("name", shell_complete=main.complete_topics)
@click.argument("partitions", type=PositiveInteger("partitions"))
@output_options
def grow(name: str, partitions: int, output: Output) -> None:
    """Increase the number of partitions.

    Messages with the same key keep their order within a partition, but later ones may go to a new partition.
    """
    with output.admin() as admin:
        find_topic(admin, name)
        count = admin.grow_topic(name, partitions)
    output.report({"topic": name, "partitions": count}, f"{name} has {with_noun(count, 'partition')} now")


@topic.command(
    short_help="Let a stopped partition accept messages again.",
    epilog="\b\nExample:\n  tfmq topic resume orders --partition 2",
)
@click.argument("name", shell_complete=main.complete_topics)
@click.option("--partition", type=click.IntRange(min=0), help="The partition [every stopped partition].")
@output_options
def resume(name: str, partition: int | None, output: Output) -> int:
    """Let a stopped partition accept messages again, after the cause is corrected.

    If the folder of the partition was missing when the broker started, the partition begins empty: the messages of the
    missing folder are lost. The exit code is 1 if a partition stays stopped.
    """
    with output.admin() as admin:
        before = {p.partition: p for p in find_topic(admin, name).partitions}
        stopped = [number for number, p in before.items() if p.state == PartitionState.STOPPED]
        chosen = stopped if partition is None else [partition]
        states = {number: admin.resume(name, number) for number in chosen}
        after = {p.partition: p.reason for p in admin.topic(name).partitions}
    rows = [
        {"topic": name, "partition": n, "state": state}
        | ({"reason": after[n]} if state == PartitionState.STOPPED else {})
        for n, state in states.items()
    ]
    output.print_rows(rows, ("topic", "partition", "state"), f"no partition of {name} is stopped")
    for number, state in states.items():
        if state == PartitionState.STOPPED:
            click.echo(f"tfmq: {name}-{number} is still stopped: {after[number]}", err=True)
        elif before[number].is_lost:
            output.info(f"{name}-{number} is empty now: the messages of its lost folder are given up")
    return 1 if PartitionState.STOPPED in states.values() else 0


@topic.command(
    short_help="Remove the messages before an offset or a time.",
    epilog="\b\nExamples:\n  tfmq topic purge orders --before -30d\n"
    "  tfmq topic purge orders --partition 2 --before 4096\n  tfmq topic purge test-events --yes",
)
@click.argument("name", shell_complete=main.complete_topics)
@click.option("--partition", type=click.IntRange(min=0), help="Only this partition.")
@click.option(
    "--before", type=StartPosition(), default="latest", help="Remove messages before this [latest: all messages]."
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@output_options
def purge(name: str, partition: int | None, before: str | int | datetime, yes: bool, output: Output) -> None:
    """Remove the messages of a topic before an offset or a time.

    Removed messages cannot be restored. Messages are removed by block, never more than requested; a file is removed
    with its last block.

    A group whose next message is removed continues at the first remaining message, unless a member of the group is
    running.
    """
    with output.admin() as admin:
        found = find_topic(admin, name)
        where = name if partition is None else f"{name}-{partition}"
        if isinstance(before, int) and partition is None and len(found.partitions) > 1:
            number = len(found.partitions)
            raise click.UsageError(f"{name} has {number} partitions, an offset needs --partition")
        if not yes:
            until = "" if before == "latest" else f" before {before}"
            confirm(f"remove the messages of {where}{until}", "not removed", "they cannot be restored")
        purged = admin.purge(name, partition, before)
        left = admin.topic(name)
    before_it = {each.partition: each.first_ordinal for each in found.partitions}
    count = sum(each.first_ordinal - before_it.get(each.partition, 0) for each in left.partitions)
    if output.json:
        rows = [{"partition": each, "first_offset": first} for each, first in purged.first_offsets.items()]
        output.print_object({"topic": name, "partitions": rows, "moved": purged.moved, "left": purged.left})
        return
    output.info(f"removed {with_noun(max(0, count), 'message')} of {where}")
    if purged.moved:
        output.info(f"moved to the first remaining message: {', '.join(purged.moved)}")
    for group in purged.left:
        output.info(
            f"{group} has a live member or a transaction, and offsets of removed messages: stop its members, then run"
            f" tfmq group reset {group} {name} --to earliest"
        )


@topic.command(epilog="\b\nExample:\n  tfmq topic delete orders --yes")
@click.argument("name", shell_complete=main.complete_topics)
@click.option("--yes", is_flag=True, help="Do not ask.")
@output_options
def delete(name: str, yes: bool, output: Output) -> None:
    """Delete a topic with all its messages, also delayed ones. They cannot be restored."""
    with output.admin() as admin:
        found = json_row(find_topic(admin, name))
        if not yes:
            waiting = admin.delayed_histogram([0, 1], name).pending
            delayed = f" and {waiting:,} that wait for their time" if waiting else ""
            confirm(f"delete {name} with {with_noun(found['messages'], 'message')}{delayed}", "not deleted")
        admin.delete_topic(name)
    output.report({"topic": name, "deleted": True}, f"deleted {name}")


NONE_YET = " There are no topics yet: tfmq send TOPIC PAYLOAD makes one."


def check_name(name: str) -> None:
    """Raise UsageError if `name` is no valid topic name."""
    if is_valid_name(name):
        return
    wildcards = " There are no wildcards here: give one name." if set(name) & set("*?[]") else ""
    raise click.UsageError(f"{name!r} cannot be a topic: {NAME_RULE}.{wildcards}")


def find_topic(admin: Admin, name: str) -> Any:
    """Return the description of a topic. Raises UnknownTopic with the most similar name; UsageError for a bad name."""
    check_name(name)
    try:
        return admin.topic(name)
    except UnknownTopic:
        raise unknown_topic(name, [topic.name for topic in admin.topics()]) from None


def unknown_topic(name: str, names: Sequence[str]) -> UnknownTopic:
    """Return the error for a topic that is not there. `names`: all that are."""
    hint = did_you_mean(name, names) or (" `tfmq topic list` has all." if names else NONE_YET)
    return UnknownTopic(f"There is no topic {name!r}.{hint}")
