"""`tfmq schedule`: messages that the broker sends at the times of a cron expression."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfmq.cli import main
from tfmq.cli.option_types import Property
from tfmq.cli.output import (
    Output,
    did_you_mean,
    escape_unprintable,
    output_options,
    payload_fields,
    time_text,
    with_times,
)
from tfmq.errors import UnknownSchedule

if TYPE_CHECKING:
    from tfmq.admin import Admin
    from tfmq.client.admin.delayed import ScheduleDescription


COLUMNS = ("name", "state", "next_run", "cron", "timezone", "topic", "last_run")
MISFIRE = ("one", "all", "skip")

ADD_EXAMPLES = """\b
Examples:
  tfmq schedule add "0 9 * * mon-fri" reports "make the daily report" --timezone Europe/Berlin
  tfmq schedule add @hourly cleanup go --name cleanup --misfire skip
  tfmq schedule add "*/15 8-17 * * *" prices -f request.json -k EUR

\b
The fields: minute, hour, day of month, month, day of week (0 and 7 are Sunday).
"""


@click.group(epilog='\b\nExample:\n  tfmq schedule add "0 9 * * mon-fri" reports go --timezone Europe/Berlin')
def schedule() -> None:
    """Schedules: add, list, show, run, pause, resume, remove."""


@schedule.command(epilog=ADD_EXAMPLES)
@click.argument("cron")
@click.argument("topic", shell_complete=main.complete_topics)
@click.argument("payload", required=False)
@click.option(
    "-f",
    "--file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read the payload from this file.",
)
@click.option("--name", help="Name of the schedule [derived from the arguments].")
@click.option("--timezone", default="UTC", show_default=True, help="Time zone, as Europe/Berlin.")
@click.option(
    "--misfire",
    type=click.Choice(MISFIRE),
    default="one",
    show_default=True,
    help="After missed times, send the latest message, all, or none.",
)
@click.option("-k", "--key", help="The messages' key.")
@click.option("-t", "--tag", help="A tag that consumers can filter by.")
@click.option("--property", "properties", type=Property(), multiple=True, help="A property; may be repeated.")
@click.option("--partition", type=click.IntRange(min=0), help="Partition of the messages [selected by the key].")
@output_options
def add(
    cron: str,
    topic: str,
    payload: str | None,
    file: Path | None,
    name: str | None,
    timezone: str,
    misfire: str,
    key: str | None,
    tag: str | None,
    properties: tuple[tuple[str, str], ...],
    partition: int | None,
    output: Output,
) -> None:
    """Send PAYLOAD to TOPIC at each time of CRON, which is five fields in quotes, or @daily and the like.

    The topic is made on first use. Running the same command again adds no second schedule.
    """
    if (payload is None) == (file is None):
        raise click.UsageError("give either a PAYLOAD or --file")
    content = payload.encode(errors="surrogateescape") if payload is not None else b""
    with output.admin(may_create=True) as admin:
        known = {each.name for each in admin.schedules()}
        found = admin.schedule(
            cron,
            topic,
            content if file is None else file.read_bytes(),
            name=name,
            timezone=timezone,
            key=key,
            tag=tag,
            properties=dict(properties),
            partition=partition,
            misfire=misfire,
        )
    # If the schedule existed before and is paused, print this, so that the user of a deployment script notices it.
    paused = f", paused: tfmq schedule resume {found.name}" if found.state == "paused" else ""
    what = f"there already{paused}" if paused or found.name in known else "added"
    report_schedule(output, found, f"{escape_unprintable(found.name)} is {what}")


names = main.complete_names(lambda admin: (each.name for each in admin.schedules()))
name_argument = click.argument("name", shell_complete=names)


@schedule.command("list", epilog="\b\nExamples:\n  tfmq schedule list\n  tfmq schedule list --json | jq -r .[].name")
@output_options
def list_command(output: Output) -> None:
    """List the schedules with their next run, each in its time zone."""
    with output.admin() as admin:
        found = admin.schedules()
        if output.json:
            output.print_array(
                json_row(whole) for whole in (describe_full(admin, each.name) for each in found) if whole
            )
            return
    empty = "no schedules yet: tfmq schedule add makes one"
    output.print_rows([table_row(each) for each in found], COLUMNS, empty, ("state", "cron", "timezone"))
    for each in found:
        if each.trouble:
            output.info(f"{escape_unprintable(each.name)} waits: {escape_unprintable(each.trouble)}")


def describe_full(admin: "Admin", name: str) -> "ScheduleDescription | None":
    """Return the schedule `name` with its payload; None if it was removed meanwhile."""
    try:
        return admin.describe_schedule(name)
    except UnknownSchedule:
        return None


@schedule.command(epilog="\b\nExample:\n  tfmq schedule show cleanup")
@name_argument
@output_options
def show(name: str, output: Output) -> None:
    """Show a schedule, what it sends, and its next run."""
    with output.admin() as admin:
        found = with_name_hint(admin, name, admin.describe_schedule)
    output.print_object(json_row(found) if output.json else detail_row(found))


@schedule.command(epilog="\b\nExample:\n  tfmq schedule run cleanup")
@name_argument
@output_options
def run(name: str, output: Output) -> None:
    """Send the message of a schedule once, now, in addition to its times; also for a paused schedule."""
    from tfmq.client.admin.delayed import datetime_at as moment_at
    from tfmq.producer import Producer

    with output.admin() as admin, Producer(output.servers) as producer:
        found = with_name_hint(admin, name, admin.describe_schedule)
        message, now = found.message, moment_at(admin.ping(), found.timezone)
        assert message is not None and now is not None, "asked for by its name"
        own = {"schedule": name, "scheduled_for": now.isoformat(timespec="seconds")}
        message = message._replace(properties={**(message.properties or {}), **own}, partition=found.partition)
        sent = producer.send(found.topic, message).result()
    output.report(
        {"name": name, "topic": sent.topic, "partition": sent.partition, "offset": sent.offset},
        f"sent to {sent.topic}, partition {sent.partition}, offset {sent.offset} ({sent.durability})",
    )


@schedule.command(epilog="\b\nExample:\n  tfmq schedule pause cleanup")
@name_argument
@output_options
def pause(name: str, output: Output) -> None:
    """Pause a schedule: the broker sends none of its messages until it is resumed."""
    with output.admin() as admin:
        found = with_name_hint(admin, name, admin.pause_schedule)
    report_schedule(output, found, f"{name} is paused: tfmq schedule resume {name}")


@schedule.command(epilog="\b\nExample:\n  tfmq schedule resume cleanup")
@name_argument
@output_options
def resume(name: str, output: Output) -> None:
    """Resume a schedule that is paused, or waits because the broker's clock was set back. Past times are not sent."""
    with output.admin() as admin:
        found = with_name_hint(admin, name, admin.resume_schedule)
    report_schedule(output, found, f"{name} goes on")


@schedule.command(epilog="\b\nExample:\n  tfmq schedule remove cleanup")
@name_argument
@output_options
def remove(name: str, output: Output) -> None:
    """Remove a schedule."""
    with output.admin() as admin:
        removed = with_name_hint(admin, name, admin.remove_schedule)
    sentence = f"removed {name}" if removed else f"{name} was removed, and another one made, meanwhile"
    output.report({"name": name, "removed": removed}, sentence)


def with_name_hint(admin: "Admin", name: str, call: Callable[[str], Any]) -> Any:
    """Return `call(name)`. If it raises UnknownSchedule, raise one that also names the most similar schedule."""
    try:
        return call(name)
    except UnknownSchedule:
        others = [each.name for each in admin.schedules()]
        rest = " `tfmq schedule list` has all." if others else " There are no schedules yet."
        raise UnknownSchedule(f"There is no schedule {name!r}.{did_you_mean(name, others) or rest}") from None


def report_schedule(output: Output, found: "ScheduleDescription", sentence: str) -> None:
    """Print the schedule as JSON, or `sentence` followed by the time of the next run."""
    if output.json:
        output.print_object(json_row(found))
        return
    following = "" if found.next_at is None else f"; next run {format_run_time(found.next_at, found.timezone)}"
    output.info(f"{sentence}{following}")
    if found.trouble:
        output.info(f"it waits: {escape_unprintable(found.trouble)}")


def json_row(found: "ScheduleDescription") -> dict[str, Any]:
    """Return the JSON object of a schedule; next and last run are ISO times in its zone, or None."""
    row = {key: value for key, value in found._asdict().items() if key not in ("details", "message")}
    if found.message is not None:
        row |= {"key": found.message.key, **payload_fields(found.message.payload)}
    row["next_run"] = None if found.next_at is None else found.next_at.isoformat()
    row["last_run"] = None if found.last_at is None else found.last_at.isoformat()
    return with_times(row | dict(found.details), "made")


def detail_row(found: "ScheduleDescription") -> dict[str, Any]:
    row = json_row(found)
    for name in ("next_ms", "last_ms", "made_ms", "made_at", "id", "size_bytes"):
        del row[name]
    shown = {name: value if isinstance(value, int) else format_payload(value) for name, value in row.items()}
    return {name: value for name, value in shown.items() if value not in ("", "None")} | {
        "next_run": format_run_time(found.next_at, found.timezone),
        "last_run": format_run_time(found.last_at, found.timezone),
        "made": time_text(found.made_ms or None),
    }


def format_payload(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{escape_unprintable(name)}={escape_unprintable(text)}" for name, text in value.items())
    return escape_unprintable(value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value))


def table_row(found: "ScheduleDescription") -> dict[str, Any]:
    row = {key: escape_unprintable(str(getattr(found, key))) for key in ("name", "state", "cron", "timezone", "topic")}
    return row | {"next_run": time_text(found.next_at), "last_run": time_text(found.last_at)}


def format_run_time(moment: datetime | None, timezone: str) -> str:
    """Format a time with its zone: 2026-11-27 09:00:00 +01:00 (Europe/Berlin)."""
    return "-" if moment is None else f"{time_text(moment)} ({escape_unprintable(timezone)})"
