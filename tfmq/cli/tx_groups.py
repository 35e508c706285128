"""`tfmq tx groups` and `tfmq tx forget-group`: how far the writers are whose transactions are committed in groups."""

import sys
from typing import TYPE_CHECKING, Any

import click

from tfmq.cli.output import Output, counted, did_you_mean, output_options, printable, time_text, with_times
from tfmq.errors import NOT_DONE, TfmqError

if TYPE_CHECKING:
    from tfmq.client.admin.models import CommitGroupDescription

COLUMNS = ("group", "sequence", "rows", "committed", "members", "run")


@click.command(
    "groups",
    short_help="List commit groups: how far each writer is.",
    epilog="\b\nExamples:\n  tfmq tx groups\n  tfmq tx groups --json | jq -r .[].group",
)
@output_options
def groups(output: Output) -> None:
    """List commit groups: streaming queries of Spark, and others who commit many transactions together.

    The sequence is the last one that was committed: of a query, its micro-batch. A member is a transaction that waits
    for the group's next commit; `tfmq tx show XID` says to which sequence and run it belongs.
    """
    from tfmq.admin import Admin

    with Admin(output.servers) as admin:
        found = admin.commit_groups()
    if output.json:
        output.array(row_of(each) for each in found)
        return
    output.rows([readable(each) for each in found], COLUMNS, "no commit group has committed anything")


def row_of(found: "CommitGroupDescription") -> dict[str, Any]:
    """As programs get it."""
    row = found._asdict()
    return with_times(row | row.pop("details"), "committed")


def readable(found: "CommitGroupDescription") -> dict[str, Any]:
    """As a table shows it."""
    row, none = row_of(found), found.sequence < 0
    return {
        "group": printable(found.group),
        "sequence": None if none else str(found.sequence),
        "rows": None if none else found.rows,
        "committed": time_text(row.get("committed_ms") or None),
        "members": row.get("members", 0),
        "run": printable(found.run) or None,
    }


@click.command(
    "forget-group",
    short_help="Forget how far commit groups are.",
    epilog="\b\nExample:\n  tfmq tx forget-group spark-stream-0a6cd9f2-8e0c-4d4e-9d0e-7d1f0c4b1f6e..copies",
)
@click.argument("names", metavar="GROUP...", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
@output_options
def forget_group(names: tuple[str, ...], yes: bool, output: Output) -> None:
    """Forget how far commit groups are, once their writers are gone for good or shall begin anew.

    A writer that comes back then writes again what it thinks is not done: make sure that its checkpoint is where it
    should be.
    """
    from tfmq.admin import Admin

    with Admin(output.servers) as admin:
        known = {each.group: each for each in admin.commit_groups()}
        for name in names:
            if name not in known:
                hint = did_you_mean(name, list(known)) or " `tfmq tx groups` has all."
                raise TfmqError(f"There is no commit group {name!r}.{hint}", outcome=NOT_DONE)
        if not yes:
            confirm([known[name] for name in names])
        forgotten = [{"group": name, "forgotten": admin.forget_commit_group(name)} for name in names]
    if output.json:
        output.array(forgotten)
    for name in names:
        output.say(f"{printable(name)}: forgotten{staying(known[name].details.get('members', 0))}")


def staying(members: int) -> str:
    """What a group that is forgotten leaves behind."""
    if not members:
        return ""
    return (
        f"; {counted(members, 'prepared transaction')} of it {'stays' if members == 1 else 'stay'} until the time is"
        " over (`tfmq tx list`; `tfmq tx rollback XID` drops one)"
    )


def confirm(found: "list[CommitGroupDescription]") -> None:
    """Ask on a terminal; elsewhere demand --yes, so that a script forgets nothing by accident."""
    first = found[0]
    where = "has committed nothing yet" if first.sequence < 0 else f"is at sequence {first.sequence}"
    which = f"{printable(first.group)}, which {where}"
    if len(found) > 1:
        which = f"{counted(len(found), 'commit group')}; the first is {which}"
    if not sys.stdin.isatty():
        raise click.UsageError(f"To forget {which}, say --yes. It cannot be undone.")
    click.confirm(f"Forget {which}? This cannot be undone.", abort=True, err=True)
